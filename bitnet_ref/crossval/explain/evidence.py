"""One run of the reference in which each step is fed the engine's own tensors, as far as they were recorded.

So each wrong tensor is judged by itself, whatever earlier errors there are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...families.family import LINEAR, NORM, Edit, like
from ...reference.layers import Array
from ...system.lazy import lazy_property
from ..compare import View, fits
from ..metrics import MASKED, recorded_dtype, tensor_of
from ..names import find_step, is_by_head, op_inputs, op_kind
from ..tolerances import EPSILON, RECORDED_ROUNDING, tolerance_of
from ..types import Mask
from .variants import IMPOSSIBLE, Setting, Step, edit_copies
from .wording import example

# The relative step of each narrow float; for engines that round only the inputs of their products, the step of those.
SPACING = RECORDED_ROUNDING | {"8-bit activations": 2.0**-7}
SPACING |= {f"{dtype} activations": SPACING[dtype] for dtype in ("bfloat16", "float16")}
FLIPPED_ROWS, FLIP_ERROR = 0.4, 0.03  # of a site with int8 inside: the share of tokens, and their error, of flips
# An edit that rounds may round this share of the values the other way; their error may be so many times the largest one
# without it. At a thin site this share of the error may be left.
ROUNDED_OTHERWISE, FLIP_SIZE, ROUNDING_LEFT = 0.03, 2.5, 0.15


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

    def close(self, mine: Array) -> Mask:
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

    def fits_but_for_flips(self, close: Mask, mine: Array) -> bool:
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

    def is_rounded(self, mine: Array, close: Mask, without: Target) -> bool:
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
        self.last_step, self.last_result = Step("", setting, {}), np.zeros(0)  # see `_formula`
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
                    result = edit(step, self._formula(step), *step.inputs)
                else:
                    result = self.setting.with_edits(edits).run(target.__eq__, target, self.steps)[target]
            except IMPOSSIBLE:
                return None  # not every edit can be made of every shape
        return self._as_recorded(target, result)

    def _formula(self, step: Step) -> Callable[..., Array]:
        """The step's, which is computed once with its own inputs: most edits change what it gives."""
        if step is not self.last_step:
            self.last_step, self.last_result = step, step.compute(*step.inputs)
        right = self.last_result

        def compute(*inputs: Any) -> Array:
            is_right = len(inputs) == len(step.inputs) and all(map(operator.is_, inputs, step.inputs))
            return right.copy() if is_right else step.compute(*inputs)

        return compute

    def _as_recorded(self, target: str, result: Array) -> Array | None:
        shape = self.steps[target].result.shape
        if result.size != np.prod(shape):
            return None
        theirs = self.targets[target].theirs
        return result.reshape(shape)[-len(theirs) :] if theirs.shape != shape else result


def tensors_left(setting: Setting, view: View, without: Evidence | None = None) -> list[str] | None:
    """The tensors that are wrong in this setting; None where it cannot be computed.   without: see `Evidence`."""
    try:
        return Evidence(setting, view, without).wrong
    except IMPOSSIBLE:
        return None
