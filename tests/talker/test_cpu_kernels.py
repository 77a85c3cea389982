"""The compiled CPU kernels against torch, and their independence of the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.talker import cpu_kernels as kernels
from engine.talker.cpu_step import CpuStep, _are_halves, _layer, _matrix
from engine.talker.geometry import StackGeometry, TalkerGeometry
from engine.talker.layers import DecoderLayer, rms_norm, rotary_table
from engine.talker.model import TalkerModel
from engine.talker.predictor import CodePredictor
from engine.talker.slots import SlotBuffers, SlotOptions
from engine.talker.torch_step import TorchStep
from tests.talker.driving import geometry_config, prompt

GEOMETRY = StackGeometry(96, 200, 1, 4, 2, 32, 1e-6, 1e6)


def arrays(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def layer() -> DecoderLayer:
    torch.manual_seed(0)
    made = DecoderLayer(GEOMETRY)
    for name, weight in made.named_parameters():
        weight.data.normal_(0, 0.1)
        if name.endswith("norm"):
            weight.data.add_(1)
    return made


def before(x: np.ndarray, made: DecoderLayer, positions: np.ndarray) -> tuple[np.ndarray, ...]:
    g, count = GEOMETRY, len(x)
    query, key, value = (np.empty((count, n, g.head_dim), np.float32) for n in (g.heads, g.kv_heads, g.kv_heads))
    table = rotary_table(g, 50).numpy()
    kernels.before_attention(x, count, _layer(made, False), table, positions, g.eps, query, key, value)
    return query, key, value


def after(x: np.ndarray, made: DecoderLayer, attended: np.ndarray) -> np.ndarray:
    x = x.copy()
    kernels.after_attention(x, len(x), attended, _layer(made, False), GEOMETRY.eps)
    return x


@pytest.mark.parametrize("width", [1, 3, 4, 17, 64])
def test_linear(width):
    x, weight, out = arrays(5, 40), arrays(width, 40, seed=1), np.zeros((5, width), np.float32)
    kernels.linear(x, 4, weight, out)
    np.testing.assert_allclose(out[:4], x[:4] @ weight.T, rtol=1e-4, atol=1e-5)
    assert (out[4] == 0).all()


def test_linear_with_halves_is_the_same_to_the_bit():
    x, out, expected = arrays(3, 40), np.zeros((3, 18), np.float32), np.zeros((3, 18), np.float32)
    weight = torch.from_numpy(arrays(18, 40, seed=1)).bfloat16().float()
    kernels.linear(x, 3, weight.numpy(), expected)
    kernels.linear(x, 3, _matrix(weight, True), out)
    assert _matrix(weight, True).dtype == np.uint16
    assert np.array_equal(out, expected)


def test_halves_are_used_only_where_they_lose_nothing():
    model = Parts(geometry_config())
    assert not _are_halves(model)
    for weight in model.parameters():
        weight.data.copy_(weight.data.bfloat16())
    assert _are_halves(model)
    model.predictor.layers[1].down.data[0, 0] += 1e-6
    assert not _are_halves(model)


def test_exponential_and_swiglu_are_accurate_over_the_whole_range():
    gate = np.linspace(-200, 200, 4001, dtype=np.float32)[None]
    up, out = np.ones_like(gate), np.empty_like(gate)
    kernels.swiglu(np.concatenate([gate, up], axis=1), 1, out)
    expected = F.silu(torch.from_numpy(gate).double()).numpy()
    inside = np.abs(gate) < 80
    np.testing.assert_allclose(out[inside], expected[inside], rtol=1e-6, atol=1e-12)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, expected, atol=1e-30, rtol=1e-5)
    values = np.linspace(-80, 80, 997, dtype=np.float32)
    ours = np.array([kernels.exponential(value) for value in values])
    np.testing.assert_allclose(ours, np.exp(values.astype(np.float64)), rtol=5e-6)  # t - floor(t) has 7 digits at 80
    near = np.abs(values) < 1
    np.testing.assert_allclose(ours[near], np.exp(values[near].astype(np.float64)), rtol=3e-7)


def test_layer_halves_are_those_of_torch():
    made, x, attended = layer(), arrays(6, 96), arrays(6, 128, seed=2)
    positions = np.array([0, 7, 3, 49, 1, 20])
    expected = made.before_attention(torch.from_numpy(x), rotary_table(GEOMETRY, 50)[positions])
    for ours, theirs in zip(before(x, made, positions), expected, strict=True):
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-4, atol=1e-5)
    theirs = made.after_attention(torch.from_numpy(x), torch.from_numpy(attended))
    np.testing.assert_allclose(after(x, made, attended), theirs.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_row_does_not_depend_on_its_batch():
    """To the bit: alone, and at every place of batches of every size."""
    made, x, attended = layer(), arrays(9, 96), arrays(9, 128, seed=2)
    positions = np.arange(9)
    together = (*before(x, made, positions), after(x, made, attended))
    for row in range(9):
        for size in (1, 2, 5):
            if row + size <= 9:
                part = slice(row, row + size)
                alone = (*before(x[part], made, positions[part]), after(x[part], made, attended[part]))
                for ours, theirs in zip(alone, together, strict=True):
                    assert np.array_equal(ours, theirs[part])


class Parts(TalkerModel):
    """What a step needs of the model, without vLLM's attention."""

    def __init__(self, config, halves=False, slots=5, frames=30) -> None:
        torch.nn.Module.__init__(self)
        g = self.geometry = TalkerGeometry.from_config(config)
        self.max_rows, self.max_positions, self.end_token = slots, 64, slots + 1
        self.layers, self.attentions = torch.nn.ModuleList(), torch.nn.ModuleList()
        self.head = torch.nn.Parameter(torch.empty(g.vocab, g.talker.hidden), requires_grad=False)
        self.predictor = CodePredictor(g)
        self.slots = SlotBuffers(g, slots, 60, frames, torch.device("cpu"), torch.float32)
        torch.manual_seed(1)
        for name, weight in self.named_parameters():
            weight.data.normal_(0, 0.15) if not name.endswith("norm") else weight.data.normal_(1, 0.1)
            if halves:
                weight.data.copy_(weight.data.bfloat16())
        self.predictor.finish_loading()


