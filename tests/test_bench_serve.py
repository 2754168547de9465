"""`bitnet-ref bench serve`: the arithmetic of its figures, and the command on a small model."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import GOLDEN, model

from bitnet_ref.benchmark.serve import Load, LoadPoint, Quantiles, measure_serve
from bitnet_ref.cli import cli
from bitnet_ref.errors import GenerationError
from bitnet_ref.serving import Engine

TINY = GOLDEN / "bitnet-packed-offline"
FAST = ("--requests", 6, "--prompt", "2-4", "--new", "3", "--rate", 200, "--rate", 400)


def invoke(*args):
    return CliRunner().invoke(cli, ["bench", "serve", *map(str, args)])


def test_a_load_is_the_same_every_time_and_lies_in_its_ranges():
    load = Load(requests=500, prompt=(2, 5), new=(7, 7), seed=3)
    requests = load.draw(50)
    assert requests == load.draw(50)
    assert {len(prompt) for prompt, _ in requests} == {2, 3, 4, 5}
    assert {new for _, new in requests} == {7}
    assert {token for prompt, _ in requests for token in prompt} == set(range(3, 50))
    gaps = np.diff(load.arrivals(20.0))
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.1)
    np.testing.assert_allclose(load.arrivals(40.0) * 2, load.arrivals(20.0))  # the same arrivals, closer together


def test_figures():
    point = LoadPoint(10.0, 8, 2, 3.0, 60, None, None, 4, 2.5, processor_s=1.5, energy_j=90.0)
    assert (point.requests_per_s, point.tokens_per_s) == (2.0, 20.0)
    assert (point.processor_s_per_token, point.joules_per_token) == (0.025, 1.5)
    refused = LoadPoint(10.0, 8, 8, 3.0, 0, None, None, 0, 0.0, processor_s=1.5)
    assert (refused.processor_s_per_token, refused.joules_per_token) == (None, None)
    assert Quantiles.of([]) is None
    assert Quantiles.of([1.0, 2.0, 3.0]).p50_s == 2.0


def test_measuring_a_tiny_model():
    tiny = model(TINY, "auto")
    load = Load(requests=5, prompt=(2, 4), new=(3, 5))
    found = measure_serve(tiny, load, rates_per_s=[300.0])
    assert found.equal
    (point,) = found.points
    assert (point.requests, point.refused) == (5, 0)
    assert point.tokens == sum(new for _, new in load.draw(tiny.config.vocab_size))
    assert 1 <= point.mean_batch <= point.largest_batch <= 5
    assert point.first_token.p50_s > 0
    assert found.capacity_per_s > 0
    assert point.processor_s_per_token > 0
    assert found.conditions.waited is None  # it sleeps between arrivals


@pytest.mark.thorough
def test_what_is_refused_is_counted():
    found = measure_serve(
        model(TINY, "auto"),
        Load(requests=40, prompt=(2, 2), new=(20, 20)),
        replace(measure_config(), max_batch=1, max_queue=1),
        rates_per_s=[1e6],
    )
    (point,) = found.points
    assert point.refused > 0
    assert point.tokens == 20 * (40 - point.refused)


def measure_config():
    from bitnet_ref.serving import EngineConfig

    return EngineConfig(max_batch=4)


def test_an_engine_that_gives_something_else_gets_no_figures(monkeypatch):
    submit = Engine.submit
    monkeypatch.setattr(Engine, "submit", lambda self, prompt, **p: submit(self, [*prompt[:-1], 3], **p))
    result = invoke(TINY, *FAST)
    assert result.exit_code == 1
    assert "DIFFERS" in result.stdout
    facts = json.loads(invoke(TINY, *FAST, "--json").stdout)
    assert (facts["equal"], facts["points"], facts["capacity_per_s"]) == (False, [], None)


def test_the_command():
    result = invoke(TINY, *FAST)
    assert result.exit_code == 0, result.output
    assert "200.00" in result.stdout
    assert "CPU ms/tok" in result.stdout
    facts = json.loads(invoke(TINY, *FAST, "--json").stdout)
    assert [point["offered_per_s"] for point in facts["points"]] == [200.0, 400.0]
    assert facts["points"][0]["tokens"] == 18
    assert facts["points"][0]["processor_s_per_token"] > 0
    assert facts["conditions"]["quiet"] in (True, False)


@pytest.mark.parametrize(
    "arguments",
    [
        ("storyteller", "--synthetic", "1b"),
        ("--layers", "1"),
        ("--prompt", "9-3"),
        ("--new", "x"),
        ("--rate", "-1"),
        ("--rate", "inf"),
        ("--max-batch", "8", "--max-batch-tokens", "8"),
        ("--prompt", "300"),
    ],
)
def test_wrong_usage(arguments):
    assert invoke(*arguments).exit_code == 2


def test_a_load_that_does_not_fit_is_refused():
    with pytest.raises(GenerationError, match="context"):
        measure_serve(model(TINY, "auto"), Load(prompt=(1, 10_000)))
