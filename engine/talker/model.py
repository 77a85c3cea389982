"""The talker as a vLLM model: one forward pass takes the last frame's codes to the next frame's codes.

vLLM schedules, keeps the paged KV cache and runs attention; the token it sees is the request's slot number (or the
end token). Sampling happens in here: `forward` returns one-hot rows and vLLM's greedy sampler reads them back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.forward_context import get_forward_context

from engine.talker import fp8
from engine.talker.compat import attention_layer
from engine.talker.frames import HostReports
from engine.talker.geometry import TalkerGeometry
from engine.talker.layers import DecoderLayer, parameter
from engine.talker.placement import SpeakAfter
from engine.talker.predictor import CodePredictor
from engine.talker.slots import SlotBuffers
from engine.talker.torch_step import TorchStep

ARCHITECTURE = "ChorusTalker"


class TalkerModel(nn.Module):
    """The model class vLLM builds; sizes come from the derived config (see derived_config.py)."""

    @staticmethod
    def get_model_state_cls() -> type:
        """vLLM's Model Runner V2 asks for this (CUDA); V1 (CPU) does not."""
        from engine.talker.hooks import TalkerModelState

        return TalkerModelState

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        hf_config = vllm_config.model_config.hf_config
        extra: dict[str, Any] = hf_config.chorus
        g = self.geometry = TalkerGeometry.from_config(extra["config"])
        self.max_rows: int = vllm_config.scheduler_config.max_num_seqs
        self.max_positions: int = vllm_config.model_config.max_model_len
        self.end_token: int = extra["slots"] + 1
        self.token_count: int = hf_config.vocab_size
        self.layers = nn.ModuleList([DecoderLayer(g.talker) for _ in range(g.talker.layers)])
        self.attentions = nn.ModuleList(
            [attention_layer(g.talker, vllm_config, f"layers.{i}.attention") for i in range(g.talker.layers)]
        )
        self.norm, self.head = parameter(g.talker.hidden), parameter(g.vocab, g.talker.hidden)
        self.predictor = CodePredictor(g)
        device, dtype = self.head.device, self.head.dtype
        self.slots = SlotBuffers(g, extra["slots"], extra["max_prompt"], extra["max_frames"], device, dtype)
        self.reports = HostReports()
        self.probe: torch.Tensor | None = None  # [tokens, H] hidden states of the last step, for the self-check
        if extra["probe"]:
            rows = vllm_config.scheduler_config.max_num_batched_tokens
            self.probe = torch.zeros(rows, g.talker.hidden, device=device, dtype=dtype)
        self.fp8 = extra["predictor_weights"] == "fp8"
        self.step = self._step(extra["predictor"], extra["layers"], device, dtype)
        self.after: SpeakAfter | None = None  # None: codes are made inside `forward`
        if extra["speak_after"]:
            self.after = SpeakAfter(self, vllm_config.scheduler_config.max_num_batched_tokens)

    def _step(self, predictor: str, layers: str, device: torch.device, dtype: torch.dtype) -> TorchStep:
        if predictor == "plain":  # torch operations throughout; settings.py refuses layers of another kind with it
            return TorchStep(self)
        if device.type == "cuda":
            if predictor in ("skinny", "persistent") or layers in ("skinny", "paged"):
                from engine.talker.skinny import SkinnyStep

                return SkinnyStep(self, predictor, layers, self.fp8)
            from engine.talker.fused import FusedStep

            return FusedStep(self)
        if dtype == torch.float32:
            from engine.talker.cpu_step import CpuStep

            return CpuStep(self)
        return TorchStep(self)

    def finish_loading(self) -> None:
        """Derive what depends on the weights; called by the loader."""
        if self.fp8:  # first: every step, and what it packs, starts from the rounded weights
            fp8.round_weights(self.predictor)
        self.predictor.finish_loading()
        self.step.finish_loading()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Part of vLLM's interface; the input rows are built in `forward`."""
        return torch.zeros(
            input_ids.shape[0], self.geometry.talker.hidden, dtype=self.head.dtype, device=self.head.device
        )

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Rows over vLLM's vocabulary: what `forward` returned, or what is made of its hidden states now. [R] tokens
        where they are wanted themselves (`SpeakAfter.direct`)."""
        if self.after is None:
            return hidden_states
        tokens = self.after.speak(hidden_states)
        self._push_reports(tokens.shape[0])
        return tokens if self.after.direct else self._one_hot(tokens)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        sample_rows: torch.Tensor | None = None,
        sample_count: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """One step.

        Args:
            input_ids: [N] slot of each row; positions: [N] its position in its request.
            sample_rows: [R] rows to sample, where the model-state hook knows them.
            sample_count: [1] how many of sample_rows count (graphs of steps with a prefill have a fixed R).

        Returns:
            [N, tokens] float32, one-hot in the sampled rows. With `after`: [N, H] hidden states.
        """
        count = input_ids.shape[0]
        x, slot, frame = self.step.inputs(input_ids, positions)
        hidden = self.step.layers(x, positions)
        if self.probe is not None:
            self.probe[:count].copy_(hidden)
        if self.after is not None:
            metadata, mapping = self.metadata()
            self.after.keep(slot, frame, None if mapping is None else mapping[:count] >= 0)
            if metadata is not None and hidden.device.type == "cpu":  # on CUDA the model-state hook knows the rows
                ends = metadata.query_start_loc[1:] - 1
                self.after.rows[: ends.shape[0]].copy_(ends)
            return hidden
        rows, valid = self._rows(count, positions.device, sample_rows)
        padding = None
        if sample_count is not None and rows is not None:
            padding = torch.arange(rows.shape[0], device=rows.device) >= sample_count
            valid = valid & ~padding
        if rows is not None:
            hidden, slot, frame = hidden[rows], slot[rows], frame[rows]
        tokens = self.step.speak(hidden, slot, frame, self.real(slot, frame, valid))
        self._push_reports(hidden.shape[0])
        if rows is None:
            return self._one_hot(tokens)
        if padding is not None:  # padded entries write entry 0 once more
            rows, tokens = torch.where(padding, rows[0], rows), torch.where(padding, tokens[0], tokens)
        out = torch.zeros(count, self.token_count, dtype=torch.float32, device=hidden.device)
        return out.index_put_((rows, tokens), torch.ones_like(tokens, dtype=out.dtype))

    def real(self, slot: torch.Tensor, frame: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """Which rows make a frame: [R] bool, of slot and frame [R] int64 and of the rows that are no padding."""
        # a chunk that ends inside the prompt produces a frame below 0, a row of the end token has slot 0
        return valid & (slot > 0) & (frame >= 0) & (frame < self.slots.max_frames)

    def _push_reports(self, rows: int) -> None:
        if self.head.device.type == "cpu":
            self.reports.push(self.step.reported(rows).numpy())

    def _one_hot(self, tokens: torch.Tensor) -> torch.Tensor:
        """[R] int64 to [R, tokens] float32."""
        out = torch.zeros(tokens.shape[0], self.token_count, dtype=torch.float32, device=tokens.device)
        return out.scatter_(1, tokens[:, None], 1.0)

    def metadata(self) -> tuple[Any, Any]:
        """Attention metadata of this step, and where the keys of each row are written (below 0: padding).

        A profiling run has neither.
        """
        context = get_forward_context()
        metadata: Any = context.attn_metadata
        name = str(self.attentions[0].layer_name)
        if isinstance(metadata, dict):
            metadata = metadata[name]
        mapping = context.slot_mapping.get(name) if isinstance(context.slot_mapping, dict) else None
        return (None, None) if metadata is None or mapping is None else (metadata, mapping)

    def _rows(
        self, count: int, device: torch.device, sample_rows: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Which rows to sample (None: all), and which of them are real.

        Padded rows of a graph keep ids and positions of earlier steps; only a negative entry in vLLM's slot mapping
        (where keys and values are written) marks them. Requests = tokens tells a decode batch, not the longest
        query: the capture fix of hooks.py changes that one.
        """
        metadata, mapping = self.metadata()
        if metadata is None:  # a profiling run: nothing is real, at most a full batch is sampled
            rows = torch.arange(min(count, self.max_rows), device=device)
            return rows, torch.zeros_like(rows, dtype=torch.bool)
        starts = metadata.query_start_loc
        if starts.shape[0] - 1 == count:
            return None, mapping[:count] >= 0
        rows = (sample_rows if sample_rows is not None else starts[1:] - 1).to(torch.int64)
        return rows, mapping[rows] >= 0
