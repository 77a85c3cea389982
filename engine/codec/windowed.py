"""Windowed decoding, kept to be measured against: each chunk decodes the frames before it again.

Without state in the layers a chunk needs left context: its window is the last `left_context` frames and the new ones,
decoded as if the stream began there, and the context's samples are dropped. The reference's `chunked_decode` does so
with 25 frames. It costs (context + new) / new times the stateful decoder, and is exact only while the window reaches
back to the start: the layers together see further than any window used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.codec.decoder import CodecDecoder
from engine.codec.streaming import DecoderState, SlotState, StateWalk
from engine.errors import ConfigError


@dataclass(frozen=True)
class WindowState(SlotState):
    """position: int64 [B], frames decoded so far. codes: int64 [B, G, left_context], the newest last."""

    position: Tensor
    codes: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.position, self.codes)

    def _map(self, each: Callable[[Tensor], Tensor]) -> WindowState:
        return WindowState(each(self.position), each(self.codes))


class WindowWalk(StateWalk):
    """A decode of windows whose first `missing` [B] frames do not exist yet (young streams).

    Shapes stay static under CUDA graphs: the missing frames are computed, and blanked wherever they could reach
    real ones, that is before each convolution and in attention.
    """

    def __init__(self, missing: Tensor, frames: int, histories: list[int]) -> None:
        super().__init__(DecoderState(-missing, (), (), ()))  # the first real frame has position 0
        self._missing, self._frames = missing, frames
        self._lengths = iter(histories)

    def extend(self, x: Tensor) -> Tensor:
        rate = x.shape[-1] // self._frames  # steps per frame at this layer
        step = torch.arange(x.shape[-1], device=x.device)
        blank = step < (self._missing * rate)[:, None]  # [B, T]
        return F.pad(x.masked_fill(blank[:, None], 0), (next(self._lengths), 0))

    def next_history(self) -> None:
        return None

    def next_cache(self) -> None:
        return None

    def keep_cache(self, keys: Tensor, values: Tensor) -> None:
        pass

    def extend_cache(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys, values


class WindowedDecoder:
    """The decoder with the interface of `CodecDecoder` where streams are concerned.

    Args:
        decoder: the weights.
        left_context: frames decoded again for each chunk.
    """

    def __init__(self, decoder: CodecDecoder, left_context: int) -> None:
        if left_context < 0:
            raise ConfigError(
                f"codec.left_context is {left_context}; it counts frames, from 0", field="codec.left_context"
            )
        self.decoder, self.left_context = decoder, left_context
        self.groups, self.samples_per_frame = decoder.groups, decoder.samples_per_frame

    def init_state(self, batch: int, device: torch.device | str | None = None) -> WindowState:
        """State of streams that have not begun."""
        device = device or self.decoder.pre_conv.conv.weight.device
        codes = torch.zeros(batch, self.groups, self.left_context, dtype=torch.int64, device=device)
        return WindowState(torch.zeros(batch, dtype=torch.int64, device=device), codes)

    def step(self, codes: Tensor, state: WindowState) -> tuple[Tensor, WindowState]:
        """The next T frames of each stream: int64 [B, G, T] -> PCM [B, 1, T * samples_per_frame] and the next state."""
        window = torch.cat((state.codes, codes), dim=-1)
        missing = (self.left_context - state.position).clamp(min=0)
        pcm = self.decoder.decode_with(window, WindowWalk(missing, window.shape[-1], self.decoder.history_lengths))
        new = codes.shape[-1]
        kept = window[..., window.shape[-1] - self.left_context :]
        return pcm[..., self.left_context * self.samples_per_frame :], WindowState(state.position + new, kept)
