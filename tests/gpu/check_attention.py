"""vLLM's attention in a decode step of the 1.7B talker, by how many parts it may split a request's keys into.

    python3 tests/gpu/check_attention.py

Microseconds a layer in a CUDA graph, the merging of the parts included, as vLLM calls it in a full graph.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

from tests.gpu.check_predictor import GEOMETRY, microseconds

PAGE, LAYERS = 16, 28


def layer(rows: int, keys: int, splits: int) -> tuple[float, torch.Tensor]:
    """Microseconds of a layer with `rows` requests of `keys` keys each, and the first layer's output."""
    g, pages = GEOMETRY.talker, -(-keys // PAGE)
    generator = torch.Generator(device="cuda").manual_seed(0)
    shape = (LAYERS, 2, rows * pages, PAGE, g.kv_heads, g.head_dim)
    caches = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(rows, g.heads, g.head_dim, generator=generator, device="cuda", dtype=torch.bfloat16)
    table = torch.arange(rows * pages, device="cuda", dtype=torch.int32).view(rows, pages)
    starts = torch.arange(rows + 1, device="cuda", dtype=torch.int32)
    used, out = torch.full((rows,), keys, device="cuda", dtype=torch.int32), torch.empty_like(query)
    plan = get_scheduler_metadata(
        batch_size=rows, max_seqlen_q=1, max_seqlen_k=2048, num_heads_q=g.heads, num_heads_kv=g.kv_heads,
        headdim=g.head_dim, cache_seqlens=used, qkv_dtype=torch.bfloat16, cu_seqlens_q=starts, page_size=PAGE,
        causal=True, num_splits=splits,
    )  # fmt: skip

    def run() -> None:
        for cache in caches:
            flash_attn_varlen_func(
                q=query, k=cache[0], v=cache[1], out=out, cu_seqlens_q=starts, max_seqlen_q=1, seqused_k=used,
                max_seqlen_k=2048, softmax_scale=g.head_dim**-0.5, causal=True, block_table=table,
                scheduler_metadata=plan, fa_version=3, num_splits=splits,
            )  # fmt: skip

    spent = microseconds(run) / LAYERS
    return spent, out.float()


def main() -> None:
    gain = 0.0
    for rows in (1, 2, 8, 32, 64):
        for keys in (64, 200, 400, 1000, 2000):
            times, outputs = {}, []
            for splits in (32, 4, 1):
                times[splits], output = layer(rows, keys, splits)
                outputs.append(output)
            worst = max(float((o - outputs[0]).norm() / outputs[0].norm()) for o in outputs)
            listed = "  ".join(f"{n}: {t:.2f}" for n, t in times.items())
            print(
                f"result us a layer, {rows} rows, {keys} keys, by splits: {listed}; differ by {worst:.4f}", flush=True
            )
            if keys == 200 and rows in (1, 64):
                gain += times[32] - times[1]
    print(f"result one part {'GAINS' if gain > 0.5 else 'loses'} {gain:.2f} us at 200 keys")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
