"""Results that are not computed yet: what lies between two matrix products, put off until a kernel can do it at once.

The model's text says `h = be.rms_norm(be.add(x, y), w)`, then `be.linears(h, ...)`. One by one, each of these would
write every row to memory and read it again. So a backend may only note what it was asked for, in these objects, and
whoever needs the numbers computes all of it, row by row: the sum, its norm and the int8 of the norm.

    Rows    made   = a | a + b | relu(a)^2 * b | silu(a) * b
    Normed  normed = made / sqrt(mean(made^2) + eps) * weight
    Turned  q or k after RoPE: the cache turns k on its way in, attention turns q
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

PLAIN, SUM, RELU2, SILU = range(4)  # what rows are made of; cuda/rows.cu: enum Source, _cpu_ternary.pxi
GATES = {"relu2": RELU2, "silu": SILU}


class Deferred:
    """A float32 array that is not there yet."""

    dtype = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """What the array's will be."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]


@dataclass(eq=False)
class Rows(Deferred):
    """(N, K), made of one or two arrays of that shape."""

    source: int
    a: Any
    b: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.a.shape

    def settle(self, made: Any) -> None:
        """They are there; what they were made of is let go."""
        self.source, self.a, self.b = PLAIN, made, None


@dataclass(eq=False)
class Normed(Deferred):
    """(N, K): the RMSNorm of some rows."""

    of: Rows
    weight: Any  # (K,)
    eps: float
    value: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape


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
class Turned(Deferred):
    """One of the two results of a rotation."""

    rotation: Rotation
    is_query: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rotation.q if self.is_query else self.rotation.k).shape


@dataclass(eq=False)
class Pair:
    """Two products of the same x, which may be gate and up; `ys` once they are there."""

    x: Any
    ws: Any
    ys: Any = None


@dataclass(eq=False)
class OfPair(Deferred):
    """(N, out): one of the two."""

    pair: Pair
    index: int

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.pair.x), self.pair.ws[self.index].shape[0]
