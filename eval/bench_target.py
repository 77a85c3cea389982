"""Who the speed benchmark measures: a server of its own over HTTP, or the engine's child process without HTTP."""

from __future__ import annotations

import argparse
import importlib.util
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from engine.config import ROOT
from eval.errors import EvalError
from eval.http_target import HttpTarget, ServerSettings
from eval.targets import EngineTarget, Target

START_S = 300.0  # until a served engine is ready


def _overrides(args: argparse.Namespace, kind: str) -> tuple[str, dict[str, Any]]:
    """Model and settings of one session."""
    model = {"custom": args.custom, "base": args.base}[kind]
    streams = args.streams or 64
    return model, {"talker.max_num_seqs": streams, "stream.max_waiting": 512, **args.settings}


def can_serve() -> bool:
    return all(importlib.util.find_spec(name) for name in ("fastapi", "uvicorn", "prometheus_client"))


@contextmanager
def served(config: str, model: str, settings: dict[str, Any], log: Path) -> Iterator[str]:
    """A server in a process of its own; yields its address. Raises EvalError with the end of its log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "engine", "serve", "--config", config, "--model", model, "--port", str(port)]
    for key, value in settings.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    with log.open("wb") as out:
        child = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        try:
            began = time.monotonic()
            while not _ready(port):
                if child.poll() is not None or time.monotonic() - began > START_S:
                    tail = log.read_text(errors="replace")[-1500:]
                    raise EvalError(f"the server did not start ({child.poll()}); {log} ends: {tail}", field="model")
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            child.terminate()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def _own_voice(engine: Any, frames: int = 135) -> Any:
    """A voice of random codes, so long that the prompt of a ten-word text has about 150 rows."""
    from engine.voices import VoicePrompt

    rng = np.random.default_rng(0)
    hidden = engine.prepare_voice(rng.normal(0, 0.1, 72_000).astype(np.float32), 24_000, "a").speaker_embedding.shape[0]
    codes = rng.integers(0, 16, (frames, engine.info.groups))
    return VoicePrompt(rng.normal(0, 0.02, hidden).astype(np.float32), codes, "some words", "bench", frames * 0.08)


@contextmanager
def opened(args: argparse.Namespace, kind: str, out: Path) -> Iterator[tuple[Target, str]]:
    """The target of a session and the voice to ask for."""
    model, settings = _overrides(args, kind)
    if args.in_process:
        from engine.process import EngineProcess

        with EngineProcess(args.config, model=model, **settings) as engine:
            target = EngineTarget(engine)
            if kind == "base":
                target.add_voice("bench", _own_voice(engine))
            yield target, "bench"
        return
    with served(args.config, model, settings, out / f"server-{kind}.log") as url:
        voice = _voice_of(url, kind)
        yield HttpTarget(ServerSettings(url, voices="name")), voice


def _voice_of(url: str, kind: str) -> str:
    """A speaker, or the bundled voice, that the server offers."""
    with urllib.request.urlopen(f"{url}/audio/voices", timeout=30) as answer:
        offered = json.load(answer)
    names = offered.get("voices", offered) if isinstance(offered, dict) else offered
    names = [n if isinstance(n, str) else n.get("name") or n.get("id") for n in names]
    if not names:
        raise EvalError(f"the server offers no {'speaker' if kind == 'custom' else 'voice'}", field="voice")
    return str(names[0])
