"""The speaker encoder against the reference's golden files."""

import numpy as np
import pytest
import torch

from engine.checkpoint import Checkpoint
from engine.errors import CheckpointError, InvalidAudio
from engine.speaker import SpeakerEncoder, mel_spectrogram
from tests.conftest import GOLDEN

PREFIX = "speaker_encoder."


@pytest.fixture(scope="module")
def encoder() -> SpeakerEncoder:
    checkpoint = Checkpoint.open(GOLDEN / "checkpoints" / "base")
    encoder = SpeakerEncoder(checkpoint.config["speaker_encoder_config"])
    weights = {name.removeprefix(PREFIX): tensor.float() for name, tensor in checkpoint.tensors(PREFIX)}
    encoder.load_state_dict(weights, strict=True)
    return encoder.eval()


@pytest.fixture(scope="module")
def clip() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / "clip.npz"))


@pytest.mark.parametrize("part", ["whole", "ragged"])
def test_embedding_equals_the_reference(encoder, clip, part):
    embedding = encoder.embed(clip[f"{part}_pcm"].astype(np.float32) / 32768)
    want = clip[f"{part}_embedding"]
    assert embedding.dtype == np.float32
    assert np.abs(embedding - want).max() <= 1e-5 * np.abs(want).max()


def test_the_two_parts_of_the_clip_differ(clip):
    """Else the comparison above would prove nothing."""
    assert np.abs(clip["whole_embedding"] - clip["ragged_embedding"]).max() > 0.01


def test_a_batch_equals_its_rows(encoder):
    pcm = torch.randn(2, 12_000, generator=torch.Generator().manual_seed(0)) * 0.1
    mel = mel_spectrogram(pcm)
    assert mel.shape == (2, 12_000 // 256, 128)
    with torch.no_grad():
        together = encoder(mel)
        alone = torch.cat([encoder(mel[:1]), encoder(mel[1:])])
    assert together.shape == (2, encoder.dim)
    assert (together - alone).abs().max() < 1e-4


def test_gradients_reach_audio_and_weights(encoder):
    pcm = (torch.randn(1, 8000, generator=torch.Generator().manual_seed(0)) * 0.1).requires_grad_()
    encoder(mel_spectrogram(pcm)).square().sum().backward()
    assert pcm.grad is not None and pcm.grad.abs().sum() > 0
    assert all(p.grad is not None for p in encoder.parameters())
    encoder.zero_grad(set_to_none=True)


@pytest.mark.parametrize("pcm", [np.zeros(4095, np.float32), np.zeros((2, 24000), np.float32)])
def test_too_short_and_many_channels_are_refused(encoder, pcm):
    with pytest.raises(InvalidAudio) as error:
        encoder.embed(pcm)
    assert error.value.field == "voice"


def test_the_shortest_clip_allowed_works_at_the_published_geometry():
    embedding = SpeakerEncoder({}).eval().embed(np.zeros(4096, np.float32))
    assert embedding.shape == (1024,) and np.isfinite(embedding).all()


@pytest.mark.parametrize(
    "change",
    [
        {"enc_channels": [512, 512, 1536]},
        {"enc_channels": [512, 512, 512, 512, 1024]},
        {"enc_res2net_scale": 7},
    ],
)
def test_layer_lists_that_do_not_fit_are_refused(change):
    with pytest.raises(CheckpointError, match="enc_channels"):
        SpeakerEncoder(change)
