"""Conversion from one file format to another, with proof: `convert(source, destination, to)`.

The result is read again before it gets its name, and compared with the source: every ternary plane bit for bit, every
scale, every other tensor, the tokenizer, and the logits of a few tokens. If the proof fails, nothing is left behind.
"""

from .convert import convert
from .proof import Proof, prove
from .targets import TARGETS, Target

__all__ = ["TARGETS", "Proof", "Target", "convert", "prove"]
