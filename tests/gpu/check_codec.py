"""The codec's decoder on a CUDA machine, published geometry with random weights: speed, sound, kernels.

    python3 -m tests.gpu.check_codec [VARIANT ...] [--device cpu --small]

Each variant: ms per graph replay and x real time by (batch, frames), SNR against float32 without TF32 on the same
codes, and the kernels of one 32 x 4 step. Lines of the table begin with `result`. A variant that fails prints its
traceback and the next one runs.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from engine.codec.codec import _fill_random
from engine.codec.decoder import CodecDecoder
from engine.codec.graphs import CodecRunner
from engine.geometry import published_codec_config
from engine.request import FRAMES_PER_SECOND

SIZES = ((1, 1), (1, 4), (1, 25), (8, 4), (16, 4), (32, 1), (32, 4), (32, 8), (32, 16), (64, 4), (64, 16))
SMALL = {
    "decoder_dim": 64,
    "latent_dim": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}

# name → dtype, TF32 in convolutions and matrix products, arguments of freeze(), cuDNN measures its kernels: for float16
# it always does, as in the engine (`CodecRunner`); without, two convolutions take 70 ms each
PLAIN = {"fused": False, "matrix_upsampling": False, "compact": False}
FUSED = {"fused": True, "matrix_upsampling": False, "channels_last": False, "compact": False}
LAST = {**FUSED, "channels_last": True}
COMPACT = {**LAST, "compact": True}
VARIANTS: dict[str, tuple[torch.dtype, bool, dict[str, bool], bool]] = {
    "float32": (torch.float32, False, PLAIN, False),
    "tf32": (torch.float32, True, PLAIN, False),
    "tf32-fused": (torch.float32, True, FUSED, False),
    "tf32-last": (torch.float32, True, LAST, False),
    "tf32-compact": (torch.float32, True, COMPACT, False),
    "tf32-compact-search": (torch.float32, True, COMPACT, True),
    "bf16": (torch.bfloat16, True, PLAIN, False),
    "bf16-fused": (torch.bfloat16, True, FUSED, False),
    "fp16-fused": (torch.float16, True, FUSED, True),
    "fp16-last": (torch.float16, True, LAST, True),
    "fp16-compact": (torch.float16, True, COMPACT, True),
}


@contextmanager
def switches(tf32: bool, search: bool) -> Iterator[None]:
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = search
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = flags[:2]
        torch.backends.cudnn.benchmark = flags[2]


def audible(decoder: CodecDecoder) -> None:
    """Scale the last convolution so that random weights give a signal at a level of speech, not clipped, not silent."""
    with torch.no_grad():
        codes = torch.randint(
            0, decoder.codebook_size, (1, decoder.groups, 12), device=decoder.pre_conv.conv.weight.device
        )
        level = decoder(codes).std()
        decoder.decoder[-1].conv.weight.mul_(0.1 / level)


def decode(decoder: CodecDecoder, codes: torch.Tensor, pieces: tuple[int, ...]) -> torch.Tensor:
    """The way the engine decodes: float32 [B, samples]."""
    state, out = decoder.init_state(codes.shape[0]), []
    for piece in codes.split(pieces, dim=-1):
        pcm, state = decoder.step(piece, state)
        out.append(pcm[:, 0].float())
    return torch.cat(out, dim=-1)


def snr(got: torch.Tensor, want: torch.Tensor) -> float:
    """dB, worst row."""
    error = (got - want).square().mean(-1)
    return float((10 * torch.log10(want.square().mean(-1) / error.clamp(min=1e-30))).min())


def seconds(run: Callable[[], object], device: torch.device, budget: float) -> list[float]:
    """Times of single runs, each waited for, within about `budget` seconds."""
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - began < budget and len(times) < 200):
        before = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - before)
    return times


def speed(name: str, decoder: CodecDecoder, dtype: torch.dtype, device: torch.device, sizes, budget: float) -> None:
    cuda = device.type == "cuda"
    began = time.perf_counter()
    runner = CodecRunner(decoder, 64, sizes if cuda else (), device, dtype)
    print(f"result {name}: {len(sizes)} graphs captured in {time.perf_counter() - began:.1f} s", flush=True)
    for batch, frames in sizes:
        codes = torch.randint(0, decoder.codebook_size, (batch, decoder.groups, frames))
        slots = list(range(batch))
        if cuda:
            graph = next(g for g in runner._graphs[frames] if g.batch == batch)
            run: Callable[[], object] = graph.replay
        else:
            run = lambda slots=slots, codes=codes: runner.launch(slots, codes)  # noqa: E731
        run()
        bare = 1e3 * statistics.median(seconds(run, device, budget))
        with_host = 1e3 * statistics.median(seconds(lambda s=slots, c=codes: runner.decode(s, c), device, budget))
        audio = batch * frames / FRAMES_PER_SECOND
        print(
            f"result {name}: {batch:2d} x {frames:2d} frames: {bare:7.3f} ms, {1e3 * audio / bare:6.0f} x real time; "
            f"with codes in and PCM out {with_host:7.3f} ms",
            flush=True,
        )


def profile(name: str, decoder: CodecDecoder, device: torch.device, batch: int = 32, frames: int = 4) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    codes = torch.randint(0, decoder.codebook_size, (batch, decoder.groups, frames), device=device)
    state = decoder.init_state(batch)
    for _ in range(2):
        decoder.step(codes, state)
    cuda = device.type == "cuda"
    with profiler(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as record:
        decoder.step(codes, state)
        if cuda:
            torch.cuda.synchronize()
    key = "self_device_time_total" if cuda else "self_cpu_time_total"
    rows = [row for row in record.key_averages() if getattr(row, key) > 0]  # kernels, not the calls that launch them
    rows.sort(key=lambda row: -getattr(row, key))
    total, count = sum(getattr(row, key) for row in rows), sum(row.count for row in rows)
    print(f"result {name}: {batch} x {frames} eager: {total / 1e3:.3f} ms in {count} kernels")
    for row in rows[:12]:
        print(f"result {name}:   {getattr(row, key) / 1e3:7.3f} ms  {row.count:4d} x  {row.key[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variants", nargs="*")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny decoder, to try this file without a GPU")
    parser.add_argument("--budget", type=float, default=0.12, help="seconds per timed cell and way")
    args = parser.parse_args()
    device = torch.device(args.device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print("result device", where, "torch", torch.__version__, flush=True)
    config = published_codec_config()["decoder_config"] | (SMALL if args.small else {})
    sizes = ((1, 1), (2, 4)) if args.small else SIZES
    torch.manual_seed(0)
    with torch.inference_mode(), torch.device(device):
        base = CodecDecoder(config)
        _fill_random(base)
        with switches(False, False):
            audible(base.freeze(**PLAIN))
            codes = torch.randint(0, base.codebook_size, (4, base.groups, 50))
            pieces = (4, 4, 8, 16, 18)
            want = decode(base.freeze(**PLAIN), codes, pieces)
        print(f"result level of the signal: {float(want.std()):.3f}, largest {float(want.abs().max()):.2f}")
    for name in args.variants or VARIANTS:
        dtype, tf32, how, search = VARIANTS[name]
        began = time.perf_counter()
        try:
            with torch.inference_mode(), switches(tf32, search):
                decoder = copy.deepcopy(base).to(device).narrow(dtype).freeze(**how)
                got = decode(decoder, codes, pieces)
                print(f"result {name}: SNR {snr(got, want):.1f} dB against float32", flush=True)
                profile(name, decoder, device)
                speed(name, decoder, dtype, device, sizes, args.budget)
                del decoder, got
        except Exception:
            traceback.print_exc()
            print(f"result {name}: FAILED: {traceback.format_exc().strip().splitlines()[-1][:300]}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"result {name}: took {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
