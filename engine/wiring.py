"""From settings to the arguments of each part: device, dtypes, vLLM's limits, graph sizes, codec policy."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint import Checkpoint
from engine.codec.codec import Codec
from engine.codec.graphs import CodecRunner, StreamDecoder
from engine.codec.host_state import HostStateDecoder
from engine.codec.windowed import WindowedDecoder
from engine.config import ROOT, EngineConfig
from engine.errors import CheckpointError, ConfigError
from engine.scheduler import TASK_GATE, SchedulerSettings
from engine.speaker import SpeakerEncoder
from engine.talker.settings import TalkerSettings

log = logging.getLogger(__name__)
AUTO_LEAST_DB = 50.0  # of the codec in float16, for random codes; the embedded voice's has 61
LEAD_S = {"cuda": 0.1, "cpu": 0.25}  # a talker step and the codec's queue take 10 to 30 ms on a GPU
MOST_AHEAD = 16  # streams whose first chunks share a graph; more take several


def device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no CUDA device here; use device: auto", field="device")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def dtype(config: EngineConfig, device: torch.device, checkpoint: Checkpoint | None = None) -> torch.dtype:
    """auto: on CUDA bfloat16 for weights that are stored in it (the published ones) or are random, else float32.

    float16, as the embedded voice has it, has three bits more than bfloat16; float32 keeps them.
    """
    if config.dtype == "auto":
        finer = checkpoint is not None and checkpoint.stored_dtype not in (None, "BF16")
        return torch.bfloat16 if device.type == "cuda" and not finer else torch.float32
    return getattr(torch, config.dtype)


def codec_device(config: EngineConfig, talker: torch.device) -> torch.device:
    """Where codes become PCM: with the talker, or where `codec.device` says.

    Raises:
        ConfigError: there is no such device here.
    """
    if config.codec.device == "auto":
        return talker
    wanted = torch.device(config.codec.device)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted.type == "cuda" and (wanted.index or 0) >= count:
        here = ", ".join(["cpu", *(f"cuda:{i}" for i in range(count))])
        raise ConfigError(f"codec.device is {wanted}, but torch finds only {here}; use auto", field="codec.device")
    return wanted


def load_codec(config: EngineConfig, checkpoint: Checkpoint, target: torch.device) -> Codec:
    """The codec in `codec.dtype`. auto: on CUDA float16, as near to exact as TF32, which float32 is there, and 1.7
    times as fast (docs/measurements/gpu.md); float32 on the CPU, where the weights do not bear float16, and where a
    chunk may run outside of graphs: there cuDNN's unmeasured choices take 70 ms for each of two convolutions.

    Raises:
        CheckpointError, ConfigError: see Codec.load.
    """
    if config.codec.dtype != "auto":
        return Codec.load(checkpoint, target, getattr(torch, config.codec.dtype))
    if target.type == "cuda" and any(frames == 1 for _, frames in capture(config)):  # then every chunk has graphs
        try:
            return Codec.load(checkpoint, target, torch.float16, AUTO_LEAST_DB)
        except ConfigError as error:
            log.warning("The codec runs in float32. %s", error.message)
    return Codec.load(checkpoint, target)


def talker_settings(config: EngineConfig, device: torch.device, checkpoint: Checkpoint | None = None) -> TalkerSettings:
    t = config.talker
    mode = t.scheduler_mode
    if mode == "auto":
        mode = "async" if device.type == "cuda" else "sync"
    return TalkerSettings(
        max_num_seqs=t.max_num_seqs,
        max_model_len=t.max_model_len,
        max_prompt=t.max_prompt,
        max_frames=config.stream.max_frames,
        max_num_batched_tokens=t.max_num_batched_tokens,
        scheduler_mode=mode,
        dtype=str(dtype(config, device, checkpoint)).removeprefix("torch."),
        device=device.type,
        kv_cache_memory_bytes=int(t.kv_cache_gib * 2**30) or None,
        cudagraph=t.cudagraph,
        capture_sizes=t.capture_sizes,
        predictor=t.predictor,
        predictor_weights=t.predictor_weights,
        predictor_placement=t.predictor_placement,
        layers=t.layers,
        stream_priority=t.stream_priority,
        deterministic=t.deterministic,
        self_check=t.self_check,
    )


def capture(config: EngineConfig) -> tuple[tuple[int, int], ...]:
    """(batch, frames) sizes to capture: the configured ones, or powers of two for each size of the chunk schedule."""
    if config.codec.state == "host":
        return ()
    if config.codec.capture:
        return config.codec.capture
    top = min(config.codec.max_batch, config.talker.max_num_seqs)
    batches = sorted({b for b in (1, 2, 4, 8, 16, 32, 64, 128) if b < top} | {top})
    frames = sorted(set(config.stream.chunk_schedule) | {1, 2, 4, 8})
    return tuple((batch, count) for count in frames for batch in batches)


def ahead(config: EngineConfig) -> tuple[tuple[int, int], ...]:
    """(batch, frames) sizes of first chunks, to capture once more (`CodecRunner`)."""
    if config.codec.first_chunks == "queue" or config.codec.state == "host":
        return ()
    first = config.stream.chunk_schedule[0]
    return tuple((batch, frames) for batch, frames in capture(config) if frames == first and batch <= MOST_AHEAD)


def codec_runner(config: EngineConfig, codec: Codec, target: torch.device) -> CodecRunner:
    """Slots for every stream that may run, over the decoder that `codec.mode` asks for."""
    decoder: StreamDecoder = codec.decoder
    if config.codec.mode == "windowed":
        decoder = WindowedDecoder(codec.decoder, config.codec.left_context)
    if config.codec.state == "host":
        decoder = HostStateDecoder(decoder)
    return CodecRunner(
        decoder,
        slots=config.talker.max_num_seqs,
        capture=capture(config) if target.type == "cuda" else (),
        device=target,
        dtype=codec.decoder.tail_dtype,
        ahead=ahead(config) if target.type == "cuda" else (),
    )


def scheduler_settings(config: EngineConfig, runner: CodecRunner) -> SchedulerSettings:
    codec, cuda = config.codec, runner.device.type == "cuda"
    admission: Any = codec.admission
    if admission == "unlimited":
        admission = None
    elif admission == "by_task":
        admission = TASK_GATE
    return SchedulerSettings(
        schedule=config.stream.chunk_schedule,
        max_batch=codec.max_batch,
        batching=codec.batching,
        admission=admission,
        gather=(4 if cuda else 1) if codec.gather == "auto" else codec.gather,
        gather_share=8 if codec.gather == "auto" else 1,
        in_flight=codec.in_flight,
        lead_s=LEAD_S["cuda" if cuda else "cpu"],
        captured=frozenset(runner.captured),
        ahead=frozenset(frames for _, frames in runner.ahead),
    )


def inside_root(folder: str) -> Path:
    """A relative folder of the settings lies in the repository, wherever the program was started."""
    path = Path(folder).expanduser()
    return path if path.is_absolute() else ROOT / path


def speaker_encoder(checkpoint: Checkpoint, target: torch.device) -> SpeakerEncoder | None:
    """The checkpoint's speaker encoder in float32, ready to embed; None for checkpoints that do not clone."""
    if checkpoint.task != "Base":
        return None
    encoder = SpeakerEncoder(checkpoint.config.get("speaker_encoder_config") or {})
    if checkpoint.load_format != "dummy":
        prefix = "speaker_encoder."
        state = {name[len(prefix) :]: tensor for name, tensor in checkpoint.tensors(prefix)}
        try:
            encoder.load_state_dict(state)
        except RuntimeError as error:
            raise CheckpointError(f"{checkpoint.name}: speaker encoder: {error}", field="model") from None
    return encoder.float().eval().requires_grad_(False).to(target)
