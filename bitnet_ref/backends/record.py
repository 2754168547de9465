"""Every named intermediate of a forward pass, without a hook in the model's text.

`Recorder` is a backend that passes each primitive on to another backend and keeps what it saw. The fused operations
are inherited, so they run as compositions of recorded primitives. Which layer a call belongs to is read off the weight
that it is given. Names are TransformerLens's, without a batch axis, plus BitNet's own under each linear:

    hook_embed (N, D)                                    ln_final.hook_scale (N, 1), .hook_normalized (N, D)
    blocks.0.hook_resid_pre, hook_resid_mid, hook_resid_post, hook_attn_out, hook_mlp_out (N, D)
    blocks.0.ln1.hook_scale (N, 1), .hook_normalized     likewise ln2, attn.sub_norm, mlp.sub_norm
    blocks.0.attn.hook_q, hook_rot_q, hook_z (N, H, d)   hook_k, hook_rot_k, hook_v (N, G, d)
    blocks.0.attn.hook_attn_scores, hook_pattern (H, N, S)      masked scores are -inf, masked pattern 0
    blocks.0.mlp.hook_pre, hook_pre_linear, hook_post (N, F)    gate, up, act(gate) * up
    blocks.0.attn.q_proj.hook_x_int8 (N, K) int8, hook_x_scale (N, 1), hook_acc_int32 (N, out), hook_out (N, out)
    lm_head.hook_out (N, V)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import NumericsError
from ..reference import layers
from ..reference.cache import KVCache, TokenBatch, TokenIds
from ..reference.config import ModelConfig, RopeConfig
from ..reference.model import final_hidden, forward
from ..reference.weights import DenseWeight, LinearWeight, ModelWeights, TernaryLinear
from . import Backend, HeadCandidates, HeadNeed

NamesFilter = Callable[[str], bool] | str | Iterable[str] | None


FEW_LOGITS = 4096  # of a token: so few are looked at together with those of others


def names_matcher(names_filter: NamesFilter) -> Callable[[str], bool]:
    """A filter given as a callable, a glob ("blocks.*.hook_pattern"), several globs, or None (everything)."""
    if names_filter is None:
        return lambda name: True
    if callable(names_filter):
        return names_filter
    globs = (names_filter,) if isinstance(names_filter, str) else tuple(names_filter)
    return lambda name: any(fnmatchcase(name, glob) for glob in globs)


def record(
    be: Backend,
    w: ModelWeights,
    cfg: ModelConfig,
    tokens: TokenIds,
    names_filter: NamesFilter = None,
    cache: KVCache | None = None,
) -> tuple[NDArray, dict[str, NDArray]]:
    """One forward pass over one sequence.   -> logits (T, V), {name: array} in the order of the computation

    cache: an empty one to compute with; None makes the backend's own.
    """
    recorder = Recorder(be, w, cfg, names_filter)
    cache = be.new_cache(cfg, 1, max(1, len(tokens))) if cache is None else cache
    logits = checked_forward(be, w, cfg, TokenBatch.of([(0, 0, tokens)]), cache, recorder)
    return logits, recorder.seen


def checked_forward(
    be: Backend,
    w: ModelWeights,
    cfg: ModelConfig,
    batch: TokenBatch,
    cache: KVCache,
    recorder: Recorder | None = None,
) -> NDArray:
    """`forward`, through the recorder if there is one. NaN or Inf raises NumericsError naming the first bad tensor."""
    # What NumPy would warn about ends in the logits, and is then reported by name.
    with np.errstate(all="ignore"), be.running():
        try:
            logits = be.to_host(forward(recorder or be, w, cfg, batch, cache))
            if np.isfinite(logits).all():
                return logits
        except NumericsError:
            pass
        raise first_non_finite(be, w, cfg, batch, cache)


def checked_candidates(
    be: Backend,
    w: ModelWeights,
    cfg: ModelConfig,
    batch: TokenBatch,
    cache: KVCache,
    needs: Sequence[HeadNeed],
) -> tuple[NDArray, list[HeadCandidates]]:
    """The forward pass with `head_candidates` in place of `lm_head`, checked alike.   -> final hidden (wanted, D), ...

    A logit that is not a candidate is finite too: its bounds are.
    """
    with np.errstate(all="ignore"), be.running():
        try:
            x = be.run(final_hidden, w, cfg, batch, cache)
            found = be.head_candidates(x, w.lm_head, needs)
            x = be.to_host(x)
            if np.isfinite(x).all() and _all_finite(found):
                return x, found
        except NumericsError:
            pass
        raise first_non_finite(be, w, cfg, batch, cache)


def _all_finite(found: Sequence[HeadCandidates]) -> bool:
    logits = [candidates.logits for candidates in found]
    if len(logits) > 1 and max(map(len, logits)) <= FEW_LOGITS:
        logits = [np.concatenate(logits)]
    return all(np.isfinite(each).all() for each in logits)


def first_non_finite(
    be: Backend, w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache
) -> NumericsError:
    """Run the batch again, watching, and say which tensor is the first that holds NaN or Inf."""
    recorder = _Watch(be, w, cfg, lambda name: True)
    try:
        logits = forward(recorder, w, cfg, batch, cache)
        recorder.keep("logits", logits)
    except NumericsError as error:
        if error.tensor is not None:
            return error
        return NumericsError(f"{recorder.current} is the first bad tensor: {error}", tensor=recorder.current)
    return NumericsError("the logits hold NaN or Inf, but a second run of these tokens does not: is the memory sound?")


class Recorder(Backend):
    """A backend that records. `seen` maps names to copies of the arrays, in the order of the computation."""

    def __init__(self, inner: Backend, w: ModelWeights, cfg: ModelConfig, names_filter: NamesFilter = None) -> None:
        self.inner, self.cfg = inner, cfg
        self.name, self.dtype, self.threads = inner.name, inner.dtype, inner.threads
        self.wants = names_matcher(names_filter)
        self.seen: dict[str, NDArray] = {}
        self._host_batch: TokenBatch | None = None  # what `place` was given
        self.current = ""  # the tensor being computed, or the last one kept
        self._linear_names = {id(weight): name for name, weight in w.linears() if name != "lm_head"}
        self._norm_names = {id(w.final_norm): "ln_final"}
        for i, layer in enumerate(w.layers):
            self._norm_names |= {id(layer.attn_norm): f"blocks.{i}.ln1", id(layer.ffn_norm): f"blocks.{i}.ln2"}
            if layer.attn_sub_norm is not None:
                self._norm_names[id(layer.attn_sub_norm)] = f"blocks.{i}.attn.sub_norm"
            if layer.ffn_sub_norm is not None:
                self._norm_names[id(layer.ffn_sub_norm)] = f"blocks.{i}.mlp.sub_norm"
        for name, weight in w.linears():
            if isinstance(weight, TernaryLinear) and weight.input_norm is not None:
                self._norm_names[id(weight.input_norm.weight)] = f"{name}.rms_norm"
        self._block = ""  # "blocks.3", read off the last weight seen
        self._linear = ""  # "blocks.3.attn.q_proj", while its quantisation and product run

    def keep(self, name: str, array: NDArray) -> None:
        if self.wants(name):
            self.seen[name] = np.array(self.inner.to_host(array))
        self.current = name

    def place(self, batch: TokenBatch) -> TokenBatch:
        self._host_batch = batch
        return self.inner.place(batch)

    def at_layer(self, index: int, x: NDArray) -> NDArray:
        return self.inner.at_layer(index, x)

    def from_host(self, array: NDArray) -> NDArray:
        return self.inner.from_host(array)

    def to_host(self, array: NDArray) -> NDArray:
        return self.inner.to_host(array)

    def new_cache(self, *args: Any, **kwargs: Any) -> KVCache:
        return self.inner.new_cache(*args, **kwargs)

    # -- primitives, each passed on and kept ---------------------------------------------------------------------------

    def embed(self, w: DenseWeight, tokens: NDArray) -> NDArray:
        x = self.inner.embed(w, tokens)
        self.keep("hook_embed", x)
        return x

    def rms_norm(self, x: NDArray, weight: NDArray, eps: float) -> NDArray:
        name = self._norm_names[id(weight)]
        if name.endswith("ln1"):
            if self._block:
                self.keep(f"{self._block}.hook_resid_post", x)
            self._block = name.removesuffix(".ln1")
            self.keep(f"{self._block}.hook_resid_pre", x)
        elif name.endswith("ln2"):
            self.keep(f"{self._block}.hook_resid_mid", x)
        elif name == "ln_final":
            self.keep(f"{self._block}.hook_resid_post", x)
        self.current = f"{name}.hook_scale"
        self.keep(self.current, layers.rms_scale(self.inner.to_host(x), eps))
        y = self.inner.rms_norm(x, weight, eps)
        self.keep(f"{name}.hook_normalized", y)
        return y

    def rope_tables(self, positions: NDArray, rope: RopeConfig, head_dim: int) -> tuple[NDArray, NDArray]:
        return self.inner.rope_tables(positions, rope, head_dim)

    def rope(self, q: NDArray, k: NDArray, cos: NDArray, sin: NDArray) -> tuple[NDArray, NDArray]:
        self.keep(f"{self._block}.attn.hook_q", q)
        self.keep(f"{self._block}.attn.hook_k", k)
        q, k = self.inner.rope(q, k, cos, sin)
        self.keep(f"{self._block}.attn.hook_rot_q", q)
        self.keep(f"{self._block}.attn.hook_rot_k", k)
        return q, k

    def quantize_activations(self, x: NDArray) -> tuple[NDArray, NDArray]:
        return self.inner.quantize_activations(x)

    def ternary_matmul(self, x_q: NDArray, w: TernaryLinear) -> NDArray:
        acc = self.inner.ternary_matmul(x_q, w)
        self.keep(f"{self._linear}.hook_x_int8", x_q)
        return acc

    def dequantize(self, acc: NDArray, w: TernaryLinear, x_quant_scale: NDArray) -> NDArray:
        self.keep(f"{self._linear}.hook_x_scale", x_quant_scale)
        self.keep(f"{self._linear}.hook_acc_int32", acc)
        return self.inner.dequantize(acc, w, x_quant_scale)

    def dense_matmul(self, x: NDArray, w: DenseWeight) -> NDArray:
        return self.inner.dense_matmul(x, w)

    def attention_scores(self, q: NDArray, keys: NDArray) -> NDArray:
        return self.inner.attention_scores(q, keys)

    def softmax(self, scores: NDArray) -> NDArray:
        return self.inner.softmax(scores)

    def attention_values(self, pattern: NDArray, values: NDArray) -> NDArray:
        return self.inner.attention_values(pattern, values)

    def gated(self, gate: NDArray, up: NDArray, activation: str) -> NDArray:
        self.keep(f"{self._block}.mlp.hook_pre", gate)
        self.keep(f"{self._block}.mlp.hook_pre_linear", up)
        y = self.inner.gated(gate, up, activation)
        self.keep(f"{self._block}.mlp.hook_post", y)
        return y

    def add(self, x: NDArray, y: NDArray) -> NDArray:
        return self.inner.add(x, y)

    def take_rows(self, x: NDArray, rows: NDArray) -> NDArray:
        return self.inner.take_rows(x, rows)

    # -- fused: inherited compositions, with the names that only they know ---------------------------------------------

    def linears(self, x: NDArray, ws: Sequence[LinearWeight]) -> tuple[NDArray, ...]:
        outputs: list[NDArray] = []
        for w in ws:  # one at a time, so that each quantisation is recorded under its linear; the values are the same
            self._linear = self._linear_names.get(id(w), "lm_head")
            (y,) = super().linears(x, (w,))
            self.keep(f"{self._linear}.hook_out", y)
            outputs.append(y)
        if self._linear.endswith("o_proj"):
            self.keep(f"{self._block}.hook_attn_out", outputs[0])
        elif self._linear.endswith("down_proj"):
            self.keep(f"{self._block}.hook_mlp_out", outputs[0])
        return tuple(outputs)

    def attention(self, q: NDArray, cache: KVCache, batch: TokenBatch, layer: int, window: int | None) -> NDArray:
        attn = f"{self._block}.attn"
        here = batch if self._host_batch is None else self._host_batch
        self.keep(f"{attn}.hook_v", cache.stored(layer, here)[1])
        if self.wants(f"{attn}.hook_attn_scores") or self.wants(f"{attn}.hook_pattern"):
            self._keep_pattern(self.inner.to_host(q), cache, here, layer, window)
        z = self.inner.attention(q, cache, batch, layer, window)  # the backend's own, fused or not
        self.keep(f"{attn}.hook_z", z)
        return z

    def _keep_pattern(self, q: NDArray, cache: KVCache, batch: TokenBatch, layer: int, window: int | None) -> None:
        """Scores and pattern, which a fused attention never holds as a whole: by the primitives, token by token."""
        scores_all = np.full((q.shape[1], len(batch), int(batch.positions.max()) + 1), -np.inf, dtype=self.dtype)
        pattern_all = np.zeros_like(scores_all)
        for i, (slot, position) in enumerate(zip(batch.slots, batch.positions, strict=True)):
            keys, _ = cache.visible(layer, slot, position, window)
            scores = self.attention_scores(q[i], keys)
            seen = slice(position + 1 - len(keys), position + 1)
            scores_all[:, i, seen], pattern_all[:, i, seen] = scores, self.softmax(scores)
        self.keep(f"{self._block}.attn.hook_attn_scores", scores_all)
        self.keep(f"{self._block}.attn.hook_pattern", pattern_all)


class _Watch(Recorder):
    """Keeps nothing; stops at the first tensor that is not finite."""

    def keep(self, name: str, array: NDArray) -> None:
        masked = name.endswith("hook_attn_scores")  # -inf there is the causal mask
        values = np.asarray(self.inner.to_host(array))
        bad = np.isnan(values) | np.isposinf(values) if masked else ~np.isfinite(values)
        if bad.any():
            where = tuple(int(i) for i in np.argwhere(bad)[0])
            raise NumericsError(f"{name} is the first tensor that holds NaN or Inf, at index {where}", tensor=name)
        self.current = name
