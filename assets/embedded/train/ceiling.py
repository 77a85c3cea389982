"""What likeness the codec leaves: Kokoro says other sentences with the held-out voices; plain, and through the codec.

    python ceiling.py --onnx kokoro-f32.onnx --voices-dir voices           # from the project's root

A talker that says what it is trained to say sounds as much like its reference as this. (A clip of the reference's own
words flatters, as GE2E hears the words, too: 0.855 where other words had 0.785.) Also how far the codec's mean power
lies from the speech's in each band.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import evaluate  # puts the project's root on the path
import numpy as np
import onnxruntime
import torch
from phonemes import Phonemizer, ids

from engine.codec.codec import Codec
from engine.speaker import mel_filters
from eval import datasets, similarity, speakers

VOICES = {
    "Emma": ("bf_emma",),
    "Daniel": ("bm_daniel",),
    "Puck": ("am_puck",),
    "River": ("af_river",),
    "River and Emma": ("af_river", "bf_emma"),
    "Puck and Daniel": ("am_puck", "bm_daniel"),
}
SENTENCES = 8  # of each voice, no two of them the same
LEVEL = 10 ** (-23 / 20)


class Kokoro:
    def __init__(self, onnx_file: Path, voices: Path) -> None:
        self.session = onnxruntime.InferenceSession(str(onnx_file), providers=["CPUExecutionProvider"])
        self.voices, self.phonemize = voices, Phonemizer()

    def say(self, text: str, names: tuple[str, ...]) -> np.ndarray:
        """PCM at 24 kHz without the silence around it, -23 dBFS; the mean of several voices."""
        said = ids(self.phonemize([text], names[0].startswith("b"))[0])
        rows = [np.fromfile(self.voices / f"{name}.bin", "<f4").reshape(510, 256)[len(said) - 1] for name in names]
        given = np.array([[0, *said, 0]]), np.mean(rows, 0, dtype=np.float32)[None], np.ones(1, np.float32)
        inputs = {slot.name: value for slot, value in zip(self.session.get_inputs(), given, strict=True)}
        pcm = self.session.run(None, inputs)[0].ravel()
        loud = np.flatnonzero(np.abs(pcm) > 0.01 * np.abs(pcm).max())
        pcm = pcm[max(0, loud[0] - 1200) : loud[-1] + 2400].astype(np.float32)
        return pcm * LEVEL / np.sqrt(np.square(pcm).mean())


def levels(pcm: np.ndarray) -> np.ndarray:
    """Mean power in 32 bands, dB."""
    spectrum = torch.stft(torch.from_numpy(pcm), 1024, 256, window=torch.hann_window(1024), return_complex=True)
    mel = mel_filters() @ spectrum.abs().square().mean(1).numpy()
    return 10 * np.log10(mel.reshape(32, 4).sum(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=evaluate.ROOT / "assets/embedded")
    parser.add_argument("--onnx", type=Path, required=True)
    parser.add_argument("--voices-dir", type=Path, required=True)
    args = parser.parse_args()
    kokoro = Kokoro(args.onnx, args.voices_dir)
    codec = Codec.load(args.model, "cpu", torch.float32)
    references = {name: voice.pcm() for name, voice in evaluate.held_out_voices().items()}
    judges = {name: similarity.References(speakers.load(name), references) for name in ("ge2e", "dvector")}
    texts = [u.text for u in datasets.load("english", limit=SENTENCES * len(VOICES)).utterances]
    found, bands = [], []
    print("                  GE2E plain, codec  d-vector plain, codec")
    for number, (name, names) in enumerate(VOICES.items()):
        rows = []
        for text in texts[number * SENTENCES : (number + 1) * SENTENCES]:
            pcm = kokoro.say(text, names)
            codes = torch.from_numpy(codec.encode(pcm)).T[None].long()
            with torch.no_grad():
                again = codec.decoder(codes)[0, 0, : len(pcm)].numpy()
            both = pcm, again
            rows.append([judge.compare(name, x, evaluate.RATE).whole for judge in judges.values() for x in both])
            bands.append(levels(again) - levels(pcm))
        print(f"{name:18s}" + "".join(f"{x:10.3f}" for x in np.mean(rows, 0)), flush=True)
        found += rows
    print("mean              " + "".join(f"{x:10.3f}" for x in np.mean(found, 0)))
    print("level of the codec's bands, dB: " + " ".join(f"{x:.1f}" for x in np.mean(bands, 0)))


if __name__ == "__main__":
    main()
