"""Mistakes before and after the forward pass: in the prompt's token ids, in stopping, in the positions of new tokens.

To test one, the reference's own ids are changed, or its greedy generation is run with the mistake made. The result must
equal the candidate's ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ....backends.loaded import LoadedModel
from ....backends.paged_cache import PagedKVCache
from ....errors import TokenizerError
from ....reference.cache import TokenBatch
from ....tokenizers.base import END_OF_TURN

if TYPE_CHECKING:
    from ....tokenizers import Tokenizer

Ids = list[int]


@dataclass(frozen=True)
class TokenHypothesis:
    """A mistake in ids.   wrong: the ids that it would give, or None where it does not apply."""

    name: str
    cause: str
    remedy: str
    wrong: Callable[[], Ids | None]


# -- the prompt --------------------------------------------------------------------------------------------------------


def prompt_hypotheses(
    ids: Sequence[int], candidate_ids: Sequence[int], tokenizer: Tokenizer | None, prompt: str | None
) -> list[TokenHypothesis]:
    """Mistakes in encoding a prompt: `ids` are the reference's, `prompt` the text they were encoded from, if known."""
    right, bos = list(ids), tokenizer.bos_id if tokenizer else None
    hypotheses = [
        TokenHypothesis(
            "bos_twice",
            "the prompt begins with BOS twice: the template writes it and the tokenizer adds it",
            "Encode a rendered template with add_special_tokens off, or strip the second BOS.",
            lambda: [right[0], *right] if bos is None or right[0] == bos else None,
        ),
        TokenHypothesis(
            "bos_missing",
            "the prompt does not begin with BOS",
            "Add BOS: the model has never seen a text without it.",
            lambda: right[1:] if bos is None or right[0] == bos else None,
        ),
        TokenHypothesis(
            "eos_appended",
            "the tokenizer put an end token after the prompt",
            "Set add_eos_token to false for generation.",
            lambda: (
                [*right, candidate_ids[-1]]
                if tokenizer and len(candidate_ids) and candidate_ids[-1] in tokenizer.eos_ids
                else None
            ),
        ),
    ]
    if tokenizer is not None and prompt is not None:
        hypotheses += [
            TokenHypothesis(name, cause, remedy, partial(_encode_changed, tokenizer, prompt, change))
            for name, cause, remedy, change in _TEXT_CHANGES
        ]
        hypotheses.append(
            TokenHypothesis(
                "special_tokens_as_text",
                "special tokens in the prompt were encoded as plain text",
                "Parse special tokens when encoding a rendered template (parse_special=true in llama.cpp).",
                partial(_special_tokens_as_text, tokenizer, right, list(candidate_ids)),
            )
        )
    return hypotheses


def _encode_changed(tokenizer: Tokenizer, prompt: str, change: Callable[[str], str]) -> Ids | None:
    changed = change(prompt)
    return None if changed == prompt else tokenizer.encode(changed)


def _special_tokens_as_text(tokenizer: Tokenizer, right: Ids, candidate: Ids) -> Ids | None:
    """The candidate's ids, if they decode to the prompt's text but contain none of its special tokens."""
    specials = [token for token in right[1:] if tokenizer.is_special(token)]
    if not specials or any(token in candidate for token in specials):
        return None
    same = tokenizer.decode(right, skip_special_tokens=False) == tokenizer.decode(candidate, skip_special_tokens=False)
    return candidate if same else None


_TURN = re.compile(r"(User|System|Assistant): (.*?)" + re.escape(END_OF_TURN), re.DOTALL)
_OPEN = "Assistant: "


def _older_template(prompt: str) -> str:
    """The `Human: / BITNETAssistant:` template that the published GGUF file carries."""
    text = _TURN.sub(
        lambda m: {"User": "Human: ", "Assistant": "BITNETAssistant: "}.get(m[1], "") + m[2] + "\n\n", prompt
    )
    return text.removesuffix(_OPEN) + "BITNETAssistant: " if text.endswith(_OPEN) and text != prompt else prompt


_TEXT_CHANGES: tuple[tuple[str, str, str, Callable[[str], str]], ...] = (
    (
        "template_space_missing",
        "the space after `Assistant:` is missing at the prompt's end",
        "The generation prompt is `Assistant: `; do not strip a rendered template.",
        lambda text: text.removesuffix(" "),
    ),
    (
        "generation_prompt_missing",
        "the prompt does not end with `Assistant: `",
        "Render the template with add_generation_prompt=True.",
        lambda text: text.removesuffix(_OPEN),
    ),
    (
        "older_template",
        "the prompt was rendered with the older `Human: / BITNETAssistant:` template",
        "Take the template of the Hugging Face repository, not the one inside the published GGUF file.",
        _older_template,
    ),
    (
        "prompt_stripped",
        "whitespace around the prompt was stripped",
        "Encode the prompt as it is.",
        lambda text: text if text.endswith(_OPEN) else text.strip(),  # `template_space_missing` covers those
    ),
)


# -- generation --------------------------------------------------------------------------------------------------------


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


def tokenizer_of(model: LoadedModel) -> Tokenizer | None:
    """The model's tokenizer, or None where its folder has none."""
    try:
        return model.tokenizer
    except TokenizerError:
        return None
