"""The talker against the reference implementation: greedy codes of every task type, under every kind of scheduling."""

from __future__ import annotations

import numpy as np
import pytest

from tests.talker.driving import GOLDEN, Collector, golden_requests, open_golden

pytestmark = pytest.mark.slow

KINDS = ("base", "custom_voice", "voice_design")


def check(collector: Collector, requests) -> None:
    for golden in requests:
        outcome = collector[golden.name]
        assert outcome.codes.shape == golden.codes.shape, golden.name
        wrong = np.nonzero((outcome.codes != golden.codes).any(axis=1))[0]
        assert len(wrong) == 0, f"{golden.name}: first wrong frame {wrong[0]} of {len(golden.codes)}"
        assert outcome.finish == golden.finish, golden.name


@pytest.fixture(params=KINDS, scope="module")
def kind(request):
    with open_golden(request.param) as talker:
        yield talker, golden_requests(request.param)


def test_there_is_enough_to_compare():
    requests = [golden for name in KINDS for golden in golden_requests(name)]
    assert sum(len(golden.codes) >= 64 for golden in requests) >= 8
    assert {golden.finish for golden in requests} == {"stop", "length"}


def test_alone(kind):
    talker, requests = kind
    for golden in requests:
        talker.add(golden.name, golden.rows, golden.options)
        check(Collector(talker).run(), [golden])


def test_together_from_different_starts(kind):
    talker, requests = kind
    collector, waiting = Collector(talker), list(reversed(requests))
    while waiting or talker.busy:
        if waiting:
            golden = waiting.pop()
            talker.add(golden.name, golden.rows, golden.options)
        for _ in range(7):
            collector.step()
    check(collector, requests)


def drive_staggered(talker, requests) -> Collector:
    collector = Collector(talker)
    for index, golden in enumerate(requests):
        talker.add(golden.name, golden.rows, golden.options)
        for _ in range(index % 3):
            collector.step()
    return collector.run()


def test_chunked_prefill():
    """Sixteen rows a step: prompts arrive in pieces, beside running decodes."""
    requests = golden_requests("base")
    with open_golden("base", max_num_batched_tokens=16) as talker:
        check(drive_staggered(talker, requests), requests)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_preemption(mode):
    """KV memory for little more than one request of full length: vLLM drops requests and computes them again."""
    requests = golden_requests("base")
    token = 2 * 3 * 1 * 64 * 4  # keys and values, layers, heads, width, bytes: of the golden checkpoints
    with open_golden("base", scheduler_mode=mode, kv_cache_memory_bytes=14 * 32 * token) as talker:
        scheduler = talker._client.engine_core.scheduler
        preempted, original = [], scheduler._preempt_request
        scheduler._preempt_request = lambda request, *a, **k: (
            preempted.append(request.request_id),
            original(request, *a, **k),
        )[1]
        check(drive_staggered(talker, requests), requests)
        assert preempted, "the test did not cause what it tests"


def test_async_scheduling():
    """The next step is launched before the last one's tokens are read; codes stay the same, ends included."""
    requests = golden_requests("voice_design")
    with open_golden("voice_design", scheduler_mode="async") as talker:
        core = talker._client.engine_core
        assert core.batch_queue_size == 2 and type(core.scheduler).__name__ == "AsyncScheduler"
        check(drive_staggered(talker, requests), requests)


def test_plain_predictor():
    """The plain torch step, kept for comparison and for other devices, is the same talker."""
    requests = golden_requests("custom_voice")[:3]
    with open_golden("custom_voice", predictor="plain") as talker:
        check(drive_staggered(talker, requests), requests)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_abort_and_reuse(mode):
    """Aborted at several stages, each slot taken over at once by another request: the rest is not disturbed."""
    requests = golden_requests("base")
    with open_golden("base", slots=4, max_num_seqs=4, scheduler_mode=mode) as talker:
        for steps in (0, 1, 2, 9):
            collector = Collector(talker)
            for index in range(3):
                talker.add(requests[index].name, requests[index].rows, requests[index].options)
            talker.add("gone", requests[3].rows, requests[3].options)
            for _ in range(steps):
                collector.step()
            assert talker.abort("gone")
            talker.add(requests[4].name, requests[4].rows, requests[4].options)  # only the aborted one's slot is free
            collector.run()
            assert "gone" not in collector.finish
            check(collector, [*requests[:3], requests[4]])
            if collector.frames("gone"):
                prefix = collector["gone"].codes
                assert np.array_equal(prefix, requests[3].codes[: len(prefix)])


def test_golden_files_are_there():
    assert (GOLDEN / "requests.json").is_file()
