"""Draws mistakes at random, plants each in an engine and counts which of them crossval explains.

    python crossval/drawn_mistakes.py [--seeds 0:500] [--thin] [--correct] [--json FILE]

The engine is `forward` below: its own text in NumPy, one statement a line. A mistake is a change of that text: a line is
replaced by another formula with drawn constants, or a line is added after an assignment that scales, moves, cuts, rounds
or exchanges what was assigned, in drawn layers and in a drawn part of the tensor. Nothing here knows the descriptions of
`bitnet_ref.crossval.explain`. Shared with the package are the random checkpoints, as the package reads them, and the
names of a trace.

For each seed: is the first wrong op the one that was changed, and is the first explanation the cause? An explanation
counts only if the reference with it also gives the engine's tensors on tokens that crossval has not seen.
--thin shows crossval hook_resid_post and the logits alone. --correct draws engines without a mistake in three dtypes.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from planted_models import BASE, tensors_for, write

import bitnet_ref
from bitnet_ref.crossval.compare import View, compare
from bitnet_ref.crossval.explain.diagnose import diagnose
from bitnet_ref.crossval.explain.evidence import Evidence
from bitnet_ref.crossval.explain.variants import Setting
from bitnet_ref.reference.weights import TernaryLinear

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


# -- the engine: a text of its own ------------------------------------------------------------------------------------


def forward(ids, W, C, R, record):  # type: ignore[no-untyped-def]
    """The pass over ids. R rounds to the engine's dtype, record(name, array) keeps a tensor."""
    N, D, H, G, d, eps = len(ids), C.D, C.H, C.G, C.d, C.eps
    layer = -1
    x = R(W["embed"][ids])
    record("hook_embed", x)
    for layer in range(C.L):
        w, b = W[layer], f"blocks.{layer}."
        record(b + "hook_resid_pre", x)
        r1 = R(np.sqrt(C.mean(x * x) + eps))
        h = R(x / r1 * w["attn_norm"])
        record(b + "ln1.hook_scale", r1)
        record(b + "ln1.hook_normalized", h)
        q = linear(h, w["q_proj"], C, R, record, b + "attn.q_proj", layer)
        k = linear(h, w["k_proj"], C, R, record, b + "attn.k_proj", layer)
        v = linear(h, w["v_proj"], C, R, record, b + "attn.v_proj", layer)
        q = q.reshape(N, H, d)
        k = k.reshape(N, G, d)
        v = v.reshape(N, G, d)
        record(b + "attn.hook_q", q)
        record(b + "attn.hook_k", k)
        if C.qk_norm:
            rq = R(np.sqrt(C.mean(q * q) + eps))
            rk = R(np.sqrt(C.mean(k * k) + eps))
            q = R(q / rq * w["q_norm"])
            k = R(k / rk * w["k_norm"])
            record(b + "attn.q_norm.hook_scale", rq[..., 0])
            record(b + "attn.q_norm.hook_normalized", q.reshape(N, -1))
            record(b + "attn.k_norm.hook_scale", rk[..., 0])
            record(b + "attn.k_norm.hook_normalized", k.reshape(N, -1))
        pos = np.arange(N)
        freq = C.theta ** (-np.arange(0, d, 2) / d)
        ang = pos[:, None] * freq
        cos, sin = R(np.cos(ang))[:, None], R(np.sin(ang))[:, None]
        q1, q2, k1, k2 = q[..., : d // 2], q[..., d // 2 :], k[..., : d // 2], k[..., d // 2 :]
        q = R(np.concatenate([q1 * cos - q2 * sin, q2 * cos + q1 * sin], -1))
        k = R(np.concatenate([k1 * cos - k2 * sin, k2 * cos + k1 * sin], -1))
        record(b + "attn.hook_rot_q", q)
        record(b + "attn.hook_rot_k", k)
        record(b + "attn.hook_v", v)
        kvmap = np.arange(H) // (H // G)
        s = R(C.dot("ihd,jhd->hij", q, k[:, kvmap]) / np.sqrt(d))
        i, j = np.arange(N)[:, None], np.arange(N)[None]
        s = np.where(j <= i, s, -np.inf)
        record(b + "attn.hook_attn_scores", s)
        e = np.exp(s - s.max(-1, keepdims=True))
        p = R(e / e.sum(-1, keepdims=True))
        record(b + "attn.hook_pattern", p)
        z = R(C.dot("hij,jhd->ihd", p, v[:, kvmap]))
        record(b + "attn.hook_z", z)
        z = z.reshape(N, H * d)
        if C.sub_norm:
            r2 = R(np.sqrt(C.mean(z * z) + eps))
            z = R(z / r2 * w["attn_sub_norm"])
            record(b + "attn.sub_norm.hook_scale", r2)
            record(b + "attn.sub_norm.hook_normalized", z)
        o = linear(z, w["o_proj"], C, R, record, b + "attn.o_proj", layer)
        record(b + "hook_attn_out", o)
        x = R(x + o)
        record(b + "hook_resid_mid", x)
        r3 = R(np.sqrt(C.mean(x * x) + eps))
        h = R(x / r3 * w["ffn_norm"])
        record(b + "ln2.hook_scale", r3)
        record(b + "ln2.hook_normalized", h)
        g = linear(h, w["gate_proj"], C, R, record, b + "mlp.gate_proj", layer)
        u = linear(h, w["up_proj"], C, R, record, b + "mlp.up_proj", layer)
        record(b + "mlp.hook_pre", g)
        record(b + "mlp.hook_pre_linear", u)
        a = R(C.act(g) * u)
        record(b + "mlp.hook_post", a)
        if C.sub_norm:
            r4 = R(np.sqrt(C.mean(a * a) + eps))
            a = R(a / r4 * w["ffn_sub_norm"])
            record(b + "mlp.sub_norm.hook_scale", r4)
            record(b + "mlp.sub_norm.hook_normalized", a)
        f = linear(a, w["down_proj"], C, R, record, b + "mlp.down_proj", layer)
        record(b + "hook_mlp_out", f)
        x = R(x + f)
        record(b + "hook_resid_post", x)
    layer = 0
    r5 = R(np.sqrt(C.mean(x * x) + eps))
    y = R(x / r5 * W["final_norm"])
    record("ln_final.hook_scale", r5)
    record("ln_final.hook_normalized", y)
    logits = R(C.dot("nk,ok->no", y, W["head"]))
    record("lm_head.hook_out", logits)


def linear(x, m, C, R, record, name, layer):  # type: ignore[no-untyped-def]
    """x (N, K) times a matrix: a float one, or integers with a scale."""
    proj = name.rsplit(".", 1)[1]
    if m[1] is None:
        y = R(C.dot("nk,ok->no", x, m[0]))
        record(name + ".hook_out", y)
        return y
    amax = np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-5))
    xs = np.float32(127) / amax
    xq = np.clip(np.rint(x * xs), -128, 127)
    acc = xq.astype(np.float64) @ m[0].T.astype(np.float64)
    y = R(acc.astype(np.float32) * (m[1] / xs))
    record(name + ".hook_x_int8", xq.astype(np.int32))
    record(name + ".hook_x_scale", np.broadcast_to(xs, amax.shape))
    record(name + ".hook_acc_int32", acc)
    record(name + ".hook_out", y)
    return y


