"""Carry out a run: load, then scores, then figures. Every stage goes on where an earlier sitting stopped."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from eval import datasets, load, provenance, report, summary
from eval.datasets import Dataset
from eval.folder import RowWriter, RunFolder
from eval.plan import Cell, Planned, plan_cell
from eval.records import RequestRow
from eval.scoring import SCORED, Scorer, score_rows
from eval.settings import RunSettings, TargetSpec
from eval.targets import Target


@dataclass(frozen=True)
class Progress:
    """Where a run is. `left_s` is an estimate from the pace so far, None at the start of a stage."""

    stage: str  # "prepare" | "load" | "score" | "report" | "done" | "stopped"
    detail: str
    done: int
    total: int
    left_s: float | None = None


OnProgress = Callable[[Progress], None]
OpenTarget = Callable[[TargetSpec], Target]


class Run:
    """One run in one folder. `execute` may be called from any thread; `stop` from another.

    Args:
        folder: from `RunFolder.create` or `RunFolder.open`.
        on_progress: called often, from the thread of `execute`; must be quick.
        open_target: how a `TargetSpec` becomes a target; the web page hands over its running engine here.
        on_row: sees each finished request (live charts).
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        on_progress: OnProgress = lambda progress: None,
        open_target: OpenTarget = TargetSpec.open,
        on_row: Callable[[RequestRow], None] = lambda row: None,
    ) -> None:
        self.folder = folder
        self.settings: RunSettings = folder.settings
        self._report = on_progress
        self._open_target = open_target
        self._on_row = on_row
        self._stop = threading.Event()

    @classmethod
    def new(cls, path: str | Path, settings: RunSettings, **callbacks) -> Run:
        """Check the settings against the dataset, make the folder and write down the plan.

        Raises:
            EvalError: a dataset or voice that is not there; a folder that is not empty.
        """
        for spec in settings.variants.values():
            spec.check()
        dataset = _dataset(settings)
        facts = {
            "git": provenance.git(),
            "versions": provenance.versions(),
            "host": provenance.host(),
            "dataset": {
                "name": dataset.name,
                "language": dataset.language,
                "utterances": len(dataset.utterances),
                "skipped": list(dataset.skipped),
            },
        }
        folder = RunFolder.create(Path(path), settings, facts)
        for variant in settings.variants:
            for cell in settings.cells:
                folder.write_arrivals(_plan(settings, dataset, cell, variant), variant)
        return cls(folder, **callbacks)

    def stop(self) -> None:
        """End after the requests that are running; `execute` on the same folder goes on later."""
        self._stop.set()

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    def execute(self) -> dict:
        """Measure, score, report; returns the summary. Stages that are complete cost next to nothing."""
        self.folder.repair()
        dataset = _dataset(self.settings)
        try:
            asyncio.run(self._measure(dataset))
            self.folder.finish_audio()
            figures = self._score(dataset)
        except BaseException:
            self.folder.finish_audio()
            self.folder.update_facts(state="broken off")
            raise
        self._report(Progress("report", "", 0, 1))
        state = "stopped" if self.stopped else "done"
        self.folder.update_facts(state=state)
        result = summary.build(self.folder, figures)
        self.folder.write_json("summary.json", result)
        self.folder.write_text("report.html", report.render(self.folder, result))
        if not self.stopped and self.settings.keep_audio != "all":
            keep = summary.worst_ids(self.folder) if self.settings.keep_audio == "worst" else set()
            self.folder.drop_audio(keep)
        self._report(Progress(state, str(self.folder.path), 1, 1))
        return result

    # ---- the timed part ----------------------------------------------------------------------------------------

    async def _measure(self, dataset: Dataset) -> None:
        have = {row.id for row in self.folder.rows() if not row.warmup}
        blocks = []
        for variant, part in _turns(list(self.settings.variants)):
            for name in self.settings.cells:
                planned = _share(_plan(self.settings, dataset, name, variant), part)
                if any(p.id not in have for p in planned if not p.warmup):
                    blocks.append((variant, Cell.parse(name), [p for p in planned if p.warmup or p.id not in have]))
        total = sum(not p.warmup for _, _, planned in blocks for p in planned) + len(have)
        opened: tuple[str, Target] | None = None
        done = len(have)
        spent = 0.0  # in blocks, without the starting of engines
        try:
            for variant, cell, planned in blocks:
                if self.stopped:
                    break
                if opened is None or opened[0] != variant:
                    if opened is not None:
                        await opened[1].close()  # the next engine needs its memory
                    opened = (variant, await self._start(variant, dataset))
                before, began = done, time.monotonic()
                title = f"{cell.title} {variant}".strip()

                def progress(count: int, before=before, began=began, title=title, spent=spent) -> None:
                    fresh = before + count - len(have)
                    pace = (spent + time.monotonic() - began) / fresh if fresh else None
                    left = None if pace is None else pace * (total - before - count)
                    self._report(Progress("load", title, before + count, total, left))

                done += await self._block(opened[1], variant, cell, planned, dataset, progress)
                spent += time.monotonic() - began
        finally:
            if opened is not None:
                await opened[1].close()

    async def _start(self, variant: str, dataset: Dataset) -> Target:
        spec = self.settings.variants[variant]
        self._report(Progress("prepare", f"starting {spec.label or spec.kind} {variant}".strip(), 0, 1))
        target = self._open_target(spec)
        try:
            used = {u.voice for u in dataset.utterances}
            await target.prepare({name: r for name, r in dataset.references.items() if name in used})
        except BaseException:
            await target.close()
            raise
        facts = self.folder.facts
        self.folder.update_facts(targets=facts["targets"] | {variant: target.describe() | {"label": spec.label}})
        return target

    async def _block(
        self,
        target: Target,
        variant: str,
        cell: Cell,
        planned: list[Planned],
        dataset: Dataset,
        progress: Callable[[int], None],
    ) -> int:
        sessions = self.folder.facts["sessions"]
        settings = load.LoadSettings(
            language=dataset.language,
            deadline_s=self.settings.deadline_s,
            frames=self.settings.frames,
            session=len(sessions),
            variant=variant,
        )
        self.folder.update_facts(
            sessions=[*sessions, {"variant": variant, "cell": cell.name, "began": time.strftime("%Y-%m-%dT%H:%M:%S%z")}]
        )
        writer = RowWriter(self.folder)
        count = 0

        def finished(row: RequestRow, pcm) -> None:
            nonlocal count
            count += not row.warmup
            writer(row, pcm)
            self._on_row(row)
            progress(count)

        progress(0)
        try:
            lag = await load.run_cell(
                target,
                cell,
                planned,
                settings,
                started=time.monotonic(),
                on_row=finished,
                stop=self._stop.is_set,
            )
        finally:
            writer.close()
        sessions = self.folder.facts["sessions"]
        sessions[settings.session]["client_lag"] = lag.to_dict()
        self.folder.update_facts(sessions=sessions)
        return count

    # ---- after it ----------------------------------------------------------------------------------------------

    def _score(self, dataset: Dataset) -> dict:
        """Score what has no score yet; returns the judges' names and levels (kept in run.json)."""
        settings = self.settings.score
        if settings is None or not settings.any:
            return {}
        if not all(clones(target) for target in self.folder.facts["targets"].values()):
            settings = replace(settings, speakers=())  # preset and designed voices have no reference to be like
        have = {score["id"] for score in self.folder.scores()}
        rows = [r for r in self.folder.rows() if not r.warmup and r.audio and r.status in SCORED]
        left = [r for r in rows if r.id not in have]
        if not left or self.stopped:
            return self.folder.facts.get("judges", {})
        self._report(Progress("prepare", "loading the judges", 0, 1))
        scorer = Scorer(settings, dataset.references, dataset.utterances, dataset.language)
        judges = {"models": scorer.models(), "levels": scorer.levels()}
        self.folder.update_facts(judges=judges)
        began, count = time.monotonic(), 0

        def scored(score: dict) -> None:
            nonlocal count
            count += 1
            self.folder.add_score(score)
            left_s = (time.monotonic() - began) / count * (len(left) - count)
            self._report(Progress("score", score["utterance"], len(rows) - len(left) + count, len(rows), left_s))

        score_rows(scorer, left, self.folder.read_pcm, scored, self._stop.is_set)
        return judges


