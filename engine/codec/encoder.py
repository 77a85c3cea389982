"""The 12 Hz codec encoder: 24 kHz PCM in, codes out. Mimi's encoder in plain torch (arXiv 2410.00037).

Parameter names are those of `encoder.*` in speech_tokenizer/model.safetensors. transformers has the model too, but
cuts it into other modules from release to release (5.17 and 5.24 differ); these names and numbers stay. Structure:
transformers 4.57.3, models/mimi/modeling_mimi.py, as qwen-tts 0.1.1 uses it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.codec.transformer import LayerScale, head_dim_of, rotary, rotate
from engine.errors import CheckpointError

# Values MimiConfig takes for keys a config.json leaves out.
DEFAULTS: dict[str, Any] = {
    "audio_channels": 1,
    "hidden_size": 512,
    "num_filters": 64,
    "num_residual_layers": 1,
    "upsampling_ratios": (8, 6, 5, 4),
    "kernel_size": 7,
    "last_kernel_size": 3,
    "residual_kernel_size": 3,
    "dilation_growth_rate": 2,
    "compress": 2,
    "pad_mode": "constant",
    "use_causal_conv": True,
    "use_conv_shortcut": False,
    "codebook_size": 2048,
    "codebook_dim": 256,
    "vector_quantization_hidden_dimension": 256,
    "num_quantizers": 32,
    "num_semantic_quantizers": 1,
    "num_hidden_layers": 8,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "hidden_act": "gelu",
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
}


class StridedConv(nn.Module):
    """Causal convolution: [B, in, T] -> [B, out, ceil(T / stride)]; the last window is filled up on the right."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        stride: int = 1,
        dilation: int = 1,
        bias: bool = True,
        pad_mode: str = "constant",
    ) -> None:
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, kernel, stride, dilation=dilation, bias=bias)
        self.left = (kernel - 1) * dilation + 1 - stride
        self.stride, self.pad_mode = stride, pad_mode

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (self.left, -x.shape[-1] % self.stride), mode=self.pad_mode))


class ResnetBlock(nn.Module):
    def __init__(self, channels: int, dilation: int, config: Mapping[str, Any]) -> None:
        super().__init__()
        inner, pad = channels // config["compress"], config["pad_mode"]
        self.block = nn.ModuleList(
            [
                nn.ELU(),
                StridedConv(channels, inner, config["residual_kernel_size"], dilation=dilation, pad_mode=pad),
                nn.ELU(),
                StridedConv(inner, channels, 1, pad_mode=pad),
            ]
        )
        self.shortcut = StridedConv(channels, channels, 1) if config["use_conv_shortcut"] else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in self.block:
            h = layer(h)
        return self.shortcut(x) + h


class Seanet(nn.Module):
    """PCM [B, 1, T] -> features [B, hidden, ceil(T / 960)]."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        pad, channels = config["pad_mode"], config["num_filters"]
        layers: list[nn.Module] = [StridedConv(config["audio_channels"], channels, config["kernel_size"], pad_mode=pad)]
        for ratio in reversed(config["upsampling_ratios"]):
            dilations = [config["dilation_growth_rate"] ** i for i in range(config["num_residual_layers"])]
            layers += [ResnetBlock(channels, dilation, config) for dilation in dilations]
            layers += [nn.ELU(), StridedConv(channels, 2 * channels, 2 * ratio, ratio, pad_mode=pad)]
            channels *= 2
        layers += [nn.ELU(), StridedConv(channels, config["hidden_size"], config["last_kernel_size"], pad_mode=pad)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Attention(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, bias = config["hidden_size"], config["attention_bias"]
        self.head_dim = head_dim_of(config)
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, width, bias=bias)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        batch, frames, _ = x.shape
        q = rotate(self.q_proj(x).view(batch, frames, self.heads, self.head_dim).transpose(1, 2), *rotation)
        k = rotate(self.k_proj(x).view(batch, frames, self.kv_heads, self.head_dim).transpose(1, 2), *rotation)
        v = self.v_proj(x).view(batch, frames, self.kv_heads, self.head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads)
        return self.o_proj(out.transpose(1, 2).reshape(batch, frames, -1))


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner, bias=False)
        self.fc2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Layer(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.self_attn = Attention(config)
        self.mlp = MLP(width, config["intermediate_size"])
        self.input_layernorm = nn.LayerNorm(width, eps=config["norm_eps"])
        self.post_attention_layernorm = nn.LayerNorm(width, eps=config["norm_eps"])
        self.self_attn_layer_scale = LayerScale(width, 0.01)
        self.mlp_layer_scale = LayerScale(width, 0.01)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), rotation))
        return x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))


class CausalTransformer(nn.Module):
    """[B, T, hidden] -> [B, T, hidden]. Every frame attends to all before it: the reference's mask ignores the
    config's `sliding_window`, so clips longer than that (10 s as published) are encoded with full attention too."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(config) for _ in range(config["num_hidden_layers"])])
        self.head_dim, self.theta = head_dim_of(config), float(config["rope_theta"])

    def forward(self, x: Tensor) -> Tensor:
        position = torch.arange(x.shape[1], device=x.device)[None]
        rotation = rotary(position, self.head_dim, self.theta, x.dtype)
        for layer in self.layers:
            x = layer(x, rotation)
        return x


