"""How fast the shipped tokenizer is: tokens a second, one text at a time and batched, encoding, decoding and streaming.

Checked before it is timed: the batch equals the texts one by one, the texts come back, the stream equals the decode.
"""

from __future__ import annotations

import random
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import GenerationError
from ..formats.open import find_model
from ..tokenizers import load_tokenizer
from .timing import Action, Timing, take_turns

WORDS = """
    the little girl looked at lion and said that she was not afraid of anything in great forest where old tree stood
    upon a time there lived king who had three sons went away to sea naïve café 日本
"""


@dataclass(frozen=True)
class TokenizerBench:
    """Each way through the tokenizer. `timings` is empty unless everything compared equal."""

    texts: int
    tokens: int
    load_s: float
    checks: dict[str, bool]
    timings: dict[str, Timing] = field(default_factory=dict)  # of all texts

    @property
    def equal(self) -> bool:
        return bool(self.checks) and all(self.checks.values())

    def tokens_per_s(self, name: str) -> float:
        """At the best time."""
        return self.tokens / self.timings[name].best_s

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        speeds = {f"{name}_tokens_per_s": round(self.tokens_per_s(name)) for name in self.timings}
        return {**asdict(self), "equal": self.equal, **speeds}


def make_texts(count: int, words: int, seed: int = 0) -> list[str]:
    """Texts of story-book words, the same for a seed."""
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS.split(), k=words)).capitalize() + "." for _ in range(count)]


def measure_tokenizer(texts: int = 256, words: int = 60, repeats: int = 5) -> TokenizerBench:
    """The tokenizer of the shipped model on that many texts of that many words."""
    if min(texts, words, repeats) < 1:
        raise GenerationError(f"texts, words and repeats must be at least 1, got {texts}, {words}, {repeats}")
    start = time.perf_counter()
    tokenizer = load_tokenizer(find_model("storyteller"))
    load_s = time.perf_counter() - start
    written = make_texts(texts, words)
    batch = [tokenizer.encode(text) for text in written]

    def stream() -> list[str]:
        result = []
        for ids in batch:
            decoder = tokenizer.stream_decoder()
            result.append("".join(map(decoder.push, ids)) + decoder.flush())
        return result

    decoded = [tokenizer.decode(ids) for ids in batch]
    checks = {
        "batch_equals_single": tokenizer.encode_batch(written) == batch,
        "text_comes_back": decoded == written,
        "stream_equals_decode": stream() == decoded,
    }
    found = TokenizerBench(texts, sum(map(len, batch)), load_s, checks)
    if not found.equal:
        return found
    actions: dict[str, Action] = {
        "encode_single": lambda: [tokenizer.encode(text) for text in written],
        "encode_batch": lambda: tokenizer.encode_batch(written),
        "decode": lambda: [tokenizer.decode(ids) for ids in batch],
        "stream": stream,
    }
    return TokenizerBench(texts, found.tokens, load_s, checks, take_turns(actions, repeats))
