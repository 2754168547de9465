"""`EngineMetrics`: what an engine has done, counted. Names as vLLM's, so dashboards for it need a new prefix only.

Always on: a few additions a token. `snapshot()` is a plain dict; `register()` shows the same to Prometheus.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from threading import Lock
from typing import TYPE_CHECKING, Any

from ..errors import BackendUnavailable

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

PREFIX = "bitnet_ref:"
FINISHED = ("stop", "length", "filtered", "abort", "timeout", "error")  # abort: cancelled, in vLLM's word

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_NEXT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)

# name: (the limits of its buckets, what it is)
HISTOGRAMS = {
    "time_to_first_token_seconds": (_FIRST, "From a request's arrival to its first token."),
    "inter_token_latency_seconds": (_NEXT, "Between two tokens of a request."),
    "e2e_request_latency_seconds": (_WHOLE, "From a request's arrival to its end."),
    "request_queue_time_seconds": (_WHOLE, "From a request's arrival to its first step."),
    "engine_step_seconds": (_NEXT, "One step of the engine, all sequences together."),
}
COUNTERS = {
    "prompt_tokens": "Prompt tokens of requests that began.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Tokens looked for in the cache when a sequence was let in.",
    "prefix_cache_hits": "Tokens that were found there.",
    "num_preemptions": "Sequences that lost their pages and had to compute them again.",
    "requests_refused": "Requests refused because the queue was full.",
    "engine_steps": "Steps of the engine.",
    "engine_faults": "Steps that failed.",
}
GAUGES = {
    "num_requests_running": "Requests that have a place in the batch.",
    "num_requests_waiting": "Requests that wait for one.",
    "kv_cache_usage_perc": "Share of the cache's pages in use, 0 to 1.",
}


class Histogram:
    """Counts of values in fixed buckets. `quantile` estimates within a bucket, as Prometheus does."""

    def __init__(self, limits: tuple[float, ...]) -> None:
        self.limits = limits
        self.counts = [0] * (len(limits) + 1)  # of values <= each limit and above the last one before; and the rest
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.limits, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, q: float) -> float | None:
        """The value below which a share q of all lie; the last limit for what is beyond it. None without values."""
        total = self.count
        if total == 0:
            return None
        below = 0.0
        for place, count in enumerate(self.counts[:-1]):
            if count and below + count >= q * total:
                low = self.limits[place - 1] if place else 0.0
                return low + (self.limits[place] - low) * (q * total - below) / count
            below += count
        return self.limits[-1]

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus's buckets."""
        total, buckets = 0, []
        for limit, count in zip((*self.limits, float("inf")), self.counts, strict=True):
            total += count
            buckets.append((f"{limit}" if limit != float("inf") else "+Inf", float(total)))
        return buckets


class EngineMetrics:
    """The figures of one engine. `gauges`: where those of this moment come from."""

    def __init__(self, gauges: Callable[[], dict[str, float]], model_name: str = "") -> None:
        self.model_name = model_name
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.finished = dict.fromkeys(FINISHED, 0)
        self.histograms = {name: Histogram(limits) for name, (limits, _) in HISTOGRAMS.items()}
        self._gauges = gauges
        self._lock = Lock()  # counters are added to by the engine's thread and by those that submit

    def add(self, name: str, value: int = 1) -> None:
        with self._lock:
            self.counters[name] += value

    def end(self, reason: str) -> None:
        with self._lock:
            self.finished[reason] += 1

    def observe(self, name: str, value: float) -> None:
        """Only the engine's own thread does."""
        self.histograms[name].observe(value)

    def snapshot(self) -> dict[str, Any]:
        """Everything now: gauges and counters by name, `request_success` by reason, and of each histogram its count,
        sum, mean, p50, p95 and p99 (None without values)."""
        found: dict[str, Any] = {**self._gauges(), **self.counters, "request_success": dict(self.finished)}
        for name, histogram in self.histograms.items():
            count = histogram.count
            found[name] = {
                "count": count,
                "sum": histogram.sum,
                "mean": histogram.sum / count if count else None,
                **{f"p{q}": histogram.quantile(q / 100) for q in (50, 95, 99)},
            }
        return found

    def register(self, registry: CollectorRegistry | None = None) -> EngineMetrics:
        """Show these to prometheus_client, in its own registry or that one. Raises BackendUnavailable without it."""
        try:
            from prometheus_client import REGISTRY
        except ImportError as error:
            raise BackendUnavailable(
                "prometheus_client is not installed: pip install 'bitnet-ref[monitoring]'"
            ) from error
        (REGISTRY if registry is None else registry).register(self)
        return self

    def unregister(self, registry: CollectorRegistry | None = None) -> None:
        from prometheus_client import REGISTRY

        (REGISTRY if registry is None else registry).unregister(self)

    def collect(self) -> Iterator[Metric]:
        """For prometheus_client, which calls it."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        labels, values = ["model_name"], [self.model_name]
        now = self._gauges()
        for name, what in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, what, labels=labels)
            gauge.add_metric(values, now[name])
            yield gauge
        for name, what in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, what, labels=labels)
            counter.add_metric(values, self.counters[name])
            yield counter
        ends = CounterMetricFamily(
            f"{PREFIX}request_success", "Requests that ended, by reason.", labels=[*labels, "finished_reason"]
        )
        for reason, count in self.finished.items():
            ends.add_metric([*values, reason], count)
        yield ends
        for name, (_, what) in HISTOGRAMS.items():
            family = HistogramMetricFamily(PREFIX + name, what, labels=labels)
            family.add_metric(values, self.histograms[name].cumulative(), self.histograms[name].sum)
            yield family
