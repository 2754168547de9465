"""Compares a student's answer with the right one: numbers, words, sets, arrays. What is wrong is said in a sentence.

Right answers may be of another type: a list for an array, "transposed" for "transpose", 4.0 for 4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ...errors import describe
from ...reference.layers import Array
from .declare import Unanswered, Wrong

CLOSE = 2e-6  # relative: a few roundings of float32


def expect_number(
    value: Any, expected: float, *, within: float = 0.0, mistakes: Mapping[str, ArrayLike] | None = None, hint: str = ""
) -> None:
    """Raises Wrong unless the number is `expected`, give or take `within`.

    mistakes: sentence -> the number, or numbers, that this mistake gives; they may be rounded as far as `expected`.
    """
    number = as_number(value)
    if abs(number - expected) <= within:
        return
    relative = max(1e-6, within / abs(expected) if expected else 0.0)
    for sentence, numbers in (mistakes or {}).items():
        wrong = np.asarray(numbers, dtype=np.float64)
        if (np.abs(number - wrong) <= np.maximum(within, relative * np.abs(wrong))).any():
            raise Wrong(sentence)
    size = "too large" if number > expected else "too small"
    raise Wrong(f"{number + 0.0:g} is {size}. {hint}".strip())  # + 0.0: no "-0"


def as_number(value: Any) -> float:
    """One number of any type, also as a text. Raises Wrong."""
    if value is None:
        raise Unanswered
    try:
        if isinstance(value, str):
            value = Fraction(value) if "/" in value else float(value)
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, ArithmeticError):
        raise Wrong(f"One number is wanted, not {describe(value)}.") from None
    if array.size != 1:
        raise Wrong(f"One number is wanted; yours are {array.size}.")
    if not np.isfinite(array).all():
        raise Wrong(f"A finite number is wanted, not {array.item()}.")
    return float(array.item())


def expect_word(value: Any, stems: Iterable[str], mistakes: Mapping[str, Iterable[str]], hint: str) -> None:
    """Raises Wrong unless a word of the text begins with one of `stems`, and none with that of a mistake.

    mistakes: sentence -> the stems of which it is said.
    """
    if not isinstance(value, str):
        raise Wrong(f"A text is wanted, not {describe(value)}.")
    words = re.findall(r"[a-z0-9]+", value.lower())
    is_right = any(word.startswith(tuple(stems)) for word in words)
    for sentence, wrong in mistakes.items():
        if any(word.startswith(tuple(wrong)) for word in words):
            raise Wrong(f"Name one thing only. {sentence}" if is_right else sentence)
    if {"not", "no", "never", "but", "except", "neither", "nor", "without"} & set(words):
        raise Wrong("Say what it is, not what it is not.")
    if not is_right:
        raise Wrong(hint)


def expect_set(value: Any, expected: set[Any], choices: Mapping[Any, str]) -> None:
    """Raises Wrong unless the set (list, tuple, text) has the expected members. choices: all of them, and why each is a
    member or is none."""
    if isinstance(value, str):
        letters = set(value.strip().lower())  # of choices that are letters: "ab"
        parts = letters if letters and letters <= {*choices} else re.split(r"[,;]|\band\b", value)
        given: Iterable[Any] = [value] if value in choices else parts
    elif isinstance(value, (Set, list, tuple, range, np.ndarray)):
        given = value
    else:
        raise Wrong(f"A set is wanted, as {{...}}, not {describe(value)}.")
    names = {str(choice).lower(): choice for choice in choices}
    chosen = set()
    for each in given:
        name = str(each).strip(" .(){}[]").lower()
        if name not in names:
            raise Wrong(f"{describe(each)} is none of the choices: {', '.join(map(repr, choices))}.")
        chosen.add(names[name])
    for extra in sorted(chosen - expected, key=str):
        raise Wrong(f"{extra!r} is one too many: {choices[extra]}")
    for missing in sorted(expected - chosen, key=str):
        raise Wrong(f"One is missing. {choices[missing]}" if len(chosen) else "The set is empty.")


def expect_names(answer: Any, keys: Iterable[str], names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(key, one of `names`) of each entry of a student's dict, in the order of `keys`. Raises Unanswered, Wrong."""
    keys = list(keys)
    if not isinstance(answer, Mapping) or set(answer) != set(keys):
        raise Wrong(f"A dict with the keys {', '.join(keys)} is wanted.")
    if None in answer.values():
        raise Unanswered
    for key in keys:
        name = " ".join(str(answer[key]).lower().split())
        if name not in names:
            raise Wrong(f"{key}: {answer[key]!r} is no name of the table: {'; '.join(map(repr, names))}.")
        yield key, name


