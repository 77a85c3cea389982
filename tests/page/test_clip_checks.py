"""What the page says of a reference clip, with the real recogniser and the real noise judge."""

from __future__ import annotations

import numpy as np
import pytest

from engine.audio import load_audio
from tests.page.conftest import VOICES
from ui import clip_checks

CLIP = VOICES / "kokoro_bf_emma.flac"


@pytest.mark.parametrize(
    "text,seconds,doubt",
    [("The library closes at six on Fridays.", 2.5, ""), ("Hello.", 8.0, "fewer"), ("word " * 60, 5.0, "more"),
     ("", 5.0, ""), ("图书馆六点关门", 3.0, "")],
)  # fmt: skip
def test_words_that_do_not_fit_the_length_are_doubted(text, seconds, doubt):
    found = clip_checks.rate_doubts(text, seconds)
    assert bool(found) == bool(doubt) and all(doubt in line for line in found)


@pytest.mark.slow
def test_a_clean_clip_is_transcribed_without_doubts():
    audio = load_audio(CLIP)
    heard = clip_checks.transcribe(audio)
    assert heard.text and "library closes" in heard.text
    assert clip_checks.doubts(heard, audio) == [] and clip_checks.noise_doubts(audio) == []


@pytest.mark.slow
def test_noise_is_heard_as_noise():
    rng = np.random.default_rng(0)
    audio = load_audio(CLIP)
    hiss = load_audio((0.1 * rng.standard_normal(4 * 24_000)).astype(np.float32), 24_000)
    heard = clip_checks.transcribe(hiss)
    assert heard.text is None and "No speech" in clip_checks.doubts(heard, hiss)[0]
    noisy = audio.pcm + (0.3 * audio.pcm.std() * rng.standard_normal(len(audio.pcm))).astype(np.float32)
    assert "background" in clip_checks.noise_doubts(load_audio(noisy, 24_000))[0]


@pytest.mark.slow
def test_several_speakers_are_suspected_where_there_are_two_and_only_there():
    """Every bundled clip is one person; halves of two clips are two, unless both are the same reader."""
    clips = {path.stem: load_audio(path) for path in sorted(VOICES.glob("*.flac"))}
    for name, clip in clips.items():
        assert clip_checks.speaker_doubts(clip) == [], name
    half = 4 * 24_000
    for one, other in (("kokoro_af_heart", "kokoro_bf_emma"), ("kokoro_am_michael", "human_librivox_a"),
                       ("kokoro_am_puck", "kokoro_am_michael"), ("human_arctic", "kokoro_af_river")):  # fmt: skip
        both = np.concatenate([clips[one].pcm[:half], clips[other].pcm[:half]])
        assert "Several speakers" in clip_checks.speaker_doubts(load_audio(both, 24_000))[0], (one, other)
    assert clip_checks.speaker_doubts(load_audio(clips["kokoro_af_heart"].pcm[: 3 * 24_000], 24_000)) == []  # too short
