"""Many requests on one model: continuous batching. May import `generation` and below."""

from .cache_memory import cache_memory
from .engine import Engine
from .engine_config import EngineConfig
from .replicas import Replicas, start_engines
from .tickets import RequestHandle

__all__ = ["Engine", "EngineConfig", "Replicas", "RequestHandle", "cache_memory", "start_engines"]
