"""crossval/README.md: its examples compile and run, and what they write is a trace. The scripts beside it run too."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import GOLDEN, model

import bitnet_ref
from bitnet_ref.cli import cli
from bitnet_ref.crossval import cross_trace
from bitnet_ref.crossval.engines.outside import ENGINES
from bitnet_ref.crossval.names import op_order, weight_names
from bitnet_ref.crossval.trace import Trace, record_to_file
from bitnet_ref.formats.convert import convert

FOLDER = Path(__file__).parents[2] / "crossval"
LLAMA_CPP = FOLDER / "record_llama_cpp.cpp"
RECORDERS = Path(bitnet_ref.__file__).parent / "crossval" / "engines" / "recorders"
PYTHON = os.environ.get("BITNET_REF_ENGINES_PYTHON") or None
WHY = "set BITNET_REF_ENGINES_PYTHON to an interpreter that has it"
README = (FOLDER / "README.md").read_text()


def example(language, words):
    """The page's piece of code in that language that has these words."""
    (code,) = [c for c in re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL) if words in c]
    return code


def test_the_page_begins_with_a_mistake_that_is_found(tmp_path, monkeypatch):
    """Its commands and its Python, as they stand there, print what the page shows."""
    monkeypatch.chdir(tmp_path)
    section = README.partition("## See it find a mistake")[2].partition("\n## ")[0]
    blocks = re.findall(r"```(\w+)\n(.*?)```", section, flags=re.DOTALL)
    assert [language for language, _ in blocks] == ["console", "python", "console"]
    for language, text in blocks:
        if language == "python":
            exec(compile(text, "README.md", "exec"), {})
            continue
        command, _, shown = text.partition("\n")
        result = CliRunner().invoke(cli, command.removeprefix("$ bitnet-ref ").split(), env={"COLUMNS": "100"})
        printed = " ".join(result.stdout.split())
        for part in shown.split("...\n"):
            assert " ".join(part.split()) in printed


def test_the_exit_codes_stand_in_the_guide_alone():
    guide = (FOLDER.parent / "docs" / "crossval.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| exit code .*?\n\n", guide + README, flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"^\| (\d) ", table, flags=re.MULTILINE) == ["0", "1", "3", "4"]
    assert "](../docs/crossval.md#" in README.partition("\nExit code 0 ")[2].partition("\n")[0]


def test_the_numpy_example_writes_a_trace(tmp_path, monkeypatch):
    m = model("storyteller")
    monkeypatch.chdir(tmp_path)
    exec(compile(example("python", "hook_embed"), "README.md", "exec"), {})
    crossing = cross_trace(m, tmp_path / "my_run.safetensors")
    assert crossing.opponent == "my port 0.1"
    assert crossing.agrees, crossing.verdict


def test_which_tokens_to_run():
    values = {}
    exec(compile(example("python", "default_tokens"), "README.md", "exec"), values)
    assert 16 <= len(values["tokens"]) <= 32


def weights_table():
    """The page's table, from the package's own tables of names."""
    lines = ["| Hugging Face | GGUF | trace |", "|---|---|---|"]
    for hf, gguf, ours in weight_names():
        theirs = " or ".join(f"`{name}.weight`" for name in hf) or "Gemma: see above"
        lines.append(f"| {theirs} | `{gguf}.weight` | `{ours}` |")
    return "\n".join(lines)


def test_the_map_of_weights_is_the_packages_own():
    assert f"<!-- weights -->\n{weights_table()}\n" in README


def compile_c(folder, text, *flags):
    (folder / "main.c").write_text(text)
    flags = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-O1", f"-I{FOLDER}", *flags]
    subprocess.run(["cc", *flags, "main.c", "-o", "main"], cwd=folder, check=True)
    return folder / "main"


needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc) here")


@needs_cc
def test_the_c_example_writes_a_trace(tmp_path):
    program, path = compile_c(tmp_path, example("c", "int main")), tmp_path / "t.safetensors"
    subprocess.run([program, path], check=True)
    with Trace(path) as trace:
        assert trace.token_ids == [1, 17, 5]
        assert trace.engine == "my C port 0.1"
        assert len(trace) == 10
        assert trace["blocks.0.attn.q_proj.hook_x_int8"].dtype == np.int8
        assert trace["blocks.0.attn.hook_pattern"].shape == (4, 3, 3)
        np.testing.assert_array_equal(trace["hook_embed"], np.zeros((3, 256), dtype=np.float32))
    crossing = cross_trace(model("storyteller"), path, causes=False)
    assert crossing.gaps[0].startswith("306 tensors not recorded")
    assert crossing.comparisons[-1].first_divergence.name == "hook_embed"
    assert subprocess.run([program, tmp_path / "no" / "such"], check=False).returncode == 1


