"""LoRA adapters against peft's logits (made by transformers and peft), and what is refused."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers import DATA, difference, model, rng
from safetensors.numpy import load_file, save_file

import bitnet_ref
from bitnet_ref.backends import choose_backend
from bitnet_ref.crossval.compare import compare
from bitnet_ref.crossval.explain.diagnose import diagnose
from bitnet_ref.crossval.explain.replay import judge_trace
from bitnet_ref.crossval.explain.variants import Setting
from bitnet_ref.crossval.paths import check_paths
from bitnet_ref.crossval.teacher import teacher_forced
from bitnet_ref.errors import BackendUnavailable, ConfigError, ConfigWarning, FormatError, GenerationError
from bitnet_ref.families.lora import MISTAKES, AdaptedLinear, Adapter, LoraTerm, without_adapters
from bitnet_ref.formats.checkpoint import LoadOptions
from bitnet_ref.formats.convert import convert
from bitnet_ref.formats.hashes import weight_hash
from bitnet_ref.formats.hf import adapter as adapters
from bitnet_ref.formats.open import open_checkpoint
from bitnet_ref.generation.chat import PrefixCache
from bitnet_ref.generation.embed import default_prompt, longest_text
from bitnet_ref.inspection import inspect_model

ADAPTERS = DATA / "adapters"
BESIDE, ALONE = ADAPTERS / "beside", ADAPTERS / "alone" / "adapter"
GOLDEN = {path: load_file(path / "golden.safetensors") for path in (BESIDE, ADAPTERS / "alone")}
CASES = {"beside": (BESIDE, GOLDEN[BESIDE]), "alone": (ALONE, GOLDEN[ADAPTERS / "alone"])}
LIMIT = 3e-4


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture
def copy(tmp_path):
    """A copy of the model with an adapter beside it, and a function that changes its adapter_config.json."""
    folder = shutil.copytree(BESIDE, tmp_path / "m")
    path = folder / "adapter_config.json"

    def change(**keys):
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))
        return folder

    return change


def test_transformers_and_peft(case, backend_name):
    path, golden = case
    m = model(path, backend_name)
    assert difference(m.logits(golden["tokens"]), golden["logits"]) < LIMIT
    assert difference(model(path, dtype="float64").logits(golden["tokens"]), golden["logits"]) < LIMIT


def test_without_it(backend_name):
    tokens = GOLDEN[BESIDE]["tokens"]
    m = bitnet_ref.load(BESIDE, backend=backend_name, adapter="none")
    assert difference(m.logits(tokens), GOLDEN[BESIDE]["logits_base"]) < LIMIT
    assert difference(model(BESIDE, backend_name).logits(tokens), m.logits(tokens)) > 1
    if backend_name == "numpy":
        assert weight_hash(without_adapters(model(BESIDE).weights)) == weight_hash(m.weights)
        assert weight_hash(model(BESIDE).weights) != weight_hash(m.weights)


def test_given_by_path(tmp_path):
    """For a base that is in another format: the names of the modules are the model's."""
    base = ADAPTERS / "alone" / "base"
    convert(base, tmp_path / "x.bitnet.safetensors", "native")
    golden = GOLDEN[ADAPTERS / "alone"]
    for file in (base, tmp_path / "x.bitnet.safetensors"):
        for given in (ALONE, ALONE / "adapter_config.json"):
            m = bitnet_ref.load(file, backend="numpy", adapter=given)
            assert difference(m.logits(golden["tokens"]), golden["logits"]) < LIMIT
    ternary = [w for _, w in m.weights.linears() if isinstance(w, AdaptedLinear)]
    assert ternary
    assert all(w.bit_linear is not None for w in ternary)  # they stay so


