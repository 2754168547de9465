"""Judges a recorded run op by op: the reference computes each op from the run's own inputs.

`compare` holds a trace against another run; this holds it against itself. For each tensor of the trace whose inputs
were recorded, the reference computes that op from them, for example accumulators from the int8 inputs and the weights,
exactly. So an error is named at the op that makes it, whatever earlier errors or rounding flips there are.

An input that was not recorded is computed from the nearest tensors that were. If that would need a guess how the engine
rounded an activation, the tensor is left to `compare`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...backends import Backend
from ...backends.backend import plain_weights
from ...backends.loaded import LoadedModel
from ...errors import NumericsError
from ...families import KINDS
from ...families.linear_norms import model_norms
from ...families.lora import AdaptedLinear, lora_term
from ...reference import layers
from ...reference.layers import Array
from ...reference.model import rope_tables_of
from ...reference.weights import LinearWeight, Norm
from .. import names
from ..compare import DIFFERS, FLIP, Comparison, OpResult, View, Walk, fits, same_tokens
from ..flips import judge_flips
from ..metrics import tensor_of
from ..tolerances import TABLE
from .variants import all_scores, all_values, is_seen


class _MissingInput(Exception):
    """An op's inputs are not in the trace."""


def judge_trace(
    model: LoadedModel, trace: Mapping[str, Array], tokens: Array | None = None, backend: Backend | None = None
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
    replay = _Replay(model, trace, ids, backend)
    own = bool(getattr(trace, "own_engine", True))
    walk = Walk({}, {}, cfg, ids, comparison, own, getattr(trace, "engine_dtype", "float32"), replay.is_ternary)
    with np.errstate(all="ignore"):  # values that are not finite are reported as such
        for name in names.op_order(cfg):
            if name in replay.misfits:
                comparison.ops.append(walk.refuse(name, names.op_shape(name, cfg, len(ids)), replay.misfits[name]))
            elif name in replay.recorded:
                result = replay.judge(name, walk, own)
                if result is None:
                    comparison.missing.append(name)
                else:
                    comparison.ops.append(result)
    if not comparison.ops:
        comparison.problem = "no tensor of the trace can be computed from others that it carries"
    return comparison


class _Replay:
    """The reference's ops by the names of their results, each fed from the trace."""

    def __init__(
        self, model: LoadedModel, trace: Mapping[str, Array], ids: NDArray[np.int64], backend: Backend | None
    ) -> None:
        self.trace, self.ids, self.cfg = View(trace), ids, model.config
        self.recorded: set[str] = set()  # names of the tensors that have the right shape
        self.misfits: dict[str, str] = {}  # name -> what is wrong with its shape
        for name in set(names.op_order(self.cfg)).intersection(self.trace):
            shape, given = names.op_shape(name, self.cfg, len(ids)), tensor_of(self.trace, name).shape
            if fits(shape, given, name):
                self.recorded.add(name)
            elif not (name == names.LOGITS and given in (shape[1:], (1, *shape[1:]))):  # of the last token only
                self.misfits[name] = f"shape {list(given)} instead of {list(shape)}"
        self.w = plain_weights(model.weights)
        self.be = backend or Backend("float32", model.backend.threads)
        self.linears: dict[str, LinearWeight] = dict(self.w.linears())
        self.norms = {norm.name: norm for norm in model_norms(self.w)}
        self.recomputed: list[str] = []  # inputs of the current op that were not recorded

    def is_ternary(self, linear: str) -> bool:
        return self.linears[linear].bit_linear is not None

    def judge(self, name: str, walk: Walk, own: bool) -> OpResult | None:
        """Judge one tensor of the trace; None when its inputs are missing."""
        self.recomputed = []
        try:
            mine = self.compute(name)
        except _MissingInput:
            return None
        except NumericsError as error:
            return walk.refuse(name, names.op_shape(name, self.cfg, len(self.ids)), f"cannot be computed: {error}")
        theirs = np.asarray(self.trace[name]).reshape(mine.shape)
        rounded = any(TABLE[names.op_kind(op, self.is_ternary, self.cfg)].alone for op in self.recomputed)
        result = walk.judge(name, mine, theirs, depth=0 if rounded else None)
        if result.status == DIFFERS and result.kind == "activation int8" and np.isfinite(result.max_abs):
            return self.rounding(name, mine, theirs, result, own)
        return result

    def value(self, name: str, dtype: type = np.float32) -> Array:
        """A tensor of the run: as recorded, or computed from recorded ones."""
        if name in self.recorded:
            array = np.asarray(self.trace[name]).reshape(names.op_shape(name, self.cfg, len(self.ids)))
            cast: Array = array.astype(dtype)
            if np.dtype(dtype).kind == "i" and not np.array_equal(cast, array):
                raise NumericsError(f"{name} has values that {np.dtype(dtype)} cannot hold", tensor=name)
            return cast
        if name.endswith(names.INT8):
            source = names.linear_input(name.rpartition(".")[0], self.cfg)
            if source not in self.recorded:  # how the engine rounded it is not known
                raise _MissingInput(name)
        array = self.compute(name)
        self.recomputed.append(name)
        return array

    def rows(self, name: str) -> Array:
        return self.value(name).reshape(len(self.ids), -1)

    def heads(self, name: str) -> Array:
        return self.value(name).reshape(len(self.ids), -1, self.cfg.head_dim)

    def compute(self, name: str) -> Array:
        """The op, computed by the reference from its inputs."""
        parent, _, hook = name.rpartition(".")
        block = name.rpartition(".attn.")[0] or name.rpartition(".mlp.")[0] or parent
        inputs = names.op_inputs(name, self.cfg)
        if name == names.LOGITS and self.cfg.logit_softcap is not None:
            return layers.softcap(self.rows(inputs[0]), self.cfg.logit_softcap)
        if hook in (names.ROTATED, names.INT8, names.SCALE, names.ACC, names.LORA, names.OUT, "hook_uncapped"):
            return self._linear(parent, hook)
        if hook in (names.NORM_SCALE, names.NORMALIZED):
            x, norm = self.rows(inputs[0]), self._norm(parent)
            x = x.reshape(-1, len(norm.weight))  # a row for each head, where the norm is over heads
            y = layers.rms_scale(x, norm.eps) if hook == names.NORM_SCALE else self.be.rms_norm(x, norm)
            return y.reshape(len(self.ids), -1)
        if hook == "hook_embed":
            return self.be.embed(self.w.embedding, self.ids)
        if hook in ("hook_embed_scaled", "hook_scaled"):
            factor = self.cfg.embedding_scale if hook == "hook_embed_scaled" else self.cfg.head_scale
            return self.be.scale(self.value(inputs[0]), factor, name)
        own = names.find_step(name, self.cfg).compute
        if own is not None:  # a step of the model's family
            layer = self.w.layers[names.layer_of(name) or 0]
            return own(self.be, layer, self.cfg, *map(self.rows, inputs))
        if hook in ("hook_resid_mid", "hook_resid_post"):
            return self.rows(inputs[0]) + self.rows(inputs[1])
        if hook in ("hook_rot_q", "hook_rot_k"):
            tables = rope_tables_of(self.be, self.cfg, np.arange(len(self.ids)))
            return layers.apply_rope(self.heads(inputs[0]), *tables[self.cfg.rope_of(names.layer_of(name) or 0)])
        if hook in ("hook_attn_scores", "hook_pattern", "hook_z"):
            return self._attention(f"{block}.attn", hook)
        if hook == "hook_post":
            return self.be.gated(self.rows(inputs[0]), self.rows(inputs[1]), self.cfg.activation)
        if hook in ("hook_q", "hook_k", "hook_v"):
            return self.heads(inputs[0])
        return self.rows(inputs[0])  # the same numbers under another name

    def _linear(self, linear: str, hook: str) -> Array:
        w = self.linears[linear]
        if isinstance(w, AdaptedLinear):
            if hook == names.LORA:
                return lora_term(self.be, self.rows(names.module_input(linear, self.cfg)), w)
            if hook == names.OUT:
                return self._product(linear, w.linear, hook) + self.rows(f"{linear}.{names.LORA}")
            w = w.linear
        return self._product(linear, w, hook)

    def _product(self, linear: str, w: LinearWeight, hook: str) -> Array:
        """A tensor of a linear without an adapter."""
        ternary = w.bit_linear
        if ternary is None:
            x = self.rows(names.module_input(linear, self.cfg))
            if hook in (names.OUT, "hook_uncapped"):
                return self.be.linear(x, w)
            beside = dict(KINDS[w.kind].also_recorded.values())
            tensor = beside[hook](x, w) if hook in beside else None
            if tensor is None:
                raise _MissingInput(hook)
            return tensor
        if hook in (names.INT8, names.SCALE):
            x_q, scale = self.be.quantize_activations(self.rows(names.linear_input(linear, self.cfg)))
            return x_q if hook == names.INT8 else scale
        if hook == names.ACC:
            return self.be.ternary_matmul(self.value(f"{linear}.{names.INT8}", np.int8), ternary)
        acc, scale = self.value(f"{linear}.{names.ACC}", np.int32), self.value(f"{linear}.{names.SCALE}")
        y = self.be.dequantize(acc, ternary, scale.reshape(len(self.ids), -1))
        return y if w.bias is None else y + w.bias

    def _attention(self, attn: str, hook: str) -> Array:
        n, window = len(self.ids), self.cfg.window_of(int(attn.split(".")[1]))
        if hook == "hook_attn_scores":
            q, k = (self.heads(name) for name in names.op_inputs(f"{attn}.{hook}", self.cfg))
            return all_scores(n, q, k, window)
        if hook == "hook_pattern":
            given = self.value(f"{attn}.hook_attn_scores").reshape(-1, n, n)
            return layers.softmax(np.where(is_seen(n, window), given, -np.inf))
        pattern = self.value(f"{attn}.hook_pattern").reshape(-1, n, n)
        return all_values(n, np.where(is_seen(n, window), pattern, 0), self.heads(f"{attn}.hook_v"))

    def _norm(self, name: str) -> Norm:
        norm = self.norms.get(name)
        if norm is None:
            raise _MissingInput(name)
        return norm

    def rounding(self, name: str, mine: Array, theirs: Array, result: OpResult, own: bool) -> OpResult:
        """Judge int8 values that differ from the rounded input: by the last bit of x * scale, or wrong."""
        linear = name.rpartition(".")[0]
        source = names.linear_input(linear, self.cfg)
        here = {source: self.rows(source)}
        if (scale := f"{linear}.{names.SCALE}") in self.recorded:
            here[scale] = self.value(scale)
        rows = np.ones(len(self.ids), dtype=bool)
        recorded = here if source in self.recorded else {}  # the engine's own input may differ from a recomputed one
        judged = judge_flips(here, recorded, linear, self.cfg, 0, rows, mine, theirs.astype(np.int64), own)
        if judged.unexplained is not None:
            note = f"{list(judged.unexplained)}: {judged.why}"
            return replace(result, note="; ".join(part for part in (result.note, note) if part))
        return replace(result, status=FLIP, note=f"{len(judged.flips)} flips, expected: {judged.flips[0]}")
