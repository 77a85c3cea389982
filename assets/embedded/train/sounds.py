"""What makes further speakers of one: formants elsewhere, another microphone."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import formants
import torch
import yaml
from corpus import tone_colour
from torch import Tensor

SETTINGS = yaml.safe_load((Path(__file__).parent / "settings.yaml").read_text("utf-8"))
RATE, MOST = formants.RATE, 16384  # speakers of one corpus


def coloured(wave: Tensor, knots: Tensor, cut: Tensor) -> Tensor:
    """[B, C, N] through a filter of its own for each row: knots [B, K] in dB, low-pass at cut [B] in Hz."""
    whole = 1 << (wave.shape[-1] - 1).bit_length()
    spectrum = torch.fft.rfft(wave, whole)
    frequency = torch.linspace(0, RATE / 2, spectrum.shape[-1], device=wave.device)
    factors = tone_colour(knots, len(frequency)) * torch.sigmoid((cut[:, None] - frequency) / 100)
    return torch.fft.irfft(spectrum * factors[:, None], whole)[..., : wave.shape[-1]]


class Sound(NamedTuple):
    """How speakers sound besides, which their clips and references share: [speakers, ...] each."""

    formants: Tensor  # [speakers, knots] of formants.py
    colour: Tensor  # [speakers, knots] their microphones, in dB
    cut: Tensor  # [speakers] Hz: for a share of them it hears nothing above

    @classmethod
    def drawn(cls, speakers: int, device: torch.device | str, version: int = 0) -> Sound:
        """Each version gives the same speakers other sounds. A speaker's do not depend on how many there are: parts of
        a corpus, which are encoded apart, need not all have the last one."""
        if speakers > MOST:
            raise ValueError(f"{speakers} speakers, at most {MOST}: raise MOST")
        c = SETTINGS["corpus"]
        generator = torch.Generator().manual_seed(c["seed"] + 1000 * version)
        colour = c["colour_db"] * (2 * torch.rand(MOST, c["colour_knots"], generator=generator) - 1)
        low, high = c["low_pass"]
        cut = low + (high - low) * torch.rand(MOST, generator=generator)
        cut[torch.rand(MOST, generator=generator) >= c["low_passed"]] = 1e9
        steps = formants.draw(MOST, c["formants"], generator)
        return cls(*(value[:speakers].to(device) for value in (steps, colour, cut)))

    def of(self, speakers: Tensor) -> Sound:
        """The rows of some of them: speakers [B]."""
        return Sound(*(value[speakers] for value in self))

    def hear(self, wave: Tensor) -> Tensor:
        """PCM [B, C, N] of the speakers of the rows -> how they sound."""
        return coloured(formants.moved(wave, self.formants), self.colour, self.cut)
