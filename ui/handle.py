"""The one engine behind the page: loaded in the background, restarted with other settings, always safe to ask."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.config import EngineConfig
from engine.errors import ChorusError, EngineClosed

log = logging.getLogger("chorus.page")


@dataclass(frozen=True)
class Status:
    """What the page shows of the engine. `version` grows with each change, so a poll is one comparison."""

    state: str  # "starting" | "ready" | "restarting" | "failed" | "closed"
    detail: str
    since: float  # time.monotonic(), seconds
    version: int


class EngineHandle:
    """Owns the engine's life. `make(config)` builds one; it may take minutes and may raise `ChorusError`.

    Tabs keep the handle, never the engine: `handle.engine` is the one of now, or raises a typed error that says why
    there is none.
    """

    def __init__(self, config: EngineConfig, make: Callable[[EngineConfig], Any]) -> None:
        self.config = config
        self._make = make
        self._engine: Any = None
        self._status = Status("starting", "", time.monotonic(), 0)
        self._lock = threading.RLock()
        self._turn = threading.Lock()  # one start or restart at a time
        self._errors: list[tuple[float, str]] = []

    # ---- asking -------------------------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        """A failure of a running engine shows here too."""
        with self._lock:
            if self._status.state == "ready" and self._engine is not None and getattr(self._engine, "failure", None):
                self._set("failed", str(self._engine.failure))
            return self._status

    @property
    def engine(self) -> Any:
        """The ready engine. Raises `EngineClosed`."""
        status = self.status
        if status.state == "ready":
            return self._engine
        if status.state == "failed":
            raise EngineClosed(f"The engine is not running: {status.detail} Restart it in the Engine tab.")
        raise EngineClosed(f"The engine is {status.state}; try again in some seconds.")

    @property
    def info(self) -> Any | None:
        """`EngineInfo` of the ready engine, or None."""
        with self._lock:
            return self._engine.info if self._status.state == "ready" else None

    @property
    def errors(self) -> list[tuple[float, str]]:
        """The last errors, newest first: (seconds since the epoch, message)."""
        with self._lock:
            return self._errors[::-1]

    def note_error(self, message: str) -> None:
        with self._lock:
            self._errors = [*self._errors[-19:], (time.time(), message)]

    def touch(self) -> None:
        """Something else that pages show has changed (a voice, say): make them look again."""
        with self._lock:
            now = self._status
            self._status = Status(now.state, now.detail, now.since, now.version + 1)

    # ---- changing -----------------------------------------------------------------------------------------------

    def start(self, *, wait: bool = False) -> None:
        """Load the engine in a thread of its own; `wait` returns when it is ready or has failed."""
        self._run(self.config, "starting", wait)

    def restart(self, config: EngineConfig, *, wait: bool = False) -> None:
        """Close the engine and load one with other settings. Requests meanwhile get `EngineClosed`.

        Raises:
            EngineClosed: another restart is going on.
        """
        self._run(config, "restarting", wait)

    def close(self) -> None:
        with self._turn, self._lock:
            engine, self._engine = self._engine, None
            self._set("closed", "")
        if engine is not None:
            engine.close()

    def _run(self, config: EngineConfig, state: str, wait: bool) -> None:
        if not self._turn.acquire(blocking=False):
            raise EngineClosed("The engine is already being restarted; wait until it is ready.")
        with self._lock:
            old, self._engine = self._engine, None
            self.config = config
            self._set(state, f"loading {config.model}")
        thread = threading.Thread(target=self._load, args=(config, old), name="engine-loader", daemon=True)
        thread.start()
        if wait:
            thread.join()

    def _load(self, config: EngineConfig, old: Any) -> None:
        try:
            if old is not None:
                old.close()
            engine = self._make(config)
            with self._lock:
                self._engine = engine
                self._set("ready", "")
        except Exception as error:
            if not isinstance(error, ChorusError):
                log.exception("the engine failed to start")
            message = error.message if isinstance(error, ChorusError) else f"{type(error).__name__}: {error}"
            self.note_error(message)
            with self._lock:
                self._set("failed", message if message.endswith(".") else message + ".")
        finally:
            self._turn.release()

    def _set(self, state: str, detail: str) -> None:
        self._status = Status(state, detail, time.monotonic(), self._status.version + 1)
