"""A codec in 16 bits is held against float32 before it serves anyone."""

from __future__ import annotations

import pytest
import torch

from engine.checkpoint import Checkpoint
from engine.codec import precision
from engine.codec.codec import Codec
from engine.config import EMBEDDED_MODEL, ROOT
from engine.errors import ConfigError


@pytest.fixture(scope="module")
def checkpoint():
    return Checkpoint.open(str(ROOT / EMBEDDED_MODEL))


def test_float16_suits_the_embedded_voice(checkpoint):
    plain = Codec.load(checkpoint)
    wanted = precision.spoken(plain.decoder)
    assert wanted.shape == (2, 1, 25 * 1920) and wanted.abs().max() > 0.01
    half = Codec.load(checkpoint, dtype=torch.float16)
    assert 45 < precision.check(half.decoder, wanted) < 70


def test_activations_beyond_float16_are_told_at_the_start(checkpoint, monkeypatch):
    """In float32 the next layer's weights make a hundred thousand times as much small again."""
    tensors = Checkpoint.codec_tensors

    def larger(self, prefix=""):
        for name, tensor in tensors(self, prefix):
            enlarged = name.removeprefix(prefix).startswith("decoder.0.conv")
            yield name, tensor.float() * 1e5 if enlarged else tensor

    monkeypatch.setattr(Checkpoint, "codec_tensors", larger)
    assert torch.isfinite(precision.spoken(Codec.load(checkpoint).decoder)).all()
    with pytest.raises(ConfigError, match="set it to auto") as refusal:
        Codec.load(checkpoint, dtype=torch.float16)
    assert refusal.value.field == "codec.dtype"


def test_the_transformer_stays_wide(checkpoint):
    """On these codes its third layer reaches 81,000, which float16 does not hold."""
    decoder, largest = Codec.load(checkpoint, dtype=torch.float16).decoder, []
    for layer in decoder.pre_transformer.layers:
        layer.register_forward_hook(lambda module, given, out: largest.append(float(out.abs().max())))
    assert torch.isfinite(precision.spoken(decoder)).all() and max(largest) > 65_504
    state = decoder.init_state(3)
    assert {tensor.dtype for tensor in (*state.keys, *state.values, state.histories[0])} == {torch.float32}
    assert {tensor.dtype for tensor in state.histories[1:]} == {torch.float16}


def test_values_that_are_off_are_told(checkpoint):
    half = Codec.load(checkpoint, dtype=torch.float16)
    wanted = precision.spoken(half.decoder)
    with pytest.raises(ConfigError, match="only 34 dB"):
        precision.check(half.decoder, wanted * 1.02)
