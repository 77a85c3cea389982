"""How a text will be spoken: cleaned, and in which parts. Costs nothing, so it is shown while typing."""

from __future__ import annotations

from typing import Any

from engine.errors import ChorusError
from ui.handle import EngineHandle

COLUMNS = ["Part", "Text", "About"]
CHARACTERS_PER_SECOND = 15.0  # English reading speed, for an estimate only


def preview(handle: EngineHandle, raw: str, language: str) -> tuple[str, list[list[Any]]]:
    """(one line, rows of COLUMNS); the rows are empty when nothing can be said."""
    try:
        cleaned = handle.engine.prepare_text(raw, language or "auto")
    except ChorusError as error:
        return f"⚠ {error.message}", []
    seconds = [len(part) / CHARACTERS_PER_SECOND for part in cleaned.parts]
    rows = [[i, part, f"{s:.0f} s"] for i, (part, s) in enumerate(zip(cleaned.parts, seconds, strict=True), 1)]
    parts = "one part" if len(rows) == 1 else f"{len(rows)} parts, spoken as one stream"
    return f"{len(cleaned.text)} characters in {parts}, about {sum(seconds):.0f} s", rows
