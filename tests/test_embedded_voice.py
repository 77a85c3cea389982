"""The shipped voice speaks: ten fixed sentences with fixed seeds through the whole engine, heard by Whisper.

This guards the engine as much as the model: wrong codes, a wrong prompt row or a broken decoder show up here.
"""

from __future__ import annotations

import numpy as np
import pytest

from engine.engine import Engine
from engine.request import SpeechRequest
from eval import asr, datasets, wer
from eval.normalize import WhisperEnglish

pytestmark = pytest.mark.slow
VOICES = ("River", "Puck", "Emma", "Daniel", "Arctic")  # never heard in training
TEXTS = (
    "He left the preparation of meals to his wife.",
    "You must accept yourself and others if you really want to live.",
    "A surgeon's job is the saving of lives.",
    "They claimed that they had been in contact with extraterrestrial beings.",
    "The idea for the book grew out of a short story.",
    "She exempted me from the exam.",
    "The lawyer has a good record.",
    "How does your idea work in practice?",
    "The children must learn to behave.",
    "This remark led to further arguments among the guests.",
)


def test_ten_sentences_are_understood():
    known = datasets.bundled_voices()
    with Engine.from_config("configs/embedded.yaml") as engine:
        assert engine.info.weights == "trained"
        voices = {
            name: engine.prepare_voice(str(known[name].file), transcript=known[name].transcript) for name in VOICES
        }
        streams = [
            engine.stream(SpeechRequest(text, voice=voices[VOICES[i % 5]], x_vector_only=i % 2 == 0, seed=i))
            for i, text in enumerate(TEXTS)
        ]
        spoken = [np.concatenate([chunk.pcm for chunk in stream]) for stream in streams]
        assert [stream.result.finish_reason for stream in streams] == ["stop"] * 10
    recogniser, normalizer = asr.load("tiny.en"), WhisperEnglish()
    rates = []
    for text, pcm in zip(TEXTS, spoken, strict=True):
        heard = recogniser.transcribe(pcm, 24_000)
        rates.append(wer.score(text, heard.text, normalizer, no_speech=heard.no_speech).rate)
        print(f"{rates[-1]:.2f} {text} | {heard.text}")
    print(f"WER {np.mean(rates):.3f}")
    assert np.mean(rates) <= 0.15
