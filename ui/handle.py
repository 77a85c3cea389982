"""The one engine behind the page, as its tabs see it: one status to follow, typed errors while there is none."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import ROOT, EngineConfig
from engine.errors import ChorusError, EngineClosed

log = logging.getLogger("chorus.page")
KEEP_ERRORS = 20


@dataclass(frozen=True)
class Status:
    """What the page shows of the engine. `version` changes with everything a page may have to redraw."""

    state: str  # "starting" | "ready" | "restarting" | "failed" | "closed"
    detail: str
    since: float  # time.monotonic(), seconds
    version: int


class EngineHandle:
    """Around an `EngineProcess`, which loads in the background and comes back by itself after a crash.

    Tabs keep the handle, never the engine: `handle.engine` is the ready one, or raises an error that says why there
    is none.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._lock = threading.RLock()
        self._seen: tuple[Any, ...] = ()
        self._status = Status("starting", "", time.monotonic(), 0)
        self._errors: list[tuple[float, str]] = []
        self._restarting: EngineConfig | None = None
        self._fault: str | None = None  # of the last restart

    # ---- asking -------------------------------------------------------------------------------------------------

    @property
    def config(self) -> EngineConfig:
        """Settings in force, or those being started."""
        return self._restarting or self._engine.config

    @property
    def status(self) -> Status:
        state = "restarting" if self._restarting is not None else self._engine.state
        detail = str(self._engine.failure or "") if state == "failed" else ""
        with self._lock:
            seen = (state, detail, self._engine.restarts, _changed(self._engine.config))
            if seen != self._seen:
                fresh = seen[:3] != self._seen[:3]
                self._seen = seen
                if fresh and state == "failed":
                    self.note_error(detail)
                since = time.monotonic() if fresh else self._status.since
                self._status = Status(state, detail, since, self._status.version + 1)
            return self._status

    @property
    def engine(self) -> Any:
        """The ready engine. Raises `EngineClosed`."""
        status = self.status
        if status.state == "ready":
            return self._engine
        if status.state == "failed":
            raise EngineClosed(f"The engine is not running ({status.detail}). Restart it in the Engine tab.")
        raise EngineClosed(f"The engine is {status.state}; try again in some seconds.")

    @property
    def info(self) -> Any | None:
        """`EngineInfo` of the ready engine, or None."""
        return self._engine.info if self.status.state == "ready" else None

    @property
    def raw(self) -> Any:
        """The engine in whatever state, for the API beside the page, which has its own answers to that."""
        return self._engine

    @property
    def errors(self) -> list[tuple[float, str]]:
        """The last errors, newest first: (seconds since the epoch, message)."""
        with self._lock:
            return self._errors[::-1]

    # ---- changing -----------------------------------------------------------------------------------------------

    def note_error(self, message: str) -> None:
        with self._lock:
            self._errors = [*self._errors[1 - KEEP_ERRORS :], (time.time(), message)]

    def touch(self) -> None:
        """Something else that pages show has changed (a voice, say): make them look again."""
        with self._lock:
            now = self.status
            self._status = Status(now.state, now.detail, now.since, now.version + 1)

    def restart(self, config: EngineConfig, *, wait_s: float | None = None) -> str | None:
        """Load other settings in the background; requests meanwhile get `EngineClosed`.

        Where they do not start, the engine goes on with the old ones and the error is noted; it is returned too if
        it came within `wait_s` seconds.

        Raises:
            EngineClosed: it is starting or restarting already.
        """
        with self._lock:
            if self.status.state not in ("ready", "failed"):
                raise EngineClosed(f"The engine is {self.status.state}; wait until it is ready.")
            self._restarting, self._fault = config, None
        thread = threading.Thread(target=self._restart, args=(config,), name="engine-restart", daemon=True)
        thread.start()
        thread.join(wait_s)
        return None if thread.is_alive() else self._fault

    def close(self) -> None:
        self._engine.close()

    def _restart(self, config: EngineConfig) -> None:
        try:
            self._engine.restart(config)
        except Exception as error:
            if not isinstance(error, ChorusError):
                log.exception("the restart failed")
            self._fault = error.message if isinstance(error, ChorusError) else f"{type(error).__name__}: {error}"
            self.note_error(self._fault)
        finally:
            with self._lock:
                self._restarting = None
                self.touch()


def _changed(config: EngineConfig) -> int:
    """When a voice was last saved, renamed or deleted, by whomever: the API beside the page changes voices too."""
    try:
        return (ROOT / Path(config.voices_dir).expanduser() / "saved").stat().st_mtime_ns
    except OSError:  # no voice was ever saved
        return 0
