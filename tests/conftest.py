"""Shared fixtures: one real engine per test session, on small random weights; clips of the repository."""

import os
from pathlib import Path

import pytest

# Before vllm is imported anywhere: one process, little log, nothing sent out.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
RANDOM_BASE = GOLDEN / "checkpoints" / "base"


def small_engine_config(**overrides):
    """Settings for a random-weight engine that starts in seconds."""
    from engine.config import EngineConfig

    values = {
        "model": str(RANDOM_BASE),
        "talker.max_num_seqs": 8,
        "talker.max_model_len": 512,
        "talker.max_prompt": 384,
        "stream.max_frames": 256,
        "stream.max_waiting": 16,
        "stream.chunk_schedule": [1, 2, 4, 8],
        "voices_dir": "data/test-voices",
    }
    return EngineConfig.load(None, **(values | overrides))


@pytest.fixture(scope="session")
def engine():
    """A real engine (vLLM, codec, voices) on the random-weight Base checkpoint."""
    from engine.engine import Engine

    engine = Engine.from_config(small_engine_config())
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def voice(engine):
    """A prepared voice of a bundled clip, with transcript."""
    return engine.voices.get(engine.voices.list()[0].name)


def pytest_collection_modifyitems(items):
    """Files without slow tests first, so that a fault shows early; the browser last.

    Playwright's synchronous interface keeps an event loop running in the main thread until the session ends, in which
    no other test may call `asyncio.run`.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: 2 if "page" in item.path.parts else int(item.path in slow))
