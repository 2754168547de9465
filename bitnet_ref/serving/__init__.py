"""Many requests on one model: continuous batching. May import `notebook`, `generation` and below."""

from .cache_memory import cache_memory
from .engine import Engine
from .engine_config import EngineConfig
from .tickets import RequestHandle

__all__ = ["Engine", "EngineConfig", "RequestHandle", "cache_memory"]
