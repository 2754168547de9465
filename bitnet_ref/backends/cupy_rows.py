"""Rows that are not computed yet: what lies between two matrix products, put off until a kernel can do it at once.

The model's text says `h = be.rms_norm(be.add(x, y), w)`, then `be.linears(h, ...)`. On a card each of these would be a
kernel that reads 10 KB and writes 10 KB. So `add`, `gated` and `rms_norm` only note what they were asked for, and
whoever needs the numbers asks `rows.cu` for all of it: the sum, its norm and the int8 of the norm in one launch.

    Rows    made   = a | a + b | relu(a)^2 * b | silu(a) * b
    Normed  normed = made / sqrt(mean(made^2) + eps) * weight
    Turned  q or k after RoPE: the cache turns k on its way in, and q beside it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

PLAIN, SUM, RELU2, SILU = range(4)  # rows.cu: enum Source
GATES = {"relu2": RELU2, "silu": SILU}


@dataclass(eq=False)
class Rows:
    """(N, K) float32, made of one or two device arrays of that shape; `made` once a kernel has."""

    source: int
    a: Any
    b: Any = None
    made: Any = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.a.shape

    @property
    def ndim(self) -> int:
        return 2

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    def __len__(self) -> int:
        return self.shape[0]


@dataclass(eq=False)
class Normed:
    """(N, K) float32: the RMSNorm of some rows."""

    of: Rows
    weight: Any  # (K,) on the device
    eps: float
    value: Any = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.of.shape

    @property
    def ndim(self) -> int:
        return 2

    @property
    def dtype(self) -> np.dtype:
        return self.of.dtype

    def __len__(self) -> int:
        return self.shape[0]


@dataclass(eq=False)
class Rotation:
    """q (N, H, d) and k (N, G, d), to be turned by the tables cos and sin (N, d/2)."""

    q: Any
    k: Any
    cos: Any
    sin: Any
    q_turned: Any = None
    k_turned: Any = None


@dataclass(eq=False)
class Turned:
    """One of the two results of a rotation."""

    rotation: Rotation
    is_query: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.rotation.q if self.is_query else self.rotation.k).shape

    @property
    def ndim(self) -> int:
        return 3

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    def __len__(self) -> int:
        return self.shape[0]
