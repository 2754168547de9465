"""Mistakes that engines shipped with, in rounding, integers, scales and codes: each in an engine of its own text.

    python crossval/shipped_mistakes.py [NAME ...] [--thin]

The engine is that of `drawn_mistakes`. For each mistake of the list: is the first wrong op the right one, does the first
cause say it, and does the cause also give the engine's tensors on tokens that crossval has not seen? --thin shows
crossval hook_resid_post and the logits alone.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from drawn_mistakes import SOURCE, EngineTrace, Mistake, edited, model_of, thin

from bitnet_ref.crossval.compare import View, compare
from bitnet_ref.crossval.explain.diagnose import diagnose
from bitnet_ref.crossval.explain.evidence import Evidence
from bitnet_ref.crossval.explain.variants import Setting

HELPERS = """
BF, F16, F8 = ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn
def narrow(x, dtype):
    return np.asarray(x, np.float32).astype(dtype).astype(np.float32)
def parts(x, w, size, limit):
    return sum(limit(x[:, a:a + size].astype(np.float64) @ w[:, a:a + size].T) for a in range(0, x.shape[1], size))
def saturated(bits):
    return lambda y: np.clip(y, -2 ** (bits - 1), 2 ** (bits - 1) - 1)
def wrapped(bits):
    return lambda y: (y + 2 ** (bits - 1)) % 2 ** bits - 2 ** (bits - 1)
def running(x, dtype):
    s = np.zeros(x.shape[:-1], dtype)
    for i in range(x.shape[-1]):
        s = (s + x[..., i].astype(dtype)).astype(dtype)
    return s.astype(np.float32)[..., None]
def rows(x, top):
    s = np.maximum(np.abs(x).max(-1, keepdims=True), 1e-9) / top
    return (np.rint(x / s) * s).astype(np.float32)
def whole(x, top):
    return rows(x.reshape(1, -1), top).reshape(x.shape)
def blocks(x, top, size):
    return rows(x.reshape(-1, size), top).reshape(x.shape)
def q4_0(w):
    b = w.reshape(-1, 32)
    d = b[np.arange(len(b)), np.abs(b).argmax(1)][:, None].astype(np.float32) / np.float32(-8)
    q = np.clip((b / np.where(d == 0, 1, d) + np.float32(8.5)).astype(np.int64), 0, 15) - 8
    return (q * narrow(d, F16)).reshape(w.shape)
def signed_shift(w, rows_, columns):
    w = w.copy()
    w[rows_, columns] = np.where(w[rows_, columns] > 0, -3, w[rows_, columns])
    return w
"""  # the text that the engine's changed lines call


Engine = Callable[[Sequence[int]], EngineTrace]


@dataclass(frozen=True)
class Shipped:
    """One mistake. changes: lines of the engine's text that begin so, and what replaces them.   words: of its cause."""

    name: str
    family: str
    first: str  # the end of the name of the first wrong tensor of a full trace
    words: str  # a regular expression
    changes: tuple[tuple[str, str], ...]

    @property
    def text(self) -> dict[str, str]:
        """The engine's functions with the mistake."""
        text = dict(SOURCE)
        for line, new in self.changes:
            (function,) = [f for f in SOURCE if any(each.strip().startswith(line) for each in SOURCE[f].split("\n"))]
            text[function] = edited(text[function], Mistake(function, line, new, "", ""))
        return text


def shipped(name: str, family: str, first: str, words: str, *changes: tuple[str, str]) -> Shipped:
    return Shipped(name, family, first, words, changes)


