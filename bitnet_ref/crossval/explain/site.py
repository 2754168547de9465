"""A wrong tensor, the steps from right tensors to it, and the search for the edits of these steps that give it.

The steps of a *site* are one of a full trace, a block of a thin one. The descriptions of these steps are computed, the
simplest first, and compared with the engine's tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import Any, Protocol

import numpy as np

from ...families.family import Edit, Hypothesis
from ...reference.layers import Array
from ...system.lazy import lazy_property
from ..names import hook_of, is_by_head, layer_of, role
from ..tolerances import EPSILON
from ..types import Mask
from . import delta_steps, expert_steps, roundings
from .edits import constants, descriptions
from .edits.constants import names_of
from .edits.kinds import Description, Family
from .evidence import ROUNDING_LEFT, Evidence
from .suggested import solved
from .variants import Step, both_edits
from .wording import noun, place_in_words


class Report(Protocol):
    """Called with a text before each test; it may raise to end the search. `add` announces further tests."""

    def __call__(self, text: str) -> None: ...

    def add(self, count: int) -> None: ...


# Steps that one mistake may be in together.
PAIRS = (
    ("hook_rot_q", "hook_rot_k"), ("hook_q", "hook_k"), ("hook_attn_scores", "hook_z"), ("hook_rot_k", "hook_v"),
    ("hook_resid_mid", "hook_resid_post"), ("hook_state", "hook_delta_out"), ("hook_scale", "hook_normalized"),
)  # fmt: skip
BETWEEN_TOKENS = (
    *("hook_pattern", "hook_q", "hook_k", "hook_v", "hook_rot_q", "hook_rot_k"),
    *("hook_attn_scores", "hook_z"),
)
# What one mistake may be in, among the steps of one kind.
GROUPS = (
    *("", r"\.attn\.", r"\.mlp\.", r"\.[qkv]_proj\.", r"\.ln", "sub_norm", "gate_proj|up_proj"),
    r"\.(o|down)_proj\.",
)
SAME_CONSTANT = 1e-5  # how near to the right constant, relative, one is the right one
NAMED = 0.9  # the cost of an edit that has a name
ALL_AT_ONCE = 0.2  # how much less an edit of many steps of one kind costs: an engine has one function for them
# Two edits of one step cost so much each at most. The first of them leaves less than this share of the error, and so
# many such are tried with every other one.
MOST_OF_A_PAIR, NEARER, NEAREST = 1.4, 0.97, 6
ENOUGH = 0.35  # descriptions that cost so much more than the simplest that explains a site are not tried


@dataclass(frozen=True)
class Explanation(Description):
    """A description with its constant, applied in the steps `names`.   result: the tensor with it."""

    names: tuple[str, ...] = ()
    place: str = ""
    error: float = 0.0
    result: Array | None = None

    def says_the_same(self, other: Explanation) -> bool:
        """Whether it rounds the same as another one, in other words."""
        if not self.rounds or self.names != other.names or self.result is None or other.result is None:
            return False
        size = float(np.abs(self.result).max(where=np.isfinite(self.result), initial=0))
        return bool(np.isclose(self.result, other.result, rtol=1e-5, atol=1e-6 * size).mean() > 0.99)


Trial = tuple[float, tuple[str, ...], Description | Family]  # cost, steps


class Site:
    """A wrong tensor, and the search for what explains it."""

    def __init__(self, evidence: Evidence, name: str, report: Report, known: Sequence[Hypothesis] = ()) -> None:
        self.evidence, self.name, self.report = evidence, name, report
        self.target, self.stretch = evidence.targets[name], evidence.stretch(name)
        self.known = [(each, [n for n in self.stretch if each.is_in(evidence.steps[n])]) for each in known]
        mask = np.isfinite(self.target.theirs) & (~self.target.right_close if self.target.alone else True)
        seen = mask & self._first_half()
        self.mask = seen if (seen & ~self.target.right_close).any() else mask
        self.after_layers = frozenset(takewhile(lambda step: layer_of(step) is None, self.stretch))

    def _first_half(self) -> Mask:
        """The values of the first half of the tokens: constants are solved for there, and must hold on the others."""
        shape = self.target.theirs.shape
        axis = int(self.target.by_head)
        half = np.arange(shape[axis]) < -(-shape[axis] // 2)
        return np.broadcast_to(half.reshape([-1 if i == axis else 1 for i in range(len(shape))]), shape)

    def _trials(self, after_layers: bool) -> list[Trial]:
        """What is tried in the steps after all layers, or in the others; the simplest first."""
        trials: list[Trial] = []
        first_right = not self.target.by_head and bool(self.target.right_close[:1].all())
        for unit in self.units():
            if self.after_layers.issuperset(unit) != after_layers:
                continue
            self.evidence.setting.check()
            step = self.evidence.steps[unit[0]]
            distance = 0.02 * min(10, self.stretch.index(unit[0])) if len(self.stretch) > 1 else 0.0
            if len(self.stretch) > 1 and first_right != any(name.endswith(BETWEEN_TOKENS) for name in unit):
                distance += 1  # the first token sees only itself: it tells attention from all else
            if len(unit) > 2:
                distance -= ALL_AT_ONCE
            own: list[Description | Family] = [_named(each) for each, names in self.known if set(unit) <= set(names)]
            for module in (descriptions, delta_steps, expert_steps, roundings):
                own += module.descriptions(step)
            own += [*constants.families(step), *delta_steps.families(step)]
            own += solved(step, self.target) if unit == (self.name,) else ()
            for d in own:
                changes_input = "{in" in d.text and "is taken for" not in d.text
                of_products = len(unit) > 1 and step.name.endswith("_proj.hook_out")  # whose inputs several steps make
                if changes_input and len(self.stretch) > 1 and not of_products and self._made_in_stretch(step, d.text):
                    continue  # the same change of the step that computes this input is tried
                slow = 0.15 if isinstance(d, Family) and not self.target.alone else 0.0
                trials.append((d.cost + distance + slow, unit, d))
        for each, names in self.known:
            for part in dict.fromkeys(map(tuple, _groups(names))):
                several = len({hook_of(name) for name in part}) > 1  # no unit has steps of several kinds
                if several and self.after_layers.issuperset(part) == after_layers:
                    trials.append((NAMED, part, _named(each)))
        return sorted(trials, key=lambda trial: trial[0])

    def explanations(self) -> list[Explanation]:
        """What explains the whole tensor, the simplest first; empty if nothing does.

        The steps after all layers come first: where logits alone were recorded, their edits cost least to compute.
        """
        good = self._try_all(self._trials(after_layers=True)) or self._try_all(self._trials(after_layers=False))
        closest = min((e.error for e in good), default=0.0)
        near = [e for e in good if e.error <= (3 * closest if e.rounds else 20 * closest) + 8 * EPSILON]
        near.sort(key=lambda e: e.cost)
        return [e for i, e in enumerate(near) if not any(e.says_the_same(earlier) for earlier in near[:i])]

    def _try_all(self, trials: list[Trial]) -> list[Explanation]:
        """Those that explain the whole tensor."""
        good, is_zero = list[Explanation](), not self.target.theirs.any()
        self.report.add(len(trials))
        size = self.evidence.copies
        for start in range(0, len(trials), size):
            if good and trials[start][0] > good[0].cost + ENOUGH:
                self.report.add(start - len(trials))
                break
            chunk = trials[start : start + size]
            edits = [d.edit if isinstance(d, Description) else d.nudged for *_, d in chunk]
            changed = [dict.fromkeys(unit, edit) for (_, unit, _), edit in zip(chunk, edits, strict=True)]
            for (cost, unit, d), mine in zip(chunk, self.evidence.compute_all(self.name, changed), strict=True):
                self.report(say(d.text, self.evidence.steps[unit[0]]))
                if mine is None:
                    continue
                if isinstance(d, Family):
                    if is_zero:  # which no constant says better than "all zeros"
                        continue
                    direction = self._direction(mine)
                    promises, unmoved = direction is not None and direction > 0.3, direction is None
                    tried = promises or (d.starts and (d.cost < 1.15 or unmoved))
                    result = self.solve(unit, d, cost, promises) if tried else None
                else:
                    result = self.attempt(unit, replace(d, cost=cost), mine)
                if result is not None:
                    good.append(result)
        return good

    def pairs(self, made: Sequence[Description]) -> list[Explanation]:
        """What explains the tensor of one step by two edits of it: neither does alone.

        made: the edits that explain other tensors. One of the two is one of these, or among those that come nearest.
        """
        if not self.target.alone:
            return []
        step, near, good = self.evidence.steps[self.name], list[tuple[float, Description]](), list[Explanation]()
        trials = self._trials(after_layers=bool(self.after_layers))
        own = [d for _, unit, d in trials if isinstance(d, Description) and unit == (self.name,)]
        own = [d for d in own if d.cost <= MOST_OF_A_PAIR]
        self.report.add(len(own))
        for d in own:
            self.report(say(d.text, step))
            mine = self.compute((self.name,), d.edit)
            if mine is not None and (error := self.target.distance(mine)) < NEARER * self.target.error:
                near.append((error, d))
        near.sort(key=lambda pair: pair[0])
        firsts = [(self.target.error, d) for d in made] + near[:NEAREST]
        self.report.add(len(firsts) * len(own))
        for error, first in firsts:
            for second in own:
                self.report(f"{say(first.text, step)}; and {say(second.text, step)}")
                text, edit = f"{first.text}; and {second.text}", both_edits(first.edit, second.edit)
                both = Description(first.cost + second.cost, text, edit, rounds=first.rounds or second.rounds)
                mine = self.compute((self.name,), edit)
                if mine is None or self.target.match(mine, both.rounds) != ():
                    continue
                left = self.target.distance(mine)
                if left < ROUNDING_LEFT / 3 * min(error, self.target.error) and not self._makes_less(second, left):
                    good.append(Explanation(**vars(both), names=(self.name,), error=left, result=mine))
            if good:
                break
        return sorted(good, key=lambda e: e.cost)

    def _makes_less(self, edit: Description, left: float) -> bool:
        """Whether one of two edits alone leaves as little."""
        alone = self.compute((self.name,), edit.edit)
        return alone is not None and left >= ROUNDING_LEFT / 3 * self.target.distance(alone)

    def _direction(self, nudged: Array) -> float | None:
        """How well a small change of a constant points towards the engine's tensor, 0 to 1.

        None where the tensor stays as it is: a cap that is far from all values.
        """
        if self.target.alone:
            return 1.0
        slope = (nudged.reshape(self.target.theirs.shape) - self.target.right)[self.mask]
        if np.linalg.norm(slope) < 1e-6 * np.linalg.norm(self.target.right):
            return None
        wanted = (self.target.theirs - self.target.right)[self.mask]
        norms = float(np.linalg.norm(slope) * np.linalg.norm(wanted))
        return abs(float(slope @ wanted)) / norms if norms > 0 else 0.0

    def _made_in_stretch(self, step: Step, text: str) -> bool:
        """Whether a change of an input is one of the step that computes it, because nothing else reads that."""
        x = step.inputs[int(text[text.index("{in") + 3])]
        sources = [name for name in self.stretch[1:] if np.may_share_memory(x, self.evidence.steps[name].result)]
        return any(self._readers[name] == 1 for name in sources)

    @lazy_property
    def _readers(self) -> dict[str, int]:
        """How many steps of the stretch read the result of each."""
        steps = [self.evidence.steps[name] for name in self.stretch]
        arrays = [[x for x in step.inputs if isinstance(x, np.ndarray)] for step in steps]
        return {
            step.name: sum(any(np.may_share_memory(step.result, x) for x in inputs) for inputs in arrays)
            for step in steps
        }

    def units(self) -> Iterator[tuple[str, ...]]:
        """The sets of steps that one mistake may be in: each step, and those of one kind."""
        renamed = ("hook_pre", "hook_pre_linear", "hook_attn_out", "hook_mlp_out")  # a tensor's second name
        yield from ((name,) for name in self.stretch if len(self.stretch) == 1 or not name.endswith(renamed))
        if len(self.stretch) == 1:
            return
        by_kind: dict[str, list[str]] = {}
        for name in self.stretch:
            by_kind.setdefault(hook_of(name), []).append(name)
        for names in by_kind.values():
            groups = _groups(names)
            groups += [[n for n in names if role(n) == r] for r in dict.fromkeys(map(role, names))]  # in all layers
            done = [[n] for n in names]
            for group in groups:
                if len(group) > 1 and group not in done:
                    done.append(group)
                    yield tuple(group)
        for pair in PAIRS:
            names = [n for n in self.stretch if n.endswith(pair)]
            if len(names) > 1:
                yield tuple(names)

    def compute(self, unit: Iterable[str], edit: Edit) -> Array | None:
        return self.evidence.compute(self.name, dict.fromkeys(unit, edit))

    def attempt(self, unit: tuple[str, ...], d: Description, mine: Array | None = None) -> Explanation | None:
        mine = self.compute(unit, d.edit) if mine is None else mine
        match = None if mine is None else self.target.match(mine, d.rounds)
        if match is None or mine is None:
            return None
        if not match:
            error = self.target.distance(mine)
            if not self.target.alone and error > (ROUNDING_LEFT if d.rounds else 0.05) * self.target.error:
                return None  # among so many descriptions one is near by chance
            return Explanation(**vars(d), names=unit, error=error, result=mine)
        axis, indices = match
        of_step = axis if self.target.alone else int(is_by_head(unit[0]))
        part = regional(d.edit, of_step, indices)
        again = self.compute(unit, part)
        if again is None or self.target.match(again) != ():
            return None
        shape, by_head = self.target.theirs.shape, self.target.by_head
        place = place_in_words(unit[0], shape, by_head, self.evidence.setting, axis, indices)
        cost, error = d.cost + 0.1, self.target.distance(again)
        return Explanation(cost, d.text, part, d.known, names=unit, place=place, error=error)

    def solve(self, unit: tuple[str, ...], family: Family, cost: float, promises: bool) -> Explanation | None:
        """The constant with which the family gives the tensor, if there is one: Gauss-Newton, then a name for it."""
        target = self.target
        wrong = np.nan_to_num((target.theirs - target.right)[self.mask], posinf=1e30, neginf=-1e30)
        whole = float(np.linalg.norm(wrong))
        starts = [c for c in (family.right, *family.starts) if not np.isnan(c)]
        values = self._values(unit, family, starts)
        errors = [np.inf if y is None else float(np.linalg.norm(y)) for y in values]
        order = sorted(range(len(starts)), key=errors.__getitem__)
        if not target.alone and not errors[order[0]] < 0.97 * whole and not promises:
            return None
        best, best_error = family.right, np.inf
        for i in order[: len(order) if target.alone else 2]:
            c, y, error = starts[i], values[i], errors[i]
            for iteration in range(10):
                if y is None or (iteration > 1 and not target.alone and error > 0.6 * whole):
                    break
                share = 1e-3 if target.alone else 0.1 if iteration < 4 else 0.02  # of c; int8 inside hides small ones
                h = share * (c if family.log else max(abs(c), 0.1))
                (shifted,) = self._values(unit, family, [c + h])
                if shifted is None:
                    break
                slope = (y - shifted) / h
                norm = float(slope @ slope)
                if not norm > 0 or not np.isfinite(norm):
                    break
                longest = float(slope @ y) / norm
                steps = [longest, longest / 3, longest / 9, longest / 27]
                trial = [c * float(np.exp(np.clip(s / c, -3, 3))) if family.log else c + s for s in steps]
                if family.log and c + longest > 0:  # exact for a limit
                    trial.append(c + longest)
                tried = self._values(unit, family, trial)
                lower = [(float(np.linalg.norm(v)), t, v) for t, v in zip(trial, tried, strict=True) if v is not None]
                if not lower or min(lower, key=lambda item: item[0])[0] >= error:
                    break
                last, (error, c, y) = c, min(lower, key=lambda item: item[0])
                if abs(c - last) <= 1e-8 * abs(c):
                    break
            if error < best_error:
                best, best_error = c, error
            if best_error < 1e-4 * whole:
                break
        changes_nothing = starts[0] == family.right and errors[0] >= 0.99 * whole
        same = changes_nothing and abs(best - family.right) <= SAME_CONSTANT * abs(family.right)
        if not best_error < 0.5 * whole or best == family.right or same:
            return None
        if not target.alone and 1e-3 * whole < best_error < 0.2 * whole:
            best = self._refine(unit, family, best, best_error)
        near = 1e-5 if target.alone and not target.exact else 0.02
        step = self.evidence.steps[unit[0]]
        for words, constant in islice(names_of(best, step, near), 12):
            named = Description(cost, family.text.replace("{c}", words), _by_constants(family, constant))
            if (result := self.attempt(unit, named)) is not None:
                return result
        text = family.text.replace("{c}", f"{best:.8g}")
        return self.attempt(unit, Description(cost + 0.3, text, family.edit(best)))

    def _refine(self, unit: tuple[str, ...], family: Family, best: float, error: float) -> float:
        """The constant of least error near `best`: int8 inside a site makes slopes too rough for Gauss-Newton."""
        width, by_factors = 1.0, family.log or best * family.right > 0
        for _ in range(5):
            steps = [width * i / 4 for i in range(-4, 5) if i]
            trial = [best * 2.0**s if by_factors else best + s * max(abs(best), 0.1) for s in steps]
            errors = [np.inf if y is None else float(np.linalg.norm(y)) for y in self._values(unit, family, trial)]
            if min(errors) < error:
                error, best = min(zip(errors, trial, strict=True))
            width /= 3
        return best

    def _values(self, unit: tuple[str, ...], family: Family, constants: list[float]) -> list[Array | None]:
        """The differences from the engine's tensor with each constant; None where they are not finite."""
        trials = [dict.fromkeys(unit, family.edit(c)) for c in constants]
        values: list[Array | None] = []
        for mine in self.evidence.compute_all(self.name, trials):
            theirs = self.target.theirs
            apart = None if mine is None else (theirs - mine.reshape(theirs.shape))[self.mask]
            values.append(apart if apart is not None and np.isfinite(apart).all() else None)
        return values


