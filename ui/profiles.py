"""Profiles for the page: the overlays of `configs/`, put on the machine and the model that are in force."""

from __future__ import annotations

from typing import Any

from engine.config import ROOT, EngineConfig

# What belongs to this machine, or was chosen elsewhere on the page: a profile that does not name it leaves it alone.
KEPT = ("model", "load_format", "device", "dtype", "threads", "voices_dir", "trace", "models")


def names() -> list[str]:
    """The overlays that are whole profiles."""
    return [f"configs/{path.name}" for path in sorted((ROOT / "configs").glob("*.yaml"))]


def under(profile: str, now: EngineConfig) -> EngineConfig:
    """The settings of a profile on this machine. Raises `ConfigError`."""
    fresh = EngineConfig.load(profile)
    return fresh.replace(**{key: getattr(now, key) for key in KEPT if key not in fresh.model_fields_set})


def changes(now: EngineConfig, then: EngineConfig) -> list[tuple[str, Any, Any]]:
    """(setting, value now, value then) of each that differs, by dotted name."""
    before, after = _flat(now.model_dump(mode="json")), _flat(then.model_dump(mode="json"))
    return [(key, before[key], after[key]) for key in before if before[key] != after[key]]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out
