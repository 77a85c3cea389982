"""What a codec graph is told, on its way to the device: pinned buffers that stay, one copy for slots and codes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor


class _Buffer:
    def __init__(self, count: int, pinned: bool) -> None:
        self.tensor = torch.zeros(count, dtype=torch.int64, pin_memory=pinned)
        self.values = self.tensor.numpy()  # the same memory
        self.read = torch.cuda.Event() if pinned else None  # when the device has it


class HostInputs:
    """Fills a graph's inputs: rows int64 [batch], then codes int64 [batch, G, T], one after the other on the device.

    Pinning a tensor anew for every launch took a tenth of the engine's thread at 64 streams on an H200
    (docs/measurements/gpu.md). A buffer is written again once the device has read it; until then, another is.
    """

    def __init__(self, batch: int, groups: int, frames: int, device: torch.device) -> None:
        self.batch, self.shape = batch, (batch, groups, frames)
        self.device_values = torch.zeros(batch * (1 + groups * frames), dtype=torch.int64, device=device)
        self._pinned = device.type == "cuda"
        self._buffers: deque[_Buffer] = deque()

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
        buffer, n = self._take(), len(rows)
        buffer.values[:n] = rows
        buffer.values[n : self.batch] = filler
        buffer.values[self.batch :].reshape(self.shape)[:n] = codes.numpy()
        self.device_values.copy_(buffer.tensor, non_blocking=True)
        if buffer.read is not None:
            buffer.read.record()
        self._buffers.append(buffer)

    def _take(self) -> _Buffer:
        if self._buffers and ((read := self._buffers[0].read) is None or read.query()):
            return self._buffers.popleft()
        return _Buffer(len(self.device_values), self._pinned)
