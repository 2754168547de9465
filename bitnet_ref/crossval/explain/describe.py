"""Says what a wrong tensor is: the simplest edits of the reference's own steps that give the engine's tensor.

`Evidence` is one run of the reference in which each step is fed the engine's own tensors, as far as they were recorded.
So each wrong tensor is judged by itself, whatever earlier errors there are. A *site* is a wrong tensor and the steps
from right tensors to it: one step of a full trace, a block of a thin one. The descriptions of these steps are computed,
the simplest first, and compared with the engine's tensor. What explains one site is tried at the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, islice
from operator import itemgetter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...families.family import LINEAR, NORM, Edit, Hypothesis, after, before, instead, like
from ...reference.layers import Array
from ...reference.weights import LinearWeight
from ...system.lazy import lazy_property
from ..compare import View, fits
from ..metrics import MASKED, recorded_dtype, tensor_of
from ..names import find_step, is_by_head, layer_of, op_inputs, op_kind
from ..tolerances import EPSILON, RECORDED_ROUNDING, tolerance_of
from . import delta_steps, expert_steps, roundings
from . import edits as step_edits
from .edits import Description, Family, constants, matrix, moved, names_of, scale_inputs
from .variants import IMPOSSIBLE, Setting, Step, both_edits, edit_copies, is_same
from .wording import axis_words, example, noun, place_in_words, remedy, role, scope_in_words


class Report(Protocol):
    """Called with a text before each test; it may raise to end the search. `add` announces further tests."""

    def __call__(self, text: str) -> None: ...

    def add(self, count: int) -> None: ...


# Of narrow floats, relative; of the engines that round the inputs of their products only, the step of that.
SPACING = RECORDED_ROUNDING | {"8-bit activations": 2.0**-7}
SPACING |= {f"{dtype} activations": SPACING[dtype] for dtype in ("bfloat16", "float16")}
RELATED = (
    {"hook_rot_q", "hook_rot_k"},
    {"hook_rot_k", "hook_v"},
    {"hook_resid_mid", "hook_resid_post"},
    {"hook_attn_out", "hook_mlp_out"},
    {"hook_embed", "hook_out"},
    {"hook_attn_scores", "hook_z"},
    {"hook_q", "hook_k", "hook_v"},
    {"hook_state", "hook_delta_out"},
    {"hook_x_scale", "hook_x_int8"},
    {"hook_pre", "hook_pre_linear", "hook_expert_out"},
)  # one mistake in all
# Steps that one mistake may be in together.
PAIRS = (
    ("hook_rot_q", "hook_rot_k"),
    ("hook_q", "hook_k"),
    ("hook_attn_scores", "hook_z"),
    ("hook_rot_k", "hook_v"),
    ("hook_resid_mid", "hook_resid_post"),
    ("hook_state", "hook_delta_out"),
    ("hook_scale", "hook_normalized"),
)
BETWEEN_TOKENS = (
    "hook_pattern",
    *("hook_q", "hook_k", "hook_v", "hook_rot_q", "hook_rot_k"),
    *("hook_attn_scores", "hook_z"),
)
# What one mistake may be in, among the steps of one kind.
GROUPS = (
    "",
    r"\.attn\.",
    r"\.mlp\.",
    r"\.[qkv]_proj\.",
    r"\.ln",
    "sub_norm",
    "gate_proj|up_proj",
    r"\.(o|down)_proj\.",
)
FLIPPED_ROWS, FLIP_ERROR = 0.4, 0.03  # of a site with int8 inside: the share of tokens, and their error, of flips
SAME_CONSTANT = 1e-5  # how near to the right constant, relative, one is the right one
NAMED = 0.9  # the cost of an edit that has a name
# Of an edit that rounds: the share of values that may be rounded the other way, and how much larger than the largest
# error without it they may be; of a thin site, the share of the error that may be left.
ROUNDED_OTHERWISE, FLIP_SIZE, ROUNDING_LEFT = 0.03, 2.5, 0.15
ALL_AT_ONCE = 0.2  # how much less an edit of many steps of one kind costs: an engine has one function for them
# Of two edits of one step: what each costs at most, the share of the error that is left by the first of them, and how
# many such are tried with every other one.
MOST_OF_A_PAIR, NEARER, NEAREST = 1.4, 0.97, 6
ENOUGH = 0.35  # descriptions that cost so much more than the simplest that explains a site are not tried


class Target:
    """An engine's tensor that is wrong, and what "equal" means for it."""

    def __init__(self, name: str, right: Array, theirs: Array, alone: bool, dtype: str, ternary: bool) -> None:
        self.name, self.theirs, self.alone = name, theirs.astype(np.float64), alone
        self.by_head = is_by_head(name)
        self.exact = right.dtype.kind == "i"
        self.flips = ternary and not alone
        kind = op_kind(name, lambda _: ternary)
        depth = None if alone else 0
        self.relative = max(tolerance_of(kind, False).relative(depth), 4 * EPSILON)
        if dtype in SPACING:
            self.relative, self.exact = SPACING[dtype] * (4 if alone else 12), False
        self.row_axes = (2,) if self.by_head else tuple(range(1, right.ndim))
        self.right = right.astype(np.float64)
        with np.errstate(all="ignore"):
            size = np.where(np.isfinite(self.theirs), np.abs(self.theirs), 0).max(axis=self.row_axes, keepdims=True)
        self.allowed = self.relative * np.maximum(size, float(self.by_head))
        self.allowed += float(dtype in SPACING and kind == "activation int8")
        self.right_close = self.close(self.right)
        self.error = self.distance(self.right)

    def close(self, mine: Array) -> NDArray[np.bool_]:
        mine = mine.reshape(self.theirs.shape).astype(np.float64)
        with np.errstate(all="ignore"):
            if self.exact:
                return np.asarray(mine == self.theirs)
            both = np.isneginf(mine) & (self.theirs <= MASKED)
            return np.asarray((np.abs(mine - self.theirs) <= self.allowed) | both)

    def distance(self, mine: Array) -> float:
        """Relative L2, over what is finite in both."""
        a, b = self.theirs, mine.reshape(self.theirs.shape).astype(np.float64)
        good = np.isfinite(a) & np.isfinite(b)
        if not good.any() or (np.isnan(b) & ~np.isnan(a)).any():
            return np.inf
        return float(np.linalg.norm((a - b)[good]) / max(float(np.linalg.norm(a[good])), 1e-30))

    @property
    def agrees(self) -> bool:
        return self.fits_but_for_flips(self.right_close, self.right)

    def fits_but_for_flips(self, close: NDArray[np.bool_], mine: Array) -> bool:
        if close.all():
            return True
        if self.exact and self.name.endswith("hook_x_int8"):  # x * scale within rounding of a half
            apart = np.abs(mine.reshape(self.theirs.shape) - self.theirs)
            return bool(apart.max() <= 1 and (~close).mean() <= 0.002)
        if not self.flips or self.by_head:
            return False
        rows = ~close.all(axis=self.row_axes)
        with np.errstate(all="ignore"):
            error = np.linalg.norm((mine.reshape(self.theirs.shape) - self.theirs)[rows])
        return bool(rows.mean() <= FLIPPED_ROWS and error <= FLIP_ERROR * np.linalg.norm(self.theirs[rows]))

    def is_rounded(self, mine: Array, close: NDArray[np.bool_], without: Target) -> bool:
        """Whether a tensor of an edit that rounds fits: a few values lie on the other side of a border.

        without: the same tensor without the edit.
        """
        if self.distance(mine) <= ROUNDING_LEFT * without.error:
            return True
        if not self.alone:
            return False
        wrong = ~without.right_close
        if 2 * (wrong & close).sum() < wrong.sum():  # it leaves most of what was wrong
            return False
        apart = np.abs(mine.reshape(self.theirs.shape) - self.theirs)[~close]
        return bool((~close).mean() <= ROUNDED_OTHERWISE and (apart <= FLIP_SIZE * without.largest).all())

    @lazy_property
    def largest(self) -> float:
        """The largest difference of the right tensor."""
        with np.errstate(all="ignore"):
            apart = np.abs(self.theirs - self.right)
        return float(np.where(np.isfinite(apart), apart, 0).max())

    def match(self, mine: Array, rounds: bool = False) -> tuple[()] | tuple[int, tuple[int, ...]] | None:
        """Where a computed tensor fits the engine's: () everywhere; None if it explains nothing.

        (an axis, its indices): there only, and at the others the right tensor fits.
        """
        close = self.close(mine)
        if rounds and self.is_rounded(mine, close, self):
            return ()
        if self.fits_but_for_flips(close, mine.astype(np.float64)):
            changed = ~self.right_close & close
            few = self.exact and not close.all() and (~close).sum() > 0.1 * (~self.right_close).sum()
            return () if changed.any() and not few else None
        wrong = ~self.right_close
        if not (wrong & close).any():
            return None
        for axis in range(close.ndim) if self.alone else (0,):
            others = tuple(i for i in range(close.ndim) if i != axis)
            bad = wrong.any(axis=others)
            if not bad.all() and np.take(close, np.flatnonzero(bad), axis=axis).all():
                return axis, tuple(np.flatnonzero(bad).tolist())
        return None


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


