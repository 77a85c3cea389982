"""What the codec runs next: plain values in, a decision out.

No tensors, no clock, no threads: the caller passes the time in and carries the decision out. The codec works
chunk by chunk, so a stream never holds it for its lifetime. Holding it was worth 2-40x of p95 first audio to
cloned voices in vllm-omni PR #3163; `admission` brings that behaviour back, to be measured against.

The order of work, most pressing first:

1. **urgent**: the listener runs dry within `lead_s`, or a first chunk has waited for almost `patience_s`;
   by deadline;
2. **first chunks**, by arrival;
3. **the rest**, by deadline, streams that have ended before those that go on.

Nobody starves. A deadline is a fixed moment, and a stream that is served gets a later one, so once a waiting
chunk's deadline has passed every other stream goes before it at most once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engine.chunks import CHUNK_SCHEDULES, check_schedule, next_boundary, playback_end
from engine.errors import ConfigError, InvalidRequest

# vllm-omni PR #3163: preset and designed voices kept one codec stream, clones gained from ten.
TASK_GATE: dict[str, int] = {"custom_voice": 1, "voice_design": 1, "base": 10}

_URGENT, _FIRST, _ENDING, _REST = range(4)


@dataclass(frozen=True)
class SchedulerSettings:
    """How the codec is shared.

    Attributes:
        schedule: frames per chunk of streams that bring no schedule of their own; the last size repeats.
        max_batch: most streams of one codec step.
        batching: False runs one stream at a time.
        admission: how many streams may hold the codec from their first chunk to their last. None: any
            number, each chunk on its own. A mapping limits each task by itself (`TASK_GATE`).
        captured: (batch, frames) sizes that run as a graph. When given, a chunk is cut into captured frame
            counts (largest first, so 15 frames are 12 + 2 + 1), and only a stream's last one is filled up, in one
            step of the next larger count: nothing follows that could hear of it.
        ahead: frame counts whose first chunks run by themselves, ahead of all other chunks (`next_batch`).
        gather: streams of the rest that wait for each other while none of them is pressing, so that a step
            carries more of them; 1 runs each at once. Costs listeners nothing: they have seconds in hand.
        gather_share: of so many running streams one is waited for; fewer than `gather` with few streams, whose company
            would be long in coming.
        in_flight: most codec steps that the device has been given and has not finished (codec_stage.py).
        lead_s: seconds before an underrun from which a stream is urgent; should cover one talker step and
            one codec step.
        patience_s: seconds after which a first chunk that nobody ran counts as late.
    """

    schedule: tuple[int, ...] = CHUNK_SCHEDULES["balanced"]
    max_batch: int = 32
    batching: bool = True
    admission: int | Mapping[str, int] | None = None
    captured: frozenset[tuple[int, int]] = frozenset()
    ahead: frozenset[int] = frozenset()
    gather: int = 1
    gather_share: int = 1
    in_flight: int = 2
    lead_s: float = 0.25
    patience_s: float = 0.5
    # Frame counts that are captured, ascending, and the largest captured batch of each; derived.
    _frame_sizes: tuple[int, ...] = field(init=False, repr=False, compare=False, default=())
    _largest_batch: dict[int, int] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        try:
            check_schedule(self.schedule, "schedule")
        except InvalidRequest as error:
            raise ConfigError(error.message, field=error.field) from None
        for name in ("max_batch", "gather", "gather_share", "in_flight"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give 1 or more", field=name)
        limits = self.admission.values() if isinstance(self.admission, Mapping) else (self.admission,)
        for limit in limits:
            if limit is not None and limit < 1:
                raise ConfigError(f"admission is {limit}; give 1 or more, or null for no limit", field="admission")
        for name in ("lead_s", "patience_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give seconds, 0 or more", field=name)
        largest: dict[int, int] = {}
        for batch, frames in self.captured:
            if batch < 1 or frames < 1:
                raise ConfigError(f"captured holds ({batch}, {frames}); both must be 1 or more", field="captured")
            largest[frames] = max(batch, largest.get(frames, 0))
        object.__setattr__(self, "_frame_sizes", tuple(sorted(largest)))
        object.__setattr__(self, "_largest_batch", largest)

    def batch_limit(self, frames: int) -> int:
        """Most streams of one step of `frames` frames each."""
        if not self.batching:
            return 1
        return min(self.max_batch, self._largest_batch.get(frames, self.max_batch))

    def runnable(self, frames: int) -> int:
        """The part of `frames` that one step can run: the largest captured size, or all when none fits."""
        place = bisect_right(self._frame_sizes, frames)
        return self._frame_sizes[place - 1] if place else frames

    def covering(self, frames: int) -> int:
        """The smallest captured size that holds `frames`, or as `runnable` when none does."""
        place = bisect_left(self._frame_sizes, frames)
        return self._frame_sizes[place] if place < len(self._frame_sizes) else self.runnable(frames)


@dataclass(slots=True)
class CodecStream:
    """One stream as the scheduler sees it; only `CodecQueue` writes to it. Times are seconds of one monotonic clock.

    Attributes:
        id: request id.
        arrival: order number; smaller came earlier.
        produced: frames that the talker has written.
        decoded: frames given to the codec so far. The place in the chunk schedule follows from it.
        ended: no more frames will come.
        schedule: frames per chunk; the last size repeats.
        ready_since: when the next chunk became complete.
        plays_until: when the listener will have played everything emitted; None before the first chunk.
        task: what `admission` may tell apart: base, custom_voice, voice_design.
    """

    id: str
    arrival: int
    produced: int
    decoded: int
    ended: bool
    schedule: tuple[int, ...]
    ready_since: float = 0.0
    plays_until: float | None = None
    task: str = "base"

    @property
    def done(self) -> bool:
        return self.ended and self.decoded >= self.produced

    @property
    def ready(self) -> int:
        """Frames of the next chunk, or 0 while it is incomplete. An ended stream flushes what it has."""
        boundary = next_boundary(self.decoded, self.schedule)
        if self.produced >= boundary:
            return boundary - self.decoded
        return max(0, self.produced - self.decoded) if self.ended else 0


@dataclass(frozen=True, slots=True)
class CodecBatch:
    """One codec step: the next `frames` frames of each of `streams`, most pressing first; of one that ended all it has,
    where that is less."""

    frames: int
    streams: tuple[str, ...]


def next_batch(
    streams: Iterable[CodecStream], settings: SchedulerSettings, now: float, ahead: bool = False
) -> CodecBatch | None:
    """What the codec should run now, or None when no admitted stream has a complete chunk.

    The most pressing chunk sets the frame count; streams whose next step has the same count join it in order.
    `ahead`: of first chunks that run by themselves, else of all others.
    """
    admitted = _admit([stream for stream in streams if not stream.done], settings.admission)
    waiting = sorted(
        (_priority(stream, settings, now), frames, stream.id)
        for stream in admitted
        if (frames := _step_frames(stream, settings)) and ahead == (stream.decoded == 0 and frames in settings.ahead)
    )
    groups: dict[int, list[str]] = {}  # by frame count, most pressing group and stream first
    for _, frames, stream_id in waiting:
        groups.setdefault(frames, []).append(stream_id)
    pressing = {frames for (rank, *_), frames, _ in waiting if rank < _REST}
    gather = min(settings.gather, max(1, len(admitted) // settings.gather_share))
    for frames, ids in groups.items():
        limit = settings.batch_limit(frames)
        if frames in pressing or len(ids) >= min(gather, limit):
            return CodecBatch(frames, tuple(ids[:limit]))
    return None


def _step_frames(stream: CodecStream, settings: SchedulerSettings) -> int:
    """Frames of the step that runs the stream's next chunk, or its first part; 0 while there is none."""
    frames = stream.ready
    if stream.ended and stream.decoded + frames == stream.produced:
        return settings.covering(frames) if frames else 0
    return settings.runnable(frames) if frames else 0


