"""Token ids of two engines: are the prompt's the same, and where does a greedy continuation differ first?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backends import Backend
from ..backends.backend import plain_weights
from ..backends.loaded import LoadedModel
from ..errors import TokenizerError, count_of
from ..reference.config import ModelConfig
from ..reference.layers import Array
from .tolerances import NEAR_TIE, near_tie
from .types import Tokens

if TYPE_CHECKING:
    from ..api import Model

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
    reference: Tokens, candidate: Tokens, config: ModelConfig, prompts: tuple[str | None, str | None] = (None, None)
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


def used_ids(model: LoadedModel, rows: Array, ids: Tokens) -> list[int | None] | None:
    """The tokens whose rows of the embedding an engine used, from its hook_embed (N, D).   ids: which it should have.

    None for a row that the table does not have, and for all if the rows are those of `ids`. A row may be rounded.
    """
    be, w = Backend("float32", model.backend.threads), plain_weights(model.weights).embedding
    if not (rows := np.asarray(rows, dtype=np.float32)).size:
        return None
    rows = rows.reshape(-1, rows.shape[-1]) if rows.ndim else rows.reshape(1, 1)
    right = be.embed(w, np.asarray(ids, dtype=np.int64))
    if rows.shape[1] != right.shape[1] or not np.isfinite(rows).all():
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


def beside(expected: Tokens, used: Sequence[int | None]) -> str:
    """Both lists of ids in words, cut to where they begin to differ."""
    head = common_prefix(expected, [-1 if token is None else token for token in used])
    start = max(0, head - 2)

    def shown(ids: Sequence[int | None]) -> str:
        inner = ", ".join("?" if token is None else str(token) for token in ids[start : start + _SHOWN_IDS])
        return f"[{'..., ' * (start > 0)}{inner}{', ...' * (start + _SHOWN_IDS < len(ids))}]"

    return f"expected {shown(expected)}, used {shown(used)}"


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many tokens at the start are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(frozen=True)
class Greedy:
    """`compared` tokens of a greedy continuation; `parted` is the index of the first wrong one, None if there is none.

    margin: best minus second best logit of the reference there.
    behind: how far the candidate's token is behind the best; None where the program printed only text.
    ties: tokens that are behind the best, but by so little that rounding can decide.
    hidden: mistakes with which the reference gives the same tokens, so that these do not show whether one was made.
    """

    compared: int
    parted: int | None = None
    reference: str = ""  # the token where they part
    candidate: str = ""
    margin: float | None = None
    behind: float | None = None
    smallest_margin: float | None = None  # of the steps compared
    smallest_at: int | None = None
    ties: tuple[int, ...] = ()
    differing: int | None = None  # how many tokens are wrong, each after the candidate's own tokens before it
    hidden: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        return self.parted is None and self.compared > 0

    @property
    def verdict(self) -> str:
        """One line."""
        if not self.compared:
            return "NOT COMPARABLE: the program gave no token"
        if self.parted is None:
            count = count_of(self.compared, "token")
            margin = "" if self.smallest_margin is None else f", smallest margin {self.smallest_margin:.3g}"
            margin += "" if self.smallest_at is None else f" at token {self.smallest_at}"
            if self.ties:
                equal = f"{self.compared - len(self.ties)} of {count}"
                verdict = f"AGREES up to near ties: equal for {equal}{margin}"
            else:
                verdict = f"AGREES: equal for {count}{margin}"
            if self.hidden:
                verdict += ". The same tokens come with a mistake, so they do not rule it out: " + "; ".join(
                    self.hidden
                )
            return verdict
        near = ", which a single rounding flip can decide" if self.margin is not None and self.margin < NEAR_TIE else ""
        margin = "" if self.margin is None else f"; the reference's margin there is {self.margin:.3g}{near}"
        behind = "" if self.behind is None else f"; the candidate's is {self.behind:.3g} behind the best"
        count = "" if self.differing is None else f"; {self.differing} of {self.compared} tokens differ"
        return (
            f"DIFFERS from token {self.parted} on: {self.reference} in the reference and {self.candidate} in the "
            f"candidate{margin}{behind}{count}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "agrees": self.agrees, "verdict": self.verdict}


def compare_ids(
    model: LoadedModel,
    tokens: Tokens,
    theirs: Tokens,
    *,
    engine_dtype: str = "float32",
    finish: str | None = None,
    max_tokens: int | None = None,
) -> Greedy:
    """The candidate's greedy ids after `tokens` (N,): is each the reference's largest logit, after the ids before it?

    engine_dtype: what the engine computes in; it says how near a near tie is.
    finish, max_tokens: why the candidate ended ("stop", "length") and how many were asked for, where known.
    """
    ids = [int(token) for token in theirs]
    inside = next((i for i, token in enumerate(ids) if not 0 <= token < model.config.vocab_size), len(ids))
    known = ids[: min(inside, model.context_length - len(tokens) + 1)]
    if not known:
        return Greedy(0) if not ids else _outside(model, ids, 0)
    room = model.context_length - len(tokens)  # the logits after the last id, too, if they can be computed
    logits = model.logits([*tokens, *known[:room]])[len(tokens) - 1 :]
    rows, ends = logits[: len(known)], end_ids(model)
    behind = rows.max(axis=1) - rows[np.arange(len(known)), known]
    wrong = behind > near_tie(engine_dtype, rows)
    margins = _margins(rows)
    smallest, at = float(margins.min()), int(margins.argmin())
    count = int(wrong.sum())
    first = int(wrong.argmax()) if count else len(known)
    past = next((i + 1 for i, token in enumerate(known[:-1]) if token in ends), None)
    if past is not None and past <= first:
        return Greedy(len(known), past, "the end", name_of(model, known[past]), smallest_margin=smallest)
    if count:
        best, given = (name_of(model, token) for token in (int(rows[first].argmax()), known[first]))
        figures = float(margins[first]), float(behind[first]), smallest, at
        ties = tuple(np.flatnonzero((behind > 0) & ~wrong).tolist())
        return Greedy(len(known), first, best, given, *figures, ties, count)
    if inside < len(ids):
        return _outside(model, ids, inside)
    if _stops_early(known, logits, ends, finish, max_tokens):
        best = name_of(model, int(logits[-1].argmax()))
        return Greedy(len(known) + 1, len(known), best, "the end", float(_margins(logits[-1:])[0]))
    return Greedy(len(known), smallest_margin=smallest, smallest_at=at, ties=tuple(np.flatnonzero(behind > 0).tolist()))


def _stops_early(ids: Tokens, logits: Array, ends: Tokens, finish: str | None, max_tokens: int | None) -> bool:
    """Whether a text ended although neither an end token nor its limit says so.   logits: also after the last id"""
    if len(logits) == len(ids) or ids[-1] in ends or int(logits[-1].argmax()) in ends:
        return False
    return finish == "stop" or (max_tokens is not None and len(ids) < max_tokens)


def _outside(model: LoadedModel, ids: Tokens, index: int) -> Greedy:
    name = f"token {ids[index]}, which is outside the vocabulary of {model.config.vocab_size},"
    return Greedy(index + 1, index, "another token", name)


def end_ids(model: LoadedModel) -> tuple[int, ...]:
    """The ids that end a text."""
    try:
        of_tokenizer = model.tokenizer.eos_ids
    except TokenizerError:
        of_tokenizer = ()
    return tuple(dict.fromkeys((*model.config.eos_token_ids, *of_tokenizer)))


def name_of(model: LoadedModel, token: int) -> str:
    """The id with its text, where the model has a tokenizer: `token 262 ' the'`."""
    try:
        return f"token {token} {model.tokenizer.decode([token], skip_special_tokens=False)!r}"
    except TokenizerError:
        return f"token {token}"


def ids_of_text(model: LoadedModel, prompt: Tokens, text: str) -> list[int] | None:
    """A text's ids after a prompt, as far as they are certain: as the tokenizer splits both together."""
    try:
        start = model.tokenizer.decode(list(prompt))
        whole = model.tokenizer.encode(start + text)
    except TokenizerError:
        return None
    if whole[: len(prompt)] != list(prompt):
        return None
    return whole[len(prompt) :]


