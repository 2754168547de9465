"""How good a model is: perplexity by named protocols, and lm-eval's tasks. May import `api` and below."""

from .perplexity import PROTOCOLS, Perplexity, perplexity

__all__ = ["PROTOCOLS", "Perplexity", "perplexity"]
