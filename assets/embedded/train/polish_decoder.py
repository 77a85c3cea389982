"""A last pass over the decoder alone: the right loudness and voice, everything else as it was. For a CPU.

    python polish_decoder.py --clips FOLDER --codec run/codec.safetensors --listener run/judge.safetensors \\
        --voice-judge dvector.safetensors --out polished.safetensors --seconds 1500

FOLDER holds any speech (wav, flac, ogg, opus, or tar files of such). Adversarial training gives the decoder its
texture, but left bands several dB too low, and a voice is told by its spectral envelope. Here no discriminator asks for
anything: the mean power of 160 ms in mel bands is put right (`level_loss`), and the direction of the complex spectra
stays what it was before (`texture_loss`), whatever their size. `--voice-judge` (voice_judge.py) compares the decoded
voice with the clip's; the codes stay as they are, and so does the talker.
"""

from __future__ import annotations

import argparse
import math
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from balance import Balance
from codec_losses import Listener, astray, level_loss, mel_loss, spectrum, unlike
from codec_model import Codec, export_state, import_state
from corpus import FRAME
from safetensors.torch import load_file, save_file
from scipy.signal import resample_poly
from side_by_side import SideBySide
from torch import Tensor
from voice_judge import VoiceJudge, stranger

from engine.audio import load_audio
from engine.errors import InvalidAudio

SETTINGS = yaml.safe_load((Path(__file__).parent / "settings.yaml").read_text("utf-8"))
P = SETTINGS["polishing"]


def sounds(folder: Path) -> Iterator[np.ndarray]:
    """Mono float PCM at 24 kHz of every file, sorted by name; what the engine would refuse as a voice is left out."""
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".tar", ".wav", ".flac", ".ogg", ".opus")):
        for data in members(path) if path.suffix == ".tar" else [path.read_bytes()]:
            with suppress(InvalidAudio):
                yield load_audio(data, trim=False).pcm


def members(path: Path) -> Iterator[bytes]:
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            if file := archive.extractfile(member):
                yield file.read()


