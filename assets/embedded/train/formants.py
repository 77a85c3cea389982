"""Speakers whose formants lie elsewhere: the smooth spectrum of speech stretched along the frequency axis, unevenly.

Kokoro's voices, however they are mixed, keep the vowels of one model; strangers and people have theirs at other places.
The filter has no phase of its own, so harmonics stay where the pitch grid put them (pitch_grid.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

RATE, FFT, HOP = 24000, 1024, 256
QUEFRENCY = 40, 56  # samples, 2.3 ms: what is smoother than that along the frequency axis is no harmonic below 430 Hz
KNOTS = (0, 500, 1500, 3000, 5500, 12000)  # Hz
LIMIT = 2.0  # nepers of gain, 17 dB


def draw(count: int, spread: float, generator: torch.Generator) -> Tensor:
    """[count, knots] logarithms of how far the formants near each knot are moved up; none at either end."""
    steps = spread * torch.randn(count, len(KNOTS), generator=generator).clamp(-2, 2)
    steps[:, 0] = steps[:, -1] = 0
    return steps


def source_bins(steps: Tensor, bins: int) -> Tensor:
    """[B, knots] -> [B, bins]: the bin whose envelope each bin gets, as a float, rising."""
    knots = torch.tensor(KNOTS, device=steps.device, dtype=steps.dtype)
    frequency = torch.linspace(0, RATE / 2, bins, device=steps.device)
    right = torch.searchsorted(knots, frequency, right=True).clamp(1, len(KNOTS) - 1)
    share = (frequency - knots[right - 1]) / (knots[right] - knots[right - 1])
    moved = steps[:, right - 1] * (1 - share) + steps[:, right] * share
    return (frequency * torch.exp(-moved)).clamp(max=RATE / 2) * (2 * (bins - 1) / RATE)


def moved(wave: Tensor, steps: Tensor) -> Tensor:
    """PCM [B, C, N], C kinds of the same speech; steps [B, knots] of `draw` -> the same with moved formants. The first
    kind's envelope decides for all."""
    window = torch.hann_window(FFT, device=wave.device)
    spectrum = torch.stft(wave.flatten(0, 1), FFT, HOP, window=window, return_complex=True).unflatten(0, wave.shape[:2])
    power = torch.view_as_real(spectrum[:, 0]).square().sum(-1)
    log = 0.5 * (power + 1e-7 * FFT).log()
    cepstrum = torch.fft.irfft(log, FFT, dim=1)
    low, high = QUEFRENCY
    half = torch.arange(FFT // 2 + 1, device=wave.device)
    half = 0.5 + 0.5 * torch.cos(torch.pi * ((half - low) / (high - low)).clamp(0, 1))
    lifter = torch.cat([half, half[1:-1].flip(0)])
    envelope = torch.fft.rfft(cepstrum * lifter[:, None], dim=1).real
    place = source_bins(steps, envelope.shape[1])
    left = place.floor().long().clamp(max=envelope.shape[1] - 2)
    share = (place - left)[..., None]

    def look(index: Tensor) -> Tensor:
        return envelope.gather(1, index[..., None].expand(-1, -1, envelope.shape[2]))

    gain = (look(left) * (1 - share) + look(left + 1) * share - envelope).clamp(-LIMIT, LIMIT).exp()
    made = spectrum * gain[:, None]
    return torch.istft(made.flatten(0, 1), FFT, HOP, window=window, length=wave.shape[-1]).unflatten(0, wave.shape[:2])
