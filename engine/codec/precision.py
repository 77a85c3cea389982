"""Whether a decoder in 16 bits still says what it says in float32: asked at the start, not after hours of noise.

float16 ends at 65504, and nothing in a checkpoint tells how large its activations grow. So the weights at hand are run.
(The transformer, whose activations grow largest, is in float32 anyway, and with float16 so is all but the upsampling
blocks' convolutions: `CodecDecoder.narrow`.)
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from engine.codec.layers import CausalConv, CausalUpsample
from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.codec.decoder import CodecDecoder

STREAMS, FRAMES = 2, 25
ROOM = 16.0  # speech may have values that these codes do not; the embedded voice's stay below 10
# Of the difference, in dB below the signal. Where the weights suit them float16 has 58 to 62 (61 on these codes) and
# bfloat16 32 to 37 (docs/measurements/gpu.md; the embedded voice in plain torch on the CPU).
LEAST_DB = {torch.float16: 40.0, torch.bfloat16: 20.0}


@torch.inference_mode()
def spoken(decoder: CodecDecoder) -> torch.Tensor:
    """float32 [STREAMS, 1, FRAMES * 1920] of codes drawn with a fixed seed, on the decoder's device."""
    device = decoder.pre_conv.conv.weight.device
    shape = (STREAMS, decoder.groups, FRAMES)
    codes = torch.randint(0, decoder.codebook_size, shape, generator=torch.Generator().manual_seed(0))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return decoder(codes.to(device)).float()


@torch.inference_mode()
def check_room(decoder: CodecDecoder) -> float:
    """Run a float32 decoder in plain torch; returns the largest value that would be float16 (`CodecDecoder.narrow`).

    Raises:
        ConfigError: other codes, with values ROOM times as large, would leave float16's range.
    """
    peaks: list[torch.Tensor] = []
    blocks: Any = decoder.decoder
    convolutions = [m for block in blocks[1:-2] for m in block.modules() if isinstance(m, (CausalConv, CausalUpsample))]
    hooks = [m.register_forward_hook(lambda _, __, out: peaks.append(out.abs().max())) for m in convolutions]
    spoken(decoder)
    for hook in hooks:
        hook.remove()
    largest = float(torch.stack(peaks).max())
    if not largest * ROOM <= torch.finfo(torch.float16).max:
        raise ConfigError(
            f"codec.dtype is float16, but with these weights the decoder's values reach {largest:.0f}, too near to "
            "float16's end at 65504; set it to auto",
            field="codec.dtype",
        )
    return largest


def check(decoder: CodecDecoder, wanted: torch.Tensor, least_db: float | None = None) -> float:
    """Compare with what the same weights said in float32; returns the SNR in dB.

    Args:
        least_db: instead of LEAST_DB's.

    Raises:
        ConfigError: the difference is too large, or the sound is not finite.
    """
    dtype = decoder.tail_dtype
    least = LEAST_DB[dtype] if least_db is None else least_db
    difference = (spoken(decoder) - wanted).double().square().sum()
    snr = float(10 * torch.log10(wanted.double().square().sum() / difference))
    if not snr >= least:  # nan included
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"codec.dtype is {name}, but with these weights the decoder's sound is then only {snr:.0f} dB above its "
            f"difference from float32 ({least:.0f} are the least; nan: values beyond {name}); set it to auto",
            field="codec.dtype",
        )
    return snr