# fmt: off
ROTATED_K = "np.concatenate([k1 * cos - k2 * sin, k2 * cos + k1 * sin], -1)"
OUT = "y = R(acc.astype(np.float32) * "
LIST = (
    # -- integers inside a product
    shipped("sums of 4 saturate", "bitnet", "acc_int32", "sums of 4 products saturate at 8 bits", ("acc =", "acc = parts(xq, m[0], 4, saturated(8))")),
    shipped("sums of 4 wrap", "bitnet", "acc_int32", "sums of 4 products wrap round at 8 bits", ("acc =", "acc = parts(xq, m[0], 4, wrapped(8))")),
    shipped("sums of 32 saturate", "bitnet", "acc_int32", "sums of 32 products saturate at 8 bits", ("acc =", "acc = parts(xq, m[0], 32, saturated(8))")),
    shipped("sums wrap at 10 bits", "bitnet", "acc_int32", "wrap round at 10 bits", ("acc =", "acc = parts(xq, m[0], 999, wrapped(10))")),
    shipped("128 is -128", "bitnet", "x_int8", "128 becomes the int8 -128", ("xs =", "xs = np.float32(128) / amax"), ("xq =", "xq = np.rint(x * xs).astype(np.int64).astype(np.int8)")),
    shipped("zero point left in", "bitnet", "acc_int32", "128 is added to the inputs", ("acc =", "acc = parts(xq + 128.0, m[0], 999, np.asarray)")),
    # -- scales
    shipped("x_scale in float16", "bitnet", "x_int8", "activation scale .* rounded to float16", ("xs =", "xs = narrow(np.float32(127) / amax, F16)")),
    shipped("x_scale in bfloat16", "bitnet", "x_int8", "activation scale .* rounded to bfloat16", ("xs =", "xs = narrow(np.float32(127) / amax, BF)")),
    shipped("inverse x_scale in float16", "bitnet", "hook_out", "inverse of the activation scale is rounded to float16", ("y = R(acc", OUT + "(m[1] * narrow(1 / xs, F16)))")),
    shipped("w_scale in fp8", "bitnet", "hook_out", "scale of the matrix is rounded to fp8", ("y = R(acc", OUT + "(narrow(m[1], F8) / xs))")),
    shipped("quantised twice", "bitnet", "hook_out", "share of non-zeros", ("y = R(acc", OUT + "(m[1] * np.abs(m[0]).mean() / xs))")),
    shipped("quantised twice by row", "bitnet", "hook_out", "of each row .* share of non-zeros", ("y = R(acc", OUT + "(m[1] * np.abs(m[0]).mean(1) / xs))")),
    shipped("divided by density", "bitnet", "hook_out", "1/this matrix's share of non-zeros", ("y = R(acc", OUT + "(m[1] / np.abs(m[0]).mean() / xs))")),
    # -- codes
    shipped("tiles of 16 rows moved", "bitnet", "acc_int32", "rows of the matrix are 16 too far", ("acc =", "acc = np.roll(parts(xq, m[0], 999, np.asarray), 16, 1)")),
    shipped("signed shift, quarters", "bitnet", "acc_int32", "last quarter of rows, are shifted", ("acc =", "acc = parts(xq, signed_shift(m[0], slice(len(m[0]) // 4 * 3, None), slice(None)), 999, np.asarray)")),
    shipped("signed shift, neighbours", "bitnet", "acc_int32", "each fourth weight, are shifted", ("acc =", "acc = parts(xq, signed_shift(m[0], slice(None), slice(3, None, 4)), 999, np.asarray)")),
    shipped("nibbles exchanged", "bitnet", "acc_int32", "neighbours exchanged", ("acc =", "acc = parts(xq[:, np.arange(xq.shape[1]) ^ 1], m[0], 999, np.asarray)")),
    shipped("pairs exchanged", "bitnet", "acc_int32", "neighbouring 2s exchanged", ("acc =", "acc = parts(xq[:, np.arange(xq.shape[1]) ^ 2], m[0], 999, np.asarray)")),
    # -- whole ops: of the input, of rows, of norms, of a softmax
    shipped("scales one after the other in bfloat16", "bitnet", "hook_out", "in bfloat16, and so is each product: acc w_scale / x_scale", ("y = R(acc", "y = R(narrow(narrow(acc, BF) * narrow(m[1], BF), BF) / xs)")),
    shipped("quantised twice by the root of squares", "bitnet", "hook_out", "sqrt\\(this matrix's share of non-zeros\\)", ("y = R(acc", OUT + "(m[1] * np.sqrt((m[0] ** 2).mean()) / xs))")),
    shipped("rows behind the last tile of 64", "bitnet", "acc_int32", "behind the last whole tile of 64 give zeros", ("acc =", "acc = parts(xq, m[0], 999, np.asarray) * (np.arange(len(m[0])) < len(m[0]) // 64 * 64)")),
    shipped("the last row is the one before", "bitnet", "acc_int32", "its last column is that 1 before", ("acc =", "acc = parts(xq, np.concatenate([m[0][:-1], m[0][-2:-1]]), 999, np.asarray)")),
    shipped("q and k in int8 for the scores", "llama", "attn_scores", "q after RoPE and k after RoPE are quantised to int8", ("s = R(C.dot", 's = R(C.dot("ihd,jhd->hij", rows(q, 127), rows(k, 127)[:, kvmap]) / np.sqrt(d))')),
    shipped("an online softmax is not rescaled", "llama", "pattern", "blocks of 4 keys, and sums of earlier blocks are not rescaled", ("e =", "e = np.nan_to_num(np.exp(s - np.repeat(np.maximum.accumulate(s.reshape(*s.shape[:2], -1, 4).max(-1), -1), 4, -1)))")),
    shipped("silu by a table", "llama", "hook_post", "the activation is a table of float16", ("a = R(C.act", "a = narrow(C.act(narrow(g, F16)), F16) * u")),
    shipped("frequencies and angles in bfloat16", "llama", "rot_q", "frequencies and angles are in bfloat16", ("ang =", "ang = narrow(pos[:, None] * narrow(freq, BF), BF)")),
    shipped("the norms of a block exchanged", "llama", "ln1.hook_normalized", "weight of blocks.0.ffn_norm is taken; and .* weight of blocks.0.attn_norm is taken", ("h = R(x / r1", "h = R(x / r1 * w['ffn_norm'])"), ("h = R(x / r3", "h = R(x / r3 * w['attn_norm'])")),
    # -- several at once: in one step, and in three, of which the second is in the way of the third
    shipped("the input in bfloat16, and its product with the scale in float16", "bitnet", "x_int8", "input is rounded to bfloat16; and .*x \\* scale is rounded to float16|attn_norm is rounded to bfloat16.*x \\* scale is rounded to float16",
        ("xs =", "x = narrow(x, BF)\namax = np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-5))\nxs = np.float32(127) / amax"), ("xq =", "xq = np.clip(np.rint(narrow(x * xs, F16)), -128, 127)")),
    shipped("the norms exchanged, and v turned", "llama", "ln1.hook_normalized", "weight of blocks.0.ffn_norm is taken; and v, .* is turned by RoPE as well; and .* weight of blocks.0.attn_norm is taken",
        ("h = R(x / r1", "h = R(x / r1 * w['ffn_norm'])"), ("h = R(x / r3", "h = R(x / r3 * w['attn_norm'])"), ("k = R(np.con", f"k = {ROTATED_K}; k1, k2 = v[..., : d // 2], v[..., d // 2 :]; v = {ROTATED_K}")),
    # -- attention in narrow numbers
    shipped("exp in float16", "llama", "pattern", r"exp\(s\) is rounded to float16", ("e =", "e = narrow(np.exp(s - s.max(-1, keepdims=True)), F16)")),
    shipped("pattern in bfloat16", "llama", "pattern", "pattern.* rounded to bfloat16", ("p =", "p = narrow(e / e.sum(-1, keepdims=True), BF)")),
    shipped("pattern in fp8", "llama", "pattern", "pattern.* rounded to fp8", ("p =", "p = narrow(e / e.sum(-1, keepdims=True), F8)")),
    shipped("scores in float16", "llama", "attn_scores", "scores.* rounded to float16", ("s = R(C.dot", 's = narrow(C.dot("ihd,jhd->hij", q, k[:, kvmap]) / np.sqrt(d), F16)')),
    shipped("keys in int8", "llama", "rot_k", "k after RoPE.* int8, a scale per head and token", ("k = R(np.con", f"k = rows({ROTATED_K}, 127)")),
    shipped("values in int8", "llama", "hook_v", "v, .* int8, a scale per head and token|int8 in blocks of 16", ("v = v.reshape", "v = rows(v.reshape(N, G, d), 127)")),
    shipped("values in int8, one scale", "llama", "hook_v", "v.* int8, one scale", ("v = v.reshape", "v = whole(v.reshape(N, G, d), 127)")),
    shipped("cache in fp8", "llama", "rot_k", "k after RoPE.* rounded to fp8", ("k = R(np.con", f"k = narrow({ROTATED_K}, F8)"), ("v = v.reshape", "v = narrow(v.reshape(N, G, d), F8)")),
    shipped("cache in bfloat16", "llama", "rot_k", "k after RoPE.* rounded to bfloat16", ("k = R(np.con", f"k = narrow({ROTATED_K}, BF)"), ("v = v.reshape", "v = narrow(v.reshape(N, G, d), BF)")),
    shipped("RoPE without its minus", "llama", "rot_q", "without its minus|other direction .*the first 8 of 16", ("q = R(np.con", "q = R(np.concatenate([q1 * cos + q2 * sin, q2 * cos + q1 * sin], -1))")),
    shipped("frequencies in float16", "llama", "rot_q", "frequencies are rounded to float16", ("freq =", "freq = narrow(C.theta ** (-np.arange(0, d, 2) / d), F16)")),
    # -- norms, gate and stream in narrow numbers
    shipped("norm summed in bfloat16", "llama", "ln1.hook_scale", "sum of squares is kept in bfloat16, term by term", ("r1 =", "r1 = np.sqrt(running(x * x, BF) / D + eps)")),
    shipped("sub-norm summed in float16", "bitnet", "mlp.sub_norm.hook_scale", "sum of squares is kept in float16, term by term", ("r4 =", "r4 = np.sqrt(running(a * a, F16) / a.shape[-1] + eps)")),
    shipped("relu^2 in float16", "bitnet", "hook_post", "activation is rounded to float16", ("a = R(C.act", "a = narrow(C.act(g), F16) * u")),
    shipped("gate * up in bfloat16", "bitnet", "hook_post", r"act\(gate\) \* up.* rounded to bfloat16", ("a = R(C.act", "a = narrow(C.act(g) * u, BF)")),
    shipped("stream in float16", "llama", "resid_post", "stream after the feed-forward.* rounded to float16", ("x = R(x + f", "x = narrow(x + f, F16)")),
    shipped("stream in bfloat16", "llama", "resid_mid", "stream after .* and the stream .* rounded to bfloat16", ("x = R(x + f", "x = narrow(x + f, BF)"), ("x = R(x + o", "x = narrow(x + o, BF)")),
    # -- matrices
    shipped("head in int4 rows", "bitnet", "lm_head.hook_out", "lm_head.* int4, a scale per row", ("logits =", 'logits = C.dot("nk,ok->no", y, rows(W["head"], 7))')),
    shipped("head in int8 rows", "bitnet", "lm_head.hook_out", "lm_head.* int8", ("logits =", 'logits = C.dot("nk,ok->no", y, rows(W["head"], 127))')),
    shipped("head in Q4_0", "bitnet", "lm_head.hook_out", "lm_head.* stored as Q4_0", ("logits =", 'logits = C.dot("nk,ok->no", y, q4_0(W["head"]))')),
    shipped("embedding and head in int4 rows", "bitnet", "hook_embed", "embedding and the output of lm_head.* int4, a scale per row", ("x = R(W", 'x = rows(W["embed"], 7)[ids]'), ("logits =", 'logits = C.dot("nk,ok->no", y, rows(W["head"], 7))')),
    shipped("embedding in int8 rows", "bitnet", "hook_embed", "the embedding.* int8, a scale per row", ("x = R(W", 'x = rows(W["embed"], 127)[ids]')),
    shipped("embedding in Q4_0", "bitnet", "hook_embed", "the embedding.* stored as Q4_0", ("x = R(W", 'x = q4_0(W["embed"])[ids]')),
    shipped("int8 times int8", "llama", "hook_out", "the matrix and its input are quantised to int8", ("y = R(C.dot", 'y = R(C.dot("nk,ok->no", rows(x, 127), rows(m[0], 127)))')),
    shipped("matrices in Q4_0", "llama", "hook_out", "the matrix is stored as Q4_0", ("y = R(C.dot", 'y = R(C.dot("nk,ok->no", x, q4_0(m[0])))')),
    shipped("inputs in bfloat16", "llama", "hook_out", "input is rounded to bfloat16", ("y = R(C.dot", 'y = R(C.dot("nk,ok->no", narrow(x, BF), m[0]))')),
    shipped("inputs in blocks of 32", "llama", "hook_out", "input is quantised to int8 in blocks of 32", ("y = R(C.dot", 'y = R(C.dot("nk,ok->no", blocks(x, 127, 32), m[0]))')),
    shipped("inputs in int8", "llama", "hook_out", "input is quantised to int8, a scale per token", ("y = R(C.dot", 'y = R(C.dot("nk,ok->no", rows(x, 127), m[0]))')),
)
# fmt: on


