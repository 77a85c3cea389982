"""What is spoken in a run: utterances from a bundled list, a seed-tts-eval folder, or a file of the user's.

english, hard               assets/prompts/*.tsv with the bundled voices
<folder or .lst>            seed-tts-eval: utt|prompt_text|prompt_wav|infer_text[|infer_wav]
<file.tsv>                  a header with at least `text` (id, category, spoken, voice are optional)
<file.txt>                  one utterance a line
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import soundfile

from eval.errors import DatasetError
from eval.normalize import has_nothing_to_say

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ROOT / "assets" / "prompts"
VOICES = ROOT / "assets" / "voices"
BUNDLED = ("english", "hard")


@dataclass(frozen=True)
class Reference:
    """A voice to clone: a clip and what it says."""

    name: str
    file: Path
    transcript: str
    licence: str = ""

    def pcm(self) -> tuple[np.ndarray, int]:
        """Mono float32 [samples] and its rate in Hz."""
        try:
            data, rate = soundfile.read(self.file, dtype="float32", always_2d=True)
        except (OSError, soundfile.LibsndfileError) as error:
            raise DatasetError(f"voice '{self.name}': cannot read {self.file.name}: {error}", field="voices") from error
        return data.mean(axis=1), rate


@dataclass(frozen=True)
class Utterance:
    """One text to speak. `spoken` is the same text as it is read out, "" when `text` already is that."""

    id: str
    text: str
    voice: str = ""
    category: str = ""
    spoken: str = ""


@dataclass(frozen=True)
class Dataset:
    name: str
    utterances: tuple[Utterance, ...]
    references: dict[str, Reference]
    language: str = "english"
    skipped: tuple[str, ...] = ()  # rows that could not be used, with the reason


def bundled_voices(names: Sequence[str] = ()) -> dict[str, Reference]:
    """The clips of assets/voices that are offered as voices; all, or those named.

    Raises:
        DatasetError: a name that is not among them.
    """
    index = json.loads((VOICES / "voices.json").read_text(encoding="utf-8"))
    offered = {
        v["name"]: Reference(v["name"], VOICES / v["file"], v["transcript"], v["licence"])
        for v in index
        if v.get("offered", True)
    }
    if not names:
        return offered
    by_lower = {name.lower(): name for name in offered}
    missing = [name for name in names if name.lower() not in by_lower]
    if missing:
        raise DatasetError(f"no bundled voice {', '.join(missing)}; there are {', '.join(offered)}", field="voices")
    return {by_lower[name.lower()]: offered[by_lower[name.lower()]] for name in names}


def load(source: str, *, voices: Sequence[str] = (), limit: int | None = None, language: str = "auto") -> Dataset:
    """Read a dataset by name or path.

    Args:
        voices: bundled voices to use in turn (lists without reference clips of their own); default all.
        limit: at most so many utterances, from the start of the list.
        language: of the texts; "auto" takes the list's own (English, or by the name of a seed-tts-eval folder).

    Raises:
        DatasetError: no such list, nothing usable in it, or a malformed row (named with its line).
    """
    if limit is not None and limit < 1:
        raise DatasetError(f"limit {limit}: at least one utterance is needed", field="limit")
    path = Path(source)
    if source in BUNDLED:
        dataset = _from_table(PROMPTS / f"{source}.tsv", source)
    elif path.is_dir():
        return _limited(_seed_tts(_find_list(path), language), limit)
    elif not path.is_file():
        raise DatasetError(
            f"no dataset '{source}': neither {' nor '.join(BUNDLED)}, nor a file or folder", field="dataset"
        )
    elif path.suffix == ".lst":
        return _limited(_seed_tts(path, language), limit)
    elif path.suffix == ".tsv":
        dataset = _from_table(path, path.stem)
    else:
        dataset = _from_lines(path)
    dataset = _limited(dataset, limit)
    references = bundled_voices(voices)
    unknown = sorted({u.voice for u in dataset.utterances} - set(references) - {""})
    if unknown:
        raise DatasetError(f"voice {unknown[0]} of the list is not a bundled one", field="voice")
    turn = list(references)
    spoken = tuple(u if u.voice else replace(u, voice=turn[i % len(turn)]) for i, u in enumerate(dataset.utterances))
    return replace(
        dataset, utterances=spoken, references=references, language="english" if language == "auto" else language
    )


def _limited(dataset: Dataset, limit: int | None) -> Dataset:
    return dataset if limit is None else replace(dataset, utterances=dataset.utterances[:limit])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path.name} is not a readable UTF-8 text: {error}", field="dataset") from error


def _finish(name: str, utterances: list[Utterance], skipped: list[str]) -> Dataset:
    seen: set[str] = set()
    unique = []
    for u in utterances:
        if u.id in seen:
            raise DatasetError(f"{name}: the id '{u.id}' stands twice", field="id")
        seen.add(u.id)
        unique.append(u)
    if not unique:
        raise DatasetError(f"{name}: nothing to speak ({'; '.join(skipped[:3]) or 'the list is empty'})", field="text")
    return Dataset(name, tuple(unique), {}, skipped=tuple(skipped))


def _from_table(path: Path, name: str) -> Dataset:
    rows = csv.DictReader(_read(path).splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
    if "text" not in (rows.fieldnames or ()):
        raise DatasetError(f"{path.name}: the first line must name the columns, one of them `text`", field="text")
    utterances, skipped = [], []
    for number, row in enumerate(rows, start=2):
        text = (row["text"] or "").strip()
        if has_nothing_to_say(text):
            skipped.append(f"line {number}: nothing to say")
            continue
        utterances.append(
            Utterance(
                id=_safe_id(row.get("id") or f"{number - 1:05d}", number),
                text=text,
                voice=(row.get("voice") or "").strip(),
                category=(row.get("category") or "").strip(),
                spoken=(row.get("spoken") or "").strip(),
            )
        )
    return _finish(name, utterances, skipped)


def _from_lines(path: Path) -> Dataset:
    utterances, skipped = [], []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if has_nothing_to_say(line):
            if line.strip():
                skipped.append(f"line {number}: nothing to say")
            continue
        utterances.append(Utterance(id=f"{number:05d}", text=line.strip()))
    return _finish(path.stem, utterances, skipped)


def _safe_id(raw: str, number: int) -> str:
    """An id names files, so it may hold letters, digits, dot, dash and underscore only."""
    if not re.fullmatch(r"[\w][\w.\-]{0,119}", raw.strip()):
        raise DatasetError(f"line {number}: the id {raw!r} may hold letters, digits, . - and _ only", field="id")
    return raw.strip()


# ---- seed-tts-eval -----------------------------------------------------------------------------------------------


def _find_list(folder: Path) -> Path:
    for candidate in (folder / "meta.lst", folder / "en" / "meta.lst", folder / "zh" / "meta.lst"):
        if candidate.is_file():
            return candidate
    raise DatasetError(f"{folder} holds no meta.lst (seed-tts-eval has en/meta.lst and zh/meta.lst)", field="dataset")


def parse_seed_tts(text: str, folder: Path) -> tuple[list[Utterance], dict[str, Reference], list[str]]:
    """Rows `utt | prompt_text | prompt_wav | infer_text [| infer_wav]`; `prompt_wav` is relative to `folder`.

    Every row has a voice of its own, named by its clip. A clip that leaves the folder is refused; a missing one is
    reported among the skipped rows (the original scripts drop it silently).
    """
    utterances, references, skipped = [], {}, []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        parts = [part.strip() for part in line.split("|")]
        if len(parts) not in (4, 5):
            raise DatasetError(f"meta.lst line {number}: {len(parts)} columns; 4 or 5 are expected", field="dataset")
        utt, prompt_text, prompt_wav, infer_text = parts[:4]
        clip = (folder / prompt_wav).resolve()
        if not clip.is_relative_to(folder.resolve()):
            raise DatasetError(f"meta.lst line {number}: {prompt_wav} lies outside the folder", field="dataset")
        if has_nothing_to_say(infer_text):
            skipped.append(f"line {number}: nothing to say")
        elif not clip.is_file():
            skipped.append(f"line {number}: no clip {prompt_wav}")
        else:
            voice = re.sub(r"\.\w+$", "", prompt_wav.replace("/", "."))
            references[voice] = Reference(voice, clip, prompt_text)
            utterances.append(Utterance(_safe_id(re.sub(r"\.wav$", "", utt), number), infer_text, voice=voice))
    return utterances, references, skipped


def _seed_tts(path: Path, language: str) -> Dataset:
    utterances, references, skipped = parse_seed_tts(_read(path), path.parent)
    if language == "auto":
        language = "chinese" if path.parent.name == "zh" else "english"
    dataset = _finish(f"seed-tts-eval {path.parent.name}/{path.name}", utterances, skipped)
    return replace(dataset, references=references, language=language)
