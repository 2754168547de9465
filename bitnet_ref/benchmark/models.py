"""A whole model: tokens per second of a prompt and of decoding, beside what the machine allows.

A decoded token reads every weight once, so memory bandwidth over the bytes of a token bounds its speed, unless the
model fits in the processor's cache. The tokens of a prompt share what is read: there the bound is the rate of the
product instruction over the multiply-adds of a token's ternary linears. The head sees only the last token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

import numpy as np

from ..api import Model
from ..backends.cpu.weights import mean_skipped, strip_bytes, strip_uses
from ..backends.run import TokenLogits
from ..crossval.metrics import measure_logits
from ..errors import GenerationError
from ..families import config_to_dict, family_of
from ..families.linear_norms import model_norms
from ..formats.checkpoint import Progress, ticker
from ..generation.results import Generation
from ..generation.sampling import log_probability
from ..notebook.profiling import Profile
from ..reference.cache import KVCache, TokenBatch
from ..reference.config import ModelConfig
from ..reference.weights import ModelWeights
from ..system.memory import peak_memory_bytes
from .limits import MemoryReader, last_level_cache_bytes, peak_of
from .timing import Conditions, Record, Sample, Statistic, Stopwatch, Timing, Watch, ratio
from .validate import Check, check_model

PROMPT_REPEATS = 3
PEAK_CALLS = 10  # of about 1 ms each
STEPS_BETWEEN_READS = 4  # of decoding; a read empties the caches that a small model is held in


@dataclass(frozen=True)
class StepBytes(Record):
    """Bytes that decoding one token reads."""

    ternary: int  # planes, with their padding, and biases
    dense: int  # linears that are not ternary, and those by ggml's rule
    head: int  # all of it, or its screen and the rows computed after screening
    cache: int  # keys and values that the token sees, states of layers without them
    other: int  # norms, and one row of the embedding

    @property
    def total(self) -> int:
        return self.ternary + self.dense + self.head + self.cache + self.other


def bytes_of_step(
    config: ModelConfig, weights: ModelWeights, position: float, float_bytes: int = 4, head_rows: float = 1
) -> StepBytes:
    """Bytes read to decode the token at `position` (it may be a mean of positions).

    float_bytes: per value of the cache. head_rows: logits computed per token, when the head is screened.
    """
    ternary = dense = 0
    norms = sum(norm.weight.nbytes for norm in model_norms(weights))
    for layer in weights.layers:
        for _, weight in layer.linears():
            if weight.kind in ("dense", "ruled"):
                dense += weight.nbytes
            else:
                ternary += getattr(weight.bit_linear or weight, "bytes_of_token", weight.nbytes)
    cache = float_bytes * round(sum(cached_floats(config, i, position) for i in range(config.num_hidden_layers)))
    row = weights.embedding.nbytes // weights.embedding.shape[0]
    head = weights.lm_head.nbytes
    if (screen_nbytes := getattr(weights.lm_head, "screen_nbytes", None)) is not None:
        head = screen_nbytes + round(head_rows * row)
    return StepBytes(ternary, dense, head, cache, norms + row)


def cached_floats(config: ModelConfig, layer: int, position: float) -> float:
    """Floats of a layer's cache that the token at `position` reads: keys and values, or its states."""
    if size := family_of(config).state_size(config, layer):
        return size
    return 2 * config.kv_size * min(position + 1, config.window_of(layer) or np.inf)


def ternary_multiply_adds(weights: ModelWeights) -> int:
    """Multiply-adds of one of several tokens, without those that calls so far have skipped."""
    linears = [weight.bit_linear for _, weight in weights.linears() if weight.bit_linear is not None]
    return sum(getattr(w, "multiply_adds_of_token", math.prod(w.shape)) for w in linears)