def test_the_files_of_sentence_transformers_beside_an_adapter(tmp_path):
    """Which saves an adapter with them, and its base has none: how texts become vectors, their prompts and length."""
    tokens = [5, 6, 7, 8]
    plain = bitnet_ref.load(ALONE, backend="numpy")
    hidden = plain.run_with_cache(tokens, "ln_final.hook_normalized")[1]["ln_final.hook_normalized"]
    folder = shutil.copytree(ALONE.parent, tmp_path / "m") / "adapter"
    for name, content in {
        "modules.json": [{"type": f"sentence_transformers.models.{kind}"} for kind in ("Transformer", "Pooling")],
        "1_Pooling/config.json": {"pooling_mode": "mean"},
        "config_sentence_transformers.json": {"prompts": {"query": "Q: "}, "default_prompt_name": "query"},
        "sentence_bert_config.json": {"max_seq_length": 6},
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    for m in (bitnet_ref.load(folder, backend="numpy"), bitnet_ref.load(folder, backend="numpy").renew()):
        for each in (m, m.on(m.backend)):
            np.testing.assert_allclose(each.embed(tokens), hidden.mean(axis=0), rtol=0, atol=1e-5)
            assert (default_prompt(each.texts_path), longest_text(each)) == ("Q: ", 6)
    base = bitnet_ref.load(folder.parent / "base", backend="numpy")
    assert (base.config.pooling, longest_text(base)) == ("last", base.context_length)


def test_what_lies_beside_a_file_of_its_own_is_not_for_it(tmp_path):
    convert(ADAPTERS / "alone" / "base", tmp_path / "x.bitnet.safetensors", "native")
    shutil.copytree(ALONE, tmp_path, dirs_exist_ok=True)
    linears = bitnet_ref.load(tmp_path / "x.bitnet.safetensors", backend="numpy").weights.linears()
    assert not any(isinstance(w, AdaptedLinear) for _, w in linears)


@pytest.mark.thorough
def test_every_path(case):
    path, _ = case
    reference = model(path)
    tokens = rng(7).integers(0, reference.config.vocab_size, 12).tolist()
    for backend in ("numpy", "cython"):
        checks = list(check_paths(partial(choose_backend, backend, threads=2), reference, tokens))
        assert [(each.path, each.detail) for each in checks if not each.passed] == []


def test_each_op_is_judged(case):
    path, golden = case
    m, tokens = model(path), golden["tokens"]
    comparison = teacher_forced(m, model(path, "cython"), tokens)
    assert {op.status for op in comparison.ops} == {"ok"}
    seen = m.run_with_cache(tokens)[1]
    terms = [name for name in seen if name.endswith("hook_lora")]
    assert len(terms) == sum(isinstance(w, AdaptedLinear) for _, w in m.weights.linears())
    replayed = judge_trace(m, seen, tokens)
    assert replayed.agrees
    assert replayed.missing == []
    name = terms[0]
    changed = judge_trace(m, {**seen, name: seen[name] * 1.01}, tokens)
    assert changed.first_divergence.name == name


@pytest.mark.sample(2)
def test_mistakes_are_named(case):
    path, golden = case
    m = model(path)
    tokens = golden["tokens"]
    setting = Setting.of(m, tokens)
    right = setting.run()
    named = set()
    for mistake in MISTAKES:
        changed = mistake.change(setting)
        if changed is not None:
            wrong = changed.run()
            found = diagnose(m, tokens, wrong, compare(right, wrong, m.config))
            assert mistake.name in [each.name for each in found if each.confirmed], mistake.name
            named.add(mistake.name)
    assert {"lora_missing", "lora_alpha_not_divided", "lora_root_of_rank"} <= named
    assert ("lora_of_int8_input" in named) == (m.config.quantization is not None)


def test_scales(copy):
    """alpha / r; alpha / sqrt(r) with use_rslora; of some modules another alpha."""
    tokens = GOLDEN[BESIDE]["tokens"]

    def factors(folder):
        linears = bitnet_ref.load(folder, backend="numpy").weights.linears()
        return {name.rpartition(".")[2]: w.factor for name, w in linears if isinstance(w, AdaptedLinear)}

    assert factors(copy()) == {"q_proj": 2.0, "v_proj": 2.0, "down_proj": 2.0}
    assert factors(copy(use_rslora=True)) == {"q_proj": 4.0, "v_proj": 4.0, "down_proj": 4.0}
    some = {"self_attn.q_proj": 4, "model.layers.0.mlp.down_proj": 2}
    folder = copy(use_rslora=False, alpha_pattern=some)
    assert factors(folder) == {"q_proj": 1.0, "v_proj": 2.0, "down_proj": 2.0}  # of layer 1, listed last
    assert difference(model(folder).logits(tokens), GOLDEN[BESIDE]["logits"]) > LIMIT


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("q_proj", ["q_proj"]),
        ("_proj", []),
        ("^model.layers.0.mlp.down_proj", ["down_proj"]),
        ("^mlp.down_proj", []),
        (r"layers\.\d+\..*", ["q_proj", "v_proj", "down_proj"]),
        (r"self_attn\.[qk]_proj$", ["q_proj"]),
        (r".*\.(v|down)_proj", ["v_proj", "down_proj"]),
    ],
)
def test_patterns_of_modules(copy, pattern, names):
    """As peft's get_pattern_key: a pattern is the whole name, or its end after a dot."""
    linears = bitnet_ref.load(copy(alpha_pattern={pattern: 64}), backend="numpy").weights.linears()
    factors = {name: w.factor for name, w in linears if isinstance(w, AdaptedLinear)}
    changed = [name for name, factor in factors.items() if factor == 64 / 4]
    assert {name.rpartition(".")[2] for name in changed} == set(names)
    assert len(factors) > len(changed) or "layers" in pattern


