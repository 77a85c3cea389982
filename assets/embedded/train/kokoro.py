"""Kokoro-82M on the GPU, hundreds of sentences at once (PyPI kokoro 0.9.4, Apache-2.0: only its torch modules).

Batches hold clips of one length only: AdaIN takes its statistics over time, so padding would change the sound. The text
side runs in groups of equal token count; durations are then fitted to a grid so that lengths coincide.
"""

from __future__ import annotations

import math
import sys
import types
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from pitch_grid import VOICED, in_phase, on_grid
from torch import Tensor, nn

FRAME = 600  # samples of one Kokoro frame, 25 ms


def _bag(**parts: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, part in parts.items():
        setattr(module, name, part)
    return module


class Albert(nn.Module):
    """The one shared layer, run 12 times (published names, so that the weights load)."""

    def __init__(self) -> None:
        super().__init__()
        width, inner, narrow = 768, 2048, 128
        self.embeddings = _bag(
            word_embeddings=nn.Embedding(178, narrow),
            position_embeddings=nn.Embedding(512, narrow),
            token_type_embeddings=nn.Embedding(2, narrow),
            LayerNorm=nn.LayerNorm(narrow, eps=1e-12),
        )
        attention = _bag(
            query=nn.Linear(width, width),
            key=nn.Linear(width, width),
            value=nn.Linear(width, width),
            dense=nn.Linear(width, width),
            LayerNorm=nn.LayerNorm(width, eps=1e-12),
        )
        layer = _bag(
            attention=attention,
            ffn=nn.Linear(width, inner),
            ffn_output=nn.Linear(inner, width),
            full_layer_layer_norm=nn.LayerNorm(width, eps=1e-12),
        )
        self.encoder = _bag(
            embedding_hidden_mapping_in=nn.Linear(narrow, width),
            albert_layer_groups=nn.ModuleList([_bag(albert_layers=nn.ModuleList([layer]))]),
        )

    def forward(self, ids: Tensor) -> Tensor:
        """[B, n] -> [B, n, 768]"""
        e = self.embeddings
        positions = e.position_embeddings.weight[: ids.shape[1]]
        h = e.LayerNorm(e.word_embeddings(ids) + e.token_type_embeddings.weight[0] + positions)
        h = self.encoder.embedding_hidden_mapping_in(h)
        layer = self.encoder.albert_layer_groups[0].albert_layers[0]
        a, batch, length = layer.attention, *h.shape[:2]
        for _ in range(12):
            q, k, v = (f(h).view(batch, length, 12, -1).transpose(1, 2) for f in (a.query, a.key, a.value))
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, -1)
            h = a.LayerNorm(h + a.dense(mixed))
            h = layer.full_layer_layer_norm(layer.ffn_output(F.gelu(layer.ffn(h), approximate="tanh")) + h)
        return h


def load(state: dict[str, np.ndarray], package: Path, device: torch.device) -> nn.Module:
    """The model with `state` (speech_pack.read_weights). package: folder of the unpacked kokoro wheel."""
    wheel = types.ModuleType("kokoro")
    wheel.__path__ = [str(package)]
    sys.modules["kokoro"] = wheel
    from kokoro.istftnet import Decoder
    from kokoro.modules import ProsodyPredictor, TextEncoder

    model = _bag(
        bert=Albert(),
        bert_encoder=nn.Linear(768, 512),
        predictor=ProsodyPredictor(style_dim=128, d_hid=512, nlayers=3, max_dur=50, dropout=0.2),
        text_encoder=TextEncoder(channels=512, kernel_size=5, depth=3, n_symbols=178),
        decoder=Decoder(
            dim_in=512,
            style_dim=128,
            dim_out=80,
            upsample_kernel_sizes=[20, 12],
            upsample_rates=[10, 6],
            gen_istft_hop_size=5,
            gen_istft_n_fft=20,
            resblock_dilation_sizes=[[1, 3, 5]] * 3,
            resblock_kernel_sizes=[3, 7, 11],
            upsample_initial_channel=512,
        ),
    )
    for module in model.modules():
        if hasattr(module, "weight_g"):
            nn.utils.remove_weight_norm(module)
    model.eval().requires_grad_(False)
    missing, unexpected = model.load_state_dict({k: torch.from_numpy(v) for k, v in state.items()}, strict=False)
    strange = [k for k in missing if ".norm." not in k] + [k for k in unexpected if "pooler" not in k]
    if strange:
        raise ValueError(f"the packed weights do not fit the kokoro package: {strange[:5]}")
    _own_phase(model)
    stft = model.decoder.generator.stft
    stft.window = stft.window.to(device)  # else it is copied, and waited for, in every call
    return model.to(device)


