"""Mistakes in how greedy generation is driven: the prompt's ids, positions and cache of new tokens, penalties, stops.

A mistake is tested teacher-forced: the reference computes, with the mistake made, the logits that choose each of an
engine's ids from all ids before it. If the engine makes this mistake, each of its ids is the largest logit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...api import Model
from ...backends import Backend
from ...backends.backend import plain_weights
from ...backends.loaded import LoadedModel
from ...backends.paged_cache import EngineKVCache, PagedKVCache
from ...errors import TokenizerError
from ...generation.processors import CountPenalties, RepetitionPenalty
from ...reference.cache import TokenBatch
from ...reference.model import decoder_layers, embeddings, head_input, rope_tables_of, softcap
from ..explain.hypotheses.prompts import prompt_hypotheses, tokenizer_of
from ..token_ids import end_ids

Ids = list[int]
Rows = NDArray[np.floating]  # (n, V): the logits that choose each id


@dataclass(frozen=True)
class GivenRun:
    """Ids that an engine chose.

    prompt, tokens: ids before them, and they.   text: the prompt's, if known.   messages: a conversation, if it was one.
    finish: "stop" or "length", why the engine says it ended; None: unknown.   engine_dtype: what it computes in.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    finish: str | None = None
    max_tokens: int | None = None  # how many were asked for
    engine_dtype: str = "float32"

    @property
    def context(self) -> Ids:
        """The ids that the reference runs over: the last one is chosen by the one before it."""
        return [*self.prompt, *self.tokens[:-1]]


class Replay:
    """The reference's logits for one run of an engine, as they are and with a mistake made."""

    def __init__(self, model: LoadedModel, run: GivenRun) -> None:
        self.model, self.run = model, run
        self.end_ids = end_ids(model)

    @cached_property
    def base(self) -> Rows:
        """Without a mistake.   -> (n, V)"""
        return self.every[len(self.run.prompt) - 1 :]

    @cached_property
    def every(self) -> Rows:
        """After each token of the prompt too.   -> (prompt + n - 1, V)"""
        return np.asarray(self.model.logits(self.run.context))

    def after(self, prompt: Sequence[int]) -> Rows | None:
        """With another prompt before the same ids; None where it does not fit."""
        ids = [*prompt, *self.run.tokens[:-1]]
        if not prompt or len(ids) > self.model.context_length:
            return None
        return np.asarray(self.model.logits(ids))[len(prompt) - 1 :]

    def with_first(self, position: int) -> Rows:
        """The first id chosen from the logits of another token of the prompt."""
        rows = self.base.copy()
        rows[0] = self.every[position]
        return rows

    def decoded(self, shift: int, prompt: Sequence[int] | None = None) -> Rows | None:
        """New tokens written `shift` places from where they belong in the cache.   prompt: what the cache has of it"""
        run, known = self.run, list(self.run.prompt if prompt is None else prompt)
        start, new = len(run.prompt) + shift, run.tokens[:-1]
        capacity = start + len(run.tokens)
        if not new or start < 0 or capacity > self.model.context_length:
            return None
        cache = self.model.new_cache(slots=1, capacity=capacity, page_size=capacity)
        if not isinstance(cache, PagedKVCache):
            return None
        cache.fill_with_zeros()  # what is never written holds zeros
        if known:
            self.model.run(TokenBatch.of([(0, 0, known)]), cache)
        rows = self.model.run(TokenBatch.of([(0, start, new)]), cache).all()
        return np.concatenate([self.base[:1], rows])

    def turned(self, position: Callable[[int], int]) -> Rows | None:
        """RoPE of the new tokens at other positions, by the number of the new token; the cache is right."""
        run, model, be = self.run, self.model, Backend("float32", self.model.backend.threads)
        ids, first = run.context, len(run.prompt)
        new = np.array([position(i) for i in range(len(run.tokens) - 1)], dtype=np.int64)
        if not len(new) or new.min() < 0:
            return None
        weights, config = plain_weights(model.weights), model.config
        batch = TokenBatch.of([(0, 0, ids)])
        ropes = rope_tables_of(be, config, np.concatenate([np.arange(first), new]))
        cache = EngineKVCache(config, slots=1, capacity=len(ids))
        x = embeddings(be, weights, config, batch.tokens)
        x = decoder_layers(be, x, weights.layers, config, ropes, batch, cache)
        logits = be.lm_head(head_input(be, weights, config, x[first - 1 :]), weights.lm_head)
        return logits if config.logit_softcap is None else softcap(logits, config.logit_softcap)

    def changed(self, change: Callable[[NDArray[np.int64], Rows], Rows]) -> Rows:
        """Each row changed by a rule (ids before it, logits (V,)) -> logits."""
        ids = np.array([*self.run.prompt, *self.run.tokens], dtype=np.int64)
        first = len(self.run.prompt)
        return np.stack([change(ids[: first + i], row) for i, row in enumerate(self.base)])


