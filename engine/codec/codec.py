"""The codec of a checkpoint: its encoder and decoder, loaded by name and checked."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from engine.checkpoint import Checkpoint
from engine.codec import precision
from engine.codec.decoder import CodecDecoder
from engine.codec.encoder import CodecEncoder
from engine.errors import CheckpointError, InvalidAudio


class Codec:
    """PCM to codes and back.

    Attributes:
        decoder: frozen, on `device` in `dtype`.
        encoder: float32 on `device`, whatever the decoder's dtype: codes are nearest neighbours, and rounding
            would pick others.
        groups: codes per frame. samples_per_frame: PCM samples per frame.
    """

    def __init__(self, encoder: CodecEncoder, decoder: CodecDecoder, groups: int) -> None:
        self.encoder = encoder.eval().requires_grad_(False)
        self.decoder = decoder.freeze()
        self.groups = groups
        self.samples_per_frame = decoder.samples_per_frame

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint | str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        least_db: float | None = None,
    ) -> Codec:
        """The codec in `speech_tokenizer/` of a checkpoint; random weights where the checkpoint is "dummy". `least_db`:
        how near to float32 it must be in a `dtype` of 16 bits, see precision.check.

        Raises:
            CheckpointError: a tensor is missing, unknown or of another shape, or the config cannot be built.
            ConfigError: these weights do not bear a `dtype` of 16 bits (precision.py).
        """
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint.open(checkpoint)
        config = checkpoint.codec_config
        groups = int(config.get("encoder_valid_num_quantizers", 16))
        frame = int(config.get("encode_downsample_rate", 1920))
        with torch.device("meta"):
            encoder = CodecEncoder(_section(config, "encoder_config"), frame)
            decoder = CodecDecoder(_section(config, "decoder_config"))
        _check_match(encoder, decoder, groups)
        if checkpoint.load_format == "dummy":
            _fill_random(encoder.to_empty(device=device))
            _fill_random(decoder.to_empty(device=device))
        else:
            _load(encoder, checkpoint, "encoder.")
            _load(decoder, checkpoint, "decoder.")
        # Random weights are there to be measured: noise has no precision to lose.
        asked = dtype != torch.float32 and checkpoint.load_format != "dummy"
        if asked and dtype == torch.float16:
            precision.check_room(decoder.to(device))
        wanted = precision.spoken(decoder.to(device)) if asked else None
        codec = cls(encoder.to(device, torch.float32), decoder.to(device).narrow(dtype), groups)
        if wanted is not None:
            precision.check(codec.decoder, wanted, least_db)
        return codec

    def encode(self, pcm: np.ndarray) -> np.ndarray:
        """float32 [samples], mono 24 kHz -> int64 [ceil(samples / 1920), groups].

        Raises:
            InvalidAudio: not one channel, or empty.
        """
        if pcm.ndim != 1 or not pcm.size:
            raise InvalidAudio(f"The codec encodes one channel of samples; got shape {pcm.shape}.", field="voice")
        if not np.isfinite(pcm).all():
            raise InvalidAudio("The audio holds NaN or infinite samples.", field="voice")
        device = self.encoder.downsample.conv.weight.device
        signal = torch.from_numpy(np.ascontiguousarray(pcm, dtype=np.float32)).to(device)
        return self.encoder(signal[None, None], self.groups)[0].T.cpu().numpy()

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """A whole sequence: int64 [frames, groups] -> float32 [frames * 1920]. Raises InvalidRequest."""
        tensor = torch.from_numpy(np.asarray(codes)).T[None]
        self.decoder.check_codes(tensor)
        device = self.decoder.pre_conv.conv.weight.device
        # Triton launches on the current device, wherever its tensors are.
        with torch.inference_mode(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return self.decoder(tensor.to(device))[0, 0].float().cpu().numpy()


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    if not isinstance(section, dict):
        raise CheckpointError(f"speech_tokenizer/config.json lacks {name}; is this a 12 Hz checkpoint?", field=name)
    return section


def _check_match(encoder: CodecEncoder, decoder: CodecDecoder, groups: int) -> None:
    if decoder.samples_per_frame != encoder.samples_per_frame:
        raise CheckpointError(
            f"speech_tokenizer/config.json: a frame is {encoder.samples_per_frame} samples for the encoder and "
            f"{decoder.samples_per_frame} for the decoder.",
            field="decoder_config.upsample_rates",
        )
    if groups != decoder.groups or groups > encoder.config["num_quantizers"]:
        raise CheckpointError(
            f"speech_tokenizer/config.json: encoder_valid_num_quantizers is {groups}; the decoder takes "
            f"{decoder.groups} and the encoder has {encoder.config['num_quantizers']}.",
            field="encoder_valid_num_quantizers",
        )
    if encoder.config["codebook_size"] > decoder.codebook_size:
        raise CheckpointError(
            f"speech_tokenizer/config.json: the encoder's codebooks hold {encoder.config['codebook_size']} entries, "
            f"the decoder's {decoder.codebook_size}.",
            field="encoder_config.codebook_size",
        )


def _load(module: nn.Module, checkpoint: Checkpoint, prefix: str) -> None:
    """Puts the tensors under `prefix` in place of the module's meta tensors; every name and shape must match."""
    tensors = {name[len(prefix) :]: tensor.float() for name, tensor in checkpoint.codec_tensors(prefix)}
    wanted = {name: tuple(t.shape) for name, t in module.state_dict().items()}
    where = f"{checkpoint.name}/speech_tokenizer"
    for name, shape in wanted.items():
        if name not in tensors:
            raise CheckpointError(f"{where}: tensor {prefix}{name} is missing; download it again.", field="model")
        if tuple(tensors[name].shape) != shape:
            raise CheckpointError(
                f"{where}: tensor {prefix}{name} has shape {list(tensors[name].shape)}, config.json asks for "
                f"{list(shape)}; config and weights do not belong together.",
                field="model",
            )
    if unknown := sorted(tensors.keys() - wanted.keys()):
        raise CheckpointError(
            f"{where}: tensor {prefix}{unknown[0]} (and {len(unknown) - 1} more) is not part of a 12 Hz codec as "
            "config.json describes it.",
            field="model",
        )
    module.load_state_dict(tensors, strict=True, assign=True)


@torch.no_grad()
def _fill_random(module: nn.Module) -> None:
    """Random weights of a trained codec's size, for measuring speed; the sound is noise."""
    generator = torch.Generator(device=next(module.parameters()).device).manual_seed(0)
    for name, t in module.state_dict().items():
        if t.ndim > 1:
            t.normal_(0, 0.5 / t[0].numel() ** 0.5, generator=generator)
        else:
            t.fill_(0.0 if name.endswith(("bias", "alpha", "beta")) else 0.01 if name.endswith("scale") else 1.0)
