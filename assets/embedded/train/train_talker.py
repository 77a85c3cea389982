"""Trains talker, code predictor and speaker encoder together for a given time.

    python train_talker.py --corpus corpus --codec run/codec.safetensors --pack pack --out run --seconds 540 --end 0.7
    python train_talker.py ... --seconds 240 --begin 0.7 --resume run/talker.pt
    torchrun --nproc-per-node 2 train_talker.py ...    # on two GPUs (together.py)

Needs corpus/codes.npz (encode_corpus.py). `--resume` also takes the shipped model-*.safetensors files (comma list).
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from examples import Examples
from profiling import profile
from talker_trainer import SETTINGS, Trainer
from together import Together
from torch.utils.data import DataLoader

from engine.codec.layers import SnakeBeta


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, help="folder with codes.npz, or several (comma list)")
    parser.add_argument("--pack", type=Path, required=True, help="folder with tokens.npz (bpe.py)")
    parser.add_argument("--codec", type=Path, required=True, help="whose codes they are")
    parser.add_argument("--voice-judge", type=Path, help="weights of voice_judge.py: with the loss `unlike`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", type=Path, help="folder of the float16 weights; default: --out")
    parser.add_argument("--resume")
    parser.add_argument("--reset", help="weights that start anew all the same: 'model.' for the talker's layers")
    parser.add_argument("--plain", action="store_true", help="no recorded steps")
    parser.add_argument("--profile", action="store_true", help="print the ten slowest operations of five steps, stop")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--begin", type=float, default=0.0)
    parser.add_argument("--end", type=float, default=1.0)
    parser.add_argument("--save-every", type=float, default=120.0)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    args.small = args.small or args.out
    together = Together(args.device)
    torch.manual_seed(7 + int(args.begin * 1000) + 100_000 * together.rank)  # others learn from other examples
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.enable_cudnn_sdp(False)  # plans anew for each shape: 160 ms a step
    if args.voice_judge and args.device == "cuda" and not args.plain:
        import snake  # Triton

        snake.fuse(SnakeBeta)
    data = Examples(SETTINGS, args.corpus, args.pack)
    validation = list(Examples(SETTINGS, args.corpus, args.pack, held_back=True, batches=6))
    loader = DataLoader(
        data,
        batch_size=None,
        num_workers=args.workers,
        prefetch_factor=8 if args.workers else None,
        pin_memory=args.device == "cuda",
    )
    batches = iter(loader)
    first = next(batches)  # the workers start before the device is used
    trainer = Trainer(args, len(data.codes), together)
    trainer.talker.train()
    if args.profile:
        profile(lambda: trainer.step(next(batches), 0.0))
        return
    began = shown = time.time()
    saved = 0.0
    start = trainer.steps
    while (spent := together.agreed(time.time() - began)) < args.seconds and trainer.steps - start < args.steps:
        progress = args.begin + (args.end - args.begin) * spent / args.seconds
        log = trainer.step(first if trainer.steps == start else next(batches), progress)
        if trainer.steps % 200 == 0 or trainer.steps - start in (1, 20):
            values = {k: round(v.item(), 3) for k, v in log.items() if v.ndim == 0}
            if not math.isfinite(values["code0"]):
                raise SystemExit(f"step {trainer.steps}: the loss is {values}; the last save is good")
            rate = (time.time() - shown) / 200 * 1000
            if together.rank == 0:
                print(f"{spent:.0f}s {trainer.steps} p{progress:.3f} {rate:.0f}ms {values}", flush=True)
            shown = time.time()
        if spent - saved > args.save_every:
            trainer.save(validation)
            saved = spent
    trainer.save(validation)
    together.end()


if __name__ == "__main__":
    main()