def test_so_many_patterns_of_modules(copy):
    bitnet_ref.load(copy(alpha_pattern={f"^x{number}": 64 for number in range(64)}), backend="numpy")
    with pytest.raises(ConfigError, match="expected at most 64 patterns"):
        bitnet_ref.load(copy(alpha_pattern={f"^x{number}": 64 for number in range(65)}), backend="numpy")


def test_linears_that_share_a_tensor(tmp_path):
    """Of Qwen3.5: an adapter of a module is one of each linear in it, as if it were merged into the tensor."""
    base = shutil.copytree(DATA / "families" / "qwen3_5-groups128-hybrid", tmp_path / "base")
    path, dice = base / "model.safetensors", rng(1)
    stored, adapter = load_file(path), {}
    for module in ("layers.0.linear_attn.in_proj_qkv", "layers.0.linear_attn.in_proj_b", "layers.3.self_attn.q_proj"):
        name = next(name for name in stored if name.endswith(f"{module}.weight"))
        w = stored[name].astype(np.float32)
        a, b = (dice.normal(size=shape).astype(np.float32) * 0.2 for shape in ((3, w.shape[1]), (len(w), 3)))
        stored[name] = w + 2 * b @ a
        adapter |= {f"base_model.model.model.{module}.lora_{letter}.weight": m for letter, m in (("A", a), ("B", b))}
    adapter |= {f"base_model.model.model.visual.x.lora_{letter}.weight": np.ones((1, 1), np.float32) for letter in "AB"}
    merged = shutil.copytree(base, tmp_path / "merged")
    save_file({name: w.astype(np.float32) for name, w in stored.items()}, merged / "model.safetensors")
    save_file(adapter, base / "adapter_model.safetensors")
    (base / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 6}))
    with pytest.warns(ConfigWarning, match="1 terms of modules that text does not need"):
        adapted = bitnet_ref.load(base, backend="numpy", dtype="float64")
    tokens = rng(2).integers(0, adapted.config.vocab_size, 9)
    wanted = model(merged, dtype="float64").logits(tokens)
    assert difference(adapted.logits(tokens), wanted) < 1e-6
    assert difference(bitnet_ref.load(base, adapter="none").logits(tokens), wanted) > 0.1


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("keys", "field"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"target_parameters": ["experts"]}, "target_parameters"),
        ({"lora_alpha": 0}, "lora_alpha"),
        ({"lora_alpha": 1e6}, "lora_alpha"),
        ({"r": "4"}, "r"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"rank_pattern": {"(q.*)+proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q(proj": 2}}, "alpha_pattern"),
        ({"alpha_pattern": {r".*\..*\.q.*": 2}}, "alpha_pattern"),
        ({"alpha_pattern": {".?" * 30 + "Z": 2}}, "alpha_pattern"),
        ({"alpha_pattern": {"(.|.)" * 30 + "Z": 2}}, "alpha_pattern"),
        ({"alpha_pattern": [1]}, "alpha_pattern"),
    ],
)
def test_other_functions_are_refused_by_name(copy, keys, field):
    folder = copy(**keys)
    with pytest.raises(ConfigError) as caught:
        bitnet_ref.load(folder, backend="numpy")
    assert caught.value.field == field
    assert [error.field for error in inspect_model(folder).errors] == [field]


