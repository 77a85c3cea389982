"""The model-state hook of vLLM's Model Runner V2 (CUDA): inputs that graphs need, and the frame reports.

Under a full CUDA graph the model sees what capture saw. Anything that changes per step lives in a tensor that stays.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.output import SamplerOutput


class TokenSampler:
    """Stands where vLLM's sampler stands once the model returns tokens: nothing is left to sample.

    The sampler itself launches half a dozen kernels to find the ones in one-hot rows, and writes settings of each
    request to the device that nobody reads.
    """

    def __init__(self, sampler: Any, after: Any) -> None:
        self._sampler, self._after = sampler, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def add_request(self, *args: Any, **kwargs: Any) -> None:
        if not self._after.direct:
            self._sampler.add_request(*args, **kwargs)

    def apply_staged_writes(self) -> None:
        if not self._after.direct:
            self._sampler.apply_staged_writes()

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> SamplerOutput:
        """logits: [R] int64 tokens. Rows over the vocabulary, as during start-up, are sampled."""
        if logits.dim() != 1:
            return self._sampler(logits, input_batch)
        sampled, rejected = get_num_sampled_and_rejected(
            input_batch.seq_lens.new_ones(input_batch.num_reqs),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self._sampler.req_states.prefill_len.gpu,
        )
        tokens = logits.clone().view(-1, 1)  # the graph's own buffer is overwritten by the next step
        return SamplerOutput(
            sampled_token_ids=tokens, logprobs_tensors=None, num_nans=None, num_sampled=sampled, num_rejected=rejected
        )


class TalkerModelState(DefaultModelState):
    """One per engine; vLLM calls its methods around every step, graph replays included."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sample_rows = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=self.device)
        self.sample_count = torch.zeros(1, dtype=torch.int64, device=self.device)
        after: Any = self.model.after
        self.after = after
        if after is not None:
            after.rows = self.sample_rows

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any] | None:
        """Asked once, after loading; None leaves vLLM's own."""
        return None if self.after is None else (TokenSampler(sampler, self.after), None)

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """Before every step. The returned arguments reach eager steps only, the tensors' contents reach both."""
        inputs = super().prepare_inputs(input_batch, req_states)
        count = input_batch.num_reqs
        prompt = input_batch.num_tokens != count
        if self.after is None:  # else rows beyond the count are told apart there
            self.sample_rows.zero_()
            self.sample_count.fill_(count)
        else:
            self.after.prompt = prompt
        self.sample_rows[:count] = input_batch.logits_indices[:count]
        if prompt:
            inputs["sample_rows"] = self.sample_rows[:count]
        return inputs

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        """Before profiling and capture. Zeroed: rows of an earlier, larger run would point outside a smaller graph."""
        inputs = super().prepare_dummy_inputs(num_reqs, num_tokens)
        self.sample_rows.zero_()
        self.sample_count.zero_()
        if num_reqs != num_tokens:
            inputs |= {"sample_rows": self.sample_rows[:num_reqs], "sample_count": self.sample_count}
        return inputs

    def prepare_attn(self, input_batch: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Capture every graph as if one request held all tokens.

        FlashAttention 3 may split a request's keys and merges the parts in a second kernel, whose launch grid is
        fixed at capture from the longest query. vLLM 0.26 captures tokens / requests there; a longer prompt replayed
        in such a graph has most of its output never written. With the token count, the grid is one that fits any
        query. That holds for graphs up to the request limit as well (one token per request at capture, but a short
        chunk of a prompt replays them too): with 6 query on 2 key heads of 64 all of them were wrong, with 16 on 8
        of 128 none.
        """
        if kwargs.get("for_capture"):
            scheduled = input_batch.num_scheduled_tokens.copy()
            scheduled[-1] = input_batch.num_tokens
            input_batch.num_scheduled_tokens = scheduled
        return super().prepare_attn(input_batch, *args, **kwargs)

    def postprocess_state(self, *args: Any, **kwargs: Any) -> None:
        """After every step, on the stream that ran it."""
        super().postprocess_state(*args, **kwargs)
        record = getattr(self.model.reports, "record", None)
        if record is not None:
            record()
