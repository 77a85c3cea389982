"""When the talker's next step has to be launched so that the device does not wait for it.

With async scheduling a step is launched while the one before runs. Launched at once, it leaves out whoever arrives in
the meantime: an arrival then waits for the rest of one step and for the whole of the next. With few streams there is
time to spare, so the launch waits until the running step is about to end, and arrivals until then are in it.

Plain times in, a moment out: no clock, no device.
"""

from __future__ import annotations

from collections import defaultdict, deque

KEPT = 32  # lengths of steps, and of launches, that are remembered for each kind
ENOUGH = 4  # of them, before they are relied upon
EVERY = 8  # each so many steps are launched at once, so that a length without any waiting is among those remembered
FIRST_LAUNCH_S = 3e-3  # what a launch is thought to take before one was seen


class Pace:
    """Lengths of the last steps. Times are seconds of one monotonic clock.

    A step is never thought longer than the shortest like it: launched too early it costs an arrival its place in it,
    too late it costs every stream the difference.
    """

    def __init__(self, most_streams: int, spare_s: float = 4e-4) -> None:
        """most_streams: with more, steps are launched at once (the engine's thread has no time to spare). spare_s: how
        much earlier than the lengths say."""
        self.most_streams, self.spare_s = most_streams, spare_s
        self._lengths: defaultdict[tuple[int, bool], deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._launches: defaultdict[bool, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._returned: float | None = None  # when the last call brought a step's frames: since then the next one runs
        self._running = (0, False)  # streams of the step that runs, and whether a prompt is in it
        self._steps = 0

    def stepped(
        self, began: float, launched: float, returned: float, *, streams: int, prefills: int, ran: bool
    ) -> None:
        """A call of the talker's `step`.

        Args:
            began, launched, returned: when the call began, when it had launched its step, when it returned.
            streams, prefills: of the step that it launched.
            ran: whether it waited for a step launched before; else nothing ran when it began.
        """
        if ran and self._returned is not None:
            self._lengths[self._running].append(returned - self._returned)
        self._returned = returned if ran else None
        self._running = (streams, prefills > 0)
        self._launches[prefills > 0].append(launched - began)
        self._steps += 1

    def due(self, prefills: int) -> float:
        """The moment from which the next step should be launched; 0.0: at once. prefills: prompts it would hold."""
        lengths = self._lengths.get(self._running, ())
        if self._returned is None or self._running[0] > self.most_streams or len(lengths) < ENOUGH:
            return 0.0
        if self._steps % EVERY == 0:
            return 0.0
        launch = max(self._launches[prefills > 0], default=FIRST_LAUNCH_S)
        return self._returned + min(lengths) - launch - self.spare_s
