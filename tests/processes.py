"""One engine process for all test modules that leave it as they found it: starts are slow."""

from __future__ import annotations

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
