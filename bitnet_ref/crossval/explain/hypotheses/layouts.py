"""Mistakes in reading packed weights: the right codes at the wrong places of the matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....families import family_of
from ....families.family import Hypothesis
from ....families.linear_norms import NormedLinear
from ....reference.weights import LayerWeights, LinearWeight
from ..variants import Setting, with_matrix

layout_mistake = partial(Hypothesis, "*_proj.hook_acc_int32 *_proj.hook_out")
query_mistake = partial(Hypothesis, "*.q_proj.hook_acc_int32 *.q_proj.hook_out")


def _matrices(s: Setting, change: Callable[[NDArray], NDArray | None]) -> Setting | None:
    """Every ternary matrix of the blocks changed; None if `change` returns None for one of them."""
    changed: dict[str, NDArray] = {}
    for _, weight in s.weights.linears():
        w = weight.bit_linear
        if w is not None and weight is not s.weights.lm_head:
            matrix = change(w.ternary())
            if matrix is None:
                return None
            changed[w.name] = matrix
    return s.map_ternary(lambda _, w: with_matrix(w, changed[w.name])) if changed else None


def _row_groups(w: NDArray, shape: tuple[int, int]) -> NDArray | None:
    """The rows of w in `shape`, one of (4, -1) and (-1, 4), read in the order of the transposed shape."""
    return None if len(w) % 4 else w.reshape(*shape, w.shape[1]).swapaxes(0, 1).reshape(w.shape)


def _in_blocks(w: NDArray, size: int, order: NDArray) -> NDArray | None:
    """Each run of `size` weights, in storage order, taken in another order."""
    return None if w.size % size else w.reshape(-1, size)[:, order].reshape(w.shape)


_PLACES = np.arange(128)
_BYTE, _QUARTER = _PLACES % 32, _PLACES // 32  # x86: weight j of a block is in byte j % 32, quarter j // 32
_ARM_PLACE = (_BYTE // 16) * 64 + _QUARTER * 16 + _BYTE % 16  # the place of the same bits in two ARM blocks of 64


def interleaving(heads: int, head_dim: int) -> NDArray[np.int64]:
    """Row order in which llama.cpp's converter stores q and k: the pair (j, j + d/2) of a head becomes (2j, 2j+1)."""
    rows = np.arange(heads * head_dim).reshape(heads, 2, head_dim // 2)
    return rows.swapaxes(1, 2).reshape(-1)


def _take_rows(w: LinearWeight, order: NDArray) -> LinearWeight:
    """The linear with its rows in another order: of each of its arrays that has them."""
    if isinstance(w, NormedLinear):
        return replace(w, linear=_take_rows(w.linear, order))
    arrays = {name: getattr(w, name) for name in ("packed", "scales", "stored", "bias") if hasattr(w, name)}
    changed: dict[str, Any] = {name: array[order] for name, array in arrays.items() if array is not None}
    return replace(w, **changed)  # type: ignore[type-var]


def permute_qk(s: Setting, *, back: bool = False) -> Setting:
    """q and k with their rows in llama.cpp's order; back: with that order undone once too often."""
    q, k = (interleaving(n, s.config.head_dim) for n in (s.config.num_attention_heads, s.config.num_key_value_heads))
    if back:
        q, k = np.argsort(q), np.argsort(k)

    def layer(w: LayerWeights) -> LayerWeights:
        if family_of(s.config).state_size(s.config, int(w.name.split(".")[1])):  # it has no RoPE
            return w
        return replace(w, q_proj=_take_rows(w.q_proj, q), k_proj=_take_rows(w.k_proj, k))

    return s.map_layers(layer)


# fmt: off
HYPOTHESES = (
    layout_mistake("hf_rows_adjacent", "a packed byte's four rows are taken as neighbours",
        "Hugging Face packs strided: byte row r holds rows r, r+R, r+2R, r+3R with R = out/4.",
        lambda s: _matrices(s, lambda w: _row_groups(w, (4, -1)))),
    layout_mistake("own_rows_strided", "rows packed as neighbours are read as Hugging Face's strided ones",
        "Read the file with the layout that wrote it.", lambda s: _matrices(s, lambda w: _row_groups(w, (-1, 4)))),
    layout_mistake("i2s_bits_reversed", "I2_S bytes are read from the low bits up",
        "In I2_S the first 32 weights of a block of 128 are in bits 6-7, the last in bits 0-1.",
        lambda s: _matrices(s, lambda w: _in_blocks(w, 128, (3 - _QUARTER) * 32 + _BYTE))),
    layout_mistake("i2s_x86_read_as_arm",
        "I2_S written in x86 blocks (128 weights in 32 bytes) is read in ARM blocks (64 in 16)",
        "The file does not say which: take the order of the machine that wrote it.",
        lambda s: _matrices(s, lambda w: _in_blocks(w, 128, np.argsort(_ARM_PLACE)))),
    layout_mistake("i2s_arm_read_as_x86",
        "I2_S written in ARM blocks (64 weights in 16 bytes) is read in x86 blocks (128 in 32)",
        "The file does not say which: take the order of the machine that wrote it.",
        lambda s: _matrices(s, lambda w: _in_blocks(w, 128, _ARM_PLACE))),
    layout_mistake("i2s_read_sequentially", "I2_S bytes are read as four neighbouring weights each",
        "Byte j of a block of 128 holds the weights j, j+32, j+64 and j+96, from the high bits down.",
        lambda s: _matrices(s, lambda w: _in_blocks(w, 128, np.arange(128).reshape(4, 32).T.reshape(-1)))),
    layout_mistake("four_in_a_byte_reversed", "the four codes of a byte are read in reverse",
        "Where a byte holds four neighbours, the first is in the lowest bits.",
        lambda s: _matrices(s, lambda w: None if w.shape[1] % 4 else _in_blocks(w, 4, np.array([3, 2, 1, 0])))),
    layout_mistake("signs_flipped", "+1 and -1 are exchanged",
        "Codes 0, 1, 2 stand for -1, 0, +1.", lambda s: _matrices(s, np.negative)),
    query_mistake("qk_permuted",
        "the rows of q and k are in llama.cpp's order for interleaved RoPE, but RoPE is half-split",
        "Un-permute q and k of `llama` architecture GGUF files; bitnet architectures are not permuted.",
        lambda s: permute_qk(s) if s.config.head_dim > 2 else None),
    query_mistake("qk_unpermuted_twice", "the rows of q and k were un-permuted though they were not permuted",
        "Only `llama` architecture GGUF files are permuted; bitnet ones and Hugging Face's are not.",
        lambda s: permute_qk(s, back=True) if s.config.head_dim > 4 else None),
)
