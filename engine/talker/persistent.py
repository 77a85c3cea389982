"""The code predictor of one stream in a single kernel that stays on the device for the whole frame."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from engine.talker import kernels_persistent
from engine.talker.fp8 import MATRICES
from engine.talker.layers import decoder_layers
from engine.talker.slots import SEED, SUB_TEMPERATURE, SUB_TOP_K, SUB_TOP_P

if TYPE_CHECKING:
    from engine.talker.geometry import TalkerGeometry
    from engine.talker.model import TalkerModel


class Shape(NamedTuple):
    """How the kernel is cut: programs, warps of each, and the rows of a matrix that a warp reads at a time, of wide
    products (q/k/v, gate and up, head) and of narrow ones (output, down)."""

    programs: int = 132
    warps: int = 8
    each: int = 2
    narrow: int = 1


SHAPE = Shape()
# In use in this process. Two kernels whose programs wait for each other, started side by side on one device, could each
# hold a part of it and wait for ever.
_live: weakref.WeakSet[PersistentPredictor] = weakref.WeakSet()


def fits(geometry: TalkerGeometry, device: torch.device, shape: Shape = SHAPE) -> bool:
    """Whether each program can hold its part of every matrix, and the device (Hopper or later) all of them at once,
    which no other predictor of this process may have."""
    g, narrow = geometry.predictor, shape.programs * shape.warps * shape.narrow
    wide = shape.programs * shape.warps * shape.each
    suits = (
        g.qkv_width <= 2 * wide
        and 2 * g.intermediate <= 3 * wide
        and g.hidden <= narrow
        and geometry.predictor_vocab <= wide
        and g.heads <= shape.programs
        and g.head_dim & (g.head_dim - 1) == 0
    )
    if not suits or device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    if any(other.device == device for other in _live):
        return False
    return torch.cuda.get_device_properties(device).multi_processor_count >= shape.programs


class PersistentPredictor:
    """Runs a predictor's weights where they fit (`fits`): elsewhere programs would wait for others that never start.

    Needs Triton only, so tests run it in Triton's interpreter (one program).
    """

    def __init__(self, model: TalkerModel, shape: Shape = SHAPE) -> None:
        """Reads `model.predictor` and `model.geometry`."""
        self.predictor, self.geometry, self.shape = model.predictor, model.geometry, shape
        self.stacked: dict[str, torch.Tensor] = {}
        self.device = self.predictor.norm.device
        _live.add(self)

    def close(self) -> None:
        """Will not run again: leave the device to another one."""
        _live.discard(self)

    @torch.no_grad()
    def finish_loading(self) -> None:
        """Put each kind of matrix one layer after the other in memory; the layers' own become views of that."""
        stack = decoder_layers(self.predictor.layers)
        for name in MATRICES:
            self.stacked[name] = torch.stack([getattr(layer, name).detach() for layer in stack])
            for layer, matrix in zip(stack, self.stacked[name], strict=True):
                getattr(layer, name).data = matrix
        norms = [(layer.input_norm, layer.post_norm, layer.query_norm, layer.key_norm) for layer in stack]
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
        """As CodePredictor.forward, of one row."""
        predictor, g, groups, shape = self.predictor, self.geometry.predictor, self.geometry.groups, self.shape
        layers, vocab = len(predictor.layers), predictor.heads.shape[1]
        codes = first.new_empty(1, groups)
        widths = g.hidden, g.qkv_width, g.heads * g.head_dim, g.intermediate, vocab
        kernels_persistent.predict[(shape.programs,)](
            predictor.project(hidden).contiguous(),
            first,
            codes,
            self.counters,
            *(hidden.new_empty(width) for width in widths),
            hidden.new_empty(layers, 2, g.kv_heads, groups, g.head_dim),
            *(self.stacked[name] for name in (*MATRICES, "norms")),
            predictor.norm,
            predictor.heads,
            predictor.projected,
            predictor.projected_first,
            predictor.rotary,
            integers[:, SEED],
            frame,
            reals[:, SUB_TEMPERATURE],
            reals[:, SUB_TOP_P],
            integers[:, SUB_TOP_K],
            g.eps,
            g.head_dim**-0.5,
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
            num_warps=shape.warps,
        )
        return codes
