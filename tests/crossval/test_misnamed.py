"""Right tensors under wrong names are no difference; a mistake that looks like one is. Arrays that no engine used."""

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from helpers import DATA, TINY, model, write_checkpoint

import bitnet_ref
from bitnet_ref.cli import cli
from bitnet_ref.crossval.compare import compare
from bitnet_ref.crossval.explain import diagnose
from bitnet_ref.crossval.explain.describe import find
from bitnet_ref.crossval.explain.replay import judge_trace
from bitnet_ref.crossval.explain.variants import Setting
from bitnet_ref.crossval.misnamed import in_words, misnamed
from bitnet_ref.crossval.opponents import cross_trace
from bitnet_ref.crossval.tolerances import EPSILON
from bitnet_ref.crossval.trace import Trace, write_trace

TOKENS = [3, 14, 15, 92, 6, 53, 58, 79]
FAMILIES = ("storyteller", "qwen3-groups128", "hunyuan", "embedding-gemma3")
# the name that an author gave -> what he recorded
WRONG = {
    "attn.hook_q": "attn.hook_rot_q",
    "attn.hook_z": "attn.sub_norm.hook_normalized",
    "mlp.hook_post": "mlp.sub_norm.hook_normalized",
    "hook_resid_post": "hook_mlp_out",
    "mlp.hook_pre": "mlp.hook_pre_linear",
}


def recorded(name):
    m = model(name if name == "storyteller" else DATA / "families" / name)
    return m, m.run_with_cache(TOKENS)[1]


def crossed(m, tensors, path, **options):
    write_trace(path, tensors, TOKENS, engine="theirs")
    return cross_trace(m, path, **options)


CASES = [(f, given) for f in FAMILIES for given in WRONG if f == "storyteller" or "sub_norm" not in WRONG[given]]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "given"),
    [pytest.param(*case, marks=pytest.mark.thorough if i % 4 else ()) for i, case in enumerate(CASES)],
)
def test_a_tensor_under_another_name_is_said_to_be_so(family, given, tmp_path):
    m, right = recorded(family)
    held = WRONG[given]
    tensors = dict(right)
    for layer in range(m.config.num_hidden_layers):
        tensors[f"blocks.{layer}.{given}"] = right[f"blocks.{layer}.{held}"].copy()
    crossing = crossed(m, tensors, tmp_path / "t")
    assert crossing.agrees, crossing.verdict
    (sentence,) = [gap for gap in crossing.gaps if "holds" in gap]
    assert f"not compared under their names: {given} holds {held}; record it there" in sentence
    assert not crossed(m, tensors, tmp_path / "t", strict=True).agrees


@pytest.mark.thorough
def test_what_only_has_the_wrong_name_is_compared_under_the_right_one(tmp_path):
    m, right = recorded("storyteller")
    tensors = {name: x for name, x in right.items() if not name.endswith(("hook_rot_q", "hook_q"))}
    for layer in range(m.config.num_hidden_layers):
        tensors[f"blocks.{layer}.attn.hook_q"] = right[f"blocks.{layer}.attn.hook_rot_q"]
    crossing = crossed(m, tensors, tmp_path / "t")
    assert crossing.agrees
    compared = {op.name for op in crossing.comparisons[-1].ops}
    assert "blocks.3.attn.hook_rot_q" in compared
    assert "blocks.3.attn.hook_q" not in compared


@pytest.mark.thorough
def test_an_inverse_is_said_to_be_one(tmp_path):
    m, right = recorded("storyteller")
    tensors = {name: 1 / x if name.endswith(("hook_x_scale", "ln1.hook_scale")) else x for name, x in right.items()}
    crossing = crossed(m, tensors, tmp_path / "t")
    assert crossing.agrees, crossing.verdict
    (sentence,) = [gap for gap in crossing.gaps if "hold" in gap]
    assert sentence.startswith("48 tensors not compared under their names: ln1.hook_scale, attn.q_proj.hook_x_scale, ")
    assert sentence.endswith("and 4 more hold the inverse of what is meant; record the numbers themselves")


