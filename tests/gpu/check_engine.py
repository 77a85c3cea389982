"""The whole engine on a CUDA machine, random weights of a published geometry: does it run, and how fast is a first cut?

    python -m tests.gpu.check_engine [--model dummy:1.7b-base] [--streams 1,16,64]

Prints one JSON line per cell, beginning with `result`. In-process: no HTTP. Output length is fixed (50 frames).
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
import traceback

import numpy as np

from engine.engine import Engine
from engine.request import FRAMES_PER_SECOND, SpeechRequest
from engine.voices import VoicePrompt

TEXT = "The ferry leaves at seven and comes back before the lights go out."


def random_voice(engine: Engine, seed: int, frames: int) -> VoicePrompt:
    """A voice of random numbers: geometry is all that matters to random weights."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, engine.codec.decoder.codebook_size, (frames, engine.info.groups))
    embedding = rng.normal(0, 0.02, engine.prompts.hidden).astype(np.float32)
    return VoicePrompt(embedding, codes, "some words of a reference clip", f"random-{seed}", frames / FRAMES_PER_SECOND)


def cell(engine: Engine, voices: list[VoicePrompt], streams: int, frames: int) -> dict:
    """`streams` requests at once, each `frames` long."""
    results = [None] * streams

    def run(i: int) -> None:
        request = SpeechRequest(
            TEXT, voice=voices[i % len(voices)], seed=i, max_frames=frames, min_frames=frames, language="english"
        )
        stream = engine.stream(request)
        stream.read_all()
        results[i] = stream.result

    started = time.monotonic()
    threads = [threading.Thread(target=run, args=(i,)) for i in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.monotonic() - started
    first = sorted(r.ttfa_ms for r in results if r is not None and r.ttfa_ms is not None)
    return {
        "streams": streams,
        "ttfa_ms_p50": round(statistics.median(first), 1),
        "ttfa_ms_max": round(first[-1], 1),
        "x_real_time": round(sum(r.audio_s for r in results if r) / wall, 1),
        "reasons": sorted({r.finish_reason for r in results if r}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="dummy:1.7b-base")
    parser.add_argument("--config", default="configs/balanced.yaml")
    parser.add_argument("--streams", default="1,16,64")
    parser.add_argument("--frames", type=int, default=50)
    args = parser.parse_args()
    counts = [int(n) for n in args.streams.split(",")]
    started = time.monotonic()
    engine = Engine.from_config(args.config, model=args.model, **{"talker.max_num_seqs": max(counts)})
    print("result", json.dumps({"start_s": round(time.monotonic() - started, 1), "device": engine.info.device_name}))
    try:
        voices = [random_voice(engine, i, 100) for i in range(8)]
        cell(engine, voices, min(4, max(counts)), 10)  # warm-up: kernels compile, voices are primed
        for streams in counts:
            for _ in range(2):
                print("result", json.dumps(cell(engine, voices, streams, args.frames)), flush=True)
        print("result", json.dumps(engine.metrics()))
    except Exception:
        traceback.print_exc()
    finally:
        engine.close()


if __name__ == "__main__":
    main()
