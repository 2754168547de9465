"""How much work one rendering of a chat template may do: two budgets, and the sizes that are paid from them.

Jinja's sandbox keeps a template away from Python, but lets it work for ever: two nested loops, `x ~ x` forty times, or
a list that contains itself twice, twenty times over. So each loop turn and each operation pays `steps`, each result
pays `size`, and no single value may be larger than a conversation of this length could need. A deadline stands behind
the budgets, in processor time, so that neighbours that use the processor do not fail a rendering. It is read where
steps are paid: what a single call may take is paid before it, and a payment that cannot end in time is refused.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Any, TypeVar

from jinja2.exceptions import SecurityError
from jinja2.runtime import Undefined

T = TypeVar("T")
MAX_INTEGER = 1 << 63
MAX_NESTING = 40
MAX_MACRO_DEPTH = 32
MAX_SECONDS = 2.0
_SECONDS_PER_STEP = 5e-7
_STEPS_PER_LOOK = 512


class LimitError(SecurityError):
    """A template exceeded a limit."""


def measure(value: Any, limit: int) -> tuple[int, int]:
    """(size, depth) of a value: characters, plus 8 per item. A shared item counts each time it appears.

    Printing, comparing and tojson walk it in the same way: `[x, x]` made twenty times over is small in memory and
    prints a million items. Raises LimitError past `limit`, and for anything but text, numbers, lists and dicts.
    """
    kind = type(value)
    if kind is str:
        return _within(len(value), limit), 0
    if not isinstance(value, (str, list, tuple, dict, int)):
        return 1, 0
    size, deepest = 0, 0
    todo: list[tuple[Any, int]] = [(value, 0)]
    while todo:
        item, depth = todo.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, (list, tuple, dict)):
            if depth >= MAX_NESTING:
                raise LimitError(f"lists are nested more than {MAX_NESTING} deep")
            size += 8 * (1 + len(item))
            deepest = max(deepest, depth + 1)
            if size <= limit:
                children = [*item.keys(), *item.values()] if isinstance(item, dict) else item
                todo.extend((child, depth + 1) for child in children)
        elif isinstance(item, int):
            if not -MAX_INTEGER < item < MAX_INTEGER:
                raise LimitError("an integer of more than 63 bits")
            size += 1
        elif item is None or isinstance(item, (float, Undefined)):
            size += 1
        else:
            raise LimitError(f"a {type(item).__name__} inside a list or dict")
        _within(size, limit)
    return size, deepest


def _within(size: int, limit: int) -> int:
    if size > limit:
        raise LimitError(f"a value grows past {limit} characters, more than a conversation of this length needs")
    return size


class Budget:
    """What one rendering may still spend. `value_limit` is also the maximum length of the text."""

    def __init__(self, variables: dict[str, Any]) -> None:
        given = sum(measure(value, 1 << 40)[0] for value in variables.values())
        self.value_limit = (1 << 20) + 16 * given
        self._size = 64 * self.value_limit
        self._steps = self._next_look = 2_000_000 + 32 * given
        self._deadline = time.thread_time() + MAX_SECONDS
        self.macro_depth = 0
        self.printed = 0

    def step(self, count: int) -> None:
        """Pay for `count` pieces of work (each about one evaluated node of the template)."""
        self._steps -= count
        if self._steps < self._next_look:
            self._next_look = self._steps - _STEPS_PER_LOOK
            if self._steps < 0:
                raise LimitError(
                    "the template does more work than a conversation of this length needs: does a loop end?"
                )
            if time.thread_time() + count * _SECONDS_PER_STEP > self._deadline:
                raise LimitError(f"the template works for more than {MAX_SECONDS:g} s")

    def read(self, value: Any) -> Any:
        """Pay for one walk over a value (a comparison, a search), and return it."""
        if type(value) is str:
            self.step(1 + len(value) // 64)
        elif isinstance(value, range):
            self.step(1 + len(value))
        elif isinstance(value, (str, list, tuple, dict)):
            self.step(1 + measure(value, self.value_limit)[0] // 8)  # measuring itself takes a step per item
        return value

    def made(self, value: T) -> T:
        """Pay for a value that an operation made, and return it."""
        size = measure(value, self.value_limit)[0]
        self.will_make(size)
        if isinstance(value, (list, tuple, dict)):
            self.step(size // 8)
        return value

    def will_make(self, size: int) -> None:
        """Pay for a value of this size; called before an operation whose result may be larger than its inputs."""
        self._size -= _within(size, self.value_limit)
        if self._size < 0:
            raise LimitError("the template makes more text than a conversation of this length needs")
        self.step(1 + size // 64)

    def print(self, count: int) -> None:
        """Pay for characters of the final text."""
        self.printed += count
        if self.printed > self.value_limit:
            raise LimitError(f"the text grows past {self.value_limit} characters")


# The budget of the rendering that runs in this thread. All threads share an environment's filters and operators.
current: ContextVar[Budget] = ContextVar("bitnet_ref.template_budget")