class Evidence:
    """One run of a setting, each step fed the engine's tensors. `wrong`: those that the steps do not give, in order.

    without: the evidence of the setting without edits that round, whose tensors may differ in a few values.
    """

    def __init__(self, setting: Setting, view: View, without: Evidence | None = None) -> None:
        self.setting, self.view = setting, view
        self.dtype = str(getattr(view, "engine_dtype", None) or "float32")
        if self.dtype == "float32":  # where a tensor was recorded in a narrower float, so were most
            recorded = {recorded_dtype(tensor_of(view, name)) for name in view}
            self.dtype = max(recorded, key=lambda dtype: RECORDED_ROUNDING.get(dtype, 0.0), default="")
        self.steps: dict[str, Step] = {}
        self.targets: dict[str, Target] = {}
        self.sources: dict[str, list[str]] = {}  # of each step: those that computed its inputs and were not recorded
        self.recorded: set[str] = set()
        self.settled: dict[str, Array] = {}  # the tensors that the run goes on with
        setting.run(names_filter=(), settle=self._settle)
        self.wrong = [n for n, target in self.targets.items() if not (target.agrees or self._is_rounded(n, without))]

    def _is_rounded(self, name: str, without: Evidence | None) -> bool:
        if without is None or not any(step in self.setting.edits for step in self.stretch(name)):
            return False
        target = self.targets[name]
        return target.is_rounded(target.right, target.right_close, without.targets[name])

    def _settle(self, step: Step) -> Array:
        self.settled[step.name] = result = self._judge(step)
        step.result = result  # a tape of these steps goes on with it as well
        return result

    def _judge(self, step: Step) -> Array:
        step.seen = dict(step.seen)
        arrays = [x for x in step.inputs if isinstance(x, np.ndarray)]
        if step.name.endswith("hook_attn_scores"):
            arrays = arrays[:2]
        sources = self._named_sources(step)
        if sources:
            arrays = sources
        self.sources[step.name] = [
            name for name, earlier in step.seen.items()
            if name not in self.recorded and any(np.may_share_memory(x, earlier) for x in arrays)
        ]  # fmt: skip
        self.steps[step.name] = step
        theirs = self._recorded_as(step)
        if theirs is None:
            return step.result
        right = step.result if theirs.shape == step.result.shape else step.result[-len(theirs) :]
        stretch = self.stretch(step.name)
        ternary = any(name.endswith("hook_x_int8") for name in self.steps)
        target = Target(step.name, right, theirs, len(stretch) == 1, self.dtype, ternary)
        self.targets[step.name] = target
        whole = theirs.shape == step.result.shape and np.isfinite(np.where(np.isneginf(theirs), 0, theirs)).all()
        if not whole:
            return step.result
        self.recorded.add(step.name)
        return like(theirs, step.result)

    def _named_sources(self, step: Step) -> list[Array]:
        """The tensors that a step is computed from, if all are steps: its inputs may be copies of these."""
        config = self.setting.config
        if not step.name.startswith("blocks.") or step.name.endswith(("product", "proj_scaled")):
            return []
        if find_step(step.name, config).kind in (LINEAR, NORM):
            return []
        inputs = op_inputs(step.name, config)
        return [step.seen[name] for name in inputs] if all(name in step.seen for name in inputs) else []

    def _recorded_as(self, step: Step) -> Array | None:
        """The engine's tensor for a step, in the step's shape; logits may be the last token's."""
        name, shape = step.name, step.result.shape
        names = [name]
        if name.endswith("hook_resid_post"):
            names.append(f"blocks.{int(name.split('.')[1]) + 1}.hook_resid_pre")
        for theirs in (np.asarray(self.view[each]) for each in names if each in self.view):
            if fits(shape, theirs.shape) or theirs.size == step.result.size:
                theirs = np.where(theirs <= MASKED, -np.inf, theirs) if name.endswith("scores") else theirs
                return theirs.reshape(shape)
            if name == "lm_head.hook_out" and theirs.size == shape[-1]:
                return theirs.reshape(1, -1)
        return None

    def example(self, name: str) -> str:
        """One value of a wrong tensor, worked through; "" of one whose shape is another."""
        step, target = self.steps[name], self.targets[name]
        return example(step, target.theirs, target.right) if target.theirs.shape == step.result.shape else ""

    def stretch(self, name: str) -> list[str]:
        """The steps from recorded tensors to this one, itself first, then backwards."""
        needed, order = {name}, [name]
        for earlier in reversed(list(self.steps)):
            if earlier in needed:
                order += [earlier] if earlier != name else []
                needed.update(self.sources[earlier])
        return order

    @lazy_property
    def copies(self) -> int:
        """How many edited runs are computed at once: what a small model's run costs is its calls, not its numbers."""
        if self.setting.config.has_states:  # which are of one sequence
            return 1
        numbers = len(self.setting.tokens) * max(self.setting.config.hidden_size, self.setting.config.intermediate_size)
        return max(1, min(32, 200_000 // numbers))

    @lazy_property
    def tape(self) -> dict[str, Step]:
        """The steps of this run with so many copies of the tokens."""
        tape: dict[str, Step] = {}

        def settle(step: Step) -> Array:
            one_each = (1,) * (step.result.ndim - 1)
            times = (1, self.copies, 1) if is_by_head(step.name) else (self.copies, *one_each)
            step.result = np.tile(self.settled[step.name], times)
            tape[step.name] = step
            return step.result

        self._of_copies([{}] * self.copies, set()).run(names_filter=(), settle=settle, copies=self.copies)
        return tape

    def _of_copies(self, trials: Sequence[Mapping[str, Edit]], failed: set[int]) -> Setting:
        """The setting for a run of copies, each with its own edits as well; `failed`: see `edit_copies`."""
        each = [self.setting.with_edits(edits).edits for edits in trials]
        names = {name for edits in each for name in edits}
        edits = {n: edit_copies([one.get(n) for one in each], len(self.setting.tokens), failed) for n in names}
        return replace(self.setting, edits=edits)

    def compute_all(self, target: str, trials: Sequence[Mapping[str, Edit]]) -> list[Array | None]:
        """`compute` of several edits, in as few runs as possible."""
        if self.copies == 1 or len(trials) == 1 or all(list(edits) == [target] for edits in trials):
            return [self.compute(target, edits) for edits in trials]
        if len(trials) > self.copies:
            return self.compute_all(target, trials[: self.copies]) + self.compute_all(target, trials[self.copies :])
        failed = set[int]()
        changed = self._of_copies([*trials, *[{}] * (self.copies - len(trials))], failed)
        try:
            whole = changed.run(target.__eq__, target, self.tape, copies=self.copies)[target]
        except IMPOSSIBLE:
            half = len(trials) // 2
            return self.compute_all(target, trials[:half]) + self.compute_all(target, trials[half:])
        parts = np.split(whole, self.copies, axis=int(is_by_head(target)))
        return [None if i in failed else self._as_recorded(target, parts[i]) for i in range(len(trials))]

    def compute(self, target: str, edits: Mapping[str, Edit]) -> Array | None:
        """The tensor with these edits made; None where they cannot be."""
        with np.errstate(all="ignore"):
            try:
                if list(edits) == [target]:
                    step = self.steps[target]
                    edit = self.setting.with_edits(edits).edits[target]
                    result = edit(step, step.compute, *step.inputs)
                else:
                    result = self.setting.with_edits(edits).run(target.__eq__, target, self.steps)[target]
            except IMPOSSIBLE:
                return None  # not every edit can be made of every shape
        return self._as_recorded(target, result)

    def _as_recorded(self, target: str, result: Array) -> Array | None:
        shape = self.steps[target].result.shape
        if result.size != np.prod(shape):
            return None
        theirs = self.targets[target].theirs
        return result.reshape(shape)[-len(theirs) :] if theirs.shape != shape else result


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

    def _first_half(self) -> NDArray[np.bool_]:
        """The values of the first half of the tokens: constants are solved for there, and must hold on the others."""
        shape = self.target.theirs.shape
        axis = int(self.target.by_head)
        half = np.arange(shape[axis]) < -(-shape[axis] // 2)
        return np.broadcast_to(half.reshape([-1 if i == axis else 1 for i in range(len(shape))]), shape)

    def _trials(self) -> list[Trial]:
        """What is tried, the simplest first."""
        trials: list[Trial] = []
        first_right = not self.target.by_head and bool(self.target.right_close[:1].all())
        for unit in self.units():
            self.evidence.setting.check()
            step = self.evidence.steps[unit[0]]
            distance = 0.02 * min(10, self.stretch.index(unit[0])) if len(self.stretch) > 1 else 0.0
            if len(self.stretch) > 1 and first_right != any(name.endswith(BETWEEN_TOKENS) for name in unit):
                distance += 1  # the first token sees only itself: it tells attention from all else
            if len(unit) > 2:
                distance -= ALL_AT_ONCE
            own: list[Description | Family] = [_named(each) for each, names in self.known if set(unit) <= set(names)]
            for module in (step_edits, delta_steps, expert_steps, roundings):
                own += module.descriptions(step)
            own += [*step_edits.families(step), *delta_steps.families(step)]
            own += solved(step, self.target) if unit == (self.name,) else ()
            for d in own:
                changes_input = "{in" in d.text and "is taken for" not in d.text
                of_products = len(unit) > 1 and step.name.endswith("_proj.hook_out")  # whose inputs several steps make
                if changes_input and len(self.stretch) > 1 and not of_products and self._made_in_stretch(step, d.text):
                    continue  # the same change of the step that computes this input is tried
                slow = 0.15 if isinstance(d, Family) and not self.target.alone else 0.0
                trials.append((d.cost + distance + slow, unit, d))
        for each, names in self.known:
            parts = [tuple(n for n in names if re.search(group, n)) for group in GROUPS]
            for part in dict.fromkeys(parts):
                if len({name.rpartition(".")[2] for name in part}) > 1:  # no unit has steps of several kinds
                    trials.append((NAMED, part, _named(each)))
        return sorted(trials, key=lambda trial: trial[0])

    def explanations(self) -> list[Explanation]:
        """What explains the whole tensor, the simplest first; empty if nothing does."""
        trials, good, is_zero = self._trials(), list[Explanation](), not self.target.theirs.any()
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
        closest = min((e.error for e in good), default=0.0)
        near = [e for e in good if e.error <= (3 * closest if e.rounds else 20 * closest) + 8 * EPSILON]
        near.sort(key=lambda e: e.cost)
        return [e for i, e in enumerate(near) if not any(e.says_the_same(earlier) for earlier in near[:i])]

    def pairs(self, made: Sequence[Description]) -> list[Explanation]:
        """What explains the tensor of one step by two edits of it: neither does alone.

        made: the edits that explain other tensors. One of the two is one of these, or among those that come nearest.
        """
        if not self.target.alone:
            return []
        step, near, good = self.evidence.steps[self.name], list[tuple[float, Description]](), list[Explanation]()
        own = [d for _, unit, d in self._trials() if isinstance(d, Description) and unit == (self.name,)]
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
            by_kind.setdefault(name.rpartition(".")[2], []).append(name)
        for names in by_kind.values():
            groups = [[n for n in names if re.search(group, n)] for group in GROUPS]
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


def _named(mistake: Hypothesis) -> Description:
    return Description(NAMED, mistake.cause, mistake.edit, mistake, mistake.rounds)


def _by_constants(family: Family, constant: Callable[[dict[str, float]], float]) -> Edit:
    return lambda step, compute, *inputs: family.edit(constant(constants(step)))(step, compute, *inputs)


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


def solved(step: Step, target: Target) -> Iterator[Description]:
    """Descriptions that the engine's tensor itself suggests."""
    theirs, right, kind = target.theirs, target.right, step.name.rpartition(".")[2]
    if theirs.shape != step.result.shape or not np.isfinite(np.where(np.isneginf(theirs), 0, theirs)).all():
        return
    if kind == "hook_x_int8":
        low, high = theirs.min(), theirs.max()
        clipped = instead(lambda x, s: np.clip(np.rint(x * s), low, high))
        yield Description(1, f"activations are clipped to {low:g} and {high:g}", clipped)
        yield from _rounding(step, theirs)
        if offset := float(np.median(theirs - right)):
            moved_by = after(lambda x: np.clip(x.astype(int) + round(offset), -128, 127))
            yield Description(1.2, f"{offset:g} is added to the int8 values", moved_by)
    if kind == "hook_embed":
        table, ids = step.inputs
        rows = table.rows(slice(None), np.float32)
        taken = np.array([int(np.abs(rows - row).max(axis=1).argmin()) for row in theirs])
        shifts = set(((taken - ids) % len(rows)).tolist())
        if len(shifts) == 1 and (shift := shifts.pop()):
            yield Description(1, f"the row of id + {shift} is taken", step_edits.take_row(shift))
        elif shifts != {0}:
            yield Description(1.5, f"the rows of other ids are taken: {taken.tolist()}", before(1, lambda ids: taken))
    if kind in ("hook_scale", "hook_x_scale"):
        yield from _cut_rows(step, target)
    if len(step.inputs) == 2 and isinstance(step.inputs[1], LinearWeight):
        yield from _cut_sums(step, target)
    yield from _other_orders(step, target)
    if step.result.dtype.kind == "f" and not target.by_head and theirs.ndim > 1:
        rows = np.flatnonzero((~target.right_close).reshape(len(theirs), -1).any(axis=1))
        yield from _sums_of_two(step, target, rows)


def _other_orders(step: Step, target: Target) -> Iterator[Description]:
    """The right tensor with its tokens, heads, columns or keys in an order that the engine's tensor shows."""
    allowed = np.broadcast_to(target.allowed, target.theirs.shape) * (not target.exact)
    for axis, word in enumerate(axis_words(target.right.shape, target.by_head, len(step.setting.tokens))):
        theirs, right, room, close = (
            np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)
            for x in (np.maximum(target.theirs, -1e30), np.maximum(target.right, -1e30), allowed, target.right_close)
        )
        order, wrong = np.arange(len(theirs)), np.flatnonzero(~close.all(axis=1)).tolist()
        if len(wrong) > 1024:
            continue
        for i in wrong:
            equal = np.flatnonzero((np.abs(right - theirs[i]) <= room[i]).all(axis=1))
            if not len(equal):
                break
            order[i] = equal[0]
        else:
            if (
                wrong
                and wrong == list(range(wrong[0], len(order)))
                and len(apart := set((order - np.arange(len(order)))[wrong])) == 1
            ):
                by = int(apart.pop())
                last = f"last {word} is that" if len(wrong) == 1 else f"last {len(wrong)} {word}s are those"
                text = f"its {last} {abs(by)} {'before' if by < 0 else 'after'}"
                yield Description(1.7, text, after(partial(_last_moved, count=len(wrong), by=by, axis=axis)))
                continue
            pairs = ", ".join(f"{i} has that of {order[i]}" for i in wrong[:4])
            text = f"its {word}s are in another order: {word} {pairs}{', ...' * (len(wrong) > 4)}"
            change = partial(_in_order, order=order, axis=axis, joined=target.right.ndim == 2)
            yield Description(1.8, text, after(change))


def _last_moved(x: Array, count: int, by: int, axis: int) -> Array:
    places = np.arange(x.shape[axis])
    places[-count:] += by
    return x.take(places, axis)


def _in_order(x: Array, order: NDArray[np.int64], axis: int, joined: bool) -> Array:
    """joined: the order is one of the rows of a norm over heads, which `after` passes by token and head."""
    return (x.reshape(-1, x.shape[-1]) if joined else x).take(order, axis)


def _rounding(step: Step, theirs: Array) -> Iterator[Description]:
    """round(x * scale + c) or round(x * scale * c): the constants that give every integer."""
    v = step.inputs[0].astype(np.float64) * step.inputs[1]
    inside = np.abs(theirs) < min(127, np.abs(theirs).max())
    if not inside.any():
        return
    v, t = v[inside], theirs[inside]
    low, high = (t - 0.5 - v).max(), (t + 0.5 - v).min()
    if low < high and (c := _plainest(low, high)):
        added = instead(lambda x, s: np.clip(np.rint(x * s + np.float32(c)), -128, 127))
        yield Description(1.2, f"{c:g} is added to x * scale before the rounding", added)
    big = np.abs(v) > 1
    if big.any():
        ends = np.sort(np.stack([(t - 0.5)[big] / v[big], (t + 0.5)[big] / v[big]]), axis=0)
        f = _plainest(ends[0].max(), ends[1].min())
        if ends[0].max() < ends[1].min() and f not in (0.0, 1.0):
            multiplied = instead(lambda x, s: np.clip(np.rint(x * s * np.float32(f)), -128, 127))
            yield Description(1.2, f"x * scale is multiplied by {f:g} before the rounding", multiplied)


def _plainest(low: float, high: float) -> float:
    """The number between two with the fewest digits."""
    middle = (low + high) / 2
    return next((c for n in range(1, 9) if low < (c := float(f"{middle:.{n}g}")) < high), middle)


def _cut_rows(step: Step, target: Target) -> Iterator[Description]:
    """How many columns a norm's length, or an activation scale, is taken of."""
    x = step.inputs[0].astype(np.float64)
    n = x.shape[1]
    if step.name.endswith("hook_x_scale"):
        for end, columns in (("first", x), ("last", x[:, ::-1])):
            scales = 127 / np.maximum(np.maximum.accumulate(np.abs(columns), axis=1), 1e-5)
            for k in np.flatnonzero((np.abs(scales - target.theirs) <= target.allowed).all(axis=0))[:3].tolist():
                part = slice(0, k + 1) if end == "first" else slice(n - k - 1, n)
                text = f"the activation scale takes the largest of the {end} {k + 1} of {n} columns only"
                yield Description(1.2, text, before(0, itemgetter((slice(None), part))))
        return
    sums, count, eps = np.cumsum(np.square(x), axis=1), np.arange(1, n + 1), float(step.inputs[1])
    for words, mean in (("", sums / count), (", divided by all", sums / n)):
        fitting = (np.abs(np.sqrt(mean + eps) - target.theirs) <= target.allowed).all(axis=0)
        for k in np.flatnonzero(fitting)[:3].tolist():
            text = f"the mean of squares runs over the first {k + 1} of {n} columns only{words}"
            yield Description(1.2, text, instead(partial(_length_of, columns=k + 1, divisor=n if words else k + 1)))


def _length_of(x: Array, eps: float, columns: int, divisor: int) -> Array:
    return np.asarray(np.sqrt(np.square(x[:, :columns].astype(np.float64)).sum(-1, keepdims=True) / divisor + eps))


def _cut_sums(step: Step, target: Target) -> Iterator[Description]:
    """Where a product's sums stop or start, from one of them."""
    x, m = step.inputs[0].astype(np.float64), matrix(step.inputs[1]).astype(np.float64)
    i, j = np.unravel_index(int(np.abs(target.theirs - target.right).argmax()), target.theirs.shape)
    sums = np.cumsum(x[i] * m[j])
    n, slack = len(sums), 0.0 if target.exact else float(np.broadcast_to(target.allowed, target.theirs.shape)[i, j])
    for k in np.flatnonzero(np.abs(sums - target.theirs[i, j]) <= slack)[:20].tolist():
        yield Description(1.1, f"the sums stop after {k + 1} of {n} inputs", scale_inputs(0, k + 1, 1, others=0))
    for k in np.flatnonzero(np.abs(sums[-1] - sums - target.theirs[i, j]) <= slack)[:20].tolist():
        yield Description(1.1, f"the sums start at input {k + 1} of {n}", scale_inputs(k + 1, None, 1, others=0))
    missing = sums[-1] - target.theirs[i, j]
    before_sum = np.concatenate([[0.0], sums])
    for width in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        if width >= n:
            break
        for a in np.flatnonzero(np.abs(before_sum[width:] - before_sum[:-width] - missing) <= slack)[:10].tolist():
            yield Description(1.3, f"inputs {a} to {a + width - 1} are left out", scale_inputs(a, a + width, 0))


def _sums_of_two(step: Step, target: Target, rows: NDArray[np.int64]) -> Iterator[Description]:
    """a A + b B, of tensors that the run has, the right result among them."""
    block = step.name.split(".")[:2]
    given = {
        name: x
        for name, x in step.seen.items()
        if x.size == step.result.size
        and x.dtype == step.result.dtype
        and (name.split(".")[:2] == block or "resid" in name or "embed" in name)
        and np.isfinite(x).all()
    }
    arrays = {"": target.right.astype(step.result.dtype), **dict(list(given.items())[-16:])}
    columns = {n: x.reshape(target.theirs.shape)[rows].reshape(-1).astype(np.float64) for n, x in arrays.items()}
    y = target.theirs[rows].reshape(-1)
    limit = np.broadcast_to(target.allowed, target.theirs.shape)[rows].reshape(-1)
    for a, b in combinations(arrays, 2):
        pair = np.stack([columns[a], columns[b]], axis=1)
        gram = pair.T @ pair
        if np.linalg.det(gram) <= 1e-9 * gram[0, 0] * gram[1, 1]:
            continue
        factors = np.linalg.solve(gram, pair.T @ y)
        if (np.abs(pair @ factors - y) > 4 * limit).mean() > 0.01:
            continue
        named = [_name_of(float(factor), step) for factor in factors]
        nouns = ["its right value" if n == "" else f"{{{n}}}" for n in (a, b)]
        terms = [n if w == "1" else f"{w} times {n}" for (w, _), n in zip(named, nouns, strict=True) if w != "0"]
        yield Description(1.5, f"it is {' + '.join(terms)}", _sum_edit((a, b), [c for _, c in named], step.name))


def _name_of(factor: float, step: Step) -> tuple[str, step_edits.Constant]:
    """The simplest name of a factor, and its value by `constants`."""
    if abs(factor) <= 1e-6:
        return "0", lambda _: 0.0
    return next(names_of(factor, step, 1e-5), (f"{factor:.6g}", lambda _: factor))


def _sum_edit(names: tuple[str, str], factors: list[step_edits.Constant], origin: str) -> Edit:
    def edit(step: Step, compute: Edit, *inputs: Any) -> Array:
        right, numbers = compute(*inputs), constants(step)
        parts = [right if n == "" else step.seen[moved(n, origin, step)].reshape(right.shape) for n in names]
        first, second = (np.float32(f(numbers)) * part for f, part in zip(factors, parts, strict=True))
        return (first + second).astype(right.dtype)

    return edit


# -- from a site to the whole run --------------------------------------------------------------------------------------


@dataclass
class Finding:
    """One explanation of the first wrong tensor.

    name: of a known mistake, else "described".   edits: by step, for the whole run.   left: the tensors that are still
    wrong with these edits, in order.   whole: a known mistake, in all its steps.
    shows_flips: the engine's int8 activations are all known, so flips of them that move its logits do not speak
    against the cause.   made: the edit, for other steps.   tensor: the one that it explains, which is not `left`.
    moved: the first one left is a later one.
    """

    name: str
    cause: str
    remedy: str
    example: str
    edits: dict[str, Edit]
    left: list[str]
    whole: bool = False
    rounds: bool = False
    shows_flips: bool = False
    made: Description | None = None
    tensor: str = ""
    moved: bool = False


@np.errstate(all="ignore")  # most descriptions are wrong, and some overflow
def find(
    setting: Setting,
    view: View,
    report: Report,
    known: Sequence[Hypothesis] = (),
    made: Sequence[Description] | None = None,
) -> list[Finding]:
    """Explanations of the engine's first wrong tensor. Those that leave the fewest tensors wrong come first.

    known: the edits that have a name, which are tried before others.
    made: None for explanations by one edit; by two, these among them (`Site.pairs`).
    """
    evidence = Evidence(setting, view)
    if not evidence.wrong:
        return []
    name, findings = evidence.wrong[0], []
    shown = evidence.example(name)
    site, order = Site(evidence, name, report, known), list(evidence.steps)
    for explanation in (site.explanations() if made is None else site.pairs(made))[:6]:
        finding = _whole(evidence, explanation, shown) or _spread_out(evidence, explanation, shown)
        if finding is None or name in finding.left:
            continue
        cause = explanation.known.cause if explanation.known else explanation.text
        finding.made = replace(explanation, text=cause)
        finding.tensor = name
        finding.moved = bool(finding.left) and order.index(finding.left[0]) > order.index(name)
        findings.append(finding)
        if not finding.left and len(findings) >= 3:
            break
    if any(finding.whole for finding in findings):  # other known mistakes do it in a part of their steps
        findings = [finding for finding in findings if finding.whole or finding.name == "described"]
    int8 = [n for n in evidence.steps if n.endswith("hook_x_int8")]
    for finding in findings:
        finding.shows_flips = bool(int8) and evidence.recorded.issuperset(int8) and not finding.left
    return sorted(findings, key=lambda finding: len(finding.left))


def _whole(evidence: Evidence, explanation: Explanation, shown: str) -> Finding | None:
    """A known mistake in all its steps, if that leaves nothing wrong."""
    known = explanation.known
    if known is None or explanation.place:
        return None
    edits = {name: known.edit for name, step in evidence.steps.items() if known.is_in(step)}
    left = tensors_left(evidence.setting.with_edits(edits), evidence.view, evidence if known.rounds else None)
    if left != []:
        return None
    return Finding(known.name, known.cause, known.remedy, shown, edits, [], whole=True, rounds=known.rounds)


def _spread_out(evidence: Evidence, explanation: Explanation, shown: str) -> Finding | None:
    """An edit in all steps in which it holds."""
    setting, view = evidence.setting, evidence.view
    edits, without = spread(evidence, explanation), evidence if explanation.rounds else None
    left = tensors_left(setting.with_edits(edits), view, without)
    if left is None:
        return None
    for wider in wider_scopes(evidence, explanation, edits) if len(edits) > 1 or not left else ():
        if tensors_left(setting.with_edits(wider), view, without) == left:
            edits = wider
            break
    first, known = evidence.steps[explanation.names[0]], explanation.known
    scope = scope_in_words(edits, evidence.steps)
    place = f" ({explanation.place})" if explanation.place else ""
    cause = f"{scope}: {say(explanation.text, first, len(set(map(role, edits))) > 1)}{place}"
    name, advice = ("described", "") if known is None else (known.name, f"{known.remedy} ")
    return Finding(name, cause, advice + remedy(first), shown, edits, left, rounds=explanation.rounds)


def tensors_left(setting: Setting, view: View, without: Evidence | None = None) -> list[str] | None:
    """The tensors that are wrong in this setting; None where it cannot be computed.   without: see `Evidence`."""
    try:
        return Evidence(setting, view, without).wrong
    except IMPOSSIBLE:
        return None


def wider_scopes(evidence: Evidence, explanation: Explanation, edits: dict[str, Edit]) -> Iterator[dict[str, Edit]]:
    """The same edit in more steps, the widest set first: a mistake may not show in every step that has it."""
    kinds, roles = {n.rpartition(".")[2] for n in edits}, {role(n) for n in edits}
    layers = {layer_of(n) for n in edits}
    shapes = _shape_of(evidence.steps[explanation.names[0]])
    for kinds_only, every_layer in ((True, True), (False, True), (True, False)):
        names = [n for n in evidence.steps if (n.rpartition(".")[2] in kinds if kinds_only else role(n) in roles)]
        names = [n for n in names if (every_layer or layer_of(n) in layers) and shapes == _shape_of(evidence.steps[n])]
        if kinds_only:  # not in a step that it cannot change: it would undo another mistake there
            own = {n for n in names if n in edits or (role(n) in roles and n not in evidence.setting.edits)}
            names = [n for n in names if n in own or _changes(evidence.steps[n], explanation.edit)]
        if len(names) > len(edits) and (len(edits) > 1 or not kinds_only):
            yield {**dict.fromkeys(names, explanation.edit), **edits}


def _changes(step: Step, edit: Edit) -> bool:
    """Whether an edit changes a step, if only by a bit."""
    try:
        right = step.compute(*step.inputs)
        return not np.array_equal(edit(step, step.compute, *step.inputs), right, equal_nan=right.dtype.kind == "f")
    except IMPOSSIBLE:
        return False


def _shape_of(step: Step) -> list[type]:
    return [type(x) for x in step.inputs]


@np.errstate(all="ignore")
def work_through(setting: Setting, view: View, first: str | None = None) -> str:
    """The line of the reference to compare with, and one value. "" where nothing is wrong, or all is zero.

    first: the wrong tensor that is shown; None, and if all its values may be rounding: the first wrong one.
    """
    evidence = Evidence(setting, view)
    if first not in evidence.targets or evidence.targets[first].right_close.all():
        first = next(iter(evidence.wrong), None)
    if first is None or not evidence.targets[first].theirs.any():
        return ""
    return f"{remedy(evidence.steps[first])}\n{evidence.example(first)}".strip()


def spread(evidence: Evidence, explanation: Explanation) -> dict[str, Edit]:
    """The explanation's edit in all steps where it explains the engine's tensors."""
    edits = dict.fromkeys(explanation.names, explanation.edit)
    own_kinds = {name.rpartition(".")[2] for name in explanation.names}
    kinds = own_kinds.union(*(group for group in RELATED if own_kinds & group))
    for name in evidence.wrong[1:]:
        if name in edits:
            continue
        layer, stretch = layer_of(name), evidence.stretch(name)
        moved_there = (
            n if layer is None or layer_of(n) is None else f"blocks.{layer}.{role(n)}" for n in explanation.names
        )
        tries = [[n for n in moved_there if n in stretch]]
        tries.append([n for n in stretch if n.rpartition(".")[2] in own_kinds])
        tries += [[n] for n in stretch[:8] if n.rpartition(".")[2] in kinds]
        for unit in tries:
            if unit and all(n in evidence.steps for n in unit):
                wider = {n: e for n, e in edits.items() if n in stretch} | dict.fromkeys(unit, explanation.edit)
                mine = evidence.compute(name, wider)
                if mine is not None and evidence.targets[name].match(mine, explanation.rounds) == ():
                    edits.update(dict.fromkeys(unit, explanation.edit))
                    break
    return edits


def differing_tensors(one: Setting, other: Setting) -> list[str]:
    """The tensors in which two explanations differ by more than rounding, in order. Empty if they are one."""
    first, second = one.run(), other.run()
    return [name for name, x in first.items() if name in second and not is_same(second[name], x)]
