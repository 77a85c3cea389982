"""How a text will be spoken: cleaned, and in which parts. Costs nothing, so it is shown while typing."""

from __future__ import annotations

import html

from engine import text
from engine.errors import ChorusError
from ui.handle import EngineHandle

CHARACTERS_PER_SECOND = 15.0  # English reading speed, for an estimate only


def preview(handle: EngineHandle, raw: str, language: str) -> tuple[str, str]:
    """(one line, a table as HTML); the table is empty when nothing can be said.

    The player marks the row of the part that is heard: ui/static/parts.js.
    """
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
        return f"⚠ {error.message}", ""
    seconds = [len(part) / CHARACTERS_PER_SECOND for part in cleaned.parts]
    parts = "one part" if len(seconds) == 1 else f"{len(seconds)} parts, spoken as one stream"
    return f"{len(cleaned.text)} characters in {parts}, about {sum(seconds):.0f} s", table(cleaned.parts, seconds)


def table(parts: tuple[str, ...], seconds: list[float]) -> str:
    rows = "".join(
        f'<tr data-part="{i}"><th scope="row">{i + 1}</th><td>{html.escape(part)}</td><td>{s:.0f} s</td></tr>'
        for i, (part, s) in enumerate(zip(parts, seconds, strict=True))
    )
    head = '<tr><th scope="col">Part</th><th scope="col">Text</th><th scope="col">About</th></tr>'
    return (
        f'<div class="ch-parts-table" tabindex="0" role="region" aria-label="Parts of the text"><table>'
        f"<thead>{head}</thead><tbody>{rows}</tbody></table></div>"
    )
