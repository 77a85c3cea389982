"""The Voices tab: what is stored, listen, rename, delete, export, import."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import gradio as gr

from engine.audio import pcm16
from engine.errors import ChorusError
from engine.request import SAMPLE_RATE
from ui.handle import EngineHandle

COLUMNS = ["Voice", "Length", "Language", "What it says", "Licence"]
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
                export = gr.DownloadButton("Export as one file", elem_id="voices-export", size="sm")
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
        export.click(self._export, self.voice, export)
        rename.click(self._rename, [self.voice, self.name], changed)
        # A browser's own question, since a deleted voice does not come back; "no" leaves the name empty.
        delete.click(
            self._delete, self.voice, changed, js="(name) => confirm(`Delete the voice ${name}?`) ? name : null"
        )
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

    def _export(self, name: str | None) -> str:
        if not name:
            raise gr.Error("Choose a voice first.", print_exception=False)
        try:
            data = self.handle.engine.voices.export(name)
        except ChorusError as error:
            raise gr.Error(error.message, print_exception=False) from error
        stem = "".join(c if c.isalnum() else "-" for c in name)
        path = Path(tempfile.mkdtemp(prefix="chorus-voice-")) / f"{stem}.voice.zip"
        path.write_bytes(data)
        return str(path)

    def _rename(self, name: str | None, new: str) -> list[Any]:
        return self._change(name, lambda voices: f"Renamed to {voices.rename(name, new).name}.", new)

    def _delete(self, name: str | None) -> list[Any]:
        def act(voices: Any) -> str:
            voices.delete(name)
            return f"Deleted {name}. Speech that is under way with it goes on."

        return self._change(name, act, None)

    def _import(self, data: bytes | None, consent: bool, name: str) -> list[Any]:
        if not data:
            return [_warning("Choose an exported voice file first."), *self.refresh()]
        return self._change(
            "file",
            lambda voices: f"Imported {voices.import_voice(data, consent=consent, name=name.strip() or None).name}.",
            name,
        )

    def _change(self, name: str | None, act: Any, chosen: str | None) -> list[Any]:
        if not name:
            return [_warning("Choose a voice first."), *self.refresh()]
        try:
            note = act(self.handle.engine.voices)
        except ChorusError as error:
            return [_warning(error.message), *self.refresh(name)]
        self.handle.touch()
        return [note, *self.refresh(chosen)]


def _warning(message: str) -> str:
    return f"⚠ {message}"
