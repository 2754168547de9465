"""The parameters of a generation: names and meanings as in vLLM, OpenAI's API and transformers, all checked."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import GenerationError
from .overflow import POLICIES

DEFAULT_MAX_TOKENS = 64
ALIASES = {
    "max_new_tokens": "max_tokens",  # transformers
    "max_completion_tokens": "max_tokens",  # OpenAI
    "num_return_sequences": "n",  # transformers
    "top_logprobs": "logprobs",  # OpenAI
}
GUIDES = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")

Processor = Callable[[NDArray[np.int64], NDArray], NDArray]  # (token ids so far (T,), logits (V,)) -> logits (V,)
Strategy = Callable[[NDArray[np.int64], NDArray, np.random.Generator], int]  # the same, and random numbers -> token id


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. "So far" means the prompt and what has been generated of it.

    How long:
    max_tokens: new tokens at most; by default 64, or what the context has room for.
    min_tokens: no end token before so many, and stop strings are looked for only after them (vLLM).
    stop: strings that end the text; they are not part of it.
    stop_token_ids: tokens that end the text, besides the model's own end tokens.
    ignore_eos: go on after the model's own end tokens.
    overflow: what to do where prompt and text outgrow the context (see `overflow.py`). "error" refuses; "truncate" cuts
        the prompt's oldest tokens until max_tokens fit behind it; "sliding" goes on, and drops the oldest tokens as
        often as the window is full; "sinks" does so too, but keeps the first sink_tokens.
    window: tokens that the model sees at a time; by default its context. sink_tokens: 4, as in StreamingLLM.

    Which distribution (in the order of transformers: the logits' own rules, then temperature, then the limits):
    temperature: 0 takes the most likely token (greedy); else logits are divided by it before sampling.
    top_k: sample among the k most likely tokens only; 0 is no limit.
    top_p: sample among the fewest most likely tokens whose probabilities reach p, after temperature and top_k.
    min_p: leave out tokens less likely than min_p times the most likely one, after top_p (vLLM does so before top_k).
    typical_p: locally typical sampling (transformers): the tokens whose surprise is nearest the average, up to mass p.
    repetition_penalty: positive logits of tokens so far are divided by it, negative ones multiplied; 1 is none.
    presence_penalty, frequency_penalty: subtracted from the logits of generated tokens, once, or for each time they
        appear; the prompt does not count (OpenAI, vLLM).
    logit_bias: {token id: what to add to its logit}, -100 to 100.
    seed: of this prompt's own random numbers; every row of a batch starts from it, so rows equal their single runs.

    What may be said:
    bad_words: strings that the text must not contain; tokens that would complete one are never chosen.
    filter: strings, or a function of the text so far (without the prompt): text that holds one of them, or of which
        the function says True, is not shown, and the generation ends there with finish_reason "filtered".
    guided_json (a JSON schema), guided_regex, guided_choice (strings), guided_grammar (Lark): the text must match.

    How many, and what of them:
    n: continuations of each prompt. The first is that of n = 1; with beams, the n best, which cannot exceed num_beams.
    logprobs: besides the chosen token's, give those of the k most likely ones (`top_logprobs`); see vLLM's `logprobs`.
    echo: let `text` begin with the prompt, as the tokenizer decodes it.

    How to choose:
    num_beams: beams of beam search; 1 is none.
    length_penalty: a finished beam's score is its log probability divided by its new tokens to this power.
    early_stopping: with num_beams finished, True stops, False stops when no beam looks likely to do better,
        "never" only when none can.
    strategy: a function (token ids so far, logits (V,), numpy Generator) -> token id, which chooses in place of
        temperature and the limits.
    processors: functions (token ids so far, logits (V,)) -> logits (V,), after the rules above; -inf forbids a token.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    overflow: str = "error"
    window: int | None = None
    sink_tokens: int = 4
    n: int = 1
    logprobs: int | None = None
    echo: bool = False
    bad_words: tuple[str, ...] = ()
    filter: tuple[str, ...] | Callable[[str], bool] = ()
    guided_json: str | Mapping[str, Any] | bool | None = field(default=None, hash=False)
    guided_regex: str | None = None
    guided_choice: tuple[str, ...] = ()
    guided_grammar: str | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    strategy: Strategy | None = None
    processors: tuple[Processor, ...] = ()

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words", "guided_choice", *(() if callable(self.filter) else ("filter",))):
            self._take_strings(name)
        for name in ("stop_token_ids", "processors"):
            value = getattr(self, name)
            _check(isinstance(value, list | tuple), name, "a list", value)
            object.__setattr__(self, name, tuple(value))
        object.__setattr__(self, "logit_bias", _token_biases(self.logit_bias))
        for name, (low, what) in _WHOLE.items():
            value = getattr(self, name)
            optional = name in ("max_tokens", "seed", "logprobs", "window")
            _check((optional and value is None) or is_int(value, low), name, what, value)
        for name, (good, what) in _REAL.items():
            value = getattr(self, name)
            _check(is_real(value) and good(value), name, what, value)
        for name in ("ignore_eos", "echo"):
            _check(isinstance(getattr(self, name), bool), name, "True or False", getattr(self, name))
        early = self.early_stopping
        _check(isinstance(early, bool) or early == "never", "early_stopping", 'True, False or "never"', early)
        _check(self.overflow in POLICIES, "overflow", f"one of {', '.join(POLICIES)}", self.overflow)
        for token in self.stop_token_ids:
            _check(is_int(token, 0), "stop_token_ids", "token ids", token)
        for processor in self.processors:
            _check(callable(processor), "processors", "functions (token_ids, logits) -> logits", processor)
        _check(
            self.strategy is None or callable(self.strategy),
            "strategy",
            "a function (token_ids, logits, rng) -> token id",
            self.strategy,
        )
        for name in ("guided_regex", "guided_grammar"):
            value = getattr(self, name)
            _check(value is None or (isinstance(value, str) and value != ""), name, "a non-empty text", value)
        schema = self.guided_json
        _check(schema is None or isinstance(schema, str | Mapping | bool), "guided_json", "a JSON schema", schema)
        self._check_together()

    def _take_strings(self, name: str) -> None:
        """One string may stand for a list of one."""
        value = getattr(self, name)
        value = (value,) if isinstance(value, str) else value
        _check(isinstance(value, list | tuple), name, "a list", value)
        for text in value:
            _check(isinstance(text, str) and text != "", name, "non-empty strings", text)
        object.__setattr__(self, name, tuple(value))

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise GenerationError(f"min_tokens: {self.min_tokens} is more than max_tokens, {self.max_tokens}")
        if len(self.guides) > 1:
            raise GenerationError(f"{' and '.join(self.guides)}: expected one of them at most")
        if self.num_beams == 1:
            return
        if self.n > self.num_beams:
            raise GenerationError(f"n: expected at most num_beams, {self.num_beams}, got {self.n}")
        beside: dict[str, tuple[Any, ...]] = {"temperature": (0,), "strategy": (None,), "stop": ((),), "filter": ((),)}
        beside |= {"overflow": ("error", "truncate")}
        for name, allowed in beside.items():
            if (value := getattr(self, name)) not in allowed:
                raise GenerationError(
                    f"{name}: beam search compares whole sequences of tokens and takes no {name}, got {value!r}; "
                    "leave it out, or set num_beams=1"
                )

    @property
    def guides(self) -> dict[str, Any]:
        """The parameter that the text must match, if there is one, and its value."""
        return {name: value for name in GUIDES if (value := getattr(self, name)) not in (None, ())}

    @classmethod
    def of(cls, **params: Any) -> SamplingParams:
        """From keyword arguments. An unknown name is refused with the nearest right one (GenerationError)."""
        known = [field.name for field in fields(cls)]
        given: dict[str, Any] = {}
        for name, value in params.items():
            right = ALIASES.get(name, name)
            if right not in known:
                near = difflib.get_close_matches(name, [*known, *ALIASES], n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(known)}"
                raise GenerationError(f"unknown generation parameter {name!r}{hint}")
            if right in given:
                also = " and ".join(alias for alias, meaning in ALIASES.items() if meaning == right)
                raise GenerationError(f"generation parameter {right!r} is given twice ({also} mean {right})")
            given[right] = value
        return cls(**given)


_WHOLE: dict[str, tuple[int, str]] = {
    "max_tokens": (1, "a whole number"),
    "min_tokens": (0, "a whole number >= 0"),
    "window": (2, "a whole number >= 2"),
    "sink_tokens": (0, "a whole number >= 0"),
    "top_k": (0, "a whole number >= 0 (0: no limit)"),
    "seed": (0, "a whole number >= 0"),
    "n": (1, "a whole number >= 1"),
    "logprobs": (0, "a whole number >= 0"),
    "num_beams": (1, "a whole number >= 1"),
}
_REAL: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda v: v >= 0, "a number >= 0"),
    "top_p": (lambda v: 0 < v <= 1, "a number in (0, 1]"),
    "min_p": (lambda v: 0 <= v <= 1, "a number in [0, 1]"),
    "typical_p": (lambda v: 0 < v <= 1, "a number in (0, 1]"),
    "repetition_penalty": (lambda v: v > 0, "a number > 0"),
    "presence_penalty": (lambda v: -2 <= v <= 2, "a number in [-2, 2]"),
    "frequency_penalty": (lambda v: -2 <= v <= 2, "a number in [-2, 2]"),
    "length_penalty": (lambda v: True, "a number"),
}


def _token_biases(given: Any) -> dict[int, float]:
    """Keys may be written as text, as JSON must write them."""
    expected = "{token id: number in [-100, 100]}"
    _check(isinstance(given, Mapping), "logit_bias", expected, given)
    biases = {}
    for token, bias in given.items():
        number = int(token) if isinstance(token, str) and token.isascii() and token.isdecimal() else token
        _check(is_int(number, 0) and is_real(bias) and -100 <= bias <= 100, "logit_bias", expected, {token: bias})
        biases[int(number)] = float(bias)
    return biases


def is_int(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check(good: bool, name: str, expected: str, got: Any) -> None:
    if not good:
        raise GenerationError(f"{name}: expected {expected}, got {got!r}")
