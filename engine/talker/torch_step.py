"""What surrounds the talker's layers, in torch operations: input rows before, codes after.

Runs on any device and inside CUDA graphs: no shape depends on a value, nothing is read by the host, and numbers are
never assigned through index tensors (that copies from the host, which capture refuses).
`cpu_step.CpuStep` computes the same with compiled kernels; tests hold the two together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from engine.talker.geometry import CONTROL_IDS
from engine.talker.layers import decoder_layers, rms_norm, rotary_table
from engine.talker.sampler import penalise, sample, uniform
from engine.talker.slots import LAST_ROW, MIN_FRAMES, PENALTY, PROMPT_LEN, SEED, TEMPERATURE, TICKET, TOP_K, TOP_P

if TYPE_CHECKING:
    from engine.talker.model import TalkerModel


class TorchStep:
    """The parts of a step in plain torch. N rows in the batch, R of them sampled, H the talker's width."""

    leaves_room = False  # asks for kernels that leave others room, where `crowds` has some that do not

    def __init__(self, model: TalkerModel) -> None:
        self.model = model
        geometry, device = model.geometry, model.head.device
        suppressed = torch.zeros(geometry.vocab, dtype=torch.bool)
        suppressed[geometry.vocab - CONTROL_IDS :] = True
        suppressed[geometry.eos] = False
        self.suppressed = suppressed.to(device)
        self.group_offsets = torch.arange(geometry.groups - 1, device=device) * geometry.predictor_vocab
        self.rotary = rotary_table(geometry.talker, model.max_positions).to(device, model.head.dtype)
        # what the host reads: filled in every step, graph replays included
        self.report = torch.zeros(model.max_rows, 2 + geometry.groups, dtype=torch.int64, device=device)

    def finish_loading(self) -> None:
        """Called once the weights are in place."""

    def close(self) -> None:
        """Will not run again."""

    def crowds(self, rows: int) -> bool:
        """Whether the predictor of so many rows takes the whole device, so that other work waits for its end."""
        return False

    def inputs(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows for the talker.

        Args:
            ids, positions: [N]; an id is a slot, anything else counts as slot 0.

        Returns:
            x [N, H], slot [N] int64, frame [N] int64: the frame this position produces, below 1 inside the prompt
            (0 for its last row).
        """
        slots, predictor = self.model.slots, self.model.predictor
        slot = ids.to(torch.int64)
        slot = slot.masked_fill((slot < 0) | (slot > slots.slots), 0)
        positions = positions.to(torch.int64)
        integers = slots.integers[slot]
        text = slots.rows[slot, torch.minimum(positions, integers[:, LAST_ROW])]
        consumed = positions - integers[:, PROMPT_LEN]
        codes = slots.codes[slot, consumed.clamp(0, slots.max_frames)].clamp_min(0)
        spoken = F.embedding(codes[:, 0], predictor.first_embedding)
        spoken = spoken + F.embedding(codes[:, 1:] + self.group_offsets, predictor.embeddings.flatten(0, 1)).sum(1)
        return text + spoken * (consumed >= 0)[:, None].to(spoken.dtype), slot, consumed + 1

    def layers(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The talker: [N, H] to normed hidden states [N, H]."""
        table = self.rotary[positions]
        for layer, attention in zip(decoder_layers(self.model.layers), self.model.attentions, strict=True):
            query, key, value = layer.before_attention(x, table)
            x = layer.after_attention(x, attention(query.flatten(-2), key.flatten(-2), value.flatten(-2)))
        return rms_norm(x, self.model.norm, self.model.geometry.talker.eps)

    def first_code(
        self, hidden: torch.Tensor, slot: torch.Tensor, frame: torch.Tensor, integers: torch.Tensor, reals: torch.Tensor
    ) -> torch.Tensor:
        """Code 0 of each row: [R, H] to [R] int64. Order as in the reference's generate(): penalty, blocked end,
        suppressed control ids, temperature, top-k, top-p; all in float32."""
        logits = F.linear(hidden, self.model.head).float()
        logits = penalise(logits, self.model.slots.seen_at[slot] < frame[:, None], reals[:, PENALTY])
        logits[:, self.model.geometry.eos].masked_fill_(frame < integers[:, MIN_FRAMES], float("-inf"))
        logits = logits.masked_fill(self.suppressed, float("-inf"))
        draw = uniform(integers[:, SEED], frame, torch.zeros_like(frame))
        return sample(logits, draw, reals[:, TEMPERATURE], integers[:, TOP_K], reals[:, TOP_P])

    def predict(
        self,
        hidden: torch.Tensor,
        first: torch.Tensor,
        integers: torch.Tensor,
        reals: torch.Tensor,
        frame: torch.Tensor,
    ) -> torch.Tensor:
        """All codes of the frame, [R, G]."""
        return self.model.predictor(hidden, first, integers, reals, frame)

    def speak(self, hidden: torch.Tensor, slot: torch.Tensor, frame: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """From hidden states to stored codes.

        Args:
            hidden: [R, H]; slot, frame: [R] int64; valid: [R] bool, False for rows that must leave no trace.

        Returns:
            [R] int64 the token vLLM is told: the slot, the end token after the end, 0 for rows that are not valid.
        """
        slots, eos = self.model.slots, self.model.geometry.eos
        slot = slot.masked_fill(~valid, 0)
        frame = frame.clamp(0, slots.max_frames).masked_fill(~valid, slots.max_frames)  # the column nobody reads
        integers, reals = slots.integers[slot], slots.reals[slot]
        first = self.first_code(hidden, slot, frame, integers, reals)
        codes = self.predict(hidden, first, integers, reals, frame)
        # A frame that is already stored stays: a step repeated after a preemption must not change what was heard.
        stored = slots.codes[slot, frame]
        codes = torch.where((stored[:, :1] >= 0) & valid[:, None], stored, codes)
        first = codes[:, 0].contiguous()
        slots.codes.index_put_((slot, frame), codes)
        seen = slots.seen_at[slot, first]
        slots.seen_at.index_put_((slot, first), torch.minimum(seen, frame.to(seen.dtype)))
        ended = valid & (first == eos)
        ticket = integers[:, TICKET].masked_fill(~valid | ended, 0)
        self.report.zero_()
        self.report[: len(slot)] = torch.cat([ticket[:, None], frame[:, None], codes], dim=1)
        return slot.masked_fill(ended, self.model.end_token)

    def reported(self, rows: int) -> torch.Tensor:
        """The report of the step that just ran, for a host that reads it directly (CPU)."""
        report = self.report[:rows]
        return report[report[:, 0] > 0]