def as_array(value: Any) -> Array:
    """An array, or a list or set of numbers as one. Raises Wrong."""
    if value is None:
        raise Unanswered
    try:
        array = np.asarray(sorted(value) if isinstance(value, Set) else value)
        if array.dtype.kind == "O" and array.ndim:  # fractions, say
            array = array.astype(np.float64)
    except ValueError:
        raise Wrong("The rows have different lengths; an array is wanted.") from None
    except TypeError:
        raise Wrong(f"An array of numbers is wanted; yours is {describe(value)}.") from None
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise Wrong(f"An array of numbers is wanted; yours is {describe(value)}.")
    return array


def as_parts(value: Any, count: int, wanted: str) -> Sequence[Any]:
    """The results of a function that has so many. Raises Wrong with the sentence `wanted`."""
    is_array = isinstance(value, np.ndarray) and value.ndim > 0
    parts: Sequence[Any] = value if is_array or isinstance(value, (tuple, list)) else ()
    if len(parts) != count:
        raise Wrong(wanted)
    return parts


def as_integers(value: Any) -> list[int]:
    """The whole numbers of an array or a list, of any shape. Raises Wrong."""
    array = as_array(value).ravel()
    if not all(float(each).is_integer() for each in array):
        raise Wrong(f"Whole numbers are wanted, not {describe(value)}.")
    return [int(each) for each in array]


def expect_array(
    value: Any, expected: ArrayLike, *, mistakes: Mapping[str, ArrayLike] | None = None, exact: bool = False
) -> str:
    """Raises Wrong unless the array has the expected values. Returns how right: "equal", or "close" with the largest
    difference.

    mistakes: sentence -> the array that this mistake gives.   exact: "close" is wrong.
    Integers and booleans must be equal, in any type that holds them. The first wrong index and the likely mistake are
    said.
    """
    right, mine = np.asarray(expected), as_array(value)
    expect_shape(mine, right.shape)
    if right.dtype.kind == "b":
        expect_booleans(mine)
    wide, target = mine.astype(np.float64), right.astype(np.float64)
    if np.array_equal(wide, target, equal_nan=True):
        return "equal"
    allowed = 0.0 if exact else CLOSE * max(float(np.abs(target[np.isfinite(target)]).max(initial=0)), 1e-30)
    if not exact and right.dtype.kind == "f" and is_close(wide, target, allowed):
        return f"close: the largest difference is {np.abs(wide - target)[np.isfinite(target)].max():.1e}"
    raise Wrong(f"{first_wrong(wide, target, allowed)} {likely_mistake(wide, target, mistakes or {}, allowed)}".strip())


def expect_shape(mine: Array, shape: tuple[int, ...]) -> None:
    """Raises Wrong if the array has another shape."""
    if mine.shape == shape:
        return
    text = f"Its shape is {mine.shape}, not {shape}."
    if sorted(mine.shape) == sorted(shape):
        raise Wrong(f"{text} Its axes are in another order: transpose it.")
    if mine.size == int(np.prod(shape)):
        raise Wrong(f"{text} It has the right number of values: reshape it.")
    raise Wrong(text)


def expect_booleans(mine: Array) -> None:
    """Raises Wrong if the array has other values than 0 and 1."""
    if mine.dtype.kind != "b" and not np.isin(mine, (0, 1)).all():
        infinite = " Minus infinity goes into the scores, where the mask is True." * bool((mine < 0).any())
        raise Wrong(f"True and False are wanted (dtype bool); yours is an array of {mine.dtype}.{infinite}")


def is_close(mine: Array, right: Array, allowed: float) -> bool:
    with np.errstate(invalid="ignore"):
        return bool(((np.abs(mine - right) <= allowed) | (mine == right) | (np.isnan(mine) & np.isnan(right))).all())


