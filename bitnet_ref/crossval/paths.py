"""Every execution path of a backend against the reference: one row for each way in which logits or text are computed.

`Model.run` is the only door to a pass, and a backend names the ways through it (`Backend.paths`). Here each of them is
taken with whole prompts, long ones, prompts in chunks, decoding, several sequences at once, pages, narrow caches, a
screened head, divided layers, and as text. What is compared, and how strictly:

    ops      the plainest path: its logits against the reference's, by the contract's rule for float32
    int8     dense weights in int8: as "ops", of those
    ruled    the same by ggml's rule: each type equal to its plain text; a model as "ops", of it; a feed-forward and a
             mixture in one call equal to their ops
    dense    a matrix in bfloat16, and of each type of blocks: by the contract's rule for float32; each token equal,
             alone or among others
    folded   a model in a Hadamard basis, folded into dense matrices: as "ops"
    others   the logits of every other path against those of "ops": equal, bit for bit
    caches   attention over a narrow cache against the reference's attention over the same stored numbers
    heads    the candidates of a screened head against the whole head: equal, and complete
    adapters sequences with different LoRA adapters in one batch, each against itself alone: equal, bit for bit
    drawn    tokens that kernels draw, one by one and in steps in a row, against NumPy's choice from the logits: equal
    text     every greedy token against the largest logit of a pass over the whole text by "ops": equal
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, cycle, pairwise, product, takewhile
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..api import Model
from ..backends import Backend
from ..backends.backend import DrawRule, Draws, GreedyRun
from ..backends.paged_cache import PagedKVCache, layers_with_keys
from ..backends.split import LayerRun, SplitBackend
from ..errors import BackendUnavailable
from ..families import KINDS
from ..families.block_rule import INPUTS, RuledWeight, ruled_linear, ruled_weights
from ..families.blocks import BLOCK_TYPES, BlockWeight, block_type, int8_weights
from ..families.lora import Adapter, LoraTerm, OnLinear, without_adapters
from ..families.moe import Experts, MoeConfig, MoeLayer
from ..generation import SamplingParams
from ..generation.sampling import choose, distribution, log_probabilities
from ..reference import layers
from ..reference.cache import KVCache, TokenBatch
from ..reference.layers import Array
from ..reference.model import PlainBackend
from ..reference.weights import DenseWeight, LayerWeights, LinearWeight, Norm
from .tolerances import EPSILON, LOGITS_FLOOR, TABLE
from .types import Tokens

PAGE_SIZE = 8
NEW_TOKENS = 10
CHUNKS = (1, 5, 16, 3)  # tokens, over and over
MAX_PREFILL = 9  # tokens before decoding begins
LONG_PROMPT = 192  # tokens, so many that kernels for long prompts take them


@dataclass(frozen=True)
class PathCheck:
    """One execution path in one way of use."""

    path: str  # "replayed, 3 sequences"
    passed: bool
    compared: int  # numbers or tokens
    detail: str  # what is equal, how far apart, or the first difference


OnCheck = Callable[[str, PathCheck], None]  # on_check(backend, check): called when a check is done, to show it


def ignore_check(backend: str, check: PathCheck) -> None:
    """The `OnCheck` that shows nothing."""


def sum_up(checks: Iterable[tuple[str, PathCheck]]) -> str:
    """One line on the checks of several backends, (backend, check) each: how many passed, or which of them failed.

    >>> fine, wrong = PathCheck("ops", True, 1, "equal"), PathCheck("text", False, 1, "differs")
    >>> sum_up([("numpy", fine), ("cython", fine)])
    'All 2 checks passed.'
    >>> sum_up([("numpy", fine), ("cython", wrong)])
    '1 of 2 checks FAILED: cython: text'
    >>> sum_up([])
    'Nothing was checked.'
    """
    rows = list(checks)
    if not rows:
        return "Nothing was checked."
    differing = [f"{backend}: {check.path}" for backend, check in rows if not check.passed]
    if not differing:
        return f"All {len(rows)} checks passed."
    return f"{len(differing)} of {len(rows)} checks FAILED: {'; '.join(differing)}"


MakeBackend = Callable[..., Backend]  # make(**settings) -> a new backend, settings as of its constructor
QUICK_TOKENS = 24
NO_ADAPTERS = "the model has an adapter on, or no linear for one"
LOADS = "loads and runs"  # the row of a backend that fails outright


def check_paths(make: MakeBackend, reference: Model, token_ids: Tokens, *, quick: bool = False) -> Iterator[PathCheck]:
    """Run every execution path of the backend that `make()` gives, on these tokens. Yields each check when it is done.

    reference: the model, on the numpy backend.
    quick: fewer tokens and checks, for a slow backend.
    """
    longest = min(QUICK_TOKENS if quick else 64, reference.config.context_length * 3 // 4)
    return run_checks(_checks(make, reference, list(token_ids)[:longest], quick))


def check_long(model: Model, token_ids: Tokens, expected: Array) -> PathCheck:
    """A long text by the usual path, in one call and in chunks that end within pages, against the logits of "ops"."""
    tokens = list(token_ids)

    def compute() -> Outcome:
        whole = _equal(_whole(model, tokens, None), expected)
        return whole if whole[1] is not None else _equal(_in_chunks(model, tokens, None), expected)

    return next(run_checks([(f"{len(tokens)} tokens", compute)]))


Outcome = tuple[int, str | None, str]  # numbers compared, the problem if there is one, what to say otherwise
Checks = Iterator[tuple[str, Callable[[], Outcome]]]  # (name, check)


def run_checks(checks: Iterable[tuple[str, Callable[[], Outcome]]]) -> Iterator[PathCheck]:
    """Each named check's result, when it is done. A check that raises has failed, and the others still run."""
    for name, compute in checks:
        try:
            compared, problem, detail = compute()
        except Exception as error:
            yield PathCheck(name, False, 0, f"{type(error).__name__}: {error}")
        else:
            yield PathCheck(name, problem is None, compared, problem or detail)


