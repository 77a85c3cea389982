"""The mean of several trainings' weights, which is often better than each (arXiv 2203.05482): of decoders or talkers
that went on from one another, with one set of codes.

    python average.py --codec codec-start.safetensors,codec.safetensors --out mean.safetensors
    python average.py --checkpoint before,after --out mean        # of the talkers in folders of export.py
"""

from __future__ import annotations

import argparse
import shutil
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


def average_talkers(folders: list[Path], out: Path) -> None:
    """Checkpoints whose talkers went on from one another -> the first one with the mean talker; ValueError where they
    do not have the same codec."""
    codec = Path("speech_tokenizer/model.safetensors")
    if len({(folder / codec).read_bytes() for folder in folders}) > 1:
        raise ValueError("checkpoints with different codecs: their codes mean different sounds")
    shutil.copytree(folders[0], out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("train"))
    for file in sorted(out.glob("model-*.safetensors")):
        states = [load_file(folder / file.name) for folder in folders]
        means = {k: torch.stack([state[k].float() for state in states]).mean(0) for k in states[0]}
        save_file({k: v.to(states[0][k].dtype) for k, v in means.items()}, file, metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--codec", help="codec.safetensors of train_codec.py, two or more (comma list)")
    which.add_argument("--checkpoint", help="folders of export.py, two or more (comma list)")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.checkpoint:
        average_talkers([Path(folder) for folder in args.checkpoint.split(",")], args.out)
        return
    save_file(average([load_file(path) for path in args.codec.split(",")]), args.out)


if __name__ == "__main__":
    main()
