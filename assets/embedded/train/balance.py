"""How much each loss may pull at the decoder's output, whatever its scale."""

from __future__ import annotations

import torch
from torch import Tensor


class Balance:
    """Scales the gradients of several losses at one tensor to given shares (EnCodec's balancer, arXiv 2210.13438).

    shares: name of a loss -> its share of the pull. Of all losses together the pull is `scale` times as strong as the
    gradient of the loss named `mel` alone, so that it keeps its relation to losses that do not pass this tensor.
    Without it the mel distance drowned the discriminators: its gradient was some hundred times theirs.
    """

    def __init__(self, shares: dict[str, float], scale: float, device: torch.device, decay: float = 0.98) -> None:
        self.shares, self.scale, self.decay = shares, scale, decay
        # On the device and changed in place: a recorded step goes on averaging.
        self.norms = {name: torch.zeros((), device=device) for name in shares}
        self.seen = {name: torch.zeros((), device=device) for name in shares}

    def gradient(self, losses: dict[str, Tensor], at: Tensor) -> Tensor:
        """Gradient at `at` [B, 1, N] of the balanced sum. Frees the graphs between `at` and the losses."""
        total = sum(self.shares[name] for name in losses)
        pull, names = torch.zeros_like(at), list(losses)
        typical: dict[str, Tensor] = {}
        gradients: dict[str, Tensor] = {}
        for name in names:
            (gradients[name],) = torch.autograd.grad(losses[name], at, retain_graph=name != names[-1])
            self.norms[name].lerp_(gradients[name].flatten(1).norm(dim=1).mean(), 1 - self.decay)
            self.seen[name].lerp_(torch.ones_like(self.seen[name]), 1 - self.decay)
            typical[name] = self.norms[name] / self.seen[name]
        for name in names:
            pull = pull + gradients[name] * (self.shares[name] / total / typical[name].clamp(min=1e-12))
        return pull * (self.scale * typical["mel"])
