"""Text generation: from the logits of the model to tokens, and from tokens to text."""

from .batching import Engine
from .chat import ChatSession
from .engine_config import EngineConfig
from .generate import TokenStream, generate, stream
from .params import SamplingParams
from .results import Generation, GenerationStats, Overflow, StreamChunk
from .tickets import RequestHandle

__all__ = [
    "ChatSession",
    "Engine",
    "EngineConfig",
    "Generation",
    "GenerationStats",
    "Overflow",
    "RequestHandle",
    "SamplingParams",
    "StreamChunk",
    "TokenStream",
    "generate",
    "stream",
]
