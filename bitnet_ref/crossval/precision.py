"""The error of narrow numbers: the logits of a text in float16 or bfloat16, of weights in int8, or with a narrow cache.

Each token follows the true text (teacher forcing), so errors do not accumulate as they do when each run continues with
its own choices; only the greedy continuation of `measure_precision` does that.

16-bit dtypes are not part of the contract, so there is a measurement and no verdict. float32 on the same backend is
listed beside them: it shows the effect of another order of sums.

Measured on the emulated device, which has NumPy's float32 product where a card has cuBLAS, as one prompt:

    storyteller, ternary; 171 tokens of a story; logits up to 19.2
        dtype     max |d logit|   mean      mean KL   max KL    same greedy choice   continued alike
        float32   7.6e-06         5.3e-07   1.1e-13   5.3e-13   100%                 48 of 48 tokens
        float16   2.5e-01         2.8e-02   2.4e-04   1.0e-03   98.8%                 5 of 48
        bfloat16  2.2e-01         3.0e-02   3.0e-04   1.6e-03   98.2%                 48 of 48
    golden llama-dense, dense, random weights; 200 random tokens; logits up to 25.1
        float32   7.6e-06         8.6e-07   3.8e-13   2.2e-12   100%                 48 of 48
        float16   8.1e-03         1.2e-03   5.5e-07   4.4e-06   100%                 48 of 48
        bfloat16  6.2e-02         1.0e-02   3.4e-05   1.8e-04   99.5%                48 of 48

Token by token, storyteller's errors are much the same and the dense model's a half to a ninth, because a decoding step
does not round activations. In the dense model float16 (11 bits) is 8 times as accurate as bfloat16 (8 bits). In the
ternary model it is not: a rounded key or value moves some activation across a rounding boundary of int8, and that step
of 1/127 is larger than either rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..api import Model
from ..backends import Backend, choose_backend
from ..backends.paged_cache import CACHE_DTYPES
from ..errors import GenerationError
from ..families.blocks import int8_weights
from ..generation import Generation
from ..reference.cache import TokenBatch
from ..reference.layers import Array
from .metrics import measure_logits
from .token_ids import common_prefix
from .types import Ints, Tokens

DTYPES = ("float32", "float16", "bfloat16")
CONTINUED = 48  # tokens of the greedy continuation, and of its prompt
WAYS = ("prompt", "steps")
CHUNK = 64  # tokens per pass over a cache, so that a large vocabulary's logits are never held for the whole text

TEXT = """
    Once upon a time there lived in a small house beside the forest an old woman and her grandson. Every morning
    the boy went out to gather wood, and every evening he came home and told her what he had seen. One day he
    met a fox, who sat upon a stone and looked at him. "Why do you carry so much?" said the fox. "Because the
    winter is long," said the boy, "and my grandmother is cold." The fox thought about it for a while. Then she
    said, "Follow me, and I will show you a tree that has been waiting for you these hundred years." So they
    walked together under the dark branches until they came to a green meadow, and in the middle of it stood the
    tallest tree that he had ever seen.
"""  # written for this package


@dataclass(frozen=True)
class PrecisionError:
    """The error of one dtype. KL(reference || dtype) in nats."""

    dtype: str
    way: str  # "prompt": all tokens in one pass; "steps": one by one, as text is generated
    max_logit_error: float  # over all tokens and the whole vocabulary
    mean_logit_error: float
    kl_mean: float
    kl_max: float
    greedy_agreement: float  # share of tokens after which the likeliest next one is the same


@dataclass(frozen=True)
class PrecisionBench:
    """errors: one for each dtype and way.   continued: the length of the reference's greedy continuation.
    same_tokens: for each dtype how many of its tokens come before the first difference."""

    backend: str
    device: str | None  # for cupy: the card, or its emulation
    tokens: int
    largest_logit: float
    errors: tuple[PrecisionError, ...]
    continued: int
    same_tokens: dict[str, int]


def measure_precision(
    model: Model, backend: str = "cupy", dtypes: Sequence[str] = DTYPES, text: str | Tokens | None = None
) -> PrecisionBench:
    """The error of each dtype of a backend on a text (or token ids), cut to the model's context.

    text: None takes a short story. Raises BackendUnavailable, ConfigError for a dtype that the backend does not have,
    GenerationError for a text of fewer than two tokens, TokenizerError for a text if the model has no tokenizer.
    """
    tokens = _tokens_of(model, text)
    if len(tokens) < 2:
        raise GenerationError(f"measure_precision: expected a text of two tokens or more, got {len(tokens)}")
    reference = model.on(Backend("float32", model.backend.threads))
    exact = reference.logits(tokens)
    start = [int(token) for token in tokens[: min(CONTINUED, len(tokens) // 2)]]
    right = _continuation(reference, start)
    errors, same, device = [], {}, None
    for dtype in dtypes:
        computed_in = "float32" if dtype == "int8" else dtype  # int8: `load(..., dense="int8")`
        own = Model(model.config, int8_weights(model.weights), model.backend) if dtype == "int8" else model
        subject = own.on(choose_backend(backend, dtype=computed_in, threads=model.backend.threads))
        device = getattr(getattr(subject.backend, "ws", None), "device", None) or device
        for way in WAYS:
            logits = _logits(subject, tokens, way)
            distance = measure_logits(exact, logits)
            difference = np.abs(exact - logits)
            kl = max(0.0, distance.kl_mean), max(0.0, distance.kl_max)  # rounding may leave -1e-18
            sizes = float(difference.max()), float(difference.mean(dtype=np.float64))
            errors.append(PrecisionError(dtype, way, *sizes, *kl, distance.top1_agreement))
        same[dtype] = common_prefix(_continuation(subject, start), right)
        subject.close()
    largest, name = float(np.abs(exact).max()), None if device is None else device.name
    return PrecisionBench(backend, name, len(tokens), largest, tuple(errors), len(right), same)


def _tokens_of(model: Model, text: str | Tokens | None) -> Ints:
    """The ids of a text (None: the short story), cut to the model's context."""
    text = " ".join(TEXT.split()) if text is None else text
    ids = model.tokenizer.encode(text) if isinstance(text, str) else list(text)
    if not ids:
        raise GenerationError("the text has no tokens")
    return model.check_tokens(ids[: model.config.context_length])


