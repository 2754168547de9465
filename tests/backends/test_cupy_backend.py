"""The CuPy backend beyond the contract: fused blocks, pages, the head, 16 bits, memory, NaN. A GPU or emulated."""

from __future__ import annotations

import warnings
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from cupy_runs import CASE, kernels_asked_for, load, top
from helpers import BITNET, DATA, GOLDEN, call, golden, model, rng, tiny_tensors, write_checkpoint

import bitnet_ref
from bitnet_ref import backends
from bitnet_ref.backends import Backend, choose_backend, cuda
from bitnet_ref.backends.backend import HeadNeed
from bitnet_ref.backends.cuda.backend import CupyBackend
from bitnet_ref.backends.cuda.cache import DeviceKVCache
from bitnet_ref.backends.cuda.emulation.device import EmulatedDevice
from bitnet_ref.backends.cuda.stacks import GROUPS, stack_linears, stack_of
from bitnet_ref.backends.paged_cache import CacheSpec
from bitnet_ref.errors import BackendUnavailable, NumericsError, OutOfMemory, ShapeError
from bitnet_ref.reference.cache import TokenBatch
from bitnet_ref.reference.config import RopeConfig
from bitnet_ref.reference.model import BlockPlace
from bitnet_ref.reference.weights import DenseWeight, Norm, TernaryWeight

pytestmark = [
    pytest.mark.card,
    pytest.mark.skipif(cuda.why_unavailable() is not None, reason=str(cuda.why_unavailable())),
]


@pytest.fixture(scope="module")
def be():
    return choose_backend("cupy")


# -- fused blocks ------------------------------------------------------------------------------------------------------

CASES = (
    "bitnet-packed-offline",
    "onebitllm-silu",
    "llama-packed-rmsnorm",
    "llama-bf16-biases",
    "mistral-dense-window8",
)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["float32", "float16", "int8"])
def test_a_fused_block_equals_the_composed_one(case, kind):
    """Each block by itself: prompts, one decoded token, several, and both kinds together, over the same cache."""
    m = load(GOLDEN / case)
    fused, cfg = m.backend, m.config
    ops = fused.op_by_op()
    caches = [fused.new_cache(cfg, CacheSpec(3, 40, kind)) for _ in range(2)]
    batches = [
        TokenBatch.of([(0, 0, [0] * 7)]),
        TokenBatch.of([(1, 0, [0] * 3), (2, 0, [0] * 12)]),
        TokenBatch.of([(0, 7, [0])]),
        TokenBatch.of([(2, 12, [0]), (0, 8, [0]), (1, 3, [0])]),
        TokenBatch.of([(0, 9, [0] * 2), (1, 4, [0])]),
    ]
    for number, host in enumerate(batches):
        x = fused.from_host(rng(number).standard_normal((len(host), cfg.hidden_size)).astype(np.float32))
        batch = fused.place(host)
        rope = fused.rope_tables(batch.positions, cfg.rope, cfg.head_dim)
        for layer, w in enumerate(m.weights.layers[:2]):
            results = [
                be.to_host(be.attention_block(x, w, cfg, BlockPlace(rope, batch, cache, layer)))
                for be, cache in zip((fused, ops), caches, strict=True)
            ]
            np.testing.assert_array_equal(*results)
            for mine, theirs in zip(*(cache.stored(layer, host) for cache in caches), strict=True):
                np.testing.assert_array_equal(mine, theirs)
            np.testing.assert_array_equal(*(be.to_host(be.feed_forward(x, w, cfg)) for be in (fused, ops)))


