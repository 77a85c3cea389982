"""What the codec's losses ask for: level without phase, phase without level (assets/embedded/train)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "assets/embedded/train"))
from codec_losses import level_loss, wave_loss

sys.path.pop(0)

NOISE = 0.1 * torch.randn(2, 2, 1, 15360, generator=torch.Generator().manual_seed(0))


def test_wave_loss_is_blind_to_loudness():
    real, other = NOISE
    assert float(wave_loss(real, real)) == pytest.approx(0, abs=1e-5)
    assert float(wave_loss(0.3 * real, real)) == pytest.approx(0, abs=1e-5)
    assert float(wave_loss(other, real)) == pytest.approx(1, abs=0.1)
    assert float(wave_loss(-real, real)) == pytest.approx(2, abs=1e-5)


def test_no_sound_is_no_way_to_lower_the_wave_loss():
    real, other = NOISE
    quiet = 1e-4 * other
    assert float(wave_loss(quiet, real)) > 0.95


def test_level_loss_is_in_decades_of_power_and_blind_to_details():
    real, other = NOISE
    assert float(level_loss(real, real)) == 0
    assert float(level_loss(0.5 * real, real)) == pytest.approx(0.602, abs=0.01)
    assert float(level_loss(other, real)) < 0.15


def test_losses_have_gradients_at_silence():
    real, _ = NOISE
    fake = torch.zeros_like(real, requires_grad=True)
    (wave_loss(fake, real) + level_loss(fake, real)).backward()
    assert fake.grad is not None and bool(fake.grad.isfinite().all())
