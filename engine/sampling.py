"""Sampling settings of one request: the checkpoint's defaults, the request's overrides, and what each may be."""

from __future__ import annotations

import secrets
from typing import Any

from engine.errors import InvalidRequest
from engine.request import SamplingOverrides

_RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, 5.0, "0 (greedy) to 5"),
    "top_p": (0.0, 1.0, "above 0, to 1"),
    "top_k": (0, 1_000_000, "0 (no limit) or more"),
    "repetition_penalty": (0.1, 10.0, "0.1 to 10; 1 is off"),
}
NAMES = tuple(SamplingOverrides.__dataclass_fields__)
MAX_SEED = 2**53 - 1  # what a browser's numbers carry exactly


def resolve(overrides: SamplingOverrides, defaults: dict[str, Any]) -> dict[str, Any]:
    """Every sampling setting as `SlotOptions` takes it, which also checks it.

    Args:
        overrides: of the request.
        defaults: `Checkpoint.generation`.
    """
    settings = {name: defaults[name] for name in NAMES} | overrides.given()
    settings["subtalker_do_sample"] = settings.pop("subtalker_dosample")  # the published files' spelling
    return settings


def check(name: str, value: Any) -> None:
    """Refuse a sampling setting that cannot be. Of a number, NaN is refused too.

    Args:
        name: a field of `SamplingOverrides`.

    Raises:
        InvalidRequest: names the field, and what it may be.
    """
    kind = name.removeprefix("subtalker_")
    if kind in ("do_sample", "dosample"):
        if not isinstance(value, bool):
            raise InvalidRequest(f"{name} must be true or false, not {value!r}", field=name)
        return
    low, high, words = _RANGES[kind]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high or (kind == "top_p" and value == 0) or (kind == "top_k" and value % 1):
        raise InvalidRequest(f"{name} = {value!r} is out of range; it may be {words}", field=name)


def resolve_seed(seed: int | None) -> int:
    """The seed given, or a fresh one. Raises InvalidRequest unless 0 <= seed < 2**53."""
    if seed is None:
        return secrets.randbelow(2**31)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise InvalidRequest(f"seed = {seed!r}; give a whole number from 0 to {MAX_SEED}, or none", field="seed")
    return seed