@dataclass(frozen=True)
class ModelBench(Record):
    """Speeds of one model on one backend. Without equality with the reference there are none."""

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
    ternary_multiply_adds: int  # per token of a prompt, without those that are skipped because they meet zeros
    read: Timing | None = None
    peak_multiply_adds: int = 0  # per call of the product instruction alone; 0: not known for this backend
    peak: Timing | None = None
    prompt: Timing | None = None  # the whole prompt
    decode: Timing | None = None  # one token, through the model
    choose: Timing | None = None  # the most likely token and, when all logits are known, its log probability
    skipped: dict[str, float] = field(default_factory=dict)  # linear -> share of its rows or columns that is not read
    not_multiplied: dict[str, float] = field(default_factory=dict)  # the same of several tokens, as in a prompt
    strip_bytes: int = 0  # of second copies, by which they are skipped: see kernels/cpu/strips.h
    head_rows: float | None = None  # logits computed per token, on average
    peak_memory_bytes: int | None = None  # without the buffer of the plain read
    conditions: Conditions | None = None

    @property
    def equal(self) -> bool:
        return self.check.equal

    @property
    def fits_in_cache(self) -> bool:
        """Whether a step's bytes may stay in the cache, so that the bound by memory does not apply."""
        return self.step_bytes.total <= self.last_level_cache_bytes

    @property
    def of_weight_bytes(self) -> float | None:
        """Peak memory of the process, Python and NumPy included, over the bytes of the weights."""
        return self.peak_memory_bytes / self.weight_bytes if self.peak_memory_bytes else None

    @property
    def read_gb_per_s(self) -> float | None:
        """The best plain read of memory."""
        return self.read.giga_per_s(self.read_bytes) if self.read else None

    @property
    def prompt_tokens_per_s(self) -> float | None:
        """At the best time."""
        return self.prompt.per_s(self.prompt_tokens) if self.prompt else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Of the best step."""
        return self.decode.per_s(1) if self.decode else None

    @property
    def decode_tokens_per_s_median(self) -> float | None:
        return self.decode.per_s(1, "median_s") if self.decode else None

    @property
    def joules_per_token(self) -> float | None:
        """Of decoding, where the machine's counters can be read."""
        return self.decode.energy_j if self.decode else None

    @property
    def prompt_joules_per_token(self) -> float | None:
        if self.prompt is None or self.prompt.energy_j is None:
            return None
        return self.prompt.energy_j / self.prompt_tokens

    @property
    def bound_tokens_per_s(self) -> float | None:
        """The best read's bandwidth over the bytes of a token."""
        return self.read.per_s(self.read_bytes) / self.step_bytes.total if self.read else None

    @property
    def of_bound(self) -> float | None:
        """The best step over the best read's bound."""
        return ratio(self.step_bytes.total, self.decode, self.read_bytes, self.read)

    @property
    def of_bound_median(self) -> float | None:
        """Median over median."""
        return ratio(self.step_bytes.total, self.decode, self.read_bytes, self.read, "median_s")

    @property
    def prompt_bound_tokens_per_s(self) -> float | None:
        """The best rate of the product instruction over a token's work."""
        return self.peak.per_s(self.peak_multiply_adds) / self.ternary_multiply_adds if self.peak else None

    @property
    def of_prompt_bound(self) -> float | None:
        return self._of_prompt_bound("best_s")

    @property
    def of_prompt_bound_median(self) -> float | None:
        return self._of_prompt_bound("median_s")

    def _of_prompt_bound(self, statistic: Statistic) -> float | None:
        work = self.prompt_tokens * self.ternary_multiply_adds
        return ratio(work, self.prompt, self.peak_multiply_adds, self.peak, statistic)


