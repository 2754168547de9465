"""The formats that engines round to: those of GGUF as its own package rounds, and what they do to mistakes' causes."""

import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path

import gguf
import numpy as np
import pytest

import bitnet_ref
from bitnet_ref.crossval.compare import compare
from bitnet_ref.crossval.explain import delta_steps, expert_steps
from bitnet_ref.crossval.explain.diagnose import diagnose
from bitnet_ref.crossval.explain.edits import descriptions
from bitnet_ref.crossval.explain.number_formats import (
    FLOATS,
    MATRICES,
    activation_formats,
    in_blocks,
    rounded,
    to_integers,
)
from bitnet_ref.crossval.explain.variants import Setting

sys.path.insert(0, str(Path(__file__).parents[2] / "crossval"))

import call_mistakes
import delta_mistakes
import generation_causes
import shipped_mistakes

RULES = dict(MATRICES)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q5_0", "Q4_1", "Q5_1"])
def test_blocks_are_those_of_the_gguf_package(name: str) -> None:
    w = random(48, 96)
    kind = getattr(gguf.GGMLQuantizationType, name)
    theirs = gguf.quants.dequantize(gguf.quants.quantize(w, kind), kind)
    np.testing.assert_allclose(RULES[f"stored as {name}"](w), theirs, rtol=1e-6, atol=1e-7)


def test_q6_k_is_on_its_grid_and_nearer_than_five_bits() -> None:
    w = random(4, 512)
    ours = RULES["stored as Q6_K"](w).reshape(-1, 16)
    for row in ours:  # of 16 values: at most 64 levels of one scale
        step = np.abs(row[row != 0]).min() if (row != 0).any() else 1
        levels = row / step * np.arange(1, 33)[:, None]  # the least level may be any of them
        assert (np.abs(levels - np.rint(levels)).max(axis=1) < 1e-3).any()
    error = np.linalg.norm(ours.reshape(w.shape) - w)
    assert error < 0.7 * np.linalg.norm(RULES["stored as Q5_1"](w) - w)
    np.testing.assert_array_equal(RULES["stored as Q6_K"](np.zeros((2, 256), np.float32)), 0)


def test_narrow_floats_keep_what_is_masked_and_fp8_stops_at_its_largest() -> None:
    x = np.array([-np.inf, 1 + 2**-9, 1e6], dtype=np.float32)
    np.testing.assert_array_equal(rounded(x, FLOATS["bfloat16"]), [-np.inf, 1, 999424])
    np.testing.assert_array_equal(rounded(x, FLOATS["fp8 (e4m3)"]), [-np.inf, 1, 448])


def test_integers_have_as_many_levels_as_they_say() -> None:
    x = random(6, 4, 32)
    for words, rule in activation_formats(x.shape):
        y = rule(x)
        assert y.shape == x.shape, words
        assert 0 < np.abs(y - x).max() < 0.2 * np.abs(x).max(), words
    assert np.unique(np.rint(to_integers(x[0], 7) / np.abs(x[0]).max(-1, keepdims=True) * 7)).size <= 15
    with pytest.raises(ValueError, match="whole blocks"):
        in_blocks(x, 24, lambda blocks: blocks)


SAMPLE = (
    *("sums of 4 saturate", "128 is -128", "quantised twice by row", "cache in fp8", "embedding in Q4_0"),
    *("rows behind the last tile of 64", "an online softmax is not rescaled", "the norms exchanged, and v turned"),
    "the input in bfloat16, and its product with the scale in float16",
)
EACH = pytest.mark.parametrize(
    "mistake",
    [pytest.param(m, marks=[] if m.name in SAMPLE else pytest.mark.slow) for m in shipped_mistakes.LIST],
    ids=lambda m: m.name,
)


@pytest.mark.sample(8)
@EACH
def test_a_mistake_that_engines_shipped_is_named(mistake: shipped_mistakes.Shipped) -> None:
    judgement = shipped_mistakes.judge(mistake)
    assert judgement.first is not None
    assert judgement.first.endswith(mistake.first)
    assert judgement.named, judgement
    assert judgement.unseen, judgement


@pytest.mark.slow
@EACH
def test_it_is_named_from_a_thin_trace(mistake: shipped_mistakes.Shipped) -> None:
    judgement = shipped_mistakes.judge(mistake, is_thin=True)
    assert judgement.named, judgement
    assert judgement.unseen, judgement


@pytest.mark.parametrize("script", [shipped_mistakes, delta_mistakes, call_mistakes, generation_causes])
def test_a_name_that_is_on_no_list(script, monkeypatch, capsys):
    """The scripts judged nothing, and ended with 0."""
    monkeypatch.setattr(sys, "argv", ["script", "of none"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    assert ": of none; there are: " in capsys.readouterr().err


DELTA_SAMPLE = (
    "1 + g for exp(g)",
    "conv with relu",
    "beta is tanh",
    "A of the next head",
    "memory in int8, a scale per head",
)


@pytest.mark.thorough
@pytest.mark.parametrize("name", DELTA_SAMPLE)
def test_a_mistake_of_a_deltanet_on_no_list_is_described(name: str) -> None:
    judgement = delta_mistakes.judge(name)
    assert judgement.named, judgement
    assert judgement.unseen, judgement


FAMILIES = Path(__file__).parents[1] / "data/families"
MOE, HYBRID = FAMILIES / "qwen3_moe-groups128", FAMILIES / "qwen3_5-groups128-hybrid"
EDITS = (  # of a mixture's steps, of a DeltaNet's, and of what that keeps from call to call
    (MOE, "mlp.hook_expert_weights", "sigmoids, as they are"),
    (MOE, "mlp.hook_mixed", "squared when results are added"),
    (MOE, "mlp.hook_mixed", "computes 3 tokens only"),
    (HYBRID, "attn.hook_log_decay", "-A_log stands for exp"),
    (HYBRID, "attn.hook_delta_out", "heads of {in0} are one too far"),
    (HYBRID, "attn.hook_conv", "call to call are the convolution's results"),
)


@pytest.mark.sample(6)
@pytest.mark.parametrize(("path", "name", "words"), EDITS)
def test_a_mistake_of_a_family_s_step_is_described(path: Path, name: str, words: str) -> None:
    """The edit's own run is the engine, in the first layer."""
    model = bitnet_ref.load(path, backend="numpy", threads=1)
    tokens, calls = [1, 17, 5, 23, 9, 42, 3, 3], (5, 1, 1, 1) if path == HYBRID else ()
    right = replace(Setting.of(model, tokens), calls=calls)
    step = right.steps[f"blocks.0.{name}"]
    every = chain(*(module.descriptions(step) for module in (expert_steps, delta_steps, descriptions)))
    edit = next(d.edit for d in every if words in d.text)
    trace = Run(right.with_edits({step.name: edit}).run())
    trace.calls = calls
    comparison = compare(right.run(), trace, model.config, tokens)
    causes = [d.cause for d in diagnose(model, tokens, trace, comparison) if d.confirmed]
    words = words.replace("{in0}", "DeltaNet's memory")
    assert any(words in cause for cause in causes), causes


class Run(dict[str, np.ndarray]):
    """The tensors of a run, with the calls that computed them."""

    calls: tuple[int, ...] = ()
