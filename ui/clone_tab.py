"""The Clone tab: text and a voice in, speech while it is made. What it shows follows the checkpoint's task."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import gradio as gr

from engine.audio import Audio, load_audio, pcm16
from engine.errors import ChorusError, InvalidRequest
from engine.request import SAMPLE_RATE
from ui import clip_checks, text_preview
from ui.handle import EngineHandle
from ui.references import References
from ui.routes import STATIC

log = logging.getLogger("chorus.page")
EXAMPLES = {
    "Greeting": "Good morning! Did you know that this sentence is played while its end is still being made?",
    "Numbers": "The train to Bristol leaves at 9:45 from platform 3, and a single ticket costs £12.50.",
    "Story": "Once upon a time there was a clock that refused to strike twelve. Nobody knew why, and nobody dared "
    "to ask. Then, one night in October, a child climbed the tower with a candle and a can of oil.",
}
AUDIO_TYPES = [".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".mp4", ".webm", ".mov", ".mkv", ".aac", ".aiff"]
READY, UPLOAD, RECORD = "Ready voice", "Upload a clip", "Record"
DISCLAIMER = (
    "Clone a voice only with the consent of the person it belongs to, and say that the result is synthetic. "
    "Recordings stay on this server until they are pushed out by newer ones; takes stay in your browser."
)
# Sampling settings of the page: label, lowest, highest, step. None in a field keeps the checkpoint's own value.
SAMPLING = {
    "temperature": ("Temperature", 0.05, 2.0, 0.05),
    "top_k": ("Top k", 0, 200, 1),
    "top_p": ("Top p", 0.05, 1.0, 0.05),
    "repetition_penalty": ("Repetition penalty", 1.0, 2.0, 0.01),
    "subtalker_temperature": ("Temperature, code predictor", 0.05, 2.0, 0.05),
    "subtalker_top_k": ("Top k, code predictor", 0, 200, 1),
}
START_BUFFERS = {"Play at once": 0.0, "Hold 0.5 s": 0.5, "Hold 2 s": 2.0}

# Gathers the inputs in the order of FIELDS and hands them to the player; no round trip to the server before it.
SPEAK_JS = """(text, source, ready, clip, transcript, speaker, instruct, language, xvector, seed, schedule, buffer,
  %s) => {
  const sampling = {%s};
  for (const key of Object.keys(sampling)) if (sampling[key] === null || sampling[key] === "") delete sampling[key];
  const stored = source === "Ready voice";
  const settings = { text, language, sampling, x_vector_only: !!xvector, start_buffer: buffer };
  if (source !== null) {
    settings.voice = stored ? ready : clip;
    settings.voice_label = stored ? ready : "own clip";
    if (!stored && transcript.trim()) settings.transcript = transcript;
    if (!settings.voice) settings.voice = "clip:";
  }
  if (speaker) settings.speaker = speaker;
  if (instruct && instruct.trim()) settings.instruct = instruct;
  if (String(seed ?? "").trim()) settings.seed = String(seed).trim();
  const sizes = schedule.split(/[ ,]+/).filter(Boolean).map(Number);
  if (sizes.length) settings.chunk_schedule = sizes;
  window.chorus.speak(settings);
}"""


TITLES = {"Base": "Clone", "CustomVoice": "Speak", "VoiceDesign": "Design"}  # of the tab, by task


class CloneTab:
    """Builds its components where it is called; `refresh` gives their state for the engine of now."""

    def __init__(self, handle: EngineHandle, references: References, tab: gr.Tab) -> None:
        self.handle, self.references, self.tab = handle, references, tab
        with gr.Row(equal_height=False):
            with gr.Column(scale=1, min_width=320):
                self._text()
                self._voice()
                self._preset()
                self._settings()
            with gr.Column(scale=1, min_width=320):
                with gr.Row(elem_classes="ch-speak-row"):
                    speak = gr.Button("Speak", variant="primary", elem_id="speak", scale=3, min_width=120)
                    stop = gr.Button("Stop", variant="stop", elem_id="stop", scale=1, min_width=80)
                gr.Markdown(DISCLAIMER, elem_classes="ch-note")
                gr.HTML((STATIC / "player.html").read_text(encoding="utf-8"), padding=False, apply_default_css=False)
        self._wire(speak, stop)

    # ---- components ---------------------------------------------------------------------------------------------

    def _text(self) -> None:
        self.text = gr.Textbox(
            label="Text", value=EXAMPLES["Greeting"], lines=5, max_lines=14, elem_id="text", autofocus=True,
            placeholder="What shall be said?", info="Ctrl+Enter speaks, Esc stops.",
        )  # fmt: skip
        with gr.Row():
            for name, example in EXAMPLES.items():
                gr.Button(f"Example: {name}", size="sm", min_width=80).click(
                    None, None, self.text, js=f"() => {json.dumps(example)}"
                )

        with gr.Accordion("How it will be spoken", open=False, elem_id="preview-box"):
            self.parts_note = gr.Markdown(elem_classes="ch-note", elem_id="parts-note")
            self.parts = gr.HTML(elem_id="parts", padding=False)
            self.text_file = gr.File(
                label="Open a .txt file", file_types=[".txt", ".md"], type="binary", height=130, elem_id="text-file"
            )

    def _voice(self) -> None:
        with gr.Group() as self.voice_group:
            self.source = gr.Radio([READY, UPLOAD, RECORD], value=READY, label="Voice", elem_id="source")
            self.ready = gr.Dropdown([], label="Voice by name", elem_id="ready", interactive=True)
            self.upload = gr.File(
                label="A clip of 3 to 15 seconds, one person speaking", file_types=AUDIO_TYPES, type="filepath",
                visible=False, elem_id="upload", height=120,
            )  # fmt: skip
            self.record = gr.Audio(
                sources=["microphone"], type="filepath", label="Record 3 to 15 seconds", visible=False, elem_id="record"
            )
            self.mic_note = gr.Markdown(
                "Browsers give a page the microphone only over https or on localhost: start Chorus with `--https`.",
                elem_classes="ch-insecure-note", container=True, visible=False,
            )  # fmt: skip
            self.preview = gr.Audio(
                label="What the model hears", interactive=False, elem_id="preview", visible=False, buttons=[]
            )
            self.hints = gr.Markdown(elem_classes="ch-hints", elem_id="hints", visible=False, container=True)
            self.transcript = gr.Textbox(
                label="What the clip says", lines=2, elem_id="transcript", visible=False,
                info="Filled in by speech recognition; correct it. Without it only the voice's timbre is used.",
            )  # fmt: skip
            self.clip = gr.Textbox(
                elem_id="clip", elem_classes="ch-hidden"
            )  # token of the uploaded or recorded reference
            self.x_vector = gr.Checkbox(label="Timbre only (ignore the transcript and the manner)", elem_id="xvector")

        with gr.Accordion("Save this voice", open=False, visible=False, elem_id="save-box") as self.save_box:
            self.save_name = gr.Textbox(label="Name", max_lines=1, elem_id="save-name")
            self.consent = gr.Checkbox(label="The speaker agreed to have this voice cloned", elem_id="consent")
            self.save = gr.Button("Save", size="sm", elem_id="save")
            self.save_note = gr.Markdown(elem_id="save-note")

    def _preset(self) -> None:
        self.speaker = gr.Dropdown([], label="Speaker", elem_id="speaker", visible=False, interactive=True)
        self.instruct = gr.Textbox(label="Manner", lines=2, elem_id="instruct", visible=False)

    def _settings(self) -> None:
        with gr.Row():
            self.language = gr.Dropdown(["auto"], value="auto", label="Language", elem_id="language", min_width=120)
            self.seed = gr.Textbox(
                label="Seed", elem_id="seed", min_width=120, placeholder="new each time", max_lines=1
            )
        with gr.Accordion("Sampling and streaming", open=False):
            gr.Markdown("Empty fields keep the checkpoint's own settings.", elem_classes="ch-note")
            self.sampling = []
            with gr.Row():
                for name, (label, low, high, step) in SAMPLING.items():
                    self.sampling.append(
                        gr.Number(None, label=label, minimum=low, maximum=high, step=step, elem_id=name, min_width=140)
                    )
            with gr.Row():
                self.schedule = gr.Textbox(
                    "", label="Chunk sizes in frames of 80 ms", placeholder="1 2 4 8 12", elem_id="schedule",
                    info="The last one repeats. Small first chunks start sooner.", min_width=200, max_lines=1,
                )  # fmt: skip
                self.buffer = gr.Dropdown(
                    list(START_BUFFERS.items()), value=0.0, label="Before playing", elem_id="buffer", min_width=140
                )

    def _wire(self, speak: gr.Button, stop: gr.Button) -> None:
        names = list(SAMPLING)
        js = SPEAK_JS % (", ".join(names), ", ".join(names))
        inputs = [self.text, self.source, self.ready, self.clip, self.transcript, self.speaker, self.instruct,
                  self.language, self.x_vector, self.seed, self.schedule, self.buffer, *self.sampling]  # fmt: skip
        speak.click(None, inputs, None, js=js)
        stop.click(None, None, None, js="() => window.chorus.stop()")
        self.source.change(self._on_source, self.source, [self.ready, self.upload, self.record, self.preview,
                           self.hints, self.transcript, self.clip, self.save_box, self.mic_note])  # fmt: skip
        self.ready.change(self._on_ready, [self.source, self.ready], [self.preview, self.hints])
        outputs = [self.preview, self.hints, self.transcript, self.clip]
        self.upload.upload(self._on_clip, [self.upload, self.language], outputs, concurrency_limit=4)
        self.upload.clear(self._no_clip, None, outputs)
        self.record.stop_recording(self._on_clip, [self.record, self.language], outputs, concurrency_limit=4)
        self.record.clear(self._no_clip, None, outputs)

        self.save.click(
            self._on_save, [self.save_name, self.consent, self.clip, self.transcript, self.language], self.save_note
        )
        shown = [self.parts_note, self.parts]
        for trigger in (self.text.change, self.language.change):
            trigger(
                self._on_text, [self.text, self.language], shown, show_progress="hidden", trigger_mode="always_last"
            )
        self.text_file.upload(self._on_text_file, self.text_file, self.text)

    # ---- state by the engine ------------------------------------------------------------------------------------

    @property
    def refreshed(self) -> list[gr.components.Component]:
        return [self.tab, self.voice_group, self.ready, self.speaker, self.instruct, self.language, self.source]

    def refresh(self, ready: str | None, speaker: str | None, language: str | None, source: str | None) -> list[Any]:
        """Updates for `refreshed`, keeping choices that are still there."""
        info = self.handle.info
        if info is None:
            return [gr.skip()] * len(self.refreshed)
        clones = info.task == "Base"
        names = self.voice_choices() if clones else []
        values = [value for _, value in names]
        languages = ["auto", *info.languages]
        return [
            gr.update(label=TITLES[info.task]),
            gr.update(visible=clones),
            gr.update(choices=names, value=ready if ready in values else (values[0] if values else None)),
            gr.update(
                choices=list(info.speakers),
                value=speaker if speaker in info.speakers else (info.speakers[0] if info.speakers else None),
                visible=info.task == "CustomVoice",
            ),
            gr.update(
                visible=info.takes_instruct,
                label="The voice, described" if info.task == "VoiceDesign" else "Manner (optional)",
                placeholder="A calm old man with a warm, slow voice"
                if info.task == "VoiceDesign"
                else "Speak happily and fast",
            ),
            gr.update(choices=languages, value=language if language in languages else "auto"),
            gr.update(value=(source or READY) if clones else None),
        ]

    def voice_choices(self) -> list[tuple[str, str]]:
        """(label, name) of every stored voice, saved ones first."""
        voices = self.handle.engine.voices.list()
        return [
            (f"{v.name}{f' – {v.description}' if v.description else ' (saved)'}", v.name)
            for v in sorted(voices, key=lambda v: v.read_only)
        ]

    # ---- events -------------------------------------------------------------------------------------------------

    def _on_source(self, source: str | None) -> list[Any]:
        ready, upload, record = source == READY, source == UPLOAD, source == RECORD
        if upload or record:
            clip_checks.warm_up()
        return [
            gr.update(visible=ready),
            gr.update(visible=upload, value=None),
            gr.update(visible=record, value=None),
            gr.update(visible=False, value=None),
            gr.update(visible=False),
            gr.update(visible=upload or record, value=""),
            "",
            gr.update(visible=upload or record),
            gr.update(visible=record),
        ]

    def _on_ready(self, source: str | None, name: str | None) -> list[Any]:
        """Preview of a stored voice; its prompt is computed now, so that Speak need not wait for it."""
        if source != READY or not name:
            return [gr.skip(), gr.skip()]
        try:
            voices = self.handle.engine.voices
            audio, entry = voices.audio(name), voices.entry(name)
            voices.get(name)
        except ChorusError as error:
            return [gr.update(visible=False), gr.update(visible=True, value=f"⚠ {error.message}")]
        said = f"“{entry.transcript}”" if entry.transcript else "No transcript: only the timbre is used."
        return [_preview(audio, entry.name), gr.update(visible=True, value=said)]

    def _no_clip(self) -> list[Any]:
        return [gr.update(visible=False, value=None), gr.update(visible=False), "", ""]

    def _on_clip(self, path: str | None, language: str) -> Iterator[list[Any]]:
        """Check the clip, show what is left of it, fill in the transcript, prepare the voice."""
        if not path:
            yield self._no_clip()
            return
        try:
            audio = load_audio(path)
            token = self.references.add(audio)
        except ChorusError as error:
            yield [gr.update(visible=False, value=None), gr.update(visible=True, value=f"⚠ {error.message}"), "", ""]
            return
        notes = [*_trimmed(audio), *audio.hints]
        yield [_preview(audio), _hints([*notes, "Listening to what it says …"]), gr.skip(), token]
        heard = clip_checks.transcribe(audio, language)
        notes += clip_checks.doubts(heard, audio)
        yield [gr.skip(), _hints(notes), gr.skip() if heard.text is None else heard.text, gr.skip()]
        try:
            self.handle.engine.prepare_voice(audio, transcript=heard.text)
        except ChorusError:
            log.info("the clip's voice will be prepared when it is used")
        notes += clip_checks.noise_doubts(audio) + clip_checks.speaker_doubts(audio)
        yield [gr.skip(), _hints(notes), gr.skip(), gr.skip()]

    def _on_save(self, name: str, consent: bool, clip: str, transcript: str, language: str) -> str:
        try:
            if not clip:
                raise InvalidRequest("Upload or record a clip first.", field="voice")
            entry = self.handle.engine.voices.save(
                name,
                self.references.get(clip),
                transcript,
                consent=consent,
                language=language,
                source="saved in the page",
            )
        except ChorusError as error:
            return f"⚠ {error.message}"
        self.handle.touch()
        return f"Saved as {entry.name}; it is now among the ready voices."

    def _on_text(self, text: str, language: str) -> tuple[str, str]:
        return text_preview.preview(self.handle, text, language)

    @staticmethod
    def _on_text_file(data: bytes | None) -> Any:
        if not data:
            return gr.skip()
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise gr.Error("The file is not UTF-8 text.", print_exception=False) from None


def _preview(audio: Audio, label: str = "What the model hears") -> Any:
    return gr.update(value=(SAMPLE_RATE, pcm16(audio.pcm)), visible=True, label=f"{label}, {audio.seconds:.1f} s")


def _hints(notes: list[str]) -> Any:
    return gr.update(value="\n".join(f"- {note}" for note in notes), visible=bool(notes))


def _trimmed(audio: Audio) -> list[str]:
    before, after = audio.trimmed_s
    return [f"Silence cut: {before:.1f} s at the start, {after:.1f} s at the end."] if before + after > 0.1 else []
