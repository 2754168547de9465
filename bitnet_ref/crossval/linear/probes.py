"""Inputs and weights that show one line of a BitLinear each.

Weights of one size, with signs of a Hadamard matrix, are the same under every rule of weights. So the outputs give the
quantised activations, whatever the layer does with weights. One-hot tokens give the quantised weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np

from ...reference.layers import Array

K, N = 256, 320  # inputs, outputs
LEVELS = (127, 128, 127.5)
GREAT = np.float32(2.0**10)  # a norm's eps is nothing beside tokens of this size
TINY = (1e-4, 3e-6, 3e-7, 1e-9)


@dataclass(frozen=True)
class Call:
    """One run of the layer. All arrays float32: x (B, T, K), w (N, K), bias (N,), dy (B, T, N)."""

    name: str
    x: Array
    w: Array
    bias: Array | None = None
    dy: Array | None = None
    in_eval: bool = False
    dtype: str = "float32"
    storage: bool = False

    @property
    def facts(self) -> dict[str, object]:
        given = self.bias is not None
        return {"bias": given, "eval": self.in_eval, "dtype": self.dtype, "storage": self.storage}


@dataclass
class Answers:
    """What the layer gave: call -> name -> array ("y", "dx", "dw", "db"), or "failed" -> a text"""

    by_call: dict[str, dict[str, Array]] = field(default_factory=dict)

    def get(self, call: str, name: str = "y") -> Array | None:
        answer = self.by_call.get(call, {}).get(name)
        return None if answer is None else answer.astype(np.float64)

    def text(self, call: str, name: str = "failed") -> str | None:
        answer = self.by_call.get(call, {}).get(name)
        return None if answer is None else str(answer)


@cache
def signs() -> Array:
    """(N, K) of -1 and 1: a Hadamard matrix, and its first rows once more, negated"""
    h = np.ones((1, 1), dtype=np.float32)
    while len(h) < K:
        h = np.block([[h, h], [h, -h]])
    return np.vstack([h, -h[: N - K]]).astype(np.float32)


def read_activations(y: Array) -> Array:
    """Outputs with `signs` as weights -> what they were multiplied by.   (B, T, N) -> (B, T, K)"""
    return y @ _inverse_signs()


@cache
def _inverse_signs() -> Array:
    return np.linalg.pinv(signs().astype(np.float64)).T


def ties(levels: float) -> Array:
    """(1, 1, K): a token whose largest value is 2 levels, and most of whose others lie on a half when it is scaled.

    Its mean is 0 and its root mean square 128 times a power of two, so a norm inside changes no bit of it either.
    """
    rng = np.random.default_rng(158)
    top, half = int(2 * levels), K // 2
    while True:
        odd = 2 * rng.integers(0, 110, half - 4) + 1
        odd[0] = top
        rest = half * 128**2 - int((odd.astype(np.int64) ** 2).sum())
        last = _three_squares(rest - 4, top)  # beside a 2
        if last is not None:
            values = np.concatenate([odd, [2], last])
            out = np.concatenate([values, -values])
            rng.shuffle(out)
            return (out.astype(np.float32) * GREAT)[None, None]


def _three_squares(total: int, top: int) -> list[int] | None:
    if total < 0:
        return None
    for a in range(min(top, int(total**0.5)), -1, -1):
        for b in range(min(a, int((total - a * a) ** 0.5)), -1, -1):
            c = round((total - a * a - b * b) ** 0.5)
            if c * c == total - a * a - b * b and c < top and a < top:
                return [a, b, c]
    return None


@cache
def matrices() -> dict[str, Array]:
    """The weights that are quantised: name -> (N, K)"""
    rng = np.random.default_rng(42)
    rows, columns = rng.uniform(0.5, 2, (N, 1)), np.repeat(rng.uniform(0.5, 2, (1, K // 16)), 16, axis=1)
    normal = rng.standard_normal((N, K)) * 0.05 * rows * columns + 0.01
    heavy = np.exp(rng.standard_normal((N, K))) * rng.choice([-1, 1], (N, K)) * 0.02
    tied = np.tile([0.5, 1.5], (N, K // 2)) * rng.choice([-1, 1], (N, K)) / 16  # the mean of |W| is 1/16
    out = {"normal": normal, "heavy": heavy, "large": normal * 40, "ties": tied}
    return {name: w.astype(np.float32) for name, w in out.items()}


def tokens(seed: int, count: tuple[int, int] = (2, 6)) -> Array:
    """(B, T, K): tokens of different sizes, with means that are not zero"""
    rng = np.random.default_rng(seed)
    sizes = 2.0 ** rng.integers(-2, 3, (*count, 1))
    x = (rng.standard_normal((*count, K)) + 0.3) * rng.uniform(0.7, 1.4, (*count, 1)) * sizes
    return x.astype(np.float32)


def one_hot() -> Array:
    return np.eye(K, dtype=np.float32)[None]


@cache
def all_calls() -> tuple[Call, ...]:
    flat = signs()
    some, drawn = tokens(1), matrices()
    rng = np.random.default_rng(9)
    bias, dy = rng.standard_normal(N).astype(np.float32), rng.standard_normal((2, 6, N)).astype(np.float32)
    calls = [Call("tokens", some, flat), Call("tokens again", some, flat)]
    calls += [Call(f"ties {levels}", ties(levels), flat) for levels in LEVELS]
    calls += [Call(f"tiny {size}", (some[:1, :1] / np.abs(some[0, 0]).max() * np.float32(size)), flat) for size in TINY]
    calls += [Call("zeros", np.zeros((1, 2, K), dtype=np.float32), flat)]
    calls += [Call("huge", some[:1, :1] * np.float32(1e12), flat)]
    calls += [Call(f"weights {name}", one_hot(), w) for name, w in drawn.items()]
    calls += [Call("weights zero", some, np.zeros((N, K), dtype=np.float32))]
    calls += [Call("weights faint", one_hot(), drawn["normal"] * np.float32(1e-6))]
    calls += [Call("with bias", some, drawn["normal"], bias), Call("without bias", some, drawn["normal"])]
    calls += [Call("gradients", some, drawn["normal"], dy=dy), Call("bias gradient", some, drawn["normal"], bias, dy)]
    calls += [Call("held out", tokens(77, (3, 4)), drawn["heavy"][::-1].copy())]
    calls += [Call("in eval", some, drawn["normal"], in_eval=True)]
    calls += [Call(dtype, some, drawn["normal"], dtype=dtype) for dtype in ("float16", "bfloat16")]
    return (*calls, Call("storage", some, drawn["normal"], storage=True))
