"""The parameters of a generation: names and meanings as in vLLM, OpenAI's API and transformers, all checked."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack, get_type_hints

import numpy as np
from numpy.typing import NDArray

from ..backends.loaded import LoadedModel
from ..errors import GenerationError, describe

DEFAULT_MAX_TOKENS = 64
ALIASES = {
    "max_new_tokens": "max_tokens",  # transformers
    "max_completion_tokens": "max_tokens",  # OpenAI
    "num_return_sequences": "n",  # transformers
    "top_logprobs": "logprobs",  # OpenAI
}
POLICIES = ("error", "truncate", "sliding", "sinks")  # of `overflow`; see `overflow.py`
LARGEST = 2**31 - 1  # of a whole number, unless a parameter says otherwise
LONGEST_S = 1e9  # 32 years: clocks and locks take no more
MAX_CHARACTERS = 1 << 16  # of the strings of one parameter, which every token is compared with
GUIDES = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


Processor = Callable[[NDArray[np.int64], NDArray], NDArray]  # (ids so far (T,), logits (V,)) -> logits (V,)
Strategy = Callable[[NDArray[np.int64], NDArray, np.random.Generator], int]  # (ids so far, logits, ...) -> token id


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. "So far" means the prompt and the generated text. Raises GenerationError.

    Length and end:
    max_tokens: maximum number of new tokens; by default 64, or as many as fit into the context.
    min_tokens: no end token before this many new tokens; stop strings count only after them (vLLM).
    stop: strings that end the text and are not part of it.
    stop_token_ids: tokens that end the text, besides the model's own end tokens.
    ignore_eos: continue after the model's own end tokens.
    overflow: what to do when prompt and text exceed the context (see `overflow.py`). "error" refuses; "truncate" cuts
        the oldest tokens of the prompt until max_tokens fit behind it; "sliding" drops the oldest tokens whenever the
        window is full; "sinks" does too, but keeps the first sink_tokens.
    window: tokens that the model sees at a time; by default its context. sink_tokens: 4, as in StreamingLLM.

    Distribution (in the order of transformers: rules on logits, then temperature, then the limits):
    temperature: 0 takes the most likely token (greedy); otherwise logits are divided by it before sampling.
    top_k: sample among the k most likely tokens; 0 is no limit.
    top_p: sample among the fewest most likely tokens whose probabilities reach p, after temperature and top_k.
    min_p: leave out tokens less likely than min_p times the most likely one, after top_p (vLLM: before top_k).
    typical_p: locally typical sampling (transformers): the tokens whose surprise is nearest the mean, up to mass p.
    repetition_penalty: positive logits of tokens so far are divided by it, negative ones multiplied; 1 is none.
    presence_penalty, frequency_penalty: subtracted from the logits of generated tokens, once or for each occurrence;
        the prompt does not count (OpenAI, vLLM).
    logit_bias: {token id: what to add to its logit}, -100 to 100.
    seed: of the random numbers of each prompt; all rows of a batch start from it, so they equal their single runs.

    Allowed text:
    bad_words: strings that the text must not contain; tokens that would complete one are never chosen.
    filter: strings, or a function of the generated text: generation ends with finish_reason "filtered" before a text
        that contains one of the strings, or for which the function returns True.
    guided_json (a JSON schema), guided_regex, guided_choice (strings), guided_grammar (Lark): the text must match.

    Number of texts, and what is reported:
    n: continuations of each prompt. The first equals that of n = 1; with beams, the n best, at most num_beams.
    logprobs: also report log probabilities of the k most likely tokens (`top_logprobs`); as vLLM's `logprobs`.
    prompt_logprobs: also report the log probability of each prompt token, and those of the k most likely ones in its
        place; as in vLLM. Needs overflow="error".
    echo: let `text` begin with the prompt, as the tokenizer decodes it.

    Search:
    num_beams: beams of beam search; 1 is none.
    length_penalty: a finished beam's score is its log probability divided by its new tokens to this power.
    early_stopping: with num_beams finished, True stops, False stops when no beam is likely to do better,
        "never" only when none can.
    strategy: a function (token ids so far, logits (V,), numpy Generator) -> token id that replaces temperature and the
        limits.
    processors: functions (token ids so far, logits (V,)) -> logits (V,), after the rules above; -inf forbids a token.

    Speed:
    speculate: "lookup" guesses tokens that followed the same words earlier, a model with the same vocabulary guesses
        its own; several are then verified in one pass (see `drafts.py`). The text stays the same, to the bit. Engines
        take "lookup" only.
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
    prompt_logprobs: int | None = None
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
    speculate: str | LoadedModel | None = None

    def __post_init__(self) -> None:
        for name, number in _NUMBERS.items():
            object.__setattr__(self, name, number.read(getattr(self, name), name))
        for name, (accepts, expected) in _CHOICES.items():
            _check(accepts(getattr(self, name)), name, expected, getattr(self, name))
        for name, (accepts, expected) in _LISTS.items():
            if name == "filter" and callable(self.filter):
                continue
            value = getattr(self, name)
            if isinstance(value, str) and expected == _STRINGS:
                value = (value,)  # one string may stand for a list of one
            _check(isinstance(value, list | tuple), name, f"a list of {expected}", value)
            for each in value:
                _check(accepts(each), name, f"a list of {expected}", each)
            object.__setattr__(self, name, tuple(value))
            if expected == _STRINGS:
                length = sum(map(len, value))
                _check(length <= MAX_CHARACTERS, name, f"at most {MAX_CHARACTERS} characters, all together", length)
        tokens = tuple(int(token) for token in self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", tokens)
        object.__setattr__(self, "logit_bias", _parse_biases(self.logit_bias))
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise GenerationError(f"min_tokens: {self.min_tokens} is more than max_tokens, {self.max_tokens}")
        if len(self.guides) > 1:
            raise GenerationError(f"{' and '.join(self.guides)}: the text can be guided by one of them only")
        if self.prompt_logprobs is not None and self.overflow != "error":
            raise GenerationError(f"prompt_logprobs: need the whole prompt, which overflow={self.overflow!r} may cut")
        if self.num_beams == 1:
            return
        if self.n > self.num_beams:
            raise GenerationError(f"n: expected at most num_beams, {self.num_beams}, got {self.n}")
        none = {"strategy": (None,), "speculate": (None,), "prompt_logprobs": (None,)}
        allowed = {"temperature": (0,), "stop": ((),), "filter": ((),), **none}
        for name, values in (allowed | {"overflow": ("error", "truncate")}).items():
            if (value := getattr(self, name)) not in values:
                raise GenerationError(
                    f"{name}: beam search compares whole token sequences and takes no {name}, got {describe(value)}; "
                    "leave it out, or set num_beams=1"
                )

    @property
    def guides(self) -> dict[str, Any]:
        """The parameter that the text must match, if there is one, and its value."""
        return {name: value for name in GUIDES if (value := getattr(self, name)) not in (None, ())}

    @classmethod
    def of(cls, **params: Unpack[SamplingOptions]) -> SamplingParams:
        """From keyword arguments. An unknown name is refused with the nearest right one (GenerationError)."""
        known = [each.name for each in fields(cls)]
        given: dict[str, Any] = {}
        for alias, value in params.items():
            name = ALIASES.get(alias, alias)
            if name not in known:
                raise GenerationError(f"unknown generation parameter {alias!r}; {suggest(alias, known, ALIASES)}")
            if name in given:
                aliases = " and ".join(alias for alias, meaning in ALIASES.items() if meaning == name)
                raise GenerationError(f"generation parameter {name!r} is given twice ({aliases} mean {name})")
            given[name] = value
        return cls(**given)


class SamplingOptions(TypedDict, total=False):
    """What a caller may give for `SamplingParams`, for type checkers and editors; a test compares the two."""

    max_tokens: int | None
    max_new_tokens: int | None
    max_completion_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Mapping[str, float]
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_tokens: int
    overflow: str
    window: int | None
    sink_tokens: int
    n: int
    num_return_sequences: int
    logprobs: int | None
    top_logprobs: int | None
    prompt_logprobs: int | None
    echo: bool
    bad_words: str | Sequence[str]
    filter: str | Sequence[str] | Callable[[str], bool]
    guided_json: str | Mapping[str, Any] | bool | None
    guided_regex: str | None
    guided_choice: str | Sequence[str]
    guided_grammar: str | None
    num_beams: int
    length_penalty: float
    early_stopping: bool | str
    strategy: Strategy | None
    processors: Sequence[Processor]
    speculate: str | LoadedModel | None


F = TypeVar("F", bound=Callable[..., Any])


def expand_params(function: F) -> F:
    """A decorator: help(), signatures and completion show the fields of SamplingParams in place of `**params`."""
    types = get_type_hints(SamplingOptions)
    signature = inspect.signature(function, eval_str=True)
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[name])
        for name, default in vars(SamplingParams()).items()
    ]
    named = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    _, _, explanation = (inspect.getdoc(SamplingParams) or "").partition("\n\n")
    function.__dict__["__signature__"] = signature.replace(parameters=[*named, *options])
    function.__doc__ = f"{inspect.getdoc(function)}\n\n{explanation}"
    return function


def suggest(name: str, known: Iterable[str], aliases: Iterable[str] = ()) -> str:
    """The hint for an unknown name: the nearest known one, or all of them."""
    near = difflib.get_close_matches(name, [*known, *aliases], n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"


class Number(NamedTuple):
    """The numbers that a parameter may be. `above`: `low` itself is excluded. `or_zero`: so may 0, below `low`."""

    low: float
    high: float = LARGEST
    whole: bool = False
    above: bool = False
    optional: bool = False
    or_zero: bool = False

    def read(self, value: Any, name: str) -> Any:
        """The value as an int or a float of Python: from one of its own or of NumPy's. Raises GenerationError.

        Anything else is refused: bool, Decimal and Fraction, NaN, and None unless `optional`.
        """
        if value is None and self.optional:
            return None
        number = _python_number(value)
        if number is None or not self._contains(number):
            raise GenerationError(f"{name}: expected {self}, got {describe(value)}")
        return number if self.whole else float(number)

    def accepts(self, value: Any) -> bool:
        number = _python_number(value)
        return number is not None and self._contains(number)

    def _contains(self, number: int | float) -> bool:
        if self.whole and not isinstance(number, int):
            return False
        if self.or_zero and number == 0:
            return True
        return (self.low < number if self.above else self.low <= number) and number <= self.high

    def __str__(self) -> str:
        kind = ("0 or " if self.or_zero else "") + ("a whole number" if self.whole else "a number")
        low, high = (f"{limit:g}" if isinstance(limit, float) else limit for limit in (self.low, self.high))
        return f"{kind} above {low}, at most {high}" if self.above else f"{kind} from {low} to {high}"


def _python_number(value: Any) -> int | float | None:
    """The value of an int, a float or a scalar of NumPy; None for everything else."""
    if isinstance(value, bool | np.timedelta64):  # both count as integers
        return None
    if isinstance(value, int):
        return int.__index__(value)
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        with np.errstate(over="ignore"):  # of a longdouble
            return float(value)
    return None


# Ranges are as wide as the arithmetic allows: within them no rule overflows float64, or float32 for usual logits.
_NUMBERS = {
    "max_tokens": Number(1, whole=True, optional=True),
    "min_tokens": Number(0, whole=True),
    "window": Number(2, whole=True, optional=True),
    "sink_tokens": Number(0, whole=True),
    "top_k": Number(0, whole=True),
    "seed": Number(0, 2**64 - 1, whole=True, optional=True),
    "n": Number(1, 1024, whole=True),
    "logprobs": Number(0, 1024, whole=True, optional=True),
    "prompt_logprobs": Number(0, 1024, whole=True, optional=True),
    "num_beams": Number(1, 1024, whole=True),
    "temperature": Number(1e-100, 1e100, or_zero=True),
    "top_p": Number(0, 1, above=True),
    "min_p": Number(0, 1),
    "typical_p": Number(0, 1, above=True),
    "repetition_penalty": Number(1e-6, 1e6),
    "presence_penalty": Number(-2, 2),
    "frequency_penalty": Number(-2, 2),
    "length_penalty": Number(-30, 30),
}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


_STRINGS, _DRAFTERS = "non-empty strings", '"lookup" or a loaded model'
_LISTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("stop", "bad_words", "guided_choice", "filter"), (_is_text, _STRINGS)),
    "stop_token_ids": (Number(0, whole=True).accepts, "token ids"),
    "processors": (callable, "functions (token_ids, logits) -> logits"),
}
_CHOICES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("ignore_eos", "echo"), (lambda v: isinstance(v, bool), "True or False")),
    **dict.fromkeys(("guided_regex", "guided_grammar"), (lambda v: v is None or _is_text(v), "a non-empty text")),
    "guided_json": (lambda v: v is None or isinstance(v, str | Mapping | bool), "a JSON schema"),
    "early_stopping": (lambda v: isinstance(v, bool) or (_is_text(v) and v == "never"), 'True, False or "never"'),
    "overflow": (lambda v: _is_text(v) and v in POLICIES, f"one of {', '.join(POLICIES)}"),
    "speculate": (lambda v: v is None or isinstance(v, LoadedModel) or (_is_text(v) and v == "lookup"), _DRAFTERS),
    "strategy": (lambda v: v is None or callable(v), "a function (token_ids, logits, rng) -> token id"),
}


def _parse_biases(given: Any) -> dict[int, float]:
    """Keys may be strings, as JSON writes them."""
    expected, token_id, bias = "{token id: number from -100 to 100}", Number(0, whole=True), Number(-100, 100)
    _check(isinstance(given, Mapping), "logit_bias", expected, given)
    biases = {}
    for key, value in given.items():
        is_digits = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20
        token = int(key) if is_digits else key
        _check(token_id.accepts(token) and bias.accepts(value), "logit_bias", expected, {key: value})
        biases[int(token)] = float(value)
    return biases


def _check(good: bool, name: str, expected: str, got: Any) -> None:
    if not good:
        raise GenerationError(f"{name}: expected {expected}, got {describe(got)}")
