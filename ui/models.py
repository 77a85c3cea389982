"""The models on offer in the switcher: `models` of the settings, folders of checkpoints opened up."""

from __future__ import annotations

from pathlib import Path

from engine.config import ROOT, EngineConfig

DESCRIPTION = "config.json"  # what makes a folder a checkpoint


def choices(config: EngineConfig) -> list[tuple[str, str]]:
    """(label, what to load) of each model, the one in force first; nothing twice. Reads folder listings only."""
    found = [config.model]
    for entry in config.models:
        found += _checkpoints(entry)
    return [(_label(model), model) for model in dict.fromkeys(found)]


def _checkpoints(entry: str) -> list[str]:
    """The entry itself, or the checkpoints in it when it is a folder of them."""
    folder = _folder(entry)
    if folder is None or (folder / DESCRIPTION).is_file():
        return [entry]
    return [f"{entry.rstrip('/')}/{path.parent.name}" for path in sorted(folder.glob(f"*/{DESCRIPTION}"))]


def _label(model: str) -> str:
    if _folder(model) is not None:
        return f"{model} (folder)"
    if model.startswith("dummy:"):
        return f"{model} (random weights)"
    return f"{model} (hub{', fetched' if _fetched(model) else ': fetched on first use'})"


def _folder(model: str) -> Path | None:
    path = Path(model).expanduser()
    for place in (path, ROOT / path):
        if place.is_dir():
            return place
    return None


def _fetched(model: str) -> bool:
    """Whether the hub client's cache has the checkpoint."""
    from huggingface_hub import try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(model, DESCRIPTION), str)
    except ValueError:  # no hub id
        return False
