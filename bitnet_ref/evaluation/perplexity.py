"""Perplexity of a text, by four protocols of the field. They cut the text differently, and so give different figures.

A protocol turns the text into windows: token ids, and the first of them that is scored. All tokens of a window from
there on are scored, each given those before it in the window; the perplexity is e to the mean of their -ln p.
docs/evaluation.md compares the protocols.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.loaded import LoadedModel
from ..errors import ConfigError, FormatError, GenerationError, TokenizerError
from ..formats.hashes import config_hash, weight_hash
from ..generation.score import score_groups
from ..system.json_file import json_hash, read_json_object, write_json
from ..system.workers import Here, Workers
from ..tokenizers.base import Tokenizer

WINDOWS_AT_A_TIME = 8
SAVE_S = 5.0
MAX_STATE_BYTES = 256 << 20
Window = tuple[NDArray[np.int64], int]  # token ids, and the index of the first that is scored, at least 1
Sums = list[float]  # of a window: -ln p, its square, tokens


@dataclass(frozen=True)
class Protocol:
    """length: tokens that the model reads at a time, unless another length is asked for."""

    cut: Callable[[Tokenizer, Sequence[str], int], list[Window]]
    length: int
    about: str
    scores_all: bool = False  # every token of the text, so that bytes and words are those of the text


@dataclass(frozen=True)
class Perplexity:
    """What was measured.

    stderr: standard error of the perplexity, as llama.cpp computes it: as if the tokens were independent.
    bits_per_byte: -log2 p of the scored tokens, per byte of their text. word_perplexity: lm-eval's, else None.
    tokens: those scored. read: those that the model read, at tokens_per_s; both are of this run where one was resumed.
    """

    protocol: str
    length: int
    perplexity: float
    stderr: float
    nats_per_token: float
    bits_per_byte: float
    word_perplexity: float | None
    windows: int
    tokens: int
    bytes: int
    read: int
    seconds: float
    tokens_per_s: float
    backend: str


# -- protocols: (tokenizer, texts, length) -> windows ------------------------------------------------------------------


def cut_llama_cpp(tokenizer: Tokenizer, texts: Sequence[str], length: int) -> list[Window]:
    """llama-perplexity: chunks of n_ctx tokens, of each the second half is scored. BOS replaces a chunk's first token.

    Source: tools/perplexity/perplexity.cpp, and common/arg.cpp for the line end that -f drops.
    """
    ids = tokenizer.encode("\n\n".join(texts).removesuffix("\n"))
    bos = tokenizer.bos_id if ids[:1] == [tokenizer.bos_id] else None
    blocks = _blocks(ids, length, 2)
    if bos is not None:
        blocks[:, 0] = bos
    return [(block, length // 2 + 1) for block in blocks]


def cut_gptq(tokenizer: Tokenizer, texts: Sequence[str], length: int) -> list[Window]:
    """GPTQ's eval: the documents joined by empty lines, encoded once, in blocks; all but a block's first token scored.

    Source: arXiv 2210.17323 and its datautils.py. BOS, where the tokenizer adds it, is in the first block only.
    """
    return [(block, 1) for block in _blocks(tokenizer.encode("\n\n".join(texts)), length, 1)]


def cut_sentences(tokenizer: Tokenizer, texts: Sequence[str], length: int) -> list[Window]:
    """1bitLLM's eval_ppl.py: lines that are not empty, each with EOS, packed whole behind one BOS. Too long ones are
    left out. All tokens after BOS are scored, EOS too.

    Source: eval_utils.py beside huggingface.co/1bitLLM/bitnet_b1_58-3B, which are the BitNet authors' own scripts.
    """
    bos, eos = tokenizer.bos_id, next(iter(tokenizer.eos_ids), None)
    if bos is None or eos is None:
        raise ConfigError("needs a tokenizer with BOS and EOS; choose another protocol", field="protocol")
    lines = [line for text in texts for line in text.split("\n") if line]
    packs, pack = [], [bos]
    for ids in tokenizer.encode_batch(lines, add_special_tokens=False):
        if len(ids) + 1 > length:
            continue
        if len(pack) + len(ids) + 1 > length:
            packs += [pack] if len(pack) > 1 else []  # not BOS alone, before a line of the whole length
            pack = [bos]
        pack += [*ids, eos]
    packs += [pack] if 1 < len(pack) <= length else []
    return [(np.array(each, dtype=np.int64), 1) for each in packs]


def cut_rolling(tokenizer: Tokenizer, texts: Sequence[str], length: int) -> list[Window]:
    """lm-eval's loglikelihood_rolling: every token of each document is scored once. The first window begins with BOS
    (without one, EOS), each other with the token before it, and the last is filled up with tokens before it.

    Source: lm_eval/utils.py, get_rolling_token_windows and make_disjoint_window.
    """
    prefix = prefix_token(tokenizer)
    windows: list[Window] = []
    for text in texts:
        ids = np.array([prefix, *tokenizer.encode(text, add_special_tokens=False)], dtype=np.int64)
        for first in range(1, len(ids), length):
            stop = min(first + length, len(ids))
            start = max(0, stop - length - 1)
            windows.append((ids[start:stop], first - start))
    return windows


def prefix_token(tokenizer: Tokenizer) -> int:
    """BOS, or EOS where there is none: what a text without a context begins with, in lm-eval. Raises TokenizerError."""
    token = tokenizer.bos_id if tokenizer.bos_id is not None else next(iter(tokenizer.eos_ids), None)
    if token is None:
        raise TokenizerError("the tokenizer has neither BOS nor EOS, one of which a text has to begin with")
    return token


def _blocks(ids: Sequence[int], length: int, least: int) -> NDArray[np.int64]:
    """Whole blocks (n, length); the rest of the ids is left out. Raises GenerationError for fewer than `least`."""
    count = len(ids) // length
    if count < least:
        message = f"{len(ids)} tokens; expected at least {least} blocks of length={length}: give a longer text"
        raise GenerationError(f"the text has {message}, or a smaller length", mentions=[f"length={length}"])
    return np.array(ids[: count * length], dtype=np.int64).reshape(count, length)


PROTOCOLS = {
    "llama.cpp": Protocol(cut_llama_cpp, 512, "chunks of 512, the second half of each scored"),
    "gptq": Protocol(cut_gptq, 2048, "blocks of 2,048"),
    "1bitllm": Protocol(cut_sentences, 2048, "lines packed behind BOS, up to 2,048"),
    "lm-eval": Protocol(cut_rolling, 2048, "every token of each document once", scores_all=True),
}


# -- measuring ---------------------------------------------------------------------------------------------------------


def perplexity(
    model: LoadedModel,
    texts: str | Sequence[str],
    protocol: str = "llama.cpp",
    length: int | None = None,
    *,
    state: Path | None = None,
    workers: Workers | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Perplexity:
    """The perplexity of a text, or of documents, by a protocol of PROTOCOLS.

    length: tokens that the model reads at a time; None: the protocol's own, or the model's context if that is shorter.
    state: a file that is written every 5 s, and from which a run that was interrupted goes on, to the same figures.
    workers: whose resource is the same model.
    progress: called with (windows done, all windows).
    Raises ConfigError, GenerationError, FormatError for a state of another run, and what `score_groups` raises.
    """
    if protocol not in PROTOCOLS:
        raise ConfigError(f"expected one of {', '.join(PROTOCOLS)}, got {protocol!r}", field="protocol")
    documents = [texts] if isinstance(texts, str) else list(texts)
    rule = PROTOCOLS[protocol]
    length = min(rule.length, model.context_length) if length is None else length
    if not 4 <= length <= model.context_length:
        message = f"expected 4 to {model.context_length} (the model's context), got {length}"
        raise ConfigError(message, field="length")
    windows = rule.cut(model.tokenizer, documents, length)
    if not windows:
        raise GenerationError("the text has no token to score; give a longer one")
    journal = _Journal(state, {} if state is None else _key(model, protocol, length, windows))  # hashes all weights
    missing = [index for index in range(len(windows)) if index not in journal.done]
    groups = [missing[at : at + WINDOWS_AT_A_TIME] for at in range(0, len(missing), WINDOWS_AT_A_TIME)]
    progress(len(journal.done), len(windows))
    started, read = time.perf_counter(), 0
    with journal:
        for number, sums in (workers or Here(model)).map(sum_windows, _items(groups, windows)):
            journal.add(zip(groups[number], sums, strict=True))
            read += sum(len(windows[index][0]) - 1 for index in groups[number])
            progress(len(journal.done), len(windows))
    seconds = time.perf_counter() - started
    totals = [math.fsum(column) for column in zip(*journal.done.values(), strict=True)]
    nll, squares, tokens = totals[0], totals[1], int(totals[2])
    mean = nll / tokens
    variance = max(0.0, squares / tokens - mean * mean)
    value = math.exp(min(mean, 700.0))
    if rule.scores_all:
        nbytes = sum(len(text.encode()) for text in documents)
        words = sum(len(re.split(r"\s+", text)) for text in documents)  # as lm-eval's wikitext counts them: 1 of ""
    else:
        nbytes = sum(len(model.tokenizer.token_bytes(int(i))) for ids, first in windows for i in ids[first:])
    return Perplexity(
        protocol=protocol,
        length=length,
        perplexity=value,
        stderr=value * math.sqrt(variance / max(1, tokens - 1)),
        nats_per_token=mean,
        bits_per_byte=nll / math.log(2) / max(1, nbytes),
        word_perplexity=math.exp(min(nll / words, 700.0)) if rule.scores_all else None,
        windows=len(windows),
        tokens=tokens,
        bytes=nbytes,
        read=read,
        seconds=seconds,
        tokens_per_s=read / seconds if read else 0.0,
        backend=model.backend.name,
    )


def _items(groups: Iterable[Sequence[int]], windows: Sequence[Window]) -> Iterator[list[tuple[list[int], int]]]:
    for group in groups:
        yield [(windows[index][0].tolist(), windows[index][1]) for index in group]


def sum_windows(model: LoadedModel, windows: Sequence[tuple[list[int], int]]) -> list[Sums]:
    """The sums of some windows: what a worker computes."""
    groups = score_groups(model, [(ids[:first], [ids[first:]]) for ids, first in windows])
    nlls = [-score.logprobs for (score,) in groups]
    return [[math.fsum(nll), math.fsum(nll * nll), float(len(nll))] for nll in nlls]


def _key(model: LoadedModel, protocol: str, length: int, windows: Sequence[Window]) -> dict[str, Any]:
    """What a run's figures depend on."""
    digest = hashlib.sha256()
    for ids, first in windows:
        digest.update(np.array([len(ids), first, *ids], dtype="<i8").tobytes())
    facts = {"config_sha256": config_hash(model.config), "weights_sha256": weight_hash(model.weights)}
    computing = {"backend": model.backend.name, "dtype": model.backend.dtype.name, "cache_dtype": model.cache_dtype}
    return {**facts, **computing, "protocol": protocol, "length": length, "windows_sha256": digest.hexdigest()}


