"""The talker's own behaviour, on random weights: seeds, limits, slots, refusals, the end of things."""

from __future__ import annotations

import dataclasses
import tempfile

import numpy as np
import pytest
import torch

from engine.errors import ConfigError, EngineClosed, InvalidRequest
from engine.talker import PromptRows, SlotOptions, SlotsFull, Talker, TalkerSettings
from tests.talker.driving import SMALL, Collector, Random, geometry_config, prompt

pytestmark = pytest.mark.slow

OPTIONS = SlotOptions(seed=7, max_frames=12)


def options(**changes) -> SlotOptions:
    return dataclasses.replace(OPTIONS, **changes)


@pytest.fixture(scope="module")
def talker():
    with Talker(TalkerSettings(**SMALL), Random(geometry_config())) as talker:
        yield talker


def alone(talker: Talker, rows: PromptRows, opts: SlotOptions):
    talker.add("alone", rows, opts)
    return Collector(talker).run()["alone"]


def test_sampled_request_beside_five_others_equals_alone(talker):
    """The same seed, the same codes: alone, again, after others, beside others that come and go."""
    mine = options(seed=123, max_frames=24, min_frames=24, temperature=1.1, top_p=0.9, subtalker_top_p=0.95)
    expected = alone(talker, prompt(1, 40), mine)
    assert np.array_equal(alone(talker, prompt(1, 40), mine).codes, expected.codes)
    collector = Collector(talker)
    for other in range(3):
        talker.add(f"early {other}", prompt(50 + other, 15 + 9 * other), options(seed=other, max_frames=9 + other))
    collector.step()
    talker.add("mine", prompt(1, 40), mine)
    for other in range(2):
        collector.step()
        talker.add(f"late {other}", prompt(70 + other, 30), options(seed=9 + other, do_sample=False))
    collector.run()
    assert np.array_equal(collector["mine"].codes, expected.codes)
    different = alone(talker, prompt(1, 40), dataclasses.replace(mine, seed=124))
    assert not np.array_equal(different.codes, expected.codes)


@pytest.mark.parametrize("frames", [1, 2, 13])
def test_length_yields_exactly_max_frames(talker, frames):
    outcome = alone(talker, prompt(2, 20), options(max_frames=frames, min_frames=frames))
    assert outcome.codes.shape == (frames, 16) and outcome.finish == "length"
    assert outcome.codes.dtype == np.int64
    assert 0 <= outcome.codes.min() and outcome.codes.max() < 96


def test_end_is_blocked_before_min_frames(talker):
    """With the end made all but certain by a flat distribution over few codes, min_frames alone decides."""
    head, eos = talker.model.step.head, talker.geometry.eos
    saved = head.copy()
    try:
        head[:] = 0.0  # all codes alike, so one draw in 97 is the end
        for least in (2, 40):
            lengths = [
                len(alone(talker, prompt(3, 9), options(seed=s, max_frames=200, min_frames=least, top_k=0)).codes)
                for s in range(6)
            ]
            assert min(lengths) >= least
            assert len(set(lengths)) > 1, "the end never came by chance"
    finally:
        head[:] = saved
    assert eos == 96 + 102


def test_greedy_ignores_the_seed(talker):
    greedy = options(do_sample=False, subtalker_do_sample=False)
    first = alone(talker, prompt(4, 25), greedy)
    second = alone(talker, prompt(4, 25), dataclasses.replace(greedy, seed=99))
    assert np.array_equal(first.codes, second.codes)
    cold = alone(talker, prompt(4, 25), options(temperature=0.0, subtalker_temperature=0.0))
    assert np.array_equal(first.codes, cold.codes)


def test_trailing_rows_matter_until_they_are_used_up(talker):
    greedy = options(do_sample=False, subtalker_do_sample=False, min_frames=12)
    rows = prompt(5, 20, trailing=6)
    base = alone(talker, rows, greedy).codes
    changed = rows.trailing.clone()
    changed[3] += 5.0
    other = alone(talker, PromptRows(rows.prefill, changed, rows.pad), greedy).codes
    differ = (base != other).any(axis=1)
    assert not differ[:4].any() and differ[4:].any()  # row 3 enters with frame 3, so frame 4 is the first to hear it
    longer = torch.cat([rows.trailing, rows.pad[None].expand(5, -1)])
    assert np.array_equal(alone(talker, PromptRows(rows.prefill, longer, rows.pad), greedy).codes, base)


def test_fifty_aborts_leave_nothing_behind(talker):
    slots, blocks = talker.free_slots, talker.free_kv_blocks
    expected = alone(talker, prompt(6, 30), OPTIONS)
    for turn in range(50):
        collector = Collector(talker)
        talker.add("stays", prompt(6, 30), OPTIONS)
        talker.add("goes", prompt(7, 10 + 5 * turn), options(max_frames=100))
        for _ in range(turn % 7):
            collector.step()
        before = talker.free_slots
        assert talker.abort("goes") and talker.free_slots == before + 1
        assert not talker.abort("goes")
        collector.run()
        assert np.array_equal(collector["stays"].codes, expected.codes)
        assert (talker.free_slots, talker.free_kv_blocks) == (slots, blocks)


