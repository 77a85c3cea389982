"""How much each loss may pull at the decoder, whatever its scale."""

from __future__ import annotations

import torch
from torch import Tensor


class Balance:
    """Weights losses so that their gradients at one tensor stand in given shares (after EnCodec's balancer,
    arXiv 2210.13438; here the norms are measured now and then, as every measurement is a backward pass of its own).

    shares: name of a loss -> its share of the pull. All together they pull `scale` times as strongly as the loss
    named `mel` alone, which keeps their relation to losses that do not pass this tensor. With fixed weights the mel
    distance drowned the discriminators: its gradient was some hundred times theirs.

    The tensor must lie before layers that learn: callers give the input of the decoder's wide layers. Measured at the
    decoded wave, as EnCodec does, a loss of logarithms looks strong and moves nothing: most of its gradient lies in
    near-silent samples and cancels on the way. In the fifth to ninth trainings `wave` had three quarters of the pull at
    the decoder so, `level` an eighth, and `mel` half a percent.
    """

    def __init__(self, shares: dict[str, float], scale: float, device: torch.device, decay: float = 0.9) -> None:
        self.scale, self.decay = scale, decay
        # On the device and changed in place: a recorded step reads and averages them where they are.
        self.shares = {name: torch.tensor(share, device=device) for name, share in shares.items()}
        self.norms = {name: torch.zeros((), device=device) for name in shares}
        self.seen = {name: torch.zeros((), device=device) for name in shares}

    def measure(self, losses: dict[str, Tensor], at: Tensor) -> None:
        """Averages the norm of each loss's gradient at `at` [B, ...], mean over the batch."""
        for name in self._mine(losses):
            (gradient,) = torch.autograd.grad(losses[name], at, retain_graph=True)
            self.norms[name].lerp_(gradient.flatten(1).norm(dim=1).mean(), 1 - self.decay)
            self.seen[name].lerp_(torch.ones_like(self.seen[name]), 1 - self.decay)

    def total(self, losses: dict[str, Tensor]) -> Tensor:
        """The weighted sum, after at least one `measure` of the same losses."""
        names = self._mine(losses)
        whole = torch.stack([self.shares[name] for name in names]).sum()
        typical = {name: (self.norms[name] / self.seen[name]).clamp(min=1e-12) for name in names}
        parts = [self.shares[name] / whole / typical[name] * losses[name] for name in names]
        return self.scale * typical["mel"] * torch.stack(parts).sum()

    def _mine(self, losses: dict[str, Tensor]) -> list[str]:
        return [name for name in self.shares if name in losses]