CONFIG_PATH = Path("somewhere/adapter_config.json")


@pytest.mark.parametrize("key", adapters.OTHER_FUNCTION)
def test_every_key_of_another_function(key):
    for value in (True, [1], {"a": 1}, "some", 2):
        with pytest.raises(ConfigError) as caught:
            adapters._check({"peft_type": "LORA", key: value}, CONFIG_PATH)
        assert (caught.value.field, caught.value.path) == (key, str(CONFIG_PATH))
        assert adapters.OTHER_FUNCTION[key] in caught.value.message
    for value in (None, False, 0, [], {}, "", "none"):
        adapters._check({"peft_type": "LORA", key: value}, CONFIG_PATH)


@pytest.mark.parametrize("begun", ["pissa", "PiSSA_niter_4", "olora", "loftq", "corda", "lora_ga"])
def test_every_way_to_begin_that_changes_the_base(begun):
    with pytest.raises(ConfigError, match="the model's matrices were changed before it was trained") as caught:
        adapters._check({"peft_type": "LORA", "init_lora_weights": begun}, CONFIG_PATH)
    assert caught.value.field == "init_lora_weights"
    for other in (True, False, "gaussian", "eva", "orthogonal", None):
        adapters._check({"peft_type": "LORA", "init_lora_weights": other}, CONFIG_PATH)


def test_six_unknown_keys_are_named():
    odd = {f"odd{n}": n for n in range(1, 9)}
    with pytest.warns(ConfigWarning) as caught:
        adapters._check({"peft_type": "LORA", **odd, "off": None}, CONFIG_PATH)
    named = ", ".join(f"odd{n}" for n in range(1, 7))
    assert [str(each.message) for each in caught] == [f"{CONFIG_PATH}: {named}: ignored; no LoRA known here has it"]
    with pytest.warns(ConfigWarning, match=r"a\\n\\t: ignored"):  # on one line
        adapters._check({"peft_type": "LORA", "a\n\t": 1}, CONFIG_PATH)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("lora_alpha", 1e-9, 1e-9),
        ("lora_alpha", 999_999.5, 999_999.5),
        ("lora_alpha", 1e6, "lora_alpha: expected a number above 0 and below 1e6, got 1000000.0"),
        ("lora_alpha", 0, "lora_alpha: expected a number above 0 and below 1e6, got 0"),
        ("lora_alpha", -1, "lora_alpha: expected a number above 0 and below 1e6, got -1"),
        ("lora_alpha", True, "lora_alpha: expected a number above 0 and below 1e6, got True"),
        ("lora_alpha", None, "lora_alpha: expected a number above 0 and below 1e6, got None"),
        ("r", 4.0, 4.0),
        ("r", 1, 1.0),
        ("r", 1.5, "r: expected a whole number, got 1.5"),
    ],
)
def test_numbers_of_an_adapter(key, value, expected):
    values = adapters._Values({key: value}, key, "pattern", CONFIG_PATH)
    if isinstance(expected, float):
        assert values.of("a.b") == expected
        assert type(values.of("a.b")) is float
        return
    with pytest.raises(ConfigError) as caught:
        values.of("a.b")
    assert str(caught.value) == f"{CONFIG_PATH}, {expected}"


