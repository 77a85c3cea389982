"""The training speech on the device, as make_speech.py wrote it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FRAME = 1920


class Corpus:
    """One stream of clips; clip i is samples start[i] .. start[i] + samples[i], beginning on a codec frame."""

    def __init__(self, folder: Path, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.pcm = _load(folder / "pcm.npy", self.device)
        self.phones = _load(folder / "phones.npy", self.device)
        z = np.load(folder / "clips.npz")
        self.start, self.samples, self.speaker, self.job = z["start"], z["samples"], z["speaker"], z["job"]
        self.frames = -(-self.samples // FRAME)

    def crops(self, batch: int, frames: int) -> tuple[Tensor, Tensor]:
        """Random stretches of the stream: float PCM [batch, 1, frames * 1920], phones [batch, frames, 4]."""
        last = len(self.pcm) // FRAME - frames
        at = torch.randint(last, (batch, 1), device=self.device)
        pcm = self.pcm[at * FRAME + torch.arange(frames * FRAME, device=self.device)]
        phones = self.phones[at * 4 + torch.arange(frames * 4, device=self.device)]
        return pcm.float()[:, None] / 32768, phones.long().unflatten(1, (-1, 4))

    def clips(self, which: np.ndarray, frames: int) -> Tensor:
        """Whole clips, zeros behind: float PCM [n, frames * 1920]."""
        out = torch.zeros(len(which), frames * FRAME, device=self.device)
        for row, clip in enumerate(which):
            length = min(int(self.samples[clip]), frames * FRAME)
            out[row, :length] = self.pcm[int(self.start[clip]) :][:length].float() / 32768
        return out


def _load(path: Path, device: torch.device) -> Tensor:
    return torch.from_numpy(np.load(path, mmap_mode="c")).to(device)


def roughen(pcm: Tensor, share: float) -> Tensor:
    """PCM [B, 1, N] with random gains; a share of rows also gets white noise (20 to 45 dB below) or a low-pass."""
    batch, device = len(pcm), pcm.device

    def draw(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(batch, 1, 1, device=device)

    pcm = pcm * 10 ** (draw(-10, 5) / 20)
    chance = torch.rand(batch, 1, 1, device=device)
    level = pcm.square().mean(-1, keepdim=True).sqrt() * 10 ** (-draw(20, 45) / 20)
    pcm = pcm + torch.randn_like(pcm) * level * (chance < share / 2)
    spectrum = torch.fft.rfft(pcm.float())
    position = torch.linspace(0, 1, spectrum.shape[-1], device=device)
    cut = torch.where((chance >= share / 2) & (chance < share), draw(0.28, 0.75), 2.0)
    return torch.fft.irfft(spectrum * torch.sigmoid((cut - position) * 120), n=pcm.shape[-1]).clamp(-1, 1)
