"""The training speech: one long stream of clips, with the phoneme spoken at every 20 ms.

    python make_speech.py --pack pack --kokoro SITE-PACKAGES/kokoro --out corpus --seconds 170

Writes pcm.npy (int16, 24 kHz; every clip begins on a codec frame), wanted.npy (the same, in phase: what the codec shall
make of it, pitch_grid.py), phones.npy (uint8 [n, 2], one row per 480 samples: phoneme and its index among the clip's,
by Kokoro's own alignment), clips.npz (start, samples, speaker, job). Needs a GPU for any amount of speech: about 500
times real time. With several GPUs, `--part 0/2` and `--part 1/2` side by side
into two folders; all later steps take `--corpus folder1,folder2`.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import kokoro
import numpy as np
import phonemes
import speech_pack
import torch
from sounds import Sound
from torch import Tensor

SETTINGS = speech_pack.SETTINGS
FRAME, PHONE_HOP, RATE = SETTINGS["frame"], 480, 24000


class Jobs:
    """The clips to make, as packed by speech_pack.py."""

    def __init__(self, pack: Path, device: torch.device) -> None:
        z = np.load(pack / "jobs.npz")
        self.count, self.speaker, self.speed = z["count"], z["speaker"], z["speed"]
        self.ids, self.offset = z["ids"], np.concatenate([[0], np.cumsum(z["count"])])
        self.pitch, self.height = z["pitch"], z["height"]
        self.strange = torch.from_numpy(z["strange"]).to(device)
        self.mixes = [torch.from_numpy(z[name]).to(device) for name in ("timbre", "prosody")]
        self.styles = torch.from_numpy(np.load(pack / "styles.npy").astype(np.float32)).to(device)

    def tokens(self, job: int) -> np.ndarray:
        """Phoneme ids with the pad at both ends."""
        return np.concatenate([[0], self.ids[self.offset[job] : self.offset[job + 1]], [0]]).astype(np.int64)

    def style(self, jobs: np.ndarray) -> Tensor:
        """[B, 256] for jobs of one token count (Kokoro's style depends on it)."""
        row = (int(self.count[jobs[0]]) - 1) // speech_pack.STYLE_STEP
        speakers = torch.as_tensor(self.speaker[jobs], device=self.styles.device, dtype=torch.long)
        halves = self.styles[:, row].chunk(2, 1)
        timbre, prosody = (mix[speakers] @ half for mix, half in zip(self.mixes, halves, strict=True))
        return torch.cat([timbre + self.strange[speakers], prosody], 1)


def spoken(ids: np.ndarray) -> np.ndarray:
    """What is heard during each token: stress marks count as the sound after them, length marks as the one before."""
    out = ids.copy()
    for i in range(len(out) - 2, -1, -1):
        if out[i] in phonemes.STRESS:
            out[i] = out[i + 1]
    for i in range(1, len(out)):
        if out[i] == phonemes.LENGTH:
            out[i] = out[i - 1]
    return out


Made = tuple[int, np.ndarray, Tensor, Tensor, Tensor]


def batches(
    model: torch.nn.Module,
    jobs: Jobs,
    chunk: np.ndarray,
    versions: list[tuple[Tensor, Tensor]],
    args: argparse.Namespace,
) -> Iterator[Made]:
    """versions: of each, how much faster and how much higher each speaker is (`bent_speakers`) -> (version, jobs,
    samples [B, 2, N] of kokoro.wave_side, factors [B], [B, 2, T of 25 ms]: phoneme and its index in the job), one
    length each."""
    device = jobs.styles.device
    by_count: dict[int, list[int]] = defaultdict(list)
    for job in chunk:
        by_count[int(jobs.count[job])].append(int(job))
    ready, bins = {}, defaultdict(list)
    sides = []
    for group in (js[i : i + 256] for js in by_count.values() for i in range(0, len(js), 256)):
        index = np.array(group)
        ids = torch.from_numpy(np.stack([jobs.tokens(j) for j in group])).to(device)
        style = jobs.style(index)
        speed = torch.as_tensor(jobs.speed[index] / jobs.pitch[jobs.speaker[index]], device=device)
        sides.append((group, style, *kokoro.text_side(model, ids, style, speed)))
    for group, style, durations, d, text in sides:
        for row, (job, natural) in enumerate(zip(group, durations.double().cpu().numpy(), strict=True)):
            whole = kokoro.fit_durations(natural, args.grid)
            bins[int(whole.sum())].append(job)
            ready[job] = (d[row], text[row], np.repeat(np.arange(len(whole)), whole), style[row])
    for length, members in bins.items():
        size = max(1, min(args.frames // length, len(members)))
        for i in range(0, len(members), size):
            group = members[i : i + size]
            full = (group * size)[:size]  # a short last batch is filled with repeats: one shape a length
            parts = [ready[j] for j in full]
            index = torch.from_numpy(np.stack([p[2] for p in parts])).to(device)
            speakers = torch.from_numpy(jobs.speaker[full].astype(np.int64)).to(device)
            heard = [(spoken(jobs.tokens(j))[ready[j][2]], ready[j][2]) for j in group]
            heard = torch.from_numpy(np.array(heard, np.uint8)).to(device)
            inputs = [p[0] for p in parts], [p[1] for p in parts], index, torch.stack([p[3] for p in parts])
            for version, (faster, higher) in enumerate(versions):
                factor = faster[speakers]
                wave = kokoro.wave_side(model, *inputs, FRAME * factor, higher[speakers])
                yield version, np.array(group), wave[: len(group)], factor[: len(group)], heard


def played(wave: Tensor, factor: Tensor) -> Tensor:
    """[B, C, N], each row played `factor` [B] times faster, by windowed sinc -> [B, C, N / smallest factor], silence
    behind."""
    length, taps = wave.shape[-1], 16
    position = torch.arange(int(length / float(factor.min())), device=wave.device) * factor[:, None].double()
    base = position.long()
    share, band = (position - base).float(), (0.97 / factor).clamp(max=1)[:, None]
    out = wave.new_zeros(*wave.shape[:2], position.shape[1])
    for tap in range(1 - taps, taps + 1):
        away = tap - share
        weight = band * torch.sinc(band * away) * (0.5 + 0.5 * torch.cos(torch.pi * (away / taps).clamp(-1, 1)))
        index = base + tap
        weight = weight * ((index >= 0) & (index < length))
        out += weight[:, None] * wave.gather(2, index.clamp(0, length - 1)[:, None].expand(out.shape))
    return out


def trim_and_level(wave: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """[B, 2, N]: silence cut to a random short rest, beginning on a codec frame; same loudness for every clip ->
    (wave, first sample, end) by row."""
    c, hop, device = SETTINGS["corpus"], 240, wave.device
    first_side = wave[:, 0]
    rms = first_side[:, : wave.shape[2] // hop * hop].unflatten(1, (-1, hop)).square().mean(-1).sqrt()
    active = rms > rms.amax(1, keepdim=True) * 10 ** (-45 / 20)
    position = torch.arange(rms.shape[1], device=device)
    first = torch.where(active, position, rms.shape[1]).amin(1) * hop
    last = (torch.where(active, position, 0).amax(1) + 1) * hop

    def rest(low: float, high: float) -> Tensor:
        share = torch.rand(len(wave), generator=generator, device=device)
        return ((low + share * (high - low)) * RATE).long()

    start = (first - rest(*c["lead_seconds"])).clamp(min=0) // FRAME * FRAME
    end = (last + rest(*c["tail_seconds"])).clamp(max=wave.shape[2])
    position = torch.arange(wave.shape[2], device=device)
    inside = (position >= start[:, None]) & (position < end[:, None])
    ramp = torch.minimum(position - start[:, None], end[:, None] - position).clamp(0, 120) / 120
    loud = (first_side.square() * inside).sum(1) / inside.sum(1)
    gain = 10 ** (c["loudness_dbfs"] / 20) / (loud + 1e-12).sqrt()
    gain = torch.minimum(gain, 0.95 / (wave.abs().amax((1, 2)) + 1e-9))
    return wave * (gain[:, None] * ramp)[:, None], start, end


def bent_speakers(jobs: Jobs, versions: int) -> list[tuple[Tensor, Tensor]]:
    """Of the first and each further version: how much faster each speaker is played, and what the pitch curve is
    multiplied by before, both [speakers]. A bent speaker's pitch follows the formants by a random part of the way."""
    steps = np.array(SETTINGS["corpus"]["bends"], np.float32).reshape(2, -1)
    number = np.arange(len(jobs.pitch))
    chosen = [steps[(v + number // 7) % 2, number % steps.shape[1]] for v in range(versions)]
    rng = np.random.default_rng(SETTINGS["corpus"]["seed"])
    out = []
    for bend in (np.ones(len(number), np.float32), *chosen):
        higher = jobs.height * bend ** -rng.uniform(0, 1, len(number)).astype(np.float32)
        out.append(tuple(torch.from_numpy(x).to(jobs.styles.device) for x in (jobs.pitch * bend, higher)))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--kokoro", type=Path, required=True, help="folder of the unpacked kokoro wheel")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this time")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th clip, from the i-th")
    parser.add_argument("--limit", type=int, default=None, help="only the first clips")
    parser.add_argument("--bent", type=int, default=0, help="further versions of every clip, faster or slower (0 to 2)")
    parser.add_argument("--chunk", type=int, default=6000)
    parser.add_argument("--frames", type=int, default=8000, help="frames of 25 ms in a batch")
    parser.add_argument("--grid", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    began, device = time.time(), torch.device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    part, parts = map(int, args.part.split("/"))
    generator = torch.Generator(device).manual_seed(SETTINGS["corpus"]["seed"] + part)
    jobs = Jobs(args.pack, device)
    model = kokoro.load(speech_pack.read_weights(args.pack / "weights.bin"), args.kokoro, device)
    order = np.arange(len(jobs.count))[: args.limit][part::parts]
    versions = bent_speakers(jobs, args.bent)
    sound = Sound.drawn(len(jobs.pitch) * (1 + args.bent), device)
    capacity = int(jobs.count[order].sum() * 0.1 * RATE) + 10 * RATE  # 0.1 s a phoneme is far above the mean
    capacity = min(capacity * len(versions), 40 * 3600 * RATE)  # more than one GPU makes in five minutes
    pcm = torch.zeros(2, capacity, dtype=torch.int16, device=device)
    phones = torch.zeros(capacity // PHONE_HOP, 2, dtype=torch.uint8, device=device)
    at, table = 0, []
    print(f"loaded in {time.time() - began:.0f} s, {len(order)} clips to make", flush=True)

    def store(version: int, group: np.ndarray, wave: Tensor, factor: Tensor, heard: Tensor) -> None:
        nonlocal at
        shift = version * len(jobs.pitch)  # added to the speakers' numbers
        wave = played(wave, factor)
        if version:
            wave = sound.of(torch.from_numpy(jobs.speaker[group].astype(np.int64)) + shift).hear(wave)
        wave, start, end = trim_and_level(wave, generator)
        finite = wave.isfinite().all((1, 2)) & (wave.abs().amax((1, 2)) > 1e-3)
        whole = (wave.clamp(-1, 1) * 32767).round().to(torch.int16)
        columns = (values.tolist() for values in (finite, start, end, factor))
        for row, (good, low, high, rate) in enumerate(zip(*columns, strict=True)):
            if not good or at + high - low + FRAME > capacity:
                continue
            pcm[:, at : at + high - low] = whole[row, :, low:high]
            steps = (high - low) // PHONE_HOP
            middle = (torch.arange(steps, device=device) * PHONE_HOP + PHONE_HOP // 2 + low) * rate
            which = (middle / kokoro.FRAME).long().clamp(max=heard.shape[2] - 1)
            phones[at // PHONE_HOP : at // PHONE_HOP + steps] = heard[row][:, which].T
            table.append((at, high - low, int(jobs.speaker[group[row]]) + shift, int(group[row])))
            at += -(-(high - low) // FRAME) * FRAME

    with torch.inference_mode():
        for low in range(0, len(order), args.chunk):
            for made in batches(model, jobs, order[low : low + args.chunk], versions, args):
                store(*made)
                if time.time() - began > args.seconds:
                    break
            print(f"{time.time() - began:.0f} s: {len(table)} clips, {at / RATE / 3600:.2f} h", flush=True)
            if time.time() - began > args.seconds:
                break
    args.out.mkdir(parents=True, exist_ok=True)
    for name, side in zip(("pcm", "wanted"), pcm, strict=True):
        np.save(args.out / f"{name}.npy", side[:at].cpu().numpy())
    np.save(args.out / "phones.npy", phones[: at // PHONE_HOP].cpu().numpy())
    columns = np.array(table, np.int64).T
    np.savez(args.out / "clips.npz", **dict(zip(("start", "samples", "speaker", "job"), columns, strict=True)))
    print(f"{len(table)} clips, {at / RATE / 3600:.2f} h in {time.time() - began:.0f} s -> {args.out}", flush=True)


if __name__ == "__main__":
    main()
