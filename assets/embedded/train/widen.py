"""A codec with wider layers that makes the same sound at first: to go on from smaller weights. Layers that
settings.yaml no longer names are left out.

    python widen.py --codec old.safetensors --out wider.safetensors       # widths: settings.yaml

What is there keeps its place in every tensor; what is new starts as in a new model, but nothing old listens to it yet
(Net2Net, arXiv 1511.05641, without copies). Codebooks get zeros; `train_codec.py --respread` gives the new coordinates
of the acoustic latents their directions and begins the acoustic codebooks anew.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import yaml
from codec_model import Codec, export_state, import_state
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

SETTINGS = yaml.safe_load((Path(__file__).parent / "settings.yaml").read_text("utf-8"))


def placed(old: Tensor, fresh: Tensor, transposed: bool) -> Tensor:
    """`old` in the first places of `fresh`; old outputs take nothing from new inputs."""
    out = fresh.clone()
    if old.dim() > 1:
        had, new = (slice(n) for n in old.shape[:2]), (slice(n, None) for n in old.shape[:2])
        (rows, columns), (more_rows, more_columns) = had, new
        out[(more_rows, columns) if transposed else (rows, more_columns)] = 0
    out[tuple(slice(n) for n in old.shape)] = old
    return out


def widened(state: dict[str, Tensor], settings: dict) -> dict[str, Tensor]:
    codec = Codec(settings)
    transposed = {
        f"decoder.{name}.weight" for name, m in codec.decoder.named_modules() if isinstance(m, nn.ConvTranspose1d)
    }
    out = {}
    for name, fresh in export_state(codec).items():
        old = state[name].float()
        if old.shape == fresh.shape:
            out[name] = old
            continue
        still = "embed" in name or name.endswith("input_proj.weight")
        out[name] = placed(old, torch.zeros_like(fresh) if still else fresh, name in transposed)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    state = widened(load_file(args.codec), SETTINGS["codec"])
    import_state(Codec(SETTINGS["codec"]), state)  # fits
    save_file({k: v.half() for k, v in state.items()}, args.out)


if __name__ == "__main__":
    main()
