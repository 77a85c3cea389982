"""The code predictor on CUDA in five kernels a layer, over kernels_skinny.py: q/k/v with its norm, attention, output
with the residual, gate and up with their norm and SwiGLU, down with the residual. By the same kernel the talker's own
layers, around vLLM's attention.

For few streams (MOST_ROWS, LAYER_ROWS): more of them run the separate kernels. `TILES` and `LAYER_TILES` say how the
products are cut into programs; tests/gpu/check_predictor.py measures candidates for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
import triton

from engine.talker import kernels_skinny, persistent
from engine.talker.fp8 import MATRICES, quantize
from engine.talker.fused import FusedStep, norm_rows
from engine.talker.launches import attend, sample
from engine.talker.layers import decoder_layers
from engine.talker.paged import PagedAttention
from engine.talker.slots import SUB_TEMPERATURE, SUB_TOP_K, SUB_TOP_P

if TYPE_CHECKING:
    from engine.talker.model import TalkerModel


class Tile(NamedTuple):
    """How a row's product is cut into programs, and what a program reads at a time.

    ahead: how many columns of its part of the matrix a program asks for before the kernels before it have ended.
    """

    block_n: int
    block_k: int
    warps: int
    ahead: int = 1 << 20  # all of them


class Matrix(NamedTuple):
    """A linear layer's weight [N, K]: the model's own with no scales, or float8_e4m3fn with scales [N] float32."""

    weight: torch.Tensor
    scales: torch.Tensor | None = None


# By kind; the best on an H200 at one row.
TILES: dict[str, Tile] = {
    "qkv": Tile(8, 256, 8),
    "output": Tile(8, 256, 8),
    "gate_up": Tile(8, 256, 4),
    "down": Tile(8, 256, 8),
    "head": Tile(8, 512, 8),
}
# The talker's own, of one layer. Programs of several kernels wait side by side, and what they ask for early must not
# push each other out of L2: they ask for little or nothing.
LAYER_TILES: dict[str, Tile] = {
    "qkv": Tile(8, 256, 8, 0),
    "output": Tile(8, 256, 8, 0),
    "gate_up": Tile(8, 256, 8, 0),
    "down": Tile(8, 256, 8, 1024),
}
FP8_TILES: dict[str, Tile] = {"gate_up": Tile(16, 256, 8)}  # where eight bits want another one

# Streams (the first pass has twice as many rows). From 8 rows on cuBLAS on tensor cores is faster; 4 were not measured.
MOST_ROWS = 2
LAYER_ROWS = 1  # of a step whose layers run here; with 2, cuBLAS is faster (1.41 against 1.74 ms, H200)


def tile(kind: str, scaled: bool) -> Tile:
    """The table's entry, for a matrix with scales or without."""
    return FP8_TILES.get(kind, TILES[kind]) if scaled else TILES[kind]


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
    early: bool = True,
) -> torch.Tensor:
    """A linear layer over few rows: the programs of each row read the matrix.

    Args:
        kind: a key of TILES; "gate_up" is gated: the weight is [2 * N, K] and the result silu(gate) * up.
        x: [R, K] float32 or bfloat16, rows any stride apart; the dtype of norm, residual and result.
        norm: [K], RMSNorm of x before the product, with `eps`.
        residual: [R, N] contiguous, added to the product.
        cut: instead of TILES' entry; pdl: instead of what the device can do.
        early: False starts the kernel when all before it have ended, as an ordinary one; the next may still be early.

    Returns:
        [R, N].
    """
    rows, size = x.shape
    gated, scaled = kind == "gate_up", matrix.scales is not None
    columns = matrix.weight.shape[0] // (2 if gated else 1)
    cut, pdl = cut or tile(kind, scaled), overlaps(x.device) if pdl is None else pdl
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
        "AHEAD": min(cut.ahead, size),
        "PDL": pdl,
        "num_warps": cut.warps,
    }
    if pdl and early:
        constants["launch_pdl"] = True
    # what a constant switches off still needs a pointer
    scales, norm, residual = (other if other is not None else x for other in (matrix.scales, norm, residual))
    arguments = (x, matrix.weight, scales, norm, residual, out, x.stride(0), eps)
    kernels_skinny.row_linear[(triton.cdiv(columns, cut.block_n), rows)](*arguments, **constants)
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
            found = sample(logits, integers, reals, frame, group + 1, columns, codes[:, group + 1], following, pdl)
            if found is not None:
                x = found[1]
        return codes


