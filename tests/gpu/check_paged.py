"""The attention of a step of one row on a CUDA machine: `talker.layers: paged` in the talker's graph against vLLM's in
eager steps, 1.7B geometry with random weights; then ms a decode step of one stream.

    python3 -m tests.gpu.check_paged

Two bfloat16 paths differ by 0.02 to 0.04 (selfcheck.py), and random weights soon draw another code: states are compared
for as long as the codes are the same.
"""

from __future__ import annotations

import time

import torch

from engine.talker import PromptRows, SlotOptions, Talker, selfcheck
from tests.gpu.check_talker import result, start, stop

GREEDY = {"do_sample": False, "subtalker_do_sample": False}


def prompt(talker: Talker, length: int) -> PromptRows:
    generator = torch.Generator().manual_seed(length)
    rows = torch.randn(length, talker.geometry.talker.hidden, generator=generator) * 0.5
    return PromptRows(rows, rows[:0], rows[0])


def spoken(talker: Talker, length: int, frames: int) -> tuple[list[torch.Tensor], list]:
    """The first row's hidden state after each step, and the codes."""
    talker.add("one", prompt(talker, length), SlotOptions(seed=0, max_frames=frames, **GREEDY))
    hidden, codes = [], []
    while talker.busy:
        codes += [code for frames_of in talker.step() for code in frames_of.codes]
        torch.cuda.synchronize()
        hidden.append(talker.model.probe[0].float().clone())
    return hidden, codes


def compare(talker: Talker, length: int, frames: int = 40) -> None:
    step = talker.model.step
    ours, codes = spoken(talker, length, frames)
    kept, step.paged = step.paged, None
    with selfcheck._eager(talker):
        theirs, others = spoken(talker, length, frames)
    step.paged = kept
    alike = next((i for i, (one, other) in enumerate(zip(codes, others, strict=False)) if (one != other).any()), frames)
    errors = [float((x - y).norm() / y.norm()) for x, y in zip(ours[1:], theirs[1:], strict=False)][: max(1, alike)]
    result(f"prompt of {length}: {alike} of {frames} frames alike; relative error up to there {max(errors):.4f}")


def speed(talker: Talker, length: int, steps: int = 60) -> None:
    talker.add("one", prompt(talker, length), SlotOptions(seed=0, max_frames=2 * steps, **GREEDY))
    for _ in range(20):
        talker.step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        talker.step()
    torch.cuda.synchronize()
    result(f"prompt of {length}, {talker.settings.layers_path}: {(time.perf_counter() - began) / steps * 1e3:.3f} ms")
    talker.abort("one")
    while talker.busy:
        talker.step()


def main() -> None:
    for layers in ("paged", "skinny"):
        talker = start(layers=layers, capture_sizes=(1, 64), max_num_seqs=4, slots=8)
        try:
            cache = talker.model.attentions[0].kv_cache
            if layers == "paged":
                result(f"a cache of {tuple(cache.shape)} is read: {talker.model.step.paged.reads(cache)}")
            for length in (40, 500, 1200):
                if layers == "paged":
                    compare(talker, length)
                speed(talker, length)
        finally:
            stop(talker)


if __name__ == "__main__":
    main()