class _Journal:
    """The sums of the windows that are done; in a file, if there is one, which is replaced every 5 s and at the end."""

    def __init__(self, path: Path | None, key: dict[str, Any]) -> None:
        self.path, self.key, self._saved_s = path, json.loads(json.dumps(key)), time.monotonic()
        self.done: dict[int, Sums] = {}
        if path is not None and path.exists():
            stored = read_json_object(path, FormatError, MAX_STATE_BYTES)
            whole = {name: value for name, value in stored.items() if name != "sha256"}
            if set(stored) != {"run", "done"} and stored.get("sha256") != json_hash(whole):  # older states have no hash
                raise FormatError("is damaged; delete it", path=path, field="sha256")
            if stored.get("run") != self.key:
                old = stored.get("run")
                same = old.items() if isinstance(old, dict) else ()
                other = ", ".join(name for name, value in self.key.items() if (name, value) not in same)
                message = f"is the state of another run: {other or 'its form'} differs; delete it or name another file"
                raise FormatError(message, path=path, field="run")
            try:
                self.done = {int(index): [float(number) for number in sums] for index, sums in stored["done"].items()}
                if not all(len(sums) == 3 and np.isfinite(sums).all() for sums in self.done.values()):
                    raise ValueError
            except (KeyError, TypeError, ValueError, AttributeError) as problem:
                raise FormatError("is damaged; delete it", path=path, field="done") from problem

    def add(self, entries: Iterable[tuple[int, Sums]]) -> None:
        self.done.update(entries)
        if time.monotonic() - self._saved_s > SAVE_S:
            self.save()

    def save(self) -> None:
        if self.path is not None:
            state = {"run": self.key, "done": {str(index): sums for index, sums in self.done.items()}}
            write_json(self.path, {**state, "sha256": json_hash(state)})
        self._saved_s = time.monotonic()

    def __enter__(self) -> _Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.save()
