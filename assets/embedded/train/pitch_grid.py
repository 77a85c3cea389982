"""Speech whose voice has a whole number of periods in every codec frame.

A codec of 12.5 frames a second either spends its codes on the phase of the voice, which a talker cannot foresee, or its
decoder has to invent one, which it did not learn in six trainings. With whole periods the phase at the start of every
frame is the same, so the height of the voice alone says where in a frame its periods lie: the decoder can be asked for
the very wave. Kokoro makes its voice from a pitch curve; this bends that curve, by 3 % at 200 Hz at most.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

RATE, HOP = 24000, 300  # samples of one value of Kokoro's pitch curve
VOICED = 10.0  # Hz; below it Kokoro's source is noise
STEPS = 32  # a frame's pitch in so many parts
TOP, HARMONICS = 1600.0, 24  # Hz; up to there the phases are set, of so many harmonics
WINDOW = 864  # samples, 36 ms, in which a harmonic's own size and phase are taken
STEADY = 4.0  # how much a change of the bending from frame to frame counts against the bending itself


def filled(pitch: Tensor) -> Tensor:
    """[B, n] Hz, with the gaps between voiced stretches closed by straight lines."""
    voiced, place = pitch > VOICED, torch.arange(pitch.shape[1], device=pitch.device).expand(pitch.shape)
    last = torch.where(voiced, place, -1).cummax(1).values
    following = torch.where(voiced, place, pitch.shape[1]).flip(1).cummin(1).values.flip(1)
    last = torch.where(last < 0, following, last).clamp(max=pitch.shape[1] - 1)
    following = torch.where(following == pitch.shape[1], last, following).clamp(max=pitch.shape[1] - 1)
    share = (place - last) / (following - last).clamp(min=1)
    line = pitch.gather(1, last) * (1 - share) + pitch.gather(1, following) * share
    return torch.where(voiced, pitch, torch.where(voiced.any(1, keepdim=True), line, 100.0))


def whole_periods(periods: Tensor, weight: Tensor) -> Tensor:
    """periods, weight [B, frames] -> whole numbers, each the one below or above, that bend the pitch little and
    steadily (Viterbi over both choices)."""
    choice = torch.stack([periods.floor().clamp(min=1), periods.floor().clamp(min=1) + 1], -1)
    error = choice / periods[..., None] - 1
    own = error.square() * (weight[..., None] + 1e-3)
    cost, came = own[:, 0], []
    for j in range(1, periods.shape[1]):
        change = (error[:, j, None, :] - error[:, j - 1, :, None]).square()  # [B, from, to]
        both = torch.minimum(weight[:, j], weight[:, j - 1])[:, None, None] + 1e-3
        best = (cost[..., None] + STEADY * both * change).min(1)
        came.append(best.indices)
        cost = best.values + own[:, j]
    path = [cost.argmin(1, keepdim=True)]
    for step in reversed(came):
        path.append(step.gather(1, path[-1]))
    return choice.gather(2, torch.cat(path[::-1], 1)[..., None])[..., 0]


def on_grid(pitch: Tensor, spacing: Tensor) -> tuple[Tensor, Tensor]:
    """Kokoro's pitch curve [B, T] in Hz, the frame [B] in its samples -> (bent curve [B, T], periods since the start of
    the frame [B, T * 300])."""
    samples, device = pitch.shape[1] * HOP, pitch.device
    spacing = spacing.to(device, torch.float32)[:, None]
    frames = int(samples / float(spacing.min())) + 1
    part = spacing / STEPS
    middle = ((torch.arange(frames * STEPS, device=device) + 0.5) * part / HOP).long().clamp(max=pitch.shape[1] - 1)
    f = filled(pitch.float()).gather(1, middle)
    voiced = (pitch.gather(1, middle) > VOICED).float().unflatten(1, (frames, STEPS)).mean(2)

    def periods(curve: Tensor) -> Tensor:
        return curve.unflatten(1, (frames, STEPS)).sum(2) * part / RATE

    wanted, bend = whole_periods(periods(f), voiced), torch.ones_like(f)
    for _ in range(6):  # smoothed, and brought back to whole periods
        bend = F.avg_pool1d(F.pad(bend[:, None], (STEPS // 4,) * 2, mode="replicate"), STEPS // 2 + 1, 1)[:, 0]
        bend = bend * (wanted / periods(f * bend)).repeat_interleave(STEPS, 1)
    f = f * bend
    since = (f * part / RATE).unflatten(1, (frames, STEPS)).cumsum(2)
    since = F.pad(since, (1, 0)).flatten(1)  # a frame: STEPS + 1 values, 0 to a whole number
    at = torch.arange(samples, device=device) / part
    step = at.long()
    low = step + step // STEPS
    cycles = since.gather(1, low).lerp(since.gather(1, low + 1), at - step)
    centre = ((torch.arange(pitch.shape[1], device=device) + 0.5) * HOP / part).long().expand(len(f), -1)
    return torch.where(pitch > VOICED, f.gather(1, centre), pitch), cycles


def in_phase(wave: Tensor, cycles: Tensor, pitch: Tensor) -> Tensor:
    """wave [B, N] of a voice whose periods begin where `cycles` [B, N] are whole, pitch [B, T] -> the same sound with
    phases of its harmonics below TOP that depend on their frequency alone."""
    length = wave.shape[1]
    whole = 1 << (length + WINDOW - 1).bit_length()
    window = torch.hann_window(WINDOW + 1, device=wave.device)[1:]
    window = torch.fft.rfft(window / window.sum(), whole)

    def smooth(x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x, whole) * window, whole)[:, WINDOW // 2 :][:, :length]

    height = F.interpolate(filled(pitch)[:, None], scale_factor=HOP, mode="linear")[:, 0]
    voiced = F.interpolate((pitch > VOICED).float()[:, None], scale_factor=HOP, mode="linear")[:, 0]
    out = wave.clone()
    for harmonic in range(1, HARMONICS + 1):
        frequency = harmonic * height
        turn = 2 * torch.pi * harmonic * cycles
        cos, sin = turn.cos(), turn.sin()
        share = 2 * voiced * (4 * (1 - frequency / TOP)).clamp(0, 1)
        a, b = smooth(wave * cos), smooth(wave * sin)
        size, phase = (a.square() + b.square()).sqrt(), 2 * torch.pi * (frequency / TOP).square()
        out += share * ((size * phase.cos() - a) * cos + (size * phase.sin() - b) * sin)
    return out
