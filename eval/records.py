"""One row per request: what was asked, when things happened, how it ended. Written as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

# How a request can end, from the listener's side. Only "ok" counts into latencies and scores.
STATUSES = (
    "ok",
    "unfinished",  # audio, but the server said it is cut: a frame cap, a loop, endless silence
    "no_audio",  # a polite answer without a sample
    "refused",  # the request itself was not accepted (HTTP 4xx)
    "busy",  # the server is full (HTTP 503, 429)
    "deadline",  # not complete within the request's deadline
    "server_error",  # HTTP 5xx, or an error inside the stream
    "connection",  # no connection, or it broke
)


@dataclass(frozen=True)
class RequestRow:
    """Times are seconds since the start of the session (one sitting of the run); None where it did not happen.

    Attributes:
        id: unique in the run, and the same again when a run is continued.
        cell: which load setting; `index` counts inside it; `warmup` rows are in no figure.
        variant: which setting of an A/B run; "" where there is one.
        session: one stretch of measuring; a continued or interleaved run has several.
        scheduled: when it should have left (open loop); `dispatched` when it did.
        first_byte: first body byte, a header included; `chunk_times` and `chunk_samples`: arrival of PCM.
        onset: first audible sample (`eval.pcm.audible_onset`).
        audio: file in the run folder; `sha256` of its PCM16 samples.
    """

    id: str
    cell: str
    index: int
    session: int
    utterance: str
    text: str
    voice: str
    seed: int | None
    scheduled: float
    dispatched: float
    finished: float
    status: str
    variant: str = ""
    warmup: bool = False
    language: str = "english"
    first_byte: float | None = None
    chunk_times: tuple[float, ...] = ()
    chunk_samples: tuple[int, ...] = ()
    sample_rate: int = 24_000
    onset: int | None = None
    detail: str = ""
    finish_reason: str = ""
    spoken_text: str = ""
    audio: str = ""
    sha256: str = ""
    extra: dict = field(default_factory=dict)

    @property
    def samples(self) -> int:
        return sum(self.chunk_samples)

    @property
    def audio_s(self) -> float:
        return self.samples / self.sample_rate

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def to_json(self) -> str:
        data = asdict(self)
        data["chunk_times"] = [round(t, 6) for t in self.chunk_times]
        return json.dumps(data, ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> RequestRow:
        data = json.loads(line)
        known = {f.name for f in fields(cls)}
        data = {k: v for k, v in data.items() if k in known}
        data["chunk_times"] = tuple(data.get("chunk_times", ()))
        data["chunk_samples"] = tuple(data.get("chunk_samples", ()))
        return cls(**data)


def read_jsonl(path: Path) -> list[dict]:
    """All complete lines; a last line cut by a crash is left out."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def read_rows(path: Path) -> list[RequestRow]:
    return [RequestRow.from_json(json.dumps(data)) for data in read_jsonl(path)]


def append_jsonl(path: Path, rows: Iterable[dict]) -> None:
    with path.open("a", encoding="utf-8") as out:
        for row in rows:
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