def _groups(names: Sequence[str]) -> list[list[str]]:
    """The steps of each of GROUPS among these."""
    return [[n for n in names if re.search(group, n)] for group in GROUPS]


def regional(edit: Edit, axis: int, indices: tuple[int, ...]) -> Edit:
    """The edit, at these indices of an axis of the result only."""

    def part(step: Step, compute: Edit, *inputs: Any) -> Array:
        right, wrong = compute(*inputs), edit(step, compute, *inputs)
        places = [i for i in indices if i < right.shape[axis]]
        result = right.copy()
        key = (slice(None),) * axis + (places,)
        result[key] = wrong[key]
        return result

    return part


def _named(mistake: Hypothesis) -> Description:
    return Description(NAMED, mistake.cause, mistake.edit, mistake, mistake.rounds)


def _by_constants(family: Family, constant: Callable[[dict[str, float]], float]) -> Edit:
    return lambda step, compute, *inputs: family.edit(constant(constants.numbers_of(step)))(step, compute, *inputs)


def say(text: str, step: Step, several: bool = False) -> str:
    """A description's text with nouns for its places.   several: it is of steps with other inputs, too."""

    def word(match: re.Match[str]) -> str:
        key = match[1]
        if key in ("it", "w", "c"):
            return {"it": "it", "w": "the matrix", "c": "another constant"}[key]
        if several and key == "in0":
            return "its input"
        if key.startswith("in"):
            x = step.inputs[int(key[2:])]
            names = [n for n, y in step.seen.items() if isinstance(x, np.ndarray) and np.may_share_memory(x, y)]
            return noun(names[-1]) if names else ("its input" if key == "in0" else f"input {int(key[2:]) + 1}")
        own = layer_of(step.name)
        return noun(key) + ("" if layer_of(key) in (None, own) else f" of layer {layer_of(key)}")

    return re.sub(r"{([^{}]+)}", word, text)
