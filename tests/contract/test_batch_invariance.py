"""Row i of any result depends on row i's own inputs only, to the bit: alone, in a batch, in chunks, token by token."""

import numpy as np
import pytest
from helpers import GOLDEN, call, model, prepared, random_blocks, random_ternary, rng

from bitnet_ref.backends.paged_cache import CacheSpec
from bitnet_ref.families.block_rule import by_rule
from bitnet_ref.families.groups import GroupTernaryWeight
from bitnet_ref.families.linear_norms import NormedLinear
from bitnet_ref.reference.cache import TokenBatch
from bitnet_ref.reference.config import RopeConfig
from bitnet_ref.reference.weights import DenseWeight, Norm, TernaryWeight

MODELS = {
    "storyteller": "storyteller",
    "dense": GOLDEN / "llama-dense",
    "window": GOLDEN / "mistral-dense-window8",
    "dynamic rope": GOLDEN / "rope-dynamic",
    "norms inside": GOLDEN / "llama-packed-rmsnorm",
}


LARGE = (pytest.mark.long_emulated, pytest.mark.thorough)


@pytest.fixture(params=[pytest.param(name, marks=LARGE if name == "storyteller" else ()) for name in MODELS])
def m(request, backend_name):
    return model(MODELS[request.param], backend_name)


def tokens_of(m, n, seed=0):
    return rng(seed).integers(0, m.config.vocab_size, n)


LENGTH = 13

# -- the whole forward pass --------------------------------------------------------------------------------------------


def test_in_chunks_and_token_by_token(m):
    tokens = tokens_of(m, LENGTH)
    whole = m.logits(tokens)
    for sizes in ([5, 1, 7], [12, 1], [1] * LENGTH):
        cache, start = m.new_cache(slots=1, capacity=LENGTH), 0
        for size in sizes:
            part = m.run(TokenBatch.of([(0, start, tokens[start : start + size])]), cache).all()
            np.testing.assert_array_equal(part, whole[start : start + size], err_msg=f"{sizes}, from {start}")
            start += size


def test_a_prefix_has_the_logits_of_the_whole(m):
    tokens = tokens_of(m, LENGTH)
    whole = m.logits(tokens)
    for n in (1, 2, 7):
        np.testing.assert_array_equal(m.logits(tokens[:n]), whole[:n])


def test_in_a_batch_of_sequences_of_other_lengths(m):
    prompts = [tokens_of(m, n, seed=n) for n in (LENGTH, 1, 6, 9)]
    alone = [m.logits(prompt) for prompt in prompts]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):  # the slots, and so the rows, in another order
        cache = m.new_cache(slots=5, capacity=2 * LENGTH)
        batch = TokenBatch.of([(slot, 0, prompts[i]) for slot, i in enumerate(order)])
        together = m.run(batch, cache).all()
        for slot, i in enumerate(order):
            np.testing.assert_array_equal(together[batch.slots == slot], alone[i])


@pytest.mark.long_emulated
def test_rows_in_any_order(m):
    """The tokens of a call may come in any order: all keys are stored before any token looks at them."""
    prompts = [tokens_of(m, n, seed=n) for n in (8, 5)]
    batch = TokenBatch.of([(0, 0, prompts[0]), (1, 0, prompts[1])])
    expected = m.run(batch, m.new_cache(slots=2, capacity=LENGTH)).all()
    order = rng(9).permutation(len(batch))
    shuffled = TokenBatch(batch.tokens[order], batch.positions[order], batch.slots[order])
    np.testing.assert_array_equal(m.run(shuffled, m.new_cache(2, LENGTH)).all(), expected[order])


@pytest.mark.long_emulated
def test_joining_late(m):
    """One sequence decodes while another's prompt is read in the same call, in a slot that was used before."""
    first, second = tokens_of(m, LENGTH, seed=1), tokens_of(m, 7, seed=2)
    alone_first, alone_second = m.logits(first), m.logits(second)
    cache = m.new_cache(slots=2, capacity=LENGTH)
    m.run(TokenBatch.of([(0, 0, first[:6]), (1, 0, tokens_of(m, LENGTH, seed=3))]), cache).all()
    both = m.run(TokenBatch.of([(0, 6, first[6:7]), (1, 0, second[:4])]), cache).all()
    np.testing.assert_array_equal(both, np.concatenate([alone_first[6:7], alone_second[:4]]))
    both = m.run(TokenBatch.of([(1, 4, second[4:]), (0, 7, first[7:])]), cache).all()
    np.testing.assert_array_equal(both, np.concatenate([alone_second[4:], alone_first[7:]]))


def test_logits_of_the_last_tokens_only(m):
    prompts = [tokens_of(m, n, seed=n) for n in (4, 9, 1)]
    parts = [(slot, 0, prompt) for slot, prompt in enumerate(prompts)]
    last = m.run(TokenBatch.of(parts, logits_of_last=[0, 1, 2]), m.new_cache(3, LENGTH)).all()
    np.testing.assert_array_equal(last, np.stack([m.logits(prompt)[-1] for prompt in prompts]))
    some = m.run(TokenBatch.of(parts, logits_of_last=[1]), m.new_cache(3, LENGTH)).all()
    np.testing.assert_array_equal(some, last[1:2])
    cache = m.new_cache(3, LENGTH)  # a piece of a prompt of which no logits are wanted, then the rest
    none = m.run(TokenBatch.of([(0, 0, prompts[1][:5])], logits_of_last=[]), cache).all()
    assert none.shape == (0, m.config.vocab_size)
    rest = m.run(TokenBatch.of([(0, 5, prompts[1][5:])], logits_of_last=[0]), cache).all()
    np.testing.assert_array_equal(rest, some)


