"""The Engine tab: what runs, how busy it is, its settings, and restarting it with others."""

from __future__ import annotations

import time
from typing import Any

import gradio as gr
import yaml

from engine.config import EngineConfig
from engine.errors import ChorusError, InvalidRequest
from ui import models, profiles
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
                self.profile = gr.Dropdown(
                    [KEEP, *profiles.names()], value=KEEP, label="Profile", elem_id="engine-profile"
                )
                self.mode = gr.Radio(MODES, value="auto", label="Scheduler mode", elem_id="engine-mode")
                self.will = gr.Markdown(elem_id="engine-will", elem_classes="ch-note")
                restart = gr.Button("Restart the engine", elem_id="engine-restart")
                self.note = gr.Markdown(elem_id="engine-note")
                with gr.Accordion("Settings in force", open=False):
                    self.settings = gr.Code(language="yaml", interactive=False, label="", elem_id="engine-settings")
                self.trace = gr.Button("Download the trace", visible=False, elem_id="engine-trace", size="sm")
        chosen = [self.model, self.profile, self.mode]
        for choice in chosen:
            choice.input(self._will, chosen, self.will, show_progress="hidden", trigger_mode="always_last")
        restart.click(self._restart, chosen, self.note)
        self.trace.click(None, None, self.note, js="() => chorus.save('/chorus/trace', 'chorus-trace.jsonl')")

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
        return [self.model, self.mode, self.settings, self.trace, self.will]

    def refresh(self) -> list[Any]:
        config = self.handle.config
        return [
            gr.update(choices=models.choices(config), value=config.model),
            gr.update(value=config.talker.scheduler_mode),
            gr.update(value=yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)),
            gr.update(visible=bool(config.trace)),
            "",
        ]

    def _wanted(self, model: str | None, profile: str, mode: str) -> EngineConfig:
        if not (model or "").strip():
            raise InvalidRequest("Choose a model, or type where it is.", field="model")
        base = self.handle.config if profile == KEEP else profiles.under(profile, self.handle.config)
        return base.replace(**{"model": str(model).strip(), "talker.scheduler_mode": mode})

    def _will(self, model: str | None, profile: str, mode: str) -> str:
        """What a restart with these choices would change, and how long the last start took."""
        try:
            differs = profiles.changes(self.handle.config, self._wanted(model, profile, mode))
        except ChorusError as error:
            return f"⚠ {error.message}"
        if not differs:
            return "These are the settings in force."
        info = self.handle.info
        took = f" The last start took {info.startup_s:.0f} s, without its imports." if info else ""
        return f"A restart changes:{took}\n" + "\n".join(f"- `{key}`: {old} → {new}" for key, old, new in differs)

    def _restart(self, model: str | None, profile: str, mode: str) -> str:
        try:
            config = self._wanted(model, profile, mode)
            fault = self.handle.restart(config, wait_s=1.5)  # a wrong path is found out at once
        except ChorusError as error:
            return f"⚠ {error.message}"
        if fault is not None:
            return f"⚠ {fault}"
        return f"{config.model} is being loaded; the head of the page says when it is ready."

    def _errors(self) -> str:
        lines = [f"- {time.strftime('%H:%M:%S', time.localtime(at))} {message}" for at, message in self.handle.errors]
        return "**Last errors**\n" + "\n".join(lines[:8]) if lines else "No errors so far."


def memory_line(metrics: dict[str, Any], device: str) -> str:
    """Memory in use, GiB: of the GPU, or of the engine's process on a CPU."""
    used, total = metrics.get("memory_used_mib"), metrics.get("memory_total_mib")
    if used is None or total is None:
        return ""
    what = "GPU memory in use" if device == "cuda" else "memory of the engine's process"
    return f"  \n{what}: {used / 1024:.1f} of {total / 1024:.1f} GiB"


def _plain(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
