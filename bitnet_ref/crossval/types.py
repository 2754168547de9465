"""Types that the signatures of this room share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..reference.layers import Array

Tensors = Mapping[str, Array]  # a run, by the names of its tensors
Tokens = Sequence[int]
Ids = list[int]
Wide = NDArray[np.float64]
Mask = NDArray[np.bool_]
Ints = NDArray[np.int64]
StrPath = str | os.PathLike[str]
