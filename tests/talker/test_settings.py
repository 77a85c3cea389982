"""Settings and options: what is refused, and with which field."""

from __future__ import annotations

import pytest
import torch

from engine.config import EngineConfig
from engine.cuda_graphs import captures_on
from engine.errors import CheckpointError, ConfigError, InvalidRequest
from engine.talker import PromptRows, SlotOptions, SlotsFull, TalkerSettings
from engine.talker.geometry import TalkerGeometry
from engine.talker.settings import AUTO_LAYERS, AUTO_PREDICTOR
from engine.talker.slots import LAST_ROW, PROMPT_LEN, SEED, TEMPERATURE, TOP_K, SlotBuffers, SlotPool
from engine.wiring import talker_settings
from tests.talker.driving import geometry_config, prompt


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"scheduler_mode": "eager"}, "scheduler_mode"),
        ({"dtype": "float16"}, "dtype"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_model_len": True}, "max_model_len"),
        ({"slots": 4, "max_num_seqs": 8}, "slots"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16}, "max_num_batched_tokens"),
        ({"deterministic": True}, "deterministic"),
        ({"device": "cuda", "deterministic": True, "predictor": "skinny"}, "predictor"),
        ({"device": "cuda", "deterministic": True, "predictor": "persistent"}, "predictor"),
        ({"predictor": "skinnier"}, "predictor"),
        ({"device": "cuda", "deterministic": True, "layers": "skinny"}, "layers"),
        ({"predictor": "plain", "layers": "skinny"}, "layers"),
        ({"layers": "fused"}, "layers"),
        ({"predictor_weights": "fp4"}, "predictor_weights"),
        ({"device": "cuda", "capture_sizes": ()}, "capture_sizes"),
        ({"device": "cuda", "capture_sizes": (0, 4)}, "capture_sizes"),
    ],
)
def test_settings_refused(changes, field):
    with pytest.raises(ConfigError) as refusal:
        TalkerSettings(**changes)
    assert refusal.value.field == f"talker.{field}" and field in refusal.value.message


def test_what_auto_means_for_the_predictor():
    assert TalkerSettings(predictor="plain").predictor_path == "plain"
    assert TalkerSettings().predictor_path == AUTO_PREDICTOR == "persistent"
    assert TalkerSettings(device="cuda", deterministic=True).predictor_path == "fused"


def test_what_auto_means_for_the_layers():
    assert TalkerSettings(layers="skinny").layers_path == "skinny"
    assert TalkerSettings().layers_path == AUTO_LAYERS == "paged"
    for other in ({"device": "cuda", "deterministic": True}, {"predictor": "plain"}):
        assert TalkerSettings(**other).layers_path == "separate"
    config = EngineConfig.load(None, **{"talker.layers": "skinny"})
    assert talker_settings(config, torch.device("cpu")).layers == "skinny"
    with pytest.raises(ConfigError, match="layers"):
        EngineConfig.load(None, **{"talker.layers": "fused"})


def test_graph_sizes():
    sizes = (1, 2, 4, 64, 160, 5000)
    common = {"device": "cuda", "capture_sizes": sizes, "max_num_seqs": 24}
    assert TalkerSettings(**common).graph_sizes == [1, 4, 24, 64, 160]
    assert TalkerSettings(**common, cudagraph="decode").graph_sizes == [1, 2, 4, 24]


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"max_frames": 0}, "max_frames"),
        ({"min_frames": -1}, "min_frames"),
        ({"seed": 1.5}, "seed"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"subtalker_top_p": 1.1}, "subtalker_top_p"),
        ({"subtalker_top_k": -1}, "subtalker_top_k"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": "high"}, "repetition_penalty"),
        ({"temperature": 5.1}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"do_sample": 1}, "do_sample"),
        ({"subtalker_do_sample": None}, "subtalker_dosample"),
    ],
)
def test_options_refused(changes, field):
    with pytest.raises(InvalidRequest) as refusal:
        SlotOptions(**({"seed": 0, "max_frames": 10} | changes))
    assert refusal.value.field == field


@pytest.mark.parametrize(
    "path, value, field",
    [
        (("hidden_size",), None, "talker_config.hidden_size"),
        (("num_key_value_heads",), 3, "talker_config.num_key_value_heads"),
        (("codec_eos_token_id",), 99_999, "talker_config.codec_eos_token_id"),
        (("num_code_groups",), 1, "talker_config.num_code_groups"),
        (("code_predictor_config",), None, "talker_config.code_predictor_config"),
        (("code_predictor_config", "vocab_size"), "many", "talker_config.code_predictor_config.vocab_size"),
    ],
)
def test_geometry_refused(path, value, field):
    config = geometry_config()
    inner = config["talker_config"]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(CheckpointError) as refusal:
        TalkerGeometry.from_config(config)
    assert refusal.value.field == field


