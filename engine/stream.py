"""The listener's end of a request: an iterator of chunks, then a result."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from engine.errors import ChorusError, DeadlineExceeded, EngineFailed
from engine.request import AudioChunk, SpeechResult

if TYPE_CHECKING:
    from engine.request import SpeechRequest


class SpeechStream(Iterator[AudioChunk]):
    """Chunks as they are made. Iterate once; `result` is there after the last chunk.

    Leaving early without `cancel()` or the `with` block leaves the request running to its end.
    """

    def __init__(
        self,
        request: SpeechRequest,
        text: str,
        seed: int,
        cancel: Callable[[str], bool],
        parts: tuple[str, ...] = (),
        input_tokens: int = 0,
    ) -> None:
        self.request = request
        self.id = request.id
        self.text = text  # as it will be spoken, after cleaning
        self.parts = parts or (text,)  # of a long text; part i is spoken with the seed `seed + i`
        self.input_tokens = input_tokens  # of the text as spoken and of the instruction
        self.position = 0  # place in the queue: 1 is next, 0 is being spoken
        self.seed = seed
        self.result: SpeechResult | None = None
        self._cancel = cancel
        self._items: queue.SimpleQueue[AudioChunk | SpeechResult | ChorusError] = queue.SimpleQueue()
        self._error: ChorusError | None = None
        self._notify: Callable[[], None] | None = None

    def __next__(self) -> AudioChunk:
        return self.next()

    def next(self, timeout: float | None = None) -> AudioChunk:
        """The next chunk; waits at most `timeout` seconds.

        Raises:
            StopIteration: the stream has ended; `result` says how.
            EngineFailed: the engine broke; chunks so far are valid.
            DeadlineExceeded: `deadline_s` passed before the first sound.
            queue.Empty: nothing within `timeout`.
        """
        if self._error is not None:
            raise self._error
        if self.result is not None:
            raise StopIteration
        item = self._items.get(timeout=timeout)
        if isinstance(item, AudioChunk):
            return item
        if isinstance(item, SpeechResult):
            self.result = item
            if item.finish_reason == "deadline" and item.frames == 0:
                self._error = DeadlineExceeded(f"no sound within the deadline: {item.detail}", field="deadline_s")
                raise self._error
            raise StopIteration
        self._error = item
        raise item

    def on_item(self, notify: Callable[[], None]) -> None:
        """Call `notify` (from the engine's thread; must not block) whenever something can be read without waiting, or
        `position` has changed.

        For event loops: `stream.on_item(lambda: loop.call_soon_threadsafe(event.set))`, then `try_next`.
        """
        self._notify = notify
        if self.position or not self._items.empty():
            notify()

    def try_next(self) -> AudioChunk | None:
        """`next` without waiting; None when nothing is there yet."""
        try:
            return self.next(timeout=0)
        except queue.Empty:
            return None

    def cancel(self) -> bool:
        """Stop and free everything the request holds; False if it had ended already."""
        return self._cancel(self.id)

    def read_all(self) -> list[AudioChunk]:
        """Every remaining chunk."""
        return list(self)

    def __enter__(self) -> SpeechStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cancel()

    # ---- the engine's side -------------------------------------------------------------------------------------

    def put(self, item: AudioChunk | SpeechResult | ChorusError) -> None:
        """Called by the engine's thread only."""
        self._items.put(item)
        if self._notify is not None:
            self._notify()

    def moved(self, position: int) -> None:
        """Called by the engine's thread only: a new place in the queue."""
        self.position = position
        if self._notify is not None:
            self._notify()


def failed(reason: str) -> EngineFailed:
    return EngineFailed(f"the engine stopped while speaking: {reason}. Send the request again")
