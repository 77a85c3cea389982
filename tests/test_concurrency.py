"""Sixteen voices at once on the real engine: each as good as alone, and nobody waits for another's end.

Then one setting brings back what vllm-omni #3163 measured, the staircase of first chunks.
"""

from __future__ import annotations

import json
import logging
from itertools import pairwise

import numpy as np
import pytest

from engine.request import SpeechRequest
from tests.conftest import small_engine_config
from tests.processes import SLOTS, shared_process
from tests.streams import codes_of, requests, together

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def process():
    return shared_process()


def test_sixteen_streams_sound_as_each_alone(process):
    """vllm-omni #4370: with two requests in flight the first seconds came in another caller's voice."""
    wanted = requests(process, 16, 14)
    mixed, _, results = together(process, wanted)
    for i, request in enumerate(wanted):
        again = SpeechRequest(**{**vars(request), "id": f"alone-{i}"})
        [alone], _, [result] = together(process, [again])
        assert (result.frames, result.finish_reason) == (results[i].frames, results[i].finish_reason)
        assert len(mixed[i]) == len(alone) == result.frames * 1920
        # Other codes would be off by the whole signal; sums in another order are off by rounding.
        np.testing.assert_allclose(mixed[i], alone, atol=1e-3, err_msg=f"stream {i}, seed {request.seed}")
    for i in range(15):  # the check would see a mix-up
        n = min(len(mixed[i]), len(mixed[i + 1]))
        assert np.abs(mixed[i][:n] - mixed[i + 1][:n]).max() > 1e-2


def test_sixteen_streams_have_the_codes_of_each_alone(tmp_path, caplog):
    from engine.engine import Engine

    trace = tmp_path / "trace.jsonl"
    caplog.set_level(logging.INFO, "chorus.engine")
    config = small_engine_config(**{"talker.max_num_seqs": 16, "trace": str(trace)})
    with Engine.from_config(config) as engine:
        wanted = requests(engine, 16, 14)
        mixed = codes_of(engine, wanted)
        for i, request in enumerate(wanted):
            [alone] = codes_of(engine, [SpeechRequest(**{**vars(request), "id": f"alone-{i}"})])
            assert np.array_equal(mixed[i], alone), f"stream {i}, seed {request.seed}"
        assert min(len(codes) for codes in mixed) >= 2
        assert len({codes[:2].tobytes() for codes in mixed}) == 16  # the check would see a mix-up
    assert f"settings {config.hash}: {{" in caplog.text and '"max_num_seqs": 16' in caplog.text
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert lines[0]["config"] == config.hash and lines[0]["settings"]["talker"]["max_num_seqs"] == 16
    steps = [line for line in lines if line["event"] == "step"]
    assert sum(step["prefills"] for step in steps) == 32 and max(step["streams"] for step in steps) == 16


def test_every_first_chunk_comes_before_any_stream_ends(process):
    _, times, results = together(process, requests(process, 16, 40))
    waits = sorted(1e3 * (t[0] - r.submitted_at) for t, r in zip(times, results, strict=True))
    print("\nms to the first chunk, each chunk on its own:", " ".join(f"{w:.0f}" for w in waits))
    assert max(t[0] for t in times) < min(t[-1] for t in times)


def test_admission_1_brings_the_staircase_back(process):
    process.restart(small_engine_config(**{"talker.max_num_seqs": SLOTS, "codec.admission": 1}))
    _, times, results = together(process, requests(process, 8, 30))
    waits = [1e3 * (t[0] - r.submitted_at) for t, r in zip(times, results, strict=True)]
    print("\nms to the first chunk, one stream holds the codec:", " ".join(f"{w:.0f}" for w in sorted(waits)))
    spans = sorted((t[0], t[-1]) for t in times)
    for (_, end), (start, _) in pairwise(spans):
        assert start >= end  # each waits for the whole utterance before it
