"""How a text will be spoken: cleaned, and in which parts. Costs nothing, so it is shown while typing."""

from __future__ import annotations

from typing import Any

from engine import text
from engine.errors import ChorusError
from ui.handle import EngineHandle

COLUMNS = ["Part", "Text", "About"]
CHARACTERS_PER_SECOND = 15.0  # English reading speed, for an estimate only


def preview(handle: EngineHandle, raw: str, language: str) -> tuple[str, list[list[Any]]]:
    """(one line, rows of COLUMNS); the rows are empty when nothing can be said."""
    limits = handle.config.stream
    info = handle.info
    languages = list(info.languages) if info else []
    try:
        cleaned = text.prepare(
            raw,
            max_chars=limits.max_text_chars,
            split_chars=limits.split_chars,
            spoken_forms=text.wants_spoken_forms(limits.spoken_forms, language or "auto", languages),
        )
    except ChorusError as error:
        return f"⚠ {error.message}", []
    seconds = [len(part) / CHARACTERS_PER_SECOND for part in cleaned.parts]
    rows = [[i, part, f"{s:.0f} s"] for i, (part, s) in enumerate(zip(cleaned.parts, seconds, strict=True), 1)]
    parts = "one part" if len(rows) == 1 else f"{len(rows)} parts, spoken as one stream"
    return f"{len(cleaned.text)} characters in {parts}, about {sum(seconds):.0f} s", rows
