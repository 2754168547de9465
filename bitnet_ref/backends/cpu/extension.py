"""The compiled extension: whether it is here, its kernel sets (one for each instruction set), and its weight layouts.

A layout decides by which method a ternary matrix is multiplied:

    layout    weights                             arithmetic                                   kernels/cpu/
    2-bit     2 bits per weight                   multiply and add (as I2_S)                   ternary_*.h
    table     2 bits per weight, transposed       sums of two activations, looked up by pairs  table_avx2.h
                                                  of weights (as TL1)
    1.6-bit   five weights per byte               multiply and add, digits never extracted     dense_avx512.h

All give the same int32 accumulators. Weights are packed for one layout when a model is loaded: 2-bit, unless `layout=`
or BITNET_REF_WEIGHTS asks for another. Measured, two threads of a Cascade Lake Xeon. Busy machine (3.8 GB/s), eight
layers of 2B-4T, one token: avx2 2-bit 50.9 ms, table 57.9; avx512 2-bit 46.2, 1.6-bit 40.1. Quiet cores (21.5 GB/s),
all of 2B-4T: one token 22.9 to 23.3 tok/s with 2-bit, 24.4 to 25.1 with 1.6-bit; prompts of 64 equal; 8 sequences
1.90 ms per layer with 2-bit, 2.30 with 1.6-bit. So 1.6-bit wins only for one sequence where memory is the limit.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import BackendUnavailable
from ...reference import quantization
from ...system.threads import set_bound_cpus

# A waiting OpenMP thread spins for a tenth of a millisecond and then sleeps. With libgomp's default of milliseconds it
# takes the processor from the thread it waits for whenever the machine has other work: 30 times slower, measured.
# libgomp reads the variable when it is loaded; the user's own setting takes precedence. Measured by GOMP_SPINCOUNT:
# - 2 threads of a quiet Cascade Lake Xeon, 12 layers of 2B-4T, tok/s: 0: 22.1, 3000: 22.6
# - cores shared with other programs (load 4 to 6), overhead of a 150 us region: 0: 155 us, 1000: 166, 2000: 175,
#   4000: 197, 10,000: 1.1 ms, 100,000: 3.3 ms
# - a virtual Sapphire Rapids, where waking a processor costs 60 to 100 us, tok/s: 0: 41, 300: 42, 1000: 44, 2000: 48,
#   4000: 48, 20,000: 49; beside two programs that never sleep 0: 18, 300: 26, 1000: 19, 2000: 24, 4000: 22, 20,000: 13
SPIN_COUNT = 2000
_set_spin_count = "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ
if _set_spin_count:
    os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
try:
    from ...kernels.cpu import _cpu as _cpu  # type: ignore[attr-defined]
except ImportError as error:
    _cpu = None
    _import_error = "was not built" if find_spec("bitnet_ref.kernels.cpu._cpu") is None else f"does not load: {error}"
finally:
    if _set_spin_count:
        del os.environ["GOMP_SPINCOUNT"]
if _cpu is not None:
    set_bound_cpus(_cpu.bound_cpus())

DEFAULT_LAYOUT = "2-bit"
STRIPS = ("auto", "always", "never")  # whether large, all or no up_proj and down_proj get them
TABLE_TOKENS = 16  # per call with the table layout, whose tables are 16 times as large as the activations
_WRONG = "its sums differ from those of the scalar kernels on this processor: please report it, with bitnet-ref doctor"
_LAYOUT_SUMMARIES = {
    "2-bit": (2.0, "multiply and add, 2 bits per weight"),
    "table": (2.0, "table look-up by pairs of weights, 2 bits per weight"),
    "1.6-bit": (1.6, "multiply and add, five weights per byte"),
}


def why_unavailable() -> str | None:
    """None when the compiled extension is here, else the reason and the remedy."""
    if _cpu is not None:
        return None
    if sys.platform in ("win32", "emscripten"):
        return (
            f"the compiled extension {_import_error}: there are no kernels for {sys.platform}; take the numpy backend"
        )
    if _import_error == "was not built" and (Path(__file__).parents[3] / "setup.py").exists():
        return (
            "the compiled extension was not built in these sources; start Python in another folder, where it imports "
            "an installed bitnet-ref, or build it here: python setup.py build_ext --inplace"
        )
    return (
        f"the compiled extension {_import_error}; install a C compiler (Debian/Ubuntu: apt install gcc; "
        "macOS: xcode-select --install) and install bitnet-ref again, from source (pip's --no-binary bitnet-ref)"
    )


@cache
def simd_variants() -> dict[str, str | None]:
    """The kernel sets of the extension, the best last, with None or what this processor lacks for them.

    A set whose sums differ from the scalar set's on this processor counts as lacking: some sets were written without
    such a processor at hand.
    """
    sets = dict(_cpu.kernel_sets()) if _cpu is not None else {}
    return {
        name: lacks or (None if _sums_are_right(list(sets).index(name)) else _WRONG) for name, lacks in sets.items()
    }


def _sums_are_right(kernel_set: int) -> bool:
    """Whether a kernel set multiplies like the scalar one: odd sizes, few and many tokens, the largest values."""
    rng = np.random.default_rng(0)
    for n_tokens, n_out, n_in in ((1, 70, 80), (37, 130, 1104)):
        codes = rng.integers(0, 3, (n_out, n_in), dtype=np.uint8)
        codes[0] = 2
        packed = quantization.pack_ternary(codes.view(np.int8) - np.int8(1))
        panels = np.empty((-(-n_out // _cpu.panel_rows), n_in // 16 * _cpu.block_bytes), dtype=np.uint8)
        _cpu.pack_panels(packed, panels, 1, 0)
        x_q = rng.integers(-128, 128, (n_tokens, n_in), dtype=np.int8)
        x_q[0] = 127
        x_sum = x_q.sum(axis=1, dtype=np.int32)
        expected, acc = (np.empty((n_tokens, n_out), dtype=np.int32) for _ in range(2))
        _cpu.ternary_matmul(x_q, x_sum, panels, expected, 1, 0, 0)
        _cpu.ternary_matmul(x_q, x_sum, panels, acc, 1, kernel_set, 0)
        if not np.array_equal(expected, acc):
            return False
    return True


def choose_simd(name: str | None = None) -> str:
    """The kernel set to run: the argument, else BITNET_REF_SIMD, else the best that this processor has.

    Raises BackendUnavailable for a set that cannot run here, or without the extension.
    """
    variants = simd_variants()
    if not variants:
        raise BackendUnavailable(f"there are no kernel sets: {why_unavailable()}")
    name = name or os.environ.get("BITNET_REF_SIMD") or [each for each, lacks in variants.items() if not lacks][-1]
    if name not in variants:
        raise BackendUnavailable(f"no kernel set is called {name!r} in this build; there are: {', '.join(variants)}")
    if variants[name] is not None:
        raise BackendUnavailable(f"the kernel set {name!r} cannot run here: {variants[name]}")
    return name


@cache
def layouts() -> dict[str, tuple[int, list[str]]]:
    """Each weight layout's columns per block, and the kernel sets that can multiply by it. {} without the extension."""
    return {name: (block_k, sets) for name, block_k, sets in _cpu.ternary_methods()} if _cpu is not None else {}


