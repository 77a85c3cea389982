"""The CUDA kernels of the decoder against plain torch. Runs where Triton is: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined
pytest.importorskip("triton")

from engine.codec.kernels import snake
from engine.codec.layers import SnakeBeta
from engine.codec.windowed import WindowedDecoder
from tests.codec.test_graphs import small_decoder

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


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_fused_decoder_gives_the_same_sound_whole_in_chunks_and_in_windows(channels_last):
    model = small_decoder().to(DEVICE).freeze(fused=False)
    codes = torch.randint(0, 16, (2, 3, 4), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    windowed = WindowedDecoder(model, 3)
    with torch.inference_mode():
        want = model(codes)
        window_want = windowed.step(codes, windowed.init_state(2))[0]
        model.freeze(fused=True, matrix_upsampling=False, channels_last=channels_last)
        torch.testing.assert_close(model(codes), want, rtol=1e-4, atol=1e-4)
        state, pieces = model.init_state(2), []
        for piece in codes.split((1, 3), dim=-1):
            pcm, state = model.step(piece, state)
            pieces.append(pcm)
        torch.testing.assert_close(torch.cat(pieces, dim=-1), want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(windowed.step(codes, windowed.init_state(2))[0], window_want, rtol=1e-4, atol=1e-4)