@dataclass(frozen=True)
class Driving:
    """One mistake.   rows: the logits with it made, None where it does not apply.   values: of its parameter, the usual
    ones first; `cause` has a {} for the one that fits."""

    name: str
    cause: str
    remedy: str
    rows: Callable[..., Rows | None]
    values: tuple[Any, ...] = ()
    concerns_prompt: bool = False


# -- the list ----------------------------------------------------------------------------------------------------------

REPETITION = (1.1, 1.2, 1.05, 1.15, 1.3, 1.18, 1.25, 1.02, 1.03, 1.08, 1.5, 2.0)
COUNTED = (0.5, 1.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 1.2, 1.5, 2.0)
NGRAMS = (3, 2, 4, 5, 6)
WINDOW = 64  # llama.cpp's repeat_last_n
_CUTS = (4, 8, 16, 32, 64, 128, 256, 512)


def drivings(runs: Sequence[GivenRun], model: LoadedModel) -> Iterator[Driving]:
    """The mistakes that may explain these runs, the cheapest to test last."""
    yield from _prompts(runs, model)
    yield from _positions()
    yield from _penalties(longest=max(len(run.prompt) + len(run.tokens) for run in runs))


def bos_drivings(model: LoadedModel) -> list[Driving]:
    """BOS twice and BOS missing: what ids that agree may still hide."""
    names = ("bos_twice", "bos_missing", "bos_added")
    return [each for each in _edited_prompts(model) if each.name in names]


def _prompts(runs: Sequence[GivenRun], model: LoadedModel) -> Iterator[Driving]:
    yield from _edited_prompts(model)
    ask = "Send the prompt's ids once and whole."
    # fmt: off
    yield Driving("last_token_twice", "the prompt's last token was computed twice",
        "Decode the first new token, not the prompt's last one again.",
        lambda replay: replay.after([*replay.run.prompt, replay.run.prompt[-1]]), concerns_prompt=True)
    yield Driving("last_token_dropped", "the prompt's last token was dropped", ask,
        lambda replay: replay.after(replay.run.prompt[:-1]), concerns_prompt=True)
    yield Driving("prompt_cut", "only the last {} tokens of the prompt were computed",
        "Compare the prompt's length with the engine's context and batch.", _cut_front, _CUTS, True)
    yield Driving("prompt_end_cut", "only the first {} tokens of the prompt were computed",
        "Compare the prompt's length with the engine's batch: all its pieces must be computed.", _cut_end, _CUTS, True)
    # fmt: on


def _cut_front(replay: Replay, count: int) -> Rows | None:
    return replay.after(replay.run.prompt[-count:]) if count < len(replay.run.prompt) else None


def _cut_end(replay: Replay, count: int) -> Rows | None:
    return replay.after(replay.run.prompt[:count]) if count < len(replay.run.prompt) else None


