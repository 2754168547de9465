"""Other people's engines as opponents: recorded in a process of their own, judged here."""

import os
import sys
import venv
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from cli_runs import invoke, invoke_json
from click.testing import CliRunner
from helpers import DATA, GOLDEN, golden, model, rng

import bitnet_ref
from bitnet_ref.backends import Backend
from bitnet_ref.cli import cli
from bitnet_ref.crossval import cross_engine, long_tokens, make_receipt, run_written, verify_receipt
from bitnet_ref.crossval.engines.engine import ExternalEngine, Outcome
from bitnet_ref.crossval.engines.llama_cpp import _count_unflipped, block_rule, first_tokens
from bitnet_ref.crossval.engines.outside import ENGINES
from bitnet_ref.crossval.engines.written import MLX_LM
from bitnet_ref.crossval.explain.replay import judge_trace
from bitnet_ref.crossval.explain.variants import Setting
from bitnet_ref.crossval.receipt import write_receipt
from bitnet_ref.crossval.tolerances import LOGITS_FLOOR
from bitnet_ref.crossval.trace import Trace
from bitnet_ref.errors import ConfigError
from bitnet_ref.formats.convert import TARGETS, Target, convert

CASE = GOLDEN / "bitnet-packed-offline"
RECORDERS = Path(bitnet_ref.__file__).parent / "crossval" / "engines" / "recorders"

# The interpreter that has torch, transformers and llama-cpp-python, where this one has not
PYTHON = os.environ.get("BITNET_REF_ENGINES_PYTHON") or None
needs_onnx = pytest.mark.skipif(
    find_spec("onnx") is None or ENGINES["onnxruntime"].missing() is not None, reason="needs onnx and onnxruntime"
)
WHY = "set BITNET_REF_ENGINES_PYTHON to an interpreter that has it"


@cache
def needs(engine):
    reason = engine.missing(PYTHON)
    return pytest.mark.skipif(reason is not None, reason=f"{reason}; {WHY}")


class Run(dict):
    """A run of an engine that is not ours, as a trace of it would be."""

    own_engine = False

    def __init__(self, tensors, tokens):
        super().__init__(tensors)
        self.token_ids = list(tokens)


def tokens_of(case):
    return golden(case)["tokens"].tolist()


# -- onnxruntime -------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@needs_onnx
def test_onnxruntime_agrees_and_its_receipt_holds(tmp_path):
    cases = ["bitnet-packed-offline", "llama-packed-rmsnorm", "rope-dynamic"]  # the others: slow
    by_case = [cross_engine("onnxruntime", GOLDEN / case, tokens_of(case)) for case in cases]
    for case, (crossing,) in zip(cases, by_case, strict=True):
        assert crossing.agrees, f"{case}: {crossing.verdict}"
        free = crossing.comparisons[-1]
        assert free.logits.top1_agreement == 1
        if model(GOLDEN / case).config.quantization is not None:
            assert free.accumulators[0] > 0
            assert free.accumulators[1] == 0
            assert [found.mode for found in crossing.comparisons] == ["op by op", "free-running"]
            assert all(op.equal for op in free.ops if op.kind != "logits")
    receipt = make_receipt("onnxruntime", str(CASE), model(CASE), tokens_of(CASE.name), by_case[0])
    write_receipt(tmp_path / "r.json", receipt)
    assert verify_receipt(tmp_path / "r.json").holds


@pytest.mark.slow
@needs_onnx
def test_onnxruntime_on_every_case():
    cases = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
    subjects = [("storyteller", None), *((GOLDEN / case, tokens_of(case)) for case in cases)]
    for subject, tokens in subjects:
        (crossing,) = cross_engine("onnxruntime", subject, tokens)
        assert crossing.agrees, f"{subject}: {crossing.verdict}"


