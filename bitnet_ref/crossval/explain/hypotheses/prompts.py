"""Mistakes before the forward pass: in the prompt's token ids.

To test one, the reference's own ids are changed. The result must equal the candidate's ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ....backends.loaded import LoadedModel
from ....errors import TokenizerError
from ....tokenizers.base import END_OF_TURN
from ...types import Ids, Tokens

if TYPE_CHECKING:
    from ....tokenizers import Tokenizer


@dataclass(frozen=True)
class TokenHypothesis:
    """A mistake in ids.   wrong: the ids that it would give, or None where it does not apply."""

    name: str
    cause: str
    remedy: str
    wrong: Callable[[], Ids | None]


def prompt_hypotheses(
    ids: Tokens, candidate_ids: Tokens, tokenizer: Tokenizer | None, prompt: str | None
) -> list[TokenHypothesis]:
    """Mistakes in encoding a prompt: `ids` are the reference's, `prompt` the text they were encoded from, if known."""
    right, bos = list(ids), tokenizer.bos_id if tokenizer else None
    starts_with_bos = bos is None or right[:1] == [bos]
    ends = tokenizer and len(candidate_ids) and candidate_ids[-1] in tokenizer.eos_ids
    # fmt: off
    hypotheses = [
        TokenHypothesis("bos_twice",
            "the prompt begins with BOS twice: the template writes it and the tokenizer adds it",
            "Encode a rendered template with add_special_tokens off, or strip the second BOS.",
            lambda: [*right[:1], *right] if starts_with_bos else None),
        TokenHypothesis("bos_missing", "the prompt does not begin with BOS",
            "Add BOS: the model has never seen a text without it.", lambda: right[1:] if starts_with_bos else None),
        TokenHypothesis("eos_appended", "the tokenizer put an end token after the prompt",
            "Set add_eos_token to false for generation.", lambda: [*right, candidate_ids[-1]] if ends else None),
    ]
    # fmt: on
    if tokenizer is not None and prompt is not None:
        for name, cause, remedy, change in _TEXT_CHANGES:
            wrong = partial(_encode_changed, tokenizer, prompt, change)
            hypotheses.append(TokenHypothesis(name, cause, remedy, wrong))
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
    names = {"User": "Human: ", "Assistant": "BITNETAssistant: "}
    text = _TURN.sub(lambda turn: f"{names.get(turn[1], '')}{turn[2]}\n\n", prompt)
    return text.removesuffix(_OPEN) + "BITNETAssistant: " if text.endswith(_OPEN) and text != prompt else prompt


# fmt: off
_TEXT_CHANGES: tuple[tuple[str, str, str, Callable[[str], str]], ...] = (
    ("template_space_missing", "the space after `Assistant:` is missing at the prompt's end",
        "The generation prompt is `Assistant: `; do not strip a rendered template.",
        lambda text: text.removesuffix(" ")),
    ("generation_prompt_missing", "the prompt does not end with `Assistant: `",
        "Render the template with add_generation_prompt=True.", lambda text: text.removesuffix(_OPEN)),
    ("older_template", "the prompt was rendered with the older `Human: / BITNETAssistant:` template",
        "Take the template of the Hugging Face repository, not the one inside the published GGUF file.",
        _older_template),
    ("prompt_stripped", "whitespace around the prompt was stripped",
        "Encode the prompt as it is.",
        lambda text: text if text.endswith(_OPEN) else text.strip()),  # `template_space_missing` covers those
)
# fmt: on


def ids_as_message(model: LoadedModel, text: str) -> Ids | None:
    """The ids of a conversation that begins with this message; None if the model has no chat template."""
    try:
        return model.tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=True)
    except TokenizerError:
        return None


def tokenizer_of(model: LoadedModel) -> Tokenizer | None:
    """The model's tokenizer, or None where its folder has none."""
    try:
        return model.tokenizer
    except TokenizerError:
        return None
