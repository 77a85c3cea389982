"""Faults of speech servers that an error rate alone does not name. Pure functions on word lists.

Each flag points at a known fault: words of the reference clip in the output (QwenLM/Qwen3-TTS 341), words of another
request (sglang-omni 350), the text spoken twice, its end missing (QwenLM/Qwen3-TTS 181), far too much or too little
audio for the text (vllm-omni 4536, 4576).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from eval.wer import UtteranceErrors

LEAK_WORDS = 4  # a run of so many words that the text does not have; three are often chance ("one of the")
OTHER_LEAK_WORDS = 5  # the texts of a whole run hold more chances
REPEAT_WORDS = 4
TAIL_WORDS = 2
PACE = 15.0  # characters a second of English read aloud; used where the reference clip gives no better one
PAUSE_S = 0.8  # silence around the words, which one-word texts are mostly made of
RATIO_LIMITS = (0.5, 2.0)


@dataclass(frozen=True)
class Checks:
    """Empty strings and False where nothing was found.

    Attributes:
        reference_leak: words heard that only the reference clip's transcript has.
        other_leak: words heard that only another request's text has.
        repeated: the words spoken more often than asked.
        missing_tail, missing_head: how many words the end or the start lacks.
        duration_ratio: seconds of audio / seconds expected for the text, None without audio.
        wrong_length: the ratio is outside 0.5-2.
    """

    reference_leak: str = ""
    other_leak: str = ""
    repeated: str = ""
    missing_tail: int = 0
    missing_head: int = 0
    duration_ratio: float | None = None
    wrong_length: bool = False

    def flags(self) -> list[str]:
        """Names of what was found, for tables."""
        found = [name for name in ("reference_leak", "other_leak", "repeated", "wrong_length") if getattr(self, name)]
        found += [name for name in ("missing_tail", "missing_head") if getattr(self, name) >= TAIL_WORDS]
        return found

    def to_dict(self) -> dict:
        return asdict(self) | {"flags": self.flags()}


def ngrams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


class OtherTexts:
    """The n-grams of every text of a run, so that one clip can be checked against all others at once."""

    def __init__(self, texts: dict[str, Sequence[str]]) -> None:
        """From utterance id -> its words."""
        self._owners: dict[tuple[str, ...], set[str]] = {}
        for name, words in texts.items():
            for gram in ngrams(words, OTHER_LEAK_WORDS):
                self._owners.setdefault(gram, set()).add(name)

    def leaked(self, own: str, heard: Sequence[str], wanted: Sequence[str]) -> str:
        """The first run of words heard that another text has and the own one has not."""
        mine = set(ngrams(wanted, OTHER_LEAK_WORDS))
        for gram in ngrams(heard, OTHER_LEAK_WORDS):
            if gram not in mine and self._owners.get(gram, set()) - {own}:
                return " ".join(gram)
        return ""


def reference_leak(heard: Sequence[str], wanted: Sequence[str], reference: Sequence[str]) -> str:
    """Words heard that the reference's transcript has and the text has not."""
    foreign = set(ngrams(reference, LEAK_WORDS)) - set(ngrams(wanted, LEAK_WORDS))
    return next((" ".join(gram) for gram in ngrams(heard, LEAK_WORDS) if gram in foreign), "")


def repeated(heard: Sequence[str], wanted: Sequence[str]) -> str:
    """Words spoken more often than the text has them: runs of four, or the whole of a shorter text."""
    n = min(REPEAT_WORDS, len(wanted))
    if n == 0:
        return ""
    asked = Counter(ngrams(wanted, n))
    for gram, times in Counter(ngrams(heard, n)).items():
        if gram in asked and times > asked[gram]:
            return " ".join(gram)
    return ""


def missing_ends(errors: UtteranceErrors) -> tuple[int, int]:
    """(words missing at the start, at the end) of an alignment; all of them at the end when nothing was heard."""
    parts = errors.differences
    if not errors.hits and not errors.substitutions:
        return 0, errors.deletions
    head = len(parts[0].reference) if parts and parts[0].kind == "delete" else 0
    tail = len(parts[-1].reference) if parts and parts[-1].kind == "delete" else 0
    return head, tail


def expected_seconds(text: str, pace: float = PACE) -> float:
    return len(text) / pace + PAUSE_S


def reference_pace(transcript: str, seconds: float) -> float:
    """Characters a second of a reference clip, kept within what people do (8-22)."""
    return min(max(len(transcript) / seconds, 8.0), 22.0) if seconds > 0 else PACE


def check(
    *,
    utterance: str,
    heard: Sequence[str],
    wanted: Sequence[str],
    reference: Sequence[str],
    others: OtherTexts,
    errors: UtteranceErrors,
    spoken_text: str,
    audio_s: float,
    pace: float = PACE,
) -> Checks:
    """All checks of one clip; the words come from one normaliser, `spoken_text` is what is read out."""
    head, tail = missing_ends(errors)
    ratio = audio_s / expected_seconds(spoken_text, pace) if audio_s else None
    return Checks(
        reference_leak=reference_leak(heard, wanted, reference),
        other_leak=others.leaked(utterance, heard, wanted),
        repeated=repeated(heard, wanted),
        missing_tail=tail,
        missing_head=head,
        duration_ratio=ratio,
        wrong_length=ratio is not None and not RATIO_LIMITS[0] <= ratio <= RATIO_LIMITS[1],
    )
