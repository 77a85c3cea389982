"""What surrounds the talker's layers on CUDA against the plain torch step. On a GPU, or in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("vllm")

import triton
import triton.language as tl

from engine.talker import kernels, sampler
from engine.talker.fused import FusedStep
from engine.talker.geometry import TalkerGeometry
from engine.talker.predictor import CodePredictor
from engine.talker.slots import SlotBuffers, SlotOptions
from engine.talker.torch_step import TorchStep
from tests.talker.driving import geometry_config, prompt

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, FRAMES = 6, 40


@triton.jit
def draws(seeds, frames, group, out):
    row = tl.program_id(0)
    tl.store(out + row, kernels.uniform(tl.load(seeds + row), tl.load(frames + row), tl.cast(group, tl.int64)))


def test_uniform():
    """To the last bit: the same seed draws the same numbers on every device."""
    generator = torch.Generator().manual_seed(3)
    seeds = torch.randint(-(1 << 62), 1 << 62, (64,), generator=generator).to(DEVICE)
    seeds[:3] = torch.tensor([0, -(1 << 63), (1 << 63) - 1])
    frames = torch.randint(0, 2000, (64,), generator=generator).to(DEVICE)
    out = torch.empty(64, device=DEVICE)
    for group in (0, 1, 15, 16):
        draws[(64,)](seeds, frames, group, out)
        assert torch.equal(out, sampler.uniform(seeds, frames, torch.full_like(frames, group)))
    assert len(out.unique()) > 60


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def steps(request):
    """A plain and a fused step over slots with four requests at different frames, each with its own slots."""
    geometry, dtype = TalkerGeometry.from_config(geometry_config()), request.param
    torch.manual_seed(2)
    with torch.device(DEVICE):
        predictor = CodePredictor(geometry)
        for weight in predictor.parameters():
            weight.data.normal_(0, 0.3)
        predictor = predictor.to(dtype)
        head = (torch.randn(geometry.vocab, geometry.talker.hidden) * 0.3).to(dtype)
    made = []
    for kind in (TorchStep, FusedStep):
        slots = SlotBuffers(geometry, SLOTS, 60, FRAMES, torch.device(DEVICE), dtype)
        for slot in range(1, 5):
            settings = SlotOptions(
                seed=slot - 3, max_frames=FRAMES, min_frames=8 * (slot % 2), temperature=(0.0, 0.9, 1.3, 0.6)[slot - 1],
                top_k=(0, 50, 7, 20)[slot - 1], top_p=(1.0, 0.9, 1.0, 0.5)[slot - 1], repetition_penalty=1 + slot / 5,
            )  # fmt: skip
            slots.write(slot, 100 + slot, prompt(slot, 5 + slot, trailing=3 * slot), settings)
            generator = torch.Generator().manual_seed(slot)
            spoken = torch.randint(0, geometry.predictor_vocab, (4 * slot, geometry.groups), generator=generator)
            slots.codes[slot, 1 : 1 + 4 * slot] = spoken.to(DEVICE)
            slots.seen_at[slot, spoken[:, 0]] = torch.arange(1, 1 + 4 * slot, dtype=torch.int32, device=DEVICE)
        model = SimpleNamespace(geometry=geometry, slots=slots, predictor=predictor, head=head, end_token=SLOTS + 1)
        model.max_positions, model.max_rows = 200, 12
        step = kind(model)
        # codes that follow from code 0: the predictor itself has tests of its own
        step.predict = lambda hidden, first, integers, reals, frame: torch.stack(
            [first, *((first * 7 + frame + group) % 96 for group in range(1, geometry.groups))], dim=1
        )
        made.append(step)
    return made


def test_input_rows(steps):
    """Rows inside prompts, at every kind of decode position, of the trash slot and of ids that are no slots."""
    ids = torch.tensor([1, 1, 2, 3, 4, 4, 0, -1, SLOTS + 1, 3], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([0, 5, 6, 9, 11, 24, 3, 2, 0, 7 + 500], device=DEVICE)
    (expected, *wanted), (found, *got) = (step.inputs(ids, positions) for step in steps)
    for one, other in zip(wanted, got, strict=True):
        assert torch.equal(one, other)
    assert {*wanted[1].tolist()} >= {0, 1} and wanted[1].max() > FRAMES and wanted[1].min() < 0
    found, expected = found[:6].float(), expected[:6].float()  # slot 0 holds whatever was left there
    half = steps[0].model.head.dtype == torch.bfloat16  # a sum near a border may be rounded to the other side
    torch.testing.assert_close(found, expected, rtol=0, atol=0.07 if half else 1e-5)


def test_speak(steps):
    """Codes, first occurrences, reports and tokens; what is not valid leaves no trace outside the trash slot."""
    torch.manual_seed(8)
    hidden = torch.randn(9, steps[0].model.head.shape[1], device=DEVICE).to(steps[0].model.head.dtype)
    slot = torch.tensor([1, 2, 3, 4, 2, 3, 0, 4, 1], device=DEVICE)
    frame = torch.tensor([5, 9, 13, 17, 4, -3, 2, 18, FRAMES + 9], device=DEVICE)  # row 4 repeats a stored frame
    valid = torch.tensor([True, True, True, True, True, False, False, True, False], device=DEVICE)
    eos = steps[0].model.geometry.eos
    hidden[7] = steps[0].model.head[eos] * 9  # an end, and one that min_frames holds back
    hidden[0] = hidden[7]
    untouched = steps[0].model.slots.codes[5:].clone()
    for step in steps:
        step.report.fill_(7)
    expected, found = (step.speak(hidden, slot, frame, valid) for step in steps)
    assert torch.equal(found, expected)
    assert expected.tolist() == [1, 2, 3, 4, 2, 0, 0, SLOTS + 1, 0]
    plain, fused = (step.model.slots for step in steps)
    assert torch.equal(fused.codes[1:], plain.codes[1:]) and torch.equal(fused.seen_at[1:], plain.seen_at[1:])
    assert torch.equal(fused.codes[5:], untouched)
    assert plain.codes[1, 5, 0] != eos and plain.codes[4, 18, 0] == eos
    rows = [0, 1, 2, 3, 4, 9, 10, 11]  # and the tickets of the others
    assert torch.equal(steps[1].report[rows], steps[0].report[rows])
    assert torch.equal(steps[1].report[:, 0], steps[0].report[:, 0])
    assert steps[0].report[:, 0].tolist() == [101, 102, 103, 104, 102, 0, 0, 0, 0, 0, 0, 0]
