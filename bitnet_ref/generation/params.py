"""The parameters of a generation: names and meanings as in vLLM, OpenAI's API and transformers, all checked."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields
from typing import Any

from ..errors import GenerationError

DEFAULT_MAX_TOKENS = 64
ALIASES = {"max_new_tokens": "max_tokens"}


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    max_tokens: new tokens at most; by default 64, or what the context has room for.
    temperature: 0 takes the most likely token (greedy); else logits are divided by it before sampling.
    top_k: sample among the k most likely tokens only; 0 is no limit.
    top_p: sample among the fewest most likely tokens whose probabilities reach p, after temperature and top_k.
    seed: of this prompt's own random numbers; every row of a batch starts from it, so rows equal their single runs.
    stop: strings that end the text; they are not part of it.
    stop_token_ids: tokens that end the text, besides the model's own end tokens.
    ignore_eos: go on after the model's own end tokens.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            _check(isinstance(value, list | tuple), name, "a list", value)
            object.__setattr__(self, name, tuple(value))
        _check(self.max_tokens is None or _is_int(self.max_tokens, 1), "max_tokens", "a whole number", self.max_tokens)
        _check(_is_real(self.temperature) and self.temperature >= 0, "temperature", "a number >= 0", self.temperature)
        _check(_is_int(self.top_k, 0), "top_k", "a whole number >= 0 (0: no limit)", self.top_k)
        _check(_is_real(self.top_p) and 0 < self.top_p <= 1, "top_p", "a number in (0, 1]", self.top_p)
        _check(self.seed is None or _is_int(self.seed, 0), "seed", "a whole number >= 0", self.seed)
        _check(isinstance(self.ignore_eos, bool), "ignore_eos", "True or False", self.ignore_eos)
        for text in self.stop:
            _check(isinstance(text, str) and text != "", "stop", "non-empty strings", text)
        for token in self.stop_token_ids:
            _check(_is_int(token, 0), "stop_token_ids", "token ids", token)

    @classmethod
    def of(cls, **params: Any) -> SamplingParams:
        """From keyword arguments. An unknown name is refused with the nearest right one (GenerationError)."""
        known = [field.name for field in fields(cls)]
        given: dict[str, Any] = {}
        for name, value in params.items():
            name = ALIASES.get(name, name)
            if name not in known:
                near = difflib.get_close_matches(name, [*known, *ALIASES], n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(known)}"
                raise GenerationError(f"unknown generation parameter {name!r}{hint}")
            if name in given:
                raise GenerationError(f"generation parameter {name!r} is given twice (max_new_tokens means max_tokens)")
            given[name] = value
        return cls(**given)


def _is_int(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check(good: bool, name: str, expected: str, got: Any) -> None:
    if not good:
        raise GenerationError(f"{name}: expected {expected}, got {got!r}")
