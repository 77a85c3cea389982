from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine import wiring
from engine.config import ROOT, EngineConfig
from engine.errors import ConfigError
from eval.settings import read_experiment


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_config_loads(path: Path):
    assert EngineConfig.load(path).hash


@pytest.mark.parametrize("path", sorted((ROOT / "configs/experiments").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_experiment_has_two_sides(path: Path):
    sides, title = read_experiment(path)
    assert set(sides) == {"A", "B"} and title


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"talker.max_num_seq": 3}, "did you mean talker.max_num_seqs"),
        ({"codec": {"batchin": True}}, "did you mean codec.batching"),
        ({"modle": "x"}, "did you mean model"),
        ({"talker.max_num_seqs": 0}, "talker.max_num_seqs = 0"),
        ({"talker.scheduler_mode": "fast"}, "talker.scheduler_mode = 'fast'"),
        ({"stream.chunk_schedule": []}, "stream.chunk_schedule"),
    ],
)
def test_wrong_settings_are_named(overrides, words):
    with pytest.raises(ConfigError) as error:
        EngineConfig.load(None, **overrides)
    assert words in error.value.message


def test_overlay_extends_and_hash(tmp_path):
    (tmp_path / "base.yaml").write_text("talker: {max_num_seqs: 4, max_prompt: 99}\n")
    (tmp_path / "top.yaml").write_text("extends: base.yaml\ntalker: {max_num_seqs: 8}\n")
    config = EngineConfig.load(tmp_path / "top.yaml")
    assert (config.talker.max_num_seqs, config.talker.max_prompt) == (8, 99)
    assert config.hash == EngineConfig.load(None, **config.model_dump()).hash
    assert config.hash != config.replace(**{"talker.max_num_seqs": 9}).hash


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(ConfigError, match="configs/embedded.yaml"):
        EngineConfig.load(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        EngineConfig.load(tmp_path / "bad.yaml")
    (tmp_path / "loop.yaml").write_text("extends: loop.yaml\n")
    with pytest.raises(ConfigError, match="extends itself"):
        EngineConfig.load(tmp_path / "loop.yaml")


def test_the_codec_runs_with_the_talker_or_where_it_is_told_to(monkeypatch):
    cpu, first = torch.device("cpu"), torch.device("cuda")
    config = EngineConfig.load(None)
    assert wiring.codec_device(config, cpu) == cpu and wiring.codec_device(config, first) == first
    assert wiring.codec_device(config.replace(**{"codec.device": "cpu"}), first) == cpu
    with pytest.raises(ConfigError, match="cuda:1, but torch finds only cpu") as refusal:
        wiring.codec_device(config.replace(**{"codec.device": "cuda:1"}), cpu)
    assert refusal.value.field == "codec.device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert wiring.codec_device(config.replace(**{"codec.device": "cuda:1"}), first) == torch.device("cuda:1")
    with pytest.raises(ConfigError, match="finds only cpu, cuda:0, cuda:1"):
        wiring.codec_device(config.replace(**{"codec.device": "cuda:2"}), first)
    for word in ("gpu", "cuda:", "cuda:x", "1"):
        with pytest.raises(ConfigError, match=r"codec\.device"):
            EngineConfig.load(None, **{"codec.device": word})


def test_sizes_of_first_chunks_that_go_ahead():
    def sizes(**changes):
        return wiring.ahead(EngineConfig.load(None, **({"codec.first_chunks": "ahead"} | changes)))

    assert sizes(**{"talker.max_num_seqs": 64}) == ((1, 1), (2, 1), (4, 1), (8, 1), (16, 1))
    assert sizes(**{"stream.chunk_schedule": [3, 4], "talker.max_num_seqs": 2}) == ((1, 3), (2, 3))
    assert sizes(**{"codec.first_chunks": "queue"}) == sizes(**{"codec.state": "host"}) == ()
    assert sizes(**{"codec.capture": [[1, 4], [8, 8]]}) == ()  # no graph holds a first chunk


@pytest.mark.parametrize(
    ("device", "given", "gather", "share", "lead_s"),
    [("cuda", "auto", 4, 8, 0.1), ("cuda", 6, 6, 1, 0.1), ("cpu", "auto", 1, 8, 0.25), ("cpu", 2, 2, 1, 0.25)],
)
def test_how_long_chunks_wait_for_company(device, given, gather, share, lead_s):
    config = EngineConfig.load(None, **{"codec.gather": given})
    runner = SimpleNamespace(device=torch.device(device), captured=((4, 1),), ahead=((4, 1),))
    settings = wiring.scheduler_settings(config, runner)
    assert (settings.gather, settings.gather_share, settings.lead_s) == (gather, share, lead_s)
    assert settings.ahead == {1}
    with pytest.raises(ConfigError, match="gather"):
        EngineConfig.load(None, **{"codec.gather": 0})
