"""The mistakes that engines make, each as a change of the reference that can be run and compared with a candidate.

`forward_hypotheses(setting, candidate)` gives those about the forward pass. `prompts` has the ones about token
ids and stopping, which no forward pass shows.
"""

from __future__ import annotations

from collections.abc import Mapping

from numpy.typing import NDArray

from ..variants import Setting
from . import activations, attention, blocks, layouts, linears
from .base import Hypothesis, Kind

__all__ = ["HYPOTHESES", "Hypothesis", "Kind", "forward_hypotheses"]

HYPOTHESES: tuple[Hypothesis, ...] = (
    *blocks.HYPOTHESES,
    *linears.HYPOTHESES,
    *activations.HYPOTHESES,
    *layouts.HYPOTHESES,
    *attention.HYPOTHESES,
)


def forward_hypotheses(setting: Setting, candidate: Mapping[str, NDArray]) -> tuple[Hypothesis, ...]:
    """All of them, with those that are made from what is seen in the candidate's tensors (which linears are zeros).

    A hypothesis whose `change` of the setting is None does not apply to the model.
    """
    return (*HYPOTHESES, *linears.zero_hypotheses(setting, candidate))
