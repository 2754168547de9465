"""The shape that every result has: a dataclass that is written as JSON with its fields and its properties."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

Progress = Callable[[int, int], None]  # called with (steps done, steps in all)


class Record:
    """Base of the result dataclasses. A property (a speed, a ratio, a verdict) is computed from the fields."""

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        properties = [name for name in dir(type(self)) if isinstance(getattr(type(self), name), property)]
        return {name: to_json(getattr(self, name)) for name in (*vars(self), *properties)}


def to_json(value: Any) -> Any:
    """The value as JSON has it: a `Record` as an object with its properties, any other dataclass by its fields."""
    if isinstance(value, Record):
        return value.to_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: to_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value
