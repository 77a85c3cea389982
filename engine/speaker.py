"""Who speaks: the ECAPA-TDNN speaker encoder of Base checkpoints and its mel front end.

Plain torch and differentiable; parameter names are those of `speaker_encoder.*` in the checkpoint. Structure:
qwen_tts/core/models/modeling_qwen3_tts.py of qwen-tts 0.1.1, after arXiv 2005.07143.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import CheckpointError, InvalidAudio
from engine.request import SAMPLE_RATE

FFT = 1024
HOP = 256
MELS = 128
F_MAX = 12_000.0
MIN_SAMPLES = 4096  # 16 mel frames: every reflected border of the encoder needs a few

DEFAULTS: dict[str, Any] = {
    "mel_dim": 128,
    "enc_dim": 1024,
    "enc_channels": (512, 512, 512, 512, 1536),
    "enc_kernel_sizes": (5, 3, 3, 3, 1),
    "enc_dilations": (1, 2, 3, 4, 1),
    "enc_attention_channels": 128,
    "enc_res2net_scale": 8,
    "enc_se_channels": 128,
}


def pointwise(in_channels: int, out_channels: int) -> nn.Conv1d:
    return nn.Conv1d(in_channels, out_channels, 1)


class TimeDelay(nn.Module):
    """Convolution over time with reflected borders, then ReLU. [B, in, T] -> [B, out, T]."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(
            in_channels, out_channels, kernel, dilation=dilation, padding="same", padding_mode="reflect"
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x))


class Res2Net(nn.Module):
    """Channels in `scale` parts; each part but the first is filtered together with the part before it."""

    def __init__(self, channels: int, scale: int, kernel: int, dilation: int) -> None:
        super().__init__()
        part = channels // scale
        self.blocks = nn.ModuleList([TimeDelay(part, part, kernel, dilation) for _ in range(scale - 1)])
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        first, *parts = x.chunk(self.scale, dim=1)
        done = [first]
        for i, (block, part) in enumerate(zip(self.blocks, parts, strict=True)):
            done.append(block(part if i == 0 else part + done[-1]))
        return torch.cat(done, dim=1)


class SqueezeExcitation(nn.Module):
    """Scales each channel by a gate computed from the means over time."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.conv1 = pointwise(channels, squeezed)
        self.conv2 = pointwise(squeezed, channels)

    def forward(self, x: Tensor) -> Tensor:
        gate = F.relu(self.conv1(x.mean(dim=2, keepdim=True)))
        return x * torch.sigmoid(self.conv2(gate))


class EcapaBlock(nn.Module):
    def __init__(self, channels: int, scale: int, squeezed: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.tdnn1 = TimeDelay(channels, channels)
        self.res2net_block = Res2Net(channels, scale, kernel, dilation)
        self.tdnn2 = TimeDelay(channels, channels)
        self.se_block = SqueezeExcitation(channels, squeezed)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(x))))


class AttentivePooling(nn.Module):
    """Mean and deviation over time, weighted by attention. [B, C, T] -> [B, 2C, 1]."""

    def __init__(self, channels: int, attention_channels: int) -> None:
        super().__init__()
        self.tdnn = TimeDelay(channels * 3, attention_channels)
        self.conv = pointwise(attention_channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        mean, deviation = _statistics(x, torch.full_like(x, 1.0 / x.shape[2]))
        context = torch.cat((x, mean.expand_as(x), deviation.expand_as(x)), dim=1)
        weights = F.softmax(self.conv(torch.tanh(self.tdnn(context))), dim=2)
        return torch.cat(_statistics(x, weights), dim=1)


def _statistics(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    mean = (weights * x).sum(dim=2, keepdim=True)
    variance = (weights * (x - mean).square()).sum(dim=2, keepdim=True)
    return mean, variance.clamp(min=1e-12).sqrt()


class SpeakerEncoder(nn.Module):
    """Mel frames to one vector per clip.

    Args:
        config: `speaker_encoder_config` of config.json; `enc_dim` equals the talker's hidden size.

    Raises:
        CheckpointError: the layer lists do not fit together.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        c = {**DEFAULTS, **{k: v for k, v in config.items() if v is not None}}
        channels, kernels, dilations = c["enc_channels"], c["enc_kernel_sizes"], c["enc_dilations"]
        if not len(channels) == len(kernels) == len(dilations) >= 3:
            raise _fault("enc_channels", "enc_kernel_sizes and enc_dilations must list the same 3 or more layers")
        if len(set(channels[:-1])) != 1 or channels[0] % c["enc_res2net_scale"]:
            raise _fault("enc_channels", "all but the last must be equal and divisible by enc_res2net_scale")
        if channels[-1] != sum(channels[1:-1]):
            raise _fault("enc_channels", f"the last must be {sum(channels[1:-1])}, the sum of the blocks'")
        self.mel_dim, self.dim = int(c["mel_dim"]), int(c["enc_dim"])
        self.blocks = nn.ModuleList(
            [
                TimeDelay(self.mel_dim, channels[0], kernels[0], dilations[0]),
                *(
                    EcapaBlock(width, c["enc_res2net_scale"], c["enc_se_channels"], kernel, dilation)
                    for width, kernel, dilation in zip(channels[1:-1], kernels[1:-1], dilations[1:-1], strict=True)
                ),
            ]
        )
        self.mfa = TimeDelay(channels[-1], channels[-1], kernels[-1], dilations[-1])
        self.asp = AttentivePooling(channels[-1], c["enc_attention_channels"])
        self.fc = pointwise(channels[-1] * 2, self.dim)

    def forward(self, mel: Tensor) -> Tensor:
        """Log-mel [B, T, 128], T >= 16, from `mel_spectrogram` -> [B, enc_dim]."""
        first, *blocks = self.blocks
        x = first(mel.transpose(1, 2))
        outputs = []
        for block in blocks:
            x = block(x)
            outputs.append(x)
        return self.fc(self.asp(self.mfa(torch.cat(outputs, dim=1)))).squeeze(-1)

    @torch.no_grad()
    def embed(self, pcm: np.ndarray) -> np.ndarray:
        """float32 [samples] at 24 kHz -> float32 [enc_dim].

        Raises:
            InvalidAudio: shorter than 4096 samples (0.17 s), or not one channel.
        """
        if pcm.ndim != 1 or pcm.shape[0] < MIN_SAMPLES:
            raise InvalidAudio(
                f"A speaker embedding needs one channel of at least {MIN_SAMPLES} samples at 24 kHz; "
                f"got shape {pcm.shape}.",
                field="voice",
            )
        weight = self.fc.weight
        mel = mel_spectrogram(torch.from_numpy(np.ascontiguousarray(pcm, dtype=np.float32))[None])
        return self(mel.to(weight.device, weight.dtype))[0].float().cpu().numpy()


