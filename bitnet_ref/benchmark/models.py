"""A whole model: tokens a second of a prompt and of decoding, against the time that reading its weights must take.

A decoded token reads every weight once. So memory bandwidth over the bytes of a token is a bound on its speed, unless
the model fits in the processor's cache. A prompt's tokens share what is read: there the bound is the rate of the
instruction that multiplies, over the multiply-adds of a token's ternary linears; the head sees only the last token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..api import Model
from ..backends import HeadCandidates, HeadNeed, ScreenedHead
from ..errors import GenerationError
from ..generation.params import SamplingParams
from ..generation.sampling import choose, choose_among, log_probability
from ..notebook.profiling import OpTime
from ..notebook.profiling import Profile as ModelProfile
from ..reference.cache import KVCache, TokenBatch
from ..reference.config import ModelConfig
from ..reference.weights import ModelWeights, TernaryLinear
from ..system.memory import peak_memory_bytes
from .bandwidth import MemoryReader, last_level_cache_bytes
from .ceiling import peak_of
from .timing import Timing, relative_speed, seconds
from .validate import Check, check_model

PROMPT_REPEATS = 3
GREEDY = SamplingParams()
PEAK_CALLS = 10  # of about 1 ms each
STEPS_BETWEEN_READS = 4  # of decoding: the read empties the caches, which a small model lives in

Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class StepBytes:
    """What decoding one token reads."""

    ternary: int  # planes, with their padding, and biases
    dense: int  # linears of a model, or part of one, that is not quantised
    head: int  # all of it, or its screen and the rows that this leaves
    cache: int  # keys and values that the token sees
    other: int  # norms, and one row of the embedding

    @property
    def total(self) -> int:
        return self.ternary + self.dense + self.head + self.cache + self.other


def bytes_of_step(
    config: ModelConfig, weights: ModelWeights, position: float, float_bytes: int = 4, head_rows: float = 1
) -> StepBytes:
    """Bytes read to decode the token at `position` (a mean of several may be given): weights, head, cache.

    float_bytes: of one value of the cache. head_rows: logits computed for a token, where the head is screened.
    """
    ternary = dense = 0
    norms = weights.final_norm.nbytes
    for layer in weights.layers:
        for _, weight in layer.linears():
            if isinstance(weight, TernaryLinear):
                ternary += weight.nbytes
                norms += 0 if weight.input_norm is None else weight.input_norm.weight.nbytes
            else:
                dense += weight.nbytes
        vectors = (layer.attn_norm, layer.attn_sub_norm, layer.ffn_norm, layer.ffn_sub_norm)
        norms += sum(vector.nbytes for vector in vectors if vector is not None)
    seen = min(position + 1, config.sliding_window or np.inf)
    cache = round(2 * config.num_hidden_layers * config.kv_size * float_bytes * seen)
    row = weights.embedding.array[:1].nbytes
    head = weights.lm_head.nbytes
    if isinstance(weights.lm_head, ScreenedHead):
        head = weights.lm_head.screen_nbytes + round(head_rows * row)
    return StepBytes(ternary, dense, head, cache, norms + row)


@dataclass(frozen=True)
class Profile:
    """Where the time of some forward passes went: each op, slowest first, and what is outside all of them."""

    tokens: int
    step_s: float  # all passes together
    outside_s: float  # of it, not in any op: the model's text, residual sums, the cache's writes, the finiteness check
    ops: list[OpTime]

    def to_dict(self) -> dict[str, Any]:
        facts = ("calls", "total_s", "nbytes", "gb_per_s")
        ops = [{"op": op.name, **{fact: getattr(op, fact) for fact in facts}} for op in self.ops]
        return {"tokens": self.tokens, "step_s": self.step_s, "outside_s": self.outside_s, "ops": ops}


@dataclass(frozen=True)
class ModelBench:
    """Speeds of one model on one backend. Without equality there are none."""

    backend: str
    kernel_set: str | None  # of the cython backend
    threads: int
    config: dict[str, Any]
    weight_bytes: int
    prompt_tokens: int
    new_tokens: int
    check: Check
    step_bytes: StepBytes  # at the mean position of the decoded tokens
    last_level_cache_bytes: int
    read_how: str
    head: str  # "exact", or "screened": the greedy token is found by bounds on the other logits
    read_bytes: int
    ternary_multiply_adds: int  # of a token
    read: Timing | None = None
    peak_multiply_adds: int = 0  # of one call of the product instruction alone; 0: not known for this backend
    peak: Timing | None = None
    prompt: Timing | None = None  # the whole prompt
    decode: Timing | None = None  # one token, through `Model.forward`
    decode_s: float | None = None  # all new tokens
    choose: Timing | None = None  # the likeliest token and, where all logits are known, its log probability
    head_rows: float | None = None  # logits computed for a token, on average
    peak_memory_bytes: int | None = None  # less the buffer that the plain read goes through
    profiles: dict[str, Profile] = field(default_factory=dict)  # "prompt", "decode", when asked for

    @property
    def read_gb_per_s(self) -> float | None:
        return self.read.giga_per_s(self.read_bytes) if self.read else None

    @property
    def prompt_tokens_per_s(self) -> float | None:
        """At the best time; `prompt` has the median."""
        return self.prompt_tokens / self.prompt.best_s if self.prompt else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Of the best step."""
        return 1 / self.decode.best_s if self.decode else None

    @property
    def decode_tokens_per_s_median(self) -> float | None:
        return 1 / self.decode.median_s if self.decode else None

    @property
    def bound_tokens_per_s(self) -> float | None:
        """What the best plain read allows: bandwidth over the bytes of a token."""
        return self.read_bytes / self.read.best_s / self.step_bytes.total if self.read else None

    @property
    def of_bound(self) -> float | None:
        """Best step over the best read's bound."""
        return relative_speed("best_s", self.step_bytes.total, self.decode, self.read_bytes, self.read)

    @property
    def of_bound_median(self) -> float | None:
        return relative_speed("median_s", self.step_bytes.total, self.decode, self.read_bytes, self.read)

    @property
    def prompt_bound_tokens_per_s(self) -> float | None:
        """What the best rate of the product instruction allows."""
        if self.peak is None or self.ternary_multiply_adds == 0:
            return None
        return self.peak_multiply_adds / self.peak.best_s / self.ternary_multiply_adds

    @property
    def of_prompt_bound(self) -> float | None:
        """Best prompt over the best rate's bound."""
        return self._of_prompt_bound("best_s")

    @property
    def of_prompt_bound_median(self) -> float | None:
        return self._of_prompt_bound("median_s")

    def _of_prompt_bound(self, which: Literal["best_s", "median_s"]) -> float | None:
        if self.ternary_multiply_adds == 0:
            return None
        work = self.prompt_tokens * self.ternary_multiply_adds
        return relative_speed(which, work, self.prompt, self.peak_multiply_adds, self.peak)

    @property
    def fits_in_cache(self) -> bool:
        """Whether the bound is none: the weights need not come from memory."""
        return self.step_bytes.total <= self.last_level_cache_bytes

    @property
    def of_weight_bytes(self) -> float | None:
        """Peak memory of the process, Python and NumPy included, over the bytes of the weights."""
        return self.peak_memory_bytes / self.weight_bytes if self.peak_memory_bytes else None

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        derived = ("read_gb_per_s", "prompt_tokens_per_s", "decode_tokens_per_s", "decode_tokens_per_s_median")
        memory = ("bound_tokens_per_s", "of_bound", "of_bound_median", "fits_in_cache", "of_weight_bytes")
        arithmetic = ("prompt_bound_tokens_per_s", "of_prompt_bound", "of_prompt_bound_median")
        return {
            **asdict(self),
            "step_bytes": {**asdict(self.step_bytes), "total": self.step_bytes.total},
            "equal": self.check.equal,
            **{name: getattr(self, name) for name in derived + memory + arithmetic},
            "profiles": {name: profile.to_dict() for name, profile in self.profiles.items()},
        }


