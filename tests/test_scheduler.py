"""The codec's scheduler, without a model: plain values in, decisions out."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.chunks import CHUNK_SCHEDULES, check_schedule, next_boundary, playback_end
from engine.errors import ConfigError, InvalidRequest
from engine.scheduler import TASK_GATE, CodecQueue, CodecStream, SchedulerSettings, next_batch

RAMP = CHUNK_SCHEDULES["latency"]


def stream(name: str, **fields) -> CodecStream:
    values = {"arrival": 0, "produced": 0, "decoded": 0, "ended": False, "schedule": RAMP, **fields}
    return CodecStream(name, **values)


# --- the chunk schedule ---------------------------------------------------------------------------------------


def test_borders_follow_the_schedule_and_the_last_size_repeats():
    borders, at = [], 0
    for _ in range(8):
        at = next_boundary(at, RAMP)
        borders.append(at)
    assert borders == [1, 3, 7, 15, 27, 39, 51, 63]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 500))
def test_next_border_is_the_smallest_border_after(schedule, decoded):
    borders = list(accumulate([*schedule, *[schedule[-1]] * 510]))
    assert next_boundary(decoded, tuple(schedule)) == min(b for b in borders if b > decoded)


@pytest.mark.parametrize("bad", [(), (0,), (1, -2), (251,), (1.5,), (True,), ("4",), (1,) * 65])
def test_bad_schedule_is_refused_by_name(bad):
    with pytest.raises(InvalidRequest) as caught:
        check_schedule(bad)
    assert caught.value.field == "chunk_schedule"


@pytest.mark.parametrize(
    ("fields", "culprit"),
    [
        ({"schedule": ()}, "schedule"),
        ({"max_batch": 0}, "max_batch"),
        ({"gather": 0}, "gather"),
        ({"admission": 0}, "admission"),
        ({"admission": {"base": 0}}, "admission"),
        ({"lead_s": -1.0}, "lead_s"),
        ({"patience_s": math.nan}, "patience_s"),
        ({"captured": frozenset({(0, 4)})}, "captured"),
    ],
)
def test_bad_settings_name_their_field(fields, culprit):
    with pytest.raises(ConfigError) as caught:
        SchedulerSettings(**fields)
    assert caught.value.field == culprit


# --- single decisions -----------------------------------------------------------------------------------------


def test_an_incomplete_chunk_waits_and_an_ended_one_flushes():
    waiting = stream("a", produced=2, decoded=1)
    assert next_batch([waiting], SchedulerSettings(), now=0) is None
    flushed = next_batch([stream("a", produced=2, decoded=1, ended=True)], SchedulerSettings(), now=0)
    assert (flushed.frames, flushed.streams) == (1, ("a",))


def test_a_done_stream_asks_for_nothing():
    assert next_batch([stream("a", produced=5, decoded=5, ended=True)], SchedulerSettings(), now=0) is None


def test_order_is_urgent_then_first_chunks_then_the_rest():
    streams = [
        stream("rest", arrival=0, produced=3, decoded=1, plays_until=12.0),
        stream("first", arrival=1, produced=1, ready_since=10.0),
        stream("urgent", arrival=2, produced=3, decoded=1, plays_until=10.1),
        stream("late", arrival=3, produced=3, decoded=1, plays_until=9.0),
    ]
    order = []
    while streams:
        batch = next_batch(streams, SchedulerSettings(batching=False), now=10.0)
        order += batch.streams
        streams = [s for s in streams if s.id not in batch.streams]
    assert order == ["late", "urgent", "first", "rest"]


def test_a_first_chunk_that_waited_long_goes_before_streams_that_are_merely_urgent():
    streams = [
        stream("urgent", arrival=0, produced=3, decoded=1, plays_until=10.1),
        stream("first", arrival=1, produced=1, ready_since=9.0),
    ]
    assert next_batch(streams, SchedulerSettings(batching=False), now=10.0).streams == ("first",)


def test_a_batch_holds_equal_frame_counts_only():
    streams = [
        stream("a", arrival=0, produced=1),
        stream("b", arrival=1, produced=3, decoded=1, plays_until=99.0),
        stream("c", arrival=2, produced=1),
    ]
    batch = next_batch(streams, SchedulerSettings(), now=0)
    assert (batch.frames, batch.streams) == (1, ("a", "c"))


def test_captured_sizes_limit_the_batch_and_cut_the_frames():
    captured = frozenset({(1, 1), (2, 1), (1, 4), (4, 4), (8, 4)})
    limits = SchedulerSettings(max_batch=6, captured=captured)
    assert [limits.batch_limit(n) for n in (1, 4, 7)] == [2, 6, 6]
    assert [limits.runnable(n) for n in (1, 3, 4, 7, 12)] == [1, 1, 4, 4, 4]


def test_the_last_frames_of_a_stream_are_one_step_filled_up():
    """Nothing follows them that could hear of it: 11 frames are one step of 12, not 8, 2 and 1 one after the other."""
    limits = SchedulerSettings(schedule=(12,), captured=frozenset({(4, n) for n in (1, 2, 4, 8, 12)}))
    assert [limits.covering(n) for n in (1, 3, 4, 5, 11, 12, 30)] == [1, 4, 4, 8, 12, 12, 12]
    assert SchedulerSettings().covering(7) == 7  # no graphs
    ended = stream("ended", arrival=1, produced=23, decoded=12, ended=True, plays_until=9.0, schedule=(12,))
    whole = stream("whole", produced=24, decoded=12, plays_until=9.0, schedule=(12,))
    going = stream("going", produced=23, decoded=12, plays_until=9.0, schedule=(12,))
    batch = next_batch([ended, whole, going], limits, now=0)
    assert (batch.frames, batch.streams) == (12, ("ended", "whole"))
    more = stream("more", produced=40, decoded=12, ended=True, plays_until=9.0, schedule=(12,))
    assert next_batch([more], limits, now=0).frames == 12  # a whole chunk comes first
    queue = CodecQueue(limits)
    queue.add("a")
    queue.produce("a", 11, now=0.0, ended=True)
    assert queue.take(0.0).frames == 12 and queue.done("a") and queue.take(0.0) is None


def test_without_batching_one_stream_runs_at_a_time():
    streams = [stream(str(i), arrival=i, produced=1) for i in range(3)]
    assert next_batch(streams, SchedulerSettings(batching=False), now=0).streams == ("0",)


def test_gathering_waits_for_company_but_not_for_ends_or_pressing_streams():
    gather = SchedulerSettings(gather=3)
    rest = [stream(str(i), arrival=i, produced=3, decoded=1, plays_until=9.0) for i in range(3)]
    busy = stream("busy", arrival=3, produced=1, decoded=1, plays_until=9.0)
    assert next_batch([*rest[:2], busy], gather, now=0) is None
    assert next_batch(rest[:2], gather, now=0).streams == ("0", "1")  # there is nobody else to wait for
    assert next_batch(rest, gather, now=0).streams == ("0", "1", "2")
    # one of the two becomes urgent, and takes the other along
    assert next_batch(rest[:2], gather, now=8.9).streams == ("0", "1")
    ended = stream("e", arrival=9, produced=3, decoded=1, plays_until=9.0, ended=True)
    assert next_batch([*rest[:1], ended], gather, now=0).streams == ("e", "0")
    first = stream("f", arrival=9, produced=1)
    assert next_batch([*rest[:1], first], gather, now=0).streams == ("f",)
    # a batch that can be no larger does not wait to be
    assert next_batch(rest[:1], SchedulerSettings(gather=3, batching=False), now=0).streams == ("0",)


def test_playback_goes_on_from_the_chunk_that_ended_an_underrun():
    assert playback_end(None, 5.0, 25) == 7.0
    assert playback_end(7.0, 6.0, 25) == 9.0  # in time: appended
    assert playback_end(7.0, 8.0, 25) == 10.0  # late: the listener waited from 7 to 8


def test_few_streams_wait_for_little_company():
    """One of eight: at ten streams nobody waits, at forty each for four."""
    auto = SchedulerSettings(gather=4, gather_share=8)
    busy = [stream(f"b{i}", arrival=9, produced=1, decoded=1, plays_until=9.0) for i in range(40)]
    rest = [stream(str(i), arrival=i, produced=3, decoded=1, plays_until=9.0) for i in range(4)]
    assert next_batch([*rest[:1], *busy[:14]], auto, now=0).streams == ("0",)
    assert next_batch([*rest[:1], *busy[:15]], auto, now=0) is None
    assert next_batch([*rest[:2], *busy[:15]], auto, now=0).streams == ("0", "1")
    assert next_batch([*rest[:3], *busy], auto, now=0) is None
    assert next_batch([*rest, *busy], auto, now=0).streams == ("0", "1", "2", "3")
    assert next_batch([*rest[:1], *busy], auto, now=8.9).streams == ("0",)  # about to run dry


def test_first_chunks_that_go_ahead_are_chosen_by_themselves():
    streams = [
        stream("first", arrival=2, produced=1),
        stream("other size", arrival=1, produced=5),  # its schedule begins with another number
        stream("second", arrival=0, produced=3, decoded=1, plays_until=99.0),
    ]
    streams[1].schedule = (5,)
    settings = SchedulerSettings(ahead=frozenset({1}), batching=False)
    assert next_batch(streams, settings, now=0, ahead=True).streams == ("first",)
    assert next_batch(streams, settings, now=0).streams == ("other size",)
    assert next_batch(streams[::2], settings, now=0).streams == ("second",)
    assert next_batch(streams[1:], settings, now=0, ahead=True) is None
    assert next_batch(streams[:1], settings, now=0) is None
    assert next_batch(streams[:1], SchedulerSettings(), now=0, ahead=True) is None  # all wait in one queue


# --- admission ------------------------------------------------------------------------------------------------


def test_admission_1_keeps_the_codec_for_one_stream_until_it_ends():
    """The behaviour measured against: a stream that holds the codec blocks others even while it has no chunk."""
    limit = SchedulerSettings(admission=1)
    holder = stream("holder", arrival=0, produced=1, decoded=1, plays_until=0.1)
    other = stream("other", arrival=1, produced=5)
    assert next_batch([other, holder], limit, now=0) is None
    ended = stream("holder", arrival=0, produced=1, decoded=1, plays_until=0.1, ended=True)
    assert next_batch([other, ended], limit, now=0).streams == ("other",)


def test_admission_takes_places_by_arrival():
    streams = [stream(str(i), arrival=i, produced=1) for i in (3, 1, 2)]
    assert next_batch(streams, SchedulerSettings(admission=2), now=0).streams == ("1", "2")


def test_a_queued_stream_without_a_chunk_takes_no_place():
    streams = [stream("empty", arrival=0), stream("ready", arrival=1, produced=1)]
    assert next_batch(streams, SchedulerSettings(admission=1), now=0).streams == ("ready",)


def test_the_task_gate_limits_each_task_by_itself():
    gate = SchedulerSettings(admission=TASK_GATE)
    streams = [stream(f"c{i}", arrival=i, produced=1, task="custom_voice") for i in range(3)]
    streams += [stream(f"b{i}", arrival=3 + i, produced=1, task="base") for i in range(12)]
    chosen = next_batch(streams, gate, now=0).streams
    assert [s for s in chosen if s[0] == "c"] == ["c0"]
    assert [s for s in chosen if s[0] == "b"] == [f"b{i}" for i in range(10)]
