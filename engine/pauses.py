"""Pauses of the interpreter that a stream would hear: a step takes a few ms, a chunk is due every few dozen."""

from __future__ import annotations

import gc
import sys


def keep_short() -> None:
    """To be called once everything is imported and loaded, in every process that sound passes through.

    A full garbage collection goes over all that was imported, which takes about a hundred ms; what is there now is
    left out of it from here on. And a thread may keep the interpreter from the others for 5 ms: here for 0.5.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(0.0005)
