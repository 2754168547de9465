"""What a notebook shows: figures, widgets, profiles, the stages of a token's choice. May import `serving` and below."""

from .beam_tree import BeamTree, beam_tree
from .lesson import setup
from .next_token import NextToken

__all__ = ["BeamTree", "NextToken", "beam_tree", "setup"]
