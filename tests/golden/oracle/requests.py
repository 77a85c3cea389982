"""The requests whose prompts and greedy codes are kept, through the reference's own text front door."""

from __future__ import annotations

from dataclasses import dataclass

CLIP_TRANSCRIPT = "And you always want to see it in the superlative degree."
SHORT = "Yes, at noon."
MIDDLE = "The ferry leaves at seven, and the last one comes back at half past nine."
LONG = (
    "When the lights went out, everyone in the room began to talk at once; then somebody found a candle, "
    "and for a moment nobody said a word. I counted 27 people."
)
CHINESE = "你好，今天天气很好。"


@dataclass(frozen=True)
class Golden:
    """One request. `frames`: at most so many are made. `voice`: None, "icl" or "x_vector" (Base)."""

    name: str
    checkpoint: str
    text: str
    frames: int
    language: str = "auto"
    non_streaming: bool = False
    voice: str | None = None
    speaker: str | None = None
    instruct: str | None = None
    repetition_penalty: float = 1.05


REQUESTS = (
    Golden("base_icl", "base", MIDDLE, 96, voice="icl"),
    Golden("base_icl_long_text", "base", LONG, 130, "english", voice="icl"),
    Golden("base_icl_non_streaming", "base", MIDDLE, 90, "english", True, voice="icl"),
    Golden("base_x_vector", "base", MIDDLE, 72, "english", voice="x_vector"),
    Golden("base_x_vector_non_streaming", "base", LONG, 64, "auto", True, voice="x_vector"),
    Golden("base_x_vector_short", "base", SHORT, 110, "german", voice="x_vector", repetition_penalty=1.3),
    Golden("custom_plain", "custom_voice", MIDDLE, 100, "english", True, speaker="vivian"),
    Golden("custom_streaming", "custom_voice", LONG, 90, speaker="Vivian"),
    Golden("custom_instruct", "custom_voice", SHORT, 70, "german", True, speaker="vivian", instruct="Speak slowly."),
    Golden("custom_dialect_auto", "custom_voice", CHINESE, 66, "auto", True, speaker="eric"),
    Golden("custom_dialect_chinese", "custom_voice", CHINESE, 64, "Chinese", speaker="eric"),
    Golden("custom_dialect_english", "custom_voice", SHORT, 64, "english", speaker="eric"),
    Golden("design_plain", "voice_design", MIDDLE, 88, "english", True, instruct="A calm, low voice of an old man."),
    Golden("design_streaming", "voice_design", LONG, 120, instruct="Bright and quick."),
    Golden("design_no_instruct", "voice_design", SHORT, 64, "auto", True, instruct=""),
)
