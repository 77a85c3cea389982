"""The codec's decoder over slots, replayed from CUDA graphs captured per (batch, frames).

Each stream owns a slot: a row of one `SlotState` that stays on the device. A decode call names the slots whose
next T frames are to be decoded; the rows are gathered, stepped and put back inside one graph, so the host launches
once. A batch is padded to the nearest captured size with the trash row; a size that was not captured runs eagerly and
is counted. On the CPU everything runs eagerly through the same path.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.codec.host_inputs import HostInputs
from engine.codec.lane import Graph, Lane, SlotOrder
from engine.codec.streaming import SlotState
from engine.cuda_graphs import Capture
from engine.errors import ConfigError, EngineBusy

AHEAD_PRIORITY = -2  # the talker may have -1; first sounds, for which this is there, go before everything
PRIME_FRAMES = 25  # an eager prime decodes in pieces of this many frames: bounded memory at any length


class StreamDecoder(Protocol):
    """What the runner asks of a decoder: `CodecDecoder`, or `WindowedDecoder` for comparison."""

    groups: int
    samples_per_frame: int

    def init_state(self, batch: int, device: Any = None) -> Any: ...

    def step(self, codes: Tensor, state: Any) -> tuple[Tensor, Any]: ...


class Decoded:
    """PCM that may still be on its way from the device."""

    def __init__(self, pieces: list[Tensor], event: torch.cuda.Event | None, graph: bool) -> None:
        self._pieces = pieces
        self._event = event
        self.graph = graph  # replayed from a captured graph, not run eagerly

    @property
    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> np.ndarray:
        """float32 [n, T * 1920]; waits for the device if need be."""
        if self._event is not None:
            self._event.synchronize()
        arrays = [piece.numpy() for piece in self._pieces]
        return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]


class CodecRunner:
    """Decodes chunks of many streams. One thread calls it.

    Args:
        decoder: on `device`, frozen.
        slots: streams that may be open at once.
        capture: (batch, frames) sizes to capture. Largest first shares the memory pool best.
        ahead: sizes to capture once more, on a stream of the highest priority: what is launched there (`ahead=True`)
            waits for nothing that was launched before, unless it is of the same slot.
        dtype: of the decoder's convolutions: in float16 cuDNN measures its kernels while graphs are captured.
        capture_with: how to capture; defaults to CUDA graphs on a GPU and to eager runs elsewhere.

    Raises:
        ConfigError: a capture size that cannot be.
    """

    def __init__(
        self,
        decoder: StreamDecoder,
        slots: int,
        capture: Iterable[tuple[int, int]] = (),
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        capture_with: Capture | None = None,
        ahead: Iterable[tuple[int, int]] = (),
    ) -> None:
        self.decoder = decoder
        self.device = torch.device(device)
        self.total_slots = slots
        self._trash = slots  # the row that padded entries read and write
        # A stream of its own: the codec's work overlaps the talker's instead of queueing behind the next step.
        self._main = self._ahead = Lane(self.device, capture_with=capture_with)
        self._order = SlotOrder()
        self._saved: torch.cuda.Event | None = None  # behind the last `save`, which the other lane has to wait for
        self._state = decoder.init_state(slots + 1, self.device)
        self._views: dict[int, list[list[Tensor]]] = {}
        self._free = list(range(slots - 1, -1, -1))
        self.stats: dict[str, int] = {"graph_hits": 0, "eager": 0, "padded_rows": 0}
        # In float16 cuDNN's first choice for two convolutions takes 70 ms each; measured choices take 3 for all.
        search = self.device.type == "cuda" and dtype == torch.float16
        self.captured, self.ahead = frozenset(capture), frozenset(ahead)
        with torch.inference_mode(), _measured_kernels() if search else nullcontext(), _tf32_products():
            self._capture_all(self._main, self.captured)
            if self.ahead:
                self._ahead = Lane(self.device, AHEAD_PRIORITY, capture_with)
                self._capture_all(self._ahead, self.ahead)
            with self._main.on():
                self._state.reset(torch.arange(slots + 1, device=self.device))
        if self._main.stream is not None:
            self._main.stream.synchronize()  # the other lane may be the next to work on it

    # ---- slots -------------------------------------------------------------------------------------------------

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def open(self) -> int:
        """A slot whose stream has not begun. Raises EngineBusy when all are taken."""
        if not self._free:
            raise EngineBusy(f"all {self.total_slots} codec slots are taken")
        slot = self._free.pop()
        with torch.inference_mode(), self._working(self._ahead, [slot]):
            for views in self._rows_of(slot):
                torch._foreach_zero_(views)
        return slot

    def close(self, slot: int) -> None:
        self._free.append(slot)

    def save(self, slot: int) -> SlotState:
        """A copy of a slot's state, to begin other streams from it (`restore`)."""
        with torch.inference_mode(), self._working(self._main, [slot]):
            state = self._state.select(self._index([slot]))
        if self._ahead is not self._main and self._ahead.stream is not None:
            self._saved = self._main.mark()
            for tensor in state.tensors():  # the other lane may still read the copy when it is forgotten
                tensor.record_stream(self._ahead.stream)
        return state

    def restore(self, slot: int, state: SlotState) -> None:
        """Continue `slot` from a saved state."""
        with torch.inference_mode(), self._working(self._ahead, [slot]):
            if self._saved is not None and self._ahead.stream is not None:
                self._ahead.stream.wait_event(self._saved)
            for mine, theirs in zip(self._rows_of(slot), _by_dtype(state.tensors()), strict=True):
                torch._foreach_copy_(mine, theirs)

    def _rows_of(self, slot: int) -> list[list[Tensor]]:
        """The slot's row of every state tensor: one launch serves them all, where each by itself is dozens."""
        if slot not in self._views:
            self._views[slot] = _by_dtype([tensor[slot : slot + 1] for tensor in self._state.tensors()])
        return self._views[slot]

    # ---- decoding ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, slots: Sequence[int], codes: Tensor, ahead: bool = False) -> Decoded:
        """Begin decoding the next T frames of each slot; on a GPU this returns before the work is done.

        What is done to one slot happens in the order of the calls, so a slot may be launched again, closed or reused at
        once.

        Args:
            slots: n different open slots.
            codes: int64 [n, G, T] on the CPU.
            ahead: in their own lane, ahead of all others, which run in the order of the calls; T is one of its sizes.
        """
        lane = self._ahead if ahead else self._main
        with self._working(lane, slots):
            graphs = lane.graphs.get(codes.shape[-1])
            if graphs is None:
                self.stats["eager"] += 1
                pieces = [self._to_host(self._step(self._index(slots), self._pinned(codes).to(self.device)))]
            else:
                largest = graphs[-1].batch
                pieces = [
                    self._replay(graphs, slots[at : at + largest], codes[at : at + largest])
                    for at in range(0, len(slots), largest)
                ]
        return Decoded(pieces, lane.mark(), graphs is not None)

    def decode(self, slots: Sequence[int], codes: Tensor) -> np.ndarray:
        """`launch` and wait: float32 [n, T * 1920]."""
        return self.launch(slots, codes).wait()

    @torch.inference_mode()
    def prime(self, slot: int, codes: Tensor) -> None:
        """Run reference codes, int64 [1, G, T], through a slot; their PCM is not wanted. Not counted.

        In pieces: of captured sizes where there are graphs (hundreds of kernels launched one by one would hold up the
        host, and with it every running stream), else of PRIME_FRAMES.
        """
        lane, at = self._main, 0
        sizes = sorted(lane.graphs, reverse=True)
        with self._working(lane, [slot]):
            while left := codes.shape[-1] - at:
                size = next((size for size in sizes if size <= left), min(left, PRIME_FRAMES))
                piece = codes[..., at : at + size].contiguous()
                if size in lane.graphs:
                    self._run_graph(lane.graphs[size], [slot], piece)
                else:
                    self._step(self._index([slot]), self._pinned(piece).to(self.device))
                at += size

    def _replay(self, graphs: list[Graph], slots: Sequence[int], codes: Tensor) -> Tensor:
        graph = self._run_graph(graphs, slots, codes)
        self.stats["graph_hits"] += 1
        self.stats["padded_rows"] += graph.batch - len(slots)
        return self._to_host(graph.pcm[: len(slots)])

    def _run_graph(self, graphs: list[Graph], slots: Sequence[int], codes: Tensor) -> Graph:
        """Fill and replay the smallest graph that holds the slots; its `pcm` holds until the next replay."""
        graph = next(graph for graph in graphs if graph.batch >= len(slots))
        graph.inputs.send(slots, codes, self._trash)
        graph.replay()
        return graph

    def _to_host(self, pcm: Tensor) -> Tensor:
        """A copy on the host: the graph's output buffer is overwritten by its next replay."""
        if not pcm.is_cuda:
            return pcm.clone()
        host = torch.empty(pcm.shape, dtype=pcm.dtype, pin_memory=True)
        return host.copy_(pcm, non_blocking=True)

    @contextmanager
    def _working(self, lane: Lane, slots: Sequence[int]) -> Iterator[None]:
        """What is queued inside works on the slots, on the lane's stream."""
        with lane.on():
            self._order.enter(lane, slots)
            yield
            self._order.leave(lane, slots)

    def _step(self, rows: Tensor, codes: Tensor) -> Tensor:
        """rows int64 [n], codes int64 [n, G, T] → float32 [n, T * 1920]; the slots move on by T frames."""
        pcm, state = self.decoder.step(codes, self._state.select(rows))
        self._state.write(rows, state)
        return pcm[:, 0].float()

    def _capture_all(self, lane: Lane, sizes: Iterable[tuple[int, int]]) -> None:
        with lane.on():
            for batch, frames in sorted(sizes, reverse=True):
                if batch < 1 or frames < 1:
                    raise ConfigError(
                        f"codec.capture holds ({batch}, {frames}); both start at 1", field="codec.capture"
                    )
                lane.add(frames, self._capture(batch, frames, lane.capture_with))

    def _capture(self, batch: int, frames: int, capture_with: Capture) -> Graph:
        inputs = HostInputs(batch, self.decoder.groups, frames, self.device)
        inputs.rows.fill_(self._trash)
        pcm = torch.zeros(batch, frames * self.decoder.samples_per_frame, device=self.device)

        def run() -> None:
            pcm.copy_(self._step(inputs.rows, inputs.codes))

        return Graph(batch, inputs, pcm, capture_with(run))

    def _index(self, slots: Sequence[int]) -> Tensor:
        return self._host(slots).to(self.device, non_blocking=True)

    def _host(self, values: Sequence[int]) -> Tensor:
        return self._pinned(torch.tensor(list(values), dtype=torch.int64))

    def _pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self.device.type == "cuda" else tensor


@contextmanager
def _measured_kernels() -> Iterator[None]:
    """cuDNN measures the kernels of each new shape and keeps to the fastest: a second for each size captured. The three
    that it thinks best are enough; ten, the default, take twice as long and find nothing better (H200)."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    cudnn.benchmark, cudnn.benchmark_limit = True, 3
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before


@contextmanager
def _tf32_products() -> Iterator[None]:
    """Matrix products as the convolutions are: in TF32, 59 dB from float32 together. A graph keeps what it was captured
    with, so the flag, which is the whole process's, is set for no longer."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Grouped, as an operation on many tensors is one launch only where they agree."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())