def _checks(make: MakeBackend, reference: Model, tokens: list[int], quick: bool) -> Checks:
    """(name, check) of every path, in the order in which they are shown."""
    model = reference.on(make())
    be = model.backend
    plain = _whole(model, tokens, "ops")
    yield "ops", lambda: _judge_logits(plain, reference, tokens)
    for path in be.paths:
        yield from _path_checks(model, tokens, path, plain)
    for dtype in ("float16", "int8"):
        if dtype in be.cache_dtypes:
            yield f"cache {dtype}", partial(_narrow_cache, model, tokens, dtype)
    for layout, make_other in be.other_layouts().items():
        yield f"{layout} weights", partial(_other_layout, reference.on(make_other()), tokens, plain)
        if layout == "stripped":
            yield "stripped weights, adapters", partial(_adapted_layout, make_other(), model, reference, tokens)
    for name, convert in (item for kind in KINDS.values() for item in kind.other_forms.items()):
        if (weights := convert(reference.weights)) is not None:
            other = Model(reference.config, weights, reference.backend)
            yield name, partial(_other_form, make, other, reference, tokens)
    own = Model(reference.config, int8_weights(reference.weights), reference.backend)
    yield "int8 weights", partial(_other_form, make, own, own, tokens)
    yield "dense blocks", lambda: _dense_blocks(be)
    if be.takes_ruled:
        ruled = Model(own.config, ruled_weights(without_adapters(own.weights)), reference.backend)
        yield "ggml's rule", partial(_other_form, make, ruled, ruled, tokens)
        yield "ggml's rule, each type", lambda: _ruled_blocks(be)
        yield "ggml's rule, feed-forward", lambda: _ruled_feed_forward(be)
    yield "dense bfloat16", lambda: _dense_bfloat16(be)
    yield "recorded", lambda: _equal(model.run_with_cache(tokens, "hook_embed")[0], plain)
    yield "divided layers", lambda: _equal(_whole(_divide(make, reference), tokens, None), plain)
    yield "adapters", lambda: _adapters(model, reference, tokens)
    if be.screens_head:
        yield "screened head", lambda: _screened(reference.on(make(head="screened")), tokens)
        yield "weights in steps", lambda: _in_steps(make, reference, tokens, plain)
        yield "exact head", lambda: _equal(_whole(reference.on(make(head="exact")), tokens, None), plain)
    yield "drawn tokens", lambda: _drawn(be, plain)
    yield "text", lambda: _text(model, tokens)
    yield "text, 3 prompts", lambda: _text_batch(model, _prompts(tokens), lambda p, greedy: model.generate(p, **greedy))
    yield "greedy steps", lambda: _steps_in_a_row(model, tokens, [GREEDY] * 3)
    yield "drawn steps", lambda: _steps_in_a_row(model, tokens, [GREEDY, DrawRule(0.8), DrawRule(1.0, 20, 0.9, 0.05)])
    yield "text, drafts", lambda: _drafted(model, tokens)
    yield "scores", lambda: _scored(model, tokens)
    if not quick:
        if be.name != "numpy":
            yield "long prompt", lambda: _long_prompt(model, tokens)
        shared = 2 * PAGE_SIZE + 2  # tokens, of which two pages; the third page differs
        beginnings = [tokens[:26], tokens[:shared] + tokens[shared:26][::-1], tokens[:26]]
        yield "text, engine", lambda: _text_batch(model, [*_prompts(tokens), *beginnings], partial(_engine, model))
        yield "text, engine, prompt scored", lambda: _prompt_scored(model, tokens)
        if be.screens_head:
            yield "text from a screened head", lambda: _text(reference.on(make(head="screened")), tokens)
            yield "text, sampled from a screened head", lambda: _sampled(make, reference, tokens)


def _path_checks(model: Model, tokens: list[int], path: str, plain: Array) -> Checks:
    """The path with a whole prompt, in chunks, decoding, beside other sequences, and over pages."""
    if path != "ops":
        yield path, lambda: _equal(_whole(model, tokens, path), plain)
    yield f"{path}, in chunks", lambda: _equal(_in_chunks(model, tokens, path), plain)
    yield f"{path}, decoding", lambda: _equal(_decoding(model, tokens, path), plain)
    yield f"{path}, 3 sequences", lambda: _several(model, tokens, path)
    yield f"{path}, pages", lambda: _equal(_over_pages(model, tokens, path), plain)


# -- ways through a pass: logits (T, V) of one sequence ----------------------------------------------------------------


def _whole(model: Model, tokens: list[int], path: str | None) -> Array:
    return model.run(TokenBatch.of([(0, 0, tokens)]), model.new_cache(1, len(tokens)), path=path).all()


