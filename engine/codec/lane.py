"""A stream of the device with graphs of its own. Lanes run side by side; what one lane is given runs in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.codec.host_inputs import HostInputs
from engine.cuda_graphs import Capture, capture_on


@dataclass(frozen=True)
class Graph:
    batch: int
    inputs: HostInputs  # rows and codes, fixed
    pcm: Tensor  # float32 [batch, T * 1920], fixed output
    replay: Callable[[], None]


class Lane:
    """On the CPU there is no stream and everything runs at once.

    Attributes:
        graphs: by frames, ascending by batch.
    """

    def __init__(self, device: torch.device, priority: int = 0, capture_with: Capture | None = None) -> None:
        """priority: below 0, the device starts this lane's kernels before those of a stream nearer to 0."""
        self.stream = torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None
        self.graphs: dict[int, list[Graph]] = {}
        # Memory of its own: graphs that share it take turns.
        self.capture_with = capture_with or capture_on(device)

    def on(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def add(self, frames: int, graph: Graph) -> None:
        graphs = self.graphs.setdefault(frames, [])
        graphs.append(graph)
        graphs.sort(key=lambda graph: graph.batch)

    def mark(self) -> torch.cuda.Event | None:
        """An event behind everything that the lane was given until now."""
        if self.stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self.stream)
        return event


class SlotOrder:
    """Keeps what lanes do to one and the same slot in the order in which they were told to."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[Lane, torch.cuda.Event]] = {}

    def enter(self, lane: Lane, slots: Iterable[int]) -> None:
        """Before the lane is given work on the slots: it waits for other lanes' work on them."""
        if lane.stream is None:
            return
        others = {last[1] for slot in slots if (last := self._last.get(slot)) and last[0] is not lane}
        for event in others:
            if not event.query():
                lane.stream.wait_event(event)

    def leave(self, lane: Lane, slots: Iterable[int]) -> None:
        """After the lane was given work on the slots."""
        if (event := lane.mark()) is not None:
            self._last.update(dict.fromkeys(slots, (lane, event)))
