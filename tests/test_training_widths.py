"""Weights that training goes on from or ends in: wider ones, and means of several (assets/embedded/train)."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "assets/embedded/train"))
from average import average, average_talkers
from codec_model import Codec, export_state, import_state
from widen import widened

RECIPE = Path(sys.path.pop(0))


@pytest.mark.parametrize("changes", [{"vq_dim": 24}, {"decoder": {"decoder_dim": 96}}, {"encoder": {"num_filters": 6}}])
def test_wider_layers_make_the_same_sound_and_codes(changes):
    settings = yaml.safe_load((RECIPE / "settings.yaml").read_text("utf-8"))["codec"]
    settings |= {"groups": 3, "codebook_size": 32, "vq_dim": 16}
    settings["decoder"]["decoder_dim"], settings["encoder"]["num_filters"] = 64, 4
    wider = copy.deepcopy(settings)
    for key, value in changes.items():
        wider[key] = {**wider[key], **value} if isinstance(value, dict) else value
    torch.manual_seed(0)
    old, new = Codec(settings).eval(), Codec(wider).eval()
    state = export_state(old)
    import_state(new, widened(state, wider))
    pcm = 0.1 * torch.randn(1, 1, 8 * 1920)
    with torch.inference_mode():
        codes = old.encode(pcm)
        sound, same = (codec.wave(codec.upsampled(*codec.lookup(codes))) for codec in (old, new))
        assert sound.std() > 1e-4
        assert float((sound - same).abs().max()) < 1e-4 * float(sound.abs().max())
        assert float((new.encode(pcm) == codes).float().mean()) > 0.95  # near ties apart


def test_average_is_of_decoders_with_the_same_codes_only():
    one = {"decoder.a": torch.tensor([1.0, 2.0]).half(), "encoder.b": torch.tensor([3.0]).half()}
    two = one | {"decoder.a": torch.tensor([3.0, 2.0]).half()}
    assert average([one, two])["decoder.a"].tolist() == [2.0, 2.0]
    assert average([one, two])["encoder.b"].tolist() == [3.0]
    with pytest.raises(ValueError, match="different codes"):
        average([one, two | {"encoder.b": torch.tensor([4.0]).half()}])


def test_the_mean_of_checkpoints_is_of_talkers_with_the_same_codec_only(tmp_path):
    folders = [tmp_path / name for name in ("before", "after")]
    for folder, value in zip(folders, (1.0, 4.0), strict=True):
        (folder / "speech_tokenizer").mkdir(parents=True)
        (folder / "speech_tokenizer/model.safetensors").write_bytes(b"one codec")
        for part in (1, 2):
            tensors = {f"talker.{part}": torch.tensor([value, part * value]).half()}
            save_file(tensors, folder / f"model-0000{part}-of-00002.safetensors")
    average_talkers(folders, tmp_path / "mean")
    mean = load_file(tmp_path / "mean/model-00002-of-00002.safetensors")
    assert mean["talker.2"].tolist() == [2.5, 5.0] and mean["talker.2"].dtype == torch.float16
    assert (tmp_path / "mean/speech_tokenizer/model.safetensors").read_bytes() == b"one codec"
    (folders[1] / "speech_tokenizer/model.safetensors").write_bytes(b"another")
    with pytest.raises(ValueError, match="different codecs"):
        average_talkers(folders, tmp_path / "none")
