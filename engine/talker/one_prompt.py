"""vLLM's scheduler with every prompt in a step of its own, for speech that does not depend on who else is speaking.

Batch-invariant kernels make a decode row the same in any batch. Prefill kernels still depend on what else is in the
step (measured: prompts that shared a step with others differed from their first frame on), so here nothing is.
"""

from __future__ import annotations

from typing import Any


def scheduler_class(asynchronous: bool) -> type:
    """A subclass of the scheduler that vLLM would take."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    base: Any = AsyncScheduler if asynchronous else Scheduler

    class OnePromptAStep(base):
        """Steps hold one prompt, or one chunk of it, and nothing else; or no prompt."""

        running: list[Any]
        max_num_running_reqs: int

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            everyone, most = self.running, self.max_num_running_reqs
            begun = [r for r in everyone if r.num_computed_tokens < r.num_prompt_tokens]
            if not begun and not self._next_fits():
                return super().schedule(*args, **kwargs)
            others = [r for r in everyone if r not in begun[:1]]
            self.running, self.max_num_running_reqs = begun[:1], 1
            try:
                return super().schedule(*args, **kwargs)
            finally:  # its own list by now: with the new request, or without one that found no memory
                self.running, self.max_num_running_reqs = others + self.running, most

        def _next_fits(self) -> bool:
            """Whether a request waits for which there is a place and memory; else the running ones go on."""
            if not self.waiting or len(self.running) >= self.max_num_running_reqs:
                return False
            tokens = self.waiting.peek_request().num_tokens
            return self.kv_cache_manager.block_pool.get_num_free_blocks() * self.block_size > tokens + self.block_size

    return OnePromptAStep