def rerender(folder: RunFolder, out: Path | None = None, clips: int = summary.WORST) -> dict:
    """Figures and page again from what is on disk, to the run's folder or to `out`; needs no server and no model."""
    folder.finish_audio()
    result = summary.build(folder, folder.facts.get("judges", {}))
    target = folder
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        target = RunFolder(out)
    target.write_json("summary.json", result)
    target.write_text("report.html", report.render(folder, result, clips))
    return result


def clones(target: dict) -> bool:
    """Whether a target (as it describes itself) speaks in the voice of a reference clip."""
    return target.get("task", "Base") == "Base" and target.get("voices") != "none"


def _dataset(settings: RunSettings) -> Dataset:
    return datasets.load(settings.dataset, voices=settings.voices, limit=settings.limit, language=settings.language)


def _plan(settings: RunSettings, dataset: Dataset, cell: str, variant: str) -> list[Planned]:
    return plan_cell(
        Cell.parse(cell),
        dataset.utterances,
        requests=settings.requests or len(dataset.utterances),
        warmup=settings.warmup,
        seed=settings.seed,
        variant=variant,
    )


def _turns(variants: list[str]) -> list[tuple[str, tuple[int, int]]]:
    """(variant, (part, parts)) in the order of measuring: A B B A, so that a drift of the machine hits both alike."""
    if len(variants) == 1:
        return [(variants[0], (0, 1))]
    forth = [(v, (0, 2)) for v in variants]
    back = [(v, (1, 2)) for v in reversed(variants)]
    return forth + back


def _share(planned: list[Planned], part: tuple[int, int]) -> list[Planned]:
    """The warm-up and the part's measured requests, in order."""
    index, parts = part
    warm = [p for p in planned if p.warmup]
    measured = [p for p in planned if not p.warmup]
    size = -(-len(measured) // parts)
    return warm + measured[index * size : (index + 1) * size]
