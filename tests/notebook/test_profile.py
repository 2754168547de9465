"""`model.profile()`: the same results, every operation in its place, the numbers add up, and the model comes back."""

import json
import threading

import numpy as np
import pytest
from helpers import TINY, model, write_checkpoint

import bitnet_ref
from bitnet_ref.backends.observe import PATHS
from bitnet_ref.errors import GenerationError, NumericsError
from bitnet_ref.notebook.profiling import OpTime
from bitnet_ref.notebook.profiling import profile as profile_module
from bitnet_ref.notebook.profiling.timed import StepTimer
from bitnet_ref.reference.weights import DenseWeight

PROMPT = "Once upon a time"


@pytest.fixture
def story(backend_name):
    return model("storyteller", backend_name)


def tiny_model(folder, **config):
    return bitnet_ref.load(write_checkpoint(folder, {**TINY, **config}), backend="numpy")


@pytest.mark.sample(3)
@pytest.mark.parametrize("path", PATHS)
def test_results_are_the_same_and_the_model_comes_back(path, story):
    plain = story.generate(PROMPT, max_tokens=8, temperature=0.8, seed=4)
    profile = story.profile(PROMPT, path=path, max_tokens=8, temperature=0.8, seed=4)
    assert story.watcher is None
    assert f"path '{path}'" in str(profile)
    assert (profile.outcome.token_ids, profile.outcome.logprobs) == (plain.token_ids, plain.logprobs)


def test_calls_are_counted_in_their_places(story):
    prompt = story.tokenizer.encode(PROMPT)
    profile = story.profile(prompt, max_tokens=5)
    layers = story.config.num_hidden_layers
    assert {kind: (phase.forward.calls, phase.tokens) for kind, phase in profile.phases.items()} == {
        "prefill": (1, len(prompt)),
        "decode": (4, 4),
    }
    forward = profile.phases["decode"].forward
    assert list(forward.children) == [
        *("embed", "rope_tables", *(f"blocks.{i}" for i in range(layers)), "rms_norm final_norm", "head_rows")
    ]
    assert "take_rows" in profile.phases["prefill"].forward.children  # only the last token's logits are wanted
    block = forward.children["blocks.0"]
    assert list(block.children) == ["attention_block", "feed_forward"]
    assert list(block.children["attention_block"].children) == [
        *("rms_norm attn_norm", "linears q_proj k_proj v_proj", "rope", "append", "attention"),
        *("rms_norm attn_sub_norm", "linears o_proj", "add"),
    ]
    assert block.children["attention_block"].children["add"].calls == 4
    assert list(block.children["feed_forward"].children) == [
        *("rms_norm ffn_norm", "linears gate_proj up_proj", "gated", "rms_norm ffn_sub_norm", "linears down_proj"),
        "add",
    ]
    merged = profile.phases["decode"].merged().children["blocks"]
    assert merged.calls == 4 * layers
    ops = {op.name: op for op in profile.ops}
    assert ops["linears down_proj"].calls == 5 * layers
    assert ops["linears down_proj"].nbytes == 5 * sum(layer.down_proj.nbytes for layer in story.weights.layers)


def test_fused_blocks_are_timed_as_a_whole(story):
    layers = story.config.num_hidden_layers
    profile = story.profile(PROMPT, path="blocks", max_tokens=4)
    ops = {op.name: op for op in profile.ops}
    assert ops["attention_block"].calls == ops["feed_forward"].calls == 4 * layers
    assert ops["feed_forward"].children == {}
    names = ("gate_proj", "up_proj", "down_proj")
    weights = sum(getattr(layer, name).nbytes for layer in story.weights.layers for name in names)
    assert ops["feed_forward"].nbytes == 4 * weights
    assert profile.phases["decode"].forward.children["blocks.0"].calls == 3


def test_a_step_as_generate_runs_it_is_one_entry(story):
    profile = story.profile(PROMPT, path="replayed", max_tokens=4)
    assert list(profile.phases["decode"].forward.children) == ["hidden", "head_rows"]
    assert {op.name: op.calls for op in profile.ops} == {"hidden": 4, "head_rows": 4}


def test_paths_do_not_mix(story):
    with pytest.raises(GenerationError, match="path: expected ops, blocks, replayed, got 'fused'"):
        story.profile(path="fused")
    with story.profile(), pytest.raises(GenerationError, match="being profiled by path 'ops'"):
        story.profile(path="blocks").__enter__()
    assert story.watcher is None