def run(mistake: Shipped, ids: Sequence[int], weights: Any, engine: Any) -> EngineTrace:
    """The engine's tensors, with the mistake."""
    trace = EngineTrace()
    scope: dict[str, Any] = {"np": np, "ml_dtypes": ml_dtypes}
    exec(HELPERS, scope)
    for function in mistake.text.values():
        exec(function, scope)

    def keep(name: str, array: Any) -> None:
        array = np.asarray(array)
        trace[name] = np.array(array, dtype=np.float32 if array.dtype.kind == "f" else array.dtype)

    with np.errstate(all="ignore"):
        scope["forward"](np.array(ids), weights, engine, lambda x: np.asarray(x).astype(np.float32), keep)
    return trace


@dataclass(frozen=True)
class Judgement:
    """What crossval says.   agrees: the trace does not show the mistake.   unseen: it holds on other tokens."""

    agrees: bool
    first: str | None
    cause: str | None
    named: bool
    unseen: bool
    seconds: float  # of the processor


def judge_engine(model: Any, engine: Engine, words: str, is_thin: bool = False, budget_s: float = 90) -> Judgement:
    """Let crossval explain an engine's tensors: engine(ids) -> its trace.   words: of the right cause."""
    rng = np.random.default_rng(5)
    ids, others = (rng.integers(0, 64, 20).tolist() for _ in range(2))
    shown, unseen = (thin(trace) if is_thin else trace for trace in map(engine, (ids, others)))
    comparison, started = compare(model.run_with_cache(ids)[1], shown, model.config, ids), time.process_time()
    if comparison.agrees:
        return Judgement(True, None, None, False, False, 0.0)
    diagnoses = diagnose(model, ids, shown, comparison, budget_s=budget_s)
    first = comparison.first_divergence.name if comparison.first_divergence else None
    cause = next((d.cause for d in diagnoses if d.confirmed), None)
    named, holds = cause is not None and re.search(words, cause) is not None, False
    if cause is not None:
        right = Setting.of(model, others, unseen)
        changed = diagnoses.changes[cause](right)
        holds = changed is not None and not Evidence(changed, View(unseen), Evidence(right, View(unseen))).wrong
    return Judgement(False, first, cause, named, holds, time.process_time() - started)


