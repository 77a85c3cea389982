"""Small values on their way to a GPU: pinned buffers that stay, instead of pinning a tensor for every copy."""

from __future__ import annotations

from collections import deque

import torch


class Staged:
    """One set of buffers. tensors: what is copied from; arrays: the same memory, to be filled."""

    def __init__(self, parts: tuple[tuple[int, torch.dtype], ...], pinned: bool) -> None:
        # vLLM changes torch's default device while it loads
        self.tensors = [torch.zeros(count, dtype=dtype, device="cpu", pin_memory=pinned) for count, dtype in parts]
        self.arrays = [tensor.numpy() for tensor in self.tensors]
        self.read = torch.cuda.Event() if pinned else None  # when the device has it


class Staging:
    """Sets of buffers of the given sizes. A set is used again once the device has read it; until then, another is.

    Pinning anew took a tenth of the engine's thread at 64 streams on an H200, for the codec's inputs alone
    (docs/measurements/gpu.md). One thread uses it.

    Args:
        parts: (count, dtype) of each buffer of a set.
        pinned: for copies to a GPU that nobody waits for.
    """

    def __init__(self, *parts: tuple[int, torch.dtype], pinned: bool) -> None:
        self._parts, self._pinned = parts, pinned
        self._sent: deque[Staged] = deque()

    def take(self) -> Staged:
        """A set that may be written; it holds what it held before."""
        if self._sent and ((read := self._sent[0].read) is None or read.query()):
            return self._sent.popleft()
        return Staged(self._parts, self._pinned)

    def sent(self, staged: Staged) -> None:
        """Its copies are queued on the current stream."""
        if staged.read is not None:
            staged.read.record()
        self._sent.append(staged)
