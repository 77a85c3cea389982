"""How much memory the models take: of the GPU, or of this process where there is none."""

from __future__ import annotations

import os

import torch

MIB = 2**20


def in_use(device: torch.device) -> dict[str, float]:
    """`memory_used_mib` and `memory_total_mib`.

    CUDA: of the whole device, other programs included, since that is what runs out. CPU: the resident set of this
    process, against the machine's memory (Linux; nothing elsewhere).
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return {"memory_used_mib": round((total - free) / MIB), "memory_total_mib": round(total / MIB)}
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        with open("/proc/self/statm", encoding="ascii") as statm:
            resident = int(statm.read().split()[1]) * page
        return {
            "memory_used_mib": round(resident / MIB),
            "memory_total_mib": round(os.sysconf("SC_PHYS_PAGES") * page / MIB),
        }
    except (OSError, ValueError):
        return {}
