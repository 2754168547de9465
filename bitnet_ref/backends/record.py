"""Every named intermediate of a forward pass, without a hook in the model's text.

`Recorder` is a function for `observe`: it sees each op with its arguments and result, and keeps copies. Names are
TransformerLens's, without a batch axis, plus BitNet's own under each linear:

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
    blocks.0.attn.q_norm.hook_scale (N, H), .hook_normalized (N, H*d)   of heads; likewise k_norm, delta_norm;
                                                         OLMo-2's are of all heads together, hook_scale (N, 1)
    blocks.0.attn.hook_scaled_q (N, H, d)                q times the query scale, after RoPE
    blocks.0.attn.hook_gated_z (N, H*d)                  attention's or DeltaNet's result times its gate
    blocks.0.ln1_post.hook_scale (N, 1), .hook_normalized (N, D)   of o_proj's result; ln2_post of down_proj's;
                                                         hook_attn_out and hook_mlp_out are what the stream gains
    blocks.0.attn.hook_conv (N, C)                       a DeltaNet's q, k and v after the convolution
    blocks.0.attn.hook_log_decay, hook_beta (N, Hv)      log alpha and beta
    blocks.0.attn.hook_state (N, Hv, dk, dv)             the memory after each token
    blocks.0.attn.hook_delta_out (N, Hv, dv)             what the memory answers
    blocks.0.attn.q_proj.hook_x_rotated (N, K)           R x, of a matrix in a Hadamard basis
    blocks.0.attn.q_proj.hook_lora (N, out)              an adapter's term, which hook_out contains
    blocks.0.attn.q_proj.rms_norm.hook_scale, .hook_normalized   of a linear with a norm of its own
    lm_head.hook_uncapped (N, V)                         logits before their soft cap
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from html import escape
from typing import Any

import numpy as np

from ..errors import GenerationError, NumericsError, describe
from ..families import also_recorded
from ..reference import layers
from ..reference.cache import KVCache, TokenBatch
from ..reference.config import ModelConfig
from ..reference.layers import Array, Floats
from ..reference.weights import LayerWeights, LinearWeight, Norm, TernaryLinear
from .backend import Backend
from .observe import Call, ObservedStep
from .paged_cache import EngineKVCache

NamesFilter = Callable[[str], bool] | str | Iterable[str] | None
LOGITS = "lm_head.hook_out"
SHOWN_ROWS = 24  # of a recorded run in a notebook's cell


def match_names(names_filter: NamesFilter) -> Callable[[str], bool]:
    """A predicate from a callable, a glob ("blocks.*.hook_pattern"), several globs, or None (every name).

    Raises GenerationError for anything else.
    """
    if names_filter is None:
        return lambda name: True
    if callable(names_filter):
        return names_filter
    is_one = isinstance(names_filter, str) or not isinstance(names_filter, Iterable)
    globs: tuple[Any, ...] = (names_filter,) if is_one else tuple(names_filter)
    if not all(isinstance(glob, str) for glob in globs):
        message = f"expected a glob, a list of globs, or a function of a name, got {describe(names_filter)}"
        raise GenerationError(message, field="names_filter")
    return lambda name: any(fnmatchcase(name, glob) for glob in globs)


def check_matched(recorded: Collection[str], names_filter: NamesFilter) -> None:
    """Raises GenerationError for a filter that none of a run's tensors matches."""
    if not recorded and names_filter is not None and names_filter != []:
        raise GenerationError(
            f"names_filter matches none of this model's tensors: {describe(names_filter)}; names are like "
            "'blocks.0.attn.hook_pattern' or 'blocks.0.mlp.down_proj.hook_acc_int32', and * matches any text"
        )


class RecordedTensors(dict[str, Array]):
    """Tensors by name, in the order of the computation. It prints as a list of names and shapes, not of numbers."""

    def __repr__(self) -> str:
        names = list(self)[:3] + ["..."] * (len(self) > 3)
        return f"<{len(self)} recorded tensors: {', '.join(names)}>"

    def _repr_html_(self) -> str:
        shown = list(self.items())[:SHOWN_ROWS]
        rows = [f"<tr><td>{escape(name)}</td><td>{a.dtype} {a.shape}</td></tr>" for name, a in shown]
        rows += [f"<tr><td colspan=2>and {len(self) - SHOWN_ROWS} more</td></tr>"] * (len(self) > SHOWN_ROWS)
        return f"<table style='white-space:nowrap'>{''.join(rows)}</table>"


