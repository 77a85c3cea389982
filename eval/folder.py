"""A run folder on disk. Never overwritten; a run that was cut off goes on where it stopped.

run.json         settings and their hash, revision, versions, machine, targets, sessions with the client's lag
arrivals.jsonl   every planned request: cell, text, voice, seed, arrival
requests.jsonl   one row per request that ended (eval.records.RequestRow)
audio/*.flac     what was heard; sha256 of the samples in the row (a .pcm is one that is not encoded yet)
scores.jsonl     one row per scored clip
summary.json     figures; report.html shows them
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import soundfile

from eval.errors import RunFolderError
from eval.load import with_onset
from eval.plan import Planned
from eval.records import RequestRow, append_jsonl, read_jsonl, read_rows
from eval.settings import RunSettings

FORMAT = 1


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    # ---- life --------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: Path, settings: RunSettings, facts: dict) -> RunFolder:
        """A new folder with its run.json.

        Raises:
            RunFolderError: something is there already.
        """
        if path.exists() and any(path.iterdir()):
            raise RunFolderError(f"{path} is not empty; a run never overwrites one (--continue goes on)", field="out")
        (path / "audio").mkdir(parents=True, exist_ok=True)
        folder = cls(path)
        folder.write_facts(
            {
                "format": FORMAT,
                "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "settings": settings.to_dict(),
                "settings_hash": settings.hash,
                "state": "started",
                "sessions": [],
                "targets": {},
            }
            | facts
        )
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run folder.

        Raises:
            RunFolderError: not one, or of another format.
        """
        folder = cls(Path(path))
        if not (folder.path / "run.json").is_file():
            raise RunFolderError(f"{path} is no run folder (it has no run.json)", field="run")
        if folder.facts.get("format") != FORMAT:
            raise RunFolderError(f"{path} was written in another format ({folder.facts.get('format')})", field="run")
        return folder

    @property
    def facts(self) -> dict:
        try:
            return json.loads((self.path / "run.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise RunFolderError(f"{self.path}/run.json is damaged: {error}", field="run") from error

    def write_facts(self, facts: dict) -> None:
        self.write_json("run.json", facts)

    def update_facts(self, **changes) -> None:
        self.write_facts(self.facts | changes)

    @property
    def settings(self) -> RunSettings:
        return RunSettings.from_dict(self.facts["settings"])

    def write_json(self, name: str, data: dict) -> None:
        self.write_text(name, json.dumps(data, indent=1, ensure_ascii=False))

    def write_text(self, name: str, text: str) -> None:
        """Atomically: a reader sees the old file or the new one."""
        scratch = self.path / f".{name}.new"
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(self.path / name)

    def repair(self) -> None:
        """Drop a last line that a crash cut short, so that what follows begins a line of its own."""
        for name in ("arrivals.jsonl", "requests.jsonl", "scores.jsonl"):
            path = self.path / name
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
            if text and not text.endswith("\n"):
                self.write_text(name, text[: text.rfind("\n") + 1])

    # ---- rows --------------------------------------------------------------------------------------------------

    def write_arrivals(self, planned: Iterable[Planned], variant: str) -> None:
        append_jsonl(self.path / "arrivals.jsonl", ({"variant": variant} | asdict(p) for p in planned))

    def rows(self) -> list[RequestRow]:
        return read_rows(self.path / "requests.jsonl")

    def scores(self) -> list[dict]:
        return read_jsonl(self.path / "scores.jsonl")

    def add_score(self, score: dict) -> None:
        append_jsonl(self.path / "scores.jsonl", [score])

    def read_pcm(self, row: RequestRow) -> np.ndarray:
        """int16 [samples] of a row, whether encoded yet or not."""
        flac = self.path / row.audio
        raw = flac.with_suffix(".pcm")
        try:
            return np.fromfile(raw, np.int16) if raw.is_file() else soundfile.read(flac, dtype="int16")[0]
        except (OSError, soundfile.LibsndfileError) as error:
            raise RunFolderError(f"the audio of {row.id} is gone: {error}", field="audio") from error

    def finish_audio(self) -> None:
        """Encode what the timed part left as raw samples, and fill in onsets."""
        rows = self.rows()
        changed = False
        for i, row in enumerate(rows):
            if not row.audio or not (raw := (self.path / row.audio).with_suffix(".pcm")).is_file():
                continue
            pcm = np.fromfile(raw, np.int16)
            scratch = raw.with_suffix(".tmp")
            soundfile.write(scratch, pcm, row.sample_rate, format="FLAC", subtype="PCM_16")
            scratch.replace(self.path / row.audio)
            rows[i] = with_onset(row, pcm)
            changed = True
        if changed:
            self.write_text("requests.jsonl", "".join(row.to_json() + "\n" for row in rows))
            for row in rows:
                if row.audio:
                    (self.path / row.audio).with_suffix(".pcm").unlink(missing_ok=True)

    def drop_audio(self, keep: set[str]) -> None:
        """Remove clips whose request id is not in `keep`; their rows and hashes stay."""
        for row in self.rows():
            if row.audio and row.id not in keep:
                (self.path / row.audio).unlink(missing_ok=True)


class RowWriter:
    """Takes finished requests from the timed part and writes them in a thread of its own, samples before the row."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._items: queue.SimpleQueue[tuple[RequestRow, np.ndarray] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._write, name="row-writer", daemon=True)
        self._thread.start()

    def __call__(self, row: RequestRow, pcm: np.ndarray) -> None:
        self._items.put((row, pcm))

    def _write(self) -> None:
        try:
            with (self._folder.path / "requests.jsonl").open("a", encoding="utf-8") as out:
                while (item := self._items.get()) is not None:
                    row, pcm = item
                    if pcm.size:
                        name = f"audio/{row.id}.flac"
                        pcm.tofile((self._folder.path / name).with_suffix(".pcm"))
                        row = replace(row, audio=name, sha256=hashlib.sha256(pcm.tobytes()).hexdigest())
                    out.write(row.to_json() + "\n")
                    out.flush()
        except OSError as error:
            self._error = error

    def close(self) -> None:
        """Wait until everything is on disk.

        Raises:
            RunFolderError: the disk did not take it.
        """
        self._items.put(None)
        self._thread.join()
        if self._error is not None:
            raise RunFolderError(f"cannot write the run: {self._error}", field="out")