def test_rope_theta_is_found_in_both_places():
    config = geometry_config()
    del config["talker_config"]["rope_theta"]
    config["talker_config"]["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    geometry = TalkerGeometry.from_config(config)
    assert geometry.talker.rope_theta == 5e5 and geometry.predictor.rope_theta == 1e6


def test_pool_gives_every_slot_once():
    pool = SlotPool(3)
    taken = [pool.take() for _ in range(3)]
    assert sorted(taken) == [1, 2, 3] and len(pool) == 0
    with pytest.raises(SlotsFull):
        pool.take()
    pool.give(2)
    assert pool.take() == 2


@pytest.fixture
def buffers():
    geometry = TalkerGeometry.from_config(geometry_config())
    return SlotBuffers(geometry, 3, 40, 20, torch.device("cpu"), torch.float32)


def test_a_slot_is_written_whole(buffers):
    buffers.codes.fill_(5)
    buffers.seen_at.fill_(0)
    rows = prompt(0, 30, trailing=8)
    buffers.write(2, 77, rows, SlotOptions(seed=(1 << 64) - 3, max_frames=20, top_k=0, do_sample=False))
    assert torch.equal(buffers.rows[2, :39], torch.cat([rows.prefill, rows.trailing, rows.pad[None]]))
    integers = buffers.integers[2].tolist()
    assert (integers[PROMPT_LEN], integers[LAST_ROW], integers[SEED]) == (30, 38, -3)
    assert integers[TOP_K] == buffers.vocab and buffers.reals[2, TEMPERATURE] == 0
    assert (buffers.codes[2] == -1).all() and (buffers.seen_at[2] > 1 << 29).all()
    assert (buffers.codes[1] == 5).all() and (buffers.codes[3] == 5).all()


def test_text_rows_past_the_last_frame_need_no_room(buffers):
    rows = prompt(0, 30, trailing=500)
    fits = SlotOptions(seed=0, max_frames=10)
    buffers.check(rows, fits)
    buffers.write(1, 1, rows, fits)
    assert buffers.integers[1, LAST_ROW] == 40
    with pytest.raises(InvalidRequest):
        buffers.check(rows, SlotOptions(seed=0, max_frames=11))


def test_half_precision_prompts_are_taken(buffers):
    rows = prompt(0, 10)
    half = PromptRows(rows.prefill.half(), rows.trailing.half(), rows.pad.half())
    buffers.check(half, SlotOptions(seed=0, max_frames=10))
    buffers.write(1, 1, half, SlotOptions(seed=0, max_frames=10))
    assert torch.equal(buffers.rows[1, :10], half.prefill.float())


@pytest.mark.parametrize(("trailing", "max_frames"), [(8, 20), (20, 20), (25, 6), (0, 3)])
def test_a_prompt_in_parts_is_written_as_the_whole_one(buffers, trailing, max_frames):
    """Parts end wherever they like; trailing rows past the last frame are left out before the pad row."""
    whole = prompt(0, 12, trailing=trailing)
    rows = torch.cat([whole.prefill, whole.trailing, whole.pad[None]])
    parts = PromptRows.joined([rows[:5], rows[5:14], rows[14:]], 12, whole.pad, finite=True)
    assert (parts.length, parts.trailing_count) == (12, trailing)
    assert torch.equal(parts.prefill, whole.prefill) and torch.equal(parts.trailing, whole.trailing)
    options = SlotOptions(seed=1, max_frames=max_frames)
    for slot, written in ((1, whole), (2, parts)):
        buffers.check(written, options)
        buffers.write(slot, 9, written, options)
    last = int(buffers.integers[1, LAST_ROW])
    assert torch.equal(buffers.integers[1], buffers.integers[2])
    assert torch.equal(buffers.rows[1, : last + 1], buffers.rows[2, : last + 1])


def test_a_prompt_known_to_hold_what_is_not_finite_is_refused(buffers):
    rows = torch.zeros(6, buffers.rows.shape[-1])
    with pytest.raises(InvalidRequest):
        buffers.check(PromptRows.joined([rows], 5, rows[0], finite=False), SlotOptions(seed=0, max_frames=4))


def test_whose_kernels_go_first():
    assert TalkerSettings(device="cuda").goes_first
    assert not TalkerSettings(device="cuda", stream_priority="normal").goes_first
    assert not TalkerSettings(stream_priority="high").goes_first  # the CPU has no streams
    with pytest.raises(ConfigError, match="stream_priority"):
        TalkerSettings(stream_priority="low")


def test_graphs_that_name_no_stream_are_captured_on_the_one_given():
    """vLLM's: a graph's kernels keep the priority of the stream that they were captured on."""
    before, stream = torch.cuda.graph.default_capture_stream, object()
    with pytest.raises(ZeroDivisionError), captures_on(stream):
        assert torch.cuda.graph.default_capture_stream is stream
        raise ZeroDivisionError
    with captures_on(None):
        assert torch.cuda.graph.default_capture_stream is before
    assert torch.cuda.graph.default_capture_stream is before