def test_the_first_pattern_that_fits_counts():
    given = {"q_proj": 2, "layers.1.q_proj": 3, r"layers\.[01]\..*": 4, "proj": 5, "b.q_proj": 0}
    values = adapters._Values({"r": 1, "p": given}, "r", "p", CONFIG_PATH)
    for module, expected in (
        ("a.layers.1.q_proj", 2),
        ("q_proj", 2),
        ("a.layers.1.k_proj", 4),
        ("layers.2.k_proj", 1),
        ("proj", 5),
        ("a.xq_proj", 1),
    ):
        assert values.of(module) == expected
    late = adapters._Values({"r": 1, "p": dict(reversed(given.items()))}, "r", "p", CONFIG_PATH)
    assert late.of("a.layers.1.q_proj") == 4
    with pytest.raises(ConfigError, match=r"p.b.q_proj: expected a number above 0"):
        late.of("b.q_proj")


@pytest.mark.parametrize(
    ("files", "asked", "expected"),
    [
        ((), None, (".", None)),
        (("config.json",), None, (".", None)),
        (("config.json", "adapter_config.json"), None, (".", ".")),
        (("config.json", "adapter_model.safetensors"), None, (".", ".")),
        (("config.json", "adapter_model.bin"), None, (".", ".")),
        (("config.json", "adapter_config.json"), "none", (".", None)),
        (("config.json", "adapter_config.json"), "other", (".", "other")),
        (("config.json",), "other/adapter_config.json", (".", "other")),
    ],
)
def test_which_adapter_is_put_on(files, asked, expected, tmp_path):
    folder, other = tmp_path / "m", tmp_path / "other"
    for each in (folder, other):
        each.mkdir()
    (other / "adapter_config.json").write_text("{}")
    for name in files:
        (folder / name).write_text("{}")
    places = {".": folder, "other": other, None: None}
    given = asked if asked in (None, "none") else tmp_path / asked
    assert adapters.find_adapter(folder, given) == (folder, places[expected[1]])
    for name, is_folders in (
        ("x.safetensors", True),
        ("x.gguf", False),
        ("x.onnx", False),
        ("x.bitnet.safetensors", False),
    ):
        (folder / name).touch()
        weights_and_adapter = adapters.find_adapter(folder / name, given)
        beside = places[expected[1]] if is_folders or asked not in (None, "none") else None
        assert weights_and_adapter == (folder / name, beside)


def test_the_base_that_an_adapter_names(tmp_path):
    """A path below the adapter's folder if it is there, else the name as it is."""
    (tmp_path / "base").mkdir()
    for named, base in (("base", tmp_path / "base"), ("org/base", "org/base"), (str(tmp_path), str(tmp_path))):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": named}))
        assert adapters.find_adapter(tmp_path, None) == (base, tmp_path)
    for named in ("", None, 3, "a\0b"):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": named}))
        with pytest.raises(ConfigError, match="expected the name or path of the model that the adapter is for"):
            adapters.find_adapter(tmp_path, None)


def test_an_adapter_of_mlx_lm_is_named(copy):
    folder = copy()
    (folder / "adapter_config.json").write_text('{"fine_tune_type": "lora", "lora_parameters": {"rank": 8}}')
    with pytest.raises(ConfigError, match="an adapter of mlx-lm"):
        bitnet_ref.load(folder, backend="numpy")