def test_the_kernels_of_a_fused_block(monkeypatch):
    """Of several tokens and of one: what each block launches."""
    m = load()
    be, cfg, w = m.backend, m.config, m.weights.layers[0]
    cache, launched = be.new_cache(cfg, CacheSpec(2, 8)), kernels_asked_for(monkeypatch, be.ws.device)
    product = ["rows_2", "ternary_gemv_mma_8"]
    prompt = [*product, "rope_append_float32", "attention_scores", "attention_values", *product]
    decoded = ["ternary_row_2", "attention_append_scores", "attention_values", "ternary_row_2"]
    expected = {
        (0, 0, 5): (prompt, product * 2),
        (1, 0, 1): (decoded, ["ternary_row_2"] * 2),
    }
    for (slot, position, n), (attention, feed_forward) in expected.items():
        batch = be.place(TokenBatch.of([(slot, position, [0] * n)]))
        rope = be.rope_tables(batch.positions, cfg.rope, cfg.head_dim)
        x = be.from_host(rng(n).standard_normal((n, cfg.hidden_size)).astype(np.float32))
        launched.clear()
        be.attention_block(x, w, cfg, BlockPlace(rope, batch, cache, 0))
        assert len(launched) == len(attention)
        assert all(name.startswith(kernel) for name, kernel in zip(launched, attention, strict=True))
        launched.clear()
        be.feed_forward(x, w, cfg)
        assert launched == feed_forward


def test_ops_that_stand_alone_equal_numpys(be):
    """Residual sum, norm and quantisation of several rows."""
    plain, generator = Backend(), rng(1)
    x, y = (generator.standard_normal((3, 200)).astype(np.float32) for _ in range(2))
    norm = Norm(generator.standard_normal(200).astype(np.float32), 1e-5)
    total = call(be, "add", x, y)
    np.testing.assert_array_equal(total, x + y)
    normed = call(be, "rms_norm", total, norm)
    expected = plain.rms_norm(x + y, norm)
    np.testing.assert_array_equal(normed, expected)
    for mine, theirs in zip(
        call(be, "quantize_activations", normed), plain.quantize_activations(expected), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("head_dim", [2, 6, 64])
def test_rotating_k_on_its_way_into_the_cache_changes_no_bit(be, head_dim):
    config = replace(model(GOLDEN / "llama-dense").config, head_dim=head_dim)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    generator = rng(head_dim)
    batch = be.place(TokenBatch.of([(1, 3, [0] * 5)]))
    q, k, v = (
        be.from_host(generator.standard_normal((5, n, head_dim)).astype(np.float32))
        for n in (heads, kv_heads, kv_heads)
    )
    rope = be.rope_tables(batch.positions, RopeConfig(), head_dim)
    caches = [be.new_cache(config, CacheSpec(2, 8)) for _ in range(2)]
    q_fused = caches[0].rope_append(0, batch, q, k, v, rope)
    q_alone, k_alone = be.rope(q, k, *rope)
    be.append(caches[1], 0, batch, k_alone, v)
    np.testing.assert_array_equal(be.to_host(q_fused), be.to_host(q_alone))
    for fused, alone in zip(caches[0].stored(0, batch.host), caches[1].stored(0, batch.host), strict=True):
        np.testing.assert_array_equal(fused, alone)
    np.testing.assert_array_equal(caches[0].stored(0, batch.host)[0], be.to_host(k_alone))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("head_dim", "window"), [(2, None), (20, 3), (64, None)])