@pytest.mark.parametrize(
    "config, halves",
    [(geometry_config(), True), (geometry_config(width=128, groups=8), True), (geometry_config(groups=4), False)],
    ids=["16 groups", "8 groups, no projection", "float32 matrices"],
)
@torch.inference_mode()
def test_a_whole_frame_is_that_of_torch(config, halves):
    """Codes, tokens, stored state and report; sampled, greedy, top-p, ended, invalid and repeated rows in one batch."""
    models = [Parts(config, halves), Parts(config, halves)]
    steps = [TorchStep(models[0]), CpuStep(models[1])]
    settings = [{}, {"do_sample": False, "subtalker_do_sample": False}, {"top_p": 0.7, "subtalker_top_p": 0.8},
                {"top_k": 0, "subtalker_top_k": 0, "min_frames": 0}, {"repetition_penalty": 3.0}]  # fmt: skip
    for model, step in zip(models, steps, strict=True):
        step.finish_loading()
        for slot, changes in enumerate(settings, start=1):
            options = SlotOptions(seed=slot, max_frames=30, **changes)
            model.slots.write(slot, 100 + slot, prompt(slot, 10 + slot), options)
    generator, ended = torch.Generator().manual_seed(3), 0
    for frame in range(10):
        hidden = torch.randn(5, models[0].geometry.talker.hidden, generator=generator)
        if frame == 9:  # make the end all but certain for one row
            eos = models[0].head[models[0].geometry.eos]
            hidden[3] = eos / eos.norm() * 100
        slot, frames = torch.arange(1, 6), torch.full((5,), frame)
        valid = torch.tensor([True, True, frame != 5, True, True])
        results = [step.speak(hidden, slot, frames, valid) for step in steps]
        assert torch.equal(results[0], results[1])
        reports = [step.reported(5) for step in steps]
        assert torch.equal(reports[0], reports[1]) and len(reports[0])
        ended += int((results[0] == models[0].end_token).sum())
        kept = models[0].slots.codes[1:, frame].clone()
        again = [step.speak(-hidden, slot, frames, valid) for step in steps]  # a repeated step must change nothing
        assert torch.equal(again[0], results[0]) and torch.equal(again[1], results[0])
        assert torch.equal(models[0].slots.codes[1:, frame], kept)
        # after the end only code 0 counts
        going = kept[:, 0] != models[0].geometry.eos
        assert torch.equal(models[1].slots.codes[1:, frame][going], kept[going])
        assert torch.equal(models[1].slots.codes[1:, frame, 0], kept[:, 0])
        assert torch.equal(models[0].slots.seen_at[1:], models[1].slots.seen_at[1:])
    assert ended >= 1
    for positions in (torch.tensor([3, 11, 12, 13, 30]), torch.tensor([11, 12, 13, 14, 15])):
        ids = torch.tensor([1, 2, 3, 0, 6])
        ours, theirs = (step.inputs(ids, positions) for step in reversed(steps))
        torch.testing.assert_close(ours[0][:3], theirs[0][:3], rtol=1e-5, atol=1e-5)
        assert torch.equal(ours[1], theirs[1]) and torch.equal(ours[2], theirs[2])


def test_rms_norm():
    x, weight, out = arrays(3, 33), arrays(33, seed=4), np.empty((3, 33), np.float32)
    kernels.rms_norm(x, 3, weight, 1e-6, out)
    expected = rms_norm(torch.from_numpy(x), torch.from_numpy(weight), 1e-6).numpy()
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
