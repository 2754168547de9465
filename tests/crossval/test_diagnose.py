"""Diagnosis: what is wrong is confirmed, what is right is not, and what cannot be told apart is all listed."""

import json
import time
from functools import cache

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import BITNET, GOLDEN, model, write_checkpoint

import bitnet_ref
from bitnet_ref.cli import cli
from bitnet_ref.crossval import default_tokens
from bitnet_ref.crossval.compare import compare
from bitnet_ref.crossval.explain.diagnose import diagnose, diagnose_prompt
from bitnet_ref.crossval.explain.evidence import Evidence
from bitnet_ref.crossval.explain.hypotheses import HYPOTHESES, forward_hypotheses
from bitnet_ref.crossval.explain.hypotheses.calls import first_wrong_token
from bitnet_ref.crossval.explain.variants import IMPOSSIBLE, Setting
from bitnet_ref.crossval.trace import Trace, write_trace
from bitnet_ref.families.family import after

TOKENS = [1, 17, 5, 23, 9, 32, 3, 3]
SLOW_CASES = ("bitnet-packed-offline", "llama-packed-bitlinear", "mistral-window3", "rope-linear")
CASES = ("tiny", *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES))
# Mistakes that are one computation to rounding on these inputs; a diagnosis lists both.
ALIKE = (
    {"norm_eps_1e-06", "norm_eps_1e-08"},  # embeddings of size 1/2 do not show the sixth place of eps
)
BY_NAME = {hypothesis.name: hypothesis for hypothesis in HYPOTHESES}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """The model of a case: "tiny", one layer with sub-norms and GQA, or a golden one."""
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, {**BITNET, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1})

    @cache
    def load(case: str = "tiny", backend: str = "numpy") -> bitnet_ref.Model:
        return bitnet_ref.load(folder if case == "tiny" else GOLDEN / case, backend=backend, threads=1)

    return load


def made_by(m: bitnet_ref.Model, *names: str) -> dict[str, np.ndarray]:
    """What the reference computes with those mistakes made."""
    setting = Setting.of(m, TOKENS)
    for name in names:
        changed = BY_NAME[name].change(setting)
        assert changed is not None
        setting = changed
    return setting.run()


def diagnosed(m: bitnet_ref.Model, candidate: dict[str, np.ndarray], **options: object) -> list:
    comparison = compare(m.run_with_cache(TOKENS)[1], candidate, m.config, TOKENS)
    return diagnose(m, TOKENS, candidate, comparison, **options)


def confirmed(diagnoses: list) -> set[str]:
    return {diagnosis.name for diagnosis in diagnoses if diagnosis.confirmed}


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_confirmed_of_a_correct_engine(case, load, backend_name):
    """A backend of ours has nothing wrong, and no reference with a mistake that shows agrees with it."""
    m, candidate = load(case), load(case, backend_name).run_with_cache(TOKENS)[1]
    right = m.run_with_cache(TOKENS)[1]
    comparison = compare(right, candidate, m.config, TOKENS)
    assert comparison.agrees
    assert diagnose(m, TOKENS, candidate, comparison) == []
    setting = Setting.of(m, TOKENS)
    for hypothesis in forward_hypotheses(setting, right):
        changed = hypothesis.change(setting)
        if changed is None:
            continue
        wrong = changed.run()
        if compare(wrong, candidate, changed.config, TOKENS).agrees:  # then it must not show on this input at all
            assert compare(right, wrong, m.config, TOKENS).agrees, hypothesis.name


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_each_mistake_is_confirmed_and_no_other(case, load):
    m = load(case)
    setting = Setting.of(m, TOKENS)
    right = m.run_with_cache(TOKENS)[1]
    found = 0
    for hypothesis in forward_hypotheses(setting, right):
        changed = hypothesis.change(setting)
        if changed is None:
            continue
        candidate = changed.run()
        comparison = compare(right, candidate, m.config, TOKENS)
        if comparison.agrees:
            continue
        diagnoses = diagnose(m, TOKENS, candidate, comparison, depth=1)
        assert diagnoses[0].confirmed, hypothesis.name
        assert {hypothesis.name, "described"} & confirmed(diagnoses)
        for other in confirmed(diagnoses) - {
            hypothesis.name,
            "described",
        }:  # the same computation on this input, to rounding
            assert compare(made_by(m, other), candidate, m.config, TOKENS).agrees
            assert {hypothesis.name, other} in ALIKE
        found += 1
    assert found > 15


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    ["silu_for_relu2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("scale_inverted", "gqa_heads_interleaved"))],
)
def test_logits_alone_are_enough(name, load):
    logits = made_by(load(), name)["lm_head.hook_out"]
    for seen in ({"lm_head.hook_out": logits}, {"logits": logits}, {"logits": logits[-1:]}):
        found = diagnosed(load(), seen)
        assert confirmed(found) == {name}
        assert found[0].logit_error == 0
        assert found[0].logit_error_before > 1e-3


