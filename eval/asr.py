"""Speech recognition with openai-whisper: PCM in, a transcript out, and an honest "no speech" where there is none.

Greedy decoding without temperature fallback, so a clip always gets the same transcript. ffmpeg is not needed.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from eval import hf_whisper, models
from eval.errors import EvalError, ModelUnavailable
from eval.pcm import loudest_dbfs, resample
from eval.threads import torch_threads

SAMPLE_RATE = 16_000  # Hz, what Whisper hears
WINDOW_S = 30.0  # Whisper's receptive field; longer audio is read window by window

# The no-speech gate, from what tiny.en and base gave: silence, white and brown noise, hum, tones and clicks have a
# no-speech probability of 0.65-0.96 and come out as "you", "I", "." or, from base, one phrase over and over; whole
# sentences, clean or at 0 dB SNR, have at most 0.2; fragments of speech of 0.35-0.6 s up to 0.7 (one of 32: 0.88).
NO_SPEECH_SURE = 0.75
NO_SPEECH_DOUBTFUL = 0.5  # enough when the text is what the model writes on noise
MADE_UP = {"you", "i", "thank you", "thanks for watching", "bye", "so", "the"}
REPETITIVE = 2.4  # gzip ratio above which text repeats itself
SILENCE_DBFS = -55.0  # the loudest 20 ms; below it nobody is heard and Whisper is not asked

PACKAGED = ("tiny.en", "base")


@dataclass(frozen=True)
class Word:
    text: str
    start_s: float
    end_s: float
    probability: float


@dataclass(frozen=True)
class Transcript:
    """What was heard.

    Attributes:
        text: empty when `no_speech`.
        no_speech: silence or noise only; an error rate counts it as everything missing.
        language: Whisper's code, e.g. "en".
        words: with times, when asked for.
        no_speech_probability, logprob: Whisper's own, of its first window.
        compression: gzip ratio of the text; above 2.4 it repeats itself.
    """

    text: str
    no_speech: bool
    language: str
    words: tuple[Word, ...] = ()
    no_speech_probability: float = 0.0
    logprob: float = 0.0
    compression: float = 1.0


class Transcriber:
    """One Whisper model. Safe to call from several threads: calls take turns."""

    def __init__(self, model, name: str) -> None:
        self._model = model
        self.name = name if name.startswith("whisper") else f"whisper-{name}"
        self.multilingual: bool = model.is_multilingual
        self._turn = threading.Lock()

    def transcribe(
        self, pcm: np.ndarray, sample_rate: int, *, language: str | None = None, words: bool = False
    ) -> Transcript:
        """Transcribe mono float32 `pcm` [samples] in [-1, 1].

        Args:
            language: code or English name ("en", "chinese"); None or "auto" detects it (English-only models: English).
            words: also give word times (slower).

        Raises:
            EvalError: not mono, not finite, or a language the model does not know.
        """
        if pcm.ndim != 1 or not np.isfinite(pcm).all():
            raise EvalError("speech recognition needs finite mono samples", field="pcm")
        code = self._language_code(language)
        if pcm.size == 0 or loudest_dbfs(pcm, sample_rate) < SILENCE_DBFS:
            return Transcript("", no_speech=True, language=code or "en", no_speech_probability=1.0)
        audio = resample(pcm, sample_rate, SAMPLE_RATE)
        with self._turn, torch_threads():
            if words or audio.size > WINDOW_S * SAMPLE_RATE:
                return self._long(audio, code, words)
            return self._short(audio, code)

    def _short(self, audio: np.ndarray, code: str | None) -> Transcript:
        import whisper

        mel = whisper.log_mel_spectrogram(whisper.pad_or_trim(audio), n_mels=self._model.dims.n_mels)
        options = whisper.DecodingOptions(language=code, without_timestamps=True, fp16=self._half)
        heard = whisper.decode(self._model, mel.to(self._model.device), options)
        empty = _nothing_said(heard.text, heard.no_speech_prob, heard.compression_ratio)
        return Transcript(
            text="" if empty else heard.text.strip(),
            no_speech=empty,
            language=heard.language,
            no_speech_probability=heard.no_speech_prob,
            logprob=heard.avg_logprob,
            compression=heard.compression_ratio,
        )

    def _long(self, audio: np.ndarray, code: str | None, words: bool) -> Transcript:
        heard = self._model.transcribe(
            audio,
            language=code,
            temperature=0.0,
            condition_on_previous_text=False,  # a mistake must not be carried into the next window
            no_speech_threshold=None,  # our own gate below
            word_timestamps=words,
            fp16=self._half,
            verbose=None,
        )
        segments = [
            s for s in heard["segments"] if not _nothing_said(s["text"], s["no_speech_prob"], s["compression_ratio"])
        ]
        first = heard["segments"][0] if heard["segments"] else None
        return Transcript(
            text="".join(s["text"] for s in segments).strip(),
            no_speech=not segments,
            language=heard["language"],
            words=tuple(
                Word(w["word"].strip(), float(w["start"]), float(w["end"]), float(w["probability"]))
                for s in segments
                for w in s.get("words", ())
            ),
            no_speech_probability=first["no_speech_prob"] if first else 1.0,
            logprob=first["avg_logprob"] if first else 0.0,
            compression=max((s["compression_ratio"] for s in segments), default=1.0),
        )

    @property
    def _half(self) -> bool:
        return self._model.device.type == "cuda"

    def _language_code(self, language: str | None) -> str | None:
        from whisper.tokenizer import LANGUAGES, TO_LANGUAGE_CODE

        if not self.multilingual:
            if language and language.lower() not in ("auto", "en", "english"):
                raise EvalError(
                    f"{self.name} hears English only; take a multilingual model (base) for '{language}'",
                    field="language",
                )
            return "en"
        if not language or language.lower() == "auto":
            return None
        code = language.lower()
        code = code if code in LANGUAGES else TO_LANGUAGE_CODE.get(code)
        if code is None:
            raise EvalError(f"Whisper does not know the language '{language}'", field="language")
        return code


def _nothing_said(text: str, no_speech: float, compression: float) -> bool:
    words = " ".join(re.findall(r"[\w']+", text.lower()))
    if not words or no_speech > NO_SPEECH_SURE:
        return True
    return no_speech > NO_SPEECH_DOUBTFUL and (words in MADE_UP or compression > REPETITIVE)


@lru_cache(maxsize=2)
def load(name: str = "tiny.en", device: str = "cpu") -> Transcriber:
    """A Whisper model by name.

    `tiny.en` and `base` come from packages (`eval.models`, no hub). Any other name openai-whisper knows
    (`large-v3`, ...) is fetched by it, a path to one of its checkpoints is read as it is, and `hf:<folder or hub id>`
    takes a Whisper of transformers.

    Raises:
        ModelUnavailable: unknown name, unreadable file, or no network.
    """
    import whisper

    try:
        if name in PACKAGED:
            model = whisper.load_model(str(models.ensure(f"whisper-{name}")), device=device)
            heads = whisper._ALIGNMENT_HEADS[name]  # a checkpoint given by path would get a rougher fall-back
            model.set_alignment_heads(heads)
            return Transcriber(model, name)
        if name.startswith("hf:"):
            source = name.removeprefix("hf:")
            return Transcriber(hf_whisper.load(source, device), source.rstrip("/").rsplit("/", 1)[-1])
        if Path(name).is_file():
            return Transcriber(whisper.load_model(name, device=device), Path(name).stem)
        if name in whisper.available_models():
            root = str(models.cache_folder() / "whisper")
            return Transcriber(whisper.load_model(name, device=device, download_root=root), name)
    except (OSError, RuntimeError, KeyError, EOFError, ValueError) as error:
        raise ModelUnavailable(
            f"Whisper '{name}' could not be loaded ({error}); tiny.en and base need no download from a hub",
            field="asr",
        ) from error
    known = ", ".join((*PACKAGED, *(m for m in whisper.available_models() if m not in PACKAGED)))
    raise ModelUnavailable(f"no Whisper '{name}': neither a file nor one of {known}", field="asr")
