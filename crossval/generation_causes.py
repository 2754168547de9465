"""Causes of a wrong greedy continuation: in stopping, and in the positions of new tokens.

To test one, the reference's greedy generation is run with the mistake made. The result must equal the candidate's ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bitnet_ref.backends.loaded import LoadedModel
from bitnet_ref.backends.paged_cache import PagedKVCache
from bitnet_ref.crossval.explain.diagnose import Diagnosis, judge_ids
from bitnet_ref.crossval.explain.hypotheses.prompts import Ids, TokenHypothesis, tokenizer_of
from bitnet_ref.reference.cache import TokenBatch


def diagnose_generation(
    model: LoadedModel,
    tokens: Sequence[int],
    candidate_generated: Sequence[int],
    generated: Sequence[int] | None = None,
) -> list[Diagnosis]:
    """Why a candidate's greedy continuation of the same token ids differs. Empty when it does not.

    generated: the reference's own continuation with its end token; computed here when it is not given.
    """
    wrong = [int(t) for t in candidate_generated]
    right = greedy(model, tokens, max(1, len(wrong))) if generated is None else [int(t) for t in generated]
    return [] if right == wrong else judge_ids(generation_hypotheses(model, tokens, right, wrong), wrong)


def generation_hypotheses(
    model: LoadedModel, prompt_ids: Sequence[int], generated: Sequence[int], candidate: Sequence[int]
) -> list[TokenHypothesis]:
    """Why a greedy continuation of the same prompt differs: `generated` is the reference's, with its end token."""
    prompt, right, n = list(prompt_ids), list(generated), len(candidate)

    def continue_past_end() -> Ids | None:
        if not right or n <= len(right) or right[-1] not in _end_ids(model):
            return None
        ends = frozenset(_end_ids(model)) - {right[-1]}
        return greedy(model, prompt, n, ends)

    if n < len(right) and right[:n] == list(candidate):
        return [
            TokenHypothesis(
                "stops_early",
                "the generation stops at a token that is no end token, or at a smaller limit",
                "Compare the stop tokens, stop strings and max_tokens.",
                lambda: right[:n],
            )
        ]
    end_name = _name_of(model, right[-1]) if right else None
    end_token = f"the end token {end_name}" if end_name else "an end token"
    return [
        TokenHypothesis(
            "eot_not_a_stop",
            f"{end_token} does not end the generation",
            "Stop on every id of eos_token_id and on <|eot_id|>: 2B-4T ends its turns with 128009, not with 128001.",
            continue_past_end,
        ),
        TokenHypothesis(
            "prefill_logits_of_the_previous_position",
            "the first new token is taken from the logits of the second-to-last prompt token",
            "After a batched prefill, read the row (first row of the sequence) + length - 1.",
            lambda: greedy(model, prompt, n, first_from=-2) if len(prompt) > 1 else None,
        ),
        TokenHypothesis(
            "prefill_logits_of_the_first_position",
            "the first new token is taken from the logits of the first prompt token",
            "After a batched prefill, read the row (first row of the sequence) + length - 1.",
            lambda: greedy(model, prompt, n, first_from=0) if len(prompt) > 2 else None,
        ),
        TokenHypothesis(
            "decode_overwrites_the_last_entry",
            "new tokens are written one place too low in the KV cache, over the prompt's last token",
            "The first new token's position is the number of prompt tokens.",
            lambda: greedy(model, prompt, n, shift=-1),
        ),
        TokenHypothesis(
            "decode_leaves_a_gap",
            "new tokens are written one place too high in the KV cache, after an empty entry",
            "The first new token's position is the number of prompt tokens.",
            lambda: greedy(model, prompt, n, shift=1),
        ),
    ]


def greedy(
    model: LoadedModel,
    prompt: Sequence[int],
    n: int,
    end_ids: frozenset[int] | None = None,
    *,
    first_from: int = -1,
    shift: int = 0,
) -> Ids:
    """At most n new tokens, each the most likely one.

    end_ids: stop after one of them; None takes the model's own.
    first_from: the prompt position whose logits choose the first new token.   shift: of the new tokens' positions.
    """
    ends = frozenset(_end_ids(model)) if end_ids is None else end_ids
    capacity = len(prompt) + n + max(shift, 0)
    cache = model.new_cache(slots=1, capacity=capacity, page_size=capacity)
    assert isinstance(cache, PagedKVCache)
    cache.fill_with_zeros()  # a gap left by `shift` holds zeros
    logits = model.run(TokenBatch.of([(0, 0, prompt)]), cache).all()[first_from]
    new: Ids = []
    while len(new) < n:
        new.append(int(np.argmax(logits)))
        if new[-1] in ends or len(new) == n:
            break
        step = TokenBatch.of([(0, len(prompt) + len(new) - 1 + shift, new[-1:])])
        logits = model.run(step, cache).all()[-1]
    return new


def _end_ids(model: LoadedModel) -> tuple[int, ...]:
    tokenizer = tokenizer_of(model)
    return (*model.config.eos_token_ids, *(tokenizer.eos_ids if tokenizer else ()))


def _name_of(model: LoadedModel, token: int) -> str | None:
    tokenizer = tokenizer_of(model)
    return tokenizer.id_to_token(token) if tokenizer and token < tokenizer.vocab_size else None
