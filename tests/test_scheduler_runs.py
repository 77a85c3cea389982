"""The codec's scheduler over whole runs: a talker that gives frames, a codec that takes them."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.chunks import CHUNK_SCHEDULES, next_boundary
from engine.scheduler import TASK_GATE, CodecQueue, SchedulerSettings

schedules = st.sampled_from([*CHUNK_SCHEDULES.values(), (3, 7), (5,)])
settings_of_runs = st.builds(
    SchedulerSettings,
    schedule=schedules,
    max_batch=st.integers(1, 9),
    batching=st.booleans(),
    gather=st.sampled_from([1, 1, 4]),
    admission=st.sampled_from([None, 1, 3, 10, TASK_GATE]),
    captured=st.sampled_from([frozenset(), frozenset({(b, f) for b in (1, 4) for f in (1, 2, 4, 8, 12, 25)})]),
)
FILLED = {1: (1, 1), 2: (2, 2), 4: (3, 4), 8: (5, 8), 12: (9, 12), 25: (13, 25)}  # frames that a step is filled up from
arrivals = st.lists(
    st.tuples(
        st.integers(0, 30),  # the step of its arrival
        st.integers(0, 70),  # frames in all
        st.none() | schedules,
        st.sampled_from(["base", "custom_voice", "voice_design"]),
    ),
    min_size=1,
    max_size=12,
)


def drive(plan, limits, decisions_per_step=2, step_s=0.04):
    """A talker that gives every stream one frame a step, and a codec that may run a few times a step."""
    queue, log, left, now, step = CodecQueue(limits), [], {}, 0.0, 0
    waiting = {f"s{i}": entry for i, entry in enumerate(plan)}
    while waiting or left:
        for name in [n for n, entry in waiting.items() if entry[0] <= step]:
            _, frames, schedule, task = waiting.pop(name)
            queue.add(name, schedule=schedule, task=task)
            left[name] = frames
        for name, frames in left.items():
            if frames >= 0:
                queue.produce(name, min(1, frames), now, ended=frames <= 1)
                left[name] = frames - 1 if frames > 1 else -1  # -1: the talker is through with it
        for _ in range(decisions_per_step):
            if (batch := queue.take(now)) is None:
                break
            log.append((now, batch))
        for name in [n for n in left if queue.done(n)]:
            queue.remove(name)
            del left[name]
        now += step_s
        step += 1
        assert step < 5000, f"stuck with {left} left"
    assert len(queue) == 0
    return log


@settings(max_examples=150, deadline=None)
@given(arrivals, settings_of_runs)
def test_every_frame_is_decoded_once_in_order_and_on_schedule(plan, limits):
    log = drive(plan, limits)
    for i, (_, frames, schedule, _) in enumerate(plan):
        sizes = [batch.frames for _, batch in log if f"s{i}" in batch.streams]
        at, sizes_wanted = 0, schedule or limits.schedule
        for size in sizes:
            taken, border = min(size, frames - at), next_boundary(at, sizes_wanted)
            assert 0 < taken and at + taken <= border, "a step crosses no chunk border"
            if not limits.captured:
                assert taken == size and at + size in (border, frames), "whole chunks, but for the flush at the end"
            else:
                assert size in (1, 2, 4, 8, 12, 25)
                assert taken in (size, *range(*FILLED[size])), "filled up only where a smaller step has no room"
            at += taken
        assert at == frames  # each frame once; the order is the order of the batches
    for _, batch in log:
        assert len(set(batch.streams)) == len(batch.streams) <= limits.batch_limit(batch.frames)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 64), st.integers(1, 16), schedules, st.booleans())
def test_equal_streams_form_no_staircase(count, max_batch, schedule, backlog):
    """vllm-omni #3163: four clones at once heard 677, 1252, 2760 and 3333 ms. Here all first chunks come first.

    Even when later chunks wait beside them, as long as no listener is about to run dry.
    """
    queue = CodecQueue(SchedulerSettings(schedule=schedule, max_batch=max_batch, lead_s=0.0 if backlog else 0.25))
    for i in range(count):
        queue.add(str(i))
        queue.produce(str(i), sum(schedule) * 2 if backlog else schedule[0], now=0.0)
    first = set()
    for _ in range(math.ceil(count / max_batch)):
        batch = queue.take(now=0.0)
        assert batch.frames == schedule[0]
        first.update(batch.streams)
    assert len(first) == count


def test_admission_1_does_form_the_staircase():
    """What the experiment shows: the n-th listener waits for n-1 whole utterances."""
    plan = [(0, 50, None, "base")] * 4
    starts = {}
    for now, batch in drive(plan, SchedulerSettings(schedule=(25,), admission=1)):
        for name in batch.streams:
            starts.setdefault(name, now)
    gaps = [b - a for a, b in pairwise(sorted(starts.values()))]
    assert len(gaps) == 3 and sum(gaps) > 0
    together = {}
    for now, batch in drive(plan, SchedulerSettings(schedule=(25,))):
        for name in batch.streams:
            together.setdefault(name, now)
    assert len(set(together.values())) == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 20), st.integers(1, 20), st.integers(1, 40))
def test_nobody_starves_when_the_codec_is_too_slow(count, step_ms, first_at):
    """Endless streams with chunks always ready, one per decision: the rival's first chunk still gets its turn."""
    queue = CodecQueue(SchedulerSettings(schedule=(1,), batching=False, patience_s=0.3))
    for i in range(count):
        queue.add(f"old{i}")
        queue.produce(f"old{i}", 10_000, now=0.0)
    now, served = 0.0, []
    for step in range(first_at + 2 * count + 1000 // step_ms + 2):
        if step == first_at:
            arrived = now
            queue.add("new")
            queue.produce("new", 1, now)
        served.append((now, queue.take(now).streams[0]))
        now += step_ms / 1000
    when = next(t for t, name in served if name == "new")
    # Once its deadline has passed, each of the others goes before it at most once.
    assert when <= arrived + 0.3 + (count + 1) * step_ms / 1000
    assert {name for _, name in served} >= {f"old{i}" for i in range(min(count, len(served) - 1))}


def test_a_cancelled_stream_frees_its_place():
    queue = CodecQueue(SchedulerSettings(admission=1, schedule=(1,)))
    queue.add("a")
    queue.add("b")
    queue.produce("a", 1, now=0.0)
    queue.produce("b", 1, now=0.0)
    assert queue.take(0.0).streams == ("a",)
    assert queue.take(0.0) is None
    assert queue.remove("a") and not queue.remove("a")
    queue.produce("a", 1, now=0.1)  # the talker's last step before it heard of the cancel
    assert queue.take(0.1).streams == ("b",)
    assert "a" not in queue


def test_a_used_id_is_refused():
    queue = CodecQueue(SchedulerSettings())
    queue.add("a")
    with pytest.raises(ValueError, match="already queued"):
        queue.add("a")
