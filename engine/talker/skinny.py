"""The code predictor on CUDA in five kernels a layer, over kernels_skinny.py: q/k/v with its norm, attention, output
with the residual, gate and up with their norm and SwiGLU, down with the residual.

`TILES` says how each of them is cut for a number of rows; tests/gpu/check_predictor.py measures candidates for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
import triton

from engine.talker import kernels_skinny
from engine.talker.fp8 import MATRICES, quantize
from engine.talker.fused import FusedStep, attend, sample
from engine.talker.layers import decoder_layers
from engine.talker.sampler import uniform
from engine.talker.slots import SEED, SUB_TEMPERATURE, SUB_TOP_K, SUB_TOP_P

if TYPE_CHECKING:
    from engine.talker.model import TalkerModel


class Tile(NamedTuple):
    """How a product is cut into programs. BLOCK_M 0: a row a program, without tensor cores (row_linear)."""

    block_m: int
    block_n: int
    block_k: int
    split: int = 1  # parts of K that different warps sum; at most `warps`
    warps: int = 4
    stages: int = 1  # blocks of K that are loaded ahead


class Matrix(NamedTuple):
    """A linear layer's weight [N, K]: the model's own with no scales, or float8_e4m3fn with scales [N] float32."""

    weight: torch.Tensor
    scales: torch.Tensor | None = None


# By kind, then by the most rows an entry is for. Steps of more rows than a kind has here run the separate kernels.
TILES: dict[str, dict[int, Tile]] = {
    "qkv": {
        2: Tile(0, 16, 256, warps=4),
        16: Tile(16, 16, 64, split=4, warps=4, stages=3),
        32: Tile(32, 16, 64, split=4, warps=4, stages=3),
        64: Tile(64, 32, 128, warps=4, stages=4),
        128: Tile(64, 64, 128, warps=4, stages=3),
    },
    "output": {
        2: Tile(0, 8, 512, warps=4),
        16: Tile(16, 8, 128, split=4, warps=4, stages=3),
        32: Tile(32, 8, 128, split=4, warps=4, stages=3),
        64: Tile(32, 16, 128, split=4, warps=4, stages=3),
        128: Tile(64, 16, 128, warps=4, stages=4),
    },
    "gate_up": {
        2: Tile(0, 16, 256, warps=4),
        16: Tile(16, 16, 64, split=4, warps=4, stages=3),
        32: Tile(32, 16, 64, split=4, warps=4, stages=3),
        64: Tile(64, 32, 64, warps=4, stages=4),
        128: Tile(64, 64, 64, warps=4, stages=3),
    },
    "down": {
        2: Tile(0, 8, 512, warps=4),
        16: Tile(16, 8, 128, split=4, warps=4, stages=3),
        32: Tile(32, 8, 128, split=4, warps=4, stages=3),
        64: Tile(32, 16, 128, split=4, warps=4, stages=3),
        128: Tile(64, 16, 128, warps=4, stages=4),
    },
    "head": {
        2: Tile(0, 16, 256, warps=4),
        16: Tile(16, 16, 64, split=4, warps=4, stages=3),
        32: Tile(32, 16, 64, split=4, warps=4, stages=3),
        64: Tile(64, 16, 128, warps=4, stages=4),
    },
}
FP8_TILES: dict[str, dict[int, Tile]] = {}  # where eight bits want other ones; the rest is as above

MOST_ROWS = 64  # streams; more of them run the separate kernels


def tile(kind: str, rows: int, scaled: bool) -> Tile:
    """The entry for so many rows; the largest one if there are more."""
    found = TILES[kind] | (FP8_TILES.get(kind, {}) if scaled else {})
    return found[min((most for most in found if most >= rows), default=max(found))]


def overlaps(device: torch.device) -> bool:
    """Whether kernels may start before the last one has ended (programmatic dependent launch): Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def linear(
    kind: str,
    x: torch.Tensor,
    matrix: Matrix,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    cut: Tile | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    """A linear layer over a few rows.

    Args:
        kind: a key of TILES; "gate_up" is gated: the weight is [2 * N, K] and the result silu(gate) * up.
        x: [R, K] float32 or bfloat16, rows any stride apart; the dtype of norm, residual and result.
        norm: [K], RMSNorm of x before the product, with `eps`.
        residual: [R, N] contiguous, added to the product.
        cut: instead of the table's; pdl: instead of what the device can do.

    Returns:
        [R, N].
    """
    rows, size = x.shape
    gated, scaled = kind == "gate_up", matrix.scales is not None
    columns = matrix.weight.shape[0] // (2 if gated else 1)
    cut, pdl = cut or tile(kind, rows, scaled), overlaps(x.device) if pdl is None else pdl
    out = x.new_empty(rows, columns)
    constants: dict[str, Any] = {
        "N": columns,
        "K": size,
        "NORM": norm is not None,
        "GATED": gated,
        "ADD": residual is not None,
        "SCALED": scaled,
        "BLOCK_N": cut.block_n,
        "BLOCK_K": cut.block_k,
        "PDL": pdl,
        "num_warps": cut.warps,
    }
    if pdl:
        constants["launch_pdl"] = True
    # what a constant switches off still needs a pointer
    scales, norm, residual = (other if other is not None else x for other in (matrix.scales, norm, residual))
    arguments = (x, matrix.weight, scales, norm, residual, out, rows, x.stride(0), eps)
    across = triton.cdiv(columns, cut.block_n)
    if cut.block_m == 0:
        kernels_skinny.row_linear[(across, rows)](*arguments, **constants)
    else:
        kernels_skinny.tile_linear[(across, triton.cdiv(rows, cut.block_m))](
            *arguments,
            **constants,
            BLOCK_M=cut.block_m,
            SPLIT=cut.split,
            WIDE=x.dtype == torch.float32 or not x.is_cuda,
            num_stages=cut.stages,
        )
    return out


class SkinnyPredictor:
    """Runs a predictor's weights. Needs Triton only, so tests run it in Triton's interpreter."""

    def __init__(self, model: TalkerModel) -> None:
        """Reads `model.predictor` and `model.geometry`."""
        self.predictor, self.geometry = model.predictor, model.geometry
        self.layers: list[dict[str, Matrix]] = []
        self.heads: list[Matrix] = []

    def finish_loading(self, fp8: bool) -> None:
        """Take the weights as they are, or in eight bits (exact once fp8.round_weights has been over them)."""

        def held(weight: torch.Tensor) -> Matrix:
            return Matrix(*quantize(weight)) if fp8 else Matrix(weight.detach())

        stack = decoder_layers(self.predictor.layers)
        self.layers = [{name: held(getattr(layer, name)) for name in MATRICES} for layer in stack]
        self.heads = [held(head) for head in self.predictor.heads]

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
        rows, stack = hidden.shape[0], decoder_layers(predictor.layers)
        pdl = overlaps(hidden.device)
        draws = uniform(integers[:, SEED, None], frame[:, None], predictor.groups[None])
        codes = first.new_empty(rows, groups)
        codes[:, 0] = first
        cache = hidden.new_empty(len(stack), 2, rows, g.kv_heads, groups, g.head_dim)
        start = torch.stack([predictor.project(hidden), F.embedding(first, predictor.projected_first)], dim=1)
        x, per, position = start.view(2 * rows, g.hidden), 2, 0  # positions 0 and 1 of each row, side by side
        for group in range(groups - 1):
            for layer, held, cached in zip(stack, self.layers, cache, strict=True):
                qkv = linear("qkv", x, held["qkv"], layer.input_norm, g.eps, pdl=pdl)
                attended = hidden.new_empty(rows * per, g.heads * g.head_dim)
                for step in range(per):
                    where = qkv[step:], attended[step:], cached, position + step
                    attend(predictor, layer, *where, rows, per, pdl)
                x = linear("output", attended, held["output"], residual=x, pdl=pdl)
                active = linear("gate_up", x, held["gate_up"], layer.post_norm, g.eps, pdl=pdl)
                x = linear("down", active, held["down"], residual=x, pdl=pdl)
            if per == 2:  # only the second position goes on to the head
                x = x.view(rows, 2, g.hidden)[:, 1]
            position, per = position + per, 1
            logits = linear("head", x, self.heads[group], predictor.norm, g.eps, pdl=pdl)
            following = (predictor.projected[group], stack[0].input_norm, g.eps) if group + 2 < groups else None
            columns = (SUB_TEMPERATURE, SUB_TOP_P, SUB_TOP_K)
            found = sample(logits, draws[:, group], reals, integers, columns, codes[:, group + 1], following, pdl)
            if found is not None:
                x = found[1]
        return codes


class SkinnyStep(FusedStep):
    """As FusedStep, with the predictor in fewer kernels: bfloat16, up to MOST_ROWS rows."""

    def __init__(self, model: TalkerModel, fp8: bool) -> None:
        super().__init__(model)
        self.fp8 = fp8
        self.skinny = SkinnyPredictor(model) if model.head.dtype == torch.bfloat16 else None

    def finish_loading(self) -> None:
        super().finish_loading()
        if self.skinny is not None:
            self.skinny.finish_loading(self.fp8)

    def predict(
        self,
        hidden: torch.Tensor,
        first: torch.Tensor,
        integers: torch.Tensor,
        reals: torch.Tensor,
        frame: torch.Tensor,
    ) -> torch.Tensor:
        if self.skinny is None or hidden.shape[0] > MOST_ROWS:
            return super().predict(hidden, first, integers, reals, frame)
        return self.skinny.predict(hidden, first, integers, reals, frame)