class Recorder:
    """Records a pass: `observe(be, recorder)`. `seen` maps names to copies, in the order of the computation."""

    def __init__(self, be: Backend, cfg: ModelConfig, names_filter: NamesFilter = None) -> None:
        self.be, self.cfg = be, cfg
        self.wants = match_names(names_filter)
        self.seen = RecordedTensors()
        self.current = ""  # the tensor being computed, or the last one kept
        self.tokens = 0  # of the batch, in the block that is computed
        self.also_recorded = also_recorded(cfg)

    def __call__(self, step: ObservedStep, call: Call, args: tuple[Any, ...]) -> Any:
        """Compute the op; its handler, the method `on_` and the op's name, keeps what it sees."""
        handler = getattr(self, "on_result" if step.op in ("embed", "scale") else f"on_{step.op}", None)
        return call(*args) if handler is None else handler(step, call, *args)

    def keep(self, name: str, array: Array) -> None:
        if self.wants(name):
            self.seen[name] = np.array(self.be.to_host(array))
        self.current = name

    def on_result(self, step: ObservedStep, call: Call, *args: Any) -> Any:
        """An op whose result is the tensor; not one that has another name in a trace (see `on_add`)."""
        y = call(*args)
        if "hook_" in step.name:
            self.keep(step.name, y)
        return y

    def on_attention_block(self, step: ObservedStep, call: Call, x: Floats, w: LayerWeights, *rest: Any) -> Any:
        self.keep(f"{w.name}.hook_resid_pre", x)
        self.tokens = x.shape[0]
        return call(x, w, *rest)

    def on_feed_forward(self, step: ObservedStep, call: Call, x: Floats, w: LayerWeights, *rest: Any) -> Any:
        self.keep(f"{w.name}.hook_resid_mid", x)
        self.tokens = x.shape[0]
        y = call(x, w, *rest)
        self.keep(step.name, y)
        return y

    def on_rms_norm(self, step: ObservedStep, call: Call, x: Floats, norm: Norm) -> Any:
        if norm.name == "ln_final":
            self.tokens = x.shape[0]
        self.current = f"{norm.name}.hook_scale"
        self.keep(self.current, self.by_token(layers.rms_scale(self.be.to_host(x), norm.eps)))
        y = call(x, norm)
        self.keep(step.name, self.by_token(y))
        return y

    def by_token(self, array: Array) -> Array:
        """A row for each token, of a norm over each head too."""
        return array if array.shape[0] == self.tokens else array.reshape(self.tokens, -1)

    def on_rope(self, step: ObservedStep, call: Call, *args: Any) -> Any:
        q, k = call(*args)
        self.keep(step.name, q)
        self.keep(step.name.removesuffix("q") + "k", k)
        return q, k

    def on_linears(self, step: ObservedStep, call: Call, x: Floats, ws: Sequence[LinearWeight]) -> Any:
        outputs: list[Floats] = []
        for w in ws:  # one at a time, so that each quantisation is recorded under its linear; the values are the same
            name = step.name if len(ws) == 1 else f"{w.name}.hook_out"
            (y,) = call(x, (w,))
            self.keep_output(name, y)
            outputs.append(y)
        self.keep_heads(ws, outputs)
        return tuple(outputs)

    def keep_output(self, name: str, y: Array) -> None:
        """A linear's output; of a head with a soft cap also what it gives."""
        if name == LOGITS and self.cfg.logit_softcap is not None:
            self.keep("lm_head.hook_uncapped", y)
            y = layers.softcap(self.be.to_host(y), self.cfg.logit_softcap)
        self.keep(name, y)

    def keep_heads(self, ws: Sequence[LinearWeight], outputs: list[Array]) -> None:
        """q and k of attention, cut into heads."""
        if not ws[-1].name.endswith(".v_proj"):  # of a block without keys the last one is another
            return
        for w, letter, y in zip(ws, "qk", outputs, strict=False):
            block = w.name.rpartition(".")[0]
            self.keep(f"{block}.hook_{letter}", y.reshape(y.shape[0], -1, self.cfg.head_dim))

    def on_ternary_matmul(self, step: ObservedStep, call: Call, x_q: Array, w: TernaryLinear) -> Any:
        acc = call(x_q, w)
        self.keep(sibling(step.name, "hook_x_int8"), x_q)
        return acc

    def on_dequantize(
        self, step: ObservedStep, call: Call, acc: Floats, w: TernaryLinear, x_quant_scale: Floats
    ) -> Any:
        self.keep(sibling(step.name, "hook_x_scale"), x_quant_scale)
        self.keep(sibling(step.name, "hook_acc_int32"), acc)
        return call(acc, w, x_quant_scale)

    def on_gated(self, step: ObservedStep, call: Call, gate: Floats, up: Floats, activation: str) -> Any:
        self.keep(sibling(step.name, "hook_pre"), gate)
        self.keep(sibling(step.name, "hook_pre_linear"), up)
        y = call(gate, up, activation)
        self.keep(step.name, y)
        return y

    def on_add(self, step: ObservedStep, call: Call, x: Array, y: Array) -> Any:
        if y.ndim == 2 and not step.name.endswith(".hook_out"):  # neither a bias nor an adapter's term
            half = "attn" if step.name.endswith("hook_resid_mid") else "mlp"
            self.keep(sibling(step.name, f"hook_{half}_out"), y)
        return call(x, y)

    def on_compute(self, step: ObservedStep, call: Call, name: str, function: Callable[..., Floats], *args: Any) -> Any:
        """An op of one family or kind of weight, and what that wants recorded beside it."""
        if function in self.also_recorded:
            self.keep_beside(step, function, args)
        y = call(name, function, *args)
        if not step.name.endswith(".hook_out"):  # a product, which `on_linears` keeps with its bias
            self.keep(step.name, y)
        return y

    def keep_beside(self, step: ObservedStep, function: Callable[..., Array], args: Sequence[Any]) -> None:
        """What an op of a family wants recorded beside its result."""
        hook, further = self.also_recorded[function]
        if self.wants(sibling(step.name, hook)):
            tensor = further(*map(self.be.to_host, args))
            if tensor is not None:
                self.keep(sibling(step.name, hook), tensor)

    def on_attention(
        self,
        step: ObservedStep,
        call: Call,
        q: Floats,
        cache: KVCache,
        batch: TokenBatch,
        layer: int,
        window: int | None,
    ) -> Any:
        attn, host = step.name.removesuffix(".hook_z"), batch.on_host
        assert isinstance(cache, EngineKVCache)
        self.keep(f"{attn}.hook_v", cache.stored(layer, host)[1])
        if self.wants(f"{attn}.hook_attn_scores") or self.wants(f"{attn}.hook_pattern"):
            self.keep_pattern(attn, self.be.to_host(q), cache, host, layer, window)
        z = call(q, cache, batch, layer, window)
        self.keep(step.name, z)
        return z

    def keep_pattern(
        self, attn: str, q: Floats, cache: KVCache, batch: TokenBatch, layer: int, window: int | None
    ) -> None:
        """Scores and pattern, computed by the reference: a fused attention never holds them as a whole."""
        scores_all = np.full((q.shape[1], len(batch), int(batch.positions.max()) + 1), -np.inf, dtype=q.dtype)
        pattern_all = np.zeros_like(scores_all)
        for i, (slot, position) in enumerate(zip(batch.slots, batch.positions, strict=True)):
            keys, _ = cache.visible(layer, slot, position, window)
            scores = layers.attention_scores(q[i], keys)
            columns = slice(position + 1 - len(keys), position + 1)
            scores_all[:, i, columns], pattern_all[:, i, columns] = scores, layers.softmax(scores)
        self.keep(f"{attn}.hook_attn_scores", scores_all)
        self.keep(f"{attn}.hook_pattern", pattern_all)


def sibling(name: str, hook: str) -> str:
    """The tensor `hook` beside the one of that name: "a.b.hook_z", "hook_v" -> "a.b.hook_v"."""
    return f"{name.rpartition('.')[0]}.{hook}"


class FiniteCheck(Recorder):
    """Keeps nothing; raises NumericsError at the first tensor that is not finite."""

    def keep(self, name: str, array: Array) -> None:
        values = np.asarray(self.be.to_host(array))
        is_masked = name.endswith("hook_attn_scores")  # its -inf are the causal mask
        bad = np.isnan(values) | np.isposinf(values) if is_masked else ~np.isfinite(values)
        if bad.any():
            index = tuple(int(i) for i in np.argwhere(bad)[0])
            raise NumericsError(f"{name} is the first tensor that holds NaN or Inf, at index {index}", tensor=name)
        self.current = name
