"""Many requests at once, and what each of them was given."""

from __future__ import annotations

import numpy as np

from engine.request import SpeechRequest

WORDS = "one two three four five six seven eight".split()


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


def codes_of(engine, wanted):
    """int64 [frames, G] of each request, all submitted at once: what the talker hands to the codec."""
    codes = {request.id: [] for request in wanted}
    stage, produced = engine._loop._codec, engine._loop._codec.produced

    def watched(job, new, *, ended):
        codes[job.id].append(new)
        produced(job, new, ended=ended)

    stage.produced = watched
    try:
        together(engine, wanted)
    finally:
        del stage.produced
    return [np.concatenate(codes[request.id]) for request in wanted]
