"""What a run is: dataset, load, targets, scores. Plain frozen values that go to run.json and back."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from eval.errors import EvalError
from eval.plan import Cell
from eval.scoring import ScoreSettings
from eval.targets import EngineTarget, Target

TARGET_KINDS = ("engine", "process", "server", "given")


@dataclass(frozen=True)
class TargetSpec:
    """Who is measured.

    Attributes:
        kind: "engine" (in this process), "process" (in a child process), "server" (HTTP), "given" (a running engine
            handed over by the caller: the web page).
        config, overrides: profile and dotted settings on top, for the engine kinds.
        server: fields of `eval.http_target.ServerSettings`.
        label: for people, e.g. "scheduler async".
    """

    kind: str = "engine"
    config: str = "configs/embedded.yaml"
    overrides: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    label: str = ""

    def check(self) -> None:
        """Refuse what cannot be opened, before anything is made or loaded.

        Raises:
            EvalError, ConfigError: which field, and what it may be.
        """
        if self.kind == "server":
            from eval.http_target import ServerSettings

            ServerSettings(**self.server)
        elif self.kind in ("engine", "process"):
            from engine.config import EngineConfig

            EngineConfig.load(self.config, **self.overrides)

    def open(self) -> Target:
        """Start or connect; takes as long as the engine takes to load."""
        if self.kind == "server":
            from eval.http_target import HttpTarget, ServerSettings

            return HttpTarget(ServerSettings(**self.server))
        if self.kind == "engine":
            from engine.engine import Engine

            return EngineTarget(Engine.from_config(self.config, **self.overrides), own=True)
        if self.kind == "process":
            from engine.config import EngineConfig
            from engine.process import EngineProcess

            return EngineTarget(EngineProcess(EngineConfig.load(self.config, **self.overrides)), own=True)
        raise EvalError(f"a target of kind '{self.kind}' cannot be opened here", field="target")


@dataclass(frozen=True)
class RunSettings:
    """Everything that decides what a run does; two runs with the same hash ask for the same work.

    Attributes:
        variants: one target, or two named A and B that take turns (A B B A).
        cells: load settings as `Cell.parse` reads them.
        requests: measured requests of a cell; 0 takes every utterance once.
        frames: fixed output length in frames of 80 ms (speed runs with random weights), or None.
        keep_audio: "all", "worst" (ten by error rate and every failed check) or "none" after scoring.
    """

    dataset: str = "english"
    limit: int | None = None
    language: str = "auto"
    voices: tuple[str, ...] = ()
    variants: dict[str, TargetSpec] = field(default_factory=lambda: {"": TargetSpec()})
    cells: tuple[str, ...] = ("c1",)
    requests: int = 0
    warmup: int = 2
    seed: int = 0
    deadline_s: float = 120.0
    frames: int | None = None
    score: ScoreSettings | None = None
    keep_audio: str = "all"
    title: str = ""

    def __post_init__(self) -> None:
        if not self.cells:
            raise EvalError("at least one load setting is needed, e.g. c1", field="load")
        for cell in self.cells:
            Cell.parse(cell)
        if len(set(self.cells)) != len(self.cells):
            raise EvalError("a load setting stands twice", field="load")
        for name, least in (("requests", 0), ("warmup", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise EvalError(f"{name} must be at least {least}", field=name)
        if self.deadline_s <= 0:
            raise EvalError("deadline_s must be positive", field="deadline_s")
        if self.frames is not None and self.frames < 2:
            raise EvalError("frames must be at least 2", field="frames")
        if self.keep_audio not in ("all", "worst", "none"):
            raise EvalError("keep_audio is all, worst or none", field="keep_audio")
        for spec in self.variants.values():
            if spec.kind not in TARGET_KINDS:
                raise EvalError(f"target kind '{spec.kind}': one of {', '.join(TARGET_KINDS)}", field="target")

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        for spec in data["variants"].values():
            if spec["server"].get("api_key"):
                spec["server"]["api_key"] = "(not kept)"
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RunSettings:
        data = {k: v for k, v in data.items() if k in {f.name for f in fields(cls)}}
        data["variants"] = {name: TargetSpec(**spec) for name, spec in data["variants"].items()}
        data["voices"], data["cells"] = tuple(data["voices"]), tuple(data["cells"])
        if data.get("score"):
            data["score"] = ScoreSettings(**{k: tuple(v) for k, v in data["score"].items()})
        return cls(**data)

    @property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:12]


def read_experiment(path: str | Path) -> tuple[dict[str, TargetSpec], str]:
    """Two engine settings to be compared, from YAML, and the experiment's title.

        title: vLLM's scheduler, sync against async
        config: configs/embedded.yaml        # optional: the profile both stand on
        a: {talker.scheduler_mode: sync}     # dotted settings of engine/config.py
        b: {talker.scheduler_mode: async}

    Raises:
        EvalError: unreadable, or without both sides.
        ConfigError: a setting that the engine does not know (checked before anything is loaded).
    """
    from engine.config import EngineConfig

    path = Path(path)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise EvalError(f"cannot read the experiment {path}: {error}", field="experiment") from error
    if not isinstance(data, dict) or not isinstance(data.get("a"), dict) or not isinstance(data.get("b"), dict):
        raise EvalError(f"{path}: an experiment has the two sides `a` and `b`", field="experiment")
    unknown = set(data) - {"title", "config", "a", "b", "load"}
    if unknown:
        raise EvalError(f"{path}: unknown key {sorted(unknown)[0]}", field="experiment")
    config = data.get("config", "configs/embedded.yaml")
    sides = {}
    for name in ("a", "b"):
        EngineConfig.load(config, **data[name])
        label = ", ".join(f"{key}={value}" for key, value in data[name].items()) or "as in the profile"
        sides[name.upper()] = TargetSpec("process", config, data[name], label=label)
    return sides, str(data.get("title", path.stem))
