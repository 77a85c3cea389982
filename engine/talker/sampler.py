"""Sampling inside the model: a counter-based generator and exact temperature, top-k and top-p, in plain torch.

No generator state exists: the uniform number of a draw is a hash of (seed, frame, code group), so a request draws the
same numbers whatever else is in the batch, and a step that runs twice draws twice the same. The kernels for the CPU
(`cpu_kernels.py`) and CUDA (`kernels.py`) compute the same functions; tests hold the three together.
"""

from __future__ import annotations

import torch

# Constants of splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014), as int64.
MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15

COLDEST = 1e-4  # guards the division; a temperature of 0 means greedy and takes the other branch


def _mix(x: torch.Tensor) -> torch.Tensor:
    # >> is arithmetic on int64: the masks drop the copies of the sign
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def uniform(seed: torch.Tensor, frame: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Numbers in (0, 1) on a grid of 2**24, from int64 tensors that broadcast together. float32."""
    hashed = _mix(_mix(seed * GOLDEN + frame) + group * GOLDEN)
    return (((hashed >> 40) & 0xFFFFFF).to(torch.float32) + 0.5) / 16777216.0


def filtered_probabilities(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """The distribution that is drawn from: temperature, then top-k, then top-p, as the warpers of `transformers`.

    A value is kept when fewer than top_k values are larger, and when the probability mass of the larger values is
    below top_p. Values tied with the last one kept are kept too (for top-k `transformers` does the same; for top-p
    it breaks ties by its sort).

    Args:
        logits: [R, V] float32.
        temperature, top_p: [R] float32. A temperature of 0 counts as 1e-4 here.
        top_k: [R] int64, at least 1; V or more keeps all.

    Returns:
        [R, V] float32, rows sum to 1, zero outside the kept set.
    """
    scaled = logits / temperature.clamp_min(COLDEST)[:, None]
    ordered, _ = scaled.sort(dim=-1, descending=True)
    kth = ordered.gather(1, (top_k.clamp_max(scaled.shape[-1]) - 1)[:, None])
    mass = torch.softmax(ordered.masked_fill(ordered < kth, float("-inf")), dim=-1)
    larger = mass.cumsum(-1) - mass
    # At top_p = 1 rounding of the sum must not cut the tail. Of a run of ties the first decides: its `larger` is least.
    cut = (larger >= top_p[:, None]) & (top_p < 1)[:, None]
    smallest = ordered.masked_fill(cut | (ordered < kth), float("inf")).amin(-1, keepdim=True)
    return torch.softmax(scaled.masked_fill(scaled < smallest, float("-inf")), dim=-1)


def sample(
    logits: torch.Tensor,
    draw: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """One code per row: inverse of the cumulative distribution in index order, or the argmax at temperature 0.

    Args:
        logits: [R, V] float32; draw, temperature, top_p: [R] float32; top_k: [R] int64.

    Returns:
        [R] int64.
    """
    probabilities = filtered_probabilities(logits, temperature, top_k, top_p)
    cumulative = probabilities.cumsum(-1)
    index = (cumulative <= (draw * cumulative[:, -1])[:, None]).sum(-1)
    # rounding may step past the last kept code
    last = (probabilities > 0).long().mul(torch.arange(logits.shape[-1], device=logits.device)).amax(-1)
    greedy = temperature <= 0
    return torch.where(greedy, logits.argmax(-1), torch.minimum(index, last))


def penalise(logits: torch.Tensor, spoken: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Repetition penalty of CTRL (Keskar et al. 2019): spoken codes are divided when positive, else multiplied.

    Args:
        logits: [R, V] float32; spoken: [R, V] bool; penalty: [R] float32.
    """
    factor = penalty[:, None]
    return torch.where(spoken, torch.where(logits < 0, logits * factor, logits / factor), logits)
