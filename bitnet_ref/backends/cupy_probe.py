"""Why the CuPy backend cannot run here."""

from __future__ import annotations

from importlib.util import find_spec


def why_unavailable() -> str | None:
    """Always a reason: this release has no CUDA kernels yet."""
    if find_spec("cupy") is None:
        return 'CuPy is not installed: pip install "bitnet-ref[cuda12]"; and this release has no CUDA kernels yet'
    return "this release has no CUDA kernels yet; use the cython backend"
