"""Token ids of two engines: are the prompt's the same, and where does a greedy continuation differ first?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..backends import Backend
from ..backends.backend import plain_weights
from ..backends.loaded import LoadedModel
from ..reference.config import ModelConfig

if TYPE_CHECKING:
    from ..api import Model

# A single rounding flip moved a logit of storyteller by at most this much, as measured.
NEAR_TIE = 0.15
LONG_RUN = 520  # tokens: more than a sliding window of 512, more than a page of the cache
_SHORT_CONTEXT = 48  # of a model with no more, the usual run covers half
_ROW_ERROR = 0.02  # relative L2 of a row of the embedding: an engine may hold the table in 16 or 8 bits
_BLOCK_VALUES = 1 << 22
_SHOWN_IDS = 12


def long_tokens(config: ModelConfig) -> list[int] | None:
    """Ids of a run of `LONG_RUN` tokens, or as many as the context holds; None where that is hardly more than usual.

    They are spread over the vocabulary: consecutive ones differ by about 0.38 of it.
    """
    if config.context_length <= _SHORT_CONTEXT:
        return None
    count, vocabulary = min(LONG_RUN, config.context_length), config.vocab_size
    return [(7 + i * 382 * vocabulary // 1000) % vocabulary for i in range(count)]


def token_parity(
    reference: Sequence[int],
    candidate: Sequence[int],
    config: ModelConfig,
    prompts: tuple[str | None, str | None] = (None, None),
) -> str | None:
    """None when the prompt's tokens are the same, else one line that says how they differ and the likely cause.

    It is asked before anything is compared: with other tokens no later difference means anything.
    prompts: the text that each was made from, where it is known.
    """
    mine, theirs = list(map(int, reference)), list(map(int, candidate))
    if mine == theirs:
        return None
    bos = config.bos_token_id
    counts = f"{len(theirs)} tokens instead of {len(mine)}" if len(mine) != len(theirs) else f"{len(mine)} tokens each"
    if bos is not None and theirs == [bos, *mine] and mine[:1] == [bos]:
        return f"BOS twice: the candidate's tokens begin {bos}, {bos} ({counts})"
    if bos is not None and theirs == [bos, *mine]:
        return f"the candidate puts BOS ({bos}) before the tokens, the reference does not ({counts})"
    if bos is not None and mine == [bos, *theirs]:
        return f"BOS is missing: the reference's tokens begin with {bos}, the candidate's do not ({counts})"
    outside = next((i for i, token in enumerate(theirs) if not 0 <= token < config.vocab_size), None)
    if outside is not None:
        return f"token {theirs[outside]} at index {outside} is outside the vocabulary of {config.vocab_size}"
    head = common_prefix(mine, theirs)
    tail = common_prefix(mine[head:][::-1], theirs[head:][::-1])
    first = [str(ids[head]) if head < len(ids) else "none" for ids in (mine, theirs)]
    here = f"first at index {head}: {first[0]} in the reference, {first[1]} in the candidate"
    if None not in prompts and prompts[0] != prompts[1]:
        return f"another prompt text, so another chat template or other message ({counts}; {here})"
    if prompts[0] is not None and prompts[0] == prompts[1]:
        return f"the same text gives other tokens, so another tokenizer ({counts}; {here})"
    if head == len(theirs):
        return f"the candidate stops after {head} of {len(mine)} tokens"
    if head == len(mine):
        return f"the candidate has {len(theirs) - head} tokens more at its end: another template, or an added EOS"
    if head + tail and tail >= len(mine) // 4:
        return f"other tokens in the middle or at the start: another chat template or tokenizer ({counts}; {here})"
    return f"other tokens: another prompt, template or tokenizer ({counts}; {here})"


def used_ids(model: LoadedModel, rows: NDArray, ids: Sequence[int]) -> list[int | None] | None:
    """The tokens whose rows of the embedding an engine used, from its hook_embed (N, D).   ids: which it should have.

    None for a row that the table does not have, and for all if the rows are those of `ids`. A row may be rounded.
    """
    be, w = Backend("float32", model.backend.threads), plain_weights(model.weights).embedding
    rows = np.asarray(rows, dtype=np.float32)
    rows = rows.reshape(-1, rows.shape[-1]) if rows.ndim else rows.reshape(1, 1)
    right = be.embed(w, np.asarray(ids, dtype=np.int64))
    if not rows.size or rows.shape[1] != right.shape[1] or not np.isfinite(rows).all():
        return None
    best = np.zeros(len(rows), dtype=np.int64)
    best[: len(ids)] = ids[: len(rows)]  # of equal rows of the table the expected one is meant
    error = np.full(len(rows), np.inf, dtype=np.float64)
    error[: len(ids)] = np.linalg.norm((rows[: len(ids)] - right[: len(rows)]).astype(np.float64), axis=1)
    limit = _ROW_ERROR * np.linalg.norm(rows, axis=1)
    if len(rows) == len(ids) and (error <= limit).all():
        return None
    for start in range(0, w.shape[0], step := max(1, _BLOCK_VALUES // rows.shape[1])):
        table = be.embed(w, np.arange(start, min(start + step, w.shape[0])))
        nearest = (np.einsum("vd,vd->v", table, table) - 2 * (rows @ table.T)).argmin(axis=1)
        distance = np.linalg.norm((rows - table[nearest]).astype(np.float64), axis=1)
        closer = distance < error
        best[closer], error[closer] = nearest[closer] + start, distance[closer]
    return [int(token) if fits else None for token, fits in zip(best, error <= limit, strict=True)]


def beside(expected: Sequence[int], used: Sequence[int | None]) -> str:
    """Both lists of ids in words, cut to where they begin to differ."""
    head = common_prefix(expected, [-1 if token is None else token for token in used])
    start = max(0, head - 2)

    def shown(ids: Sequence[int | None]) -> str:
        inner = ", ".join("?" if token is None else str(token) for token in ids[start : start + _SHOWN_IDS])
        return f"[{'..., ' * (start > 0)}{inner}{', ...' * (start + _SHOWN_IDS < len(ids))}]"

    return f"expected {shown(expected)}, used {shown(used)}"


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens at the start are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(frozen=True)
class Greedy:
    """`compared` tokens of both continuations; `parted` is the index of the first difference, None if there is none.

    margin: best minus second best logit of the reference there.
    behind: how far the candidate's token is behind the best; None where the program printed only text.
    """

    compared: int
    parted: int | None = None
    reference: str = ""  # the token where they part
    candidate: str = ""
    margin: float | None = None
    behind: float | None = None
    smallest_margin: float | None = None  # of the steps compared

    @property
    def agrees(self) -> bool:
        return self.parted is None and self.compared > 0

    @property
    def verdict(self) -> str:
        """One line."""
        if not self.compared:
            return "NOT COMPARABLE: the program printed no token"
        if self.parted is None:
            return f"AGREES, greedy: {self.compared} tokens the same, smallest margin {self.smallest_margin:.3g}"
        near = ", which a single rounding flip can decide" if self.margin is not None and self.margin < NEAR_TIE else ""
        behind = "" if self.behind is None else f"; the candidate's is {self.behind:.3g} behind the best"
        return (
            f"DIFFERS, greedy: parts at token {self.parted}, {self.reference} in the reference and {self.candidate} in "
            f"the candidate; the reference's margin there is {self.margin:.3g}{near}{behind}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "agrees": self.agrees, "verdict": self.verdict}


def compare_ids(model: Model, tokens: Sequence[int], theirs: Sequence[int]) -> Greedy:
    """The candidate's token ids, continuing `tokens` (N,), against the reference's."""
    mine, logits = _continue(model, tokens, max(1, len(theirs)))
    for i, token in enumerate(theirs):
        if i >= len(mine):
            return _parted(logits, i, "the end", f"token {token}", None)
        if token != mine[i]:
            return _parted(logits, i, f"token {mine[i]}", f"token {token}", token)
    return _same(logits, len(theirs))


def compare_text(model: Model, tokens: Sequence[int], theirs: str, count: int) -> Greedy:
    """The candidate's text against the text of the reference's `count` tokens, token by token.

    Whitespace at the end is not compared: programs print a line end there.
    """
    mine, logits = _continue(model, tokens, count)
    theirs, eos = theirs.rstrip(), set(model.tokenizer.eos_ids)
    mine = [token for token in mine if token not in eos]
    prompt = model.tokenizer.decode(list(tokens))

    def text_of(n: int) -> str:
        return model.tokenizer.decode([*tokens, *mine[:n]])[len(prompt) :]

    for i in range(len(mine)):
        text = text_of(i + 1)
        if text.endswith("\ufffd"):  # in the middle of a character
            continue
        if not (theirs.startswith(text) or text.rstrip() == theirs):
            index, before = i, text_of(i)
            if text[len(before) :][:1].isspace() and _within_word(theirs, len(before)):
                # the candidate's previous token is a longer one that begins the same
                index, text, before = max(0, i - 1), before, text_of(max(0, i - 1))
            return _parted(logits, index, repr(text[len(before) :]), repr(theirs[len(before) :][:24]), None)
    whole = text_of(len(mine)).rstrip()
    if len(theirs) > len(whole):
        return _parted(logits, len(mine), "the end", repr(theirs[len(whole) :][:24]), None)
    return _same(logits, len(mine))


def _continue(model: Model, tokens: Sequence[int], count: int) -> tuple[list[int], NDArray]:
    """The reference's greedy continuation, its end token included, and the logits (n, V) that chose each token."""
    result = model.generate(list(tokens), max_tokens=count, temperature=0.0)
    assert not isinstance(result, list)
    ids = list(result.token_ids)
    if not ids:
        return ids, np.empty((0, model.config.vocab_size), dtype=np.float32)
    return ids, model.logits([*tokens, *ids[:-1]])[len(tokens) - 1 :]


def _within_word(text: str, index: int) -> bool:
    return 0 < index < len(text) and text[index - 1].isalnum() and text[index].isalnum()


def _margins(logits: NDArray) -> NDArray:
    best = np.partition(logits, -2, axis=-1)[:, -2:]
    return np.asarray(best[:, 1] - best[:, 0])


def _same(logits: NDArray, count: int) -> Greedy:
    return Greedy(count, smallest_margin=float(_margins(logits[:count]).min()) if count else None)


def _parted(logits: NDArray, index: int, mine: str, theirs: str, token: int | None) -> Greedy:
    row = logits[min(index, len(logits) - 1)]
    behind = None if token is None or not 0 <= token < len(row) else float(row.max() - row[token])
    margins = _margins(logits)
    margin = float(margins[min(index, len(margins) - 1)])
    return Greedy(index + 1, index, mine, theirs, margin, behind, float(margins.min()))
