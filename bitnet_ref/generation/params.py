"""The parameters of a generation: names and meanings as in vLLM, OpenAI's API and transformers, all checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from ..backends.loaded import LoadedModel
from ..errors import GenerationError, describe
from ..reference.layers import Floats
from ..system.options import (
    FLAG,
    TEXT,
    TEXT_OR_NONE,
    ListOf,
    Number,
    Rule,
    Schema,
    Values,
    choice,
    find_surrogate,
    option,
    read_options,
    show_options,
    suggest,
)

DEFAULT_MAX_TOKENS = 64
ALIASES = {
    "max_new_tokens": "max_tokens",  # transformers
    "max_completion_tokens": "max_tokens",  # OpenAI
    "num_return_sequences": "n",  # transformers
    "top_logprobs": "logprobs",  # OpenAI
}
POLICIES = ("error", "truncate", "sliding", "sinks")  # of `overflow`; see `overflow.py`
MAX_CHARACTERS = 1 << 16  # of the strings of one parameter, which every token is compared with
GUIDES = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


Processor = Callable[[NDArray[np.int64], Floats], Floats]  # (ids so far (T,), logits (V,)) -> logits (V,)
Strategy = Callable[[NDArray[np.int64], Floats, np.random.Generator], int]  # (ids so far, logits, ...) -> token id


class Biases(Rule):
    """Token ids with a number for each. Ids may be strings, as JSON writes them."""

    def faults(self, value: Any) -> list[Any]:
        if not isinstance(value, Mapping):
            return [value]
        return [
            {key: bias} for key, bias in value.items() if not (TOKEN_ID.accepts(_number_of(key)) and BIAS.accepts(bias))
        ]

    def store(self, value: Any) -> dict[int, float]:
        return {int(_number_of(key)): float(bias) for key, bias in value.items()}

    def schema(self) -> Schema:
        return {"type": ["object", "null"], "additionalProperties": {**BIAS.schema(), "type": "number"}}

    def __str__(self) -> str:
        return "{token id: number from -100 to 100}"


class TextsOrFunction(ListOf):
    """Strings, or a function in their place."""

    def faults(self, value: Any) -> list[Any]:
        return [] if callable(value) else super().faults(value)

    def store(self, value: Any) -> Any:
        return value if callable(value) else super().store(value)


def _number_of(key: Any) -> Any:
    """The token id that a string stands for; anything else as it is."""
    is_digits = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20
    return int(key) if is_digits else key


everywhere = partial(option, in_http=True)  # Python, TOML, the shell and HTTP
in_python = partial(option, in_shell=False)
TOKEN_ID = Number(0, whole=True)
BIAS = Number(-100, 100)
TEXTS = ListOf(TEXT, "non-empty strings", or_one=True)
STOP_SCHEMA = {"anyOf": [TEXT.schema(), replace(TEXTS, high=64).schema()]}
JSON_SCHEMA = Values(
    lambda value: value is None or isinstance(value, str | Mapping | bool),
    "a JSON schema",
    {"type": ["object", "string", "boolean", "null"]},
)
DRAFTER = Values(
    lambda value: value is None or isinstance(value, LoadedModel) or (isinstance(value, str) and value == "lookup"),
    '"lookup" or a loaded model',
    {"enum": ["lookup", None]},
)
STRATEGY = Values(lambda value: value is None or callable(value), "a function (token_ids, logits, rng) -> token id")
PROCESSORS = ListOf(Values(callable, "a function"), "functions (token_ids, logits) -> logits")
TOP = Number(0, 1024, whole=True, optional=True)


# Ranges are as wide as the arithmetic allows: within them no rule overflows float64, or float32 for usual logits.
@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. "So far" means the prompt and the generated text. Raises GenerationError.

    Length and end:
    max_tokens: Maximum number of new tokens. By default 64 (chat: 512), or as many as fit into the context.
    min_tokens: No end token before this many new tokens. Stop strings count only after them (vLLM).
    stop: Strings that end the text and are not part of it.
    stop_token_ids: Tokens that end the text, besides the model's own end tokens.
    ignore_eos: Continue after the model's own end tokens.
    overflow: Beyond the context: refuse, cut the prompt (chat: drop the oldest turns), or drop the oldest tokens.
        "error" refuses; "truncate" cuts the oldest tokens of the prompt until max_tokens fit behind it; "sliding"
        drops the oldest tokens whenever the window is full; "sinks" does too, but keeps the first sink_tokens (see
        `overflow.py`). By default error (chat: truncate).
    window: Tokens that the model sees at a time. By default its context.
    sink_tokens: First tokens that overflow="sinks" keeps. 4, as in StreamingLLM.

    Choice of tokens:
    temperature: 0 takes the most likely token (greedy); otherwise logits are divided by it before sampling. Rules on
        logits go first, and the limits below after it, as in transformers. By default 0 (chat: as the model
        recommends).
    top_k: Sample among the k most likely tokens; 0 is no limit.
    top_p: Sample among the fewest most likely tokens whose probabilities reach p. After temperature and top_k.
    min_p: Exclude tokens less likely than p times the most likely one. After top_p (vLLM: before top_k).
    typical_p: Sample among the tokens whose surprise is nearest the mean, up to mass p. As in transformers (locally
        typical sampling).
    repetition_penalty: Positive logits of tokens so far are divided by it, negative ones multiplied; 1 is none.
    presence_penalty: Subtracted once from the logits of generated tokens. The prompt does not count (OpenAI, vLLM).
    frequency_penalty: Subtracted from the logits of generated tokens for each occurrence. The prompt does not count.
    logit_bias: What to add to the logits of tokens, from -100 to 100. {token id: number}.
    seed: The same seed gives the same text. All rows of a batch start from it, so they equal their single runs. By
        default random.

    What may be said:
    bad_words: Strings that the text must not contain. Tokens that would complete one are never chosen.
    filter: Strings before which the text ends, with finish_reason "filtered". Or a function of the generated text,
        which ends where it returns True.
    guided_json: A JSON schema that the text must match.
    guided_regex: A regular expression that the text must match.
    guided_choice: Strings of which the text must be one.
    guided_grammar: A grammar that the text must match, of Lark or in llama.cpp's GBNF.

    guide_after: The guide holds for the text after these tokens; what is before them is free. For models that think
        before they answer: the ids of </think>.

    Several texts:
    n: Continuations of each prompt. The first equals that of n = 1; with beams, the n best, at most num_beams.
    num_beams: Beams of beam search; 1 is none.
    length_penalty: A finished beam's score is its log probability divided by its new tokens to this power.
    early_stopping: When a beam search ends. With num_beams finished, True stops, False stops when no beam is likely to
        do better, "never" only when none can.

    Output:
    logprobs: Also report log probabilities of the k most likely tokens. `top_logprobs`; as vLLM's `logprobs`.
    prompt_logprobs: Also report the log probability of each prompt token, and those of the k most likely ones in its
        place. As in vLLM. Needs overflow="error".
    echo: Begin the text with the prompt, as the tokenizer decodes it.
    shown_tokens: Special tokens that the text shows; the others have no text.

    Speed:
    speculate: Verify guesses together: of earlier text, or of a smaller model. "lookup" guesses tokens that followed
        the same words earlier, a model with the same vocabulary guesses its own (see `drafts.py`). The text stays the
        same, to the bit. Engines take "lookup" only. By default off.

    Adapter:
    adapter: A LoRA adapter that is on, by its name in the model. See `Model.add_adapter`; over HTTP it is part of the
        model's name, "base:adapter". By default none.

    Functions:
    strategy: A function (token ids so far, logits (V,), numpy Generator) -> token id. It replaces temperature and the
        limits.
    processors: Functions (token ids so far, logits (V,)) -> logits (V,). After the rules above; -inf forbids a token.
    """

    max_tokens: int | None = everywhere(None, Number(1, whole=True, optional=True))
    min_tokens: int = everywhere(0, Number(0, whole=True))
    stop: tuple[str, ...] = option((), TEXTS, in_http=STOP_SCHEMA)
    stop_token_ids: tuple[int, ...] = everywhere((), ListOf(TOKEN_ID, "token ids"), flag="--stop-token-id")
    ignore_eos: bool = everywhere(False, FLAG)
    overflow: str = option("error", choice(*POLICIES))
    window: int | None = option(None, Number(2, whole=True, optional=True))
    sink_tokens: int = option(4, Number(0, whole=True), in_shell="First tokens that --overflow sinks keeps.")

    temperature: float = option(0.0, Number(1e-100, 1e100, or_zero=True), in_http=Number(0, 2).schema())  # OpenAI's
    top_k: int = option(0, Number(0, whole=True), in_http=Number(-1, whole=True).schema())  # vLLM's -1 is no limit
    top_p: float = everywhere(1.0, Number(0, 1, above=True))
    min_p: float = everywhere(0.0, Number(0, 1))
    typical_p: float = everywhere(1.0, Number(0, 1, above=True))
    repetition_penalty: float = everywhere(1.0, Number(1e-6, 1e6))
    presence_penalty: float = everywhere(0.0, Number(-2, 2))
    frequency_penalty: float = everywhere(0.0, Number(-2, 2))
    logit_bias: Mapping[int, float] = everywhere({}, Biases(), metavar="ID=BIAS", is_hashable=False)
    seed: int | None = option(
        None, Number(0, 2**64 - 1, whole=True, optional=True), in_http=Number(-(2**63), 2**64 - 1, whole=True).schema()
    )  # over HTTP, modulo 2^64; -1 is none

    bad_words: tuple[str, ...] = everywhere((), TEXTS, flag="--bad-word")
    filter: tuple[str, ...] | Callable[[str], bool] = option(
        (), TextsOrFunction(TEXT, "non-empty strings", or_one=True)
    )
    guided_json: str | Mapping[str, Any] | bool | None = everywhere(
        None, JSON_SCHEMA, metavar="SCHEMA", is_hashable=False
    )
    guided_regex: str | None = everywhere(None, TEXT_OR_NONE, metavar="REGEX")
    guided_choice: tuple[str, ...] = everywhere((), TEXTS)
    guided_grammar: str | None = everywhere(None, TEXT_OR_NONE, metavar="GRAMMAR")
    guide_after: tuple[int, ...] = in_python((), ListOf(TOKEN_ID, "token ids"))

    n: int = everywhere(1, Number(1, 1024, whole=True), flag="-n")
    num_beams: int = option(1, Number(1, 1024, whole=True))
    length_penalty: float = everywhere(1.0, Number(-30, 30))
    early_stopping: bool | str = option(False, choice(True, False, "never"))

    logprobs: int | None = option(
        None, TOP, metavar="K", in_shell="With --json: ln p of the K most likely tokens at each position."
    )
    prompt_logprobs: int | None = in_python(None, TOP)
    echo: bool = option(False, FLAG)
    shown_tokens: tuple[int, ...] = in_python((), ListOf(TOKEN_ID, "token ids"))

    speculate: str | LoadedModel | None = everywhere(None, DRAFTER, metavar="lookup|MODEL")
    adapter: str | None = in_python(None, TEXT_OR_NONE)
    strategy: Strategy | None = in_python(None, STRATEGY)
    processors: tuple[Processor, ...] = in_python((), PROCESSORS)

    def __post_init__(self) -> None:
        if isinstance(self.guided_choice, list) and not self.guided_choice:
            raise GenerationError("expected at least one text, got an empty list", field="guided_choice")
        read_options(self, GenerationError)
        for name in ("stop", "bad_words", "filter", "guided_choice"):
            length = sum(map(len, texts)) if isinstance(texts := getattr(self, name), tuple) else 0
            if length > MAX_CHARACTERS:
                message = f"expected at most {MAX_CHARACTERS} characters, all together, got {length}"
                raise GenerationError(message, field=name)
        for each in fields(self):
            if (half := find_surrogate(getattr(self, each.name))) is not None:
                message = f"expected text, got {half!r}, half of a surrogate pair, which is no character"
                raise GenerationError(message, field=each.name)
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = f"{self.min_tokens} is more than max_tokens, {self.max_tokens}"
            raise GenerationError(message, field="min_tokens", mentions=["max_tokens"])
        if len(self.guides) > 1:
            message = f"{' and '.join(self.guides)}: the text can be guided by one of them only"
            raise GenerationError(message, mentions=list(self.guides))
        if self.prompt_logprobs is not None and self.overflow != "error":
            message = f"need the whole prompt, which overflow={self.overflow!r} may cut"
            raise GenerationError(message, field="prompt_logprobs", mentions=[f"overflow={self.overflow!r}"])
        if self.num_beams == 1:
            return
        if self.n > self.num_beams:
            message = f"expected at most num_beams, {self.num_beams}, got {self.n}"
            raise GenerationError(message, field="n", mentions=["num_beams"])
        none = {"strategy": (None,), "speculate": (None,), "prompt_logprobs": (None,), "guide_after": ((),)}
        allowed = {"temperature": (0,), "stop": ((),), "filter": ((),), **none}
        for name, values in (allowed | {"overflow": ("error", "truncate")}).items():
            if (value := getattr(self, name)) not in values:
                raise GenerationError(
                    f"beam search compares whole token sequences and takes no {name}, got {describe(value)}; "
                    "leave it out, or set num_beams=1",
                    field=name,
                    mentions=[name, "num_beams=1"],
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
    guide_after: Sequence[int]
    shown_tokens: Sequence[int]
    num_beams: int
    length_penalty: float
    early_stopping: bool | str
    adapter: str | None
    strategy: Strategy | None
    processors: Sequence[Processor]
    speculate: str | LoadedModel | None


expand_params = show_options(SamplingParams, types=SamplingOptions)  # decorates what takes **params
