"""What a codec graph is told, on its way to the device: pinned buffers that stay, one copy for slots and codes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.staging import Staging


class HostInputs:
    """Fills a graph's inputs: rows int64 [batch], then codes int64 [batch, G, T], one after the other on the device."""

    def __init__(self, batch: int, groups: int, frames: int, device: torch.device) -> None:
        self.batch, self.shape = batch, (batch, groups, frames)
        count = batch * (1 + groups * frames)
        self.device_values = torch.zeros(count, dtype=torch.int64, device=device)
        self._staging = Staging((count, torch.int64), pinned=device.type == "cuda")

    @property
    def rows(self) -> Tensor:
        """int64 [batch] on the device."""
        return self.device_values[: self.batch]

    @property
    def codes(self) -> Tensor:
        """int64 [batch, G, T] on the device."""
        return self.device_values[self.batch :].view(self.shape)

    def send(self, rows: Sequence[int], codes: Tensor, filler: int) -> None:
        """Queue the copy on the current stream. Rows beyond those given are `filler`, their codes what was there.

        Args:
            rows: n of them, at most `batch`.
            codes: int64 [n, G, T] on the CPU, of any strides.
        """
        staged, n = self._staging.take(), len(rows)
        (values,) = staged.arrays
        values[:n] = rows
        values[n : self.batch] = filler
        values[self.batch :].reshape(self.shape)[:n] = codes.numpy()
        self.device_values.copy_(staged.tensors[0], non_blocking=True)
        self._staging.sent(staged)