def _priority(stream: CodecStream, settings: SchedulerSettings, now: float) -> tuple[int, float, int]:
    """Sort key: smaller runs earlier."""
    first = stream.decoded == 0
    if stream.plays_until is None:
        deadline = stream.ready_since + settings.patience_s
    else:
        deadline = stream.plays_until
    if deadline - now < settings.lead_s:
        return _URGENT, deadline, stream.arrival
    if first:
        return _FIRST, float(stream.arrival), stream.arrival
    # An end waits for no company: it frees a slot and makes the caller's file whole.
    return (_ENDING if stream.ended else _REST), deadline, stream.arrival


def _admit(streams: list[CodecStream], admission: int | Mapping[str, int] | None) -> list[CodecStream]:
    """The streams that may use the codec: those that began, then by arrival up to the limit."""
    if admission is None:
        return streams
    held: dict[str, int] = {}
    admitted = []
    # False sorts first: a stream that began keeps its place.
    for stream in sorted(streams, key=lambda s: (s.decoded == 0, s.arrival)):
        if stream.decoded == 0 and not stream.ready:
            continue  # a place is taken by the first complete chunk, not by being queued
        group = stream.task if isinstance(admission, Mapping) else ""
        limit = admission.get(group) if isinstance(admission, Mapping) else admission
        if stream.decoded > 0 or limit is None or held.get(group, 0) < limit:
            held[group] = held.get(group, 0) + 1
            admitted.append(stream)
    return admitted


