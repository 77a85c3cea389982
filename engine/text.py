"""Clean text for speaking, split long text at sentences, bound how long its speech may be."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from engine.errors import InvalidText
from engine.normalize import english

_MARKDOWN = (
    (re.compile(r"```.*?```", re.S), " "),  # code blocks are not read out
    (re.compile(r"!\[([^\]]*)\]\([^)]*\)"), r"\1"),
    (re.compile(r"\[([^\]]+)\]\([^)]*\)"), r"\1"),
    (re.compile(r"^\s{0,3}#{1,6}\s+", re.M), ""),
    (re.compile(r"^\s{0,3}>\s?", re.M), ""),
    (re.compile(r"^\s*[-*+]\s+(?=\S)", re.M), ""),
    (re.compile(r"(\*\*|__|~~)(?=\S)(.+?)(?<=\S)\1", re.S), r"\2"),
    (re.compile(r"(?<![\w*])[*_](?=\S)([^*_\n]+?)(?<=\S)[*_](?![\w*])"), r"\1"),
    (re.compile(r"`([^`\n]+)`"), r"\1"),
)
# Holds nothing that the patterns above or `_speakable` would change; most text is such, and needs one look for all.
_PLAIN = re.compile(r"[A-Za-z0-9.,;:!?'\"/%$()&](?:[A-Za-z0-9.,;:!?'\"/%$()& -]*[A-Za-z0-9.,;:!?'\"/%$()& ])?")
_JOINERS = re.compile("[\u200b-\u200f\u2028-\u202e\u2060-\u2064\ufeff\ufe0e\ufe0f\u20e3]")
_LINE_ENDS = re.compile(r"\s*\n\s*(?:\n\s*)*")
_FINAL = ".!?…。！？；;:：\"'”’)）]】」』"
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]")

# A sentence ends at . ! ? and their wide forms, with closing quotes, before a space or the end. Not after
# abbreviations, initials or inside numbers ("Dr. Who", "J. Smith", "3.5").
_ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof sr jr st vs etc e.g i.e fig no vol pp inc ltd co corp dept est approx jan feb mar apr jun jul "
    "aug sep sept oct nov dec u.s u.k a.m p.m".split()
)
_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’)\]]*(?=\s|$)|[。！？；]+[”’」』）]*")
_SOFT_BREAK = re.compile(r"[,;:，、；：—–]\s*|\s+")


@dataclass(frozen=True)
class CleanText:
    """Text as it will be spoken, in parts of bounded length."""

    text: str
    parts: tuple[str, ...]


def clean(text: str, max_chars: int = 20_000) -> str:
    """Remove what cannot be spoken: control characters, markdown, emoji; close with a full stop.

    Raises:
        InvalidText: not a string, too long, or nothing left to say.
    """
    if not isinstance(text, str):
        raise InvalidText(f"text must be a string, not {type(text).__name__}", field="text")
    if len(text) > max_chars:
        raise InvalidText(
            f"the text has {len(text)} characters; {max_chars} is the limit of one request. Send it in pieces",
            field="text",
        )
    text = unicodedata.normalize("NFC", text).replace("\r\n", "\n").replace("\r", "\n")
    if not _PLAIN.fullmatch(text):
        for pattern, replacement in _MARKDOWN:
            text = pattern.sub(replacement, text)
        text = "".join(_speakable(char) for char in _JOINERS.sub("", text))
    # A line end closes a sentence: headings and list items carry no full stop of their own.
    lines = [re.sub(r"\s+", " ", line).strip() for line in _LINE_ENDS.split(text)]
    lines = [line for line in lines if any(char.isalnum() for char in line)]
    if not lines:
        raise InvalidText("nothing to say: the text has no letters or digits. Write some words", field="text")
    return " ".join(_closed(line) for line in lines)


def _speakable(char: str) -> str:
    if char == "\n":
        return char
    category = unicodedata.category(char)
    if category in ("Zs", "Zl", "Zp") or char == "\t":
        return " "
    # So: pictographs and emoji; Sk: emoji skin tones; C*: control, unassigned, private use, lone surrogates
    if category in ("So", "Sk") or category.startswith("C"):
        return " " if category == "So" else ""
    return char


def _closed(line: str) -> str:
    if line[-1] in _FINAL:
        return line
    line = line.rstrip(",-–—，、 ")
    return line + ("。" if _CJK.match(line[-1]) else ".")


def sentences(text: str) -> list[str]:
    """Split cleaned text at sentence ends; joined with spaces they give the text again (CJK without)."""
    found, start = [], 0
    for match in _SENTENCE_END.finditer(text):
        word = text[start : match.start()].rsplit(None, 1)[-1:] or [""]
        bare = word[0].strip("\"'“‘([").lower()
        if match.group().startswith(".") and match.end() < len(text):
            initial = len(bare) == 1 and bare.isalpha()
            if bare in _ABBREVIATIONS or initial:
                continue
        found.append(text[start : match.end()].strip())
        start = match.end()
    if text[start:].strip():
        found.append(text[start:].strip())
    return [sentence for sentence in found if sentence]


def split(text: str, limit: int = 280) -> tuple[str, ...]:
    """Group sentences into parts of at most `limit` characters; a longer sentence is cut at a comma or a space."""
    pieces: list[str] = []
    for sentence in sentences(text):
        pieces += _cut(sentence, limit)
    parts: list[str] = []
    for piece in pieces:
        if parts and len(parts[-1]) + 1 + len(piece) <= limit:
            parts[-1] += (" " if not _CJK.search(parts[-1][-2:]) else "") + piece
        else:
            parts.append(piece)
    # A part that holds no word (a stray quote) goes with its neighbour: alone it would make the model babble.
    merged: list[str] = []
    for part in parts:
        if merged and not any(char.isalnum() for char in part):
            merged[-1] += part
        else:
            merged.append(part)
    return tuple(merged)


def _cut(sentence: str, limit: int) -> list[str]:
    pieces = []
    while len(sentence) > limit:
        breaks = [m.end() for m in _SOFT_BREAK.finditer(sentence, 0, limit + 1)]
        commas = [end for end in breaks if sentence[end - 1] in ",;:，、；：—–" or sentence[end - 2] in ",;:—–"]
        at = next((end for end in reversed(commas) if end > limit // 3), breaks[-1] if breaks else limit)
        pieces.append(sentence[:at].strip())
        sentence = sentence[at:].strip()
    return [piece for piece in (*pieces, sentence) if piece]


def frame_cap(text: str, limit: int) -> int:
    """Most frames (80 ms) that speaking `text` may take, at most `limit`.

    About three times a slow reading: 3 frames a letter, 8 a CJK character, 10 a digit (a digit may be a whole word).
    Public reports of a 0.5 s text that ran for 16 s (vllm-omni #4576) show why a cap by text is needed.
    """
    digits = sum(char.isdigit() for char in text)
    wide = len(_CJK.findall(text))
    return min(limit, 40 + 10 * digits + 8 * wide + 3 * (len(text) - digits - wide))


def prepare(text: str, *, max_chars: int, split_chars: int, spoken_forms: bool = False) -> CleanText:
    """`clean`, numbers and the like to English words if asked, then `split`."""
    cleaned = clean(text, max_chars)
    if spoken_forms:
        cleaned = english(cleaned)
    return CleanText(cleaned, split(cleaned, split_chars))


def wants_spoken_forms(setting: str, language: str, languages: list[str]) -> bool:
    """Whether text is to be expanded to English words.

    "auto" says yes for English, named or certain: other languages read their digits their own way, and with
    "auto" as language the model finds out which one it is.
    """
    if setting != "auto":
        return setting == "on"
    name = language.strip().lower()
    return name in ("en", "english") or name.startswith("en-") or (name == "auto" and languages == ["english"])
