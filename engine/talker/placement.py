"""Where a frame's codes are made: inside the talker's step, or after it, in CUDA graphs of its own or eagerly.

Inside is how Chorus runs. The others exist to be measured against: servers whose talker graph ends at the hidden state
run the code predictor after it (vllm-omni #3221 eagerly, #3839 in graphs). Then `forward` returns hidden states, and
what follows them runs in `compute_logits`, which vLLM calls once per step on the rows to be sampled, outside its graph.
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
    slot: torch.Tensor  # [B] int64
    frame: torch.Tensor  # [B] int64
    valid: torch.Tensor  # [B] bool
    tokens: torch.Tensor  # [B] int64, output


class SpeakAfter:
    """From hidden states to tokens, after the talker's step.

    Attributes:
        rows: [max_rows] int64, which rows of the step are sampled; set by whoever knows (model-state hook on CUDA,
            `TalkerModel.forward` on the CPU) before `speak`.
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
            buffers = _Rows(
                hidden=head.new_zeros(size, head.shape[1]),
                slot=head.new_zeros(size, dtype=torch.int64),
                frame=head.new_zeros(size, dtype=torch.int64),
                valid=head.new_zeros(size, dtype=torch.bool),
                tokens=head.new_zeros(size, dtype=torch.int64),
            )

            def run(b: _Rows = buffers) -> None:
                b.tokens.copy_(self._model.step.speak(b.hidden, b.slot, b.frame, b.valid))

            self._graphs.insert(0, (size, buffers, capture_with(run)))

    def speak(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] hidden states of the sampled rows, in the order of `rows`, to [R] int64 tokens for vLLM.

        More rows than requests fit are no sampled rows: vLLM's warm-up on CUDA asks for the log-probabilities of whole
        prompts, which no request of ours does. They are told token 0 and leave no trace.
        """
        count = hidden.shape[0]
        if count > len(self.rows):
            return torch.zeros(count, dtype=torch.int64, device=hidden.device)
        rows = self.rows[:count]
        slot, frame = self._slot[rows], self._frame[rows]
        valid = self._model.real(slot, frame, self._valid[rows])
        for size, buffers, replay in self._graphs:
            if size < count:
                continue
            buffers.hidden[:count].copy_(hidden)
            buffers.slot[:count].copy_(slot)
            buffers.frame[:count].copy_(frame)
            buffers.valid.zero_()  # rows of an earlier, larger step
            buffers.valid[:count].copy_(valid)
            replay()
            self.stats["graph_hits"] += 1
            self.stats["padded_rows"] += size - count
            return buffers.tokens[:count]
        self.stats["eager"] += 1
        return self._model.step.speak(hidden, slot, frame, valid)
