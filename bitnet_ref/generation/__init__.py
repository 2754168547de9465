"""Text generation: from the logits of the model to tokens, and from tokens to text."""

from .generate import Generation, GenerationStats, StreamChunk, TokenStream, generate, stream
from .params import SamplingParams

__all__ = ["Generation", "GenerationStats", "SamplingParams", "StreamChunk", "TokenStream", "generate", "stream"]
