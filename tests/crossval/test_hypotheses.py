"""Hypotheses: each is an edit of steps that a run can show, first in one of them."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import GOLDEN, model

from bitnet_ref.crossval.explain.hypotheses import HYPOTHESES, forward_hypotheses
from bitnet_ref.crossval.explain.variants import Setting
from bitnet_ref.crossval.names import LOGITS

TOKENS = [1, 17, 5, 23, 9, 42, 3, 3, 60, 11]
# Between them these have every feature that a hypothesis is about: relu2 and silu, sub-norms, GQA, a window, RoPE
# scaling, a head_dim that is not D/H, ternary and dense linears, rows longer than a block of 256, float32 weights.
CASES = (
    "bitnet-packed-offline",
    "llama-packed-bitlinear",
    "llama-dense",
    "mistral-window3",
    "rope-linear",
    "llama-f32-headdim",
    # the families of 2026: norms of linears and heads, two RoPEs, groups, a Hadamard basis, DeltaNet
    "../families/embedding-gemma3",
    "../families/embedding-qwen3",
    "../families/qwen3-groups128",
    "../families/qwen3-groups128/pq2_0-hadamard.gguf",
    "../families/qwen3_5-groups128-hybrid",
    "../families/smollm3",  # a layer without positions
    "../families/hunyuan",  # norms of heads after RoPE
    "../families/qwen3_moe-groups128",  # a mixture of experts, and a layer without
    "../adapters/alone/adapter",
    "../families/maple",  # gates that are clamped, a wider window
    "../families/olmo2",  # norms of results alone, of q and k as a whole
    "../families/granite",  # factors of queries and results
)


def first_difference(right: dict[str, np.ndarray], wrong: dict[str, np.ndarray]) -> str | None:
    """The first name, in order, whose arrays are not the same to the bit; one that is missing is a difference too."""
    for name, array in right.items():
        if name not in wrong or not np.array_equal(array, wrong[name]):
            return name
    return None


@pytest.mark.sample(9)
@pytest.mark.parametrize("case", ["storyteller", *CASES, "llama-packed-rmsnorm", "onebitllm-silu", "llama-bf16-biases"])
def test_an_unchanged_setting_is_the_reference(case: str, backend_name: str) -> None:
    path = case if case == "storyteller" else GOLDEN / case
    right = model(path).run_with_cache(TOKENS)[1]
    seen = Setting.of(model(path, backend_name), TOKENS).run()
    assert list(seen) == list(right)
    assert first_difference(right, seen) is None


def test_names_are_unique_and_texts_are_whole() -> None:
    names = [hypothesis.name for hypothesis in HYPOTHESES]
    assert len(names) == len(set(names)) >= 60
    for hypothesis in HYPOTHESES:
        assert hypothesis.cause
        assert hypothesis.remedy.endswith(".")
        assert not hypothesis.cause.endswith(".")


# What needs an input of its own: sums beyond int16, ties, faint tokens. The planted bugs have one for each.
RARE = {
    "int16_accumulators_wrap",
    "int16_accumulators_saturate",
    "round_half_away",
    "round_half_up",
    "activation_floor_missing",
    "query_scale_missing",
    "lora_of_normed_input",  # shows with an adapter on a linear that has a norm inside
    "groups_of_128_for_64",
    "groups_of_128_for_64_rows_too",
    "last_group_scale_missing",  # rows of the models here are whole groups
}


@pytest.mark.parametrize(
    "each_model", [pytest.param(False, marks=pytest.mark.thorough), pytest.param(True, marks=pytest.mark.slow)]
)
def test_each_shows_where_it_is_made(each_model: bool) -> None:
    """The first tensor that an edit moves is of a step of its own, on the first model (every model) where it moves
    anything."""
    shown: set[str] = set()
    settings = [(case, Setting.of(model(GOLDEN / case), TOKENS)) for case in CASES]
    settings += [(case, replace(each, calls=(6, 1, 3))) for case, each in settings if "hybrid" in case]
    for case, setting in settings:
        right = setting.run()
        for hypothesis in forward_hypotheses(setting, right):
            if hypothesis.name in shown and not each_model:
                continue
            changed = hypothesis.change(setting)
            first = None if changed is None else first_difference(right, changed.run())
            if first is not None:
                shown.add(hypothesis.name)
                scale = first.replace("hook_x_int8", "hook_x_scale")  # which a trace has after the values
                assert hypothesis.is_at(first) or hypothesis.is_at(scale), f"{hypothesis.name}: {case}, {first}"
    assert {hypothesis.name for hypothesis in HYPOTHESES} - shown <= RARE


def test_linears_that_are_zeros_are_read_off_the_candidate() -> None:
    setting = Setting.of(model(GOLDEN / "bitnet-packed-offline"), TOKENS)
    candidate = setting.run()
    assert not any("zeros" in hypothesis.name for hypothesis in forward_hypotheses(setting, candidate))
    candidate["blocks.1.mlp.up_proj.hook_acc_int32"][:] = 0
    candidate["blocks.1.mlp.up_proj.hook_out"][:] = 0
    (zeros,) = [h for h in forward_hypotheses(setting, candidate) if "zeros" in h.name]
    assert "(out 768, in 256)" in zeros.cause
    changed = zeros.change(setting)
    assert changed is not None
    seen = changed.run()
    assert not seen["blocks.1.mlp.up_proj.hook_out"].any()
    assert seen["blocks.0.mlp.up_proj.hook_out"].any()
    unseen = [h.cause for h in forward_hypotheses(setting, {}) if "zeros" in h.name]
    assert "the linears of 768 inputs return zeros" in unseen


@pytest.mark.parametrize(("case", "applies"), [("bitnet-packed-offline", False), ("../families/qwen3-groups128", True)])
def test_norms_of_keys_are_of_models_that_have_them(case, applies):
    setting = replace(Setting.of(model(GOLDEN / case), TOKENS), calls=(8, 1, 1))
    mistake = next(h for h in forward_hypotheses(setting, {}) if h.name == "cache_normed_twice")
    assert (mistake.change(setting) is not None) == applies


@pytest.mark.parametrize("case", ["smollm3", "maple", "hunyuan", "granite"])  # no RoPE, norms after it, factors of q
def test_rows_of_others_are_what_attention_reads(case):
    others = (tuple(TOKENS), (7, 5, 2))
    setting = replace(Setting.of(model(GOLDEN / "../families" / case), TOKENS), calls=(8, 1, 1), others=others)
    known = {h.name: h.change(setting) for h in forward_hypotheses(setting, {}) if "other_" in h.name}
    right = dict.fromkeys(
        ("cache_of_other_0", "keys_of_other_0", "values_of_other_0"), setting
    )  # that is this sequence
    right["sees_other_1"] = replace(setting, tokens=np.array([*others[1], *TOKENS]), calls=(), others=())
    for name, same in right.items():
        logits = same.run()[LOGITS][-len(TOKENS) :]
        np.testing.assert_allclose(known[name].run()[LOGITS], logits, atol=1e-4 * np.abs(logits).max(), err_msg=name)