def _logits(model: Model, tokens: Ints, way: str) -> Array:
    cache = model.new_cache(1, len(tokens))
    if way == "prompt":
        return model.run(TokenBatch.of([(0, 0, tokens)]), cache).all()
    steps = (TokenBatch.of([(0, i, tokens[i : i + 1])], logits_of_last=[0]) for i in range(len(tokens)))
    return np.concatenate([model.run(step, cache).all() for step in steps])


def _continuation(model: Model, start: list[int]) -> list[int]:
    count = min(CONTINUED, model.config.context_length - len(start))
    out = model.generate(start, max_tokens=count, temperature=0.0, ignore_eos=True)
    assert isinstance(out, Generation)
    return list(out.token_ids)


@dataclass(frozen=True)
class CacheError:
    """The error of one cache dtype. KL(float32 || dtype) in nats."""

    dtype: str
    bytes_per_token: int
    max_logit_error: float  # over all tokens and the whole vocabulary
    kl_mean: float
    kl_max: float
    greedy_agreement: float  # share of tokens with the same most likely next token


@dataclass(frozen=True)
class CacheBench:
    """One `CacheError` per cache dtype; all are measured against float32."""

    backend: str
    tokens: int
    errors: tuple[CacheError, ...]


def measure_cache(model: Model, text: str | Tokens | None = None, dtypes: Sequence[str] = CACHE_DTYPES) -> CacheBench:
    """The error of each cache dtype on a text (or token ids), cut to the model's context. Only the cache differs.

        for error in measure_cache(bitnet_ref.load()).errors:
            print(error.dtype, error.bytes_per_token, error.kl_mean)

    text: None means a short story. Raises ShapeError for a dtype that the backend does not support, GenerationError
    for a text without tokens, TokenizerError for a text when the model has no tokenizer.
    """
    tokens = _tokens_of(model, text)
    caches = {dtype: model.new_cache(1, len(tokens), dtype=dtype) for dtype in dict.fromkeys(("float32", *dtypes))}
    chunks: dict[str, list[tuple[int, float, float, float, float]]] = {dtype: [] for dtype in caches}
    for start in range(0, len(tokens), CHUNK):
        batch = TokenBatch.of([(0, start, tokens[start : start + CHUNK])])
        exact = model.run(batch, caches["float32"]).all()
        for dtype, cache in caches.items():
            logits = exact if dtype == "float32" else model.run(batch, cache).all()
            distance = measure_logits(exact, logits)
            max_error = float(np.abs(exact - logits).max())
            chunks[dtype].append((len(batch), max_error, distance.kl_mean, distance.kl_max, distance.top1_agreement))
    errors = []
    for dtype in dtypes:
        counts, max_errors, kl_means, kl_maxima, agreements = zip(*chunks[dtype], strict=True)
        kl_mean, agreement = (float(np.average(values, weights=counts)) for values in (kl_means, agreements))
        kl = max(0.0, kl_mean), max(0.0, *kl_maxima)
        errors.append(CacheError(dtype, caches[dtype].bytes_per_token, max(max_errors), *kl, agreement))
    return CacheBench(model.backend.name, len(tokens), tuple(errors))
