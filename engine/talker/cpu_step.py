"""The step on the CPU: the compiled kernels of cpu_kernels.py around vLLM's attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.talker import cpu_kernels as kernels
from engine.talker.geometry import CONTROL_IDS
from engine.talker.layers import decoder_layers, rms_norm
from engine.talker.torch_step import TorchStep

if TYPE_CHECKING:
    from engine.talker.layers import DecoderLayer
    from engine.talker.model import TalkerModel

# Above this many rows torch's matrix products win over ours (measured, 2 cores); prompts are longer, decode batches
# are not.
KERNEL_ROWS = 24


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().contiguous().numpy()


def _layer(layer: DecoderLayer) -> kernels.LayerArrays:
    return kernels.LayerArrays(*[_array(getattr(layer, name)) for name in kernels.LayerArrays._fields])


def _scratch(model: TalkerModel, spoken: int) -> kernels.Scratch:
    g, rows = model.geometry.predictor, model.max_rows
    logits = np.empty((rows, model.geometry.predictor_vocab), np.float32)
    first = np.empty((rows, spoken + 1), np.float32)
    scale = np.empty(g.intermediate, np.float32)
    return kernels.Scratch(
        query=np.empty((2 * rows, g.heads, g.head_dim), np.float32),
        key=np.empty((2 * rows, g.kv_heads, g.head_dim), np.float32),
        value=np.empty((2 * rows, g.kv_heads, g.head_dim), np.float32),
        logits=logits,
        bits=logits.view(np.int32),
        mass=np.empty(logits.shape[1], np.float32),
        first_logits=first,
        first_bits=first.view(np.int32),
        first_mass=np.empty(first.shape[1], np.float32),
        scale=scale,
        powers=scale.view(np.int32),
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
        scale = np.empty(geometry.talker.intermediate, np.float32)
        self.powers, self.scale = scale.view(np.int32), scale
        self._report = np.empty((0, 2 + geometry.groups), np.int64)

    def finish_loading(self) -> None:
        predictor, empty = self.model.predictor, np.empty(0, np.float32)
        projection = (empty.reshape(0, 0), empty)
        if self.model.geometry.has_projection:
            projection = (_array(predictor.projection), _array(predictor.projection_bias))
        layers = [_layer(layer) for layer in decoder_layers(predictor.layers)]
        self.predictor = kernels.PredictorArrays(
            kernels.LayerArrays(*[np.stack(arrays) for arrays in zip(*layers, strict=True)]),
            _array(predictor.norm),
            _array(predictor.heads),
            *projection,
            _array(predictor.projected),
            _array(predictor.projected_first),
            _array(predictor.rotary),
        )
        self.layer_arrays = [_layer(layer) for layer in decoder_layers(self.model.layers)]
        head = self.model.head
        self.head = _array(torch.cat([head[: self.spoken], head[self.model.geometry.eos, None]]))
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
        if x.shape[0] > KERNEL_ROWS:
            return super().layers(x, positions)
        g, count = self.model.geometry.talker, x.shape[0]
        query = torch.empty(count, g.heads, g.head_dim)
        key, value = torch.empty(count, g.kv_heads, g.head_dim), torch.empty(count, g.kv_heads, g.head_dim)
        rows, where = x.numpy(), positions.to(torch.int64).numpy()
        arrays = query.numpy(), key.numpy(), value.numpy()
        flat = query.flatten(1), key.flatten(1), value.flatten(1)
        for layer, attention in zip(self.layer_arrays, self.model.attentions, strict=True):
            kernels.before_attention(rows, count, layer, self.table, where, g.eps, *arrays)
            attended = attention(*flat).numpy()
            kernels.after_attention(rows, count, attended, layer, g.eps, self.powers, self.scale)
        return rms_norm(x, self.model.norm, g.eps)

    def speak(self, hidden: torch.Tensor, slot: torch.Tensor, frame: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        g, count = self.model.geometry, hidden.shape[0]
        tokens = torch.empty(count, dtype=torch.int64)
        report = np.empty((count, 2 + g.groups), np.int64)
        made = kernels.speak(
            hidden.contiguous().numpy(),
            slot.numpy(),
            frame.numpy(),
            valid.numpy(),
            self.slots,
            self.head,
            self.spoken,
            g.eos,
            self.predictor,
            self.scratch,
            g.predictor.eps,
            self.model.end_token,
            tokens.numpy(),
            report,
        )
        self._report = report[:made]
        return tokens

    def reported(self, rows: int) -> torch.Tensor:
        return torch.from_numpy(self._report)
