"""How fast the shipped tokenizer is: tokens a second, one text at a time and batched, encoding, decoding and streaming.

    python bench/bench_tokenizer.py [--json]

Checked before it is timed: the batch equals the texts one by one, and the stream equals the decode.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import bitnet_ref.errors
from bitnet_ref.tokenizers import load_tokenizer

STORYTELLER = Path(bitnet_ref.errors.__file__).parent / "assets" / "storyteller"
WORDS = """
    the little girl looked at lion and said that she was not afraid of anything in great forest where old tree stood
    upon a time there lived king who had three sons went away to sea naïve café 日本
"""


def make_texts(count: int, words: int, seed: int = 0) -> list[str]:
    """Texts of story-book words, the same for a seed."""
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS.split(), k=words)).capitalize() + "." for _ in range(count)]


def tokens_per_s(tokens: int, action: Callable[[], object], repeats: int) -> float:
    """The best of a few runs: what disturbs a run only slows it down."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return tokens / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--texts", type=int, default=256, help="how many texts (default 256)")
    parser.add_argument("--words", type=int, default=60, help="words in each (default 60)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each, the best counts (default 5)")
    options = parser.parse_args()
    if min(options.texts, options.words, options.repeats) < 1:
        parser.error("--texts, --words and --repeats must be at least 1")

    start = time.perf_counter()
    tokenizer = load_tokenizer(STORYTELLER)
    load_s = time.perf_counter() - start
    texts = make_texts(options.texts, options.words)
    batch = [tokenizer.encode(text) for text in texts]
    tokens = sum(map(len, batch))

    def stream() -> list[str]:
        result = []
        for ids in batch:
            decoder = tokenizer.stream_decoder()
            result.append("".join(map(decoder.push, ids)) + decoder.flush())
        return result

    decoded = [tokenizer.decode(ids) for ids in batch]
    assert tokenizer.encode_batch(texts) == batch, "the batch differs from the texts one by one"
    assert decoded == texts, "the text does not come back"
    assert stream() == decoded, "the stream differs from the text"

    speeds = {
        "encode_single": tokens_per_s(tokens, lambda: [tokenizer.encode(text) for text in texts], options.repeats),
        "encode_batch": tokens_per_s(tokens, lambda: tokenizer.encode_batch(texts), options.repeats),
        "decode": tokens_per_s(tokens, lambda: [tokenizer.decode(ids) for ids in batch], options.repeats),
        "stream": tokens_per_s(tokens, stream, options.repeats),
    }
    if options.json:
        rounded = {f"{name}_tokens_per_s": round(speed) for name, speed in speeds.items()}
        print(json.dumps({"texts": len(texts), "tokens": tokens, "load_s": round(load_s, 4), **rounded}))
        return
    print(f"{len(texts)} texts, {tokens} tokens; loaded in {load_s * 1e3:.0f} ms")
    for name, speed in speeds.items():
        print(f"{name:14s} {speed:12,.0f} tokens/s")


if __name__ == "__main__":
    main()
