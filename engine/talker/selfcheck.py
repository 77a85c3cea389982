"""At start, on CUDA: do the captured graphs compute what eager steps compute?

vLLM 0.26 captures some prefill graphs wrongly (hooks.py mends that); a wrong graph gives hidden states with relative
errors above 1, right ones stay within the noise of bfloat16 (0.02 to 0.04 measured on an H100 and an H200). Codes
cannot tell the two apart: bfloat16 logits tie, so hidden states are compared.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine.errors import ConfigError
from engine.talker import compat
from engine.talker.slots import PromptRows, SlotOptions

if TYPE_CHECKING:
    from engine.talker.talker import Talker

log = logging.getLogger(__name__)
LIMIT = 0.15  # relative error of a row; noise is below 0.05, a wrong graph above 1
GREEDY = {"do_sample": False, "subtalker_do_sample": False}


@dataclass(frozen=True)
class Comparison:
    """Graph against eager for a step of one or more prompts.

    Attributes:
        rows: tokens of the step; graph: tokens of the graph that ran it, 0 when none did.
        error: largest relative error of a row's hidden state.
    """

    rows: int
    graph: int
    error: float


@contextmanager
def _eager(talker: Talker) -> Iterator[None]:
    """Steps inside run without graphs."""
    manager = compat.runner(talker._client).cudagraph_manager
    kept, manager._candidates = manager._candidates, {}
    try:
        yield
    finally:
        manager._candidates = kept


@contextmanager
def _watch(talker: Talker, sizes: list[int]) -> Iterator[None]:
    """Notes the size of every graph that is replayed."""
    manager = compat.runner(talker._client).cudagraph_manager
    original = manager.run_fullgraph

    def run(description: Any) -> Any:
        sizes.append(description.num_tokens)
        return original(description)

    manager.run_fullgraph = run
    try:
        yield
    finally:
        del manager.run_fullgraph


def _longest(talker: Talker) -> int:
    return min(talker.settings.max_prompt, talker.settings.max_model_len - 2)


def _prompts(talker: Talker, rows: int) -> list[PromptRows]:
    """Random prompts of `rows` rows together, as few as fit."""
    longest = _longest(talker)
    count = -(-rows // longest)
    width = talker.geometry.talker.hidden
    generator = torch.Generator().manual_seed(rows)
    lengths = [rows // count + (i < rows % count) for i in range(count)]
    rows_of = [torch.randn(n, width, generator=generator) * 0.5 for n in lengths]
    return [PromptRows(x, x[:0], torch.zeros(width)) for x in rows_of]


def _hidden(talker: Talker, rows: int) -> torch.Tensor:
    """Hidden states [rows, H] of one step that prefills `rows` rows, in the order of their slots."""
    names = []
    for index, prompt in enumerate(_prompts(talker, rows)):
        names.append(f"self-check {index}")
        talker.add(names[-1], prompt, SlotOptions(seed=0, max_frames=1, **GREEDY))
    slots = [talker._running[name].slot for name in names]
    talker.step()
    torch.cuda.synchronize()
    ids = compat.runner(talker._client).input_buffers.input_ids[:rows]
    probe = talker.model.probe
    assert probe is not None
    hidden = torch.cat([probe[:rows][ids == slot] for slot in slots]).float()
    while talker.busy:
        talker.step()
    return hidden


@torch.inference_mode()
def compare(talker: Talker, rows: int) -> Comparison:
    """One prefill step of `rows` rows, in its graph and eagerly."""
    sizes: list[int] = []
    with _watch(talker, sizes):
        graph = _hidden(talker, rows)
    with _eager(talker):
        eager = _hidden(talker, rows)
    error = ((graph - eager).norm(dim=-1) / eager.norm(dim=-1).clamp_min(1e-6)).nan_to_num(nan=9.9, posinf=9.9)
    return Comparison(rows, sizes[0] if sizes else 0, float(error.max()))


def sizes_to_check(talker: Talker) -> list[int]:
    """For every graph of a step with a prefill, its full size and the smallest step that it serves."""
    settings = talker.settings
    graphs = settings.graph_sizes
    pairs = [(low + 1, high) for low, high in zip([1, *graphs], graphs, strict=False)]
    most = settings.max_num_batched_tokens
    if settings.one_prompt_a_step:  # then larger graphs serve no step
        most = min(most, _longest(talker))
    return sorted({rows for pair in pairs for rows in pair if 1 < rows <= most})


def run(talker: Talker) -> list[Comparison]:
    """Compare all graphs.

    Raises:
        ConfigError: a graph's hidden states are wrong; names the sizes.
    """
    results = [compare(talker, rows) for rows in sizes_to_check(talker)]
    wrong = [result for result in results if result.error > LIMIT]
    worst = max(results, key=lambda result: result.error, default=None)
    log.info("graph self-check: %d steps, worst relative error %s", len(results), worst)
    if wrong:
        found = ", ".join(f"{r.rows} rows in graph {r.graph}: {r.error:.2f}" for r in wrong[:4])
        raise ConfigError(
            f"{len(wrong)} of {len(results)} captured graphs differ from eager steps ({found}); leave these sizes out "
            "of talker.capture_sizes, set talker.cudagraph to decode, or dtype to float32",
            field="talker.capture_sizes",
        )
    return results
