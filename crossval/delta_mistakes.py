"""Mistakes in Qwen3.5's two kinds of layers, each in an engine of its own text: is the cause named?

    python crossval/delta_mistakes.py [NAME ...] [--thin]

The engine is `forward` below, in NumPy, and shares nothing with the package but the checkpoint. A mistake replaces
lines of that text. None of them is a known mistake of the package, so that each must be described. A cause counts if
its words fit, and if the reference with it also gives the engine's tensors on other tokens. --thin shows crossval
hook_resid_post and the logits alone.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from drawn_mistakes import EngineTrace, Mistake, edited
from shipped_mistakes import HELPERS, campaign, judge_engine

import bitnet_ref
from bitnet_ref.reference.weights import Norm

HYBRID = Path(__file__).parents[1] / "tests/data/families/qwen3_5-groups128-hybrid"


@cache
def model_of_family() -> tuple[Any, list[dict[str, np.ndarray]]]:
    """The reference's model, and the engine's weights by layer: float32 arrays."""
    model = bitnet_ref.load(HYBRID, backend="numpy", threads=1)
    layers = []
    for layer in model.weights.layers:
        w = {}
        for name in layer.__dataclass_fields__:
            value = getattr(layer, name)
            if isinstance(value, Norm):
                w[name] = value.weight
            elif isinstance(value, np.ndarray):
                w[name] = value
            elif hasattr(value, "rows"):
                w[name] = value.rows(slice(None), np.float32)
        layers.append(w)
    return model, layers


def forward(ids, W, embed, head, final, C, record):  # type: ignore[no-untyped-def]
    """The pass over ids. record(name, array) keeps a tensor."""
    N, Hk, Hv, dk, dv = len(ids), C.delta.key_heads, C.delta.value_heads, C.delta.key_dim, C.delta.value_dim
    H, G, d, part, eps = C.num_attention_heads, C.num_key_value_heads, C.head_dim, C.rotary_dim, C.norm_eps
    x = embed[ids]
    record("hook_embed", x)
    for layer in range(C.num_hidden_layers):
        w, b = W[layer], f"blocks.{layer}."
        h = norm(x, w["attn_norm"], eps)
        record(b + "ln1.hook_normalized", h)
        q, k, v, z = (mul(h, w[n + "_proj"]) for n in "qkvz")
        for n, y in zip("qkvz", (q, k, v, z), strict=True):
            record(b + f"attn.{n}_proj.hook_out", y)
        if "conv" in w:
            a, beta = mul(h, w["a_proj"]), mul(h, w["b_proj"])
            record(b + "attn.a_proj.hook_out", a)
            record(b + "attn.b_proj.hook_out", beta)
            qkv = np.concatenate([q, k, v], 1)
            taps = w["conv"]
            padded = np.concatenate([np.zeros((3, qkv.shape[1])), qkv])
            mixed = sum(padded[i : i + N] * taps[:, i] for i in range(4))
            mixed = silu(mixed)
            record(b + "attn.hook_conv", mixed)
            g = -w["decay"] * np.logaddexp(0, a + w["decay_bias"])
            record(b + "attn.hook_log_decay", g)
            beta = 1 / (1 + np.exp(-beta))
            record(b + "attn.hook_beta", beta)
            q = mixed[:, : Hk * dk].reshape(N, Hk, dk)
            k = mixed[:, Hk * dk : 2 * Hk * dk].reshape(N, Hk, dk)
            v = mixed[:, 2 * Hk * dk :].reshape(N, Hv, dv)
            q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6)
            k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
            q = np.repeat(q, Hv // Hk, 1) / np.sqrt(dk)
            k = np.repeat(k, Hv // Hk, 1)
            S, y, memories = np.zeros((Hv, dk, dv)), np.zeros((N, Hv, dv)), []
            for t in range(N):
                old = S
                S = S * np.exp(g[t])[:, None, None]
                error = v[t] - np.einsum("hk,hkv->hv", k[t], S)
                S = S + np.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
                y[t] = np.einsum("hk,hkv->hv", q[t], S)
                memories.append(S)
            record(b + "attn.hook_state", np.stack(memories))
            record(b + "attn.hook_delta_out", y)
            y = norm(y, w["delta_norm"], eps).reshape(N, -1)
            record(b + "attn.delta_norm.hook_normalized", y)
            y = y * silu(z)
        else:
            q, k, v = q.reshape(N, H, d), k.reshape(N, G, d), v.reshape(N, G, d)
            q = norm(q, w["q_norm"], eps)
            k = norm(k, w["k_norm"], eps)
            record(b + "attn.q_norm.hook_normalized", q.reshape(N, -1))
            record(b + "attn.k_norm.hook_normalized", k.reshape(N, -1))
            freq = C.rope.theta ** (-np.arange(0, part, 2) / part)
            angles = np.arange(N)[:, None] * freq
            q = turn(q, angles[:, None], part)
            k = turn(k, angles[:, None], part)
            record(b + "attn.hook_rot_q", q)
            record(b + "attn.hook_rot_k", k)
            record(b + "attn.hook_v", v)
            s = np.einsum("ihd,jhd->hij", q, np.repeat(k, H // G, 1)) / np.sqrt(d)
            s = np.where(np.tri(N, dtype=bool), s, -np.inf)
            record(b + "attn.hook_attn_scores", s)
            e = np.exp(s - s.max(-1, keepdims=True))
            p = e / e.sum(-1, keepdims=True)
            record(b + "attn.hook_pattern", p)
            y = np.einsum("hij,jhd->ihd", p, np.repeat(v, H // G, 1)).reshape(N, -1)
            record(b + "attn.hook_z", y)
            y = y * (1 / (1 + np.exp(-z)))
        record(b + "attn.hook_gated_z", y)
        o = mul(y, w["o_proj"])
        record(b + "attn.o_proj.hook_out", o)
        x = x + o
        record(b + "hook_resid_mid", x)
        h = norm(x, w["ffn_norm"], eps)
        record(b + "ln2.hook_normalized", h)
        gate, up = mul(h, w["gate_proj"]), mul(h, w["up_proj"])
        record(b + "mlp.gate_proj.hook_out", gate)
        record(b + "mlp.up_proj.hook_out", up)
        m = silu(gate) * up
        record(b + "mlp.hook_post", m)
        f = mul(m, w["down_proj"])
        record(b + "mlp.down_proj.hook_out", f)
        x = x + f
        record(b + "hook_resid_post", x)
    x = norm(x, final, eps)
    record("ln_final.hook_normalized", x)
    record("lm_head.hook_out", mul(x, head))


def norm(x, weight, eps):  # type: ignore[no-untyped-def]
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def mul(x, w):  # type: ignore[no-untyped-def]
    return x @ w.T.astype(np.float64)


def silu(x):  # type: ignore[no-untyped-def]
    return x / (1 + np.exp(-x))


def turn(x, angles, part):  # type: ignore[no-untyped-def]
    a, b, rest = x[..., : part // 2], x[..., part // 2 : part], x[..., part:]
    c, s = np.cos(angles), np.sin(angles)
    return np.concatenate([a * c - b * s, b * c + a * s, rest], -1)


def regrouped(w, change):  # type: ignore[no-untyped-def]
    """A matrix in groups of 128 with other scales: change(scales (rows, groups)). The head is left as it is."""
    groups = w.reshape(len(w), -1, 128)
    s = np.abs(groups).max(-1)
    return w if len(w) == 320 else (groups / np.maximum(s, 1e-30)[..., None] * change(s)[..., None]).reshape(w.shape)


TEXT = "\n".join(map(inspect.getsource, (norm, mul, silu, turn, regrouped)))
SOURCE = inspect.getsource(forward)
UNIT = "/ np.sqrt(({0} * {0}).sum(-1, keepdims=True) + 1e-6)"
# fmt: off
# name -> (words of the cause, a regular expression; lines that begin so and what replaces them)
LIST: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "L2 with a large eps": ("", (("q = q / ", "q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-2)"), ("k = k / ", "k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-2)"))),
    "L2 over all heads": ("", (("q = q / ", "q = q / np.sqrt((q * q).sum((1, 2), keepdims=True) + 1e-6)"), ("k = k / ", "k = k / np.sqrt((k * k).sum((1, 2), keepdims=True) + 1e-6)"))),
    "L2 is a sum of |x|": ("", (("q = q / ", "q = q / np.abs(q).sum(-1, keepdims=True)"), ("k = k / ", "k = k / np.abs(k).sum(-1, keepdims=True)"))),
    "L2 is the largest": ("", (("k = k / ", "k = k / np.abs(k).max(-1, keepdims=True)"),)),
    "v to unit length too": ("", (("v = mixed", "v = mixed[:, 2 * Hk * dk :].reshape(N, Hv, dv); v = v " + UNIT.format("v")),)),
    "conv without its first tap": ("", (("taps =", "taps = w['conv'] * [0, 1, 1, 1]"),)),
    "conv in bfloat16": ("", (("taps =", "taps = narrow(w['conv'], BF)"),)),
    "conv adds its input": ("", (("mixed = sum", "mixed = sum(padded[i : i + N] * taps[:, i] for i in range(4)) + qkv"),)),
    "conv with gelu": ("", (("mixed = silu", "mixed = mixed / (1 + np.exp(-1.702 * mixed))"),)),
    "conv with relu": ("", (("mixed = silu", "mixed = np.maximum(mixed, 0)"),)),
    "silu not on v": ("", (("mixed = silu", "mixed = np.where(np.arange(mixed.shape[1]) < 2 * Hk * dk, silu(mixed), mixed)"),)),
    "channels as v, q, k": ("", (("qkv =", "qkv = np.concatenate([v, q, k], 1)"), ("mixed = silu", "mixed = np.roll(silu(mixed), -Hv * dv, 1)"))),
    "conv's taps of the next channel": ("", (("taps =", "taps = np.roll(w['conv'], 1, 0)"),)),
    "2 sigmoid": ("", (("beta = 1", "beta = 2 / (1 + np.exp(-beta))"),)),
    "beta is tanh": ("", (("beta = 1", "beta = np.tanh(beta)"),)),
    "2^g": ("", (("S = S * np", "S = S * 2.0 ** g[t][:, None, None]"),)),
    "log2 of 1 + e^x": ("", (("g =", "g = -w['decay'] * np.logaddexp(0, a + w['decay_bias']) / np.log(2)"),)),
    "decay not below e^-1": ("", (("g =", "g = np.maximum(-w['decay'] * np.logaddexp(0, a + w['decay_bias']), -1)"),)),
    "decay of the next head": ("", (("g =", "g = np.roll(-w['decay'] * np.logaddexp(0, a + w['decay_bias']), 1, 1)"),)),
    "A of the next head": ("", (("g =", "g = -np.roll(w['decay'], 1) * np.logaddexp(0, a + w['decay_bias'])"),)),
    "dt_bias subtracted": ("", (("g =", "g = -w['decay'] * np.logaddexp(0, a - w['decay_bias'])"),)),
    "g in bfloat16": ("", (("g =", "g = narrow(-w['decay'] * np.logaddexp(0, a + w['decay_bias']), BF)"),)),
    "one decay for all heads": ("", (("g =", "g = -w['decay'] * np.logaddexp(0, a + w['decay_bias']); g = g * 0 + g.mean(1, keepdims=True)"),)),
    "memory in fp8": ("", (("S = S + ", "S = narrow(S + np.einsum('hk,hv->hkv', k[t], beta[t][:, None] * error), F8)"),)),
    "memory in int8, a scale per head": ("", (("S = S + ", "S = S + np.einsum('hk,hv->hkv', k[t], beta[t][:, None] * error); m = np.maximum(np.abs(S).max((1, 2), keepdims=True), 1e-9) / 127; S = np.rint(S / m) * m"),)),
    "memory emptied every 8 tokens": ("", (("S = S * np", "S = S * np.exp(g[t])[:, None, None] * (t % 8 > 0)"),)),
    "chunks of 4 without correction inside": ("", (("old =", "old = S if t % 4 == 0 else old * np.exp(g[t - 1])[:, None, None]"), ("error =", "error = v[t] - np.einsum('hk,hkv->hv', k[t], old * np.exp(g[t])[:, None, None])"))),
    "beta twice": ("", (("S = S + ", "S = S + np.einsum('hk,hv->hkv', k[t], beta[t][:, None] ** 2 * error)"),)),
    "beta of the token before": ("", (("S = S + ", "S = S + np.einsum('hk,hv->hkv', k[t], beta[max(t - 1, 0)][:, None] * error)"),)),
    "decay of the token before": ("", (("S = S * np", "S = S * np.exp(g[max(t - 1, 0)])[:, None, None]"),)),
    "asked with k": ("", (("y[t] =", "y[t] = np.einsum('hk,hkv->hv', k[t], S)"),)),
    "k is scaled in the recall": ("", (("error =", "error = v[t] - np.einsum('hk,hkv->hv', k[t] / np.sqrt(dk), S)"),)),
    "v's heads in tiles": ("", (("v = mixed", "v = mixed[:, 2 * Hk * dk :].reshape(N, Hk, Hv // Hk, dv).swapaxes(1, 2).reshape(N, Hv, dv)"),)),
    "gate's heads in tiles": ("", (("y = y * silu", "y = y * silu(z).reshape(N, Hk, Hv // Hk, dv).swapaxes(1, 2).reshape(N, -1)"),)),
    "1 added to the delta norm's weight": ("", (("y = norm(y", "y = norm(y, 1 + w['delta_norm'], eps).reshape(N, -1)"),)),
    "delta norm over all heads": ("", (("y = norm(y", "y = norm(y.reshape(N, -1), np.tile(w['delta_norm'], Hv), eps)"),)),
    "delta norm missing": ("", (("y = norm(y", "y = (y * w['delta_norm']).reshape(N, -1)"),)),
    "gate without silu": ("", (("y = y * silu", "y = y * z"),)),
    "attention's gate missing": ("", (("y = y * (1", "y = y"),)),
    "attention's gate of the next head": ("", (("y = y * (1", "y = y * np.roll(1 / (1 + np.exp(-z)), d, 1)"),)),
    "RoPE of the last numbers": ("", (("q = turn", "q = np.roll(turn(np.roll(q, part, -1), angles[:, None], part), -part, -1)"), ("k = turn", "k = np.roll(turn(np.roll(k, part, -1), angles[:, None], part), -part, -1)"))),
    "RoPE's frequencies over the whole head": ("", (("freq =", "freq = C.rope.theta ** (-np.arange(0, part, 2) / d)"),)),
    "q normed after RoPE": ("", (("q = norm", "q = q"), ("q = turn", "q = norm(turn(q, angles[:, None], part), w['q_norm'], eps)"))),
    # -- written when the edits for those above were there, and before any for these
    "scales of the group before": ("", (("return x @", "return x @ regrouped(w, lambda s: np.roll(s, 1, 1)).T.astype(np.float64)"),)),
    "scales of rows 16 too far": ("", (("return x @", "return x @ regrouped(w, lambda s: np.roll(s, 16, 0)).T.astype(np.float64)"),)),
    "scales stored group by group": ("", (("return x @", "return x @ regrouped(w, lambda s: s.reshape(s.shape[::-1]).T).T.astype(np.float64)"),)),
    "the first group's scale for all": ("", (("return x @", "return x @ regrouped(w, lambda s: s[:, :1].repeat(s.shape[1], 1)).T.astype(np.float64)"),)),
    "scales in fp8": ("", (("return x @", "return x @ regrouped(w, lambda s: narrow(s, F8)).T.astype(np.float64)"),)),
    "scales in bfloat16": ("", (("return x @", "return x @ regrouped(w, lambda s: narrow(s, BF)).T.astype(np.float64)"),)),
    "the mean of a row's scales": ("", (("return x @", "return x @ regrouped(w, lambda s: s * 0 + s.mean(1, keepdims=True)).T.astype(np.float64)"),)),
    "k divided by head_k_dim": ("", (("k = np.repeat", "k = np.repeat(k, Hv // Hk, 1) / dk"),)),
    "silu of the gate, squared": ("", (("y = y * silu", "y = y * silu(z) ** 2"),)),
    "a convolution over every second token": ("", (("padded =", "padded = np.concatenate([np.zeros((6, qkv.shape[1])), qkv])"), ("mixed = sum", "mixed = sum(padded[2 * i : 2 * i + N] * taps[:, i] for i in range(4))"))),
    "the delta norm's eps": ("", (("y = norm(y", "y = norm(y, w['delta_norm'], 1e-3).reshape(N, -1)"),)),
    "v of the token before": ("", (("v = mixed", "v = np.roll(mixed[:, 2 * Hk * dk :].reshape(N, Hv, dv), 1, 0)"),)),
    "key heads in reverse": ("", (("k = np.repeat", "k = np.repeat(k, Hv // Hk, 1)[:, ::-1]"),)),
    "queries of the next head": ("", (("q = np.repeat", "q = np.roll(np.repeat(q, Hv // Hk, 1) / np.sqrt(dk), 1, 1)"),)),
    "chunks of 16 that lose the memory": ("", (("S = S * np", "S = S * np.exp(g[t])[:, None, None] * (t % 16 > 0)"),)),
    "what is written is rounded to bfloat16": ("", (("S = S + ", "S = S + narrow(np.einsum('hk,hv->hkv', k[t], beta[t][:, None] * error), BF)"),)),
    "the error in bfloat16": ("", (("error =", "error = narrow(v[t] - np.einsum('hk,hkv->hv', k[t], S), BF)"),)),
    "alpha in bfloat16": ("", (("S = S * np", "S = S * narrow(np.exp(g[t]), BF)[:, None, None]"),)),
    "softmax in bfloat16": ("", (("p = e", "p = narrow(e / e.sum(-1, keepdims=True), BF)"),)),
    "attention's gate of k's heads": ("", (("y = y * (1", "y = (y.reshape(N, H, d) / (1 + np.exp(-z.reshape(N, H, d)[:, :1]))).reshape(N, -1)"),)),
    "the decay's floor e^-0.5": ("", (("S = S * np", "S = S * np.maximum(np.exp(g[t]), 0.6)[:, None, None]"),)),
    "beta not above 0.5": ("", (("beta = 1", "beta = np.minimum(1 / (1 + np.exp(-beta)), 0.5)"),)),
    # -- written when the edits for those above were there
    "decay on the answer": ("its decay", (("S = S * np", "S = S"), ("y[t] =", "y[t] = np.einsum('hk,hkv->hv', q[t], S) * np.exp(g[t])[:, None]"))),
    "conv centred": ("2 tokens after the current one", (("padded =", "padded = np.concatenate([np.zeros((1, qkv.shape[1])), qkv, np.zeros((2, qkv.shape[1]))])"),)),
    "1 + g for exp(g)": (r"1 \+ log alpha", (("S = S * np", "S = S * (1 + g[t])[:, None, None]"),)),
    "L2 eps outside the root": ("0.01 is added to the length", (("q = q / ", "q = q / (np.sqrt((q * q).sum(-1, keepdims=True)) + 1e-2)"), ("k = k / ", "k = k / (np.sqrt((k * k).sum(-1, keepdims=True)) + 1e-2)"))),
    "dt at most 0.5": ("softplus is 0.5 at most", (("g =", "g = -w['decay'] * np.minimum(np.logaddexp(0, a + w['decay_bias']), 0.5)"),)),
    "A_log in bfloat16": ("A_log is rounded to bfloat16", (("g =", "g = -np.exp(narrow(np.log(w['decay']), BF)) * np.logaddexp(0, a + w['decay_bias'])"),)),
    "beta tanh and conv relu": ("", (("beta = 1", "beta = np.tanh(beta)"), ("mixed = silu", "mixed = np.maximum(mixed, 0)"))),
    "gate missing and dt_bias subtracted": ("", (("y = y * silu", "y = y"), ("g =", "g = -w['decay'] * np.logaddexp(0, a - w['decay_bias'])"))),
}
# fmt: on


def run(name: str | None, ids: Sequence[int]) -> EngineTrace:
    """The engine's tensors, with the mistake of that name; None: without one."""
    text = TEXT + SOURCE
    for line, new in LIST[name][1] if name else ():
        text = edited(text, Mistake("forward", line, new, "", ""))
    scope: dict[str, Any] = {"np": np, "ml_dtypes": ml_dtypes}
    exec(HELPERS + text, scope)
    trace = EngineTrace()
    model, layers = model_of_family()
    w = model.weights
    embed, head = (each.rows(slice(None), np.float32) for each in (w.embedding, w.lm_head))

    def keep(name: str, array: Any) -> None:
        trace[name] = np.array(array, dtype=np.float32)

    with np.errstate(all="ignore"):
        scope["forward"](np.array(ids), layers, embed, head, w.final_norm.weight, model.config, keep)
    return trace


def judge(name: str, is_thin: bool = False, budget_s: float = 25) -> Any:
    """Run the engine, and let crossval explain its tensors."""
    return judge_engine(model_of_family()[0], partial(run, name), LIST[name][0], is_thin, budget_s)


def main(arguments: Sequence[str] | None = None) -> int:
    return campaign({name: ("", partial(judge, name)) for name in LIST}, arguments)


if __name__ == "__main__":
    sys.exit(main())