@pytest.mark.thorough
@needs_onnx
def test_the_shell_runs_an_engine():
    result = CliRunner().invoke(cli, ["crossval", "onnxruntime", str(CASE), "--tokens", "1,5,9"])
    assert result.exit_code == 0, result.output
    assert "AGREES" in result.stdout


# -- what `convert` has written ----------------------------------------------------------------------------------------


@pytest.mark.thorough
@needs_onnx
def test_a_written_file_runs_in_its_engine(tmp_path):
    facts = invoke_json("convert", CASE, tmp_path / "right", "--to", "onnx")
    assert facts["proof"]["exact"]
    assert (facts["engine"]["name"], facts["engine"]["status"]) == ("onnxruntime", "agrees")
    sentence = f"run in onnxruntime {version('onnxruntime')}: logits of 8 tokens within "
    assert facts["engine"]["sentence"].startswith(sentence)
    assert float(facts["engine"]["sentence"].removeprefix(sentence)) <= LOGITS_FLOOR
    late = run_written(tmp_path / "right", "onnx", timeout_s=0.01)
    assert (late.status, late.sentence) == ("not finished", "not finished in 0.01 s by onnxruntime")
    assert not late.is_wrong
    for option in ("--no-engine", "--no-verify"):
        assert invoke_json("convert", CASE, tmp_path / option, "--to", "onnx", option)["engine"] is None


@pytest.mark.thorough
@needs_onnx
@pytest.mark.parametrize(
    ("op", "status", "says"),
    [
        ("Sub", "differs", "computes something else from it: DIFFERS, free-running, first at lm_head.hook_out"),
        ("NoSuchOp", "fails", "onnxruntime fails on it: "),
    ],
)
def test_an_engine_that_does_not_run_a_written_file(op, status, says, tmp_path, monkeypatch):
    """The weights are proven, which our reader takes without the graph; the engine computes by the graph."""
    good = TARGETS["onnx"]

    def write(checkpoint, path, options, progress):
        good.write(checkpoint, path, options, progress)
        graph = onnx.load(str(path / "model.onnx"), load_external_data=False)
        adds = [n for n in graph.graph.node if n.op_type == "Add" and n.name.startswith("/model/layers.1/mlp/")]
        adds[-1].op_type = op
        onnx.save(graph, str(path / "model.onnx"))

    import onnx

    monkeypatch.setitem(TARGETS, "onnx", Target("onnx", None, write))
    facts = invoke_json("convert", CASE, tmp_path / "a", "--to", "onnx", code=1)
    assert (facts["proof"]["exact"], facts["engine"]["status"]) == (True, status)
    shown = invoke("convert", CASE, tmp_path / "b", "--to", "onnx")
    assert shown.exit_code == 1
    assert shown.stderr.startswith("Warning: ")
    assert says in shown.stderr
    assert "proven: identical" in shown.stdout
    assert (tmp_path / "b" / "model.onnx").is_file()


