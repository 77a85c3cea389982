"""Reference audio → voice prompt, computed once: the voice library.

A voice prompt is what the talker is given of a voice: speaker embedding, reference codes, transcript. Computing it
runs two neural encoders, so prompts are cached by the hash of the audio, in memory for every voice and on disk for
bundled and saved ones. Prompts belong to a checkpoint (another one has other encoders) and are keyed by its id.
The encoders are injected: this file imports no torch.
"""

from __future__ import annotations

import difflib
import io
import re
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from engine.audio import Audio, load_audio
from engine.errors import EngineClosed, InvalidRequest, UnknownVoice
from engine.request import SAMPLE_RATE
from engine.voice_files import (
    BUNDLED_FOLDER,
    BundledVoices,
    VoiceEntry,
    VoiceFolder,
    clean_name,
    clean_transcript,
    new_entry,
    pack,
    unpack,
    write_atomically,
)

__all__ = ["Encode", "VoiceEntry", "VoiceLibrary", "VoicePrompt"]

# Audio -> (speaker embedding float32 [D], codes int64 [frames, G] or None where the codec has no encoder)
Encode = Callable[[Audio], tuple[np.ndarray, np.ndarray | None]]


@dataclass(frozen=True)
class VoicePrompt:
    """A voice as the prompt takes it."""

    speaker_embedding: np.ndarray  # float32 [D]
    codes: np.ndarray | None  # int64 [frames, G]
    transcript: str | None
    audio_hash: str  # sha256 of the prepared PCM
    seconds: float


