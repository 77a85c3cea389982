"""Voices on disk: one JSON file and one FLAC file each, named by a hash, never by what a person typed.

The JSON file is written last and removed first, each time by an atomic rename, so a voice is there whole or not at
all. Nothing is kept in memory: several processes may share a folder.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tempfile
import time
import unicodedata
import zipfile
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from engine.audio import Audio, load_audio
from engine.errors import InvalidRequest
from engine.request import SAMPLE_RATE

BUNDLED_FOLDER = Path(__file__).resolve().parent.parent / "assets" / "voices"
MAX_NAME, MAX_TRANSCRIPT, MAX_VOICES = 64, 2000, 1000
MAX_IMPORT_BYTES = 16 * 2**20  # 30 s of 24-bit FLAC stays under 3 MiB


@dataclass(frozen=True)
class VoiceEntry:
    """What is known of a stored voice, without its samples."""

    name: str
    transcript: str | None
    language: str = "auto"
    seconds: float = 0.0
    audio_hash: str = ""
    kind: str = "saved"  # "saved" | "bundled"
    description: str = ""
    source: str = ""
    licence: str = ""
    consent: bool = False  # the speaker agreed; always true for a saved voice
    created: float = 0.0  # seconds since the epoch

    @property
    def read_only(self) -> bool:
        return self.kind == "bundled"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def clean_name(name: str) -> str:
    """A voice's name: 1 to 64 printable characters, spaces collapsed. Raises `InvalidRequest(field="name")`."""
    if not isinstance(name, str):
        raise InvalidRequest("A voice's name is text.", field="name")
    name = " ".join(unicodedata.normalize("NFC", name).split())
    if not 1 <= len(name) <= MAX_NAME:
        raise InvalidRequest(f"A voice needs a name of 1 to {MAX_NAME} characters.", field="name")
    if not re.fullmatch(r"[^\W_][\w .,'()&+-]*", name):
        raise InvalidRequest(
            "A voice's name starts with a letter or digit and has only letters, digits, spaces and . , ' ( ) & + - _",
            field="name",
        )
    return name


def clean_transcript(transcript: str | None) -> str | None:
    """The words of a recording on one line; None when there are none. Raises `InvalidRequest(field="transcript")`."""
    if transcript is None:
        return None
    text = " ".join(str(transcript).split())
    if len(text) > MAX_TRANSCRIPT:
        raise InvalidRequest(
            f"The transcript has {len(text)} characters; 30 seconds of speech have fewer than {MAX_TRANSCRIPT}.",
            field="transcript",
        )
    return text or None


