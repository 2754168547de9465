"""Figures of plain data (matplotlib, `pip install 'bitnet-ref[notebooks]'`). Each function returns its figure.

Nothing here computes, and nothing knows a model.
"""

from .memory import memory_lines
from .timeline import timeline
from .tokens import token_bars

__all__ = ["memory_lines", "timeline", "token_bars"]
