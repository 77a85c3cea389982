"""Scores of the embedded voice, through the engine, on the CPU: the table of the model card.

    python assets/embedded/train/evaluate.py codec                # from the project's root: the codec alone
    python assets/embedded/train/evaluate.py speech --limit 20 --seeds 3

The recognisers and speaker encoders are those of eval/ (their weights come from packages; see eval/models.py). Eight
voices that training never heard: the bundled ones, and blends of two of them (half of each of Kokoro's styles).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
import yaml

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from engine.audio import load_audio  # noqa: E402
from eval import asr, datasets, mos, similarity, speakers, wer  # noqa: E402
from eval.normalize import WhisperEnglish  # noqa: E402

HELD_OUT = ("kokoro_af_river", "kokoro_am_puck", "kokoro_bf_emma", "kokoro_bm_daniel", "human_")
BLENDS = (
    (
        "River and Emma",
        "river_emma.flac",
        "The tide had gone out early, and along the wet sand three children were looking for shells before breakfast.",
    ),
    (
        "Puck and Daniel",
        "puck_daniel.flac",
        "By noon the market was full, so we left our bicycles near the bridge and walked the rest of the way.",
    ),
)
RATE = 24000
# Samples of silence before a clip: how it lies on the codec's frames decides over words that are hard to hear, and one
# clip of one voice was found at 50, 5, 23 and 23 %.
ALIGNMENTS = (0, 480, 960, 1440)


def held_out_voices() -> dict[str, datasets.Reference]:
    voices = {name: v for name, v in datasets.bundled_voices().items() if v.file.stem.startswith(HELD_OUT)}
    folder = Path(__file__).parent / "held_out"
    return voices | {name: datasets.Reference(name, folder / file, text) for name, file, text in BLENDS}


def mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def judge_sound(clips: list[tuple[str, np.ndarray]], references: dict[str, datasets.Reference]) -> dict[str, float]:
    """clips: (name of the reference, PCM) -> similarity and predicted MOS, means."""
    known = similarity.References(speakers.load("ge2e"), {name: r.pcm() for name, r in references.items()})
    compared = [(own, known.compare(own, pcm, RATE)) for own, pcm in clips]
    for name in references:
        likeness = mean([c.whole for own, c in compared if own == name and c.whole is not None])
        right = mean([float(c.nearest == own) for own, c in compared if own == name])
        print(f"{name}: GE2E {likeness:.2f}, right voice {right:.2f}")
    scores = {"GE2E cosine": mean([c.whole for _, c in compared if c.whole is not None])}
    scores["right voice nearest"] = mean([float(c.nearest == own) for own, c in compared])
    # Training may have listened to this one (voice_judge.py), so it is no judge of how alike they are.
    trained = similarity.References(speakers.load("dvector"), {name: r.pcm() for name, r in references.items()})
    compared = [(own, trained.compare(own, pcm, RATE)) for own, pcm in clips]
    scores["d-vector cosine"] = mean([c.whole for _, c in compared if c.whole is not None])
    scores["right voice nearest, d-vector"] = mean([float(c.nearest == own) for own, c in compared])
    for name, key in (("dnsmos", "ovrl"), ("distillmos", "")):
        predictor = mos.load(name)
        found = [mos.predict(predictor, pcm, RATE) for _, pcm in clips]
        values = [v for f in found for k, v in f.items() if key in k.lower()]
        scores[f"{name} {key}".strip()] = mean(values)
    return scores


def codec(args: argparse.Namespace) -> dict[str, float]:
    from engine.codec.codec import Codec

    model = Codec.load(args.model, "cpu", torch.float32)
    recogniser, normalizer = asr.load("tiny.en"), WhisperEnglish()
    voices = held_out_voices()
    before, after, unmoved, clips = [], [], [], []
    for name, voice in voices.items():
        pcm = load_audio(str(voice.file)).pcm

        def rate(sound: np.ndarray, said: str = voice.transcript) -> float:
            heard = recogniser.transcribe(sound, RATE)
            return wer.score(said, heard.text, normalizer, no_speech=heard.no_speech).rate

        again = []
        for silence in ALIGNMENTS:
            codes = torch.from_numpy(model.encode(np.pad(pcm, (silence, 0)))).T[None].long()
            with torch.no_grad():
                again.append(model.decoder(codes)[0, 0, silence : silence + len(pcm)].float().numpy())
        rates = [rate(sound) for sound in again]
        clips.append((name, again[0]))
        before.append(rate(pcm))
        unmoved.append(rates[0])
        after.append(mean(rates))
        print(f"{name}: WER {before[-1]:.2f} -> {after[-1]:.2f} ({', '.join(f'{r:.2f}' for r in rates)})", flush=True)
    scores = {"WER before": mean(before), "WER after": mean(after), "WER after, unmoved": mean(unmoved)}
    return {**scores, **judge_sound(clips, voices)}


def speech(args: argparse.Namespace) -> dict[str, float]:
    from engine.engine import Engine
    from engine.request import SpeechRequest

    voices = held_out_voices()
    texts = datasets.load(args.texts, limit=args.limit).utterances
    changes = {key: yaml.safe_load(value) for key, value in (pair.split("=", 1) for pair in args.set)}
    engine = Engine.from_config(str(ROOT / "configs/embedded.yaml"), model=str(args.model), **changes)
    prompts = {name: engine.prepare_voice(str(v.file), transcript=v.transcript) for name, v in voices.items()}
    made, names = [], list(voices)
    for seed in range(args.seeds):
        for number, text in enumerate(texts):
            name = names[(number + seed) % len(names)]
            vector = (number // len(names) + seed) % 2 == 0  # every voice both ways
            stream = engine.stream(SpeechRequest(text=text.text, voice=prompts[name], x_vector_only=vector, seed=seed))
            pcm = np.concatenate([np.zeros(1, np.float32), *[chunk.pcm for chunk in stream]])
            made.append((name, text, vector, pcm, stream.result))
    engine.close()
    recogniser, normalizer = asr.load("tiny.en"), WhisperEnglish()
    rates = []
    for name, text, vector, pcm, result in made:
        heard = recogniser.transcribe(pcm, RATE)
        rates.append(wer.score(text.text, heard.text, normalizer, no_speech=heard.no_speech).rate)
        how = "x-vector" if vector else "in context"
        print(f"{rates[-1]:.2f} {name} ({how}) {result.finish_reason}: {text.text} | {heard.text}", flush=True)
    results = [result for *_, result in made]
    bad = [r > 0.5 or not result.ok for r, result in zip(rates, results, strict=True)]
    return {
        "utterances": len(made),
        "WER": mean(rates),
        "WER, x-vector": mean([r for r, m in zip(rates, made, strict=True) if m[2]]),
        "WER, in context": mean([r for r, m in zip(rates, made, strict=True) if not m[2]]),
        "WER above 50 % or no end": mean([float(b) for b in bad]),
        "x real time": mean([r.x_real_time for r in results]),
        **judge_sound([(name, pcm) for name, _, _, pcm, _ in made], voices),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("codec", "speech"))
    parser.add_argument("--model", type=Path, default=ROOT / "assets/embedded")
    parser.add_argument("--texts", default="english", help="a prompt list of eval/")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an engine setting (speech)")
    args = parser.parse_args()
    scores = codec(args) if args.what == "codec" else speech(args)
    for name, value in scores.items():
        print(f"{name:30s} {value:.3f}")


if __name__ == "__main__":
    main()
