"""Text generation: from the logits of the model to tokens, and from tokens to text."""

from .beam_tree import BeamTree, beam_tree
from .chat import ChatSession
from .generate import TokenStream, generate, stream
from .next_token import NextToken
from .params import SamplingParams
from .results import Generation, GenerationStats, StreamChunk

__all__ = [
    "BeamTree",
    "ChatSession",
    "Generation",
    "GenerationStats",
    "NextToken",
    "SamplingParams",
    "StreamChunk",
    "TokenStream",
    "beam_tree",
    "generate",
    "stream",
]
