"""What a user reads of a trace: names that nobody knows, other tokens, whole tables, a search that ends, `watch`."""

import inspect
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cli_runs import process
from click.testing import CliRunner
from helpers import GOLDEN, model
from rich.console import Console

import bitnet_ref
from bitnet_ref.cli import cli
from bitnet_ref.cli.crossval_command import draw
from bitnet_ref.cli.shell import make_table, style_text
from bitnet_ref.crossval import Crossing, cross_trace
from bitnet_ref.crossval.compare import compare
from bitnet_ref.crossval.explain import wording
from bitnet_ref.crossval.explain.variants import Setting
from bitnet_ref.crossval.names import LOGITS, nearest_name, op_order
from bitnet_ref.crossval.opponents import explain_trace
from bitnet_ref.crossval.token_ids import used_ids
from bitnet_ref.crossval.trace import write_trace

CASE = str(GOLDEN / "bitnet-packed-offline")
IDS = [1, 5, 9, 14, 3]
TRUNCATED = "\N{HORIZONTAL ELLIPSIS}"


@pytest.fixture(scope="module")
def seen():
    return model(CASE).run_with_cache(IDS)[1]


def crossval(*args):
    return CliRunner().invoke(cli, ["crossval", *map(str, args)])


def draw_at(width, *drawn):
    out = Console(width=width, highlight=False, emoji=False, markup=False)
    with out.capture() as capture:
        for each in drawn:
            out.print(each) if not callable(each) else each(out)
    return capture.get()


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("blocks.1.mlp.hook_pots", "blocks.1.mlp.hook_post"),
        ("blocks.1.hook_post", "blocks.1.mlp.hook_post"),
        ("layers.1.hook_resid_post", "blocks.1.hook_resid_post"),
        ("blocks.0.attn.q_proj.hook_acc", "blocks.0.attn.q_proj.hook_acc_int32"),
        ("model.layers.1.self_attn.o_proj", "blocks.1.attn.o_proj.hook_out"),
        ("model.layers.1.post_attention_layernorm.weight", "blocks.1.ln2.hook_normalized"),
        ("blk.0.ffn_down.weight", "blocks.0.mlp.down_proj.hook_out"),
        ("output_norm", "ln_final.hook_normalized"),
        ("model.embed_tokens", "hook_embed"),
        ("blocks.77.hook_resid_post", None),
        ("xyz", None),
        ("blocks.0." + "x" * 1_000_000, None),
    ],
)
def test_the_nearest_name(name, meant):
    assert nearest_name(name, op_order(model(CASE).config)) == meant


def test_names_that_no_run_has_are_reported(tmp_path, seen):
    tensors = dict(seen)
    tensors["blocks.1.mlp.hook_pots"] = tensors.pop("blocks.1.mlp.hook_post")
    tensors["blocks.2.hook_resid_post"] = tensors.pop("blocks.0.hook_resid_post")  # layers counted from 1
    write_trace(tmp_path / "t", tensors, IDS, engine="theirs")
    result = crossval("trace", CASE, tmp_path / "t")
    text = " ".join(result.stdout.split())
    assert result.exit_code == 0
    assert f"{len(seen) - 2} of {len(seen)} tensors compared" in text
    assert "blocks.1.mlp.hook_pots (did you mean blocks.1.mlp.hook_post?)" in text
    assert "blocks.2.hook_resid_post (the layers are blocks.0 to blocks.1)" in text
    result = crossval("trace", CASE, tmp_path / "t", "--strict", "--json")
    assert result.exit_code == 1
    (found,) = json.loads(result.stdout)["results"]
    assert found["verdict"].startswith("INCOMPLETE")
    assert found["comparisons"][-1]["unknown"]["blocks.1.mlp.hook_pots"] == "blocks.1.mlp.hook_post"


def test_strict_holds_for_a_whole_trace(tmp_path, seen):
    write_trace(tmp_path / "all", seen, IDS, engine="theirs")
    assert crossval("trace", CASE, tmp_path / "all", "--strict").exit_code == 0
    write_trace(tmp_path / "few", {LOGITS: seen[LOGITS]}, IDS, engine="theirs")
    assert crossval("trace", CASE, tmp_path / "few").exit_code == 0
    assert crossval("trace", CASE, tmp_path / "few", "--strict").exit_code == 1


