"""Keeps the acoustic latents wide, so that every codebook has something to say.

The commitment loss is smallest where there is nothing to commit to. In the second training the acoustic latents shrank
to ten directions, one of them with nearly all of the variance: two of the seven codebooks left 0.4 % of it, and the
other five said nothing. Here each of the latents' coordinates is held at a stated size and apart from the others (the
variance and covariance terms of VICReg, arXiv 2105.04906). The sizes fall, so that the first codebooks take the most.
"""

from __future__ import annotations

import torch
from codec_model import Codec
from torch import Tensor

FIRST, RATIO = 4.0, 0.965  # standard deviation of the first coordinate; of each to the one before


def sizes(width: int, device: torch.device) -> Tensor:
    """[width]: the standard deviation that each coordinate shall have."""
    return FIRST * RATIO ** torch.arange(width, device=device)


def spread_loss(x: Tensor) -> Tensor:
    """x [N, width] float32 -> squared logarithm of size to wanted size, mean, plus squared correlations, mean row."""
    x = x - x.mean(0)
    size = x.square().mean(0).add(1e-6).sqrt()
    unit = x / size
    apart = (unit.T @ unit / len(x)) * (1 - torch.eye(x.shape[1], device=x.device))
    return (size / sizes(x.shape[1], x.device)).log().square().mean() + apart.square().sum(1).mean()


def relative(commitment: Tensor, x: Tensor) -> Tensor:
    """Commitment loss of latents x [N, width] against their variance: smaller latents gain nothing by it."""
    return commitment / x.var(0).mean().clamp(min=1e-6)


@torch.no_grad()
def respread(codec: Codec, trunk: Tensor) -> None:
    """New acoustic latents for a collapsed encoder; the decoder gets the same input as before, as far as it used it.

    trunk: [N, hidden], what the encoder's projections see, of real speech; N of some thousands. The directions that the
    old latents used come first, then the principal components of what those leave of the trunk, which the decoder
    ignores at first. The acoustic codebooks begin anew.
    """
    h = trunk.double()
    project, width = codec.project[1].weight, codec.width
    old = h @ project[..., 0].double().T
    mean = old.mean(0)
    _, s, directions = torch.linalg.svd(old - mean, full_matrices=False)
    std = s / len(h) ** 0.5
    kept = int((std > 0.01 * std[0]).sum())
    want = sizes(width, trunk.device).double()
    used = directions[:kept]
    first = (used @ project[..., 0].double()) * (want[:kept] / std[:kept])[:, None]  # [kept, hidden]
    centred = h - h.mean(0)
    known = torch.linalg.lstsq(centred @ first.T, centred).solution  # [kept, hidden]
    rest = torch.eye(h.shape[1], device=h.device, dtype=h.dtype) - first.T @ known
    _, s, components = torch.linalg.svd(centred @ rest, full_matrices=False)
    scale = want[kept:] / (s[: width - kept] / len(h) ** 0.5)
    second = (rest @ components[: width - kept].T * scale).T
    project[..., 0] = torch.cat([first, second]).to(project.dtype)

    decoder = codec.decoder
    out = decoder.quantizer.rvq_rest.output_proj.weight  # [outer, width, 1]
    before = out[..., 0].double()
    unused = mean - used.T @ (used @ mean)  # the same in every frame: a bias
    out.zero_()
    out[:, :kept, 0] = (before @ used.T * (std[:kept] / want[:kept])).to(out.dtype)
    conv = decoder.pre_conv.conv
    conv.bias += (conv.weight.double().sum(-1) @ (before @ unused)).to(conv.bias.dtype)
    codec.books[1].counts.fill_(1.0)
    codec.books[1].begin((h @ project[..., 0].double().T).float())
    print(f"acoustic latents: {kept} of {width} directions were in use", flush=True)
