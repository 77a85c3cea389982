"""Sixteen streams of eight voices at once on a CUDA machine, against each alone (tests/test_concurrency.py, there).

    python -m tests.gpu.check_concurrency [--model assets/embedded] [--dtypes float32,bfloat16] [--streams 16]
    python -m tests.gpu.check_concurrency --dtypes bfloat16 --set talker.deterministic=true    # then all are equal

Prints one JSON line per dtype, beginning with `result`. In 16 bits a batch of another size rounds otherwise, and two
codes that were nearly as likely may change places, after which the streams part; what must hold there as well is that
no stream has another's codes. So: equal frames from the start, in the mean and at least; streams whose nearest run
alone, by the codes of all frames and of the first second, is their own.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
import yaml

from engine.engine import Engine
from engine.request import FRAMES_PER_SECOND, SpeechRequest
from tests.streams import codes_of, requests


def equal_start(a: np.ndarray, b: np.ndarray) -> int:
    """Frames [n, G] before the first that differs."""
    n = min(len(a), len(b))
    same = (a[:n] == b[:n]).all(1)
    return n if same.all() else int(same.argmin())


def alike(a: np.ndarray, b: np.ndarray, frames: int) -> float:
    """Share of equal codes among the first `frames`."""
    n = min(len(a), len(b), frames)
    return float((a[:n] == b[:n]).mean())


def check(model: str, dtype: str, streams: int, changes: dict) -> dict:
    settings = {"talker.max_num_seqs": streams, "dtype": dtype} | changes
    with Engine.from_config("configs/embedded.yaml", model=model, **settings) as engine:
        wanted = requests(engine, streams, 14)
        mixed = codes_of(engine, wanted)
        alone = []
        for i, request in enumerate(wanted):
            alone += codes_of(engine, [SpeechRequest(**{**vars(request), "id": f"alone-{i}"})])
        metrics = engine.metrics()
    starts = [equal_start(a, b) / min(len(a), len(b)) for a, b in zip(mixed, alone, strict=True)]
    own = {}
    for name, frames in (("whole", 10**9), ("first_second", round(FRAMES_PER_SECOND))):
        likeness = np.array([[alike(a, b, frames) for b in alone] for a in mixed])
        own[name] = int((likeness.argmax(1) == np.arange(streams)).sum())
    return {
        "dtype": dtype,
        "settings": changes,
        "streams": streams,
        "equal_streams": sum(np.array_equal(a, b) for a, b in zip(mixed, alone, strict=True)),
        "equal_share_mean": round(float(np.mean(starts)), 3),
        "equal_share_min": round(min(starts), 3),
        "nearest_is_own": own,
        "metrics": {name: value for name, value in metrics.items() if "graph" in name or "eager" in name},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="assets/embedded")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    changes = {key: yaml.safe_load(value) for key, value in (pair.split("=", 1) for pair in args.set)}
    for dtype in args.dtypes.split(","):
        print("result", json.dumps(check(args.model, dtype, args.streams, changes)), flush=True)


if __name__ == "__main__":
    main()
