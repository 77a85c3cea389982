"""What the device did during a stretch of work: how busy, where it waited for the host, which kernels took the time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile

WAIT_US = 10.0  # pauses of a stream that are worth a line


@dataclass(frozen=True)
class Kernel:
    """Times in microseconds."""

    name: str
    stream: int
    start: float
    end: float


def record(work: Callable[[], object]) -> list[Kernel]:
    """Run `work`, which waits for its results, and return what ran on the device, by start. The recording itself costs
    about a microsecond a kernel, so shares and counts are worth more than the sums."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorder:
        work()
    found = recorder.profiler.kineto_results.events()  # type: ignore[union-attr]  # the summary takes minutes over these
    kernels = [
        Kernel(e.name(), e.device_resource_id(), e.start_ns() / 1e3, (e.start_ns() + e.duration_ns()) / 1e3)
        for e in found
        if str(e.device_type()).endswith("CUDA") and e.duration_ns() > 0
    ]
    return sorted(kernels, key=lambda kernel: kernel.start)


def busy_us(kernels: Iterable[Kernel]) -> float:
    """Time in which at least one of the kernels, sorted by start, ran."""
    total, until = 0.0, float("-inf")
    for kernel in kernels:
        total += max(0.0, kernel.end - max(until, kernel.start))
        until = max(until, kernel.end)
    return total


def pauses(kernels: Iterable[Kernel]) -> dict[tuple[str, str], list[float]]:
    """Pauses of WAIT_US or more, in us, by the kernels before and after."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    last: Kernel | None = None
    for kernel in kernels:
        if last is not None and kernel.start - last.end >= WAIT_US:
            found[short(last.name), short(kernel.name)].append(kernel.start - last.end)
        if last is None or kernel.end > last.end:
            last = kernel
    return found


def short(name: str) -> str:
    """Without template arguments, which would fill the line."""
    return name.replace("void ", "").split("<")[0].split("(")[0][-60:]


def report(kernels: list[Kernel], steps: int, most: int = 14) -> Iterator[str]:
    """Lines of text: the whole device, then each stream that was busy for a hundredth of the time."""
    wall = kernels[-1].end - kernels[0].start
    yield (
        f"{wall / 1e3:.1f} ms, {steps} talker steps, {len(kernels)} kernels; "
        f"busy {100 * busy_us(kernels) / wall:.1f} %, {busy_us(kernels) / 1e3 / max(1, steps):.2f} ms a step"
    )
    for stream in sorted({kernel.stream for kernel in kernels}):
        mine = [kernel for kernel in kernels if kernel.stream == stream]
        if busy_us(mine) < wall / 100:
            continue
        yield (
            f"stream {stream}: busy {100 * busy_us(mine) / wall:.1f} %, {busy_us(mine) / 1e3 / max(1, steps):.3f} ms "
            f"and {len(mine) / max(1, steps):.0f} kernels a step"
        )
        waits = sorted(pauses(mine).items(), key=lambda item: -sum(item[1]))
        for (before, after), each in waits[:6]:
            longest = max(each)
            yield (
                f"  waits {sum(each) / 1e3 / max(1, steps):.3f} ms a step, {len(each)} times, longest "
                f"{longest / 1e3:.2f} ms: {before} > {after}"
            )
        by_name: dict[str, list[float]] = defaultdict(list)
        for kernel in mine:
            by_name[kernel.name].append(kernel.end - kernel.start)
        for name, spent in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:most]:
            yield (
                f"  {sum(spent) / 1e3 / max(1, steps):.3f} ms a step, {len(spent) / max(1, steps):.1f} x "
                f"{sum(spent) / len(spent):.1f} us: {name[:110]}"
            )
