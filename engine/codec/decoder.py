"""The 12 Hz codec decoder: codes in, 24 kHz PCM out; whole sequences or chunk by chunk with the same samples.

Plain torch and differentiable. Parameter names are those of `decoder.*` in speech_tokenizer/model.safetensors, so a
reference state dict loads strictly. Structure: qwen_tts/core/tokenizer_12hz/modeling_qwen3_tts_tokenizer_v2.py of
qwen-tts 0.1.1.

    decoder = CodecDecoder(codec_config["decoder_config"])
    pcm = decoder(codes)                          # [B, G, T] -> [B, 1, T * 1920]

    state = decoder.init_state(batch=2)           # explicit tensors, one row per stream
    pcm, state = decoder.step(codes, state)       # the next T frames of each stream
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine.codec.layers import CausalConv, CausalUpsample, ConvNeXtBlock, SnakeBeta, UpsampleBlock
from engine.codec.quantizer import ResidualQuantizer, SplitQuantizer
from engine.codec.streaming import DecoderState, StateWalk
from engine.codec.transformer import SlidingTransformer
from engine.errors import CheckpointError, InvalidRequest

# Values the reference's Qwen3TTSTokenizerV2DecoderConfig takes for keys a config.json leaves out.
DEFAULTS: dict[str, Any] = {
    "codebook_size": 2048,
    "hidden_size": 1024,
    "latent_dim": 1024,
    "rope_theta": 10000.0,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "attention_bias": False,
    "sliding_window": 72,
    "intermediate_size": 3072,
    "hidden_act": "silu",
    "layer_scale_initial_scale": 0.01,
    "rms_norm_eps": 1e-5,
    "num_hidden_layers": 8,
    "num_quantizers": 16,
    "upsample_rates": (8, 5, 4, 3),
    "upsampling_ratios": (2, 2),
    "decoder_dim": 1536,
}


class CodecDecoder(nn.Module):
    """Codes to PCM.

    Args:
        config: the `decoder_config` of speech_tokenizer/config.json.

    Attributes:
        groups: code groups per frame. codebook_size: codes are 0 .. codebook_size - 1.
        samples_per_frame: PCM samples of one frame (1920 in the published checkpoints).

    Raises:
        CheckpointError: a field is missing or cannot be built.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        c = resolve_config(config)
        self.config = c
        self.groups: int = c["num_quantizers"]
        self.codebook_size: int = c["codebook_size"]
        self.samples_per_frame: int = math.prod((*c["upsample_rates"], *c["upsampling_ratios"]))
        # See `freeze`. The second takes [B, T, latent] and keeps histories as [B, n, channels].
        self._fused_tail: Callable[[Tensor, StateWalk | None], Tensor] | None = None
        self._channels_last_tail: Callable[[Tensor, StateWalk | None], Tensor] | None = None
        self._compact_transformer: Callable[[Tensor, StateWalk | None], Tensor] | None = None
        latent, width = c["latent_dim"], c["decoder_dim"]

        # Registered in the order in which they run: the state's tensors are kept in that order.
        self.quantizer = SplitQuantizer(self.groups, self.codebook_size, c["codebook_dim"] // 2, c["codebook_dim"])
        self.pre_conv = CausalConv(c["codebook_dim"], latent, 3)
        self.pre_transformer = SlidingTransformer(c)
        self.upsample = nn.ModuleList(
            nn.ModuleList([CausalUpsample(latent, latent, ratio, ratio), ConvNeXtBlock(latent)])
            for ratio in c["upsampling_ratios"]
        )
        widths = [width // 2**i for i in range(len(c["upsample_rates"]) + 1)]
        self.decoder = nn.ModuleList(
            [
                CausalConv(latent, width, 7),
                *(UpsampleBlock(widths[i], widths[i + 1], rate) for i, rate in enumerate(c["upsample_rates"])),
                SnakeBeta(widths[-1]),
                CausalConv(widths[-1], 1, 7),
            ]
        )

    def forward(self, codes: Tensor) -> Tensor:
        """Whole sequences: int64 [B, G, T], T >= 1 -> PCM in [-1, 1], [B, 1, T * samples_per_frame].

        Codes must lie in the codebook: they index tables, and on a GPU a bad index aborts the process. Check codes
        from outside with `check_codes`.
        """
        return self.decode_with(codes, None)

    def step(self, codes: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """The next T frames of each stream; rows may stand at different positions.

        Args:
            codes: int64 [B, G, T], T >= 1.
            state: from `init_state` or an earlier step; left as it is.

        Returns:
            PCM [B, 1, T * samples_per_frame], equal to that stretch of `forward` over all codes (float32: within
            1e-4), and the next state. Shapes depend on B and T only; nothing waits for the device.
        """
        walk = StateWalk(state)
        pcm = self.decode_with(codes, walk)
        return pcm, walk.finish(codes.shape[-1])

    def init_state(self, batch: int, device: torch.device | str | None = None) -> DecoderState:
        """State of `batch` streams that have not begun; device: by default the weights'. Histories have the dtype of
        their convolution's weight, keys and values that of the transformer's."""
        weight = self.pre_conv.conv.weight
        device = device or weight.device
        last = self._channels_last_tail is not None
        histories = tuple(
            torch.zeros(
                batch,
                *self._history_shape(m, last and m is not self.pre_conv),
                device=device,
                dtype=m.conv.weight.dtype,
            )
            for m in self._remembering()
        )
        c = self.config
        shape = (batch, c["num_key_value_heads"], c["sliding_window"] - 1, self.pre_transformer.head_dim)
        keys = tuple(torch.zeros(shape, device=device, dtype=weight.dtype) for _ in self.pre_transformer.layers)
        values = tuple(torch.zeros_like(k) for k in keys)
        return DecoderState(torch.zeros(batch, device=device, dtype=torch.int64), histories, keys, values)

    @property
    def tail_dtype(self) -> torch.dtype:
        """Of the convolutions in the upsampling blocks, where nearly all the work is."""
        return self.decoder[1].block[1].conv.weight.dtype  # type: ignore[union-attr, index, return-value]

    def narrow(self, dtype: torch.dtype) -> CodecDecoder:
        """Put what is behind the transformer in `dtype`; float16: only the weights of the upsampling blocks'
        convolutions. The transformer stays as it is: activations of the embedded voice's pass 80,000, and float16 ends
        at 65,504.

        With float16 weights the blocks' convolutions take, give and remember float16. Everything else is small and
        stays in float32, because its rounding weighs most: on speech, Snake's constants in float16 cost 3 to 5 dB, and
        so does what is in front of the blocks, at 12.5 to 50 steps a second.
        """
        if dtype == torch.float16:
            for module in self.decoder[1:-2].modules():
                if isinstance(module, (CausalConv, CausalUpsample)):
                    module.conv.weight.data = module.conv.weight.data.to(dtype)
        else:
            self.upsample.to(dtype)
            self.decoder.to(dtype)
        return self

    @property
    def history_lengths(self) -> list[int]:
        """Inputs that each convolution remembers, in the order in which they run."""
        return [m.history for m in self._remembering()]

    @staticmethod
    def _history_shape(layer: CausalConv | CausalUpsample, channels_last: bool) -> tuple[int, int]:
        shape = layer.history_channels, layer.history
        return shape[::-1] if channels_last else shape

    def _remembering(self) -> list[CausalConv | CausalUpsample]:
        return [m for m in self.modules() if isinstance(m, (CausalConv, CausalUpsample)) and m.history]

    def freeze(
        self,
        matrix_upsampling: bool | None = None,
        fused: bool | None = None,
        channels_last: bool | None = None,
        compact: bool | None = None,
    ) -> CodecDecoder:
        """For serving: no gradients, and what depends on weights alone computed once. Call again after a change.

        States come from `init_state` after this call: `channels_last` changes their shapes.

        Args:
            matrix_upsampling: transposed convolutions as matrix products; None: on the CPU, where it pays.
            fused: what lies between the convolutions as Triton kernels; None: on CUDA.
            channels_last: everything behind the transformer with channels next to each other, which needs `fused`;
                None: where `fused` is on.
            compact: codebooks projected beforehand, the transformer in fewer kernels; needs Triton. None: on CUDA.
        """
        self.eval().requires_grad_(False)
        device = self.pre_conv.conv.weight.device.type
        if matrix_upsampling is None:
            matrix_upsampling = device == "cpu"
        fused = device == "cuda" if fused is None else fused
        channels_last = fused if channels_last is None else channels_last and fused
        compact = device == "cuda" if compact is None else compact
        self._fused_tail = self._channels_last_tail = self._compact_transformer = None
        for module in self.modules():
            if isinstance(module, SnakeBeta):
                module.fold()
            elif isinstance(module, ResidualQuantizer):
                module.fold(project=compact)
            elif isinstance(module, CausalUpsample):
                module.fold(matrix_upsampling)
        # These need Triton, which machines without CUDA need not have.
        if compact:
            from engine.codec.compact_transformer import CompactTransformer

            self._compact_transformer = CompactTransformer(self.pre_transformer)
        if channels_last:
            from engine.codec.channels_last import ChannelsLastTail

            self._channels_last_tail = ChannelsLastTail(self.upsample, self.decoder)
        elif fused:
            from engine.codec.fused import FusedTail

            self._fused_tail = FusedTail(list(self.decoder))
        return self

    def check_codes(self, codes: Tensor) -> None:
        """Raises InvalidRequest unless codes are integers [.., G, T] inside the codebook (waits for the device)."""
        if codes.dtype not in (torch.int64, torch.int32) or codes.ndim < 2 or codes.shape[-2] != self.groups:
            raise InvalidRequest(
                f"Codes must be int64 [..., {self.groups}, frames]; got {codes.dtype} {tuple(codes.shape)}.",
                field="codes",
            )
        if not codes.shape[-1]:
            raise InvalidRequest("There are no frames to decode; pass at least one.", field="codes")
        low, high = int(codes.min()), int(codes.max())
        if low < 0 or high >= self.codebook_size:
            raise InvalidRequest(
                f"Codes must lie in 0..{self.codebook_size - 1}; these reach from {low} to {high}.", field="codes"
            )

    def decode_with(self, codes: Tensor, walk: StateWalk | None) -> Tensor:
        """The layers in order; `walk` tells each of them what came before (None: nothing)."""
        x = self.pre_conv(self.quantizer(codes), walk)  # [B, latent, T]
        x = (self._compact_transformer or self.pre_transformer)(x.transpose(1, 2), walk)
        x = x.to(self.decoder[0].conv.weight.dtype)  # type: ignore[union-attr, arg-type]
        if self._channels_last_tail is not None:
            return self._channels_last_tail(x, walk)
        x = x.transpose(1, 2)
        for stage in self.upsample:
            x = stage[0](x, walk)  # type: ignore[index]
            x = stage[1](x, walk)  # type: ignore[index]
        if self._fused_tail is not None:
            return self._fused_tail(x, walk).clamp(-1, 1)
        first, *blocks, snake, last = self.decoder
        x = first(x, walk)
        for block in blocks:
            x = block(x, walk)
        return last(snake(x), walk).clamp(-1, 1)


def resolve_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fills in the reference's defaults and checks what would otherwise fail deep inside.

    Raises:
        CheckpointError: names the field of `decoder_config`.
    """
    c = {**DEFAULTS, **{k: v for k, v in config.items() if v is not None}}
    if "rope_parameters" in c:  # transformers 5 writes rope settings there
        c["rope_theta"] = c["rope_parameters"].get("rope_theta", c["rope_theta"])
    scaling = c.get("rope_scaling") or {}
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise _fault("rope_scaling", f"only default rotary positions are known, not {scaling}")
    if "codebook_dim" not in c:
        raise _fault("codebook_dim", "missing; the published codec has 512")
    for key in ("codebook_dim", "codebook_size", "latent_dim", "hidden_size", "decoder_dim", "sliding_window"):
        if not isinstance(c[key], int) or c[key] < 1:
            raise _fault(key, f"must be a positive integer, not {c[key]!r}")
    if c["num_quantizers"] < 2:
        raise _fault(
            "num_quantizers", f"must be at least 2 (one semantic group and the rest), not {c['num_quantizers']}"
        )
    if c["num_attention_heads"] % c["num_key_value_heads"]:
        raise _fault("num_key_value_heads", f"must divide num_attention_heads ({c['num_attention_heads']})")
    if c["hidden_act"] != "silu":
        raise _fault("hidden_act", f"only silu is known, not {c['hidden_act']!r}")
    if c["decoder_dim"] % 2 ** len(c["upsample_rates"]):
        raise _fault("decoder_dim", f"must be divisible by {2 ** len(c['upsample_rates'])}: it halves at each block")
    return c


def _fault(key: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"speech_tokenizer/config.json, decoder_config.{key}: {what}.", field=f"decoder_config.{key}"
    )
