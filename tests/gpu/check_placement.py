"""On a CUDA machine: codes and step times with the predictor inside the talker's graph, in its own, and eagerly.

    python3 tests/gpu/check_placement.py

1.7B geometry, random weights, bfloat16. Same helpers and output as check_talker.py.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from engine.talker import SlotOptions
from tests.gpu.check_talker import LINES, milliseconds, prompt, result, run, start, stop

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
            for batch in BATCHES:
                for index in range(batch):
                    talker.add(str(index), prompt(index, 150), SlotOptions(seed=index, max_frames=60, min_frames=60))
                times: list[float] = []
                last = None
                while talker.busy:
                    if talker.step():
                        now = time.perf_counter()
                        times += [now - last] if last else []
                        last = now
                result(f"{placement}: decode step, batch {batch}: {milliseconds(times[10:-3])} ms")
            if talker.model.after is not None:
                result(f"{placement}: {talker.model.after.stats}")
        finally:
            stop(talker)
    print("\n" + "\n".join(LINES))


if __name__ == "__main__":
    main()
