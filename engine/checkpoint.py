"""Find, check and read a Qwen3-TTS checkpoint in its published layout.

Layout: `config.json`, one or many safetensors files (with `model.safetensors.index.json`), tokenizer files,
`generation_config.json`, and `speech_tokenizer/` with a config and weights of its own. `open` reads headers only,
so a damaged or mismatched checkpoint is refused before any weight is loaded.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from engine import geometry
from engine.errors import CheckpointError

if TYPE_CHECKING:
    import torch

TASKS = {"base": "Base", "custom_voice": "CustomVoice", "voice_design": "VoiceDesign"}
DUMMY_PREFIX = "dummy:"  # "dummy:1.7b-base": random weights of a published geometry, no file read

# The reference's fall-backs where generation_config.json is silent (qwen-tts 0.1.1, Qwen3TTSModel).
GENERATION_DEFAULTS: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.9,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.05,
    "subtalker_dosample": True,
    "subtalker_temperature": 0.9,
    "subtalker_top_k": 50,
    "subtalker_top_p": 1.0,
    "max_new_tokens": 2048,
}


@dataclass(frozen=True)
class TensorFile:
    """One safetensors file, and the shapes and dtypes ("BF16", "F16", ...) its header declares."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint. `path` is None for random weights of a published geometry."""

    name: str
    path: Path | None
    config: dict[str, Any]
    codec_config: dict[str, Any]
    generation: dict[str, Any]
    load_format: str = "auto"  # "auto" | "dummy"
    files: tuple[TensorFile, ...] = ()
    codec_files: tuple[TensorFile, ...] = field(default=())

    @classmethod
    def open(cls, source: str | Path, load_format: str = "auto") -> Checkpoint:
        """Open a folder, a hub id ("Qwen/Qwen3-TTS-12Hz-1.7B-Base") or "dummy:<size>-<kind>".

        Args:
            source: where the checkpoint is.
            load_format: "auto" reads the weights; "dummy" makes random ones of the config's geometry.

        Raises:
            CheckpointError: missing, damaged, of another kind, or weights that do not fit the config.
        """
        text = str(source)
        if text.startswith(DUMMY_PREFIX):
            return cls._published(text[len(DUMMY_PREFIX) :])
        folder = Path(source).expanduser()
        if not folder.is_dir():
            folder = _from_hub(text)
        config = _read_json(folder / "config.json")
        codec_config = _read_json(folder / "speech_tokenizer" / "config.json", missing_ok=load_format == "dummy")
        checkpoint = cls(
            name=folder.name if Path(source).expanduser().is_dir() else text,
            path=folder,
            config=config,
            codec_config=codec_config or geometry.published_codec_config(),
            generation=GENERATION_DEFAULTS | _read_json(folder / "generation_config.json", missing_ok=True),
            load_format=load_format,
            files=() if load_format == "dummy" else _tensor_files(folder),
            codec_files=() if load_format == "dummy" else _tensor_files(folder / "speech_tokenizer"),
        )
        checkpoint._check()
        return checkpoint

    @classmethod
    def _published(cls, name: str) -> Checkpoint:
        config = geometry.published_config(name)
        if config is None:
            raise CheckpointError(
                f"no published geometry is called {name!r}; use one of 0.6b or 1.7b with base, customvoice or "
                "voicedesign, for example dummy:1.7b-base",
                field="model",
            )
        codec_config = geometry.published_codec_config()
        return cls(f"{DUMMY_PREFIX}{name.lower()}", None, config, codec_config, dict(GENERATION_DEFAULTS), "dummy")

    # ---- what it is -------------------------------------------------------------------------------------------

    @property
    def task(self) -> str:
        """ "Base" | "CustomVoice" | "VoiceDesign"."""
        return TASKS[self.config["tts_model_type"]]

    @property
    def talker(self) -> dict[str, Any]:
        return self.config["talker_config"]

    @property
    def groups(self) -> int:
        """Codes per frame."""
        return int(self.talker["num_code_groups"])

    @property
    def languages(self) -> list[str]:
        """Names a request may use besides "auto"; dialect ids are reached through their speaker."""
        return [name for name in self.talker.get("codec_language_id") or {} if "dialect" not in name]

    @property
    def speakers(self) -> list[str]:
        return sorted(self.talker.get("spk_id") or {})

    @property
    def weights(self) -> str:
        """ "random" for dummy weights and for checkpoints that say so themselves, else "trained"."""
        return "random" if self.load_format == "dummy" or self.config.get("random_weights") else "trained"

    @property
    def stored_dtype(self) -> str | None:
        """What most of the talker is stored in ("BF16" in the published checkpoints); None without files."""
        sizes: Counter[str] = Counter()
        for file in self.files:
            for name, shape in file.shapes.items():
                if name.startswith("talker."):
                    sizes[file.dtypes[name]] += math.prod(shape)
        return sizes.most_common(1)[0][0] if sizes else None

    @property
    def notice(self) -> str:
        """What the checkpoint's makers want every user told (`notice` in config.json), or ""."""
        return str(self.config.get("notice") or "")

    @cached_property
    def id(self) -> str:
        """Stable short hash of configs and tensor headers; keys voice caches."""
        digest = hashlib.sha256(json.dumps([self.config, self.codec_config], sort_keys=True).encode())
        for file in (*self.files, *self.codec_files):
            digest.update(f"{file.path.name}:{file.path.stat().st_size}:{file.path.stat().st_mtime_ns}".encode())
        return digest.hexdigest()[:16]

    # ---- tensors ----------------------------------------------------------------------------------------------

    def tensors(self, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
        """(full name, CPU tensor) of the main model's tensors whose name starts with `prefix`."""
        return _iterate(self.files, prefix)

    def codec_tensors(self, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
        """The same for `speech_tokenizer/`."""
        return _iterate(self.codec_files, prefix)

    # ---- checks -----------------------------------------------------------------------------------------------

    def _check(self) -> None:
        config, where = self.config, f"{self.path}/config.json"
        if config.get("model_type") != "qwen3_tts" or "talker_config" not in config:
            raise CheckpointError(
                f"{where}: model_type is {config.get('model_type')!r}, not 'qwen3_tts'; this is not a Qwen3-TTS "
                "checkpoint",
                field="model",
            )
        kinds = {str(config.get("tokenizer_type")), str(self.codec_config.get("model_type"))}
        if any("25hz" in kind or "tokenizer_v1" in kind for kind in kinds):
            raise CheckpointError(
                f"{self.name} uses the 25 Hz speech tokenizer; Chorus serves the 12 Hz family (Qwen3-TTS-12Hz-...)",
                field="model",
            )
        if config.get("tts_model_type") not in TASKS:
            raise CheckpointError(
                f"{where}: tts_model_type is {config.get('tts_model_type')!r}; expected one of {sorted(TASKS)}",
                field="model",
            )
        quantizers = self.codec_config["decoder_config"].get("num_quantizers", self.groups)
        if quantizers != self.groups:
            raise CheckpointError(
                f"{self.name}: the talker makes {self.groups} codes a frame, its speech tokenizer takes {quantizers}; "
                "talker and speech_tokenizer/ do not belong together",
                field="model",
            )
        if self.load_format != "dummy":
            self._check_geometry()

    def _check_geometry(self) -> None:
        found = {name: shape for file in self.files for name, shape in file.shapes.items()}
        for name, shape in geometry.talker_shapes(self.config).items():
            if name not in found:
                raise CheckpointError(
                    f"{self.path}: tensor {name} is missing; download the checkpoint again", field="model"
                )
            if found[name] != shape:
                raise CheckpointError(
                    f"{self.path}: tensor {name} has shape {list(found[name])}, config.json asks for {list(shape)}; "
                    "config and weights do not belong together",
                    field="model",
                )
        if self.task == "Base" and not any(name.startswith("speaker_encoder.") for name in found):
            raise CheckpointError(f"{self.path}: a Base checkpoint without speaker_encoder.* tensors", field="model")


def _from_hub(source: str) -> Path:
    if source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise CheckpointError(
            f"no such folder: {source}; give a checkpoint folder or a hub id such as Qwen/Qwen3-TTS-12Hz-1.7B-Base",
            field="model",
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source))
    except Exception as error:
        raise CheckpointError(
            f"{source} is neither a folder here nor could it be fetched from the hub ({type(error).__name__}: {error})",
            field="model",
        ) from error


def _read_json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if missing_ok:
            return {}
        raise CheckpointError(f"{path} is missing; this is not a whole Qwen3-TTS checkpoint", field="model")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}", field="model") from error


