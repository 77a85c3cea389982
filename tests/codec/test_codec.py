"""The codec against the reference's golden files, and what it refuses."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.codec.codec import Codec
from engine.codec.decoder import CodecDecoder, resolve_config
from engine.codec.encoder import CodecEncoder
from engine.errors import CheckpointError, InvalidAudio, InvalidRequest
from tests.conftest import GOLDEN

BASE = GOLDEN / "checkpoints" / "base"


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec.load(BASE)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / "decoder.npz"))


@pytest.fixture(scope="module")
def clip() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / "clip.npz"))


@pytest.mark.parametrize("part", ["whole", "ragged"])
def test_codes_equal_the_reference(codec, clip, part):
    pcm = clip[f"{part}_pcm"].astype(np.float32) / 32768
    codes = codec.encode(pcm)
    assert codes.dtype == np.int64
    assert codes.shape == (-(-len(pcm) // 1920), 16)
    np.testing.assert_array_equal(codes, clip[f"{part}_codes"])


def test_whole_decode_equals_the_reference(codec, golden):
    pcm = codec.decode(golden["codes"][0].T)
    assert pcm.shape == (64 * 1920,)
    assert abs(pcm - golden["pcm"][0, 0]).max() <= 1e-4


@pytest.mark.parametrize("chunks", [[1] * 64, [2] * 32, [3] * 21 + [1], [5] * 12 + [4], [8] * 8, [1, 2, 4, 8, 12, 37]])
def test_streamed_decode_equals_the_reference(codec, golden, chunks):
    codes, want = torch.from_numpy(golden["codes"]), golden["pcm"]
    state, pieces, at = codec.decoder.init_state(1), [], 0
    with torch.inference_mode():
        for size in chunks:
            pcm, state = codec.decoder.step(codes[..., at : at + size], state)
            assert pcm.shape == (1, 1, size * 1920)
            pieces.append(pcm.numpy())
            at += size
    got = np.concatenate(pieces, axis=-1)
    assert got.shape == want.shape
    assert abs(got - want).max() <= 1e-4


def test_every_checkpoint_key_is_used_and_no_other_is_made(codec):
    stored = load_file(BASE / "speech_tokenizer" / "model.safetensors")
    ours = {f"encoder.{k}" for k in codec.encoder.state_dict()} | {f"decoder.{k}" for k in codec.decoder.state_dict()}
    assert ours == set(stored)


def test_encoded_audio_can_be_decoded(codec, clip):
    pcm = clip["ragged_pcm"].astype(np.float32) / 32768
    assert codec.decode(codec.encode(pcm)).shape == (12 * 1920,)


def test_bfloat16_decoder_stays_near(golden):
    codec = Codec.load(BASE, dtype=torch.bfloat16)
    pcm = codec.decode(golden["codes"][0].T)
    want = golden["pcm"][0, 0]
    assert np.square(pcm - want).mean() < 0.01 * np.square(want).mean()
    assert codec.encoder.downsample.conv.weight.dtype == torch.float32


def test_dummy_weights_need_no_file():
    from engine.checkpoint import Checkpoint

    checkpoint = Checkpoint(
        "dummy", None, {}, json.loads((BASE / "speech_tokenizer/config.json").read_text()), {}, "dummy"
    )
    pcm = Codec.load(checkpoint).decode(np.zeros((3, 16), np.int64))
    assert pcm.shape == (3 * 1920,) and np.isfinite(pcm).all()


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "codes",
    [
        np.zeros((3, 15), np.int64),  # a group is missing
        np.zeros((0, 16), np.int64),  # no frames
        np.full((3, 16), 64),  # outside the codebook of 64
        np.full((3, 16), -1),  # the reference's padding
        np.zeros((3, 16), np.float32),
    ],
    ids=["groups", "empty", "too large", "negative", "float"],
)
def test_bad_codes_are_refused(codec, codes):
    with pytest.raises(InvalidRequest) as error:
        codec.decode(codes)
    assert error.value.field == "codes"


@pytest.mark.parametrize(
    "pcm", [np.zeros(0, np.float32), np.zeros((2, 4000), np.float32), np.full(4000, np.nan, np.float32)]
)
def test_bad_audio_is_refused(codec, pcm):
    with pytest.raises(InvalidAudio):
        codec.encode(pcm)


@pytest.fixture
def damaged(tmp_path):
    """A copy of the checkpoint whose speech tokenizer a test may spoil."""
    folder = tmp_path / "base"
    shutil.copytree(BASE, folder)
    path = folder / "speech_tokenizer" / "model.safetensors"

    def spoil(change):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)
        return folder

    return spoil


def test_missing_unknown_and_misshapen_tensors_are_named(damaged):
    name = "decoder.upsample.0.1.gamma"
    with pytest.raises(CheckpointError, match=r"decoder\.upsample\.0\.1\.gamma is missing"):
        Codec.load(damaged(lambda t: t.pop(name)))
    with pytest.raises(CheckpointError, match=r"gamma has shape \[3\]"):
        Codec.load(damaged(lambda t: t.update({name: torch.zeros(3)})))
    with pytest.raises(CheckpointError, match=r"decoder\.surplus"):
        Codec.load(damaged(lambda t: t.update({name: torch.ones(64), "decoder.surplus": torch.zeros(1)})))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"codebook_dim": None}, "codebook_dim"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"num_quantizers": 1}, "num_quantizers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"decoder_dim": 100}, "decoder_dim"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling"),
    ],
)
def test_decoder_configs_that_cannot_be_built_name_the_field(change, field):
    with pytest.raises(CheckpointError) as error:
        CodecDecoder({"codebook_dim": 512, **change})
    assert error.value.field == f"decoder_config.{field}"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"use_causal_conv": False}, "use_causal_conv"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"upsampling_ratios": [8, 6, 5]}, "upsampling_ratios"),
        ({"num_semantic_quantizers": 32}, "num_semantic_quantizers"),
    ],
)
def test_encoder_configs_that_cannot_be_built_name_the_field(change, field):
    with pytest.raises(CheckpointError) as error:
        CodecEncoder({**change}, samples_per_frame=1921 if field == "upsampling_ratios" else 1920)
    assert error.value.field == f"encoder_config.{field}"


def test_rope_settings_are_read_as_either_transformers_writes_them():
    assert resolve_config({"codebook_dim": 512, "rope_theta": 500})["rope_theta"] == 500
    written_by_5 = {"codebook_dim": 512, "rope_parameters": {"rope_theta": 500, "rope_type": "default"}}
    assert resolve_config(written_by_5)["rope_theta"] == 500


def test_the_published_geometry_can_be_built():
    """On the meta device: names and shapes only. 1920 samples a frame, about 114 M parameters in the decoder."""
    from engine.geometry import published_codec_config

    config = published_codec_config()
    with torch.device("meta"):
        decoder = CodecDecoder(config["decoder_config"])
        CodecEncoder(config["encoder_config"], config["encode_downsample_rate"])
    assert decoder.samples_per_frame == 1920
    assert 100e6 < sum(p.numel() for p in decoder.parameters()) < 130e6
