"""`crossval linear`: right layers agree, and of a layer with one mistake the wrong line is named."""

import json
import re
from pathlib import Path

import numpy as np
import numpy_layers
import pytest
from click.testing import CliRunner

from bitnet_ref.cli import cli
from bitnet_ref.crossval.linear import cross_linear
from bitnet_ref.crossval.linear.probes import K, all_calls, matrices, signs, ties
from bitnet_ref.crossval.linear.rules import Rules, output, quantize_w, quantize_x, scale_of
from bitnet_ref.errors import ConfigError
from bitnet_ref.reference import quantization

LAYERS = Path(numpy_layers.__file__)
RIGHT = ("BitLinear", "Turned", "WithRMSNorm", "WithLayerNorm", "LowFloor", "LowEpsAdded", "ForInference")
MISTAKES = {  # class -> the one line that is wrong, and words of its verdict
    "PerTensor": ("activation scale", "one scale for each tensor"),
    "PerSequence": ("activation scale", "one scale for each sequence"),
    "PerColumn": ("activation scale", "one scale for each column"),
    "Of128": ("activation scale", "128 / max|x|, where 127"),
    "Of1275": ("activation scale", "127.5 / max|x|, where 127"),
    "FourBits": ("activation scale", "7 / max|x|, where 127"),
    "NotQuantized": ("activation scale", "not quantised"),
    "FloorTooHigh": ("activation scale", "at least 0.001"),
    "NoFloor": ("activation scale", "a token of zeros gives NaN"),
    "EpsAdded": ("activation scale", "1e-05 is added to max|x|"),
    "HalvesUp": ("activation rounding", "floor(x + 0.5)"),
    "HalvesAway": ("activation rounding", "halves away from zero"),
    "Floors": ("activation rounding", "floor(x)"),
    "Truncates": ("activation rounding", "truncated"),
    "Stochastic": ("activation rounding", "stochastic"),
    "Median": ("weight scale", "median|W|"),
    "Largest": ("weight scale", "max|W|, where"),
    "PerRow": ("weight scale", "mean|W| of each row"),
    "PerGroup": ("weight scale", "mean|W| of each group of 64"),
    "RootMeanSquare": ("weight scale", "the root of mean W^2"),
    "Unscaled": ("weight scale", "1: W is rounded as it is"),
    "WeightsHalvesUp": ("weight rounding", "floor(x + 0.5)"),
    "WeightsHalvesAway": ("weight rounding", "halves away from zero"),
    "WeightsTruncated": ("weight rounding", "truncated"),
    "WeightsNotCut": ("weight rounding", "not cut to -1..1"),
    "Binary": ("weight rounding", "two values, no zeros"),
    "Threshold": ("weight rounding", "zero where |w| <= 0.7 scales"),
    "WeightsNotQuantized": ("weight scale", "the weights are not quantised"),
    "ScaleMissing": ("rescaling", "the scale is missing"),
    "ScaleDivides": ("rescaling", "it divides where it multiplies"),
    "ScaleTwice": ("rescaling", "the scale twice"),
    "ScaleTimesDensity": ("rescaling", "the share of non-zeros"),
    "ActivationScaleMissing": ("rescaling", "not divided by the activations' scale"),
    "ActivationScaleMultiplies": ("rescaling", "multiplied by the activations' scale"),
    "ForgotLevels": ("rescaling", "1 / 127"),
    "BiasInside": ("bias", "before the rescaling"),
    "BiasTimesScale": ("bias", "times the weights' scale"),
    "BiasForgotten": ("bias", "left out"),
    "NoWeightGradient": ("dW", "passes nothing"),
    "ClippedWeights": ("dW", "none where |w| > scale"),
    "ThroughTheScale": ("dW", "mean|W| is not held constant"),
    "OfUnquantized": ("dW", "activations before their quantisation"),
    "GradientTimesScale": ("dW", "times the weights' scale"),
    "NoInputGradient": ("dX", "passes nothing"),
    "OfMasters": ("dX", "weights before their quantisation"),
    "ThroughLargest": ("dX", "max|x| is not held constant"),
    "BakesDensity": ("stored weights", "all outputs are 0."),
}
ALSO = {"WeightsNotQuantized": {"weight rounding"}, "NotQuantized": {"activation rounding"}}  # two lines, one mistake


def of(name, **options):
    return cross_linear(f"{LAYERS}:{name}", **options)


@pytest.mark.thorough
@pytest.mark.parametrize("name", RIGHT)
def test_right_layers_agree(name):
    verdict = of(name)
    assert verdict.agrees, [each for each in verdict.lines if each.status not in ("right", "a choice", "-")]
    assert verdict.sentence.startswith("AGREES: ")
    assert verdict.line("norm inside").text.startswith(name.removeprefix("With") if "Norm" in name else "none")
    choices = {each.line for each in verdict.lines if each.status == "a choice"}
    low = {"LowFloor": "max|x| is at least 1e-08", "LowEpsAdded": "1e-08 is added to max|x|"}.get(name)
    assert choices == ({"norm inside"} if "Norm" in name else {"activation scale"} if low else set())
    assert low is None or f"; {low}, in the reference it is at least 1e-5" in verdict.line("activation scale").text


def slow_or_thorough(i):
    return pytest.mark.slow if i % 4 else pytest.mark.thorough if i % 12 else ()


