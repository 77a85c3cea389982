"""Sixteen voices at once on the real engine: each as good as alone, and nobody waits for another's end.

Then one setting brings back what vllm-omni #3163 measured, the staircase of first chunks.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from engine.request import SpeechRequest
from tests.conftest import small_engine_config
from tests.processes import SLOTS, shared_process

pytestmark = pytest.mark.slow
WORDS = "one two three four five six seven eight".split()


@pytest.fixture(scope="module")
def process():
    return shared_process()


def requests(process, count, frames):
    """Eight voices in turn, every text, seed and length of its own; half of them by x-vector alone."""
    names = [entry.name for entry in process.voices.list()]
    voices = [(name, x_vector) for x_vector in (False, True) for name in names][:8]
    assert len(set(voices)) == 8
    return [
        SpeechRequest(
            f"Number {WORDS[i % 8]}, and {' '.join(WORDS[: 1 + i % 5])}.",
            voice=voices[i % 8][0],
            x_vector_only=voices[i % 8][1],
            seed=100 + i,
            max_frames=frames + 3 * i,
        )
        for i in range(count)
    ]


def together(process, wanted):
    """PCM, emission times and result of each request, all submitted at once."""
    streams = [process.stream(request) for request in wanted]
    heard = [list(stream) for stream in streams]
    pcm = [np.concatenate([chunk.pcm for chunk in chunks]) for chunks in heard]
    times = [[chunk.emitted_at for chunk in chunks] for chunks in heard]
    return pcm, times, [stream.result for stream in streams]


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
