"""Any audio file or array → mono float32 at 24 kHz, trimmed and checked: the one door for reference audio."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import soundfile
import soxr

from engine.audio_files import MAX_CHANNELS, MAX_DECODED_SECONDS, MAX_FILE_BYTES, MAX_RATE, MIN_RATE, decode
from engine.errors import InvalidAudio
from engine.request import SAMPLE_RATE

MIN_SECONDS, MAX_SECONDS = 1.0, 30.0  # after trimming
SILENCE_DBFS = -60.0  # the loudest 20 ms of a usable recording lie above this
TRIM_BELOW_PEAK_DB = 40.0  # an edge this far below the loudest 20 ms is silence ...
TRIM_MARGIN_S = 0.1  # ... but this much of it is kept, so that no soft consonant is cut
CLIPPED_REFUSE, CLIPPED_WARN = 0.10, 0.005  # share of samples sitting on the ceiling
ENCODINGS = {"wav": ("WAV", "PCM_16"), "flac": ("FLAC", "PCM_16"), "mp3": ("MP3", "MPEG_LAYER_III")}


@dataclass(frozen=True)
class Audio:
    """Prepared reference audio. `pcm` is float32 [samples] in [-1, 1], mono, 24 kHz, 1 to 30 s long."""

    pcm: np.ndarray
    source_rate: int = SAMPLE_RATE
    source_channels: int = 1
    trimmed_s: tuple[float, float] = (0.0, 0.0)  # seconds of silence taken off at the start and the end
    clipped: float = 0.0  # share of samples at the ceiling, 0 to 1
    hints: tuple[str, ...] = field(default=())  # for people: usable, but could be better

    @property
    def seconds(self) -> float:
        return len(self.pcm) / SAMPLE_RATE

    @cached_property
    def hash(self) -> str:
        """sha256 of the prepared samples: equal audio has an equal voice, whatever file it came in."""
        return hashlib.sha256(np.ascontiguousarray(self.pcm, dtype="<f4").tobytes()).hexdigest()


def load_audio(
    source: str | Path | bytes | np.ndarray, sample_rate: int | None = None, *, trim: bool = True, name: str = "audio"
) -> Audio:
    """Read, down-mix, trim, resample and check a recording of a voice.

    Args:
        source: the bytes of an audio file; or samples, int or float, of shape [N], [N, channels] or [channels, N];
            or a path, which only local code may pass (a server hands over bytes).
        sample_rate: Hz; needed with an array, left out with a file.
        trim: cut silence at both ends.
        name: the field an error names.

    Raises:
        InvalidAudio: empty, silent, shorter than 1 s or longer than 30 s after trimming, not audio, NaN or infinite
            samples, or clipped beyond use. Nothing has been spent by then.
    """
    if isinstance(source, np.ndarray):
        pcm, rate, channels = _from_array(source, sample_rate, name)
    else:
        if sample_rate is not None:
            raise InvalidAudio("sample_rate belongs to an array of samples; a file states its own.", field=name)
        decoded = decode(_read(source, name), field=name)
        pcm, rate, channels = decoded.pcm, decoded.rate, decoded.channels

    if len(pcm) == 0:
        raise InvalidAudio("The recording is empty: record or upload at least 1 second of speech.", field=name)
    if not np.isfinite(pcm).all():
        raise InvalidAudio("The recording has NaN or infinite samples: export it again.", field=name)

    start, end = _speech_span(pcm, rate, name) if trim else (0, len(pcm))
    before, after = start / rate, (len(pcm) - end) / rate
    pcm = pcm[start:end]
    _check_seconds(len(pcm) / rate, len(pcm) / rate + before + after, name)
    clipped = clipped_share(pcm)
    if clipped > CLIPPED_REFUSE:
        raise InvalidAudio(
            f"{clipped:.0%} of the recording is clipped, its voice is distorted beyond use: "
            "record again with a lower input level.",
            field=name,
        )
    if rate != SAMPLE_RATE:
        pcm = soxr.resample(pcm, rate, SAMPLE_RATE, quality="VHQ")
    pcm = np.ascontiguousarray(pcm, dtype=np.float32)
    peak = float(np.abs(pcm).max())
    if peak > 1.0:  # overshoot of a lossy decoder or of the resampler: scaled, since cutting it would distort
        pcm = pcm / np.float32(peak)
    return Audio(pcm, rate, channels, (before, after), clipped, _hints(pcm, rate, clipped))


def encode_audio(pcm: np.ndarray, container: str = "wav", sample_rate: int = SAMPLE_RATE) -> bytes:
    """float32 [samples] in [-1, 1] → the bytes of a finished wav (PCM16, true sizes), flac or mp3 file."""
    if container not in ENCODINGS:
        raise InvalidAudio(f"Unknown format {container!r}: use one of {', '.join(ENCODINGS)}.", field="format")
    kind, subtype = ENCODINGS[container]
    file = io.BytesIO()
    soundfile.write(file, pcm16(pcm), sample_rate, format=kind, subtype=subtype)
    return file.getvalue()


def pcm16(pcm: np.ndarray) -> np.ndarray:
    """float in [-1, 1] → int16, rounded to the nearest step of 1/32767; the browser's player rounds alike."""
    return np.floor(np.clip(pcm, -1.0, 1.0).astype(np.float64) * 32767.0 + 0.5).astype(np.int16)


