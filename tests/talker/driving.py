"""Running talkers in tests: small geometries, prompts, and collecting what comes out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.checkpoint import Checkpoint
from engine.talker import PromptRows, SlotOptions, Talker, TalkerSettings

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
SMALL = {"max_num_seqs": 8, "max_model_len": 384, "max_prompt": 300, "max_frames": 256}


@dataclass(frozen=True)
class Random:
    """Stands where a checkpoint stands: a geometry without weights."""

    config: dict[str, Any]
    load_format: str = "dummy"

    def tensors(self, prefix: str = ""):
        raise AssertionError("dummy weights must not read a file")


def geometry_config(
    hidden=128, layers=2, width=64, depth=2, groups=16, codes=96, heads=4, kv_heads=2, head_dim=32
) -> dict[str, Any]:
    """A config.json of these sizes, as far as the talker reads it."""
    attention = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    common = {**attention, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000}
    predictor = {"vocab_size": codes, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": depth}
    talker = {
        "vocab_size": codes + 1024,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_code_groups": groups,
        "codec_eos_token_id": codes + 102,
    }
    return {"talker_config": {**talker, **common, "code_predictor_config": {**predictor, **common}}}


def prompt(seed: int, length: int, trailing: int = 10, width: int = 128) -> PromptRows:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(length + trailing + 1, width, generator=generator) * 0.5
    return PromptRows(rows[:length], rows[length:-1], rows[-1])


@dataclass
class Outcome:
    """All of one request: codes [frames, G] and how it ended (None: it did not)."""

    codes: np.ndarray
    finish: str | None


class Collector:
    """Steps a talker and puts each request's frames together; frames must come in order and without gaps."""

    def __init__(self, talker: Talker) -> None:
        self.talker = talker
        self.parts: dict[str, list[np.ndarray]] = {}
        self.finish: dict[str, str] = {}

    def step(self) -> None:
        for frames in self.talker.step():
            parts = self.parts.setdefault(frames.id, [])
            assert frames.id not in self.finish, "frames after the end"
            assert frames.first_frame == sum(len(part) for part in parts)
            parts.append(frames.codes)
            if frames.finish:
                self.finish[frames.id] = frames.finish

    def run(self) -> Collector:
        while self.talker.busy:
            self.step()
        return self

    def frames(self, name: str) -> int:
        return sum(len(part) for part in self.parts.get(name, []))

    def __getitem__(self, name: str) -> Outcome:
        return Outcome(np.concatenate(self.parts[name]), self.finish.get(name))


@dataclass(frozen=True)
class Golden:
    """A request of the reference implementation with its greedy codes."""

    name: str
    checkpoint: str
    frames: int
    finish: str
    rows: PromptRows
    codes: np.ndarray
    options: SlotOptions


def golden_requests(checkpoint: str) -> list[Golden]:
    described = json.loads((GOLDEN / "requests.json").read_text(encoding="utf-8"))["requests"]
    return [_golden(entry) for entry in described if entry["checkpoint"] == checkpoint]


def _golden(entry: dict[str, Any]) -> Golden:
    arrays = np.load(GOLDEN / "requests" / f"{entry['name']}.npz")
    rows = PromptRows(*[torch.from_numpy(arrays[name]) for name in ("prefill", "trailing", "pad")])
    options = SlotOptions(
        seed=0,
        max_frames=entry["frames"],
        do_sample=False,
        subtalker_do_sample=False,
        repetition_penalty=entry["repetition_penalty"],
    )
    return Golden(entry["name"], entry["checkpoint"], entry["frames"], entry["finish"], rows, arrays["codes"], options)


def open_golden(checkpoint: str, **settings: Any) -> Talker:
    return Talker(TalkerSettings(**(SMALL | settings)), Checkpoint.open(GOLDEN / "checkpoints" / checkpoint))
