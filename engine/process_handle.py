"""The parent's side of one engine process: start it, write to it, end it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from engine.config import ROOT, EngineConfig
from engine.errors import ChorusError

POLL_S = 0.25  # a death without a closed connection is noticed after this long
CLOSE_S = 10.0  # a child that has not closed by then is killed


class ChildHandle:
    """One process and the connection to it. `start` gives it its settings."""

    config: EngineConfig

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs:
            # Not multiprocessing: that would import the app's main module again in the child.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "engine.process_child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
            )
        self.connection = Connection(ours.detach())
        self._writing = threading.Lock()
        self.error: ChorusError | None = None  # what it said before it ended
        self.was_ready = False
        self.stopping = False  # asked to end: its end is no crash

    def start(self, config: EngineConfig) -> None:
        """Load the engine; `ready` or `failed` comes back."""
        self.config = config
        self.send("config", config.model_dump())

    def prepare(self, config: EngineConfig, needed: Callable[[], bool]) -> bool:
        """Import what every engine needs, before `start`.

        False when it is `needed` no more, died, or refuses the settings (then `error` says why).
        """
        self.send("prepare", config.model_dump())
        try:
            while needed():
                if self.connection.poll(POLL_S):
                    message = self.connection.recv()
                    if message[0] == "failed":
                        self.error = message[1]
                    return message[0] == "prepared"
                if self.process.poll() is not None:
                    return False
        except (EOFError, OSError):
            pass
        return False

    def send(self, *message: Any) -> bool:
        """False when it is gone."""
        try:
            with self._writing:
                self.connection.send(message)
            return True
        except (OSError, ValueError):
            return False

    def stop(self) -> None:
        """Ask, wait, kill. Returns when the process is gone."""
        self.stopping = True
        if not self.was_ready:  # still loading: it has nothing to put in order, and would not listen
            self.kill()
            return
        self.send("close")
        try:
            self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
