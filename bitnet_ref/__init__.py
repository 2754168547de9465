"""bitnet_ref: the readable reference for BitNet b1.58 models, and the fast kernels that must agree with it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .system import forks as _forks  # noqa: F401 (first: a fork during the others waits for them)

if TYPE_CHECKING:
    from . import errors
    from .api import Model, load, load_engine
    from .backends import available_backends
    from .backends.options import DeviceOptions
    from .formats.checkpoint import LoadOptions
    from .formats.open import read_config
    from .generation import ChatSession, Generation, SamplingParams, StreamChunk, TokenStream
    from .serving import Engine, EngineConfig, RequestHandle

__version__ = "0.2.0"

# Names are imported when they are first used. So `import bitnet_ref` takes a millisecond, and a command can say what
# Ctrl-C does before the rest is imported.
_LAZY = {
    **dict.fromkeys(("Model", "load", "load_engine"), "api"),
    "available_backends": "backends",
    "DeviceOptions": "backends.options",
    "LoadOptions": "formats.checkpoint",
    "read_config": "formats.open",
    **dict.fromkeys(("ChatSession", "Generation", "SamplingParams", "StreamChunk", "TokenStream"), "generation"),
    **dict.fromkeys(("Engine", "EngineConfig", "RequestHandle"), "serving"),
}
__all__ = [
    "ChatSession",
    "DeviceOptions",
    "Engine",
    "EngineConfig",
    "Generation",
    "LoadOptions",
    "Model",
    "RequestHandle",
    "SamplingParams",
    "StreamChunk",
    "TokenStream",
    "__version__",
    "available_backends",
    "errors",
    "load",
    "load_engine",
    "read_config",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = globals()[name] = getattr(import_module(f".{_LAZY[name]}", __name__), name)
        return value
    if name == "errors":
        return import_module(".errors", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
