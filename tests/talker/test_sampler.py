"""Sampling: the distribution that is drawn from, the draws, and their numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from engine.talker import cpu_kernels
from engine.talker.sampler import filtered_probabilities, penalise, sample, uniform

SETTINGS = [  # temperature, top_k (0: off), top_p
    (1.0, 0, 1.0),
    (0.9, 50, 1.0),
    (0.7, 1, 1.0),
    (1.3, 0, 0.8),
    (0.9, 20, 0.9),
    (2.5, 200, 0.35),
    (0.3, 300, 0.999),
    (0.9, 50, 1e-6),
]


def logits(rows: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3


def column(value, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype)


def drawn(row: torch.Tensor, draws: torch.Tensor, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Codes of the compiled kernel for one distribution and many uniform numbers."""
    size, codes = row.shape[0], []
    for draw in draws.numpy():
        settings = np.float32(temperature), top_k or size, np.float32(top_p)
        codes.append(
            cpu_kernels.draw_code(row.numpy(), draw, *settings, np.empty(size, np.int32), np.empty(size, np.float32))
        )
    return np.array(codes)


@pytest.mark.parametrize("temperature, top_k, top_p", SETTINGS)
def test_distribution_is_that_of_the_reference_warpers(temperature, top_k, top_p):
    scores = logits(6, 400)
    warped = TemperatureLogitsWarper(temperature)(None, scores)
    if top_k:
        warped = TopKLogitsWarper(top_k)(None, warped)
    if top_p < 1:
        warped = TopPLogitsWarper(top_p)(None, warped)
    expected = warped.softmax(-1)
    rows = column([temperature] * 6), column([top_k or 400] * 6, torch.int64), column([top_p] * 6)
    ours = filtered_probabilities(scores, *rows)
    assert torch.equal(ours > 0, expected > 0)
    assert float((ours - expected).abs().max()) < 5e-6


def test_ties_with_the_last_kept_value_are_kept():
    scores = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]])
    kept = filtered_probabilities(scores, column([1.0]), column([2], torch.int64), column([1.0]))
    assert (kept[0] > 0).tolist() == [True, False, True, True, True, False]
    assert torch.equal(kept > 0, TopKLogitsWarper(2)(None, scores).softmax(-1) > 0)
    assert set(drawn(scores[0], torch.linspace(0.001, 0.999, 200), 1.0, 2, 1.0)) == {0, 2, 3, 4}


@pytest.mark.parametrize("temperature, top_k, top_p", SETTINGS)
def test_draws_follow_the_distribution(temperature, top_k, top_p):
    """Pearson's statistic of 40,000 draws, over bins that expect at least 5, far below its 1e-6 quantile."""
    count, size = 40_000, 60
    scores = logits(1, size, seed=3)
    frames = torch.arange(count)
    draws = uniform(torch.full((count,), 17), frames, torch.zeros_like(frames))
    settings = column([temperature]), column([top_k or size], torch.int64), column([top_p])
    expected = filtered_probabilities(scores, *settings)[0].numpy() * count
    codes = sample(scores.expand(count, size), draws, *[s.expand(count) for s in settings]).numpy()
    observed = np.bincount(codes, minlength=size)
    assert (observed[expected == 0] == 0).all()
    bins = expected >= 5
    statistic = ((observed[bins] - expected[bins]) ** 2 / expected[bins]).sum()
    freedom = max(1, bins.sum() - 1)
    assert statistic < freedom + 7 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature, top_k, top_p", SETTINGS)
def test_kernel_draws_the_same(temperature, top_k, top_p):
    scores = logits(1, 777, seed=5)[0]
    draws = uniform(torch.tensor(-5), torch.arange(300), torch.tensor(3))
    rows = [column([v] * 300, t) for v, t in ((temperature, torch.float32), (top_k or 777, torch.int64))]
    expected = sample(scores.expand(300, -1), draws, *rows, column([top_p] * 300))
    differ = (drawn(scores, draws, temperature, top_k, top_p) != expected.numpy()).sum()
    assert differ <= 1  # a draw within rounding of a border may fall on either side


def test_greedy_and_settings_per_row():
    scores = logits(4, 100, seed=9)
    draws = torch.tensor([0.5, 0.999, 0.3, 0.3])
    temperature, top_k, top_p = column([0.0, 0.0, 1.0, 1.0]), column([100, 3, 1, 100], torch.int64), column([1.0] * 4)
    codes = sample(scores, draws, temperature, top_k, top_p)
    best = scores.argmax(-1)
    assert codes[:3].tolist() == best[:3].tolist()
    alone = sample(scores[3:], draws[3:], temperature[3:], top_k[3:], top_p[3:])
    assert codes[3] == alone[0]
    assert drawn(scores[0], draws, 0.0, 0, 1.0).tolist() == [int(best[0])] * 4


def test_uniform_numbers():
    """Even, uncorrelated between neighbours in every argument, inside (0, 1), the same in the kernel."""
    seeds, frames, groups = torch.meshgrid(
        torch.tensor([0, 1, -1, 1 << 62]), torch.arange(2000), torch.arange(16), indexing="ij"
    )
    numbers = uniform(seeds, frames, groups)
    assert 0 < float(numbers.min()) and float(numbers.max()) < 1
    histogram = torch.histc(numbers, 64, 0, 1)
    expected = numbers.numel() / 64
    assert float(((histogram - expected) ** 2 / expected).sum()) < 63 + 7 * np.sqrt(2 * 63)
    centred = (numbers - 0.5) / numbers.std()
    for dim in range(3):
        size = centred.shape[dim] - 1
        neighbours = (centred.narrow(dim, 0, size) * centred.narrow(dim, 1, size)).mean()
        assert abs(float(neighbours)) < 0.02, dim
    for seed, frame, group in ((0, 0, 0), (-7, 3, 15), (1 << 62, 2047, 1)):
        expected_one = uniform(torch.tensor(seed), torch.tensor(frame), torch.tensor(group))
        assert cpu_kernels.uniform(seed, frame, group) == expected_one.item()


def test_repetition_penalty_is_that_of_the_reference():
    scores, history = logits(2, 50, seed=2), torch.tensor([[1, 2, 3], [4, 4, 49]])
    spoken = torch.zeros(2, 50, dtype=torch.bool).scatter_(1, history, True)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(history, scores.clone())
    assert torch.equal(penalise(scores, spoken, column([1.3, 1.3])), expected)