def test_attention_that_rotates_and_appends_changes_no_bit(be, dtype, head_dim, window):
    """Decoded tokens of three sequences, one in its second chunk of keys."""
    config = replace(model(GOLDEN / "llama-dense").config, head_dim=head_dim)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    generator = rng(head_dim)
    places = [(2, 5), (0, 0), (1, 130)]
    caches = [DeviceKVCache(be.ws, config, CacheSpec(3, 140), dtype) for _ in range(2)]
    for slot, position in places:
        before = TokenBatch.of([(slot, 0, [0] * position)])
        k, v = (generator.standard_normal((position, kv_heads, head_dim)).astype(np.float32) for _ in range(2))
        for cache in caches if position else ():
            call(be, "append", cache, 0, before, k, v)
    batch = be.place(TokenBatch.of([(slot, position, [0]) for slot, position in places]))
    q, k, v = (
        be.from_host(generator.standard_normal((3, n, head_dim)).astype(np.float32))
        for n in (heads, kv_heads, kv_heads)
    )
    rope = be.rope_tables(batch.positions, RopeConfig(), head_dim)
    before = be.ws.device.launches if be.ws.device.emulated else 0
    together = be.to_host(be._attend_new(q, k, v, BlockPlace(rope, batch, caches[0], 0), window))
    assert not be.ws.device.emulated or be.ws.device.launches - before == 2
    q, k = be.rope(q, k, *rope)
    be.append(caches[1], 0, batch, k, v)
    np.testing.assert_array_equal(together, be.to_host(be.attention(q, caches[1], batch, 0, window)))
    for mine, theirs in zip(*(cache.stored(0, batch.host) for cache in caches), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("order", [1, 7])
def test_no_result_depends_on_the_order_of_threads(order):
    """Blocks and threads descending, and shuffled: what differs lacks a barrier."""
    if not choose_backend("cupy").ws.device.emulated:
        pytest.skip("a GPU has its own order")
    tokens = golden("bitnet-packed-offline")["tokens"]
    expected = model(CASE, "cupy").logits(tokens)
    np.testing.assert_array_equal(load(device=EmulatedDevice(order=order)).logits(tokens), expected)


# -- linears of one input ----------------------------------------------------------------------------------------------


def linears_of(m):
    """The weights of a layer's two groups, on the card and as the reference has them."""
    plain = model(m.path, "numpy").weights.layers[1]
    for names in GROUPS:
        yield [getattr(m.weights.layers[1], name) for name in names], [getattr(plain, name) for name in names]


@pytest.mark.parametrize("case", ["bitnet-packed-offline", "llama-bf16-biases", "mistral-dense-window8"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_stack_computes_what_each_of_its_linears_does(case, tokens):
    """All at once, one by one, and some of them: the same bits; of ternary ones the reference's own accumulators."""
    m = load(GOLDEN / case)
    be, plain = m.backend, Backend()
    for ws, references in linears_of(m):
        x = rng(tokens).standard_normal((tokens, ws[0].shape[1])).astype(np.float32)
        together, alone = call(be, "linears", x, ws), [call(be, "linear", x, w) for w in ws]
        for y, single, pair in zip(together, alone, call(be, "linears", x, ws[::-1])[::-1], strict=True):
            np.testing.assert_array_equal(y, single)
            np.testing.assert_array_equal(y, pair)
        for w, reference in zip(ws, references, strict=True):
            assert w.shape == reference.shape
            if isinstance(reference, TernaryWeight):
                x_q, _ = plain.quantize_activations(x)
                np.testing.assert_array_equal(call(be, "ternary_matmul", x_q, w), plain.ternary_matmul(x_q, reference))
                np.testing.assert_array_equal(w.ternary(), reference.ternary())
                assert w.w_dequant_scale == reference.w_dequant_scale


@pytest.mark.parametrize("case", ["bitnet-packed-offline", "mistral-dense-window8"])
def test_stacked_weights_lie_on_the_card_once(case):
    """No second copy: what the device holds after stacking is what it held before."""
    be, plain = CupyBackend(), model(GOLDEN / case, "numpy").weights
    device = be.ws.device
    linears = [{name: be.prepare(w) for name, w in layer.linears()} for layer in plain.layers]
    weights = replace(plain, layers=tuple(replace(old, **new) for old, new in zip(plain.layers, linears, strict=True)))
    before = device.memory().used
    stack_linears(weights.layers, (be._ternary, be._denses), device)
    assert device.memory().used <= before + 4096  # a pool rounds sizes up
    assert all(stack_of(ws) is not None for layer in weights.layers for ws in groups(layer))
    stack_linears(weights.layers, (be._ternary, be._denses), device)  # and once more is none
    assert device.memory().used <= before + 4096


def groups(layer):
    return [[getattr(layer, name) for name in names] for names in GROUPS]


@pytest.mark.parametrize(("case", "per_layer"), [("bitnet-packed-offline", 6), ("mistral-dense-window8", 11)])
def test_launches_of_a_token(case, per_layer):
    """Per layer: qkv, scores, values, o, gate and up, down (dense: also two norms, the gate and two residual sums).
    Around the layers: the embedding, cos and sin, the last norm, the head, its largest, and what equals it."""
    m = load(GOLDEN / case, graphs=False)
    device, layers = m.backend.ws.device, m.config.num_hidden_layers
    if not device.emulated:
        pytest.skip("a GPU does not count")
    cache = m.new_cache(1, 8)
    counts = []
    for position in range(2):
        before = device.launches
        m.run(TokenBatch.of([(0, position, [4])], [0]), cache, top(1))
        counts.append(device.launches - before)
    assert counts == [layers * per_layer + 6] * 2


# -- pages -------------------------------------------------------------------------------------------------------------


def test_pages_in_any_order_give_the_same_bits():
    m = model(GOLDEN / "mistral-dense-window8", "cupy")
    tokens = rng(2).integers(1, 50, 11)
    expected = m.logits(tokens)
    cache = m.backend.new_cache(m.config, CacheSpec(2, 16, page_size=4, pages=9))
    cache.page_table[1] = [7, 2, 8, -1]
    batch = TokenBatch.of([(1, 0, tokens)])
    np.testing.assert_array_equal(m.run(batch, cache).all(), expected)
    for pool, again in zip((cache.keys, cache.values), cache.visible(1, 1, 10, None), strict=True):
        rows = np.concatenate([m.backend.ws.device.to_host(pool[1, page]) for page in (7, 2, 8)])[:11]
        np.testing.assert_array_equal(rows, again)


def test_a_page_that_changes_between_recorded_steps():
    """The owner of the pool gives a slot another page; the record reads the table as it is now."""
    m = load()
    tokens = rng(3).integers(1, 50, 7)
    cache = m.backend.new_cache(m.config, CacheSpec(1, 8, page_size=2, pages=6))
    cache.page_table[0] = [5, 0, 3, 1]
    expected = m.logits(tokens)

    def logits_at(i):
        return m.run(TokenBatch.of([(0, i, [tokens[i]])], [0]), cache).all()[0]

    results = [logits_at(i) for i in range(3)]
    with m.backend.ws.device.use():
        cache.keys[:, 4] = cache.keys[:, 5]
        cache.values[:, 4] = cache.values[:, 5]
    cache.page_table[0] = [4, 0, 2, 1]
    results += [logits_at(i) for i in range(3, 7)]
    np.testing.assert_array_equal(np.stack(results), expected)


def test_places_that_do_not_exist_are_refused_before_a_kernel_runs():
    m = load()
    cache = m.new_cache(1, 4)
    for slot, position in ((1, 0), (0, 4)):
        with pytest.raises(ShapeError, match="positions < 4 and slots < 1"):
            m.run(TokenBatch.of([(slot, position, [1])]), cache)
    pool = m.backend.new_cache(m.config, CacheSpec(1, 8, page_size=2, pages=3))
    with pytest.raises(ShapeError, match="a page for position 0"):
        m.run(TokenBatch.of([(0, 0, [1])]), pool)


def test_copies_of_slots_happen_at_once():
    m = load()
    prompts = [rng(n).integers(1, 50, 5) for n in (1, 2)]
    cache = m.new_cache(3, 8)
    m.run(TokenBatch.of([(slot, 0, p) for slot, p in enumerate(prompts)]), cache)
    before = [cache.visible(0, slot, 4, None)[0] for slot in (0, 1)]
    cache.copy([1, 0, 0], [0, 1, 2], 5)
    for slot, source in ((0, 1), (1, 0), (2, 0)):
        np.testing.assert_array_equal(cache.visible(0, slot, 4, None)[0], before[source])


# -- the head ----------------------------------------------------------------------------------------------------------


def head_rows(be, x, w, needs):
    with be.running():
        return be.head_rows(be.from_host(x), w, needs)


@pytest.mark.parametrize("k", [1, 2, 5, 40, 511])
def test_head_rows_are_the_k_largest_and_all_that_equal_the_kth(be, k):
    logits = np.round(rng(k).standard_normal((3, 700)) * 8).astype(np.float32) / 4  # many are equal
    logits[0, :2] = [-0.0, 0.0]
    logits[2] = -np.abs(logits[2])
    x, w = np.eye(3, dtype=np.float32), DenseWeight(np.ascontiguousarray(logits.T))
    needs = [HeadNeed(k, [3, 650]), HeadNeed(k), HeadNeed(1, [9])]
    for row, found, need in zip(logits, head_rows(be, x, w, needs), needs, strict=True):
        if len(found.ids) < 700:
            expected = np.union1d(np.flatnonzero(row >= np.sort(row)[-need.k]), need.also)
            np.testing.assert_array_equal(found.ids, expected)
        np.testing.assert_array_equal(found.values, row[found.ids])


def test_a_token_that_needs_all_logits_beside_one_that_does_not(be):
    logits = rng(5).standard_normal((2, 90)).astype(np.float32)
    w = DenseWeight(np.ascontiguousarray(logits.T))
    whole, few = head_rows(be, np.eye(2, dtype=np.float32), w, [HeadNeed(), HeadNeed(1)])
    np.testing.assert_array_equal(whole.values, logits[0])
    assert few.ids.tolist() == [logits[1].argmax()]


def test_more_equals_than_there_is_room_for(be):
    w = DenseWeight(np.ones((300, 1), dtype=np.float32))
    (found,) = head_rows(be, np.ones((1, 1), dtype=np.float32), w, [HeadNeed(1)])
    assert len(found.ids) == 300
    assert (found.values == 1).all()


# -- 16 bits -----------------------------------------------------------------------------------------------------------


def test_sixteen_bit_floats_are_rounded_as_numpy_rounds_them():
    """Through the cache: every exponent, ties, subnormals, the largest and beyond."""
    m = model(GOLDEN / "llama-dense", "cupy")
    kv_heads, head_dim = m.config.num_key_value_heads, m.config.head_dim
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)  # all of them that are finite
    odd = np.array([65504, 65519.996, 65520, 1e30, 3e38, 1e-8, 2**-25, 2**-24, 6e-8, -0.0, np.inf], dtype=np.float32)
    between = halves * np.float32(1 + 2**-11)  # half-way to the next one, for normal halves
    nearly = np.nextafter(between, np.float32(0))
    dice = rng(6).standard_normal(4096).astype(np.float32) * np.float32(10) ** rng(7).integers(-30, 30, 4096)
    every = np.concatenate([halves, -between, nearly, -odd, odd, dice])
    count = -(-len(every) // (kv_heads * head_dim))
    values = np.zeros(count * kv_heads * head_dim, dtype=np.float32)
    values[: len(every)] = every
    rows = values.reshape(count, kv_heads, head_dim)
    batch = TokenBatch.of([(0, 0, [0] * count)])
    for dtype, host in (("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)):
        be = choose_backend("cupy", dtype=dtype)
        cache = be.new_cache(m.config, CacheSpec(1, count))
        call(be, "append", cache, 0, batch, rows, rows)
        with warnings.catch_warnings(), np.errstate(over="ignore"):
            warnings.simplefilter("ignore")
            expected = rows.astype(host).astype(np.float32)
        np.testing.assert_array_equal(cache.stored(0, batch)[0], expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mixed_precision_stays_near(dtype):
    """Only what is kept in 16 bits is rounded: the distance is that of 8 or 11 bits, not of another computation."""
    case = GOLDEN / "llama-dense"
    tokens = golden("llama-dense")["tokens"]
    logits = load(case, dtype=dtype).logits(tokens)
    exact = model(case, "numpy", dtype="float64").logits(tokens)
    error = np.abs(logits - exact).max() / np.abs(exact).max()
    assert logits.dtype == np.float32
    assert 1e-6 < error < {"float16": 2e-3, "bfloat16": 2e-2}[dtype]


# -- when things go wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [True, False])
def test_nan_names_its_tensor(tmp_path, graphs):
    """Found by a kernel, told when results are read; also in a replayed step."""
    tensors = tiny_tensors(BITNET)
    m = load(write_checkpoint(tmp_path, BITNET, tensors), graphs=graphs)
    cache = m.new_cache(1, 8)
    for position in range(3):
        m.run(TokenBatch.of([(0, position, [4])], [0]), cache, top(1))
    good = m.backend.ws.device.to_host(m.weights.embedding.device_rows)
    bad = good.copy()
    bad[9, 3] = np.array(np.nan, dtype=ml_dtypes.bfloat16).view(np.uint16)
    m.backend.ws.device.copy(m.weights.embedding.device_rows, bad)
    with pytest.raises(NumericsError, match="hook_embed") as caught:
        m.run(TokenBatch.of([(0, 3, [9])], [0]), cache, top(1))
    assert caught.value.tensor == "hook_embed"
    m.backend.ws.device.copy(m.weights.embedding.device_rows, good)
    m.run(TokenBatch.of([(0, 3, [4])], [0]), cache, top(1))  # and all is well again


def test_a_logit_that_is_not_finite_is_found_in_a_record(tmp_path):
    """The final hidden state is finite, and the selection would leave NaN out."""
    config = {**BITNET, "tie_word_embeddings": False}
    m = load(write_checkpoint(tmp_path, config, tiny_tensors(config)))
    cache = m.new_cache(1, 8)
    for position in range(2):
        m.run(TokenBatch.of([(0, position, [4])], [0]), cache, top(1))
    rows = m.weights.lm_head.device_rows
    bad = m.backend.ws.device.to_host(rows)
    bad[9, 3] = np.array(np.nan, dtype=ml_dtypes.bfloat16).view(np.uint16)
    m.backend.ws.device.copy(rows, bad)
    with pytest.raises(NumericsError, match="lm_head"):
        m.run(TokenBatch.of([(0, 2, [9])], [0]), cache, top(1))


def test_memory_has_a_limit():
    with pytest.raises(OutOfMemory, match=r"memory|limit"):
        bitnet_ref.load(backend="cupy", memory_limit="1 MiB", gpu_layers="all")
    with pytest.raises(BackendUnavailable, match="'many'"):
        bitnet_ref.load(backend="cupy", memory_limit="many")


def test_a_pass_takes_more_of_a_prompt_where_there_is_room():
    config = model(CASE).config
    assert CupyBackend(memory_limit="1GiB").prompt_tokens(config) == 2048
    assert CupyBackend(memory_limit="16MiB").prompt_tokens(config) == Backend().prompt_tokens(config) == 512


def test_everything_is_given_back():
    m = bitnet_ref.load(CASE, backend="cupy")
    device = m.backend.ws.device
    used = device.memory().used
    assert used > m.weights.embedding.device_rows.nbytes
    m.logits([1, 2, 3])
    m.generate([1, 2, 3], max_tokens=3, ignore_eos=True)
    del m
    import gc

    gc.collect()
    assert device.memory().used < used / 10
    device.close()


def test_auto_takes_a_card_and_warns_when_it_does_not_answer(monkeypatch):
    if backends.cuda.emulation_wanted():
        assert choose_backend("auto").name != "cupy"  # by name only
    monkeypatch.setattr(backends.cuda, "emulation_wanted", lambda: False)
    monkeypatch.setattr(backends.cuda, "why_unavailable", lambda index=0: None)
    monkeypatch.setattr("bitnet_ref.backends.cuda.backend.open_device", _lost)
    with pytest.warns(UserWarning, match="the GPU does not answer.*it is lost"):
        assert choose_backend("auto").name in ("cython", "numpy")
    with pytest.raises(BackendUnavailable, match="it is lost"):
        choose_backend("cupy")
    assert choose_backend("auto", dtype="float64").name == "numpy"


def test_auto_leaves_a_model_that_the_card_cannot_run_to_the_processor(monkeypatch):
    monkeypatch.setattr(backends, "_open_card", lambda *_: choose_backend("cupy"))
    folder = DATA / "families" / "embedding-gemma3"
    with pytest.warns(UserWarning, match=r"cupy has no kernels for .* of gemma3_text.*without the card"):
        assert bitnet_ref.load(folder).backend.name == backends.choose_cpu()
    with pytest.raises(BackendUnavailable, match="no kernels"):
        bitnet_ref.load(folder, backend="cupy")


def _lost(**_):
    raise BackendUnavailable("it is lost")


def test_without_cupy_the_reason_is_one_line_with_the_remedy(monkeypatch):
    monkeypatch.setenv("BITNET_REF_CUDA", "gpu")
    reason = bitnet_ref.available_backends()["cupy"]
    if reason is None:
        pytest.skip("there is a GPU")
    assert "\n" not in reason
    with pytest.raises(BackendUnavailable) as caught:
        bitnet_ref.load(backend="cupy")
    assert reason in str(caught.value)
