"""Did both engines read the same tokens? If not, nothing else that differs means anything, so this is asked first."""

from __future__ import annotations

from collections.abc import Sequence

from ..reference.config import ModelConfig


def token_parity(
    reference: Sequence[int],
    candidate: Sequence[int],
    config: ModelConfig,
    prompts: tuple[str | None, str | None] = (None, None),
) -> str | None:
    """None when the tokens are the same, else one line that says how they differ and what that looks like.

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
    head = _common(mine, theirs)
    tail = _common(mine[head:][::-1], theirs[head:][::-1])
    here = f"first at index {head}: {_at(mine, head)} in the reference, {_at(theirs, head)} in the candidate"
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


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    n = 0
    for mine, theirs in zip(a, b, strict=False):
        if mine != theirs:
            break
        n += 1
    return n


def _at(tokens: Sequence[int], index: int) -> str:
    return str(tokens[index]) if index < len(tokens) else "none"