def layout_number(layout: str) -> int:
    """The layout's number in the extension."""
    return list(layouts()).index(layout)


def layouts_for(simd: str) -> list[str]:
    """The layouts that this kernel set can multiply by, the default first."""
    return [name for name, (_, sets) in layouts().items() if simd in sets]


def choose_layout(name: str | None, simd: str) -> str:
    """The layout of the weights: the argument, else BITNET_REF_WEIGHTS, else 2-bit. "1.6" and "2" mean those bits.

    Raises BackendUnavailable.
    """
    name = name or os.environ.get("BITNET_REF_WEIGHTS") or DEFAULT_LAYOUT
    name = {"2": "2-bit", "1.6": "1.6-bit"}.get(name, name)
    if name not in layouts():
        raise BackendUnavailable(f"no layout of weights is called {name!r}; there are: {', '.join(layouts())}")
    if simd not in (sets := layouts()[name][1]):
        raise BackendUnavailable(
            f"the kernel set {simd!r} has no kernel for {name} weights; these sets have: {', '.join(sets)}"
        )
    return name


def choose_strips(name: str | None) -> str:
    """Which matrices get strips: the argument, else BITNET_REF_STRIPS, else "auto". Raises BackendUnavailable."""
    name = name or os.environ.get("BITNET_REF_STRIPS") or "auto"
    if name not in STRIPS:
        raise BackendUnavailable(f"expected one of {', '.join(STRIPS)}, got {name!r}", field="strips")
    return name


@dataclass(frozen=True)
class Method:
    """One way to multiply by a ternary matrix, for `doctor` and `bench kernels`."""

    name: str  # of its layout
    summary: str
    bits_per_weight: float
    kernel_sets: tuple[str, ...]
    chosen: bool
    reason: str | None  # why the kernel set in use cannot run it; None when it can
    why: str  # what chose it, or would choose it

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe_methods(simd: str | None = None) -> list[Method]:
    """Every method of this build, seen from that kernel set, or the one that a backend takes, and its layout.

    [] without the extension. Raises BackendUnavailable for a set or a layout that cannot run here.
    """
    if not layouts():
        return []
    simd = choose_simd(simd)
    chosen = choose_layout(None, simd)
    methods = []
    for name, (_, sets) in layouts().items():
        reason = None if simd in sets else f"the kernel set {simd} has no kernel for it; {', '.join(sets)} have"
        if name == chosen:
            why = "BITNET_REF_WEIGHTS asks for it" if os.environ.get("BITNET_REF_WEIGHTS") else "the default"
        else:
            why = "the default" if name == DEFAULT_LAYOUT else f"BITNET_REF_WEIGHTS={name} takes it"
        bits, summary = _LAYOUT_SUMMARIES[name]
        methods.append(Method(name, summary, bits, tuple(sets), name == chosen, reason, why))
    return methods
