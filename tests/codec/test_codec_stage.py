"""The codec's side of the engine's thread: who waits for whom when voices are heard for the first time."""

import threading
import time

import numpy as np
import pytest
import torch

from engine import codec_stage
from engine.codec.graphs import CodecRunner
from engine.codec_stage import CodecStage
from engine.config import WatchdogConfig
from engine.cuda_graphs import run_eagerly
from engine.job import Job
from engine.request import SpeechRequest
from engine.scheduler import SchedulerSettings
from engine.stream import SpeechStream
from engine.trace import Trace
from engine.watchdog import Watchdog
from tests.codec.test_streaming import FRAME, LIMIT, codes, decoder  # noqa: F401  (the fixture)

FRAMES = 4


class CountingRunner(CodecRunner):
    primes = 0

    def prime(self, slot, sequence):
        self.primes += 1
        super().prime(slot, sequence)


def job(name: str, reference: torch.Tensor | None, key: str | None) -> Job:
    stream = SpeechStream(SpeechRequest("Hi.", id=name), "Hi.", 0, lambda _: True)
    return Job(
        stream=stream,
        parts=(),
        task="base",
        watchdog=Watchdog(WatchdogConfig(), False),
        model="",
        weights="random",
        reference_codes=None if reference is None else reference.T.numpy(),
        reference_key=key,
    )


@pytest.fixture
def scene(decoder):  # noqa: F811
    """Five first chunks that are ready at once: two of one new voice, one of another, one known, one without."""
    runner = CountingRunner(decoder, slots=6)
    stage = CodecStage(runner, SchedulerSettings(schedule=(FRAMES,)), Trace(None))
    voices = {"old": codes(1, 9, seed=1)[0], "new": codes(1, 30, seed=2)[0], "other": codes(1, 8, seed=3)[0]}
    before = job("before", voices["old"], "old")  # makes "old" a known voice
    stage.open(before)
    stage.produced(before, np.zeros((FRAMES, 5), np.int64), ended=True)
    list(stage.run(wait=True))
    stage.close(before)
    runner.primes = 0
    wanted = [("a", "new"), ("b", "other"), ("c", "new"), ("d", "old"), ("e", None)]
    jobs = [job(name, voices.get(key or ""), key) for name, key in wanted]
    spoken = codes(5, FRAMES, seed=5)
    for index, each in enumerate(jobs):
        stage.open(each)
        stage.produced(each, spoken[index].T.numpy(), ended=True)
    return runner, stage, jobs, voices, spoken


def test_nobody_waits_for_the_reference_of_another_new_voice(scene, decoder):  # noqa: F811
    runner, stage, jobs, voices, spoken = scene
    heard = [(each.id, runner.primes, samples) for each, samples, _ in stage.run(wait=True)]
    # known voices first, then one new voice after the other, each with everyone who speaks in it
    assert [(name, primes) for name, primes, _ in heard] == [("d", 0), ("e", 0), ("a", 1), ("c", 1), ("b", 2)]
    for name, _, samples in heard:
        index = "abcde".index(name)
        key = jobs[index].reference_key
        before = voices[key] if key else torch.zeros(5, 0, dtype=torch.int64)
        whole = decoder(torch.cat([before, spoken[index]], dim=1)[None])[0, 0].numpy()
        assert abs(samples - whole[before.shape[1] * FRAME :]).max() <= LIMIT, name


def test_a_stream_that_ends_meanwhile_is_left_out(scene):
    runner, stage, jobs, _, _ = scene
    heard = []
    for each, _, _ in stage.run(wait=True):
        heard.append(each.id)
        if each.id == "d":
            stage.close(jobs[1])  # "b", whose turn would have come
    assert sorted(heard) == ["a", "c", "d", "e"]
    for each in jobs:
        stage.close(each)
    assert runner.free_slots == 6


