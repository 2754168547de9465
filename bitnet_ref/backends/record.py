"""Every named intermediate of a forward pass, without a hook in the model's text.

`Recorder` is a function for `observe`: it sees each op with its arguments and result, and keeps copies. The layer and
the linear of a call are known from the weight it is given. Names are TransformerLens's, without a batch axis, plus
BitNet's own under each linear:

    hook_embed (N, D)                                    ln_final.hook_scale (N, 1), .hook_normalized (N, D)
    blocks.0.hook_resid_pre, hook_resid_mid, hook_resid_post, hook_attn_out, hook_mlp_out (N, D)
    blocks.0.ln1.hook_scale (N, 1), .hook_normalized     likewise ln2, attn.sub_norm, mlp.sub_norm
    blocks.0.attn.hook_q, hook_rot_q, hook_z (N, H, d)   hook_k, hook_rot_k, hook_v (N, G, d)
    blocks.0.attn.hook_attn_scores, hook_pattern (H, N, S)      masked scores are -inf, masked pattern 0
    blocks.0.mlp.hook_pre, hook_pre_linear, hook_post (N, F)    gate, up, act(gate) * up
    blocks.0.attn.q_proj.hook_x_int8 (N, K) int8, hook_x_scale (N, 1), hook_acc_int32 (N, out), hook_out (N, out)
    lm_head.hook_out (N, V)

Of the families that have them (docs/families.md):

    hook_embed_scaled, ln_final.hook_scaled (N, D)       embeddings, and the head's input, times a factor
    blocks.0.attn.q_norm.hook_scale (N, H), .hook_normalized (N, H*d)   of heads; likewise k_norm, delta_norm
    blocks.0.attn.hook_scaled_q (N, H, d)                q times the query scale, after RoPE
    blocks.0.attn.hook_gated_z (N, H*d)                  attention's or DeltaNet's result times its gate
    blocks.0.ln1_post.hook_scale (N, 1), .hook_normalized (N, D)   of o_proj's result; ln2_post of down_proj's;
                                                         hook_attn_out and hook_mlp_out are what the stream gains
    blocks.0.attn.hook_conv (N, C)                       a DeltaNet's q, k and v after the convolution
    blocks.0.attn.hook_log_decay, hook_beta (N, Hv)      log alpha and beta
    blocks.0.attn.hook_state (N, Hv, dk, dv)             the memory after each token
    blocks.0.attn.hook_delta_out (N, Hv, dv)             what the memory answers
    blocks.0.attn.q_proj.hook_x_rotated (N, K)           R x, of a matrix in a Hadamard basis
    blocks.0.attn.q_proj.rms_norm.hook_scale, .hook_normalized   of a linear with a norm of its own
    lm_head.hook_uncapped (N, V)                         logits before their soft cap
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import NumericsError
from ..reference import layers
from ..reference.cache import KVCache, TokenBatch
from ..reference.config import DeltaConfig, ModelConfig
from ..reference.delta_net import DeltaInputs, delta_inputs, delta_recurrence
from ..reference.weights import GroupTernaryLinear, ModelWeights, TernaryLinear
from .backend import Backend

NamesFilter = Callable[[str], bool] | str | Iterable[str] | None
Call = Callable[..., Any]
NORM_NAMES = {  # of the fields of `LayerWeights`
    "attn_norm": "ln1",
    "ffn_norm": "ln2",
    "attn_sub_norm": "attn.sub_norm",
    "ffn_sub_norm": "mlp.sub_norm",
    "q_norm": "attn.q_norm",
    "k_norm": "attn.k_norm",
    "delta_norm": "attn.delta_norm",
    "attn_post_norm": "ln1_post",
    "ffn_post_norm": "ln2_post",
}
HEAD_NORMS = ("q_norm", "k_norm", "delta_norm")
SHOWN_ROWS = 24  # of a recorded run in a notebook's cell


def match_names(names_filter: NamesFilter) -> Callable[[str], bool]:
    """A predicate from a callable, a glob ("blocks.*.hook_pattern"), several globs, or None (every name)."""
    if names_filter is None:
        return lambda name: True
    if callable(names_filter):
        return names_filter
    globs = (names_filter,) if isinstance(names_filter, str) else tuple(names_filter)
    return lambda name: any(fnmatchcase(name, glob) for glob in globs)


class RecordedTensors(dict[str, NDArray]):
    """Tensors by name, in the order of the computation. It prints as a list of names and shapes, not of numbers."""

    def __repr__(self) -> str:
        names = list(self)[:3] + ["..."] * (len(self) > 3)
        return f"<{len(self)} recorded tensors: {', '.join(names)}>"

    def _repr_html_(self) -> str:
        rows = [f"<tr><td>{name}</td><td>{a.dtype} {a.shape}</td></tr>" for name, a in list(self.items())[:SHOWN_ROWS]]
        rows += [f"<tr><td colspan=2>and {len(self) - SHOWN_ROWS} more</td></tr>"] * (len(self) > SHOWN_ROWS)
        return f"<table style='white-space:nowrap'>{''.join(rows)}</table>"


class Recorder:
    """Records a pass: `observe(be, recorder)`. `seen` maps names to copies, in the order of the computation."""

    def __init__(self, be: Backend, w: ModelWeights, cfg: ModelConfig, names_filter: NamesFilter = None) -> None:
        self.be, self.cfg = be, cfg
        self.wants = match_names(names_filter)
        self.seen = RecordedTensors()
        self.current = ""  # the tensor being computed, or the last one kept
        self.linear_names = {id(weight): name for name, weight in w.linears() if name != "lm_head"}
        self.norm_names = {id(w.final_norm): "ln_final"}
        for i, layer in enumerate(w.layers):
            self.norm_names |= {id(weight): f"blocks.{i}.{NORM_NAMES[field]}" for field, weight in layer.norms()}
        for name, linear in w.linears():
            if isinstance(linear, TernaryLinear) and linear.input_norm is not None:
                self.norm_names[id(linear.input_norm.weight)] = f"{name}.rms_norm"
        self.tokens = 0  # of the batch, from the last block's input
        self.block = ""  # "blocks.3", from the last weight seen
        self.linear = ""  # "blocks.3.attn.q_proj", during its quantisation and product

    def __call__(self, op: str, call: Call, args: tuple[Any, ...]) -> Any:
        """Compute the op; the method `_on_OP`, where there is one, keeps what it sees."""
        handler = getattr(self, f"_on_{op}", None)
        return call(*args) if handler is None else handler(call, *args)

    def keep(self, name: str, array: NDArray) -> None:
        if self.wants(name):
            self.seen[name] = np.array(self.be.to_host(array))
        self.current = name

    def _on_embed(self, call: Call, *args: Any) -> Any:
        x = call(*args)
        self.keep("hook_embed", x)
        return x

    def name_norm(self, x: NDArray, weight: NDArray) -> str:
        """The name of the norm with this weight. Its input x may be the residual stream, which is then kept."""
        name = self.norm_names[id(weight)]
        if name.endswith("ln1"):
            if self.block:
                self.keep(f"{self.block}.hook_resid_post", x)
            self.block = name.removesuffix(".ln1")
            self.keep(f"{self.block}.hook_resid_pre", x)
            self.tokens = len(x)
        elif name.endswith("ln2"):
            self.keep(f"{self.block}.hook_resid_mid", x)
        elif name == "ln_final":
            self.keep(f"{self.block}.hook_resid_post", x)
        return name

    def _on_rms_norm(self, call: Call, x: NDArray, weight: NDArray, eps: float) -> Any:
        name = self.name_norm(x, weight)
        self.current = f"{name}.hook_scale"
        self.keep(self.current, self.by_token(name, layers.rms_scale(self.be.to_host(x), eps)))
        y = call(x, weight, eps)
        self.keep(f"{name}.hook_normalized", self.by_token(name, y))
        return y

    def by_token(self, norm: str, array: NDArray) -> NDArray:
        """A row for each token, of a norm over each head too."""
        return array.reshape(self.tokens, -1) if norm.endswith(HEAD_NORMS) else array

    def _on_rope(self, call: Call, *args: Any) -> Any:
        q, k = call(*args)
        self.keep(f"{self.block}.attn.hook_rot_q", q)
        self.keep(f"{self.block}.attn.hook_rot_k", k)
        return q, k

    def _on_ternary_matmul(self, call: Call, x_q: NDArray, w: TernaryLinear) -> Any:
        acc = call(x_q, w)
        self.keep(f"{self.linear}.hook_x_int8", x_q)
        return acc

    def _on_dequantize(self, call: Call, acc: NDArray, w: TernaryLinear, x_quant_scale: NDArray) -> Any:
        self.keep(f"{self.linear}.hook_x_scale", x_quant_scale)
        self.keep(f"{self.linear}.hook_acc_int32", acc)
        return call(acc, w, x_quant_scale)

    def _on_gated(self, call: Call, gate: NDArray, up: NDArray, activation: str) -> Any:
        self.keep(f"{self.block}.mlp.hook_pre", gate)
        self.keep(f"{self.block}.mlp.hook_pre_linear", up)
        y = call(gate, up, activation)
        self.keep(f"{self.block}.mlp.hook_post", y)
        return y

    def _on_linears(self, call: Call, x: NDArray, ws: Any) -> Any:
        outputs = []
        for w in ws:  # one at a time, so that each quantisation is recorded under its linear; the values are the same
            self.linear = self.linear_names.get(id(w), "lm_head")
            (y,) = call(x, (w,))
            shown = y
            if self.linear == "lm_head" and self.cfg.logit_softcap is not None:
                self.keep("lm_head.hook_uncapped", y)
                shown = layers.softcap(self.be.to_host(y), self.cfg.logit_softcap)
            self.keep(f"{self.linear}.hook_out", shown)
            outputs.append(y)
        if self.linear.endswith("v_proj"):  # of attention; a DeltaNet's last one is b_proj
            for letter, y in zip("qk", outputs, strict=False):
                self.keep(f"{self.block}.attn.hook_{letter}", y.reshape(y.shape[0], -1, self.cfg.head_dim))
        return tuple(outputs)

    def _on_group_matmul(self, call: Call, x: NDArray, w: GroupTernaryLinear) -> Any:
        if w.rotation is not None and self.wants(f"{self.linear}.hook_x_rotated"):
            self.keep(f"{self.linear}.hook_x_rotated", w.rotation.turn(self.be.to_host(x)).astype(x.dtype))
        return call(x, w)

    def _on_add(self, call: Call, x: NDArray, y: NDArray) -> Any:
        if y.ndim == 2:  # not a bias
            half = "attn" if self.linear.endswith("o_proj") else "mlp"
            self.keep(f"{self.block}.hook_{half}_out", y)
        return call(x, y)

    def _on_scale(self, call: Call, x: NDArray, factor: float) -> Any:
        y = call(x, factor)
        if x.ndim == 3:
            self.keep(f"{self.block}.attn.hook_scaled_q", y)
        elif not self.block:
            self.keep("hook_embed_scaled", y)
        elif self.current.startswith("ln_final"):
            self.keep("ln_final.hook_scaled", y)
        return y  # a block's result is recorded when it is added

    def _on_output_gate(self, call: Call, z: NDArray, gate: NDArray, activation: str) -> Any:
        y = call(z, gate, activation)
        self.keep(f"{self.block}.attn.hook_gated_z", y)
        return y

    def _on_delta_conv(self, call: Call, *args: Any) -> Any:
        mixed = call(*args)
        self.keep(f"{self.block}.attn.hook_conv", mixed)
        return mixed

    def _on_delta_gates(self, call: Call, *args: Any) -> Any:
        gates = call(*args)
        for name, gate in zip(("hook_log_decay", "hook_beta"), gates, strict=True):
            self.keep(f"{self.block}.attn.{name}", gate)
        return gates

    def _on_delta_rule(self, call: Call, *args: Any) -> Any:
        self.keep_states(*args)
        y = call(*args)
        self.keep(f"{self.block}.attn.hook_delta_out", y)
        return y

    def keep_states(
        self,
        mixed: NDArray,
        log_alpha: NDArray,
        beta: NDArray,
        cfg: DeltaConfig,
        cache: KVCache,
        layer: int,
        batch: TokenBatch,
    ) -> None:
        """The memory after each token, computed by the reference: the op only leaves the last one."""
        if not self.wants(f"{self.block}.attn.hook_state"):
            return
        assert cache.states is not None
        host, after = self.be.to_host, []
        inputs = delta_inputs(host(mixed), host(log_alpha), host(beta), cfg)
        for slot, _, rows in batch.on_host.sequences():
            memory = cache.states.memory_of(layer, slot).copy()
            for i in range(rows.start, rows.stop):
                delta_recurrence(DeltaInputs(*(each[i : i + 1] for each in inputs)), memory)
                after.append(memory.copy())
        self.keep(f"{self.block}.attn.hook_state", np.stack(after))

    def _on_attention(
        self, call: Call, q: NDArray, cache: KVCache, batch: TokenBatch, layer: int, window: int | None
    ) -> Any:
        attn, host = f"{self.block}.attn", batch.on_host
        self.keep(f"{attn}.hook_v", cache.stored(layer, host)[1])
        if self.wants(f"{attn}.hook_attn_scores") or self.wants(f"{attn}.hook_pattern"):
            self._keep_pattern(self.be.to_host(q), cache, host, layer, window)
        z = call(q, cache, batch, layer, window)
        self.keep(f"{attn}.hook_z", z)
        return z

    def _keep_pattern(self, q: NDArray, cache: KVCache, batch: TokenBatch, layer: int, window: int | None) -> None:
        """Scores and pattern, computed by the reference: a fused attention never holds them as a whole."""
        scores_all = np.full((q.shape[1], len(batch), int(batch.positions.max()) + 1), -np.inf, dtype=q.dtype)
        pattern_all = np.zeros_like(scores_all)
        for i, (slot, position) in enumerate(zip(batch.slots, batch.positions, strict=True)):
            keys, _ = cache.visible(layer, slot, position, window)
            scores = layers.attention_scores(q[i], keys)
            columns = slice(position + 1 - len(keys), position + 1)
            scores_all[:, i, columns], pattern_all[:, i, columns] = scores, layers.softmax(scores)
        self.keep(f"{self.block}.attn.hook_attn_scores", scores_all)
        self.keep(f"{self.block}.attn.hook_pattern", pattern_all)


class FiniteCheck(Recorder):
    """Keeps nothing; raises NumericsError at the first tensor that is not finite."""

    def keep(self, name: str, array: NDArray) -> None:
        values = np.asarray(self.be.to_host(array))
        is_masked = name.endswith("hook_attn_scores")  # its -inf are the causal mask
        bad = np.isnan(values) | np.isposinf(values) if is_masked else ~np.isfinite(values)
        if bad.any():
            index = tuple(int(i) for i in np.argwhere(bad)[0])
            raise NumericsError(f"{name} is the first tensor that holds NaN or Inf, at index {index}", tensor=name)
        self.current = name
