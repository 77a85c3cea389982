"""The engine: text and a voice in, PCM chunks out, many requests at once.

    engine = Engine.from_config("configs/embedded.yaml")
    voice = engine.prepare_voice("clip.wav", transcript="What the clip says.")
    for chunk in engine.stream(SpeechRequest("Hello there.", voice=voice)):
        play(chunk.pcm)

A request is checked, cleaned and laid out in the caller's thread, so bad input raises at once and costs the running
streams nothing; the models belong to the thread in `loop.py`.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine import memory, pauses, sampling, text, wiring
from engine.audio import Audio
from engine.checkpoint import Checkpoint
from engine.chunks import check_schedule
from engine.codec_stage import CodecStage
from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.info import EngineInfo
from engine.job import Job, Part
from engine.loop import EngineLoop
from engine.prompt import PromptBuilder
from engine.request import SAMPLE_RATE, SpeechRequest
from engine.stream import SpeechStream
from engine.talker.slots import SlotOptions
from engine.talker.talker import Talker
from engine.trace import Trace
from engine.voices import VoiceLibrary, VoicePrompt, prepare_audio
from engine.watchdog import Watchdog

log = logging.getLogger("chorus.engine")


class Engine:
    """See the module's docstring. Safe to call from many threads."""

    def __init__(self, config: EngineConfig) -> None:
        """Load everything; returns when a request can be served.

        Raises:
            ConfigError, CheckpointError: what is wrong, before anything large is loaded.
        """
        started = time.monotonic()
        self.config = config
        settings = config.model_dump(mode="json")
        log.info("settings %s: %s", config.hash, json.dumps(settings))
        self.checkpoint = Checkpoint.open(config.model_path, config.load_format)
        self.device = wiring.device(config)
        self._trace = Trace(config.trace, config=config.hash, settings=settings, model=self.checkpoint.name)
        self.codec_device = wiring.codec_device(config, self.device)
        cuda = self.device.type == "cuda"
        self.dtype = wiring.dtype(config, self.device, self.checkpoint)
        if cuda and config.dtype == "auto" and self.dtype == torch.float32:
            stored = self.checkpoint.stored_dtype
            log.warning("weights are stored as %s: running in float32; dtype: bfloat16 is faster and coarser", stored)
        self.prompts = PromptBuilder(self.checkpoint, self.dtype, pinned=cuda)
        # One caller prepares at a time: dozens at once would share the interpreter with the engine's thread.
        self._preparing = threading.Lock()
        self._config_hash = config.hash
        if self.device.type == "cuda":
            self.prompts.text_rows.fill(self.device)
        talker_settings = wiring.talker_settings(config, self.device, self.checkpoint)
        # The codec first: vLLM makes torch.set_num_threads a no-op on the CPU.
        self.codec = wiring.load_codec(config, self.checkpoint, self.codec_device)
        self._runner = wiring.codec_runner(config, self.codec, self.codec_device)
        self.speaker_encoder = wiring.speaker_encoder(self.checkpoint, self.device)
        self._talker = Talker(talker_settings, self.checkpoint)
        self._loop = EngineLoop(
            self._talker,
            CodecStage(self._runner, wiring.scheduler_settings(config, self._runner), self._trace),
            max_active=config.talker.max_num_seqs,
            max_waiting=config.stream.max_waiting,
            trace=self._trace,
            threads=config.threads,
        )
        self.voices = VoiceLibrary(
            wiring.inside_root(config.voices_dir), encode=self._encode_voice, checkpoint_id=self.checkpoint.id
        )
        self._watch = config.watchdog.enabled == "on" or (
            config.watchdog.enabled == "auto" and self.checkpoint.weights == "trained"
        )
        self.info = self._describe(time.monotonic() - started)
        if self.device.type == "cuda":
            pauses.keep_short()

    @classmethod
    def from_config(cls, config: str | Path | EngineConfig | None = None, **overrides: Any) -> Engine:
        """An engine from a YAML file (or a ready config); `overrides` as in `EngineConfig.load`."""
        if isinstance(config, EngineConfig):
            return cls(config.replace(**overrides) if overrides else config)
        return cls(EngineConfig.load(config, **overrides))

    # ---- voices ------------------------------------------------------------------------------------------------

    def prepare_voice(
        self,
        audio: str | Path | bytes | np.ndarray | Audio,
        sample_rate: int | None = None,
        transcript: str | None = None,
    ) -> VoicePrompt:
        """A reference clip as the model uses it: speaker embedding, codes, transcript. Cached by content.

        Args:
            audio: a path, a file's bytes, or samples with their `sample_rate`.
            transcript: what the clip says; without it only the x-vector can be used.

        Raises:
            InvalidAudio: see `engine.audio.load_audio`.
            InvalidRequest: the checkpoint does not clone.
        """
        if self.checkpoint.task != "Base":
            raise InvalidRequest(f"a {self.checkpoint.task} checkpoint cannot clone a voice", field="voice")
        return self.voices.prepare(prepare_audio(audio, sample_rate), transcript)

    @torch.inference_mode()
    def _encode_voice(self, clip: Audio) -> tuple[np.ndarray, np.ndarray]:
        assert self.speaker_encoder is not None
        return self.speaker_encoder.embed(clip.pcm), self.codec.encode(clip.pcm)

    def _resolve_voice(self, voice: VoicePrompt | str | None) -> VoicePrompt | None:
        if not isinstance(voice, str):
            return voice
        if self.checkpoint.task != "Base":
            raise InvalidRequest(f"a {self.checkpoint.task} checkpoint cannot clone a voice", field="voice")
        try:
            return self.voices.get(voice)
        except InvalidRequest as error:
            error.field = "voice"  # the request's field, whatever the library calls it
            raise

    # ---- speaking ----------------------------------------------------------------------------------------------

    def stream(self, request: SpeechRequest) -> SpeechStream:
        """Start speaking; chunks come while the rest is made.

        Raises:
            InvalidRequest (also InvalidText, UnknownVoice): names the field; nothing was spent.
            EngineBusy: the queue is full.
            EngineClosed: closed or failed.
        """
        submitted_at = time.monotonic()
        voice = self._resolve_voice(request.voice)
        # Held once: each time that a lock changes hands beside a busy engine costs its next owner 2 ms.
        with self._preparing:
            cleaned = self.prepare_text(request.text, request.language)
            seed = sampling.resolve_seed(request.seed)
            sampled = sampling.resolve(request.sampling, self.checkpoint.generation)
            options = SlotOptions(seed=seed, max_frames=self.config.stream.max_frames, **sampled)
            if request.chunk_schedule is not None:
                check_schedule(request.chunk_schedule)
            if request.deadline_s is not None and not request.deadline_s > 0:
                raise InvalidRequest("deadline_s must be more than 0 seconds", field="deadline_s")
            parts = [self._part(request, part, voice, options, seed + i) for i, part in enumerate(cleaned.parts)]
            in_context = voice is not None and self._in_context(request, voice)
            tokens = self.prompts.count_tokens(cleaned.text, request.instruct)
        stream = SpeechStream(request, cleaned.text, seed, self.cancel, cleaned.parts, tokens)
        deadline = request.deadline_s or self.config.stream.deadline_s
        self._loop.submit(
            Job(
                stream=stream,
                parts=tuple(parts),
                task=self.checkpoint.config["tts_model_type"],
                watchdog=Watchdog(self.config.watchdog, self._watch),
                model=self.checkpoint.name,
                weights=self.checkpoint.weights,
                config_hash=self._config_hash,
                chunk_schedule=request.chunk_schedule,
                deadline=submitted_at + deadline if deadline else None,
                reference_codes=voice.codes if voice is not None and in_context else None,
                reference_key=voice.audio_hash if voice is not None and in_context else None,
                submitted_at=submitted_at,
            )
        )
        return stream

    def accepts_at_once(self, request: SpeechRequest) -> bool:
        """Whether `stream` would return within a few ms: no voice has to be encoded first, and the text is no book."""
        short = len(request.text) <= 10 * self.config.stream.split_chars
        return short and (not isinstance(request.voice, str) or self.voices.at_hand(request.voice))

    def prepare_text(self, written: str, language: str = "auto") -> text.CleanText:
        """The text as it would be spoken, and its parts; for previews too. Raises InvalidText."""
        limits = self.config.stream
        return text.prepare(
            written,
            max_chars=limits.max_text_chars,
            split_chars=limits.split_chars,
            spoken_forms=text.wants_spoken_forms(limits.spoken_forms, language or "auto", self.checkpoint.languages),
        )

    def cancel(self, request_id: str) -> bool:
        """Stop a request and free what it holds; False if it is not running or waiting."""
        return self._loop.cancel(request_id)

    @staticmethod
    def _in_context(request: SpeechRequest, voice: VoicePrompt) -> bool:
        """In-context cloning needs the codes and the transcript; without one the x-vector alone is used."""
        return not request.x_vector_only and voice.codes is not None and bool(voice.transcript)

    def _part(
        self, request: SpeechRequest, part: str, voice: VoicePrompt | None, options: SlotOptions, seed: int
    ) -> Part:
        in_context = voice is not None and self._in_context(request, voice)
        rows = self.prompts.build(
            part,
            language=request.language,
            speaker=request.speaker,
            instruct=request.instruct,
            speaker_embedding=voice.speaker_embedding if voice is not None else None,
            reference_codes=voice.codes if voice is not None and in_context else None,
            reference_text=voice.transcript if voice is not None and in_context else None,
            non_streaming_text=request.non_streaming_text,
        )
        least, most = self._length(request, part, rows.length)
        options = replace(options, seed=seed, min_frames=least, max_frames=most)
        self._talker.check(rows, options)
        return Part(part, rows, options)

    def _length(self, request: SpeechRequest, part: str, rows: int) -> tuple[int, int]:
        """The least and the most frames of a part with a prompt of `rows` rows. Raises InvalidRequest."""
        limits = self.config
        room = limits.talker.max_model_len - rows
        if room < 2:
            raise InvalidRequest(
                f"text and reference need {rows} positions of {limits.talker.max_model_len}; use a "
                "shorter reference clip or instruction",
                field="voice" if request.voice is not None else "instruct",
            )
        cap = min(limits.stream.max_frames, room)
        least, most = request.min_frames, request.max_frames
        for name, value in (("min_frames", least), ("max_frames", 2 if most is None else most)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidRequest(f"{name} must be a whole number of frames, not {value!r}", field=name)
        if most is not None and not 2 <= most <= cap:
            raise InvalidRequest(
                f"max_frames = {most}; with this text and voice it may be 2 to {cap}", field="max_frames"
            )
        if least > (cap if most is None else most):
            top = f"the {cap} that fit with this text and voice" if most is None else f"max_frames = {most}"
            raise InvalidRequest(f"min_frames = {least} is more than {top}", field="min_frames")
        least = max(2, least)
        return least, max(least, text.frame_cap(part, cap)) if most is None else most

    # ---- state -------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Counters since start and gauges of now, plain numbers."""
        return self._loop.metrics() | memory.in_use(self.device)

    @property
    def failure(self) -> str | None:
        """Why the engine no longer serves, or None."""
        return self._loop.failure

    def close(self) -> None:
        """End every request as cancelled and free the models."""
        self._loop.close()
        self._talker.close()
        self._trace.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _device_names(self) -> str:
        def named(device: torch.device) -> str:
            if device.type == "cuda":
                return torch.cuda.get_device_name(device)
            threads = self.config.threads or torch.get_num_threads()
            return f"CPU, {threads} thread{'s' if threads > 1 else ''}"

        apart = self.codec_device not in (self.device, torch.device(self.device.type, 0))
        return named(self.device) + (f"; codec on {self.codec_device}: {named(self.codec_device)}" if apart else "")

    def _describe(self, startup_s: float) -> EngineInfo:
        from importlib.metadata import version

        import vllm

        return EngineInfo(
            model=self.checkpoint.name,
            checkpoint_id=self.checkpoint.id,
            task=self.checkpoint.task,
            weights=self.checkpoint.weights,
            languages=tuple(self.checkpoint.languages),
            speakers=tuple(self.checkpoint.speakers),
            takes_instruct=self.prompts.takes_instruct,
            groups=self.checkpoint.groups,
            sample_rate=SAMPLE_RATE,
            device=self.device.type,
            device_name=self._device_names(),
            dtype=str(self.dtype).removeprefix("torch."),
            scheduler_mode=self._talker.settings.scheduler_mode,
            config=self.config.model_dump(),
            config_hash=self.config.hash,
            versions={"torch": torch.__version__, "vllm": vllm.__version__, "transformers": version("transformers")},
            startup_s=round(startup_s, 2),
            notice=self.checkpoint.notice,
        )
