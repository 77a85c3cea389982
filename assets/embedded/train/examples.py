"""Batches for the talker: target clip, another clip of the same speaker, a layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from corpus import clip_table, labels
from layout import Example, Ids, build
from talker_model import control_ids
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info


class Examples(IterableDataset):
    """Endless batches; `held_back`: those of the clips kept for validation instead, ended after `batches`."""

    def __init__(self, settings: dict, corpus: str, pack: Path, held_back: bool = False, batches: int = 0) -> None:
        self.t, self.batches, self.held_back = settings["talker_training"], batches, held_back
        clips = clip_table(corpus)
        codes = [np.load(Path(folder) / "codes.npz") for folder in corpus.split(",")]
        tokens = dict(np.load(pack / "tokens.npz"))
        # int16 [versions, frames, groups], encode_corpus.py
        self.codes = np.concatenate([part["codes"] for part in codes], 1)
        self.offset = np.cumsum(np.concatenate([[0], *[np.diff(part["offset"]) for part in codes]]))
        self.size = settings["codec"]["codebook_size"]
        self.speaker, self.start, self.samples = (clips[key] for key in ("speaker", "start", "samples"))
        every, begin = labels(corpus), clips["start"] // 480
        first_place = np.concatenate([[0], np.cumsum(np.load(pack / "jobs.npz")["count"] + 2)])
        self.phones, self.places = [], []
        for at, known, frames, job in zip(
            begin, clips["samples"] // 480, np.diff(self.offset), clips["job"], strict=True
        ):
            rows = np.array(every[at : at + 4 * frames])
            rows[known:] = rows[known - 1]  # what is left of the last frame
            self.phones.append(rows[:, 0].copy())
            self.places.append(tokens["place"][first_place[job] :][rows[:, 1]].reshape(-1, 4).astype(np.int64))
        first = np.concatenate([[0], np.cumsum(tokens["count"])])
        flat = tokens["ids"].astype(np.int64)
        self.text = [flat[first[j] : first[j + 1]] for j in clips["job"]]
        names = tokens["special"]  # bpe.SPECIAL
        self.ids = Ids(tokens["role"], int(names[3]), int(names[4]), int(names[5]), control_ids(settings))
        kept = np.random.default_rng(0).permutation(len(self.speaker))
        cut = min(self.t["held_back"], len(kept) // 4)
        self.targets = kept[:cut] if held_back else kept[cut:]
        by_speaker: dict[int, list[int]] = {}
        for clip in kept[cut:]:
            by_speaker.setdefault(int(self.speaker[clip]), []).append(int(clip))
        self.by_speaker = {who: np.array(clips) for who, clips in by_speaker.items()}

    def clip_codes(self, clip: int, version: int = 0) -> np.ndarray:
        return self.codes[version, self.offset[clip] : self.offset[clip + 1]].astype(np.int64)

    def example(self, clip: int, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], int]:
        """-> rows, clip of the speaker encoder. Both clips are of one version of their speaker."""
        version = int(rng.integers(len(self.codes)))
        others = self.by_speaker.get(int(self.speaker[clip]), np.array([clip]))
        other = int(rng.choice(others))
        for _ in range(8):
            if other != clip and len(self.clip_codes(other)) <= 130:
                break
            other = int(rng.choice(others))
        layout = str(rng.choice(list(self.t["layouts"]), p=list(self.t["layouts"].values())))
        context = layout.startswith("context")
        made = Example(
            self.text[clip],
            self.clip_codes(clip, version),
            self.text[other] if context else None,
            self.clip_codes(other, version) if context else None,
            "english" if rng.random() < self.t["language_tag"] else None,
            layout.endswith("streaming"),
        )
        rows = build(self.ids, made)
        rows["version"] = np.array(version)
        rows["heard"] = rows["codes"].copy(), rows["codec"].copy()
        rows["phones"] = self.phones[clip].reshape(-1, 4)
        rows["own"] = np.zeros(len(rows["text"]), bool)
        # The rows whose text is spoken in the frame that a row predicts: those its attention is led to.
        places, frames = self.places[clip], len(made.codes)
        rows["low"], rows["high"] = np.full((2, len(rows["text"])), -1, np.int64)
        if places.min() >= 0:
            first = len(rows["text"]) - frames - 1
            rows["low"][first : first + frames] = rows["said"] + places.min(1)
            rows["high"][first : first + frames] = rows["said"] + places.max(1)
        if not self.held_back:
            self._disturb(rows, len(made.codes), clip, rng)
        return rows, other

    def _disturb(self, rows: dict, frames: int, clip: int, rng: np.random.Generator) -> None:
        """Wrong or hidden codes among the generated frames' inputs; what is to be predicted stays right.

        In a training example the frames before have the voice that is wanted, and it need not be looked for in the
        reference; frames that the talker generated have it only as far as it listened. So some examples have said
        the same, frame by frame, in the voice of another version so far; and in some the trainer puts what the talker
        itself would have said in each frame (`own`).
        """
        t, codec, codes = self.t, rows["codec"][-frames:], rows["codes"][-frames:]
        if rng.random() < t["other_voice"]:
            otherwise = self.clip_codes(clip, int(rng.integers(len(self.codes))))
            codec[:], codes[:] = otherwise[:, 0], otherwise[:, 1:]
        rows["own"][-frames:] = rng.random() < t["own_voice"]
        if rng.random() < t["noisy_examples"]:
            wrong = rng.random((frames, codes.shape[1] + 1)) < t["noisy_codes"]
            random = rng.integers(self.size, size=wrong.shape)
            codec[:] = np.where(wrong[:, 0], random[:, 0], codec)
            codes[:] = np.where(wrong[:, 1:], random[:, 1:], codes)
        if rng.random() < t["hidden_groups"]:
            codes[:] = -1
        if rng.random() < t["hidden_frames"]:
            lost = rng.random(frames) < 0.5
            codec[lost] = -1
            codes[lost] = -1

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        info = get_worker_info()
        seed = 1 if self.held_back else int(torch.initial_seed() % 2**31) + (info.id if info else 0)
        rng, made = np.random.default_rng(seed), 0
        lengths = self.t["lengths"]
        waiting: dict[int, list[tuple[dict[str, np.ndarray], int]]] = {length: [] for length in lengths}
        while True:
            rows, other = self.example(int(rng.choice(self.targets)), rng)
            fitting = [length for length in lengths if length >= len(rows["text"])]
            if not fitting:
                continue
            group = waiting[fitting[0]]
            group.append((rows, other))
            if len(group) < self.t["positions"] // fitting[0]:
                continue
            yield self.collate(group, fitting[0], rng)
            group.clear()
            made += 1
            if self.batches and made >= self.batches:
                return

    def collate(
        self, group: list[tuple[dict[str, np.ndarray], int]], longest: int, rng: np.random.Generator
    ) -> dict[str, Tensor]:
        """Right-padded rows; and `predicted` of the frames to predict: row (flat), true codes, phones, weight (0: there
        were not as many). Shapes depend on `longest` alone, so that a step can be recorded."""
        batch: dict[str, np.ndarray] = {}
        for key in ("text", "codec", "codes", "speaker", "target", "low", "high", "own"):
            first = group[0][0][key]
            nothing = 0 if key in ("speaker", "own") else -1
            batch[key] = np.full((len(group), longest, *first.shape[1:]), nothing, first.dtype)
            for i, (rows, _) in enumerate(group):
                batch[key][i, : len(rows[key])] = rows[key]
        where, frames, crops, cropped = [], [], [], self.t["judged_frames"]
        for i, (rows, _) in enumerate(group):
            predicting = np.flatnonzero((rows["target"] >= 0) & (rows["target"] < self.size))
            where.append(i * longest + predicting)
            shown = (rows["codes"][predicting + 1] >= 0).all()  # nothing hidden: as it will be when it speaks by itself
            if len(predicting) >= cropped and shown:
                at = int(rng.integers(len(predicting) - cropped + 1))
                crops.append(where[-1][at : at + cropped])
            codes, codec = rows["heard"]  # row r + 1 holds the frame that row r predicts
            frames.append(np.concatenate([codec[predicting + 1, None], codes[predicting + 1]], 1))
        every = np.concatenate(where)
        count = self.t["predicted"]
        pick = rng.permutation(len(every))[:count]
        rest = count - len(pick)

        def fixed(values: np.ndarray) -> np.ndarray:
            return np.concatenate([values[pick], np.zeros((rest, *values.shape[1:]), values.dtype)])

        batch["where"], batch["frames"] = fixed(every), fixed(np.concatenate(frames))
        batch["phones"] = fixed(np.concatenate([rows["phones"] for rows, _ in group]).astype(np.int64))
        batch["weight"] = fixed(np.ones(len(every), np.float32))
        # Stretches of frames to be listened to: [judged, judged_frames] flat rows, -1 where there are too few.
        batch["crops"] = np.full((self.t["judged"], cropped), -1, np.int64)
        for row, crop in enumerate(rng.permutation(len(crops))[: self.t["judged"]]):
            batch["crops"][row] = crops[crop]
        other = np.array([other for _, other in group])
        batch["start"], batch["samples"] = self.start[other], self.samples[other]
        batch["version"] = np.array([rows["version"] for rows, _ in group])
        batch["who"] = self.speaker[other].astype(np.int64)
        return {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in batch.items()}
