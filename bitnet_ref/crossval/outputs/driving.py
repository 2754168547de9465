"""Mistakes in how greedy generation is driven: the prompt's ids, positions and cache of new tokens, penalties, stops.

A mistake is tested teacher-forced: the reference computes, with the mistake made, the logits that choose each of an
engine's ids from all ids before it. If the engine makes this mistake, each of its ids is the largest logit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from ...api import Model
from ...backends.loaded import LoadedModel
from ...generation.processors import CountPenalties, RepetitionPenalty
from ..explain.hypotheses.prompts import ids_as_message, prompt_hypotheses, tokenizer_of
from ..token_ids import end_ids
from ..types import Ints, Tokens
from .given import GivenRun, Replay, Rows


@dataclass(frozen=True)
class Driving:
    """One mistake.   rows: the logits with it made, None where it does not apply.   values: of its parameter, the usual
    ones first; `cause` has a {} for the one that fits."""

    name: str
    cause: str
    remedy: str
    rows: Callable[..., Rows | None]
    values: tuple[Any, ...] = ()


REPETITION = (1.1, 1.2, 1.05, 1.15, 1.3, 1.18, 1.25, 1.02, 1.03, 1.08, 1.5, 2.0)
COUNTED = (0.5, 1.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 1.2, 1.5, 2.0)
NGRAMS = (3, 2, 4, 5, 6)
WINDOW = 64  # llama.cpp's repeat_last_n
_CUTS = (4, 8, 16, 32, 64, 128, 256, 512)


def drivings(runs: Sequence[GivenRun], model: LoadedModel) -> Iterator[Driving]:
    """The mistakes that may explain these runs, the cheapest to test last."""
    yield from _prompts(model)
    yield from _positions()
    yield from _penalties(longest=max(len(run.prompt) + len(run.tokens) for run in runs))


def bos_drivings(model: LoadedModel) -> list[Driving]:
    """BOS twice and BOS missing: what ids that agree may still hide."""
    names = ("bos_twice", "bos_missing", "bos_added")
    return [each for each in _edited_prompts(model) if each.name in names]


def _prompts(model: LoadedModel) -> Iterator[Driving]:
    yield from _edited_prompts(model)
    ask = "Send the prompt's ids once and whole."
    # fmt: off
    yield Driving("last_token_twice", "the prompt's last token was computed twice",
        "Decode the first new token, not the prompt's last one again.",
        lambda replay: replay.after([*replay.run.prompt, replay.run.prompt[-1]]))
    yield Driving("last_token_dropped", "the prompt's last token was dropped", ask,
        lambda replay: replay.after(replay.run.prompt[:-1]))
    yield Driving("prompt_cut", "only the last {} tokens of the prompt were computed",
        "Compare the prompt's length with the engine's context and batch.",
        lambda replay, n: replay.after(replay.run.prompt[-n:]) if n < len(replay.run.prompt) else None, _CUTS)
    yield Driving("prompt_end_cut", "only the first {} tokens of the prompt were computed",
        "Compare the prompt's length with the engine's batch: all its pieces must be computed.",
        lambda replay, n: replay.after(replay.run.prompt[:n]) if n < len(replay.run.prompt) else None, _CUTS)
    # fmt: on


def _edited_prompts(model: LoadedModel) -> list[Driving]:
    """The mistakes in encoding that `prompt_hypotheses` knows, and those of templates and BOS."""
    tokenizer = tokenizer_of(model)
    bos = model.config.bos_token_id if tokenizer is None else tokenizer.bos_id
    drivings = [] if bos is None else [
        Driving("bos_added", "BOS was put before a prompt that has none",
            "Send these ids as they are (add_special_tokens=False).",
            lambda replay: replay.after([bos, *replay.run.prompt]) if replay.run.prompt[0] != bos else None)
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
            drivings.append(Driving(each.name, each.cause, each.remedy, rows))
    (appended,) = (each for each in known if each.name == "eos_appended")
    for end in end_ids(model):
        name = f"token {end}" if tokenizer is None else tokenizer.id_to_token(end)
        cause = appended.cause.replace("an end token", f"the end token {name}")
        rows = partial(encoded, name="eos_appended", end=end)
        if tokenizer is None:
            rows = partial(lambda replay, end: replay.after([*replay.run.prompt, end]), end=end)
        drivings.append(Driving("eos_appended", cause, appended.remedy, rows))
    if tokenizer is not None and tokenizer.chat_template:
        # fmt: off
        drivings += [
            Driving("template_applied", "the text was put into the chat template as a user's message",
                "Use the completions endpoint, or the engine's raw mode, for plain text.", _as_message),
            Driving("template_not_applied", "the message was taken as plain text, without the chat template",
                "Render the conversation with the model's chat template.", _as_text),
        ]
        # fmt: on
    return drivings


def _as_message(replay: Replay) -> Rows | None:
    run = replay.run
    if run.messages is not None:
        return None
    text = replay.model.tokenizer.decode(list(run.prompt)) if run.text is None else run.text
    ids = ids_as_message(replay.model, text)
    return None if ids is None else replay.after(ids)


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
        "Keep the keys and values of all pieces of the prompt.",
        lambda replay, n: replay.decoded(0, replay.run.prompt[:n]) if n < len(replay.run.prompt) else None, _CUTS)
    # fmt: on


def _unseen(replay: Replay) -> Rows | None:
    new = replay.run.tokens[:-1]
    return None if not new else np.concatenate([replay.base[:1], np.asarray(replay.model.logits(new))])


def _penalties(longest: int) -> Iterator[Driving]:
    off = "Switch it off for greedy decoding: {}."
    rules: list[tuple[str, str, tuple[float, ...], Callable[[float], Any]]] = [  # name, its neutral value, values, rule
        ("repetition_penalty", "1", REPETITION, RepetitionPenalty),
        ("presence_penalty", "0", COUNTED, lambda value: CountPenalties(value, 0.0, prompt_tokens=0)),
        ("frequency_penalty", "0", COUNTED, lambda value: CountPenalties(0.0, value, prompt_tokens=0)),
    ]
    ranges: list[tuple[str, str, Callable[[int], slice]]] = [
        ("", "", lambda prompt: slice(None)),
        ("_generated", ", on generated tokens only", lambda prompt: slice(prompt, None)),
        ("_prompt", ", on the prompt's tokens only", lambda prompt: slice(prompt)),
    ]
    if longest > WINDOW:
        ranges.append(("_last", f", on the last {WINDOW} tokens", lambda prompt: slice(-WINDOW, None)))

    def penalised(replay: Replay, value: float, rule_of: Callable[[float], Any], part: Callable[[int], slice]) -> Rows:
        rule, chosen = rule_of(value), part(len(replay.run.prompt))
        return replay.changed(lambda ids, row: rule(ids[chosen], row))

    for (suffix, words, part), (name, neutral, values, rule_of) in product(ranges, rules):
        cause = f"a {name.replace('_', ' ')} of {{}} is left on{words}"
        rows = partial(penalised, rule_of=rule_of, part=part)
        yield Driving(f"{name}{suffix}", cause, off.format(f"{name} {neutral}"), rows, values)
    # fmt: off
    yield Driving("no_repeat_ngram", "no_repeat_ngram_size is {}: no sequence of so many tokens comes twice",
        off.format("no_repeat_ngram_size 0"),
        lambda replay, size: replay.changed(partial(_ban_repeats, size)), NGRAMS)
    yield Driving("end_tokens_suppressed", "end tokens are made impossible", "Leave ignore_eos and min_tokens out.",
        lambda replay: replay.changed(partial(_ban, replay.end_ids)))
    # fmt: on


def _ban(banned: Tokens, ids: Ints, row: Rows) -> Rows:
    out = row.copy()
    out[list(banned)] = -np.inf
    return out


def _ban_repeats(size: int, ids: Ints, row: Rows) -> Rows:
    """transformers' no_repeat_ngram_size, over prompt and generated tokens."""
    if len(ids) < size:
        return row
    windows = np.lib.stride_tricks.sliding_window_view(ids, size)
    same = (windows[:, :-1] == ids[len(ids) - size + 1 :]).all(axis=1)
    return _ban(windows[same, -1].tolist(), ids, row)