def _in_calls(
    model: Model, tokens: list[int], path: str | None, ends: Iterable[int], cache: KVCache | None = None, slot: int = 0
) -> Array:
    """In calls that end at these tokens. cache: None is a new one."""
    cache = model.new_cache(1, len(tokens)) if cache is None else cache
    batches = (TokenBatch.of([(slot, start, tokens[start:end])]) for start, end in pairwise([0, *ends]))
    return np.concatenate([model.run(batch, cache, path=path).all() for batch in batches])


def _in_chunks(model: Model, tokens: list[int], path: str | None) -> Array:
    ends = takewhile(lambda end: end < len(tokens), accumulate(cycle(CHUNKS)))
    return _in_calls(model, tokens, path, [*ends, len(tokens)])


def _long_prompt(model: Model, tokens: list[int]) -> Outcome:
    """The tokens over and over: in one call by the usual path, and in chunks by the plainest."""
    repeated = cycle(tokens)
    long = [next(repeated) for _ in range(min(LONG_PROMPT, model.config.context_length))]
    return _equal(_whole(model, long, None), _in_chunks(model, long, "ops"))


def _decoding(model: Model, tokens: list[int], path: str | None) -> Array:
    """A short prompt, then one token at a time: a replayed step is a replayed one from the second step on."""
    return _in_calls(model, tokens, path, range(_prefill(tokens), len(tokens) + 1))