class VoiceLibrary:
    """Bundled voices (read-only) and saved ones, by name, case-insensitively. Safe to use from several threads.

    Args:
        folder: where saved voices live; None keeps nothing on disk and refuses to save.
        encode: computes the embedding and the codes of a recording; without it only metadata can be used.
        checkpoint_id: prompts of another checkpoint are never reused.
        bundled: a folder with a `voices.json`; None for no bundled voices.
        tail_silence_s: silence appended to the recording before it is encoded, so that its last word does not
            leak into the first word spoken (peers append 0.5 s; the bare reference appends none).
        cache_size: prompts kept in memory; each has some 50 kB.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        encode: Encode | None = None,
        checkpoint_id: str = "",
        *,
        bundled: str | Path | None = BUNDLED_FOLDER,
        tail_silence_s: float = 0.5,
        cache_size: int = 256,
    ) -> None:
        self._saved = VoiceFolder(Path(folder) / "saved") if folder is not None else None
        self._bundled = BundledVoices(Path(bundled)) if bundled is not None else None
        self._encode = encode
        self._tail_silence_s = tail_silence_s
        self._cache_size = cache_size
        self._cache: OrderedDict[str, tuple[np.ndarray, np.ndarray | None]] = OrderedDict()
        self._lock = threading.RLock()
        self._encoding: dict[str, threading.Lock] = {}  # one computation a recording, also when two ask at once
        key = re.sub(r"[^A-Za-z0-9]+", "-", f"{checkpoint_id}-{tail_silence_s * 1000:.0f}ms").strip("-")
        self._prompts = Path(folder) / "prompts" / key if folder is not None else None

    # ---- reading ------------------------------------------------------------------------------------------------

    def list(self) -> list[VoiceEntry]:
        """Bundled voices first, then saved ones by name."""
        with self._lock:
            bundled = self._bundled.entries() if self._bundled else []
            return bundled + (self._saved.entries() if self._saved else [])

    def entry(self, name: str) -> VoiceEntry:
        """Metadata of a voice. Raises `UnknownVoice`."""
        with self._lock:
            for shelf in (self._bundled, self._saved):
                if shelf is not None and (entry := shelf.find(name)) is not None:
                    return entry
            names = [entry.name for entry in self.list()]
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else "the voices are: " + ", ".join(names[:20])
        raise UnknownVoice(f"There is no voice {name!r}; {hint}", field="voice")

    def __contains__(self, name: str) -> bool:
        try:
            return bool(self.entry(name))
        except InvalidRequest:
            return False

    def get(self, name: str) -> VoicePrompt:
        """The prompt of a stored voice; computed on first use. Raises `UnknownVoice`."""
        entry = self.entry(name)
        embedding, codes = self._encoded(entry.audio_hash, lambda: self.audio(entry.name), keep=True)
        return VoicePrompt(embedding, codes, entry.transcript, entry.audio_hash, entry.seconds)

    def at_hand(self, name: str) -> bool:
        """Whether `get` would answer from memory. An unknown voice is answered at once, too."""
        try:
            return self.entry(name).audio_hash in self._cache
        except InvalidRequest:
            return True

    def audio(self, name: str) -> Audio:
        """The prepared recording of a stored voice."""
        entry = self.entry(name)
        if entry.read_only:
            assert self._bundled is not None
            return self._bundled.audio(entry.name)
        assert self._saved is not None
        return Audio(self._saved.samples(entry.name))

    def audio_bytes(self, name: str) -> bytes:
        """The recording as a FLAC file, to listen to."""
        entry = self.entry(name)
        shelf = self._bundled if entry.read_only else self._saved
        assert shelf is not None
        return shelf.audio_bytes(entry.name)

    def prepare(self, audio: Audio, transcript: str | None = None) -> VoicePrompt:
        """The prompt of a recording that is not stored. The same samples cost nothing the second time."""
        transcript = clean_transcript(transcript)
        embedding, codes = self._encoded(audio.hash, lambda: audio, keep=False)
        return VoicePrompt(embedding, codes, transcript, audio.hash, audio.seconds)

    # ---- changing -----------------------------------------------------------------------------------------------

    def save(
        self,
        name: str,
        audio: Audio,
        transcript: str | None = None,
        *,
        consent: bool,
        language: str = "auto",
        source: str = "",
        overwrite: bool = False,
    ) -> VoiceEntry:
        """Keep a recording as a voice.

        Raises:
            InvalidRequest: the name is unfit or taken (`field="name"`), the speaker has not agreed
                (`field="consent"`), or the library keeps nothing on disk.
        """
        if consent is not True:
            raise InvalidRequest(
                "Confirm that the speaker agreed to have this voice cloned; only then it is saved.", field="consent"
            )
        entry = new_entry(clean_name(name), audio, clean_transcript(transcript), language, str(source)[:500])
        with self._lock:
            self._folder().write(self._free(entry, overwrite), audio)
        return entry

    def rename(self, name: str, new_name: str) -> VoiceEntry:
        """Raises `UnknownVoice`, or `InvalidRequest` for a bundled voice or a taken name."""
        with self._lock:
            entry = self._changeable(name)
            renamed = replace(entry, name=clean_name(new_name))
            if renamed.name.casefold() != entry.name.casefold():
                self._free(renamed, overwrite=False)
            return self._folder().rename(entry, renamed.name)

    def delete(self, name: str) -> None:
        """Remove a saved voice and its prompts; requests that already have the prompt go on."""
        with self._lock:
            entry = self._changeable(name)
            self._folder().remove(entry.name)
            if any(other.audio_hash == entry.audio_hash for other in self.list()):
                return
            self._cache.pop(entry.audio_hash, None)
            if self._prompts is not None:
                for path in self._prompts.parent.glob(f"*/{entry.audio_hash}.npz"):
                    path.unlink(missing_ok=True)

    def export(self, name: str) -> bytes:
        """A voice as one file, to be given to `import_voice` elsewhere."""
        return pack(self.entry(name), self.audio_bytes(name))

    def import_voice(self, data: bytes, *, consent: bool, name: str | None = None) -> VoiceEntry:
        """Save an exported voice, under another name if given."""
        about, audio = unpack(data)
        transcript = about.get("transcript")
        return self.save(
            name or str(about.get("name", "")),
            audio,
            transcript if isinstance(transcript, str) else None,
            consent=consent,
            language=str(about.get("language", "auto"))[:40],
            source=str(about.get("source", "")),
        )

    # ---- inside -------------------------------------------------------------------------------------------------

    def _folder(self) -> VoiceFolder:
        if self._saved is None:
            raise InvalidRequest("This engine keeps no voices on disk: set voices_dir.", field="name")
        return self._saved

    def _changeable(self, name: str) -> VoiceEntry:
        entry = self.entry(name)
        if entry.read_only:
            raise InvalidRequest(f"{entry.name} is a bundled voice and cannot be changed.", field="name")
        return entry

    def _free(self, entry: VoiceEntry, overwrite: bool) -> VoiceEntry:
        if self._bundled is not None and self._bundled.find(entry.name):
            raise InvalidRequest(f"{entry.name} is the name of a bundled voice: choose another.", field="name")
        if not overwrite and self._folder().find(entry.name):
            raise InvalidRequest(f"A voice named {entry.name} exists: choose another name or delete it.", field="name")
        return entry

    def _encoded(
        self, audio_hash: str, audio: Callable[[], Audio], *, keep: bool
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """From memory, else from disk, else computed. `keep` also writes the result to disk."""
        with self._lock:
            if audio_hash in self._cache:
                self._cache.move_to_end(audio_hash)
                return self._cache[audio_hash]
            turn = self._encoding.setdefault(audio_hash, threading.Lock())
        try:
            with turn:  # encoding runs outside the library's lock: other voices stay usable meanwhile
                with self._lock:
                    if audio_hash in self._cache:
                        return self._cache[audio_hash]
                path = self._prompts / f"{audio_hash}.npz" if self._prompts is not None else None
                found = _read_prompt(path) if path is not None else None
                if found is None:
                    found = self._compute(audio())
                    if keep and path is not None:
                        write_atomically(path, _prompt_bytes(*found))
                with self._lock:
                    self._cache[audio_hash] = found
                    while len(self._cache) > self._cache_size:
                        self._cache.popitem(last=False)
                return found
        finally:
            with self._lock:
                self._encoding.pop(audio_hash, None)

    def _compute(self, audio: Audio) -> tuple[np.ndarray, np.ndarray | None]:
        if self._encode is None:
            raise EngineClosed("No engine is attached to this voice library: start one to prepare voices.")
        tail = np.zeros(round(self._tail_silence_s * SAMPLE_RATE), np.float32)
        embedding, codes = self._encode(replace(audio, pcm=np.concatenate([audio.pcm, tail])))
        return np.asarray(embedding, np.float32), None if codes is None else np.asarray(codes, np.int64)


def prepare_audio(audio: Audio | str | Path | bytes | np.ndarray, sample_rate: int | None = None) -> Audio:
    """`Audio` as it is, anything else through the door of `engine.audio`; errors name the field `voice`."""
    return audio if isinstance(audio, Audio) else load_audio(audio, sample_rate, name="voice")


def _prompt_bytes(embedding: np.ndarray, codes: np.ndarray | None) -> bytes:
    arrays = {"speaker_embedding": embedding} | ({} if codes is None else {"codes": codes.astype(np.int32)})
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def _read_prompt(path: Path) -> tuple[np.ndarray, np.ndarray | None] | None:
    """None when there is none, or a damaged one (it is computed again)."""
    try:
        with np.load(path, allow_pickle=False) as file:
            codes = file["codes"].astype(np.int64) if "codes" in file else None
            return file["speaker_embedding"].astype(np.float32), codes
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