def clipped_share(pcm: np.ndarray) -> float:
    """Share of samples that sit on the ceiling: flat runs at the peak, or far more time at the peak than any voice.

    A lossy codec rounds flat tops off, so samples within 2 % of the peak count as well once they exceed a fifth of
    the recording (a pure tone spends 13 % of its time there, speech well under 1 %).
    """
    level = np.abs(pcm)
    peak = float(level.max()) if len(level) else 0.0
    if peak < 0.05:
        return 0.0
    flat = (level[1:] > 0.99 * peak) & (np.abs(np.diff(pcm)) < 1e-4)
    near = float(np.mean(level > 0.98 * peak))
    return max(float(flat.mean()) if len(flat) else 0.0, near if near > 0.2 else 0.0)


def _read(source: str | Path | bytes, name: str) -> bytes:
    if isinstance(source, (bytes, bytearray, memoryview)):
        return bytes(source)
    if not isinstance(source, (str, Path)):
        raise InvalidAudio(
            f"Audio comes as a path, the bytes of a file, or an array, not as {type(source).__name__}.", field=name
        )
    path = Path(source)
    if not path.is_file():
        raise InvalidAudio(f"There is no audio file {str(source)!r}: check the path.", field=name)
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES + 1)  # one byte over the limit is enough to be refused


def _from_array(samples: np.ndarray, rate: int | None, name: str) -> tuple[np.ndarray, int, int]:
    """Any integer or float array → (float32 [N], rate, channels)."""
    if rate is None:
        raise InvalidAudio("An array of samples needs its sample_rate in Hz.", field=name)
    if not MIN_RATE <= int(rate) <= MAX_RATE:
        raise InvalidAudio(f"A sample rate of {rate} Hz is outside {MIN_RATE} to {MAX_RATE} Hz.", field=name)
    if samples.ndim not in (1, 2):
        raise InvalidAudio(
            f"Samples come as [N], [N, channels] or [channels, N], not in {samples.ndim} dimensions.", field=name
        )
    if samples.size == 0:
        raise InvalidAudio("The recording is empty: record or upload at least 1 second of speech.", field=name)
    if samples.ndim == 1:
        samples = samples[:, None]
    elif samples.shape[0] < samples.shape[1]:
        samples = samples.T  # the shorter side holds the channels
    frames, channels = samples.shape
    if channels > MAX_CHANNELS:
        raise InvalidAudio(f"An array of shape {samples.shape} has too many channels: mix it down first.", field=name)
    if frames > MAX_DECODED_SECONDS * rate:
        raise InvalidAudio(
            f"The recording is longer than {MAX_DECODED_SECONDS:.0f} seconds: cut out 3 to 15 seconds.", field=name
        )
    return _to_float(samples, name).mean(axis=1, dtype=np.float32), int(rate), channels


