"""Codec state in host memory, kept to be measured against: every chunk carries it to the device and back.

Servers that were built around host-side request state do so (vllm-omni #1852 is about such tensors of the talker:
keeping three of them on the GPU gave 65 % more audio at four streams). What is computed is the same; a GPU waits for
two copies a chunk, and none of it can be part of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.codec.streaming import SlotState


@dataclass(frozen=True)
class HostState(SlotState):
    """Rows of `kept` in host memory. `select` hands out copies on `device`, `write` takes them back.

    Row numbers may come on any device.
    """

    kept: Any
    device: torch.device

    def tensors(self) -> tuple[Tensor, ...]:
        return self.kept.tensors()

    def _map(self, each: Callable[[Tensor], Tensor]) -> HostState:
        return HostState(self.kept._map(each), self.device)

    def select(self, rows: Tensor) -> Any:
        return self.kept.select(rows.cpu())._map(lambda t: t.to(self.device))

    def write(self, rows: Tensor, other: SlotState) -> None:
        self.kept.write(rows.cpu(), other._map(lambda t: t.cpu()))

    def reset(self, rows: Tensor) -> None:
        self.kept.reset(rows.cpu())


class HostStateDecoder:
    """A decoder, stateful or windowed, whose slots lie in host memory. `step` is the decoder's own."""

    def __init__(self, decoder: Any) -> None:
        self.step = decoder.step
        self._decoder = decoder
        self.groups, self.samples_per_frame = decoder.groups, decoder.samples_per_frame

    def init_state(self, batch: int, device: torch.device | str | None = None) -> HostState:
        """State of streams that have not begun; chunks are decoded on `device`."""
        return HostState(self._decoder.init_state(batch, "cpu"), torch.device(device or "cpu"))