def test_blocks_are_free_right_after_an_abort(talker):
    blocks = talker.free_kv_blocks
    talker.add("goes", prompt(8, 100), options(max_frames=100))
    talker.step()
    assert talker.free_kv_blocks < blocks
    talker.abort("goes")
    assert talker.free_kv_blocks == blocks
    Collector(talker).run()


def test_an_id_may_be_used_again_at_once(talker):
    expected = alone(talker, prompt(9, 20), OPTIONS)
    talker.add("name", prompt(8, 100), options(max_frames=50))
    talker.step()
    talker.abort("name")
    talker.add("name", prompt(9, 20), OPTIONS)
    assert np.array_equal(Collector(talker).run()["name"].codes, expected.codes)


def test_more_requests_than_seats_wait_their_turn(talker):
    expected = {seed: alone(talker, prompt(seed, 12), options(seed=seed)).codes for seed in range(16)}
    for seed in range(16):
        talker.add(str(seed), prompt(seed, 12), options(seed=seed))
    assert talker.free_slots == 0
    with pytest.raises(SlotsFull):
        talker.add("one too many", prompt(0, 12), OPTIONS)
    collector = Collector(talker).run()
    assert talker.free_slots == 16
    for seed, codes in expected.items():
        assert np.array_equal(collector[str(seed)].codes, codes)


REFUSED = {
    "prefill width": (lambda p: PromptRows(p.prefill[:, :9], p.trailing, p.pad), {}, "prefill"),
    "no rows": (lambda p: PromptRows(p.prefill[:0], p.trailing, p.pad), {}, "prefill"),
    "trailing rank": (lambda p: PromptRows(p.prefill, p.trailing[0], p.pad), {}, "trailing"),
    "integer pad": (lambda p: PromptRows(p.prefill, p.trailing, p.pad.long()), {}, "pad"),
    "not finite": (lambda p: PromptRows(p.prefill / 0, p.trailing, p.pad), {}, "prefill"),
    "too long": (lambda p: prompt(0, 301), {}, "prefill"),
    "too many frames": (lambda p: p, {"max_frames": 257}, "max_frames"),
    "beyond the model": (lambda p: prompt(0, 250), {"max_frames": 200}, "max_frames"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_cost_nothing(talker, case):
    change, extra, field = REFUSED[case]
    free = talker.free_slots, talker.free_kv_blocks
    talker.add("running", prompt(1, 20), OPTIONS)
    collector = Collector(talker)
    collector.step()
    with pytest.raises(InvalidRequest) as refusal:
        talker.add("bad", change(prompt(1, 20)), options(**extra))
    assert refusal.value.field == field and refusal.value.message
    with pytest.raises(InvalidRequest) as twice:
        talker.add("running", prompt(1, 20), OPTIONS)
    assert twice.value.field == "id"
    collector.run()
    assert collector["running"].finish
    assert (talker.free_slots, talker.free_kv_blocks) == free


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_modes_give_the_same_codes_and_nothing_lies_about(mode, talker, tmp_path, monkeypatch):
    """A killed process cannot tidy up: what vLLM starts from is gone before the first request."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seeds = range(5)
    expected = {seed: alone(talker, prompt(seed, 18 + seed), options(seed=seed)) for seed in seeds}
    other = Talker(TalkerSettings(**SMALL, scheduler_mode=mode), Random(geometry_config()))
    assert not list(tmp_path.glob("chorus-*"))
    for seed in seeds:
        other.add(str(seed), prompt(seed, 18 + seed), options(seed=seed))
    collector = Collector(other).run()
    for seed in seeds:
        assert np.array_equal(collector[str(seed)].codes, expected[seed].codes)
        assert collector[str(seed)].finish == expected[seed].finish
    other.close()
    other.close()
    with pytest.raises(EngineClosed):
        other.add("late", prompt(0, 10), OPTIONS)
    with pytest.raises(EngineClosed):
        other.step()
    assert not other.busy
    # one engine's end leaves others of the process alone
    assert np.array_equal(alone(talker, prompt(0, 18), options(seed=0)).codes, expected[0].codes)


def test_eight_groups_and_equal_widths():
    """Other geometry: 8 groups, no projection between talker and predictor; fused and plain agree."""
    config, outcomes = geometry_config(width=128, groups=8, head_dim=64, kv_heads=4), []
    for predictor in ("fused", "plain"):
        with Talker(TalkerSettings(**SMALL, predictor=predictor), Random(config)) as talker:
            outcomes.append(alone(talker, prompt(1, 30), options(min_frames=12)))
    assert outcomes[0].codes.shape == (12, 8)
    assert np.array_equal(outcomes[0].codes, outcomes[1].codes)


def test_too_little_kv_memory_is_refused_before_anything_is_loaded():
    settings = TalkerSettings(**SMALL, kv_cache_memory_bytes=1000)
    with pytest.raises(ConfigError) as refusal:
        Talker(settings, Random(geometry_config()))
    assert refusal.value.field == "talker.kv_cache_memory_bytes"
