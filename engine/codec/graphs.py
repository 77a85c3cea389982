"""The codec's decoder over slots, replayed from CUDA graphs captured per (batch, frames).

Each stream owns a slot: a row of one `DecoderState` that stays on the device. A decode call names the slots whose
next T frames are to be decoded; the rows are gathered, stepped and put back inside one graph, so the host launches
once. A batch is padded to the nearest captured size with the trash row; a size that was not captured runs eagerly and
is counted. On the CPU everything runs eagerly through the same path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.codec.decoder import CodecDecoder
from engine.codec.streaming import DecoderState
from engine.errors import ConfigError, EngineBusy

Capture = Callable[[Callable[[], None]], Callable[[], None]]  # a function over fixed buffers → its replay


def capture_cuda(run: Callable[[], None]) -> Callable[[], None]:
    """Capture `run` in a CUDA graph; all graphs share one memory pool, since only one replays at a time."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warm-up: cuDNN picks its algorithms, lazy kernels load
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_pool()):
        run()
    return graph.replay


_POOL: list = []


def _pool():
    if not _POOL:
        _POOL.append(torch.cuda.graph_pool_handle())
    return _POOL[0]


def run_eagerly(run: Callable[[], None]) -> Callable[[], None]:
    """The seam for machines without CUDA: "replay" runs the function over the same fixed buffers."""
    return run


@dataclass(frozen=True)
class _Graph:
    batch: int
    codes: Tensor  # int64 [batch, G, T], fixed input
    rows: Tensor  # int64 [batch], fixed input
    pcm: Tensor  # float32 [batch, T * 1920], fixed output
    replay: Callable[[], None]


class CodecRunner:
    """Decodes chunks of many streams. One thread calls it.

    Args:
        decoder: on `device`, frozen.
        slots: streams that may be open at once.
        capture: (batch, frames) sizes to capture. Largest first shares the memory pool best.
        capture_with: how to capture; defaults to CUDA graphs on a GPU and to eager runs elsewhere.

    Raises:
        ConfigError: a capture size that cannot be.
    """

    def __init__(
        self,
        decoder: CodecDecoder,
        slots: int,
        capture: Iterable[tuple[int, int]] = (),
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        capture_with: Capture | None = None,
    ) -> None:
        self.decoder = decoder
        self.device = torch.device(device)
        self.total_slots = slots
        self._trash = slots  # the row that padded entries read and write
        self._state = decoder.init_state(slots + 1, self.device, dtype)
        self._free = list(range(slots - 1, -1, -1))
        self._graphs: dict[int, list[_Graph]] = {}  # frames → graphs by batch, ascending
        self.stats: dict[str, int] = {"graph_hits": 0, "eager": 0, "padded_rows": 0}
        if capture_with is None:
            capture_with = capture_cuda if self.device.type == "cuda" else run_eagerly
        self.captured = frozenset(capture)
        with torch.inference_mode():
            for batch, frames in sorted(self.captured, reverse=True):
                if batch < 1 or frames < 1:
                    raise ConfigError(
                        f"codec.capture holds ({batch}, {frames}); both start at 1", field="codec.capture"
                    )
                self._graphs.setdefault(frames, []).append(self._capture(batch, frames, capture_with))
            for graphs in self._graphs.values():
                graphs.sort(key=lambda graph: graph.batch)
            self._state.reset(torch.arange(slots + 1, device=self.device))

    # ---- slots -------------------------------------------------------------------------------------------------

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def open(self) -> int:
        """A slot whose stream has not begun. Raises EngineBusy when all are taken."""
        if not self._free:
            raise EngineBusy(f"all {self.total_slots} codec slots are taken")
        slot = self._free.pop()
        self._state.reset(self._index([slot]))
        return slot

    def close(self, slot: int) -> None:
        self._free.append(slot)

    def save(self, slot: int) -> DecoderState:
        """A copy of a slot's state, to begin other streams from it (`restore`)."""
        return self._state.select(self._index([slot]))

    def restore(self, slot: int, state: DecoderState) -> None:
        """Continue `slot` from a saved state."""
        self._state.write(self._index([slot]), state)

    # ---- decoding ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def decode(self, slots: Sequence[int], codes: Tensor, prime: bool = False) -> np.ndarray:
        """The next T frames of each slot.

        Args:
            slots: n different open slots.
            codes: int64 [n, G, T] on the CPU.
            prime: the PCM is not wanted (reference frames); runs eagerly, is not counted, returns an empty array.

        Returns:
            float32 [n, T * 1920].
        """
        if prime:
            self._step(self._index(slots), codes.to(self.device))
            return np.zeros((len(slots), 0), np.float32)
        frames = codes.shape[-1]
        graphs = self._graphs.get(frames)
        if graphs is None:
            self.stats["eager"] += 1
            return self._step(self._index(slots), codes.to(self.device)).cpu().numpy()
        largest = graphs[-1].batch
        pieces = [
            self._replay(graphs, slots[at : at + largest], codes[at : at + largest])
            for at in range(0, len(slots), largest)
        ]
        return np.concatenate(pieces) if len(pieces) > 1 else pieces[0]

    def _replay(self, graphs: list[_Graph], slots: Sequence[int], codes: Tensor) -> np.ndarray:
        n = len(slots)
        graph = next(graph for graph in graphs if graph.batch >= n)
        pad = graph.batch - n
        graph.rows.copy_(self._host([*slots, *[self._trash] * pad]), non_blocking=True)
        graph.codes[:n].copy_(self._pinned(codes), non_blocking=True)
        graph.replay()
        self.stats["graph_hits"] += 1
        self.stats["padded_rows"] += pad
        pcm = graph.pcm[:n]
        return pcm.cpu().numpy() if pcm.is_cuda else pcm.numpy().copy()

    def _step(self, rows: Tensor, codes: Tensor) -> Tensor:
        """rows int64 [n], codes int64 [n, G, T] → float32 [n, T * 1920]; the slots move on by T frames."""
        pcm, state = self.decoder.step(codes, self._state.select(rows))
        self._state.write(rows, state)
        return pcm[:, 0].float()

    def _capture(self, batch: int, frames: int, capture_with: Capture) -> _Graph:
        codes = torch.zeros(batch, self.decoder.groups, frames, dtype=torch.int64, device=self.device)
        rows = torch.full((batch,), self._trash, dtype=torch.int64, device=self.device)
        pcm = torch.zeros(batch, frames * self.decoder.samples_per_frame, device=self.device)

        def run() -> None:
            pcm.copy_(self._step(rows, codes))

        return _Graph(batch, codes, rows, pcm, capture_with(run))

    def _index(self, slots: Sequence[int]) -> Tensor:
        return self._host(slots).to(self.device, non_blocking=True)

    def _host(self, values: Sequence[int]) -> Tensor:
        return self._pinned(torch.tensor(list(values), dtype=torch.int64))

    def _pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self.device.type == "cuda" else tensor
