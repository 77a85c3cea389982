"""The page as a whole: head, banner, tabs, and how they follow the engine."""

from __future__ import annotations

import html
from typing import Any

import gradio as gr

from ui.clone_tab import CloneTab
from ui.handle import EngineHandle
from ui.references import References

HEAD = """
<link rel="stylesheet" href="/chorus/static/chorus.css">
<script type="module" src="/chorus/static/chorus.js"></script>
<meta name="viewport" content="width=device-width, initial-scale=1">
"""
POLL_S = 2.0


def theme() -> gr.themes.Base:
    """System fonts: a page that works without the internet fetches none."""
    return gr.themes.Soft(
        primary_hue="teal",
        neutral_hue="slate",
        font=["system-ui", "sans-serif"],
        font_mono=["ui-monospace", "monospace"],
    )


def build(handle: EngineHandle, references: References) -> gr.Blocks:
    """The Gradio page; everything it needs of the engine it asks the handle for."""
    with gr.Blocks(title="Chorus", analytics_enabled=False) as page:
        gr.HTML('<header class="ch-head"><h1>Chorus</h1><p>Qwen3-TTS, heard while it is made</p></header>')
        banner = gr.HTML(banner_html(handle))
        seen = gr.State(-1)
        with gr.Tabs():
            with gr.Tab("Clone", id="clone"):
                clone = CloneTab(handle, references)

        kept = [clone.ready, clone.speaker, clone.language, clone.source]

        def follow(version: int, *chosen: Any) -> list[Any]:
            """Update what depends on the engine, when it changed since this browser last looked."""
            now = handle.status.version
            if now == version:
                return [gr.skip()] * (2 + len(clone.refreshed))
            return [now, banner_html(handle), *clone.refresh(*chosen)]

        outputs = [seen, banner, *clone.refreshed]
        page.load(follow, [seen, *kept], outputs, show_progress="hidden")
        gr.Timer(POLL_S).tick(follow, [seen, *kept], outputs, show_progress="hidden", queue=False)
    return page


def banner_html(handle: EngineHandle) -> str:
    """What a user must know of the engine before believing the sound."""
    status = handle.status
    if status.state in ("starting", "restarting"):
        return _banner(
            "info", "Loading the model", f"{handle.config.model}; the page can be used as soon as it is there."
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
    about = f"{info.model}, {info.task}, on {info.device_name}, {info.dtype}."
    return _banner("info", "Ready", about)


def _banner(kind: str, title: str, text: str) -> str:
    return f'<div class="ch-banner {kind}"><b>{html.escape(title)}.</b> {html.escape(text)}</div>'
