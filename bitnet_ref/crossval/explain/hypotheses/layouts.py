"""Mistakes in reading packed weights: the right codes at the wrong places of the matrix."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ....families import family_of
from ....families.family import Edit, Hypothesis, before, instead
from ....formats.gguf.evidence import permute_rows, unpermute_rows
from ....reference.layers import Array
from ....reference.weights import LinearWeight
from ..edits.attention import interleaved
from ..variants import Step, with_matrix

layout_mistake = partial(Hypothesis, "*_proj.hook_acc_int32")
# Of attention's q and k: their rows, and their biases.
query_steps = " ".join(f"*.{letter}_proj.{hook}" for letter in "qk" for hook in ("hook_acc_int32", "hook_out", "added"))


def _stored(change: Callable[[Array], Array]) -> Edit:
    """The product with the ternary matrix (N, K) that a reader gets who takes the codes in another order."""
    return before(1, lambda w: with_matrix(w, change(w.ternary())))


def _row_groups(w: Array, shape: tuple[int, int]) -> Array:
    """The rows of w in `shape`, one of (4, -1) and (-1, 4), read in the order of the transposed shape."""
    return w.reshape(*shape, w.shape[1]).swapaxes(0, 1).reshape(w.shape)


def _has_groups_of_4(step: Step) -> bool:
    return bool(step.inputs[1].shape[0] % 4 == 0)


def _in_blocks(size: int, order: Array) -> Edit:
    """Each run of `size` weights, in storage order, taken in another order."""
    return _stored(lambda w: w.reshape(-1, size)[:, order].reshape(w.shape))


def _has_blocks(step: Step) -> bool:
    rows, columns = step.inputs[1].shape
    return bool(rows * columns % 128 == 0)


_PLACES = np.arange(128)
_BYTE, _QUARTER = _PLACES % 32, _PLACES // 32  # x86: weight j of a block is in byte j % 32, quarter j // 32
_ARM_PLACE = (_BYTE // 16) * 64 + _QUARTER * 16 + _BYTE % 16  # the place of the same bits in two ARM blocks of 64


def permuted(reorder: Callable[[Array, int], Array]) -> Edit:
    """A product or a bias of q or k whose rows are reordered, as `permute_rows` does it, or undone once too often."""

    def edit(step: Step, compute: Edit, x: Array, second: Any, *rest: Any) -> Array:
        y = compute(x, second, *rest)
        order = reorder(np.arange(y.shape[1]), y.shape[1] // step.setting.config.head_dim)
        if isinstance(second, LinearWeight):
            return y[:, order]
        return compute(x, second[..., order])  # the product has them in that order already

    return edit


def _is_query_product(step: Step) -> bool:
    """Whether a step of q or k computes with the matrix or the bias, in a block that has RoPE."""
    config = step.setting.config
    has_state = family_of(config).state_size(config, step.layer or 0) > 0
    return len(step.inputs) == 2 and config.head_dim > 2 and not has_state


def _permuted_and_interleaved(step: Step, compute: Edit, *inputs: Any) -> Array:
    turns = step.name.endswith(("hook_rot_q", "hook_rot_k"))
    return instead(interleaved)(step, compute, *inputs) if turns else permuted(permute_rows)(step, compute, *inputs)


def _pairs_adjacent(step: Step, compute: Edit, x: Array, cos: Array, sin: Array) -> Array:
    turned = 2 * cos.shape[-1]
    y = compute(x, cos, sin)
    y[..., :turned] = y[..., permute_rows(np.arange(turned), 1)]
    return y


# fmt: off
HYPOTHESES = (
    layout_mistake("hf_rows_adjacent", "a packed byte's four rows are taken as neighbours",
        "Hugging Face packs strided: byte row r holds rows r, r+R, r+2R, r+3R with R = out/4.",
        _stored(lambda w: _row_groups(w, (4, -1))), _has_groups_of_4),
    layout_mistake("hf_bits_reversed", "a packed byte's four rows are read from the high bits down",
        "Hugging Face packs from the low bits up: row r in bits 0-1 of byte row r, row r+R in bits 2-3, and so on.",
        _stored(lambda w: w.reshape(4, -1)[::-1].reshape(w.shape)), _has_groups_of_4),
    layout_mistake("own_rows_strided", "rows packed as neighbours are read as Hugging Face's strided ones",
        "Read the file with the layout that wrote it.",
        _stored(lambda w: _row_groups(w, (-1, 4))), _has_groups_of_4),
    layout_mistake("i2s_bits_reversed", "I2_S bytes are read from the low bits up",
        "In I2_S the first 32 weights of a block of 128 are in bits 6-7, the last in bits 0-1.",
        _in_blocks(128, (3 - _QUARTER) * 32 + _BYTE), _has_blocks),
    layout_mistake("i2s_x86_read_as_arm",
        "I2_S written in x86 blocks (128 weights in 32 bytes) is read in ARM blocks (64 in 16)",
        "The file does not say which: take the order of the machine that wrote it.",
        _in_blocks(128, np.argsort(_ARM_PLACE)), _has_blocks),
    layout_mistake("i2s_arm_read_as_x86",
        "I2_S written in ARM blocks (64 weights in 16 bytes) is read in x86 blocks (128 in 32)",
        "The file does not say which: take the order of the machine that wrote it.",
        _in_blocks(128, _ARM_PLACE), _has_blocks),
    layout_mistake("i2s_read_sequentially", "I2_S bytes are read as four neighbouring weights each",
        "Byte j of a block of 128 holds the weights j, j+32, j+64 and j+96, from the high bits down.",
        _in_blocks(128, np.arange(128).reshape(4, 32).T.reshape(-1)), _has_blocks),
    layout_mistake("four_in_a_byte_reversed", "the four codes of a byte are read in reverse",
        "Where a byte holds four neighbours, the first is in the lowest bits.",
        _in_blocks(4, np.array([3, 2, 1, 0])), lambda step: step.inputs[1].shape[1] % 4 == 0),
    layout_mistake("signs_flipped", "+1 and -1 are exchanged",
        "Codes 0, 1, 2 stand for -1, 0, +1.", _stored(np.negative)),
    Hypothesis(query_steps, "qk_permuted",
        "the rows of q and k are in llama.cpp's order for interleaved RoPE, but RoPE is half-split",
        "Un-permute q and k of `llama` architecture GGUF files; bitnet architectures are not permuted.",
        permuted(permute_rows), _is_query_product),
    Hypothesis(query_steps, "qk_unpermuted_twice", "the rows of q and k were un-permuted though they were not permuted",
        "Only `llama` architecture GGUF files are permuted; bitnet ones and Hugging Face's are not.",
        permuted(unpermute_rows), lambda step: step.setting.config.head_dim > 4 and _is_query_product(step)),
    Hypothesis(f"{query_steps} *.attn.hook_rot_q *.attn.hook_rot_k", "qk_permuted_with_interleaved_rope",
        "q and k are stored permuted and RoPE is interleaved, as in llama.cpp: an equal computation in another order",
        "Nothing is wrong: compare from the attention scores on.",
        _permuted_and_interleaved, lambda step: step.name.endswith(("rot_q", "rot_k")) or _is_query_product(step)),
    Hypothesis("*.attn.hook_rot_q *.attn.hook_rot_k", "rotated_pairs_adjacent",
        "q and k after RoPE have the pair (j, j + d/2) at (2j, 2j+1): an equal computation in another order",
        "Nothing is wrong: compare from the attention scores on.", _pairs_adjacent,
        lambda step: step.inputs[1].shape[-1] > 1),
)
