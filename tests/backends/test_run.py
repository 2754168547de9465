"""bitnet_ref.backends.run: the one door to a pass. What it returns, on every path, and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import GOLDEN, GOLDEN_CASES, TINY, model, rng, tiny_tensors, write_checkpoint

import bitnet_ref
from bitnet_ref.backends import choose_backend
from bitnet_ref.backends.run import first_non_finite
from bitnet_ref.errors import BackendUnavailable, NumericsError, OutOfMemory, ShapeError
from bitnet_ref.reference.cache import TokenBatch
from bitnet_ref.reference.model import forward
from bitnet_ref.reference.weights import DenseWeight

CASE = GOLDEN / "bitnet-packed-offline"
TOKENS = [5, 6, 7, 8]
PROMPT = TokenBatch.of([(0, 0, TOKENS)])


# On the emulated GPU these, one of each kind; tests/test_golden.py has all cases
ON_CUPY = ("bitnet-packed-offline", "mistral-dense-window8", "llama-packed-rmsnorm", "rope-dynamic", "onebitllm-silu")


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_every_path_gives_the_same_bits(case, backend_name):
    """A prompt in two pieces, then two sequences with one token each, by every path that the backend names."""
    if backend_name == "cupy" and case not in ON_CUPY:
        pytest.skip("on the emulated GPU one case of each kind is enough")
    m, tokens = model(GOLDEN / case, backend_name), rng(1).integers(1, 50, 10)
    outputs = {}
    for path in (None, *m.backend.paths):
        cache = m.new_cache(2, 12)
        batches = [TokenBatch.of([(0, 0, tokens[:7])]), TokenBatch.of([(0, 7, tokens[7:9]), (1, 0, tokens[:9])])]
        batches += [TokenBatch.of([(0, 9, [3]), (1, 9, [4])]), TokenBatch.of([(0, 10, [4]), (1, 10, [3])], [0, 1])]
        outputs[path] = np.concatenate([m.run(batch, cache, path=path).all() for batch in batches])
    assert m.backend.paths[0] == "ops"
    for path, logits in outputs.items():
        np.testing.assert_array_equal(logits, outputs["ops"], err_msg=str(path))


def test_the_plain_text_is_what_runs():
    m = model(CASE)
    expected = forward(m.backend, m.weights, m.config, PROMPT, m.new_cache(1, 4))
    np.testing.assert_array_equal(m.run(PROMPT, m.new_cache(1, 4)).all(), expected)


def test_a_path_that_the_backend_does_not_have(backend_name):
    m = model(CASE, backend_name)
    with pytest.raises(BackendUnavailable, match=f"{backend_name}.* has no path 'fused'; there are: ops"):
        m.run(PROMPT, m.new_cache(1, 4), path="fused")


@pytest.mark.parametrize("way", ["run", "run_hidden"])
def test_a_pass_without_memory(way, monkeypatch):
    def fail(*args):
        raise MemoryError("no memory for 4 tokens of 64 activations")

    m = model(CASE)
    monkeypatch.setattr(m.backend, "hidden", fail)
    with pytest.raises(OutOfMemory, match=r"a pass of 4 tokens: no memory for 4 .*; compute fewer tokens at a time"):
        getattr(m, way)(PROMPT, m.new_cache(1, 4))


# -- what comes back ---------------------------------------------------------------------------------------------------


def test_all_logits(backend_name):
    m = model(CASE, backend_name)
    found = m.run(PROMPT, m.new_cache(1, 4))
    assert (len(found.tokens), found.vocab_size) == (4, m.config.vocab_size)
    assert all(token.complete for token in found.tokens)
    np.testing.assert_array_equal(found.all(), m.logits(TOKENS))
    for token, row in zip(found.tokens, m.logits(TOKENS), strict=True):
        np.testing.assert_array_equal(token.ids, np.arange(found.vocab_size))
        np.testing.assert_array_equal(token.all(), row)


def test_the_wanted_tokens_in_their_order(backend_name):
    m = model(CASE, backend_name)
    parts = [(0, 0, TOKENS), (1, 0, TOKENS[:2])]
    found = m.run(TokenBatch.of(parts, logits_of_last=[1, 0]), m.new_cache(2, 4))
    np.testing.assert_array_equal(found.all(), m.logits(TOKENS)[[1, 3]])


def test_the_largest_logits_of_each_token(backend_name):
    m = model("storyteller", backend_name)
    logits, top = m.logits(TOKENS), [(1, ()), (None, ()), (5, [9, 3]), (2, np.array([0]))]
    found = m.run(PROMPT, m.new_cache(1, 4), top)
    for token, row, (k, also) in zip(found.tokens, logits, top, strict=True):
        np.testing.assert_array_equal(token.values, row[token.ids])
        assert (np.diff(token.ids) > 0).all()
        assert {*np.argsort(-row, kind="stable")[: k or len(row)], *also} <= {*token.ids.tolist()}
        np.testing.assert_array_equal(token.all(), row)
    np.testing.assert_array_equal(found.all(), logits)


def test_no_wanted_tokens(backend_name):
    m = model(CASE, backend_name)
    for top in (None, []):
        cache = m.new_cache(1, 5)
        found = m.run(TokenBatch.of([(0, 0, TOKENS)], logits_of_last=[]), cache, top)
        assert found.all().shape == (0, m.config.vocab_size)
        following = m.run(TokenBatch.of([(0, 4, [9])]), cache).all()  # the cache has its keys and values all the same
        np.testing.assert_array_equal(following, m.logits([*TOKENS, 9])[4:])


# -- NaN and Inf -------------------------------------------------------------------------------------------------------


def changed(m, backend_name, **parts):
    """The numpy model `m` with other weights, prepared for another backend."""
    changed_model = bitnet_ref.Model(m.config, replace(m.weights, **parts), m.backend)
    return changed_model.on(choose_backend(backend_name, threads=2))


def check_named(m, tensor):
    for path in (None, *m.backend.paths):
        for top in (None, [(1, ())] * 4):
            with pytest.raises(NumericsError, match="is the first") as caught:
                m.run(PROMPT, m.new_cache(1, 4), top, path)
            assert caught.value.tensor == tensor, path


@pytest.mark.parametrize(
    ("part", "tensor", "bad"),
    [
        ("attn_norm", "ln1.hook_normalized", np.nan),
        ("attn_sub_norm", "attn.sub_norm.hook_normalized", np.inf),
        ("ffn_norm", "ln2.hook_normalized", -np.inf),
        ("ffn_sub_norm", "mlp.sub_norm.hook_normalized", np.nan),
    ],
)
def test_the_first_bad_tensor_is_named(part, tensor, bad, backend_name):
    m = model(CASE)
    layers = list(m.weights.layers)
    norm = getattr(layers[1], part)
    weight = np.array(norm.weight)
    weight[3] = bad
    layers[1] = replace(layers[1], **{part: replace(norm, weight=weight)})
    check_named(changed(m, backend_name, layers=tuple(layers)), f"blocks.1.{tensor}")


def test_bad_embeddings_and_final_norms_and_heads(backend_name):
    m = model(GOLDEN / "llama-dense")
    table = np.array(m.weights.embedding.array, dtype=np.float32)
    table[7, 2] = np.nan
    check_named(changed(m, backend_name, embedding=DenseWeight(table)), "hook_embed")
    weight = np.array(m.weights.final_norm.weight)
    weight[0] = np.inf
    norm = replace(m.weights.final_norm, weight=weight)
    check_named(changed(m, backend_name, final_norm=norm), "ln_final.hook_normalized")
    head = np.array(m.weights.lm_head.array, dtype=np.float32)
    head[9] = 3e38
    check_named(changed(m, backend_name, lm_head=DenseWeight(head)), "lm_head.hook_out")


def test_a_fault_that_does_not_come_back_is_no_tensor():
    m = model(CASE)
    error = first_non_finite(m.backend, m.weights, m.config, PROMPT, m.new_cache(1, 4))
    assert error.tensor is None
    assert "second run" in str(error)


def test_a_batch_that_does_not_fit_the_cache(backend_name):
    m = model(CASE, backend_name)
    for path in (None, *m.backend.paths):
        with pytest.raises(ShapeError, match="positions < 3"):
            m.run(PROMPT, m.new_cache(1, 3), path=path)


def test_a_window_that_no_integer_of_a_kernel_holds_is_no_window(tmp_path, backend_name):
    shape = {**TINY, "model_type": "mistral"}
    logits = [
        bitnet_ref.load(
            write_checkpoint(tmp_path / str(window), {**shape, "sliding_window": window}, tiny_tensors(TINY)),
            backend=backend_name,
            allow_unquantized=True,
        ).logits(TOKENS)
        for window in (2**40, None)
    ]
    np.testing.assert_array_equal(*logits)
