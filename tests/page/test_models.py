"""What the model switcher offers, and the memory that the Engine tab shows."""

from __future__ import annotations

from engine.config import EngineConfig
from tests.conftest import GOLDEN
from ui import models
from ui.engine_tab import memory_line


def test_folders_hub_ids_and_folders_of_checkpoints_are_offered_once(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = GOLDEN / "checkpoints"
    config = EngineConfig.load(
        None, model=str(folder / "base"), models=[f"{folder}/", "assets/embedded", "Qwen/Qwen3-TTS-12Hz-1.7B-Base"]
    )
    offered = models.choices(config)
    assert [value for _, value in offered] == [
        *(f"{folder}/{name}" for name in ("base", "custom_voice", "voice_design")),
        "assets/embedded",
        "Qwen/Qwen3-TTS-12Hz-1.7B-Base",
    ]
    labels = dict((value, label) for label, value in offered)
    assert labels["assets/embedded"] == "assets/embedded (folder)"
    assert "(hub" in labels["Qwen/Qwen3-TTS-12Hz-1.7B-Base"]


def test_by_default_the_embedded_and_the_published_models_are_offered():
    values = [value for _, value in models.choices(EngineConfig.load(None, model="dummy:1.7b-base"))]
    assert values[:2] == ["dummy:1.7b-base", "assets/embedded"] and "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice" in values


def test_an_empty_folder_offers_nothing(tmp_path):
    config = EngineConfig.load(None, models=[str(tmp_path)])
    assert [value for _, value in models.choices(config)] == [config.model]


def test_memory_is_named_by_what_it_is():
    metrics = {"memory_used_mib": 2048.0, "memory_total_mib": 81920.0}
    assert "GPU memory in use: 2.0 of 80.0 GiB" in memory_line(metrics, "cuda")
    assert "process: 2.0 of 80.0 GiB" in memory_line(metrics, "cpu")
    assert memory_line({}, "cpu") == ""
