"""`EngineMetrics`: counters and latencies of an engine, named as in vLLM, so its dashboards need only a new prefix.

They are always on, at the cost of a few additions per token. `snapshot()` is a plain dict; `register()` publishes the
same to Prometheus.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ..errors import BackendUnavailable
from ..system.forks import ForkLock

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

PREFIX = "bitnet_ref:"
FINISHED = ("stop", "length", "filtered", "abort", "timeout", "error")  # abort: cancelled, as vLLM calls it

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_NEXT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)

# name: (limits of the buckets, explanation)
HISTOGRAMS = {
    "time_to_first_token_seconds": (_FIRST, "From a request's arrival to its first token."),
    "inter_token_latency_seconds": (_NEXT, "Between two tokens of a request."),
    "e2e_request_latency_seconds": (_WHOLE, "From a request's arrival to its end."),
    "request_queue_time_seconds": (_WHOLE, "From a request's arrival to its first step."),
    "request_prefill_time_seconds": (_WHOLE, "From a request's first step to its first token."),
    "request_decode_time_seconds": (_WHOLE, "From a request's first token to its end."),
    "request_prompt_tokens": (_TOKENS, "Tokens of a request's prompt."),
    "request_generation_tokens": (_TOKENS, "Tokens that a request got."),
    "engine_step_seconds": (_NEXT, "One step of the engine, all sequences together."),
}
COUNTERS = {
    "prompt_tokens": "Prompt tokens of started requests.",
    "generation_tokens": "Tokens generated.",
    "screened_tokens": "Tokens of ended requests that were chosen without computing all logits.",
    "spec_decode_num_draft_tokens": "Guessed tokens that were verified, with `speculate`.",
    "spec_decode_num_accepted_tokens": "Guessed tokens that became text.",
    "prefix_cache_queries": "Tokens of admitted sequences, looked up in the cache.",
    "prefix_cache_hits": "Tokens that the cache held already.",
    "num_preemptions": "Sequences that lost their pages and have to compute them again.",
    "requests_refused": "Requests refused because the queue was full.",
    "engine_steps": "Steps of the engine.",
    "engine_faults": "Steps that failed.",
    "backend_restarts": "Backends that replaced one whose device had failed.",
}
GAUGES = {
    "num_requests_running": "Requests in the batch.",
    "num_requests_waiting": "Requests that wait for a place in it.",
    "num_requests_paused": "Requests whose readers are behind.",
    "kv_cache_usage_perc": "Share of the cache's pages in use, 0 to 1.",
    "memory_used_bytes": "Memory that the model's device holds: the process's, or the card's.",
    "memory_free_bytes": "Memory that the device has left.",
    "device_utilization": "Share of time in which the card computes, 0 to 1; by NVML (nvidia-ml-py).",
}


class Histogram:
    """Counts of values in fixed buckets. `quantile` estimates within a bucket, as Prometheus does."""

    def __init__(self, limits: tuple[float, ...]) -> None:
        self.limits = limits
        self.counts = [0] * (len(limits) + 1)  # of values up to each limit and above the one before; then the rest
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.limits, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, q: float) -> float | None:
        """The value below which a share q of all values lies; at most the last limit. None without values."""
        rank, below = q * self.count, 0
        if self.count == 0:
            return None
        for low, high, count in zip((0.0, *self.limits), self.limits, self.counts, strict=False):
            if count and below + count >= rank:
                return low + (high - low) * (rank - below) / count
            below += count
        return self.limits[-1]

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus's buckets."""
        labels = [*map(str, self.limits), "+Inf"]
        return [(label, float(total)) for label, total in zip(labels, accumulate(self.counts), strict=True)]


class EngineMetrics:
    """The counters, histograms and gauges of one engine. gauges: a function that returns their present values."""

    def __init__(self, gauges: Callable[[], dict[str, float]], model_name: str = "") -> None:
        self.labels = {"model_name": model_name}
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.finished = dict.fromkeys(FINISHED, 0)
        self.histograms = {name: Histogram(limits) for name, (limits, _) in HISTOGRAMS.items()}
        self._gauges = gauges
        self._lock = ForkLock()  # the engine's thread and those that submit add to counters

    def add(self, name: str, value: int = 1) -> None:
        with self._lock:
            self.counters[name] += value

    def end(self, reason: str) -> None:
        with self._lock:
            self.finished[reason] += 1

    def observe(self, name: str, value: float) -> None:
        """For the engine's thread only."""
        self.histograms[name].observe(value)

    def snapshot(self) -> dict[str, Any]:
        """Gauges and counters by name, `request_success` by reason, and for each histogram its count, sum, mean, p50,
        p95 and p99 (None without values)."""
        values: dict[str, Any] = {**self._gauges(), **self.counters, "request_success": dict(self.finished)}
        for name, histogram in self.histograms.items():
            count = histogram.count
            values[name] = {
                "count": count,
                "sum": histogram.sum,
                "mean": histogram.sum / count if count else None,
                **{f"p{q}": histogram.quantile(q / 100) for q in (50, 95, 99)},
            }
        return values

    def register(self, registry: CollectorRegistry | None = None) -> EngineMetrics:
        """Publish by prometheus_client, in this registry or its default one. Raises BackendUnavailable without it."""
        _registry(registry).register(self)
        return self

    def unregister(self, registry: CollectorRegistry | None = None) -> None:
        _registry(registry).unregister(self)

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        labels, values = list(self.labels), list(self.labels.values())
        numbers = {**self._gauges(), **self.counters}
        for kind, explanations in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, explanation in explanations.items():
                if not math.isnan(numbers[name]):
                    metric = kind(PREFIX + name, explanation, labels=labels)
                    metric.add_metric(values, numbers[name])
                    yield metric
        ends = CounterMetricFamily(
            f"{PREFIX}request_success", "Requests that ended, by reason.", labels=[*labels, "finished_reason"]
        )
        for reason, count in self.finished.items():
            ends.add_metric([*values, reason], count)
        yield ends
        for name, histogram in self.histograms.items():
            family = HistogramMetricFamily(PREFIX + name, HISTOGRAMS[name][1], labels=labels)
            family.add_metric(values, histogram.cumulative(), histogram.sum)
            yield family


def render_metrics(engines: Sequence[EngineMetrics]) -> tuple[bytes, str]:
    """The metrics of several engines, and of this process, as text for Prometheus; and its content type.

    Raises BackendUnavailable without prometheus_client.
    """
    _registry(None)
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

    class Together:
        def collect(self) -> Iterator[Metric]:
            families: dict[str, Metric] = {}
            for metric in (metric for engine in engines for metric in engine.collect()):
                if metric.name in families:
                    families[metric.name].samples += metric.samples
                else:
                    families[metric.name] = metric
            yield from families.values()

    registry = CollectorRegistry()
    registry.register(Together())
    ProcessCollector(registry=registry)
    return generate_latest(registry), CONTENT_TYPE_LATEST


def _registry(given: CollectorRegistry | None) -> CollectorRegistry:
    try:
        from prometheus_client import REGISTRY
    except ImportError as error:
        raise BackendUnavailable("prometheus_client is not installed: pip install 'bitnet-ref[monitoring]'") from error
    return REGISTRY if given is None else given