def nodes(node):
    yield node
    for child in node.children.values():
        yield from nodes(child)


def test_times_add_up(story):
    profile = story.profile(PROMPT, max_tokens=6)
    for phase in profile.phases.values():
        for node in nodes(phase.forward):
            assert node.total_s > 0
            assert node.self_s > -1e-9, node.name  # what is inside is not longer
            assert node.mean_s == pytest.approx(node.total_s / node.calls)
    assert profile.forward_s + profile.outside_s == pytest.approx(profile.wall_s)
    tops = sum(op.total_s for op in profile.ops)
    assert 0 < tops < profile.forward_s
    assert [op.total_s for op in profile.ops] == sorted((op.total_s for op in profile.ops), reverse=True)


def test_parts_of_composed_operations_are_inside_them():
    found = model("storyteller", "numpy").profile(PROMPT, max_tokens=2)
    ops = {op.name: op for op in found.ops}
    assert list(ops["linears gate_proj up_proj"].children) == [
        *("quantize_activations", "ternary_matmul gate_proj", "dequantize", "ternary_matmul up_proj")
    ]
    assert "quantize_activations" not in ops  # not in the model's text


def test_what_attention_reads(tmp_path):
    """Each token's keys and values once: the window's where there is one, once for a slot however many tokens ask."""
    tiny = tiny_model(tmp_path, model_type="mistral", sliding_window=3)
    row = 2 * tiny.config.kv_size * 4  # bytes of a token in one layer
    profile = tiny.profile([1, 5, 7, 9], max_tokens=3)
    layers = tiny.config.num_hidden_layers
    of = {kind: phase.ops()["attention"] for kind, phase in profile.phases.items()}
    assert of["prefill"].nbytes == layers * 4 * row
    assert of["decode"].nbytes == layers * 2 * 3 * row
    assert of["decode"].gb_per_s == pytest.approx(of["decode"].nbytes / of["decode"].total_s / 1e9)
    both = tiny.profile([[1, 5], [1, 5, 7, 9]], max_tokens=2)
    assert both.phases["decode"].tokens == 2
    assert both.phases["decode"].ops()["attention"].nbytes == layers * 2 * 3 * row


def test_nested_and_overlapping_profiles(story):
    outer, inner = story.profile(), story.profile()
    outer.__enter__()
    story.logits([1, 2])
    inner.__enter__()
    story.logits([1, 2, 3])
    outer.__exit__()  # the one that began first ends first
    story.logits([1, 2, 3, 4])
    assert isinstance(story.watcher, StepTimer)
    inner.__exit__()
    assert story.watcher is None
    assert [p.phases["prefill"].tokens for p in (outer, inner)] == [2 + 3, 3 + 4]
    with inner, inner:  # entered again it goes on; entered twice it counts once
        story.logits([1, 2])
    assert inner.phases["prefill"].tokens == 3 + 4 + 2
    assert story.watcher is None


def test_an_error_inside_leaves_no_trace_behind(story):
    profile = story.profile()
    with pytest.raises(GenerationError), profile:
        story.logits([])
    assert story.watcher is None
    assert profile.phases == {}


def test_an_error_inside_an_operation(tmp_path):
    tiny = tiny_model(tmp_path)
    down = tiny.weights.layers[1].down_proj
    bad = np.full(down.shape, np.nan, dtype=np.float32)
    object.__setattr__(tiny.weights.layers[1], "down_proj", DenseWeight(bad, name=down.name))
    profile = tiny.profile()
    with pytest.raises(NumericsError, match=r"blocks\.1\.mlp\.down_proj"), profile:
        tiny.logits([1, 2, 3])
    assert profile.phases["prefill"].forward.calls == 1
    object.__setattr__(tiny.weights.layers[1], "down_proj", down)
    with profile:
        tiny.logits([1, 2, 3])
    assert profile.phases["prefill"].forward.calls == 2


