"""The code predictor: from a talker's hidden state and code 0 to codes 1 .. G-1, one after the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from engine.talker.geometry import TalkerGeometry
from engine.talker.layers import DecoderLayer, decoder_layers, parameter, rms_norm, rotary_table
from engine.talker.sampler import sample, uniform
from engine.talker.slots import SEED, SUB_TEMPERATURE, SUB_TOP_K, SUB_TOP_P


class CodePredictor(nn.Module):
    """Weights, and the plain torch way to run them. Hp is the predictor's width, H the talker's, V its vocabulary.

    Position 0 is the talker's normed hidden state, position 1 the embedding of code 0, position g + 1 that of code g
    (g up to G-2); head g reads position g + 1 and yields code g + 1. A fresh cache per frame, rotary from position 0.
    Embeddings live in the talker's width and pass through `projection` (the identity when the widths agree).

    `projected` and `projected_first` hold those tables after projection: a lookup then replaces a matrix product.
    """

    projected: torch.Tensor
    projected_first: torch.Tensor

    def __init__(self, geometry: TalkerGeometry) -> None:
        super().__init__()
        g = self.geometry = geometry
        inner, width = g.predictor, g.talker.hidden
        self.first_embedding = parameter(g.vocab, width)  # code 0, shared with the talker's input
        self.embeddings = parameter(g.groups - 1, g.predictor_vocab, width)
        self.heads = parameter(g.groups - 1, g.predictor_vocab, inner.hidden)
        if g.has_projection:
            self.projection, self.projection_bias = parameter(inner.hidden, width), parameter(inner.hidden)
        self.layers = nn.ModuleList([DecoderLayer(inner) for _ in range(inner.layers)])
        self.norm = parameter(inner.hidden)
        self.rotary = rotary_table(inner, g.groups + 1).to(self.norm.device, self.norm.dtype)
        self.groups = torch.arange(1, g.groups, device=self.norm.device)
        if g.has_projection:
            tables = (g.groups - 1, g.predictor_vocab, inner.hidden), (g.vocab, inner.hidden)
            self.register_buffer("projected", torch.empty(tables[0]), persistent=False)
            self.register_buffer("projected_first", torch.empty(tables[1]), persistent=False)
        else:
            self.register_buffer("projected", self.embeddings.detach(), persistent=False)  # the same memory
            self.register_buffer("projected_first", self.first_embedding.detach(), persistent=False)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] to [..., Hp]."""
        return F.linear(x, self.projection, self.projection_bias) if self.geometry.has_projection else x

    @torch.no_grad()
    def finish_loading(self) -> None:
        """Fill the projected tables, in place, so that captured graphs see them."""
        if self.geometry.has_projection:
            for group, table in enumerate(self.embeddings):
                self.projected[group] = self.project(table)
            self.projected_first.copy_(self.project(self.first_embedding))

    def draws(
        self, integers: torch.Tensor, reals: torch.Tensor, frame: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Uniform numbers [R, G-1] and the sampling settings [R] of the rows' slots."""
        draw = uniform(integers[:, SEED, None], frame[:, None], self.groups[None])
        return draw, reals[:, SUB_TEMPERATURE], integers[:, SUB_TOP_K], reals[:, SUB_TOP_P]

    def forward(
        self,
        hidden: torch.Tensor,
        first: torch.Tensor,
        integers: torch.Tensor,
        reals: torch.Tensor,
        frame: torch.Tensor,
    ) -> torch.Tensor:
        """All codes of a frame.

        Args:
            hidden: [R, H] the talker's normed hidden state.
            first: [R] int64 code 0.
            integers, reals: the slots' settings, [R, 7] and [R, 5].
            frame: [R] int64 the number of the frame, for the draws.

        Returns:
            [R, G] int64.
        """
        inner, count = self.geometry.predictor, hidden.shape[0]
        draw, temperature, top_k, top_p = self.draws(integers, reals, frame)
        shape = (len(self.layers), 2, count, inner.kv_heads, self.geometry.groups, inner.head_dim)
        cache = hidden.new_empty(shape)  # keys and values of each layer
        x = torch.stack([self.project(hidden), F.embedding(first, self.projected_first)], dim=1)  # [R, 2, Hp]
        codes, start = [first], 0
        for group in range(self.geometry.groups - 1):
            stop = start + x.shape[1]
            for index, layer in enumerate(decoder_layers(self.layers)):
                query, key, value = layer.before_attention(x, self.rotary[start:stop])
                keys, values = cache[index, 0], cache[index, 1]
                keys[:, :, start:stop], values[:, :, start:stop] = key.transpose(1, 2), value.transpose(1, 2)
                attended = F.scaled_dot_product_attention(
                    query.transpose(1, 2),
                    keys[:, :, :stop],
                    values[:, :, :stop],
                    is_causal=start == 0,
                    enable_gqa=inner.heads != inner.kv_heads,
                )
                x = layer.after_attention(x, attended.transpose(1, 2).flatten(-2))
            start = stop
            logits = F.linear(rms_norm(x[:, -1], self.norm, inner.eps), self.heads[group]).float()
            codes.append(sample(logits, draw[:, group], temperature, top_k, top_p))
            if group + 2 < self.geometry.groups:
                x = F.embedding(codes[-1], self.projected[group])[:, None]
        return torch.stack(codes, dim=1)
