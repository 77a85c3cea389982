"""What leaves the API plays: decoded again, with the samples and sizes it should have."""

from __future__ import annotations

import io
import struct

import av
import numpy as np
import pytest
import soundfile

from engine.api.formats import MEDIA_TYPES, encode_file, stream_encoder, wav_header
from engine.audio import pcm16
from engine.request import SAMPLE_RATE

SECONDS = 2.4
TONE = (0.5 * np.sin(2 * np.pi * 440 * np.arange(int(SECONDS * SAMPLE_RATE)) / SAMPLE_RATE)).astype(np.float32)
CHUNKS = np.split(TONE, [1920, 3 * 1920, 7 * 1920, 15 * 1920])


def decode(data: bytes) -> np.ndarray:
    """float32 [samples] at 24 kHz."""
    with av.open(io.BytesIO(data)) as container:
        resampler = av.AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE)
        parts = [f.to_ndarray()[0] for frame in container.decode(audio=0) for f in resampler.resample(frame)]
        parts += [f.to_ndarray()[0] for f in resampler.resample(None)]
    return np.concatenate(parts)


def streamed(name: str) -> list[bytes]:
    encoder = stream_encoder(name)
    return [encoder.start(), *(encoder.feed(chunk) for chunk in CHUNKS), encoder.finish()]


@pytest.mark.parametrize("name", ["wav", "flac", "pcm"])
def test_lossless_formats_keep_every_sample(name):
    for data in (encode_file(name, CHUNKS), b"".join(streamed(name))):
        if name == "pcm":
            samples = np.frombuffer(data, "<i2")
        else:
            samples = np.round(decode(data) * 32768).astype(np.int16)
        np.testing.assert_array_equal(samples, pcm16(TONE))


@pytest.mark.parametrize("name", ["mp3", "opus"])
def test_lossy_formats_keep_the_tone_and_its_length(name):
    for data in (encode_file(name, CHUNKS), b"".join(streamed(name))):
        samples = decode(data)
        assert abs(len(samples) / SAMPLE_RATE - SECONDS) < 0.15  # encoder delay and padding
        spectrum = np.abs(np.fft.rfft(samples[4800:43200]))
        assert abs(np.argmax(spectrum) * SAMPLE_RATE / 38400 - 440) < 5
        assert abs(np.sqrt(np.mean(samples[4800:43200] ** 2)) - 0.5 / np.sqrt(2)) < 0.03


@pytest.mark.parametrize("name", MEDIA_TYPES)
def test_streams_hand_out_bytes_chunk_by_chunk(name):
    """Nothing may sit in a muxer's buffer: after each chunk the listener has all but an encoder's delay."""
    parts = streamed(name)
    lossless = name in ("wav", "pcm")
    for i in range(2, 5):
        heard = b"".join(parts[: i + 1])
        fed = sum(map(len, CHUNKS[:i]))
        if lossless:
            assert len(heard) == fed * 2 + (44 if name == "wav" else 0)
        else:
            assert len(decode(heard)) >= fed - 0.25 * SAMPLE_RATE


def test_wav_sizes_are_true_in_files_and_open_in_streams():
    data = encode_file("wav", CHUNKS)
    assert struct.unpack_from("<I", data, 4)[0] == len(data) - 8
    assert struct.unpack_from("<I", data, 40)[0] == len(data) - 44 == len(TONE) * 2
    assert soundfile.info(io.BytesIO(data)).frames == len(TONE)
    header = wav_header()
    assert (header[4:8], header[40:44]) == (b"\xff" * 4, b"\xff" * 4)
    assert len(header) == 44 and b"".join(streamed("wav")).startswith(header)


@pytest.mark.parametrize("name", MEDIA_TYPES)
def test_no_audio_is_still_a_file(name):
    assert isinstance(encode_file(name, []), bytes)


def test_loud_samples_are_clipped_not_wrapped():
    samples = np.frombuffer(encode_file("pcm", [np.array([2.0, -2.0], np.float32)]), "<i2")
    assert samples.tolist() == [32767, -32767]
