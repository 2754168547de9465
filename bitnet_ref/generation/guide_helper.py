"""A process that compiles guides for another one, and may die of them. `guide_prover.py` starts and feeds it.

It runs as a script, so it imports nothing of this package. Each message is 8 bytes of length and a value of `marshal`:
a vocabulary (tokens, end_tokens, bos), or a grammar of llguidance. Each grammar is answered by a line of JSON: null
when it compiles and its first steps end, else what is wrong. Too much time, memory or stack ends the process.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import random
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, TypeVar

CPU_S = 2.0  # of processor time for one guide
STEP_S = 0.5  # of processor time for one step
MEMORY_BYTES = 1 << 30  # beyond what the process has at its start
STACK_BYTES = 192 << 20  # for compiling, there and in the process that asks; reserved, not used, until it is needed
STEP_STACK_BYTES = 256 << 10  # for the steps: less than any thread has
TEXTS = 4
STEPS = 12  # of each text
IDLE_S = 120.0
T = TypeVar("T")


def main(commands: BinaryIO, answers: BinaryIO) -> None:
    """Answer messages until there are no more, or none for a while."""
    from llguidance import LLMatcher

    limit_memory()
    vocabulary: Any = None
    while select.select([commands], [], [], IDLE_S)[0]:
        head = read_exactly(commands, 8)
        if len(head) < 8:
            return
        message = marshal.loads(read_exactly(commands, int.from_bytes(head, "little")))
        if isinstance(message, tuple):
            tokens, end_tokens, bos = message
            vocabulary = wrap_vocabulary(tokens, end_tokens, bos, split_by_longest(tokens))
            continue
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # its signal ends the process
        answer = try_guide(LLMatcher, vocabulary, message)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def read_exactly(commands: BinaryIO, count: int) -> bytes:
    """So many bytes; fewer at the end of all messages."""
    data = bytearray()
    while len(data) < count and (block := commands.read(count - len(data))):
        data += block
    return bytes(data)


def limit_memory() -> None:
    import resource

    pages = 1 << 18
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES + STACK_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def wrap_vocabulary(
    tokens: Sequence[bytes], end_tokens: Sequence[int], bos: int | None, split: Callable[[str], list[int]]
) -> Any:
    """llguidance's form of a vocabulary.

    tokens: the bytes of each; b"" for a special one. split: a text -> the tokens whose bytes are exactly its own.
    """
    import llguidance

    specials = [token for token, data in enumerate(tokens) if not data]

    class Wrapped:
        eos_token_id = end_tokens[0] if end_tokens else (specials[0] if specials else 0)
        bos_token_id = bos
        special_token_ids = specials

        def __init__(self) -> None:
            # llguidance marks special tokens with a byte that no text has; distinct names keep its messages readable.
            self.tokens = [data or b"\xff<%d>" % token for token, data in enumerate(tokens)]

        def __call__(self, text: str | bytes) -> list[int]:
            return split(text.decode(errors="replace") if isinstance(text, bytes) else text)

    wrapper = llguidance.TokenizerWrapper(Wrapped())
    return llguidance.LLTokenizer(wrapper, eos_token=list(end_tokens) or None, slices=None)


def split_by_longest(tokens: Sequence[bytes]) -> Callable[[str], list[int]]:
    """A function that splits a text into tokens: at each place the longest that fits.

    >>> split_by_longest([b"a", b"ab", b"", b"ab", b"c"])("abca")
    [1, 4, 0]
    """
    token_of = {data: token for token, data in reversed(list(enumerate(tokens))) if data}  # of equal ones the first
    lengths = range(max(map(len, tokens), default=0), 0, -1)

    def split(text: str) -> list[int]:
        data, place = text.encode(), 0
        ids: list[int] = []
        while length := next((size for size in lengths if data[place : place + size] in token_of), 0):
            ids.append(token_of[data[place : place + length]])
            place += length
        return ids

    return split


def try_guide(maker: Any, vocabulary: Any, grammar: str) -> str | None:
    """None when the guide compiles and its first steps end, each within STEP_S; else what is wrong."""
    matcher = in_thread(STACK_BYTES, lambda: maker(vocabulary, grammar, log_level=0))
    if matcher.is_error():
        return str(matcher.get_error())
    return in_thread(STEP_STACK_BYTES, lambda: take_steps(matcher))


def take_steps(matcher: Any) -> str | None:
    """Follow some texts that the guide allows: one of the first tokens of the vocabulary, which are short, and others
    of random ones."""
    draw = random.Random(0)
    for text in range(TEXTS):
        matcher.reset()
        for _ in range(STEPS):
            started_s = time.thread_time()
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            if mask:
                start = draw.randrange(mask.bit_length()) if text else 0
                rest = mask >> start  # has the highest bit
                matcher.consume_token(start + (rest & -rest).bit_length() - 1)
            if matcher.is_error():
                return str(matcher.get_error())
            step_s = time.thread_time() - started_s
            if step_s > STEP_S:
                return f"a step takes {step_s:.1f} s, and at most {STEP_S:g} s are allowed; use a simpler guide"
            if not mask or matcher.is_stopped():
                break
    return None


def in_thread(stack_bytes: int, function: Callable[[], T]) -> T:
    results: list[T] = []
    threading.stack_size(stack_bytes)
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


if __name__ == "__main__":
    # Before anything else: what is printed here must not become an answer
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # The first process that the system ends when memory is short
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
        score.write("1000")
    main(os.fdopen(os.dup(0), "rb", buffering=0), output)  # unbuffered, for select
