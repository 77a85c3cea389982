"""What the talker keeps for each request: fixed device buffers indexed by slot.

A slot is a row of every buffer. The slot's number is also the token that vLLM sees for the request, so a batch row
finds its state from `input_ids` alone, in every scheduling mode and inside CUDA graphs. Everything is a function of
(slot, position): no step counter exists, so chunked prefill, preemption and discarded steps need no handling.
Slot 0 is the trash slot: dummy runs, padded rows and rows after the end land there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine import sampling
from engine.errors import EngineBusy, InvalidRequest
from engine.staging import Staging
from engine.talker.geometry import TalkerGeometry

NEVER = 1 << 30  # a frame number no request reaches
COLD = 1e-3  # temperatures below are greedy: the usual way to ask for the likeliest code is 0

# Columns of SlotBuffers.integers and .reals: one row copy admits a request, one gather serves a batch.
PROMPT_LEN, LAST_ROW, SEED, MIN_FRAMES, TICKET, TOP_K, SUB_TOP_K = range(7)
TEMPERATURE, TOP_P, PENALTY, SUB_TEMPERATURE, SUB_TOP_P = range(5)


class SlotsFull(EngineBusy):
    """Every slot holds a request; add again once one has ended."""

    code = "slots_full"


class PromptRows:
    """A request as the talker reads it, in the talker's width H, any float dtype.

    Made of tensors that are copied into a slot one after the other: rows that requests share (a voice, a layout) are
    kept once and never put together on the host.

    Attributes:
        parts: tensors [n, H] that joined are the prefill, the trailing rows and, with `ends_in_pad`, the pad row.
        length: T, rows of the prompt.
        trailing_count: L, text rows, one added to the input of each decode step; may be 0.
        pad: [H] the row added once the trailing rows are used up.
        finite: whether all values are; None: not known, `SlotBuffers.check` looks.
    """

    __slots__ = ("ends_in_pad", "finite", "length", "pad", "parts", "trailing_count")

    def __init__(self, prefill: torch.Tensor, trailing: torch.Tensor, pad: torch.Tensor) -> None:
        """prefill [T, H], trailing [L, H], pad [H]."""
        self.parts: tuple[torch.Tensor, ...] = (prefill, trailing)
        self.length, self.trailing_count, self.pad = prefill.shape[0], trailing.shape[0], pad
        self.ends_in_pad = False
        self.finite: bool | None = None

    @classmethod
    def joined(cls, parts: Sequence[torch.Tensor], length: int, pad: torch.Tensor, *, finite: bool) -> PromptRows:
        """Of parts [n, H] of one dtype whose last row is the pad row; the first `length` rows are the prompt."""
        rows = cls.__new__(cls)
        rows.parts, rows.length, rows.pad, rows.finite = tuple(parts), length, pad, finite
        rows.trailing_count = sum(part.shape[0] for part in parts) - 1 - length
        rows.ends_in_pad = True
        return rows

    @property
    def prefill(self) -> torch.Tensor:
        """[T, H] a copy of the rows of the prompt."""
        return torch.cat(self.parts)[: self.length]

    @property
    def trailing(self) -> torch.Tensor:
        """[L, H] a copy of the text rows after it."""
        return torch.cat(self.parts)[self.length : self.length + self.trailing_count]


@dataclass(frozen=True)
class SlotOptions:
    """How one request is sampled. Defaults are those of the published generation_config.json.

    The plain names govern code 0, the `subtalker_` names codes 1 and up (the code predictor).

    Attributes:
        seed: any integer; the same seed gives the same draws whatever else runs.
        max_frames: frames to make at most; exactly this many when no end comes before (the reference stops one
            frame earlier, as its last code 0 never gets its frame).
        min_frames: frames before which the end is blocked.
        do_sample: False takes the likeliest code; so does a temperature of 0.
        top_k: 0 switches it off.
        repetition_penalty: on the code 0 values already spoken; the prompt is not counted.
    """

    seed: int
    max_frames: int
    min_frames: int = 2
    do_sample: bool = True
    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.05
    subtalker_do_sample: bool = True
    subtalker_temperature: float = 0.9
    subtalker_top_k: int = 50
    subtalker_top_p: float = 1.0

    def __post_init__(self) -> None:
        for name, low in (("max_frames", 1), ("min_frames", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise InvalidRequest(f"{name} must be an integer of at least {low}, not {value!r}", field=name)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InvalidRequest(f"seed must be an integer, not {self.seed!r}", field="seed")
        for name in sampling.NAMES:
            sampling.check(name, getattr(self, name.replace("dosample", "do_sample")))


def _temperature(do_sample: bool, value: float) -> float:
    """0 is greedy."""
    return value if do_sample and value >= COLD else 0.0


class SlotPool:
    """Which slots are free. First in, first out, so that a freed slot rests as long as possible."""

    def __init__(self, slots: int) -> None:
        self.total = slots
        self._free = deque(range(1, slots + 1))

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        if not self._free:
            raise SlotsFull(f"all {self.total} talker slots are taken; add the request when one has ended")
        return self._free.popleft()

    def give(self, slot: int) -> None:
        self._free.append(slot)


class SlotBuffers:
    """The per-slot tensors. S = slots + 1 (slot 0 is trash), F = max_frames, G = code groups.

    rows      [S, max_prompt + 1, H]  prefill rows, trailing text rows, then the pad row
    codes     [S, F + 1, G] int64   written once per frame, -1 before; column F takes what must not be kept
    seen_at   [S, vocab] int32      first frame in which code 0 took this value, NEVER before
    integers  [S, 7] int64, reals [S, 5] float32     one column per setting, see the names above
    """

    def __init__(
        self,
        geometry: TalkerGeometry,
        slots: int,
        max_prompt: int,
        max_frames: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.slots = slots
        self.max_prompt, self.max_frames = max_prompt, max_frames
        self.vocab = geometry.vocab
        width, count = geometry.talker.hidden, slots + 1
        # empty, not zeros: on the CPU the pages of slots never used are never touched
        self.rows = torch.empty(count, max_prompt + 1, width, device=device, dtype=dtype)
        self.rows[0].zero_()
        self.codes = torch.full((count, max_frames + 1, geometry.groups), -1, device=device, dtype=torch.int64)
        self.seen_at = torch.full((count, geometry.vocab), NEVER, device=device, dtype=torch.int32)
        self.integers = torch.zeros(count, 7, device=device, dtype=torch.int64)
        self.reals = torch.ones(count, 5, device=device, dtype=torch.float32)
        self._staging = Staging((7, torch.int64), (5, torch.float32), pinned=self.rows.is_cuda)
        self.integers[:, TOP_K] = self.integers[:, SUB_TOP_K] = geometry.vocab

    def check(self, prompt: PromptRows, options: SlotOptions) -> None:
        """Refuse what does not fit or could poison a batch.

        Raises:
            InvalidRequest: wrong shape, too long, or a value that is not finite; `field` names the culprit.
        """
        width = self.rows.shape[-1]
        names = ("prefill",) * len(prompt.parts) if prompt.ends_in_pad else ("prefill", "trailing")
        for name, tensor, dims in (*zip(names, prompt.parts, (2,) * len(names), strict=True), ("pad", prompt.pad, 1)):
            if tensor.dim() != dims or tensor.shape[-1] != width or not tensor.is_floating_point():
                raise InvalidRequest(
                    f"prompt.{name} must be a float tensor of width {width}, not {tensor.dtype} {list(tensor.shape)}",
                    field=name,
                )
            if prompt.finite is False or (prompt.finite is None and not bool(torch.isfinite(tensor).all())):
                raise InvalidRequest(f"prompt.{name} holds values that are not finite", field=name)
        if options.max_frames > self.max_frames:
            raise InvalidRequest(
                f"max_frames {options.max_frames} is above this engine's limit of {self.max_frames}", field="max_frames"
            )
        if prompt.length == 0:
            raise InvalidRequest("prompt.prefill has no rows", field="prefill")
        # text rows past the last frame are never read: only those that can be must fit
        rows = prompt.length + min(prompt.trailing_count, options.max_frames)
        if rows > self.max_prompt:
            raise InvalidRequest(
                f"the prompt has {rows} rows, this engine takes {self.max_prompt}; shorten the text, the instruction "
                "or the reference clip, or raise talker.max_prompt",
                field="prefill",
            )

    def write(self, slot: int, ticket: int, prompt: PromptRows, options: SlotOptions) -> None:
        """Set every field of a slot. Queued on the current stream: a step in flight on it cannot see the change.

        Args:
            ticket: a positive number of this admission, carried by every frame report (slots are reused).
        """
        length, last = prompt.length, prompt.length + min(prompt.trailing_count, options.max_frames)
        whole = prompt.ends_in_pad and prompt.trailing_count <= options.max_frames  # then the last part brings the pad
        stop, at, mine = last + whole, 0, self.rows[slot]
        for part in prompt.parts:
            count = min(part.shape[0], stop - at)
            if count:
                self._copy(mine[at : at + count], part[:count])
                at += count
        if not whole:
            self._copy(mine[last], prompt.pad)
        top_k, sub_top_k = int(options.top_k) or self.vocab, int(options.subtalker_top_k) or self.vocab
        seed = (options.seed + (1 << 63)) % (1 << 64) - (1 << 63)  # any integer, wrapped to int64
        staged = self._staging.take()
        staged.arrays[0][:] = length, last, seed, options.min_frames, ticket, top_k, sub_top_k
        staged.arrays[1][:] = (
            _temperature(options.do_sample, options.temperature),
            options.top_p,
            options.repetition_penalty,
            _temperature(options.subtalker_do_sample, options.subtalker_temperature),
            options.subtalker_top_p,
        )
        for target, source in zip((self.integers[slot], self.reals[slot]), staged.tensors, strict=True):
            target.copy_(source, non_blocking=True)
        self._staging.sent(staged)
        self.codes[slot].fill_(-1)
        self.seen_at[slot].fill_(NEVER)

    @staticmethod
    def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
        if target.is_cuda and not source.is_cuda and not source.is_pinned():
            # from pageable memory the copy would wait for the step in flight
            source = source.to(target.dtype).pin_memory()
        target.copy_(source, non_blocking=True)

    def nbytes(self) -> int:
        tensors = (self.rows, self.codes, self.seen_at, self.integers, self.reals)
        return sum(math.prod(t.shape) * t.element_size() for t in tensors)
