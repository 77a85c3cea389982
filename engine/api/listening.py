"""A stream of the engine on an event loop, and the client who may leave at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from engine.request import AudioChunk, SpeechResult
from engine.stream import SpeechStream

T = TypeVar("T")


class ClientGone(Exception):
    """The connection was closed by the other side."""


class Listener:
    """Reads a `SpeechStream` without blocking the loop or holding a thread."""

    def __init__(self, stream: SpeechStream) -> None:
        self.stream = stream
        self._something = asyncio.Event()
        loop = asyncio.get_running_loop()

        def notify() -> None:  # on the engine's thread, which an ended loop must not hurt
            try:
                loop.call_soon_threadsafe(self._something.set)
            except RuntimeError:
                stream.cancel()

        stream.on_item(notify)

    async def next(self) -> AudioChunk | None:
        """The next chunk, or None at the end. Raises what the stream raises (EngineFailed, DeadlineExceeded)."""
        while True:
            self._something.clear()
            try:
                chunk = self.stream.try_next()
            except StopIteration:
                return None
            if chunk is not None:
                return chunk
            await self._something.wait()

    @property
    def result(self) -> SpeechResult:
        """How it ended; only after `next` gave None."""
        assert self.stream.result is not None
        return self.stream.result


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves. The request's body must have been read.

    Raises:
        ClientGone: the client left first.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for each in (task, watch):
            if not each.done():
                each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