def measure_model(
    model: Model,
    prompt_tokens: int = 64,
    new_tokens: int = 32,
    *,
    profile: bool = False,
    reader_bytes: int | None = None,
    progress: Progress | None = None,
) -> ModelBench:
    """Compare the model with the reference, then time a random prompt and greedy decoding after it.

    Raises GenerationError when prompt and new tokens do not fit the context.
    """
    context = model.config.context_length
    if min(prompt_tokens, new_tokens) < 1 or prompt_tokens + new_tokens > context:
        asked = f"{prompt_tokens} prompt tokens and {new_tokens} new ones"
        raise GenerationError(f"expected at least 1 of each and at most {context} together, got {asked}")
    steps = _Steps(progress, 1 + PROMPT_REPEATS + new_tokens + (1 + new_tokens if profile else 0))
    prompt = np.random.default_rng(1).integers(0, model.config.vocab_size, prompt_tokens)
    check = check_model(model, prompt.tolist())
    steps.done()
    before = peak_memory_bytes()
    reader = MemoryReader(model.backend.threads, reader_bytes)
    mean_position = mean(range(prompt_tokens, prompt_tokens + new_tokens))
    facts: dict[str, Any] = {
        "backend": model.backend.name,
        "kernel_set": getattr(model.backend, "simd", None),
        "threads": model.backend.threads,
        "config": model.config.to_dict(),
        "weight_bytes": model.weights.nbytes,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "check": check,
        "step_bytes": bytes_of_step(model.config, model.weights, mean_position, model.backend.dtype.itemsize),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "read_how": reader.how,
        "head": model.head,
        "read_bytes": reader.nbytes,
        "ternary_multiply_adds": sum(
            math.prod(weight.shape) for _, weight in model.weights.linears() if isinstance(weight, TernaryLinear)
        ),
    }
    if not check.equal:
        return ModelBench(**facts)

    cache = model.new_cache(slots=1, capacity=prompt_tokens + new_tokens)
    reader.read()  # the first pass finds cold tables
    reads, peaks, prompts, decodes, chooses, head_rows = [], [], [], [], [], []
    peak, facts["peak_multiply_adds"] = peak_of(model.backend) or (None, 0)
    for _ in range(PROMPT_REPEATS):
        reads.append(seconds(reader.read))
        if peak is not None:
            peaks.append(seconds(peak, PEAK_CALLS))
        start = time.perf_counter()
        found = prefill(model, prompt, cache)
        prompts.append(time.perf_counter() - start)
        steps.done()
    for step in range(new_tokens):
        if step % STEPS_BETWEEN_READS == 0:
            reads.append(seconds(reader.read))
        start = time.perf_counter()
        token = likeliest(found)
        if found.complete:
            log_probability(found.logits, token)
        chosen = time.perf_counter()
        found = decode(model, token, prompt_tokens + step, cache)
        head_rows.append(len(found.ids))
        decodes.append(time.perf_counter() - chosen)
        chooses.append(chosen - start)
        steps.done()
    size = model.backend.dtype.itemsize
    facts["step_bytes"] = bytes_of_step(model.config, model.weights, mean_position, size, mean(head_rows))
    # A higher peak than before was reached with the buffer in place; the same peak was the model's own.
    after = peak_memory_bytes()
    return ModelBench(
        **facts,
        read=Timing.of(reads),
        peak=Timing.of(peaks) if peaks else None,
        prompt=Timing.of(prompts),
        decode=Timing.of(decodes),
        decode_s=sum(decodes),
        choose=Timing.of(chooses),
        head_rows=mean(head_rows),
        peak_memory_bytes=max(before, after - reader.nbytes),
        profiles=profile_model(model, prompt, new_tokens, steps) if profile else {},
    )


