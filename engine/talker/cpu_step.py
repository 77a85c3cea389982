"""The step on the CPU: the compiled kernels of cpu_kernels.py around vLLM's attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from engine.talker import cpu_kernels as kernels
from engine.talker.geometry import CONTROL_IDS
from engine.talker.layers import decoder_layers, rms_norm
from engine.talker.slots import TICKET
from engine.talker.torch_step import TorchStep

if TYPE_CHECKING:
    from engine.talker.layers import DecoderLayer
    from engine.talker.model import TalkerModel

# Above this many rows torch's matrix products win over ours (measured, 2 cores); prompts are longer, decode batches
# are not.
KERNEL_ROWS = 24


MATRICES = ("qkv", "output", "gate_up", "down")


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().contiguous().numpy()


def _matrix(tensor: torch.Tensor, halves: bool) -> np.ndarray:
    """As cpu_kernels stores matrices: the tensor itself, or the upper halves of its elements."""
    array = _array(tensor)
    return (array.view(np.uint32) >> 16).astype(np.uint16) if halves else array


def _are_halves(model: nn.Module) -> bool:
    """Whether every matrix is bfloat16 in value, so that nothing is lost by storing it so."""
    return all(bool((p.view(torch.int32) & 0xFFFF).eq(0).all()) for p in model.parameters() if p.dim() > 1)


def _layer(layer: DecoderLayer, halves: bool) -> kernels.LayerArrays:
    arrays = {
        name: _matrix(getattr(layer, name), halves) if name in MATRICES else _array(getattr(layer, name))
        for name in kernels.LayerArrays._fields
    }
    return kernels.LayerArrays(**arrays)


def _scratch(model: TalkerModel, spoken: int) -> kernels.Scratch:
    g, rows, size = model.geometry.predictor, model.max_rows, model.geometry.predictor_vocab
    longest = max(size, spoken + 1)
    return kernels.Scratch(
        query=np.empty((2 * rows, g.heads, g.head_dim), np.float32),
        key=np.empty((2 * rows, g.kv_heads, g.head_dim), np.float32),
        value=np.empty((2 * rows, g.kv_heads, g.head_dim), np.float32),
        logits=np.empty((rows, size), np.float32),
        first_logits=np.empty((rows, spoken + 1), np.float32),
        order=np.empty(longest, np.int32),
        mass=np.empty(longest, np.float32),
    )


class CpuStep(TorchStep):
    """As TorchStep, float32 only. Arrays are views of the model's memory where the layout allows."""

    def __init__(self, model: TalkerModel) -> None:
        super().__init__(model)
        geometry, slots = model.geometry, model.slots
        self.slots = kernels.SlotArrays(
            slots.rows.numpy(), slots.codes.numpy(), slots.seen_at.numpy(), slots.integers.numpy(), slots.reals.numpy()
        )
        self.spoken = min(geometry.vocab - CONTROL_IDS, geometry.eos)
        self.table = self.rotary.numpy()
        self.scratch = _scratch(model, self.spoken)
        self._report = np.empty((0, 2 + geometry.groups), np.int64)

    def finish_loading(self) -> None:
        predictor, halves = self.model.predictor, _are_halves(self.model)
        projection, bias = np.empty((0, 0), np.uint16 if halves else np.float32), np.empty(0, np.float32)
        if self.model.geometry.has_projection:
            projection, bias = _matrix(predictor.projection, halves), _array(predictor.projection_bias)
        layers = [_layer(layer, halves) for layer in decoder_layers(predictor.layers)]
        self.predictor = kernels.PredictorArrays(
            kernels.LayerArrays(*[np.stack(arrays) for arrays in zip(*layers, strict=True)]),
            _array(predictor.norm),
            _matrix(predictor.heads, halves),
            projection,
            bias,
            _array(predictor.projected),
            _array(predictor.projected_first),
            _array(predictor.rotary),
        )
        self.layer_arrays = [_layer(layer, halves) for layer in decoder_layers(self.model.layers)]
        head = self.model.head
        self.head = _matrix(torch.cat([head[: self.spoken], head[self.model.geometry.eos, None]]), halves)
        self.embeddings = _array(predictor.first_embedding), _array(predictor.embeddings)

    def inputs(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count = ids.shape[0]
        x = torch.empty(count, self.model.geometry.talker.hidden)
        slot, frame = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.int64)
        kernels.build_inputs(
            ids.to(torch.int64).numpy(),
            positions.to(torch.int64).numpy(),
            self.slots,
            *self.embeddings,
            x.numpy(),
            slot.numpy(),
            frame.numpy(),
        )
        return x, slot, frame

    def layers(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        g, count = self.model.geometry.talker, x.shape[0]
        query = torch.empty(count, g.heads, g.head_dim)
        key, value = torch.empty(count, g.kv_heads, g.head_dim), torch.empty(count, g.kv_heads, g.head_dim)
        where = positions.to(torch.int64).numpy()
        heads = query.numpy(), key.numpy(), value.numpy()
        flat = query.flatten(1), key.flatten(1), value.flatten(1)
        stack = decoder_layers(self.model.layers)
        for layer, arrays, attention in zip(stack, self.layer_arrays, self.model.attentions, strict=True):
            if count <= KERNEL_ROWS:
                kernels.before_attention(x.numpy(), count, arrays, self.table, where, g.eps, *heads)
                kernels.after_attention(x.numpy(), count, attention(*flat).numpy(), arrays, g.eps)
                continue
            qkv = F.linear(self._norm(x, arrays.input_norm), layer.qkv)
            kernels.split_heads(qkv.numpy(), count, arrays, self.table, where, g.eps, *heads)
            x += F.linear(attention(*flat), layer.output)
            gate_up = F.linear(self._norm(x, arrays.post_norm), layer.gate_up)
            active = torch.empty(count, g.intermediate)
            kernels.swiglu(gate_up.numpy(), count, active.numpy())
            x += F.linear(active, layer.down)
        return rms_norm(x, self.model.norm, g.eps)

    def _norm(self, x: torch.Tensor, weight: np.ndarray) -> torch.Tensor:
        out = torch.empty_like(x)
        kernels.rms_norm(x.numpy(), x.shape[0], weight, self.model.geometry.talker.eps, out.numpy())
        return out

    def speak(self, hidden: torch.Tensor, slot: torch.Tensor, frame: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        g, state = self.model.geometry, self.slots
        slots, frames, real = slot.numpy(), frame.numpy(), valid.numpy()
        stored = state.codes[slots, np.where(real, frames, 0), 0]
        tokens = np.where(real, np.where(stored == g.eos, self.model.end_token, slots), 0)
        # A frame that is already stored stays: a step repeated after a preemption must not change what was heard.
        fresh = np.flatnonzero(real & (stored < 0))
        states, s, f = hidden.numpy()[fresh], slots[fresh], frames[fresh]
        first = np.empty(len(fresh), np.int64)
        kernels.first_codes(states, len(s), s, f, state, self.head, self.spoken, g.eos, self.scratch, first)
        state.seen_at[s, first] = np.minimum(state.seen_at[s, first], f)
        ended = first == g.eos
        state.codes[s[ended], f[ended], 0] = g.eos
        tokens[fresh[ended]] = self.model.end_token
        if ended.any():  # the end has no other codes
            states, s, f, first = states[~ended], s[~ended], f[~ended], first[~ended]
        codes = np.empty((len(s), g.groups), np.int64)
        if len(s):
            kernels.predict(states, len(s), first, s, f, state, self.predictor, self.scratch, g.predictor.eps, codes)
        state.codes[s, f] = codes
        self._report = np.column_stack([state.integers[s, TICKET], f, codes])
        return torch.from_numpy(tokens)

    def reported(self, rows: int) -> torch.Tensor:
        return torch.from_numpy(self._report)
