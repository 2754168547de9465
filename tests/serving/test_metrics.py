"""The engine's metrics: what they count, and what Prometheus reads of them."""

import sys

import pytest
from helpers import model

from bitnet_ref.errors import BackendUnavailable
from bitnet_ref.serving.metrics import COUNTERS, FINISHED, GAUGES, HISTOGRAMS, EngineMetrics, Histogram, render_metrics

LONGER = "Once upon a time there was a rabbit"


@pytest.fixture
def used():
    """Metrics of an engine that has finished four requests and dropped one."""
    with model("storyteller", "auto").engine(page_size=4) as engine:
        engine.generate(["Alice", LONGER], max_tokens=4)
        engine.generate(LONGER, n=2, temperature=1.0, seed=0, max_tokens=3)
        engine.generate("Alice", max_tokens=3, stop_token_ids=list(range(4096)))
        stream = engine.stream("Alice", max_tokens=200)
        next(stream)
        stream.close()
    return engine.metrics


def test_a_snapshot_counts_what_was_done(used):
    now = used.snapshot()
    encode = model("storyteller", "auto").tokenizer.encode
    lengths = [len(encode(text)) for text in ("Alice", LONGER)]
    assert now["prompt_tokens"] == 3 * lengths[0] + 2 * lengths[1]
    assert now["request_success"] == {"stop": 1, "length": 3, "filtered": 0, "abort": 1, "timeout": 0, "error": 0}
    assert 4 + 4 + 6 + 1 < now["generation_tokens"] < 200
    assert now["time_to_first_token_seconds"]["count"] == now["request_queue_time_seconds"]["count"] == 5
    assert now["e2e_request_latency_seconds"]["count"] == 5
    assert now["inter_token_latency_seconds"]["count"] >= 3 + 3
    assert now["request_generation_tokens"]["count"] == now["request_prefill_time_seconds"]["count"] == 5
    assert now["request_prompt_tokens"]["sum"] == now["prompt_tokens"]
    assert now["request_generation_tokens"]["sum"] == now["generation_tokens"]
    queue, prefill, decode, whole = (
        now[name]["sum"]
        for name in (
            *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
            "e2e_request_latency_seconds",
        )
    )
    assert min(queue, prefill, decode) > 0
    assert whole < 60
    assert queue + prefill + decode == pytest.approx(whole, abs=0.01)
    assert queue + prefill == pytest.approx(now["time_to_first_token_seconds"]["sum"], abs=0.01)
    assert 0 < now["inter_token_latency_seconds"]["sum"] <= decode
    assert 0 < now["engine_step_seconds"]["sum"] < 60
    assert now["memory_used_bytes"] > 1 << 20
    assert now["engine_step_seconds"]["count"] == now["engine_steps"] > 0
    assert now["prefix_cache_hits"] >= lengths[1] // 4 * 4 - 4
    assert (now["num_requests_running"], now["num_requests_waiting"], now["kv_cache_usage_perc"]) == (0, 0, 0)


def test_prometheus_reads_the_same(used, monkeypatch):
    prometheus = pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    gauges = used._gauges()
    monkeypatch.setattr(used, "_gauges", lambda: gauges)  # the process's memory changes from call to call
    registry = prometheus.CollectorRegistry()
    used.register(registry)
    text = prometheus.generate_latest(registry).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    now = used.snapshot()
    assert "bitnet_ref:device_utilization" not in families  # there is no card
    for name in {*GAUGES, *COUNTERS} - {"device_utilization"}:
        (sample,) = families[f"bitnet_ref:{name}"].samples
        assert (sample.value, sample.labels) == (now[name], {"model_name": "storyteller"})
    ends = {s.labels["finished_reason"]: s.value for s in families["bitnet_ref:request_success"].samples}
    assert ends == now["request_success"]
    for name in HISTOGRAMS:
        samples = families[f"bitnet_ref:{name}"].samples
        by_name = {s.name.rsplit("_", 1)[1]: s.value for s in samples if not s.name.endswith("_bucket")}
        buckets = [s.value for s in samples if s.name.endswith("_bucket")]
        assert by_name == {"count": now[name]["count"], "sum": pytest.approx(now[name]["sum"])}
        assert buckets == sorted(buckets)
        assert buckets[-1] == now[name]["count"]
    used.unregister(registry)
    assert prometheus.generate_latest(registry) == b""


def test_without_prometheus_there_is_one_line(used, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for publish in (used.register, lambda: render_metrics([used])):
        with pytest.raises(BackendUnavailable, match=r"pip install 'bitnet-ref\[monitoring\]'"):
            publish()


def test_quantiles_lie_in_their_bucket():
    histogram = Histogram((1.0, 2.0, 4.0))
    assert histogram.quantile(0.5) is None
    for value in (0.5, 1.0, 1.5, 3.0, 100.0):
        histogram.observe(value)
    assert histogram.counts == [2, 1, 1, 1]
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 3), ("4.0", 4), ("+Inf", 5)]
    assert [histogram.quantile(q) for q in (0.2, 0.4, 0.6, 0.7, 1.0)] == [0.5, 1.0, 2.0, 3.0, 4.0]
    assert (histogram.count, histogram.sum) == (5, 106.0)
    histogram = Histogram((1.0, 2.0, 4.0))
    for value in (1.0, 3.0):
        histogram.observe(value)
    assert [histogram.quantile(q) for q in (0.25, 0.5, 0.75)] == [0.5, 1.0, 3.0]  # none is between 1 and 2


def test_a_snapshot_has_everything():
    metrics = EngineMetrics(lambda: {"num_requests_running": 2}, "story")
    for number in range(1, 101):
        metrics.observe("request_prompt_tokens", number)
    metrics.add("engine_steps")
    metrics.add("prompt_tokens", 5050)
    metrics.end("length")
    none = {"count": 0, "sum": 0.0, "mean": None, "p50": None, "p95": None, "p99": None}
    assert metrics.snapshot() == {
        "num_requests_running": 2,
        **dict.fromkeys(COUNTERS, 0),
        "engine_steps": 1,
        "prompt_tokens": 5050,
        "request_success": {**dict.fromkeys(FINISHED, 0), "length": 1},
        **dict.fromkeys(HISTOGRAMS, none),
        "request_prompt_tokens": {"count": 100, "sum": 5050, "mean": 50.5, "p50": 50, "p95": 95, "p99": 99},
    }


def test_buckets_are_vllms():
    """Up to 80 s, a million tokens, 10 s and 480 s, by their number and sum."""
    shapes = {name: (len(limits), sum(limits)) for name, (limits, _) in HISTOGRAMS.items()}
    first, following, tokens, whole = (19, 167.816), (18, 21.0685), (18, 888888), (18, 1078.6)
    assert shapes == {
        "time_to_first_token_seconds": (first[0], pytest.approx(first[1])),
        **{
            name: (following[0], pytest.approx(following[1]))
            for name in ("inter_token_latency_seconds", "engine_step_seconds")
        },
        **dict.fromkeys(("request_prompt_tokens", "request_generation_tokens"), tokens),
        **{
            f"{name}_seconds": (whole[0], pytest.approx(whole[1]))
            for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time")
        },
    }
    assert all(list(limits) == sorted(limits) for limits, _ in HISTOGRAMS.values())