def test_of_logits_alone_the_steps_after_the_layers_are_tried_first(load):
    """A mistake there is found before the edits of the layers, which are thousands, are even listed."""
    logits, told = load().run_with_cache(TOKENS)[1]["lm_head.hook_out"], list[tuple[int, int, str]]()
    for words, wrong in {
        "it is multiplied by 1.3": logits * np.float32(1.3),
        "columns of it are one too far": np.roll(logits, 1, axis=1),
        "it is rounded to float16": logits.astype(np.float16).astype(np.float32),
    }.items():
        found = diagnosed(load(), {"logits": wrong}, progress=lambda *step: told.append(step))
        assert found[0].confirmed
        assert found[0].cause == f"the output of lm_head: {words}"
        assert told[-1][1] < 1000


@pytest.mark.thorough
def test_a_constant_is_solved_for_in_a_run_too_long_for_several_copies(load, monkeypatch):
    """More values of a constant are tried than edited runs are computed at once."""
    monkeypatch.setattr(Evidence, "copies", 2)
    m = load()
    edit = {"blocks.0.attn.hook_attn_scores": after(lambda x: x * np.float32(1.25))}
    wrong = Setting.of(m, TOKENS).with_edits(edit).run()
    thin = {name: wrong[name] for name in ("blocks.0.attn.hook_rot_k", "blocks.0.hook_resid_mid", "lm_head.hook_out")}
    found = diagnosed(m, thin)
    assert not found.failed
    assert any(d.confirmed and "scores are multiplied by 1.25" in d.cause for d in found)


@pytest.mark.thorough
def test_what_logits_cannot_tell_apart_is_listed_together(load):
    """Interleaved RoPE equals half-split RoPE on rows un-permuted without need: scores are sums of the same terms."""
    candidate = made_by(load(), "rope_interleaved")
    found = diagnosed(load(), {"logits": candidate["lm_head.hook_out"]})
    assert confirmed(found) == {"rope_interleaved", "qk_unpermuted_twice"}
    assert confirmed(diagnosed(load(), candidate)) == {"rope_interleaved"}


@pytest.mark.parametrize("name", ["qk_permuted_with_interleaved_rope", "rotated_pairs_adjacent"])
def test_a_harmless_order_of_q_and_k_is_named_as_such(load, name):
    found = diagnosed(load(), made_by(load(), name))
    assert confirmed(found) == {name}
    assert "Nothing is wrong" in str(found[0])


@pytest.mark.sample(2)
@pytest.mark.parametrize("mistakes", [("rope_interleaved", "silu_for_relu2"), ("scale_inverted", "head_int8_rows")])
def test_two_mistakes_at_once(mistakes, load):
    candidate = made_by(load(), *mistakes)
    assert not confirmed(diagnosed(load(), candidate, depth=1, thorough=False))
    found = diagnosed(load(), candidate, thorough=False)
    assert confirmed(found) == {" + ".join(mistakes)}
    assert next(d.name for d in found if d.partly) == mistakes[0]


