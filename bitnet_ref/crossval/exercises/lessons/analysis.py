"""Notebooks 6, 10 and 11: finding what is wrong, and what a file is."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ....api import Model
from ....errors import describe
from ....families.hadamard import hadamard
from ....reference import quantization
from ....reference.layers import Array
from ....reference.weights import TernaryLinear
from ...compare import compare
from ...explain.variants import Setting
from ..answers import as_number, expect_array, expect_names, expect_number, expect_set, expect_word, mistake_of
from ..declare import NoResult, Unanswered, Wrong, draws, exercise, run, said_of
from ..engines import calls_of, run_engine, unequal
from ..tables import judged_by_table

# -- 6: crossval ---------------------------------------------------------------------------------------------------


@exercise("6.first")
def where_it_begins(answer: Any) -> str:
    draw = draws(60)
    names = ("embed", "norm", "x_int8", "acc", "out", "logits")
    right = {name: draw.normal(size=(4, 8)) for name in names}
    right["x_int8"] = draw.integers(-127, 128, (4, 8)).astype(np.int8)
    norm, whole = right["norm"], right | {name: 1.1 * right[name] for name in ("out", "logits")}
    off, more_off = (whole | {"acc": factor * right["acc"]} for factor in (1.001, 1.01))
    holes, masked, unmasked = (np.where(np.eye(4, 8) > 0, fill, norm) for fill in (np.nan, -np.inf, 0))
    tiny, not_so_tiny = (np.where(np.arange(32).reshape(4, 8) == 0, first, norm) for first in (1e-6, 2e-4))
    reordered = dict(reversed(whole.items()))
    without = {name: whole[name] for name in names if name not in ("norm", "acc")}
    # the first that is wrong, the tensors of `wrong`, "norm" of `right`
    cases: dict[str, tuple[str, dict[str, Array], Array]] = {
        "The last two tensors are 1.1 times the right ones.": ("out", whole, norm),
        "One is wrong by a hundredth, and those behind it by a tenth.": ("acc", more_off, norm),
        "One differs by 1e-7 of its size, which is rounding.": ("out", whole | {"norm": norm * (1 + 1e-7)}, norm),
        "`wrong` lists its tensors in another order; `right` has that of the run.": ("out", reordered, norm),
        "`wrong` has not all of the tensors.": ("out", without, norm),
        "The integers are others.": ("x_int8", whole | {"x_int8": np.roll(right["x_int8"], 1)}, norm),
        "A tensor has NaN in it, and NaN > 1e-4 is False.": ("norm", whole | {"norm": holes}, norm),
        "A tensor has −inf at the same places in both engines. −inf − (−inf) is NaN, and they are equal.": (
            "out",
            whole | {"norm": masked},
            masked,
        ),
        "A tensor has 0 where −inf is right: its mask is missing.": ("norm", whole | {"norm": unmasked}, masked),
        "One is wrong by a thousandth, and more than 1e-4 counts.": ("acc", off, norm),
        "One has values of some 1e4 and differs by 1e-7 of its size: divide by the length of the right tensor.": (
            "out",
            whole | {"norm": norm * 1e4 * (1 + 1e-7)},
            norm * 1e4,
        ),
        "One has a single tiny element that is wrong, in a tensor whose relative L2 error is below 1e-4: "
        "compare lengths of whole tensors, not elements.": ("out", whole | {"norm": not_so_tiny}, tiny),
    }
    named = []
    for _, wrong, right_norm in cases.values():
        try:
            named.append(run(answer, right | {"norm": right_norm}, dict(wrong)))
        except NoResult:
            named.append(None)
    for name, (what, (first, _, _)) in zip(named, cases.items(), strict=True):
        if name is None:
            raise Wrong(f"{what} Your function returned None, which says that nothing differs. The first is {first!r}.")
        if str(name) != first:
            raise Wrong(f"{what} The first is {first!r}, and yours is {name!r}.")
    return "It needs no knowledge of the port: only what it computed."


@exercise("6.alone")
def wrong_by_themselves(answer: Any) -> str:
    draw = draws(62)
    x = (draw.normal(size=(4, 512)) * [[1], [3], [0.3], [2]]).astype(np.float32)
    t, s = draw.integers(-1, 2, (8, 512)).astype(np.int8), np.float32(0.002)
    x[3], t[5] = 2, 1  # a sum of 65,024
    x_q, a = quantization.quantize_activations(x)
    one = np.full_like(a, a.min())
    coarse = np.rint(x * one).astype(np.int8)

    def port(x_int8: Array = x_q, x_scale: Array = a, more: int = 0, factor: float = 1.0) -> dict[str, Array]:
        acc = x_int8.astype(np.int32) @ t.T.astype(np.int32)
        acc[1, 2] += more
        acc[1, 3] -= more
        out = quantization.dequantize(acc, s, x_scale) * np.float32(factor)
        return {"x": x, "x_int8": x_int8, "x_scale": x_scale, "acc": acc, "out": out}

    single = port()
    single["out"][np.unravel_index(np.abs(single["out"]).argmax(), single["out"].shape)] *= np.float32(1.1)
    cases: list[tuple[str, dict[str, Array], set[str]]] = [
        ("Every op is right.", port(), set()),
        ("One scale serves all tokens; the products are right.", port(coarse, one), {"x_int8", "x_scale"}),
        ("The activations are truncated.", port((x * a).astype(np.int8)), {"x_int8"}),
        ("Two integer sums are off by 7; the output is made of them.", port(more=7), {"acc"}),
        ("The output is 1.01 times what its sums give.", port(factor=1.01), {"out"}),
        (
            "Two sums are off by 7, and the output is 1.01 times what its sums give.",
            port(more=7, factor=1.01),
            {"acc", "out"},
        ),
        ("The output differs by 1e-7 of its size, which is rounding.", port(factor=1 + 1.2e-7), set()),
        ("One value of the output is a tenth too large.", single, {"out"}),
    ]
    given = []
    for _, run_of_port, _ in cases:
        names = run(answer, {name: array.copy() for name, array in run_of_port.items()}, t, s)
        try:
            given.append(set(re.findall(r"\w+", names)) if isinstance(names, str) else {str(name) for name in names})
        except TypeError:
            raise Wrong(f"A set of names is wanted, not {describe(names)}.") from None
    for names, (what, _, right) in zip(given, cases, strict=True):
        if names != right:
            told = "none" if not right else " and ".join(sorted(right))
            why = mistake_of(given, [(case, t, s) for _, case, _ in cases], ALONE)
            raise Wrong(f"{what} Wrong by itself: {told}; yours are {sorted(names) or 'none'}.{why}")
    return "Whatever it was given, an op that is right says so."


def differing(port: Mapping[str, Array], x_q: Array, a: Array, acc: Array, out: Array) -> set[str]:
    """The names of a port's tensors that are not these."""
    again = {"x_int8": x_q, "x_scale": a, "acc": acc, "out": out}
    return {name for name, array in again.items() if not np.allclose(port[name], array)}


