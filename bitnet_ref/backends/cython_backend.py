"""The compiled CPU backend: the plain NumPy one, with the ternary product in C over packed weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import ShapeError
from ..weights import TernaryWeight
from .numpy_backend import Backend

try:
    from ..kernels import _cpu  # type: ignore[attr-defined]
except ImportError as error:
    _cpu = None
    _import_error = str(error)


def why_unavailable() -> str | None:
    """None when the compiled extension is here, else the reason and the remedy."""
    if _cpu is not None:
        return None
    return (
        f"the compiled extension is missing ({_import_error}); install a C compiler (Debian/Ubuntu: apt install gcc; "
        "macOS: xcode-select --install) and install bitnet-ref again"
    )


class CythonBackend(Backend):
    """Overrides `ternary_matmul`; accumulators are equal to the reference's."""

    name = "cython"
    dtypes = ("float32",)

    def ternary_matmul(self, x_q: NDArray[np.int8], w: TernaryWeight) -> NDArray[np.int32]:
        """x_q (N, K) int8 -> acc (N, out) int32, exact"""
        if x_q.dtype != np.int8 or x_q.ndim != 2 or x_q.shape[1] != w.in_features:
            got = f"x_q {x_q.dtype} {x_q.shape}"
            raise ShapeError("ternary_matmul", expected=f"x_q int8 (M, {w.in_features})", got=got)
        acc = np.empty((len(x_q), len(w.packed)), dtype=np.int32)
        _cpu.ternary_matmul(np.ascontiguousarray(x_q), w.packed, acc, self.threads)
        return acc
