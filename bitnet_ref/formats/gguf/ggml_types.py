"""The tensor types of GGUF files: ids, names and sizes. `blocks`, `i2_s` and `tl` decode them.

Two dialects use the same ids. bitnet.cpp has I2_S 36, I8_S 37, TL1 38 and TL2 39; llama.cpp has dropped 36 to 38 (they
were repacked forms of IQ4_NL) and uses 39 for MXFP4. A type whose id does not determine the size has `block_bytes` 0:
such a tensor extends to the next one, or to the end of the file.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GgmlType:
    """`block_values` consecutive values of a row take `block_bytes`; the tensor ends with `tail_bytes` more."""

    id: int
    name: str
    block_values: int
    block_bytes: int
    tail_bytes: int = 0

    @property
    def known_size(self) -> bool:
        return self.block_bytes > 0

    def nbytes(self, n_values: int) -> int:
        """Bytes of a tensor of that many values, a whole number of blocks."""
        return n_values // self.block_values * self.block_bytes + self.tail_bytes

    @property
    def kind(self) -> str:
        """The type as `convert --to gguf-...` calls it: "i2_s", "tl2", "f16"."""
        return "tl2" if self.name == "TL2/MXFP4" else self.name.lower()


_TABLE = (
    *((0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22)),
    *((7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 40), (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110)),
    *((12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292)),
    *((16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50)),
    *((20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136)),
    *((24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8), (28, "F64", 1, 8)),
    *((29, "IQ1_M", 256, 56), (30, "BF16", 1, 2), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66)),
    *((36, "I2_S", 4, 1, 32), (37, "I8_S", 1, 0), (38, "TL1", 1, 0), (39, "TL2/MXFP4", 1, 0)),
    *((40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18)),
)
TYPES: dict[int, GgmlType] = {row[0]: GgmlType(*row) for row in _TABLE}
BY_NAME: dict[str, GgmlType] = {kind.name: kind for kind in TYPES.values()}
BY_KIND: dict[str, GgmlType] = {kind.kind: kind for kind in TYPES.values()}
TERNARY_BLOCKS = ("TQ1_0", "TQ2_0")  # with a float16 scale in each block
TERNARY_TYPES = ("I2_S", *TERNARY_BLOCKS, "TL1", "TL2/MXFP4")
