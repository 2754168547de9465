"""The reference with one thing changed, run and recorded: how a hypothesis about an engine's mistake is tested.

A `Setting` is everything that a forward pass depends on. A `Hypothesis` makes a changed one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...backends import Backend
from ...backends.loaded import LoadedModel
from ...backends.observe import observe
from ...backends.record import Call, NamesFilter, Recorder
from ...reference import layers, model
from ...reference.cache import KVCache, TokenBatch
from ...reference.config import ModelConfig
from ...reference.model import forward
from ...reference.weights import LayerWeights, ModelWeights, TernaryWeight, plain_weights

Op = Callable[..., NDArray]
Sees = Callable[[int, int | None], tuple[int, int]]  # (position, window) -> first position seen, one past the last
NORMS = (
    "attn_norm",
    "ffn_norm",
    "attn_sub_norm",
    "ffn_sub_norm",
    "q_norm",
    "k_norm",
    "attn_post_norm",
    "ffn_post_norm",
)


def causal(position: int, window: int | None) -> tuple[int, int]:
    """The token itself and the tokens before it, as far as the window reaches."""
    return (0 if window is None else max(0, position - window + 1)), position + 1


@dataclass(frozen=True)
class AttentionRule:
    """sees: the positions that a token attends to.   kv_heads: the kv head of each query head; None: h // (H/G).
    factor: of the scores."""

    sees: Sees = causal
    kv_heads: tuple[int, ...] | None = None
    factor: float = 1.0


@dataclass(frozen=True)
class Setting:
    """What one run computes.

    tokens: (T,).   ops: replacements of ops by name, each called with the plain op and then with its arguments.
    texts: replacements of functions of `reference.model` by name, for mistakes in the order of the ops.
    """

    config: ModelConfig
    weights: ModelWeights
    tokens: NDArray[np.int64]
    ops: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    attention: AttentionRule = AttentionRule()
    texts: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, loaded: LoadedModel, token_ids: Any) -> Setting:
        """The reference's own setting, whatever backend the model was loaded for."""
        return cls(loaded.config, plain_weights(loaded.weights), loaded.check_tokens(token_ids))

    def with_ops(self, **ops: Callable[..., Any]) -> Setting:
        return replace(self, ops={**self.ops, **ops})

    def with_texts(self, **texts: Callable[..., Any]) -> Setting:
        return replace(self, texts={**self.texts, **texts})

    def with_attention(self, **values: Any) -> Setting:
        return replace(self, attention=replace(self.attention, **values))

    def with_config(self, **values: Any) -> Setting:
        return replace(self, config=replace(self.config, **values))

    def with_rope(self, **values: Any) -> Setting:
        return self.with_config(rope=replace(self.config.rope, **values))

    def map_layers(self, change: Callable[[LayerWeights], LayerWeights]) -> Setting:
        return replace(self, weights=replace(self.weights, layers=tuple(change(w) for w in self.weights.layers)))

    def map_ternary(self, change: Callable[[str, TernaryWeight], TernaryWeight]) -> Setting:
        """Every ternary linear of the blocks changed; `change` gets its name ("q_proj") and its weight."""

        def layer(w: LayerWeights) -> LayerWeights:
            linears = ((name, weight) for name, weight in w.linears() if isinstance(weight, TernaryWeight))
            changed: dict[str, Any] = {name: change(name, weight) for name, weight in linears}
            return replace(w, **changed)

        return self.map_layers(layer)

    def around(self, op: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """For `observe`: computes the op, or its replacement."""
        return self.ops[op](call, *args) if op in self.ops else call(*args)

    def backend(self) -> Backend:
        """The plain backend with the replaced ops."""
        return observe(Backend("float32", threads=1), self.around)

    def run(self, names_filter: NamesFilter = None, until: str | None = None) -> dict[str, NDArray]:
        """One forward pass, recorded: {name: array} in the order of the computation.

        until: the pass ends when the tensor of that name has been computed.
        """
        be = Backend("float32", threads=1)
        recorder = _VariantRecorder(self, be, names_filter, until)
        batch, cache = TokenBatch.of([(0, 0, self.tokens)]), KVCache(self.config, slots=1, capacity=len(self.tokens))
        with np.errstate(all="ignore"), suppress(_Finished):  # a wrong change may overflow: `run` would raise
            forward(self._with_its_texts(observe(be, recorder)), self.weights, self.config, batch, cache)
        return recorder.seen

    def _with_its_texts(self, be: Backend) -> Backend:
        """The backend with blocks that call the replaced functions of the model's text."""
        if self.texts:
            names = {**vars(model), **self.texts}
            for name, function in vars(model).items():
                if isinstance(function, FunctionType) and name not in self.texts:
                    names[name] = FunctionType(function.__code__, names, name, function.__defaults__)
            for block in ("attention_block", "feed_forward"):
                setattr(be, block, partial(names[block], be))
        return be


@dataclass(frozen=True)
class Hypothesis:
    """A mistake that an engine may have made.

    shows: globs, separated by blanks, of the ops that would differ first.   name: short, stable.
    change: the setting with this mistake made; None where the model has no place for it.
    """

    shows: str
    name: str
    cause: str
    remedy: str
    change: Callable[[Setting], Setting | None]


class _Finished(Exception):
    """The last tensor that was asked for has been computed."""


class _VariantRecorder(Recorder):
    """Records a pass with the setting's ops and its rule of attention."""

    def __init__(self, setting: Setting, be: Backend, names_filter: NamesFilter, until: str | None) -> None:
        super().__init__(be, setting.weights, setting.config, names_filter)
        self.setting, self.rule, self.until = setting, setting.attention, until

    def __call__(self, op: str, call: Call, args: tuple[Any, ...]) -> Any:
        return super().__call__(op, lambda *inputs: self.setting.around(op, call, inputs), args)

    def keep(self, name: str, array: NDArray) -> None:
        super().keep(name, array)
        if name == self.until:
            raise _Finished

    def _on_attention(
        self, call: Call, q: NDArray, cache: KVCache, batch: TokenBatch, layer: int, window: int | None
    ) -> NDArray:
        n = len(batch)
        scores_all = np.full((q.shape[1], n, n), -np.inf, dtype=q.dtype)
        pattern_all, z = np.zeros_like(scores_all), np.empty_like(q)
        keys, values = cache.visible(layer, 0, n - 1, None)
        self.keep(f"{self.block}.attn.hook_v", values)
        if self.rule.kv_heads is not None:
            keys, values = keys[:, self.rule.kv_heads], values[:, self.rule.kv_heads]
        for i in range(n):
            first, stop = self.rule.sees(i, window)
            seen = slice(first, min(stop, n))
            scores_all[:, i, seen] = layers.attention_scores(q[i], keys[seen]) * np.float32(self.rule.factor)
            pattern_all[:, i, seen] = layers.softmax(scores_all[:, i, seen])
            z[i] = layers.attention_values(pattern_all[:, i, seen], values[seen])
        self.keep(f"{self.block}.attn.hook_attn_scores", scores_all)
        self.keep(f"{self.block}.attn.hook_pattern", pattern_all)
        self.keep(f"{self.block}.attn.hook_z", z)
        return z


def with_matrix(weight: TernaryWeight, w_t: NDArray[np.int8]) -> TernaryWeight:
    """The same weight with another ternary matrix (N, K)."""
    packed = TernaryWeight.from_ternary(np.ascontiguousarray(w_t), float(weight.w_dequant_scale)).packed
    return replace(weight, packed=packed)


def map_norms(setting: Setting, change: Callable[[NDArray], NDArray]) -> Setting:
    """Every norm's weight vector, changed."""

    def layer(w: LayerWeights) -> LayerWeights:
        present = {name: getattr(w, name) for name in NORMS}
        changed: dict[str, Any] = {name: change(norm) for name, norm in present.items() if norm is not None}
        return replace(w, **changed)

    changed = setting.map_layers(layer)
    return replace(changed, weights=replace(changed.weights, final_norm=change(setting.weights.final_norm)))
