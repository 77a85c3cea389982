"""Word error rates: per utterance and over a set, under two normalisers at once.

Two averages are in use and they answer different questions: the *macro* mean of per-utterance rates
(seed-tts-eval), which one runaway of 160 s can ruin, and the *micro* rate (errors of the whole set over its words),
which long texts dominate. So a set is reported as all / filtered (utterances <= 50 %) / count above 50 %, with its
coverage: utterances that failed or could not be scored are counted, never silently dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from eval.normalize import Normalizer

OUTLIER = 0.5  # utterances above it are left out of the filtered average (seed-tts-eval's threshold)


@dataclass(frozen=True)
class Difference:
    """One stretch of an alignment: `kind` is equal | substitute | delete | insert."""

    kind: str
    reference: tuple[str, ...]
    hypothesis: tuple[str, ...]


@dataclass(frozen=True)
class UtteranceErrors:
    """Errors of one utterance. `rate` is errors / reference tokens and may exceed 1."""

    rate: float
    hits: int
    substitutions: int
    deletions: int
    insertions: int
    reference_tokens: int
    differences: tuple[Difference, ...] = ()

    @property
    def errors(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    def to_dict(self) -> dict:
        return asdict(self)


def score(reference: str, hypothesis: str, normalizer: Normalizer, *, no_speech: bool = False) -> UtteranceErrors:
    """Compare what was asked for with what was heard.

    `no_speech` (or a hypothesis without tokens) counts as every token deleted: rate 1, whatever the recogniser made
    up. An empty reference is 0 when nothing was said, else 1 (a finite rule, as there is no rate without tokens).
    """
    wanted = normalizer.tokens(reference)
    heard = [] if no_speech else normalizer.tokens(hypothesis)
    if not wanted or not heard:
        kind = "insert" if not wanted else "delete"
        parts: tuple[Difference, ...] = (Difference(kind, tuple(wanted), tuple(heard)),) if wanted or heard else ()
        return UtteranceErrors(float(bool(parts)), 0, 0, len(wanted), len(heard), len(wanted), parts)
    import jiwer  # only here: speed is measured where it need not be installed

    split = jiwer.Compose([jiwer.ReduceToListOfListOfWords()])  # tokens are final; jiwer shall not clean them again
    out = jiwer.process_words(
        [" ".join(wanted)],
        [" ".join(heard)],
        reference_transform=split,
        hypothesis_transform=split,
    )
    parts = tuple(
        Difference(
            a.type,
            tuple(wanted[a.ref_start_idx : a.ref_end_idx]),
            tuple(heard[a.hyp_start_idx : a.hyp_end_idx]),
        )
        for a in out.alignments[0]
    )
    return UtteranceErrors(
        out.wer, out.hits, out.substitutions, out.deletions, out.insertions, len(wanted), differences=parts
    )


@dataclass(frozen=True)
class SetErrors:
    """A set under one normaliser. Rates are fractions; None where nothing could be scored.

    Attributes:
        asked: utterances that should have been spoken; `scored` of them had audio and a transcript.
        macro, micro: over all scored ones.
        macro_filtered, micro_filtered: over those with rate <= 0.5.
        above_half: how many have rate > 0.5; `no_speech` of the scored were silent.
        insertions, deletions, substitutions: per reference token, of all scored ones.
    """

    normalizer: str
    asked: int
    scored: int
    macro: float | None
    micro: float | None
    macro_filtered: float | None
    micro_filtered: float | None
    above_half: int
    no_speech: int
    insertions: float | None
    deletions: float | None
    substitutions: float | None

    @property
    def coverage(self) -> float:
        return self.scored / self.asked if self.asked else 0.0

    def to_dict(self) -> dict:
        return asdict(self) | {"coverage": self.coverage}


def summarize(
    utterances: Sequence[UtteranceErrors], *, normalizer: str, asked: int | None = None, no_speech: int = 0
) -> SetErrors:
    """Averages over the scored utterances of a set in which `asked` were asked for (default: all were scored)."""
    kept = [u for u in utterances if u.rate <= OUTLIER]
    tokens = sum(u.reference_tokens for u in utterances)

    def share(kind: str) -> float | None:
        return sum(getattr(u, kind) for u in utterances) / tokens if tokens else None

    return SetErrors(
        normalizer=normalizer,
        asked=len(utterances) if asked is None else asked,
        scored=len(utterances),
        macro=_macro(utterances),
        micro=_micro(utterances),
        macro_filtered=_macro(kept),
        micro_filtered=_micro(kept),
        above_half=len(utterances) - len(kept),
        no_speech=no_speech,
        insertions=share("insertions"),
        deletions=share("deletions"),
        substitutions=share("substitutions"),
    )


def _macro(utterances: Sequence[UtteranceErrors]) -> float | None:
    return sum(u.rate for u in utterances) / len(utterances) if utterances else None


def _micro(utterances: Sequence[UtteranceErrors]) -> float | None:
    tokens = sum(u.reference_tokens for u in utterances)
    return sum(u.errors for u in utterances) / tokens if tokens else None
