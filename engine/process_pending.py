"""What callers of an engine process wait for: streams and answers, until they come or the process is gone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from engine.errors import ChorusError
from engine.stream import SpeechStream


class Pending:
    """Filled by callers' threads, emptied by the one thread that reads what the process sends."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[Future, Callable[[Any], Any]]] = {}
        self._numbers = itertools.count(1)
        self._streams: dict[str, SpeechStream] = {}

    def call(self, accept: Callable[[Any], Any]) -> tuple[int, Future]:
        """A number for a call, and where its result will be: `accept` of the answer, on the reading thread."""
        number, future = next(self._numbers), Future[Any]()
        self._calls[number] = (future, accept)
        return number, future

    def stream(self, stream: SpeechStream) -> SpeechStream:
        """Expect chunks of a stream."""
        self._streams[stream.id] = stream
        return stream

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def take(self, message: tuple) -> bool:
        """Hand a message of the process to whom it is for; False when it is for nobody here.

        What still comes for a stream that was given up is dropped.
        """
        kind, rest = message[0], message[1:]
        if kind == "chunk":
            if (stream := self._streams.get(rest[0].request_id)) is not None:
                stream.put(rest[0])
        elif kind == "position":
            if (stream := self._streams.get(rest[0])) is not None:
                stream.moved(rest[1])
        elif kind == "end":
            if (stream := self._streams.pop(rest[0].request_id, None)) is not None:
                stream.put(rest[0])
        elif kind == "broken":
            if (stream := self._streams.pop(rest[0], None)) is not None:
                stream.put(rest[1])
        elif kind in ("reply", "raise"):
            future, accept = self._calls.pop(rest[0])
            if kind == "raise":
                future.set_exception(rest[1])
            else:
                future.set_result(accept(rest[1]))
        else:
            return False
        return True

    def abandon(self, error: ChorusError) -> None:
        """Every open stream and call ends with `error`."""
        streams, calls = list(self._streams.values()), list(self._calls.values())
        self._streams.clear()
        self._calls.clear()
        for stream in streams:
            stream.put(error)
        for future, _ in calls:
            future.set_exception(error)