def test_other_threads_and_sessions_are_seen(story):
    profile = story.profile()
    with profile:
        threads = [threading.Thread(target=story.logits, args=([1, 2, 3],)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        list(story.stream([1, 5], max_tokens=3))
    assert profile.phases["prefill"].tokens == 3 * 3 + 2
    assert profile.phases["decode"].tokens == 2
    assert profile.phases["prefill"].forward.children["blocks.0"].calls == 4
    assert "overlap" in str(profile)


def test_record_and_beams_under_a_profile(story):
    plain, seen = story.run_with_cache([1, 5, 9])
    profile = story.profile()
    with profile:
        logits, again = story.run_with_cache([1, 5, 9])
        story.generate([1, 5], num_beams=3, max_tokens=4)
    assert np.array_equal(logits, plain)
    assert all(np.array_equal(again[name], seen[name]) for name in seen)
    assert profile.phases["decode"].tokens == 3 * 3


def test_the_table_in_text_and_html(story):
    profile = story.profile(PROMPT, max_tokens=4)
    text, html = str(profile), profile._repr_html_()
    for name in ("prefill: 1 step", "decode: 3 steps, 3 tokens", "linears gate_proj up_proj", "outside the model"):
        assert name in text
        assert name in html
    assert "blocks.5" not in text
    assert html.count("<tr>") == len(text.splitlines()) - 1


def test_names_are_escaped_in_html(story):
    profile = story.profile([1, 2], max_tokens=2)
    profile.phases["decode"].forward.child("<script>").add(OpTime("<script>", 1, 1.0))
    assert "<script>" not in profile._repr_html_()
    assert "&lt;script&gt;" in profile._repr_html_()


def test_to_dict_is_json(story):
    profile = story.profile(PROMPT, max_tokens=4)
    facts = json.loads(json.dumps(profile.to_dict(), allow_nan=False))
    assert facts["backend"] == story.backend.name
    assert [phase["kind"] for phase in facts["phases"]] == ["prefill", "decode"]
    all_nodes = [node for phase in profile.phases.values() for node in nodes(phase.forward)]
    counted = [node for node in all_nodes if node.name != "forward" and not node.name.startswith("blocks.")]
    assert facts["calls"] == sum(node.calls for node in counted)


def test_the_trace_file(story, tmp_path):
    profile = story.profile(PROMPT, max_tokens=3)
    path = profile.save(tmp_path / "trace.json")
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    assert {event["ph"] for event in events} == {"X"}
    assert sum(event["name"] == "feed_forward" for event in events) == 3 * 6
    steps = [event for event in events if event["name"] in ("prefill", "decode")]
    assert [step["args"]["tokens"] for step in steps] == [len(profile.outcome.prompt_token_ids), 1, 1]
    inside = [e for e in events if steps[1]["ts"] < e["ts"] < steps[1]["ts"] + steps[1]["dur"]]
    assert all(e["ts"] + e["dur"] <= steps[1]["ts"] + steps[1]["dur"] + 0.01 for e in inside)


def test_what_is_kept_has_a_limit(story, monkeypatch):
    monkeypatch.setattr(profile_module, "KEPT_CALLS", 100)
    profile = story.profile(PROMPT, max_tokens=6)
    assert profile.phases["decode"].forward.calls == 5
    assert sum(len(step.spans) for step in profile.steps) <= 100 < profile.calls


def test_reprs_fit_a_cell(story):
    profile = story.profile(PROMPT, max_tokens=3)
    assert max(len(repr(each)) for each in (profile, *profile.steps, *profile.in_order(), *profile.ops)) < 300
    assert len(profile._repr_html_()) < 40_000


def test_parameters_without_a_prompt(story):
    with pytest.raises(GenerationError, match="max_tokens: a profile without a prompt"):
        story.profile(max_tokens=3)


def test_the_figure(story):
    pytest.importorskip("matplotlib")
    profile = story.profile(PROMPT, max_tokens=4)
    figure = profile.plot()
    assert [ax.get_title().split(":")[0] for ax in figure.axes] == ["prefill", "decode"]
    for ax, phase in zip(figure.axes, profile.phases.values(), strict=True):
        bars = list(nodes(phase.merged()))
        assert len(ax.patches) == len(bars)
        assert max(patch.get_width() for patch in ax.patches) == pytest.approx(phase.forward.total_s * 1e3)
        for node, patch in zip(bars, ax.patches, strict=True):  # depth first, as drawn
            assert patch.get_width() == pytest.approx(node.total_s * 1e3)


def test_shared_models_are_restored_for_all():
    one = bitnet_ref.load("storyteller", share=True)
    other = bitnet_ref.load("storyteller", share=True)
    with one.profile() as profile:
        other.logits([1, 2])
    assert profile.phases["prefill"].tokens == 2
    assert other.watcher is None