def _edited_prompts(model: LoadedModel) -> list[Driving]:
    """The mistakes in encoding that `prompt_hypotheses` knows, and those of templates and BOS."""
    tokenizer = tokenizer_of(model)
    bos = model.config.bos_token_id if tokenizer is None else tokenizer.bos_id
    found = [] if bos is None else [
        Driving("bos_added", "BOS was put before a prompt that has none",
            "Send these ids as they are (add_special_tokens=False).",
            lambda replay: replay.after([bos, *replay.run.prompt]) if replay.run.prompt[0] != bos else None,
            concerns_prompt=True)
    ]  # fmt: skip

    def encoded(replay: Replay, name: str, end: int | None = None) -> Rows | None:
        run, text = replay.run, replay.run.text
        if name.startswith("bos") and (bos is None or run.prompt[0] != bos):
            return None
        if text is None and run.messages is not None and isinstance(model, Model):
            text = model.tokenizer.apply_chat_template(list(run.messages))
        candidate = [*run.prompt, *([] if end is None else [end])]
        for each in prompt_hypotheses(run.prompt, candidate, tokenizer, text):
            if each.name == name and (ids := each.wrong()) is not None and ids != list(run.prompt):
                return replay.after(ids)
        return None

    known = prompt_hypotheses([0], [0], tokenizer, None if tokenizer is None else "")
    for each in known:
        if each.name not in ("eos_appended", "special_tokens_as_text"):
            rows = partial(encoded, name=each.name)
            found.append(Driving(each.name, each.cause, each.remedy, rows, concerns_prompt=True))
    (appended,) = (each for each in known if each.name == "eos_appended")
    for end in end_ids(model):
        name = f"token {end}" if tokenizer is None else tokenizer.id_to_token(end)
        cause = appended.cause.replace("an end token", f"the end token {name}")
        rows = partial(encoded, name="eos_appended", end=end) if tokenizer else partial(_append, end=end)
        found.append(Driving("eos_appended", cause, appended.remedy, rows, concerns_prompt=True))
    if tokenizer is not None and tokenizer.chat_template:
        # fmt: off
        found += [
            Driving("template_applied", "the text was put into the chat template as a user's message",
                "Use the completions endpoint, or the engine's raw mode, for plain text.", _as_message,
                concerns_prompt=True),
            Driving("template_not_applied", "the message was taken as plain text, without the chat template",
                "Render the conversation with the model's chat template.", _as_text, concerns_prompt=True),
        ]
        # fmt: on
    return found


def _append(replay: Replay, end: int) -> Rows | None:
    return replay.after([*replay.run.prompt, end])


def _as_message(replay: Replay) -> Rows | None:
    model, run = replay.model, replay.run
    text = run.text
    if run.messages is not None:
        return None
    try:
        if text is None:
            text = model.tokenizer.decode(list(run.prompt))
        ids = model.tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=True)
    except TokenizerError:
        return None
    return replay.after(ids)


def _as_text(replay: Replay) -> Rows | None:
    messages = replay.run.messages
    if messages is None:
        return None
    text = "\n".join(str(each.get("content", "")) for each in messages)
    return replay.after(replay.model.tokenizer.encode(text))


def _positions() -> Iterator[Driving]:
    count = "The first new token's position is the number of prompt tokens."
    row = "After a batched prefill, read the row (first row of the sequence) + length - 1."
    # fmt: off
    yield Driving("prefill_logits_of_the_previous_position",
        "the first new token is taken from the logits of the second-to-last prompt token", row,
        lambda replay: replay.with_first(-1 - len(replay.run.tokens)) if len(replay.run.prompt) > 1 else None)
    yield Driving("prefill_logits_of_the_first_position",
        "the first new token is taken from the logits of the first prompt token", row,
        lambda replay: replay.with_first(0) if len(replay.run.prompt) > 2 else None)
    yield Driving("decode_overwrites_the_last_entry",
        "new tokens are written one place too low in the KV cache, over the prompt's last token", count,
        lambda replay: replay.decoded(-1))
    yield Driving("decode_leaves_a_gap",
        "new tokens are written one place too high in the KV cache, after an empty entry", count,
        lambda replay: replay.decoded(1))
    yield Driving("decode_position_high", "the positions of new tokens are one too high in RoPE", count,
        lambda replay: replay.turned(lambda i: len(replay.run.prompt) + i + 1))
    yield Driving("decode_position_low", "the positions of new tokens are one too low in RoPE", count,
        lambda replay: replay.turned(lambda i: len(replay.run.prompt) + i - 1))
    yield Driving("decode_position_from_0", "the positions of new tokens begin at 0 again in RoPE", count,
        lambda replay: replay.turned(lambda i: i))
    yield Driving("decode_position_constant", "all new tokens have the same position in RoPE",
        "Advance the position with each new token.", lambda replay: replay.turned(lambda i: len(replay.run.prompt)))
    yield Driving("prompt_cache_lost", "new tokens see zeros where the cache should have the prompt",
        "Keep the prompt's keys and values between prefill and decoding.",
        lambda replay: replay.decoded(0, prompt=()))
    yield Driving("prompt_cache_unseen", "new tokens see each other only, and not the prompt",
        "The mask of decoding begins at position 0 of the sequence.", _unseen)
    yield Driving("prompt_cache_short", "the cache has only the first {} tokens of the prompt, and zeros behind them",
        "Keep the keys and values of all pieces of the prompt.", _short, _CUTS)
    # fmt: on


