"""The audio front door: every container, every array layout, and each refusal with the field it names."""

from __future__ import annotations

import io
import time
import tracemalloc
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile as sf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.audio import clipped_share, encode_audio, load_audio, pcm16
from engine.errors import InvalidAudio
from engine.request import SAMPLE_RATE

VOICES = Path(__file__).parents[1] / "assets" / "voices"
CLIPS = sorted(VOICES.glob("*.flac"))


@pytest.fixture(scope="module")
def clip() -> np.ndarray:
    return sf.read(VOICES / "kokoro_af_heart.flac", dtype="float32")[0]


def tone(seconds: float, rate: int = SAMPLE_RATE, level: float = 0.3) -> np.ndarray:
    return (level * np.sin(2 * np.pi * 220 * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def file_bytes(pcm: np.ndarray, rate: int, container: str, subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    sf.write(file, pcm, rate, format=container, subtype=subtype)
    return file.getvalue()


def ffmpeg_bytes(pcm: np.ndarray, rate: int, container: str, codec: str) -> bytes:
    """[N] or [N, 2] float32 → an encoded file, by PyAV."""
    planar = np.atleast_2d(pcm.T).astype(np.float32)
    layout = "mono" if len(planar) == 1 else "stereo"
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(planar), format="fltp", layout=layout)
        frame.sample_rate = rate
        fifo = av.AudioFifo()
        fifo.write(frame)
        resampler = av.AudioResampler(format=stream.format, layout=layout, rate=rate, frame_size=960)
        for part in [*resampler.resample(fifo.read()), *resampler.resample(None)]:
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))
    return file.getvalue()


def likeness(a: np.ndarray, b: np.ndarray) -> float:
    """Highest normalised correlation over all shifts: 1 for the same sound, whatever the codec's delay."""
    n = 1 << int(np.ceil(np.log2(len(a) + len(b))))
    cross = np.fft.irfft(np.fft.rfft(a, n) * np.conj(np.fft.rfft(b, n)), n)
    return float(cross.max() / (np.linalg.norm(a) * np.linalg.norm(b)))


def refused(source, rate=None, match: str | None = None, **kwargs) -> InvalidAudio:
    with pytest.raises(InvalidAudio, match=match) as caught:
        load_audio(source, rate, **kwargs)
    assert caught.value.field == kwargs.get("name", "audio")
    return caught.value


@pytest.mark.parametrize("path", CLIPS, ids=lambda p: p.stem)
def test_bundled_clips_pass_untouched(path):
    audio = load_audio(path)
    source, rate = sf.read(path, dtype="float32")
    assert rate == SAMPLE_RATE and audio.pcm.dtype == np.float32 and audio.pcm.ndim == 1
    start = round(audio.trimmed_s[0] * rate)
    assert np.array_equal(audio.pcm, source[start : start + len(audio.pcm)])  # 24 kHz is never resampled
    assert audio.clipped == 0 and audio.hints == ()
    assert sum(audio.trimmed_s) < 0.6


@pytest.mark.parametrize("container,subtype", [("WAV", "PCM_16"), ("WAV", "PCM_24"), ("WAV", "FLOAT"), ("WAV", "ULAW"),
                                               ("FLAC", "PCM_24"), ("OGG", "VORBIS"), ("OGG", "OPUS"),
                                               ("MP3", None), ("AIFF", "PCM_16")])  # fmt: skip
def test_soundfile_containers(clip, container, subtype):
    audio = load_audio(file_bytes(clip, SAMPLE_RATE, container, subtype))
    assert abs(audio.seconds - load_audio(clip, SAMPLE_RATE).seconds) < 0.15
    assert likeness(audio.pcm, clip) > 0.95


@pytest.mark.parametrize("container,codec", [("mp4", "aac"), ("ipod", "aac"), ("webm", "libopus"), ("matroska", "aac"),
                                             ("adts", "aac"), ("mov", "alac")])  # fmt: skip
@pytest.mark.parametrize("channels", [1, 2])
def test_ffmpeg_containers_at_48_khz(clip, container, codec, channels):
    import soxr

    wide = soxr.resample(clip, SAMPLE_RATE, 48_000)
    wide = wide if channels == 1 else np.stack([wide, wide], axis=1)
    audio = load_audio(ffmpeg_bytes(wide, 48_000, container, codec))
    assert (audio.source_rate, audio.source_channels) == (48_000, channels)
    assert abs(audio.seconds - load_audio(clip, SAMPLE_RATE).seconds) < 0.15
    assert likeness(audio.pcm, clip) > 0.95