@pytest.mark.thorough
def test_the_screen_says_which_tensors_were_not_compared(tmp_path):
    m, right = recorded("storyteller")
    crossed(m, {**right, "blocks.2.attn.hook_q": right["blocks.2.attn.hook_rot_q"]}, tmp_path / "t")
    shown = CliRunner().invoke(cli, ["crossval", "trace", "storyteller", str(tmp_path / "t")])
    words = " ".join(shown.stdout.split())
    assert "AGREES, free-running: 315 of 316 tensors" in words
    assert "1 tensor not compared under its name: attn.hook_q holds attn.hook_rot_q; record it there" in words
    write_trace(tmp_path / "right", right, TOKENS, engine="theirs")
    shown = CliRunner().invoke(cli, ["crossval", "trace", "storyteller", str(tmp_path / "right"), str(tmp_path / "t")])
    assert "t: 1 tensor not compared under its name" in " ".join(shown.stdout.split())
    thin = {name: x for name, x in right.items() if name.endswith(("hook_resid_post", "lm_head.hook_out"))}
    crossed(m, thin, tmp_path / "t")
    shown = CliRunner().invoke(cli, ["crossval", "trace", "storyteller", str(tmp_path / "t")])
    assert "7 of 316 tensors" in shown.stdout
    assert "not " not in shown.stdout


def test_a_mistake_is_no_wrong_name(tmp_path):
    """Attention's result is left out: `hook_resid_mid` has the numbers of `hook_resid_pre`, and all else differs."""
    m, right = recorded("storyteller")
    tensors = {name: right[name] for name in right if name.endswith(("hook_resid_pre", "hook_out"))}
    for layer in range(m.config.num_hidden_layers):
        tensors[f"blocks.{layer}.hook_resid_mid"] = right[f"blocks.{layer}.hook_resid_pre"]
    tensors["lm_head.hook_out"] = np.roll(right["lm_head.hook_out"], 1, axis=0)
    crossing = crossed(m, tensors, tmp_path / "t", causes=False)
    assert not crossing.agrees
    assert crossing.misnamed == {}
    # only in one layer, so the engine itself may do it there
    tensors["lm_head.hook_out"] = right["lm_head.hook_out"]
    tensors["blocks.2.hook_resid_mid"] = right["blocks.2.hook_resid_mid"] * np.float32(1.5)
    crossing = crossed(m, tensors, tmp_path / "t", causes=False)
    assert not crossing.agrees
    assert crossing.misnamed == {}


def test_without_logits_nothing_is_renamed():
    m, right = recorded("storyteller")
    tensors = {"blocks.0.attn.hook_q": right["blocks.0.attn.hook_rot_q"]}
    assert misnamed(right, tensors, compare(right, tensors, m.config, TOKENS)) == {}
    assert in_words({}) == []


