"""A against B: differences with confidence intervals, and a verdict against stated tolerances.

Requests are paired by load setting and index: both runs speak the same text with the same voice and sampling seed
there, so the interval is of the paired difference (bootstrap over requests), which is far narrower than two
intervals side by side. A verdict is

    same      the interval lies within the tolerance
    better    the interval lies beyond the tolerance on the good side
    no worse  the interval ends within the tolerance on the bad side and reaches beyond it on the good one
    worse     the interval lies beyond the tolerance on the bad side
    unclear   none of these: too few requests, or too much noise
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from eval import metrics
from eval.errors import RunFolderError
from eval.folder import RunFolder
from eval.metrics import RESAMPLES
from eval.plan import Cell
from eval.records import RequestRow
from eval.summary import to_errors


@dataclass(frozen=True)
class Tolerances:
    """How much worse B may be. Error rates in points (0.02 = two of a hundred words), the others as shares of A."""

    wer_points: float = 0.02
    similarity: float = 0.02
    mos: float = 0.02
    latency: float = 0.10
    throughput: float = 0.10


@dataclass(frozen=True)
class Side:
    """One side of a comparison: the rows and scores of one variant of one run."""

    label: str
    rows: Sequence[RequestRow]
    scores: Sequence[dict]

    @classmethod
    def read(cls, spec: str) -> Side:
        """`FOLDER`, or `FOLDER:A` for one variant of an A/B run.

        Raises:
            RunFolderError: no such run or variant, or several variants and none named.
        """
        path, _, variant = spec.partition(":")
        folder = RunFolder.open(path)
        variants = list(folder.settings.variants)
        if not variant:
            if len(variants) > 1:
                raise RunFolderError(f"{path} has the variants {', '.join(variants)}: say {path}:A", field="run")
            variant = variants[0]
        elif variant not in variants:
            raise RunFolderError(f"{path} has no variant '{variant}'", field="run")
        return cls.of(folder, variant, label=spec)

    @classmethod
    def of(cls, folder: RunFolder, variant: str, label: str = "") -> Side:
        rows = [r for r in folder.rows() if r.variant == variant and not r.warmup]
        scores = [s for s in folder.scores() if s.get("variant", "") == variant]
        return cls(label or variant, rows, scores)


@dataclass(frozen=True)
class Finding:
    """One figure of one load setting. `change` is B - A (points) or B / A (ratio), with its 95 % interval."""

    cell: str
    name: str
    a: float
    b: float
    change: float
    interval: tuple[float, float] | None
    kind: str  # "difference" | "ratio"
    pairs: int
    verdict: str

    def to_dict(self) -> dict:
        return asdict(self)


def compare(a: Side, b: Side, tolerances: Tolerances | None = None) -> list[Finding]:
    """All figures that both sides have, for each load setting that both ran.

    Raises:
        RunFolderError: no load setting in common, or different texts under the same index.
    """
    tolerances = tolerances or Tolerances()
    cells = [c for c in dict.fromkeys(r.cell for r in a.rows) if any(r.cell == c for r in b.rows)]
    if not cells:
        raise RunFolderError(f"{a.label} and {b.label} have no load setting in common", field="run")
    findings = []
    for cell in cells:
        pairs = _paired(a, b, cell)
        findings += _quality(cell, pairs, a, b, tolerances)
        findings += _speed(cell, pairs, a, b, tolerances)
    return findings


def _paired(a: Side, b: Side, cell: str) -> list[tuple[RequestRow, RequestRow]]:
    theirs = {r.index: r for r in b.rows if r.cell == cell}
    pairs = [(r, theirs[r.index]) for r in a.rows if r.cell == cell and r.index in theirs]
    for x, y in pairs:
        if (x.text, x.voice) != (y.text, y.voice):
            raise RunFolderError(
                f"request {x.index} of {cell} is '{x.text[:40]}' ({x.voice}) in {a.label} and '{y.text[:40]}' "
                f"({y.voice}) in {b.label}: the runs need the same dataset, voices and seed",
                field="run",
            )
    return pairs


# ---- quality: differences of means -------------------------------------------------------------------------------


def _quality(
    cell: str, pairs: Sequence[tuple[RequestRow, RequestRow]], a: Side, b: Side, t: Tolerances
) -> list[Finding]:
    left, right = ({s["id"]: s for s in side.scores} for side in (a, b))
    both = [(left[x.id], right[y.id]) for x, y in pairs if x.id in left and y.id in right]
    found: list[Finding | None] = []
    for asr in _common([(x["wer"], y["wer"]) for x, y in both]):
        for normalizer in _common([(x["wer"].get(asr, {}), y["wer"].get(asr, {})) for x, y in both]):
            errors = [tuple(to_errors(s["wer"][asr][normalizer]) for s in pair) for pair in both]
            name = f"WER, {asr}, {normalizer}"
            rates = [(x.rate, y.rate) for x, y in errors]
            found.append(_difference(cell, f"{name}, macro", rates, t.wer_points, lower_is_better=True))
    for encoder in _common([(x["similarity"], y["similarity"]) for x, y in both]):
        values = [tuple(s["similarity"].get(encoder, {}).get("whole") for s in pair) for pair in both]
        found.append(_share_difference(cell, f"similarity, {encoder}", values, t.similarity))
    for model in _common([(x["mos"], y["mos"]) for x, y in both]):
        for name in _common([(x["mos"].get(model, {}), y["mos"].get(model, {})) for x, y in both]):
            values = [tuple(s["mos"].get(model, {}).get(name) for s in pair) for pair in both]
            found.append(_share_difference(cell, name, values, t.mos))
    return [f for f in found if f is not None]


def _common(both: Sequence[tuple[dict, dict]]) -> list[str]:
    """Keys that both of a pair have, in the order of their first appearance."""
    return list(dict.fromkeys(k for x, y in both for k in x if k in y))


def _share_difference(cell: str, name: str, values: Sequence[tuple[float | None, ...]], share: float) -> Finding | None:
    pairs = [(x, y) for x, y in values if x is not None and y is not None]
    if not pairs:
        return None
    limit = share * abs(float(np.mean([x for x, _ in pairs])))
    return _difference(cell, name, pairs, limit, lower_is_better=False)


def _difference(
    cell: str, name: str, pairs: Sequence[tuple[float, float]], limit: float, *, lower_is_better: bool
) -> Finding:
    values = np.array(pairs, dtype=np.float64)
    change = values[:, 1] - values[:, 0]
    interval = metrics.bootstrap_mean(list(change))
    bad = None if interval is None else (interval if lower_is_better else (-interval[1], -interval[0]))
    mean_a, mean_b = (float(v) for v in values.mean(axis=0))
    return Finding(
        cell, name, mean_a, mean_b, float(change.mean()), interval, "difference", len(values), verdict(bad, limit)
    )


def verdict(bad: tuple[float, float] | None, limit: float) -> str:
    """From the interval of a change counted so that more is worse (0: none), and how much is tolerated."""
    if bad is None:
        return "unclear"
    if bad[0] > limit:
        return "worse"
    if bad[1] < -limit:
        return "better"
    if bad[1] > limit:
        return "unclear"
    return "same" if bad[0] >= -limit else "no worse"


# ---- speed: ratios -----------------------------------------------------------------------------------------------


def _speed(cell: str, pairs: Sequence[tuple[RequestRow, RequestRow]], a: Side, b: Side, t: Tolerances) -> list[Finding]:
    good = [(x, y) for x, y in pairs if x.ok and y.ok]
    found: list[Finding | None] = []
    measures: tuple[tuple[str, Callable[[RequestRow], float | None]], ...] = (
        ("TTFA", metrics.ttfa_ms),
        ("audible TTFA", metrics.audible_ttfa_ms),
        ("E2E", lambda r: 1e3 * (r.finished - r.dispatched)),
    )
    for name, measure in measures:
        values = [(measure(x), measure(y)) for x, y in good]
        kept = np.array([(x, y) for x, y in values if x is not None and y is not None], dtype=np.float64)
        if not len(kept):
            continue
        for statistic, quantile in (("p50", 50), ("p95", 95)):
            found.append(_ratio(cell, f"{name} {statistic}, ms", kept, quantile, t.latency))
    found.append(_throughput(cell, a, b, t))
    return [f for f in found if f is not None]


def _ratio(cell: str, name: str, pairs: np.ndarray, quantile: float, tolerance: float) -> Finding:
    at_a, at_b = (float(v) for v in np.percentile(pairs, quantile, axis=0))
    interval = None
    if len(pairs) > 1:
        draws = np.random.default_rng(0).integers(0, len(pairs), (RESAMPLES, len(pairs)))
        both = np.percentile(pairs[draws], quantile, axis=1)  # [resamples, 2]
        low, high = np.percentile(both[:, 1] / np.maximum(both[:, 0], 1e-9), (2.5, 97.5))
        interval = (float(low), float(high))
    bad = None if interval is None else (interval[0] - 1, interval[1] - 1)
    ratio = at_b / at_a if at_a else 1.0
    return Finding(cell, name, at_a, at_b, ratio, interval, "ratio", len(pairs), verdict(bad, tolerance))


def _throughput(cell: str, a: Side, b: Side, t: Tolerances) -> Finding | None:
    """Audio seconds per second. Requests of a closed loop hang together, so the interval is over blocks of a run."""
    if Cell.parse(cell).kind == "open":
        return None  # the arrivals decide
    sides = [[r for r in side.rows if r.cell == cell] for side in (a, b)]
    at_a, at_b = (metrics.cell_metrics(rows).x_real_time for rows in sides)
    if not at_a:
        return None
    per_block = [
        [metrics.cell_metrics([r for r in rows if r.session == s]).x_real_time for s in {r.session for r in rows}]
        for rows in sides
    ]
    ratio = at_b / at_a
    interval = None
    if min(len(blocks) for blocks in per_block) > 1:
        interval = (min(per_block[1]) / max(per_block[0]), max(per_block[1]) / min(per_block[0]))
    bad = (1 - ratio, 1 - ratio) if interval is None else (1 - interval[1], 1 - interval[0])
    pairs = sum(len(blocks) for blocks in per_block)
    return Finding(cell, "× real time", at_a, at_b, ratio, interval, "ratio", pairs, verdict(bad, t.throughput))


# ---- text --------------------------------------------------------------------------------------------------------


def table(findings: Sequence[Finding]) -> str:
    """For a terminal."""
    lines = [f"{'load':<10} {'figure':<58} {'A':>9} {'B':>9} {'change':>9}  {'95 % interval':<19} {'n':>4}  verdict"]
    for f in findings:
        form = "{:.3f}" if f.kind == "ratio" else "{:+.4f}"
        spread = "–" if f.interval is None else " … ".join(form.format(v) for v in f.interval)
        change = ("×" if f.kind == "ratio" else "") + form.format(f.change)
        lines.append(
            f"{f.cell:<10} {f.name:<58} {f.a:>9.4g} {f.b:>9.4g} {change:>9}  {spread:<19} {f.pairs:>4}  {f.verdict}"
        )
    return "\n".join(lines)


def exit_code(findings: Sequence[Finding], *, strict: bool = False) -> int:
    """1 when something is worse (with `strict` also when something is unclear), else 0."""
    bad = {"worse", "unclear"} if strict else {"worse"}
    return int(any(f.verdict in bad for f in findings))
