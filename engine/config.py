"""Every setting of the engine, typed, with its default; read from YAML overlays.

A profile (`configs/*.yaml`) holds only what differs from these defaults. `extends: <file>` puts one overlay on
another. An unknown key is an error that names the nearest known one. `EngineConfig.hash` travels with every result.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
EMBEDDED_MODEL = "assets/embedded"
PUBLISHED = (
    EMBEDDED_MODEL,
    *(f"Qwen/Qwen3-TTS-12Hz-{kind}" for kind in ("1.7B-Base", "0.6B-Base", "1.7B-CustomVoice", "0.6B-CustomVoice")),
    "Qwen/Qwen3-TTS-12Hz-1.7B-VoiceDesign",
)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class TalkerConfig(Section):
    """The vLLM side."""

    scheduler_mode: Literal["auto", "sync", "async"] = "auto"  # vLLM's scheduling; auto: async on CUDA, sync on CPU
    max_num_seqs: int = Field(16, ge=1, le=1024)  # requests in one step
    max_model_len: int = Field(2048, ge=64)  # prefill rows + frames of one request
    max_prompt: int = Field(1024, ge=16)  # rows of prefill + trailing text a slot can hold
    max_num_batched_tokens: int = Field(1280, ge=32)  # bounds the prefill of one step, so arrivals cannot stall streams
    kv_cache_gib: float = Field(0.0, ge=0)  # 0: as many tokens as max_num_seqs * max_model_len need
    cudagraph: Literal["full", "decode", "none"] = "full"
    capture_sizes: tuple[int, ...] = (1, 4, 8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 480, 640, 960, 1280)
    # persistent (auto): one kernel for one stream, where the GPU and the model suit it; otherwise skinny, and fused for
    # three streams or more
    predictor: Literal["auto", "fused", "skinny", "persistent", "plain"] = "auto"
    # fp8: the predictor's matrices in eight bits: skinny reads half the bytes, all else uses the same rounded weights.
    # It changes the distribution that codes are drawn from slightly, so it is off unless asked for.
    predictor_weights: Literal["auto", "fp8"] = "auto"
    # After the talker's step in CUDA graphs of its own (auto, own_graph) or without (eager), or inside the step and its
    # graph (graph; auto where there are no graphs, or with deterministic)
    predictor_placement: Literal["auto", "graph", "own_graph", "eager"] = "auto"
    # The talker's own layers. skinny: in steps of one row on CUDA the predictor's kernels of that name; paged (auto):
    # there in one kernel, too, what else vLLM's kernels do: norms, rotary embedding, cache and attention
    layers: Literal["auto", "separate", "skinny", "paged"] = "auto"
    # high (auto): where kernels of both wait for room on the GPU, the talker's start before the codec's
    stream_priority: Literal["auto", "high", "normal"] = "auto"
    deterministic: bool = False  # CUDA: the same codes at any load (batch-invariant kernels, each prompt by itself)
    self_check: bool = True  # CUDA graphs: compare graph and eager at start, refuse to serve if they differ


class CodecConfig(Section):
    """How codes become PCM. The settings besides the defaults exist to be measured against."""

    # auto: the talker's; "cuda:1" decodes on a second GPU, "cpu" beside a GPU that has no room left
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    mode: Literal["stateful", "windowed"] = "stateful"
    left_context: int = Field(72, ge=0)  # windowed only: frames decoded again for each chunk; the peers used 25 and 72
    state: Literal["device", "host"] = (
        "device"  # where streams wait between chunks; host: two copies a chunk, no graphs
    )
    batching: bool = True
    max_batch: int = Field(32, ge=1)
    admission: Literal["unlimited", "by_task"] | int = "unlimited"  # streams that may hold the codec at once
    in_flight: int = Field(2, ge=1)  # codec steps that a GPU may have before it; more due chunks wait and share steps
    # ahead: on a GPU streams' first chunks do not queue behind other chunks, nor behind the talker's kernels (auto)
    first_chunks: Literal["auto", "ahead", "queue"] = "auto"
    # Streams with time in hand wait until so many can share a codec step; auto: on a GPU one of eight, four at most
    gather: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    capture: tuple[tuple[int, int], ...] = ()  # (batch, frames) graphs; (): from the chunk schedule
    # auto: on CUDA float16 in the upsampling blocks, where nearly all the work is, if the weights at hand bear it and
    # all chunks run in graphs (else float32, which is TF32 there and 1.7 times as slow, but starts half a minute
    # sooner); float32 on the CPU
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"


class StreamConfig(Section):
    """Chunk sizes and endings of one stream."""

    chunk_schedule: tuple[int, ...] = Field((1, 2, 4, 8, 12), min_length=1)  # frames; the last repeats
    max_waiting: int = Field(64, ge=0)  # queued beyond the running ones; past it EngineBusy
    deadline_s: float | None = Field(None, gt=0)
    split_chars: int = Field(280, ge=40)  # longer text is spoken in parts, split at sentences
    spoken_forms: Literal["auto", "on", "off"] = "auto"  # numbers, dates, prices to English words; auto: see text.py
    max_text_chars: int = Field(20_000, ge=1)
    max_frames: int = Field(1024, ge=2)  # of one part, whatever its text


class WatchdogConfig(Section):
    """Stops runaways: no end in sight, yet nothing said any more."""

    enabled: Literal["auto", "on", "off"] = "auto"  # auto: on for trained weights
    silence_s: float = Field(3.0, gt=0)  # of PCM below silence_dbfs
    silence_dbfs: float = -50.0
    loop_frames: int = Field(30, ge=4)  # one and the same code 0 in a row


class EngineConfig(Section):
    """All settings. `model` is a checkpoint folder, a hub id, or "dummy:<size>-<kind>"."""

    model: str = EMBEDDED_MODEL
    load_format: Literal["auto", "dummy"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on CUDA if stored so, else float32
    threads: int = Field(0, ge=0)  # CPU threads that torch may use to speak; 0: all cores. One suits small models
    voices_dir: str = "data/voices"  # saved voices
    trace: str | None = None  # JSON-lines file
    models: tuple[str, ...] = PUBLISHED  # offered by the page's model switcher; a folder of checkpoints stands for each
    talker: TalkerConfig = TalkerConfig()
    codec: CodecConfig = CodecConfig()
    stream: StreamConfig = StreamConfig()
    watchdog: WatchdogConfig = WatchdogConfig()

    @classmethod
    def load(cls, path: str | Path | None = None, **overrides: Any) -> EngineConfig:
        """Read an overlay and apply overrides, e.g. `load("configs/latency.yaml", model="Qwen/…")`.

        Dotted keys work too: `**{"talker.scheduler_mode": "sync"}`.

        Raises:
            ConfigError: no such file, not YAML, an unknown key (the nearest is named), or a value out of range.
        """
        data = _read_overlay(Path(path)) if path else {}
        for key, value in overrides.items():
            _merge(data, _undot(key, value))
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> EngineConfig:
        try:
            config = cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError(*_explain(error)) from None
        if config.codec.state == "host" and config.codec.capture:
            raise ConfigError(
                "codec.capture names graphs, but with codec.state: host every chunk copies its state, which no graph "
                "can hold; leave codec.capture out or set codec.state to device",
                field="codec.capture",
            )
        return config

    def replace(self, **overrides: Any) -> EngineConfig:
        """A copy with overrides, as in `load`."""
        data = self.model_dump()
        for key, value in overrides.items():
            _merge(data, _undot(key, value))
        return self.from_dict(data)

    @property
    def hash(self) -> str:
        """Short SHA-256 of the resolved settings that a result depends on: not of the models that are on offer."""
        return hashlib.sha256(json.dumps(self.model_dump(exclude={"models"}), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def model_path(self) -> str:
        """`model`, with a folder of this repository found from any working directory."""
        inside = ROOT / self.model
        return str(inside) if not Path(self.model).is_absolute() and inside.is_dir() else self.model


def _undot(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _merge(into: dict[str, Any], other: dict[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _read_overlay(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    if not path.is_file() and (ROOT / path).is_file():
        path = ROOT / path
    if not path.is_file():
        known = ", ".join(sorted(str(p.relative_to(ROOT)) for p in (ROOT / "configs").rglob("*.yaml")))
        raise ConfigError(f"no config file {path}; there are {known}", field="config")
    if path in seen:
        raise ConfigError(f"{path} extends itself", field="extends")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}", field="config") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold keys and values", field="config")
    base = data.pop("extends", None)
    if base is None:
        return data
    merged = _read_overlay(path.parent / base, (*seen, path))
    _merge(merged, data)
    return merged


def _known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, info in model.model_fields.items():
        keys.append(prefix + name)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            keys += _known_keys(info.annotation, f"{prefix}{name}.")
    return keys


def _explain(error: ValidationError) -> tuple[str]:
    lines = []
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, _known_keys(EngineConfig), n=1, cutoff=0.3)
            lines.append(f"unknown setting {key}" + (f"; did you mean {near[0]}?" if near else ""))
        else:
            lines.append(f"{key} = {fault['input']!r}: {fault['msg'].lower()}")
    return ("; ".join(lines),)