def mel_spectrogram(pcm: Tensor) -> Tensor:
    """Log-mel of the reference: float [B, samples] at 24 kHz, samples >= 385 -> [B, samples // 256, 128].

    Hann window and FFT of 1024, hop 256, reflected borders of 384, magnitudes, 128 Slaney mels to 12 kHz, natural
    logarithm of max(mel, 1e-5). Differentiable; computed in the dtype of `pcm` (use float32).
    """
    border = (FFT - HOP) // 2
    padded = F.pad(pcm[:, None], (border, border), mode="reflect")[:, 0]
    window = torch.hann_window(FFT, device=pcm.device, dtype=pcm.dtype)
    spectrum = torch.stft(padded, FFT, HOP, window=window, center=False, return_complex=True)
    magnitude = torch.sqrt(torch.view_as_real(spectrum).square().sum(-1) + 1e-9)  # [B, 513, T]
    return torch.log((_filters(pcm.device, pcm.dtype) @ magnitude).clamp(min=1e-5)).transpose(1, 2)


@lru_cache(maxsize=8)
def _filters(device: torch.device, dtype: torch.dtype) -> Tensor:
    """`mel_filters` where they are used: copied there once."""
    return torch.from_numpy(mel_filters()).to(device, dtype)


@lru_cache(maxsize=1)
def mel_filters() -> np.ndarray:
    """float32 [128, 513]: triangles on Slaney's mel scale, each of unit area (as librosa.filters.mel by default)."""
    edges = _mel_to_hz(np.linspace(0.0, _hz_to_mel(F_MAX), MELS + 2))
    bins = np.linspace(0.0, SAMPLE_RATE / 2, FFT // 2 + 1)
    rising = (bins[None] - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - bins[None]) / np.diff(edges)[1:, None]
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    return (triangles * (2.0 / (edges[2:] - edges[:-2]))[:, None]).astype(np.float32)


# Slaney's scale: linear up to 1 kHz (15 mels), then 27 mels per factor 6.4.
_LINEAR_HZ_PER_MEL = 200.0 / 3
_LOG_STEP = math.log(6.4) / 27


def _hz_to_mel(hz: float) -> float:
    return hz / _LINEAR_HZ_PER_MEL if hz < 1000 else 15 + math.log(hz / 1000) / _LOG_STEP


def _mel_to_hz(mel: np.ndarray) -> np.ndarray:
    return np.where(mel < 15, mel * _LINEAR_HZ_PER_MEL, 1000 * np.exp(_LOG_STEP * (mel - 15)))


def _fault(key: str, what: str) -> CheckpointError:
    return CheckpointError(f"config.json, speaker_encoder_config.{key}: {what}.", field=f"speaker_encoder_config.{key}")
