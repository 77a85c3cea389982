"""PCM chunks → the bytes of an audio format, while they come or as a whole file.

Every encoder takes float32 [samples] in [-1, 1] at 24 kHz mono. A streamed file cannot know its length: its WAV
header says 0xFFFFFFFF, as players and OpenAI's own API expect, and FLAC's says 0 samples ("unknown"). A whole file
has true sizes.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable
from typing import Protocol, cast

import numpy as np

from engine.audio import pcm16
from engine.request import SAMPLE_RATE

MEDIA_TYPES = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
}
UNKNOWN_SIZE = 0xFFFFFFFF
# (container, codec, sample format, bits a second); mono speech needs no more.
_CODECS = {
    "flac": ("flac", "flac", "s16", None),
    "mp3": ("mp3", "libmp3lame", "s16p", 96_000),
    "opus": ("ogg", "libopus", "s16", 48_000),
}


class Encoder(Protocol):
    """Feeds on PCM; hands out bytes as soon as the format allows."""

    def start(self) -> bytes: ...
    def feed(self, pcm: np.ndarray) -> bytes: ...
    def finish(self) -> bytes: ...


def stream_encoder(name: str) -> Encoder:
    """An encoder for audio that is sent while it is made. `name` is a key of MEDIA_TYPES."""
    return RawEncoder(wav_header()) if name == "wav" else RawEncoder() if name == "pcm" else AvEncoder(name)


def encode_file(name: str, chunks: Iterable[np.ndarray]) -> bytes:
    """A finished file, with true sizes in its header."""
    pcm = np.concatenate([np.zeros(0, np.float32), *chunks])
    if name in ("wav", "pcm"):
        data = pcm16(pcm).astype("<i2").tobytes()
        return (wav_header(len(data)) if name == "wav" else b"") + data
    encoder = AvEncoder(name, whole=True)
    encoder.feed(pcm)
    return encoder.finish()


def wav_header(data_bytes: int | None = None) -> bytes:
    """The 44 bytes before 16-bit mono samples; None: of a stream whose end nobody knows."""
    size = UNKNOWN_SIZE if data_bytes is None else data_bytes
    riff = UNKNOWN_SIZE if data_bytes is None else 36 + data_bytes
    layout = (1, 1, SAMPLE_RATE, SAMPLE_RATE * 2, 2, 16)  # PCM, mono, rate, bytes a second, block, bits
    return (
        b"RIFF"
        + struct.pack("<I", riff)
        + b"WAVEfmt "
        + struct.pack("<IHHIIHH", 16, *layout)
        + (b"data" + struct.pack("<I", size))
    )


class RawEncoder:
    """16-bit little-endian samples, behind an optional header."""

    def __init__(self, header: bytes = b"") -> None:
        self._header = header

    def start(self) -> bytes:
        return self._header

    def feed(self, pcm: np.ndarray) -> bytes:
        return pcm16(pcm).astype("<i2").tobytes()

    def finish(self) -> bytes:
        return b""


class _Pipe:
    """A file that can only be written to, so that no muxer goes back to fill in sizes."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        data = b"".join(self._parts)
        self._parts.clear()
        return data


class AvEncoder:
    """FLAC, MP3 or Opus (in Ogg) by FFmpeg's libraries.

    Args:
        name: flac, mp3 or opus.
        whole: write to memory that can be sought, for true sizes; nothing comes out before `finish`.
    """

    def __init__(self, name: str, *, whole: bool = False) -> None:
        container, codec, sample_format, bits = _CODECS[name]
        self._file = io.BytesIO() if whole else None
        self._pipe = _Pipe()
        # Without these, Ogg holds a second of audio back for its page and the muxer 32 kB for its buffer.
        options = {} if whole else {"flush_packets": "1"}
        if name == "opus" and not whole:
            options["page_duration"] = "80000"  # microseconds: one frame
        if name == "mp3" and not whole:
            options["write_xing"] = "0"
        import av  # only here: a server that is asked for wav and pcm alone never loads FFmpeg

        self._container = av.open(self._file or self._pipe, "w", format=container, options=options)
        self._stream = cast(av.AudioStream, self._container.add_stream(codec, rate=SAMPLE_RATE))
        self._stream.codec_context.layout = "mono"
        self._stream.codec_context.format = sample_format
        if bits:
            self._stream.codec_context.bit_rate = bits
        self._samples = 0

    def start(self) -> bytes:
        return b""

    def feed(self, pcm: np.ndarray) -> bytes:
        if len(pcm):
            import av

            frame = av.AudioFrame.from_ndarray(pcm16(pcm)[None, :], format="s16", layout="mono")
            frame.sample_rate = SAMPLE_RATE
            frame.pts = self._samples
            self._samples += len(pcm)
            self._container.mux(self._stream.encode(frame))
        return self._pipe.take()

    def finish(self) -> bytes:
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._file.getvalue() if self._file is not None else self._pipe.take()