COPY = """
#include "trace.h"

static char data[1 << 24];

int main(int argc, char **argv) { /* copies the tensors that stdin describes into a trace: name, dtype, axes, bytes */
    int tokens[] = {1, 5, 9};
    struct trace trace;
    char name[128], dtype[8];
    int depth, rows, columns, bytes;
    if (argc != 2) return 2;
    trace_begin(&trace, argv[1], "a copy in C", tokens, 3);
    while (scanf("%127s %7s %d %d %d %d%*c", name, dtype, &depth, &rows, &columns, &bytes) == 6) {
        if (fread(data, 1, bytes, stdin) != (size_t)bytes) return 3;
        trace_add(&trace, name, dtype, data, depth, rows, columns);
    }
    return trace_end(&trace) == 0 ? 0 : 1;
}
"""


@needs_cc
def test_a_whole_run_written_in_c_agrees(tmp_path):
    """Every tensor of a run, of every dtype and rank, through trace.h: nothing is missing and nothing differs."""
    m, given = model(GOLDEN / "bitnet-packed-offline"), b""
    for name, array in m.run_with_cache([1, 5, 9])[1].items():
        kind = {"float32": "F32", "int8": "I8", "int32": "I32"}[array.dtype.name]
        depth = array.shape[0] if array.ndim == 3 else 0
        given += (
            f"{name} {kind} {depth} {array.shape[-2]} {array.shape[-1]} {array.nbytes}\n".encode() + array.tobytes()
        )
    subprocess.run([compile_c(tmp_path, COPY), tmp_path / "t"], input=given, check=True)
    crossing = cross_trace(m, tmp_path / "t", strict=True)
    assert crossing.agrees, crossing.verdict
    assert all(op.equal for op in crossing.comparisons[-1].ops)


# -- recorders of other engines ----------------------------------------------------------------------------------------


def test_both_recorders_of_llama_cpp_have_the_same_names():
    python = (RECORDERS / "record_llama_cpp.py").read_text()
    pairs = [
        set(re.findall(r'"([\w ]+)"[:,] "((?:hook_|\w+\.)[\w.]+)"', text)) for text in (python, LLAMA_CPP.read_text())
    ]
    assert pairs[0] == pairs[1]
    assert len(pairs[0]) == 33


BUILT = os.environ.get("BITNET_REF_LLAMA_CPP")  # a folder with llama.cpp's headers, and one with its libraries


