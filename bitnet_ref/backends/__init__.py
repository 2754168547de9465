"""Which backends there are, which can run here and why not, and the choice among them."""

from __future__ import annotations

from ..errors import BackendUnavailable
from .candidates import HeadCandidates, HeadNeed
from .numpy_backend import HEADS, Backend, choose_cache_dtype
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
        from . import cython_backend

        return cython_backend.why_unavailable()
    if name == "cupy":
        from . import cupy_probe

        return cupy_probe.why_unavailable()
    return None


def choose_backend(
    name: str = "auto", *, dtype: str = "float32", threads: int | None = None, head: str = "auto"
) -> Backend:
    """The backend of that name, ready to use. "auto" takes the fastest that can run here and has the dtype.

    head: "exact", "screened" (cython) or "auto"; see `CythonBackend.prepare_model`.

    Raises BackendUnavailable when a named backend cannot run here.
    """
    if name == "auto":
        name = "cython" if dtype == "float32" and _why_not("cython") is None else "numpy"
    if name not in NAMES:
        raise BackendUnavailable(f"no backend is called {name!r}; there are: auto, {', '.join(NAMES)}")
    if reason := _why_not(name):
        raise BackendUnavailable(f"backend {name!r} cannot run here: {reason}")
    if name == "cython":
        from .cython_backend import CythonBackend

        return CythonBackend(dtype, threads, head=head)
    return Backend(dtype, threads, head=head)