def prefill(model: Model, prompt: NDArray[np.int64], cache: KVCache) -> HeadCandidates:
    """The prompt through the model in generation's steps of some hundred tokens.   -> what may follow the last"""
    at_once = model.backend.prompt_tokens(model.config)
    for start in range(0, len(prompt), at_once):
        piece = prompt[start : start + at_once]
        last = [0] if start + len(piece) == len(prompt) else []
        _, found = model.candidates(
            TokenBatch.of([(0, start, piece)], logits_of_last=last), cache, [HeadNeed(1)] * len(last)
        )
    return found[0]


def decode(model: Model, token: int, position: int, cache: KVCache) -> HeadCandidates:
    """One more token of slot 0, as greedy generation takes it.   -> what may follow it"""
    return model.candidates(TokenBatch.of([(0, position, [token])], logits_of_last=[0]), cache, [HeadNeed(1)])[1][0]


def likeliest(found: HeadCandidates) -> int:
    """The greedy token, chosen as generation chooses it."""
    if found.complete:
        return choose(found.logits, GREEDY, 0.0)
    token = choose_among(found, GREEDY, 0.0)
    assert token is not None
    return token


def profile_model(
    model: Model, prompt: NDArray[np.int64], new_tokens: int, steps: _Steps | None = None
) -> dict[str, Profile]:
    """The same passes once more, each op timed: {"prompt": ..., "decode": ...}."""
    steps = steps or _Steps(None, 0)
    cache = model.new_cache(slots=1, capacity=len(prompt) + new_tokens)
    with model.profile() as of_prompt:
        found = prefill(model, prompt, cache)
    steps.done()
    with model.profile() as of_decoding:
        for step in range(new_tokens):
            found = decode(model, likeliest(found), len(prompt) + step, cache)
            steps.done()
    return {"prompt": _profile(of_prompt, len(prompt)), "decode": _profile(of_decoding, new_tokens)}


def _profile(found: ModelProfile, tokens: int) -> Profile:
    return Profile(tokens, found.forward_s, found.forward_s - sum(op.total_s for op in found.ops), found.ops)


class _Steps:
    """Counts for a progress bar."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.count = progress, total, 0

    def done(self) -> None:
        self.count += 1
        if self.progress is not None:
            self.progress(self.count, self.total)