# how a tensor of the file alone is wrong -> what the verdict says of it, and the reference's line that it leads to
UNUSED = {
    "blocks.2.attn.hook_v": (lambda x: np.roll(x, 1, axis=0), "each token has v of the previous", "split_heads: v ="),
    "blocks.2.attn.hook_rot_k": (lambda x: x[:, [0, 0]], "every head has k after RoPE of the first", "apply_rope"),
    "blocks.3.mlp.down_proj.hook_x_int8": (
        lambda x: x + (np.arange(x.size) < 8).reshape(x.shape),
        "",
        "quantize_activations: return np.clip(np.rint(",
    ),
    "blocks.4.hook_resid_post": (lambda x: x * np.float32(1.01), "", "feed_forward: return be.add"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", UNUSED)
def test_numbers_that_the_engine_did_not_use_are_no_mistake_of_it(name, tmp_path):
    m, right = recorded("storyteller")
    change, held, line = UNUSED[name]
    wrong = {**right, name: change(right[name]).astype(right[name].dtype)}
    if name.endswith("hook_resid_post"):
        wrong = {each: x for each, x in wrong.items() if each.endswith(("hook_resid_post", "lm_head.hook_out"))}
    crossing = crossed(m, wrong, tmp_path / "t")
    assert not crossing.agrees
    assert "cause" not in crossing.verdict
    words = f"the logits and the other tensors are those of a right {name}, so the engine did not use these numbers"
    (sentence,) = crossing.diagnosis()
    assert sentence.startswith(words)
    assert held in sentence
    (example,) = crossing.examples()
    assert line in example


@pytest.mark.thorough
def test_one_kind_of_tensor_that_is_recorded_wrongly_in_every_linear(tmp_path):
    """The activations as unsigned bytes, whose zero is 128, as some instructions want them."""
    m, right = recorded("storyteller")
    wrong = {name: x.view(np.uint8) + np.uint8(128) if name.endswith("hook_x_int8") else x for name, x in right.items()}
    (sentence,) = crossed(m, wrong, tmp_path / "t").diagnosis()
    assert sentence.startswith("the logits and the other tensors are those of a right hook_x_int8, so the engine")


@pytest.mark.thorough
def test_numbers_that_the_engine_may_have_used_are_looked_into(tmp_path):
    """Without the logits, and where what follows is wrong as well, the causes are those of a mistake."""
    m, right = recorded("storyteller")
    first = {name: right[name] for name in list(right)[: list(right).index("blocks.0.attn.hook_z")]}
    shifted = {**first, "blocks.0.attn.hook_v": np.roll(first["blocks.0.attn.hook_v"], 1, axis=0)}
    (cause,) = [each for each in crossed(m, shifted, tmp_path / "t").diagnosis() if "confirmed" in each]
    assert "v, in every layer: each token has it of the previous token" in cause


@pytest.mark.thorough
def test_a_trace_of_zeros_has_no_causes(tmp_path, monkeypatch):
    searches = []
    monkeypatch.setattr(diagnose, "find", lambda *args: searches.append(args) or find(*args))
    m, right = recorded("storyteller")
    names = ["hook_embed", "blocks.0.attn.q_proj.hook_x_scale", "blocks.0.hook_resid_post"]
    crossing = crossed(m, {name: np.zeros_like(right[name]) for name in names}, tmp_path / "t")
    assert crossing.diagnosis() == ["all 3 tensors are all zeros: were the arrays filled before they were recorded?"]
    assert crossing.examples() == []
    one = {"hook_embed": np.zeros_like(right["hook_embed"]), names[2]: right[names[2]]}
    (cause,) = crossed(m, one, tmp_path / "t").diagnosis()
    assert "the embedding: it is all zeros" in cause
    assert len(searches) == 1  # not for a second mistake, which could change nothing of what is made of zeros alone


@pytest.mark.thorough
def test_numbers_that_only_lead_to_flips_were_used(tmp_path):
    """All norms in bfloat16. The next int8 values are what follows from them, and the next norm is as wrong."""
    m, right = recorded("storyteller")

    def narrow(step, compute, *inputs):
        return compute(*inputs).astype(ml_dtypes.bfloat16).astype(np.float32)

    norms = [name for name in right if name.endswith("hook_normalized")]
    wrong = Setting.of(m, TOKENS).with_edits(dict.fromkeys(norms, narrow)).run(right.__contains__)
    crossing = crossed(m, wrong, tmp_path / "t")
    assert norms[0] in crossing.verdict
    (cause,) = [each for each in crossing.diagnosis() if "confirmed" in each]
    assert "rounded to bfloat16" in cause


def test_float_sums_are_no_mistake_of_an_engine_without_integer_ones(tmp_path):
    """transformers multiplies dequantised floats, whose sum is off by more than factors in another order."""
    m, right = recorded("storyteller")
    rng, given = np.random.default_rng(0), {name: x for name, x in right.items() if name.endswith(("int8", "x_scale"))}
    for name, x in right.items():
        if name.endswith("proj.hook_out"):
            off = rng.uniform(-8, 8, x.shape) * EPSILON
            given[name] = (x + np.abs(x).max(axis=1, keepdims=True) * off).astype(np.float32)
    sums = {name: x for name, x in right.items() if name.endswith("hook_acc_int32")}
    for more, expected in (({}, {"ok"}), (sums, {"differs"})):
        write_trace(tmp_path / "t", given | more, TOKENS, engine="theirs")
        with Trace(tmp_path / "t") as trace:
            assert {op.status for op in judge_trace(m, trace).ops if op.name.endswith("proj.hook_out")} == expected


@pytest.mark.thorough
def test_an_attention_factor_that_is_left_out(tmp_path):
    """YaRN's, of cos and sin. Edits that turn by other angles keep it."""
    m = bitnet_ref.load(
        write_checkpoint(tmp_path / "m", {**TINY, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    )
    right, tokens = m.run_with_cache(list(range(1, 24)))[1], list(range(1, 24))
    scale = np.float32(m.config.rope.attention_factor)
    turned = [name for name in right if name.endswith(("hook_rot_q", "hook_rot_k"))]
    unscaled = dict.fromkeys(turned, lambda step, compute, x, cos, sin: compute(x, cos / scale, sin / scale))
    wrong = Setting.of(m, tokens).with_edits(unscaled).run(right.__contains__)
    write_trace(tmp_path / "t", wrong, tokens, engine="theirs")
    causes = [each for each in cross_trace(m, tmp_path / "t").diagnosis() if "confirmed" in each]
    assert "RoPE's cos and sin are not multiplied by its attention factor" in causes[0]
