"""Trains the codec for a given time; goes on from a checkpoint, or from the shipped weights.

    python train_codec.py --corpus corpus --out run --seconds 380 --begin 0 --end 0.45
    python train_codec.py --corpus corpus --out run --seconds 500 --begin 0.45 --end 1 --resume run/codec.pt
    torchrun --nproc-per-node 2 train_codec.py ...     # on two GPUs (together.py)

`--begin` and `--end` are shares of the whole training: they place this stretch on the learning-rate curve and decide
what learns (settings.yaml: discriminate_from, freeze_from).
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from codec_trainer import Trainer
from profiling import profile
from together import Together

from engine.codec.layers import SnakeBeta


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, help="folder of make_speech.py, or several (comma list)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the full checkpoint")
    parser.add_argument("--small", type=Path, help="folder of codec.safetensors, judge.safetensors; default: --out")
    parser.add_argument(
        "--resume",
        type=Path,
        help="codec.pt of an earlier stretch, or its codec.safetensors",
    )
    parser.add_argument(
        "--respread", action="store_true", help="new acoustic latents for a collapsed encoder (spread.py)"
    )
    parser.add_argument(
        "--encoder-first", type=float, default=0.0, help="so many seconds without the decoder: what the codes tell"
    )
    parser.add_argument("--voice-judge", type=Path, help="weights of voice_judge.py: with the loss `stranger`")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--begin", type=float, default=0.0)
    parser.add_argument("--end", type=float, default=1.0)
    parser.add_argument("--save-every", type=float, default=120.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", action="store_true", help="print the ten slowest operations of a step, stop")
    parser.add_argument("--plain", action="store_true", help="plain torch: no kernels of snake.py, no recorded steps")
    parser.add_argument(
        "--side-by-side", action="store_true", help="discriminators and mel scales on streams of their own (GPU)"
    )
    args = parser.parse_args()
    args.small = args.small or args.out
    together = Together(args.device)
    torch.manual_seed(int(args.begin * 1000) + 1000 * together.rank)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    if together.device.type == "cuda" and not args.plain:
        import snake

        snake.fuse(SnakeBeta)
    trainer = Trainer(args, together)
    if args.profile:
        profile(lambda: trainer.step(args.begin))
        return
    began, shown, saved, first = time.time(), time.time(), 0.0, trainer.steps
    while (spent := together.agreed(time.time() - began)) < args.seconds and trainer.steps - first < args.steps:
        progress = args.begin + (args.end - args.begin) * spent / args.seconds
        trainer.encoder_only = spent < args.encoder_first
        log = trainer.step(progress)
        if trainer.steps % 100 == 0 or trainer.steps - first in (1, 10):
            values = {k: round(v.item(), 3) for k, v in log.items()}
            if not math.isfinite(sum(values.values())):
                raise SystemExit(f"step {trainer.steps}: the loss is {values}; the last save is good")
            used = [(book.counts > 0.1).float().mean().item() for book in trainer.codec.books]
            rate = (time.time() - shown) / 100 * 1000
            head = f"{spent:.0f}s {trainer.steps} p{progress:.3f} {rate:.0f}ms used {used[0]:.2f} {used[1]:.2f}"
            if together.rank == 0:
                print(head, values, flush=True)
            shown = time.time()
        if spent - saved > args.save_every:
            trainer.save()
            saved = spent
    trainer.save()
    together.end()


if __name__ == "__main__":
    main()
