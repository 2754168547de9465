"""Text generation: from the logits of the model to tokens, and from tokens to text.

May import `tokenizers`, `backends`, `reference` and `system`.
"""

from .chat import ChatSession
from .generate import TokenStream, generate, stream
from .params import SamplingParams
from .results import Generation, GenerationStats, Overflow, StreamChunk

__all__ = [
    "ChatSession",
    "Generation",
    "GenerationStats",
    "Overflow",
    "SamplingParams",
    "StreamChunk",
    "TokenStream",
    "generate",
    "stream",
]