@pytest.mark.parametrize("rate", [8_000, 11_025, 16_000, 22_050, 44_100, 48_000, 96_000])
def test_any_rate_keeps_the_length_and_the_pitch(rate):
    audio = load_audio(tone(2, rate), rate)
    assert abs(len(audio.pcm) - 2 * SAMPLE_RATE) <= 1
    peak = np.argmax(np.abs(np.fft.rfft(audio.pcm))) * SAMPLE_RATE / len(audio.pcm)
    assert abs(peak - 220) < 1


@pytest.mark.parametrize("layout", ["[N]", "[N,1]", "[1,N]", "[N,2]", "[2,N]", "[N,6]", "[6,N]"])
def test_array_layouts_mean_the_same(clip, layout):
    channels = int("".join(c for c in layout if c.isdigit()) or 1)
    array = clip if layout == "[N]" else np.repeat(clip[:, None], channels, axis=1)
    array = array if layout.endswith((f"N,{channels}]", "[N]")) else np.ascontiguousarray(array.T)
    assert np.allclose(load_audio(array, SAMPLE_RATE).pcm, load_audio(clip, SAMPLE_RATE).pcm, atol=1e-6)


def test_stereo_is_mixed_not_dropped(clip):
    other = tone(len(clip) / SAMPLE_RATE)
    mixed = load_audio(np.stack([clip, other], axis=1), SAMPLE_RATE, trim=False).pcm
    assert np.allclose(mixed, (clip + other) / 2, atol=1e-6)


@pytest.mark.parametrize("dtype,scale,offset", [("int8", 128, 0), ("uint8", 128, 128), ("int16", 32768, 0),
                                                ("uint16", 32768, 32768), ("int32", 2**31, 0),
                                                ("float64", 1, 0), ("float16", 1, 0)])  # fmt: skip
def test_sample_types(dtype, scale, offset):
    array = (tone(1.5).astype(np.float64) * scale + offset).astype(dtype)
    assert np.abs(load_audio(array, SAMPLE_RATE, trim=False).pcm - tone(1.5)).max() < 1 / 100


def test_equal_audio_has_an_equal_hash_in_any_wrapping(clip):
    stereo = np.stack([clip, clip])
    hashes = {load_audio(file_bytes(clip, SAMPLE_RATE, kind), name="x").hash for kind in ("WAV", "FLAC")}
    assert hashes == {load_audio(np.round(stereo * 32768).astype(np.int16), SAMPLE_RATE).hash}
    assert load_audio(clip[::-1].copy(), SAMPLE_RATE).hash not in hashes


def test_silence_at_the_ends_is_cut_with_a_margin():
    audio = load_audio(np.concatenate([np.zeros(24_000), tone(2), np.zeros(48_000)]), SAMPLE_RATE)
    assert audio.seconds == pytest.approx(2.2, abs=0.03)
    assert audio.trimmed_s == (pytest.approx(0.9, abs=0.02), pytest.approx(1.9, abs=0.02))


def test_the_limits_count_after_trimming():
    pause = np.zeros(40 * SAMPLE_RATE)
    assert load_audio(np.concatenate([pause, tone(3), pause]), SAMPLE_RATE).seconds < 3.3
    refused(np.concatenate([pause, tone(0.4), pause]), SAMPLE_RATE, match="at least 1 s")


def test_refusals():
    refused(b"", match="empty")
    refused(np.zeros(0, np.float32), SAMPLE_RATE, match="empty")
    refused(np.zeros(48_000, np.float32), SAMPLE_RATE, match="silent")
    refused(np.full(48_000, 0.5, np.float32), SAMPLE_RATE, match="silent")  # a constant is no sound
    refused(tone(0.5), SAMPLE_RATE, match="at least 1 s")
    refused(tone(31), SAMPLE_RATE, match="at most 30 s")
    refused(np.full(48_000, np.nan, np.float32), SAMPLE_RATE, match="NaN")
    refused(np.r_[tone(2), np.inf].astype(np.float32), SAMPLE_RATE, match="NaN or infinite")
    refused(np.clip(20 * tone(2), -1, 1), SAMPLE_RATE, match="clipped")
    refused(tone(2) * 30_000, SAMPLE_RATE, match=r"\[-1, 1\]")
    refused(tone(2), match="sample_rate")
    refused(tone(2), 100, match="sample rate")
    refused(tone(2).astype(complex), SAMPLE_RATE, match="full scale")
    refused(np.zeros((2, 2, 2)), SAMPLE_RATE, match="dimensions")
    refused(np.zeros((500, 500)), SAMPLE_RATE, match="channels")
    refused(b"this is a text file, not sound" * 100, match="not an audio file", name="ref_audio")
    refused(42, match="int")
    refused("/no/such/file.wav", match="no audio file")
    refused(file_bytes(tone(2), SAMPLE_RATE, "WAV"), 24_000, match="states its own")


