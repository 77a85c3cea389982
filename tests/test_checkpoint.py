import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint import Checkpoint
from engine.errors import CheckpointError
from engine.geometry import published_codec_config, published_config, talker_shapes


def small_config() -> dict:
    config = published_config("0.6b-base")
    config["talker_config"] |= {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    config["talker_config"] |= {"num_attention_heads": 2, "num_key_value_heads": 1, "text_hidden_size": 12}
    config["talker_config"] |= {"text_vocab_size": 40, "vocab_size": 1100}
    predictor = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 8, "vocab_size": 32}
    config["talker_config"]["code_predictor_config"] |= predictor | {"num_attention_heads": 1, "num_key_value_heads": 1}
    return config


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of the right shape: two shards with an index, a codec file."""
    config = small_config()
    tensors = {name: torch.zeros(shape) for name, shape in talker_shapes(config).items()}
    tensors["speaker_encoder.fc.weight"] = torch.ones(4)
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, tmp_path / shard)
    index = {"weight_map": {name: shard for shard, members in shards.items() for name in members}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.7}))
    codec = tmp_path / "speech_tokenizer"
    codec.mkdir()
    (codec / "config.json").write_text(json.dumps(published_codec_config()))
    save_file({"decoder.x": torch.arange(3.0)}, codec / "model.safetensors")
    return tmp_path


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_reads_the_published_layout(folder):
    checkpoint = Checkpoint.open(folder)
    assert (checkpoint.task, checkpoint.groups, checkpoint.weights) == ("Base", 16, "trained")
    assert "english" in checkpoint.languages
    assert checkpoint.generation["temperature"] == 0.7 and checkpoint.generation["top_k"] == 50
    assert len(dict(checkpoint.tensors("talker."))) == len(talker_shapes(checkpoint.config))
    assert dict(checkpoint.codec_tensors())["decoder.x"].tolist() == [0, 1, 2]
    assert checkpoint.id == Checkpoint.open(folder).id


def test_random_weights_say_so(folder):
    edit(folder / "config.json", random_weights=True)
    assert Checkpoint.open(folder).weights == "random"
    assert Checkpoint.open(folder, "dummy").weights == "random"
    assert Checkpoint.open("dummy:1.7b-base").weights == "random"


def test_no_such_folder(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder") as error:
        Checkpoint.open(tmp_path / "nothing")
    assert error.value.field == "model"
    with pytest.raises(CheckpointError, match="1.7b"):
        Checkpoint.open("dummy:9b-base")


def test_hub_id_that_cannot_be_had(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="nobody/nothing is neither a folder"):
        Checkpoint.open("nobody/nothing")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen3"}, "not a Qwen3-TTS"),
        ({"tokenizer_type": "qwen3_tts_tokenizer_25hz"}, "25 Hz"),
        ({"tts_model_type": "singing"}, "tts_model_type"),
    ],
)
def test_other_kinds_are_refused(folder, changes, words):
    edit(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(folder)


def test_missing_shard_is_named(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00002.safetensors"):
        Checkpoint.open(folder)


def test_truncated_shard_names_file_and_tensor(folder):
    path = folder / "model-00001-of-00002.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match="model-00001-of-00002.safetensors is truncated: tensor talker"):
        Checkpoint.open(folder)
    path.write_bytes(data[:20])
    with pytest.raises(CheckpointError, match="truncated inside its header"):
        Checkpoint.open(folder)
    path.write_bytes(b"\x10\0\0\0\0\0\0\0not json at all!")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        Checkpoint.open(folder)


def test_geometry_that_does_not_match(folder):
    talker = json.loads((folder / "config.json").read_text())["talker_config"]
    edit(folder / "config.json", talker_config=talker | {"hidden_size": 24})
    with pytest.raises(CheckpointError, match="do not belong together"):
        Checkpoint.open(folder)
    edit(folder / "config.json", talker_config=talker | {"num_hidden_layers": 3})
    with pytest.raises(CheckpointError, match="talker.model.layers.2.* is missing"):
        Checkpoint.open(folder)
    edit(folder / "config.json", talker_config=talker)
    codec = published_codec_config()
    codec["decoder_config"]["num_quantizers"] = 8
    (folder / "speech_tokenizer" / "config.json").write_text(json.dumps(codec))
    with pytest.raises(CheckpointError, match="16 codes a frame, its speech tokenizer takes 8"):
        Checkpoint.open(folder)


def test_weights_finer_than_bfloat16_run_in_float32_on_cuda(folder):
    """The embedded voice (float16) failed the graphs' check in bfloat16 on an H200; published weights are bfloat16."""
    from engine import wiring
    from engine.config import EngineConfig

    cuda, config = torch.device("cuda"), EngineConfig()
    assert Checkpoint.open("assets/embedded").stored_dtype == "F16"
    assert wiring.dtype(config, cuda, Checkpoint.open("assets/embedded")) == torch.float32
    assert wiring.dtype(config, cuda, Checkpoint.open("dummy:1.7b-base")) == torch.bfloat16
    for path in folder.glob("model-*.safetensors"):
        save_file({name: value.bfloat16() for name, value in load_file(path).items()}, path)
    assert wiring.dtype(config, cuda, Checkpoint.open(folder)) == torch.bfloat16
    assert wiring.dtype(config, torch.device("cpu"), Checkpoint.open(folder)) == torch.float32