def measure_model(
    model: Model,
    prompt_tokens: int = 64,
    new_tokens: int = 32,
    *,
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
    watch, stopwatch = Watch(), Stopwatch()
    tick = ticker(progress, 1 + PROMPT_REPEATS + new_tokens)
    prompt = random_prompt(model, prompt_tokens)
    check = check_model(model, prompt)
    tick()
    memory_before = peak_memory_bytes()
    reader = MemoryReader(model.backend.threads, reader_bytes)
    peak, peak_multiply_adds = peak_of(model.backend) or (None, 0)
    position = mean(range(prompt_tokens, prompt_tokens + new_tokens))
    value_bytes = model.backend.dtype.itemsize
    bench = ModelBench(
        backend=model.backend.name,
        kernel_set=getattr(model.backend, "simd", None),
        threads=model.backend.threads,
        config=config_to_dict(model.config),
        weight_bytes=model.weights.nbytes,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        check=check,
        step_bytes=bytes_of_step(model.config, model.weights, position, value_bytes),
        last_level_cache_bytes=last_level_cache_bytes(),
        read_how=reader.how,
        head=model.head,
        read_bytes=reader.nbytes,
        peak_multiply_adds=peak_multiply_adds,
        ternary_multiply_adds=ternary_multiply_adds(model.weights),
    )
    if not check.equal:
        return bench

    cache = model.new_cache(slots=1, capacity=prompt_tokens + new_tokens)
    reader.read()  # not counted: the first read finds cold page tables
    reads: list[Sample] = []
    peaks: list[Sample] = []
    prompts: list[Sample] = []
    decodes: list[Sample] = []
    chooses: list[Sample] = []
    head_rows: list[int] = []
    for _ in range(PROMPT_REPEATS):
        reads.append(stopwatch.repeat(reader.read))
        if peak is not None:
            peaks.append(stopwatch.repeat(peak, PEAK_CALLS))
        logits, taken = stopwatch.time(prefill, model, prompt, cache)
        prompts.append(taken)
        tick()
    for step in range(new_tokens):
        if step % STEPS_BETWEEN_READS == 0:
            reads.append(stopwatch.repeat(reader.read))
        token, taken = stopwatch.time(choose, logits)
        chooses.append(taken)
        logits, taken = stopwatch.time(decode, model, token, prompt_tokens + step, cache)
        decodes.append(taken)
        head_rows.append(len(logits.ids))
        tick()
    conditions = watch.conditions(computing=model.backend.name != "cupy")
    # If the peak did not rise after the buffer was allocated, it is the model's own; else the buffer is part of it.
    memory_bytes = max(memory_before, peak_memory_bytes() - reader.nbytes)
    uses, of_several = strip_uses(model.weights), strip_uses(model.weights, several=True)
    work_per_token = ternary_multiply_adds(model.weights)
    return replace(
        bench,
        step_bytes=bytes_of_step(model.config, model.weights, position, value_bytes, mean(head_rows)),
        read=Timing.of(reads),
        peak=Timing.of(peaks) if peaks and work_per_token else None,
        prompt=Timing.of(prompts),
        decode=Timing.of(decodes),
        choose=Timing.of(chooses),
        ternary_multiply_adds=work_per_token,
        skipped={linear: mean_skipped(uses, linear) for linear in ("up_proj", "down_proj") if uses},
        not_multiplied={linear: mean_skipped(of_several, linear) for linear in ("up_proj", "down_proj") if of_several},
        strip_bytes=strip_bytes(model.weights),
        head_rows=mean(head_rows),
        peak_memory_bytes=memory_bytes,
        conditions=conditions,
    )


@dataclass(frozen=True)
class RuleBench(Record):
    """ggml's rule beside float activations (`families/block_rule`): what it gains is the difference of their speeds."""

    floats: ModelBench  # the same file with float activations
    tokens: int  # of a text that the model with float activations has drawn
    kl_mean: float  # nats: KL(floats || rule) of the next token, over the text's positions
    kl_max: float
    same_top: float  # share of positions with the same most likely token
    perplexity: float | None  # of the text, by the rule; None of a single token
    floats_perplexity: float | None


def measure_rule(ruled: Model, floats: Model, prompt_tokens: int, new_tokens: int, **options: Any) -> RuleBench:
    """`measure_model` of the same file with float activations, and what rounding them by blocks changes.

    options: of `measure_model`
    """
    bench = measure_model(floats, prompt_tokens, new_tokens, **options)
    start, length = random_prompt(floats, 1), prompt_tokens + new_tokens
    drawn = floats.generate(start, max_tokens=length - 1, temperature=1, seed=1, ignore_eos=True)
    assert isinstance(drawn, Generation)
    text = [*start, *drawn.token_ids]
    change = measure_logits(floats.logits(text), ruled.logits(text), np.array(text))
    return RuleBench(
        bench,
        tokens=len(text),
        kl_mean=change.kl_mean,
        kl_max=change.kl_max,
        same_top=change.top1_agreement,
        perplexity=change.perplexity_candidate,
        floats_perplexity=change.perplexity_reference,
    )


def random_prompt(model: Model, tokens: int) -> list[int]:
    """Token ids, the same for every model of that vocabulary."""
    ids: list[int] = np.random.default_rng(1).integers(0, model.config.vocab_size, tokens).tolist()
    return ids


def prefill(model: Model, prompt: list[int], cache: KVCache) -> TokenLogits:
    """The prompt through the model, in steps as large as generation's.   -> the logits of its last token"""
    step = model.backend.prompt_tokens(model.config)
    for start in range(0, len(prompt), step):
        piece = prompt[start : start + step]
        wanted = [0] if start + len(piece) == len(prompt) else []
        logits = model.run(TokenBatch.of([(0, start, piece)], logits_of_last=wanted), cache, [(1, ())] * len(wanted))
    return logits.tokens[0]


def decode(model: Model, token: int, position: int, cache: KVCache) -> TokenLogits:
    """One more token of slot 0, as greedy generation computes it.   -> its logits"""
    return model.run(TokenBatch.of([(0, position, [token])]), cache, [(1, ())]).tokens[0]


def choose(logits: TokenLogits) -> int:
    """The greedy token, and where all logits are known its log probability, as generation computes it."""
    token = int(logits.ids[logits.values.argmax()])  # of equal logits the lowest id
    if logits.complete:
        log_probability(logits.values, token)
    return token


def profile_model(model: Model, prompt_tokens: int, new_tokens: int) -> Profile:
    """A prompt and decoding once more, each operation timed."""
    with model.profile() as profile:
        model.generate([random_prompt(model, prompt_tokens)], max_tokens=new_tokens, ignore_eos=True)
    return profile