# -- the mistakes: changes of that text --------------------------------------------------------------------------------

VARIABLES = {  # the variable, the beginning of the line that assigns it, the ends of the trace names that then may differ
    "x0": ("x = R(W", "hook_embed"), "rqn": ("rq =", "q_norm.hook_scale"), "rkn": ("rk =", "k_norm.hook_scale"), "qn": ("q = R(q /", "q_norm.hook_normalized"), "kn": ("k = R(k /", "k_norm.hook_normalized"),
    "r1": ("r1 =", "ln1.hook_scale"), "h1": ("h = R(x / r1", "ln1.hook_normalized"),
    "q": ("q = q.reshape", "hook_q"), "k": ("k = k.reshape", "hook_k"), "v": ("v = v.reshape", "hook_v"),
    "rq": ("q = R(np.con", "hook_rot_q"), "rk": ("k = R(np.con", "hook_rot_k"), "s": ("s = np.where", "hook_attn_scores"),
    "p": ("p =", "hook_pattern"), "z": ("z = R(C.dot", "hook_z"), "r2": ("r2 =", "attn.sub_norm.hook_scale"),
    "zn": ("z = R(z / r2", "attn.sub_norm.hook_normalized"), "o": ("o =", "hook_attn_out"), "x1": ("x = R(x + o", "hook_resid_mid"),
    "r3": ("r3 =", "ln2.hook_scale"), "h2": ("h = R(x / r3", "ln2.hook_normalized"), "g": ("g =", "hook_pre"), "u": ("u =", "hook_pre_linear"),
    "a": ("a = R(C.act", "hook_post"), "r4": ("r4 =", "mlp.sub_norm.hook_scale"), "an": ("a = R(a / r4", "mlp.sub_norm.hook_normalized"),
    "f": ("f =", "hook_mlp_out"), "x2": ("x = R(x + f", "hook_resid_post"), "r5": ("r5 =", "ln_final.hook_scale"),
    "y5": ("y = R(x / r5", "ln_final.hook_normalized"), "logits": ("logits =", "lm_head.hook_out"),
    "xs": ("xs =", "hook_x_scale hook_x_int8"), "xq": ("xq =", "hook_x_int8"), "acc": ("acc =", "hook_acc_int32"), "yl": ("y = R(acc", "hook_out"),
    "yd": ("y = R(C.dot(\"nk,ok->no\", x, m", "hook_out"),
}  # fmt: skip
Rule = tuple[str, str, str]  # variable, what stands in its line, what replaces it; {…} are drawn by `constants`
RULES: tuple[Rule, ...] = (
    *((r, "+ eps", new) for r in ("r1", "r2", "r3", "r4", "r5") for new in ("+ {eps}", "", "+ {eps}", "+ eps * D")),
    *((r, "np.sqrt(", "(") for r in ("r1", "r2", "r3")), *((r, ") + eps)", ")) + eps") for r in ("r1", "r3", "r5")),
    ("r1", "C.mean(x * x)", "C.mean((x - C.mean(x)) ** 2)"), ("r3", "C.mean(x * x)", "C.mean((x - C.mean(x)) ** 2)"),
    ("r1", "np.sqrt(C.mean(x * x) + eps)", "np.abs(x).max(-1, keepdims=True)"), ("r3", "np.sqrt(C.mean(x * x) + eps)", "C.mean(np.abs(x))"),
    ("r1", "C.mean(x * x)", "C.mean(x * x) * D / (D - 1)"), ("r3", "C.mean(x * x)", "C.mean(x[:, :{cut}] ** 2)"), ("r5", "C.mean(x * x)", "C.mean(x[:, :{cut}] ** 2)"),
    ("r4", "C.mean(a * a)", "(a * a).sum(-1, keepdims=True)"), ("r2", "C.mean(z * z)", "(z * z).sum(-1, keepdims=True)"),
    ("qn", "R(q / rq * w[\"q_norm\"])", "q"), ("kn", "* w[\"k_norm\"]", ""), ("qn", "w[\"q_norm\"]", "w[\"k_norm\"]"), ("rqn", "+ eps", "+ {eps}"), ("rkn", "np.sqrt(", "("),
    ("h1", "* w[\"attn_norm\"]", ""), ("h1", "w[\"attn_norm\"]", "w[\"ffn_norm\"]"), ("h2", "w[\"ffn_norm\"]", "w[\"attn_norm\"]"), ("h1", "w[\"attn_norm\"]", "(1 + w[\"attn_norm\"])"),
    ("h1", "x / r1", "x"), ("h2", "x / r3", "x"), ("h2", "x / r3", "x * r3"), ("y5", "x / r5", "x"), ("y5", "W[\"final_norm\"]", "W[0][\"attn_norm\"]"), ("y5", "* W[\"final_norm\"]", ""),
    ("h1", "w[\"attn_norm\"]", "W[(layer + 1) % C.L][\"attn_norm\"]"), ("h2", "R(x / r3 * w[\"ffn_norm\"])", "x"), ("h1", "R(x / r1 * w[\"attn_norm\"])", "x"),
    ("zn", "R(z / r2 * w[\"attn_sub_norm\"])", "z"), ("an", "R(a / r4 * w[\"ffn_sub_norm\"])", "a"), ("zn", "* w[\"attn_sub_norm\"]", ""), ("an", "z / r2", "z"),
    ("h1", "w[\"attn_norm\"]", "w[\"attn_norm\"] ** {c}"), ("h2", "w[\"ffn_norm\"]", "np.roll(w[\"ffn_norm\"], 1)"),
    ("pos", "np.arange(N)", "np.arange(N) + {n}"), ("pos", "np.arange(N)", "np.arange(N) * {n}"), ("pos", "np.arange(N)", "np.arange(N) * {c}"), ("pos", "np.arange(N)", "np.arange(N)[::-1]"), ("pos", "np.arange(N)", "np.arange(N) % {n}"),
    ("freq", "C.theta", "{theta}"), ("freq", "C.theta", "{theta}"), ("freq", "/ d)", "/ D)"), ("freq", "/ d)", "/ (2 * d))"), ("freq", "np.arange(0, d, 2)", "np.arange(2, d + 2, 2)"), ("freq", "C.theta", "np.where(np.arange(d // 2) < d // 4, C.theta, 1e30)"),
    ("freq", "-np.arange(0, d, 2)", "np.arange(0, d, 2)"), ("freq", "C.theta ** (-np.arange(0, d, 2) / d)", "(C.theta ** (-np.arange(0, d, 2) / d))[::-1]"),
    ("rq", "- q2 * sin", "+ q2 * sin"), ("rq", "q2 * cos + q1 * sin", "q2"), ("rk", "- k2 * sin", "+ k2 * sin"), ("rk", "R(np.concatenate([k1 * cos - k2 * sin, k2 * cos + k1 * sin], -1))", "k"), ("rq", "R(np.concatenate([q1 * cos - q2 * sin, q2 * cos + q1 * sin], -1))", "q"),
    ("cos", "np.cos(ang)", "np.sin(ang)"), ("cos", "R(np.sin(ang))", "-R(np.sin(ang))"), ("cos", "np.cos(ang)", "np.cos(ang) * {c}"),
    ("kvmap", "np.arange(H) // (H // G)", "np.arange(H) % G"), ("kvmap", "np.arange(H) // (H // G)", "np.arange(H) * 0 + {n} % G"), ("kvmap", "np.arange(H) // (H // G)", "(np.arange(H) // (H // G))[::-1]"), ("kvmap", "np.arange(H) // (H // G)", "(np.arange(H) // (H // G) + 1) % G"),
    ("s0", "/ np.sqrt(d)", "/ d"), ("s0", "/ np.sqrt(d)", ""), ("s0", "/ np.sqrt(d)", "/ np.sqrt(D)"), ("s0", "/ np.sqrt(d)", "/ np.sqrt(D / G)"), ("s0", "/ np.sqrt(d)", "* {c}"), ("s0", "/ np.sqrt(d)", "/ np.sqrt(d) - {small} * (np.arange(N)[:, None] - np.arange(N))"),
    ("s0", "R(C.dot", "{cap} * np.tanh(1 / {cap} * C.dot"), ("s", "j <= i", "j <= i + {n}"), ("s", "j <= i", "(j <= i) & (j > i - {w})"), ("s", "j <= i", "(j < i) | (i == 0)"), ("s", "j <= i", "(j <= i) & ((j > 0) | (i == 0))"), ("s", "j <= i", "j < N"), ("s", "-np.inf", "0.0"), ("s", "-np.inf", "-{n}.0"),
    ("p", "e.sum(-1, keepdims=True)", "(e.sum(-1, keepdims=True) + {c})"), ("p", "/ e.sum(-1, keepdims=True)", ""), ("p", "e.sum(-1, keepdims=True)", "(e.sum(-1, keepdims=True) + np.exp(-s.max(-1, keepdims=True)))"), ("p", "e / e.sum(-1, keepdims=True)", "e / np.maximum(e.sum(-1, keepdims=True) - np.diagonal(e, axis1=1, axis2=2)[:, :, None] * (i[None] > 0), 1e-3)"),
    ("e", "np.exp(s - s.max(-1, keepdims=True))", "np.exp2(s - s.max(-1, keepdims=True))"), ("e", "np.exp(s - s.max(-1, keepdims=True))", "np.exp({c} * (s - s.max(-1, keepdims=True)))"), ("e", "s - s.max(-1, keepdims=True)", "np.where(s > -np.inf, 5 * np.tanh(s / 5), s)"),
    ("z", "v[:, kvmap]", "k[:, kvmap]"), ("z", "v[:, kvmap]", "v[:, np.arange(H) % G]"), ("z", "\"hij,jhd->ihd\", p, v", "\"hji,jhd->ihd\", p, v"),
    ("x1", "x + o", "o"), ("x1", "x + o", "x"), ("x1", "x + o", "x + 2 * o"), ("x1", "x + o", "h + o"), ("x1", "x + o", "x - o"), ("x1", "x + o", "2 * x + o"), ("x1", "x + o", "x + {c} * o"),
    ("x2", "x + f", "f"), ("x2", "x + f", "x"), ("x2", "x + f", "x + 2 * f"), ("x2", "x + f", "h + f"), ("x2", "x + f", "x + f + o"), ("x2", "x + f", "x + f * {c}"), ("x2", "x + f", "(x + f) / np.sqrt(2)"),
    ("a", "C.act(g) * u", "C.act(u) * g"), ("a", "C.act(g) * u", "C.act(g * u)"), ("a", "C.act(g) * u", "C.act(g)"), ("a", "C.act(g) * u", "g * u"), ("a", "C.act(g) * u", "C.act(g) + u"), ("a", "C.act(g)", "np.maximum(g, 0)"), ("a", "C.act(g)", "np.tanh(g)"), ("a", "C.act(g)", "g / (1 + np.exp(-1.702 * g))"), ("a", "C.act(g)", "g / (1 + np.exp(-{c} * g))"),
    ("a", "C.act(g)", "np.where(g > 0, g, {small} * g)"), ("a", "C.act(g)", "C.act(np.minimum(g, {c}))"), ("a", "* u", "* (u + 1)"), ("a", "C.act(g) * u", "C.act(g) * np.clip(u, -{c}, {c})"), ("a", "C.act(g)", "np.log1p(np.exp(g))"), ("a", "C.act(g)", "g * np.clip(g + 3, 0, 6) / 6"), ("a", "C.act(g)", "C.act(g) ** 2"), ("a", "C.act(g)", "np.abs(g)"),
    ("xs", "127", "{range}"), ("xs", "127", "{range}"), ("xs", "np.float32(127) / amax", "np.float32(127) / amax.max()"), ("amax", "np.abs(x)", "x"), ("amax", "np.abs(x)", "np.abs(x[:, :{cut}])"), ("amax", "np.abs(x).max(-1, keepdims=True)", "4 * np.abs(x).mean(-1, keepdims=True)"), ("amax", "1e-5", "{c}"),
    ("xq", "np.rint(x * xs)", "np.floor(x * xs)"), ("xq", "np.rint(x * xs)", "np.trunc(x * xs)"), ("xq", "np.rint(x * xs)", "np.ceil(x * xs)"), ("xq", "-128, 127", "-{clip}, {clip}"), ("xq", "np.rint(x * xs)", "2 * np.rint(x * xs / 2)"), ("xq", "np.rint(x * xs)", "16 * np.rint(x * xs / 16)"), ("xq", "np.rint(x * xs)", "np.rint(x * xs + {small})"), ("xq", "np.rint(x * xs)", "np.abs(np.rint(x * xs))"), ("xq", "-128, 127", "0, 127"),
    ("acc", "m[0].T.astype(np.float64)", "np.abs(m[0].T).astype(np.float64)"), ("acc", "xq.astype(np.float64) @ m[0].T.astype(np.float64)", "xq[:, :-{tail}].astype(np.float64) @ m[0][:, :-{tail}].T.astype(np.float64)"), ("acc", "xq.astype(np.float64) @ m[0].T.astype(np.float64)", "xq[:, {tail}:].astype(np.float64) @ m[0][:, {tail}:].T.astype(np.float64)"),
    ("acc", "m[0].T.astype(np.float64)", "(m[0].T + 1.0)"), ("acc", "m[0].T.astype(np.float64)", "np.maximum(m[0], 0).T.astype(np.float64)"), ("acc", "m[0].T", "m[0][:, ::-1].T"), ("acc", "m[0].T", "m[0].reshape(len(m[0]), -1, 4)[:, :, ::-1].reshape(m[0].shape).T"), ("acc", "m[0].T", "m[0].reshape(len(m[0]), {inner}, -1).swapaxes(1, 2).reshape(m[0].shape).T"),
    ("acc", "xq.astype(np.float64) @ m[0].T.astype(np.float64)", "(xq.astype(np.float64) @ m[0].T.astype(np.float64) + {half}) % (2 * {half}) - {half}"), ("acc", "xq.astype(np.float64) @ m[0].T.astype(np.float64)", "np.clip(xq.astype(np.float64) @ m[0].T.astype(np.float64), -{half}, {half} - 1)"), ("acc", "m[0].T.astype(np.float64)", "np.where(m[0] == 0, 1, m[0]).T.astype(np.float64)"),
    ("yl", "m[1] / xs", "1 / xs"), ("yl", "m[1] / xs", "m[1] ** 2 / xs"), ("yl", "m[1] / xs", "m[1] * xs"), ("yl", "m[1] / xs", "1 / (m[1] * xs)"), ("yl", "m[1] / xs", "m[1] / xs[:1]"), ("yl", "m[1] / xs", "m[1] / xs.max()"), ("yl", "m[1] / xs", "m[1] / xs / 127"), ("yl", "m[1] / xs", "np.float32(np.float16(m[1])) / xs"), ("yl", "m[1] / xs", "m[1] * {c} / xs"),
    ("logits", "R(C.dot(\"nk,ok->no\", y, W[\"head\"]))", "{cap} * np.tanh(C.dot(\"nk,ok->no\", y, W[\"head\"]) / {cap})"), ("logits", "W[\"head\"]", "W[\"embed\"]"), ("logits", "R(C.dot(\"nk,ok->no\", y, ", "R(C.dot(\"nk,ok->no\", x, "), ("logits", "R(C.dot(\"nk,ok->no\", y, ", "R(C.dot(\"nk,ok->no\", np.roll(y, 1, 0), "),
    ("x0", "W[\"embed\"][ids]", "W[\"embed\"][ids] * np.sqrt(D)"), ("x0", "W[\"embed\"][ids]", "W[\"embed\"][(ids + {n}) % len(W[\"embed\"])]"), ("x0", "W[\"embed\"][ids]", "W[\"embed\"][ids] * {c}"),
    ("yd", "m[0]", "m[0][:, ::-1]"), ("yd", "R(C.dot(\"nk,ok->no\", x, m[0]))", "R(C.dot(\"nk,ok->no\", x[:, :-{tail}], m[0][:, :-{tail}]))"), ("yd", "m[0]", "m[0].astype(np.float16).astype(np.float32)"), ("yd", "m[0]", "(np.rint(m[0] / np.abs(m[0]).max(1, keepdims=True) * 127) / 127 * np.abs(m[0]).max(1, keepdims=True))"),
)  # fmt: skip
LINES = {"pos": ("pos =", "hook_rot_q hook_rot_k"), "freq": ("freq =", "hook_rot_q hook_rot_k"), "cos": ("cos, sin =", "hook_rot_q hook_rot_k"), "kvmap": ("kvmap =", "hook_attn_scores"), "s0": ("s = R(C.dot", "hook_attn_scores"), "e": ("e =", "hook_pattern"), "amax": ("amax =", "hook_x_scale hook_x_int8")}  # fmt: skip
ADDED = (  # after an assignment: {v} is the variable
    "{v} = {v} * {scale}", "{v} = {v} * {c}", "{v}[..., {cols}] = 0", "{v}[..., {cols}] = {v}[..., {cols}] * {c}", "{v}[{rows}] = {v}[{rows}] * {c}",
    "{v} = np.roll({v}, {sign}1, axis={axis})", "{v} = {v}[..., ::-1]", "{v} = {v}[..., {order}]", "{v} = {v}.astype(BF16).astype({v}.dtype)", "{v} = {v}.astype(np.float16).astype({v}.dtype)",
    "{v} = np.clip({v}, -{clipped}, {clipped})", "{v} = {v} + {c}", "{v} = -{v}", "{v}[{rows}] = {v}[{first}]", "{v} = {other}", "{v} = np.abs({v})", "{heads}", "{heads}", "{heads}", "{v} = np.maximum({v}, 0)", "{other_add}",
)  # fmt: skip
SAME_SHAPE = {"q": "q", "k": "v", "v": "k", "rk": "v", "o": "x h", "x1": "o h", "h1": "x", "h2": "x o", "g": "u", "u": "g", "a": "g u", "f": "x o h", "x2": "f o h", "y5": "x", "an": "g u"}  # fmt: skip
SHAPES = {"q": "H", "k": "G", "v": "G", "rq": "H", "rk": "G", "z": "H"}


