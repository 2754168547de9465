"""Where files store a linear: most have a tensor of their own; some of Qwen3.5's share one, or are in another order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..reference.config import DeltaConfig, ModelConfig
from ..reference.quantization import CODES_PER_BYTE
from ..reference.weights import linear_name
from .checkpoint import linear_shape
from .names import LINEARS_IN_DELTA, OUTSIDE_BLOCKS, gguf_name, hf_module


class LinearPlace(NamedTuple):
    """Where a file stores a linear: its row i is row `rows[i]` of the tensor, its column j column `columns[j]`."""

    module: str  # the tensor's name without ".weight"
    height: int  # rows of the tensor
    rows: NDArray[np.intp] | None = None  # None: all, in order
    columns: NDArray[np.intp] | None = None
    sharers: tuple[str, ...] = ()  # the linears in the tensor, in the order of a block's; (): this one alone

    def take(self, stored: NDArray) -> NDArray:
        """The linear, out of the tensor.   (height, K) -> (N, K)"""
        w = stored if self.rows is None else stored[self.rows]
        return w if self.columns is None else np.ascontiguousarray(w[:, self.columns])

    def take_groups(self, packed: NDArray[np.uint8], scales: NDArray) -> tuple[NDArray[np.uint8], NDArray] | None:
        """The same of a packed tensor and its scales, each of a block; None where columns are no whole blocks."""
        if self.rows is not None:
            packed, scales = packed[self.rows], scales[self.rows]
        if self.columns is None:
            return packed, scales
        block = len(self.columns) // scales.shape[1]
        starts = self.columns[::block]
        if (starts % block).any() or (self.columns.reshape(-1, block) != starts[:, None] + np.arange(block)).any():
            return None
        return packed[:, self.columns[::CODES_PER_BYTE] // CODES_PER_BYTE], scales[:, starts // block]


def linear_place(config: ModelConfig, name: str, style: Literal["hf", "gguf"]) -> LinearPlace:
    """Where a Hugging Face or GGUF file stores a linear or "embedding".

    Qwen3.5's DeltaNet has q, k and v in one tensor, its attention q and the output's gate, head by head. In GGUF files
    the value heads of a DeltaNet are in another order: the first of each key head, then the second of each, and so on.
    """
    module = hf_module(name) if style == "hf" else gguf_name(name)
    height, _ = linear_shape(config, name)
    if name in OUTSIDE_BLOCKS:
        return LinearPlace(module, height)
    _, layer, _, part = name.split(".")
    delta = config.delta if config.is_delta(int(layer)) else None
    if delta is None or part not in LINEARS_IN_DELTA:
        if not config.output_gate or part not in ("q_proj", "z_proj") or delta is not None:
            return LinearPlace(module, height)
        by_head = np.arange(2 * height).reshape(config.num_attention_heads, 2, -1)
        pair = tuple(linear_name(int(layer), each) for each in ("q_proj", "z_proj"))
        q = module.replace("z_proj", "q_proj") if style == "hf" else f"blk.{layer}.attn_q"
        return LinearPlace(q, 2 * height, by_head[:, ("q_proj", "z_proj").index(part)].reshape(-1), None, pair)
    names = LINEARS_IN_DELTA[part]
    module = f"model.layers.{layer}.{names.hf[0]}" if style == "hf" else f"blk.{layer}.{names.gguf}"
    order = value_heads_in_gguf(delta) if style == "gguf" else np.arange(delta.value_heads)
    values = (order[:, None] * delta.value_dim + np.arange(delta.value_dim)).reshape(-1)
    parts = ("q_proj", "k_proj", "v_proj")
    if part in parts:
        start = sum(delta.sizes[: parts.index(part)])
        rows = start + (values if part == "v_proj" else np.arange(height))
        return LinearPlace(module, sum(delta.sizes), rows, None, tuple(linear_name(int(layer), each) for each in parts))
    if style == "hf" or delta.value_heads == delta.key_heads:
        return LinearPlace(module, height)
    if part == "o_proj":
        return LinearPlace(module, height, None, values)
    return LinearPlace(module, height, values if part == "z_proj" else order)


def value_heads_in_gguf(delta: DeltaConfig) -> NDArray[np.intp]:
    """The place of each value head of a DeltaNet in GGUF files.

    >>> value_heads_in_gguf(DeltaConfig(2, 4, 8, 8, 4)).tolist()  # of key head 0: value heads 0 and 1
    [0, 2, 1, 3]
    """
    groups = delta.value_heads // delta.key_heads
    return np.arange(delta.value_heads).reshape(groups, delta.key_heads).T.reshape(-1)


def stored_matrix(
    config: ModelConfig, name: str, style: Literal["hf", "gguf"], read: Callable[[str], NDArray]
) -> NDArray:
    """The tensor that stores a linear, with all linears that share it.   read: a linear's name -> (N, K)"""
    place = linear_place(config, name, style)
    if place.rows is None and place.columns is None:
        return read(name)
    out: NDArray | None = None
    for sharer in place.sharers or (name,):
        w, own = read(sharer), linear_place(config, sharer, style)
        out = np.empty((place.height, w.shape[1]), dtype=w.dtype) if out is None else out
        out[slice(None) if own.rows is None else own.rows] = w if own.columns is None else w[:, np.argsort(own.columns)]
    assert out is not None
    return out
