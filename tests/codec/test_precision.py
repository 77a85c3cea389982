"""A codec in 16 bits is held against float32 before it serves anyone."""

from __future__ import annotations

import numpy as np
import pytest
import soundfile as sf
import torch

from engine import wiring
from engine.checkpoint import Checkpoint
from engine.codec import precision
from engine.codec.codec import Codec
from engine.config import EMBEDDED_MODEL, ROOT, EngineConfig
from engine.errors import ConfigError


@pytest.fixture(scope="module")
def checkpoint():
    return Checkpoint.open(str(ROOT / EMBEDDED_MODEL))


def test_float16_suits_the_embedded_voice(checkpoint):
    plain = Codec.load(checkpoint)
    wanted = precision.spoken(plain.decoder)
    assert wanted.shape == (2, 1, 25 * 1920) and wanted.abs().max() > 0.01
    half = Codec.load(checkpoint, dtype=torch.float16)
    assert 57 < precision.check(half.decoder, wanted) < 70


def test_float16_stays_near_on_speech(checkpoint):
    """58.9 dB for both; all of it in float16 50.9, Snake's constants or what is in front of the blocks 3 to 5 less."""
    plain, half = Codec.load(checkpoint), Codec.load(checkpoint, dtype=torch.float16)
    for name in ("human_librivox_b", "kokoro_am_michael"):
        clip, rate = sf.read(ROOT / "assets" / "voices" / f"{name}.flac", dtype="float32")
        assert rate == 24000
        codes = plain.encode(clip[: 2 * rate])
        wanted = plain.decode(codes)
        difference = half.decode(codes) - wanted
        assert 10 * np.log10(np.square(wanted).sum() / np.square(difference).sum()) > 57


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


def test_float16_needs_room_for_louder_values(checkpoint, monkeypatch):
    """Random codes reach a thousandth of float16's range; weights that need a tenth of it for them are refused."""
    assert 2 < precision.check_room(Codec.load(checkpoint).decoder) < 30
    tensors = Checkpoint.codec_tensors

    def larger(self, prefix=""):
        for name, tensor in tensors(self, prefix):
            yield (
                name,
                tensor.float() * 1e3 if name.removeprefix(prefix).startswith("decoder.1.block.1.conv") else tensor,
            )

    monkeypatch.setattr(Checkpoint, "codec_tensors", larger)
    with pytest.raises(ConfigError, match="too near to float16's end") as refusal:
        Codec.load(checkpoint, dtype=torch.float16)
    assert refusal.value.field == "codec.dtype"


def test_what_auto_means(checkpoint, monkeypatch, caplog):
    """float16 on CUDA where the weights bear it, to 50 dB; whoever asks for it is told, auto goes back to float32."""
    asked, bears = [], [True]

    def load(given, device="cpu", dtype=torch.float32, least_db=None):
        asked.append((str(device), dtype, least_db))
        if dtype == torch.float16 and not bears[0]:
            raise ConfigError("these weights do not bear it", field="codec.dtype")
        return dtype

    monkeypatch.setattr(wiring.Codec, "load", load)
    auto, half = EngineConfig.load(None), EngineConfig.load(None, **{"codec.dtype": "float16"})
    cuda, cpu = torch.device("cuda:1"), torch.device("cpu")
    assert wiring.load_codec(auto, checkpoint, cpu) == torch.float32
    assert wiring.load_codec(auto, checkpoint, cuda) == wiring.load_codec(half, checkpoint, cpu) == torch.float16
    bears[0] = False
    assert wiring.load_codec(auto, checkpoint, cuda) == torch.float32 and "do not bear it" in caplog.text
    with pytest.raises(ConfigError, match="bear"):
        wiring.load_codec(half, checkpoint, cuda)
    bears[0] = True
    for eager in ({"codec.state": "host"}, {"codec.capture": [[4, 2], [4, 8]]}):  # chunks of one frame have no graph
        assert wiring.load_codec(EngineConfig.load(None, **eager), checkpoint, cuda) == torch.float32
    assert asked[1] == ("cuda:1", torch.float16, 50.0) and asked[4] == ("cuda:1", torch.float32, None)


def test_the_transformer_stays_wide(checkpoint):
    """On these codes its third layer reaches 81,000, which float16 does not hold."""
    decoder, largest = Codec.load(checkpoint, dtype=torch.float16).decoder, []
    for layer in decoder.pre_transformer.layers:
        layer.register_forward_hook(lambda module, given, out: largest.append(float(out.abs().max())))
    assert torch.isfinite(precision.spoken(decoder)).all() and max(largest) > 65_504
    state = decoder.init_state(3)
    assert {tensor.dtype for tensor in (*state.keys, *state.values)} == {torch.float32}


def test_only_the_blocks_convolutions_are_narrow(checkpoint):
    decoder = Codec.load(checkpoint, dtype=torch.float16).decoder
    narrow = {name for name, p in decoder.named_parameters() if p.dtype == torch.float16}
    assert narrow == {name for name, p in decoder.named_parameters() if ".block." in name and p.ndim == 3}
    assert decoder.tail_dtype == torch.float16
    state = decoder.init_state(1)
    after = decoder.step(torch.zeros(1, decoder.groups, 2, dtype=torch.int64), state)[1]
    blocks = 4 * (1 + 3)  # of each block the transposed convolution and three dilated ones remember
    kept = [tensor.dtype for tensor in state.histories]
    assert kept == [tensor.dtype for tensor in after.histories]
    assert kept == [torch.float32] * (len(kept) - blocks - 1) + [torch.float16] * blocks + [torch.float32]


def test_values_that_are_off_are_told(checkpoint):
    half = Codec.load(checkpoint, dtype=torch.float16)
    wanted = precision.spoken(half.decoder)
    with pytest.raises(ConfigError, match="only 34 dB"):
        precision.check(half.decoder, wanted * 1.02)
