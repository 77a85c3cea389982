"""From rows and scores to figures: one entry for each variant and load setting, and the footnotes they need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from eval import metrics, wer
from eval.folder import RunFolder
from eval.metrics import LAG_LIMIT_MS
from eval.plan import Cell
from eval.records import RequestRow

WORST = 10


def build(folder: RunFolder, judges: dict) -> dict[str, Any]:
    """The content of summary.json."""
    facts = folder.facts
    settings = folder.settings
    rows, scores = folder.rows(), folder.scores()
    figures = []
    for variant in settings.variants:
        for name in settings.cells:
            mine = [r for r in rows if r.variant == variant and r.cell == name]
            if mine:
                figures.append(cell_figures(mine, scores, facts["sessions"]))
    return {
        "title": settings.title or f"{facts['dataset']['name']}, {', '.join(settings.cells)}",
        "state": facts["state"],
        "created": facts["created"],
        "settings_hash": facts["settings_hash"],
        "git": facts["git"],
        "host": facts["host"],
        "versions": facts["versions"],
        "dataset": facts["dataset"],
        "targets": facts["targets"],
        "judges": judges,
        "figures": figures,
        "footnotes": footnotes(facts, figures, scored=bool(scores)),
    }


def cell_figures(rows: Sequence[RequestRow], scores: Sequence[dict], sessions: Sequence[dict] = ()) -> dict[str, Any]:
    """Everything about one variant and load setting. `scores` may hold those of other cells too."""
    rows = [r for r in rows if not r.warmup]
    ids = {r.id for r in rows}
    mine = [s for s in scores if s["id"] in ids]
    lags = [sessions[i]["client_lag"] for i in sorted({r.session for r in rows}) if _has_lag(sessions, i)]
    return {
        "variant": rows[0].variant if rows else "",
        "cell": rows[0].cell if rows else "",
        "title": Cell.parse(rows[0].cell).title if rows else "",
        "level": Cell.parse(rows[0].cell).level if rows else 0,
        "load": metrics.cell_metrics(rows).to_dict(),
        "client_lag_p95_ms": max((lag["p95_ms"] for lag in lags if "p95_ms" in lag), default=None),
        "client_spoilt": any(lag["spoilt"] for lag in lags),
        "wer": _wer(mine, asked=len(rows)),
        "similarity": _similarity(mine),
        "mos": _mos(mine),
        "checks": dict(Counter(flag for s in mine if s["checks"] for flag in s["checks"]["flags"])),
        "scored": len(mine),
    }


def _has_lag(sessions: Sequence[dict], i: int) -> bool:
    return i < len(sessions) and "client_lag" in sessions[i]


def to_errors(data: dict) -> wer.UtteranceErrors:
    """From a row of scores.jsonl."""
    names = ("rate", "hits", "substitutions", "deletions", "insertions", "reference_tokens")
    parts = tuple(wer.Difference(d["kind"], tuple(d["reference"]), tuple(d["hypothesis"])) for d in data["differences"])
    return wer.UtteranceErrors(**{name: data[name] for name in names}, differences=parts)


def _wer(scores: Sequence[dict], asked: int) -> dict[str, dict[str, dict]]:
    out: dict[str, dict[str, dict]] = {}
    for asr in sorted({name for s in scores for name in s["wer"]}):
        out[asr] = {}
        for normalizer in next(s["wer"][asr] for s in scores if asr in s["wer"]):
            found = [s["wer"][asr][normalizer] for s in scores if asr in s["wer"]]
            errors = [to_errors(e) for e in found]
            total = wer.summarize(
                errors, normalizer=normalizer, asked=asked, no_speech=sum(e["no_speech"] for e in found)
            )
            out[asr][normalizer] = total.to_dict() | {
                "macro_ci": metrics.bootstrap_mean([e.rate for e in errors]),
                "micro_ci": _micro_interval(errors),
            }
    return out


def _micro_interval(errors: Sequence[wer.UtteranceErrors], seed: int = 0) -> tuple[float, float] | None:
    """95 % bootstrap interval of the micro rate: utterances are drawn, not words."""
    if len(errors) < 2:
        return None
    wrong = np.array([e.errors for e in errors], dtype=np.float64)
    tokens = np.array([e.reference_tokens for e in errors], dtype=np.float64)
    order = np.lexsort((wrong, tokens))  # the same set gives the same interval, in whatever order it was spoken
    wrong, tokens = wrong[order], tokens[order]
    draws = np.random.default_rng(seed).integers(0, len(errors), (metrics.RESAMPLES, len(errors)))
    rates = wrong[draws].sum(1) / np.maximum(tokens[draws].sum(1), 1)
    low, high = np.percentile(rates, (2.5, 97.5))
    return float(low), float(high)


def _similarity(scores: Sequence[dict]) -> dict[str, dict]:
    out = {}
    for model in sorted({name for s in scores for name in s["similarity"]}):
        found = [(s["voice"], s["similarity"][model]) for s in scores if model in s["similarity"]]
        heard = [(voice, one) for voice, one in found if one["whole"] is not None]
        whole = [one["whole"] for _, one in heard]
        out[model] = {
            "scored": len(heard),
            "without_sound": len(found) - len(heard),
            "mean": float(np.mean(whole)) if whole else None,
            "mean_ci": metrics.bootstrap_mean(whole),
            "lowest": min(whole, default=None),
            "start_mean": float(np.mean([one["start"] for _, one in heard])) if heard else None,
            "nearest_is_own": _share(one["nearest"] == voice for voice, one in heard),
            "nearest_at_start_is_own": _share(one["nearest_start"] == voice for voice, one in heard),
            "margin_mean": _mean([one["margin"] for _, one in heard if one["margin"] is not None]),
        }
    return out


def _mos(scores: Sequence[dict]) -> dict[str, dict]:
    out = {}
    for model in sorted({name for s in scores for name in s["mos"]}):
        for name in sorted({key for s in scores for key in s["mos"].get(model, {})}):
            values = [s["mos"][model][name] for s in scores if name in s["mos"].get(model, {})]
            out[name] = {
                "model": model,
                "scored": len(values),
                "mean": float(np.mean(values)),
                "mean_ci": metrics.bootstrap_mean(values),
                "lowest": min(values),
            }
    return out


def _share(hits) -> float | None:
    hits = list(hits)
    return sum(hits) / len(hits) if hits else None


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


# ---- the worst clips ---------------------------------------------------------------------------------------------


def badness(score: dict) -> tuple[float, int, float]:
    """Sort key: the error rate under the forgiving normaliser, then failed checks, then the similarity lacking."""
    rates = [list(by_normalizer.values())[-1]["rate"] for by_normalizer in score["wer"].values()]
    flags = len(score["checks"]["flags"]) if score["checks"] else 0
    cosines = [one["whole"] for one in score["similarity"].values() if one["whole"] is not None]
    return max(rates, default=0.0), flags, -min(cosines, default=0.0)


def worst(folder: RunFolder, count: int = WORST) -> list[tuple[RequestRow, dict]]:
    """The `count` clips that a person should listen to first; the worst take of each text, voice and seed."""
    rows = {r.id: r for r in folder.rows()}
    chosen: list[tuple[RequestRow, dict]] = []
    seen: set[tuple] = set()
    for score in sorted(folder.scores(), key=badness, reverse=True):
        row = rows.get(score["id"])
        if row is None or len(chosen) == count:
            continue
        take = (row.variant, row.utterance, row.voice, row.seed)  # at another load it mostly sounds the same
        if take in seen:
            continue
        seen.add(take)
        chosen.append((row, score))
    return chosen


def worst_ids(folder: RunFolder) -> set[str]:
    flagged = {s["id"] for s in folder.scores() if s["checks"] and s["checks"]["flags"]}
    return flagged | {row.id for row, _ in worst(folder)}


# ---- footnotes ---------------------------------------------------------------------------------------------------


def footnotes(facts: dict, figures: Sequence[dict], *, scored: bool) -> list[str]:
    """What a reader must know before quoting a figure."""
    notes = [
        "TTFA: first PCM sample at the client minus dispatch; a header is not audio. Audible TTFA: arrival of the "
        "chunk with the first of two consecutive 20 ms windows above -45 dBFS.",
        "× real time: audio seconds per wall second, more is better. Underruns: playback simulated from chunk arrivals "
        "with no start buffer. Intervals: 95 % bootstrap over requests.",
        "Latencies are of requests that ended well; failures stand beside them and in the coverage of the scores.",
    ]
    if facts["host"]["cards"]:
        notes.append("Measured on " + ", ".join(card["name"] for card in facts["host"]["cards"]) + ".")
    else:
        notes.append(
            f"Measured on a CPU ({facts['host']['cpu']}, {facts['host']['cores']} cores): no figure of a GPU follows."
        )
    if any(t.get("weights") == "random" for t in facts["targets"].values()):
        notes.append("Random weights: times are real, the sound is noise, and scores of it mean nothing.")
    notes += dict.fromkeys(f"The model says: {t['notice']}" for t in facts["targets"].values() if t.get("notice"))
    if any(t.get("kind") == "engine" for t in facts["targets"].values()):
        notes.append("The engine ran on the machine of the client, which shares its cores.")
    if any(t.get("kind") == "http" and t.get("transport") == "audio" for t in facts["targets"].values()):
        notes.append(
            "The server sent bare audio, which does not tell whether a text was spoken to its end: a stream that was "
            "cut counts as complete here (the event transport tells; so do the checks)."
        )
    spoilt = [f["title"] for f in figures if f["client_spoilt"]]
    if spoilt:
        notes.append(
            f"The client itself ran late (95 % of its timers above {LAG_LIMIT_MS:g} ms) at {', '.join(spoilt)}: read "
            "latencies there as upper bounds."
        )
    short = [f["title"] for f in figures if f["load"]["ok"] < 100]
    if short:
        notes.append("Fewer than 100 requests: p99 is close to the maximum at " + ", ".join(dict.fromkeys(short)) + ".")
    if facts["state"] not in ("done", "started"):
        notes.append(f"The run is {facts['state']}: some requests or scores are missing (`--continue` goes on).")
    if facts["dataset"]["skipped"]:
        notes.append(f"{len(facts['dataset']['skipped'])} rows of the dataset could not be used: see run.json.")
    if facts["git"]["dirty"]:
        notes.append("The checkout had local changes.")
    if scored:
        notes += [
            "Error rates compare what a recogniser wrote with what was asked for: they hold the recogniser's own "
            "errors too (1-3 % on clean speech for the small ones). Rates of different recognisers, normalisers or "
            "averages do not compare. A silent clip counts as everything missing.",
            "Cosines of different speaker encoders do not compare; read them beside the different-speaker level.",
            "Predicted opinion scores are models' guesses, not listeners.",
        ]
    return notes