def test_a_tensor_that_was_not_recorded_is_not_the_first_wrong_one(seen):
    """What its input implies of an int8 tensor is told for rounding flips alone."""
    candidate = {name: array for name, array in seen.items() if "hook_x_int8" not in name}
    name = "blocks.0.ln1.hook_normalized"
    candidate[name] = candidate[name] * np.linspace(0.5, 1.5, candidate[name].shape[1], dtype=np.float32)
    found = compare(seen, candidate, model(CASE).config, IDS)
    assert found.first_divergence.name == name
    assert not [op for op in found.ops if op.name in found.missing]


# -- tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("ran", [[1, 5, 30, 14, 3], [1, *IDS], IDS[1:], [5, 9, 14, 3, 2]])
def test_the_embedding_tells_the_tokens(tmp_path, ran):
    m = model(CASE)
    tensors = m.run_with_cache(ran)[1]
    write_trace(tmp_path / "t", tensors, IDS, engine="theirs")
    crossing = cross_trace(m, tmp_path / "t")
    assert not crossing.agrees
    assert f"expected {IDS}, used {ran}" in crossing.verdict
    assert "On these: AGREES" in crossing.verdict
    if ran == [1, *IDS]:
        assert [cause.name for cause in crossing.causes if cause.confirmed] == ["bos_twice"]
    tensors["blocks.1.hook_resid_post"] *= np.float32(1.1)  # beside it, an error: it is named too
    write_trace(tmp_path / "t", tensors, IDS, engine="theirs")
    verdict = cross_trace(m, tmp_path / "t", causes=False).verdict
    assert "On these: DIFFERS, op by op, first at blocks.1.hook_resid_post" in verdict


def test_rows_of_no_token(tmp_path, seen):
    m, right = model(CASE), seen["hook_embed"]
    assert used_ids(m, right, IDS) is None
    assert used_ids(m, right.astype(np.float16), IDS) is None
    assert used_ids(m, right * np.float32(8), IDS) == [None] * 5
    mixed = right.copy()
    mixed[1], mixed[2] = m.run_with_cache([30])[1]["hook_embed"][0], 0.123
    assert used_ids(m, mixed, IDS) == [1, 30, None, 14, 3]
    write_trace(tmp_path / "t", {**seen, "hook_embed": mixed}, IDS, engine="theirs")
    assert "expected [1, 5, 9, 14, 3], used [1, 30, ?, 14, 3]" in cross_trace(m, tmp_path / "t").verdict
    write_trace(tmp_path / "t", {**seen, "hook_embed": right * np.float32(8)}, IDS, engine="theirs")
    crossing = cross_trace(m, tmp_path / "t", causes=False)
    assert crossing.other_tokens is None
    assert crossing.verdict.startswith("DIFFERS, op by op, first at hook_embed")


# -- tables ------------------------------------------------------------------------------------------------------------


def words_of(text):
    return set(text.split())


@pytest.mark.parametrize("width", [60, 80, 120])
def test_tables_are_whole(width):
    """No number and no name is cut off or broken, at any width."""
    columns = ("tensor", "|status", ">|differ", ">|max abs", ">|rel. L2", ">|cosine", ">|scale")
    rows = [
        ("blocks.29.attn.sub_norm.hook_normalized", style_text("rounding flip"), "33,554,432", "8.00e+02", "1.7e-05"),
        ("blocks.0.attn.q_proj.rms_norm.hook_normalized", style_text("ok"), "0", "0.00e+00", "0.0e+00"),
    ]
    rows = [(*row, "-0.99999", "1.00000") for row in rows]
    text = draw_at(width, make_table(columns, rows, title="A title"))
    assert words_of(" ".join(str(cell) for row in rows for cell in row)) <= words_of(text)
    assert TRUNCATED not in text
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_crossing_is_whole(width, seen):
    deep = replace(model(CASE).config, num_hidden_layers=2)
    wrong = {**seen, "blocks.1.attn.sub_norm.hook_normalized": seen["blocks.1.attn.sub_norm.hook_normalized"] * 1.5}
    comparison = compare(seen, wrong, deep, IDS)
    engine = "llama.cpp (llama-cpp-python 0.3.36, built by hand for this machine)"
    crossing = Crossing(engine, [comparison])
    text = draw_at(width, lambda out: draw([crossing], [], out))
    bad = comparison.first_divergence
    assert TRUNCATED not in text
    assert {bad.name, f"{bad.max_abs:.2e}", f"{bad.relative_l2:.1e}", "cosine"} <= words_of(text)
    assert words_of(crossing.verdict) <= words_of(text)