class CodecQueue:
    """The streams of one engine between talker and codec: bookkeeping around `next_batch`.

    One thread calls it. Ids that are unknown are ignored: a cancel may have come first.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self._streams: dict[str, CodecStream] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, stream_id: str) -> bool:
        return stream_id in self._streams

    def add(self, stream_id: str, *, schedule: Iterable[int] | None = None, task: str = "base") -> None:
        """A new stream without frames. Raises InvalidRequest for a bad schedule, ValueError for a used id."""
        sizes = self.settings.schedule if schedule is None else check_schedule(schedule)
        if stream_id in self._streams:
            raise ValueError(f"stream {stream_id!r} is already queued")
        self._streams[stream_id] = CodecStream(stream_id, self._arrivals, 0, 0, False, sizes, task=task)
        self._arrivals += 1

    def produce(self, stream_id: str, frames: int, now: float, *, ended: bool = False) -> None:
        """The talker wrote `frames` more frames of the stream; `ended`: they were its last."""
        if (stream := self._streams.get(stream_id)) is None:
            return
        was_ready = stream.ready
        stream.produced += frames
        stream.ended = stream.ended or ended
        if not was_ready and stream.ready:
            stream.ready_since = now

    def take(self, now: float, ahead: bool = False) -> CodecBatch | None:
        """Decide (`next_batch`), and count the frames of the decision as decoded and on their way to the listeners.

        The codec may still be at work when the next decision is made. Its few milliseconds are left out of the
        listeners' clocks, which makes streams look that much more pressing than they are.
        """
        batch = next_batch(self._streams.values(), self.settings, now, ahead)
        if batch is None:
            return None
        for stream_id in batch.streams:
            stream = self._streams[stream_id]
            frames = min(batch.frames, stream.produced - stream.decoded)
            stream.decoded += frames
            stream.ready_since = now  # of the next chunk, if that is complete already
            stream.plays_until = playback_end(stream.plays_until, now, frames)
        return batch

    def done(self, stream_id: str) -> bool:
        """True once the stream has ended and every frame was taken."""
        stream = self._streams.get(stream_id)
        return stream is not None and stream.done

    def remove(self, stream_id: str) -> bool:
        """Forget a stream that is done or cancelled; False if it was not there."""
        return self._streams.pop(stream_id, None) is not None
