"""On a CUDA machine: codes and step times with the predictor inside the talker's graph, in its own, and eagerly.

    python3 tests/gpu/check_placement.py

1.7B geometry, random weights, bfloat16. Same helpers and output as check_talker.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from engine.talker import SlotOptions
from tests.gpu.check_talker import LINES, prompt, result, run, speed, start, stop

BATCHES = (1, 16, 64)


def main() -> None:
    print("device", torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    expected = None
    for placement in ("graph", "own_graph", "eager"):
        talker = start(predictor_placement=placement, self_check=False)
        try:
            talker.add("one", prompt(1, 150), SlotOptions(seed=5, max_frames=60, min_frames=60))
            codes = run(talker)["one"]
            expected = codes if expected is None else expected
            equal = bool(torch.equal(codes, expected))
            result(
                f"{placement}: {len(codes)} frames, equal to inside the graph: {equal}, start {talker.start_s:.1f} s"
            )
            speed(talker, placement, BATCHES, 60)
            if talker.model.after is not None:
                result(f"{placement}: {talker.model.after.stats}")
        finally:
            stop(talker)
    print("\n" + "\n".join(LINES))


if __name__ == "__main__":
    main()