@dataclass(frozen=True)
class Mistake:
    """A change of the engine's text. old, new: of the line that begins so; new may be several lines."""

    function: str
    line: str
    new: str
    names: str
    text: str


@dataclass(frozen=True)
class Engine:
    """The numbers of a model, and how it sums."""

    D: int
    H: int
    G: int
    d: int
    L: int
    F: int
    eps: float
    theta: float
    activation: str
    sub_norm: bool
    qk_norm: bool
    sums: str = "float64"

    def act(self, g: np.ndarray) -> np.ndarray:
        return np.square(np.maximum(g, 0)) if self.activation == "relu2" else g / (1 + np.exp(-g))

    def dot(self, axes: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if self.sums == "float64":
            return np.einsum(axes, a.astype(np.float64), b.astype(np.float64), optimize=True)
        return np.einsum(axes, a, b, optimize=self.sums == "blocks")

    def mean(self, x: np.ndarray) -> np.ndarray:
        return x.mean(-1, keepdims=True, dtype=np.float64 if self.sums == "float64" else np.float32)


FAMILIES: dict[str, dict[str, Any]] = {
    "bitnet": {},
    "llama": {"model_type": "llama", "hidden_act": "silu", "quantization_config": None, "tie_word_embeddings": False, "rope_theta": 10000.0},
    "qwen3": {"model_type": "qwen3", "hidden_act": "silu", "quantization_config": None, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6},
}  # fmt: skip


@cache
def model_of(family: str, size: int) -> tuple[Any, Any, Any]:
    """A random model: as the reference loads it, the engine's weights, the engine's numbers."""
    config = {**BASE, **FAMILIES[family]}
    config |= {
        "hidden_size": (64, 96, 128)[size % 3],
        "intermediate_size": (96, 160, 192)[size % 3],
        "num_hidden_layers": 2 + size % 2,
    }
    config |= {"num_attention_heads": 4, "num_key_value_heads": (2, 4, 1, 2)[size % 4], "max_position_embeddings": 64}
    config["head_dim"] = config["hidden_size"] // 4 if size % 2 or family != "qwen3" else 32
    config = {key: value for key, value in config.items() if value is not None}
    tensors = tensors_for(config, seed=size, embedding_std=0.5)
    rng = np.random.default_rng(size)
    for i in range(config["num_hidden_layers"]):
        for name in ("q_norm", "k_norm") if family == "qwen3" else ():
            tensors[f"model.layers.{i}.self_attn.{name}.weight"] = (
                1 + 0.2 * rng.standard_normal(config["head_dim"])
            ).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        model = bitnet_ref.load(write(Path(folder) / "m", config, tensors), backend="numpy", threads=1)
        w = Setting.of(model, [1]).weights

    def plain(linear: Any) -> Any:
        ternary = isinstance(linear, TernaryLinear)
        return (
            (linear.ternary().astype(np.float32), linear.w_dequant_scale)
            if ternary
            else (linear.array.astype(np.float32), None)
        )

    weights: dict[Any, Any] = {
        "embed": plain(w.embedding)[0],
        "final_norm": w.final_norm.weight,
        "head": plain(w.lm_head)[0],
    }
    for i, layer in enumerate(w.layers):
        norms = {name: norm.weight for name, norm in layer.norms()}
        weights[i] = {**{name: plain(m) for name, m in layer.linears()}, **norms}
    c = model.config
    engine = Engine(c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.num_hidden_layers, c.intermediate_size, c.norm_eps, c.rope.theta, c.activation, c.sub_norms, family == "qwen3")  # fmt: skip
    return model, weights, engine


class EngineTrace(dict[str, np.ndarray]):
    """The engine's tensors, as a trace says whose they are."""

    own_engine = False
    engine_dtype = "float32"
    calls: tuple[int, ...] = ()


SOURCE = {"forward": inspect.getsource(forward), "linear": inspect.getsource(linear)}


def run(
    ids: Sequence[int], weights: Any, engine: Engine, mistake: Mistake | None = None, dtype: str = "float32"
) -> EngineTrace:
    """The engine's tensors, with the mistake."""
    kind, trace = DTYPES[dtype], EngineTrace()
    trace.engine_dtype = dtype
    scope: dict[str, Any] = {"np": np, "BF16": ml_dtypes.bfloat16}
    for name, text in SOURCE.items():
        exec(text if mistake is None or mistake.function != name else edited(text, mistake), scope)

    def keep(name: str, array: np.ndarray) -> None:
        trace[name] = np.array(array, dtype=np.float32 if array.dtype.kind == "f" else array.dtype)

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(kind).astype(np.float32)

    with np.errstate(all="ignore"):
        scope["forward"](np.array(ids), weights, engine, rounded, keep)
    return trace


def edited(text: str, mistake: Mistake) -> str:
    lines = text.split("\n")
    (index,) = [i for i, line in enumerate(lines) if line.strip().startswith(mistake.line)]
    indent = lines[index][: len(lines[index]) - len(lines[index].lstrip())]
    lines[index : index + 1] = [indent + part for part in mistake.new.split("\n")]
    return "\n".join(lines)


def draw(rng: np.random.Generator, family: str, engine: Engine) -> Mistake | None:
    """A mistake that this family's text can have; None where the draw does not apply."""
    ternary, specific = family == "bitnet", rng.random() < 0.55
    rules = [rule for rule in RULES if rule[0] in VARIABLES or rule[0] in LINES]
    variable, old, new = (
        rules[rng.integers(len(rules))] if specific else (list(VARIABLES)[rng.integers(len(VARIABLES))], "", "")
    )
    begin, names = (VARIABLES | LINES)[variable]
    if (variable in ("r2", "zn", "r4", "an", "xs", "xq", "acc", "yl", "amax") and not ternary) or (
        variable == "yd" and ternary
    ):
        return None
    if variable in ("rqn", "rkn", "qn", "kn") and family != "qwen3":
        return None
    function = "linear" if variable in ("xs", "xq", "acc", "yl", "yd", "amax") else "forward"
    (line,) = [text for text in SOURCE[function].split("\n") if text.strip().startswith(begin)]
    width = {"h1": engine.D, "v": engine.d, "a": engine.F, "z": engine.d, "q": engine.d, "k": engine.d}.get(
        variable, engine.D
    )
    if variable in ("g", "u", "an", "a"):
        width = engine.F
    if variable in ("rq", "rk"):
        width = engine.d
    if variable in ("s", "p"):
        width = 8
    if variable in ("r1", "r2", "r3", "r4", "r5", "xs", "rqn", "rkn"):
        width = 1
    start = int(rng.integers(0, max(1, width - 4)))
    values = {
        "eps": f"{10.0 ** rng.uniform(-4, -1):.2g}", "cut": f"{rng.integers(8, 60)}", "c": f"{rng.choice([rng.uniform(0.2, 3), 0.5, 2.0, 1.5, 0.25]):.3g}", "n": f"{rng.integers(1, 4)}",
        "theta": f"{rng.choice([1e3, 1e4, 5e5, 1e6, 10 ** rng.uniform(2.5, 6)]):.5g}", "small": f"{rng.uniform(0.02, 0.4):.2g}", "cap": f"{rng.uniform(0.5, 5):.2g}", "w": f"{rng.integers(1, 8)}",
        "range": f"{rng.choice([126, 128, 120, 100, 63, 64, 7])}", "clip": f"{rng.integers(40, 127)}", "tail": f"{rng.choice([1, 4, 8, 16, 32, rng.integers(2, 40)])}", "inner": f"{rng.choice([2, 4, 8, 16])}", "half": f"{2 ** rng.integers(8, 12)}",
        "scale": str(rng.choice(["np.sqrt(D)", "1 / np.sqrt(D)", "2", "0.5", "-1", "np.sqrt(d)", "1 / d", "H", "np.sqrt(2)"])) if function == "forward" else str(rng.choice(["2", "0.5", "-1", "127", "np.float32(1 / 127)"])),
        "cols": str(rng.choice([f"{start}:{start + max(1, width // 4)}", f"-{max(1, width // 8)}:", f":{max(1, width // 2)}", "::2"])), "rows": str(rng.choice(["0", "-1", "5:", ":3", "4"])), "first": str(rng.choice(["0", "-1", "1"])),
        "sign": str(rng.choice(["", "-"])), "axis": str(rng.choice([0, -1])), "order": f"np.random.default_rng({rng.integers(99)}).permutation({{v}}.shape[-1])", "clipped": f"{10 ** rng.uniform(-1, 1):.2g}",
    }  # fmt: skip
    name = "cos" if variable == "cos" else begin.split("=")[0].strip()
    if specific:
        if old not in line:
            return None
        changed = new
        for key, value in values.items():
            changed = changed.replace("{" + key + "}", value)
        statement = line.strip().replace(old, changed)
    else:
        added = ADDED[rng.integers(len(ADDED))]
        others = SAME_SHAPE.get(variable, "").split()
        if "{other" in added and (not others or others == [name]):
            return None
        other = others[rng.integers(len(others))] if others else ""
        if added == "{other_add}":
            added = f"{{v}} = {{v}} + {other}"
        if added == "{heads}":
            if variable not in SHAPES:
                return None
            n = getattr(engine, SHAPES[variable])
            if n == 1:
                return None
            one, two, three = int(rng.integers(n)), *(int(i) for i in rng.permutation(n)[:2])
            added = (
                f"{{v}} = {{v}}[:, np.random.default_rng({rng.integers(99)}).permutation({n})]",
                f"{{v}}[:, {one}] = 0",
                f"{{v}}[:, {two}] = {{v}}[:, {three}]",
                f"{{v}}[:, {one}] = {{v}}[:, {one}] * {{c}}",
                "{v} = {v}.reshape({v}.shape[0], -1, {v}.shape[1]).swapaxes(1, 2).reshape({v}.shape)",
            )[rng.integers(5)]
        added = added.replace("{other}", other)
        for key, value in values.items():
            added = added.replace("{" + key + "}", value)
        statement = added.replace("{v}", name)
    layers = [*range(engine.L)]
    which = rng.random()
    chosen = (
        layers
        if which < 0.65 or variable in ("x0", "r5", "y5", "logits")
        else sorted(rng.permutation(layers)[: 1 if which < 0.9 else max(1, engine.L - 1)].tolist())
    )
    guard = f"layer in {chosen}" if len(chosen) < len(layers) else "True"
    if function == "linear" and rng.random() < 0.4:
        guard += f" and proj in {tuple(rng.permutation(['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj'])[: rng.integers(1, 3)].tolist())}"
    copied = "" if specific else f"\n    {name} = np.array({name})"
    text = f"if {guard}:{copied}\n    {statement}"
    return Mistake(function, begin, f"{line.strip()}\n{text}", names, text.replace("\n    ", " "))


@dataclass(frozen=True)
class Outcome:
    """What crossval made of one draw."""

    seed: int
    family: str
    mistake: str
    first: str | None
    first_right: bool
    cause: str | None
    cause_right: bool
    seconds: float


def thin(trace: EngineTrace) -> EngineTrace:
    kept = EngineTrace({n: x for n, x in trace.items() if n.endswith("hook_resid_post") or n == "lm_head.hook_out"})
    kept.engine_dtype, kept.calls = trace.engine_dtype, trace.calls
    return kept


def tokens_of(rng: np.random.Generator) -> list[int]:
    return rng.integers(0, 64, 12).tolist()


def outcome(seed: int, is_thin: bool = False, budget_s: float = 20.0) -> Outcome:
    """Draw until a mistake shows, then let crossval explain it."""
    rng = np.random.default_rng([21, seed])
    family = list(FAMILIES)[seed % 3]
    model, weights, engine = model_of(family, int(rng.integers(6)))
    show: Callable[[EngineTrace], EngineTrace] = thin if is_thin else (lambda trace: trace)
    while True:
        tokens, mistake = tokens_of(rng), draw(rng, family, engine)
        if mistake is None:
            continue
        try:
            trace = run(tokens, weights, engine, mistake)
        except (ValueError, IndexError, TypeError, NameError):
            continue  # a drawn shape that does not fit
        if not all(np.isfinite(np.where(np.isneginf(x), 0, x)).all() for x in trace.values()):
            continue
        right = reference(family, model, tuple(tokens))
        comparison = compare(right, show(trace), model.config, tokens)
        if not comparison.agrees:
            break
    first = comparison.first_divergence.name if comparison.first_divergence else None
    names = mistake.names.split()
    started = time.process_time()
    diagnoses = diagnose(model, tokens, show(trace), comparison, budget_s=budget_s)
    seconds = time.process_time() - started
    confirmed = [d for d in diagnoses if d.confirmed]
    right_cause = False
    if confirmed and (change := diagnoses.changes.get(confirmed[0].cause)) is not None:
        other = tokens_of(rng)
        right, unseen = Setting.of(model, other), View(show(run(other, weights, engine, mistake)))
        setting = change(right)
        right_cause = setting is not None and not Evidence(setting, unseen, Evidence(right, unseen)).wrong
    first_right = is_thin or (first is not None and (any(name in first for name in names)))
    return Outcome(
        seed, family, mistake.text, first, first_right, confirmed[0].cause if confirmed else None, right_cause, seconds
    )


@cache
def reference(family: str, model: Any, tokens: tuple[int, ...]) -> Any:
    return model.run_with_cache(list(tokens))[1]


def false_alarm(seed: int) -> str | None:
    """What crossval says of a correct engine, in one of three dtypes; None: nothing, as it should be."""
    rng = np.random.default_rng([22, seed])
    family, dtype = list(FAMILIES)[seed % 3], list(DTYPES)[seed // 3 % 3]
    model, weights, engine = model_of(family, int(rng.integers(6)))
    engine = Engine(**{**asdict(engine), "sums": str(rng.choice(["float64", "float32", "blocks"]))})
    tokens = tokens_of(rng)
    trace = run(tokens, weights, engine, None, dtype)
    for shown in (trace, thin(trace)):
        comparison = compare(model.run_with_cache(tokens)[1], shown, model.config, tokens)
        confirmed = [d for d in diagnose(model, tokens, shown, comparison, budget_s=10) if d.confirmed or d.partly]
        if confirmed:
            return f"{dtype} {engine.sums} {family}: {comparison.verdict[:150]}: {confirmed[0].cause}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Draw mistakes, plant them in an engine, count what crossval explains."
    )
    parser.add_argument("--seeds", default="0:500", help="first:stop")
    parser.add_argument("--thin", action="store_true", help="show hook_resid_post and the logits alone")
    parser.add_argument("--correct", action="store_true", help="engines without a mistake")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds for each search")
    parser.add_argument("--json", type=Path, help="write all outcomes to this file")
    options = parser.parse_args(arguments)
    first, stop = map(int, options.seeds.split(":"))
    if options.correct:
        alarms = {seed: said for seed in range(first, stop) if (said := false_alarm(seed)) is not None}
        for seed, said in alarms.items():
            print(f"{seed}: {said}")
        print(f"{stop - first} correct engines, {len(alarms)} of them with an explanation")
        return int(bool(alarms))
    outcomes = []
    for seed in range(first, stop):
        o = outcome(seed, options.thin, options.budget)
        outcomes.append(o)
        if not (o.first_right and o.cause_right):
            print(
                f"{o.seed} {o.family} | {o.mistake} | first {o.first} {'' if o.first_right else 'WRONG'} | {o.cause} | {o.seconds:.1f} s",
                flush=True,
            )
    n, seconds = len(outcomes), sum(o.seconds for o in outcomes)
    print(
        f"{n} mistakes: first op {sum(o.first_right for o in outcomes)}, cause {sum(o.cause_right for o in outcomes)}; {seconds:.0f} s"
    )
    if options.json:
        options.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1))
    return int(not all(o.cause_right for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