def test_html_breaks_no_number(seen):
    """A browser may break a line after any hyphen outside of "nowrap"."""
    wrong = {**seen, LOGITS: seen[LOGITS] + np.float32(1e-3)}
    crossing = Crossing("theirs", [compare(seen, wrong, model(CASE).config, IDS)])
    assert re.search(r"\de-\d", crossing.verdict)
    free = re.sub(r"<(span|table) style='white-space:nowrap'>.*?</\1>|<svg.*?</svg>", "", crossing._repr_html_())
    assert not re.search(r"\de-\d", free)


# -- the search for causes ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unexplained(tmp_path_factory):
    """A trace whose mistake is on no list, so that the search is longer than a bar waits."""
    m = model("storyteller")
    ids = m.tokenizer.encode("Once upon a time, the little rabbit " * 8)
    tensors = m.run_with_cache(ids)[1]
    for layer in range(6):
        z = tensors[f"blocks.{layer}.attn.hook_z"]
        z[:, 1] = np.cos(z[:, 1]) * np.float32(0.7) + z[:, 2] ** 2
    del tensors[LOGITS]  # which would show that the engine did not use these numbers
    path = tmp_path_factory.mktemp("trace") / "t.safetensors"
    write_trace(path, tensors, ids, engine="theirs")
    return path


def in_terminal(args, interrupt_at=None, columns=80):
    """(what is shown on a terminal, exit code)   interrupt_at: Ctrl-C when this text has been shown."""
    parent, child = pty.openpty()
    settings = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "bitnet_ref.cli", "crossval", *map(str, args)]
    default = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    done = subprocess.Popen(command, stdout=child, stderr=child, env=settings, preexec_fn=default)
    os.close(child)
    shown, end = "", time.monotonic() + 60
    while time.monotonic() < end:
        if select.select([parent], [], [], 0.1)[0]:
            try:
                data = os.read(parent, 1 << 16)
            except OSError:  # Linux says so at the end
                break
            if not data:
                break
            shown += data.decode()
        if interrupt_at is not None and interrupt_at in shown:
            done.send_signal(signal.SIGINT)
            interrupt_at = None
    os.close(parent)
    return shown, done.wait(10)


@pytest.mark.thorough
def test_the_verdict_comes_first_and_ctrl_c_keeps_what_is_known(unexplained):
    shown, code = in_terminal(["trace", "storyteller", unexplained], interrupt_at="testing ")
    assert code == 1
    verdict, progress, end = shown.index("DIFFERS"), shown.index("testing "), shown.index("interrupted")
    assert verdict < progress < end
    assert "Traceback" not in shown


@pytest.mark.thorough
def test_the_budget_ends_the_search(unexplained, tmp_path):
    started = time.monotonic()
    result = crossval("trace", "storyteller", unexplained, "--budget", "0.05s", "--json", "--html", tmp_path / "page")
    assert result.exit_code == 1
    assert time.monotonic() - started < 20
    (found,) = json.loads(result.stdout)["results"]
    assert "the time is up" in found["diagnosis"][-1]
    assert "the time is up" in (tmp_path / "page").read_text()
    for bad in ("1h", "-3", "", "s"):
        assert crossval("trace", CASE, unexplained, "--budget", bad).exit_code == 2


@pytest.mark.thorough
def test_progress_is_told(unexplained):
    m, told = model("storyteller"), []
    crossing = cross_trace(m, unexplained, causes=False)
    explain_trace(crossing, m, unexplained, progress=lambda *step: told.append(step), budget_s=0.5)
    assert [step[0] for step in told] == list(range(len(told)))
    assert all(total > done and text for done, total, text in told)


def test_the_reference_has_the_lines_to_compare_with():
    for function, line in wording._functions().values():
        assert line in inspect.getsource(function), (function, line)


def test_numbers_in_equal_steps():
    assert wording.numbers_in_words([0, 2, 4, 6], 8) == "0, 2, ... 6 (one in every 2, of 8)"


