"""Makes the codec's encoder hear rough recordings as it hears clean ones, without changing any code's meaning.

    python train_encoder.py --corpus corpus --codec run/codec.safetensors --out run/encoder.safetensors --seconds 180

The encoder learns to give, for a recording with noise, a room, a narrow band or another tone colour, the codes that the
encoder of --codec gives for the clean clip (distillation). Codebooks and decoder stay as they are, so talkers and
decoders trained with these codes fit as before. Out: --codec with the new encoder, float16.
"""

from __future__ import annotations

import argparse
import math
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml
from codec_model import Codec, export_state, host_constants, import_state
from corpus import Corpus, reverberate, roughen
from safetensors.torch import load_file, save_file
from torch import Tensor

SETTINGS = yaml.safe_load((Path(__file__).parent / "settings.yaml").read_text("utf-8"))


def code_loss(latents: list[Tensor], codec: Codec, codes: Tensor, sharpness: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the codes [B, T, groups], each group's residual taken behind the right codes; share that is
    right. sharpness: of each group, one over the mean squared distance of the teacher's residuals."""
    losses, right, group = [], [], 0
    for x, book in zip(latents, codec.books, strict=True):
        residual = x
        for table in book.vectors():
            distance = table.square().sum(-1) - 2 * residual @ table.T
            logits = -sharpness[group] * distance
            target = codes[..., group]
            losses.append(F.cross_entropy(logits.flatten(0, 1), target.flatten()))
            right.append((logits.argmax(-1) == target).float().mean())
            residual = residual - F.embedding(target, table)
            group += 1
    return torch.stack(losses), torch.stack(right)


def residual_sizes(latents: list[Tensor], codec: Codec, codes: Tensor) -> Tensor:
    """Mean squared distance of the latents to their own entries, of each group: [groups]."""
    sizes, group = [], 0
    for x, book in zip(latents, codec.books, strict=True):
        residual = x
        for table in book.vectors():
            residual = residual - F.embedding(codes[..., group], table)
            sizes.append(residual.square().sum(-1).mean())
            group += 1
    return torch.stack(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--codec", type=Path, required=True, help="the teacher; its decoder is kept")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    t, device = SETTINGS["encoder_training"], torch.device(args.device)
    torch.manual_seed(5)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    corpus = Corpus(args.corpus, device)
    teacher, codec = (Codec(SETTINGS["codec"]) for _ in range(2))
    for model in (teacher, codec):
        import_state(model, load_file(args.codec))
        model.to(device)
        host_constants(model)
    parts = (codec.seanet, codec.transformer, codec.downsample, codec.project)
    weights = [p for part in parts for p in part.parameters()]
    adam = torch.optim.AdamW(weights, lr=1e-4, betas=(0.9, 0.99), weight_decay=1e-3)
    average = [p.detach().clone() for p in weights]
    began, step, sharpness = time.time(), 0, None
    while (spent := time.time() - began) < args.seconds and step < args.steps:
        rate = (
            t["learning_rate"]
            * min(1.0, (step + 1) / 100)
            * (0.02 + 0.98 * math.cos(0.5 * math.pi * spent / args.seconds))
        )
        for group in adam.param_groups:
            group["lr"] = rate
        clean = corpus.crops(t["batch"], t["crop_frames"])[0][:, :1]
        rough = roughen(reverberate(clean, t["rooms"]), t["roughen"])
        with torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else nullcontext():
            with torch.no_grad():
                truth = teacher.latents(clean)
                codes = torch.cat([book(x)[1] for book, x in zip(teacher.books, truth, strict=True)], -1)
            latents = codec.latents(rough)
        if sharpness is None:
            sharpness = 1 / residual_sizes(truth, teacher, codes)
        losses, right = code_loss(latents, teacher, codes, sharpness)
        near = torch.stack([(a - b).square().mean() / b.square().mean() for a, b in zip(latents, truth, strict=True)])
        # The first group carries the words; far from the right entry the others would drown it.
        loss = losses[0] + 0.05 * losses[1:].mean() + near.sum()
        adam.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        adam.step()
        step += 1
        with torch.no_grad():
            torch._foreach_lerp_(average, weights, max(0.005, 1 / step))
        if step % 100 == 0 or step == 1:
            shown = [round(x, 3) for x in right.tolist()]
            print(f"{spent:.0f}s {step} loss {loss.item():.3f} far {near.tolist()} right {shown}", flush=True)
            if not math.isfinite(loss.item()):
                raise SystemExit("the loss is not finite")
    for own, value in zip(weights, average, strict=True):
        own.data.copy_(value)
    trained = {k: v for k, v in export_state(codec).items() if k.startswith("encoder.")}
    kept = {k: v for k, v in load_file(args.codec).items() if not k.startswith("encoder.") or ".codebook." in k}
    save_file({**{k: v.half() for k, v in trained.items()}, **kept}, args.out)
    print(f"saved after {step} steps", flush=True)


if __name__ == "__main__":
    main()