def from_x_alone(port: Mapping[str, Array], t: Array, s: np.float32) -> set[str]:
    """All of it computed from x, free-running."""
    x_q, a = quantization.quantize_activations(port["x"])
    acc = x_q.astype(np.int32) @ t.T.astype(np.int32)
    return differing(port, x_q, a, acc, quantization.dequantize(acc, s, a))


def in_narrow_sums(port: Mapping[str, Array], t: Array, s: np.float32, dtype: type = np.int8) -> set[str]:
    """From the port's own inputs, with sums that overflow."""
    x_q, a = quantization.quantize_activations(port["x"])
    acc: Array = port["x_int8"].astype(dtype) @ t.T.astype(dtype)
    return differing(port, x_q, a, acc, quantization.dequantize(port["acc"], s, port["x_scale"]))


ALONE: dict[str, Callable[..., set[str]]] = {
    "everything is computed from x; acc and out are to be made of the port's own tensors before them": from_x_alone,
    "the sums overflow int8: make x_int8 and t wider first": in_narrow_sums,
    "the sums overflow int16, too": partial(in_narrow_sums, dtype=np.int16),
}


@exercise("6.tolerance")
def fewest_wrong_judgements(answer: Any) -> str:
    draw = draws(63)
    cases = [
        ("Errors 1, 2, 3 of the right engine and 5, 6 of the bug", np.array([2.0, 1, 3]), np.array([6.0, 5])),
        ("Errors 1, 2, 9 of the right engine and 5, 6, 7 of the bug", np.array([1.0, 9, 2]), np.array([5.0, 7, 6])),
        ("Errors 3 of the right engine and 1, 2, 4, 5 of the bug", np.array([3.0]), np.array([1.0, 2, 4, 5])),
        ("Errors 4, 5, 6 of the right engine and 1 of the bug", np.array([4.0, 5, 6]), np.array([1.0])),
    ]
    cases += [("Two drawn engines", draw.lognormal(0, 1, 40), draw.lognormal(mean, 0.6, 40)) for mean in (1, 0.3)]
    for what, right, bug in cases:
        try:
            tolerance, count = map(as_number, run(answer, right, bug))
        except (TypeError, ValueError):
            raise Wrong("Two numbers are wanted: (tolerance, how many are judged wrongly).") from None
        counts = [int((right > each).sum() + (bug <= each).sum()) for each in (0, *right, *bug)]
        accused, passed = int((right > tolerance).sum()), int((bug <= tolerance).sum())
        if accused + passed > min(counts):
            why = ""
            if counts[0] == min(counts) and accused + passed == min(counts[1:]):
                why = " It is 0, which accuses everybody: is 0 among those that you try?"
            elif accused == 0:
                why = " None of the right engine's is accused; both kinds of wrong judgement count."
            raise Wrong(
                f"{what}: a tolerance of {tolerance:.3g} accuses {accused} of the right engine's tokens, and lets "
                f"{passed} of the bug's pass. The best one judges {min(counts)} wrongly.{why}"
            )
        if count != accused + passed:
            one_kind = {
                accused: " The bug's tokens that pass count, too.",
                passed: " Right tokens that are accused count, too.",
            }
            raise Wrong(
                f"{what}: at {tolerance:.3g}, {accused + passed} are judged wrongly; you say {count:g}."
                + one_kind.get(int(count), "")
            )
    return "Now on real errors."


