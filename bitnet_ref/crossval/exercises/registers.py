"""The instructions of AVX2 that a ternary product takes, in NumPy, for exercise 4.7."""

from __future__ import annotations

from collections import Counter

import numpy as np

from ...errors import describe
from ...reference.layers import Array
from .declare import Wrong


class Avx2:
    """A register is an array of 32 bytes: 32 uint8 or int8, 16 int16, or 8 int32. Sums wrap, as the processor's do.
    `executed` counts the instructions."""

    def __init__(self) -> None:
        self.executed: Counter[str] = Counter()

    def execute(self, name: str, *operands: tuple[Array, str]) -> None:
        """Counts the instruction. Raises Wrong unless each operand is a register of that dtype."""
        self.executed[name] += 1
        for register, dtype in operands:
            size = 32 // np.dtype(dtype).itemsize
            if not isinstance(register, np.ndarray):
                raise Wrong(f"{name} takes a register of {size} {dtype}; it got {describe(register)}.")
            if register.dtype != dtype or register.shape != (size,):
                raise Wrong(
                    f"{name} takes a register of {size} {dtype}; it got {register.dtype} of shape {register.shape}."
                )

    def vpbroadcastd(self, four: Array) -> Array:
        """Four int8 -> 32: the same four in each of the 8 lanes."""
        self.executed["vpbroadcastd"] += 1
        if np.shape(four) != (4,) or getattr(four, "dtype", None) != np.int8:
            raise Wrong(f"vpbroadcastd takes 4 int8 of x; it got {describe(four)}, of shape {np.shape(four)}.")
        return np.tile(four, 8)

    def vpsrlw(self, a: Array, bits: int) -> Array:
        """32 uint8, shifted right in pairs: bits of the upper byte come into the lower one from above."""
        self.execute("vpsrlw", (a, "uint8"))
        return (np.ascontiguousarray(a).view(np.uint16) >> np.uint16(bits)).view(np.uint8)

    def vpand(self, a: Array, mask: int) -> Array:
        """32 uint8, each & mask."""
        self.execute("vpand", (a, "uint8"))
        return a & np.uint8(mask)

    def vpmaddubsw(self, a: Array, b: Array) -> Array:
        """32 uint8 times 32 int8 -> 16 int16: neighbouring products are added."""
        self.execute("vpmaddubsw", (a, "uint8"), (b, "int8"))
        pairs: Array = (a.astype(np.int32) * b).reshape(16, 2).sum(axis=1)
        return np.clip(pairs, -(2**15), 2**15 - 1).astype(np.int16)

    def vpaddw(self, a: Array, b: Array) -> Array:
        """16 int16 + 16 int16; what does not fit wraps."""
        self.execute("vpaddw", (a, "int16"), (b, "int16"))
        return a + b

    def vpmaddwd(self, a: Array, b: Array) -> Array:
        """16 int16 times 16 int16 -> 8 int32: neighbouring products are added. With b of ones, it widens."""
        self.execute("vpmaddwd", (a, "int16"), (b, "int16"))
        pairs: Array = (a.astype(np.int32) * b).reshape(8, 2).sum(axis=1, dtype=np.int32)
        return pairs

    def vpaddd(self, a: Array, b: Array) -> Array:
        """8 int32 + 8 int32."""
        self.execute("vpaddd", (a, "int32"), (b, "int32"))
        return a + b
