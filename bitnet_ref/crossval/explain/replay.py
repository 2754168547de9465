"""Judges a recorded run op by op: the reference computes each op from the run's own inputs.

`compare` holds a trace against another run; this holds it against itself. The reference runs once, step by step, and
goes on with the tensors of the trace in the place of its own, for example to accumulators from the recorded int8 inputs
and the weights, exactly. So an error is named at the op that makes it, whatever earlier errors or rounding flips there
are.

An input that was not recorded is computed from the nearest tensors that were. If that would need a guess how the engine
rounded an activation, the tensor is left to `compare`. So are tensors in a narrower float than the engine's own.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...backends import Backend
from ...backends.backend import plain_weights
from ...backends.loaded import LoadedModel
from ...errors import NumericsError
from ...families.lora import AdaptedLinear
from ...reference.layers import Array
from .. import names
from ..compare import DIFFERS, FLIP, Comparison, OpResult, View, Walk, fits, is_last_token, same_tokens, shape_note
from ..flips import judge_flips
from ..metrics import recorded_dtype, tensor_of
from ..tolerances import RECORDED_ROUNDING, TABLE
from ..types import Ints, Tensors
from .attention import is_seen
from .variants import Setting, Step


def judge_trace(
    model: LoadedModel, trace: Tensors, tokens: Array | None = None, backend: Backend | None = None
) -> Comparison:
    """Every op of a recorded run on its own inputs. mode "op by op".

    trace: a `Trace`, or name -> array.   tokens: its token ids, if the trace does not have them.
    backend: computes the ops, for an engine with a rule of its own; None: the reference.
    """
    ids = np.asarray(getattr(trace, "token_ids", None) if tokens is None else tokens, dtype=np.int64)
    cfg = model.config
    calls = getattr(trace, "calls", ())
    comparison = Comparison(mode="op by op", tokens=len(ids), layers=cfg.num_hidden_layers, calls=calls)
    comparison.problem = same_tokens(ids, trace, cfg)
    if comparison.problem is not None:
        return comparison
    replay = _Replay(model, trace, ids, comparison)
    with np.errstate(all="ignore"):  # values that are not finite are reported as such
        replay.run(Setting.of(model, ids), backend or Backend("float32", model.backend.threads))
    for name in names.op_order(cfg):
        if name in replay.results:
            comparison.ops.append(replay.results[name])
        elif name in replay.recorded:
            comparison.missing.append(name)
    if not comparison.ops:
        comparison.problem = "no tensor of the trace can be computed from others that it carries"
    return comparison


class _Replay:
    """A run of the reference that goes on with the tensors of a trace, each of which it judges."""

    def __init__(self, model: LoadedModel, trace: Tensors, ids: Ints, comparison: Comparison) -> None:
        self.trace, self.ids, self.cfg = View(trace), ids, model.config
        self.linears = dict(plain_weights(model.weights).linears())
        self.own = bool(getattr(trace, "own_engine", True))
        dtype = getattr(trace, "engine_dtype", "float32")
        self.walk = Walk({}, self.trace, self.cfg, ids, comparison, self.own, dtype, self.is_ternary)
        self.recorded: set[str] = set()  # names of the tensors that have the right shape
        self.results: dict[str, OpResult] = {}
        for name in set(names.op_order(self.cfg)).intersection(self.trace):
            shape, given = names.op_shape(name, self.cfg, len(ids)), tensor_of(self.trace, name).shape
            if fits(shape, given, name):
                if dtype != "float32" or recorded_dtype(tensor_of(self.trace, name)) not in RECORDED_ROUNDING:
                    self.recorded.add(name)
            elif not (name == names.LOGITS and is_last_token(shape, given)):
                self.results[name] = self.walk.refuse(name, shape, shape_note(name, shape, given))
        self.right_scale = np.ones((len(ids), 1), dtype=np.float32)  # of the activation that is quantised
        self.guessed: set[str] = set()  # what cannot be computed without a guess how the engine rounds
        self.inexact: set[str] = set()  # what is computed from inputs that were not recorded, and may be off themselves
        for name in names.op_order(self.cfg):
            self._note_inputs(name)

    def is_ternary(self, linear: str) -> bool:
        return self.linears[linear].bit_linear is not None

    def _note_inputs(self, name: str) -> None:
        for each in set(self._inputs(name)) - self.recorded:
            is_int8 = each.endswith(names.INT8)
            rounds = is_int8 and names.linear_input(each.rpartition(".")[0], self.cfg) not in self.recorded
            if rounds or each in self.guessed:
                self.guessed.add(name)
            if TABLE[names.op_kind(each, self.is_ternary, self.cfg)].alone or each in self.inexact:
                self.inexact.add(name)

    def _inputs(self, name: str) -> tuple[str, ...]:
        """`names.op_inputs` with what this model's weights say: which linears are ternary, and have an adapter."""
        linear, _, hook = name.rpartition(".")
        inputs, w = names.op_inputs(name, self.cfg), self.linears.get(linear)
        if hook == names.OUT and f"{linear}.{names.ACC}" in inputs and w is not None and w.bit_linear is None:
            inputs = (names.linear_input(linear, self.cfg),)
        if hook == names.OUT and isinstance(w, AdaptedLinear):
            return (*inputs, f"{linear}.{names.LORA}")
        return inputs

    def run(self, setting: Setting, backend: Backend) -> None:
        """Judge each recorded tensor that the reference can compute."""
        last = [name for name in names.op_order(self.cfg) if name in self.recorded][-1:]
        if not last:
            return
        # The names that no step has are kept: a block's input, and what a kind of weight shows beside its product.
        try:
            beside = setting.run(self._is_open, last[0], settle=self._settle, backend=backend)
        except NumericsError as error:  # of what an engine's numbers give
            name = next(filter(self._is_open, names.op_order(self.cfg)), None)
            if name is not None:
                shape = names.op_shape(name, self.cfg, len(self.ids))
                self.results[name] = self.walk.refuse(name, shape, f"cannot be computed: {error}")
            return
        for name, tensor in beside.items():
            self.results[name] = self._judge(name, tensor)

    def _is_open(self, name: str) -> bool:
        return name in self.recorded and name not in self.results and name not in self.guessed

    def _settle(self, step: Step) -> Array:
        """The step's tensor as it was recorded; the reference's own where it was not, or holds no such numbers."""
        name, right = step.name, step.result
        if isinstance(step.seen, dict):
            step.seen.clear()  # no edit asks for earlier tensors, and those of a long run are many
        if name.endswith(names.SCALE):
            self.right_scale = right
        if name.endswith(names.INT8):  # by the reference's scale: a wrong one is its own op, and may be 1 / scale
            right = step.compute(step.inputs[0], self.right_scale)
        if name not in self.recorded:
            return right
        if self._is_open(name):
            self.results[name] = self._judge(name, right, *step.inputs)
        theirs = np.asarray(self.trace[name]).reshape(right.shape)
        if names.is_by_head(name):  # what is masked may hold anything
            window = self.cfg.window_of(names.layer_of(name) or 0)
            theirs = np.where(is_seen(len(self.ids), window), theirs, -np.inf if name.endswith("scores") else 0)
        cast: Array = theirs.astype(right.dtype)
        if right.dtype.kind == "i":
            is_usable = np.array_equal(cast, theirs)
        else:
            is_usable = bool(np.isfinite(theirs[~np.isneginf(theirs)]).all())
        return cast if is_usable else right

    def _judge(self, name: str, mine: Array, *inputs: Array) -> OpResult:
        """One tensor of the trace. inputs: of the step that computes it."""
        mine = mine.reshape(names.op_shape(name, self.cfg, len(self.ids)))
        theirs = np.asarray(self.trace[name]).reshape(mine.shape)
        result = self.walk.judge(name, mine, theirs, depth=0 if name in self.inexact else None)
        if result.status == DIFFERS and result.kind == "activation int8" and np.isfinite(result.max_abs):
            return self._judge_rounding(name, mine, theirs, result, *inputs)
        return result

    def _judge_rounding(
        self, name: str, mine: Array, theirs: Array, result: OpResult, x: Array, x_quant_scale: Array
    ) -> OpResult:
        """Judge int8 values that differ from the rounded input: by the last bit of x * scale, or wrong."""
        linear = name.rpartition(".")[0]
        source = names.linear_input(linear, self.cfg)
        here = {source: x, f"{linear}.{names.SCALE}": x_quant_scale}
        rows = np.ones(len(self.ids), dtype=bool)
        recorded = here if source in self.recorded else {}  # the engine's own input may differ from a recomputed one
        judged = judge_flips(here, recorded, linear, self.cfg, 0, rows, mine, theirs.astype(np.int64), self.own)
        if judged.unexplained is not None:
            note = f"{list(judged.unexplained)}: {judged.why}"
            return replace(result, note="; ".join(part for part in (result.note, note) if part))
        return replace(result, status=FLIP, note=f"{len(judged.flips)} flips, expected: {judged.flips[0]}")