@exercise("6.mend")
def mended_port(answer: Any, Port: type, model: Model, tokens: Sequence[int], recorded: Mapping[str, Array]) -> str:
    """Port: the engine of the notebook, one scale for all tokens of a call."""
    _, mine = run_engine(answer, model, tokens)
    if not issubclass(answer, Port):
        raise Wrong("Mend the port: class Mended(Port), with a method of its own.")
    others = unequal(mine, recorded)
    if not others:
        return f"All {len(recorded)} tensors are equal, to the last bit."
    _, theirs = run_engine(Port, model, tokens)
    if not unequal(mine, theirs):
        raise Wrong("Nothing has changed: every tensor is the port's.")
    other = others[0]
    index = tuple(int(i) for i in np.argwhere(mine[other] != recorded[other])[0])
    values = two_numbers(mine[other][index], recorded[other][index])
    raise Wrong(f"The first tensor that differs is {other}: at {list(index)} it is {values}.")


def two_numbers(mine: Any, right: Any) -> str:
    """Two unequal numbers, in as many digits as show it."""
    digits = next(digits for digits in (6, 9, 17) if f"{mine:.{digits}g}" != f"{right:.{digits}g}")
    rounding = " (by rounding alone: is it float32 all the way, in the same order?)" * (digits > 6)
    return f"{mine:.{digits}g}, not {right:.{digits}g}{rounding}"


@exercise("6.hunt")
def hunt(answer: Any, suspect: tuple[Model, str], model: Model, tokens: Sequence[int]) -> str:
    """suspect: the engine and the name of its mistake."""
    engine, planted = suspect
    with calls_of(type(engine.backend)) as called:
        _, mine = run_engine(answer, model, tokens)
    if called:
        raise Wrong(
            f"Your engine calls the suspect's own {called[0]}. Write the mistake yourself, in a class of Backend."
        )
    right, theirs = (each.run_with_cache(list(tokens))[1] for each in (model, engine))
    first, others = unequal(theirs, right)[0], unequal(mine, theirs)
    if not others:
        return (
            f"All {len(right)} tensors are equal, to the last bit. Proven: {planted}. Change the seed for the next one."
        )
    other = others[0]
    comparison = compare(theirs, mine, model.config, tokens, own_engine=False)
    if comparison.agrees:
        return f"Proven: {planted}. Yours only rounds otherwise, first at {other}. Change the seed for the next one."
    if not unequal(mine, right):
        raise Wrong("Every tensor is the right model's: your engine makes no mistake.")
    order = list(right)
    if order.index(other) < order.index(first):
        raise Wrong(f"Yours is wrong too early: at {other} the suspect is still right. It begins at {first}.")
    if np.array_equal(mine[first], right[first]):
        raise Wrong(f"At {first} the suspect is wrong, and yours is still right. Which method computes it?")
    apart = np.abs(mine[other].astype(float) - theirs[other])
    tipped = other.endswith("_x_int8") and apart.max() == 1 and apart.mean() < 1e-3
    if tipped or np.allclose(mine[other], theirs[other], rtol=1e-6, atol=0):
        raise Wrong(
            f"At {other} yours differs from the suspect's by rounding alone: same formula, other order of steps, or "
            "float64 for float32?"
        )
    if other == first:
        index = tuple(int(i) for i in np.argwhere(mine[first] != theirs[first])[0])
        values = ", ".join(
            f"{each[first][index]:.6g} {whose}" for each, whose in ((mine, "in yours"), (theirs, "in the suspect"))
        )
        raise Wrong(f"The place is right, {first}, but not what happens there: at {list(index)} it is {values}.")
    raise Wrong(f"The beginning is right. The first tensor that differs from the suspect's is {other}.")