class SkinnyStep(FusedStep):
    """As FusedStep, with the predictor of up to MOST_ROWS streams, the layers of a step of up to LAYER_ROWS rows, or
    both in fewer kernels: bfloat16 only."""

    def __init__(self, model: TalkerModel, predictor: str, layers: str, fp8: bool) -> None:
        """`predictor`, `layers`: TalkerSettings'; `fp8`: the predictor's weights."""
        super().__init__(model)
        self.fp8, half = fp8, model.head.dtype == torch.bfloat16
        self.skinny = SkinnyPredictor(model) if predictor in ("skinny", "persistent") and half else None
        self.persistent = None
        if predictor == "persistent" and half and not fp8 and persistent.fits(model.geometry, model.head.device):
            self.persistent = persistent.PersistentPredictor(model)
        self.skinny_layers = layers in ("skinny", "paged") and self.fused_rotary  # which asks for bfloat16, too
        self.paged = None
        if self.skinny_layers and layers == "paged":
            self.paged = PagedAttention(model.geometry.talker, self.wide_rotary)

    def finish_loading(self) -> None:
        super().finish_loading()
        if self.persistent is not None:  # first: it moves the matrices
            self.persistent.finish_loading()
        if self.skinny is not None:
            self.skinny.finish_loading(self.fp8)

    def close(self) -> None:
        if self.persistent is not None:
            self.persistent.close()

    def over_pages(self, index: int, qkv: torch.Tensor, positions: torch.Tensor, pdl: bool) -> torch.Tensor | None:
        """As `attended`, of one row; None where vLLM's has to do it: a profiling run has no cache, and only
        FlashAttention's is known to be laid out as the kernel reads it."""
        if self.paged is None or qkv.shape[0] != 1:
            return None
        cache: Any = self.model.attentions[index].kv_cache
        metadata, slots = self.model.metadata()
        if type(metadata).__name__ != "FlashAttentionMetadata" or not self.paged.reads(cache):
            return None
        layer = decoder_layers(self.model.layers)[index]
        return self.paged.attend(layer, qkv, cache, positions, metadata.block_table, slots, pdl)

    def crowds(self, rows: int) -> bool:
        return self.persistent is not None and rows == 1

    def layers(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if not self.skinny_layers or x.shape[0] > LAYER_ROWS:
            return super().layers(x, positions)
        return self.few_rows(x, positions)

    def few_rows(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """As `layers`; x, contiguous, is left as it is.

        Where the attention is vLLM's, its kernels stand between ours. A kernel launched without the attribute of
        programmatic dependent launch starts when everything before it has ended, whatever that signalled; one launched
        with it waits by itself, which covers what is before only if the kernel before waits, too. vLLM's rotary kernel
        does (it has the attribute in later versions). FlashAttention 3's combine need not: where there is one split its
        programs return first, so it may end while the attention still writes. What reads its output is therefore not
        started early.
        """
        eps, pdl, cuts = self.model.geometry.talker.eps, overlaps(x.device), LAYER_TILES
        for index, layer in enumerate(decoder_layers(self.model.layers)):
            qkv = linear("qkv", x, Matrix(layer.qkv), layer.input_norm, eps, cut=cuts["qkv"], pdl=pdl)
            attended, output, ours = self.over_pages(index, qkv, positions, pdl), Matrix(layer.output), True
            if attended is None:
                attended, ours = self.attended(index, qkv, positions), False
            x = linear("output", attended, output, residual=x, cut=cuts["output"], pdl=pdl, early=ours)
            active = linear("gate_up", x, Matrix(layer.gate_up), layer.post_norm, eps, cut=cuts["gate_up"], pdl=pdl)
            x = linear("down", active, Matrix(layer.down), residual=x, cut=cuts["down"], pdl=pdl)
        return norm_rows(x, self.model.norm, eps)

    def predict(
        self,
        hidden: torch.Tensor,
        first: torch.Tensor,
        integers: torch.Tensor,
        reals: torch.Tensor,
        frame: torch.Tensor,
    ) -> torch.Tensor:
        if self.persistent is not None and self.crowds(hidden.shape[0]) and not self.leaves_room:
            return self.persistent.predict(hidden, first, integers, reals, frame)
        if self.skinny is None or hidden.shape[0] > MOST_ROWS:
            return super().predict(hidden, first, integers, reals, frame)
        return self.skinny.predict(hidden, first, integers, reals, frame)