@pytest.mark.parametrize(
    ("name", "shape", "axis", "indices", "words"),
    [  # a norm over 4 heads, and 2 chosen experts of each token
        ("attn.q_norm.hook_normalized", (16, 8), 0, range(1, 16, 4), "in head 1 only; heads 0, 2, 3 are right"),
        ("attn.q_norm.hook_normalized", (16, 8), 0, range(4, 8), "in token 1 only; tokens 0, 2, 3 are right"),
        ("attn.q_norm.hook_normalized", (16, 8), 0, [3, 6], "in rows 3, 6 only; the others are right"),
        ("mlp.hook_pre", (4, 2, 3), 1, [1], "in chosen expert 1 only; chosen expert 0 is right"),
    ],
)
def test_a_place_is_named_by_what_it_counts(name, shape, axis, indices, words):
    setting = Setting.of(model(CASE), [1, 2, 3, 4])
    assert wording.place_in_words(f"blocks.0.{name}", shape, False, setting, axis, indices) == words


@pytest.mark.thorough
def test_a_value_is_worked_through(tmp_path, seen):
    """Whether a cause is found or not: the present line of the reference, and the engine's own value."""
    m, name = model(CASE), "blocks.1.mlp.hook_post"
    wrong = np.cos(seen[name] * 7) + seen[name]
    write_trace(tmp_path / "t", {**seen, name: wrong}, IDS, engine="theirs")
    crossing = cross_trace(m, tmp_path / "t", causes=False)
    explain_trace(crossing, m, tmp_path / "t", budget_s=0.0)
    (text,) = crossing.examples()
    line, value, *_, last = text.splitlines()
    file, number, source = re.fullmatch(r"Compare with (\S+):(\d+), gated: (.*)", line).groups()
    assert source in (Path(bitnet_ref.__file__).parents[1] / file).read_text().splitlines()[int(number) - 1]
    index = tuple(map(int, re.fullmatch(rf"{re.escape(name)}\[(.*)\]", value)[1].split(", ")))
    assert f"the engine has {wrong[index]:.6g}" in last
    assert text.splitlines()[0] in crossval("trace", CASE, tmp_path / "t", "--budget", "0", "--json").stdout
    assert not cross_trace(m, tmp_path / "t", causes=False).examples()


def test_how_many_are_not_tested(tmp_path, seen):
    """The mistakes of a kind are counted when the search comes to it, so a search may end with none counted."""
    write_trace(tmp_path / "t", seen, IDS, engine="theirs")
    crossing = cross_trace(model(CASE), tmp_path / "t", causes=False)
    crossing.causes.stopped = "the time is up"
    for untested, words in ((7, "7"), (0, "later ones")):
        crossing.causes.untested = untested
        assert crossing.diagnosis() == [f"the search for causes ended early, the time is up: {words} are not tested"]


# -- watch -------------------------------------------------------------------------------------------------------------

ENGINE = "import shutil, sys\nshutil.copyfile(sys.argv[1] + {which!r}, sys.argv[2])\n"


@pytest.mark.thorough
def test_watch(tmp_path, seen):
    write_trace(tmp_path / "right", seen, IDS, engine="theirs")
    name = "blocks.1.mlp.hook_post"
    write_trace(tmp_path / "wrong", {**seen, name: seen[name] * np.float32(1.5)}, IDS, engine="theirs")
    engine, trace = tmp_path / "engine.py", tmp_path / "run.safetensors"
    lines = []
    options = ["--model", CASE, "--no-causes", "--json"]
    words = [sys.executable, engine, f"{tmp_path}/", trace]
    for step, (text, code) in enumerate(
        [(ENGINE.format(which="wrong"), 1), (ENGINE.format(which="right"), 0), ("raise SystemExit(9)", 3)]
    ):
        engine.write_text(text)
        if step == 0:
            child = process("crossval", "watch", *options, "--", *words, stdout=subprocess.PIPE, text=True)
        lines.append(json.loads(child.stdout.readline()))
        assert lines[-1]["code"] == code
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=20)
    assert child.returncode == 3
    assert lines[0]["first"].startswith(name)
    assert lines[0]["before"] is None
    assert (lines[1]["before"], lines[1]["first"]) == (lines[0]["first"], "nothing, it agrees")
    assert "exited with 9" in lines[2]["verdict"]


@pytest.mark.thorough
def test_watch_without_a_trace(tmp_path):
    child = process("crossval", "watch", "--model", CASE, "true", stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert "has not written a file *.safetensors here; name the trace with --trace" in child.stdout.readline()
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=20)
    assert child.returncode == 3
