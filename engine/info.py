"""What an engine has loaded. Imports no model code: it also describes an engine in another process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EngineInfo:
    """What is loaded and with which settings; travels with every result."""

    model: str
    checkpoint_id: str
    task: str  # "Base" | "CustomVoice" | "VoiceDesign"
    weights: str  # "trained" | "random"
    languages: tuple[str, ...]
    speakers: tuple[str, ...]
    takes_instruct: bool
    groups: int
    sample_rate: int
    device: str
    device_name: str
    dtype: str
    scheduler_mode: str
    config: dict[str, Any]
    config_hash: str
    versions: dict[str, str]
    startup_s: float
    notice: str = ""  # a limit of the checkpoint that every user must know


def describe(info: EngineInfo) -> str:
    """A line for people, and the checkpoint's notice if it has one."""
    weights = "RANDOM WEIGHTS: noise, not speech" if info.weights == "random" else "trained weights"
    line = (
        f"{info.model} ({info.task}, {weights}) on {info.device_name}, {info.dtype}, {info.scheduler_mode} scheduling"
    )
    return f"{line}\nnotice: {info.notice}" if info.notice else line