def compare_text(model: Model, tokens: Tokens, theirs: str, count: int, *, engine_dtype: str = "float32") -> Greedy:
    """The candidate's text against the text of the reference's `count` tokens, token by token.

    A text that parts from it agrees if the ids that the tokenizer gives for it do, up to near ties.
    Whitespace at the end is not compared: programs print a line end there.
    """
    greedy = _compare_to_ours(model, tokens, theirs, count)
    ids = None if greedy.agrees else ids_of_text(model, tokens, theirs)
    if not ids or model.tokenizer.decode(ids[count:]).strip():
        return greedy
    by_ids = compare_ids(model, tokens, ids[:count], engine_dtype=engine_dtype, max_tokens=count)
    return by_ids if by_ids.agrees else greedy


def _compare_to_ours(model: Model, tokens: Tokens, theirs: str, count: int) -> Greedy:
    """`compare_text` with the one text that always takes the largest logit."""
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
            return _parted(logits, index, repr(text[len(before) :]), repr(theirs[len(before) :][:24]))
    whole = text_of(len(mine)).rstrip()
    if len(theirs) > len(whole):
        return _parted(logits, len(mine), "the end", repr(theirs[len(whole) :][:24]))
    return Greedy(len(mine), smallest_margin=float(_margins(logits[: len(mine)]).min()) if mine else None)


def _continue(model: Model, tokens: Tokens, count: int) -> tuple[list[int], Array]:
    """The reference's greedy continuation, its end token included, and the logits (n, V) that chose each token."""
    result = model.generate(list(tokens), max_tokens=count, temperature=0.0)
    assert not isinstance(result, list)
    ids = list(result.token_ids)
    if not ids:
        return ids, np.empty((0, model.config.vocab_size), dtype=np.float32)
    return ids, model.logits([*tokens, *ids[:-1]])[len(tokens) - 1 :]


def _within_word(text: str, index: int) -> bool:
    return 0 < index < len(text) and text[index - 1].isalnum() and text[index].isalnum()


def _margins(logits: Array) -> Array:
    best = np.partition(logits, -2, axis=-1)[:, -2:]
    return np.asarray(best[:, 1] - best[:, 0])


def _parted(logits: Array, index: int, mine: str, theirs: str) -> Greedy:
    margins = _margins(logits)
    margin = float(margins[min(index, len(margins) - 1)])
    return Greedy(index + 1, index, mine, theirs, margin, smallest_margin=float(margins.min()))