def _unseen(replay: Replay) -> Rows | None:
    new = replay.run.tokens[:-1]
    return None if not new else np.concatenate([replay.base[:1], np.asarray(replay.model.logits(new))])


def _short(replay: Replay, count: int) -> Rows | None:
    prompt = replay.run.prompt
    return replay.decoded(0, prompt[:count]) if count < len(prompt) else None


def _penalties(longest: int) -> Iterator[Driving]:
    off = "Switch it off for greedy decoding: {}."
    ranges: list[tuple[str, str, Callable[[int], slice]]] = [
        ("", "", lambda prompt: slice(None)),
        ("_generated", ", on generated tokens only", lambda prompt: slice(prompt, None)),
        ("_prompt", ", on the prompt's tokens only", lambda prompt: slice(prompt)),
    ]
    if longest > WINDOW:
        ranges.append(("_last", f", on the last {WINDOW} tokens", lambda prompt: slice(-WINDOW, None)))

    def repeated(replay: Replay, value: float, part: Callable[[int], slice]) -> Rows:
        rule, chosen = RepetitionPenalty(value), part(len(replay.run.prompt))
        return replay.changed(lambda ids, row: rule(ids[chosen], row))

    def counted(replay: Replay, value: float, part: Callable[[int], slice], names: tuple[str, ...]) -> Rows:
        chosen = part(len(replay.run.prompt))
        rule = CountPenalties(*(value if name in names else 0.0 for name in ("presence", "frequency")), 0)
        return replay.changed(lambda ids, row: rule(ids[chosen], row))

    for suffix, words, part in ranges:
        yield Driving(
            f"repetition_penalty{suffix}",
            f"a repetition penalty of {{}} is left on{words}",
            off.format("repetition_penalty 1"),
            partial(repeated, part=part),
            REPETITION,
        )
        for name in ("presence", "frequency"):
            yield Driving(
                f"{name}_penalty{suffix}",
                f"a {name} penalty of {{}} is left on{words}",
                off.format(f"{name}_penalty 0"),
                partial(counted, part=part, names=(name,)),
                COUNTED,
            )
    yield Driving(
        "no_repeat_ngram",
        "no_repeat_ngram_size is {}: no sequence of so many tokens comes twice",
        off.format("no_repeat_ngram_size 0"),
        lambda replay, size: replay.changed(partial(_ban_repeats, size)),
        NGRAMS,
    )
    yield Driving(
        "end_tokens_suppressed",
        "end tokens are made impossible",
        "Leave ignore_eos and min_tokens out.",
        lambda replay: replay.changed(partial(_ban, replay.end_ids)),
    )


def _ban(banned: Sequence[int], ids: NDArray[np.int64], row: Rows) -> Rows:
    out = row.copy()
    out[list(banned)] = -np.inf
    return out


def _ban_repeats(size: int, ids: NDArray[np.int64], row: Rows) -> Rows:
    """transformers' no_repeat_ngram_size, over prompt and generated tokens."""
    if len(ids) < size:
        return row
    windows = np.lib.stride_tricks.sliding_window_view(ids, size)
    same = (windows[:, :-1] == ids[len(ids) - size + 1 :]).all(axis=1)
    return _ban(windows[same, -1].tolist(), ids, row)
