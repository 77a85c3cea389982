"""The Load tab: many voices at once, on this engine as it runs or with one setting against another."""

from __future__ import annotations

import html
from typing import Any

import gradio as gr
import yaml

from engine.config import ROOT
from engine.errors import ChorusError
from eval import live
from eval.datasets import bundled_voices
from eval.errors import EvalError
from eval.settings import RunSettings, TargetSpec, read_experiment
from ui import profiles
from ui.engine_tab import KEEP, MODES
from ui.handle import EngineHandle
from ui.run_manager import Job, RunManager

SAME = "as it is"
CODECS = [
    (SAME, SAME),
    ("stateful", "stateful"),
    ("windowed, 25 frames of context", "25"),
    ("windowed, 72 frames of context", "72"),
]
KINDS = [
    ("at once (closed loop)", "c"),
    ("a second, Poisson arrivals", "poisson"),
    ("in one burst, then the next", "burst"),
]
OWN = "(own choice below)"
MAX_LEVEL = 64


class LoadTab:
    """`live` components are filled by `tick()`, as in the Engine tab."""

    def __init__(self, handle: EngineHandle, runs: RunManager) -> None:
        self.handle, self.runs = handle, runs
        self._drawn: tuple[Any, ...] = ()
        with gr.Row(equal_height=False):
            with gr.Column(min_width=320, scale=2):
                with gr.Row():
                    self.level = gr.Slider(
                        1, MAX_LEVEL, value=4, step=1, label="How many requests", elem_id="load-level"
                    )
                    self.kind = gr.Dropdown(KINDS, value="c", label="… how", elem_id="load-kind")
                self.sweep = gr.Checkbox(label="Sweep: 1, 2, 4, … up to it", elem_id="load-sweep")
                with gr.Row():
                    self.requests = gr.Number(16, label="Requests of each load", precision=0, minimum=1, maximum=2000,
                                              elem_id="load-requests")  # fmt: skip
                    self.seed = gr.Number(0, label="Seed", precision=0, minimum=0, elem_id="load-seed")
                names = list(bundled_voices())
                self.voices = gr.Dropdown(names, value=names, multiselect=True, label="Voices, in turn",
                                          elem_id="load-voices")  # fmt: skip
                self.profile = gr.Dropdown(
                    [KEEP, *profiles.names()], value=KEEP, label="Profile", elem_id="load-profile"
                )
                with gr.Row():
                    self.mode = gr.Dropdown([(SAME, SAME), *MODES], value=SAME, label="Scheduler mode",
                                            elem_id="load-mode")  # fmt: skip
                    self.codec = gr.Dropdown(CODECS, value=SAME, label="Codec mode", elem_id="load-codec")
                with gr.Accordion("A against B", open=False, elem_id="load-ab"):
                    gr.Markdown(
                        "Both sides speak the same texts with the same seeds, in turns A, B, B, A. The engine is "
                        "restarted between turns and comes back with its own settings in the end."
                    )
                    self.against = gr.Checkbox(label="Run A against B", elem_id="load-against")
                    self.experiment = gr.Dropdown([OWN, *experiments()], value=OWN, label="Experiment",
                                                  elem_id="load-experiment")  # fmt: skip
                    self.other = gr.Textbox(
                        label="B: what differs from the settings above",
                        placeholder="talker.scheduler_mode: sync",
                        info="Settings of engine/config.py, one a line; A is the engine with the settings above.",
                        lines=2,
                        elem_id="load-other",
                    )
                with gr.Row():
                    go = gr.Button("Run", variant="primary", elem_id="load-run")
                    stop = gr.Button("Stop", variant="stop", elem_id="load-stop")
                self.note = gr.Markdown(elem_id="load-note")
            with gr.Column(min_width=320, scale=3):
                self.state = gr.HTML(elem_id="load-state")
                self.charts = gr.HTML(elem_id="load-charts")
                self.table = gr.Dataframe(headers=live.TABLE_HEAD, interactive=False, label="So far",
                                          elem_id="load-table", wrap=True)  # fmt: skip
        given = [self.level, self.kind, self.sweep, self.requests, self.seed, self.voices, self.profile, self.mode]
        go.click(self._run, [*given, self.codec, self.against, self.experiment, self.other], self.note)
        stop.click(self._stop, None, self.note)

    @property
    def live(self) -> list[gr.components.Component]:
        return [self.state, self.charts, self.table]

    def tick(self) -> list[Any]:
        job = self.runs.job
        if job is None or job.kind != "load":
            return [_hint(), "", []]
        rows = list(job.rows)
        return [state_html(job), f'<div class="ch-charts">{live.charts(rows)}</div>', live.table(rows)]

    # ---- starting ------------------------------------------------------------------------------------------------

    def _run(self, level, kind, sweep, requests, seed, voices, profile, mode, codec, against, experiment, other) -> str:
        try:
            chosen = TargetSpec("given", "" if profile == KEEP else profile, overrides(mode, codec), label="A")
            variants, title = {"": chosen}, ""
            if against:
                variants, title = self._sides(chosen, experiment, other)
            settings = RunSettings(
                dataset="english",
                voices=tuple(voices),
                variants=variants,
                cells=levels(kind, int(level), sweep),
                requests=int(requests),
                warmup=min(2, int(level)),
                seed=int(seed),
                title=title or "Load",
            )
            self.runs.start("load", settings)
        except (ChorusError, TypeError) as error:
            return f"⚠ {error}"
        return "Started. It goes on when this page is closed."

    def _sides(self, chosen: TargetSpec, experiment: str, other: str) -> tuple[dict[str, TargetSpec], str]:
        if experiment != OWN:
            sides, title = read_experiment(ROOT / "configs" / "experiments" / experiment)
            return {
                name: TargetSpec("given", chosen.config, chosen.overrides | side.overrides, label=side.label)
                for name, side in sides.items()
            }, title
        try:
            differs = yaml.safe_load(other)
        except yaml.YAMLError as error:
            raise EvalError(f"B is not readable: {error}", field="b") from error
        if not isinstance(differs, dict) or not differs:
            raise EvalError("say what B changes, e.g. `talker.scheduler_mode: sync`", field="b")
        label = ", ".join(f"{key}={value}" for key, value in differs.items())
        changed = TargetSpec("given", chosen.config, chosen.overrides | differs, label=label)
        return {"A": chosen, "B": changed}, f"Settings above against {label}"

    def _stop(self) -> str:
        self.runs.stop()
        return "Stopping after the requests that are running."


