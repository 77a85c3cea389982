"""How many threads torch may use, for a stretch of code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def torch_threads(count: int | None = None) -> Iterator[None]:
    """Run with `count` threads (None: as it is), and put the old number back afterwards.

    One thread suits models of many small steps: GE2E's LSTM took 0.2 s with one and 14 s with two on two busy cores.
    None guards against libraries that change the number: numba, which times Whisper's words, does.
    """
    before = torch.get_num_threads()
    if count is not None and count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