def test_unknown_keys_are_doubts(copy):
    with pytest.warns(ConfigWarning, match="sparkle: ignored"):
        bitnet_ref.load(copy(sparkle=3, another=None), backend="numpy")


def test_tensors_that_do_not_fit(copy):
    folder = copy()
    path = folder / "adapter_model.safetensors"
    good = load_file(path)
    name = next(name for name in good if "q_proj.lora_A" in name)
    other = name.replace("lora_A", "lora_B")
    nan = good[name] * np.nan
    cases = [
        ({**good, name: good[name][:2]}, "expected floats of shape"),
        ({**good, name: nan}, "expected finite numbers"),
        ({**good, name: good[name].astype(np.int32)}, "expected floats"),
        ({key: w for key, w in good.items() if key != other}, "no lora_B beside it"),
        ({**good, name.replace("lora_A", "lora_magnitude_vector"): nan}, "DoRA"),
        ({**good, name.replace("layers.0", "layers.2"): good[name], other.replace("layers.0", "layers.2"): good[other]},
         "is no linear"),
        ({**good, "x": good[name]}, "is no term of a linear"),
        ({}, "holds no tensor"),
    ]  # fmt: skip
    for tensors, words in cases:
        save_file(tensors, path)
        with pytest.raises(FormatError, match=words) as caught:
            bitnet_ref.load(folder, backend="numpy")
        assert str(path) == str(caught.value.path)
        assert caught.value.field in (None, *tensors)
    path.write_bytes(b"not safetensors")
    with pytest.raises(FormatError):
        bitnet_ref.load(folder, backend="numpy")
    path.unlink()
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(FormatError, match="pickle, which runs code"):
        bitnet_ref.load(folder, backend="numpy")
    (folder / "adapter_config.json").unlink()
    with pytest.raises(FormatError, match=r"no adapter_config\.json"):
        bitnet_ref.load(folder, backend="numpy")
    assert bitnet_ref.load(folder, backend="numpy", adapter="none")


MERGES = [("gguf-f32", "x.gguf"), ("native", "x.bitnet.safetensors"), ("hf-unpacked", "x"), ("gguf-f16", "y.gguf")]


@pytest.mark.parametrize(("target", "name"), MERGES)
def test_convert_merges_into_dense_matrices(tmp_path, target, name):
    golden, path = GOLDEN[BESIDE], tmp_path / name
    proof = convert(BESIDE, path, target)
    assert proof.holds
    assert (proof.tensors.equal < proof.tensors.total) == (target == "gguf-f16")  # which rounds, and the proof says so
    merged = bitnet_ref.load(path, backend="numpy")
    assert not any(isinstance(w, AdaptedLinear) for _, w in merged.weights.linears())
    assert difference(merged.logits(golden["tokens"]), golden["logits"]) < (0.1 if target == "gguf-f16" else LIMIT)


def test_convert_leaves_ternary_matrices_alone(tmp_path):
    golden, path = GOLDEN[ADAPTERS / "alone"], tmp_path / "x.bitnet.safetensors"
    with pytest.raises(ConfigError, match=r"_proj is ternary.*serve --lora.*adapter='none'") as caught:
        convert(ALONE, path, "native")
    assert (caught.value.field, caught.value.mentions) == ("adapter", ("adapter='none'",))
    assert not path.exists()
    with pytest.raises(ConfigError, match="is ternary"):
        convert(ADAPTERS / "alone" / "base", path, "native", options=LoadOptions(adapter=ALONE))
    convert(ADAPTERS / "alone" / "base", path, "native")
    assert difference(bitnet_ref.load(path, backend="numpy").logits(golden["tokens"]), golden["logits"]) > LIMIT


