"""crossval: every backend and kernel set against the reference, traces of anyone, reports and receipts."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest
from helpers import BITNET, GOLDEN, chat_folder, model, tiny_tensors, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tracing_engines import TOKENS, NoisyBackend, load_random

import bitnet_ref
from bitnet_ref.backends import Backend
from bitnet_ref.backends.cpu.backend import simd_variants
from bitnet_ref.crossval import (
    Crossing,
    cross_backends,
    cross_trace,
    default_tokens,
    make_receipt,
    opponents,
    verify_receipt,
    write_html,
)
from bitnet_ref.crossval.receipt import read_receipt, seal, write_receipt
from bitnet_ref.crossval.trace import record_to_file, trace_metadata, write_trace
from bitnet_ref.errors import DeviceError, FormatError

CASE = GOLDEN / "bitnet-packed-offline"
needs_cython = pytest.mark.skipif(bitnet_ref.available_backends()["cython"] is not None, reason="no extension here")


def assert_agrees(crossings):
    for crossing in crossings:
        assert crossing.agrees is not False, f"{crossing.opponent}: {crossing.verdict}"


def check_random_models(folder, seeds, only=None):
    opponents_seen = 0
    for seed in seeds:
        crossings = cross_backends(load_random(folder, seed), TOKENS, only)
        assert_agrees(crossings)
        opponents_seen += sum(bool(crossing.agrees) for crossing in crossings)
    return opponents_seen


@pytest.mark.thorough
def test_no_false_alarm_on_random_models(tmp_path):
    variants = [f"cython {name}" for name, lacks in simd_variants().items() if lacks is None]
    assert check_random_models(tmp_path, range(2), variants) == 2 * len(variants)


@pytest.mark.slow
def test_no_false_alarm_on_many_random_models(tmp_path):
    check_random_models(tmp_path, range(1000, 1200))


@pytest.mark.thorough
def test_every_backend_and_kernel_set_is_there(crossings_of_tiny):
    names = {"numpy", "cython", "cupy"} | {f"cython {name}" for name in simd_variants()}
    assert {name for name, *_ in opponents.list_backends(2)} == names
    crossings = cross_backends(model(CASE), TOKENS, sorted(names - {"cupy"}))  # it takes seconds
    crossings += [crossing for crossing in crossings_of_tiny[1] if crossing.opponent == "cupy"]
    assert {crossing.opponent for crossing in crossings} == names
    for crossing in crossings:
        modes = [] if crossing.opponent == "numpy" else ["teacher-forced", "free-running"]
        if crossing.agrees is None:
            assert crossing.verdict.startswith("not available: ")
        else:
            assert [found.mode for found in crossing.comparisons] == modes
            assert "ops, decoding" in [check.path for check in crossing.paths]
        json.dumps(crossing.to_dict(), allow_nan=False)


def test_an_opponent_of_no_such_name_is_no_agreement():
    (crossing,) = cross_backends(model(CASE), TOKENS, ["cython mmx"])
    assert crossing.agrees is None
    assert "no backend" in crossing.verdict
    assert Crossing("nothing").agrees is False


def crossed(change, monkeypatch, m=None):
    """The crossing of a backend that has that op changed, put among ours."""

    class Wrong(Backend):
        pass

    for name, op in change.items():
        setattr(Wrong, name, op)
    entry = ("wrong", lambda: Wrong("float32", 1), None)
    monkeypatch.setattr(opponents, "list_backends", lambda threads: [entry])
    (crossing,) = cross_backends(m or model(CASE), TOKENS)
    return crossing


@pytest.mark.thorough
def test_a_wrong_backend_is_named(monkeypatch, tmp_path):
    def gated(self, gate, up, activation):
        return Backend.gated(self, gate, up, "silu")

    crossing = crossed({"gated": gated}, monkeypatch)
    assert crossing.agrees is False
    assert [found.first_divergence.name for found in crossing.comparisons] == ["blocks.0.mlp.hook_post"] * 2
    assert "blocks.0.mlp.hook_post (gate, layer 0)" in crossing.verdict
    assert crossing.evidence.name == "blocks.0.mlp.hook_post"


def test_a_backend_that_breaks_has_failed(monkeypatch):
    def gated(self, gate, up, activation):
        raise DeviceError("the device is gone")

    crossing = crossed({"gated": gated}, monkeypatch)
    assert crossing.agrees is False
    assert crossing.verdict == "FAILED: DeviceError: the device is gone"


# -- traces ------------------------------------------------------------------------------------------------------------


def test_a_trace_of_another_engine(tmp_path):
    m = model(CASE)
    noisy = m.on(NoisyBackend())
    _, seen = noisy.run_with_cache(TOKENS)
    write_trace(tmp_path / "good", seen, TOKENS, engine="another")
    crossing = cross_trace(m, tmp_path / "good", causes=False)
    assert crossing.opponent == "another"
    free = crossing.comparisons[-1]
    assert free.agrees, free.verdict
    seen["blocks.1.attn.v_proj.hook_acc_int32"][3, 4] += 1
    write_trace(tmp_path / "bad", seen, TOKENS, engine="another")
    crossing = cross_trace(m, tmp_path / "bad", causes=False)
    assert crossing.agrees is False
    assert all(
        found.first_divergence.name == "blocks.1.attn.v_proj.hook_acc_int32" for found in crossing.comparisons[1:]
    )


@pytest.mark.thorough
def test_logits_alone(tmp_path):
    m = model(CASE)
    for logits in (m.logits(TOKENS), m.logits(TOKENS)[-1]):
        write_trace(tmp_path / "t", {"logits": logits}, TOKENS, engine="another")
        crossing = cross_trace(m, tmp_path / "t", causes=False)
        assert crossing.agrees, crossing.verdict
        assert [found.mode for found in crossing.comparisons] == ["free-running"]
        write_trace(tmp_path / "t", {"logits": logits + np.float32(0.01)}, TOKENS, engine="another")
        assert cross_trace(m, tmp_path / "t", causes=False).agrees is False


def test_a_trace_of_other_tokens_or_of_another_model(tmp_path):
    m = model(CASE)
    record_to_file(m, TOKENS, tmp_path / "t")
    crossing = cross_trace(model(GOLDEN / "llama-dense"), tmp_path / "t", causes=False)
    assert crossing.agrees is False
    write_trace(tmp_path / "t", {"logits": m.logits(TOKENS)}, [*TOKENS, m.config.vocab_size], engine="another")
    assert "another model" in cross_trace(m, tmp_path / "t", causes=False).verdict
    write_trace(tmp_path / "t", {"logits": m.logits(TOKENS)}, [1, *TOKENS], engine="another")
    assert cross_trace(m, tmp_path / "t", causes=False).agrees is False


def test_the_prompt_of_a_trace_may_be_a_message_in_a_chat_template(tmp_path):
    m = bitnet_ref.load(chat_folder(tmp_path), backend="numpy")
    ids = m.tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=True)
    for tokens, agrees in ((ids, True), (m.tokenizer.encode("Hello"), True), (ids[1:], False)):
        write_trace(tmp_path / "t", {"logits": m.logits(tokens)}, tokens, engine="another", prompt="Hello")
        assert cross_trace(m, tmp_path / "t", causes=False).agrees is agrees


ODD = st.sampled_from([0.0, 1.0, -1.5, 1e-30, 300.0, 3e38, 1e300, np.inf, -np.inf, np.nan])


@pytest.mark.thorough
@settings(max_examples=20)
@given(data=st.data())
def test_traces_of_any_contents_are_judged(tmp_path, data):
    """Right names with wrong shapes, dtypes and values: a verdict, never another error."""
    m = model(CASE)
    _, seen = m.run_with_cache([1, 5])
    for name in data.draw(st.lists(st.sampled_from(sorted(seen)), min_size=1, max_size=3, unique=True)):
        shape = data.draw(st.sampled_from([seen[name].shape, (2, 1), (1,), (), (2, 0), (2, 256), (4, 2, 2)]))
        dtype = data.draw(st.sampled_from([np.float32, np.float64, np.int8, np.int64, np.bool_, np.float16]))
        with np.errstate(all="ignore"):
            seen[name] = np.full(shape, data.draw(ODD)).astype(dtype)
    for name in data.draw(st.lists(st.sampled_from(sorted(seen)), max_size=60, unique=True)):
        seen.pop(name)
    if seen:
        save_file(seen, tmp_path / "t", trace_metadata([1, 5], engine="another"))
        crossing = cross_trace(m, tmp_path / "t", causes=False)
        json.dumps(crossing.to_dict(), allow_nan=False)
        write_html(tmp_path / "r.html", "t", [crossing], {})


def test_default_tokens():
    assert default_tokens(model("storyteller"), "Once") == model("storyteller").tokenizer.encode("Once")
    tokens = default_tokens(model(CASE))
    assert len(tokens) > 8
    assert len(model(CASE).logits(tokens)) == len(tokens)


# -- reports -----------------------------------------------------------------------------------------------------------


def svgs(page):
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)]


@pytest.mark.thorough
@needs_cython
def test_the_report_is_one_file_with_plots(tmp_path, monkeypatch):
    def attention(self, q, cache, batch, layer, window):
        z = Backend.attention(self, q, cache, batch, layer, window)
        return z * np.float32(1.01) if layer == 1 else z

    good = cross_backends(model(CASE), TOKENS, ["cython"])
    bad = crossed({"attention": attention}, monkeypatch)
    path = tmp_path / "report.html"
    write_html(path, "crossval: <model> & more", [*good, bad, Crossing("cupy", unavailable="<none>")], {"tokens": "9"})
    page = path.read_text()
    assert "<title>crossval: &lt;model&gt; &amp; more</title>" in page
    assert not re.search(r"<script|https?://(?!www\.w3\.org/2000/svg)|<link|@import|url\(", page)
    assert bad.verdict.replace("'", "&#x27;") in re.sub(r"</?span[^>]*>", "", page)
    assert "not available: &lt;none&gt;" in page
    pictures = svgs(page)
    labels = [picture.get("aria-label") for picture in pictures]
    assert labels.count("divergence by depth") == labels.count("errors by kind of op") == 4
    assert labels.count("logits of both sides") == 2
    assert labels.count("heat maps of both tensors") == 1
    space = "{http://www.w3.org/2000/svg}"
    depth = [picture for picture in pictures if picture.get("aria-label") == "divergence by depth"]
    found = [*good[0].comparisons, *bad.comparisons]
    assert [len(picture.findall(f"{space}circle")) for picture in depth] == [len(each.ops) for each in found]
    red = depth[-1].findall(f"{space}circle[@fill='#cf222e']")
    assert red[0].find(f"{space}title").text.startswith("blocks.1.attn.hook_z")
    heat = pictures[labels.index("heat maps of both tensors")]
    rows, columns = bad.evidence.reference.shape
    assert len(heat.findall(f"{space}rect")) == 3 * rows * columns
    for picture in pictures:  # nothing is drawn at a place that is no number
        assert "nan" not in ElementTree.tostring(picture).decode().lower().replace("<title>", "")


def test_a_report_of_tensors_that_are_not_finite(tmp_path, monkeypatch):
    def rope(self, q, k, cos, sin):
        q, k = Backend.rope(self, q, k, cos, sin)
        q[2, 1] = np.nan
        return q, k

    m = model(CASE)
    _, seen = m.run_with_cache(TOKENS)
    seen["blocks.0.attn.hook_rot_q"][2, 1] = np.nan
    seen["lm_head.hook_out"][4, 3] = np.inf
    write_trace(tmp_path / "t", seen, TOKENS, engine="another")
    crossing = cross_trace(m, tmp_path / "t", causes=False)
    assert crossing.agrees is False
    write_html(tmp_path / "r.html", "t", [crossing], {})
    assert len(svgs((tmp_path / "r.html").read_text())) == 6
    json.dumps(crossing.to_dict(), allow_nan=False)
    write_receipt(tmp_path / "receipt", make_receipt("trace", str(CASE), m, TOKENS, [crossing], tmp_path / "t"))
    assert verify_receipt(tmp_path / "receipt").holds


# -- receipts ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crossings_of_tiny(tmp_path_factory):
    m = bitnet_ref.load(write_checkpoint(tmp_path_factory.mktemp("tiny") / "m", BITNET), backend="numpy")
    return m, cross_backends(m, TOKENS, ["numpy", "cython", "cupy"])


@pytest.fixture
def receipt(tmp_path, crossings_of_tiny):
    m, crossings = crossings_of_tiny
    path = write_checkpoint(tmp_path / "m", BITNET)
    write_receipt(tmp_path / "receipt.json", make_receipt("backends", str(path), m, TOKENS, crossings))
    return tmp_path / "receipt.json"


@pytest.mark.thorough
def test_a_receipt_holds(receipt, monkeypatch):
    monkeypatch.setattr("bitnet_ref.backends.cuda.why_unavailable", lambda index=0: "there is no GPU")
    kept = read_receipt(receipt)
    assert kept["subject"]["token_ids"] == TOKENS
    assert kept["machine"]["numpy"] == np.__version__
    found = verify_receipt(receipt)
    assert found.verdict.startswith("HOLDS") == found.holds
    if bitnet_ref.available_backends()["cython"] is None:
        assert found.holds
        assert any("cython, teacher-forced: accumulators" in line for line in found.confirmed)
    assert any("cupy" in line for line in found.unchecked)


@pytest.mark.thorough
def test_a_changed_receipt_is_refused(receipt):
    text = receipt.read_text()
    receipt.write_text(text.replace('"differ": 0', '"differ": 1', 1))
    with pytest.raises(FormatError, match="sealed"):
        verify_receipt(receipt)
    receipt.write_text(text[:-10])
    with pytest.raises(FormatError):
        verify_receipt(receipt)
    receipt.write_text("{}")
    with pytest.raises(FormatError, match="receipt"):
        verify_receipt(receipt)
    write_receipt(receipt, seal({"kind": "backends"}))
    with pytest.raises(FormatError, match="a field of the receipt is missing"):
        verify_receipt(receipt)


@pytest.mark.thorough
@needs_cython
def test_a_receipt_that_says_otherwise_is_refuted(receipt):
    kept = read_receipt(receipt)
    result = next(result for result in kept["results"] if result["comparisons"])
    result["comparisons"][0]["accumulators"]["compared"] += 1
    kept["results"] = [result]
    next(check for check in result["paths"] if check["path"] == "ops, decoding")["passed"] = False
    body = {key: kept[key] for key in ("kind", "bitnet_ref", "subject", "results", "agrees")}
    write_receipt(receipt, seal(body))
    found = verify_receipt(receipt)
    assert not found.holds
    assert "path ops, decoding" in found.refuted[0]
    assert "accumulators" in found.refuted[1]


@pytest.mark.thorough
def test_a_receipt_of_other_weights_is_refuted(receipt):
    write_checkpoint(receipt.parent / "m", BITNET, tiny_tensors(BITNET, seed=9))
    found = verify_receipt(receipt)
    assert not found.holds
    assert found.refuted[0].startswith("weights_sha256")


@pytest.mark.thorough
def test_a_receipt_without_its_model_confirms_nothing(receipt):
    (receipt.parent / "m").rename(receipt.parent / "elsewhere")
    found = verify_receipt(receipt)
    assert not found.holds
    assert not found.refuted
    assert "the model" in found.unchecked[0]
    assert not verify_receipt(receipt, str(receipt.parent / "elsewhere")).refuted


@pytest.mark.thorough
def test_the_trace_of_a_receipt_may_have_a_name_that_no_file_can_have(receipt):
    sealed = read_receipt(receipt)
    sealed["kind"], sealed["subject"]["trace"] = "trace", "x" * 5000
    write_receipt(receipt, seal({key: sealed[key] for key in ("kind", "bitnet_ref", "subject", "results", "agrees")}))
    assert any("the trace: there is no file" in line for line in verify_receipt(receipt).unchecked)


# -- causes ------------------------------------------------------------------------------------------------------------


def recorded(path, activation="relu2", before=(), names=None):
    """storyteller's run of a prompt, perhaps with a mistake in it, as a trace file."""
    m = bitnet_ref.load("storyteller", backend="numpy")
    prompt = "The rabbit ran down"
    wrong = bitnet_ref.Model(replace(m.config, activation=activation), m.weights, m.backend, m.path)
    record_to_file(wrong, [*before, *m.tokenizer.encode(prompt)], path, names, prompt)
    return cross_trace(m, path)


@pytest.mark.thorough
def test_the_cause_of_a_difference_is_tested_and_said(tmp_path):
    found = recorded(tmp_path / "t", activation="silu")
    assert found.agrees is False
    assert [cause.name for cause in found.causes if cause.confirmed] == ["silu_for_relu2"]
    assert "cause: silu where the model has relu squared" in found.verdict
    assert found.diagnosis()[0].startswith("confirmed: silu")
    assert found.to_dict()["causes"][0]["confirmed"] is True
    write_html(tmp_path / "r.html", "x", [found], {})
    assert "<h3>Diagnosis</h3><ul><li>confirmed: silu" in (tmp_path / "r.html").read_text()


def test_other_tokens_than_the_prompt_s_are_said_first(tmp_path):
    found = recorded(tmp_path / "t", before=[1])
    assert found.agrees is False
    assert "BOS twice" in found.verdict
    assert [cause.confirmed for cause in found.causes][:1] == [True]


@pytest.mark.thorough
def test_a_trace_that_agrees_has_no_diagnosis(tmp_path):
    found = recorded(tmp_path / "t")
    assert found.agrees
    assert found.diagnosis() == []