def test_damaged_files_are_refused_not_crashed(clip):
    whole = {kind: file_bytes(clip, SAMPLE_RATE, kind) for kind in ("WAV", "FLAC", "OGG", "MP3")}
    whole["MP4"] = ffmpeg_bytes(clip, 48_000, "mp4", "aac")
    rng = np.random.default_rng(0)
    for kind, data in whole.items():
        for cut in (12, 60, 400):
            try:
                assert load_audio(data[:cut]).seconds >= 1
            except InvalidAudio as error:
                assert error.field == "audio"
        noisy = bytearray(data)
        for at in rng.integers(0, len(data), 200):
            noisy[at] = rng.integers(256)
        try:
            assert np.isfinite(load_audio(bytes(noisy)).pcm).all(), kind
        except InvalidAudio:
            pass


@settings(max_examples=150, deadline=None)
@given(st.binary(min_size=1, max_size=400), st.sampled_from([b"", b"RIFF", b"fLaC", b"OggS", b"ID3\x04", b"\xff\xfb",
       b"\xff\xf1", b"\x1a\x45\xdf\xa3", b"\0\0\0\x18ftypmp42", b"#!AMR\n", b"caff", b"\x30\x26\xb2\x75"]))  # fmt: skip
@example(b"\xff", b"")  # one byte, the first of a frame of AAC: was an IndexError
def test_random_bytes_are_refused(tail, head):
    refused(head + tail)


def test_a_playlist_never_opens_what_it_names(tmp_path, clip):
    secret = tmp_path / "secret.wav"
    secret.write_bytes(file_bytes(clip, SAMPLE_RATE, "WAV"))
    for text in (f"#EXTM3U\n#EXTINF:5,\n{secret}\n#EXT-X-ENDLIST\n", f"ffconcat version 1.0\nfile {secret}\n"):
        refused(text.encode(), match="not an audio file")


def test_a_ten_hour_file_is_refused_before_it_fills_the_memory():
    hour = np.zeros(3600 * 8_000, np.int16)
    data = file_bytes(hour, 8_000, "FLAC")  # a few kB that decode to 29 million samples
    lying = bytearray(data)
    lying[21:26] = bytes([lying[21] & 0xF0, 0, 0, 0, 0])  # STREAMINFO: total samples 0 = "unknown"
    opus = ffmpeg_bytes(tone(200, 48_000), 48_000, "webm", "libopus")
    for source in (data, bytes(lying), opus, b"\0" * (65 * 2**20)):
        tracemalloc.start()
        started = time.monotonic()
        refused(source, match="longer than 180 seconds|limit is 64 MB|not an audio|silent|empty")
        assert time.monotonic() - started < 5
        assert tracemalloc.get_traced_memory()[1] < 80 * 2**20
        tracemalloc.stop()


def test_overshoot_is_scaled_not_cut():
    audio = load_audio(tone(2, level=1.4), SAMPLE_RATE, trim=False)
    assert np.allclose(audio.pcm, tone(2, level=1.0), atol=1e-3)


def test_clipping_is_measured_on_speech(clip):
    loud = clip / np.abs(clip).max()
    assert clipped_share(loud) < 0.001
    shares = [clipped_share(np.clip(loud * gain, -1, 1)) for gain in (2, 5, 20)]
    assert shares == sorted(shares) and shares[-1] > 0.1
    assert any("clipped" in hint for hint in load_audio(np.clip(loud * 4, -1, 1), SAMPLE_RATE).hints)


def test_hints_name_what_could_be_better(clip):
    assert any("quiet" in hint for hint in load_audio(clip * 0.01, SAMPLE_RATE).hints)
    assert any("8000 Hz" in hint for hint in load_audio(tone(4, 8_000), 8_000).hints)
    assert any("Under 3 seconds" in hint for hint in load_audio(tone(2), SAMPLE_RATE).hints)


@pytest.mark.parametrize("container", ["wav", "flac", "mp3"])
def test_encoded_files_have_true_sizes(clip, container):
    data = encode_audio(clip, container)
    info = sf.info(io.BytesIO(data))
    assert info.samplerate == SAMPLE_RATE and info.channels == 1
    if container == "mp3":
        assert abs(info.frames - len(clip)) < 3000 and likeness(sf.read(io.BytesIO(data))[0], clip) > 0.95
    else:
        assert np.array_equal(sf.read(io.BytesIO(data), dtype="int16")[0], pcm16(clip))
    if container == "wav":
        assert int.from_bytes(data[4:8], "little") == len(data) - 8
        assert int.from_bytes(data[40:44], "little") == 2 * len(clip)


def test_unknown_encoding_is_refused(clip):
    with pytest.raises(InvalidAudio, match="wav, flac, mp3"):
        encode_audio(clip, "exe")