@exercise("6.1")
def seen_by_the_logits(answer: Any, model: Model, port: Model, story: Sequence[int]) -> str:
    ours, theirs = (np.stack([each.logits(story[:n])[-1] for n in range(2, 25)]) for each in (model, port))
    far = np.abs(theirs - ours).max(axis=-1)
    together = np.abs(port.logits(story[:24]) - model.logits(story[:24]))
    right, others = float(far.max()), int((ours.argmax(-1) != theirs.argmax(-1)).sum())
    mistakes = {
        "The logits of the port may also be too small: take |port − model|.": (theirs - ours).max(),
        "The logits of the port may also be too large: take |port − model|.": (ours - theirs).max(),
        "That is of one run of all tokens. Each prompt is a call of its own here.": (
            together[1:].max(),
            together.max(),
        ),
        "That is the mean over the prompts; the largest is asked.": far.mean(),
        "That is of the longest prompt alone.": far[-1],
        "The size of a difference is asked, not how often the most likely token is another.": others,
    }
    expect_number(answer, right, within=0.0051, mistakes=mistakes, hint="It is of the last token's logits.")
    return f"The most likely token is another one in {others} of the 23 prompts; in the others a text begins as ours."


@exercise("6.blocks")
def rule_of_blocks(answer: Any) -> str:
    draw = draws(61)
    x = (draw.normal(size=(5, 64)) * draw.uniform(0.2, 3, (5, 64))).astype(np.float32)

    def rounded(x: Array, axes: int | tuple[int, ...] = -1, largest: float = 127.0) -> Array:
        scale = largest / np.abs(x).max(axis=axes, keepdims=True)
        return np.asarray(np.rint(x * scale) / scale)

    blocks = x.reshape(5, -1, 16)
    scale = 127 / np.abs(blocks).max(axis=-1, keepdims=True)
    mistakes = {
        "that is one scale for each token; each block of it has one": rounded(x),
        "that is one scale for all blocks of all tokens": rounded(x, (0, 1)),
        "a block has one scale for all tokens; each token has its own": rounded(blocks, (0, 2)),
        "the blocks are 256 wide; `size` says how wide they are": rounded(x.reshape(5, -1, 64)),
        "a block is made of every fourth value; its values are neighbours": rounded(x.reshape(5, 16, 4), 1),
        "nothing is rounded": x,
        "the rounded values are to be divided by the scale again": np.rint(blocks * scale),
        "the values are cut off, not rounded": np.trunc(blocks * scale) / scale,
        "the scale is 127 / max |x|, not 128": rounded(blocks, largest=128.0),
        "the scale is taken of max x; of max |x| it is right": np.rint(blocks * (127 / blocks.max(-1, keepdims=True)))
        / (127 / blocks.max(-1, keepdims=True)),
    }
    shaped = {sentence: np.reshape(values, x.shape) for sentence, values in mistakes.items()}
    expect_array(run(answer, x, 16), rounded(blocks).reshape(x.shape), mistakes=shaped)
    return "Now the measurement."


judged_by_table("6.2")


DIALECTS = ("int8, multiply", "int8, divide", "groups, float", "rotated")

# -- 10: dialects --------------------------------------------------------------------------------------------------


