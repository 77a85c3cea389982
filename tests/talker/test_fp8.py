"""Eight-bit weights of the predictor: what they hold, and that every path runs the same ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.talker import Talker, TalkerSettings
from engine.talker.fp8 import LARGEST, dequantize, matrices, quantize, round_weights
from engine.talker.geometry import TalkerGeometry
from engine.talker.predictor import CodePredictor
from engine.talker.slots import SlotOptions
from engine.wiring import talker_settings
from tests.talker.driving import SMALL, Collector, Random, geometry_config, prompt


def test_quantize():
    torch.manual_seed(0)
    weight = torch.randn(3, 40, 96) * torch.logspace(-4, 2, 40)[:, None]
    weight[1, 7] = 0
    weight[0, 0, 0] = LARGEST / 32  # far above the rest of its row
    held, scale = quantize(weight)
    assert scale[0, 0] == 1 / 32 and scale[1, 7] == 1
    assert held.dtype == torch.float8_e4m3fn and held.shape == weight.shape and scale.shape == (3, 40)
    assert torch.frexp(scale)[0].eq(0.5).all(), "powers of two"
    peak = weight.abs().amax(-1)
    assert (peak <= LARGEST * scale).all() and ((peak > LARGEST / 2 * scale) | (peak == 0)).all(), "the least of them"
    found = dequantize(held, scale, torch.float32)
    # four significant bits, below the smallest normal number a fixed step
    assert ((found - weight).abs() <= torch.maximum(weight.abs() / 16, scale[..., None] * 2.0**-10)).all()
    assert torch.equal(found, found.bfloat16().float()), "exact in bfloat16"
    assert torch.equal(dequantize(*quantize(found), torch.float32), found), "a second time changes nothing"


def test_weights_are_rounded_and_nothing_else():
    predictor = CodePredictor(TalkerGeometry.from_config(geometry_config()))
    torch.manual_seed(0)
    for weight in predictor.parameters():
        weight.data.normal_(0, 0.02)
    before = {name: weight.clone() for name, weight in predictor.named_parameters()}
    round_weights(predictor)
    for name, weight in predictor.named_parameters():
        rounded = name == "heads" or name.endswith((".qkv", ".output", ".gate_up", ".down"))
        expected = dequantize(*quantize(before[name]), torch.float32) if rounded else before[name]
        assert torch.equal(weight, expected) and torch.equal(weight, before[name]) != rounded, name
    assert len(list(matrices(predictor))) == 2 * 4 + 15


def test_the_cpu_speaks_with_rounded_weights():
    """Compiled kernels and plain torch agree on them; without the setting the weights stay."""
    codes = {}
    for predictor, held in (("fused", "fp8"), ("plain", "fp8"), ("skinny", "auto")):
        settings = TalkerSettings(**SMALL, predictor=predictor, predictor_weights=held)
        with Talker(settings, Random(geometry_config())) as talker:
            weight = talker.model.predictor.layers[0].qkv
            assert torch.equal(weight, dequantize(*quantize(weight), torch.float32)) == (held == "fp8")
            talker.add("a", prompt(1, 20), SlotOptions(seed=3, max_frames=12, min_frames=12))
            codes[predictor] = Collector(talker).run()["a"].codes
    assert np.array_equal(codes["fused"], codes["plain"]) and not np.array_equal(codes["fused"], codes["skinny"])


def test_settings():
    config = EngineConfig.load(None, **{"talker.predictor_weights": "fp8", "talker.predictor": "skinny"})
    settings = talker_settings(config, torch.device("cpu"))
    assert (settings.predictor_weights, settings.predictor) == ("fp8", "skinny")
    assert talker_settings(EngineConfig(), torch.device("cpu")).predictor_weights == "auto"
    for name in ("predictor_weights", "predictor"):
        with pytest.raises(ConfigError, match=name):
            EngineConfig.load(None, **{f"talker.{name}": "fp4"})
    with pytest.raises(ConfigError, match="predictor_weights"):
        EngineConfig.load(None, **{"talker.predictor_weight": "fp8"})
