"""Decoder state as values: what each stream must remember between two chunks.

Every layer of the 12 Hz decoder looks only to the left, so a stream is fully described by the last few inputs of
each convolution, the last `sliding_window - 1` keys and values of each attention layer, and its position in frames.
All tensors have the batch row as leading dimension and a static shape: a state may live in fixed buffers under a CUDA
graph, and rows may stand at different positions. Zeros are the state of a stream that has not begun, because the
reference pads each convolution's own input with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


class SlotState:
    """Tensors with one leading row per stream. `select` copies; `write` and `reset` work in place."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor of the state, in one fixed order."""
        raise NotImplementedError

    def _map(self, each: Callable[[Tensor], Tensor]) -> Self:
        raise NotImplementedError

    @property
    def batch(self) -> int:
        return self.tensors()[0].shape[0]

    def select(self, rows: Tensor) -> Self:
        """A copy of the rows named by the int64 tensor `rows` [n], in that order."""
        return self._map(lambda t: t.index_select(0, rows))

    def write(self, rows: Tensor, other: SlotState) -> None:
        """Puts row i of `other` into row `rows[i]`. Of equal entries in `rows` any one may win."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine.index_copy_(0, rows, theirs.to(mine.dtype))

    def reset(self, rows: Tensor) -> None:
        """Makes the named rows new streams."""
        for t in self.tensors():
            t.index_fill_(0, rows, 0)

    def clone(self) -> Self:
        return self._map(torch.clone)


@dataclass(frozen=True)
class DecoderState(SlotState):
    """State of a batch of streams.

    Attributes:
        position: int64 [B], frames decoded so far.
        histories: per convolution, its last inputs [B, channels, n]; [B, n, channels] where the decoder is frozen
            with `channels_last`.
        keys, values: per attention layer [B, kv_heads, sliding_window - 1, head_dim], newest last; keys are rotated.
    """

    position: Tensor
    histories: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.position, *self.histories, *self.keys, *self.values)

    def _map(self, each: Callable[[Tensor], Tensor]) -> DecoderState:
        parts = (tuple(map(each, tensors)) for tensors in (self.histories, self.keys, self.values))
        return DecoderState(each(self.position), *parts)


class StateWalk:
    """Hands each layer its part of a state, in the order the layers run, and gathers the next state."""

    def __init__(self, state: DecoderState) -> None:
        self.position = state.position
        self.past = state.keys[0].shape[2] if state.keys else 0  # keys of earlier frames per attention layer
        self._histories = iter(state.histories)
        self._caches = iter(zip(state.keys, state.values, strict=True))
        self._new_histories: list[Tensor] = []
        self._new_keys: list[Tensor] = []
        self._new_values: list[Tensor] = []

    def extend(self, x: Tensor) -> Tensor:
        """Puts a convolution's history before its new input x [B, C, T]; remembers the newest inputs."""
        history = next(self._histories)
        joined = torch.cat((history, x), dim=-1)
        self.remember(joined, history.shape[-1])
        return joined

    def next_history(self) -> Tensor | None:
        """`extend` in two steps, for a kernel that joins: the history that comes next, and then `remember`.

        None from a walk that joins in its own way: use `extend`.
        """
        return next(self._histories)

    def remember(self, joined: Tensor, count: int) -> None:
        """Keep the last `count` inputs of a convolution's history and new input, joined."""
        self._new_histories.append(joined[..., joined.shape[-1] - count :])

    def keep(self, history: Tensor) -> None:
        """The last inputs of a convolution themselves, in the layout of the state."""
        self._new_histories.append(history)

    def next_cache(self) -> tuple[Tensor, Tensor] | None:
        """`extend_cache` in two steps, for a kernel that joins: the cache that comes next, and then `keep_cache`.

        None from a walk without caches.
        """
        return next(self._caches)

    def keep_cache(self, keys: Tensor, values: Tensor) -> None:
        """Keep the last `past` of an attention layer's old and new keys and values, joined."""
        self._new_keys.append(keys[:, :, keys.shape[2] - self.past :])
        self._new_values.append(values[:, :, values.shape[2] - self.past :])

    def extend_cache(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The same for new keys and values [B, kv_heads, T, head_dim] of an attention layer."""
        old_keys, old_values = next(self._caches)
        keys = torch.cat((old_keys, keys), dim=2)
        values = torch.cat((old_values, values), dim=2)
        self.keep_cache(keys, values)
        return keys, values

    def finish(self, frames: int) -> DecoderState:
        return DecoderState(
            self.position + frames, tuple(self._new_histories), tuple(self._new_keys), tuple(self._new_values)
        )
