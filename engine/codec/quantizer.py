"""Codes to latents: the decoder's residual codebooks (`decoder.quantizer.*`), first group semantic, rest acoustic."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Codebook(nn.Module):
    """Vectors stored as running sums and counts, the way they are learnt with moving averages."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.cluster_usage = nn.Parameter(torch.ones(size))
        self.embedding_sum = nn.Parameter(torch.zeros(size, width))

    def vectors(self) -> Tensor:
        """[size, width]; 1e-5 keeps unused entries finite, as in the reference."""
        return self.embedding_sum / self.cluster_usage.clamp(min=1e-5)[:, None]


class QuantizerLayer(nn.Module):
    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self._codebook = Codebook(size, width)


class ResidualStack(nn.Module):
    def __init__(self, groups: int, size: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([QuantizerLayer(size, width) for _ in range(groups)])


class ResidualQuantizer(nn.Module):
    """Sum of one vector per group, then projected out."""

    table: Tensor | None
    projected: Tensor | None
    offsets: Tensor | None

    def __init__(self, groups: int, size: int, width: int, outer: int) -> None:
        super().__init__()
        self.input_proj = nn.Conv1d(outer, width, 1, bias=False)  # for encoding; the checkpoint carries it
        self.output_proj = nn.Conv1d(width, outer, 1, bias=False)
        self.vq = ResidualStack(groups, size, width)
        self.groups, self.size = groups, size
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("projected", None, persistent=False)
        self.register_buffer("offsets", None, persistent=False)

    def vectors(self) -> Tensor:
        """All codebooks in one table [groups * size, width]."""
        return torch.cat([layer._codebook.vectors() for layer in self.vq.layers])  # type: ignore[union-attr,operator]

    def fold(self, project: bool = False) -> None:
        """Computes the table once; with `project`, each of its vectors already projected out, in float32."""
        self.table = self.vectors().detach().clone()
        self.projected = self.offsets = None
        if project:
            weight = self.output_proj.weight.detach()[..., 0].double()  # [outer, width]
            self.projected = (self.table.double() @ weight.t()).float()
            steps = torch.arange(0, self.groups * self.size, self.size, device=weight.device)
            self.offsets = steps[:, None]

    def forward(self, codes: Tensor) -> Tensor:
        """int64 [B, groups, T] -> [B, outer, T]."""
        if self.projected is not None and self.offsets is not None:
            summed = F.embedding(codes + self.offsets, self.projected).sum(dim=1)
            return summed.to(self.output_proj.weight.dtype).transpose(1, 2)
        table = self.table if self.table is not None else self.vectors()
        offset = torch.arange(0, self.groups * self.size, self.size, device=codes.device)[:, None]
        summed = F.embedding(codes + offset, table).sum(dim=1)  # [B, T, width]
        return self.output_proj(summed.transpose(1, 2))


class SplitQuantizer(nn.Module):
    def __init__(self, groups: int, size: int, width: int, outer: int) -> None:
        super().__init__()
        self.rvq_first = ResidualQuantizer(1, size, width, outer)
        self.rvq_rest = ResidualQuantizer(groups - 1, size, width, outer)

    def forward(self, codes: Tensor) -> Tensor:
        """int64 [B, groups, T] -> [B, outer, T]."""
        return self.rvq_first(codes[:, :1]) + self.rvq_rest(codes[:, 1:])
