"""The training speech of the embedded voice: whole periods in every codec frame, harmonics in phase."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).resolve().parents[1] / "assets/embedded/train/pitch_grid.py"
spec = importlib.util.spec_from_file_location("pitch_grid", PATH)
pitch_grid = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pitch_grid)

FRAME, HOP = 1920, pitch_grid.HOP


def gliding(low: float, high: float, values: int = 160) -> torch.Tensor:
    """[1, values] Hz, with two gaps without voice."""
    pitch = torch.linspace(low, high, values)[None].clone()
    pitch[:, 40:52] = 0.0
    pitch[:, 100:103] = 3.0
    return pitch


@pytest.mark.parametrize("faster", [1.0, 0.86, 1.17])
@pytest.mark.parametrize(("low", "high"), [(85.0, 120.0), (103.0, 103.0), (210.0, 160.0)])
def test_every_frame_holds_whole_periods(low, high, faster):
    pitch = gliding(low, high)
    bent, cycles = pitch_grid.on_grid(pitch, torch.tensor([FRAME * faster]))
    voiced = pitch > pitch_grid.VOICED
    assert torch.equal(bent[~voiced], pitch[~voiced])
    ratio = bent[voiced] / pitch[voiced]
    half = 12.5 / faster / 2 / pitch.max().item()  # half a period in a frame: what rounding alone may ask for
    assert (ratio - 1).abs().mean() < 1.1 * half and (ratio - 1).abs().max() < 0.2
    starts = (torch.arange(1, int(cycles.shape[1] / (FRAME * faster))) * FRAME * faster).round().long()
    away = cycles[0, starts] - cycles[0, starts].round()
    assert away.abs().max() < 0.01  # the boundary lies up to half a sample off
    # The phase runs at the bent pitch, in gaps too.
    steps = (cycles[0].diff() % 1 * 24000)[: 39 * HOP].mean()
    assert steps == pytest.approx(bent[0, :39].mean().item(), rel=0.01)


def test_rounding_does_not_alternate():
    """At eight and a half periods a frame the steadier choice wins over the nearer one."""
    periods = torch.tensor([[8.45, 8.55, 8.45, 8.55, 8.45, 8.55]])
    assert len(pitch_grid.whole_periods(periods, torch.ones_like(periods)).unique()) == 1


def test_harmonics_get_the_phases_of_their_frequency():
    samples, pitch = 160 * HOP, torch.full((1, 160), 125.0)
    cycles = torch.arange(samples)[None] * 125.0 / 24000
    torch.manual_seed(0)
    sizes, phases = torch.rand(12) + 0.5, 6.28 * torch.rand(12)
    parts = [
        s * torch.cos(2 * torch.pi * h * cycles + p) for h, (s, p) in enumerate(zip(sizes, phases, strict=True), 1)
    ]
    wave = pitch_grid.in_phase(sum(parts), cycles, pitch)
    middle = slice(4800, -4800)
    for harmonic in range(1, 9):  # 1 kHz; above 1.2 kHz the change fades out
        turn = 2 * torch.pi * harmonic * cycles
        a = 2 * (wave * turn.cos())[:, middle].mean()
        b = -2 * (wave * turn.sin())[:, middle].mean()
        assert torch.hypot(a, b) == pytest.approx(sizes[harmonic - 1].item(), rel=0.03)
        wanted = -2 * torch.pi * (harmonic * 125 / pitch_grid.TOP) ** 2
        assert torch.atan2(b, a).sub(wanted).cos() > 0.999


def test_sound_without_voice_stays_as_it_is():
    torch.manual_seed(0)
    noise = torch.randn(1, 40 * HOP)
    pitch = torch.zeros(1, 40)
    bent, cycles = pitch_grid.on_grid(pitch, torch.tensor([1920.0]))
    assert torch.equal(bent, pitch)
    assert torch.equal(pitch_grid.in_phase(noise, cycles, pitch), noise)
