"""The Engine tab: what runs, how busy it is, its settings, and restarting it with others."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gradio as gr
import yaml

from engine.config import ROOT, EngineConfig
from engine.errors import ChorusError, InvalidRequest
from ui import models
from ui.handle import EngineHandle

MODES = [("auto", "auto"), ("sync: decide, then run", "sync"), ("async: decide the next step while one runs", "async")]
KEEP = "(settings in force)"


class EngineTab:
    def __init__(self, handle: EngineHandle) -> None:
        self.handle = handle
        with gr.Row(equal_height=False):
            with gr.Column(min_width=320):
                self.state = gr.Markdown(elem_id="engine-state")
                self.metrics = gr.Dataframe(headers=["Now", "Value"], interactive=False, elem_id="engine-metrics",
                                            label="Live", max_height=420)  # fmt: skip
                self.errors = gr.Markdown(elem_id="engine-errors")
            with gr.Column(min_width=320):
                gr.Markdown("## Restart with other settings\nRunning and waiting requests end; new ones are refused "
                            "until the engine is ready again, which takes seconds for a small model and up to minutes "
                            "for a large one.")  # fmt: skip
                self.model = gr.Dropdown(
                    [], label="Model", elem_id="engine-model", allow_custom_value=True, interactive=True,
                    info="From the list (`models` in the settings), or type a checkpoint folder, a hub id, or "
                    "dummy:1.7b-base.",
                )  # fmt: skip
                self.profile = gr.Dropdown([KEEP, *profiles()], value=KEEP, label="Profile", elem_id="engine-profile")
                self.mode = gr.Radio(MODES, value="auto", label="Scheduler mode", elem_id="engine-mode")
                restart = gr.Button("Restart the engine", elem_id="engine-restart")
                self.note = gr.Markdown(elem_id="engine-note")
                with gr.Accordion("Settings in force", open=False):
                    self.settings = gr.Code(language="yaml", interactive=False, label="", elem_id="engine-settings")
                self.trace = gr.DownloadButton("Download the trace", visible=False, elem_id="engine-trace", size="sm")
        restart.click(self._restart, [self.model, self.profile, self.mode], self.note)

    # Cheap enough for every tick of the page's timer.
    @property
    def live(self) -> list[gr.components.Component]:
        return [self.state, self.metrics, self.errors]

    def tick(self) -> list[Any]:
        status, info = self.handle.status, self.handle.info
        head = f"## Engine: {status.state}"
        if info is None:
            doing = status.detail or f"{self.handle.config.model} is being loaded"
            return [f"{head}\n{doing}, {time.monotonic() - status.since:.0f} s", [], self._errors()]
        about = (
            f"{info.model} ({info.task}, {info.weights} weights)  \n{info.device_name}, {info.dtype}, "
            f"{info.scheduler_mode} scheduling  \nsettings {info.config_hash}, started in {info.startup_s:.1f} s"
        )
        try:
            values = self.handle.engine.metrics()
        except ChorusError:
            values = {}
        rows = [[name.replace("_", " "), f"{value:g}"] for name, value in values.items() if _plain(value)]
        return [f"{head}\n{about}{memory_line(values, info.device)}", rows, self._errors()]

    @property
    def refreshed(self) -> list[gr.components.Component]:
        return [self.model, self.mode, self.settings, self.trace]

    def refresh(self) -> list[Any]:
        config = self.handle.config
        trace = config.trace and Path(config.trace)
        return [
            gr.update(choices=models.choices(config), value=config.model),
            gr.update(value=config.talker.scheduler_mode),
            gr.update(value=yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)),
            gr.update(visible=bool(trace), value=str(trace) if trace and trace.is_file() else None),
        ]

    def _restart(self, model: str | None, profile: str, mode: str) -> str:
        try:
            if not (model or "").strip():
                raise InvalidRequest("Choose a model, or type where it is.", field="model")
            base = self.handle.config
            if profile != KEEP:
                base = EngineConfig.load(profile, voices_dir=base.voices_dir, trace=base.trace)
            config = base.replace(**{"model": str(model).strip(), "talker.scheduler_mode": mode})
            fault = self.handle.restart(config, wait_s=1.5)  # a wrong path is found out at once
        except ChorusError as error:
            return f"⚠ {error.message}"
        if fault is not None:
            return f"⚠ {fault}"
        return f"{config.model} is being loaded; the head of the page says when it is ready."

    def _errors(self) -> str:
        lines = [f"- {time.strftime('%H:%M:%S', time.localtime(at))} {message}" for at, message in self.handle.errors]
        return "**Last errors**\n" + "\n".join(lines[:8]) if lines else "No errors so far."


def profiles() -> list[str]:
    """The overlays of `configs/` that are whole profiles."""
    return [f"configs/{path.name}" for path in sorted((ROOT / "configs").glob("*.yaml"))]


def memory_line(metrics: dict[str, Any], device: str) -> str:
    """Memory in use, GiB: of the GPU, or of the engine's process on a CPU."""
    used, total = metrics.get("memory_used_mib"), metrics.get("memory_total_mib")
    if used is None or total is None:
        return ""
    what = "GPU memory in use" if device == "cuda" else "memory of the engine's process"
    return f"  \n{what}: {used / 1024:.1f} of {total / 1024:.1f} GiB"


def _plain(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
