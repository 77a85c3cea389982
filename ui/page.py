"""The page as a whole: head, banner, tabs, and how they follow the engine."""

from __future__ import annotations

import html
import time
from typing import Any

import gradio as gr

from ui.clone_tab import CloneTab
from ui.engine_tab import EngineTab
from ui.handle import EngineHandle
from ui.load_tab import LoadTab
from ui.quality_tab import QualityTab
from ui.references import References
from ui.run_manager import RunManager
from ui.voices_tab import VoicesTab

HEAD = """
<link rel="stylesheet" href="/chorus/static/chorus.css">
<script type="module" src="/chorus/static/chorus.js"></script>
<meta name="viewport" content="width=device-width, initial-scale=1">
"""
POLL_S = 2.0


def theme() -> gr.themes.Base:
    """System fonts: a page that works without the internet fetches none."""
    made = gr.themes.Default(
        primary_hue="teal",
        neutral_hue="slate",
        font=["system-ui", "sans-serif"],
        font_mono=["ui-monospace", "monospace"],
    )
    return made.set(  # the stock colours of buttons and links are too pale to read on
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover_dark="*primary_800",
        button_primary_text_color="white",
        button_cancel_background_fill="#b91c1c",
        button_cancel_background_fill_hover="#991b1b",
        link_text_color="*primary_700",
        link_text_color_dark="*primary_300",
        color_accent="*primary_700",
        block_label_text_color="*body_text_color",
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_300",
        block_info_text_color="*body_text_color_subdued",
        block_info_text_color_dark="*body_text_color_subdued",
        input_placeholder_color="*neutral_500",
        input_placeholder_color_dark="*neutral_400",
    )


def build(handle: EngineHandle, references: References, runs: RunManager) -> gr.Blocks:
    """The Gradio page; everything it needs of the engine it asks the handle for."""
    with gr.Blocks(title="Chorus", analytics_enabled=False) as page:
        gr.HTML(
            '<header class="ch-head"><h1>Chorus</h1><p>Qwen3-TTS, heard while it is made</p></header>', padding=False
        )
        banner = gr.HTML(banner_html(handle), padding=False)
        seen = gr.State(-1)
        with gr.Tabs():
            with gr.Tab("Clone", id="clone") as tab:
                clone = CloneTab(handle, references, tab)
            with gr.Tab("Voices", id="voices"):
                voices = VoicesTab(handle)
            with gr.Tab("Load", id="load"):
                load = LoadTab(handle, runs)
            with gr.Tab("Quality", id="quality"):
                quality = QualityTab(handle, runs)
            with gr.Tab("Engine", id="engine"):
                engine = EngineTab(handle)

        chosen = [clone.ready, clone.speaker, clone.language, clone.source, voices.voice]
        followers = [banner, *clone.refreshed, *voices.refreshed, *engine.refreshed]

        def follow(version: int, *values: Any) -> list[Any]:
            """Update what depends on the engine, when it changed since this browser last looked."""
            now = handle.status.version
            if now == version:
                waiting = handle.status.state in ("starting", "restarting")
                banner_now = banner_html(handle) if waiting else gr.skip()  # it counts the seconds
                return [gr.skip(), banner_now, *[gr.skip()] * (len(followers) - 1), *ticks()]
            fresh = [*clone.refresh(*values[:4]), *voices.refresh(values[4]), *engine.refresh()]
            return [now, banner_html(handle), *fresh, *ticks()]

        def ticks() -> list[Any]:
            return [*engine.tick(), *load.tick(), *quality.tick()]

        outputs = [seen, *followers, *engine.live, *load.live, *quality.live]
        for trigger in (page.load, gr.Timer(POLL_S).tick):
            trigger(follow, [seen, *chosen], outputs, show_progress="hidden", queue=False)
    return page


def banner_html(handle: EngineHandle) -> str:
    """What a user must know of the engine before believing the sound."""
    status = handle.status
    if status.state in ("starting", "restarting"):
        return _banner(
            "busy",
            f"Loading the model, {time.monotonic() - status.since:.0f} s",
            f"{handle.config.model}; the page can be used as soon as it is there. A model of the hub is fetched first.",
        )
    if status.state != "ready":
        return _banner("error", "The engine is not running", status.detail)
    info = handle.info
    if info is None:
        return _banner("info", "Loading the model", "")
    if info.weights == "random":
        return _banner(
            "warning",
            "Random weights",
            f"{info.model} has never been trained: it makes noise, not speech. It shows the machinery and its speed; "
            "load a trained checkpoint with --model.",
        )
    if info.notice:
        return _banner("warning", f"{info.model}", info.notice)
    about = f"{info.model}, {info.task}, on {info.device_name}, {info.dtype}."
    return _banner("info", "Ready", about)


def _banner(kind: str, title: str, text: str) -> str:
    return f'<div class="ch-banner {kind}"><b>{html.escape(title)}.</b> {html.escape(text)}</div>'
