"""Notebook 3b: the eight pieces of storyteller. Each is run on tensors of the reference, and its result is judged as an
engine's: crossval's search names the mistake."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....api import Model
from ....reference.layers import Array
from ..answers import as_array, expect_array, expect_shape
from ..declare import EXERCISES, Wrong, exercise, exercise_texts, run, said_of
from ..tensors import expect_tensor

Recorded = Mapping[str, Array]


def with_edit(model: Model, name: str, old: str, new: str) -> Callable[..., Any]:
    """The function of the exercise `name` as its solution has it, with `old` replaced by `new`: a mistake, run."""
    names = sizes(model)
    for each in EXERCISES.values():
        if each.lesson == "3b":
            assert each.name != name or old in each.solution, f"{name} has no {old!r}"
            exec(each.solution.replace(old, new) if each.name == name else each.solution, names)
    function: Callable[..., Any] = names[EXERCISES[name].answer]
    return function


def slips_of(name: str) -> dict[str, Sequence[str]]:
    """sentence -> (what of the solution of `name`, what a student may write there)."""
    slips: dict[str, Sequence[str]] = exercise_texts()[name]["slips"]
    return slips


def edited(model: Model, name: str, *arguments: Any) -> dict[str, Callable[[], Array]]:
    """sentence -> what the solution of `name` gives with one of its slips in it, run when it is asked for.

    A block gets an empty cache besides its arguments.
    """

    def make(edit: Sequence[str]) -> Array:
        cache = (empty_cache(model),) * (name == "3b.7")
        result: Array = with_edit(model, name, *edit)(*arguments, *cache)
        return result

    return {sentence: partial(make, edit) for sentence, edit in slips_of(name).items()}


def sizes(model: Model) -> dict[str, Any]:
    """The names that the pieces may use besides each other, as the notebook has them."""
    c = model.config
    names: dict[str, Any] = {"np": np, "w": model.weights, "tokenizer": model.tokenizer, "theta": c.rope.theta}
    return names | {"H": c.num_attention_heads, "G": c.num_key_value_heads, "d": c.head_dim}


@exercise("3b.1")
def rows_of_the_embedding(answer: Any, model: Model, tokens: Sequence[int], recorded: Recorded) -> str:
    matrix: Any = model.weights.embedding
    table: Array = matrix.array  # (V, D) bfloat16
    mine, right = as_array(run(answer, list(tokens), table)), recorded["hook_embed"]
    expect_shape(mine, right.shape)
    wide = table.astype(np.float32)
    ids = np.asarray(tokens)
    mistakes = {
        "the rows are those of the ids plus one": wide[(ids + 1) % len(wide)],
        "the rows are those of the ids minus one": wide[ids - 1],
        "the rows are the first ones of the table, not those of the ids": wide[: len(ids)],
        "the rows are multiplied by √D, as in Gemma": right * np.float32(16),
        "each row is scaled to length 1": right / np.linalg.norm(right, axis=-1, keepdims=True),
    }
    expect_array(mine, right, mistakes=mistakes, exact=True)
    if mine.dtype != np.float32:
        raise Wrong(f"The values are right, but in {mine.dtype}: the rest computes in float32.")
    expect_array(run(answer, [int(tokens[0])], table), right[:1], exact=True)
    return "Equal, bit for bit."


@exercise("3b.2")
def norm_of_the_stream(answer: Any, model: Model, tokens: Sequence[int], recorded: Recorded) -> str:
    x, norm = recorded["hook_embed"], model.weights.layers[0].attn_norm
    mine = as_array(run(answer, x, norm))
    made = edited(model, "3b.2", x, norm)
    return expect_tensor(model, tokens, recorded, "blocks.0.ln1.hook_normalized", mine, "hook_embed", made)


@exercise("3b.3")
def linear_of_q(answer: Any, model: Model, tokens: Sequence[int], recorded: Recorded) -> str:
    x, layer = recorded["blocks.0.ln1.hook_normalized"], model.weights.layers[0]
    mine = run(answer, x, layer.q_proj)
    name = "blocks.0.attn.q_proj.hook_out"
    made = edited(model, "3b.3", x, layer.q_proj)
    sentence = expect_tensor(model, tokens, recorded, name, mine, "blocks.0.ln1.hook_normalized", made)
    x, name = recorded["blocks.0.ln2.hook_normalized"], "blocks.0.mlp.up_proj.hook_out"
    expect_tensor(model, tokens, recorded, name, run(answer, x, layer.up_proj), "blocks.0.ln2.hook_normalized")
    return sentence


@exercise("3b.4")
def turned_queries(answer: Any, model: Model, tokens: Sequence[int], recorded: Recorded) -> str:
    q, positions = recorded["blocks.0.attn.hook_q"], np.arange(len(tokens))
    name = "blocks.0.attn.hook_rot_q"
    made = edited(model, "3b.4", q, positions)
    sentence = expect_tensor(model, tokens, recorded, name, run(answer, q, positions), "blocks.0.attn.hook_k", made)
    last = run(answer, q[-1:], positions[-1:])  # alone, as in generation
    wrong_alone = f"Right for the whole text, wrong for its last token alone, at position {positions[-1]}:"
    with said_of(f"{wrong_alone} use the positions that you are given."):
        expect_array(last, recorded[name][-1:])
    return sentence


@exercise("3b.5")
def attention_of_heads(answer: Any, model: Model, tokens: Sequence[int], recorded: Recorded) -> str:
    q, k, v = (recorded[f"blocks.0.attn.{name}"] for name in ("hook_rot_q", "hook_rot_k", "hook_v"))
    name = "blocks.0.attn.hook_z"
    made, mine = edited(model, "3b.5", q, k, v), as_array(run(answer, q, k, v))
    strict = with_edit(model, "3b.5", "[None, :] > np", "[None, :] >= np")(q, k, v)
    if mine.shape == strict.shape and np.allclose(mine[1:], strict[1:], atol=1e-5):  # the first token sees nothing
        raise Wrong("Likely mistake: the mask hides the token itself, too. Query i of n sees the keys j <= T − n + i.")
    sentence = expect_tensor(model, tokens, recorded, name, mine, "blocks.0.attn.hook_v", made)
    for n in (1, 3):
        wrong_alone = f"Right for the whole text, wrong for its last {n} alone, as with a cache."
        with said_of(f"{wrong_alone} Query i of n is token T − n + i of the text."):
            expect_array(run(answer, q[-n:], k, v), recorded[name][-n:])
    return sentence


@exercise("3b.6")
def gate_of_the_feed_forward(answer: Any, model: Model, tokens: Sequence[int], recorded: Recorded) -> str:
    gate, up = recorded["blocks.0.mlp.hook_pre"], recorded["blocks.0.mlp.hook_pre_linear"]
    made = edited(model, "3b.6", gate, up)
    return expect_tensor(model, tokens, recorded, "blocks.0.mlp.hook_post", run(answer, gate, up), slips=made)


@exercise("3b.7")
def whole_block(answer: Any, model: Model, tokens: Sequence[int], recorded: Recorded) -> str:
    layer, x = model.weights.layers[0], recorded["hook_embed"]
    name = "blocks.0.hook_resid_post"
    cache = empty_cache(model)
    made = edited(model, "3b.7", x, layer)
    sentence = expect_tensor(model, tokens, recorded, name, run(answer, x, layer, cache), "hook_embed", made)
    if len(cache["k"]) != len(x) or len(cache["v"]) != len(x):
        raise Wrong(
            f"x is right, but the cache has {len(cache['k'])} keys and {len(cache['v'])} values after "
            f"{len(x)} tokens: put the new ones at its end."
        )
    expect_array(cache["v"], recorded["blocks.0.attn.hook_v"])
    # RoPE sees differences of positions alone: positions that are all too large show where two calls meet
    chunks = [x[:7], *(row[None] for row in x[7:])]

    def in_chunks(function: Any) -> tuple[Array, dict[str, NDArray[np.float32]]]:
        cache = empty_cache(model)
        return np.concatenate([as_array(run(function, chunk, layer, cache)) for chunk in chunks]), cache

    by_chunks, cache = in_chunks(answer)
    try:
        expect_array(by_chunks, recorded[name])
    except Wrong as wrong:
        if len(cache["k"]) != len(x) or len(cache["v"]) != len(x):
            cause = "put the new keys and values behind those that are in the cache, not in their place"
        elif np.allclose(cache["k"], in_chunks(with_edit(model, "3b.7", *LATE))[1]["k"], atol=1e-4):
            cause = (
                "positions are too high by the number of new tokens: count the keys in the cache before you put the "
                "new ones there"
            )
        elif not np.allclose(cache["k"], recorded["blocks.0.attn.hook_rot_k"], atol=1e-4):
            cause = (
                "positions begin at the number of keys that were in the cache before this call, and the cache keeps "
                "what is turned"
            )
        else:
            cause = "the cache is right; let attend read all of its keys and values, not the new ones alone"
        raise Wrong(
            f"Right for the whole text at once, wrong in 7 tokens and then one by one: {cause}. {wrong}"
        ) from None
    if not np.allclose(cache["v"], recorded["blocks.0.attn.hook_v"], atol=1e-5):
        raise Wrong("x is right, but the cache has the tokens in another order: put the new ones at its end.")
    return f"{sentence} Also in 7 tokens and then one by one."


LATE = ('start = len(x), len(cache["k"])', 'start = len(x), len(cache["k"]) + len(x)')  # counted after the append


def empty_cache(model: Model) -> dict[str, NDArray[np.float32]]:
    """The keys and values of no tokens."""
    shape = (0, model.config.num_key_value_heads, model.config.head_dim)
    return {"k": np.zeros(shape, dtype=np.float32), "v": np.zeros(shape, dtype=np.float32)}


@exercise("3b.8")
def head_and_loop(answer: Any, model: Model) -> str:
    for prompt, count in (("Once upon a time", 12), ("The little girl looked at the lion and said,", 12)):
        ids = model.tokenizer.encode(prompt)
        new = greedy(model, prompt, count)
        right, got = model.tokenizer.decode(ids + new), run(answer, prompt, count)
        if not isinstance(got, str):
            raise Wrong(f"A text is wanted, not {type(got).__name__}: tokenizer.decode makes one of token ids.")
        if got.strip() == right.strip():
            continue
        raise Wrong(_text_mistake(model, prompt, ids, new, got, right.strip()))
    ends, tokenizer = model.tokenizer.eos_ids, model.tokenizer
    tokenizer.eos_ids = (new[3],)  # as if the text ended there
    try:
        got = run(answer, prompt, count)
    finally:
        tokenizer.eos_ids = ends
    if got.strip() == tokenizer.decode(ids + new[:4]).strip():
        raise Wrong("It stops at a token of tokenizer.eos_ids, but writes it first: stop before it is written.")
    if got.strip() != tokenizer.decode(ids + new[:3]).strip():
        raise Wrong("The text is right, but it does not stop before a token of tokenizer.eos_ids.")
    return "The package's text, token for token."


def greedy(model: Model, prompt: str, max_tokens: int) -> list[int]:
    """The ids of the new tokens."""
    result: Any = model.generate(prompt, max_tokens=max_tokens, temperature=0.0)
    return list(result.token_ids)


def _text_mistake(model: Model, prompt: str, ids: Sequence[int], new: Sequence[int], got: str, right: str) -> str:
    """What may be wrong with a generated text."""
    got, decode = got.strip(), model.tokenizer.decode
    if got == decode(list(new)).strip():
        return "The prompt is missing: decode the prompt's ids and the new ones together."
    if got == prompt:
        return "Nothing was written: the text is the prompt."
    longer, shorter = (decode([*ids, *greedy(model, prompt, len(new) + by)]) for by in (1, -1))
    if got == longer.strip():
        return "One token too many: max_tokens counts the new ones."
    if got == shorter.strip():
        return "One token too few: max_tokens counts the new ones, and the one after the prompt is the first."
    stops = next((count for count in range(1, len(new)) if got == decode([*ids, *new[:count]]).strip()), None)
    if stops is not None:
        with_prompt = ", not those of the prompt" * (stops == len(new) - len(ids))
        return (
            f"Right so far, but it stops after {stops} of {len(new)} new tokens: max_tokens counts the new ones"
            f"{with_prompt}."
        )
    same = next((i for i, (a, b) in enumerate(zip(got, right, strict=False)) if a != b), min(len(got), len(right)))
    words = right[:same].split(" ")
    first = f"Your text leaves the package's after “{'… ' * (len(words) > 5)}{' '.join(words[-5:])}”."
    for sentence, edit in slips_of("3b.8").items():
        if with_edit(model, "3b.8", *edit)(prompt, len(new)).strip() == got:
            return f"{first} Likely mistake: {sentence}."
    if not got.startswith(prompt):
        return f"It does not begin with the prompt, {prompt!r}: decode the prompt's ids and the new ones together."
    if same > len(prompt) + 1:
        return f"{first} The first new token is right: are the caches kept, one for each block, and all blocks run?"
    return f"{first} Is the last norm there, and the head of the last token?"
