"""The Voices tab: what is stored, listen, rename, delete, export, import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradio as gr

from engine.audio import pcm16
from engine.errors import ChorusError
from engine.request import SAMPLE_RATE
from ui.handle import EngineHandle

COLUMNS = ["Voice", "Length", "Language", "What it says", "Licence"]
# By the browser itself: a download button of Gradio has its file only at the second press.
EXPORT_JS = """(name) => name ? chorus.save(`/chorus/voices/${encodeURIComponent(name)}`, `${name}.voice.zip`)
  : "⚠ Choose a voice first." """
WIDTHS = ["14%", "9%", "11%", "42%", "24%"]


class VoicesTab:
    """`refreshed` and `refresh` as in the Clone tab."""

    def __init__(self, handle: EngineHandle) -> None:
        self.handle = handle
        self.table = gr.Dataframe(
            headers=COLUMNS,
            column_widths=WIDTHS,
            interactive=False,
            wrap=True,
            label="Stored voices",
            elem_id="voices",
            max_height=360,
        )
        with gr.Row():
            with gr.Column(min_width=300):
                self.voice = gr.Dropdown([], label="Voice", elem_id="voices-pick", interactive=True)
                self.sound = gr.Audio(
                    label="Recording", interactive=False, elem_id="voices-sound", buttons=["download"]
                )
                export = gr.Button("Export as one file", elem_id="voices-export", size="sm")
            with gr.Column(min_width=300):
                self.name = gr.Textbox(label="New name", elem_id="voices-name", max_lines=1)
                rename = gr.Button("Rename", elem_id="voices-rename", size="sm")
                delete = gr.Button("Delete", variant="stop", elem_id="voices-delete", size="sm")
            with gr.Column(min_width=300):
                self.file = gr.File(label="Import an exported voice", file_types=[".zip"], type="binary", height=150,
                                    elem_id="voices-import")  # fmt: skip
                self.consent = gr.Checkbox(
                    label="The speaker agreed to have this voice cloned", elem_id="voices-consent"
                )
                bring = gr.Button("Import", elem_id="voices-import-go", size="sm")
        self.note = gr.Markdown(elem_id="voices-note")
        changed = [self.note, *self.refreshed]
        self.voice.change(self._listen, self.voice, [self.sound])
        export.click(None, self.voice, self.note, js=EXPORT_JS)
        rename.click(self._rename, [self.voice, self.name], changed)
        # A browser's own question, since a deleted voice does not come back.
        sure = gr.Checkbox(visible=False)
        delete.click(
            self._delete, [self.voice, sure], changed,
            js="(name, _) => [name, Boolean(name) && confirm(`Delete the voice ${name}?`)]",
        )  # fmt: skip
        bring.click(self._import, [self.file, self.consent, self.name], changed)

    @property
    def refreshed(self) -> list[gr.components.Component]:
        return [self.table, self.voice]

    def refresh(self, chosen: str | None = None) -> list[Any]:
        if self.handle.info is None:
            return [gr.skip(), gr.skip()]
        voices = self.handle.engine.voices.list()
        rows = [[v.name, f"{v.seconds:.1f} s", v.language, v.transcript or "–", v.licence or "yours"] for v in voices]
        names = [v.name for v in voices]
        return [gr.update(value=rows), gr.update(choices=names, value=chosen if chosen in names else None)]

    # ---- events -------------------------------------------------------------------------------------------------

    def _listen(self, name: str | None) -> Any:
        if not name:
            return gr.update(value=None)
        try:
            audio = self.handle.engine.voices.audio(name)
        except ChorusError as error:
            raise gr.Error(error.message, print_exception=False) from error
        return gr.update(value=(SAMPLE_RATE, pcm16(audio.pcm)), label=f"{name}, {audio.seconds:.1f} s")

    def _rename(self, name: str | None, new: str) -> list[Any]:
        def act(voices: Any) -> tuple[str, str]:
            renamed = voices.rename(name, new).name
            return f"Renamed to {renamed}.", renamed

        return self._change(name, act)

    def _delete(self, name: str | None, sure: bool) -> list[Any]:
        if name and not sure:
            return ["", *[gr.skip()] * len(self.refreshed)]

        def act(voices: Any) -> tuple[str, None]:
            voices.delete(name)
            return f"Deleted {name}. Speech that is under way with it goes on.", None

        return self._change(name, act)

    def _import(self, data: bytes | None, consent: bool, name: str) -> list[Any]:
        if not data:
            return [_warning("Choose an exported voice file first."), *self.refresh()]

        def act(voices: Any) -> tuple[str, str]:
            imported = voices.import_voice(data, consent=consent, name=name.strip() or None).name
            return f"Imported {imported}.", imported

        return self._change("file", act)

    def _change(self, name: str | None, act: Callable[[Any], tuple[str, str | None]]) -> list[Any]:
        """`act` gives what to say and the voice to choose then: the name as it was stored, not as it was typed."""
        if not name:
            return [_warning("Choose a voice first."), *self.refresh()]
        try:
            note, chosen = act(self.handle.engine.voices)
        except ChorusError as error:
            return [_warning(error.message), *self.refresh(name)]
        self.handle.touch()
        return [note, *self.refresh(chosen)]


def _warning(message: str) -> str:
    return f"⚠ {message}"
