"""Engine processes in tests: one for all modules that leave it as they found it, since starts are slow."""

from __future__ import annotations

import time

import psutil

from engine.process import EngineProcess
from tests.conftest import small_engine_config

SLOTS = 16
_shared: list[EngineProcess] = []


def shared_process() -> EngineProcess:
    """A ready engine process with sixteen slots; closed when the interpreter ends."""
    config = small_engine_config(**{"talker.max_num_seqs": SLOTS})
    if not _shared:
        _shared.append(EngineProcess(config))
    elif _shared[0].config.hash != config.hash:
        _shared[0].restart(config)
    return _shared[0]


def gone(pid: int, seconds: float) -> bool:
    """True once the process has ended. A zombie has: in a container nobody may be there to collect it."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False
