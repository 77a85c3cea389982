"""Independent parts of a step on streams of their own, so that a GPU runs their small kernels at the same time.

The eight discriminators and the losses of a step hardly use a large GPU each, and do not depend on each other. In a
recorded step the streams become branches of its graph; autograd runs each part's backward pass where its forward ran.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class SideBySide:
    """enabled: False runs the parts one after the other, as on the CPU."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.streams: list[torch.cuda.Stream] = []

    def __call__(self, parts: list[Callable[[], Any]], *inputs: Tensor) -> list[Any]:
        """The results of `parts`, which read `inputs` of the calling stream and share nothing else that changes."""
        if not self.enabled:
            return [part() for part in parts]
        while len(self.streams) < len(parts):
            self.streams.append(torch.cuda.Stream())
        caller, results = torch.cuda.current_stream(), []
        for part, stream in zip(parts, self.streams, strict=False):
            stream.wait_stream(caller)
            for tensor in inputs:
                tensor.record_stream(stream)  # else its memory might be given away while this stream still reads it
            with torch.cuda.stream(stream):
                results.append(part())
        for stream, result in zip(self.streams, results, strict=False):
            caller.wait_stream(stream)
            _record(result, caller)
        return results


def _record(result: Any, stream: torch.cuda.Stream) -> None:
    if isinstance(result, Tensor):
        result.record_stream(stream)
    elif isinstance(result, dict):
        _record(list(result.values()), stream)
    elif isinstance(result, list | tuple):
        for each in result:
            _record(each, stream)
