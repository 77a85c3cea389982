"""The judge behind the page: one run at a time, in a thread of the server, so that closing a tab ends nothing."""

from __future__ import annotations

import logging
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config import ROOT, EngineConfig
from engine.errors import ChorusError, EngineFailed
from eval import compare
from eval.errors import EvalError, RunFolderError
from eval.folder import RunFolder
from eval.records import RequestRow
from eval.runs import Progress, Run
from eval.settings import RunSettings, TargetSpec
from eval.targets import EngineTarget, Target
from ui import profiles
from ui.handle import EngineHandle

log = logging.getLogger("chorus.page")
RESTART_S = 900.0


@dataclass
class Job:
    """A run that was started here. `rows` and `scores` grow while it goes on; `error` is set when it broke."""

    name: str
    kind: str  # "load" | "quality"
    run: Run
    progress: Progress = field(default_factory=lambda: Progress("prepare", "", 0, 1))
    rows: list[RequestRow] = field(default_factory=list)
    error: str = ""
    running: bool = True
    began: float = field(default_factory=time.monotonic)


class RunManager:
    """Starts runs on the page's own engine and finds those made before."""

    def __init__(self, handle: EngineHandle, folder: Path | None = None) -> None:
        self.handle = handle
        self.folder = folder or ROOT / "runs"
        self.job: Job | None = None
        self._lock = threading.Lock()

    # ---- one run -----------------------------------------------------------------------------------------------

    def start(self, kind: str, settings: RunSettings) -> Job:
        """Begin a run in the background.

        Raises:
            EvalError: another is running, or the settings cannot be carried out.
            EngineClosed: the engine is not ready.
            ConfigError: a variant's setting that the engine does not know.
        """
        with self._lock:
            if self.job is not None and self.job.running:
                raise EvalError("A run is going on already; stop it, or wait for its end.", field="run")
            _ = self.handle.engine  # raises when there is none
            base = self.handle.config  # of now: the turns of an A/B run change what is in force
            for spec in settings.variants.values():
                _config(spec, base)
            name = f"{time.strftime('%Y%m%d-%H%M%S')}-{kind}"
            job: Job
            run = Run.new(
                self.folder / name,
                settings,
                on_progress=lambda progress: setattr(job, "progress", progress),
                on_row=lambda row: job.rows.append(row),  # noqa: PLW0108 - the job is made below
                open_target=lambda spec: self._open(_config(spec, base)),
            )
            job = self.job = Job(name, kind, run)
        threading.Thread(target=self._work, args=(job,), name="judge", daemon=True).start()
        return job

    def stop(self) -> None:
        """End the run after the requests that are in flight; what was measured is kept."""
        if self.job is not None:
            self.job.run.stop()

    def _work(self, job: Job) -> None:
        before = self.handle.config
        try:
            job.run.execute()
            variants = list(job.run.settings.variants)
            if len(variants) == 2 and not job.run.stopped:
                a, b = (compare.Side.of(job.run.folder, v) for v in variants)
                findings = [f.to_dict() for f in compare.compare(a, b)]
                job.run.folder.write_json("compare.json", {"findings": findings})
        except Exception as error:
            if not isinstance(error, ChorusError):
                log.exception("the run broke off")
            job.error = error.message if isinstance(error, ChorusError) else f"{type(error).__name__}: {error}"
        finally:
            try:
                self._restart(before)
            except ChorusError as error:
                job.error = job.error or error.message
            job.running = False

    # ---- the engine --------------------------------------------------------------------------------------------

    def _open(self, config: EngineConfig) -> Target:
        self._restart(config)
        return EngineTarget(self.handle.engine)

    def _restart(self, config: EngineConfig) -> None:
        if config.hash == self.handle.config.hash and self.handle.status.state == "ready":
            return
        fault = self.handle.restart(config, wait_s=RESTART_S)
        if fault is not None:
            raise EngineFailed(f"The engine did not start with these settings: {fault}")
        limit = time.monotonic() + RESTART_S
        while self.handle.status.state != "ready":
            if self.handle.status.state == "failed" or time.monotonic() > limit:
                raise EngineFailed(f"The engine did not start with these settings: {self.handle.status.detail}")
            time.sleep(0.1)

    # ---- runs on disk ------------------------------------------------------------------------------------------

    def earlier(self) -> list[str]:
        """Names of the runs that are on disk, newest first."""
        if not self.folder.is_dir():
            return []
        found = [p for p in self.folder.iterdir() if (p / "run.json").is_file()]
        return [p.name for p in sorted(found, key=lambda p: p.name, reverse=True)]

    def open(self, name: str) -> RunFolder:
        """A run by its name, which is a name and never a path.

        Raises:
            RunFolderError: there is none.
        """
        if not re.fullmatch(r"[\w][\w.\-]*", name or ""):
            raise RunFolderError(f"no run '{name}'", field="run")
        return RunFolder.open(self.folder / name)

    def compare(self, a: str, b: str) -> list[compare.Finding]:
        """Two runs, or the two variants of one (`a` == `b`)."""
        left, right = self.open(a), self.open(b)
        variants = [list(f.settings.variants) for f in (left, right)]
        if a == b and len(variants[0]) == 2:
            one, other = (compare.Side.of(left, v) for v in variants[0])
            return compare.compare(one, other)
        if len(variants[0]) > 1 or len(variants[1]) > 1:
            raise RunFolderError("an A/B run is compared with itself: choose it on both sides", field="run")
        return compare.compare(compare.Side.of(left, "", label=a), compare.Side.of(right, "", label=b))

    def describe(self) -> dict[str, Any]:
        """The running or last run in plain values, for tests and other programs."""
        job = self.job
        if job is None:
            return {"name": None, "running": False}
        return {
            "name": job.name,
            "kind": job.kind,
            "running": job.running,
            "stage": job.progress.stage,
            "done": job.progress.done,
            "total": job.progress.total,
            "error": job.error,
        }


def _config(spec: TargetSpec, base: EngineConfig) -> EngineConfig:
    """Settings of a side: a profile on this model and machine, or the settings in force; overrides on top."""
    if spec.config:
        base = profiles.under(spec.config, base)
    return base.replace(**spec.overrides)