def first_wrong(mine: Array, right: Array, allowed: float = 0.0) -> str:
    """How many values are wrong, and the first of them."""
    with np.errstate(invalid="ignore"):
        wrong = ~((np.abs(mine - right) <= allowed) | (mine == right))
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    place = f" The first, at [{', '.join(map(str, index))}]," if index else " It"
    return f"{wrong.sum():,} of {wrong.size:,} values are wrong.{place} is {mine[index]:.6g}, not {right[index]:.6g}."


def likely_mistake(
    mine: Array, right: Array, mistakes: Mapping[str, ArrayLike], allowed: float, factors: bool = True
) -> str:
    """A sentence that names the mistake that gives these values: one of `mistakes`, or a rearrangement of the right
    ones, or one factor in all if `factors`; "" if none does."""
    for sentence, array in mistakes.items():
        wrong = np.asarray(array, dtype=np.float64)
        if wrong.shape == mine.shape and is_close(mine, wrong, max(allowed, CLOSE * float(np.abs(wrong).max()))):
            return f"Likely mistake: {sentence}."
    if not np.isfinite(mine[np.isfinite(right)]).all():
        return "Some of yours are infinite or no numbers: is something divided by zero, or is −∞ minus −∞ computed?"
    for sentence, array in rearrangements(right):
        if array.shape == mine.shape and is_close(mine, array, allowed):
            return f"Likely mistake: {sentence}."
    return one_factor(mine, right) if factors else ""


def mistake_of(given: Sequence[Any], cases: Sequence[tuple[Any, ...]], wrong: Mapping[str, Callable[..., Any]]) -> str:
    """A sentence that names the first function of `wrong` that gives these answers for the cases; "" if none does."""
    likely = (f" Likely mistake: {cause}." for cause, of in wrong.items() if given == [of(*case) for case in cases])
    return next(likely, "")


def rearrangements(right: Array) -> Iterable[tuple[str, Array]]:
    """The right values in wrong orders, or rounded."""
    if right.dtype == np.float64 and np.isin(right, (0, 1)).all():
        yield "True and False are exchanged", 1 - right
    yield "the sign is the other one", -right
    if right.ndim >= 2:
        yield "the first two axes are exchanged", right.swapaxes(0, 1)
    if right.ndim >= 3:
        yield "the last two axes are exchanged", right.swapaxes(-1, -2)
        heads = right.reshape(*right.shape[:-2], right.shape[-1], right.shape[-2]).swapaxes(-1, -2)
        yield "the heads are cut with the wrong axis first: reshape to (..., heads, width)", heads
    for digits in (1, 2, 3):
        yield f"the values are rounded to {digits} digit{'s' * (digits > 1)}", right.round(digits)
    for axis in range(right.ndim):
        yield f"axis {axis} runs backwards", np.flip(right, axis)
        yield f"axis {axis} is shifted by one", np.roll(right, 1, axis)
        yield f"axis {axis} is shifted by one", np.roll(right, -1, axis)


def one_factor(mine: Array, right: Array) -> str:
    """That all values are wrong by one factor, or by one summand."""
    good = np.isfinite(right) & (np.abs(right) > 1e-3 * np.abs(right[np.isfinite(right)]).max(initial=0))
    if good.sum() < 2:
        return ""
    factors, differences = mine[good] / right[good], (mine - right)[np.isfinite(right)]
    if factors.mean() in (0, 1):  # all are 0, or what is wrong is where 0 is right
        return "All of yours are 0." * (not mine.any())
    if np.ptp(factors) <= 1e-4 * abs(factors.mean()) and not mine[right == 0].any():
        return f"Every value is {factors.mean():.6g} times the right one: a scale is missing or is one too many."
    wrong = differences[differences != 0]
    if wrong.size > 1 and np.ptp(wrong) <= 1e-4 * abs(wrong.mean()):
        which = "value" if wrong.size == differences.size else "wrong value"
        return f"Every {which} is {abs(wrong.mean()):.6g} too {'large' if wrong.mean() > 0 else 'small'}."
    return ""