def test_flips_at_ties_are_no_second_mistake():
    """A right engine may round a value on a half either way, and a trace without int8 does not show it."""
    m = model("storyteller", backend="numpy")
    tokens = default_tokens(m)
    setting = BY_NAME["round_half_away"].change(BY_NAME["gqa_heads_interleaved"].change(Setting.of(m, tokens)))
    candidate = {
        name: array for name, array in setting.run().items() if name.endswith(("resid_post", "lm_head.hook_out"))
    }
    comparison = compare(m.run_with_cache(tokens)[1], candidate, m.config, tokens)
    assert confirmed(diagnose(m, tokens, candidate, comparison)) == {"gqa_heads_interleaved"}


@pytest.mark.parametrize("name", ["activation_scale_of_128", "activation_scale_128_wraps"])
def test_a_factor_of_128_wraps_or_is_cut(name):
    m = model("storyteller", backend="numpy")
    tokens = default_tokens(m)
    candidate = BY_NAME[name].change(Setting.of(m, tokens)).run()
    comparison = compare(m.run_with_cache(tokens)[1], candidate, m.config, tokens)
    assert confirmed(diagnose(m, tokens, candidate, comparison)) == {name}


def test_a_sparse_trace_widens_the_search(load):
    """Only the residual stream was dumped: the op that differs first is not the one that is wrong."""
    candidate = made_by(load(), "activation_on_the_product")
    sparse = {name: array for name, array in candidate.items() if name.endswith("hook_resid_post")}
    assert confirmed(diagnosed(load(), sparse)) == {"activation_on_the_product"}


@pytest.mark.parametrize("engine", ["bitnet_ref numpy", "my own port 0.1"])
def test_a_trace_file_is_diagnosed(engine, load, tmp_path):
    """From the file: another engine's, whose int8 scales and products may be rounded in another order, like our own."""
    m, path = load(), tmp_path / "candidate.safetensors"
    write_trace(path, made_by(m, "silu_for_relu2"), TOKENS, engine=engine)
    with Trace(path) as trace:
        found = diagnosed(m, trace)
    assert confirmed(found) == {"silu_for_relu2"}
    write_trace(path, m.run_with_cache([1, *TOKENS])[1], [1, *TOKENS], engine=engine)
    with Trace(path) as trace:
        assert compare(m.run_with_cache(TOKENS)[1], trace, m.config, TOKENS).problem
        assert confirmed(diagnosed(m, trace)) == {"bos_twice"}


def test_a_teacher_forced_run_is_judged_at_the_op_that_differs(load):
    """What comes after it was computed from right inputs, so the whole of the changed run is nothing like it."""
    m, name = load(), "blocks.0.mlp.hook_post"
    right = m.run_with_cache(TOKENS)[1]
    candidate = right | {name: made_by(m, "silu_for_relu2")[name]}
    comparison = compare(right, candidate, m.config, TOKENS, mode="teacher-forced")
    assert confirmed(diagnose(m, TOKENS, candidate, comparison)) == {"silu_for_relu2"}


@pytest.mark.thorough
def test_an_unknown_mistake_is_not_explained_away(load):
    candidate = made_by(load())
    for name in ("blocks.0.attn.hook_z", "lm_head.hook_out"):
        candidate[name] += np.linspace(0, 1, candidate[name].size, dtype=np.float32).reshape(candidate[name].shape)
    found = diagnosed(load(), candidate)
    assert found
    assert not confirmed(found)
    assert all(str(diagnosis).startswith(("not confirmed", "explains a part")) for diagnosis in found)
    assert found[0].to_dict()["confirmed"] is False


def test_tensors_of_zeros_are_not_wrong(load):
    setting = Setting.of(load(), TOKENS).with_edits({"blocks.0.attn.hook_z": after(np.zeros_like)})
    candidate = setting.run()
    assert first_wrong_token(setting, candidate) is None
    candidate["blocks.0.attn.hook_z"][3, 0, 0] = 1e-9
    assert first_wrong_token(setting, candidate) == 3


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_prompts():
    m = model("storyteller")
    text = "Once upon a time: "
    ids = m.tokenizer.encode(text)
    bos, eos = m.tokenizer.bos_id, m.tokenizer.eos_ids[0]
    wrong = {
        "bos_twice": [bos, *ids],
        "bos_missing": ids[1:],
        "eos_appended": [*ids, eos],
        "template_space_missing": m.tokenizer.encode(text.removesuffix(" ")),
    }
    for name, candidate in wrong.items():
        found = diagnose_prompt(m, ids, candidate, text)
        assert name in confirmed(found)
        assert found[0].remedy in str(found[0])
    assert diagnose_prompt(m, ids, ids, text) == []
    assert not confirmed(diagnose_prompt(m, ids, [5, 6, 7], text))