def test_a_written_file_whose_engine_is_not_here(tmp_path):
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    shown = invoke("convert", CASE, tmp_path / "a", "--to", "hf-packed", "--python", python)
    assert shown.exit_code == 0
    sentence = " ".join(shown.stdout.split()).partition("not run in transformers: ")[2]
    assert sentence.startswith("transformers, torch, accelerate not installed in ")
    assert "pip install" in sentence
    shown = invoke("convert", CASE, tmp_path / "b.gguf", "--to", "gguf-i2_s")
    assert "not run in bitnet.cpp, which has no Python package" in shown.stdout
    assert invoke_json("convert", CASE, tmp_path / "c.bitnet.safetensors", "--to", "native")["engine"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "source", "target", "split_size"),
    [
        pytest.param(engine, *case, marks=needs(engine))
        for engine, *case in [
            (ENGINES["transformers"], CASE, "hf-packed", None),
            (ENGINES["transformers"], CASE, "hf-bf16", 500_000),
            (ENGINES["transformers"], CASE, "hf-online", None),
            (ENGINES["transformers"], DATA / "families" / "qwen3-groups128", "hf-unpacked", None),
            (ENGINES["transformers"], GOLDEN / "rope-dynamic", "hf-packed", None),
            (ENGINES["transformers"], DATA / "families" / "smollm3", "hf-bf16", None),
            (MLX_LM, DATA / "families" / "qwen3-groups128", "mlx-2bit", None),
            (ENGINES["llama_cpp"], DATA / "families" / "qwen3-groups128", "gguf-q2_0", None),
            (ENGINES["llama_cpp"], DATA / "families" / "mixtral-groups128", "gguf-q8_0", None),
            (ENGINES["llama_cpp"], DATA / "families" / "qwen3_5-groups128-hybrid", "gguf-q2_0", None),
            (ENGINES["llama_cpp"], DATA / "families" / "granite", "gguf-q8_0", None),
            (ENGINES["llama_cpp"], DATA / "families" / "granite", "gguf-f16", None),
            (ENGINES["llama_cpp"], GOLDEN / "llama-dense", "gguf-f32", 500_000),
        ]
    ],
)
def test_written_files_run_by_plain_loaders(engine, source, target, split_size, tmp_path):
    path = tmp_path / ("model.gguf" if target.startswith("gguf-") and split_size is None else "model")
    convert(source, path, target, split_size=split_size)
    result = run_written(path, target, python=PYTHON)
    assert result.status == "agrees", result.sentence
    assert result.sentence.startswith(f"run in {result.name}"), result.sentence


# -- what is missing or breaks -----------------------------------------------------------------------------------------


def test_a_missing_engine_is_named_with_its_command(tmp_path):
    lacking = ExternalEngine("transformers", ("no_such_package_at_all",), "no-such-package")
    assert "no_such_package_at_all not installed: pip install no-such-package" in lacking.missing()
    nothing = tmp_path / "python"
    (crossing,) = cross_engine("onnxruntime", CASE, [1, 5], python=str(nothing))
    assert crossing.agrees is None
    assert "does not run as a Python interpreter" in crossing.verdict
    command = ["crossval", "llama-cpp", str(CASE), "--tokens", "1,5", "--python", str(nothing)]
    assert CliRunner().invoke(cli, command).exit_code == 4
    assert CliRunner().invoke(cli, [*command, "--require"]).exit_code == 1


def test_an_unknown_engine_or_variant():
    with pytest.raises(ConfigError, match="llama_cpp"):
        cross_engine("torchscript", CASE, [1])
    (crossing,) = cross_engine("onnxruntime", CASE, [1], only=["onnxruntime cuda"])
    assert crossing.unavailable == "no variant has this name"


@pytest.mark.thorough
@needs_onnx
def test_an_engine_that_breaks_is_no_agreement(tmp_path):
    """The first job's file is no model, the second's is: the engine's words for the one, a trace of the other."""
    from bitnet_ref.crossval.engines.onnxruntime import _prepare

    (tmp_path / "bad.onnx").write_bytes(b"not a model")
    _, job = _prepare(CASE, tmp_path)
    jobs = [{**job, "tokens": [1, 5], "out": str(tmp_path / name)} for name in ("a", "b")]
    jobs[0]["model"] = str(tmp_path / "bad.onnx")
    bad, good = ENGINES["onnxruntime"].record(jobs)
    assert "bad.onnx" in bad.failed
    assert good == Outcome()
    with Trace(tmp_path / "b") as trace:
        assert trace.token_ids == [1, 5]