class EncoderCodebook(nn.Module):
    initialized: Tensor
    cluster_usage: Tensor
    embed_sum: Tensor

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.register_buffer("initialized", torch.ones(1))
        self.register_buffer("cluster_usage", torch.ones(size))
        self.register_buffer("embed_sum", torch.zeros(size, width))

    def vectors(self) -> Tensor:
        return (self.embed_sum / self.cluster_usage.clamp(min=1e-5)[:, None]).float()


class EncoderQuantizerLayer(nn.Module):
    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.codebook = EncoderCodebook(size, width)


class EncoderQuantizer(nn.Module):
    """Residual search: each layer codes what the layers before it left over."""

    def __init__(self, layers: int, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["vector_quantization_hidden_dimension"]
        self.layers = nn.ModuleList(
            [EncoderQuantizerLayer(config["codebook_size"], config["codebook_dim"]) for _ in range(layers)]
        )
        if inner != hidden:
            self.input_proj = nn.Conv1d(hidden, inner, 1, bias=False)
            self.output_proj = nn.Conv1d(inner, hidden, 1, bias=False)

    def forward(self, latent: Tensor, groups: int) -> Tensor:
        """[B, hidden, T] -> int64 [B, groups, T]."""
        if hasattr(self, "input_proj"):
            latent = self.input_proj(latent)
        residual = latent.transpose(1, 2)  # [B, T, inner]
        codes = []
        for layer in self.layers[:groups]:
            vectors = layer.codebook.vectors()  # type: ignore[union-attr,operator]
            nearest = torch.cdist(residual.float(), vectors[None]).argmin(dim=-1)
            residual = residual - F.embedding(nearest, vectors).to(residual.dtype)
            codes.append(nearest)
        return torch.stack(codes, dim=1)


class EncoderSplitQuantizer(nn.Module):
    """Semantic and acoustic groups code the same latent, each in its own projection."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.semantic = config["num_semantic_quantizers"]
        self.semantic_residual_vector_quantizer = EncoderQuantizer(self.semantic, config)
        self.acoustic_residual_vector_quantizer = EncoderQuantizer(config["num_quantizers"] - self.semantic, config)

    def forward(self, latent: Tensor, groups: int) -> Tensor:
        semantic = self.semantic_residual_vector_quantizer(latent, self.semantic)
        acoustic = self.acoustic_residual_vector_quantizer(latent, groups - self.semantic)
        return torch.cat((semantic, acoustic), dim=1)


class CodecEncoder(nn.Module):
    """PCM to codes.

    Args:
        config: `encoder_config` of speech_tokenizer/config.json.
        samples_per_frame: its `encode_downsample_rate` (1920).

    Raises:
        CheckpointError: the config describes an encoder of another kind.
    """

    def __init__(self, config: Mapping[str, Any], samples_per_frame: int = 1920) -> None:
        super().__init__()
        c = resolve_config(config)
        self.config, self.samples_per_frame = c, samples_per_frame
        stride, rest = divmod(samples_per_frame, math.prod(c["upsampling_ratios"]))
        if rest or stride < 2:
            raise _fault("upsampling_ratios", f"{c['upsampling_ratios']} do not lead to {samples_per_frame} samples")
        hidden = c["hidden_size"]
        self.encoder = Seanet(c)
        self.encoder_transformer = CausalTransformer(c)
        self.downsample = StridedConv(hidden, hidden, 2 * stride, stride, bias=False, pad_mode="replicate")
        self.quantizer = EncoderSplitQuantizer(c)

    @torch.inference_mode()
    def forward(self, pcm: Tensor, groups: int) -> Tensor:
        """float [B, 1, samples] at 24 kHz -> int64 [B, groups, ceil(samples / 1920)]."""
        features = self.encoder(pcm).transpose(1, 2)
        latent = self.downsample(self.encoder_transformer(features).transpose(1, 2))
        return self.quantizer(latent, groups)


def resolve_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fills in MimiConfig's defaults. Raises CheckpointError for what is not built here."""
    c = {**DEFAULTS, **{k: v for k, v in config.items() if v is not None}}
    if "rope_parameters" in c:  # transformers 5 writes rope settings there
        c["rope_theta"] = c["rope_parameters"].get("rope_theta", c["rope_theta"])
    if not c["use_causal_conv"]:
        raise _fault("use_causal_conv", "only causal convolutions are known")
    if c["hidden_act"] != "gelu":
        raise _fault("hidden_act", f"only gelu is known, not {c['hidden_act']!r}")
    if c["num_semantic_quantizers"] >= c["num_quantizers"]:
        raise _fault("num_semantic_quantizers", f"must be smaller than num_quantizers ({c['num_quantizers']})")
    return c


def _fault(key: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"speech_tokenizer/config.json, encoder_config.{key}: {what}.", field=f"encoder_config.{key}"
    )
