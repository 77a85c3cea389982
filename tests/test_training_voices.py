"""How the recipe makes speakers differ (assets/embedded/train): moved formants, microphones, disturbed references."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.speaker import SpeakerEncoder

sys.path.insert(0, str(Path(__file__).parents[1] / "assets/embedded/train"))
import formants
from corpus import roughen, tone_colour
from examples import Examples
from set_apart import set_apart, share_kept
from sounds import Sound, coloured
from talker_model import Talker

sys.path.pop(0)

RATE = formants.RATE


def vowel(resonances: tuple[float, ...], seconds: float = 1.0) -> torch.Tensor:
    """PCM [1, 1, N]: harmonics of 125 Hz, strong around the resonances (Hz)."""
    time, out = torch.arange(int(seconds * RATE)) / RATE, torch.zeros(int(seconds * RATE))
    for number in range(1, 90):
        f = 125.0 * number
        size = sum(1 / (1 + ((f - r) / 120) ** 2) for r in resonances) + 1e-3
        out += size * torch.cos(2 * torch.pi * f * time + number)
    return (0.2 * out / out.abs().max())[None, None]


def loudest(pcm: torch.Tensor, low: float, high: float) -> float:
    """The frequency about which the power between two others lies, Hz."""
    power = torch.fft.rfft(pcm[0, 0]).abs().square()
    f = torch.linspace(0, RATE / 2, len(power))
    band = (f > low) & (f < high)
    return float((power * f)[band].sum() / power[band].sum())


def test_formants_that_do_not_move_leave_speech_as_it_is():
    pcm = vowel((600, 1700))
    assert torch.allclose(formants.moved(pcm, torch.zeros(1, len(formants.KNOTS))), pcm, atol=1e-5)


@pytest.mark.parametrize("step", [0.15, -0.15])
def test_formants_move_and_harmonics_stay(step):
    pcm = vowel((1700,))
    steps = torch.full((1, len(formants.KNOTS)), step)
    steps[:, 0] = steps[:, -1] = 0
    made = formants.moved(pcm, steps)
    assert loudest(made, 1000, 2600) == pytest.approx(loudest(pcm, 1000, 2600) * math.exp(step), rel=0.03)
    power = torch.fft.rfft(made[0, 0]).abs().square()  # bins of 1 Hz
    near = (torch.arange(len(power)) + 2) % 125 < 5
    assert power[near].sum() / power.sum() > 0.98


def test_one_filter_serves_what_is_heard_and_what_is_wanted():
    pcm = vowel((700, 1900))
    steps = formants.draw(1, 0.1, torch.Generator().manual_seed(3))
    made = formants.moved(torch.cat([pcm, 0.5 * pcm], 1), steps)
    assert torch.allclose(made[:, 1], 0.5 * made[:, 0], atol=1e-5)


def test_formants_keep_their_order():
    steps = formants.draw(200, 0.12, torch.Generator().manual_seed(0))
    assert (formants.source_bins(steps, 513).diff(dim=1) > 0).all()


def test_tone_colour_has_its_decibels_at_its_knots():
    knots = torch.tensor([[0.0, 6.0, -6.0, 0.0]])
    factors = 20 * tone_colour(knots, 24001)[0].log10()
    for place, wanted in zip((0, 1 / 9, 4 / 9, 1), knots[0], strict=True):
        assert factors[round(place * 24000)] == pytest.approx(float(wanted), abs=0.1)


def test_a_talkers_reference_keeps_its_tone_colour():
    """A speaker vector that is told to leave the microphone out gave at most 31 % of a reference's tone colour back."""
    torch.manual_seed(0)
    pcm = vowel((600, 1700)).repeat(16, 1, 1)
    made = roughen(pcm, 0.4, filters=False)
    gain = (made * pcm).sum(-1, keepdim=True) / pcm.square().sum(-1, keepdim=True)
    left = (made - gain * pcm).square().mean((1, 2)) / (gain * pcm).square().mean((1, 2))
    assert left.max() < 0.02  # nothing but noise, at least 20 dB below
    assert 1 <= (left > 1e-6).sum() < 8


