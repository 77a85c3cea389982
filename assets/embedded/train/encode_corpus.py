"""The training speech as codes: codes.npz (codes int16 [versions, frames, groups], frame offsets) from a trained codec.

    python encode_corpus.py --corpus corpus --codec run/codec.safetensors --out corpus/codes.npz --versions 6

The first version is the speech as it is; in each further one all speakers have other formants and microphones
(sounds.py). A talker that met 4,900 speakers in one version knew them by heart after 10,000 steps.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import yaml
from codec_model import Codec, host_constants, import_state
from corpus import Corpus
from safetensors.torch import load_file
from sounds import Sound

SETTINGS = yaml.safe_load((Path(__file__).parent / "settings.yaml").read_text("utf-8"))


@torch.inference_mode()
def encode(codec: Codec, corpus: Corpus, sound: Sound | None, samples_in_batch: int = 24000 * 600) -> list[np.ndarray]:
    """Codes [frames, groups] of every clip, of speakers who sound otherwise (or not). Right padding does no harm: all
    is causal."""
    order = np.argsort(corpus.frames)
    out: list[np.ndarray] = [np.zeros(0)] * len(order)
    at = 0
    while at < len(order):
        frames = int(corpus.frames[order[min(at + 255, len(order) - 1)]])
        which = order[at : at + max(1, min(256, samples_in_batch // (frames * 1920)))]
        frames = int(corpus.frames[which].max())
        pcm = corpus.clips(which, frames)[:, None]
        if sound:
            pcm = sound.of(torch.from_numpy(corpus.speaker[which].astype(np.int64))).hear(pcm).clamp(-1, 1)
        codes = codec.encode(pcm).to(torch.int16).cpu().numpy()
        for row, clip in enumerate(which):
            out[clip] = codes[row, : corpus.frames[clip]]
        at += len(which)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, help="one folder of make_speech.py; the codes belong beside it")
    parser.add_argument("--codec", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--versions", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True  # for talkers good enough
    corpus = Corpus(args.corpus, args.device)
    codec = Codec(SETTINGS["codec"])
    import_state(codec, load_file(args.codec))
    codec.to(args.device).eval()
    host_constants(codec)
    speakers = int(corpus.speaker.max()) + 1
    sounds = [Sound.drawn(speakers, args.device, version) if version else None for version in range(args.versions)]
    every = np.stack([np.concatenate(encode(codec, corpus, sound)) for sound in sounds])
    stream = every[0]
    np.savez(args.out, codes=every, offset=np.concatenate([[0], np.cumsum(corpus.frames)]))
    usage = [len(np.unique(stream[:, g])) for g in range(stream.shape[1])]
    entropy = []
    for g in range(stream.shape[1]):
        share = np.bincount(stream[:, g], minlength=SETTINGS["codec"]["codebook_size"]) / len(stream)
        entropy.append(round(float(-(share * np.log2(share + 1e-12)).sum()), 2))
    size = f"{len(corpus.frames)} clips, {len(stream)} frames, {len(every)} versions"
    print(f"{size}; entries used {usage}; bits {entropy}", flush=True)


if __name__ == "__main__":
    main()
