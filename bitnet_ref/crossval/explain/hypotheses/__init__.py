"""The mistakes that engines make, each as a change of the reference that can be run and compared with a candidate.

`forward_hypotheses` lists those of the forward pass; `prompts` those of token ids.
"""

from __future__ import annotations

from ....families import FAMILIES, KINDS, family_of
from ....families.family import Hypothesis
from ...types import Tensors
from ..variants import Setting
from .activations import HYPOTHESES as ACTIVATIONS
from .attention import HYPOTHESES as ATTENTION
from .blocks import HYPOTHESES as BLOCKS
from .calls import call_hypotheses
from .layouts import HYPOTHESES as LAYOUTS
from .linears import HYPOTHESES as LINEARS
from .linears import zero_hypotheses

_OF_KINDS = [mistake for kind in KINDS.values() for mistake in kind.mistakes]
_OF_ALL = (*BLOCKS, *LINEARS, *ACTIVATIONS, *LAYOUTS, *ATTENTION, *_OF_KINDS)
_OF_FAMILIES = {each.name: each for family in FAMILIES.values() for each in family.mistakes}
# Those of the package's own families; `forward_hypotheses` knows those that are registered later too.
HYPOTHESES: tuple[Hypothesis, ...] = (*_OF_ALL, *_OF_FAMILIES.values())


def forward_hypotheses(setting: Setting, candidate: Tensors) -> tuple[Hypothesis, ...]:
    """Those of all models, of this one's family, about linears whose results in the candidate are zeros, and of the
    calls that the candidate says it was computed in."""
    known = (*_OF_ALL, *family_of(setting.config).mistakes)
    return (*known, *zero_hypotheses(setting, candidate), *call_hypotheses(setting, candidate, known))
