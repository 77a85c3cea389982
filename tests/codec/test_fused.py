"""The CUDA kernels of the decoder against plain torch. Runs where Triton is: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined
pytest.importorskip("triton")

from engine.codec.decoder import CodecDecoder
from engine.codec.kernels import snake
from engine.codec.layers import SnakeBeta
from engine.codec.streaming import StateWalk
from engine.codec.windowed import WindowedDecoder
from tests.codec.test_graphs import small_decoder
from tests.codec.test_streaming import CONFIG as GROUPED_CONFIG

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("steps", [1, 7, 1500])
def test_snake(dtype, steps):
    generator = torch.Generator().manual_seed(0)
    batch, channels, past = 3, 5, 6
    module = SnakeBeta(channels)
    module.alpha.data.normal_(0, 0.5, generator=generator)
    module.beta.data.normal_(0, 0.5, generator=generator)
    module.to(DEVICE).requires_grad_(False).fold()
    wide = torch.randn(batch, channels, steps + 4, generator=generator).to(DEVICE, dtype)
    x = wide[..., 2 : 2 + steps]  # rows lie apart, as after a transposed convolution
    residual = torch.randn(batch, channels, steps, generator=generator).to(DEVICE, dtype)
    history = torch.randn(batch, channels, past, generator=generator).to(DEVICE, dtype)
    bias = torch.randn(channels, generator=generator).to(DEVICE, dtype)
    total = x.float() + bias.float()[:, None] + residual.float()
    want = module(total).to(dtype)
    constants = module.frequency, module.gain
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-3}

    out, kept = snake(x, *constants, bias=bias, residual=residual, history=history, keep_total=True)
    assert torch.equal(out[..., :past], history)
    torch.testing.assert_close(out[..., past:], want, **tolerance)
    torch.testing.assert_close(kept, total.to(dtype), **tolerance)

    out, kept = snake(x, *constants, bias=bias, residual=residual, pad=2)
    assert kept is None and not out[..., :2].any()
    torch.testing.assert_close(out[..., 2:], want, **tolerance)

    torch.testing.assert_close(snake(x, *constants)[0], module(x.float()).to(dtype), **tolerance)

    out, kept = snake(x, *constants, bias=bias, residual=residual, keep_total=True, dtype=torch.float32)
    torch.testing.assert_close(out, module(total), rtol=1e-5, atol=1e-5)  # of the sum before it is stored
    assert kept.dtype == dtype


@pytest.mark.parametrize(("channels_last", "compact"), [(False, False), (True, True)])
def test_the_fused_decoder_gives_the_same_sound_whole_in_chunks_and_in_windows(channels_last, compact):
    model = small_decoder().to(DEVICE).freeze(fused=False, compact=False)
    codes = torch.randint(0, 16, (2, 3, 4), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    windowed = WindowedDecoder(model, 3)
    with torch.inference_mode():
        want = model(codes)
        window_want = windowed.step(codes, windowed.init_state(2))[0]
        model.freeze(fused=True, matrix_upsampling=False, channels_last=channels_last, compact=compact)
        torch.testing.assert_close(model(codes), want, rtol=1e-4, atol=1e-4)
        state, pieces = model.init_state(2), []
        for piece in codes.split((1, 3), dim=-1):
            pcm, state = model.step(piece, state)
            pieces.append(pcm)
        torch.testing.assert_close(torch.cat(pieces, dim=-1), want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(windowed.step(codes, windowed.init_state(2))[0], window_want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_fused_decoder_rounds_to_float16_where_the_plain_one_does(channels_last):
    """So the two differ by far less than either does from float32 (on the CPU 2 % of it)."""
    model = small_decoder().to(DEVICE).freeze(fused=False, compact=False)
    codes = torch.randint(0, 16, (1, 3, 2), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with torch.inference_mode():
        exact = model(codes)
        # transposed convolutions in the same way: in float16 their sums depend on it
        want = model.narrow(torch.float16).freeze(channels_last, fused=False, compact=False)(codes)
        model.freeze(fused=True, matrix_upsampling=False, channels_last=channels_last, compact=False)
        got, state, pieces = model(codes), model.init_state(1), []
        kept = [tensor.dtype for tensor in state.histories]
        for piece in codes.split(1, dim=-1):
            pcm, state = model.step(piece, state)
            assert [tensor.dtype for tensor in state.histories] == kept
            pieces.append(pcm)
        windowed = WindowedDecoder(model, 0)
        in_window = windowed.step(codes, windowed.init_state(1))[0]
    assert (got - want).norm() < 0.2 * (want - exact).norm()
    torch.testing.assert_close(torch.cat(pieces, dim=-1), got, rtol=0, atol=1e-3)
    torch.testing.assert_close(in_window, got, rtol=0, atol=1e-3)


def test_the_compact_transformer_gives_the_same_latents_in_chunks_and_beyond_the_window():
    """Grouped heads, 17 frames against a window of 6, rows at different positions."""
    torch.manual_seed(5)
    model = CodecDecoder(GROUPED_CONFIG)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(torch.randn_like(p) * (1.0 if "embedding_sum" in name else 0.2))
    model.to(DEVICE).freeze(fused=False, compact=False)
    transformer = model.pre_transformer
    x = torch.randn(2, 17, GROUPED_CONFIG["latent_dim"]).to(DEVICE)
    codes = torch.randint(0, 32, (2, 5, 17)).to(DEVICE)
    with torch.inference_mode():
        want, vectors = transformer(x), model.quantizer(codes)
        model.freeze(fused=False, compact=True)
        torch.testing.assert_close(model.quantizer(codes), vectors, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model._compact_transformer(x, None), want, rtol=1e-4, atol=1e-5)
        state, got = model.init_state(2), []
        for begin, end in ((0, 1), (1, 5), (5, 14), (14, 17)):
            walk = StateWalk(state)
            piece = torch.stack([x[0, begin:end], x[1, max(begin - 5, 0) : max(begin - 5, 0) + end - begin]])
            got.append(model._compact_transformer(piece, walk))
            state = walk.finish(end - begin)
            if end == 5:
                state.reset(torch.tensor([1], device=DEVICE))  # the second stream begins five frames later
        got = torch.cat(got, dim=1)
        torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got[1, 5:], want[1, :12], rtol=1e-4, atol=1e-5)
