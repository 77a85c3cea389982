"""Which requests a run makes, in which order and when: fixed by the settings and their seed before anything starts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eval.datasets import Utterance
from eval.errors import EvalError

WARM_VOICES = 16


@dataclass(frozen=True)
class Cell:
    """One load setting.

    Attributes:
        kind: "closed" keeps `level` requests running; "open" lets them arrive at `level` a second whatever the server
            does (`arrivals`: "poisson" or "constant"); "burst" sends `level` at once, waits, sends the next.
    """

    kind: str
    level: float
    arrivals: str = "poisson"

    @property
    def name(self) -> str:
        level = f"{self.level:g}"
        return {"closed": f"c{level}", "open": f"{self.arrivals}{level}", "burst": f"burst{level}"}[self.kind]

    @property
    def title(self) -> str:
        level = f"{self.level:g}"
        return {
            "closed": f"{level} at once",
            "open": f"{level} requests/s, {self.arrivals}",
            "burst": f"bursts of {level}",
        }[self.kind]

    @classmethod
    def parse(cls, text: str) -> Cell:
        """`c8`, `poisson2.5`, `constant4` or `burst16`.

        Raises:
            EvalError: anything else.
        """
        match = re.fullmatch(r"(c|poisson|constant|burst)(\d+(?:\.\d+)?)", text.strip().lower())
        if not match or float(match[2]) <= 0:
            raise EvalError(f"load '{text}': say c8, poisson2.5, constant4 or burst16", field="load")
        kind, level = match[1], float(match[2])
        if kind in ("c", "burst"):
            if level != int(level) or level > 512:
                raise EvalError(f"load '{text}': a whole number from 1 to 512 is needed", field="load")
            return cls("closed" if kind == "c" else "burst", int(level))
        return cls("open", level, arrivals=kind)


@dataclass(frozen=True)
class Planned:
    """One request of a cell. `at` is its arrival in seconds from the start of the cell (open loop), else 0."""

    id: str
    cell: str
    index: int
    utterance: Utterance
    seed: int
    at: float
    warmup: bool


def plan_cell(
    cell: Cell, utterances: Sequence[Utterance], *, requests: int, warmup: int, seed: int, variant: str = ""
) -> list[Planned]:
    """Warm-up requests, then `requests` measured ones. With any warm-up, each voice is met in it (`_warm_up`).

    The order of the texts is a shuffle by `seed`, the same in every cell, and an utterance gets the same sampling
    seed in every cell: what differs between two cells is the load. Texts repeat when there are fewer than `requests`.
    """
    order = np.random.default_rng(seed).permutation(len(utterances))
    times = _arrivals(cell, requests, seed)
    prefix = f"{variant}-{cell.name}" if variant else cell.name
    planned = []
    spoken = [utterances[i] for i in order]
    first = _warm_up(spoken, warmup)
    for i in range(-len(first), requests):
        warm = i < 0
        utterance = first[i] if warm else spoken[i % len(order)]
        planned.append(
            Planned(
                id=f"{prefix}-w{i + len(first):05d}" if warm else f"{prefix}-{i:05d}",
                cell=cell.name,
                index=i,
                utterance=utterance,
                seed=sampling_seed(seed + warm, utterance.id, i // len(order)),
                at=0.0 if warm else times[i],
                warmup=warm,
            )
        )
    return planned


def _warm_up(spoken: Sequence[Utterance], count: int) -> list[Utterance]:
    """`count` of the utterances, 0 for none; more if there are more voices, so that a server meets each of up to
    WARM_VOICES voices before it is measured: it prepares a voice once, and that stood in the first load setting's
    figures alone."""
    voices = {u.voice: u for u in reversed(spoken)}
    met = [u for u in spoken if voices[u.voice] is u] if count and len(voices) <= WARM_VOICES else []
    return met + [spoken[i % len(spoken)] for i in range(-count, -len(met))]


def sampling_seed(seed: int, utterance: str, repeat: int) -> int:
    """A 31-bit seed that depends on the run's seed, the utterance and its repetition, and on nothing else."""
    digest = hashlib.sha256(f"{seed}/{utterance}/{repeat}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def _arrivals(cell: Cell, requests: int, seed: int) -> list[float]:
    if cell.kind != "open":
        return [0.0] * requests
    if cell.arrivals == "constant":
        return [i / cell.level for i in range(requests)]
    gaps = np.random.default_rng((seed, 1)).exponential(1 / cell.level, requests)  # scaled, so rates share their shape
    return [float(t) for t in np.cumsum(gaps) - gaps[0]]
