"""Each prompt in a step of its own: what steps hold, that the codes stay, and that nobody waits for ever."""

from __future__ import annotations

import numpy as np
import pytest

from engine.talker import SlotOptions, Talker, TalkerSettings
from tests.talker.driving import SMALL, Collector, Random, geometry_config, prompt

pytestmark = pytest.mark.slow
PROMPTS = (12, 40, 280, 33, 150, 20, 60, 25, 31, 18)  # rows; the third comes in two pieces; two wait for a seat


def scene(talker: Talker) -> tuple[dict[str, np.ndarray], list[list[tuple[bool, int]]]]:
    """Ten requests on eight seats -> their codes; and of each step, for each of its requests, whether it still reads
    its prompt, and its tokens."""
    scheduler = talker._client.engine_core.scheduler
    steps, original = [], scheduler.schedule

    def schedule(*args, **kwargs):
        before = {name: request.num_computed_tokens for name, request in scheduler.requests.items()}
        output = original(*args, **kwargs)
        steps.append(
            [
                (before[name] < scheduler.requests[name].num_prompt_tokens, count)
                for name, count in output.num_scheduled_tokens.items()
            ]
        )
        return output

    scheduler.schedule = schedule
    collector = Collector(talker)
    try:
        for turn, rows in enumerate(PROMPTS):
            options = SlotOptions(seed=turn, max_frames=6 + 3 * turn, min_frames=6 + 3 * turn, temperature=1.1)
            talker.add(str(turn), prompt(turn, rows), options)
            if turn % 3 == 2:
                collector.step()
        collector.run()
    finally:
        del scheduler.schedule
    return {str(turn): collector[str(turn)].codes for turn in range(len(PROMPTS))}, [step for step in steps if step]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_prompt_shares_its_step_with_nobody(mode, monkeypatch):
    settings = TalkerSettings(**SMALL, scheduler_mode=mode, max_num_batched_tokens=160)
    with Talker(settings, Random(geometry_config())) as talker:
        expected, mixed = scene(talker)
    monkeypatch.setattr(TalkerSettings, "one_prompt_a_step", True)
    with Talker(settings, Random(geometry_config())) as talker:
        codes, steps = scene(talker)
        assert talker.free_slots == settings.slot_count
    assert any(len(step) > 1 and any(reads for reads, _ in step) for step in mixed)  # vLLM's own way
    assert all(len(step) == 1 for step in steps if any(reads for reads, _ in step))
    assert sum(count for step in steps for reads, count in step if reads) == sum(PROMPTS)
    assert max(len(step) for step in steps) > 4  # the rest is spoken together
    for name, wanted in expected.items():
        assert np.array_equal(codes[name], wanted), name


def test_with_little_memory_the_running_ones_go_on_until_there_is_some(monkeypatch):
    """Room for one and a half requests of full length: prompts wait for blocks, some are read again."""
    monkeypatch.setattr(TalkerSettings, "one_prompt_a_step", True)
    token = 2 * 2 * 2 * 32 * 4  # keys and values, layers, heads, width, bytes
    settings = TalkerSettings(**SMALL, kv_cache_memory_bytes=18 * 32 * token)
    with Talker(settings, Random(geometry_config())) as talker:
        for turn in range(6):
            options = SlotOptions(seed=turn, max_frames=90, min_frames=90)
            talker.add(str(turn), prompt(turn, 100), options)
        collector = Collector(talker).run()
        assert {len(collector[str(turn)].codes) for turn in range(6)} == {90}
        assert talker.free_slots == settings.slot_count


def test_only_deterministic_engines_do_so():
    assert not TalkerSettings().one_prompt_a_step
    assert TalkerSettings(device="cuda", deterministic=True).one_prompt_a_step