def test_each_version_of_a_speaker_sounds_otherwise():
    one, again, other = (Sound.drawn(40, "cpu", version) for version in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    fewer = Sound.drawn(7, "cpu", 1)  # as in a part of a corpus
    assert all(torch.equal(a[:7], b) for a, b in zip(one, fewer, strict=True))
    assert not torch.equal(one.formants, other.formants) and not torch.equal(one.colour, other.colour)
    assert 0 < (one.cut < 1e9).sum() < 20
    pcm = vowel((600, 1700), 0.2).repeat(2, 2, 1)
    made = one.of(torch.tensor([3, 4])).hear(pcm)
    assert made.shape == pcm.shape and torch.allclose(made[:, 0], made[:, 1], atol=1e-5)
    assert (made[0] - made[1]).square().mean() > 0.01 * pcm.square().mean()


def test_a_microphone_that_hears_nothing_above_a_limit():
    noise = torch.randn(1, 1, 24000, generator=torch.Generator().manual_seed(0))
    made = coloured(noise, torch.zeros(1, 12), torch.tensor([4000.0]))
    power = torch.fft.rfft(made[0, 0]).abs().square()
    assert power[5000:].mean() < 1e-3 * power[:3000].mean()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_examples_that_have_spoken_in_another_voice_so_far(share):
    """The frames before are another version's from end to end; what is to be predicted is none of this method's."""
    quiet = {"noisy_examples": 0.0, "hidden_groups": 0.0, "hidden_frames": 0.0, "noisy_codes": 0.0}
    examples = Examples.__new__(Examples)  # without a corpus
    examples.t = quiet | {"other_voice": share, "own_voice": share}
    examples.size, examples.offset = 1024, np.array([0, 5, 12])
    examples.codes = np.arange(3 * 12 * 4, dtype=np.int16).reshape(3, 12, 4)
    rng, wanted, seen = np.random.default_rng(0), examples.clip_codes(1, 2), set()
    for _ in range(40):
        rows = {"codec": np.append([9, 9], wanted[:, 0]), "codes": np.concatenate([np.full((2, 3), 9), wanted[:, 1:]])}
        rows["own"] = np.zeros(9, bool)
        examples._disturb(rows, 7, 1, rng)
        assert not rows["own"][:2].any() and (rows["own"][2:] == bool(share)).all()
        assert (rows["codec"][:2] == 9).all() and (rows["codes"][:2] == 9).all()
        before = np.concatenate([rows["codec"][2:, None], rows["codes"][2:]], 1)
        matching = {version for version in range(3) if (before == examples.clip_codes(1, version)).all()}
        assert len(matching) == 1
        seen |= matching
    assert seen == ({0, 1, 2} if share else {2})


def test_only_whole_stretches_of_examples_that_hide_nothing_are_listened_to():
    examples = Examples.__new__(Examples)  # without a corpus
    examples.t, examples.size = {"judged_frames": 4, "judged": 3, "predicted": 20}, 1024
    examples.start, examples.samples = np.arange(3), np.full(3, 9600)
    examples.speaker = np.array([5, 6, 7])

    def rows(frames: int, hidden: bool) -> dict:
        """Two rows of prompt, then the frames; the row before a frame predicts it."""
        length, codes = frames + 2, np.arange(3 * (frames + 2)).reshape(-1, 3)
        target = np.full(length, -1)
        target[1:-1], target[-1] = codes[2:, 0], 2000
        made = {key: np.zeros(length, np.int64) for key in ("text", "low", "high")}
        made |= {"codec": codes[:, 0], "codes": codes[:, 1:], "target": target, "own": np.zeros(length, bool)}
        made |= {"heard": (codes[:, 1:], codes[:, 0]), "phones": np.zeros((frames, 4), np.int64)}
        made["speaker"], made["version"] = np.zeros(length, np.float32), np.array(0)
        if hidden:
            made["codes"] = np.where(np.arange(length)[:, None] == 4, -1, made["codes"])  # one frame
        return made

    group = [(rows(6, True), 0), (rows(3, False), 1), (rows(7, False), 2)]
    seen = set()
    for seed in range(20):
        batch = examples.collate(group, 10, np.random.default_rng(seed))
        crop, *nothing = batch["crops"].tolist()
        assert nothing == [[-1] * 4] * 2
        assert crop == list(range(crop[0], crop[0] + 4)) and crop[0] // 10 == 2
        seen.add(crop[0] - 20)
        # Frame r + 1 of the example is what row r predicts.
        at = [batch["where"].tolist().index(row) for row in crop]
        assert (batch["frames"][at, 0] == batch["codec"].flatten()[torch.tensor(crop) + 1]).all()
    assert seen == {1, 2, 3, 4}


def test_share_kept_counts_only_what_comes_back_in_a_vectors_own_direction():
    given = np.random.default_rng(0).standard_normal((400, 12)) + 3
    noise = np.random.default_rng(1).standard_normal((400, 12))
    assert share_kept(given, 0.7 * given + 0.2 * noise - 5) == pytest.approx(0.7, abs=0.02)
    assert share_kept(given, noise) == pytest.approx(0.0, abs=0.04)


def test_set_apart_scales_vectors_about_the_mean_and_nothing_else():
    torch.manual_seed(0)
    encoder = SpeakerEncoder({"enc_dim": 24, "enc_channels": [16, 16, 16, 16, 48], "enc_res2net_scale": 4}).eval()
    own = {f"speaker_encoder.{name}": value for name, value in encoder.state_dict().items()}
    clips = [vowel((r, 3 * r))[0, 0].numpy() for r in (300.0, 450.0, 700.0)]
    before = np.stack([encoder.embed(pcm) for pcm in clips])
    mean = before.mean(0)
    moved = set_apart(own | {"talker.codec_head.weight": torch.ones(2)}, mean, 1.5)
    assert torch.equal(moved.pop("talker.codec_head.weight"), torch.ones(2))
    encoder.load_state_dict({name.removeprefix("speaker_encoder."): value for name, value in moved.items()})
    after = np.stack([encoder.embed(pcm) for pcm in clips])
    np.testing.assert_allclose(after - mean, 1.5 * (before - mean), atol=1e-4)
    assert np.abs(before - mean).max() > 0.01


def small_talker() -> Talker:
    """Random weights; two of its codes' groups and 16 of its codes, so that it fits a test."""
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    stack = layers | {"hidden_size": 32, "intermediate_size": 48, "rope_theta": 10000.0}
    encoder = {"enc_dim": 32, "enc_channels": [16, 16, 16, 16, 48], "enc_res2net_scale": 4}
    torch.manual_seed(0)
    return Talker(
        {
            "talker": stack | {"text_vocab_size": 40, "text_hidden_size": 24},
            "predictor": stack,
            "codec": {"groups": 3, "codebook_size": 16, "vq_dim": 8},
            "speaker_encoder": encoder,
            "talker_training": {"led_layers": [0]},
        },
        speakers=4,
        dropout=0.5,
    )


def test_what_the_talker_would_have_said_itself_takes_the_marked_frames_places():
    talker, length, frames = small_talker().train(), 12, 5
    one = torch.Generator().manual_seed(1)
    codec, codes = torch.full((2, length), -1), torch.full((2, length, 2), -1)
    codec[:, -frames:] = torch.randint(16, (2, frames), generator=one)
    codes[:, -frames:] = torch.randint(16, (2, frames, 2), generator=one)
    codec[1, -2], codes[1, -2] = -1, -1  # a frame that is hidden
    own = torch.zeros(2, length, dtype=torch.bool)
    own[1, -frames:] = True
    where = (torch.tensor([[0], [length]]) + torch.arange(length - frames - 1, length - 1)).flatten()
    batch = {"text": torch.randint(40, (2, length), generator=one), "codec": codec, "codes": codes, "own": own}
    batch |= {"speaker": torch.zeros(2, length), "where": torch.cat([where, torch.zeros(3, dtype=torch.long)])}
    speaker = torch.randn(2, 32, generator=one)
    made = talker.drifted(batch, speaker)
    assert talker.training and all(layer.training for layer in talker.model.layers)
    assert torch.equal(made["codec"][0], codec[0]) and torch.equal(made["codes"][0], codes[0])
    assert made["codec"][1, -2] == -1 and (made["codes"][1, -2] == -1).all()
    with torch.no_grad():
        states = talker.eval()(batch, speaker)[1]
    for row in (length - 5, length - 4, length - 3, length - 1):
        code = talker.codec_head(states[row - 1])[:16].argmax()
        assert made["codec"][1, row] == code
        so_far = [int(code)]
        for group in range(2):  # the teacher-forced predictor, asked again after each of its own codes
            full = torch.tensor([so_far + [0] * (3 - len(so_far))])
            so_far.append(int(talker.predict(states[row - 1][None], full)[0, group].argmax()))
        assert made["codes"][1, row].tolist() == so_far[1:]
    known = torch.tensor([[3, 5]])
    assert talker.complete(states[:1], known)[0, :2].tolist() == [3, 5]
    last = int(talker.predict(states[:1], torch.tensor([[3, 5, 0]]))[0, 1].argmax())
    assert talker.complete(states[:1], known)[0, 2] == last


def test_codes_spoken_aloud_are_the_talkers_own_and_their_gradient_is_the_means():
    talker = small_talker().train()
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(2), requires_grad=True)
    books = torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(3))
    made = talker.spoken(hidden, books)
    assert talker.training and made.shape == (5, 3, 8)
    talker.eval()
    with torch.no_grad():
        codes = talker.complete(hidden)
    for group in range(3):
        torch.testing.assert_close(made[:, group], books[group][codes[:, group]])
    (slope,) = torch.autograd.grad(made[0, 0, 0], hidden)
    share = talker.codec_head(hidden)[0, :16].softmax(0)  # group 0 has no dropout before it
    (wanted,) = torch.autograd.grad((share * books[0, :, 0]).sum(), hidden)
    torch.testing.assert_close(slope, wanted)
    assert slope[0].abs().sum() > 0 and slope[1:].abs().sum() == 0
    last = torch.autograd.grad(talker.spoken(hidden, books)[1, 2].sum(), list(talker.heads.parameters()))
    assert last[1].abs().sum() > 0  # the predictor learns as well