def test_what_does_not_apply_it_says_so(tmp_path):
    with pytest.raises(ConfigError, match="without an adapter") as caught:
        bitnet_ref.load(BESIDE, backend="cython", prepared=True)
    assert caught.value.field == "prepared"
    found = inspect_model(BESIDE)
    assert found.errors == []
    notes = [finding.message for finding in found.findings if "LoRA" in finding.message]
    words = "LoRA adapter beside: rank 4 on 6 linears (down_proj, q_proj, v_proj)"
    assert notes == [f"{words}; load applies it, adapter='none' leaves it out"]
    with open_checkpoint(BESIDE, LoadOptions(adapter=BESIDE)) as checkpoint:
        assert checkpoint.evidence[-1] == words


def test_a_base_that_is_not_there(tmp_path):
    folder = shutil.copytree(ALONE, tmp_path / "a")
    path = folder / "adapter_config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"base_model_name_or_path": "nobody/nothing"}))
    with pytest.raises(FormatError, match="nobody/nothing"):
        bitnet_ref.load(folder)
    path.write_text(json.dumps(raw | {"base_model_name_or_path": None}))
    with pytest.raises(ConfigError) as caught:
        bitnet_ref.load(folder)
    assert caught.value.field == "base_model_name_or_path"
    with pytest.raises(FormatError, match="an adapter without a model"):
        bitnet_ref.load(folder, adapter="none")
    with pytest.raises(FormatError, match=r"no adapter_config\.json"):
        bitnet_ref.load(BESIDE, adapter=tmp_path)


def test_shared_models_differ_by_adapter(copy):
    folder = copy()
    shared = partial(bitnet_ref.load, folder, backend="numpy", share=True)
    with_it, without = shared(), shared(adapter="none")
    assert shared() is with_it
    assert without is not with_it
    copy(lora_alpha=16)
    assert shared() is not with_it


def test_calls_choose_an_adapter(backend_name, copy):
    """By name, on or off, together or alone: the bits of the model that is loaded with it."""
    m = bitnet_ref.load(BESIDE, backend=backend_name, adapter="none")
    m.add_adapter("beside", BESIDE)
    m.add_adapter("weak", copy(lora_alpha=2))
    whole = {"beside": model(BESIDE, backend_name), "weak": bitnet_ref.load(copy(lora_alpha=2), backend=backend_name)}
    whole[None] = bitnet_ref.load(BESIDE, backend=backend_name, adapter="none")
    tokens = GOLDEN[BESIDE]["tokens"]
    settings = {"max_tokens": 5, "temperature": 1.0, "seed": 3, "logprobs": 2, "prompt_logprobs": 1}
    for name, other in whole.items():
        assert np.array_equal(m.with_adapter(name).logits(tokens), other.logits(tokens))
        assert np.array_equal(m.with_adapter(name).embed([1, 5, 9]), other.embed([1, 5, 9]))
        mine = m.generate([1, 5, 9, 20], adapter=name, **settings)
        theirs = other.generate([1, 5, 9, 20], **settings)
        assert (mine.token_ids, mine.logprobs) == (theirs.token_ids, theirs.logprobs)
        assert mine.prompt_logprobs == theirs.prompt_logprobs
    if backend_name.startswith("cupy"):
        with pytest.raises(BackendUnavailable, match="different adapters in one batch"):
            m.backend.check_mixed_adapters()
        return
    names, prompts = ["beside", None, "weak", "beside"], [[1, 5, 9, 20], [1, 5, 9, 20], [1, 5, 9, 20], [3, 3]]
    with m.engine(max_batch=4, max_batch_tokens=8, page_size=2) as engine:
        handles = [engine.submit(p, adapter=n, **settings) for p, n in zip(prompts, names, strict=True)]
        for prompt, name, handle in zip(prompts, names, handles, strict=True):
            mine, theirs = handle.result(), whole[name].generate(prompt, **settings)
            assert (mine.token_ids, mine.logprobs) == (theirs.token_ids, theirs.logprobs)