def levels(kind: str, top: int, sweep: bool) -> tuple[str, ...]:
    """Load settings for `eval.plan.Cell`: the level alone, or powers of two up to it."""
    if not sweep:
        return (f"{kind}{top}",)
    powers = [2**i for i in range(10) if 2**i < top]
    return tuple(f"{kind}{level}" for level in (*powers, top))


def overrides(mode: str, codec: str) -> dict[str, Any]:
    """Dotted engine settings of the two drop-downs."""
    out: dict[str, Any] = {}
    if mode != SAME:
        out["talker.scheduler_mode"] = mode
    if codec == "stateful":
        out["codec.mode"] = "stateful"
    elif codec != SAME:
        out |= {"codec.mode": "windowed", "codec.left_context": int(codec)}
    return out


def experiments() -> list[str]:
    return [path.name for path in sorted((ROOT / "configs" / "experiments").glob("*.yaml"))]


def state_html(job: Job) -> str:
    """What the run does now, how long it may take, and where its report is."""
    p = job.progress
    if job.error:
        head = f"⚠ Broke off: {job.error} What was measured is kept."
    elif job.running:
        left = "" if p.left_s is None else f", about {_duration(p.left_s)} left"
        words = {"prepare": "Preparing", "load": "Measuring", "score": "Scoring", "report": "Writing the report"}
        head = f"{words.get(p.stage, 'Ending')}: {p.detail} {p.done} of {p.total}{left}"
    else:
        head = "Stopped; the report has what was measured." if job.run.stopped else "Done."
    share = 100 * p.done / max(p.total, 1)
    bar = f'<div class="ch-level" role="progressbar" aria-valuenow="{share:.0f}" aria-label="Progress">'
    bar += f'<i style="width:{share:.0f}%"></i></div>' if job.running else "<i></i></div>"
    return f"<p><b>{html.escape(head)}</b></p>{bar if job.running else links(job)}"


def links(job: Job) -> str:
    base = f"/chorus/runs/{html.escape(job.name)}"
    found = [("report.html", "Open the report"), ("report.html?download=1", "download it"), ("compare.json", "A and B")]
    have = [(file, label) for file, label in found if (job.run.folder.path / file.split("?")[0]).is_file()]
    return "<p>" + " · ".join(f'<a href="{base}/{file}" target="_blank">{label}</a>' for file, label in have) + "</p>"


def _hint() -> str:
    return "<p>Nothing is running. Choose how many voices speak at once, and press Run.</p>"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