@pytest.mark.thorough
@pytest.mark.long_emulated
def test_any_number_of_threads(backend_name):
    for path in ("storyteller", GOLDEN / "llama-dense"):
        one, two, five = (model(path, backend_name, threads=n) for n in (1, 2, 5))
        tokens = tokens_of(one, LENGTH)
        expected = one.logits(tokens)
        np.testing.assert_array_equal(two.logits(tokens), expected)
        np.testing.assert_array_equal(five.logits(tokens), expected)


def test_the_same_twice(m):
    tokens = tokens_of(m, LENGTH)
    np.testing.assert_array_equal(m.logits(tokens), m.logits(tokens))


# -- each operation ----------------------------------------------------------------------------------------------------

N, D, F, H, G, HEAD = 9, 72, 100, 6, 2, 12
GEN = rng(10)
X = GEN.standard_normal((N, D)).astype(np.float32)
WEIGHT = GEN.standard_normal(D).astype(np.float32)
GATE, UP = (GEN.standard_normal((N, F)).astype(np.float32) for _ in range(2))
Q = GEN.standard_normal((N, H, HEAD)).astype(np.float32)
K, V = (GEN.standard_normal((N, G, HEAD)).astype(np.float32) for _ in range(2))
POSITIONS = GEN.integers(0, 4000, N)
DENSE = DenseWeight(GEN.standard_normal((51, D)).astype(np.float32))
TERNARY = TernaryWeight.from_ternary(random_ternary(GEN, 52, D), 0.3)
NORMED = NormedLinear(Norm(WEIGHT, 1e-5), TERNARY)
GROUPED = GroupTernaryWeight(TERNARY.packed, D, GEN.random((52, 2)).astype(np.float16), 48)
TABLE = DenseWeight(GEN.standard_normal((30, D)).astype(np.float32))

RULED = [by_rule(random_blocks(kind, GEN, 19, 256)) for kind in ("Q8_0", "Q4_1", "Q4_K", "TQ2_0")]
LONG = GEN.standard_normal((N, 256)).astype(np.float32)


def ruled(be, i):
    """Linears by ggml's rule, two widths of blocks in one call; nothing where a backend has no kernels for them."""
    if not be.takes_ruled:
        return np.empty((len(i), 0), dtype=np.float32)
    return np.concatenate(call(be, "linears", LONG[i], prepared(be, *RULED)), axis=1)


OPS = {
    "embed": lambda be, i: call(be, "embed", TABLE, POSITIONS[i] % 30),
    "rms_norm": lambda be, i: call(be, "rms_norm", X[i], Norm(WEIGHT, 1e-5)),
    "rope_tables": lambda be, i: np.stack(call(be, "rope_tables", POSITIONS[i], RopeConfig(), HEAD), axis=1),
    "rope": lambda be, i: np.concatenate(
        call(be, "rope", Q[i], K[i], *(t[i] for t in call(be, "rope_tables", POSITIONS, RopeConfig(), HEAD))), axis=1
    ),
    "quantize_activations": lambda be, i: np.concatenate(call(be, "quantize_activations", X[i]), axis=1),
    "relu2": lambda be, i: call(be, "gated", GATE[i], UP[i], "relu2"),
    "silu": lambda be, i: call(be, "gated", GATE[i], UP[i], "silu"),
    "dense linear": lambda be, i: call(be, "linear", X[i], prepared(be, DENSE)[0]),
    "ternary linear": lambda be, i: call(be, "linear", X[i], prepared(be, TERNARY)[0]),
    "group linear": lambda be, i: call(be, "linear", X[i], prepared(be, GROUPED)[0]),
    "ruled linear": lambda be, i: ruled(be, i),
    "group embed": lambda be, i: call(be, "embed", prepared(be, GROUPED)[0], POSITIONS[i] % 52),
    "linears": lambda be, i: np.concatenate(
        call(be, "linears", X[i], prepared(be, TERNARY, NORMED, GROUPED, DENSE)), axis=1
    ),
    "lm_head": lambda be, i: call(be, "lm_head", X[i], prepared(be, DENSE)[0]),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("op", OPS)
def test_rows_of_an_operation_are_independent(op, be):
    rows = np.arange(N)
    whole = OPS[op](be, rows)
    for subset in (rows[::-1], rng(11).permutation(N), rows[2:5], rows[[7]], rows[[3, 3, 0]]):
        np.testing.assert_array_equal(OPS[op](be, subset), whole[subset])
    for i in rows:
        np.testing.assert_array_equal(OPS[op](be, rows[i : i + 1]), whole[i : i + 1])


@pytest.mark.parametrize("window", [None, 1, 4])
def test_rows_of_attention_are_independent(window, be):
    """Two sequences in the cache; each token's answer does not depend on which others ask in the same call."""
    config = model(GOLDEN / "llama-dense").config  # for its shape: 4 heads on 2 of 32
    heads, kv_heads, head = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    generator = rng(12)
    cache = be.new_cache(config, CacheSpec(slots=2, capacity=12))
    batch = TokenBatch.of([(0, 0, [0] * 11), (1, 0, [0] * 6)])
    n = len(batch)
    k, v = (generator.standard_normal((n, kv_heads, head)).astype(np.float32) for _ in range(2))
    q = generator.standard_normal((n, heads, head)).astype(np.float32)
    call(be, "append", cache, 1, batch, k, v)
    whole = call(be, "attention", q, cache, batch, 1, window)
    for subset in (np.arange(n)[::-1], np.array([3]), np.array([16, 2, 10]), np.arange(5, 9)):
        part = TokenBatch(batch.tokens[subset], batch.positions[subset], batch.slots[subset])
        np.testing.assert_array_equal(call(be, "attention", q[subset], cache, part, 1, window), whole[subset])
