"""The mistakes that engines make, each as a change of the reference that can be run and compared with a candidate.

`forward_hypotheses` lists those of the forward pass; `prompts` those of token ids.
"""

from __future__ import annotations

from collections.abc import Mapping

from numpy.typing import NDArray

from ..variants import Hypothesis, Setting
from .activations import HYPOTHESES as ACTIVATIONS
from .attention import HYPOTHESES as ATTENTION
from .blocks import HYPOTHESES as BLOCKS
from .families import HYPOTHESES as FAMILIES
from .layouts import HYPOTHESES as LAYOUTS
from .linears import HYPOTHESES as LINEARS
from .linears import zero_hypotheses

HYPOTHESES: tuple[Hypothesis, ...] = (*BLOCKS, *LINEARS, *ACTIVATIONS, *LAYOUTS, *ATTENTION, *FAMILIES)


def forward_hypotheses(setting: Setting, candidate: Mapping[str, NDArray]) -> tuple[Hypothesis, ...]:
    """All of HYPOTHESES, and those about linears whose results in the candidate are all zeros."""
    return (*HYPOTHESES, *zero_hypotheses(setting, candidate))