class Later:
    """A launch that is over when the test says so, as on a GPU."""

    def __init__(self, decoded):
        self.done, self.graph, self._decoded = False, decoded.graph, decoded
        self.on_look = None  # what the device does right after the host has looked

    @property
    def ready(self):
        seen, happens, self.on_look = self.done, self.on_look, None
        if happens is not None:
            happens()
        return seen

    @ready.setter
    def ready(self, value):
        self.done = value

    def wait(self):
        self.ready = True
        return self._decoded.wait()


class SlowRunner(CodecRunner):
    """after: seconds from each launch to its end, or None."""

    def __init__(self, *args, after=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.launches: list[tuple[int, Later]] = []
        self.after = after

    def launch(self, slots, codes, ahead=False):
        later = Later(super().launch(slots, codes, ahead))
        self.launches.append((len(slots), later))
        if self.after is not None:
            threading.Timer(self.after, lambda: setattr(later, "ready", True)).start()
        return later


def test_a_busy_device_gets_two_steps_and_the_rest_shares_the_next(decoder):  # noqa: F811
    """Unbounded, 64 streams on an H200 had 155 ms of codec launches before them, 1.9 streams in each."""
    runner = SlowRunner(decoder, slots=8)
    stage = CodecStage(runner, SchedulerSettings(schedule=(FRAMES,)), Trace(None))
    jobs, spoken = [job(f"s{i}", None, None) for i in range(8)], codes(8, FRAMES, seed=7)
    for index, each in enumerate(jobs):  # one comes due at every talker step
        stage.open(each)
        stage.produced(each, spoken[index].T.numpy(), ended=True)
        assert list(stage.run(wait=False)) == []
    assert [n for n, _ in runner.launches] == [1, 1]
    runner.launches[0][1].ready = True
    heard = [each.id for each, _, _ in stage.run(wait=False)]
    assert heard == ["s0"] and [n for n, _ in runner.launches] == [1, 1, 6]
    rest = {each.id: samples for each, samples, _ in stage.run(wait=True)}
    assert list(rest) == [f"s{i}" for i in range(1, 8)] and len(runner.launches) == 3
    for name, samples in rest.items():
        whole = decoder(spoken[int(name[1:])][None])[0, 0].numpy()
        assert abs(samples - whole).max() <= LIMIT
    assert all(stage.finished(each) for each in jobs)


@pytest.mark.parametrize(
    ("streams", "wait_s", "in_time"), [(1, 5.0, True), (8, 5.0, True), (9, 5.0, False), (1, 0.0, False)]
)
def test_a_first_chunk_is_waited_for_where_asked(decoder, monkeypatch, streams, wait_s, in_time):  # noqa: F811
    """The next step takes the engine's thread 5 ms and more; a chunk that comes meanwhile would wait for its end."""
    monkeypatch.setattr(codec_stage, "FIRST_WAIT_S", wait_s)
    runner = SlowRunner(decoder, slots=9, after=0.05)
    stage = CodecStage(runner, SchedulerSettings(schedule=(FRAMES,)), Trace(None))
    jobs, spoken = [job(f"s{i}", None, None) for i in range(streams)], codes(2, FRAMES, seed=8)
    for each in jobs:
        stage.open(each)
    stage.produced(jobs[0], spoken[0].T.numpy(), ended=False)
    heard = list(stage.run(wait=False, first_wait=True))
    assert [each.id for each, _, _ in heard] == (["s0"] if in_time else [])
    for each, samples, frames in heard or stage.run(wait=True):
        each.emit(samples, frames)
    runner.after = None
    stage.produced(jobs[0], spoken[1].T.numpy(), ended=True)
    began = time.monotonic()
    assert list(stage.run(wait=False, first_wait=True)) == []  # later chunks are heard in time without
    assert time.monotonic() - began < 3.0


def test_where_steps_run_ahead_no_chunk_is_waited_for(decoder):  # noqa: F811
    runner = SlowRunner(decoder, slots=1, after=0.05)
    stage = CodecStage(runner, SchedulerSettings(schedule=(FRAMES,)), Trace(None))
    (one,) = [job("one", None, None)]
    stage.open(one)
    stage.produced(one, codes(1, FRAMES, seed=8)[0].T.numpy(), ended=False)
    assert list(stage.run(wait=False)) == []


def test_first_chunks_go_ahead_and_are_heard_in_order(decoder):  # noqa: F811
    """A busy device holds up no first chunk where these run by themselves; what follows it never overtakes it."""
    runner = SlowRunner(decoder, slots=4, capture=[(4, 1), (4, 2)], ahead=[(2, 1)], capture_with=run_eagerly)
    settings = SchedulerSettings(schedule=(1, 2), captured=runner.captured, ahead=frozenset({1}), in_flight=1)
    stage = CodecStage(runner, settings, Trace(None))
    spoken = codes(4, 3, seed=11)
    jobs = [job(f"s{i}", None, None) for i in range(4)]
    heard: dict[str, list[np.ndarray]] = {each.id: [] for each in jobs}

    def turn(wait: bool = False) -> list[str]:
        new = list(stage.run(wait=wait))
        for each, samples, _ in new:
            heard[each.id].append(samples)
        return [each.id for each, _, _ in new]

    stage.open(jobs[0])
    stage.produced(jobs[0], spoken[0].T.numpy(), ended=True)
    assert turn() == [] and [n for n, _ in runner.launches] == [1, 1]  # its first chunk, and the second: all there is
    runner.launches[0][1].ready = True
    assert turn() == ["s0"]
    for each, frames in zip(jobs[1:], spoken[1:], strict=True):
        stage.open(each)
        stage.produced(each, frames.T.numpy()[:1], ended=False)
    assert turn() == [] and [n for n, _ in runner.launches] == [1, 1, 3]  # at once, beside the one under way
    first, second = runner.launches[2][1], runner.launches[1][1]
    second.ready = True
    assert turn() == ["s0"]
    for each, frames in zip(jobs[1:], spoken[1:], strict=True):
        stage.produced(each, frames.T.numpy()[1:], ended=True)
    assert turn() == [] and [n for n, _ in runner.launches] == [1, 1, 3, 3]
    # between two looks of the host the device finishes both, the later chunk of each stream looked at first
    runner.launches[3][1].on_look = lambda: (
        setattr(first, "ready", True),
        setattr(runner.launches[3][1], "done", True),
    )
    assert turn() == 2 * ["s1", "s2", "s3"] and turn(wait=True) == []
    for index, each in enumerate(jobs):
        whole = decoder(spoken[index][None])[0, 0].numpy()
        assert abs(np.concatenate(heard[each.id]) - whole).max() <= LIMIT, each.id
        assert stage.finished(each)


def test_an_end_that_is_filled_up_sounds_the_same(decoder):  # noqa: F811
    """Eleven frames in one step of twelve, beside a whole chunk of another stream; nobody hears the twelfth."""
    runner = CodecRunner(decoder, slots=2, capture=[(2, 12)], capture_with=run_eagerly)
    stage = CodecStage(runner, SchedulerSettings(schedule=(12,), captured=runner.captured), Trace(None))
    spoken, lengths = codes(2, 12, seed=21), {"short": 11, "whole": 12}
    jobs = [job(name, None, None) for name in lengths]
    for each, frames in zip(jobs, spoken, strict=True):
        stage.open(each)
        stage.produced(each, frames.T.numpy()[: lengths[each.id]], ended=each.id == "short")
    heard = {each.id: (samples, frames) for each, samples, frames in stage.run(wait=True)}
    assert stage.batches == 1 and stage.finished(jobs[0]) and not stage.finished(jobs[1])
    for row, name in enumerate(lengths):
        samples, frames = heard[name]
        want = decoder(spoken[row : row + 1, :, : lengths[name]])[0, 0].numpy()
        assert frames == lengths[name] and samples.shape == want.shape and abs(samples - want).max() <= LIMIT
