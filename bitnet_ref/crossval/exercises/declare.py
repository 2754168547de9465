"""What an exercise is: a judge of answers, hints in steps, and a solution that a test executes.

A judge is a function of the answer, which raises `Wrong` with a sentence that says what is wrong, or `Unanswered`. What
students and teachers read is in `assets/exercises`, a file for each module of judges in `lessons`.
"""

from __future__ import annotations

import inspect
import os
import re
import tomllib
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ...formats.open import ASSETS


class Wrong(Exception):
    """A wrong answer. The text tells the student what is wrong with it; `hints` are further ones, in steps."""

    def __init__(self, text: str, *hints: str) -> None:
        super().__init__(text)
        self.hints = hints


@contextmanager
def said_of(what: str) -> Iterator[None]:
    """What is Wrong meanwhile is said of this: "w_t:" comes before its text."""
    try:
        yield
    except Wrong as wrong:
        raise Wrong(f"{what} {wrong}") from None


class NoResult(Wrong):
    """A function that is written, and returned None."""


class Unanswered(Exception):
    """The student has not begun: None, or a function as the notebook has it."""


@dataclass(frozen=True)
class Exercise:
    """name: "1.2", as notebooks call it.   judge: raises Wrong or Unanswered; may return a sentence for a right answer.
    hints: from a question to nearly the answer.   solution: code that defines the answer under the name `answer`.
    answer: the variable or function that the student writes.   minutes: an estimate; a point for every five."""

    name: str
    answer: str
    judge: Callable[..., str | None]
    hints: tuple[str, ...]
    solution: str
    minutes: int

    @property
    def points(self) -> int:
        return max(1, self.minutes // 5)

    @property
    def lesson(self) -> str:
        return self.name.partition(".")[0]


OTHER_INPUTS = "BITNET_REF_EXERCISE_INPUTS"  # a number, set by `bitnet-ref grade`
EXERCISES: dict[str, Exercise] = {}


def read_texts(file: str) -> dict[str, Any]:
    """The contents of a file of `assets/exercises`."""
    return tomllib.loads((ASSETS / "exercises" / file).read_text(encoding="utf-8"))


@cache
def exercise_texts() -> dict[str, dict[str, Any]]:
    """By the name of an exercise: its `answer`, `hints` and `solution`, its `minutes` where they are not 5, and what
    its judge reads there."""
    files = sorted(path.name for path in (ASSETS / "exercises").glob("*.toml"))
    return {name: text for file in files if file != "quiz.toml" for name, text in read_texts(file).items()}


def add_exercise(exercise: Exercise) -> None:
    assert exercise.name not in EXERCISES, f"two exercises are called {exercise.name}"
    EXERCISES[exercise.name] = exercise


def exercise(name: str) -> Callable[[Callable[..., str | None]], Callable[..., str | None]]:
    """Declares the exercise `name` of `assets/exercises` with the decorated function as its judge."""

    def declare(judge: Callable[..., str | None]) -> Callable[..., str | None]:
        text = exercise_texts()[name]
        solution, minutes = text["solution"].strip("\n"), text.get("minutes", 5)
        add_exercise(Exercise(name, text["answer"], judge, tuple(text["hints"]), solution, minutes))
        return judge

    return declare


def draws(seed: int) -> np.random.Generator:
    """Random inputs of an exercise. In a grader's process they are others than in the student's."""
    return np.random.default_rng([seed, int(os.environ.get(OTHER_INPUTS, "0"))])


def run(function: Any, *arguments: Any, keeps_lists: bool = False) -> Any:
    """The result of a student's function, on copies of the arguments. Raises Unanswered if it is not written yet, Wrong
    if it returns None, raises, or changes an array that the notebook uses again. keeps_lists: or changes a list."""
    if not callable(function):
        raise Wrong(f"A function is wanted; yours is of type {type(function).__name__}.")
    kept = (np.ndarray, list) if keeps_lists else np.ndarray
    copies = [each.copy() if isinstance(each, kept) else each for each in arguments]
    try:
        result = function(*copies)
    except (Wrong, Unanswered):
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        line = f', in its line "{frames[0].line}"' if frames and frames[0].line else ""
        raise Wrong(f"Your function raised {type(error).__name__}: {error}{line}.") from error
    for given, copy in zip(arguments, copies, strict=True):
        if keeps_lists and isinstance(given, list) and given != copy:
            raise Wrong("Your function changes the list that it was given. Make a new one, and return that.")
        if isinstance(given, np.ndarray) and not np.array_equal(given, copy, equal_nan=given.dtype.kind in "fc"):
            raise Wrong(
                "Your function changes an array that it was given, and what comes after needs it as it was. "
                "Work on a copy: x = x + 1, not x += 1."
            )
    if result is None or (isinstance(result, tuple) and any(each is None for each in result)):
        if is_open(function):
            raise Unanswered
        raise NoResult("Your function returned None here. Is a return missing, in one of its branches perhaps?")
    return result


def is_open(function: Any) -> bool:
    """Whether a function is as the notebook has it: it returns None at once, or where it says TODO."""
    code = getattr(function, "__code__", None)
    if code is None or len(code.co_code) == len((lambda: None).__code__.co_code):
        return True
    try:
        return re.search(r"\bNone\b.*# TODO", inspect.getsource(function)) is not None
    except OSError:  # no text is kept
        return False
