"""`lazy_property`: computed at the first use, without a lock.

functools.cached_property of Python 3.11 holds one lock per property while it computes. A process that is forked
meanwhile has that lock held for ever. Here two threads may compute the value at the same time; the first one is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class lazy_property(Generic[T]):  # used like `property`
    """A property whose value is kept in the instance's `__dict__`, under its own name."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__
        self.name = compute.__name__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> lazy_property[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> lazy_property[T] | T:
        if instance is None:
            return self
        value: T = instance.__dict__.setdefault(self.name, self._compute(instance))
        return value
