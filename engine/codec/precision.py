"""Whether a decoder in 16 bits still says what it says in float32: asked at the start, not after hours of noise.

float16 ends at 65504, and nothing in a checkpoint tells how large its activations grow. So the weights at hand are run.
(The transformer, whose activations grow largest, is in float32 anyway: `CodecDecoder.narrow`.)
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.codec.decoder import CodecDecoder

STREAMS, FRAMES = 2, 25
# Of the difference, in dB below the signal. float16 has 50 to 55 and bfloat16 33 to 37 where the weights suit them
# (docs/measurements/gpu.md), and random codes are harder than speech.
LEAST_DB = {torch.float16: 40.0, torch.bfloat16: 20.0}


@torch.inference_mode()
def spoken(decoder: CodecDecoder) -> torch.Tensor:
    """float32 [STREAMS, 1, FRAMES * 1920] of codes drawn with a fixed seed, on the decoder's device."""
    device = decoder.pre_conv.conv.weight.device
    shape = (STREAMS, decoder.groups, FRAMES)
    codes = torch.randint(0, decoder.codebook_size, shape, generator=torch.Generator().manual_seed(0))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return decoder(codes.to(device)).float()


def check(decoder: CodecDecoder, wanted: torch.Tensor) -> float:
    """Compare with what the same weights said in float32; returns the SNR in dB.

    Raises:
        ConfigError: the difference is too large, or the sound is not finite.
    """
    dtype = decoder.tail_dtype
    difference = (spoken(decoder) - wanted).double().square().sum()
    snr = float(10 * torch.log10(wanted.double().square().sum() / difference))
    if not snr >= LEAST_DB[dtype]:  # nan included
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"codec.dtype is {name}, but with these weights the decoder's sound is then only {snr:.0f} dB above its "
            f"difference from float32 ({LEAST_DB[dtype]:.0f} are the least; nan: values beyond {name}); set it to auto",
            field="codec.dtype",
        )
    return snr