def _own_phase(model: nn.Module) -> None:
    """The phase of the voice comes from `model.cycles` [B, samples]; all harmonics start alike."""
    source = model.decoder.generator.m_source.l_sin_gen
    harmonics = torch.arange(1, source.harmonic_num + 2)
    source._f02sine = lambda f0: torch.sin(2 * math.pi * model.cycles[..., None] * harmonics.to(f0.device))


def text_side(model: nn.Module, ids: Tensor, style: Tensor, speed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ids [B, n] with pads, style [B, 256], speed [B] -> durations [B, n] in frames, prosody [B, n, 640], text
    features [B, 512, n]."""
    lengths = torch.full((ids.shape[0],), ids.shape[1], dtype=torch.long)
    mask = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
    prosody_style = style[:, 128:]
    hidden = model.bert_encoder(model.bert(ids)).transpose(-1, -2)
    d = model.predictor.text_encoder(hidden, prosody_style, lengths, mask)
    x, _ = model.predictor.lstm(d)
    durations = torch.sigmoid(model.predictor.duration_proj(x)).sum(-1) / speed[:, None]
    return durations, d, model.text_encoder(ids, lengths, mask)


def fit_durations(durations: np.ndarray, grid: int) -> np.ndarray:
    """Whole durations whose sum is the multiple of `grid` nearest to the natural one."""
    natural = np.maximum(np.round(durations), 1).astype(np.int64)
    total = int(natural.sum())
    target = max(grid, round(total / grid) * grid)
    if target == total:
        return natural
    scaled = durations * (target / total)
    whole = np.maximum(np.round(scaled), 1).astype(np.int64)
    while difference := target - int(whole.sum()):
        error = scaled - whole if difference > 0 else np.where(whole > 1, whole - scaled, -np.inf)
        whole[np.argsort(-error, kind="stable")[: abs(difference)]] += int(math.copysign(1, difference))
        whole = np.maximum(whole, 1)
    return whole


def wave_side(
    model: nn.Module,
    d: list[Tensor],
    text: list[Tensor],
    index: Tensor,
    style: Tensor,
    spacing: Tensor,
    height: Tensor,
) -> Tensor:
    """d: [n, 640] each, text: [512, n] each, index [B, T]: the token of each frame, spacing [B]: samples of a codec
    frame, height [B]: factor of the pitch -> samples [B, 2, T * 600] with whole periods in every codec frame: as Kokoro
    makes them, and in phase (pitch_grid.py)."""
    prosody = torch.stack([a.index_select(0, i) for a, i in zip(d, index, strict=True)]).transpose(1, 2).contiguous()
    features = torch.stack([a.index_select(1, i) for a, i in zip(text, index, strict=True)])
    pitch, energy = model.predictor.F0Ntrain(prosody, style[:, 128:])
    pitch, model.cycles = on_grid(torch.where(pitch > VOICED, pitch * height[:, None], pitch), spacing)
    wave = model.decoder(features, pitch, energy, style[:, :128]).reshape(len(d), -1)
    return torch.stack([wave, in_phase(wave, model.cycles, pitch)], 1)
