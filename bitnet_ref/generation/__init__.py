"""Text generation: from the logits of the model to tokens, and from tokens to text."""

from .batching import Engine
from .beam_tree import BeamTree, beam_tree
from .cache_memory import cache_memory
from .chat import ChatSession
from .engine_config import EngineConfig
from .generate import TokenStream, generate, stream
from .next_token import NextToken
from .params import SamplingParams
from .results import Generation, GenerationStats, Overflow, StreamChunk
from .tickets import RequestHandle

__all__ = [
    "BeamTree",
    "ChatSession",
    "Engine",
    "EngineConfig",
    "Generation",
    "GenerationStats",
    "NextToken",
    "Overflow",
    "RequestHandle",
    "SamplingParams",
    "StreamChunk",
    "TokenStream",
    "beam_tree",
    "cache_memory",
    "generate",
    "stream",
]