def test_a_prompt_of_no_tokens():
    assert not confirmed(diagnose_prompt(model("storyteller"), [], [5]))


def test_a_prompt_of_the_older_template():
    m = model("storyteller")
    text = "System: Be kind.<|eot_id|>User: Hello<|eot_id|>Assistant: "
    older = "Be kind.\n\nHuman: Hello\n\nBITNETAssistant: "
    found = diagnose_prompt(m, m.tokenizer.encode(text), m.tokenizer.encode(older), text)
    assert confirmed(found) == {"older_template"}
    cut = m.tokenizer.encode(text.removesuffix("Assistant: "))
    assert confirmed(diagnose_prompt(m, m.tokenizer.encode(text), cut, text)) == {"generation_prompt_missing"}


@pytest.mark.thorough
def test_a_search_reports_each_test_and_ends_at_its_deadline_or_at_ctrl_c(load):
    m, candidate = load(), made_by(load(), "silu_for_relu2")
    steps: list[tuple[int, int, str]] = []
    whole = diagnosed(m, candidate, progress=lambda *step: steps.append(step))
    assert whole.stopped == ""
    assert [tested for tested, _, _ in steps] == list(range(len(steps)))
    assert any(text == whole[0].cause and tested < total for tested, total, text in steps)
    late = diagnosed(m, candidate, budget_s=0.0)
    assert (list(late), late.stopped) == ([], "the time is up")
    assert late.untested > 0
    started = time.process_time()
    some = diagnosed(m, {"lm_head.hook_out": np.roll(candidate["lm_head.hook_out"], 1, 1)}, budget_s=0.5)
    assert some.stopped == "the time is up"
    assert time.process_time() - started < 0.7  # most of what is above the budget is the first run

    def interrupt(tested: int, total: int, text: str) -> None:
        if tested == 2:
            raise KeyboardInterrupt

    early = diagnosed(m, candidate, progress=interrupt)
    assert early.stopped == "interrupted"
    assert len(early) in (1, 2)  # a mistake that the model has no place for is not run
    assert early.untested > 0


@pytest.fixture(scope="module")
def three_layers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    write_checkpoint(folder, {**BITNET, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3})
    return bitnet_ref.load(folder, backend="numpy", threads=1)


SAME = {"rope_alpha_ignored"}  # of this model: rope_theta_10000


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("names", "layers", "words"),
    [
        (("rope_interleaved",), (1,), "in layer 1 only"),
        (("silu_for_relu2",), (0, 2), "in layers 0, 2 only"),
        pytest.param(
            sorted(BY_NAME.keys() - SAME), (1, 2), "in layers 1 to 2 (the last 2 of 3) only", marks=pytest.mark.slow
        ),
    ],
)
def test_a_known_mistake_in_some_layers_is_named(names, layers, words, three_layers):
    setting, right = Setting.of(three_layers, TOKENS), three_layers.run_with_cache(TOKENS)[1]
    count = 0
    for name in names:
        try:
            changed = BY_NAME[name].change(setting, layers)
            candidate = None if changed is None else changed.run()
        except IMPOSSIBLE:
            candidate = None
        if candidate is None:  # this model has no place for it
            continue
        if compare(right, candidate, three_layers.config, TOKENS).agrees:
            continue
        causes = []
        for depth in (1, 2):  # some change the inputs and the outputs of linears
            causes = causes or [d for d in diagnosed(three_layers, candidate, depth=depth) if d.confirmed]
        assert causes, name
        assert any(name in d.name and words in d.cause for d in causes) or causes[0].name == "described"
        count += 1
    assert count == len(names) or count > 30


