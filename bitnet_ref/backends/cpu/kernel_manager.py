"""The methods of the ternary product that the compiled backend has, which can run here and why not, and the rule.

    method        weights                            arithmetic                              kernels/
    2-bit         2 bits a code, four rows' width    multiply and add (as I2_S)              ternary_*.h
    table         2 bits a code, transposed          sums of two activations, looked up      table_avx2.h
                                                     by pairs of weights (as TL1)
    1.6-bit       five codes a byte                  multiply and add, digits never          dense_avx512.h
                                                     taken out

All are exact: the same int32 accumulators. A model's weights are packed for one of them as it is loaded.

The rule: 2-bit, unless the backend is asked for another (`layout=`, or BITNET_REF_WEIGHTS). Measured on two threads of
a busy Cascade Lake Xeon (reads of memory 3.8 GB/s best, 3.1 median), all linears of eight layers of 2B-4T, one token,
in turn (best and median of 15):
    avx2    2-bit 50.9, 58.7 ms   table   57.9, 64.6 ms    look-up gains nothing over multiply-add, and loses prompts
    avx512  2-bit 46.2, 52.6 ms   1.6-bit 40.1, 47.5 ms    a fifth fewer bytes, 6 to 29% less time (six runs)
On quiet cores (21.5 GB/s), all of 2B-4T with the screened head:
    one token   2-bit 22.9 to 23.3 tok/s    1.6-bit 24.4 to 25.1
    prompt, 64  2-bit 171 to 186 tok/s      1.6-bit 171 to 179
    8, 16       2-bit 1.90, 3.05 ms a layer 1.6-bit 2.30, 3.40     sequences at once
so 1.6-bit wins where one sequence is decoded and memory is the limit. It does not for several, nor where there are AMX
tiles, of which it has none, nor where a thread gets more than 15 GB/s, all that its kernel takes. That is why it is
there to choose, and is not chosen.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from .backend import DEFAULT_LAYOUT, choose_layout, choose_simd, layouts, simd_variants

_SUMMARY = {
    "2-bit": (2.0, "multiply and add, 2 bits a weight"),
    "table": (2.0, "table look-up by pairs of weights, 2 bits a weight"),
    "1.6-bit": (1.6, "multiply and add, five weights in a byte"),
}


@dataclass(frozen=True)
class Method:
    """One way to multiply by a ternary matrix."""

    name: str  # of its layout of the weights
    summary: str
    bits_per_weight: float
    kernel_sets: tuple[str, ...]  # that have a kernel for it
    chosen: bool
    reason: str | None  # why the kernel set in use cannot run it; None when it can
    why: str  # what chose it, or would have to

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def methods(simd: str | None = None, layout: str | None = None) -> list[Method]:
    """Every method of this build, for the kernel set and layout that a backend with these arguments would take.

    [] where the extension is not built. Raises BackendUnavailable for a set or a layout that cannot run here.
    """
    if not layouts():
        return []
    simd = choose_simd(simd)
    taken = choose_layout(layout, simd)
    asked = "layout=" if layout else "BITNET_REF_WEIGHTS" if os.environ.get("BITNET_REF_WEIGHTS") else None
    found = []
    for name, (_, sets) in layouts().items():
        reason = None if simd in sets else f"the kernel set {simd} has no kernel for it; {', '.join(sets)} have"
        if name == taken:
            why = f"{asked} asks for it" if asked else "the default"
        else:
            why = "the default" if name == DEFAULT_LAYOUT else f"BITNET_REF_WEIGHTS={name} takes it"
        bits, summary = _SUMMARY[name]
        found.append(Method(name, summary, bits, tuple(sets), name == taken, reason, why))
    return found


def candidates(simd: str) -> list[str]:
    """The layouts that this kernel set can multiply by, the default first."""
    return [name for name, (_, sets) in layouts().items() if simd in sets] if simd in simd_variants() else []