def judge(mistake: Shipped, is_thin: bool = False, budget_s: float = 90) -> Judgement:
    """Run the engine, and let crossval explain its tensors."""
    model, weights, engine = model_of(mistake.family, 1 if mistake.family == "bitnet" else 0)
    return judge_engine(model, lambda ids: run(mistake, ids, weights, engine), mistake.words, is_thin, budget_s)


def campaign(mistakes: dict[str, tuple[str, Callable[[bool], Judgement]]], arguments: Sequence[str] | None) -> int:
    """Judge the mistakes that are asked for, print each, and count. By name: the first wrong op's end, and the judge."""
    parser = argparse.ArgumentParser(description="Plant mistakes in engines, count those whose cause is named.")
    parser.add_argument("names", nargs="*", help="of the list; all if none is given")
    parser.add_argument("--thin", action="store_true", help="show hook_resid_post and the logits alone")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in mistakes]:
        parser.error(f"no such mistake: {', '.join(unknown)}; there are: {', '.join(mistakes)}")
    firsts, named, wrong, seen = 0, 0, 0, 0
    chosen = {name: each for name, each in mistakes.items() if not options.names or name in options.names}
    for name, (end, judge_it) in chosen.items():
        j = judge_it(options.thin)
        right = j.named and j.unseen
        verdict = "not seen" if j.agrees else "named" if right else "WRONG" if j.cause else "no cause"
        print(f"{verdict:8} {name:34} {j.first}: {j.cause} ({j.seconds:.1f} s)", flush=True)
        seen += not j.agrees
        named += right
        wrong += j.cause is not None and not right
        firsts += j.first is not None and j.first.endswith(end)
    first = "" if options.thin else f", first op right {firsts}"
    print(f"{seen} mistakes of {len(chosen)} show{first}, cause named {named}, another cause {wrong}")
    return int(named < seen)


def main(arguments: Sequence[str] | None = None) -> int:
    return campaign({each.name: (each.first, partial(judge, each)) for each in LIST}, arguments)


if __name__ == "__main__":
    sys.exit(main())
