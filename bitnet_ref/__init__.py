"""bitnet_ref: the readable reference for BitNet b1.58 models, and the fast kernels that must agree with it."""

from typing import TYPE_CHECKING, Any

from .api import Model, load, load_engine
from .backends import available_backends

if TYPE_CHECKING:
    from .serving import Engine, EngineConfig

__version__ = "0.1.0"
__all__ = ["Engine", "EngineConfig", "Model", "__version__", "available_backends", "load", "load_engine"]


def __getattr__(name: str) -> Any:
    """The engine's names bring the generation package with them, which `load` does without."""
    if name in ("Engine", "EngineConfig"):
        from . import serving

        return getattr(serving, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