@pytest.mark.thorough
@pytest.mark.parametrize("hook", ["hook_beta", "hook_conv", "hook_log_decay", "hook_delta_out", "hook_gated_z"])
def test_a_mistake_in_a_delta_net_is_described(hook):
    """In the second of three DeltaNet layers: half of each token's numbers is zero."""
    m = model(GOLDEN.parent / "families" / "qwen3_5-groups128-hybrid")
    name = f"blocks.1.attn.{hook}"

    def halve(step, compute, *inputs):
        result = compute(*inputs).copy()
        result[:, result.shape[1] // 2 :] = 0
        return result

    candidate = Setting.of(m, TOKENS).with_edits({name: halve}).run()
    comparison = compare(m.run_with_cache(TOKENS)[1], candidate, m.config, TOKENS)
    assert comparison.first_divergence.name == name or hook == "hook_delta_out"
    causes = [d for d in diagnose(m, TOKENS, candidate, comparison) if d.confirmed]
    assert "in layer 1 only: it is all zeros (in " in causes[0].cause
    assert "Compare with " in causes[0].remedy


def test_a_cause_must_explain_the_logits(load):
    """A mistake with which the tensors agree, but the logits' error falls by less than half, is not confirmed."""
    m = load()
    right, wrong = m.run_with_cache(TOKENS)[1], made_by(m, "norm_eps_1e-06")
    logits, mine = wrong["lm_head.hook_out"], right["lm_head.hook_out"]
    error = np.linalg.norm(logits - mine) / np.linalg.norm(mine)
    seen = {"blocks.0.ln1.hook_scale": wrong["blocks.0.ln1.hook_scale"], "lm_head.hook_out": logits}
    assert confirmed(diagnosed(m, seen)) == {"norm_eps_1e-06", "norm_eps_1e-08"}  # see ALIKE
    seen["lm_head.hook_out"] = logits * np.float32(1 + 0.6 * error)
    assert compare(wrong, seen, m.config, TOKENS).agrees
    found = diagnosed(m, seen, depth=1, thorough=False)
    assert not {d.name for d in found if d.confirmed and not d.logit_error <= d.logit_error_before / 10}
    assert "norm_eps_1e-06" in {d.name for d in found}
    assert "norm_eps_1e-06" not in confirmed(found)


@pytest.mark.thorough
def test_a_mistake_that_cannot_be_run_is_noted(tmp_path):
    """With a window of 1, a cache that misses the newest token leaves nothing to attend to: the reference raises."""
    m = model(GOLDEN / "mistral-window1")
    seen = {"lm_head.hook_out": m.run_with_cache(TOKENS)[1]["lm_head.hook_out"] ** 3}
    found = diagnosed(m, seen, depth=1)
    (cause,) = found.failed
    assert "a token does not see itself" in cause
    assert found.failed[cause].startswith("NumericsError: ")
    assert len(found) > 20  # the others are tested
    write_trace(tmp_path / "t", seen, TOKENS, engine="theirs")
    arguments = ["crossval", "trace", str(GOLDEN / "mistral-window1"), str(tmp_path / "t"), "--json"]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 1, done.output
    (result,) = json.loads(done.stdout)["results"]
    assert cause in result["untested"]
    assert result["comparisons"][-1]["ops"]
    assert any(
        f"not tested, as the reference cannot be run so on this model: {cause}" in s for s in result["diagnosis"]
    )


def test_scaling_ignored_of_longrope(tmp_path):
    scaling = {"rope_type": "longrope", "long_factor": [2.0] * 4, "short_factor": [1.5] * 4, "factor": 4.0}
    scaling["original_max_position_embeddings"] = 4
    config = {**BITNET, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "rope_scaling": scaling}
    m = bitnet_ref.load(write_checkpoint(tmp_path, {**config, "max_position_embeddings": 16}), backend="numpy")
    found = diagnosed(m, made_by(m, "rope_scaling_ignored"))
    assert confirmed(found) == {"rope_scaling_ignored"}
    assert found.failed == {}