def _tensor_files(folder: Path) -> tuple[TensorFile, ...]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(_read_json(index)["weight_map"].values()))
        for name in names:
            if not (folder / name).is_file():
                raise CheckpointError(f"shard {name} named in {index} is missing; download it again", field="model")
        paths = [folder / name for name in names]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(f"{folder} holds no safetensors file; download the weights", field="model")
    return tuple(_read_header(path) for path in paths)


def _read_header(path: Path) -> TensorFile:
    """Shapes out of a safetensors header; the file must be as long as its header says."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length <= 0 or length > size - 8:
            raise CheckpointError(f"{path} is truncated inside its header; download it again", field="model")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise CheckpointError(f"{path} is not a safetensors file: {error}", field="model") from error
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][1]):
        end = 8 + length + entry["data_offsets"][1]
        if end > size:
            raise CheckpointError(
                f"{path} is truncated: tensor {name} ends at byte {end}, the file has {size}; download it again",
                field="model",
            )
    shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
    return TensorFile(path, shapes, {name: entry["dtype"] for name, entry in header.items()})


def _iterate(files: tuple[TensorFile, ...], prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        names = [name for name in file.shapes if name.startswith(prefix)]
        if names:
            with safe_open(file.path, framework="pt") as handle:
                for name in names:
                    yield name, handle.get_tensor(name)
