"""What the host is spared in a step of vLLM, and what it does while it waits for one; both reach into a live client."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

SERVE_S = 5e-5  # between two looks at an event


def spare_allocations(client: Any) -> None:
    """Ask vLLM for memory only when a stream has filled its last block.

    Its scheduler asks in every step for every stream, at 15 us each, and learns 15 times out of 16 that nothing is
    needed. Only where the answer follows from the request alone: one kind of attention over all positions, no prefix
    cache, no speculation.
    """
    manager = client.engine_core.scheduler.kv_cache_manager
    kinds = manager.coordinator.single_type_managers
    if len(kinds) != 1 or type(kinds[0]).__name__ != "FullAttentionManager" or manager.enable_caching:
        return
    held, block, ask = kinds[0].req_to_blocks, kinds[0].block_size, manager.allocate_slots

    def allocate_slots(request: Any, num_new_tokens: int, **others: Any) -> Any:
        computed = request.num_computed_tokens
        if num_new_tokens == 1 and computed >= request.num_prompt_tokens and not others.get("num_lookahead_tokens"):
            blocks = held.get(request.request_id)
            if blocks is not None and computed < len(blocks) * block:
                return manager.empty_kv_cache_blocks
        return ask(request, num_new_tokens, **others)

    manager.allocate_slots = allocate_slots


class Waits:
    """seconds: how long the host has waited for steps that were launched ahead, with what it served meanwhile."""

    seconds = 0.0


def serve_while_waiting(client: Any, serve: Callable[[], None]) -> Waits:
    """Have `serve` called again and again while the host waits for a step that was launched ahead; see `ServedEvent`.

    vLLM's executor hands out a future whose outcome waits for a CUDA event. Where there is no such event (sync
    scheduling, the CPU) nothing is served, and nothing else changes.
    """
    executor, waits = client.engine_core.model_executor, Waits()
    launch = executor.sample_tokens

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        future = launch(*args, **kwargs)
        output: Any = getattr(future, "async_output", None)
        if hasattr(output, "copy_event"):
            output.copy_event = ServedEvent(output.copy_event, serve, waits)
        return future

    executor.sample_tokens = sample_tokens
    return waits


class ServedEvent:
    """A CUDA event whose wait does other work."""

    def __init__(self, event: Any, serve: Callable[[], None], waits: Waits) -> None:
        self._event, self._serve, self._waits = event, serve, waits

    def synchronize(self) -> None:
        began = time.perf_counter()
        while not self._event.query():
            self._serve()
            time.sleep(SERVE_S)
        self._waits.seconds += time.perf_counter() - began
