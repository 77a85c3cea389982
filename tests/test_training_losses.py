"""What the codec's losses ask for: level without phase, phase without level (assets/embedded/train)."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "assets/embedded/train"))
from balance import Balance
from codec_losses import level_loss, mel_loss, wave_loss
from codec_model import Codec
from side_by_side import SideBySide
from spread import sizes
from talker_model import Talker

RECIPE = Path(sys.path.pop(0))
SETTINGS = yaml.safe_load((RECIPE / "settings.yaml").read_text("utf-8"))

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


def test_silence_does_not_make_the_gradient_of_the_mel_loss():
    """Digital silence had nearly all of it once: what is 100 dB below speech cannot be heard."""
    real, other = (x[:1].clone() for x in NOISE)
    for x in (real, other):
        x[..., 7680:] *= 1e-5
    other.requires_grad_()
    mel_loss(other, real, SideBySide(False)).backward()
    loud, silent = other.grad[..., :7168].norm(), other.grad[..., 8192:].norm()  # type: ignore[index]
    assert float(silent) < 0.1 * float(loud)


def test_losses_pull_in_their_shares_where_it_is_measured():
    """Not where they are computed: a loss whose gradient cancels on the way would pull at nothing."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    made = x.repeat_interleave(16, 1)  # what a decoder makes of x
    flutter = torch.tensor([1.0, -1.0]).repeat(64)  # cancels but for its mean
    losses = {"mel": (made * (flutter + 0.01)).sum() * 1e3, "level": made.square().sum() * 1e-3}
    balance = Balance({"mel": 3.0, "level": 1.0}, 15.0, torch.device("cpu"))
    balance.measure(losses, x)
    whole = torch.autograd.grad(balance.total(losses), x, retain_graph=True)[0]
    mel, level = (torch.autograd.grad(losses[name], x, retain_graph=True)[0] for name in losses)
    parts = torch.linalg.lstsq(torch.stack([mel.flatten(), level.flatten()], 1), whole.flatten()[:, None]).solution
    pulls = [float(w) * float(g.flatten(1).norm(dim=1).mean()) for w, g in zip(parts[:, 0], (mel, level), strict=True)]
    assert pulls[0] / pulls[1] == pytest.approx(3, rel=1e-3)


def test_codes_learn_to_tell_the_mel_spectrum():
    """Steps of the encoder alone, from a random start: what the quantized vectors tell comes nearer to the spectrum."""
    torch.manual_seed(0)
    settings = dict(SETTINGS["codec"])
    codec = Codec(settings)
    at = torch.arange(15360) / 24000
    pcm = torch.stack([0.2 * torch.sin(2 * torch.pi * f * at * (1 + at)) for f in (150, 400, 900, 2000)])[:, None]
    adam, losses = torch.optim.AdamW(codec.parameters(), 1e-3), []
    for _ in range(25):
        first, rest = (book(x)[0] for book, x in zip(codec.books, codec.latents(pcm), strict=True))
        loss = codec.envelope_loss(first, rest, pcm)
        losses.append(loss.item())
        adam.zero_grad()
        loss.backward()
        adam.step()
    assert losses[-1] < 0.6 * losses[0]
    assert all(p.grad is not None and bool(p.grad.any()) for p in codec.seanet.parameters())


def test_every_latent_stands_out_of_what_the_codebooks_leave():
    """Sizes fall, and the last is not below the error that seven groups of 1,024 leave of all."""
    every = sizes(48, torch.device("cpu"))
    assert all(a > b for a, b in pairwise(every.tolist()))
    left = 0.024 * float(every.square().sum()) / len(every)  # measured (docs/measurements/embedded-voice.md)
    assert float(every[-1]) ** 2 > left


def test_a_speaker_vector_learns_how_its_voice_says_each_phoneme():
    torch.manual_seed(0)
    talker = Talker(SETTINGS, speakers=2)
    width, spread = SETTINGS["talker"]["hidden_size"], SETTINGS["codec"]["vq_dim"]
    vectors = torch.nn.Parameter(0.1 * torch.randn(2, width))
    sounds = torch.randn(2, 5, spread)  # of two voices and five phonemes
    who, what = torch.randint(2, (400,)), torch.randint(5, (400,))
    learning = [vectors, *talker.voice_phones.parameters(), *talker.voice_head.parameters()]
    adam = torch.optim.Adam(learning, lr=3e-3)

    def error(voices: torch.Tensor) -> torch.Tensor:
        return talker.voice_losses(vectors[voices], what[:, None].expand(-1, 4), sounds[who, what]).mean()

    before = error(who).item()
    for _ in range(60):
        adam.zero_grad()
        error(who).backward()
        adam.step()
    assert before > 0.8
    assert error(who).item() < 0.1
    assert error(1 - who).item() > 1.0  # the other voice's vector does not tell it
