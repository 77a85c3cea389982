"""txt(id): a text id's embedding behind the text projection. It depends on the id alone, so each is projected once."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

AT_ONCE = 16  # ids in one product on the CPU: always as many, so that a row does not depend on who else was asked for


class TextRows:
    """Rows of text ids. Safe to call from many threads.

    Args:
        table: [text vocab, text hidden], any float dtype.
        projection: weight and bias of its two layers, float32.
    """

    def __init__(self, table: Tensor, projection: Sequence[Tensor]) -> None:
        self._table, self._projection = table, projection
        # Pages of ids that are never asked for are never touched.
        self._rows = torch.empty(table.shape[0], projection[2].shape[0])
        self._array = self._rows.numpy()
        self._known = np.zeros(table.shape[0], dtype=bool)
        self._lock = threading.Lock()

    def __call__(self, ids: Sequence[int]) -> Tensor:
        """float32 [n, H] of n ids, the caller's own.

        Gathered by numpy: torch would wake its threads, and dozens of callers with a team each starve the engine.
        """
        wanted = np.asarray(ids, dtype=np.int64)
        if not self._known[wanted].all():
            with self._lock:  # one at a time: callers that all multiply matrices slow each other down
                for piece in torch.from_numpy(np.unique(wanted[~self._known[wanted]])).split(AT_ONCE):
                    padded = F.pad(piece, (0, AT_ONCE - len(piece)))
                    self._rows[piece] = _project(self._table[padded], self._projection)[: len(piece)]
                    self._known[piece.numpy()] = True
        return torch.from_numpy(self._array.take(wanted, axis=0))

    @torch.inference_mode()
    def fill(self, device: torch.device, at_once: int = 8192) -> None:
        """Project every id now, on `device`: a GPU does in a moment what would cost each new word milliseconds."""
        there = [w.to(device) for w in self._projection]
        for start in range(0, len(self._table), at_once):
            self._rows[start : start + at_once] = _project(self._table[start : start + at_once].to(device), there).cpu()
        self._known[:] = True


def _project(rows: Tensor, projection: Sequence[Tensor]) -> Tensor:
    w1, b1, w2, b2 = projection
    return F.linear(F.silu(F.linear(rows.float(), w1, b1)), w2, b2)
