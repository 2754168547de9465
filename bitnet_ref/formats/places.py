"""Where files store a linear: most have a tensor of their own; some share one, or are in another order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from ..families import family_of
from ..families.family import LinearPlace
from ..reference.config import ModelConfig
from ..reference.layers import Array
from ..reference.weights import linear_name
from .checkpoint import linear_shape
from .names import OUTSIDE_BLOCKS, gguf_name, hf_module


def linear_place(config: ModelConfig, name: str, style: Literal["hf", "gguf"]) -> LinearPlace:
    """Where a Hugging Face or GGUF file stores a linear or "embedding"."""
    module = hf_module(name, config) if style == "hf" else gguf_name(name)
    height, _ = linear_shape(config, name)
    if name in OUTSIDE_BLOCKS:
        return LinearPlace(module, height)
    _, layer, _, part = name.split(".")
    own = family_of(config).place(config, int(layer), part, style)
    if own is None:
        return LinearPlace(module, height)
    block = f"model.layers.{layer}" if style == "hf" else f"blk.{layer}"
    sharers = tuple(linear_name(int(layer), each) for each in own.sharers)
    parts = tuple(f"{block}.{each}" for each in own.parts)
    stack = own.stack and f"{block}.{own.stack}"
    return own._replace(module=f"{block}.{own.module}", sharers=sharers, parts=parts, stack=stack)


def stored_matrix(config: ModelConfig, name: str, style: Literal["hf", "gguf"], read: Callable[[str], Array]) -> Array:
    """The tensor that stores a linear, with all linears that share it.   read: a linear's name -> (N, K)"""
    place = linear_place(config, name, style)
    if place.rows is None and place.columns is None:
        return read(name)
    parts = {sharer: read(sharer) for sharer in place.sharers or (name,)}
    first = next(iter(parts.values()))
    out = np.empty((place.height, first.shape[1]), dtype=first.dtype)
    for sharer, w in parts.items():
        own = linear_place(config, sharer, style)
        out[slice(None) if own.rows is None else own.rows] = w if own.columns is None else w[:, np.argsort(own.columns)]
    return out
