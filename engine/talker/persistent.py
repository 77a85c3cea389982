"""The code predictor of a few streams in one kernel that stays on the device for the whole frame
(kernels_persistent.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton

from engine.talker import kernels_persistent
from engine.talker.fp8 import MATRICES
from engine.talker.layers import decoder_layers
from engine.talker.slots import SEED, SUB_TEMPERATURE, SUB_TOP_K, SUB_TOP_P

if TYPE_CHECKING:
    from engine.talker.geometry import TalkerGeometry
    from engine.talker.model import TalkerModel


class Shape(NamedTuple):
    """How the kernel is cut: programs, warps of each, rows of a matrix that a warp reads at a time (wide and narrow
    products), columns side by side."""

    programs: int = 132
    warps: int = 8
    each: int = 2
    narrow: int = 1
    block_k: int = 256
    early: bool = True


SHAPE = Shape()
MOST_ROWS = 2  # streams; with more of them the programs have too much to hold


def fits(geometry: TalkerGeometry, device: torch.device, rows: int = MOST_ROWS, shape: Shape = SHAPE) -> bool:
    """Whether the device can hold all programs at once, and each its part of every matrix."""
    g, wide, narrow = geometry.predictor, shape.programs * shape.warps * shape.each, shape.programs * shape.warps
    heads = g.heads // g.kv_heads, g.head_dim
    suits = (
        g.qkv_width <= 2 * wide
        and 2 * g.intermediate <= 3 * wide
        and g.hidden <= narrow * shape.narrow
        and geometry.predictor_vocab <= wide
        and rows * g.heads <= shape.programs
        and all(size & (size - 1) == 0 for size in heads)
    )
    if not suits or device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    return torch.cuda.get_device_properties(device).multi_processor_count >= shape.programs


class PersistentPredictor:
    """Runs a predictor's weights. Needs Triton only, so tests run it in Triton's interpreter (one program)."""

    def __init__(self, model: TalkerModel, shape: Shape | None = None) -> None:
        """Reads `model.predictor` and `model.geometry`."""
        self.predictor, self.geometry = model.predictor, model.geometry
        self.shape = shape or SHAPE
        self.stacked: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def finish_loading(self) -> None:
        """Put each kind of matrix one layer after the other in memory; the layers' own become views of that."""
        stack = decoder_layers(self.predictor.layers)
        for name in MATRICES:
            self.stacked[name] = torch.stack([getattr(layer, name).detach() for layer in stack])
            for layer, matrix in zip(stack, self.stacked[name], strict=True):
                getattr(layer, name).data = matrix
        norms = [[layer.input_norm, layer.post_norm, layer.query_norm, layer.key_norm] for layer in stack]
        self.stacked["norms"] = torch.stack([torch.cat(each) for each in norms])
        self.counters = torch.zeros(64, dtype=torch.int32, device=self.predictor.norm.device)

    def predict(
        self,
        hidden: torch.Tensor,
        first: torch.Tensor,
        integers: torch.Tensor,
        reals: torch.Tensor,
        frame: torch.Tensor,
    ) -> torch.Tensor:
        """As CodePredictor.forward."""
        predictor, g, groups = self.predictor, self.geometry.predictor, self.geometry.groups
        rows, layers = hidden.shape[0], len(predictor.layers)
        codes = first.new_empty(rows, groups)
        start = predictor.project(hidden).contiguous()
        vocab = predictor.heads.shape[1]
        widths = g.hidden, g.qkv_width, g.heads * g.head_dim, g.intermediate, vocab
        padded = triton.next_power_of_2(rows)  # a kernel's rows are a power of two; nobody reads the padding's results
        scratch = [hidden.new_empty(padded, width) for width in widths]
        cache = hidden.new_empty(layers, 2, rows, g.kv_heads, groups, g.head_dim)
        shape = self.shape
        kernels_persistent.predict[(shape.programs,)](
            start,
            first,
            codes,
            self.counters,
            *scratch,
            cache,
            *(self.stacked[name] for name in ("qkv", "output", "gate_up", "down", "norms")),
            predictor.norm,
            predictor.heads,
            predictor.projected,
            predictor.projected_first,
            predictor.rotary,
            integers[:, SEED],
            integers[:, SUB_TOP_K],
            integers.stride(0),
            reals[:, SUB_TEMPERATURE],
            reals[:, SUB_TOP_P],
            reals.stride(0),
            frame,
            g.eps,
            g.head_dim**-0.5,
            COUNT=rows,
            LAYERS=layers,
            GROUPS=groups,
            HIDDEN=g.hidden,
            WIDE=g.intermediate,
            HEADS=g.heads,
            KV_HEADS=g.kv_heads,
            DIM=g.head_dim,
            VOCAB=vocab,
            BITS=16 if hidden.dtype == torch.bfloat16 else 32,
            PROGRAMS=shape.programs,
            WARPS=shape.warps,
            EACH=shape.each,
            NARROW=shape.narrow,
            BLOCK_K=shape.block_k,
            EARLY=shape.early,
            num_warps=shape.warps,
        )
        return codes