class VoiceFolder:
    """The saved voices of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def entries(self) -> list[VoiceEntry]:
        """Every whole voice, in the order of their names; a damaged file is passed over."""
        found = [entry for path in self.folder.glob("*.json") if (entry := _read_entry(path)) is not None]
        return sorted(found, key=lambda entry: entry.name.casefold())

    def find(self, name: str) -> VoiceEntry | None:
        return _read_entry(self._path(name, "json"))

    def samples(self, name: str) -> np.ndarray:
        """float32 [samples] at 24 kHz, within 2^-24 of what was saved."""
        return soundfile.read(self._path(name, "flac"), dtype="float32")[0]

    def audio_bytes(self, name: str) -> bytes:
        return self._path(name, "flac").read_bytes()

    def write(self, entry: VoiceEntry, audio: Audio | bytes) -> None:
        """Store a voice; one of the same name is replaced."""
        if self.find(entry.name) is None and sum(1 for _ in self.folder.glob("*.json")) >= MAX_VOICES:
            raise InvalidRequest(f"{MAX_VOICES} voices are saved already: delete some first.", field="name")
        self.folder.mkdir(parents=True, exist_ok=True)
        data = audio if isinstance(audio, bytes) else _flac(audio.pcm)
        write_atomically(self._path(entry.name, "flac"), data)
        write_atomically(self._path(entry.name, "json"), json.dumps(entry.as_dict(), indent=1).encode())

    def rename(self, entry: VoiceEntry, name: str) -> VoiceEntry:
        renamed = replace(entry, name=name)
        self.write(renamed, self.audio_bytes(entry.name))
        if self._path(name, "json") != self._path(entry.name, "json"):
            self.remove(entry.name)
        return renamed

    def remove(self, name: str) -> None:
        for suffix in ("json", "flac"):
            self._path(name, suffix).unlink(missing_ok=True)

    def _path(self, name: str, suffix: str) -> Path:
        key = hashlib.sha256(clean_name(name).casefold().encode()).hexdigest()[:24]
        return self.folder / f"{key}.{suffix}"


class BundledVoices:
    """The read-only voices of a `voices.json`; each file passes the same door as an upload, once."""

    def __init__(self, folder: Path = BUNDLED_FOLDER) -> None:
        self.folder = folder
        index = folder / "voices.json"
        rows = json.loads(index.read_text(encoding="utf-8")) if index.is_file() else []
        self._rows: dict[str, dict[str, Any]] = {row["name"].casefold(): row for row in rows if row["offered"]}
        self._loaded: dict[str, Audio] = {}

    def entries(self) -> list[VoiceEntry]:
        return [self._entry(key) for key in self._rows]

    def find(self, name: str) -> VoiceEntry | None:
        key = clean_name(name).casefold()
        return self._entry(key) if key in self._rows else None

    def audio(self, name: str) -> Audio:
        key = clean_name(name).casefold()
        if key not in self._loaded:
            self._loaded[key] = load_audio(self.folder / self._rows[key]["file"])
        return self._loaded[key]

    def audio_bytes(self, name: str) -> bytes:
        return (self.folder / self._rows[clean_name(name).casefold()]["file"]).read_bytes()

    def _entry(self, key: str) -> VoiceEntry:
        row, audio = self._rows[key], self.audio(key)
        kept = {k: row[k] for k in ("name", "transcript", "language", "description", "source", "licence")}
        return VoiceEntry(**kept, seconds=audio.seconds, audio_hash=audio.hash, kind="bundled")


def pack(entry: VoiceEntry, flac: bytes) -> bytes:
    """One voice as one file: a zip with `voice.json` and `audio.flac`."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("voice.json", json.dumps(entry.as_dict(), indent=1))
        archive.writestr("audio.flac", flac)
    return file.getvalue()


def unpack(data: bytes) -> tuple[dict[str, Any], Audio]:
    """The reverse of `pack`, trusting nothing. Raises `InvalidRequest` or `InvalidAudio`."""
    wrong = "This is not a voice exported by Chorus (a zip with voice.json and audio.flac)."
    if len(data) > MAX_IMPORT_BYTES:
        raise InvalidRequest(f"A voice file has at most {MAX_IMPORT_BYTES // 2**20} MB.", field="file")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            parts = {}
            for name in ("voice.json", "audio.flac"):  # only these two are read; nothing is unpacked to a path
                if archive.getinfo(name).file_size > MAX_IMPORT_BYTES:
                    raise InvalidRequest(wrong, field="file")
                parts[name] = archive.read(name)
            about = json.loads(parts["voice.json"])
    except (zipfile.BadZipFile, KeyError, ValueError, NotImplementedError, RuntimeError, EOFError) as error:
        raise InvalidRequest(wrong, field="file") from error
    if not isinstance(about, dict):
        raise InvalidRequest(wrong, field="file")
    # The recording was trimmed when it was first saved; trimming again would change its hash.
    return about, load_audio(parts["audio.flac"], trim=False, name="file")


def write_atomically(path: Path, data: bytes) -> None:
    """All of it or nothing, also for a reader in another process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def new_entry(name: str, audio: Audio, transcript: str | None, language: str, source: str) -> VoiceEntry:
    return VoiceEntry(
        name=name,
        transcript=transcript,
        language=language,
        seconds=audio.seconds,
        audio_hash=audio.hash,
        source=source,
        consent=True,
        created=time.time(),
    )


def _flac(pcm: np.ndarray) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, pcm, SAMPLE_RATE, format="FLAC", subtype="PCM_24")
    return file.getvalue()


def _read_entry(path: Path) -> VoiceEntry | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        known = {f.name for f in fields(VoiceEntry)}
        return VoiceEntry(**{key: value for key, value in data.items() if key in known})
    except (OSError, ValueError, TypeError, AttributeError):
        return None
