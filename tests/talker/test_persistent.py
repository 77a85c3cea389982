"""The predictor in one kernel against torch. On a GPU with programs that wait for each other, in Triton's interpreter
with a single one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("vllm")

from engine.geometry import published_config
from engine.talker.geometry import TalkerGeometry
from engine.talker.persistent import PersistentPredictor, Shape, fits
from engine.talker.predictor import CodePredictor
from engine.talker.slots import SEED, SUB_TEMPERATURE, SUB_TOP_K, SUB_TOP_P
from tests.talker.driving import geometry_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# programs, warps, rows of wide and of narrow products for each warp
SHAPES = [Shape(16, 4, 4, 2), Shape(24, 8, 2, 1)] if DEVICE == "cuda" else [Shape(1, 4, 64, 32)]


def both(hidden: int, shape: Shape, dtype: torch.dtype = torch.float32) -> tuple[CodePredictor, PersistentPredictor]:
    geometry = TalkerGeometry.from_config(geometry_config(hidden=hidden, width=64, depth=2, groups=4, codes=48))
    torch.manual_seed(3)
    with torch.device(DEVICE):
        predictor = CodePredictor(geometry).to(dtype)
        for name, weight in predictor.named_parameters():
            weight.data.normal_(1 if name.endswith("norm") else 0, 0.1)
        predictor.finish_loading()
        one = PersistentPredictor(SimpleNamespace(predictor=predictor, geometry=geometry), shape)
        one.finish_loading()
    return predictor, one


def inputs(hidden: int, heat: float, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    integers, reals = torch.zeros(1, 7, dtype=torch.int64), torch.ones(1, 5)
    integers[:, SEED], integers[:, SUB_TOP_K] = seed, 20
    reals[:, SUB_TEMPERATURE], reals[:, SUB_TOP_P] = heat, 0.9
    first = torch.randint(0, 48, (1,), generator=generator)
    given = torch.randn(1, hidden, generator=generator), first, integers, reals, torch.tensor([seed + 3])
    return tuple(each.to(DEVICE) for each in given)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("hidden", [64, 128])
def test_codes(hidden, shape):
    """Greedy and sampled codes equal those of the plain predictor, without and with projection; time after time."""
    predictor, one = both(hidden, shape)
    for heat in (0.0, 0.9):
        for seed in range(8 if DEVICE == "cuda" else 2):
            given = inputs(hidden, heat, seed)
            assert torch.equal(one.predict(*given), predictor(*given))
            assert not one.counters.any()


def test_matrices_lie_in_memory_once():
    predictor, one = both(64, SHAPES[0])
    for index, layer in enumerate(predictor.layers):
        assert layer.qkv.data_ptr() == one.stacked["qkv"][index].data_ptr()


def test_where_it_suits(monkeypatch):
    """The published sizes on a Hopper GPU with 132 multiprocessors; not another one, nor other sizes."""
    gpu = {"capability": (9, 0), "multi_processor_count": 132}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpu["capability"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**gpu))
    published = TalkerGeometry.from_config(published_config("1.7b-base") or {})
    cuda = torch.device("cuda")
    assert fits(published, cuda)
    assert not fits(published, torch.device("cpu"))
    assert not fits(replace(published, predictor=replace(published.predictor, head_dim=96)), cuda)
    assert not fits(replace(published, predictor=replace(published.predictor, intermediate=4096)), cuda)
    for other in ({"capability": (8, 0)}, {"multi_processor_count": 114}):
        with monkeypatch.context() as patch:
            for name, value in other.items():
                patch.setitem(gpu, name, value)
            assert not fits(published, cuda)
    model = SimpleNamespace(predictor=SimpleNamespace(norm=SimpleNamespace(device=cuda)), geometry=published)
    first = PersistentPredictor(model)
    assert not fits(published, cuda) and fits(published, torch.device("cuda:1"))  # one at a time on a device
    first.close()
    assert fits(published, cuda)


@pytest.mark.skipif(DEVICE != "cuda", reason="the interpreter cuts bfloat16 off")
def test_bfloat16():
    predictor, one = both(64, SHAPES[0], torch.bfloat16)
    agree = []
    for seed in range(8):
        given = inputs(64, 0.0, seed)
        given = (given[0].bfloat16(), *given[1:])
        agree.append((one.predict(*given) == predictor(*given)).float().mean())
    assert sum(agree) / len(agree) > 0.7  # roundings differ, and a group follows from the one before