def test_a_renewed_model_has_its_adapter_on(copy):
    """As an engine makes one when its backend fails; from the files, though another adapter has the name by then."""
    m = bitnet_ref.load(BESIDE, backend="numpy", adapter="none")
    m.add_adapter("a", BESIDE)
    with m.profile():
        whole, tokens = m.with_adapter("a"), GOLDEN[BESIDE]["tokens"]
    assert whole.watcher is None  # a profile is of the model that it was asked of
    expected = whole.logits(tokens)
    m.add_adapter("a", copy(lora_alpha=2))
    assert np.array_equal(whole.renew().renew("numpy").logits(tokens), expected)
    assert not np.array_equal(m.renew().logits(tokens), expected)


def test_pages_belong_to_an_adapter(copy):
    """By its numbers: one of the same name and others has none of them, one of another name and the same all."""
    m = bitnet_ref.load(BESIDE, backend="cython", adapter="none")
    m.add_adapter("a", BESIDE)
    m.add_adapter("same", BESIDE)
    cached = []
    with m.engine(max_batch=2, page_size=2) as engine:
        for name in ("a", None, "a", None, "same", "other"):
            if name == "other":
                engine.add_adapter("a", copy(lora_alpha=2))
                name = "a"
            out = engine.generate([1, 5, 9, 20, 4, 6, 8], max_tokens=2, adapter=name)
            cached.append(out.stats.cached_tokens)
    assert cached == [0, 0, 6, 6, 6, 0]


def test_a_conversation_may_change_its_adapter():
    m = bitnet_ref.load(BESIDE, backend="numpy", adapter="none")
    m.add_adapter("a", BESIDE)
    prefix, ids = PrefixCache(m), np.arange(6)
    kept = []
    for digest in ("", "", m.adapters["a"].digest, m.adapters["a"].digest, ""):
        kept.append(prefix.take(ids, 8, digest)[1])
        prefix.keep(ids)
    assert kept == [0, 5, 0, 5, 0]


def test_a_draft_model_takes_its_own_adapter():
    m = bitnet_ref.load(BESIDE, backend="cython", adapter="none")
    m.add_adapter("a", BESIDE)
    out = m.generate([1, 5, 9, 20], max_tokens=12, adapter="a", speculate=m, ignore_eos=True)
    assert out.token_ids == model(BESIDE, "cython").generate([1, 5, 9, 20], max_tokens=12, ignore_eos=True).token_ids
    assert out.stats.accepted_tokens == out.stats.drafted_tokens > 0


def test_names_that_are_refused(copy):
    m = bitnet_ref.load(BESIDE, backend="numpy", adapter="none")
    for name in ("", "a:b"):
        with pytest.raises(ConfigError, match="without a colon"):
            m.add_adapter(name, BESIDE)
    with pytest.raises(GenerationError, match=r"no adapter 'x'; there are: none; add_adapter") as caught:
        m.generate([1], adapter="x")
    assert caught.value.field == "adapter"
    with pytest.raises(ConfigError, match="loaded with an adapter on"):
        model(BESIDE).add_adapter("a", BESIDE)
    adapter = Adapter({"lm_head": LoraTerm(np.ones((1, 128), np.float32), np.ones((80, 1), np.float32), 1.0)})
    with pytest.raises(ConfigError, match="changes lm_head"):
        m.put_adapter("a", adapter)
    with pytest.raises(ConfigError) as caught:
        m.add_adapter("a", copy(use_dora=True))
    assert caught.value.field == "use_dora"


def test_a_batch_gives_what_each_gives_alone():
    m = model(BESIDE, "cython")
    prompts = [[1, 5, 9, 20], [3, 3]]
    alone = [m.generate(prompt, max_tokens=6, temperature=1.0, seed=3).token_ids for prompt in prompts]
    assert [each.token_ids for each in m.generate(prompts, max_tokens=6, temperature=1.0, seed=3)] == alone
