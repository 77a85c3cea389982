"""The talker's attention of a step of one row in one kernel, over vLLM's own cache; see kernels_paged.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton

from engine.talker import kernels_paged

if TYPE_CHECKING:
    from engine.talker.geometry import StackGeometry
    from engine.talker.layers import DecoderLayer

BLOCK, PARTS, WARPS = 64, 8, 8


def _power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


class PagedAttention:
    """Needs Triton only, so tests run it in Triton's interpreter."""

    def __init__(self, geometry: StackGeometry, rotary: torch.Tensor) -> None:
        """rotary: [positions, d] cosines, then sines, in the dtype of the weights."""
        self.geometry, self.rotary, g = geometry, rotary, geometry
        each, device = g.heads // g.kv_heads, rotary.device
        self.suits = _power_of_two(each) and _power_of_two(g.head_dim)
        # vLLM's default dtype while it makes a model is the model's
        self._partial = torch.zeros(g.kv_heads, PARTS, each, g.head_dim + 2, dtype=torch.float32, device=device)
        self._counters = torch.zeros(g.kv_heads, dtype=torch.int32, device=device)

    def reads(self, cache: torch.Tensor) -> bool:
        """Whether a layer's cache is laid out as the kernel reads it: [pages, kv_heads, positions, 2 * d], keys and
        values next to each other, in whatever order of pages, heads and positions."""
        g = self.geometry
        shape = (g.kv_heads, 2 * g.head_dim)
        laid_out = cache.dim() == 4 and (cache.shape[1], cache.shape[3]) == shape and cache.stride(3) == 1
        return self.suits and laid_out and cache.dtype == self.rotary.dtype

    def attend(
        self,
        layer: DecoderLayer,
        qkv: torch.Tensor,
        cache: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        slots: torch.Tensor,
        pdl: bool,
    ) -> torch.Tensor:
        """The new position's key and value go into the cache, and its queries see all up to it.

        Args:
            qkv: [1, qkv_width] the projection; cache: see `reads`, written.
            positions: [1] int64; table: [1, pages] int32, the pages of the request in order.
            slots: [1] int64, page * positions of a page + place of the new position; below 0: it is not stored.
            pdl: with programmatic dependent launch, see skinny.overlaps.

        Returns:
            [1, heads * d].
        """
        g = self.geometry
        out = qkv.new_empty(1, g.heads * g.head_dim)
        launch: dict[str, Any] = {"launch_pdl": True} if pdl else {}
        kernels_paged.attend[(g.kv_heads, PARTS)](
            qkv,
            cache,
            table,
            slots,
            positions,
            out,
            self._partial,
            self._counters,
            layer.query_norm,
            layer.key_norm,
            self.rotary,
            cache.stride(0),
            cache.stride(1),
            cache.stride(2),
            g.eps,
            g.head_dim**-0.5,
            EACH=g.heads // g.kv_heads,
            KV_HEADS=g.kv_heads,
            DIM=g.head_dim,
            PAGE=cache.shape[2],
            BLOCK=min(BLOCK, max(16, triton.next_power_of_2(cache.shape[2] * table.shape[1]))),
            PARTS=PARTS,
            PDL=pdl,
            num_warps=WARPS,
            **launch,
        )
        return out
