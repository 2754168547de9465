"""Engines that a student writes, and where their tensors differ."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np

from ...api import Model
from ...reference.layers import Array
from .declare import Wrong


def run_engine(answer: Any, model: Model, tokens: Sequence[int]) -> tuple[Array, Mapping[str, Array]]:
    """The logits and tensors of the student's engine. Raises Wrong."""
    make: Callable[..., Any] = answer
    if not isinstance(make, type):
        raise Wrong("Give the class itself, without brackets: a subclass of Backend.")
    try:
        return model.on(make("float32", threads=1)).run_with_cache(list(tokens))
    except Exception as error:
        raise Wrong(f"Your engine raised {type(error).__name__}: {error}") from None


def unequal(mine: Mapping[str, Array], right: Mapping[str, Array]) -> list[str]:
    """The tensors that are not equal in both, in the order of `right`."""
    return [name for name in right if not np.array_equal(mine[name], right[name])]


@contextmanager
def calls_of(engine: type) -> Iterator[list[str]]:
    """The names of an engine's own methods that are called meanwhile, also of copies and subclasses of it."""
    own = {method.__code__: name for name, method in vars(engine).items() if hasattr(method, "__code__")}
    called: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in own:
            called.append(own[frame.f_code])

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(before)
