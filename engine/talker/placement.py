"""Where a frame's codes are made: inside the talker's step, or after it, in CUDA graphs of its own or eagerly.

In graphs of its own is how Chorus runs on CUDA, inside the step elsewhere; eagerly exists to be measured against
(vllm-omni #3221; #3839 has graphs). After the step means: `forward` returns hidden states, and what follows them runs
in `compute_logits`, which vLLM calls once per step on the rows to be sampled, outside its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.cuda_graphs import Capture

if TYPE_CHECKING:
    from engine.talker.model import TalkerModel


@dataclass(frozen=True)
class _Rows:
    """The fixed buffers of a captured `speak` over B rows."""

    hidden: torch.Tensor  # [B, H]
    tokens: torch.Tensor  # [B] int64, output


class SpeakAfter:
    """From hidden states to tokens, after the talker's step.

    Attributes:
        rows: [max_rows] int64, which rows of the step are sampled; set by whoever knows (model-state hook on CUDA,
            `TalkerModel.forward` on the CPU) before `speak`, valid row numbers beyond those, too.
        direct: `compute_logits` returns the tokens themselves, for a sampler that takes them (hooks.TokenSampler).
        prompt: the step holds rows of a prompt; set like `rows`. The codec has that step's first frame during the next
            one, which then takes kernels that leave it room (`TorchStep.crowds`).
        stats: steps replayed from a graph, steps run eagerly, rows added to fill graphs.
    """

    def __init__(self, model: TalkerModel, tokens: int) -> None:
        """tokens: rows of the largest step."""
        self._model = model
        device = model.head.device
        # Written inside the talker's graph, read after it: they stay where they are.
        self._slot = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._frame = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._valid = torch.zeros(tokens, dtype=torch.bool, device=device)
        self.rows = torch.zeros(model.max_rows, dtype=torch.int64, device=device)
        self._count = torch.zeros(1, dtype=torch.int64, device=device)  # how many of rows count
        self._order = torch.arange(model.max_rows, device=device)
        self.direct = False
        self.prompt = self._prompt_before = False
        self._roomy: dict[int, Callable[[], None]] = {}  # by B, where kernels that leave room are others
        self._graphs: list[tuple[int, _Rows, Callable[[], None]]] = []  # (B, buffers, replay), ascending
        self.stats = {"graph_hits": 0, "eager": 0, "padded_rows": 0}

    def keep(self, slot: torch.Tensor, frame: torch.Tensor, valid: torch.Tensor | None) -> None:
        """Note, inside the step, whose rows these are.

        Args:
            slot, frame: [N] int64; valid: [N] bool, or None in profiling runs, where no row is real.
        """
        count = slot.shape[0]
        self._slot[:count].copy_(slot)
        self._frame[:count].copy_(frame)
        if valid is None:
            self._valid[:count].zero_()
        else:
            self._valid[:count].copy_(valid)

    @torch.inference_mode()
    def capture(self, sizes: Iterable[int], capture_with: Capture) -> None:
        """Capture a graph for each number of rows in `sizes`; once the weights are in place."""
        head = self._model.head
        for size in sorted(sizes, reverse=True):  # the largest first: the others fit into its memory
            buffers = _Rows(hidden=head.new_zeros(size, head.shape[1]), tokens=head.new_zeros(size, dtype=torch.int64))

            def run(b: _Rows = buffers) -> None:
                b.tokens.copy_(self._speak(b.hidden))

            self._graphs.insert(0, (size, buffers, capture_with(run)))
            if self._model.step.crowds(size):
                self._model.step.leaves_room = True
                self._roomy[size] = capture_with(run)
                self._model.step.leaves_room = False

    def speak(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] hidden states of the sampled rows, in the order of `rows`, to [R] int64 tokens for vLLM.

        More rows than requests fit are no sampled rows: vLLM's warm-up on CUDA asks for the log-probabilities of whole
        prompts, which no request of ours does. They are told token 0 and leave no trace.
        """
        count = hidden.shape[0]
        if count > len(self.rows):
            return torch.zeros(count, dtype=torch.int64, device=hidden.device)
        self._count.fill_(count)
        beside_first, self._prompt_before = self._prompt_before, self.prompt
        for size, buffers, replay in self._graphs:
            if size < count:
                continue
            buffers.hidden[:count].copy_(hidden)
            (self._roomy.get(size, replay) if beside_first else replay)()
            self.stats["graph_hits"] += 1
            self.stats["padded_rows"] += size - count
            return buffers.tokens[:count]
        self.stats["eager"] += 1
        return self._speak(hidden)

    def _speak(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of [B, H] rows, the first `_count` of which are real, those that make a frame; [B] tokens."""
        count = hidden.shape[0]
        rows = self.rows[:count]
        slot, frame = self._slot[rows], self._frame[rows]
        valid = self._valid[rows] & (self._order[:count] < self._count)
        return self._model.step.speak(hidden, slot, frame, self._model.real(slot, frame, valid))
