"""Where the time of a training step goes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def profile(step: Callable[[], object], warmup: int = 10, steps: int = 5) -> None:
    """Prints milliseconds a step and the ten slowest operations."""
    for _ in range(warmup):
        step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    began = time.time()
    with torch.profiler.profile(activities=activities) as seen:
        for _ in range(steps):
            step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(f"{(time.time() - began) / steps * 1000:.0f} ms a step")
    print(seen.key_averages().table(sort_by=key, row_limit=10, max_name_column_width=60), flush=True)
