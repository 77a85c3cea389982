"""Codes made after the talker's step equal codes made inside it; what a device cannot do is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from engine import wiring
from engine.config import EngineConfig
from engine.cuda_graphs import run_eagerly
from engine.errors import ConfigError
from engine.talker import SlotOptions, Talker, TalkerSettings
from tests.talker.driving import SMALL, Collector, Random, geometry_config, prompt

REFUSED = [
    ({"device": "cpu"}, "graph", "CPU has no CUDA graphs"),
    ({"device": "cpu"}, "own_graph", "CPU has no CUDA graphs"),
    ({"device": "cuda", "cudagraph": "none"}, "graph", "talker.cudagraph is none"),
    ({"device": "cpu"}, "outside", "must be one of auto, graph, own_graph, eager"),
]


@pytest.mark.parametrize(("changes", "placement", "words"), REFUSED)
def test_placements_a_device_cannot_do_are_refused(changes, placement, words):
    with pytest.raises(ConfigError) as refusal:
        TalkerSettings(**changes, predictor_placement=placement)
    assert refusal.value.field == "talker.predictor_placement" and words in refusal.value.message


@pytest.mark.parametrize("placement", ["auto", "own_graph", "eager"])
def test_placements_a_device_can_do(placement):
    TalkerSettings(device="cuda", predictor_placement=placement)
    TalkerSettings(device="cuda", predictor_placement=placement, cudagraph="none")
    TalkerSettings(device="cuda", predictor_placement="graph", cudagraph="decode")
    if placement != "own_graph":
        TalkerSettings(device="cpu", predictor_placement=placement)


def test_what_auto_means():
    """Graphs of its own where prompts run in graphs; the same codes at any load need the same kernels at any load."""
    assert TalkerSettings(device="cuda").placement == "own_graph"
    for changes in ({"cudagraph": "none"}, {"cudagraph": "decode"}, {"deterministic": True}):
        assert TalkerSettings(device="cuda", **changes).placement == "graph"
    assert TalkerSettings(device="cpu").placement == "graph"  # inside the step, which is no graph there
    assert TalkerSettings(device="cpu", predictor_placement="eager").placement == "eager"


def test_sizes_of_the_predictors_graphs():
    """Every small number of streams has a graph that it fills; the largest holds all seats."""
    assert TalkerSettings(device="cuda", max_num_seqs=7).predictor_sizes == [1, 2, 3, 4, 6, 7]
    assert TalkerSettings(device="cuda", max_num_seqs=64).predictor_sizes[-2:] == [48, 64]
    assert TalkerSettings(device="cuda", max_num_seqs=1000).predictor_sizes[-1] == 1000


def test_the_setting_of_the_engine_reaches_the_talker():
    config = EngineConfig.load(None, **{"talker.predictor_placement": "eager"})
    assert wiring.talker_settings(config, torch.device("cpu")).predictor_placement == "eager"
    with pytest.raises(ConfigError, match="no CUDA graphs"):
        wiring.talker_settings(config.replace(**{"talker.predictor_placement": "own_graph"}), torch.device("cpu"))
    with pytest.raises(ConfigError, match="predictor_placement"):
        EngineConfig.load(None, **{"talker.predictor_placement": "inside"})


def busy_scene(talker: Talker) -> dict[str, tuple[np.ndarray, str | None]]:
    """Ten requests on eight seats that join, end and are aborted at different times, one prefilled in pieces."""
    options = SlotOptions(seed=0, max_frames=14, temperature=1.1, top_p=0.95, subtalker_top_p=0.9)
    collector = Collector(talker)
    for turn in range(10):
        length = 280 if turn == 4 else 12 + 7 * turn
        frames = 4 + 2 * turn
        talker.add(str(turn), prompt(turn, length), dataclasses.replace(options, seed=turn, max_frames=frames))
        if turn % 2:
            collector.step()
    talker.add("gone", prompt(99, 30), options)
    collector.step()
    talker.abort("gone")
    collector.run()
    return {str(turn): (collector[str(turn)].codes, collector[str(turn)].finish) for turn in range(10)}


@pytest.mark.slow
@pytest.mark.parametrize("predictor", ["fused", "plain"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_after_the_step_equals_inside_it(mode, predictor):
    settings = SMALL | {"scheduler_mode": mode, "predictor": predictor, "max_num_batched_tokens": 160}
    with Talker(TalkerSettings(**settings), Random(geometry_config())) as talker:
        assert talker.model.after is None
        expected = busy_scene(talker)
    with Talker(TalkerSettings(**settings, predictor_placement="eager"), Random(geometry_config())) as talker:
        eager = busy_scene(talker)
        after = talker.model.after
        assert after is not None and after.stats["eager"] > 20 and after.stats["graph_hits"] == 0
        before = after.stats["eager"]
        after.capture([3, 1, 6], run_eagerly)  # as on CUDA, where "replay" runs over the same fixed buffers
        graphs = busy_scene(talker)
        # vLLM's warm-up on CUDA asks for the log-probabilities of whole prompts: more rows than requests
        counted, width = dict(after.stats), talker.geometry.talker.hidden
        assert after.speak(torch.zeros(len(after.rows) + 1, width)).tolist() == [0] * (len(after.rows) + 1)
        assert after.stats == counted
        # more than six rows fit no graph; fewer are filled up
        assert after.stats["graph_hits"] > 10 and after.stats["padded_rows"] > 0 and after.stats["eager"] > before
    for name, (codes, finish) in expected.items():
        for other in (eager, graphs):
            assert np.array_equal(other[name][0], codes), name
            assert other[name][1] == finish
    assert {len(codes) for codes, _ in expected.values()} != {0} and len(expected["9"][0]) > 2


@pytest.mark.slow
def test_the_step_beside_a_first_chunk_leaves_the_codec_room():
    """Where one row's predictor takes the whole device, the step after a prompt's takes the other kernels, no other."""
    with Talker(TalkerSettings(**SMALL, predictor_placement="eager"), Random(geometry_config())) as talker:
        after, step, seen = talker.model.after, talker.model.step, []
        speak = step.speak

        def watched(*args):
            seen.append(step.leaves_room)
            return speak(*args)

        step.speak, step.crowds = watched, lambda rows: rows == 1
        after.capture([1, 2], run_eagerly)
        assert not step.leaves_room
        roomy, kept = dict(after._roomy), []
        assert list(roomy) == [1]  # of two rows there is one kind
        after._roomy[1] = lambda: (kept.append(len(seen)), roomy[1]())
        hidden = torch.zeros(1, talker.geometry.talker.hidden)
        with torch.inference_mode():
            for prompt_rows, steps in ((True, 1), (False, 3), (True, 2), (False, 2)):
                after.prompt = prompt_rows
                for _ in range(steps):
                    after.speak(hidden)
            after.prompt = True
            after.speak(hidden)
            after.prompt = False
            after.speak(torch.zeros(2, hidden.shape[1]))
            after.speak(hidden)
        assert len(seen) == 11 and kept == [1, 5, 6]
