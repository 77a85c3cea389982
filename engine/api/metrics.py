"""What Prometheus reads: how requests ended, how soon they were heard, and the engine's own numbers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from engine.errors import ChorusError

OUTCOMES = ("done", "cancelled", "refused", "failed")
_FIRST_AUDIO_S = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30)


class _EngineNumbers(Collector):
    """The engine's counters and gauges, read when asked for."""

    def __init__(self, read: Callable[[], dict[str, float]]) -> None:
        self._read = read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        try:
            numbers = self._read()
        except ChorusError:  # not ready
            return
        for name, value in sorted(numbers.items()):
            if isinstance(value, int | float):
                yield GaugeMetricFamily(
                    f"chorus_engine_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}", f"Engine: {name}", value
                )


class Metrics:
    """One per app, with a registry of its own, so that several apps live in one process."""

    def __init__(self, read_engine: Callable[[], dict[str, float]], ready: Callable[[], bool]) -> None:
        self.registry = CollectorRegistry()
        self.active = 0  # speech requests now
        self.ended = Counter(
            "chorus_speech_requests", "Speech requests by how they ended", ["outcome"], registry=self.registry
        )
        for outcome in OUTCOMES:
            self.ended.labels(outcome)  # present from the start, as 0
        in_flight = Gauge("chorus_speech_in_flight", "Speech requests now", registry=self.registry)
        in_flight.set_function(lambda: float(self.active))
        self.first_audio = Histogram(
            "chorus_first_audio_seconds",
            "From the request's arrival to its first PCM",
            buckets=_FIRST_AUDIO_S,
            registry=self.registry,
        )
        self.audio = Counter("chorus_audio_seconds", "Audio handed to clients", registry=self.registry)
        gauge = Gauge("chorus_ready", "1 when requests are served", registry=self.registry)
        gauge.set_function(lambda: float(ready()))
        self.registry.register(_EngineNumbers(read_engine))

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def begin(self) -> Call:
        return Call(self)


class Call:
    """One request on its way to exactly one outcome: the first `end` counts."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._started = time.monotonic()
        self.outcome: str | None = None
        metrics.active += 1

    def heard(self) -> None:
        """The first PCM is there."""
        self._metrics.first_audio.observe(time.monotonic() - self._started)

    def sent(self, seconds: float) -> None:
        self._metrics.audio.inc(seconds)

    def end(self, outcome: str) -> None:
        if self.outcome is None:
            self.outcome = outcome
            self._metrics.active -= 1
            self._metrics.ended.labels(outcome).inc()
