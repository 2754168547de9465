"""Every exercise of the course refuses wrong answers with the sentence that helps, and takes right ones of any type."""

import json
import math
import re
import tempfile
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import SENTENCES, first_where, model
from ml_dtypes import bfloat16

import bitnet_ref
from bitnet_ref.backends import Backend
from bitnet_ref.backends.cuda.emulation.device import EmulatedDevice
from bitnet_ref.benchmark.synthetic import synthetic_model
from bitnet_ref.crossval import default_tokens
from bitnet_ref.crossval.exercises import EXERCISES, Check, tensors
from bitnet_ref.crossval.exercises.declare import Unanswered, Wrong, exercise_texts, run
from bitnet_ref.crossval.exercises.lessons import byte_pairs
from bitnet_ref.crossval.exercises.lessons.analysis import DIALECTS
from bitnet_ref.crossval.exercises.quiz import LETTERS, QUIZZES
from bitnet_ref.errors import ConfigError
from bitnet_ref.families import groups
from bitnet_ref.formats import packing
from bitnet_ref.generation.overflow import keep_after_overflow
from bitnet_ref.notebook import NextToken
from bitnet_ref.reference import layers, quantization
from bitnet_ref.reference.config import ModelConfig
from bitnet_ref.reference.weights import TernaryWeight
from bitnet_ref.training import Trainer
from bitnet_ref.training.network import master_shapes

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
N4 = np.arange(4)
TREE = """
extern "C" __global__ void tree(const int* x, int* y) {
    __shared__ int all[64];
    const int i = threadIdx.x;
    all[i] = x[i];
    for (int half = 32; half > 0; half /= 2) {
        if (i < half) all[i] += all[i + half];
    }
    y[i] = all[0];
}
"""
MEASURE = """        trainer.step(next(stream))
        if step + 1 in (half - width, half):
            losses[step + 1] = trainer.loss(exam)"""
BOTH_FALLS = "losses[half - width] - losses[half], [losses[half] - end for end in ends]"
LOSSES_OF_A_RUN = """        trainer.step(next(stream))
        if step + 1 in (half - width, half):
            losses[step + 1] = trainer.loss(exam)
    rest = [next(stream) for _ in range(width)]
    for plan in plans:
        one = branch(trainer, plan)
        for tokens in rest:
            one.step(tokens)
        ends.append(one.loss(exam))"""
BRANCHES = """    for plan in plans:
        one = branch(trainer, plan)
        for tokens in rest:"""
REST = "rest = [next(stream) for _ in range(width)]"
VARIANCE = "np.var(a, ddof=1) / len(a) + np.var(b, ddof=1) / len(b)"
SECOND_SCALE = "quantization.absmean_scale(W_t * s) / s"
MASK = N4[None, :] > N4[:, None]
PUBLISHED = {
    "a": "int8, multiply",
    "b": "int8, divide",
    "c": "int8, multiply",
    "d": "groups, float",
    "hub/e": "rotated",
}
CONFIGS = {  # as in notebook 10
    "a": {"quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear"}},
    "b": {"quantization_config": {"quant_method": "bitnet"}},
    "c": {"weight_bits": 1},
    "d": {"model_type": "qwen3", "quantization": {"group_size": 128}},
    "hub/e": {"model_type": "prism_hadamard_qwen35", "quantization": {"group_size": 128}},
}
NOTICED = {  # by the weights of case_files
    "finite": set(),
    "cosine": {2, 3},
    "top-1": {1, 2, 3},
    "one word": {2},
    "itself": {3},
    "first sums": {2, 3},
    "tensors": {1, 2, 3},
}
LENS = np.array([[7, 7, 7], [1, 9, 2], [5, 9, 3], [1, 8, 3], [1, 9, 4], [1, 9, 3], [1, 9, 4]])


class Silu(Backend):
    def gated(self, gate, up, activation):
        return layers.silu(gate) * up


class Port(Backend):
    """As notebook 6 has it: one activation scale for all tokens."""

    def quantize_activations(self, x):
        scale = np.float32(127) / np.maximum(np.abs(x).max(keepdims=True), np.float32(1e-5))
        return np.clip(np.rint(x * scale), -128, 127).astype(np.int8), np.broadcast_to(scale, (len(x), 1))


def proof(name, **methods):
    """An engine with other methods."""
    return type(name, (Backend,), methods)


def cosine(a, b):
    return (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)


def loss_of_one_block(block):
    """Exercise 3c.5 with the other blocks left out."""
    weights = model("storyteller", "numpy").weights
    engine = broken(replace(weights, layers=(weights.layers[block],)), num_hidden_layers=1)
    return loss_of(engine.logits(PASSAGE), PASSAGE)


def plain_norm(x, norm):
    return x * (1 / np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps)) * norm.weight


def merge_in_place(symbols, pair):
    for i in range(len(symbols)):
        if tuple(symbols[i : i + 2]) == pair:
            symbols[i : i + 2] = ["".join(pair)]
    return symbols


def count_by_indices(words, common):
    """Exercise 0.5 by arrays of indices, with += on them."""
    rows = np.array([common.index(word) if word in common else -1 for word in words])
    pairs = np.stack([rows[:-1], rows[1:]])[:, (rows[:-1] >= 0) & (rows[1:] >= 0)]
    counts = np.zeros((len(common), len(common)))
    counts[pairs[0], pairs[1]] += 1
    return counts + counts.T


def count_around_inner_words(words, common):
    """Exercise 0.5 for all words that have two neighbours."""
    counts = np.zeros((len(common), len(common)))
    for i in range(1, len(words) - 1):
        for j in (i - 1, i + 1):
            if words[i] in common and words[j] in common:
                counts[common.index(words[i]), common.index(words[j])] += 1
    return counts


class Rolled(Backend):
    """Four tokens or more read each weight from the place before it: two cases of notebook 11 in one."""

    def ternary_matmul(self, x_q, w):
        acc = (x_q.astype(int) @ np.roll(w.ternary(), 1, axis=1).T).astype(np.int32)
        return acc if len(x_q) > 3 else super().ternary_matmul(x_q, w)


class Arm(Backend):
    """The second case of notebook 11: blocks of 128 weights are read in blocks of 64."""

    def ternary_matmul(self, x_q, w):
        w_t = w.ternary()
        x86 = w_t.reshape(len(w_t), -1, 4, 32).swapaxes(2, 3)
        arm = x86.reshape(len(w_t), -1, 16, 4).swapaxes(2, 3).reshape(w_t.shape)
        return (x_q.astype(int) @ arm.T).astype(np.int32)


