"""Sentences to read aloud: WordNet's examples and definitions, and templates for what WordNet lacks.

A row is (text, spoken): `text` is what the model will be given, `spoken` what the reading voice is given (they differ
where the text has figures). Source: Debian package wordnet-base (WordNet 3.0 licence: free use and copying); the
templates are this project's own.

    python texts.py --wordnet /usr/share/wordnet --exclude heldout.txt --out texts.tsv
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numbers_en as say
import templates

PARTS = ("data.noun", "data.verb", "data.adj", "data.adv")


def wordnet_examples(folder: Path, low: int = 2, high: int = 25) -> Iterator[str]:
    """The quoted usage examples of every entry, as sentences of `low` to `high` words."""
    for name in PARTS:
        for line in (folder / name).read_text(encoding="latin-1").splitlines():
            if line.startswith(" ") or " | " not in line:
                continue
            for example in re.findall(r'"([^"]+)"', line.split(" | ", 1)[1]):
                sentence = as_sentence(example)
                if sentence and low <= len(sentence.split()) <= high:
                    yield sentence


def wordnet_definitions(folder: Path, rng: random.Random, count: int) -> list[str]:
    """`count` nouns with their definitions, read as "A heron is ...": they bring the rarer words."""
    frames = ("{} is {}.", "{} means {}.", "By {}, we mean {}.", "What is {}? It is {}.")
    found = []
    for line in (folder / "data.noun").read_text(encoding="latin-1").splitlines():
        if line.startswith(" ") or " | " not in line:
            continue
        head, gloss = line.split(" | ", 1)
        word = head.split()[4].replace("_", " ")
        gloss = gloss.split(";")[0].strip()
        if not re.fullmatch(r"[a-z][a-z ]{2,18}", word) or not re.fullmatch(r"[a-z][A-Za-z ,'-]+", gloss):
            continue
        if not 4 <= len(gloss.split()) <= 15 or not re.match(r"(a|an|the|any|one) ", gloss):
            continue
        article = "an" if word[0] in "aeiou" else "a"
        sentence = as_sentence(rng.choice(frames).format(f"{article} {word}", gloss))
        if sentence:
            found.append(sentence)
    return rng.sample(found, min(count, len(found)))


def as_sentence(text: str) -> str | None:
    """Capital first, stop last; None for what a voice cannot read plainly (figures, initials, acronyms, dashes)."""
    text = text.strip().strip(";").strip()
    if re.search(r"[^A-Za-z ,.'!?;:-]|--|\.\.\.|\b[A-Z]{2,}\b|\b[A-Za-z]\.", text) or not text:
        return None
    text = text[0].upper() + text[1:]
    return text if text[-1] in ".!?" else text.rstrip(",;:") + "."


def template_rows(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Rows out of templates.PATTERNS; {slots} are filled by `SLOTS` or by the word lists there."""
    rows: dict[str, str] = {}
    patterns = [p for p in templates.PATTERNS.strip().splitlines() if p.strip()]
    for attempt in range(count * 8):
        if len(rows) >= count:
            break
        text = spoken = patterns[attempt % len(patterns)].strip()
        while match := re.search(r"\{(\w+)\}", text):
            slot = match.group(1)
            shown, read = SLOTS[slot](rng) if slot in SLOTS else (rng.choice(templates.WORDS[slot].split("|")),) * 2
            text = text.replace(match.group(0), shown, 1)
            spoken = spoken.replace(match.group(0), read, 1)
        text, spoken = (t[0].upper() + t[1:] for t in (text, spoken))
        rows.setdefault(text, spoken)
    return list(rows.items())


def _number(low: int, high: int) -> Callable[[random.Random], tuple[str, str]]:
    def draw(rng: random.Random) -> tuple[str, str]:
        value = rng.randint(low, high)
        if rng.random() < 0.4:
            return (say.cardinal(value),) * 2
        shown = f"{value:,}" if value > 9999 or (value > 999 and rng.random() < 0.5) else str(value)
        return shown, say.cardinal(value)

    return draw


def _year(rng: random.Random) -> tuple[str, str]:
    value = rng.randint(1700, 2029)
    return str(value), say.year(value)


def _time(rng: random.Random) -> tuple[str, str]:
    hour, minute = rng.randint(1, 12), rng.choice((0, 5, 10, 15, 20, 25, 30, 40, 45, 50, 55))
    if minute == 0:
        return f"{hour} o'clock", f"{say.cardinal(hour)} o'clock"
    tail = f"oh {say.cardinal(minute)}" if minute < 10 else say.cardinal(minute)
    return f"{hour}:{minute:02d}", f"{say.cardinal(hour)} {tail}"


def _money(rng: random.Random) -> tuple[str, str]:
    value = rng.choice((rng.randint(2, 20), rng.randint(21, 999)))
    if rng.random() < 0.3:
        cents = rng.choice((25, 50, 75, 99))
        return f"${value}.{cents}", f"{say.cardinal(value)} dollars and {say.cardinal(cents)} cents"
    return f"${value}", f"{say.cardinal(value)} dollars"


def _percent(rng: random.Random) -> tuple[str, str]:
    value = rng.randint(1, 99)
    return (f"{value}%" if rng.random() < 0.5 else f"{value} percent"), f"{say.cardinal(value)} percent"


def _decimal(rng: random.Random) -> tuple[str, str]:
    whole, part = rng.randint(0, 99), rng.randint(1, 9)
    return f"{whole}.{part}", f"{say.cardinal(whole)} point {say.cardinal(part)}"


def _ordinal(rng: random.Random) -> tuple[str, str]:
    value = rng.randint(1, 31)
    if rng.random() < 0.5:
        return (say.ordinal(value),) * 2
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(value % 10 if value not in (11, 12, 13) else 0, "th")
    return f"{value}{suffix}", say.ordinal(value)


def _digits(rng: random.Random) -> tuple[str, str]:
    value = [rng.randint(0, 9) for _ in range(rng.randint(3, 4))]
    return " ".join(map(str, value)), " ".join(say.cardinal(v) for v in value)


SLOTS = {
    "small": _number(2, 12),
    "number": _number(13, 199),
    "large": _number(200, 90000),
    "year": _year,
    "time": _time,
    "money": _money,
    "percent": _percent,
    "decimal": _decimal,
    "ordinal": _ordinal,
    "digits": _digits,
}


def collect(wordnet: Path, exclude: set[str], seed: int, definitions: int, made: int) -> list[tuple[str, str]]:
    """All rows, shuffled; no sentence of `exclude` (compared without case) among them."""
    rng = random.Random(seed)
    plain = [*wordnet_examples(wordnet), *wordnet_definitions(wordnet, rng, definitions)]
    rows = dict(template_rows(rng, made)) | {sentence: sentence for sentence in plain}
    banned = {line.strip().lower() for line in exclude}
    kept = [row for row in rows.items() if row[0].lower() not in banned]
    rng.shuffle(kept)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wordnet", type=Path, required=True)
    parser.add_argument("--exclude", type=Path, action="append", default=[], help="held-out sentences, one a line")
    parser.add_argument("--definitions", type=int, default=8000)
    parser.add_argument("--made", type=int, default=9000, help="sentences from templates")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    exclude = {line for path in args.exclude for line in path.read_text("utf-8").splitlines()}
    rows = collect(args.wordnet, exclude, args.seed, args.definitions, args.made)
    args.out.write_text("".join(f"{text}\t{spoken}\n" for text, spoken in rows), "utf-8")
    print(f"{len(rows)} sentences, {sum(len(t.split()) for t, _ in rows)} words")


if __name__ == "__main__":
    main()