def _over_pages(model: Model, tokens: list[int], path: str | None) -> Array:
    """As `_decoding`, over a pool of small pages in reverse order."""
    needed = -(-len(tokens) // PAGE_SIZE)
    cache = model.new_cache(2, len(tokens), page_size=PAGE_SIZE, pages=needed + 1)
    assert isinstance(cache, PagedKVCache)
    cache.page_table[1, :needed] = np.arange(needed, 0, -1)
    return _in_calls(model, tokens, path, range(_prefill(tokens), len(tokens) + 1), cache, slot=1)


def _several(
    model: Model, tokens: list[int], path: str | None, names: tuple[str | None, ...] = (None, None, None)
) -> Outcome:
    """Three sequences decoded together, the third joining late, each against itself alone. names: of their adapters."""
    adapters = {slot: model.find_adapter(name) for slot, name in enumerate(names) if name is not None}
    rows, prefill = _three(tokens), _prefill(tokens)
    steps = len(rows[0]) - prefill
    cache, start = model.new_cache(3, len(tokens)), [prefill, prefill + 1, 0]
    logits: list[list[Array]] = [[], [], []]

    def run(parts: list[tuple[int, int, list[int]]]) -> None:
        result = model.run(TokenBatch.of(parts), cache, path=path, adapters=adapters).all()
        ends = np.cumsum([len(ids) for _, _, ids in parts])[:-1]
        for (slot, _, _), part in zip(parts, np.split(result, ends), strict=True):
            logits[slot].append(part)

    run([(slot, 0, rows[slot][: start[slot]]) for slot in (0, 1)])
    for step in range(steps):
        parts = [(slot, start[slot] + step, rows[slot][start[slot] + step :][:1]) for slot in (0, 1)]
        third = rows[2][2 * step : 2 * step + 2]  # a prompt in pieces beside the others' tokens
        parts += [(2, 2 * step, third)] if third else []
        run([part for part in parts if part[2]])
    begun = [slot for slot, each in enumerate(logits) if each]  # the third may not have
    lengths = [sum(map(len, each)) for each in logits]
    alone = [_whole(model.with_adapter(names[slot]), rows[slot][: lengths[slot]], "ops") for slot in begun]
    return _equal(np.concatenate([np.concatenate(logits[slot]) for slot in begun]), np.concatenate(alone))


def _prefill(tokens: list[int]) -> int:
    return max(1, min(MAX_PREFILL, len(tokens) // 3))


def _three(tokens: list[int]) -> list[list[int]]:
    """Three sequences of different lengths and contents."""
    third = max(1, len(tokens) // 3)
    return [tokens[: 2 * third], tokens[third:] or tokens, tokens[third // 2 : 2 * third]]


def _divide(make: MakeBackend, reference: Model) -> Model:
    """The model with its layers divided over two backends of the same kind."""
    count = reference.config.num_hidden_layers
    if count < 2:
        return reference.on(make())
    return reference.on(SplitBackend([LayerRun(make(), 0, count // 2), LayerRun(make(), count // 2, count)]))


def _other_form(make: MakeBackend, other: Model, reference: Model, tokens: list[int]) -> Outcome:
    """The backend's logits of other weights against the reference's."""
    return _judge_logits(_whole(other.on(make()), tokens, None), reference, tokens)


def _drawn_adapters(reference: Model) -> dict[str, Adapter]:
    """Two adapters with drawn factors, in float32 and in bfloat16. None of a model with an adapter on, or no linear for
    one."""
    added: dict[str, Adapter] = {}
    linears = dict(reference.weights.linears())
    one, two = ("q_proj", "gate_proj", "down_proj"), ("v_proj", "up_proj", "down_proj")
    for name, rank, kinds, dtype in (("one", 3, one, np.float32), ("two", 5, two, ml_dtypes.bfloat16)):
        dice, terms = np.random.default_rng(rank), dict[str, LoraTerm]()
        for linear, w in linears.items():
            if linear.endswith(kinds) and w.kind != "experts":
                a = dice.standard_normal((rank, w.shape[1]), dtype=np.float32) / np.float32(w.shape[1] ** 0.5)
                b = dice.standard_normal((w.shape[0], rank), dtype=np.float32)
                terms[linear] = LoraTerm(a.astype(dtype), b.astype(dtype), 0.3)
        added[name] = Adapter(terms)
    is_taken = any(isinstance(w, OnLinear) for w in linears.values())
    return {} if is_taken or not all(adapter.terms for adapter in added.values()) else added


def _adapted_layout(other: Backend, model: Model, reference: Model, tokens: list[int]) -> Outcome:
    """Another layout of the weights with each of two adapters on: as `_other_layout`."""
    compared, detail = 0, NO_ADAPTERS
    subject, plain = reference.on(other), Model(model.config, model.weights, model.backend)
    for name, adapter in _drawn_adapters(reference).items():
        for each in (subject, plain):
            each.put_adapter(name, adapter)
        expected = _whole(plain.with_adapter(name), tokens, "ops")
        count, problem, detail = _other_layout(subject.with_adapter(name), tokens, expected)
        compared += count
        if problem is not None:
            return compared, f"adapter {name}: {problem}", ""
    return compared, None, detail


def _adapters(model: Model, reference: Model, tokens: list[int]) -> Outcome:
    """Two adapters with drawn factors: each on the whole model, then both and none in one batch, on every path and in
    an engine."""
    added = _drawn_adapters(reference)
    subject, plain = (Model(each.config, each.weights, each.backend) for each in (model, reference))
    if not added:
        return 0, None, NO_ADAPTERS
    for name, adapter in added.items():
        subject.put_adapter(name, adapter)
        plain.put_adapter(name, adapter)
    compared, detail = 0, ""
    for name in added:
        own = _whole(subject.with_adapter(name), tokens, "ops")
        count, problem, detail = _judge_logits(own, plain.with_adapter(name), tokens)
        compared += count
        if problem is not None:
            return compared, f"adapter {name}: {problem}", ""
    try:
        subject.backend.check_mixed_adapters()
    except BackendUnavailable:
        return compared, None, f"{detail}; one for all tokens of a batch"
    names = ("one", None, "two")
    for path in subject.backend.paths:
        count, problem, _ = _several(subject, tokens, path, names)
        compared += count
        if problem is not None:
            return compared, f"{path}: {problem}", ""
    prompt = tokens[: _prefill(tokens)] * 3
    greedy = _greedy(subject, prompt)
    with subject.engine(max_batch=3, max_batch_tokens=8, page_size=PAGE_SIZE) as engine:
        for drafter in (None, "lookup"):
            asked = names * 2
            handles = [engine.submit(prompt, adapter=each, speculate=drafter, **greedy) for each in asked]
            for each, handle in zip(asked, handles, strict=True):
                out = handle.result()
                if (wrong := _judge_text(subject.with_adapter(each), prompt, out)) is not None:
                    return compared, f"text of adapter {each}: {wrong}", ""
    return compared, None, f"{detail}; in one batch equal to each alone"


# -- judging -----------------------------------------------------------------------------------------------------------


def _equal(logits: Array, expected: Array) -> Outcome:
    if logits.shape != expected.shape:
        return 0, f"expected logits {expected.shape}, got {logits.shape}", ""
    if np.array_equal(logits, expected):
        return logits.size, None, "equal to the bit"
    token, column = (int(i) for i in np.argwhere(logits != expected)[0])
    distance = float(np.abs(logits - expected).max())
    return logits.size, f"differs from ops by {distance:.1e}, first at token {token}, logit {column}", ""


def _judge_logits(logits: Array, reference: Model, tokens: list[int]) -> Outcome:
    """The contract's rule: at most twice the error of the float32 reference against float64, plus a floor.

    Up to the first int8 that rounds to the other side; `crossval.compare` finds and shows those.
    """
    plain = _whole(reference, tokens, "ops")
    truth = _whole(reference.on(Backend("float64", reference.backend.threads)), tokens, "ops")
    errors, allowed = (np.abs(each - truth).max(axis=1) for each in (logits, plain))
    beyond = np.flatnonzero(errors > 2 * allowed + LOGITS_FLOOR)
    if len(beyond) and (np.abs(logits - plain).max(axis=1)[beyond] > LOGITS_FLOOR).any():
        token = int(beyond[0])
        limit = 2 * allowed[token] + LOGITS_FLOOR
        return logits.size, f"token {token} is {errors[token]:.1e} from float64, allowed {limit:.1e}", ""
    if not (crossed := allowed > LOGITS_FLOOR).any():
        return logits.size, None, f"within {errors.max():.1e} of float64 (numpy: {allowed.max():.1e})"
    distance = np.abs(logits - plain).max()
    near = f"within {distance:.1e} of" if distance else "equal to"
    detail = f"{near} numpy; at {crossed.sum()} tokens an int8 of float64 rounds the other way"
    return logits.size, None, detail


def _other_layout(model: Model, tokens: list[int], plain: Array) -> Outcome:
    """A whole prompt, in chunks, and one token at a time: kernels for many tokens, for few and for one."""
    compared = 0
    for name, way in (("whole", _whole), ("in chunks", _in_chunks), ("decoding", _decoding)):
        count, problem, detail = _equal(way(model, tokens, None), plain)
        compared += count
        if problem is not None:
            return compared, f"{name}, {problem}", ""
    return compared, None, detail


def _in_steps(make: MakeBackend, reference: Model, tokens: list[int], plain: Array) -> Outcome:
    """Decoding, and text, while a screen and strips are made, a step with each pass."""
    stripped = make(head="screened").other_layouts()["stripped"]
    model, writer = (reference.on(stripped(), in_steps=True) for _ in range(2))
    count, problem, detail = _equal(_decoding(model, tokens, None), plain)
    return (count, problem, detail) if problem is not None else _text(writer, tokens)


def _dense_blocks(be: Backend) -> Outcome:
    """Matrices in blocks that have kernels, each as `_dense_matrix`."""
    known = [name for name, block in BLOCK_TYPES.items() if block.number is not None]
    compared = 0
    for name in known:
        count, problem, _ = _dense_matrix(be, *_random_blocks(name))
        compared += count
        if problem is not None:
            return compared, f"{name}: {problem}", ""
    return compared, None, f"{', '.join(known)} by the contract's rule, tokens equal alone and among others"


def _ruled_blocks(be: Backend) -> Outcome:
    """Matrices in blocks by ggml's rule: the bits of its plain text, for one token, for a few and for many."""
    compared = 0
    for w, x in map(_random_blocks, INPUTS):
        ruled = be.prepare(RuledWeight(w))
        expected = ruled_linear(x, RuledWeight(w))
        for count in (1, 3, len(x)):
            y = be.linear(x[:count], ruled)
            compared += y.size
            if not np.array_equal(y, expected[:count]):
                return compared, f"{w.block_type} differs by {np.abs(y - expected[:count]).max():.1e}", ""
    return compared, None, f"{', '.join(INPUTS)} equal to the plain text"


def _ruled_feed_forward(be: Backend) -> Outcome:
    """A feed-forward and a mixture of random matrices by ggml's rule, each in one call where the backend has one: the
    bits of its ops one by one, for one token, for a few and for more than gates take at a time."""
    dice = np.random.default_rng(0)
    x = dice.standard_normal((70, 512), dtype=np.float32)
    norm = Norm(dice.uniform(1e-3, 2e-3, 512).astype(np.float32), 1e-5)  # small, so that its result can be rounded too
    shapes = {"gate_proj": ("Q4_0", 96, 512), "up_proj": ("Q4_1", 96, 512), "down_proj": ("Q8_0", 512, 96)}

    def matrix(name: str, seed: int) -> LinearWeight:
        return RuledWeight(_random_blocks(*shapes[name], seed)[0])

    plain = DenseWeight(dice.standard_normal((4, 512), dtype=np.float32))  # the router; and what is not used
    rest: dict[str, Any] = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), plain)
    rest |= {"attn_norm": norm, "attn_sub_norm": None, "ffn_norm": norm, "ffn_sub_norm": None}
    ws: dict[str, Any] = {name: matrix(name, 0) for name in shapes}
    one = LayerWeights("blocks.0", **rest, **ws)
    ws = {name: Experts(tuple(matrix(name, seed) for seed in range(4)), 2) for name in shapes}
    mixture = MoeLayer("blocks.0", **rest, **ws, router=plain)
    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 4,
    }
    sizes |= {"num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 70, "moe_intermediate_size": 96}
    cfg = MoeConfig(
        model_type="mixtral", activation="silu", norm_eps=1e-5, **sizes, num_experts=4, num_experts_per_tok=2
    )
    compared = 0
    both: dict[str, LayerWeights] = {"feed-forward": one, "mixture": mixture}
    for kind, layer in both.items():
        own = layer.map_linears(be.prepare)
        expected = PlainBackend.feed_forward(be, x, own, cfg)
        for count in (1, 3, len(x)):
            y = be.feed_forward(x[:count], own, cfg)
            compared += y.size
            if not np.array_equal(y, expected[:count]):
                return compared, f"a {kind} differs by {np.abs(y - expected[:count]).max():.1e}", ""
    return compared, None, "a feed-forward and a mixture equal to their ops"


def _random_blocks(
    name: str, n_out: int = 35, n_in: int = 512, seed: int = 0
) -> tuple[BlockWeight, NDArray[np.float32]]:
    """A matrix (n_out, n_in) of that type, and 20 tokens."""
    rng, block = np.random.default_rng(seed), block_type(name)
    x = rng.standard_normal((20, n_in), dtype=np.float32)
    raw = rng.integers(0, 256, (n_out, n_in // block.values, block.nbytes), dtype=np.uint8)
    raw[:, :, [at + 1 for at in block.halves]] &= 0xBB  # finite float16 numbers, below 1
    return BlockWeight(raw.reshape(n_out, -1), block_type=name), x


def _dense_bfloat16(be: Backend) -> Outcome:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((37, 512), dtype=np.float32)
    w = rng.standard_normal((35, 512), dtype=np.float32).astype(ml_dtypes.bfloat16)
    return _dense_matrix(be, DenseWeight(w), x)


def _dense_matrix(be: Backend, w: DenseWeight, x: NDArray[np.float32]) -> Outcome:
    """The contract's rule, and equal bits for 1, 3 and all tokens."""
    wide = w.array.astype(np.float32)
    truth = x.astype(np.float64) @ wide.astype(np.float64).T
    y, one, three = (be.to_host(be.linear(be.from_host(tokens), w)) for tokens in (x, x[10:11], x[15:18]))
    error, allowed = (np.abs(each - truth).max() for each in (y, layers.dense_matmul(x, wide)))
    if not error <= 2 * allowed:
        return y.size, f"{error:.1e} from float64, allowed {2 * allowed:.1e}", ""
    for some, rows in ((one, slice(10, 11)), (three, slice(15, 18))):
        if not np.array_equal(some, y[rows]):
            return y.size, f"a token's row differs among others by {np.abs(some - y[rows]).max():.1e}", ""
    return y.size, None, f"within {error:.1e} of float64 (numpy: {allowed:.1e}), tokens equal alone and among others"


def _narrow_cache(model: Model, tokens: list[int], dtype: str) -> Outcome:
    """The paths with a narrow cache: equal among themselves; what is stored, and attention over it, as the
    reference's."""
    be, cfg, w = model.backend, model.config, model.weights
    narrow = Model(cfg, w, be, cache_dtype=dtype)
    expected = _decoding(narrow, tokens, "ops")
    for path in be.paths:
        count, problem, _ = _equal(_decoding(narrow, tokens, path), expected)
        if problem is not None:
            return count, f"{path}: {problem}", ""
    dice = np.random.default_rng(0)
    sizes = cfg.num_key_value_heads, cfg.head_dim
    k, v = (dice.standard_normal((len(tokens), *sizes), dtype=np.float32) for _ in range(2))
    q = dice.standard_normal((len(tokens), cfg.num_attention_heads, cfg.head_dim), dtype=np.float32)
    plain = Model(cfg, w, Backend("float32", 1), cache_dtype=dtype)
    halves = k[0].astype(np.float16)
    integers = np.arange(halves.size, dtype=np.float32).reshape(sizes) % 200 - 99.5
    integers[:, 0] = 127  # so that the scale is 1
    ties = np.stack([halves.astype(np.float32) + np.spacing(halves) / 2, integers])  # between two numbers of the cache
    for mine, theirs in ((ties, -ties), (k, v)):
        expected_rows, rows = (_stored(each, mine, theirs) for each in (plain, narrow))
        for a, b, name in zip(expected_rows, rows, ("keys", "values"), strict=True):
            if not np.array_equal(a, b):
                return a.size, f"the {name} at rest differ by up to {np.abs(a - b).max():.1e}", ""
    cache, batch, layer = narrow.new_cache(1, len(tokens)), TokenBatch.of([(0, 0, tokens)]), layers_with_keys(cfg)[0]
    with be.running():
        placed = be.place(batch)
        be.append(cache, layer, placed, be.from_host(k), be.from_host(v))
        z = be.to_host(be.attention(be.from_host(q), cache, placed, layer, None))
    right = plain.new_cache(1, len(tokens))
    right.append(layer, batch, k, v)
    for i in range(len(tokens)):
        keys, values = right.visible(layer, 0, i, None)
        pattern = layers.softmax(layers.attention_scores(q[i], keys))
        expected_z = layers.attention_values(pattern, values)
        if np.abs(z[i] - expected_z).max() > 2 * TABLE["attention values"].alone * EPSILON * np.abs(values).max():
            return z.size, f"attention over the stored numbers differs at token {i}", ""
    return expected.size + z.size, None, "equal to ops; stored numbers equal to the reference's"


def _stored(model: Model, k: Array, v: Array) -> tuple[Array, Array]:
    """Keys and values (T, G, d) as a cache of the model keeps them."""
    be, cache, batch = model.backend, model.new_cache(1, len(k)), TokenBatch.of([(0, 0, [0] * len(k))])
    layer = layers_with_keys(model.config)[0]
    with be.running():
        be.append(cache, layer, be.place(batch), be.from_host(k), be.from_host(v))
    return cache.stored(layer, batch)


def _screened(model: Model, tokens: list[int]) -> Outcome:
    """Candidates for several k, and of single ids, against the whole head."""
    vocab, batch, compared = model.config.vocab_size, TokenBatch.of([(0, 0, tokens)]), 0
    logits = _whole(model, tokens, None)
    for k in (1, 7, 40):
        also = [[(11 * i) % vocab, vocab - 1] for i in range(len(tokens))]
        result = model.run(batch, model.new_cache(1, len(tokens)), top=[(k, ids) for ids in also])
        for i, token in enumerate(result.tokens):
            compared += len(token.ids)
            largest = np.flatnonzero(logits[i] >= np.sort(logits[i])[-min(k, vocab)])
            if not np.array_equal(token.values, logits[i][token.ids]):
                return compared, f"k={k}: logits of token {i} differ from those of the whole head", ""
            if not set(largest) | set(also[i]) <= set(token.ids.tolist()):
                return compared, f"k={k}: a logit among the largest of token {i} is missing", ""
            if not token.complete:
                low, high = token.rest()
                rest = np.delete(logits[i], token.ids)
                if not ((low <= rest) & (rest <= high)).all():
                    return compared, f"k={k}: a bound of token {i} does not hold", ""
            if i == 0 and not np.array_equal(token.all(), logits[i]):
                return compared, f"k={k}: all logits of token {i}, computed later, differ", ""
    share = compared / (3 * len(tokens) * vocab)
    return compared, None, f"equal to the whole head, of which it computed {share:.1%}"


# -- text --------------------------------------------------------------------------------------------------------------


def _greedy(model: Model, prompt: list[int]) -> dict[str, Any]:
    max_tokens = min(NEW_TOKENS, model.config.context_length - len(prompt))
    return {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}


def _judge_text(model: Model, prompt: list[int], out: Any, top: int = 0) -> str | None:
    """The problem with a greedy text, or None: each token is the largest logit of a pass by ops over all before it, and
    the log probabilities, of the `top` most likely tokens too, are the softmax of these logits."""
    logits = _whole(model, [*prompt, *out.token_ids[:-1]], "ops")[len(prompt) - 1 :]
    for at, (token, expected) in enumerate(zip(out.token_ids, logits.argmax(axis=1).tolist(), strict=True)):
        if token != expected:
            return f"new token {at} is {token}, and the largest logit is that of {expected}"
    logprobs = log_probabilities(logits)
    if np.abs(np.array(out.logprobs) - logprobs.max(axis=1)).max() > LOGITS_FLOOR:
        return "the log probabilities of the new tokens are not those of the logits"
    likeliest = np.argsort(-logprobs, axis=1, kind="stable")[:, :top]
    for at, ids in enumerate(likeliest.tolist() if top else []):
        given, expected = out.top_logprobs[at], {token: float(logprobs[at, token]) for token in ids}
        if given.keys() != expected.keys() or any(abs(given[each] - expected[each]) > LOGITS_FLOOR for each in ids):
            return f"the {top} most likely tokens at new token {at} are {expected}, got {given}"
    return None if top or out.top_logprobs is None else "top_logprobs were not asked for"


def _judge_scores(model: Model, tokens: list[int], first: int, given: Any, is_greedy: bool | None = None) -> str | None:
    """The problem with the ln p of tokens[first:], or None: they are those of a pass by ops over all tokens."""
    rows = log_probabilities(_whole(model, tokens, "ops"))[first - 1 : -1]
    targets = np.array(tokens[first:], dtype=np.int64)
    expected = rows[np.arange(len(rows)), targets]
    if is_greedy not in (None, bool((rows.argmax(axis=1) == targets).all())):
        return f"is_greedy is {is_greedy}"
    if len(given) != len(expected):
        return f"expected {len(expected)} log probabilities, got {len(given)}"
    distances = np.abs(np.array(given) - expected)
    if not (distances <= LOGITS_FLOOR).all():
        worst = int(distances.argmax())
        return f"ln p of token {first + worst} is {given[worst]:.6f}, and by the logits {expected[worst]:.6f}"
    return None


def _scored(model: Model, tokens: list[int]) -> Outcome:
    """`Model.score`: two prompts, one of them with several continuations, which are computed together."""
    middle, count = max(1, len(tokens) // 2), 0
    rest = tokens[middle:] or tokens
    ends = [rest, rest[::-1], tokens[:3]]
    for prompt, continuations in ((tokens[:middle], ends), (tokens[:1], [tokens[1:] or rest])):
        for number, (end, score) in enumerate(zip(continuations, model.score(prompt, continuations), strict=True)):
            problem = _judge_scores(model, [*prompt, *end], len(prompt), score.logprobs, score.is_greedy)
            if problem is not None:
                return count, f"continuation {number}: {problem}", ""
            count += len(end)
    return count, None, "ln p of each token is that of the logits"


def _prompt_scored(model: Model, tokens: list[int]) -> Outcome:
    """`prompt_logprobs` beside another prompt, in chunks, with pages that the cache would have."""
    options: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    prompts = [tokens[:26], tokens[:26][::-1], tokens[:26]]
    with model.engine(max_batch=2, max_batch_tokens=8, page_size=PAGE_SIZE) as engine:
        outs: Any = [each.result() for each in [engine.submit(each, prompt_logprobs=2, **options) for each in prompts]]
    for number, (prompt, out) in enumerate(zip(prompts, outs, strict=True)):
        first, *rest = out.prompt_logprobs
        given = [entry[token] for entry, token in zip(rest, prompt[1:], strict=True)]
        if first is not None or (problem := _judge_scores(model, prompt, 1, given)) is not None:
            return number, f"prompt {number}: {problem if first is None else 'its first token has a score'}", ""
    return sum(map(len, prompts)), None, "ln p of each token is that of the logits"


def _text(model: Model, tokens: list[int]) -> Outcome:
    prompt = tokens[: 2 * _prefill(tokens)]
    out: Any = model.generate(prompt, logprobs=3, **_greedy(model, prompt))
    return len(out.token_ids), _judge_text(model, prompt, out, 3), "every token has the largest logit"


GREEDY = DrawRule(0.0)


def _steps_in_a_row(model: Model, tokens: list[int], rules: list[DrawRule]) -> Outcome:
    """Three sequences over pages, several steps at a time: what the logits of passes by ops over the same texts choose.

    The first sequence ends after fewer tokens than the others. The states of each step give its logits again.
    rules: how each sequence draws its tokens."""
    prompts = _prompts(tokens)
    params = [SamplingParams(**rule._asdict()) for rule in rules]
    numbers = np.random.default_rng(0).random((3, NEW_TOKENS + 4))
    new = _greedy(model, max(prompts, key=len))["max_tokens"]
    texts, lefts, taken = [list(prompt) for prompt in prompts], [max(1, new - 3), new, new], 0
    cache = model.new_cache(3, max(map(len, prompts)) + new, page_size=PAGE_SIZE)
    parts = [(slot, 0, prompt) for slot, prompt in enumerate(prompts)]
    logits: list[list[Array]] = [[], [], []]
    while parts:
        left = np.array([lefts[slot] for slot, _, _ in parts], dtype=np.int64)
        new_numbers = [numbers[slot, len(texts[slot]) - len(prompts[slot]) :][:4] for slot, _, _ in parts]
        drawn = np.array([rules[slot] for slot, _, _ in parts])
        draws = Draws(drawn, np.stack(new_numbers, axis=1)) if drawn[:, 0].any() else None
        run = GreedyRun(4, left, np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.uint8), draws)
        batch = TokenBatch.of(parts, range(len(parts)))
        is_prompt = len(batch) > len(parts)
        steps = [] if is_prompt else list(model.run_greedy(batch, cache, run))
        taken += len(steps)
        for number, step in enumerate(steps or [model.run(batch, cache).tokens]):
            for (slot, _, _), uniforms, each in zip(parts, new_numbers, step, strict=True):
                if lefts[slot]:
                    row = each.all()
                    token = int(each.ids[0]) if each.is_choice else choose(row, params[slot], uniforms[number])
                    texts[slot].append(token)
                    logits[slot].append(row)
                    if each.is_choice and row[token] != each.values[0]:
                        return 0, f"sequence {slot}: a token's logit is not that of its states", ""
                    lefts[slot] -= 1
        parts = [(slot, len(text) - 1, text[-1:]) for slot, text in enumerate(texts) if lefts[slot]]
    for slot, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        expected = _whole(model, text[:-1], "ops")[len(prompt) - 1 :]
        pairs = zip(expected, numbers[slot].tolist(), strict=False)
        if text[len(prompt) :] != [choose(row, params[slot], uniform) for row, uniform in pairs]:
            return taken, f"sequence {slot}: a token is not what its logits choose", ""
        if (count := _equal(np.stack(logits[slot]), expected))[1] is not None:
            return count
    compared = sum(map(len, texts)) - sum(map(len, prompts))
    return compared, None, f"equal to the bit; {taken} steps without Python between them" if taken else "one by one"


def _drafted(model: Model, tokens: list[int]) -> Outcome:
    """Guesses of a lookup, in a prompt that ends as it begins, and of the model itself, all of which are right."""
    prompt = tokens[: _prefill(tokens)] * 2
    for drafter in ("lookup", model):
        out: Any = model.generate(prompt, logprobs=3, speculate=drafter, **_greedy(model, prompt))
        if (problem := _judge_text(model, prompt, out, 3)) is not None:
            return len(out.token_ids), problem, ""
    right, drafted = out.stats.accepted_tokens, out.stats.drafted_tokens
    if right != drafted or (drafted == 0 and not model.config.has_states):
        return len(out.token_ids), f"of {drafted} tokens guessed by the model itself, {right} were right", ""
    return len(out.token_ids), None, f"every token has the largest logit; {right} were guessed"


def _drawn(be: Backend, logits: Array) -> Outcome:
    """Tokens drawn from these logits (T, V) against the sum of probabilities, one after another."""
    compared, by_backend, numbers = 0, 0, np.random.default_rng(0).random(8).tolist()
    rules = [DrawRule(0.7), DrawRule(1.0), DrawRule(1.0, 20), DrawRule(0.7, 0, 0.9), DrawRule(0.7, 20, 0.9, 0.05)]
    for row, rule in product(logits[:8], rules):
        params = SamplingParams(**rule._asdict())
        ids, probabilities = distribution(row, params)
        ends, own_rule = np.cumsum(probabilities), rule._replace(top_k=rule.top_k if rule.top_k < len(row) else 0)
        for uniform in (0.0, *numbers):
            expected = int(ids[np.searchsorted(ends, uniform, side="right")])
            drawn = be.draw(row, own_rule, uniform)
            compared, by_backend = compared + 1, by_backend + (drawn is not None)
            if choose(row, params, uniform, be.draw) != expected or drawn not in (None, expected):
                return compared, f"{uniform} by {rule}: {drawn}, not {expected}", ""
    return compared, None, f"equal to the sum of probabilities; {by_backend} by kernels"


def _prompts(tokens: list[int]) -> list[list[int]]:
    return [row[: _prefill(tokens) + i] for i, row in enumerate(_three(tokens))]


def _text_batch(model: Model, prompts: list[list[int]], generate: Callable[..., Any]) -> Outcome:
    greedy = _greedy(model, max(prompts, key=len))
    outs = generate(prompts, greedy)
    for i, (prompt, out) in enumerate(zip(prompts, outs, strict=True)):
        if len(out.token_ids) != greedy["max_tokens"]:
            return i + 1, f"prompt {i}: {greedy['max_tokens']} new tokens were asked for, got {len(out.token_ids)}", ""
        if (problem := _judge_text(model, prompt, out)) is not None:
            return i + 1, f"prompt {i}: {problem}", ""
    return sum(len(out.token_ids) for out in outs), None, "every token has the largest logit"


def _engine(model: Model, prompts: list[list[int]], greedy: dict[str, Any]) -> Any:
    with model.engine(max_batch=2, max_batch_tokens=8, page_size=PAGE_SIZE) as engine:
        return engine.generate(prompts, **greedy)


def _sampled(make: MakeBackend, reference: Model, tokens: list[int]) -> Outcome:
    """Sampling with a seed: the same tokens from a screened head as from the whole one."""
    texts = []
    settings: dict[str, Any] = {"max_tokens": 5, "temperature": 0.8, "top_k": 20, "seed": 1, "repetition_penalty": 1.1}
    for head in ("screened", "exact"):
        out: Any = reference.on(make(head=head)).generate(tokens[: _prefill(tokens)], ignore_eos=True, **settings)
        texts.append(out.token_ids)
    problem = None if texts[0] == texts[1] else "a screened head gives other tokens than the whole one"
    return len(texts[0]), problem, "equal to the whole head's"