@pytest.mark.skipif(BUILT is None, reason="set BITNET_REF_LLAMA_CPP to SOURCES:LIBRARIES of a built llama.cpp")
def test_the_recorder_of_llama_cpp(tmp_path):
    sources, libraries = BUILT.split(":")
    program, file = tmp_path / "record", tmp_path / "model.gguf"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-O1", f"-I{FOLDER}", f"-I{sources}/include"]
    flags += [f"-I{sources}/ggml/include", f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-Wl,--allow-shlib-undefined"]
    subprocess.run(["c++", *flags, LLAMA_CPP, "-o", program, "-lllama", "-lggml", "-lggml-base"], check=True)
    convert(GOLDEN / "llama-dense", file, "gguf-f32", verify=False)
    subprocess.run([program, file, tmp_path / "t", "1,5,9,14,3"], check=True, capture_output=True)
    crossing = cross_trace(model(GOLDEN / "llama-dense"), tmp_path / "t")
    assert crossing.agrees, crossing.verdict
    assert len(crossing.comparisons[-1].ops) == 35
    assert subprocess.run([program, file, tmp_path / "t", "1,x"], check=False, capture_output=True).returncode == 2


@pytest.mark.skipif(ENGINES["transformers"].missing(PYTHON) is not None, reason=f"needs transformers; {WHY}")
def test_the_hooks_record_any_model(tmp_path):
    """By Hugging Face's names, and by names that the caller gives."""
    code = f"""
import sys, torch; sys.path.insert(0, {str(RECORDERS)!r})
from torch_hooks import record
from transformers import AutoModelForCausalLM
options = dict(dtype=torch.float32, attn_implementation="eager")
model = AutoModelForCausalLM.from_pretrained({str(GOLDEN / "llama-dense")!r}, **options)
record(model.eval(), [1, 5, 9, 14, 3], {str(tmp_path / "t")!r}, engine="torch", output_attentions=True)
for layer in model.model.layers:
    attn = layer.self_attn
    attn.values = attn.v_proj; del attn.v_proj; attn.v_proj = attn.values
names = {{"model.layers.{{}}.self_attn.values": "blocks.{{}}.attn.hook_v"}}
record(model, [1, 5, 9, 14, 3], {str(tmp_path / "u")!r}, names)
"""
    done = subprocess.run([PYTHON or sys.executable, "-c", code], capture_output=True, text=True, check=False, env={})
    assert done.returncode == 0, done.stderr
    counts = []
    for path in ("t", "u"):
        crossing = cross_trace(model(GOLDEN / "llama-dense"), tmp_path / path)
        assert crossing.agrees, crossing.verdict
        assert not crossing.comparisons[-1].unknown
        counts.append(len(crossing.comparisons[-1].ops))
    assert counts == [33, 33]


def test_the_hooks_record_gemma(tmp_path):
    """Its scaled embedding, norms after each half, norms of heads that come first, and windows."""
    pytest.importorskip("torch")  # not transformers: a script of crossval/ has that name
    sizes = "hidden_size=32, intermediate_size=48, head_dim=8, num_attention_heads=4, num_key_value_heads=2"
    code = f"""
import sys, torch; sys.path.insert(0, {str(RECORDERS)!r})
from torch_hooks import record
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
torch.manual_seed(0)
layers = ["sliding_attention", "full_attention"]
config = Gemma3TextConfig({sizes}, vocab_size=96, num_hidden_layers=2, layer_types=layers, sliding_window=4)
config.update(dict(max_position_embeddings=64, query_pre_attn_scalar=32))
model = Gemma3ForCausalLM(config).eval()
for weight in model.parameters():
    torch.nn.init.normal_(weight, std=0.2)
model.save_pretrained({str(tmp_path / "m")!r})
record(model, [2, 5, 9, 14, 3, 77, 12, 8], {str(tmp_path / "t")!r})
record(model, [2, 5, 9, 14], {str(tmp_path / "four")!r})  # as many as heads
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if "No module named 'transformers'" in done.stderr:
        pytest.skip("transformers is not installed")
    assert done.returncode == 0, done.stderr
    m = bitnet_ref.load(tmp_path / "m", backend="numpy")
    crossing = cross_trace(m, tmp_path / "t")
    assert crossing.agrees, crossing.verdict
    assert cross_trace(m, tmp_path / "four").agrees
    compared = {op.name for op in crossing.comparisons[-1].ops}
    block = {f"blocks.1.{name}.hook_normalized" for name in ("ln1", "ln2", "ln1_post", "ln2_post", "attn.q_norm")}
    assert block | {"hook_embed_scaled", "blocks.1.hook_resid_mid"} <= compared
    assert not crossing.comparisons[-1].unknown


def test_the_hooks_know_the_weights_of_the_package():
    """Every module of the map of weights, under the same trace name."""
    text = (RECORDERS / "torch_hooks.py").read_text()
    known = dict(re.findall(r'"([\w.]+)": "([\w.]+)"', text[text.index("OUTPUTS =") : text.index("# ...")]))
    for hf, _, ours in weight_names():
        for name in hf:
            if name.startswith("model.layers.0."):
                assert f"blocks.0.{known[name.removeprefix('model.layers.0.')]}" == ours


def test_the_names_of_the_page_are_the_recorders():
    named = set(re.findall(r"(hook_\w+)", README))
    assert named == {name.rpartition(".")[2] for name in op_order(model("storyteller").config)}


def run(script, *arguments):
    done = subprocess.run(
        [sys.executable, FOLDER / script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "BITNET_REF_CUDA"},  # not emulated: slow
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.thorough
def test_the_scripts(tmp_path):
    case = GOLDEN / "bitnet-packed-offline"
    code, said = run("backends.py", case, "--tokens", "1,5,9")
    assert code in (0, 4), said
    assert "cupy" in said
    record_to_file(model(case), [1, 5, 9], tmp_path / "t")
    assert run("trace_file.py", case, tmp_path / "t")[0] == 0
    code, said = run("trace_file.py", case, case / "model.safetensors")
    assert code == 3
    assert "not a trace" in said
