"""The seam between code over fixed buffers and CUDA graphs: capture a function, get its replay.

Whoever captures takes a `Capture`. On a GPU that is a `CudaCapture`; on the CPU `run_eagerly`, so that padding,
buffers and bookkeeping are the same code and are tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Capture = Callable[[Callable[[], None]], Callable[[], None]]  # a function over fixed buffers → its replay


class CudaCapture:
    """Captures in CUDA graphs that share one memory pool.

    Graphs of one pool must not replay at the same time: each owner that has a stream of its own makes its own. Captured
    on the current stream, whose priority the kernels keep, or, where that is the default one, on another.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        caller = torch.cuda.current_stream()
        stream = torch.cuda.Stream() if caller == torch.cuda.default_stream() else caller  # that one cannot be captured
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            for _ in range(2):  # warm-up: cuDNN picks its algorithms, lazy kernels load
                run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                run()
        caller.wait_stream(stream)
        return graph.replay


@contextmanager
def captures_on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Graphs that name no stream to be captured on, as vLLM's, are captured on this one: a graph's kernels keep the
    priority of the stream that they were captured on, whatever stream the graph is launched on."""
    kept = torch.cuda.graph.default_capture_stream
    torch.cuda.graph.default_capture_stream = stream or kept
    try:
        yield
    finally:
        torch.cuda.graph.default_capture_stream = kept


def run_eagerly(run: Callable[[], None]) -> Callable[[], None]:
    """For machines without CUDA: "replay" runs the function over the same fixed buffers."""
    return run


def capture_on(device: torch.device) -> Capture:
    """What captures on `device`."""
    return CudaCapture() if device.type == "cuda" else run_eagerly
