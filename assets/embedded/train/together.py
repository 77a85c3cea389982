"""Several GPUs, one training each, whose weights are averaged every few steps.

    torchrun --nproc-per-node 2 train_codec.py --corpus corpus --out run ...

Local steps between averages (local SGD, arXiv 1805.09767) leave the recorded step as it is: an average is one exchange
between two replays. On one device every method does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


class Together:
    """rank, size: from torchrun's environment; alone without it. device: where this rank's weights are."""

    def __init__(self, kind: str, every: int = 4) -> None:
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.every, self.device = every, torch.device(kind)
        if self.size == 1:
            return
        if kind == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
        self.clocks = dist.new_group(backend="gloo")  # what is said on the host waits for no kernel

    def agreed(self, seconds: float) -> float:
        """The first rank's clock: all stop and save at the same step."""
        if self.size == 1:
            return seconds
        said = torch.tensor(seconds, dtype=torch.float64)
        dist.broadcast(said, 0, group=self.clocks)
        return float(said)

    @torch.no_grad()
    def average(self, values: Iterable[Tensor], steps: int) -> None:
        """Float tensors, in place; at every `every`-th step."""
        if self.size == 1 or steps % self.every:
            return
        self._flat([v.data for v in values], lambda flat: (dist.all_reduce(flat), flat.div_(self.size)))

    @torch.no_grad()
    def copy(self, values: Iterable[Tensor]) -> None:
        """Everyone takes the first rank's."""
        if self.size > 1:
            self._flat([v.data for v in values], lambda flat: dist.broadcast(flat, 0))

    @staticmethod
    def _flat(values: list[Tensor], exchange) -> None:  # type: ignore[no-untyped-def]
        flat = torch.cat([v.flatten() for v in values])
        exchange(flat)
        parts = flat.split([v.numel() for v in values])
        torch._foreach_copy_(values, [part.view_as(v) for part, v in zip(parts, values, strict=True)])

    def end(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()
