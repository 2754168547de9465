"""What a hypothesis is, and the decorator that lists one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from ..variants import Setting


class Kind(StrEnum):
    """What a wrong tensor looks like beside the right one."""

    ZEROS = "all zeros"
    SCALED = "the right tensor times one number"
    PERMUTED = "the right values in another order"
    SHIFTED = "the right rows at other tokens"
    WRAPPED = "the right integers modulo 2^16"
    ROUNDED = "the right values with fewer bits"
    MASKED = "other places masked"
    NEARLY = "off by one at a few places"
    OTHER = "other values"


Change = Callable[[Setting], Setting | None]


@dataclass(frozen=True)
class Hypothesis:
    """A mistake.   name: short, stable.   shows: globs of the op outputs that it would show at first.

    kinds: what that op's output would look like.   change: the reference with this mistake made, or None for a model
    that has no place for it.
    """

    name: str
    shows: tuple[str, ...]
    cause: str
    remedy: str
    change: Change
    kinds: tuple[Kind, ...] = (Kind.OTHER,)


Register = Callable[[Change], Change]


def listed_in(listing: list[Hypothesis]) -> Callable[..., Register]:
    """A decorator that turns a function Setting -> Setting | None into a hypothesis of `listing`."""

    def hypothesis(name: str, shows: str, cause: str, remedy: str, *kinds: Kind) -> Register:
        def register(change: Change) -> Change:
            listing.append(Hypothesis(name, tuple(shows.split()), cause, remedy, change, kinds or (Kind.OTHER,)))
            return change

        return register

    return hypothesis