@exercise("10.groups")
def weights_from_scales(answer: Any) -> str:
    draw = draws(100)
    cases: list[tuple[Array, Array, str]] = [
        (np.array([[1, -1, 1, -1]], np.int8), np.array([[2.5, 0.25]], np.float32), "the row on paper, in groups of two")
    ]
    for n, k, g in ((6, 32, 8), (5, 48, 16), (4, 8, 8)):
        t = draw.integers(-1, 2, (n, k)).astype(np.int8)
        cases.append((t, draw.uniform(0.1, 2, (n, k // g)).astype(np.float32), f"groups of {g} in rows of {k}"))
    cases.append((cases[1][0], np.array(0.07, np.float32), "one scale"))
    for t, scale, what in cases:
        wide = np.broadcast_to(scale, (len(t), scale.shape[1])) if scale.ndim else np.full((len(t), 1), scale)
        group = t.shape[1] // wide.shape[1]
        mistakes = {
            "one scale is taken for the whole row": t * wide[:, :1],
            "neighbours share a scale: np.repeat, not np.tile": t * np.tile(wide, (1, group)),
            "the scales divide; here they multiply": t / np.repeat(wide, group, axis=1),
            "the signs of t are missing": np.repeat(wide, group, axis=1),
        }
        with said_of(f"For {what}:"):
            expect_array(run(answer, t, scale), t * np.repeat(wide, group, axis=1), mistakes=mistakes)
    return "One scale, or groups of any size."


judged_by_table("10.large")


@exercise("10.hadamard")
def hadamard_matrix(answer: Any) -> str:
    for n in (2, 4, 16):
        signs = np.ones((1, 1))
        while len(signs) < n:
            signs = np.block([[signs, signs], [signs, -signs]])
        mistakes = {
            "the entries are divided by √n, so that lengths stay": signs,
            "they are divided by √n, not by n": signs / n,
            "√2 is divided by once; each doubling divides again": signs / np.sqrt(2),
            "the negated quarter is the last one, in row and in column": signs[::-1] / np.sqrt(n),
            "the negated quarter is the last one, and not the one below the first": signs[:, ::-1] / np.sqrt(n),
            "H @ H is the identity for this one, too, but the file has another basis. At n = 2 it must be the matrix "
            "above, so the negated quarter is the last one": signs[::-1, ::-1] / np.sqrt(n),
            "nothing is negated, so all rows are the same": np.ones((n, n)) / np.sqrt(n),
        }
        expect_array(run(answer, n), signs / np.sqrt(n), mistakes=mistakes)
    return "H @ H is the identity: turned twice, nothing is left of the turn."


@exercise("10.rules")
def rule_of_each_dialect(answer: Any) -> str:
    draw = draws(101)
    t = draw.integers(-1, 2, (8, 128)).astype(np.int8)
    s, scales = np.array(0.07, np.float32), draw.uniform(0.03, 0.2, (8, 2)).astype(np.float32)
    x = draw.normal(size=(4, 128)).astype(np.float32)
    x_q, a = quantization.quantize_activations(x)
    W, wide = t * np.repeat(scales, 64, axis=1), x.astype(np.float64)
    one_a = np.float32(127) / np.abs(x).max()
    in_int8, turned = x_q / a.astype(np.float64), hadamard(wide, 64)
    by_one_scale: dict[str, Array] = {
        "x is not made int8": wide @ t.T,
        "one activation scale is taken for the whole batch; each token has its own": (np.rint(x * one_a) / one_a) @ t.T,
        "the sums overflow int8: make x_q and t wider first": (x_q @ t.T) / a,
        "x_q is multiplied by x_scale; it is divided by it": (x_q.astype(int) @ t.T) * a,
        "x_scale is left out: the sums are of x_q, not of x": x_q.astype(int) @ t.T,
    }
    by_groups = {
        "one scale is taken for the whole row": t * scales[:, :1],
        "neighbours share a scale: np.repeat, not np.tile": t * np.tile(scales, (1, 64)),
        "the scales divide; in groups they multiply": t / np.repeat(scales, 64, axis=1),
    }
    for rule in DIALECTS:
        if rule.startswith("int8"):
            factor, other = (s, 1 / s) if rule == "int8, multiply" else (1 / s, s)
            right = factor * (in_int8 @ t.T)
            mistakes: dict[str, Array] = {text: factor * y for text, y in by_one_scale.items()}
            mistakes |= {
                "the scale points the other way": other * (in_int8 @ t.T),
                "the scale of the weights is left out": in_int8 @ t.T,
            }
            given = run(answer, rule, t, s, x)
        else:
            inputs, not_these = (turned, wide) if rule == "rotated" else (wide, turned)
            right = inputs @ W.T
            mistakes = {text: inputs @ wrong.T for text, wrong in by_groups.items()}
            mistakes |= {
                f"the inputs are {'turned' if rule == 'rotated' else 'not turned'} here": not_these @ W.T,
                "the inputs are turned in blocks of 64, not of the whole width": hadamard(wide, 128) @ W.T,
                "the outputs are turned; the inputs are": hadamard(wide @ W.T, 8),
                "the activations are float here; yours are int8": in_int8 @ W.T,
            }
            given = run(answer, rule, t, scales, x)
        with said_of(f"By the rule {rule!r}:"):
            expect_array(given, right, mistakes=mistakes)
    return "Four dialects in one program: what is left is to see which of them a file obeys."


BLIND = " The two names with one scale differ by a factor, to which a cosine is blind: measure a distance."


@exercise("10.files")
def which_file(answer: Any, files: Mapping[str, Mapping[str, Array]], answers: Sequence[str]) -> str:
    for (name, file), right in zip(files.items(), answers, strict=True):
        try:
            given = run(answer, dict(file))
        except NoResult:
            raise Wrong(
                f"For {name} yours is None. No y need be *equal* to the recorded: programs round otherwise. "
                "Which is nearest?"
            ) from None
        if isinstance(given, (bool, np.bool_)):
            raise Wrong(f"For {name} yours is {given}; a name is wanted. And no y is equal: which is nearest?")
        if not isinstance(given, str) or given not in DIALECTS:
            raise Wrong(
                f"For {name} yours is {describe(given)}, and no name of the table: {'; '.join(map(repr, DIALECTS))}."
            )
        one_scale = file["scale"].ndim == 0
        if one_scale != given.startswith("int8"):
            raise Wrong(f"{name} has {'one scale' if one_scale else 'a scale for each group'}: it cannot be {given!r}.")
        if given != right:
            raise Wrong(
                f"{name} is not {given!r}: its y is not what that rule gives. Which y is nearest to the recorded?"
                + BLIND * one_scale
            )
    for (name, file), right in zip(files.items(), answers, strict=True):
        if file["scale"].ndim == 0 and run(answer, {**file, "scale": 1 / file["scale"]}) == right:
            raise Wrong(f"{name} with 1 / scale is of the other rule, and yours is {right!r} again.{BLIND}")
    return "All of them. Now try another seed."


@exercise("10.norms")
def harm_of_norms(answer: Any, model: Model, variant: Callable[..., Model], ids: Sequence[int]) -> str:
    """variant, ids: the notebook's own."""
    results = []
    for norms in ({"attn_sub_norm": None}, {"ffn_sub_norm": None}):
        ours, theirs = (np.asarray(m.logits(ids), dtype=np.float64) for m in (model, variant(**norms)))
        ours, theirs = (z - np.log(np.exp(z).sum(axis=-1, keepdims=True)) for z in (ours, theirs))
        by_token, by_theirs = ((np.exp(z) * (ours - theirs)).sum(axis=-1) for z in (ours, theirs))
        mistakes = {
            "That is KL(variant ‖ model): the right one's p weighs.": -by_theirs.mean(),
            "The p that weighs is that of the right model.": by_theirs.mean(),
            "The sign is the other one: KL is never below 0.": -by_token.mean(),
            "That is in bits; ln gives nats.": by_token.mean() / np.log(2),
            "That is the sum over the tokens; their mean is asked.": by_token.sum(),
            "That is after the last token alone; the mean over all is asked.": by_token[-1],
            "The differences of ln p are to be weighed by p before they are added.": (ours - theirs).mean(),
        }
        results.append(as_number(run(partial(answer, **norms) if callable(answer) else answer)))
        right = float(by_token.mean())
        expect_number(
            results[-1],
            right,
            within=1e-3 * right,
            mistakes=mistakes,
            hint="KL is Σ p (ln p − ln q), p of the right model.",
        )
    return f"{results[0]:.2f} nats without attn_sub_norm, {results[1]:.2f} without ffn_sub_norm."


judged_by_table("10.keys")


@exercise("10.published")
def published_files(answer: Any, published: Mapping[str, Mapping[str, Any]]) -> str:
    if isinstance(answer, Mapping):  # names without the publisher will do
        full = {name.split("/")[-1]: name for name in published}
        answer = {full.get(name, name): dialect for name, dialect in answer.items()}
    elif isinstance(answer, (list, tuple)) and len(answer) == len(published):
        answer = dict(zip(published, answer, strict=True))
    for model, given in expect_names(answer, published, DIALECTS):
        right, why = published_dialect(published[model])
        if given != right:
            raise Wrong(f"{model} is not {given!r}. {why}")
    return "All five, from what their publishers wrote. A recorded run would prove it."


def published_dialect(config: Mapping[str, Any]) -> tuple[str, str]:
    """The dialect of a published config.json, and what says so."""
    if "quantization" in config:
        if "hadamard" in config["model_type"]:
            return "rotated", "Read its model_type: in which basis are its weights ternary?"
        return "groups, float", "Its quantization has a group_size: a scale for each group, and nothing of int8."
    packed = config.get("quantization_config")
    if packed is None:
        return "int8, multiply", "No scale is stored: it is mean|W|, computed on loading, and W is s times t."
    if packed.get("linear_class") == "autobitlinear":
        return "int8, multiply", "Its linear_class is autobitlinear: weight_scale is multiplied by."
    return "int8, divide", "quant_method is bitnet, and no linear_class says autobitlinear: weight_scale is divided by."


# -- 11: case files ------------------------------------------------------------------------------------------------


@exercise("11.case1")
def fluent(answer: Any, trace: Mapping[str, Array], recorded: Mapping[str, Array]) -> str:
    """trace: what the suspect recorded, who has SiLU in place of ReLU²."""
    if not isinstance(answer, (tuple, list)) or len(answer) != 2 or not isinstance(answer[0], str):
        raise Wrong('Two are wanted: (name, function), as ("blocks.0.attn.hook_z", np.tanh).')
    tensor, function = answer[0].strip(), answer[1]
    first = unequal(trace, recorded)[0]
    if tensor not in recorded:
        raise Wrong(f"No tensor is called {tensor!r}.")
    if tensor != first:
        is_right = np.array_equal(trace[tensor], recorded[tensor])
        says = "is right" if is_right else "is wrong, and one before it is wrong too"
        raise Wrong(f"{tensor} {says}. Go through the names in the order of `right`.")
    if function is None:
        raise Unanswered
    gate = np.linspace(-8, 8, 64)
    half = 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    mistakes = {
        "that is what is right, relu²; what has the suspect": np.maximum(gate, 0) ** 2,
        "below 0 the suspect's function is not quite 0": np.maximum(gate, 0),
        "that is the factor of the gate alone; the function is the gate times it": 1 / (1 + np.exp(-gate)),
        "GELU is near; compare the two at −3": gate * half,
        "nothing is done to the gate": gate,
        "the sign in the exponent is the other one": gate / (1 + np.exp(gate)),
    }
    expect_array(run(function, gate), gate / (1 + np.exp(-gate)), mistakes=mistakes)
    return "It is SiLU, and this model has ReLU²."


@exercise("11.seen")
def matrix_that_an_engine_sees(answer: Any, engine: Model, q_proj: TernaryLinear) -> str:
    """engine: one that reads the weight q_proj wrongly."""
    matrix = q_proj.ternary()
    right = engine.backend.ternary_matmul(np.eye(matrix.shape[1], dtype=np.int8), q_proj).T
    mistakes: dict[str, Array] = {
        "that is the matrix as it is right; ask the engine, by its product": matrix,
        "what comes out of the engine is W^T": right.T,
        "that is the right matrix, transposed; ask the engine, by its product": matrix.T,
        "all inputs at once give the sums of the rows": np.broadcast_to(right.sum(axis=1, keepdims=True), right.shape),
    }
    expect_array(answer, right, mistakes=mistakes)
    return f"{(right != matrix).mean():.0%} of its places have another weight than the right one."


judged_by_table("11.case2")


@exercise("11.lengths")
def right_lengths(answer: Any, model: Model, tokens: Sequence[int], engine: Model) -> str:
    tensor = "blocks.0.attn.q_proj.hook_acc_int32"

    def sums(of: Model, n: int) -> Array:
        return Setting.of(of, tokens[:n]).run(tensor.__eq__, until=tensor, backend=of.backend)[tensor]

    right = {n for n in range(1, 13) if np.array_equal(sums(model, n), sums(engine, n))}
    choices = {
        n: f"With {n} token{'s' * (n > 1)} {'all' if n in right else 'not all'} sums are right." for n in range(1, 13)
    }
    expect_set(answer, right, choices)
    return "Four tokens or more take another way through the code."


@exercise("11.case3")
def squares(answer: Any) -> str:
    mistakes: dict[str, tuple[str, ...]] = {
        "Reversed rows would move the elements (i, i), too.": ("revers",),
        "A rotated square would move the corner (0, 0).": ("rotat",),
        "A shift would move the elements (i, i), too.": ("shift",),
        "The values are the right ones, at other places.": ("negat", "sign", "scal"),
        "The elements (i, i) stay: that is the other diagonal.": ("anti",),
        "Look at the places of whole elements, in a square of 4 × 4.": ("byte", "bit", "hal"),
    }
    text = re.sub(r"\.T\b", " transpose", str(answer)).lower()
    pairs = (
        (("mirror", "reflect"), r"diagonal", "At which line? The elements (i, i) stay."),
        (("swap", "exchang"), r"row.*col|col.*row|ax[ei]s", "What is exchanged with what?"),
        (("becom", "turn"), r"row.*col|col.*row", "What becomes what?"),
        (("diagonal",), r"mirror|reflect|transpo", "The diagonal is what stays. What happens to the rest?"),
    )
    stems = ["transpo"]
    for words, needed, sentence in pairs:
        if re.search(needed, text):
            stems += words
        elif "transpo" not in text:
            mistakes[sentence] = words
    expect_word(
        text if isinstance(answer, str) else answer,
        stems,
        mistakes,
        "Follow one element (i, j) of a square: where does it go?",
    )
    return "Transposed, in tiles of 4 × 4."


@exercise("11.noticed")
def who_noticed(
    answer: Any, model: Model, tokens: Sequence[int], recorded: Mapping[str, Array], engines: Sequence[Model]
) -> str:
    """engines: the suspects of the three cases, in order."""
    cells = [what_checks_say(engine, model, tokens, recorded) for engine in engines]
    checks = list(cells[0])
    right = {check: {case for case, column in enumerate(cells, 1) if column[check][0]} for check in checks}
    if not isinstance(answer, Mapping):
        rows = answer.tolist() if isinstance(answer, np.ndarray) else answer
        if not isinstance(rows, (list, tuple)) or len(rows) != len(checks):
            raise Wrong(f"A dict of seven sets is wanted, not {describe(answer)}.")
        answer = dict(zip(checks, rows, strict=True))
    if set(answer) != set(checks):
        raise Wrong(f"The keys are {', '.join(map(repr, checks))}.")
    given = {check: cases_of(check, answer[check]) for check in checks if answer[check] is not None}
    if not given:
        raise Unanswered
    if len(given) > 2 and all(given[check] == {1, 2, 3} - right[check] for check in given):
        raise Wrong("These are the cases that each check misses. Give those that it notices.")
    wrong = [(check, case) for check in given for case in sorted(given[check] ^ right[check])]
    if wrong:
        (check, case), count = wrong[0], len(wrong)
        noticed, why = cells[case - 1][check]
        cell = f"{check!r} {'notices' if noticed else 'misses'} case {case}. {why}"
        raise Wrong(f"{count} of your {3 * len(given)} cells are wrong. The first: {cell}" if count > 1 else cell)
    if len(given) < len(checks):
        still = ", ".join(repr(check) for check in checks if check not in given)
        raise Wrong(f"What you have is right. Still open: {still}.")
    all_three = [repr(check) for check, cases in right.items() if len(cases) == 3]
    return f"All three are noticed by {' and '.join(all_three)}."


def cases_of(check: str, value: Any) -> set[int]:
    """The cases in a row of a student's table: a set, one number, a text, or three truth values."""
    flags = {"noticed": True, "yes": True, "true": True, "1": True}
    flags |= {"missed": False, "no": False, "false": False, "0": False}
    if isinstance(value, str):
        text = re.sub(r"cases?|and|[,;{}()]", " ", value.lower())
        value = {"none": [], "all": [1, 2, 3]}.get(text.strip(), text.split())
    elif not isinstance(value, (set, frozenset, list, tuple, range, np.ndarray, dict)):  # {} is meant for an empty set
        value = [value]
    cells = [str(each).lower().removeprefix("case").removesuffix(".0").strip() for each in value]
    if len(cells) == 3 and not isinstance(value, (set, frozenset)) and set(cells) <= set(flags):
        return {case for case, cell in enumerate(cells, 1) if flags[cell]}
    if set(cells) - {"1", "2", "3"}:
        raise Wrong(f"{check!r}: give a set of the cases 1, 2 and 3, such as {{1, 3}}, or set() for none.")
    return {int(cell) for cell in cells}


def what_checks_say(
    engine: Model, model: Model, tokens: Sequence[int], recorded: Mapping[str, Array]
) -> dict[str, tuple[bool, str]]:
    """By check: whether it notices this engine, and why."""
    ours, (theirs, trace) = recorded["lm_head.hook_out"], engine.run_with_cache(list(tokens))
    cosine = float((ours * theirs).sum() / np.linalg.norm(ours) / np.linalg.norm(theirs))
    top1 = float((ours.argmax(-1) == theirs.argmax(-1)).mean())
    alone, right_alone = engine.logits(list(tokens[:2])), model.logits(list(tokens[:2]))
    said, wanted = (model.tokenizer.decode([int(logits[-1].argmax())]) for logits in (alone, right_alone))
    one_word = f"After {model.tokenizer.decode(list(tokens[:2]))!r} it says {said!r}, and the model {wanted!r}."
    if np.array_equal(alone, right_alone):
        one_word = "Its logits are the right ones here: you found at which lengths it is right."
    elif said == wanted:
        one_word = f"Its logits are wrong, but the largest is in the right place: both say {said!r}."
    agrees = np.allclose(alone, theirs[:2], atol=1e-4)
    first_sums = "blocks.0.attn.q_proj.hook_acc_int32"
    differ, wrong = unequal(trace, recorded), int((trace[first_sums] != recorded[first_sums]).sum())
    return {
        "finite": (
            not bool(np.isfinite(theirs).all()),
            f"Its logits lie between {theirs.min():.0f} and {theirs.max():.0f}.",
        ),
        "cosine": (cosine < 0.5, f"Its report has a cosine of {cosine:.2f}."),
        "top-1": (top1 < 0.5, f"Its report has a top-1 agreement of {top1:.2f}."),
        "one word": (said != wanted, one_word),
        "itself": (
            not agrees,
            "It makes the same mistake both times, alone and in the longer prompt, so its two results are equal."
            if agrees
            else "Two tokens take another way alone than in a longer prompt, and have other logits there.",
        ),
        "first sums": (
            wrong > 0,
            f"{wrong:,} of these sums are wrong."
            if wrong
            else f"They are made before its mistake: the first tensor that differs is {differ[0]}.",
        ),
        "tensors": (bool(differ), f"{len(differ)} of {len(recorded)} tensors differ."),
    }


judged_by_table("11.1")


@exercise("11.2")
def own_suspect(answer: Any, model: Model, tokens: Sequence[int]) -> str:
    logits, tensors = run_engine(answer, model, tokens)
    right_logits, right = model.run_with_cache(list(tokens))
    if not unequal(tensors, right):
        if answer.__name__ == "YourSuspect" and "quantize_activations" not in vars(answer):
            raise Unanswered
        raise Wrong("Every tensor is equal, to the last bit: it makes no mistake on this prompt.")
    if not (np.isfinite(logits).all() and logits.any()):
        raise Wrong("Too large: your engine's logits are nan, or all 0. A wrong rounding is enough.")
    cosine = as_number((right_logits * logits).sum() / np.linalg.norm(right_logits) / np.linalg.norm(logits))
    top1 = float((right_logits.argmax(-1) == logits.argmax(-1)).mean())
    if cosine <= 0.5 or top1 < 0.5:
        raise Wrong(
            f"Too large: the cosine is {cosine:.2f} (0.5 is noticed), top-1 agreement {top1:.0%} (50%). "
            "A wrong rounding is enough."
        )
    comparison = compare(right, tensors, model.config, tokens)
    if comparison.first_divergence is None:
        raise Wrong("crossval says that it AGREES: that is a correct engine, which rounds otherwise. Make a mistake.")
    return f"It passes both: cosine {cosine:.4f}, top-1 {top1:.0%}. {comparison.verdict}"
