"""The mean of several trainings' weights, which is often better than each (arXiv 2203.05482): of decoders that went on
from one another, with one set of codes.

    python average.py --codec codec-start.safetensors,codec.safetensors --out mean.safetensors
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def average(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Codecs under the published names, float16 -> the same; ValueError where anything but the decoder differs, for
    then they do not have the same codes."""
    first, out = states[0], {}
    for name, value in first.items():
        others = [state[name] for state in states]
        if name.startswith("decoder."):
            out[name] = torch.stack([x.float() for x in others]).mean(0).half()
        elif all(torch.equal(x, value) for x in others):
            out[name] = value
        else:
            raise ValueError(f"{name} differs: codecs of different codes cannot be averaged")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", required=True, help="codec.safetensors of train_codec.py, two or more (comma list)")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    save_file(average([load_file(path) for path in args.codec.split(",")]), args.out)


if __name__ == "__main__":
    main()
