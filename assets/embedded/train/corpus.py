"""The training speech on the device, as make_speech.py wrote it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

FRAME = 1920
DRIFT, SWAY = 160, 60  # samples: what an encoder hears lies so far off its frames, in all; and sways so far about that


def clip_table(folders: str) -> dict[str, np.ndarray]:
    """start, samples, speaker, job of every clip of a comma list of folders, as one stream."""
    parts, shift = [], 0
    for folder in folders.split(","):
        part = dict(np.load(Path(folder) / "clips.npz"))
        part["start"] = part["start"] + shift
        shift += len(np.load(Path(folder) / "pcm.npy", mmap_mode="r"))
        parts.append(part)
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def labels(folders: str) -> np.ndarray:
    """Phoneme and its index in the clip, every 20 ms: uint8 [n, 2]."""
    return np.concatenate([np.load(Path(folder) / "phones.npy") for folder in folders.split(",")])


class Corpus:
    """One stream of clips; clip i is samples start[i] .. start[i] + samples[i], beginning on a codec frame."""

    def __init__(self, folders: str, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.pcm = self._stream(folders, "pcm.npy")
        given = all((Path(folder) / "wanted.npy").exists() for folder in folders.split(","))
        self.wanted = self._stream(folders, "wanted.npy") if given else self.pcm
        self.phones = torch.from_numpy(labels(folders)[:, 0].copy()).to(self.device)
        z = clip_table(folders)
        self.start, self.samples, self.speaker, self.job = z["start"], z["samples"], z["speaker"], z["job"]
        self.frames = -(-self.samples // FRAME)

    def _stream(self, folders: str, name: str) -> Tensor:
        parts = [np.load(Path(folder) / name, mmap_mode="c") for folder in folders.split(",")]
        return torch.cat([torch.from_numpy(part).to(self.device) for part in parts])

    def crops(self, batch: int, frames: int) -> tuple[Tensor, Tensor]:
        """Random stretches of the stream: float PCM [batch, 2, frames * 1920], phones [batch, frames, 4].

        First what an encoder hears: the speech with other phases than what is wanted, up to 3 ms early or late, and in
        half of the rows a little faster and slower by turns, so that it cannot tell how its frames lie against the
        periods of the voice. Then what is wanted (pitch_grid.py). Twice and three times as much, as in the seventh to
        ninth trainings, blurred what is wanted: log mels differed by 0.14 decades from that alone.
        """
        length = frames * FRAME
        draw = torch.rand(5, batch, 1, device=self.device)
        last = len(self.pcm) - length - 4
        at = (draw[0].double() * (last // FRAME)).long() * FRAME
        position = torch.arange(length, device=self.device)
        turn = 2 * torch.pi * ((0.3 + 0.7 * draw[1]) * position / 24000 + draw[2])
        drift = DRIFT * (draw[3] - 0.5) + SWAY * (draw[4] < 0.5) * turn.sin()
        whole = drift.floor()
        share, index = drift - whole, at + position + whole.long()
        # Catmull-Rom through four samples.
        a, b, c, d = (self.pcm[(index + k).clamp(min=0, max=len(self.pcm) - 1)].float() / 32768 for k in (-1, 0, 1, 2))
        curve = (a * (-0.5) + 1.5 * b - 1.5 * c + 0.5 * d) * share + (a - 2.5 * b + 2 * c - 0.5 * d)
        heard = (curve * share + 0.5 * (c - a)) * share + b
        wanted = self.wanted[at + position].float() / 32768
        middle = torch.arange(frames * 4, device=self.device) * 480 + 240
        phones = self.phones[(at + middle) // 480]
        return torch.stack([heard, wanted], 1), phones.long().unflatten(1, (-1, 4))

    def clips(self, which: np.ndarray, frames: int) -> Tensor:
        """Whole clips, zeros behind: float PCM [n, frames * 1920]."""
        out = torch.zeros(len(which), frames * FRAME, device=self.device)
        for row, clip in enumerate(which):
            length = min(int(self.samples[clip]), frames * FRAME)
            out[row, :length] = self.pcm[int(self.start[clip]) :][:length].float() / 32768
        return out


def tone_colour(knots: Tensor, bins: int) -> Tensor:
    """Decibels at K places [B, K] -> factors [B, bins] of a spectrum, bands equally wide in the square root of the
    frequency: finer where speech is."""
    decibels = F.interpolate(knots[:, None], size=512, mode="linear", align_corners=True)[:, 0]
    position = torch.linspace(0, 1, bins, device=knots.device)
    return 10 ** (decibels[:, (position.sqrt() * 511).long()] / 20)


def roughen(pcm: Tensor, share: float, filters: bool = True) -> Tensor:
    """PCM [B, C, N] with random gains; a share of rows also gets white noise (20 to 45 dB below; the first channel
    only: the second, if there is one, is what is wanted) or a low-pass, and another such share a random tone colour (up
    to 9 dB up or down in five bands). filters: with the last two; not for a talker's reference, which has to learn that
    its speech shall sound through the same microphone."""
    batch, device = len(pcm), pcm.device

    def draw(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(batch, 1, 1, device=device)

    pcm = pcm * 10 ** (draw(-10, 5) / 20)
    chance = torch.rand(batch, 1, 1, device=device)
    level = pcm[:, :1].square().mean(-1, keepdim=True).sqrt() * 10 ** (-draw(20, 45) / 20)
    noise = torch.randn_like(pcm[:, :1]) * level * (chance < share / 2)
    pcm = torch.cat([pcm[:, :1] + noise, pcm[:, 1:]], 1)
    if not filters:
        return pcm.clamp(-1, 1)
    spectrum = torch.fft.rfft(pcm.float())
    position = torch.linspace(0, 1, spectrum.shape[-1], device=device)
    cut = torch.where((chance >= share / 2) & (chance < share), draw(0.28, 0.75), 2.0)
    knots = 9 * (2 * torch.rand(batch, 6, device=device) - 1) * (torch.rand(batch, 1, device=device) < share)
    spectrum = spectrum * tone_colour(knots, spectrum.shape[-1])[:, None]
    return torch.fft.irfft(spectrum * torch.sigmoid((cut - position) * 120), n=pcm.shape[-1]).clamp(-1, 1)


def reverberate(pcm: Tensor, share: float) -> Tensor:
    """PCM [B, 1, N]; a share of rows as heard in a room: decaying noise, 0.1 to 0.6 s to -60 dB, behind the sound."""
    batch, _, length = pcm.shape
    device = pcm.device
    seconds = 0.1 + 0.5 * torch.rand(batch, 1, 1, device=device)
    time = torch.arange(12000, device=device) / 24000
    tail = torch.randn(batch, 1, len(time), device=device) * torch.exp(-6.9 * time / seconds)
    tail = tail / tail.square().sum(-1, keepdim=True).sqrt()
    below = 10 ** (-(2 + 16 * torch.rand(batch, 1, 1, device=device)) / 20)
    size = length + len(time)
    wet = torch.fft.irfft(torch.fft.rfft(pcm, size) * torch.fft.rfft(tail, size), size)[..., :length]
    return torch.where(torch.rand(batch, 1, 1, device=device) < share, pcm + below * wet, pcm)
