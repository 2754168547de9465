"""Speed of the shipped tokenizer, in tokens per second: one text at a time and batched, decoding, streaming.

    python scripts/benchmarks/tokenizer.py

Checked first: a batch equals its texts one by one, decoding gives the texts back, a stream equals its decoding.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click
from commands import Script, start

from bitnet_ref.benchmark.timing import Action, Record, Timing, take_turns
from bitnet_ref.cli.bench_shared import draw_table, report_bench
from bitnet_ref.cli.shell import common_options
from bitnet_ref.errors import GenerationError
from bitnet_ref.formats.open import find_model
from bitnet_ref.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from rich.console import Console

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


@click.command(cls=Script)
@click.option("--texts", type=click.IntRange(min=1), default=256, show_default=True, help="How many texts.")
@click.option("--words", type=click.IntRange(min=1), default=60, show_default=True, help="Words in each.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Runs of each.")
@common_options
def main(texts: int, words: int, repeats: int) -> None:
    """Time the shipped tokenizer: tokens per second, one text at a time and batched."""
    result = measure_tokenizer(texts, words, repeats)
    report_bench(result, lambda out: draw_tokenizer(result, out))


def draw_tokenizer(result: TokenizerBench, out: Console) -> None:
    out.print(f"{result.texts} texts, {result.tokens} tokens; loaded in {result.load_s * 1e3:.0f} ms")
    for name, equal in result.checks.items():
        if not equal:
            out.print(f"DIFFERS: {name.replace('_', ' ')}", style="bold red")
    rows = [
        (name, f"{result.tokens_per_s(name):,.0f}", f"{result.tokens / timing.median_s:,.0f}")
        for name, timing in result.timings.items()
    ]
    if rows:
        draw_table(out, ("", "tokens/s best", "median"), rows)


if __name__ == "__main__":
    start(main)