class Tiles(Backend):
    """The third: four tokens or more have their sums transposed in tiles of 4."""

    def ternary_matmul(self, x_q, w):
        acc = super().ternary_matmul(x_q, w)
        if n := len(acc) // 4 * 4:
            acc[:n] = acc[:n].reshape(n // 4, 4, -1, 4).swapaxes(1, 3).reshape(n, -1)
        return acc


@dataclass(frozen=True)
class Edit:
    """The exercise's solution with one text in place of another: a mistake in a function."""

    old: str
    new: str


@dataclass
class Case:
    """wrong: (answer or Edit, what the refusal says).   right: answers in other words and types, and the solution."""

    wrong: list
    right: list = field(default_factory=list)


def own_fragments(a, b):
    """Exercise 8.mma by lanes that exchange nothing.   -> (32 lanes, rows g and g + 8)"""
    return np.einsum("lkri,lki->lr", a.astype(int).reshape(32, 2, 2, 4), b.astype(int))


def columns_in_another_order(a, b):
    """mma with the 32 columns of A and B permuted alike: the same sums."""
    g, t, order = np.arange(32) // 4, np.arange(32) % 4, np.random.default_rng(0).permutation(32)
    whole_a, whole_b = np.zeros((16, 32)), np.zeros((32, 8))
    for half, i in np.ndindex(2, 4):
        k = order[4 * t + 16 * half + i]
        whole_a[g, k], whole_a[g + 8, k], whole_b[k, g] = a[:, 2 * half, i], a[:, 2 * half + 1, i], b[:, half, i]
    d = whole_a @ whole_b
    return np.array([d[g, 2 * t], d[g, 2 * t + 1], d[g + 8, 2 * t], d[g + 8, 2 * t + 1]]).T


CASES = {
    "0.1": Case(
        [
            (lambda symbols, pair: symbols, "Nothing was merged"),
            (Edit("i += 2", "i += 1"), "one was used twice"),
            (Edit("            i += 2", "            return [*out, *symbols[i + 2:]]"), "Only the first pair"),
            (Edit("i < len(symbols)", "i < len(symbols) - 1"), "The pieces together are"),
            (lambda symbols, pair: byte_pairs.merged_from_the_right(symbols, pair), "from the left"),
            (lambda symbols, pair: "".join(symbols), "A list of pieces is wanted"),
            (merge_in_place, "changes the list that it was given"),
            (lambda symbols, pair: merge_in_place(symbols, pair) and None, "changes the list that it was given"),
        ],
        [lambda symbols, pair: tuple(byte_pairs.merge(symbols, pair))],
    ),
    "0.2": Case(
        [
            (Edit("        symbols = merge(symbols, pairs[-1])\n", ""), "join 2 is"),
            (Edit("symbols = merge(", "symbols[:] = merge("), "changes the list that it was given"),
            (
                Edit(
                    "Counter(zip(symbols, symbols[1:])).most_common(1)[0][0]",
                    "max(sorted((c := Counter(zip(symbols, symbols[1:])))), key=c.get)",
                ),
                "join 1 is .*Both are equally frequent: take the one that stands first",
            ),
            (lambda s, n: [pair for pair, _ in Counter(pairwise(s)).most_common(n)], "Count again"),
            (lambda s, n: byte_pairs.learned(s, n, rarest=True), "The rarest pairs"),
            (lambda s, n: byte_pairs.learned(s, n, last=True), "the first of the text"),
            (Edit("return pairs", "return pairs[::-1]"), "the last comes first"),
            (Edit("range(joins)", "range(joins - 1)"), "6 joins are wanted; yours are 5"),
            (Edit("[0][0])", "[0])"), "a list of pairs|A list of pairs|join 1 is"),
            (Edit("return pairs", "return symbols"), "A list of pairs is wanted"),
        ],
        [Edit("return pairs", "return [list(pair) for pair in pairs]")],
    ),
    "0.3": Case(
        [
            (lambda word, merges: list(word), "apply the merges"),
            (Edit("in merges", "in merges[::-1]"), "in reverse"),
            (Edit("in merges", "in merges[:1]"), "Only the first merge"),
            (lambda word, merges: byte_pairs.from_the_left(word), "learned first"),
            (lambda word, merges: word, "A list of pieces is wanted"),
            (Edit("list(word)", "list(word[1:])"), "The pieces together are"),
            (Edit("for pair in merges:", "while merges:\n        pair = merges.pop(0)"), "changes the list"),
        ],
    ),
    "0.4": Case(
        [
            (Edit("    cosine[i] = -np.inf\n", ""), "nearest to itself"),
            (Edit("-np.inf", "0"), "Where all other cosines are negative.*not row 0: leave row i out by −∞"),
            (lambda table, i: byte_pairs.others(table @ table[i], i).argmax(), "prefers long rows"),
            (Edit("cosine[i] = -np.inf\n    return cosine.argmax()", "return cosine.argmin()"), "least like it"),
            (lambda table, i: byte_pairs.others(-((table - table[i]) ** 2).sum(1), i).argmax(), "nearest by distance"),
            (Edit("argmax", "max"), "the row's number is wanted"),
            (lambda table, i: table[i], "One number is wanted"),
        ],
    ),
    "0.5": Case(
        [
            (Edit("            counts[number[b], number[a]] += 1\n", ""), "only the word after"),
            (Edit("            counts[number[a], number[b]] += 1\n", ""), "only the word before"),
            (Edit("    for a", "    words = [w for w in words if w in number]\n    for a"), "became neighbours"),
            (Edit("return counts", "return counts > 0"), "count how often"),
            (Edit("zip(words, words[1:])", "zip(words, [*words[1:], words[0]])"), "last word and the first"),
            (Edit("if a in", "if a != b and a in"), "once for each of the two"),
            (
                Edit("            counts[number[b]", "            if a != b:\n                counts[number[b]"),
                "it is before it, and after it",
            ),
            (Edit("return counts", "return counts / counts.sum(1, keepdims=True)"), "divided by its sum"),
            (
                Edit("zip(words, words[1:])", "[*zip(words, words[1:]), *zip(words, words[2:])]"),
                "only the next ones are beside it",
            ),
            (count_by_indices, "np.add.at adds each time"),
            (count_around_inner_words, "first and the last word of the text"),
            (Edit("enumerate(common)", "enumerate(common[::-1])"), "row i is that of common"),
            (Edit("len(common), len(common)", "len(words), len(words)"), "Its shape is"),
            (Edit("    counts = ", "    words.append('a')\n    counts = "), "changes the list"),
            (lambda words, common: Counter(pairwise(words)), "An array of numbers"),
        ],
        [Edit("return counts", "return counts.astype(int).tolist()")],
    ),
    "0.6": Case(
        [
            (Edit("return ids", "return ids[-n:]"), "the new ids alone"),
            (Edit("range(n)", "range(n + 1)"), "one too many"),
            (Edit("range(n)", "range(n - 1)"), "one too few"),
            (Edit("    return ids", "        return ids"), "in its first round"),
            (Edit("[-1].argmax", "[0].argmax"), "The first row"),
            (Edit("logits(ids)", "logits(ids[-1:])"), "the last token alone"),
            (Edit("argmax", "argmin"), "least likely"),
            (Edit("return ids", "return model.tokenizer.decode(ids)"), "not a text"),
            (Edit("ids = [*ids, int(model.logits(ids)[-1].argmax())]", "ids.append(1)"), "changes the list"),
            (lambda ids, n: ids + [5] * n, "After .* come"),
            (Edit("    for _ in range(n):\n        ids = [*ids, ", "    ids = [*ids] + n * ["), "again and again"),
        ],
        [Edit("return ids", "return np.array(ids)")],
    ),
    "1.absmean": Case(
        [
            (Edit("np.abs(w).mean()", "np.abs(w).max()"), "s: .* not the maximum"),
            (Edit("np.abs(w).mean()", "w.mean()"), "s: .* plus and minus cancel"),
            (Edit("np.abs(w).mean()", "abs(w.mean())"), "s: .* take the sizes first"),
            (Edit("np.abs(w).mean()", "w.std()"), "standard deviation"),
            (Edit("np.abs(w).mean()", "np.abs(w).mean(axis=1, keepdims=True)"), "one scale for each row"),
            (Edit("np.abs(w).mean()", "2 * np.abs(w).mean()"), "s: .* is too large. It is the mean"),
            (Edit("np.int8), s", "np.int8), 1 / s"), "s: .*1/s. W ≈ s · W_t"),
            (Edit("np.int8), s", "np.int8), s / 2"), "s: that is the threshold"),
            (Edit("np.int8), s", "np.int8)"), "Two results"),
            (lambda w: quantization.quantize_weights(w)[::-1], "The matrix comes first"),
            (Edit("np.rint", "np.trunc"), "w_t: .* the threshold is s/2, not s"),
            (Edit("np.clip(np.rint(w / s), -1, 1)", "np.rint(w / s)"), "w_t: .* not clipped"),
            (Edit("np.rint(w / s), -1, 1).astype(np.int8)", "w / s, -1, 1)"), "w_t: .* not rounded"),
            (Edit("np.clip(np.rint(w / s), -1, 1).astype(np.int8)", "w / s"), "neither rounded nor clipped"),
            (Edit("np.rint(w / s)", "np.sign(w)"), "the sign alone"),
            (Edit("w / s", "w * s"), "multiplied by s"),
            (Edit("np.rint(w / s)", "np.rint(w)"), "W is not divided"),
            (Edit("w / s", "w / np.abs(w).max()"), "divided by its maximum"),
            (Edit("w / s", "w / np.abs(w).mean(1, keepdims=True)"), "a mean of its own"),
            (Edit(".astype(np.int8)", " * s"), "the integers themselves"),
            (Edit(".astype(np.int8)", ".astype(np.int8).astype(np.uint8)"), "has no −1"),
            (Edit("    return", "    w /= s\n    return"), "Work on a copy"),
        ],
        [
            quantization.quantize_weights,
            Edit("w / s", "w * (1 / s)"),
            Edit(".astype(np.int8)", ""),
            lambda w: ((np.sign(w) * (np.abs(w) > np.abs(w).mean() / 2)).tolist(), float(np.abs(w).mean())),
        ],
    ),
    "1.entropy": Case(
        [
            (Edit("np.log2", "np.log"), "in nats"),
            (Edit("return -(", "return ("), "The sign is the other one"),
            (Edit("np.log2(p)).sum()", "np.log2(p)).sum() / np.log2(3)"), "digits of three values"),
            (Edit("    p = p[p > 0]\n", ""), "0 · log2.0. became no number"),
            (Edit(".sum()", ".sum() * w_t.size"), "all weights together"),
            (lambda w_t: np.log2(len(np.unique(w_t))), "equally frequent"),
            (Edit("(w_t == value).mean()", "(w_t == value).sum() / len(w_t)"), "len.w_t. is the number of rows"),
            (Edit(".mean() for", ".sum() for"), "a share is a count divided by"),
            (lambda w_t: 1.585, "1.585 is too large|1.585 is too small"),
        ],
        [Edit("np.array([(w_t == value).mean() for value in (-1, 0, 1)])", "np.bincount(w_t.ravel() + 1) / w_t.size")],
    ),
    "1.harmless": Case(
        [
            ({"q_proj", "v_proj", "gate_proj", "up_proj"}, "'q_proj' is one too many: q and k set the scores"),
            ({"v_proj", "gate_proj", "up_proj", "o_proj"}, "'o_proj' is one too many: After o no norm"),
            ({"down_proj"}, "'down_proj' is one too many: After down no norm"),
            ({"gate_proj", "up_proj"}, "One is missing. What attention returns is a mean of v"),
            ({"v_proj", "up_proj"}, "One is missing. relu² only squares"),
            ({"v_proj", "gate_proj"}, "One is missing. Behind the product"),
            ({"value"}, "none of the choices"),
            (3, "A set is wanted"),
        ],
        [["up_proj", "v_proj", "gate_proj"], "v_proj, gate_proj and up_proj"],
    ),
    "1.backwards": Case(
        [
            (Edit("1 / w.w_dequant_scale", "w.w_dequant_scale"), "q_proj of block 0 is still"),
            (Edit("kind in kinds", "kind == kinds"), "is still"),
            (Edit("kind in kinds", "kind in kinds[:1]"), "down_proj of block 0 is still"),
            (Edit(" if kind in kinds else w", ""), "k_proj of block 0 was not asked for"),
            (Edit("kind in kinds", "kind not in kinds"), "is still|not asked for"),
            (Edit("1 / w.", "-w."), "The sign is not turned"),
            (Edit("1 / w.w_dequant_scale", "w.w_dequant_scale**2"), "q_proj of block 0 is 0.0.*, not 1 /"),
            (Edit("return with_weights(turn)", "return turn"), "A model is wanted"),
            (
                Edit("replace(w, w_dequant_scale=1 / w.w_dequant_scale)", "1 / w.w_dequant_scale"),
                "q_proj of block 0 is no matrix now but np.float32",
            ),
            (Edit("replace(w, ", "replace(w, packed=~w.packed & 0x55, "), "raised|The weights of q_proj of block 0"),
            (lambda *kinds: 0.5, "A model is wanted"),
        ],
        [Edit("1 / w.w_dequant_scale", "w.w_dequant_scale ** -1.0")],
    ),
    "1.1": Case(
        [
            (0.4307, "the scale is twice that"),
            (np.sqrt(2 / np.pi), "That is the mean"),
            (1.5, "must be smaller"),
            (0.5, "must be larger"),
            (-0.86, "larger than 0"),
            ([1, 2], "One number"),
        ],
        [0.861, "0.861", "861/1000", np.float32(0.86), np.array([0.862])],
    ),
    "1.2": Case(
        [
            (Edit("np.arange(4, -1, -1)", "np.arange(5)"), "highest digit"),
            (Edit("(w_t + 1)", "w_t"), "add 1 to the weights"),
            (Edit("3 **", "4 **"), "powers of 4"),
            (Edit("3 **", "2 **"), "powers of 2"),
            (Edit("(4, -1, -1)", "(5, 0, -1)"), "3⁵"),
            (Edit("return int", "return list"), "raised TypeError"),
            (Edit(".sum()", ".astype(np.int8).sum(dtype=np.int8)"), "overflows int8"),
        ],
        [lambda w: np.int64(np.polyval(np.asarray(w) + 1, 3)), lambda w: float(int("".join(str(d + 1) for d in w), 3))],
    ),
    "1.rows": Case(
        [
            (Edit("min(by_row, key=by_row.get)", "sorted(by_row, key=by_row.get)[1]"), "bits on the average, and"),
            (Edit("min(by_row, key=by_row.get)", "sorted(by_row, key=by_row.get)[20]"), "of another matrix have less"),
            (Edit("min(by_row", "max(by_row"), "the most of all"),
            ("up_proj", "a key of planes, not .up_proj"),
            (1.47, "The name of a matrix is wanted"),
        ],
        [Edit("min(by_row, key=by_row.get)", "sorted(by_row, key=by_row.get)[0]")],
    ),
    "1.hf": Case(
        [
            (lambda plane: quantization.unpack_ternary(plane, 4 * plane.shape[1]), "four rows, R apart. The quarters"),
            (Edit("(plane >> shift & 3).astype(np.int8) - 1", "plane >> shift & 3 - 1"), "& 3 - 1 is & 2"),
            (Edit("(0, 2, 4, 6)", "(6, 4, 2, 0)"), "you began with the highest"),
            (Edit(".astype(np.int8) - 1", ""), "take 1 away"),
            (Edit(" & 3", ""), "& 3 is missing"),
            (Edit(".astype(np.int8) - 1", " - np.uint8(1)"), "0 − 1 is 255"),
            (
                lambda plane: quantization.unpack_ternary(plane, 4 * plane.shape[1]).reshape(-1, plane.shape[1]),
                "this package's own order|values are wrong",
            ),
            (
                lambda plane: np.stack([(plane >> s & 3).astype(int) - 1 for s in (0, 2, 4, 6)], 1).reshape(24, 8),
                "R apart, not neighbours",
            ),
        ],
        [lambda plane: quantization.unpack_ternary(packing.pack_from_hf(plane), plane.shape[1]).tolist()],
    ),
    "1.4": Case(
        [
            (Edit("shares[0] + shares[2]", "1 / (shares[0] + shares[2])"), "smaller, not larger"),
            (Edit("shares[0] + shares[2]", "shares[1]"), "share of zeros"),
            (Edit("shares[0] + shares[2]", "(shares[0] + shares[2]) / 2"), "one sign only"),
            (1, "does not survive"),
            (0.1, "too small"),
        ],
        [Edit("shares[0] + shares[2]", "round(shares[0] + shares[2], 3)")],
    ),
    "1.3": Case(
        [
            (Edit("[0, 2, 4, 6]", "[6, 4, 2, 0]"), "lowest bits"),
            (Edit(" - 1", ""), "take 1 away"),
            (Edit("codes.reshape", "codes.swapaxes(1, 2).reshape"), "quarter of a row"),
            (Edit(".astype(np.int8) - 1", " - np.uint8(1)"), "0 − 1 is 255"),
            (Edit(".reshape(len(packed), -1)", ""), "reshape it"),
            (Edit(" & 3", ""), "& 3 is missing"),
            (Edit(" - 1", " + 1"), "code 0 is −1"),
            (lambda p: (p[..., None] >> np.array([0, 2, 4, 6]) & 3 - 1).reshape(len(p), -1), "& 3 - 1 is & 2"),
            (
                lambda packed: np.maximum(quantization.unpack_ternary(packed, 4 * packed.shape[1]), 0),
                "Every wrong value",
            ),
        ],
        [lambda packed: quantization.unpack_ternary(packed, 4 * packed.shape[1]).tolist()],
    ),
    "2.5": Case(
        [
            (lambda x: np.floor(x + 0.5), "always go up"),
            (lambda x: np.ceil(x - 0.5), "always go down"),
            (lambda x: np.trunc(x + np.copysign(0.5, x)), "away from zero, as C's"),
            (np.trunc, "truncates"),
            (np.floor, "that is the floor"),
            (Edit("low % 2 == 1", "low % 2 == 0"), "to the odd neighbour"),
            (
                lambda x: np.where(x % 1 == 0.5, 2 * np.floor(x / 2 + 0.5), np.floor(x + 0.5)),
                "is below a half",
            ),
            (
                lambda x: np.where(x % 1 == 0.5, 2 * np.floor(x / 2 + 0.5), np.floor(x + 0.5) * (np.abs(x) >= 0.5)),
                "4503599627370497 is an integer, and becomes another",
            ),
            (lambda x: np.where(abs(x) == 0.5, 0, x + 2**52 * 1.5 - 2**52 * 1.5), "becomes another one"),
            (np.rint, "it uses rint"),
            (np.round, "it uses round"),
            (lambda x: [round(each) for each in x], "it uses round"),
            (lambda x: np.vectorize(lambda each: each.round())(x), "it uses round"),
        ],
        [
            lambda x: np.ceil(x) - ((np.ceil(x) - x > 0.5) | ((np.ceil(x) - x == 0.5) & (np.ceil(x) % 2 == 1))),
            lambda x: [
                low + (rest > 0.5 or (rest == 0.5 and low % 2 == 1))
                for low, rest in ((np.floor(each), each - np.floor(each)) for each in x)
            ],
        ],
    ),
    "2.6": Case(
        [
            (Edit('theirs["x_q"].astype(np.int32) @', "x_q.astype(np.int32) @"), "'product' is not to blame"),
            (
                Edit('theirs["x_q"].astype(np.int32) @ w_t.T.astype(np.int32)', 'theirs["x_q"] @ w_t.T'),
                "sums of int8 overflow",
            ),
            (Edit('theirs["acc"].astype', "acc.astype"), "'rescale' is not to blame"),
            (Edit('theirs["a"])\n', "a)\n"), "'rescale' is not to blame"),
            (Edit('np.array_equal(theirs["y"], y)', 'np.allclose(theirs["y"], y)'), "'rescale' is to blame"),
            (Edit('np.array_equal(theirs["x_q"], x_q)', 'np.allclose(theirs["x_q"], x_q, atol=1)'), "'quantise' is to"),
            (Edit('if not np.array_equal(theirs["y"]', 'elif not np.array_equal(theirs["y"]'), "two faults"),
            (Edit('np.array_equal(theirs["acc"], acc)', 'theirs["acc"].dtype == np.int32'), "of another type"),
            (Edit("return wrong", 'return "quantise"'), "A set of"),
            (Edit("return wrong", 'return [["quantise"]]'), "A set of"),
            (Edit('["acc"].astype(np.float32)', '["acc"]'), "make acc float32"),
            (
                Edit('["x_q"].astype(np.int32) @ w_t.T.astype(np.int32)', '["x_q"].astype(np.int8) @ w_t.T'),
                "x_q and w_t int32",
            ),
            (Edit(' or not np.array_equal(theirs["a"], a)', ""), "whose x_q is right, and whose a is not.*both"),
            (Edit('not np.array_equal(theirs["a"], a)', 'not np.allclose(theirs["a"], a)'), "by its last bit"),
            (lambda x, w_t, s, theirs: {"y"}, "A set of"),
            (lambda x, w_t, s, theirs: [], "'quantise' is to blame"),
        ],
        [
            Edit("return wrong", "return sorted(wrong)"),
            Edit("return wrong", "return frozenset(wrong)"),
            Edit('theirs["x_q"].astype(np.int32) @ w_t.T.astype(np.int32)', 'theirs["x_q"].astype(float) @ w_t.T'),
        ],
    ),
    "2.4": Case(
        [
            (4128, "still fits"),
            (8257, "is the sign"),
            (4096, "127, not 128"),
            (4127, "127 · 4,127"),
            (259, "an int16"),
            (2**19, "the first sum"),
            (5000, "too large"),
            (-0.0, "^not right yet. 0 is too small"),
            ("many", "One number is wanted"),
        ],
        ["4129", 4129.0, np.int64(4129)],
    ),
    "2.3": Case(
        [
            (Edit(", dtype=np.int32", ", dtype=np.int8"), "overflow int8"),
            (Edit(" - np.stack(minus, axis=1)", ""), "weight −1 are not subtracted"),
            (Edit(" - np.stack", " + np.stack"), "added where the weight is −1"),
            (Edit("row == -1", "row != 1"), "weights of 0"),
            (Edit("axis=1) - np.stack(minus, axis=1)", "axis=0) - np.stack(minus, axis=0)"), "transpose it"),
            (lambda x, w: x.astype(int) @ w.T.astype(int), "it multiplies"),
            (lambda x, w: np.einsum("mk,nk->mn", x, w, dtype=np.int32), "it multiplies"),
            (lambda x, w: [[np.vdot(a, b) for b in w.astype(int)] for a in x.astype(int)], "it multiplies"),
            (lambda x, w: sum(map(np.outer, x.T.astype(int), w.T.astype(int))), "it multiplies"),
            (lambda x, w: (x[:, None].astype(int) * w).sum(axis=-1), "it multiplies"),
        ],
        [
            lambda x, w: [
                [sum(int(a) if b == 1 else -int(a) for a, b in zip(t, r, strict=True) if b) for r in w] for t in x
            ],
            lambda x, w: np.where(w == 1, x[:, None], np.where(w == -1, -x[:, None], 0)).sum(axis=-1, dtype=np.int32),
            Edit("x_q[:, row == 1].sum(axis=1, dtype=np.int32)", "x_q.sum(axis=1, where=row == 1, dtype=np.int32)"),
        ],
    ),
    "2.2": Case(
        [
            ({"x_q": 2, "x_quant_scale": 0.5, "acc": 1, "y": 2}, "x_q is not 2 times"),
            ({"x_q": 1, "x_quant_scale": 2, "acc": 1, "y": 2}, "the maximum is twice as large"),
            ({"x_q": 1, "x_quant_scale": 0.5, "acc": 2, "y": 2}, "made of x_q and the weights"),
            ({"x_q": 1, "x_quant_scale": 0.5, "acc": 1, "y": 1}, "y is not 1 times"),
            ({"x_q": 1}, "keys"),
        ],
        [{"x_q": 1.0, "x_quant_scale": half, "acc": np.int8(1), "y": 2} for half in ("0.5", "1/2")],
    ),
    "2.1": Case(
        [
            (Edit("np.rint", "np.trunc"), "cut off, not rounded"),
            (Edit("np.rint", "np.floor"), "rounded down"),
            (Edit("np.rint(x * a)", "np.trunc(x * a + np.copysign(0.5, x))"), "ties are rounded away"),
            (Edit("np.rint(x * a)", "np.floor(x * a + 0.5)"), "ties are rounded up"),
            (Edit("127)", "128)"), "127, not 128"),
            (Edit("axis=-1, ", ""), "one scale for all"),
            (Edit("axis=-1, ", "axis=0, "), "scale for each feature"),
            (Edit("np.abs(x)", "x"), "maximum is of |x|"),
            (Edit("x * a", "x / a"), "divided by a"),
            (Edit("axis=-1", "axis=0"), "a scale for each feature"),
        ]
    ),
    "3a.1": Case(
        [
            (np.full((4, 4), 0.25), "also those after it"),
            (np.tril(np.ones((4, 4))), "not divided"),
            (np.tril(np.ones((4, 4))) / N4[::-1, None].T.clip(1), "values are wrong"),
            (np.tril(np.ones((4, 4))) / 4, "divided by 4"),
            (np.tril(np.ones((4, 4))) / np.arange(4, 0, -1), "columns sum to 1"),
            (np.tril(np.ones((4, 4))) / np.arange(1, 5), "keepdims=True"),
            (np.zeros((4, 4)), "All of yours are 0"),
            ((np.tril(np.ones((4, 4))) / np.arange(1, 5)[:, None]).round(2), "rounded to 2 digits"),
            (np.ones(4), "shape is"),
        ],
        [[[Fraction(j <= i, i + 1) for j in range(4)] for i in range(4)], (np.tri(4).T / np.arange(1, 5)).T.tolist()],
    ),
    "3a.2": Case(
        [
            (Edit(" / np.sqrt(2)", ""), "not divided by √d"),
            (Edit("np.sqrt(2)", "2"), "divided by d"),
            (Edit("q @ k.T", "k @ q.T"), "exchanged"),
            (Edit("q @ k.T", "q @ q.T"), "compared with queries"),
            (Edit("q @ k.T", "k @ k.T"), "keys are compared with keys"),
            (Edit("/ np", "* np"), "multiplied by √d"),
        ]
    ),
    "3a.3": Case(
        [
            (np.eye(4, k=1, dtype=bool), "only the very next"),
            (np.where(MASK, -np.inf, 0.0), "True and False are wanted.*Minus infinity goes into the scores"),
            (~MASK, "hides the past"),
            (MASK.T, "transposed"),
            (MASK | np.eye(4, dtype=bool), "must see itself"),
            (np.zeros((4, 4), dtype=bool), "nothing is hidden"),
            (np.where(MASK, -1e9, 0.0), "Minus infinity goes into the scores"),
            (MASK[1:], "shape"),
            (MASK[:3, :3], "shape"),
        ],
        [MASK.tolist(), MASK.astype(int), MASK.astype(np.float32)],
    ),
    "3a.4": Case(
        [
            (
                lambda scores: np.exp(scores) / np.exp(scores).sum(0),
                "columns sum to 1",
            ),
            (Edit("e / e.sum(axis=-1, keepdims=True)", "e"), "maximum was taken away"),
            (Edit(" - scores.max(axis=-1, keepdims=True)", ""), "take each row's maximum away"),
            (Edit("np.exp(", "np.exp2("), "powers are of 2"),
            (Edit("e.sum(axis=-1", "e.sum(axis=0"), "each row has its own"),
            (Edit("e.sum(axis=-1, keepdims=True)", "e.sum(axis=-1)"), "keepdims=True"),
            (Edit("scores.max(axis=-1, keepdims=True)", "scores.max(axis=-1)"), "keepdims=True"),
            (Edit("e / e.sum(axis=-1, keepdims=True)", "e / e.sum()"), "sum runs over all sixteen"),
            (lambda scores: np.exp(scores) / np.exp(scores).sum(), "all sixteen together sum to 1"),
            (Edit("e.sum(axis=-1, keepdims=True)", "e.sum(axis=0)"), "run over the columns"),
        ]
    ),
    "3a.5": Case(
        [
            (Edit("np.where(hidden, -np.inf, q @ k.T / np.sqrt(d))", "q @ k.T / np.sqrt(d)"), "no mask"),
            (Edit("-np.inf", "0"), "hidden scores are 0"),
            (Edit("/ np.sqrt(d)", ""), "not divided by √d"),
            (Edit("np.sqrt(d)", "np.sqrt(2)"), "width 8: .*here not 2"),
            (Edit("@ v", "@ k"), "keys are averaged"),
            (lambda q, k, v: v.cumsum(0) / np.arange(1, len(v) + 1)[:, None], "the same for every q"),
            (Edit("[None, :] >", "[None, :] <"), "past is hidden"),
            (lambda q, k, v: np.tri(len(v)) @ v, "the same for every q"),
        ]
    ),
    "3a.6": Case(
        [
            ("all", "cannot see token 3"),
            ("first", "sees itself only"),
            ("third", "before token 3"),
            ("none", "sees the change"),
            ("the second", "Token 1 comes before"),
            ("the middle", "Who can see"),
            (3, "A text is wanted"),
            ("all but the last", "Name one thing only.*cannot see token 3"),
            ("first and last", "one thing only"),
            ("the last but one", "what it is not"),
            ("next to last", "one thing only"),
            ("2 and 3", "one thing only"),
        ],
        ["Last", "the last one", "the fourth", "only token 3"],
    ),
    "3a.order": Case(
        [
            ([], "Row 0 sees itself only"),
            ({0, 1, 2, 3}, "Row 2 has the same query"),
            ([0], "Row 1 changes, too"),
            ([1], "Row 0 changes, too"),
            ([2, 3], "rows that stay"),
            ([0, 1, 3], "Row 3 has the same query"),
            ([4], "rows are 0 to 3"),
            ("all", "An array of numbers"),
        ],
        [{0, 1}, (1, 0), [True, True, False, False], np.array([0.0, 1.0])],
    ),
    "3a.back": Case(
        [
            (0, "At distance 0 the mean share is 0"),
            (2, "At distance 2 the mean share is 0"),
            (-1, "i − j, a positive number"),
            (12, "A whole number is wanted, from 0 .* to 11"),
            (0.5, "A whole number is wanted"),
            (Edit("int(np.argmax(", "float(np.max("), "That is the mean share"),
            ([0, 1, 1], "One number is wanted"),
        ],
        [1.0, "1", np.int64(1)],
    ),
    "3b.1": Case(
        [
            (Edit("np.asarray(tokens)", "np.asarray(tokens) + 1"), "ids plus one"),
            (Edit("np.asarray(tokens)", "np.asarray(tokens) - 1"), "ids minus one"),
            (Edit("np.asarray(tokens)", ": len(tokens)"), "first ones of the table"),
            (Edit(".astype(np.float32)", ".astype(np.float32) * 16"), "√D"),
            (Edit(".astype(np.float32)", ""), "the rest computes in float32"),
            (Edit(".astype(np.float32)", ".astype(np.float64)"), "the rest computes in float32"),
            (Edit(".astype(np.float32)", ".astype(np.float16)"), "values are (wrong|right, but in float16)"),
        ]
    ),
    "3b.2": Case(
        [
            (Edit(" * norm.weight", ""), "do not multiply by their weight"),
            (Edit("axis=-1", "axis=0"), "over the tokens"),
            (Edit("np.sqrt(mean_square + norm.eps)", "(mean_square + norm.eps)"), "root is missing"),
            (Edit("mean_square + norm.eps", "mean_square"), "ε is missing"),
            (Edit("np.sqrt(mean_square + norm.eps)", "(np.sqrt(mean_square) + norm.eps)"), "belongs under it"),
            (Edit("mean(axis=-1, keepdims=True)", "mean()"), "all tokens together"),
            (Edit("return x /", "return (x - x.mean(-1, keepdims=True)) /"), "values are wrong"),
        ],
        [lambda x, norm: x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps) * norm.weight],
    ),
    "3b.3": Case(
        [
            (Edit("np.rint", "np.trunc"), "truncated, not rounded"),
            (Edit("axis=-1, ", ""), "one activation scale for all tokens"),
            (Edit("matrix.w_dequant_scale / a", "1 / a"), "weight scale is not applied"),
            (Edit("matrix.w_dequant_scale / a", "1 / matrix.w_dequant_scale / a"), "inverted"),
            (Edit("float32(127)", "float32(128)"), "128 / max"),
            (Edit("np.rint(x * a)", "x * a"), "not rounded to integers"),
            (Edit("np.abs(x)", "x"), "maximum is of"),
            (
                Edit(
                    """np.abs(x).max(axis=-1, keepdims=True), np.float32(1e-5))
    x_q = np.clip(np.rint(x * a), -128, 127)""",
                    """x.max(axis=-1, keepdims=True), np.float32(1e-5))
    x_q = np.rint(x * a)""",
                ),
                "goes below −128",
            ),
        ]
    ),
    "3b.4": Case(
        [
            (Edit("x[..., : d // 2], x[..., d // 2 :]", "x[..., 0::2], x[..., 1::2]"), "neighbouring pairs"),
            (Edit("a * cos - b * sin, b * cos + a * sin", "a * cos + b * sin, b * cos - a * sin"), "other direction"),
            (Edit("positions[:, None]", "(positions[:, None] + 1)"), "one too high"),
            (Edit("theta **", "500000.0 **"), "theta"),
            (Edit("positions[:, None]", "np.arange(len(x))[:, None]"), "positions that you are given"),
            (Edit("positions[:, None]", "(2 * positions[:, None])"), r"is (\S+), not (?!\1\.)"),
        ]
    ),
    "3b.5": Case(
        [
            (Edit("np.arange(H) // (H // G)", "np.arange(H) % G"), "grouped wrongly"),
            (Edit("/ np.sqrt(d)", ""), r"not divided by sqrt\(d\)"),
            (Edit("/ np.sqrt(d)", "/ d"), "divided by d"),
            (Edit("/ np.sqrt(d)", "/ np.sqrt(H * d)"), "divided by √D"),
            (Edit("/ np.sqrt(d)", "/ np.sqrt(T)"), "divided by √T"),
            (Edit("/ np.sqrt(d)", "/ np.sqrt(H)"), "divided by √H"),
            (Edit("/ np.sqrt(d)", "/ np.sqrt(G * d)"), "root of G · d"),
            (Edit("[None, :] > np", "[None, :] < np"), "turned round"),
            (Edit("np.arange(T - n, T)", "np.arange(n)"), "token T − n \\+ i"),
            (Edit("-np.inf", "0"), "hidden scores are 0"),
            (Edit("[None, :] > np", "[None, :] >= np"), "hides the token itself"),
            (
                Edit(
                    """    scores = np.where(hidden, -np.inf, scores)
    e = np.exp((scores - scores.max(axis=-1, keepdims=True)).astype(np.float64))
    pattern = (e / e.sum(axis=-1, keepdims=True)).astype(np.float32)""",
                    """    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    pattern = np.where(hidden, 0, e / e.sum(axis=-1, keepdims=True))""",
                ),
                "mask comes after softmax",
            ),
        ]
    ),
    "3b.6": Case(
        [
            (Edit("np.square(np.maximum(gate, 0))", "np.maximum(gate, 0)"), "without the square"),
            (Edit("np.square(np.maximum(gate, 0))", "gate / (1 + np.exp(-gate))"), "silu"),
            (Edit("np.square(np.maximum(gate, 0)) * up", "np.square(np.maximum(gate * up, 0))"), "gate \\* up"),
            (Edit("np.square(np.maximum(gate, 0)) * up", "np.square(np.maximum(up, 0)) * gate"), "exchanged"),
            (Edit("np.square(np.maximum(gate, 0)) * up", "np.maximum(gate * gate * up, 0)"), "taken of the product"),
            (Edit("* up", "* np.maximum(up, 0)"), "negative results are cut to 0"),
            (Edit(" * up", ".T"), "transpose"),
        ]
    ),
    "3b.7": Case(
        [
            (Edit("x = x + bit", "x = bit"), "must be added"),
            (Edit("x = x + bit", "x += bit"), "changes an array that it was given"),
            (Edit("layer.ffn_norm", "layer.attn_norm"), "the second has ffn_norm"),
            (
                Edit(
                    "rope(bit_linear(h, layer.k_proj).reshape(n, G, d), positions)",
                    "bit_linear(h, layer.k_proj).reshape(n, G, d)",
                ),
                "keys are not turned",
            ),
            (Edit("np.arange(start, start + n)", "np.arange(n)"), "one by one: positions begin"),
            (
                Edit('start = len(x), len(cache["k"])', 'start = len(x), len(cache["k"]) + len(x)'),
                "before you put the new ones",
            ),
            (Edit("np.arange(start, start + n)", "np.arange(2 * start, 2 * start + n)"), "before this call"),
            (Edit('np.concatenate([cache["k"], k])', "k"), "one by one: put the new keys"),
            (Edit('attend(q, cache["k"], cache["v"])', "attend(q, k, v)"), "one by one: the cache is right"),
            (Edit('cache["k"], cache["v"] = ', "_ = "), "raised"),
            (Edit("h = rms_norm(x, layer.attn_norm)", "h = x"), "first norm is missing"),
            (Edit("h = rms_norm(x, layer.ffn_norm)", "pass"), "second norm is missing: gate and up read what"),
            (Edit("h = rms_norm(x, layer.ffn_norm)", "h = x"), "second norm is missing: gate and up read x"),
            (Edit("x = x + bit", "x = h + bit"), "added to the normalised x"),
            (Edit("attn_sub_norm", "attn_norm"), "attn_norm twice"),
            (Edit("return x + bit", "return h + bit"), "must be added to x"),
            (
                Edit(
                    '[cache["k"], k]), np.concatenate([cache["v"], v])',
                    '[k, cache["k"]]), np.concatenate([v, cache["v"]])',
                ),
                "tokens in another order",
            ),
        ]
    ),
    "3b.8": Case(
        [
            (Edit("argmax", "argmin"), "argmin"),
            (Edit("encode(prompt)", "encode(prompt)[1:]"), "BOS is missing"),
            (Edit("if token in tokenizer.eos_ids:", "if token < 0:"), "does not stop before"),
            (Edit("ids + new)", "new)"), "prompt is missing"),
            (Edit("len(new) < max", "len(new) <= max"), "too many"),
            (Edit("len(new) < max_tokens", "len(new) < max_tokens - 1"), "too few"),
            (Edit("len(new) <", "len(ids + new) <"), r"stops after \d of 12 new tokens: .*not those of the prompt"),
            (Edit("len(new) <", "2 * len(new) <"), r"stops after 6 of 12 new tokens: max_tokens counts the new ones\."),
            (Edit("fed = [token]", "fed = ids + new"), "feed only the new token"),
            (Edit("tokenizer.decode(ids + new)", "ids + new"), "A text is wanted"),
            (Edit("rms_norm(x[-1:], w.final_norm)", "x[-1:]"), "last norm, w.final_norm, is missing"),
            (Edit("w.layers]", "w.layers][:1] * 6"), "share one cache"),
            (Edit("decode(ids + new)", "decode(new + ids)"), "does not begin with the prompt"),
            (Edit("in tokenizer.eos_ids", "is None"), "does not stop before"),
            (
                Edit(
                    "        if token in", "        new += [token] * (token in tokenizer.eos_ids)\n        if token in"
                ),
                "writes it first",
            ),
        ]
    ),
    "3c.1": Case(
        [
            (Edit(", -1, 1, 2)", ", 0, 1, 2)"), "at the token itself|layer comes first"),
            (Edit("argmax", "argmin"), "the least|at the token itself|layer comes first"),
            (Edit("argmax()", "ravel().argsort()[-2]"), "another one has more|is asked|layer comes first"),
            (Edit("), H)", "), H)[::-1]"), "layer comes first"),
            (Edit("divmod(int(shares.argmax()), H)", "int(shares.argmax())"), "divmod by H"),
            ((6, 0), "Layers are 0 to 5"),
            ([1, 2, 3], "Two numbers"),
        ],
        [
            Edit("), H)", "), H)\none_back = list(one_back)"),
            Edit("), H)", "), H)\none_back = np.array(one_back, float)"),
        ],
    ),
    "3c.2": Case(
        [
            (768, "one of these is missing"),
            (256, "one block"),
            (3072, "each query head"),
            (24, "has d numbers"),
            (5, "too small"),
            (4, "vectors of one block"),
            (2304, "Queries are not kept"),
            (384, "both factors"),
            (6144, "bytes in float32"),
            (1536 * 256, "full cache"),
        ],
        [1536.0, "1536"],
    ),
    "3c.3": Case(
        [
            ((LENS[-1] == LENS).argmax(0), "for the first time"),
            ((LENS[-1] == LENS).sum(0), "counted"),
            ([2, 3, 5], "embedding is depth 0"),
            ([3, 2, 0], "not from the end"),
            ([6], "shape"),
        ],
        [np.array([3.0, 4, 6]), (3, 4, 6)],
    ),
    "3c.seen": Case(
        [
            (Edit(".sum())", ".sum()) / len(right)"), "That is a share"),
            (Edit("!=", "=="), "how often they agree"),
            (Edit("right.argmax(axis=-1) != wrong.argmax(axis=-1)", "right != wrong"), "logits that differ"),
            (lambda right, wrong: (right.max(-1) != wrong.max(-1)).sum(), "where the token stays"),
            (lambda right, wrong: (right.argmax(0) != wrong.argmax(0)).sum(), "along the last axis"),
            (lambda right, wrong: 0, "too small"),
            (lambda right, wrong: right.argmax(-1) != wrong.argmax(-1), "One number is wanted; yours are 11"),
            (lambda right, wrong: (right.argmax(-1) != wrong.argmax(-1)).argmax(), "for the first time. Count"),
            (lambda right, wrong: 1 + (right.argmax(-1) != wrong.argmax(-1)).argmax(), "counted from 1"),
            (lambda right, wrong: len({*right.argmax(-1)} - {*wrong.argmax(-1)}), "not as sets"),
            (lambda right, wrong: len({*right.argmax(-1)} ^ {*wrong.argmax(-1)}), "not as sets"),
            (Edit("argmax(axis=-1)", "argmin(axis=-1)"), "not argmin"),
            (4, "A function is wanted"),
            (lambda right, wrong: (right.argmax(-1) != wrong.argmax(-1)).any(), "whether any differs"),
            (lambda right, wrong: bool((right.argmax(-1) != wrong.argmax(-1)).any()), "whether any differs"),
        ],
        [lambda right, wrong: sum(a.argmax() != b.argmax() for a, b in zip(right, wrong, strict=True))],
    ),
    "3c.tipped": Case(
        [
            (Edit(".mean()", ".sum()"), "the share of them"),
            (Edit(".mean()", ".mean() * 100"), "in percent"),
            (Edit("!=", "=="), "stays equal"),
            (
                Edit(
                    "np.concatenate([(run32[name] != run64[name]).ravel()",
                    "np.mean([(run32[name] != run64[name]).mean()",
                ),
                "mean of four",
            ),
            (Edit("(run32[name] != run64[name]).ravel()", "(run32[name] != run64[name]).any(-1)"), "share of tokens"),
            (Edit("inputs.values()", "[*inputs.values()][:1]"), "q, k and v alone"),
            (Edit("inputs.values()", "[*inputs.values()][3:]"), "down alone"),
            (lambda i: 0.5, "too large. In block 0"),
        ]
    ),
    "3c.first": Case(
        [
            (
                Edit("not np.array_equal(array, theirs.get(name))", "not np.allclose(array, theirs[name])"),
                "last bits alone",
            ),
            (Edit("right.items()", "reversed(right.items())"), "Two differ"),
            (Edit('return "none"', 'return ""'), "All are equal: .* Yours is ''"),
            (Edit('return "none"', "pass"), "All are equal: .* Yours is None"),
            (
                lambda right, theirs: next(
                    (n for n in right if n not in theirs or (right[n] != theirs[n]).all()), "none"
                ),
                "single element",
            ),
            (Edit("right.items()", "[(name, right[name]) for name in theirs]"), "order of the computation"),
            (
                lambda right, theirs: max(right, key=lambda name: abs(right[name] - theirs[name]).max()),
                "second by more",
            ),
            (Edit("theirs.get(name)", "theirs[name]"), "raised KeyError"),
            (Edit("not ", ""), "One tensor differs"),
            (Edit("return name", "return array"), "name is wanted"),
        ],
        [lambda right, theirs: next((n for n in right if n not in theirs or (right[n] != theirs[n]).any()), "none")],
    ),
    "3c.4": Case(
        [
            (lambda q, k: (q, k), "inherits from Backend"),
            (type("Same", (Backend,), {}), "nothing is planted"),
            (type("Both", (Backend,), {"rope": lambda self, q, k, cos, sin: (q, k)}), "queries are not turned"),
            (type("Queries", (Backend,), {"rope": lambda self, q, k, *t: (q, layers.apply_rope(k, *t))}), "not turned"),
            (type("Other", (Backend,), {"rope": lambda self, q, k, *t: (-layers.apply_rope(q, *t), k)}), "are others"),
            (type("Back", (Backend,), {"rope": lambda self, q, k, *t: (layers.apply_rope(q, *t), -k)}), "k itself"),
            (Silu, "replace rope alone"),
            (type("Broken", (Backend,), {"rope": lambda self, q, k, *t: q}), "raised"),
        ]
    ),
    "3c.row": Case(
        [
            (Edit("kl(p, q).mean()", "kl(p, q)"), "one for each token"),
            (Edit("kl(p, q).mean()", "kl(q, p).mean()"), "the right run comes first"),
            (Edit("kl(p, q).mean()", "kl(p, q).sum()"), "sum over the tokens"),
            (Edit("kl(p, q).mean()", "kl(p, q).max()"), "the worst token"),
            (Edit("visible(p, q)", "visible(p, p)"), "visible.right, wrong., of the logits"),
            (Edit("loss_of(q,", "loss_of(p,"), "the bug's own"),
            (Edit("loss_of(q, tokens)", "loss_of(q, tokens) / np.log(2)"), "The loss is"),
            (Edit("first_difference(right, theirs)", '"q"'), "The first difference is 'norm', .*; yours is 'q'"),
            (Edit("first_difference(right, theirs)", "first_difference(theirs, right)"), "in the right order"),
            (Edit("return kl", "return visible(p, q), kl"), "Four things"),
            (lambda right, theirs, tokens: 3.0, "Four things"),
        ],
        [
            Edit(
                "return kl(p, q).mean(), visible(p, q), ",
                "return np.float32(kl(p, q).mean()) * 1.0, int(visible(p, q)), ",
            )
        ],
    ),
    "3c.5": Case(
        [
            (Edit("if i != block", ""), "raised|no block"),
            (Edit("i != block", "i != (block + 1) % 6"), "block after it"),
            (Edit("i != block", "i != 5 - block"), "from the end"),
            (Edit("return loss_of", "return -loss_of"), "sign"),
            (loss_of_one_block, "alone is kept"),
            (lambda block: loss_of(model("storyteller", "numpy").logits(PASSAGE), PASSAGE), "no block is left out"),
            (
                Edit("return loss_of(engine.logits(passage_ids), passage_ids)", "return engine.logits(passage_ids)"),
                "One number",
            ),
            (
                Edit("for i, layer in enumerate(w.layers) if i != block", "for layer in w.layers[:block]"),
                "raised|values",
            ),
        ]
    ),
    "4.4": Case(
        [
            (Edit("(c0 - 1) * x0 + (c1 - 1) * x1", "c0 * x0 + c1 * x1"), "its code less 1"),
            (Edit("for c1 in range(3) for c0 in range(3)", "for c0 in range(3) for c1 in range(3)"), "exchanged"),
            (Edit("* x1 for", "* x1 + 256 for"), "256 is added"),
            (Edit(" + (c1 - 1) * x1", ""), "only column 0"),
            (Edit("x0 + (c1", "x0 * (c1"), "they are added"),
            (Edit("range(3)", "range(4)"), "Nine entries"),
            (lambda x0, x1: np.add.outer([-x1, 0, x1], [-x0, 0, x0]).astype(np.int8).ravel(), "does not fit int8"),
        ],
        [lambda x0, x1: np.add.outer([-x1, 0, x1], [-x0, 0, x0]).ravel()],
    ),
    "4.digits": Case(
        [
            (Edit("axis=1)", "axis=1)[:, ::-1]"), "run the other way"),
            (Edit("r.astype(int)", "r"), "widen r first"),
            (Edit("rest & 255", "rest"), "must be taken away"),
            (
                Edit("digits.append(rest >> 8)\n        rest = rest & 255", "digits.append(rest >> 8 & 3)"),
                "& 3 takes two bits",
            ),
            (Edit("digits.append(rest >> 8)", "digits.append((rest >> 8) - 1)"), "those are weights"),
            (Edit("digits.append(rest >> 8)", "digits.append(rest & 255)"), "left after each step"),
            (lambda r: np.stack([(r >> 8 * 0) // 3**n % 3 for n in range(5)]), "cannot divide"),
            (lambda r: np.stack([r.astype(int) % 3] * 5, axis=1), "cannot divide"),
            (lambda r: np.array([[int(x) // 3**n % 3 for n in (4, 3, 2, 1, 0)] for x in r]), "digits of the number r"),
            (Edit(", axis=1", ""), "transpose"),
        ],
        [
            lambda r: [[(int(x) * 3**n * 3 >> 8) - 3 * (int(x) * 3**n >> 8) for n in range(5)] for x in r],
            Edit("rest & 255", "rest - 256 * (rest >> 8)"),
        ],
    ),
    "4.tile": Case(
        [
            (Edit("return c + ", "return "), "c, are missing"),
            (lambda c, a, b: c + a.astype(int) @ b.T.astype(int), "and not all columns of row k"),
            (Edit("mki,kni->mn", "mki,kni->nm"), "the other way"),
            (Edit(".astype(int), b.reshape(16, 16, 4).astype(int)", ", b.reshape(16, 16, 4)"), "wraps: widen"),
            (Edit("a.reshape(16, 16, 4)", "a.reshape(16, 4, 16).swapaxes(1, 2)"), "neighbours in a, too"),
            (Edit("b.reshape(16, 16, 4)", "b.reshape(16, 4, 16).swapaxes(1, 2)"), "16 apart"),
            (lambda c, a, b: c + a.astype(int)[:, ::4] @ b.astype(int)[:, ::4], "only the first of each four"),
            (lambda c, a, b: c + a @ b, "raised ValueError"),
            (Edit("b.reshape", "b.view(np.int8).reshape"), "bytes of b have no sign"),
            (Edit("a.reshape", "a.view(np.uint8).reshape"), "bytes of a have a sign"),
            (
                lambda c, a, b: (
                    c
                    + np.einsum(
                        "mki,kni->mn",
                        a.view(np.uint8).reshape(16, 16, 4).astype(int),
                        b.view(np.int8).reshape(16, 16, 4).astype(int),
                    )
                ),
                "the wrong operand is unsigned",
            ),
        ],
        [
            lambda c, a, b: [
                [
                    c[m, n] + sum(int(a[m, 4 * k + i]) * int(b[k, 4 * n + i]) for k in range(16) for i in range(4))
                    for n in range(16)
                ]
                for m in range(16)
            ],
            lambda c, a, b: c + a.astype(float) @ b.astype(float).reshape(16, 16, 4).transpose(0, 2, 1).reshape(64, 16),
        ],
    ),
    "4.5": Case(
        [
            (Edit("gate > 0", "gate >= 0"), "a gate of 0 is closed"),
            (Edit("gate > 0", "gate != 0"), "a negative gate is closed"),
            (Edit("gate > 0", "x_int8 != 0"), "known only when the row"),
            (Edit("x_int8 != 0", "gate > 0"), "rounded to 0"),
            (Edit("x_int8 != 0", "x_int8 > 0"), "below 0 counts"),
            (Edit("gate > 0, x_int8 != 0", "gate > 0"), "Two arrays"),
            (Edit("gate > 0, x_int8 != 0", "np.array(2)"), "Two arrays"),
            (Edit("x_int8 != 0", "x_int8 == 0"), "need not be read"),
            (Edit("gate > 0, x_int8 != 0", "(gate > 0).sum(), (x_int8 != 0).sum()"), "shape"),
        ],
        [Edit("gate > 0, x_int8 != 0", "[np.maximum(gate, 0) ** 2 > 0, (x_int8 != 0).astype(int)]")],
    ),
    "4.6": Case(
        [
            (Edit("memory = tokens * ", "memory = "), "meets each of the tokens"),
            (Edit("tokens * weights_per_byte", "tokens"), "GB/s are bytes|a byte has several weights"),
            (Edit('"memory" if memory < peak else "arithmetic"', '"memory"'), "the lower is arithmetic, not 'memory'"),
            (Edit("min(", "max("), "of the higher limit"),
            (Edit("speed / min(memory, peak)", "min(memory, peak) / speed"), "1 over it"),
            (Edit("speed /", "100 * speed /"), "percentage"),
            (Edit("min(memory, peak)", "read_gb_per_s"), "GB/s are bytes"),
            (lambda *given: "memory", "Two are wanted"),
        ],
        [Edit("speed / min", "np.float64(speed) / min")],
    ),
    "4.3": Case(
        [(131, "one too many"), (260, "two products"), (520, "two products"), (128, "63, not 64"), (65, "half of it")],
        [130.0],
    ),
    "4.1": Case(
        [
            (Edit("[0, 2, 4, 6]", "[6, 4, 2, 0]"), "opposite order"),
            (Edit(").ravel()", ").T.ravel()"), "same place of all four"),
            (Edit(".ravel()", ".ravel().astype(int) - 1"), "those are weights"),
            (
                lambda four: (four[:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).ravel() - np.uint8(1),
                "0 − 1 is 255",
            ),
            (Edit("[0, 2, 4, 6]", "[0, 1, 2, 3]"), "shifted by one"),
            (Edit(" & 3", ""), "& 3 is missing"),
        ],
        [lambda four: [int(byte) >> shift & 3 for byte in four for shift in (0, 2, 4, 6)]],
    ),
    "4.2": Case(
        [
            ([0, 1, 2, 3], "one byte"),
            ([3, 7, 11, 15], "highest bits"),
            ([1, 5, 9, 13], "begin at 0"),
            ([0, 2, 4, 6], "not two"),
            ([0, 16, 32, 48], "four bytes apart"),
            ([0], "shape"),
        ],
        [(0, 4, 8, 12), {"a": 0} and range(0, 16, 4), np.arange(0, 16, 4.0)],
    ),
    "4.7": Case(
        [
            (Edit(" - x.sum(dtype=np.int32)", ""), "still in it"),
            (Edit("total - x", "total + x"), "added, not taken away"),
            (Edit("register, 2 * s", "register, 6 - 2 * s"), "run the other way"),
            (Edit("x[16 * block + 4 * s :][:4]", "x[16 * block + s :: 4][:4]"), "not neighbours"),
            (Edit("x[16 * block + 4 * s :]", "x[4 * s :]"), "first 16 activations"),
            (
                Edit("cpu.vpand(cpu.vpsrlw(register, 2 * s), 3)", "cpu.vpsrlw(register, 2 * s)"),
                "& 3 is missing: from above",
            ),
            (Edit("register, 2 * s", "register, 0"), "the shift is missing"),
            (Edit("    total = cpu.vpaddd(total, cpu.vpmaddwd(short, ones))\n    return", "    return"), "is lost"),
            (Edit("block % 16 == 15", "block % 32 == 31"), "an int16 wrapped"),
            (Edit("block % 16 == 15", "False"), "an int16 wrapped"),
            (Edit("np.zeros(16, dtype=np.int16)\n    total", "np.zeros(16, dtype=np.int32)\n    total"), "16 int16"),
            (Edit("cpu.vpand(cpu.vpsrlw(register, 2 * s), 3)", "register >> 2 * s & 3.0"), "raised TypeError"),
            (Edit("[:4])", ")"), "takes 4 int8"),
            (Edit("[:4])", "[:4].tolist())"), "takes 4 int8"),
            (Edit("(codes, x4)", "(codes.tolist(), x4)"), "register of 32 uint8"),
            (lambda cpu, registers, x: x_times_rows(registers, x), "not made by registers"),
        ],
        [
            Edit("block % 16 == 15", "True"),
            Edit("cpu.vpand(cpu.vpsrlw(register, 2 * s), 3)", "register >> 2 * s & 3"),
            Edit("total - x.sum(dtype=np.int32)", "[int(each) - int(x.sum(dtype=int)) for each in total]"),
        ],
    ),
    "5.1": Case(
        [
            (Edit(" >> bit & 1", " >> (4 - bit) & 1"), "other way"),
            (
                Edit("np.where(", "np.copyto(none, every, where=(numbers >> bit & 1) == 1) or np.where("),
                "changes an array that it was given",
            ),
            (Edit("numbers >> bit & 1", "numbers & bit"), "other bits|values are wrong"),
            (Edit("every, none)", "none, every)"), "True and False are exchanged"),
            (Edit(" == 1", ""), "Which of them say yes"),
            (Edit(">> bit &", ">> bit + 1 &"), "one too many"),
            (Edit("numbers >> bit & 1", "numbers == bit"), "a bit of their number"),
            (Edit("np.where(numbers >> bit & 1, every, none)", "every"), "nothing is mixed"),
            (Edit("unpack(np.where(numbers >> bit & 1, every, none)) == 1", "numbers >> bit & 1"), "shape"),
        ],
        [
            Edit("numbers >> bit & 1, every", "numbers // 2**bit % 2 == 1, every"),
            Edit(" == 1", " > 0"),
        ],
    ),
    "5.5": Case(
        [
            (Edit("-(-number * 256 // 243)", "number"), "fraction of 256"),
            (Edit("-(-number * 256 // 243)", "number * 256 // 243"), "rounded up, so"),
            (Edit("-(-number * 256 // 243)", "round(number * 256 / 243)"), "not to the nearest"),
            (Edit("in weights:", "in weights[::-1]:"), "yours is the lowest"),
            (Edit("w + 1", "w"), "a digit is w"),
            (Edit("* 256", "* 255"), "not 255"),
        ],
        [lambda weights: math.ceil(sum((w + 1) * 3 ** (4 - i) for i, w in enumerate(weights)) * 256 / 243)],
    ),
    "5.2": Case(
        [
            ([1357 // 4, 2], "weights 32 apart"),
            ([77, 2], "another byte"),
            ([333, 4], "highest bits"),
            ([333, 0], "the shift is not"),
            ([333], "Two numbers"),
        ],
        [[333, 2], np.array([333, 2])],
    ),
    "5.3": Case(
        [
            (
                lambda data: np.packbits(np.unpackbits(data[:, None], axis=1)[:, ::-1], axis=1).ravel(),
                "eight bits are reversed",
            ),
            (lambda data: data >> 4 | data << 4, "halves"),
            (lambda data: data[::-1], "bytes are in another order"),
            (lambda data: data, "as they were"),
            (Edit("(data >> 4 & 3) << 2 | (data >> 2 & 3) << 4", "data & 60"), "old places"),
        ]
    ),
    "5.4": Case(
        [
            (Edit("(codes - 1)", "codes"), "a code is w"),
            (Edit("[0, 2, 4, 6]", "[6, 4, 2, 0]"), "lowest bits"),
            (Edit("(-1, 2, 1, 32) >>", "(-1, 1, 1, 64) >>"), "64"),
            (Edit("reshape(shape),", "reshape(shape) * scale,"), "scaled already"),
            (Edit("blocks[0, 64:].copy()", "blocks[0, :63:-1].copy()"), "exchanged"),
            (Edit(".view(np.float16)[0]", ".view(np.uint16)[0]"), "its bits as an integer"),
            (Edit("reshape(shape), scale", "reshape(shape)"), "Two results"),
            (Edit(".view(np.float16)[0]", ".view(bfloat16)[0]"), "bfloat16"),
            (Edit(" & 3", ""), "& 3 is missing"),
            (Edit("(codes - 1)", "np.array([0, 1, -1])[codes]"), "took them for 0, 1 and −1"),
            (Edit("[:, :64]", "[:, 2:]"), "the scale comes last"),
            (Edit(".reshape(shape)", ".reshape(shape[::-1]).T"), "you filled columns"),
            (Edit("blocks[0, 64:]", "blocks[0, :2]"), "which are codes"),
            (Edit("scale = blocks", "scale = 1 / blocks"), "1 over the scale"),
        ]
    ),
    "5.6": Case(
        [
            (lambda before, after: [], "all signs are turned"),
            (lambda before, after: sorted(before), "differ in nothing"),
            (Edit("{*before, *after}", "before"), "the first has not"),
            (Edit("{*before, *after}", "after"), "is missing in the second"),
            (Edit(" or before[name][1] != after[name][1]", ""), "a scale is not"),
            (Edit("before[name][1] != after[name][1]", "not np.isclose(before[name][1], after[name][1])"), "last bit"),
            (
                Edit(
                    "np.array_equal(before[name][0], after[name][0])", "before[name][0].sum() == after[name][0].sum()"
                ),
                "places",
            ),
            (lambda before, after: before == after, "raised|list of names"),
            (lambda before, after: "k", "A list of names"),
        ],
    ),
    "5.7": Case(
        [
            ({"A": "layout", "B": "scale", "C": "gate", "D": "scale"}, "D is not 'scale': it is sound"),
            ({"A": "gate", "B": "scale", "C": "gate", "D": "none"}, "A is not 'gate': its columns' non-zeros"),
            ({"A": "layout", "B": "none", "C": "gate", "D": "none"}, "B is not 'none': look at w_dequant_scale"),
            (
                {"A": "layout", "B": "scale", "C": "layout", "D": "none"},
                "C is not 'layout': its matrices and scales are",
            ),
            ({"A": "layout", "B": "scale", "C": "relu", "D": "none"}, "'relu' is no name of the table"),
            ({"A": "layout"}, "A dict with the keys A, B, C, D"),
        ],
        [{"A": "LAYOUT", "B": " scale", "C": "gate", "D": "none"}],
    ),
    "5.8": Case(
        [
            ({"a"}, "One is missing. Three codes"),
            ({"b"}, "NaN is none"),
            ({"a", "b", "c"}, "one too many: Codes 0 and 1"),
            ({"c"}, "one too many"),
            ("abc", "one too many"),
            ("d", "none of the choices"),
            (set(), "empty"),
        ],
        ["a, b", ["B", "A"], "(a) and (b)", "ab", "BA"],
    ),
    "6.alone": Case(
        [
            (
                Edit(
                    'x_q, scale = quantization.quantize_activations(theirs["x"])',
                    'x_q, scale = theirs["x_int8"], theirs["x_scale"]',
                ),
                "One scale serves",
            ),
            (Edit('theirs["x_int8"].astype(int) @', "x_q.astype(int) @"), "Wrong by itself: x_int8 and x_scale; yours"),
            (
                Edit(
                    """    out = quantization.dequantize(theirs["acc"], s, theirs["x_scale"])""",
                    """    acc = x_q.astype(int) @ t.T.astype(int)
    out = quantization.dequantize(acc, s, scale)""",
                ),
                "everything is computed from x",
            ),
            (Edit('theirs["x_int8"].astype(int) @ t.T.astype(int)', 'theirs["x_int8"] @ t.T'), "overflow int8"),
            (
                Edit("not np.allclose(theirs[name], again[name])", "not np.array_equal(theirs[name], again[name])"),
                "which is rounding",
            ),
            (Edit("dequantize(theirs", "dequantize(acc + 0 * theirs"), "made of them|off by 7, and"),
            (Edit("return {name for", 'return {*"abc"} or {name for'), "Every op is right. Wrong by itself: none"),
            (Edit('s, theirs["x_scale"])', '1, theirs["x_scale"])'), "Every op is right"),
            (Edit("again = {", "return len(theirs)\n    again = {"), "A set of names"),
            (
                Edit(
                    "not np.allclose(theirs[name], again[name])", "abs(theirs[name].mean() - again[name].mean()) > 1e-6"
                ),
                "off by 7",
            ),
            (
                Edit('theirs["x_int8"].astype(int) @ t.T.astype(int)', 'theirs["x_int8"].astype(np.int16) @ t.T'),
                "overflow int16",
            ),
            (lambda theirs, t, s: {"x_int8", "x_scale"}, "Every op is right"),
            (lambda theirs, t, s: set(), "One scale serves"),
        ],
        [
            Edit(
                "return {name for name in again if not np.allclose(theirs[name], again[name])}",
                "return [name for name in again if not np.allclose(theirs[name], again[name], rtol=1e-4)]",
            ),
            Edit("astype(int) @ t.T.astype(int)", "astype(float) @ t.T"),
        ],
    ),
    "6.tolerance": Case(
        [
            (lambda right, bug: (right.max(), (bug <= right.max()).sum()), "None of the right engine's is accused"),
            (lambda right, bug: (right.mean() / 2 + bug.mean() / 2, 0), "The best one judges"),
            (lambda right, bug: (bug.min(), 0), "accuses 0 of .* lets 1"),
            (Edit("return tolerance, wrongly(tolerance)", "return tolerance"), "Two numbers"),
            (
                Edit("return tolerance, wrongly(tolerance)", "return tolerance, (bug <= tolerance).sum()"),
                "Right tokens that are accused count",
            ),
            (
                Edit("return tolerance, wrongly(tolerance)", "return tolerance, (right > tolerance).sum()"),
                "The bug's tokens that pass count",
            ),
            (
                Edit("return tolerance, wrongly(tolerance)", "return wrongly(tolerance), tolerance"),
                "The best one judges|you say",
            ),
            (Edit("[0, *right, *bug]", "right"), "is 0 among those that you try"),
            (Edit("[0, *right, *bug]", "[*right, *bug]"), "The best one judges 1 wrongly. It is 0,"),
            (Edit("min([", "max(["), "The best one judges"),
            (Edit("(bug <= t)", "(bug < 0)"), "The best one judges"),
            (Edit("wrongly(tolerance)", "wrongly(tolerance) / len(right)"), "you say"),
        ],
        [
            Edit("[0, *right, *bug]", "np.r_[-1, np.sort(np.r_[right, bug])]"),
            Edit("[0, *right, *bug]", "np.linspace(0, 30, 3001)"),
        ],
    ),
    "6.mend": Case(
        [
            (Edit("np.float32(127) / largest", "127 / largest.astype(np.float64)"), "rounding alone"),
            (Port, "Nothing has changed"),
            (Backend, "class Mended.Port"),
            (Port("float32", threads=1), "class itself"),
            (Edit("axis=-1, ", ""), "raised"),
            (Edit("axis=-1", "axis=0"), "raised"),
            (Edit("np.rint(", "np.trunc("), "q_proj.hook_x_int8: at .* it is"),
            (Edit("float32(127)", "float32(128)"), "The first tensor that differs is"),
        ],
        [Edit("(np.int8), x_quant_scale", "(np.int8), np.broadcast_to(x_quant_scale, (len(x), 1))")],
    ),
    "6.hunt": Case(
        [
            (("blocks.0.mlp.hook_post", "silu"), "class itself"),
            (Silu("float32", threads=1), "class itself"),
            (Silu, "calls the suspect's own gated"),
            (proof("Same", gated=Silu.gated), "calls the suspect's own gated"),
            (
                proof("Handed", gated=lambda self, g, u, a: Silu("float32", threads=1).gated(g, u, a)),
                "calls the suspect's own gated. Write",
            ),
            (proof("Ones", rms_norm=lambda self, x, norm: 2 * Backend.rms_norm(self, x, norm)), "too early"),
            (proof("Late", dense_matmul=lambda self, x, w: 2 * Backend.dense_matmul(self, x, w)), "still right. Which"),
            (proof("Gelu", gated=lambda self, g, u, a: np.maximum(g, 0) * u), "place is right.*in the suspect"),
            (proof("Shape", gated=lambda self, g, u, a: g[:1]), "raised"),
            (proof("None_", gated=lambda self, g, u, a: Backend.gated(self, g, u, a)), "makes no mistake"),
            (
                proof(
                    "Two",
                    gated=lambda self, g, u, a: layers.silu(g) * u,
                    dense_matmul=lambda self, x, w: 2 * Backend.dense_matmul(self, x, w),
                ),
                "The beginning is right.*lm_head",
            ),
        ],
        [
            proof("Same", gated=lambda self, g, u, a: layers.silu(g) * u),
            proof("Rounds", gated=lambda self, g, u, a: g * u / (1 + np.exp(-g))),
        ],
    ),
    "6.1": Case(
        [
            (100, "too large"),
            (-1, "too small"),
            ([True, False], "One number"),
            ("none", "One number"),
            (np.nan, "finite"),
            (0, "too small"),
            (
                Edit(
                    "np.abs(port.logits(story[:n])[-1] - model.logits(story[:n])[-1])",
                    "(port.logits(story[:n])[-1] - model.logits(story[:n])[-1])",
                ),
                "may also be too",
            ),
            (Edit("(2, 25)", "(24, 25)"), "longest prompt alone"),
            (Edit("= max(", "= (1 / 23) * sum("), "the mean over"),
        ],
        [Edit("= max(", "= 0.005 + max("), Edit("= max(", "= -0.005 + max(")],  # two decimals are enough
    ),
    "6.first": Case(
        [
            (Edit("for name in right", "for name in reversed(right)"), "The last two tensors"),
            (Edit("<= 1e-4", "<= 0.05"), "wrong by a hundredth"),
            (Edit("<= 1e-4", "<= 1e-2"), "wrong by a thousandth"),
            (Edit("1e-4 * np.linalg.norm(a[np.isfinite(a)])", "1e-4"), "divide by the length"),
            (
                lambda right, wrong: next(n for n in right if n in wrong and not np.allclose(right[n], wrong[n])),
                "not elements",
            ),
            (
                Edit(
                    "np.linalg.norm(b[differ] - a[differ]) <= 1e-4 * np.linalg.norm(a[np.isfinite(a)])",
                    "np.isclose(b, a, 1e-4, 1e-5).all()",
                ),
                "not elements",
            ),
            (Edit("<= 1e-4", "<= 1e-9"), "which is rounding"),
            (Edit("for name in right", "for name in wrong"), "in another order"),
            (Edit("if name in wrong", "if True"), "raised KeyError"),
            (Edit("if name in wrong", "if name in wrong and name != 'x_int8'"), "integers are others"),
            (
                Edit("if not np.linalg.norm(b[differ] - a[differ]) <=", "if np.linalg.norm(b[differ] - a[differ]) >"),
                "has NaN in it",
            ),
            (Edit("differ = a != b", "differ = a == a"), "−inf at the same places"),
            (Edit("differ = a != b", "differ = np.isfinite(a)"), "mask is missing"),
            (
                lambda right, wrong: next(
                    (
                        k
                        for k in right
                        if k in wrong
                        and (right[k] * 1.0 * wrong[k]).sum()
                        / np.linalg.norm(right[k] * 1.0)
                        / np.linalg.norm(wrong[k] * 1.0)
                        < 0.99
                    ),
                    None,
                ),
                "1.1 times the right ones. Your function returned None",
            ),
            (lambda right, wrong: min(right), "The first is 'out', and yours is 'acc'"),
        ],
        [
            Edit(
                """            differ = a != b
            if not np.linalg.norm(b[differ] - a[differ])""",
                """            d = np.where(a == b, 0, b - a)
            if not np.linalg.norm(d)""",
            )
        ],
    ),
    "6.blocks": Case(
        [
            (Edit("reshape(len(x), -1, size)", "reshape(len(x), 1, -1)"), "one scale for each token"),
            (Edit("axis=-1, keepdims", "keepdims"), "all blocks of all tokens"),
            (Edit("axis=-1, keepdims", "axis=(0, 2), keepdims"), "one scale for all tokens"),
            (Edit("127 /", "128 /"), "not 128"),
            (Edit(" / scale)", ")"), "divided by the scale again"),
            (Edit("np.rint(", "np.trunc("), "cut off"),
            (Edit("np.rint(", "("), "nothing is rounded"),
            (Edit("np.abs(blocks)", "blocks"), "of max |x| it is right"),
            (Edit(".reshape(x.shape)", ""), "reshape it"),
        ],
        [Edit("127 / np.abs(blocks)", "-127 / np.abs(blocks)")],
    ),
    "6.2": Case(
        [
            ({"cosine"}, "does not turn"),
            ({"relative L2"}, "One is missing"),
            ({"scale ratio"}, "One is missing"),
            ({"relative L2", "cosine", "scale ratio"}, "one too many"),
            ({"L3"}, "none of the choices"),
            (set(), "empty"),
            ([["relative L2"]], "none of the choices"),
        ],
        [
            ["scale ratio", "relative L2 "],
            "relative L2, scale ratio.",
            {"RELATIVE L2": 0, "Scale Ratio": 0}.keys(),
            "relative L2 and scale ratio",
        ],
    ),
    "7a.1": Case(
        [
            (Edit(" / p[kept].sum()", ""), "divided by its sum"),
            (Edit("p, 0) / p[kept].sum()", "p, 0)[order] / p[kept].sum()"), "at its token's place"),
            (Edit("argsort(-p)", "argsort(p)"), "least likely"),
            (Edit("before < limit", "before <= limit"), "after the sum has reached the limit"),
            (Edit(" - p[order]", ""), "reaches the limit"),
            (lambda p, limit: np.where(p >= limit * p.max(), p, 0) / p[p >= limit * p.max()].sum(), "that is min_p"),
            (lambda p, limit: np.where(p > limit, p, 0), "their sum that counts|nothing is left"),
            (lambda p, limit: p, "nothing is cut"),
            (Edit("before < limit", "before < limit - 1e-3"), "reaches the limit"),
            (
                Edit(
                    "kept[order[before < limit]] = True",
                    "kept[order[before < limit]] = True\n    kept[order[-1]] = False",
                ),
                "wrong",
            ),
            (lambda p, limit: 0 * p, r"p = \[0\.\d{1,3}, .* nothing is left: .*always kept"),
        ],
        [lambda p, limit: (q := p * [p[p > each].sum() < limit for each in p]) / q.sum()],
    ),
    "7b.4": Case(
        [
            (12, "float16 takes half"),
            (26, "one too many"),
            (50, "float16 takes two"),
            (52083, "a text has 2,048"),
            (762, "30 layers"),
            (25.43, "round down"),
        ],
        ["25", 25.0],
    ),
    "7a.3": Case(
        [
            (Edit(" - np.log(np.exp(z).sum(axis=1, keepdims=True))", ""), "not yet ln p"),
            (Edit("logits[start - 1 : -1]", "logits[start:]"), "the token after"),
            (lambda logits, ids, start: mean_ln_p(logits, ids, start + 1), "is missing"),
            (lambda logits, ids, start: mean_ln_p(logits, ids, 1), "the beginning is in it"),
            (Edit(".mean()", ".sum()"), "the mean is wanted"),
            (Edit("return ln_p", "return -ln_p"), "a loss"),
            (Edit("ids[start:]].mean()", "ids[start:]].mean() / np.log(2)"), "ln is wanted"),
            (Edit("return ln_p", "return np.exp(ln_p)"), "take ln p"),
            (Edit("return ln_p[np.arange(len(z)), ids[start:]].mean()", "return ln_p"), "One number is wanted"),
        ],
        [Edit(".astype(np.float64)", "")],
    ),
    "7b.5": Case(
        [
            (Edit("if length <= window", "if length < window"), "it fits, so all stay"),
            (Edit("(window - sinks) // 2", "window // 2"), "half of the whole window"),
            (Edit("(window - sinks) // 2", "(window - sinks)"), "drop half of it"),
            (Edit("[(0, sinks), (length", "[(length"), "the sinks are missing"),
            (
                Edit("[(0, sinks), (length - (window - sinks) // 2, length)]", "[(0, sinks + (window - sinks) // 2)]"),
                "oldest stay",
            ),
            (Edit("return [(0, sinks), ", "return [*[(0, sinks)] * 2, "), "in it twice"),
            (Edit("// 2, length)]", "// 2, length - 1)]"), "no longer in it"),
            (lambda length, window, sinks: length, "A list of .start, stop. is wanted"),
        ],
        [
            Edit("[(0, sinks), ", "[[0, sinks], "),
            lambda length, window, sinks: keep_after_overflow(length, window, "sinks", sinks),
        ],
    ),
    "7a.stop": Case(
        [
            (Edit("for stop in stops for", "for stop in stops[:1] for"), "each of them may begin"),
            (Edit("max(", "min("), "the shortest is taken"),
            (Edit("return max(", "return len(text) - max("), "count from the end"),
            (lambda text, stops: max(map(len, stops), default=0), "a whole stop string is held"),
            (lambda text, stops: min(len(text), max((len(s) - 1 for s in stops), default=0)), "can be no beginning"),
            (Edit("range(1, len(stop))", "(1,)"), "3 are held, and yours are 0"),
            (Edit("text.endswith(stop[:n])", "stop[:n] in text"), "not anywhere in it"),
            (Edit("text.endswith", "text.lower().endswith"), "0 are held, and yours are 1"),
            (Edit("text.endswith", "text.rstrip().endswith"), "are held, and yours are"),
            (Edit("text.endswith(stop[:n])", "stop[:n] in text[-len(stop):]"), "not anywhere in it"),
            (Edit("text.endswith(stop[:n])", "n <= len(text) and text[-n:] in stop"), "not any piece of it"),
            (lambda text, stops: any(text.endswith(s[:1]) for s in stops), "are held, and yours are"),
            (lambda text, stops: text, "One number"),
            (Edit(", default=0", ""), "stop=.*, 0 are held. Your function raised ValueError"),
            (
                lambda text, stops: max(max(n for n in range(len(s)) if text.endswith(s[:n])) for s in stops),
                "stop=.., 0 are held. Your function raised ValueError",
            ),
        ],
        [
            Edit("range(1, len(stop))", "range(1, len(stop) + 1)"),  # a whole one has ended the text
            lambda text, stops: next(
                (
                    len(text) - i
                    for i in range(len(text))
                    if any(s.startswith(text[i:]) and s != text[i:] for s in stops)
                ),
                0,
            ),
        ],
    ),
    "7a.5": Case(
        [
            (Edit('"e" in text.lower()', '"e" in text'), "capital E"),
            (Edit("-np.inf", "0"), "Nothing is forbidden"),
            (Edit('"e" in text.lower()', 'text == "e"'), "with an e are allowed, as '▁?[a-z]+'"),
            (lambda ids, logits: np.full_like(logits, -np.inf), "without an e are forbidden, as '▁?[a-zA-Z]+'"),
            (Edit('"e" in text.lower()', '"e" in text.lower() or "a" in text'), "without an e are forbidden"),
            (Edit("-np.inf, logits)", "-np.inf, logits + 1)"), "must stay"),
        ]
    ),
    "7a.guide": Case(
        [
            (lambda machine, state, texts: [text[0] in machine[state] for text in texts], "only the first character"),
            (Edit("            at = machine[at][character]\n", ""), "moves to another state"),
            (
                lambda machine, state, texts: [
                    all(any(c in arcs for arcs in machine.values()) for c in text) for text in texts
                ],
                "the order counts",
            ),
            (Edit("return True", "return not machine[at]"), "to its end"),
            (Edit("at = state", "at = 0"), "not in 0"),
            (Edit("return False", "return 1 > 0"), "is not possible; yours says True"),
            (Edit("return [fits(text) for", "return [not fits(text) for"), "exchanged"),
            (
                Edit("return [fits(text) for text in texts]", "return [text for text in texts if fits(text)]"),
                "numbers is wanted|True or False",
            ),
            (
                Edit("            if character not in machine[at]:\n                return False\n", ""),
                "raised KeyError",
            ),
            (
                Edit("return [fits(text) for text in texts]", "return all(fits(text) for text in texts)"),
                "has the shape",
            ),
            (Edit("for character in text:", "for character in sorted(text):"), "yours says"),
            (Edit("for character in text:", "for character in text[:2]:"), "yours says"),
            (Edit("for character in text:", "for character in text.strip():"), "yours says"),
        ],
        [
            Edit("return [fits(text) for text in texts]", "return np.array([fits(text) for text in texts])"),
            Edit("return True", "return 1"),
        ],
    ),
    "7a.2": Case(
        [
            (2, "Colder"),
            (0.01, "Hotter"),
            (Edit("= hundredths", "= (hundredths + 1)"), "Colder"),
            (Edit("= hundredths", "= (hundredths - 1)"), "Hotter"),
            (0, "between 0 and 2"),
            (0.253, "Two decimals"),
        ],
        [Edit("hundredths / 100", "str(hundredths / 100)")],
    ),
    "7a.4": Case(
        [
            (Edit("sorted(longer, reverse=True)", "sorted(longer)"), "the least likely are kept"),
            (
                Edit(
                    "beams = sorted(longer, reverse=True)[:num_beams]",
                    "best = [b for i in range(0, len(longer), 6) for b in sorted(longer[i:i + 6])[-num_beams:]]\n"
                    "        beams = sorted(best)[:num_beams]",
                ),
                "the least likely of each beam's best",
            ),
            (Edit("[:num_beams]", "[:1]"), "3 texts are wanted; yours are 1"),
            (Edit("return beams", "return beams[0]"), "A list of .sum of ln p, ids. is wanted"),
            (Edit("range(steps)", "range(steps + 1)"), "each has 7 tokens, with the prompt's two; one of yours has 8"),
            (Edit("[*text, token]", "[token]"), "with the prompt's two; one of yours has"),
            (Edit("total + p", "p"), "by their last ln p, not by the sum"),
            (Edit("return beams", "return [(total / steps, text) for total, text in beams]"), "times the right one"),
            (Edit("return beams", "return beams[::-1]"), "in another order"),
            (
                Edit(
                    "beams = sorted(longer, reverse=True)[:num_beams]",
                    "best = [max(longer[i:i + 6]) for i in range(0, len(longer), 6)]\n"
                    "        beams = sorted(longer)[-num_beams:][::-1] if len(beams) == 1 else sorted(best)[::-1]",
                ),
                "the continuations of all compete",
            ),
        ],
        [Edit("return beams", "return [[total, np.array(text)] for total, text in beams]")],
    ),
    "7b.1": Case(
        [(9, "in batches"), (12, "one text after"), (7, "no step lies between"), (5, "A alone"), (100, "too large")],
        ["6", 6.0],
    ),
    "7b.2": Case(
        [
            (lambda lengths, places: sum(lengths), "one request after the other"),
            (
                Edit("list(lengths), [], 0", "[length + 1 for length in lengths], [], 0"),
                "Lengths .5., 3 places: 5 steps, and yours are 6: a step",
            ),
            (
                Edit("while waiting and len(running) < places", "while not running and waiting"),
                "raised|yours are|batches",
            ),
            (lambda lengths, places: max(lengths), "a place for every request"),
            (lambda lengths, places: len(lengths), "the number of requests"),
            (Edit("list(lengths)", "sorted(lengths)"), "shortest first"),
            (Edit("list(lengths)", "sorted(lengths, reverse=True)"), "longest first"),
            (Edit("if left > 1", "if left > 0"), "a step too many"),
            (lambda lengths, places: -(-sum(lengths) // places), "all places taken"),
            (Edit("while waiting and len(", "if waiting and len("), "one request begins in a step"),
            (Edit(".pop(0)", ".pop()"), "from the back of the queue"),
            (Edit("< places", "<= places"), "one running request too many"),
            (Edit("< places", "< places - 1"), "a place always stays empty"),
            (Edit("while waiting or running:", "while waiting:"), "requests still run"),
            (Edit("steps = list(lengths), [], 0", "steps = list(lengths), [], 1"), "nothing runs is counted"),
            (Edit("return steps", "return steps - 1"), "last step is missing"),
            (lambda lengths, n: max(sum(lengths[i::n]) for i in range(n)), "a queue for each place"),
            (
                lambda lengths, n: sum(max(lengths[i : i + n]) for i in range(0, len(lengths), n)),
                "whole batches",
            ),
        ]
    ),
    "7b.3": Case(
        [
            (Edit("range(places)", "range(1)"), "one request after the other"),
            (Edit("if waiting and place not in at", "if waiting and len(at) <= place"), "takes place 1 from request 1"),
            (Edit("        for place in range", "        for place in () if at else range"), "whole batches"),
            (Edit("range(places):", "range(places + 1):"), "there are 2, from 0 on"),
            (Edit("while waiting or at", "while waiting"), "Request 4 is to write 4 tokens; yours are 1"),
            (
                Edit("start = len(text) - 1 if written[i] else 0", "start = 0"),
                "holds 5 tokens, which are computed again",
            ),
            (Edit("len(text) - 1 if", "len(text) if"), "yours: 0 tokens at position"),
            (
                Edit("(place, start, text", "(place, start and start + 1, text"),
                "at position 5 is next; yours: 1 token at position 6",
            ),
            (Edit("(place, start, text", "(place, 0, text"), "yours: 1 token at position 0"),
            (Edit("(place, start, text", "(0, start, text"), "Two requests have one place"),
            (Edit("(place, start, text", "(place + 1, start, text"), "there are 2, from 0 on"),
            (Edit("text[start:]", "text[-1]"), "also of a single token"),
            (Edit("zip(parts, run(parts))", "zip(parts, run(parts)[::-1])"), "row j of the logits belongs to part j"),
            (Edit("argmax", "argmin"), "yours goes on with"),
            (Edit("== lengths[i]", "== lengths[i] - 1"), "raised|is to write|not done"),
            (Edit("== lengths[i]", "> lengths[i]"), "still takes part"),
            (Edit("                del at[place]", "                del at[place], written[i][0]"), "yours are 5"),
            (Edit("[[] for _ in prompts]", "[[]] * len(prompts)"), "one token at position 5 is next"),
            (Edit("return written", "return sorted(written)"), "list i belongs to request i"),
            (Edit("return written", "return [p + w for p, w in zip(prompts, written)]"), "begins with its prompt"),
            (Edit("waiting.pop(0)", "waiting.pop()"), "from the front of the queue"),
            (Edit("return written", "return written[1:]"), "4 lists of tokens for 5"),
            (Edit("while waiting or at:", "while True:"), "a step without a request"),
        ],
        [
            Edit("return written", "return dict(enumerate(written))"),
            Edit("text[start:]", "np.array(text[start:])"),
            Edit("return written", "return [np.array(each) for each in written]"),
            Edit("for place, i in at.items()", "for place, i in sorted(at.items(), reverse=True)"),
        ],
    ),
    "8.2": Case(
        [
            (Edit("row % 8", "row // 2"), "the lane"),
            (Edit("row // 8 +", "row % 2 +"), "the word"),
            (Edit("column // 4 % 4, column % 4", "column % 4, column // 4 % 4"), "exchanged"),
            (Edit(", column % 4", ""), "Four numbers"),
            (Edit("2 * (column // 64)", "column // 64"), "the word"),
        ]
    ),
    "8.1": Case(
        [(2**18 - 1, "fits"), (2**24, "64 times"), (2**25, "64 times"), (2**19, "has a sign"), (2**18 + 1, "One less")],
        [2.0**18],
    ),
    "8.mma": Case(
        [
            (Edit("g + 8 * (r % 2), 4 * t + 16 * (r // 2)", "g + 8 * (r // 2), 4 * t + 16 * (r % 2)"), "same columns"),
            (Edit("g + 8 * (r // 2), 2 * t + r % 2", "g + 8 * (r % 2), 2 * t + r // 2"), "two tokens of row g"),
            (Edit("2 * t + r % 2", "t + 4 * (r % 2)"), "two neighbouring tokens"),
            (Edit("4 * t + 16 * (r // 2) + i", "t + 4 * i + 16 * (r // 2)"), "in A as in B"),
            (Edit("4 * t + 16 * r + i, g", "8 * t + 4 * r + i, g"), "16 columns on; yours"),
            (Edit("dtype=int), np.zeros((32, 8), dtype=int)", "np.int8), np.zeros((32, 8), np.int8)"), "widen both"),
            (Edit("g + 8 * (r // 2), 2", "g, 2"), "row g . 8 is missing"),
            (
                Edit(
                    "return np.stack([whole_d[g + 8 * (r // 2), 2 * t + r % 2] for r in range(4)], axis=1)",
                    "return whole_d",
                ),
                "D as a whole",
            ),
            (Edit(", axis=1", ""), "transpose"),
            (lambda a, b: own_fragments(a, b)[:, [0, 0, 1, 1]], "multiplies its own fragments"),
            (lambda a, b: own_fragments(a, b)[:, [0, 1, 0, 1]], "multiplies its own fragments"),
            (lambda a, b: np.einsum("lri,lri->lr", a.astype(int), np.tile(b, (1, 2, 1))), "its own fragments"),
        ],
        [
            columns_in_another_order,
        ],
    ),
    "8.3": Case(
        [
            ("kernel", "named tree"),
            (TREE, "A round must not begin"),
            (TREE.replace("if (i < half)", "__syncthreads(); if (i < half)"), "before the last line"),
            (
                TREE.replace("all[i] += all[i + half];", "{ __syncthreads(); all[i] += all[i + half]; }"),
                "inside the if",
            ),
            (TREE.replace("all[i + half];\n", "all[i + half];\n        __syncthreads();\n"), "before all have written"),
            (TREE.replace("half > 0", "half > 1"), "A round must not begin"),
            (17, "The text of a kernel"),
            (TREE.replace("y[i] =", "__syncthreads() y[i] ="), "It does not run((?!A barrier must).)*$"),
        ],
        [
            TREE.replace("all[i] = x[i];", "all[i] = x[i];\n    __syncthreads();").replace(
                "all[i + half];\n", "all[i + half];\n        __syncthreads();\n"
            ),
            TREE.partition("    for")[0]
            + "__syncthreads(); int sum = 0; for (int k = 0; k < 64; k++) sum += all[k]; y[i] = sum; }",
        ],
    ),
    "8.4": Case(
        [
            (Edit("sum / 64", "sum"), "divide at the end"),
            (Edit("sum += __shfl_xor_sync(0xffffffff, sum, 2);", ""), "one shuffle is missing"),
            (Edit("sum += __shfl_xor_sync(0xffffffff, sum, 1);", ""), "over 1 is missing"),
            (
                Edit(
                    "1);\n    sum += __shfl_xor_sync(0xffffffff, sum, 2",
                    "2);\n    sum += __shfl_xor_sync(0xffffffff, sum, 4",
                ),
                "lanes of other rows",
            ),
            (
                Edit(
                    "    y[i]",
                    "    for (int b = 4; b < 32; b *= 2) sum += __shfl_xor_sync(0xffffffff, sum, b);\n    y[i]",
                ),
                "a row has four",
            ),
            (Edit("    y[i]", "    sum += __shfl_xor_sync(0xffffffff, sum, 4);\n    y[i]"), "the shuffle over 4"),
            (Edit("6 - 2 * c", "2 * c"), "the other way"),
            (Edit("32 + 4 * (i % 4) + c", "32 + c"), "activations of the first"),
            (Edit(" & 0xC0C0C0C0", ""), "is missing"),
            (Edit("<< (6 - 2 * c)", "<< 0"), "each has a shift of its own"),
            (Edit("sum / 64;", "sum / 64"), "does not run"),
            ("y = x", "named eight_rows"),
        ],
        [
            Edit("sum / 64", "sum >> 6"),
            Edit(
                "(6 - 2 * c) & 0xC0C0C0C0, x[32 + 4 * (i % 4) + c]",
                "2 * (3 - c) & 0xC0C0C0C0, (x + 32)[(i & 3) * 4 + c]",
            ),
        ],
    ),
    "8.5": Case(
        [
            (Edit("sorted(arrivals)", "arrivals"), "added as they come"),
            (lambda arrivals: sum(float(part) for _, part in arrivals), "float64 only rounds less"),
            (Edit("sorted(arrivals)", "sorted(arrivals)[1:]"), "Part 0 is missing"),
            (lambda arrivals: 0, "and yours 0"),
            (lambda arrivals: [part for _, part in sorted(arrivals)], "One number is wanted"),
            (lambda arrivals: np.sum([part for _, part in arrivals], dtype=np.float32), "in the order"),
        ],
        [
            lambda arrivals: math.fsum(part for _, part in arrivals),
            lambda arrivals: sum(dict(sorted(arrivals)).values()),
        ],
    ),
    "8.6": Case(
        [
            (21.12, "percentage"),
            (4.733, "how many times"),
            (887.218, "GB/s that a step reads"),
            (0.0931, "The head is read"),
            (0.118, "ternary weights are read"),
            (0.16, "between two steps"),
            (0.5, "too large"),
        ],
        ["0.21", 0.2112],
    ),
    "8.fixed": Case(
        [
            ((3.14, 1.31), "with the fixed time in it"),
            ((3.14, 0.406), "microseconds for a MB"),
            ((3.14, 2461), "Those are GB/s"),
            ((2.46, 3.14), "come first"),
            ((3.81, 2.46), "with its 1.64 MB"),
            ((2.93, 2.46), "how much longer"),
            ((3.42, 2.46), "the speed that you found"),
            ((3.14e-6, 2.46), "Those are seconds"),
            (3.14, "Two numbers"),
        ],
        [[3.14, 2.46], np.array([3.144, 2.461]), (3.1, 2.465)],
    ),
    "9.2": Case(
        [
            (1.7, "cannot be 1.7"),
            (54.4, "no longer −1.7"),
            (1, "its master goes on"),
            (-22.7, "against it"),
            (10, "too small"),
            (22.4, "longer"),
            (22.8, "too large, by 0.08"),
        ],
        ["22.7", 22.72],
    ),
    "9.3": Case(
        [
            (Edit("W - rate", "W + rate"), "up the slope"),
            (Edit(" / len(x)", ""), "mean over tokens is missing"),
            (Edit("len(x)", "target.size"), "divided by all outputs"),
            (Edit("rate * (", "2 * rate * ("), "factor 2"),
            (Edit("(W_t * s).T", "W.T"), "takes the float masters"),
            (Edit("(dy.T @ (x_q / a))", "(dy.T @ x)"), "gradient takes x"),
            (Edit("return W -", "return W_t * s -"), "the master is"),
            (Edit("return W - rate *", "return"), "that is the gradient"),
            (Edit("rate * ", ""), "the rate is missing"),
            (Edit("(x_q / a) @ (W_t * s).T", "x_q @ W_t.T * (s / a)"), "summed in int8 and overflows"),
            (
                lambda W, x, target, rate: W - rate * ((x @ W.T - target) / len(x)).T @ x,
                "nothing is rounded: that is a float",
            ),
            (Edit("(x_q / a) @ (W_t * s).T", "x @ W.T"), "the forward pass rounds nothing"),
        ]
    ),
    "9.falls": Case(
        [
            (
                Edit(BOTH_FALLS, "losses[half] - losses[half - width], [end - losses[half] for end in ends]"),
                "before minus",
            ),
            (Edit("[losses[half] - end", "[end - losses[half]"), "are wrong"),
            (Edit("losses[half] - end for", "losses[half - width] - end for"), "not from `half - "),
            (
                Edit(
                    LOSSES_OF_A_RUN,
                    LOSSES_OF_A_RUN.replace("trainer.step(next(stream))", "loss = trainer.step(next(stream))")
                    .replace("one.step(tokens)", "loss = one.step(tokens)")
                    .replace("trainer.loss(exam)", "loss")
                    .replace("one.loss(exam)", "loss"),
                ),
                "losses of training",
            ),
            (
                Edit(
                    MEASURE,
                    "        if step + 1 in (half - width, half):\n"
                    "            losses[step + 1] = trainer.loss(exam)\n"
                    "        trainer.step(next(stream))",
                ),
                "one step too early",
            ),
            (Edit(BOTH_FALLS, "losses[half], ends"), "those are losses"),
            (Edit("batches(1 + seed)", "batches(99)"), "values are wrong"),
            (Edit("batches(1 + seed)", "batches(1)"), "batches are those of 1 . seed"),
            (Edit("batches(1 + seed)", "batches(seed)"), "not of the seed"),
            (Edit("(config, seed, plans[0])", "(config, 0, plans[0])"), "begin with `seed`"),
            (Edit("    trainer, stream =", "    seed = 0\n    trainer, stream ="), "seed is not used"),
            (Edit(", [losses[half] - end for end in ends]", ""), "Two things are wanted"),
            (Edit("[losses[half] - end for end in ends]", "losses[half] - ends[0]"), "Two things are wanted"),
            (Edit(REST, "rest = [tokens for tokens, _ in zip(batches(1 + seed), range(width))]"), "half. on .* anew"),
            (
                Edit(
                    f"    {REST}\n{BRANCHES}",
                    BRANCHES.replace("in rest", "in [next(stream) for _ in range(width)]"),
                ),
                "each branch has other batches",
            ),
            (
                Edit(
                    "for step in range(half):\n        trainer.step(next(stream))",
                    "for tokens, step in zip(stream, range(half)):\n        trainer.step(tokens)",
                ),
                "one batch too many where range",
            ),
            (Edit("one = branch", "one = trainer = branch"), "begins where the last one ended; each"),
            (Edit("branch(trainer, plan)", "branch(trainer, plans[0])"), "follow the first plan"),
            (Edit("branch(trainer, plan)", "trainer"), "the trainer itself"),
        ],
        [Edit(BOTH_FALLS, f"np.array(losses[half - width] - losses[half]), np.array({BOTH_FALLS.split(', ')[1]})")],
    ),
    "9.spread": Case(
        [
            (Edit("np.mean(a) - np.mean(b)", "np.mean(b) - np.mean(a)"), "minus that of `other`"),
            (Edit("key=np.mean", "key=min"), "luckiest seed"),
            (Edit("key=np.mean", "key=lambda losses: -np.mean(losses)"), "Lower is better"),
            (Edit("np.mean(a) - np.mean(b)", "min(a) - min(b)"), "best seed at each best rate"),
            (Edit("np.mean(a) - np.mean(b)", "np.median(a) - np.median(b)"), "medians"),
            (
                Edit(
                    "a, b = (min(losses.values(), key=np.mean) for losses in (one, other))",
                    "rate = min(one, key=lambda rate: np.mean(one[rate]))\n    a, b = one[rate], other[rate]",
                ),
                "that of `one` for both",
            ),
            (Edit(VARIANCE, "np.var(a) / len(a) + np.var(b) / len(b)"), "ddof=1"),
            (Edit(VARIANCE, "np.var(a, ddof=1) + np.var(b, ddof=1)"), "single seeds"),
            (Edit(f"np.sqrt({VARIANCE})", VARIANCE), "root is missing"),
            (Edit(VARIANCE, "np.std(a, ddof=1) / len(a) + np.std(b, ddof=1) / len(b)"), "squared under the root"),
            (Edit(VARIANCE, "np.var(np.array(a) - np.array(b), ddof=1) / len(a)"), "pairs the seeds"),
            (Edit("len(a) + np.var(b, ddof=1) / len(b)", "3 + np.var(b, ddof=1) / 3"), "not always 3"),
            (Edit(" + np.var(b, ddof=1) / len(b)", ""), "spread of `other` is missing"),
            (Edit(f", np.sqrt({VARIANCE})", ""), "Two numbers"),
        ],
        [
            lambda one, other: [
                min(map(np.mean, one.values())) - min(map(np.mean, other.values())),
                math.sqrt(sum(np.var(min(each.values(), key=sum), ddof=1) / len(each[0.01]) for each in (one, other))),
            ]
        ],
    ),
    "9.twice": Case(
        [
            (1, "the zeros count"),
            (Edit(SECOND_SCALE, "s / quantization.absmean_scale(W_t * s)"), "The other way"),
            (Edit(SECOND_SCALE, "quantization.absmean_scale(W_t * s)"), "over the first"),
            (Edit(SECOND_SCALE, "(W_t == 0).mean()"), "share of zeros"),
            (Edit(SECOND_SCALE, "(W_t == 1).mean()"), "counts as much"),
            (Edit("/ s", "/ s * 100"), "percentage"),
            (0.9, "too large"),
        ],
        [Edit(SECOND_SCALE, "round(float((W_t != 0).mean()), 2)")],
    ),
    "9.4": Case(
        [
            (Edit("scale / 2 - size[", "scale - size["), "half of the scale"),
            (Edit("scale / 2 - size[", "size["), "way to 0"),
            (Edit("[size < scale / 2]", ""), "stair 0"),
            (Edit(" / 0.01", ""), "divide it by the rate"),
            (Edit("/ 0.01", "* 0.01"), "divide by it"),
            (Edit("np.median", "np.mean"), "the median is asked"),
            (Edit("- size[", "- untrained[WATCHED]["), "both signs"),
            (Edit("np.median(scale / 2 - size[size < scale / 2])", "scale / 4"), "half of the stair"),
            (Edit("/ 0.01", "/ 0.01 // 1"), "rounded too far.*rounded up"),
            (
                Edit(
                    "\nfewest_steps = np.median(scale / 2 - size[size < scale / 2]) / 0.01",
                    "\nfewest_steps = round(float(np.median(scale / 2 - size[size < scale / 2])) / 0.01, 1)",
                ),
                "rounded too far",
            ),
            (1e6, "too many"),
        ],
        [
            Edit("/ 0.01", "/ 0.01 // 1 + 1"),
            Edit(
                "fewest_steps = np.median(scale / 2 - size[size < scale / 2]) / 0.01",
                "fewest_steps = round(float(np.median(scale / 2 - size[size < scale / 2]) / 0.01), 2)",
            ),
        ],
    ),
    "9.1": Case(
        [
            (Edit("dy @ (W_t * s)", "dy @ W"), "dx: .*float masters"),
            (Edit("dy @ (W_t * s)", "dy @ W_t"), "scale s is missing"),
            (Edit("dy.T @ (x_q / a)", "dy.T @ x"), "dW: .*before rounding"),
            (Edit("(x_q / a)", "x_q"), "divided by its scale a"),
            (Edit("(x_q / a)", "(x_q / a) * s"), "does not belong"),
            (Edit("(x_q / a)", "(x_q / a) / len(x)"), "mean over tokens"),
            (Edit("(x_q / a)", "(x_q / a) * (np.abs(W) < s)"), "all get theirs"),
            (Edit("dy @ (W_t * s), dy.T @ (x_q / a)", "dy.T @ (x_q / a), dy @ (W_t * s)"), "exchanged"),
            (Edit("dy @ (W_t * s)", "dy @ (np.sign(W) * s)"), "dx: .*may also be 0"),
            (Edit("dy @ (W_t * s)", "0 * x"), "dx: .*counts as 1"),
            (Edit("(x_q / a)", "(x_q * a)"), "dW: .*multiplied by its scale a"),
            (Edit("(x_q / a)", "(x_q / a.min())"), "dW: .*its own a"),
            (Edit("dy.T @ (x_q / a)", "0 * W"), "dW: .*counts as 1"),
        ]
    ),
    "10.groups": Case(
        [
            (Edit("np.repeat(scale, t.shape[1] // scale.shape[1], axis=1)", "scale[:, :1]"), "one scale is taken"),
            (Edit("t * np.repeat", "t / np.repeat"), "the scales divide"),
            (
                Edit(
                    "np.repeat(scale, t.shape[1] // scale.shape[1], axis=1)",
                    "np.tile(scale, t.shape[1] // scale.shape[1])",
                ),
                "np.repeat, not np.tile",
            ),
            (Edit("t * np.repeat", "np.repeat"), "signs of t"),
            (Edit("t.shape[1] // scale.shape[1]", "2"), "groups of 8 in rows of 32: Your function raised|raised"),
            (Edit("    if np.ndim(scale) == 0:\n        return t * scale\n", ""), "raised"),
            (Edit("return t * scale", "return t / scale"), "one scale: .*the scales divide"),
        ],
        [lambda t, s: t * np.asarray(s).repeat(t.shape[1] // np.shape(s)[1], 1) if np.ndim(s) else t * float(s)],
    ),
    "10.large": Case(
        [
            (6, "negative"),
            (7, "negative"),
            (12, "Zero"),
            (256, "whole range"),
            (127, "what 20 becomes"),
            (15, "rounded down"),
        ],
        ["13", 13.0],
    ),
    "10.files": Case(
        [
            (Edit("min(errors", "max(errors"), "Which y is nearest"),
            (lambda file: "rotated", "file 0 has one scale: it cannot be"),
            (Edit('names[:2] if file["scale"].ndim == 0 else names[2:]', "names[:2]"), "raised|for each group"),
            (Edit("min(errors, key=errors.get)", "min(errors.values())"), "no name of the table"),
            (lambda file: "int8, multiply", "file 1 is not"),
            (lambda file: "ternary", "no name of the table"),
            (lambda file: next((n for n in DIALECTS if np.array_equal(file["y"], n)), None), "yours is None"),
            (lambda file: np.array_equal(file["y"], file["x"]), "yours is False"),
            (Edit("relative_error(", "-cosine("), "cosine is blind"),
            ({"file 0": "int8, multiply"}, "A function is wanted"),
        ]
    ),
    "10.published": Case(
        [
            ({"a": "rotated"}, "The keys|dict with the keys"),
            (dict.fromkeys("abcde", "bitnet"), "no name of the table"),
            ({**PUBLISHED, "a": "int8, divide"}, "multiplied by"),
            ({**PUBLISHED, "b": "int8, multiply"}, "divided by"),
            ({**PUBLISHED, "c": "int8, divide"}, "No scale is stored"),
            ({**PUBLISHED, "d": "rotated"}, "a scale for each group"),
            ({**PUBLISHED, "hub/e": "groups, float"}, "Read its model_type"),
            ("rotated", "dict"),
        ],
        [
            {name: word.upper() for name, word in PUBLISHED.items()},
            {name.removeprefix("hub/"): word for name, word in PUBLISHED.items()},
            [*PUBLISHED.values()],
        ],
    ),
    "10.rules": Case(
        [
            (Edit('"int8, divide"', '"int8, multiply"'), "int8, multiply.*points the other way"),
            (Edit("1 / scale if", "scale if"), "int8, divide.*points the other way"),
            (Edit("x_q.astype(np.int64) @ t.T.astype(np.int64)", "x_q @ t.T"), "overflow int8"),
            (Edit("(s / x_scale)", "(s * x_scale)"), "it is divided by it"),
            (Edit("(s / x_scale)", "s"), "x_scale is left out"),
            (Edit("(s / x_scale)", "(1 / x_scale)"), "scale of the weights is left out"),
            (Edit("return acc * (s / x_scale)", "return x @ t.T * s"), "x is not made int8"),
            (Edit("weights_of(t, scale)", "(t * scale[:, :1])"), "groups, float.*one scale is taken"),
            (Edit("weights_of(t, scale)", "(t * np.tile(scale, (1, 64)))"), "not np.tile"),
            (Edit("weights_of(t, scale)", "weights_of(t, 1 / scale)"), "the scales divide; in groups they multiply"),
            (Edit('if rule == "rotated":', "if False:"), "rotated.*the inputs are turned here"),
            (Edit('if rule == "rotated":', "if True:"), "groups, float.*not turned here"),
            (Edit("64) @ hadamard_of(64)", "x.shape[1]) @ hadamard_of(x.shape[1])"), "blocks of 64"),
            (
                Edit("quantization.quantize_activations(x)", "quantize_batch(x)"),
                "one activation scale is taken for the whole batch",
            ),
            (lambda rule, t, scale, x: x @ t.T, "int8, multiply"),
            ("rotated", "A function is wanted"),
        ],
        [
            Edit("acc * (s / x_scale)", "(x_q / x_scale) @ (s * t).T.astype(np.float64)"),
            Edit("return x @ weights_of(t, scale).T", "return np.einsum('mk,nk->mn', x, weights_of(t, scale))"),
            Edit("(x.reshape(len(x), -1, 64) @ hadamard_of(64)).reshape(x.shape)", "groups.hadamard(x, 64)"),
        ],
    ),
    "10.norms": Case(
        [
            (Edit("(model, variant(**norms))", "(variant(**norms), model)"), "the right one's p weighs"),
            (Edit("np.exp(ours)", "np.exp(theirs)"), "The p that weighs is that of the right model"),
            (Edit("(ours - theirs)", "(theirs - ours)"), "never below 0"),
            (Edit(".mean()", ".mean() / np.log(2)"), "in bits"),
            (Edit(".mean()", ".sum()"), "sum over the tokens"),
            (Edit(".mean()", "[-1]"), "the last token alone"),
            (Edit("np.exp(ours) * ", "1 / 4096 * "), "weighed by p"),
            (Edit("variant(**norms))", "variant())"), "too small"),
            (0.789, "A function is wanted"),
        ]
    ),
    "10.hadamard": Case(
        [
            (Edit(" / np.sqrt(2)", ""), "so that lengths stay"),
            (Edit("np.sqrt(2)", "2"), "not by n"),
            (Edit("return H", "return np.sign(H) / np.sqrt(2)"), "each doubling divides again"),
            (Edit("[[H, H], [H, -H]]", "[[H, -H], [H, H]]"), "the last one"),
            (Edit("[[H, H], [H, -H]]", "[[H, H], [-H, H]]"), "not the one below the first"),
            (Edit("[[H, H], [H, -H]]", "[[-H, H], [H, H]]"), "identity for this one, too"),
            (Edit("-H", "H"), "nothing is negated"),
            (Edit("< n", "<= n"), "shape is"),
        ],
        [lambda n: [[(-1) ** (i & j).bit_count() / n**0.5 for j in range(n)] for i in range(n)]],
    ),
    "10.keys": Case(
        [
            ({"a"}, "as ternary as any other"),
            ({"b"}, "The scales are"),
            ({"a", "c"}, "one too many"),
            ({"d"}, "none of the choices"),
            (set(), "empty"),
        ],
        ["c", ["C"], ("c",), "(c)"],
    ),
    "11.case1": Case(
        [
            ("activation", "Two are wanted"),
            (("hook_post", np.tanh), "No tensor"),
            (("blocks.0.mlp.hook_pre", np.tanh), "hook_pre is right"),
            (("blocks.0.mlp.sub_norm.hook_scale", np.tanh), "one before it is wrong too"),
            (("blocks.0.mlp.hook_post", lambda gate: np.maximum(gate, 0) ** 2), "that is what is right"),
            (("blocks.0.mlp.hook_post", lambda gate: np.maximum(gate, 0)), "not quite 0"),
            (Edit("gate / (1", "1 / (1"), "factor of the gate alone"),
            (Edit("-gate", "gate"), "sign in the exponent"),
            (Edit("gate / (1 + np.exp(-gate))", "gate"), "nothing is done"),
            (("blocks.0.mlp.hook_post", "silu"), "A function is wanted"),
        ],
        [
            ["blocks.0.mlp.hook_post ", layers.silu],
            ("blocks.0.mlp.hook_post", lambda gate: gate * (1 + np.tanh(gate / 2)) / 2),
        ],
    ),
    "11.seen": Case(
        [
            (
                Edit("suspect2.backend.ternary_matmul(np.eye(256, dtype=np.int8), q_proj).T", "q_proj.ternary()"),
                "ask the engine",
            ),
            (Edit(").T", ")"), "is W\\^T"),
            (
                Edit("suspect2.backend.ternary_matmul(np.eye(256, dtype=np.int8), q_proj).T", "q_proj.ternary().T"),
                "transposed; ask",
            ),
            (Edit("np.eye(256, dtype=np.int8)", "2 * np.eye(256, dtype=np.int8)"), "2 times the right one"),
            (Edit("np.eye(256, dtype=np.int8)", "np.ones((256, 256), np.int8)"), "sums of the rows"),
            (Edit("np.eye(256, dtype=np.int8)", "np.eye(8, 256, dtype=np.int8)"), "shape"),
        ],
        [Edit(").T", ").T.astype(float)")],
    ),
    "11.case2": Case(
        [
            ("scale", "before it"),
            ("order of magnitude", "before it"),
            ("signs", "np.abs of both"),
            ("arithmetic", "multiplies rightly"),
            ("rounding", "not rounded"),
            ("the norm", "which of"),
            (3, "A text is wanted"),
            ("the order is right, but the sign", "one thing only"),
        ],
        ["the order", "ordering", "a permutation", "Layout"],
    ),
    "11.lengths": Case(
        [
            ({1, 2, 3, 4}, "4 is one too many: With 4 tokens not all"),
            ({1, 2}, "One is missing. With 3 tokens all"),
            ({1}, "One is missing"),
            (set(range(4, 13)), "10 is one too many"),
            ({0, 1, 2, 3}, "none of the choices"),
            (set(), "empty"),
        ],
        [[1, 2, 3], "1, 2, 3", np.array([3, 2, 1]), range(1, 4)],
    ),
    "11.case3": Case(
        [
            ("reversed", "move the elements"),
            ("rotated", "corner"),
            ("shifted", "move the elements"),
            ("mirrored", "which line"),
            ("mirrored at the anti-diagonal", "other diagonal"),
            ("the signs are swapped", "right ones"),
            ("bytes swapped", "whole elements"),
            ("scaled", "right ones"),
            ("the diagonal", "The diagonal is what stays"),
            ("swap rows", "What is exchanged with what"),
            ("swap columns", "What is exchanged with what"),
            ("exchange", "What is exchanged with what"),
            ("reflected", "At which line"),
            ("each is turned", "What becomes what"),
            ("wrong", "Follow one element"),
            (4, "A text is wanted"),
        ],
        [
            "transposed",
            "transposing",
            "Transposition",
            "a transpose",
            "rows and columns are swapped",
            "rows become columns",
            "mirrored at the diagonal",
            "Reflection in the diagonal",
            "the diagonal stays: transposed",
            "swapaxes",
            "a.T",
            ".T",
            "transponieren",
        ],
    ),
    "11.noticed": Case(
        [
            (NOTICED | {"finite": {2}}, "'finite' misses case 2. Its logits lie between"),
            (NOTICED | {"cosine": {1, 2}}, "The first: 'cosine' misses case 1. Its report has a cosine of 0"),
            (NOTICED | {"top-1": set()}, "3 of your 21 cells are wrong. The first: 'top-1' notices case 1"),
            (NOTICED | {"one word": {1, 2}}, "misses case 1. Its logits are wrong, but the largest is in the right"),
            (NOTICED | {"one word": {2, 3}}, "misses case 3. Its logits are the right ones"),
            (NOTICED | {"one word": set()}, "notices case 2. After 'Once' it says 'conc'"),
            (NOTICED | {"itself": {1, 3}}, "misses case 1. It makes the same mistake both times"),
            (NOTICED | {"itself": set()}, "notices case 3. Two tokens take another way"),
            (NOTICED | {"first sums": "all"}, "made before its mistake: the first .* blocks.0.mlp.hook_post"),
            (NOTICED | {"first sums": 2}, "'first sums' notices case 3. [0-9,]+ of these sums are wrong"),
            (NOTICED | {"tensors": [3]}, "'tensors' notices case 1. .* of 316 tensors differ"),
            ({check: {1, 2, 3} - cases for check, cases in NOTICED.items()}, "cases that each check misses"),
            (NOTICED | {"itself": {2}}, "2 of your 21"),
            (NOTICED | {"itself": {0}}, "cases 1, 2 and 3"),
            (NOTICED | {"itself": "tiles"}, "cases 1, 2 and 3"),
            (NOTICED | {"itself": None}, "Still open: 'itself'"),
            ({"finite": set()}, "The keys are"),
            ({1, 2, 3}, "A dict of seven sets"),
        ],
        [
            NOTICED,
            {check: sorted(cases) for check, cases in NOTICED.items()},
            {check: " and ".join(f"case {case}" for case in cases) or "none" for check, cases in NOTICED.items()},
            {check: [case in cases for case in (1, 2, 3)] for check, cases in NOTICED.items()},
            NOTICED | {"finite": {}, "one word": 2, "itself": "3", "first sums": np.array([2, 3])},
            [[int(case in cases) for case in (1, 2, 3)] for cases in NOTICED.values()],
            np.array([[case in cases for case in (1, 2, 3)] for cases in NOTICED.values()]),
            NOTICED | {"finite": [], "top-1": "all", "tensors": range(1, 4)},
            NOTICED | {"one word": ["missed", "noticed", "missed"], "itself": "{3}", "first sums": "case 2, case 3"},
        ],
    ),
    "11.1": Case(
        [
            ({"int8 inputs"}, "x alone"),
            ({"integer sums"}, "applied after them"),
            ({"output", "integer sums"}, "one too many"),
            (set(), "empty"),
            ({"logits"}, "none of the choices"),
        ],
        ["output", ["output"]],
    ),
    "11.2": Case(
        [
            (type("Same", (Backend,), {}), "no mistake on this prompt"),
            (Silu("float32", threads=1), "without brackets"),
            (
                type("Near", (Backend,), {"rms_norm": lambda self, x, norm: plain_norm(x, norm)}),
                "a correct engine, which rounds otherwise",
            ),
            (type("Huge", (Backend,), {"rms_norm": lambda self, x, norm: x}), "NumericsError|Too large"),
            (type("Shape", (Backend,), {"rms_norm": lambda self, x, norm: x[:1]}), "raised"),
            (type("Nan", (Backend,), {"gated": lambda self, g, u, a: np.nan * g}), "raised NumericsError"),
            (type("Empty", (Backend,), {"embed": lambda self, w, i: 0 * Backend.embed(self, w, i)}), "all 0"),
            (type("Zero", (Backend,), {"gated": lambda self, g, u, a: 0 * g}), "Too large|raised"),
            (
                type("Negative", (Backend,), {"embed": lambda self, w, i: -Backend.embed(self, w, i)}),
                "Too large|no mistake",
            ),
        ]
    ),
}
# Each wrong choice of a quiz, with the other letters right: it says why it is wrong.
for lesson, questions in QUIZZES.items():
    letters = [question.letter for question in questions]
    wrong = [
        ("".join([*letters[:i], "abc"[question.choices.index(choice)], *letters[i + 1 :]]), re.escape(why))
        for i, question in enumerate(questions)
        for choice, why in question.wrong.items()
    ]
    others = [(17, "Five letters"), ("abc", "5 letters"), ("abcdx", "of a, b and c")]
    numbered = " ".join(f"{number}{letter}" for number, letter in enumerate(letters, start=1))
    CASES[f"{lesson}.quiz"] = Case(wrong + others, [letters, ", ".join(letters).upper(), numbered])

# The emulated device compiles, which takes seconds; 8.3 and 8.4 run on it.
SLOW = {"8.3": pytest.mark.emulated, "8.4": pytest.mark.emulated, "6.1": pytest.mark.slow, "3b.8": pytest.mark.slow}
each_exercise = pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in CASES])
LONG = dict.fromkeys(("6.hunt", "3b.2", "3b.3", "3c.5"), pytest.mark.thorough)  # of their wrong answers
BUILT_ON = {
    "1.entropy",
    "3c.seen",
    "3c.first",
    "10.groups",
    "10.hadamard",
    "10.rules",
}  # by the solutions of later exercises
SAID = "The little girl looked at the lion and said,"
PASSAGE = [1, 356, 510, 1011, 785, 359, 264, 290, 350]


def loss_of(z, tokens):
    z = z.astype(np.float64) - z.max(axis=-1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
    return -log_p[np.arange(len(tokens) - 1), tokens[1:]].mean()


def kl(right, wrong):
    """As notebook 3c has it."""
    right, wrong = log_softmax(right), log_softmax(wrong)
    return (np.exp(right) * (right - wrong)).sum(axis=-1)


def broken(weights=None, **config):
    story = model("storyteller", "numpy")
    return bitnet_ref.Model(replace(story.config, **config), weights or story.weights, story.backend, story.path)


def patients():
    """As notebook 5 has them: storyteller in a wrong layout, with inverse scales, with another gate, and as it is."""
    story = model("storyteller", "numpy")
    first = story.weights.layers[0]
    w_t, s = first.q_proj.ternary(), first.q_proj.w_dequant_scale
    inverse = replace(first.q_proj, w_dequant_scale=np.float32(1) / s)
    moved = TernaryWeight.from_ternary(np.roll(w_t, 1, axis=1), s)
    layout, scale = (
        broken(replace(story.weights, layers=(replace(first, q_proj=w), *story.weights.layers[1:])))
        for w in (moved, inverse)
    )
    return {"A": layout, "B": scale, "C": broken(activation="silu"), "D": story}


def with_weights(change):
    """As notebook 1 has it."""
    weights = model("storyteller", "numpy").weights
    changed = [{kind: change(kind, w) for kind, w in block.linears()} for block in weights.layers]
    blocks = tuple(replace(block, **ws) for block, ws in zip(weights.layers, changed, strict=True))
    return broken(replace(weights, layers=blocks))


def variant(**norms):
    """As notebook 10 has it."""
    weights = model("storyteller", "numpy").weights
    return broken(replace(weights, layers=tuple(replace(layer, **norms) for layer in weights.layers)))


def relative_error(wrong, right):
    return np.linalg.norm(wrong - right) / np.linalg.norm(right)


def quantize_batch(x):
    """int8 by one scale for all tokens: the mistake of notebook 2."""
    scale = np.float32(127) / np.abs(x).max()
    return np.rint(x * scale).astype(np.int8), scale


def log_softmax(z):
    z = z.astype(np.float64) - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def mean_ln_p(logits, ids, start):
    """Exercise 7a.3."""
    return log_softmax(logits)[np.arange(start - 1, len(ids) - 1), ids[start:]].mean()


def x_times_rows(registers, x):
    """Exercise 4.7 without its instructions."""
    codes = (registers[:, None] >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None] & 3).reshape(-1, 4, 8, 4)
    return codes.transpose(2, 0, 1, 3).reshape(8, -1).astype(int) @ x.astype(int) - x.sum(dtype=int)


def run_kernel(text, name, x, order, threads):
    """As notebook 8 has it: a kernel on the emulated device, with its threads in some order."""
    device = EmulatedDevice(order=order)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "mine.cu")
        path.write_text(text)
        y = device.zeros(threads, np.int32)
        device.kernel(str(path), name)(1, threads, (device.array(x.astype(np.int32)), y))
        return device.to_host(y)


def head(q, k, v):
    """As notebook 3a has it."""
    n, d = q.shape
    return layers.softmax(np.where(np.tri(n) == 0, -np.inf, q @ k.T / np.sqrt(d))) @ v


@cache
def real_pattern():
    """As notebook 3a has it: of one head of storyteller."""
    story = model("storyteller", "numpy")
    return story.run_with_cache(story.tokenizer.encode(SAID))[1]["blocks.2.attn.hook_pattern"][0]


@cache
def silu_trace():
    """Of the first suspect of notebook 11."""
    story = model("storyteller", "numpy")
    return dict(story.on(Silu("float32", threads=1)).run_with_cache(story.tokenizer.encode(SAID))[1])


@cache
def case_files():
    """The prompt and the suspects of notebook 11, on drawn weights: what is noticed depends on both."""
    story = model("storyteller", "numpy")
    weights = synthetic_model(story.config, story.backend, seed=5).weights
    drawn = bitnet_ref.Model(story.config, weights, story.backend, story.path)
    tokens = default_tokens(story)[:12]
    return {
        "model": drawn,
        "tokens": tokens,
        "recorded": dict(drawn.run_with_cache(tokens)[1]),
        "engines": [drawn.on(suspect("float32", threads=1)) for suspect in (Silu, Arm, Tiles)],
    }


@cache
def training():
    """The trainer, batches and exam of notebook 9, on tokens that are drawn."""
    notebook = json.loads((NOTEBOOKS / "09_training.ipynb").read_text(encoding="utf-8"))
    source = {cell["id"]: "".join(cell["source"]) for cell in notebook["cells"]}
    draw = np.random.default_rng(9)
    names = {
        "np": np,
        "Trainer": Trainer,
        "master_shapes": master_shapes,
        "CONTEXT": 64,
        "seen": draw.integers(3, 64, 999),
    }
    names |= {"ModelConfig": ModelConfig, "tokenizer": SimpleNamespace(vocab_size=64), "deepcopy": deepcopy}
    exec("\n\n".join(source[cell] for cell in ("09-009-1", "09-009-2", "09-016-0")), names)
    exam = draw.integers(3, 64, (4, 65))
    return {
        "tiny": names["shape"](16, 1, False),
        "new_trainer": names["new_trainer"],
        "branch": names["branch"],
        "batches": names["batches"],
        "exam": exam,
    }


def given():
    """What the notebooks hand to the checks."""
    draw = np.random.default_rng(0)
    story = model("storyteller", "numpy")
    w = draw.normal(size=(16, 32)).astype(np.float32)
    w_t, s = quantization.quantize_weights(w)
    x = np.array([[1.0, 0], [0, 1], [1, 1], [0, 1]])
    codes = draw.integers(0, 3, (16, 32))
    neighbours = (codes.reshape(16, -1, 4) << np.array([0, 2, 4, 6])).sum(-1).astype(np.uint8)
    files = {}
    for name, scale in (("file 0", s), ("file 1", 1 / s)):
        x_q, a = quantization.quantize_activations(x_in := draw.normal(size=(4, 32)).astype(np.float32))
        y = quantization.dequantize(x_q.astype(np.int32) @ w_t.T.astype(np.int32), s, a)
        files[name] = {"stored": w_t, "scale": np.asarray(scale), "x": x_in, "y": y}
    t, scales = draw.integers(-1, 2, (8, 128)), draw.uniform(0.1, 2, (8, 2))
    x_in = draw.normal(size=(4, 128))
    for name, turned in (("file 2", x_in), ("file 3", groups.hadamard(x_in, 64))):
        y = turned @ (t * np.repeat(scales, 64, axis=1)).T
        files[name] = {"stored": t, "scale": scales, "x": x_in, "y": y}
    q, k = x @ np.array([[0.0, 1], [2, 0]]), x
    inputs = {"q, k, v": "attn.q_proj", "o": "attn.o_proj", "gate, up": "mlp.gate_proj", "down": "mlp.down_proj"}
    widths = dict.fromkeys(inputs.values(), 8) | {"mlp.down_proj": 24}
    run32 = {
        f"blocks.{i}.{linear}.hook_x_int8": draw.integers(-99, 99, (5, width)).astype(np.int8)
        for i in range(6)
        for linear, width in widths.items()
    }
    run64 = {name: x_q + 2 * (draw.random(x_q.shape) < 0.2).astype(np.int8) for name, x_q in run32.items()}
    return SimpleNamespace(
        ternary=w_t,
        planes={name: each for name, each in story.weights.linears() if name != "lm_head"},
        shares=[(w_t == v).mean() for v in (-1, 0, 1)],
        q=q,
        k=k,
        v=x @ np.array([[1.0, 0], [-1, 1]]),
        head=head,
        real_pattern=real_pattern(),
        inputs=inputs,
        run32=run32,
        run64=run64,
        codes=codes,
        neighbours=neighbours,
        addresses=np.full((16, 128), 333),
        port=story.on(Silu("float32", threads=1)),
        Port=Port,
        story=[*PASSAGE, *PASSAGE, *PASSAGE],
        suspect=(story.on(Silu("float32", threads=1)), "silu"),
        engine=story.on(Rolled("float32", threads=1)),
        suspect2=story.on(Rolled("float32", threads=1)),
        q_proj=story.weights.layers[0].q_proj,
        trace=silu_trace(),
        trace1=silu_trace(),
        after=NextToken(story, "The rabbit ran"),
        lengths=[30, 22, 18, 9],
        run_kernel=run_kernel,
        orders={"ascending": 0, "descending": 1},
        master=w,
        files=files,
        answers=["int8, multiply", "int8, divide", "groups, float", "rotated"],
        broken=broken,
        loss_of=loss_of,
        kl=kl,
        patients=patients(),
        variant=variant,
        with_weights=with_weights,
        log_softmax=log_softmax,
        ids=PASSAGE,
        passage_ids=PASSAGE,
        lens_best=LENS,
        published=CONFIGS,
        TREE=TREE,
        untrained={"W": w},
        **training(),
        WATCHED="W",
        trainer=SimpleNamespace(masters={"W": w}),
    )


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch):
    """What is found in a second on a student's machine may take longer beside other tests."""
    monkeypatch.setattr(tensors, "SEARCH_S", 30.0)


@pytest.fixture(scope="module")
def notebook():
    """A session, and the names that solutions use."""
    story = model("storyteller", "numpy")
    ids = story.tokenizer.encode(SAID)
    check = Check(story, ids)
    names = {**check._pieces, **vars(given()), "Backend": Backend, "quantization": quantization, "replace": replace}
    names |= {
        "groups": groups,
        "relative_error": relative_error,
        "cosine": cosine,
        "quantize_batch": quantize_batch,
        "names": list(DIALECTS),
    }
    names |= {"model": story, "cache": check.recorded, "L": 6, "N": len(ids), "compare": None, "bfloat16": bfloat16}
    names |= {"groups": groups, "right": check.recorded}
    names |= {"model": story, "L": 6, "N": len(ids), "compare": None, "bfloat16": bfloat16}
    for exercise in EXERCISES.values():
        if exercise.lesson in ("0", "3b") or exercise.name in BUILT_ON:
            exec(exercise.solution, names)
    return check, names


def answer_of(name, answer, names):
    """The answer of an Edit: the changed solution is executed."""
    if not isinstance(answer, Edit):
        return answer
    exercise, own = EXERCISES[name], dict(names)
    assert answer.old in exercise.solution, f"{name}: the solution has no {answer.old!r}"
    exec(exercise.solution.replace(answer.old, answer.new), own)
    return own[exercise.answer]


def judge(notebook, name, answer):
    check, names = notebook
    wanted = EXERCISES[name].judge.__code__.co_varnames[: EXERCISES[name].judge.__code__.co_argcount]
    handed = {each: value for each, value in vars(given()).items() if each in wanted}
    if name == "11.noticed":
        handed |= case_files()
    return check.judge(name, answer_of(name, answer, names), **handed)


def test_every_exercise_has_a_judge_and_five_wrong_answers():
    assert set(exercise_texts()) == {name for name in EXERCISES if not name.endswith(".quiz")}
    assert set(CASES) == set(EXERCISES)
    assert {name: len(case.wrong) for name, case in CASES.items() if len(case.wrong) < 5} == {}


@pytest.mark.sample(20)
@pytest.mark.parametrize("name", [pytest.param(name, marks=(SLOW | LONG).get(name, ())) for name in CASES])
def test_wrong_answers_are_refused_with_the_sentence_that_helps(name, notebook):
    for answer, says in CASES[name].wrong:
        answered = judge(notebook, name, answer)
        assert answered.status == "wrong", (name, answer, answered.text)
        assert re.search(says, answered.text, re.DOTALL), (answer, answered.text)


# Solutions that need what only the notebook has: executed with it, in tests/test_notebooks.py
IN_THE_NOTEBOOK = {"6.hunt", "11.lengths", "11.noticed", "5.2", "5.7"}


@pytest.mark.sample(20)
@each_exercise
def test_right_answers_are_taken_in_other_words_and_types(name, notebook):
    solution = [] if name in IN_THE_NOTEBOOK else [Edit("", "")]
    for answer in solution + CASES[name].right:
        answered = judge(notebook, name, answer)
        assert answered.status == "right", (name, answer, answered.text)


@pytest.mark.parametrize("answer", [2, 2.0, np.float32(2)])
def test_a_number_of_steps_that_was_rounded_is_not_taken_for_another_mistake(answer):
    """In notebook 9 half of the stair is 1.997 steps, and the answer 2.03."""
    master = np.random.default_rng(0).normal(0, 0.1, (384, 128)).astype(np.float32)
    with pytest.raises(Wrong, match="rounded too far"):
        EXERCISES["9.4"].judge(answer, master=master)


@pytest.mark.thorough
def test_a_proof_of_notebook_6_that_is_wrong_by_rounding_alone_says_so(notebook):
    def scaled_by(factor):
        def quantize(self, x):
            _, scale = quantization.quantize_activations(x)
            return np.clip(np.rint(x * factor(scale)), -128, 127).astype(np.int8), factor(scale)

        return proof("Scaled", quantize_activations=quantize)

    check, _ = notebook

    def planted_scale(x):
        return np.float32(128) / np.maximum(np.abs(x).max(axis=-1, keepdims=True), np.float32(1e-5))

    def by_128(self, x):
        return np.clip(np.rint(x * planted_scale(x)), -128, 127).astype(np.int8), planted_scale(x)

    planted = proof("Planted", quantize_activations=by_128)
    suspect = (check.model.on(planted("float32", threads=1)), "128")
    mine = scaled_by(lambda scale: scale * np.float32(128 / 127))
    assert re.search("by rounding alone|rounds otherwise", check.judge("6.hunt", mine, suspect=suspect).text)

    def in_float64(self, x):
        scaled = x.astype(np.float64) * planted_scale(x)
        return np.clip(np.rint(scaled), -128, 127).astype(np.int8), planted_scale(x)

    mine = proof("Double", quantize_activations=in_float64)

    def refusal(text):
        tokens = default_tokens(check.model, text)
        try:
            EXERCISES["6.hunt"].judge(mine, suspect=suspect, model=check.model, tokens=tokens)
        except Wrong as wrong:
            return str(wrong)
        return ""

    def an_integer_tips(text):
        return re.search("x_int8 yours differs .* by rounding alone", refusal(text))

    first_where((None, SAID, *SENTENCES), an_integer_tips, "a text of which an integer tips in float64")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "answer", "says"),
    [
        ("0.3", lambda word, merges: len(word), "A list of pieces is wanted, not int"),
        ("1.entropy", lambda w_t: "1.5 bits", "One number is wanted, not '1.5 bits'"),
        ("1.entropy", lambda w_t: (each for each in (0.5, 1.0)), "One number is wanted"),
        ("2.6", lambda *_: [np.zeros(3)], "A set of 'quantise'"),
        ("3a.6", "the last two", "Name one thing only"),
        ("3a.order", [0, 1, 0, 1], "Row 0 changes, too|Row 3 has the same query"),
        ("3a.order", [0, None], "Whole numbers are wanted"),
        ("3a.order", [0.0, 1.5], "Whole numbers are wanted"),
        ("3c.1", (2, None), "Whole numbers are wanted"),
        ("3c.1", (2, np.inf), "Whole numbers are wanted"),
        ("4.6", lambda *_: (np.zeros(3), 0.5), "is wanted, not array"),
        ("4.6", lambda *_: ("compute", 0.5), "is wanted, not 'compute'"),
        ("5.6", lambda before, after: [["k"]], "The names are"),
        ("6.first", lambda right, wrong: np.array(["out", "logits"]), "The first is 'out'"),
        ("8.6", 21, "That is the percentage"),
        ("8.6", 887, "Those are the GB/s"),
    ],
)
def test_odd_answers_are_refused_in_a_sentence(name, answer, says, notebook):
    answered = judge(notebook, name, answer)
    assert answered.status == "wrong"
    assert re.search(says, answered.text)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("2.6", Edit("return wrong", "return np.array(sorted(wrong))")),
        ("4.5", Edit("gate > 0, x_int8 != 0", "np.stack([gate > 0, x_int8 != 0])")),
        ("5.6", Edit("return names", "return np.array(names)")),
        ("3a.order", [1, 1, 0, 0]),
        ("4.6", Edit('"memory" if', '"Memory" if')),
        ("5.8", "{a, b}"),
    ],
)
def test_arrays_masks_and_texts_are_taken(name, answer, notebook):
    answered = judge(notebook, name, answer)
    assert answered.status == "right", answered.text


@pytest.mark.sample(12)
@each_exercise
def test_none_is_no_answer(name, notebook):
    answered = judge(notebook, name, None)
    assert answered.status == "open"
    assert "hint" in answered.text
    assert len(EXERCISES[name].hints) >= 2


def test_each_exercise_stands_in_its_notebook_once():
    used = []
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
        for name in re.findall(r'check(?:\.use)?\("([^"]+)"', "\n".join("".join(cell["source"]) for cell in cells)):
            if not name.startswith(("blocks", "hook")):
                used.append(name)
                assert path.name.startswith(name.partition(".")[0].zfill(2 + (name[1] in "abc"))), name
    assert sorted(used) == sorted(EXERCISES)


def quiz_text(lesson):
    """The questions as the notebook has them."""
    lines = ["## Quiz", "", 'Five letters, such as `"abcab"`. One choice of each is right.', ""]
    for number, question in enumerate(QUIZZES[lesson], start=1):
        choices = [f"- {letter}: {choice}" for letter, choice in zip(LETTERS, question.choices, strict=True)]
        lines += [f"**{number}.** {question.text}", "", *choices, ""]
    return "\n".join(lines).rstrip()


@pytest.mark.parametrize("lesson", QUIZZES)
def test_a_quiz_has_five_questions_and_stands_in_its_notebook(lesson):
    assert len(QUIZZES[lesson]) == 5
    assert all(len(set(question.choices)) == len(LETTERS) for question in QUIZZES[lesson])
    letters = [question.letter for question in QUIZZES[lesson]]
    assert max(map(letters.count, letters)) <= 3, "one letter is right too often"
    (path,) = NOTEBOOKS.glob(f"{lesson.zfill(3 if lesson[-1] in 'abc' else 2)}_*.ipynb")
    sources = ["".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    assert quiz_text(lesson) in sources
    assert f'quiz = None  # TODO\n\ncheck("{lesson}.quiz", quiz)' in sources


def test_neither_length_nor_letter_gives_a_right_choice_away():
    """Over all quizzes, the right choice is about as often the longest, the shortest and the one between, and as often
    a, b and c: whoever guesses by such a rule has two of five at most."""
    questions = [question for lesson in QUIZZES.values() for question in lesson]
    longer = [[np.sign(len(question.right) - len(wrong)) for wrong in question.wrong] for question in questions]
    ranks = [signs[0] if len(set(signs)) == 1 else 0 for signs in longer]  # 1: the longest, -1: the shortest
    letters = [question.letter for question in questions]
    for each in (ranks, letters):
        assert len(set(each)) == len(LETTERS)
        assert max(map(each.count, each)) <= 0.4 * len(questions), {value: each.count(value) for value in set(each)}


@pytest.mark.thorough
def test_a_tensor_of_the_run(notebook):
    check, _ = notebook
    right = check.recorded["blocks.0.attn.hook_q"]
    assert check.judge("blocks.0.attn.hook_q", right).text == "right. Equal, bit for bit."
    assert "Close" in check.judge("blocks.0.attn.hook_q", right * (1 + 1e-7)).text
    rotated = right.reshape(*right.shape[:2], 2, 32).swapaxes(-1, -2).reshape(right.shape)
    for wrong, says in (
        (right[..., :32], "shape"),
        (right.swapaxes(0, 1), "transpose it"),
        (right.reshape(12, 256), "reshape it"),
        (-right, "sign"),
        (np.roll(right, 1, axis=0), "axis 0 is shifted"),
        (2 * right, "2 times the right one|multiplied by 2|scale"),
        (rotated, "values are wrong"),
        (right * np.nan, "no numbers"),
        ("q", "An array of numbers"),
    ):
        answered = check.judge("blocks.0.attn.hook_q", wrong)
        assert answered.status == "wrong"
        assert re.search(says, answered.text), answered.text
    assert check.judge("blocks.0.attn.q", right).text.endswith("did you mean blocks.0.attn.hook_q?")
    pattern = check.recorded["blocks.0.attn.hook_pattern"].swapaxes(1, 2)
    assert "the last two axes are exchanged" in check.judge("blocks.0.attn.hook_pattern", pattern).text
    scores = np.maximum(check.recorded["blocks.0.attn.hook_attn_scores"], -1e9)  # its mask in place of −∞
    assert re.search("Close: 0 of .* at most by 0", check.judge("blocks.0.attn.hook_attn_scores", scores).text)


def as_given(values):
    return None  # TODO


def without_return(values):
    sorted(values)


def test_a_missing_return_is_no_open_exercise():
    for function in (as_given, lambda values: None):
        with pytest.raises(Unanswered):
            run(function, [2, 1])
    with pytest.raises(Wrong, match="Is a return missing"):
        run(without_return, [2, 1])


def test_hints_come_one_at_a_time_and_progress_is_kept(capsys):
    check = Check()
    check.hint()
    check("2.4", None)
    check.hint()
    check("2.4", 4128)
    check.hint()
    check.hint()
    check("2.4", 4129)
    check.hint()
    check("2.2", None)
    check.progress()
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("Run a cell with a check first")
    assert out[1].startswith("2.4: not answered yet. check.hint() gives the first of 2 hints")
    assert out[2].startswith("2.4, hint 1 of 2: A register of n bits")
    assert "127 · 4,128 = 524,256 still fits" in out[3]
    assert out[4].startswith("2.4, hint 2 of 2: It ends at 524,287")
    assert out[5].startswith("2.4: there is no further hint")
    assert out[6].startswith("2.4: right.")
    assert "needs no hint" in out[7]
    assert out[9:] == ["1 of 2 exercises are right.", "  2.4          right, 2 tries, 2 hints", "  2.2          open"]


def test_the_remedy_of_a_named_mistake_is_the_first_hint(notebook):
    check, _ = notebook
    answered = check.judge("3b.6", lambda gate, up: np.maximum(gate, 0) * up)
    assert answered.hints == ("relu2 is relu(gate)^2.", *EXERCISES["3b.6"].hints)


def test_use_gives_ours_until_the_answer_is_right(capsys):
    check = Check()
    ours = check.use("3a.4", lambda scores: np.exp(scores))
    assert np.allclose(ours(np.zeros((1, 2))), 0.5)
    assert "goes on with ours" in capsys.readouterr().out
    assert check.use("3a.4", ours) is ours
    with pytest.raises(ConfigError, match=r"3a.44: there is no such exercise; .*3a\.4"):
        check.use("3a.44", ours)


def test_a_row_that_differs_by_rounding_has_not_changed(notebook):
    check, names = notebook

    def rounding(q, k, v):  # otherwise, in the order of the tokens
        return head(q, k, v) * (1 + 1e-15 * q[0, 0])

    answered = check.judge("3a.order", [0, 1, 2, 3], head=rounding, **{each: names[each] for each in "qkv"})
    assert "compare with np.isclose" in answered.text


def test_a_head_that_returns_lists_is_one(notebook):
    check, names = notebook
    given = {each: names[each] for each in "qkv"}
    answered = check.judge("3a.order", [0, 1], head=lambda q, k, v: head(q, k, v).tolist(), **given)
    assert answered.status == "right", answered.text


def test_ours_calls_no_function_of_the_student(capsys):
    """A piece that is judged right by mistake does not spoil the pieces that stand in for later ones."""
    check = Check(model("storyteller", "numpy"), PASSAGE)

    def mine(gate, up):
        return np.square(np.maximum(gate, 0)) * up

    assert check.use("3b.6", mine) is mine
    assert check.use("3b.7", None).__globals__["gated"] is not mine


def test_without_a_model_a_tensor_is_refused():
    assert "needs Check(model, tokens)" in Check().judge("hook_embed", [1.0]).text
    named = Check(model("storyteller", "numpy"), PASSAGE).judge(9.9, [1.0]).text
    assert "No tensor is called '9.9'" in named
