"""Voices as far from the middle as their references: a talker drifts towards the mean voice while it speaks.

    python set_apart.py --model DIR --corpus corpus --texts heldout.txt --out OTHER-DIR      # from the project's root

Speaks with the vector of every clip of a small corpus (`make_speech.py --limit 48 --device cpu`), hears what vector the
speech has, and finds which share of a vector's distance from the mean comes back. The speaker encoder's last layer is
then scaled about that mean by the reverse of the share, or by `--factor`: the checkpoint keeps its format and size.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[3]
RATE = 24000
WEIGHT, BIAS = "speaker_encoder.fc.weight", "speaker_encoder.fc.bias"


def share_kept(given: np.ndarray, heard: np.ndarray) -> float:
    """given, heard [clips, width]: how much of the vectors' distances from their mean is there again, in their own
    directions (1: all of it)."""
    x, y = given - given.mean(0), heard - heard.mean(0)
    return float((x * y).sum() / (x * x).sum())


def set_apart(weights: dict[str, Tensor], mean: np.ndarray, factor: float) -> dict[str, Tensor]:
    """Weights under the published names whose speaker vectors v are mean + factor * (v - mean)."""
    weight, bias = weights[WEIGHT], weights[BIAS]
    moved = factor * bias.float() + (1 - factor) * torch.from_numpy(mean)
    return weights | {WEIGHT: (factor * weight.float()).to(weight.dtype), BIAS: moved.to(bias.dtype)}


def vectors(model: Path, corpus: Path, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Of every clip longer than 1.5 s: its vector, and that of a sentence spoken with it; both [clips, width]."""
    sys.path.insert(0, str(ROOT))
    from engine.engine import Engine
    from engine.request import SpeechRequest

    clips, stream = np.load(corpus / "clips.npz"), np.load(corpus / "pcm.npy", mmap_mode="r")
    engine = Engine.from_config(str(ROOT / "configs/embedded.yaml"), model=str(model))
    given, heard = [], []
    for number, (start, samples) in enumerate(zip(clips["start"], clips["samples"], strict=True)):
        if samples < 1.5 * RATE:
            continue
        voice = engine.prepare_voice(np.array(stream[start : start + samples]), RATE)
        made = engine.stream(SpeechRequest(text=texts[number % len(texts)], voice=voice, seed=number))
        pcm = np.concatenate([chunk.pcm for chunk in made])
        given.append(voice.speaker_embedding)
        heard.append(engine.prepare_voice(pcm, RATE).speaker_embedding)
    engine.close()
    return np.stack(given), np.stack(heard)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint of export.py")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True, help="one sentence a line")
    parser.add_argument("--factor", type=float, help="default: what makes up for the share that is lost")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    sentences = [line for line in args.texts.read_text("utf-8").splitlines() if 7 < len(line.split()) < 12]
    given, heard = vectors(args.model, args.corpus, sentences)
    kept = share_kept(given, heard)
    factor = args.factor or 1 / kept
    shutil.copytree(args.model, args.out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("train"))
    for file in sorted(args.out.glob("model-*.safetensors")):
        weights = load_file(file)
        if WEIGHT in weights:
            save_file(set_apart(weights, given.mean(0), factor), file, metadata={"format": "pt"})
    print(f"{len(given)} clips: {kept:.2f} of a vector's distance from the mean is heard again; scaled by {factor:.2f}")


if __name__ == "__main__":
    main()
