"""The seam, and what stands behind it: backends, `run`, caches, the head, layers divided over devices.

May import `tokenizers`, `reference`, `system` and `kernels`. No backend but numpy's is loaded before it is chosen.
"""

from __future__ import annotations

import warnings

from ..errors import BackendError, BackendUnavailable, ConfigError
from .backend import HEADS, Backend

__all__ = ["HEADS", "NAMES", "Backend", "available_backends", "choose_backend", "choose_cpu"]

NAMES = ("numpy", "cython", "cupy")
DTYPES = {"float32": NAMES, "float64": ("numpy",), "float16": ("cupy",), "bfloat16": ("cupy",)}  # and who has them


def available_backends() -> dict[str, str | None]:
    """Every backend by name, with None when it can run here, else the reason why not and what to do about it."""
    return {name: _why_not(name) for name in NAMES}


def _why_not(name: str) -> str | None:
    if name == "cython":
        from .cpu import extension

        return extension.why_unavailable()
    if name == "cupy":
        from . import cuda

        return cuda.why_unavailable()
    return None


def choose_backend(
    name: str = "auto",
    *,
    dtype: str = "float32",
    threads: int | None = None,
    head: str = "auto",
    memory_limit: int | str | None = None,
    device: int = 0,
) -> Backend:
    """The backend of that name, ready to use. "auto" takes the fastest that can run here and has the dtype.

    A GPU is the fastest where there is one; its emulation is taken by name only. When the GPU does not answer, "auto"
    warns and goes on without it.

    head: "exact", "screened" (cython) or "auto"; see `CythonBackend.prepare_model`.
    memory_limit: the maximum memory of the card (cupy), in bytes or as "8GiB".  device: the card's number.

    Raises BackendUnavailable when a named backend cannot run here, ConfigError for a dtype that it does not have.
    """
    is_auto = name == "auto"
    if not is_auto and name not in NAMES:
        raise BackendUnavailable(f"no backend is called {name!r}; there are: auto, {', '.join(NAMES)}")
    if dtype not in DTYPES or not (is_auto or name in DTYPES[dtype]):
        choices = [f"{each} ({', '.join(names)})" for each, names in DTYPES.items() if is_auto or name in names]
        raise ConfigError(f"backend {name!r} computes in {' or '.join(choices)}, got {dtype!r}", field="dtype")
    if is_auto:
        if (card := _open_card(dtype, threads, head, memory_limit, device)) is not None:
            return card
        name = "cupy" if dtype in ("float16", "bfloat16") else choose_cpu(dtype)
    if not is_auto and name != "cupy" and memory_limit is not None:
        message = f"memory_limit bounds a card's memory; the backend {name!r} computes on the CPU"
        raise BackendUnavailable(message, mentions=["memory_limit"])
    if reason := _why_not(name):
        raise BackendUnavailable(f"backend {name!r} cannot run here: {reason}")
    if name == "cython":
        from .cpu.backend import CythonBackend

        return CythonBackend(dtype, threads, head=head)
    if name == "cupy":
        from .cuda.backend import CupyBackend

        return CupyBackend(dtype, threads, head=head, memory_limit=memory_limit, index=device)
    return Backend(dtype, threads, head=head)


def choose_cpu(dtype: str = "float32") -> str:
    """The faster of the processor's backends that can run here and has the dtype."""
    return "cython" if dtype == "float32" and _why_not("cython") is None else "numpy"


def _open_card(
    dtype: str, threads: int | None, head: str, memory_limit: int | str | None, device: int
) -> Backend | None:
    """The CuPy backend if "auto" should take it: there is a GPU, it has the dtype and the head, and it answers."""
    from . import cuda

    if cuda.emulation_wanted() or dtype == "float64" or head == "screened" or cuda.why_unavailable(device) is not None:
        return None
    from .cuda.backend import CupyBackend

    try:
        return CupyBackend(dtype, threads, head=head, memory_limit=memory_limit, index=device)
    except BackendError as error:
        warnings.warn(f"the GPU does not answer, and the processor computes instead: {error}", stacklevel=3)
        return None
