"""bitnet_ref: the readable reference for BitNet b1.58 models, and the fast kernels that must agree with it."""

from .api import Model, load
from .backends import available_backends

__version__ = "0.1.0"
__all__ = ["Model", "__version__", "available_backends", "load"]
