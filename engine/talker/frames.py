"""From the model to the host: which frames are ready.

Each step leaves a report: one row per sampled request, [R, 2 + G] int64: ticket, frame number, codes. Rows that hold
no frame (an unfinished prompt, padding, the end) carry ticket 0. Tickets name one admission, so a row that belongs to
an earlier owner of a slot matches nobody.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch


class HostReports:
    """Reports that are host memory already: the model on the CPU hands over a copy."""

    def __init__(self) -> None:
        self._ready: deque[np.ndarray] = deque()

    def push(self, rows: np.ndarray) -> None:
        """rows: int64 [n, 2 + G], not reused by the caller."""
        if len(rows):
            self._ready.append(rows)

    def collect(self) -> list[np.ndarray]:
        rows = list(self._ready)
        self._ready.clear()
        return rows

    def wait(self) -> list[np.ndarray]:
        """As collect: nothing is ever on its way."""
        return self.collect()


class PinnedReports:
    """A ring of pinned buffers, one per step, each with an event.

    Under async scheduling a blocking copy on the model's stream would wait for the step launched next; this copy is
    queued right behind the step and read once its event has passed. The ring grows when the host falls behind, so a
    report is never overwritten unread.
    """

    def __init__(self, source: torch.Tensor, buffers: int = 8) -> None:
        """source: the device tensor that the model fills in each step, int64 [max_num_seqs, 2 + G]."""
        self._source = source
        self._free: list[tuple[torch.Tensor, torch.cuda.Event]] = [self._buffer() for _ in range(buffers)]
        self._pending: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        self.enabled = False  # start-up runs of vLLM are not reported

    def _buffer(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        return torch.empty(self._source.shape, dtype=self._source.dtype, pin_memory=True), torch.cuda.Event()

    def record(self) -> None:
        """Queue the copy of this step's report on the current stream."""
        if not self.enabled:
            return
        buffer, event = self._free.pop() if self._free else self._buffer()
        buffer.copy_(self._source, non_blocking=True)
        event.record()
        self._pending.append((buffer, event))

    def collect(self) -> list[np.ndarray]:
        """Reports whose copy has finished, oldest first."""
        ready = []
        while self._pending and self._pending[0][1].query():
            buffer, event = self._pending.popleft()
            rows = buffer.numpy()
            ready.append(rows[rows[:, 0] > 0])  # a copy: the buffer is used again
            self._free.append((buffer, event))
        return ready

    def wait(self) -> list[np.ndarray]:
        """As collect, but the oldest report on its way is waited for. Empty when none is."""
        if self._pending:
            self._pending[0][1].synchronize()
        return self.collect()
