"""What the host does less of, or does while it waits: serving within a step, memory asked for when it is needed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

from engine.talker import SlotOptions, Talker, TalkerSettings, compat, host_work
from tests.talker.driving import SMALL, Collector, Random, geometry_config, prompt


class Later:
    """Stands for a CUDA event: over when it was asked for the fourth time."""

    def __init__(self) -> None:
        self.left = 3

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_requests_that_come_while_the_host_waits_speak_as_alone(monkeypatch):
    from vllm.v1.worker import gpu_model_runner

    settings = TalkerSettings(**SMALL, scheduler_mode="async")
    given = {name: (prompt(i, 20 + 9 * i), SlotOptions(seed=i, max_frames=9 + 4 * i)) for i, name in enumerate("abcde")}
    with Talker(settings, Random(geometry_config())) as talker:
        expected = {}
        for name, request in given.items():
            talker.add(name, *request)
            expected[name] = Collector(talker).run()[name]

        class Slow(gpu_model_runner.AsyncGPUModelRunnerOutput):  # on CUDA vLLM's own waits for such an event
            def __init__(self, **kwargs) -> None:
                super().__init__(**kwargs)
                self.copy_event = Later()

            def get_output(self):
                self.copy_event.synchronize()
                return super().get_output()

        monkeypatch.setattr(gpu_model_runner, "AsyncGPUModelRunnerOutput", Slow)
        left, served = list("bcde"), []

        def serve() -> None:
            served.append(len(left))
            if left and len(served) % 5 == 0:
                talker.add(left[0], *given[left.pop(0)])

        talker.serve_while_waiting(serve)
        talker.add("a", *given["a"])
        assert talker.waited_s == 0
        collector = Collector(talker).run()
        assert talker.waited_s > len(served) * host_work.SERVE_S
    assert not left and len(served) > 30
    for name, outcome in expected.items():
        assert np.array_equal(collector[name].codes, outcome.codes) and collector[name].finish == outcome.finish


class FullAttentionManager(SimpleNamespace):
    """By this name vLLM's manager of blocks is known."""


def scheduler_of(kinds: list, asked: list, caching: bool = False) -> SimpleNamespace:
    manager = SimpleNamespace(enable_caching=caching, empty_kv_cache_blocks="none")
    manager.coordinator = SimpleNamespace(single_type_managers=kinds)
    manager.allocate_slots = lambda request, count, **others: (
        asked.append((request.num_computed_tokens, count)) or "some"
    )
    core = SimpleNamespace(scheduler=SimpleNamespace(kv_cache_manager=manager))
    host_work.spare_allocations(SimpleNamespace(engine_core=core))
    return manager


def test_vllm_is_asked_for_memory_when_a_block_is_full():
    blocks: dict[str, list[int]] = {"r": [1, 2]}  # 32 positions
    asked: list[tuple[int, int]] = []
    manager = scheduler_of([FullAttentionManager(req_to_blocks=blocks, block_size=16)], asked)
    request = SimpleNamespace(request_id="r", num_prompt_tokens=20, num_computed_tokens=0)
    assert manager.allocate_slots(request, 20) == "some"  # a prompt
    assert manager.allocate_slots(request, 1) == "some"  # the first row of one
    for computed in range(20, 32):
        request.num_computed_tokens = computed
        assert manager.allocate_slots(request, 1, num_lookahead_tokens=0) == "none"
    assert manager.allocate_slots(request, 1, num_lookahead_tokens=4) == "some"
    request.num_computed_tokens = 32
    assert manager.allocate_slots(request, 1) == "some"
    stranger = SimpleNamespace(request_id="s", num_prompt_tokens=1, num_computed_tokens=1)
    assert manager.allocate_slots(stranger, 1) == "some"
    assert asked == [(0, 20), (0, 1), (31, 1), (32, 1), (1, 1)]


def test_where_the_answer_depends_on_more_vllm_is_always_asked():
    kind = FullAttentionManager(req_to_blocks={"r": [1, 2]}, block_size=16)
    request = SimpleNamespace(request_id="r", num_prompt_tokens=4, num_computed_tokens=20)
    for kinds, caching in (([kind, kind], False), ([SimpleNamespace(**vars(kind))], False), ([kind], True)):
        asked: list[tuple[int, int]] = []
        assert scheduler_of(kinds, asked, caching).allocate_slots(request, 1) == "some" and asked == [(20, 1)]


def test_streams_that_cross_blocks_get_them():
    """The real scheduler: 80 frames pass several blocks of 32, and every block is free again afterwards."""
    with Talker(TalkerSettings(**SMALL), Random(geometry_config())) as talker:
        free = talker.free_kv_blocks
        for i in range(3):
            talker.add(str(i), prompt(i, 30 + i), SlotOptions(seed=i, max_frames=80, min_frames=80))
        collector = Collector(talker)
        for _ in range(60):
            collector.step()
        # positions so far, rounded up to blocks
        assert free - talker.free_kv_blocks == sum(-(-(30 + i + 60 - 1) // compat.CPU_BLOCK) for i in range(3))
        collector.run()
        assert talker.free_kv_blocks == free
        assert [collector.frames(str(i)) for i in range(3)] == [80] * 3


@pytest.mark.parametrize("direct", [False, True])
def test_the_sampler_passes_tokens_on_once_the_model_returns_them(direct):
    hooks = pytest.importorskip("engine.talker.hooks")
    calls: list[tuple] = []
    stock = SimpleNamespace(
        add_request=lambda *given: calls.append(given), apply_staged_writes=lambda: calls.append(("staged",)), other=7
    )
    sampler = hooks.TokenSampler(stock, SimpleNamespace(direct=direct))
    sampler.add_request(3, 10, "parameters")
    sampler.apply_staged_writes()
    assert calls == ([] if direct else [(3, 10, "parameters"), ("staged",)]) and sampler.other == 7
