"""Speed of the shipped tokenizer, in tokens per second: one text at a time and batched, decoding, streaming.

Checked first: a batch equals its texts one by one, decoding gives the texts back, a stream equals its decoding.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

from ..errors import GenerationError
from ..formats.open import find_model
from ..tokenizers import load_tokenizer
from .timing import Action, Record, Timing, take_turns

WORDS = """
    the little girl looked at lion and said that she was not afraid of anything in great forest where old tree stood
    upon a time there lived king who had three sons went away to sea naïve café 日本
"""


@dataclass(frozen=True)
class TokenizerBench(Record):
    """`timings` is empty unless all checks passed."""

    texts: int
    tokens: int
    load_s: float
    checks: dict[str, bool]
    timings: dict[str, Timing] = field(default_factory=dict)  # each of all texts

    @property
    def equal(self) -> bool:
        return bool(self.checks) and all(self.checks.values())

    def tokens_per_s(self, name: str) -> float:
        """At the best time."""
        return self.tokens / self.timings[name].best_s

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        speeds = {f"{name}_tokens_per_s": round(self.tokens_per_s(name)) for name in self.timings}
        return {**super().to_dict(), **speeds}


def make_texts(count: int, words: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS.split(), k=words)).capitalize() + "." for _ in range(count)]


def measure_tokenizer(texts: int = 256, words: int = 60, repeats: int = 5) -> TokenizerBench:
    """Check and time the shipped tokenizer on `texts` texts of `words` words."""
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
    actions: dict[str, Action] = {
        "encode_single": lambda: [tokenizer.encode(text) for text in written],
        "encode_batch": lambda: tokenizer.encode_batch(written),
        "decode": lambda: [tokenizer.decode(ids) for ids in batch],
        "stream": stream,
    }
    timings = take_turns(actions, repeats) if all(checks.values()) else {}
    return TokenizerBench(texts, sum(map(len, batch)), load_s, checks, timings)