@pytest.mark.thorough
@pytest.mark.parametrize("name", [pytest.param(name, marks=slow_or_thorough(i)) for i, name in enumerate(MISTAKES)])
def test_the_wrong_line_is_named(name):
    verdict = of(name)
    line, words = MISTAKES[name]
    wrong = {each.line for each in verdict.lines if each.status in ("WRONG", "not explained")}
    assert wrong - ALSO.get(name, set()) == {line}, verdict.lines
    assert words in verdict.line(line).text
    assert not verdict.agrees
    assert verdict.sentence.startswith("DIFFERS: ")


def test_every_layer_is_judged():
    own = {name for name, value in vars(numpy_layers).items() if isinstance(value, type)}
    assert own == {*RIGHT, *MISTAKES, "Of128NotCut"}


@pytest.mark.thorough
def test_two_mistakes_are_both_named():
    verdict = of("Of128NotCut")
    assert {each.line for each in verdict.lines if each.status == "WRONG"} == {
        "activation scale",
        "activation rounding",
    }
    line = verdict.line("activation rounding")
    assert "128 is" in line.text or "..128" in line.text


@pytest.mark.thorough
def test_an_example_can_be_computed_by_hand():
    line = of("Truncates").line("activation rounding")
    value = float(line.at.partition("= ")[2])
    assert np.rint(value) == line.expected
    assert np.trunc(value) == line.found
    line = of("BiasTimesScale").line("bias")
    assert line.found / line.expected == pytest.approx(np.abs(matrices()["normal"]).mean(), rel=1e-3)


def test_the_rules_are_those_of_the_reference():
    for call in all_calls():
        x_q, a = quantization.quantize_activations(call.x.reshape(-1, K))
        w_t, s = quantization.quantize_weights(call.w)
        q, ours = quantize_x(call.x, Rules())
        assert np.array_equal(q.reshape(-1, K), x_q)
        assert np.array_equal(ours.reshape(-1, 1), a)
        scale = scale_of(call.w, Rules())
        assert np.array_equal(quantize_w(call.w, Rules(), scale), w_t)
        y = quantization.dequantize(x_q.astype(np.int32) @ w_t.T.astype(np.int32), s, a)
        np.testing.assert_allclose(
            output(call.x, call.w, Rules()).reshape(y.shape), y, rtol=1e-5, atol=1e-6 * np.abs(y).max()
        )


@pytest.mark.parametrize("levels", [127, 128, 127.5])
def test_tokens_of_ties_stay_ties_behind_a_norm(levels):
    x = ties(levels)[0, 0]
    assert x.sum(dtype=np.float64) == 0
    assert (x.astype(np.float64) ** 2).mean() == 2.0**34
    scaled = x * (np.float32(levels) / np.abs(x).max())
    assert (np.abs(scaled) % 1 == 0.5).mean() > 0.9
    assert np.linalg.cond(signs()) < 2


@pytest.mark.thorough
def test_what_cannot_be_built_is_said():
    assert "has no attribute 'Missing'" in of("Missing").sentence
    assert of("Missing").agrees is None
    assert "--args" in of("half_up").sentence
    with pytest.raises(ConfigError, match="expected MODULE:CLASS"):
        cross_linear("bitlinear")


@pytest.mark.thorough
def test_arguments_can_be_given():
    assert of("Turned", args="in_features, size_out=out_features, use_bias=bias").agrees
    assert "malformed" in of("Turned", args="open('x')").sentence  # nothing is executed


@pytest.mark.thorough
def test_the_guide_shows_what_the_command_prints(monkeypatch):
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    guide = (root / "docs" / "crossval.md").read_text(encoding="utf-8")
    shown = guide.partition("$ bitnet-ref crossval linear")[2]
    arguments, line = shown.splitlines()[:2]
    result = CliRunner().invoke(cli, ["crossval", "linear", *arguments.split()])
    assert result.stdout.splitlines()[0] == line
    below = guide.partition("## A BitLinear of any package")[2].partition("```text\n")[2].partition("```")[0]
    assert "WRONG" in below
    value = re.compile(r"a\[0, 0, \d+\] = -?109.5: expected -?110, found -?109$")  # which it is depends on the BLAS
    printed, guide_lines = (
        [value.sub("a", " ".join(line.split())) for line in text.splitlines()]  # columns are as wide as their cells
        for text in (result.stdout, below)
    )
    assert "x a" in guide_lines
    assert guide_lines == printed[2 : 2 + len(guide_lines)]
    assert all(line.startswith(("right", "a choice", "-")) for line in printed[5:])
    assert f"a right layer and {len(MISTAKES)} with one mistake each" in guide


@pytest.mark.thorough
def test_command():
    result = CliRunner().invoke(cli, ["crossval", "linear", f"{LAYERS}:Truncates", "--json"])
    assert result.exit_code == 1
    facts = json.loads(result.stdout)
    assert facts["agrees"] is False
    line = next(each for each in facts["lines"] if each["line"] == "activation rounding")
    assert line["status"] == "WRONG"
    result = CliRunner().invoke(cli, ["crossval", "linear", f"{LAYERS}:BitLinear"])
    assert result.exit_code == 0
    assert result.stdout.startswith("AGREES")
    assert CliRunner().invoke(cli, ["crossval", "linear", f"{LAYERS}:Missing"]).exit_code == 4
