"""Bytes of an audio file → mono samples, decoded block by block so that a long file never fills the memory.

libsndfile reads wav, flac, ogg, mp3 and aiff; FFmpeg (through PyAV) reads the rest: m4a/mp4, webm, aac, amr, and
wav with a codec that libsndfile lacks. FFmpeg is told the container by its first bytes instead of being left to guess:
its playlist readers (m3u8, concat) would otherwise open other files and addresses named inside the upload.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import soundfile

from engine.errors import InvalidAudio

MAX_FILE_BYTES = 64 * 2**20
MAX_DECODED_SECONDS = 180.0
MIN_RATE, MAX_RATE = 4_000, 384_000  # Hz
MAX_CHANNELS = 32
FORMATS = "wav, flac, mp3, ogg, m4a/mp4 or webm"


@dataclass(frozen=True)
class Decoded:
    """`pcm` float32 [samples], mono, at `rate` Hz, before any trimming or scaling."""

    pcm: np.ndarray
    rate: int
    channels: int


def decode(data: bytes, *, field: str = "audio") -> Decoded:
    """Decode a whole audio file given by its bytes. Raises `InvalidAudio`; never opens anything else."""
    if not data:
        raise InvalidAudio("The audio file is empty: upload a recording of 1 to 30 seconds.", field=field)
    if len(data) > MAX_FILE_BYTES:
        raise InvalidAudio(
            f"The audio file has {len(data) / 2**20:.0f} MB, the limit is {MAX_FILE_BYTES // 2**20} MB: "
            "cut out 3 to 15 seconds of clear speech.",
            field=field,
        )
    try:
        return _decode_soundfile(data, field)
    except soundfile.LibsndfileError:
        pass  # not one of libsndfile's containers, or a codec it lacks
    container = _container(data)
    if container is None:
        raise InvalidAudio(f"This is not an audio file that can be read: use {FORMATS}.", field=field)
    from av.error import FFmpegError  # only here: a server that is sent wav, flac, mp3 and ogg never loads FFmpeg

    try:
        return _decode_ffmpeg(data, container, field)
    except (FFmpegError, ValueError, EOFError) as error:
        raise InvalidAudio(
            f"The file looks like {container} but could not be decoded ({error}): export it again as wav or flac.",
            field=field,
        ) from error


def _decode_soundfile(data: bytes, field: str) -> Decoded:
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        rate, channels = file.samplerate, file.channels
        _check_layout(rate, channels, field)
        _check_length(file.frames / rate, field)
        blocks, total = [], 0
        # The header's length is not believed: blocks are counted as they come.
        for block in file.blocks(blocksize=65_536, dtype="float32", always_2d=True):
            total += len(block)
            _check_length(total / rate, field)
            blocks.append(block.mean(axis=1, dtype=np.float32))  # [samples, channels] -> [samples]
    return Decoded(_join(blocks), rate, channels)


def _decode_ffmpeg(data: bytes, container: str, field: str) -> Decoded:
    import av

    # A folder of a movie's own choosing must not be followed either: external data references stay off.
    with av.open(io.BytesIO(data), mode="r", format=container, options={"enable_drefs": "0"}) as file:
        if not file.streams.audio:
            raise InvalidAudio("The file has no sound track: record or upload speech.", field=field)
        stream = file.streams.audio[0]
        rate, channels = int(stream.rate or 0), int(stream.channels or 0)
        _check_layout(rate, channels, field)
        if file.duration:
            _check_length(file.duration / av.time_base, field)
        to_float = av.AudioResampler(format="fltp", layout=stream.layout, rate=rate)  # same rate: only the sample type
        blocks, total = [], 0
        for frame in file.decode(stream):
            for part in to_float.resample(frame):
                block = part.to_ndarray().mean(axis=0, dtype=np.float32)  # [channels, samples] -> [samples]
                total += len(block)
                _check_length(total / rate, field)
                blocks.append(block)
    return Decoded(_join(blocks), rate, channels)


def _container(data: bytes) -> str | None:
    """FFmpeg's name of the container, by the first bytes; None when it is none of those that are read here."""
    head = data[:16]
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mov"
    if head[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"  # webm is a matroska profile
    if head[:4] == b"OggS":
        return "ogg"
    if head[:4] in (b"RIFF", b"RF64"):
        return "wav"
    if head[:5] == b"#!AMR":
        return "amr"
    if head[:4] == b"caff":
        return "caf"
    if head[:4] == b"\x30\x26\xb2\x75":
        return "asf"
    sync = int.from_bytes(head[:2], "big") if len(head) > 1 else 0
    if sync & 0xFFF6 == 0xFFF0:
        return "aac"  # ADTS: twelve sync bits, layer 0
    if head[:3] == b"ID3" or sync & 0xFFE0 == 0xFFE0:
        return "mp3"
    return None


def _check_layout(rate: int, channels: int, field: str) -> None:
    if not MIN_RATE <= rate <= MAX_RATE:
        raise InvalidAudio(
            f"A sample rate of {rate} Hz is outside {MIN_RATE} to {MAX_RATE} Hz: export the clip at 24 or 48 kHz.",
            field=field,
        )
    if not 1 <= channels <= MAX_CHANNELS:
        raise InvalidAudio(f"{channels} channels cannot be mixed down: export the clip as mono.", field=field)


def _check_length(seconds: float, field: str) -> None:
    if seconds > MAX_DECODED_SECONDS:
        raise InvalidAudio(
            f"The recording is longer than {MAX_DECODED_SECONDS:.0f} seconds: cut out 3 to 15 seconds of clear speech.",
            field=field,
        )


def _join(blocks: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(blocks) if blocks else np.zeros(0, np.float32)
