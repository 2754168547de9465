"""Figures (matplotlib, `pip install 'bitnet-ref[notebooks]'`) of what other parts of the package found out.

Each function takes plain data, draws it and gives the figure back. Nothing here computes, and nothing knows a model.
"""

from .beams import beam_tree
from .icicle import icicles
from .memory import memory_lines
from .timeline import timeline
from .tokens import token_bars

__all__ = ["beam_tree", "icicles", "memory_lines", "timeline", "token_bars"]
