"""Which backends there are, which can run here and why not, and the choice among them."""

from __future__ import annotations

import warnings

from ..errors import BackendError, BackendUnavailable
from .backend import HEADS, Backend, choose_cache_dtype
from .candidates import HeadCandidates, HeadNeed
from .screened_head import ScreenedHead

__all__ = [
    "HEADS",
    "NAMES",
    "Backend",
    "HeadCandidates",
    "HeadNeed",
    "ScreenedHead",
    "available_backends",
    "choose_backend",
    "choose_cache_dtype",
]

NAMES = ("numpy", "cython", "cupy")


def available_backends() -> dict[str, str | None]:
    """Every backend by name, with None when it can run here, else the reason why not and what to do about it."""
    return {name: _why_not(name) for name in NAMES}


def _why_not(name: str) -> str | None:
    if name == "cython":
        from .cpu import backend as cython_backend

        return cython_backend.why_unavailable()
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
    memory_limit: the most memory of the card (cupy), in bytes or as "8GiB".  device: the card's number.

    Raises BackendUnavailable when a named backend cannot run here.
    """
    if name == "auto":
        if (card := _card(dtype, threads, head, memory_limit, device)) is not None:
            return card
        name = choose_cpu(dtype)
    if name not in NAMES:
        raise BackendUnavailable(f"no backend is called {name!r}; there are: auto, {', '.join(NAMES)}")
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


def _card(dtype: str, threads: int | None, head: str, memory_limit: int | str | None, device: int) -> Backend | None:
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