@torch.inference_mode()
def encoded(codec: Codec, folder: Path, most: int, rng: np.random.Generator) -> tuple[list[Tensor], list[Tensor]]:
    """Codes [frames, groups] and PCM [frames * 1920] of up to `most` clips, half of them played slower or faster."""
    clips, bends = [], SETTINGS["corpus"]["bends"]
    for pcm in sounds(folder):
        bent = rng.random() < 0.5
        played = resample_poly(pcm, 100, round(100 * float(rng.choice(bends)))).astype(np.float32) if bent else pcm
        if len(played) >= P["crop_frames"] * FRAME:
            clips.append(torch.from_numpy(played[: len(played) // FRAME * FRAME]))
    clips = [clips[i] for i in rng.permutation(len(clips))[:most]]
    clips.sort(key=len)
    codes = []
    for at in range(0, len(clips), 8):
        group = clips[at : at + 8]
        both = torch.nn.utils.rnn.pad_sequence(group, batch_first=True)[:, None]  # on the right: the encoder is causal
        codes += [row[: len(pcm) // FRAME] for row, pcm in zip(codec.encode(both).long(), group, strict=True)]
    return codes, clips


def texture_loss(fake: Tensor, before: Tensor) -> Tensor:
    """How little the complex spectra point the same way, in bands of 375 Hz (`astray`). PCM [B, 1, N]."""
    total = fake.new_zeros(())
    for fft in (256, 1024):
        both = torch.view_as_real(spectrum(torch.cat([fake, before])[:, 0], fft, fft // 4))[:, : fft // 2]
        total = total + astray(*both.unflatten(1, (-1, fft // 64)).chunk(2))
    return total / 2


class Polish:
    def __init__(self, args: argparse.Namespace) -> None:
        self.codec, self.before = Codec(SETTINGS["codec"]), Codec(SETTINGS["codec"])
        for codec in (self.codec, self.before):
            import_state(codec, load_file(args.codec))
        self.listener = Listener().requires_grad_(False) if args.listener else None
        if self.listener:
            state = {k[9:]: v.float() for k, v in load_file(args.listener).items() if k.startswith("listener.")}
            self.listener.load_state_dict(state)
        self.voice = VoiceJudge(args.voice_judge) if args.voice_judge else None
        self.rng = np.random.default_rng(SETTINGS["corpus"]["seed"])
        self.codes, self.clips = encoded(self.codec.eval(), args.clips, args.most, self.rng)
        self.tables = [table.detach() for book in self.codec.books for table in book.vectors()]
        self.learning = [p for n, p in self.codec.decoder.named_parameters() if "_codebook" not in n]
        self.adam = torch.optim.AdamW(self.learning, lr=P["learning_rate"], betas=(0.8, 0.99), weight_decay=0.0)
        self.balance = Balance(P["shares"], SETTINGS["codec_training"]["weights"]["mel"], torch.device("cpu"))
        self.beside, self.steps = SideBySide(False), 0

    def crops(self) -> tuple[Tensor, Tensor]:
        """Codes [B, crop_frames, groups] and what they shall sound like [B, 1, crop_frames * 1920]."""
        frames, codes, pcm = P["crop_frames"], [], []
        for clip in self.rng.integers(len(self.clips), size=P["batch"]):
            at = int(self.rng.integers(len(self.codes[clip]) - frames + 1))
            codes.append(self.codes[clip][at : at + frames])
            pcm.append(self.clips[clip][at * FRAME : (at + frames) * FRAME])
        return torch.stack(codes), torch.stack(pcm)[:, None]

    def step(self, progress: float) -> dict[str, Tensor]:
        curve = 0.02 + 0.49 * (1 + math.cos(math.pi * progress))
        for group in self.adam.param_groups:
            group["lr"] = P["learning_rate"] * curve * min(1.0, (self.steps + 1) / 20)
        codes, real = self.crops()
        before, heard = SETTINGS["codec_training"]["context_frames"], P["judged_frames"]
        at = int(self.rng.integers(P["crop_frames"] - before - heard + 1))
        vectors = [F.embedding(codes[..., group], table) for group, table in enumerate(self.tables)]
        real = real[..., (at + before) * FRAME : (at + before + heard) * FRAME]

        def decode(codec: Codec) -> tuple[Tensor, Tensor]:
            x = codec.upsampled(vectors[0], torch.stack(vectors[1:]).sum(0))
            each = x.shape[-1] // P["crop_frames"]
            x = x[..., at * each : (at + before + heard) * each]
            return x, codec.wave(x)[..., before * FRAME :]

        x, fake = decode(self.codec)
        with torch.no_grad():
            was = decode(self.before)[1]
        log = {"mel": mel_loss(fake, real, self.beside), "level": level_loss(fake, real)}
        log["texture"] = texture_loss(fake, was)
        if self.listener:
            log["unlike"] = unlike(self.listener(real)[0], self.listener(fake)[0])
        if self.voice:
            log["stranger"] = stranger(self.voice, fake, real)
        if self.steps % 16 == 0:
            self.balance.measure(log, x)
        self.adam.zero_grad(set_to_none=True)
        self.balance.total(log).backward()
        torch.nn.utils.clip_grad_norm_(self.learning, 20.0)
        self.adam.step()
        self.steps += 1
        return {name: loss.detach() for name, loss in log.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=Path, required=True)
    parser.add_argument("--most", type=int, default=1400, help="clips used")
    parser.add_argument("--codec", type=Path, required=True)
    parser.add_argument("--listener", type=Path, help="judge.safetensors of the codec's training")
    parser.add_argument("--voice-judge", type=Path, help="weights of voice_judge.py")
    parser.add_argument("--out", type=Path, required=True, help="a codec.safetensors")
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    polish = Polish(args)
    print(f"{len(polish.clips)} clips, {sum(map(len, polish.clips)) / 24000 / 60:.0f} minutes", flush=True)
    began, recent = time.time(), []
    while (spent := time.time() - began) < args.seconds:
        recent.append(polish.step(spent / args.seconds))
        if polish.steps % 50 == 0:
            means = {name: round(torch.stack([log[name] for log in recent]).mean().item(), 3) for name in recent[0]}
            print(f"{spent:.0f}s {polish.steps}", means, flush=True)
            recent.clear()
    save_file({k: v.half() for k, v in export_state(polish.codec).items()}, args.out)


if __name__ == "__main__":
    main()
