"""The server beside another one, on the same GGUF and threads: tokens per second, and time to first token.

    python scripts/benchmarks/servers.py FILE.gguf --llama-server PROGRAM --activations blocks

    python scripts/benchmarks/servers.py FILE.gguf --peer-python PYTHON

PROGRAM is llama.cpp's own server, PYTHON one with `pip install 'llama-cpp-python[server]'`. Both servers run all the
time; rounds of streams go to one and the other in turn, and only the ratios of these pairs say something on a machine
that does other work. Greedy texts, each of another prompt: llama-cpp-python's server keeps the tokens of the last one,
and would compute one token of a prompt that comes twice. It computes one request at a time, llama-server several.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import click
from commands import Script, start

from bitnet_ref.benchmark.timing import Record
from bitnet_ref.cli.bench_shared import report_bench
from bitnet_ref.cli.shell import common_options
from bitnet_ref.errors import BackendError

if TYPE_CHECKING:
    from rich.console import Console

OURS, THEIRS = "bitnet_ref", "peer"
START_S = 120.0
TIMEOUT_S = 600.0
COMPARED = 16  # texts
REQUESTS = 20  # of one stream in a round, one after the other
WORDS = (
    "old",
    "man",
    "went",
    "sea",
    "and",
    "a",
    "king",
    "saw",
    "his",
    "daughter",
    "in",
    "wood",
    "by",
    "fire",
    "with",
    "bread",
)  # each a token of most vocabularies


@dataclass(frozen=True)
class Pair(Record):
    """Both servers with this many streams at a time, measured in turn. Lists have a value for each round."""

    streams: int
    tokens_per_s: Mapping[str, list[float]]  # of all streams together
    first_token_s: Mapping[str, list[float]]  # the median of the texts
    slow_first_token_s: Mapping[str, list[float]]  # that of the slowest text but one in a hundred
    cpu_s_per_text: Mapping[str, list[float]]  # processor time of the server

    def ratios(self, name: str) -> list[float]:
        """Ours / theirs of each round."""
        values = getattr(self, name)
        return [ours / theirs for ours, theirs in zip(values[OURS], values[THEIRS], strict=True)]


@dataclass(frozen=True)
class ServerBench(Record):
    """`equal_texts`: prompts of which both servers write the same text."""

    new_tokens: int
    prompts: int
    equal_texts: int
    pairs: tuple[Pair, ...]


def ask(port: int, prompt: str, new: int) -> tuple[float, str]:
    """Seconds to the first text of a stream, and the whole text. Raises BackendError unless it has `new` tokens."""
    body = {"model": "model", "prompt": prompt, "max_tokens": new, "temperature": 0, "stream": True, "ignore_eos": True}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)) as connection:
        begin, first_s, text, reason = time.perf_counter(), None, "", None
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise BackendError(f"port {port}: status {answer.status}: {answer.read()[:200]!r}")
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            (choice,) = json.loads(line[6:])["choices"]
            if choice["text"] and first_s is None:
                first_s = time.perf_counter() - begin
            text += choice["text"]
            reason = choice["finish_reason"] or reason
    if reason != "length" or first_s is None:
        raise BackendError(f"port {port}: {prompt[:80]!r} ended with {reason!r} before {new} tokens: choose fewer")
    return first_s, text


@dataclass(frozen=True)
class Served:
    """A server that runs."""

    port: int
    process: int

    def cpu_s(self) -> float:
        """Its processor time so far; 0.0 where the system does not show it as Linux does."""
        try:
            with open(f"/proc/{self.process}/stat") as file:
                ticks = file.read().rpartition(")")[2].split()[11:13]
        except OSError:
            return 0.0
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def make_prompts(count: int, words: int, shared: int, seed: str) -> list[str]:
    """Prompts of so many words, of which the first `shared` are the same."""
    rng = random.Random(seed)
    first = rng.choices(WORDS, k=shared)
    return [" ".join(["Once", *first, *rng.choices(WORDS, k=words - shared)]) for _ in range(count)]


def time_streams(port: int, streams: int, new: int, prompts: Sequence[str]) -> tuple[float, list[float]]:
    """Tokens per second of so many streams at a time, and each text's seconds to its first token, the least first."""
    results: list[tuple[float, str]] = []

    def follow(own: Sequence[str]) -> None:
        for prompt in own:
            results.append(ask(port, prompt, new))

    threads = [threading.Thread(target=follow, args=[prompts[number::streams]]) for number in range(streams)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(results) != len(prompts):
        raise BackendError(f"port {port}: {len(prompts) - len(results)} of {len(prompts)} texts failed")
    return len(prompts) * new / (time.perf_counter() - begin), sorted(first for first, _ in results)


def compare_servers(
    servers: Mapping[str, Served], streams: Sequence[int], words: int, shared: int, new: int, rounds: int
) -> ServerBench:
    """Both servers in turn, the other one first in every second round. Their texts are compared first."""
    prompts = make_prompts(COMPARED, words, shared, "texts")
    texts = {name: [ask(each.port, prompt, new)[1].strip() for prompt in prompts] for name, each in servers.items()}
    equal = sum(ours == theirs for ours, theirs in zip(texts[OURS], texts[THEIRS], strict=True))
    pairs = []
    for count in streams:
        pair = Pair(count, *({OURS: [], THEIRS: []} for _ in range(4)))
        for number in range(rounds):
            prompts = make_prompts(max(count, REQUESTS), words, shared, f"{count} {number}")
            for name in (OURS, THEIRS) if number % 2 == 0 else (THEIRS, OURS):
                before_s = servers[name].cpu_s()
                tokens_per_s, first_s = time_streams(servers[name].port, count, new, prompts)
                pair.tokens_per_s[name].append(tokens_per_s)
                pair.first_token_s[name].append(median(first_s))
                pair.slow_first_token_s[name].append(first_s[math.ceil(0.99 * len(first_s)) - 1])
                pair.cpu_s_per_text[name].append((servers[name].cpu_s() - before_s) / len(prompts))
        pairs.append(pair)
    return ServerBench(new, COMPARED, equal, tuple(pairs))


@contextmanager
def running(command: Sequence[str]) -> Iterator[Served]:
    """A server on a free port, which is added to the command; it ends with the block. Raises BackendError."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([*command, "--port", str(port)], stdout=-3, stderr=-3) as process:
        try:
            end = time.monotonic() + START_S
            while not answers(port):
                if process.poll() is not None or time.monotonic() > end:
                    raise BackendError(f"{' '.join(command)}: does not start (exit code {process.poll()})")
                time.sleep(0.2)
            yield Served(port, process.pid)
        finally:
            process.terminate()


def answers(port: int) -> bool:
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
            connection.request("GET", "/v1/models")
            return connection.getresponse().status == 200
    except OSError:
        return False


@click.command(cls=Script)
@click.argument("file")
@click.option("--llama-server", help="The program of llama.cpp.")
@click.option("--peer-python", help="A Python with llama-cpp-python[server].")
@click.option("--activations", type=click.Choice(["auto", "float", "blocks"]), default="auto", show_default=True)
@click.option("--streams", type=click.IntRange(min=1), multiple=True, default=(1, 16), show_default=True)
@click.option("--words", type=click.IntRange(min=1), default=10, show_default=True, help="Of each prompt.")
@click.option("--shared", type=click.IntRange(min=0), default=0, show_default=True, help="Words that all begin with.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Of each server.")
@click.option("--new", type=click.IntRange(min=1), default=32, show_default=True, help="Tokens of each text.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Pairs of each size.")
@common_options
def main(
    file: str,
    llama_server: str | None,
    peer_python: str | None,
    activations: str,
    streams: Sequence[int],
    words: int,
    shared: int,
    threads: int,
    new: int,
    rounds: int,
    **options: Any,
) -> None:
    """Serve FILE by bitnet_ref and by a peer, and time streams in turn."""
    if shared > words or (llama_server is None) == (peer_python is None):
        raise click.UsageError("expected --llama-server or --peer-python, and --shared of at most --words")
    ours = [sys.executable, "-m", "bitnet_ref", "serve", f"model={file}", "--threads", str(threads)]
    ours += ["--activations", activations]
    if llama_server is not None:
        context = max(streams) * (2 * words + new + 64)  # of all its slots
        theirs = [llama_server, "-m", file, "-t", str(threads), "-tb", str(threads), "-np", str(max(streams))]
        theirs += ["-c", str(context), "--no-warmup"]
    else:
        theirs = [str(peer_python), "-m", "llama_cpp.server", "--model", file, "--n_threads", str(threads)]
        theirs += ["--n_threads_batch", str(threads)]  # by default all processors compute a prompt
        theirs += ["--n_ctx", "0", "--interrupt_requests", "false"]
    with running(ours) as server, running(theirs) as peer:
        bench = compare_servers({OURS: server, THEIRS: peer}, streams, words, shared, new, rounds)

    def draw(out: Console) -> None:
        out.print(f"{bench.equal_texts} of {bench.prompts} texts are equal; {new} tokens each, {threads} threads")
        for pair in bench.pairs:
            for field, unit in (
                ("tokens_per_s", "tokens/s"),
                ("first_token_s", "s to the first token"),
                ("slow_first_token_s", "s to the first token of the slowest in a hundred"),
                ("cpu_s_per_text", "s of processor time per text"),
            ):
                values = getattr(pair, field)
                ratios = ", ".join(f"{ratio:.2f}" for ratio in pair.ratios(field))
                out.print(
                    f"{pair.streams} streams: {OURS} {median(values[OURS]):.3g} {unit}, {THEIRS} "
                    f"{median(values[THEIRS]):.3g}; ours / theirs of each round: {ratios}"
                )

    report_bench(bench, draw)


if __name__ == "__main__":
    start(main)
