"""One JSON line per event, with monotonic times, so that a latency can be taken apart afterwards.

Events and their fields (`t` is `time.monotonic()` in seconds when the event was over, `request` the request id):

| event | of | fields |
|---|---|---|
| `trace` | the file | `wall` (Unix time at `t`), `pid`, whatever the opener adds (settings, their hash, model) |
| `enqueue` | a request | `task`, `chars` |
| `prefill` | a request | `rows` |
| `step` | the talker | `ms`, `streams`, `prefills` |
| `codec` | the codec | `ms`, `frames` (of each stream), `streams` (their number), `graph` (False: ran eagerly) |
| `chunk` | a request | `index`, `frames`: PCM handed to the listener |
| `first_byte` | a request | - : PCM written to a connection |
| `end` | a request | `reason`, `frames` |

`engine/trace_tables.py` turns a file of them into tables and a plot.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode
_FLUSH_S = 1.0  # what a killed process may lose
_FLUSH_LINES = 1000


class Trace:
    """Adds events to the file `path`, or does nothing when `path` is None. Any thread may call `event`.

    Whole lines are appended in one write, so the engine and the server may share a file from two processes; the
    monotonic clock is the machine's. Runs add up in a file: remove it to begin again.

    Args:
        path: file to append to; its folder is made.
        header: fields of the first line.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: str | Path | None, **header: Any) -> None:
        self._fd: int | None = None
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        if path is None:
            return
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigError(f"cannot write the trace {path}: {error.strerror}", field="trace") from error
        self.event("trace", wall=time.time(), pid=os.getpid(), **header)
        threading.Thread(target=self._flush_now_and_then, name="chorus-trace", daemon=True).start()

    def __bool__(self) -> bool:
        """False when off: lets a caller skip work done for the trace alone."""
        return self._fd is not None

    def event(self, name: str, request_id: str | None = None, **fields: Any) -> None:
        """Note that `name` happened now. Less than a microsecond when off, some ten when on."""
        if self._fd is None:
            return
        now = time.monotonic()
        line: dict[str, Any] = {"t": round(now, 6), "event": name}
        if request_id is not None:
            line["request"] = request_id
        line.update(fields)
        text = _encode(line) + "\n"
        with self._lock:
            self._lines.append(text)
            if len(self._lines) >= _FLUSH_LINES:
                self._write()

    def flush(self) -> None:
        with self._lock:
            self._write()

    def close(self) -> None:
        """Write what is buffered; later events are dropped."""
        self._closing.set()
        with self._lock:
            self._write()
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def _flush_now_and_then(self) -> None:
        while not self._closing.wait(_FLUSH_S):
            self.flush()

    def _write(self) -> None:
        if self._fd is not None and self._lines:
            os.write(self._fd, "".join(self._lines).encode())
        self._lines.clear()