def _to_float(samples: np.ndarray, name: str) -> np.ndarray:
    kind, bits = samples.dtype.kind, samples.dtype.itemsize * 8
    if kind == "i" and bits <= 32:
        return samples.astype(np.float32) / np.float32(2 ** (bits - 1))
    if kind == "u" and bits <= 32:
        middle = 2.0 ** (bits - 1)
        return ((samples.astype(np.float64) - middle) / middle).astype(np.float32)
    if kind != "f":
        raise InvalidAudio(
            f"Samples of type {samples.dtype} have no known full scale: convert to int16, int32 or float32.",
            field=name,
        )
    pcm = samples.astype(np.float32)
    with np.errstate(invalid="ignore"):
        peak = float(np.abs(pcm).max())
    if np.isfinite(peak) and peak > 2.0:
        raise InvalidAudio(
            f"Float samples lie in [-1, 1], these reach {peak:g}: divide by the full scale (32768 for 16 bit).",
            field=name,
        )
    return pcm


def _speech_span(pcm: np.ndarray, rate: int, name: str) -> tuple[int, int]:
    """First and last sample worth keeping, by the level of 20 ms windows each 10 ms. Raises when all is silent."""
    hop = max(1, rate // 100)
    centred = pcm - np.float32(pcm.mean(dtype=np.float64))  # a constant offset is no sound
    energy = np.add.reduceat(np.square(centred, dtype=np.float64), np.arange(0, len(pcm), hop))
    pairs = np.sqrt((energy[:-1] + energy[1:]) / (2 * hop)) if len(energy) > 1 else np.sqrt(energy / len(pcm))
    loudest = float(pairs.max())
    if loudest < 10 ** (SILENCE_DBFS / 20):
        raise InvalidAudio("The recording is silent: check the microphone or choose another file.", field=name)
    active = np.flatnonzero(pairs >= loudest * 10 ** (-TRIM_BELOW_PEAK_DB / 20))
    margin = int(TRIM_MARGIN_S * rate)
    return max(0, int(active[0]) * hop - margin), min(len(pcm), (int(active[-1]) + 2) * hop + margin)


def _check_seconds(seconds: float, untrimmed: float, name: str) -> None:
    heard = f"{seconds:.1f} s" + (f" of {untrimmed:.1f} s after cutting silence" if untrimmed - seconds > 0.05 else "")
    if seconds < MIN_SECONDS:
        raise InvalidAudio(
            f"The recording has {heard}; at least {MIN_SECONDS:.0f} s of speech is needed, 5 to 15 s is best.",
            field=name,
        )
    if seconds > MAX_SECONDS:
        raise InvalidAudio(
            f"The recording has {heard}; at most {MAX_SECONDS:.0f} s can be used: cut out 5 to 15 s of clear speech.",
            field=name,
        )


def _hints(pcm: np.ndarray, rate: int, clipped: float) -> tuple[str, ...]:
    hints = []
    level = 20 * np.log10(float(np.sqrt(np.mean(np.square(pcm, dtype=np.float64)))) + 1e-12)
    if level < -40:
        hints.append(f"The recording is very quiet ({level:.0f} dBFS): move closer to the microphone.")
    if clipped > CLIPPED_WARN:
        hints.append(f"{clipped:.1%} of the samples are clipped: record at a lower level.")
    if rate < 16_000:
        hints.append(f"A {rate} Hz recording carries little of a voice: 24 kHz or more is better.")
    if len(pcm) < 3 * SAMPLE_RATE:
        hints.append("Under 3 seconds of speech: 5 to 15 seconds clone a voice better.")
    return tuple(hints)