def test_an_engine_that_dies_has_last_words(tmp_path):
    """Not every job was done: those that are left have the reason."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport sys\nprint('{{\"failed\": null}}')\nsys.exit('out of luck')\n")
    script.chmod(0o755)
    assert ENGINES["onnxruntime"].record([{}, {}], str(script)) == [
        Outcome(),
        Outcome("onnxruntime ended with status 1: out of luck"),
    ]


# -- llama.cpp's rule --------------------------------------------------------------------------------------------------


def test_the_block_rule_is_ggml_s_own(tmp_path):
    """Q8_K, from its source: iscale = -127 / the value of largest magnitude; min(127, round(iscale * x))."""
    m = model("storyteller")
    backend = block_rule(m)
    x = rng(3).standard_normal((3, 768)).astype(np.float32)
    x[1, :256] = 0
    x_q, scale = backend.quantize_activations(x)
    for row, ours, scales in zip(x, x_q, scale, strict=True):
        for block in range(3):
            values = row[256 * block : 256 * (block + 1)]
            largest = values[np.abs(values).argmax()]
            iscale = np.float32(0) if largest == 0 else np.float32(-127) / largest
            np.testing.assert_array_equal(
                ours[256 * block : 256 * (block + 1)], np.minimum(127, np.rint(iscale * values))
            )
            assert scales[block] == iscale


def test_a_run_by_the_block_rule_is_judged_by_it():
    """By the rule it agrees op by op, and not one op fewer; by the contract it does not."""
    m = model(CASE)
    backend, tokens = block_rule(m), tokens_of(CASE.name)
    run = m.on(backend).run_with_cache(tokens)[1]
    shown = {name: array for name, array in run.items() if not name.endswith(("int8", "x_scale", "int32"))}
    seen = Run(shown, tokens)
    assert judge_trace(m, seen, backend=backend).agrees
    by_contract = judge_trace(m, seen)
    assert by_contract.first_divergence.name == "blocks.0.mlp.down_proj.hook_out"  # the first that is wider than 256
    # an engine that follows the rule but gets one linear wrong
    seen["blocks.1.attn.v_proj.hook_out"] = seen["blocks.1.attn.v_proj.hook_out"] * np.float32(1.01)
    found = judge_trace(m, seen, backend=backend)
    assert found.first_divergence.name == "blocks.1.attn.v_proj.hook_out"


def test_tokens_before_a_flip_are_those_that_are_compared():
    m = model(CASE)
    setting = Setting.of(m, [1, 5, 9, 17])
    run, backend = setting.run(), Backend("float32", threads=1)

    candidate = Run(run, setting.tokens)
    assert _count_unflipped(run, candidate, backend, m) == 4
    x = run["blocks.1.ln2.hook_normalized"].copy()
    x[2, 0] *= np.float32(1.5)
    candidate["blocks.1.ln2.hook_normalized"] = x
    assert _count_unflipped(run, candidate, backend, m) == 2
    cut = first_tokens(run, 2)
    assert cut["hook_embed"].shape[0] == 2
    assert cut["blocks.0.attn.hook_pattern"].shape[1:] == (2, 2)


# -- the engines, where an interpreter has them ------------------------------------------------------------------------


@pytest.mark.slow
@needs(ENGINES["transformers"])
def test_transformers():
    cases = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
    subjects = [("storyteller", None), *((GOLDEN / case, tokens_of(case)) for case in cases)]
    for subject, tokens in subjects:
        crossings = cross_engine("transformers", subject, tokens, python=PYTHON)
        by_name = {crossing.opponent: crossing for crossing in crossings}
        single = by_name["transformers float32"]
        assert single.agrees, f"{subject}: {single.verdict}"
        half = by_name["transformers bfloat16"]
        assert half.agrees, f"{subject}: {half.verdict}"
        assert "bfloat16 cannot hold the integers" in half.verdict
        assert half.comparisons[-1].logits.kl_max > 100 * single.comparisons[-1].logits.kl_max
    packed = cross_engine("transformers", GOLDEN / "llama-packed-bitlinear", [1, 5, 9], python=PYTHON)
    assert packed[0].comparisons[-1].accumulators[1] == 0
    assert packed[1].comparisons[-1].accumulators[1] > 0  # bfloat16


@pytest.mark.slow
@needs(ENGINES["transformers"])
def test_an_unmodified_oracle_agrees_for_every_family():
    families = sorted(path.parent.name for path in (DATA / "families").glob("*/model.safetensors"))
    settings = {"python": PYTHON, "long": [2 + i % 60 for i in range(200)]}
    results = [cross_engine("transformers", DATA / "families" / family, **settings) for family in families]
    for family, found in zip(families, results, strict=True):
        agreeing = [crossing for crossing in found if crossing.unavailable is None]
        assert all(crossing.agrees for crossing in agreeing), [each.verdict for each in agreeing]
        assert family == "maple" or agreeing
    assert "no model type 'maple'" in results[families.index("maple")][0].unavailable
    assert "master weights" in results[families.index("embedding-qwen3")][0].unavailable
    hybrid = results[families.index("qwen3_5-groups128-hybrid")][0].comparisons[-1]
    compared = {op.name for op in hybrid.ops}
    assert {f"blocks.0.attn.{name}_proj.hook_out" for name in "qkvzabo"} <= compared  # a DeltaNet
    assert any(name.endswith("attn.hook_gated_z") for name in compared)


@pytest.mark.slow
@needs(ENGINES["transformers"])
def test_every_hook_of_transformers_is_mapped(tmp_path):
    """What a trace of it holds: every module's result, and what is read before it."""
    job = {"model": str(CASE), "tokens": [1, 5, 9], "dtype": "float32", "out": str(tmp_path / "t")}
    assert ENGINES["transformers"].record([job], PYTHON) == [Outcome()]
    block = ["hook_resid_pre", "hook_resid_mid", "hook_resid_post", "ln1.hook_normalized", "ln2.hook_normalized"]
    block += [f"attn.{name}_proj.hook_out" for name in "qkvo"] + ["attn.hook_z", "attn.hook_pattern"]
    block += [f"mlp.{name}_proj.hook_out" for name in ("gate", "up", "down")] + ["mlp.hook_post"]
    block += ["attn.sub_norm.hook_normalized", "mlp.sub_norm.hook_normalized"]
    expected = {"hook_embed", "ln_final.hook_normalized", "lm_head.hook_out"}
    expected |= {f"blocks.{i}.{name}" for i in range(2) for name in block}
    with Trace(tmp_path / "t") as trace:
        assert set(trace) == expected
        _, seen = model(CASE).run_with_cache([1, 5, 9])
        for name in expected:
            np.testing.assert_allclose(
                trace[name].reshape(seen[name].shape), seen[name], rtol=0, atol=2e-4, err_msg=name
            )


@pytest.mark.slow
@needs(ENGINES["llama_cpp"])
@pytest.mark.parametrize("case", ["storyteller", "bitnet-packed-offline", "llama-packed-bitlinear", "llama-dense"])
def test_llama_cpp_is_explained(case):
    path = case if case == "storyteller" else GOLDEN / case
    for crossing in cross_engine("llama_cpp", path, None, python=PYTHON):
        assert crossing.agrees, crossing.verdict
        by_rule = crossing.comparisons[-1].logits.kl_max
        assert by_rule < 1e-9
        if case == "llama-dense":
            assert crossing.rule is None
        else:
            assert not crossing.contract.agrees
            assert crossing.contract.logits.kl_max > 1e4 * by_rule


@pytest.mark.thorough
@needs_onnx
def test_onnxruntime_agrees_over_the_whole_context():
    (crossing,) = cross_engine("onnxruntime", CASE, [1, 5, 9], long=long_tokens(model(CASE).config))
    assert crossing.agrees, crossing.verdict
    (*_, free) = crossing.long
    assert free.tokens == 256
    assert {op.kind for op in free.ops} >= {"residual", "activation int8", "logits"}
    assert not any(op.kind in ("gate", "norm") for op in free.ops)
