"""Where likeness is lost: clips of held-out voices said again by the talker, after frames that are the clip's own.

    python where_lost.py --pack pack             # from the project's root; pack: for the tokenizer's fixed ids

Of each frame the first k code groups are the clip's, the others what the talker holds likeliest after the clip's frames
so far (x-vector, streaming layout); k = 8 is the codec alone. What speech of the talker's own (evaluate.py speech) has
less than k = 0 is lost because it hears itself.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import evaluate  # puts the project's root on the path
import numpy as np
import torch
import yaml
from layout import Example, Ids, build
from safetensors.torch import load_file
from talker_model import Talker, control_ids, import_state

from engine.audio import load_audio
from engine.codec.codec import Codec
from engine.speaker import mel_spectrogram
from eval import similarity, speakers

SETTINGS = yaml.safe_load((Path(__file__).parent / "settings.yaml").read_text("utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=evaluate.ROOT / "assets/embedded")
    parser.add_argument("--pack", type=Path, required=True)
    args = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer, fixed = AutoTokenizer.from_pretrained(str(args.model)), np.load(args.pack / "tokens.npz")
    names = fixed["special"]
    ids = Ids(fixed["role"], int(names[3]), int(names[4]), int(names[5]), control_ids(SETTINGS))
    talker = Talker(SETTINGS, speakers=1).eval()
    files = sorted(args.model.glob("model-*.safetensors"))
    import_state(talker, {k: v for file in files for k, v in load_file(file).items()})
    codec = Codec.load(args.model, "cpu", torch.float32)
    voices = evaluate.held_out_voices()
    known = similarity.References(speakers.load("ge2e"), {name: v.pcm() for name, v in voices.items()})
    table = []
    print("true groups: " + " ".join(f"{k:5d}" for k in range(talker.groups, -1, -1)))
    for name, voice in voices.items():
        pcm = load_audio(str(voice.file)).pcm
        codes = codec.encode(pcm)  # [frames, groups]
        text = tokenizer(f"<|im_start|>assistant\n{voice.transcript}")["input_ids"][3:]
        rows = build(ids, Example(np.array(text), codes))
        batch = {key: torch.from_numpy(value)[None] for key, value in rows.items()}
        with torch.no_grad():
            states = talker(batch, talker.speaker_encoder(mel_spectrogram(torch.from_numpy(pcm)[None])))[0]
        hidden = states[-len(codes) - 1 : -1]
        row = []
        for first in range(talker.groups, -1, -1):
            with torch.no_grad():
                made = talker.complete(hidden, torch.from_numpy(codes[:, :first]))
                sound = codec.decoder(made.T[None])[0, 0].numpy()
            row.append(known.compare(name, sound, evaluate.RATE).whole)
        table.append(row)
        print(f"{name:16s}" + " ".join(f"{x:.3f}" for x in row), flush=True)
    print("mean            " + " ".join(f"{x:.3f}" for x in np.mean(table, 0)))


if __name__ == "__main__":
    main()
