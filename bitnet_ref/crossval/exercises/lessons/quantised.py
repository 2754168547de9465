"""Notebooks 1, 2 and 5: ternary weights, BitLinear, files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Set
from types import CodeType
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from ....api import Model
from ....errors import describe
from ....formats import packing
from ....formats.gguf.blocks import blocks_from_ternary
from ....reference import quantization
from ....reference.layers import Array
from ....reference.weights import TernaryWeight
from ..answers import as_array, as_number, as_parts, expect_array, expect_names, expect_number
from ..declare import Wrong, draws, exercise, run, said_of
from ..tables import judged_by_table

# -- 1: ternary weights --------------------------------------------------------------------------------------------

BRACKETS = "− comes before &: & 3 - 1 is & 2. Put the & into brackets"


@exercise("1.absmean")
def ternary_matrix(answer: Any) -> str:
    draw = draws(19)
    w = (draw.normal(0.4, 2, (6, 16)) * draw.uniform(0.5, 1.5, (6, 1))).astype(np.float32)
    w[np.abs(np.abs(w) / np.abs(w).mean() - 0.5) < 0.01] *= np.float32(0.9)  # nothing near a half: W · (1/s) is W / s
    right, s = quantization.quantize_weights(w)
    w_t, scale = map(as_array, as_parts(run(answer, w), 2, "Two results are wanted, w_t and s."))
    if w_t.shape == () and scale.shape == w.shape:
        raise Wrong("The matrix comes first, then the scale: return w_t, s.")
    if scale.size in w.shape:
        raise Wrong("s: one scale for each row or column. The mean is of the whole matrix.")
    sizes = np.abs(w)
    scales = {
        "the mean of |W| is wanted, not the maximum.": (sizes.max(), w.max()),
        "that is |mean W|, where plus and minus cancel: take the sizes first, then their mean.": abs(w.mean()),
        "the mean is of |W|: of W itself, plus and minus cancel.": w.mean(),
        "that is 1/s. W ≈ s · W_t: the scale multiplies.": 1 / s,
        "that is the threshold, s/2.": s / 2,
        "that is the standard deviation; the mean of |W| is wanted.": w.std(),
        "that is the root of the mean square; the mean of |W| is wanted.": np.sqrt((w**2).mean()),
        "that is the median of |W|; the mean is wanted.": np.median(sizes),
    }
    with said_of("s:"):
        expect_number(scale, float(s), within=1e-5 * float(s), mistakes=scales, hint="It is the mean of |W|.")
    scaled = w / s
    matrices = {
        "the values are cut off where they should be rounded: the threshold is s/2, not s": np.trunc(scaled).clip(
            -1, 1
        ),
        "the values are not clipped to −1 and +1": np.rint(scaled),
        "the values are not rounded": scaled.clip(-1, 1),
        "W is divided by s, and neither rounded nor clipped": scaled,
        "the values are rounded down": np.floor(scaled).clip(-1, 1),
        "that is the sign alone: what is smaller than s/2 becomes 0": np.sign(w),
        "W is multiplied by s where it is divided": np.rint(w * s).clip(-1, 1),
        "W is not divided by s": np.rint(w).clip(-1, 1),
        "W is divided by its maximum": np.rint(w / sizes.max()).clip(-1, 1),
        "each row is divided by a mean of its own": np.rint(w / sizes.mean(1, keepdims=True)).clip(-1, 1),
        "that is s · W_t; the integers themselves are wanted": right * s,
        "an unsigned type has no −1: take int8": right.astype(np.uint8),
    }
    with said_of("w_t:"):
        expect_array(w_t, right, mistakes=matrices)
    return "So every ternary matrix of BitNet b1.58 is made."


@exercise("1.entropy")
def entropy_of_three(answer: Any) -> str:
    draw = draws(11)
    cases = [np.array([[-1, 0, 1], [1, -1, 0]]), draw.choice([-1, 0, 1], (8, 16), p=[0.2, 0.5, 0.3])]
    cases += [np.array([0, 1, 1, 0]), np.zeros((2, 3), dtype=int)]
    for w_t in cases:
        p = np.array([(w_t == value).mean() for value in (-1, 0, 1)])
        p = p[p > 0]
        bits = float(-(p * np.log2(p)).sum())
        given = run(answer, w_t)
        if "nan" in str(given):
            raise Wrong("A share is 0, and 0 · log2(0) became no number: a value that does not occur adds nothing.")
        by_rows, counts = p * w_t.size / len(w_t), p * w_t.size
        mistakes = {
            "That is in nats: log2 gives bits.": bits * np.log(2),
            "The sign is the other one: log2 of a share is negative.": -bits,
            "That is in digits of three values; log2 gives bits.": bits / np.log2(3),
            "That is the bits of all weights together.": bits * w_t.size,
            "That would be so if the values were equally frequent.": np.log2(len(p)),
            "Those are counts: a share is a count divided by w_t.size.": -(counts * np.log2(counts)).sum(),
            "len(w_t) is the number of rows: a share is of all weights, w_t.size.": -(by_rows * np.log2(by_rows)).sum(),
        }
        expect_number(given, bits, within=1e-6, mistakes=mistakes, hint=f"For {w_t.tolist()} it is {bits:.4f}.")
    return "Three equal shares give log₂ 3 = 1.585 bits, and nothing gives more."


@exercise("1.1")
def thirds(answer: Any) -> str:
    scale = as_number(answer)
    if scale <= 0:
        raise Wrong("A scale is larger than 0.")
    zeros = math.erf(scale / 2 / math.sqrt(2))
    if abs(zeros - 1 / 3) < 0.005:
        return f"The mean is only {scale - math.sqrt(2 / math.pi):.2f} below it."
    if abs(scale - 0.4307) < 0.005:
        raise Wrong("That is where the weights are cut. Half of the scale is the threshold: the scale is twice that.")
    if abs(scale - math.sqrt(2 / math.pi)) < 0.005:
        raise Wrong("That is the mean of |w|, which gives 31% of zeros: a little too few.")
    size = "smaller" if zeros > 1 / 3 else "larger"
    raise Wrong(f"{zeros:.0%} of the weights would be 0. For a third the scale must be {size}.")


@exercise("1.2")
def five_in_a_byte(answer: Any) -> str:
    tests = np.array([[0, 0, 0, 0, 0], [-1] * 5, [1] * 5, [-1, -1, -1, -1, 1], [1, 0, -1, 0, 1]], dtype=np.int8)
    powers = 3 ** np.arange(4, -1, -1)
    got = [as_number(run(answer, each)) for each in tests]
    mistakes = {
        "the sum overflows int8, the type of the weights: make a wider one first, as int(w)": (
            ((tests + 1) @ powers).astype(np.int8)
        ),
        "the first weight must be the highest digit, and yours is the lowest": (tests + 1) @ powers[::-1],
        "add 1 to the weights first: the digits are 0, 1 and 2": tests @ powers,
        "the digits are worth powers of 3; yours are powers of 4": (tests + 1) @ 4 ** np.arange(4, -1, -1),
        "the digits are worth powers of 3; yours are powers of 2": (tests + 1) @ 2 ** np.arange(4, -1, -1),
        "the first digit is worth 3⁴; yours is worth 3⁵": 3 * (tests + 1) @ powers,
    }
    expect_array(np.array(got), (tests + 1) @ powers, mistakes=mistakes)
    return "Five weights in a byte: 1.6 bits for each."


@exercise("1.3")
def four_from_a_byte(answer: Any) -> str:
    right = draws(14).integers(-1, 2, (6, 32)).astype(np.int8)
    packed = quantization.pack_ternary(right)
    codes = packed[..., None] >> np.array([0, 2, 4, 6], dtype=np.uint8) & 3
    strided, unmasked = codes.swapaxes(1, 2), packed[..., None] >> np.array([0, 2, 4, 6], dtype=np.uint8)
    mistakes = {
        "the first weight lies in the lowest bits; you began with the highest": codes[..., ::-1].reshape(6, 32) - 1.0,
        "the codes are 0, 1, 2: take 1 away": codes.reshape(6, 32),
        "a byte holds four neighbours; you put them a quarter of a row apart": strided.reshape(6, 32) - 1.0,
        "& 3 is missing: the codes above are still there": unmasked.astype(np.int8).reshape(6, 32) - np.int8(1),
        "add instead of take away: code 0 is −1": codes.reshape(6, 32) + 1.0,
        BRACKETS: codes.reshape(6, 32) & 2,
        "the minus 1 was computed in uint8, where 0 − 1 is 255": (codes.reshape(6, 32) - np.uint8(1)).astype(float),
    }
    expect_array(run(answer, packed), right, mistakes=mistakes)
    return "It is what every kernel does with each byte."


def entropy_by_row(w_t: Array) -> float:
    """The mean over the rows of -sum p log2 p, in bits per weight."""
    p = np.stack([(w_t == value).mean(axis=1) for value in (-1, 0, 1)])
    return float(-(p * np.log2(np.where(p > 0, p, 1))).sum(axis=0).mean())


@exercise("1.rows")
def unlike_rows(answer: Any, planes: Mapping[str, TernaryWeight]) -> str:
    if not isinstance(answer, str) or answer not in planes:
        raise Wrong(f"The name of a matrix is wanted, a key of planes, not {describe(answer)}.")
    bits = {name: entropy_by_row(w.ternary()) for name, w in planes.items()}
    right = min(bits, key=lambda name: bits[name])
    w_t = planes[right].ternary()
    if answer == max(bits, key=lambda name: bits[name]):
        raise Wrong(f"Its rows have {bits[answer]:.3f} bits, the most of all: the least is asked.")
    if answer != right:
        raise Wrong(
            f"The rows of {answer} have {bits[answer]:.3f} bits on the average, and those of another matrix have less. "
            "Take the entropy of each row alone, then the mean."
        )
    zeros = (w_t == 0).mean(axis=1)
    learned = np.log2(w_t.shape[1]) / w_t.shape[1]  # half of log2 K bits for each of two free shares of a row
    return (
        f"Its rows have {zeros.min():.0%} to {zeros.max():.0%} of zeros and {bits[right]:.2f} bits on the average: "
        f"{bits[right] + learned:.2f} if each row's shares must be told, too."
    )


@exercise("1.hf")
def rows_far_apart(answer: Any) -> str:
    right = draws(16).integers(-1, 2, (24, 8)).astype(np.int8)
    plane = packing.hf_from_ternary(right)
    codes = np.stack([plane >> shift & 3 for shift in (0, 2, 4, 6)]).astype(np.int8) - 1  # (4, R, K)
    mistakes = {
        "the four rows of a byte are R apart, not neighbours": codes.swapaxes(0, 1).reshape(24, 8),
        "the first quarter of the rows lies in the lowest bits; you began with the highest": np.concatenate(
            list(codes[::-1])
        ),
        "those are four neighbours of a row, as in this package's own order": codes.transpose(1, 2, 0).reshape(24, 8),
        "the codes are 0, 1, 2: take 1 away": right + 1,
        BRACKETS: right + 1 & 2,
        "& 3 is missing: the codes above are still there": np.concatenate(
            [(plane >> shift).astype(np.int8) - np.int8(1) for shift in (0, 2, 4, 6)]
        ),
        "the minus 1 was computed in uint8, where 0 − 1 is 255": right.astype(np.int64) % 256,
    }
    mine = as_array(run(answer, plane))
    if mine.size == right.size and mine.shape[0] == len(plane):
        raise Wrong(
            f"Its shape is {mine.shape}, not {right.shape}, and a reshape would misplace the weights: the "
            "four of a byte belong to four rows, R apart. The quarters of the rows must be the first axis."
        )
    expect_array(mine, right, mistakes=mistakes)
    return "Of the same bytes, another matrix than unpack_four would make."


@exercise("1.4")
def scale_again(answer: Any, ternary: Array) -> str:
    used = float((ternary != 0).mean())
    mistakes = {
        "The new scale is smaller, not larger: yours is the true scale divided by the new one.": 1 / used,
        "That is the share of zeros. Which share keeps its absolute value?": 1 - used,
        "The scale does not survive: the zeros pull the mean down.": 1.0,
        "That is one sign only; −s and +s have the same absolute value.": used / 2,
    }
    expect_number(answer, used, within=2e-3, mistakes=mistakes, hint="Which share of the matrix is not 0?")
    return "Absmean of a matrix that is ternary already makes its scale too small by the share of non-zeros."


judged_by_table("1.harmless")


@exercise("1.backwards")
def turned_scales(answer: Any, model: Model, with_weights: Callable[..., Model]) -> str:
    """with_weights: the notebook's own."""
    for kinds in (("q_proj",), ("v_proj", "down_proj"), ()):
        turned = run(answer, *kinds)
        if not isinstance(turned, Model):
            raise Wrong(f"A model is wanted, as with_weights returns it, not {describe(turned)}.")
        for number, (before, after) in enumerate(zip(model.weights.layers, turned.weights.layers, strict=True)):
            for kind, w in before.linears():
                what, mine = f"{kind} of block {number}", getattr(after, kind)
                assert isinstance(w, TernaryWeight)
                if not isinstance(mine, TernaryWeight):
                    raise Wrong(f"{what} is no matrix now but {describe(mine)}: replace(w, ...) makes one.")
                s, scale = float(w.w_dequant_scale), as_number(mine.w_dequant_scale)
                right = 1 / s if kind in kinds else s
                if not np.array_equal(mine.packed, w.packed):
                    raise Wrong(f"The weights of {what} are others now: change the scale alone.")
                if abs(scale - right) <= 1e-5 * right:
                    continue
                if kind not in kinds:
                    raise Wrong(f"{what} was not asked for (kinds is {kinds}), and its scale is another now.")
                if scale == s:
                    raise Wrong(f"The scale of {what} is still {s:.4f}: it should be 1 / {s:.4f}.")
                sign = " The sign is not turned: the scale is." if scale < 0 else ""
                raise Wrong(f"The scale of {what} is {scale:.4g}, not 1 / {s:.4f} = {right:.4g}.{sign}")
    return "One line of a wrong program. Each output of these matrices is now 100 to 240 times too large."


# -- 2: BitLinear --------------------------------------------------------------------------------------------------


@exercise("2.1")
def absmax(answer: Any) -> str:
    x = draws(24).normal(size=(6, 64)).astype(np.float32)
    x[0] = np.arange(64, dtype=np.float32) - 31.5  # ties, since the scale is 1
    x[0, 0] = 127
    right_q, right_a = quantization.quantize_activations(x)
    x_q, a = map(as_array, as_parts(run(answer, x), 2, "Two arrays are wanted, x_q and a."))
    if a.shape in ((1, x.shape[1]), (x.shape[1],)):
        raise Wrong("a: a scale for each feature. Each token has its own: axis=-1, keepdims=True.")
    if a.size == 1:
        raise Wrong("a: one scale for all tokens. Each token has its own: axis=-1, keepdims=True.")
    scales = {
        "the scale is 1 / a: a multiplies x": 1 / right_a,
        "one scale for all tokens; each token has its own (axis=-1)": np.full_like(right_a, right_a.min()),
        "the factor is 127, not 128": right_a * 128 / 127,
        "the maximum is of |x|; yours is of x": 127 / x.max(-1, keepdims=True),
        "the mean of |x| is taken, and the maximum is wanted": 127 / np.abs(x).mean(-1, keepdims=True),
    }
    with said_of("a:"):
        expect_array(a, right_a, mistakes=scales)
    scaled = x * right_a
    roundings = {
        "the values are cut off, not rounded": np.trunc(scaled),
        "the values are rounded down": np.floor(scaled),
        "ties are rounded away from zero; np.rint rounds them to even": np.trunc(scaled + np.copysign(0.5, scaled)),
        "ties are rounded up; np.rint rounds them to even": np.floor(scaled + np.float32(0.5)),
        "they are not rounded": scaled,
        "they are divided by a again; the integers themselves are wanted": np.rint(scaled) / right_a,
        "x is divided by a instead of multiplied": np.rint(x / right_a),
    }
    with said_of("x_q:"):
        expect_array(x_q, right_q, mistakes=roundings)
    return "The integers of every BitLinear in the model are made so."


@exercise("2.2")
def doubled(answer: Any) -> str:
    right = {"x_q": 1.0, "x_quant_scale": 0.5, "acc": 1.0, "y": 2.0}
    if not isinstance(answer, Mapping) or set(answer) != set(right):
        raise Wrong(f"A dict with the keys {', '.join(right)} is wanted.")
    reasons = {
        "x_q": "The largest entry becomes 127, however large it was",
        "x_quant_scale": "a = 127 / max|x|, and the maximum is twice as large",
        "acc": "It is made of x_q and the weights alone",
        "y": "The layer is linear but for rounding, and the rounding is the same",
    }
    for name, factor in right.items():
        if as_number(answer[name]) != factor:
            raise Wrong(f"{name} is not {as_number(answer[name]):g} times what it was. {reasons[name]}.")
    return "Exactly so, because 2 is a power of two: the integers do not see the size of a token."


class Unmultiplied(np.ndarray[Any, Any]):
    """An array that raises Wrong where it is multiplied."""

    PRODUCTS = (np.multiply, np.matmul, np.dot, np.vdot, np.outer, np.einsum, np.inner, np.tensordot)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        self.expect_no_product(ufunc)
        if "out" in options:
            options["out"] = tuple(np.asarray(each) for each in options["out"])
        if "where" in options:
            options["where"] = np.asarray(options["where"])
        plain = (np.asarray(each) if isinstance(each, Unmultiplied) else each for each in inputs)
        result = getattr(ufunc, method)(*plain, **options)
        return result.view(Unmultiplied) if isinstance(result, np.ndarray) else result

    def __array_function__(self, function: Any, *rest: Any) -> Any:
        self.expect_no_product(function)
        return super().__array_function__(function, *rest)

    def dot(self, *_: Any) -> Any:
        self.expect_no_product(np.dot)

    def expect_no_product(self, function: Any) -> None:
        if function in self.PRODUCTS:
            raise Wrong("It is equal, but it multiplies. Sum the activations whose weight is +1, and those of −1.")


@exercise("2.3")
def without_products(answer: Any) -> str:
    draw = draws(22)
    x_q = draw.integers(-127, 128, (5, 64)).astype(np.int8)
    w_t = draw.integers(-1, 2, (7, 64)).astype(np.int8)
    right = x_q.astype(np.int32) @ w_t.T.astype(np.int32)
    plus, all_ = x_q @ (w_t == 1).T.astype(np.int32), x_q.sum(1, keepdims=True, dtype=np.int32)
    mistakes = {
        "the sums overflow int8: give the sum dtype=np.int32": right.astype(np.int8),
        "the sums overflow int16 or int8 before they are subtracted": (right & 0xFF),
        "the inputs with weight −1 are not subtracted": plus,
        "they are added where the weight is −1, too": x_q.astype(np.int32) @ np.abs(w_t).T.astype(np.int32),
        "weights of 0 are subtracted, too": plus - (all_ - plus),
    }
    expect_array(run(answer, x_q, w_t), right, mistakes=mistakes)
    expect_array(run(answer, x_q.view(Unmultiplied), w_t.view(Unmultiplied)), right)
    return "A matrix product without a multiplication, and equal."


judged_by_table("2.4")


@exercise("2.5")
def ties_to_even(answer: Any) -> str:
    ties = np.arange(-6, 6) + 0.5
    numbers = np.concatenate([ties, np.arange(-2.0, 3.0), draws(25).normal(0, 20, 50)])
    mistakes = {
        "ties always go up": np.floor(numbers + 0.5),
        "ties always go down": np.ceil(numbers - 0.5),
        "ties go away from zero, as C's round() does": np.trunc(numbers + np.copysign(0.5, numbers)),
        "ties go towards zero": np.copysign(np.ceil(np.abs(numbers) - 0.5), numbers),
        "ties go to the odd neighbour": np.where(
            numbers % 1 == 0.5, 2 * np.floor(numbers) + 1 - np.rint(numbers), np.rint(numbers)
        ),
        "that truncates: what is above a half must go up": np.trunc(numbers),
        "that is the floor: what is above a half must go up": np.floor(numbers),
    }
    expect_array(run(answer, numbers), np.rint(numbers), mistakes=mistakes, exact=True)
    if forbidden := sorted(names_in(answer) & {"rint", "round", "around"}):
        raise Wrong(f"It is equal, but it uses {forbidden[0]}, and the chip has none. Write it from floor.")
    below = np.array([np.nextafter(0.5, 0), -np.nextafter(0.5, 0)])
    if as_array(run(answer, below)).any():
        raise Wrong(f"{below[0]} is below a half, and becomes 1: adding 0.5 rounds. Compare x − floor(x) with 0.5.")
    large = 2.0**52 + np.array([1, 3])  # float64 has every integer here, and nothing between two
    if not np.array_equal(as_array(run(answer, large)), large):
        raise Wrong(f"{large[0]:.0f} is an integer, and becomes another one: adding 0.5 rounds. Add nothing to x.")
    return "And no sum was rounded on the way: x − floor(x) is exact."


def names_in(function: Any) -> set[str]:
    """The names that a function's code uses, and the functions in it; of one that is not written in Python its own."""
    code = function if isinstance(function, CodeType) else getattr(function, "__code__", None)
    if code is None:
        return {getattr(function, "__name__", "")}
    return set(code.co_names).union(*(names_in(each) for each in code.co_consts if isinstance(each, CodeType)))


STEPS = {  # and what makes a right one look wrong
    "quantise": "Compare x_q and a with those of quantize_activations, as values.",
    "product": "A product of int8 wraps in NumPy: make x_q and w_t int32 first.",
    "rescale": "int32 times float32 is float64 in NumPy: make acc float32 first. And s / a comes first.",
}


@exercise("2.6")
def steps_at_fault(answer: Any) -> str:
    draw = draws(26)
    x = np.clip(draw.normal(size=(8, 256)), -3.9, 3.9).astype(bfloat16).astype(np.float32)
    x[:4, 0] = 127 / 32  # the scale is 32, and bfloat16 gives ties
    w_t, s = draw.integers(-1, 2, (24, 256), dtype=np.int8), np.float32(draw.uniform(0.02, 0.1))
    faults: list[tuple[dict[str, Any], set[str], str]] = [
        ({}, set(), "An engine that is right in every step."),
        ({"kept": np.float32}, set(), "An engine that is right, and keeps its integers in float32."),
        ({"inputs": np.int8}, set(), "An engine that is right, whose x_q is int8: sums of int8 overflow in NumPy."),
        ({"ties": away_from_zero}, {"quantise"}, "An engine that rounds ties away from zero."),
        ({"per_token": False}, {"quantise"}, "An engine with one scale for all tokens."),
        ({"scale_off": True}, {"quantise"}, "An engine whose x_q is right, and whose a is not, by its last bit."),
        ({"sums": bfloat16}, {"product"}, "An engine that rounds its sums to bfloat16."),
        ({"other_brackets": True}, {"rescale"}, "An engine that writes acc · s / a: off by the last bit."),
        ({"ties": away_from_zero, "other_brackets": True}, {"quantise", "rescale"}, "An engine with two faults."),
        ({"sums": bfloat16, "other_brackets": True}, {"product", "rescale"}, "An engine with two faults."),
    ]
    for changes, right, what in faults:
        names = run(answer, x, w_t, s, other_bit_linear(x, w_t, s, **changes))
        if not isinstance(names, (list, tuple, Set, np.ndarray)) or not {str(name) for name in names} <= set(STEPS):
            raise Wrong(f"A set of 'quantise', 'product' and 'rescale' is wanted, not {describe(names)}.")
        given = {str(name) for name in names}
        if not changes and given:
            raise Wrong(f"{what} {min(given)!r} is not to blame there. {STEPS[min(given)]}")
        if given - right:
            raise Wrong(
                f"{what} {min(given - right)!r} is not to blame there: judge a step by what it was given, their acc by "
                "their x_q, and their y by their acc and their a. Equal values may be of another type."
            )
        if right - given:
            raise Wrong(
                f"{what} {min(right - given)!r} is to blame, and is missing. Look at all three steps (x_q and a both "
                "belong to quantise), and compare with ==: no tolerance sees a last bit."
            )
    return "Each step is judged by its own input. So one fault does not hide behind another."


def away_from_zero(x: Array) -> Array:
    rounded: Array = np.trunc(x + np.copysign(np.float32(0.5), x))
    return rounded


def other_bit_linear(
    x: Array,
    w_t: Array,
    s: np.float32,
    *,
    ties: Callable[[Array], Array] = np.rint,
    per_token: bool = True,
    scale_off: bool = False,
    sums: Any = np.int32,
    kept: Any = np.int32,
    inputs: Any = None,
    other_brackets: bool = False,
) -> dict[str, Array]:
    """What an engine computes for x (N, K), with its faults: x_q and a, acc, y."""
    a = np.float32(127) / np.abs(x).max(axis=-1, keepdims=True)
    if not per_token:
        a = np.full_like(a, a.min())
    x_q = ties(x * a)
    if scale_off:
        a = np.nextafter(a, np.float32(0))
    acc = (x_q.astype(np.int32) @ w_t.T.astype(np.int32)).astype(sums).astype(kept)
    wide = acc.astype(np.float32)
    return {
        "x_q": x_q.astype(inputs or kept),
        "a": a,
        "acc": acc,
        "y": wide * s / a if other_brackets else wide * (s / a),
    }


def four_engines(x: Array, w_t: Array, s: np.float32) -> dict[str, dict[str, Array]]:
    """The engines of notebook 2, by letter: what each computes for x."""
    return {
        "A": other_bit_linear(x, w_t, s, other_brackets=True),
        "B": other_bit_linear(x, w_t, s),
        "C": other_bit_linear(x, w_t, s, sums=bfloat16),
        "D": other_bit_linear(x, w_t, s, ties=away_from_zero, other_brackets=True),
    }


# -- 5: files ------------------------------------------------------------------------------------------------------


@exercise("5.1")
def one_question(answer: Any) -> str:
    draw = draws(51)
    place = draw.permutation(128).reshape(8, 16)  # of each weight: four in a byte, 32 bytes

    def unpack(data: Array) -> Array:
        return (np.asarray(data, dtype=np.uint8)[place // 4] >> (2 * (place % 4)) & 3).astype(np.int8) - 1

    none, every, number = np.zeros(32, dtype=np.uint8), np.full(32, 0b10101010, dtype=np.uint8), place // 4
    for bit in range(5):
        mistakes = {
            "bit 0 is the lowest; yours run the other way": number >> (4 - bit) & 1,
            "`number & bit` asks for other bits: shift the number by `bit` first": (number & bit) != 0,
            "it is shifted by one too many": number >> (bit + 1) & 1,
            "the bytes are compared with `bit`; a bit of their number is wanted": number == bit,
            "nothing is mixed": number >= 0,
        }
        got = as_array(run(answer, unpack, none, every, bit))
        if (got == -1).any():
            raise Wrong("Those are the weights that came out. Which of them say yes? True and False are wanted.")
        expect_array(got, (number >> bit & 1).astype(bool), mistakes=mistakes)
    return (
        "It relies on one thing: a byte alone decides each weight. TL2 keeps signs apart, so it is asked with 0 and +1."
    )


@exercise("5.2")
def place_in_i2_s(answer: Any, addresses: Array) -> str:
    pair = as_array(answer).ravel()
    if pair.size != 2:
        raise Wrong("Two numbers are wanted, (byte, shift).")
    byte, shift = (as_number(each) for each in pair)
    right = int(addresses[5, 77])
    if byte != right:
        plain = {
            77 % 32: "that is its byte in row 0",
            10 * 32 + 77 // 4: "four neighbours do not share one; in a block, weights 32 apart do",
            10 * 128 + 13: "bytes, not weights",
        }
        raise Wrong(f"It is another byte{': ' + plain[int(byte)] if int(byte) in plain else ''}.")
    if shift != 2:
        reverse = " The first 32 weights of a block are in the highest bits, not the lowest." * (shift == 4)
        raise Wrong(f"The byte is right, the shift is not.{reverse}")
    return "Weight 1357 of the line is number 77 of block 10."


@exercise("5.3")
def codes_reversed(answer: Any) -> str:
    data = np.arange(256, dtype=np.uint8)
    right = data >> 6 | (data >> 4 & 3) << 2 | (data >> 2 & 3) << 4 | (data & 3) << 6
    bits = np.packbits(np.unpackbits(data[:, None], axis=1)[:, ::-1], axis=1).ravel()
    mistakes = {
        "the eight bits are reversed; the order within each code must stay": bits,
        "only the halves of the byte are exchanged": data >> 4 | data << 4,
        "the bytes are in another order; the codes in each byte are to be": data[::-1],
        "the codes are as they were": data,
        "codes two and three are still in their old places": data >> 6 | data & 0b00111100 | (data & 3) << 6,
    }
    expect_array(run(answer, data), right, mistakes=mistakes)
    return "TQ2_0 from I2_S, byte for byte."


@exercise("5.4")
def reader_of_tq2_0(answer: Any) -> str:
    draw = draws(54)
    w_t = draw.integers(-1, 2, (6, 512), dtype=np.int8)
    data = blocks_from_ternary(w_t, float(draw.uniform(0.01, 0.1)), "TQ2_0").ravel()
    scale = data[64:66]
    right = float(scale.view(np.float16)[0])
    wanted = "Two results are wanted: the weights, of the given shape, and the scale."
    mine, its_scale = as_parts(run(answer, data, w_t.shape), 2, wanted)
    halves = w_t.reshape(-1, 2, 4, 32)
    fields, flipped = data.reshape(-1, 66)[:, :64].reshape(-1, 2, 32), np.flip(halves, 2)
    shifts = np.array([0, 2, 4, 6])[:, None]
    mistakes = {
        "those are the codes; a code is w + 1": w_t + 1,
        "the lowest bits hold the first 32 weights of a half, as the picture has it": flipped,
        "the four codes of a byte are 32 weights apart, not neighbours": halves.swapaxes(2, 3),
        "a byte's codes are 32 weights apart, not 64: a block has two halves of 32 bytes": (
            (fields.reshape(-1, 1, 64) >> shifts & 3).astype(np.int8) - 1
        ),
        "1 is taken from an unsigned byte: 0 − 1 is 255": (w_t.astype(np.int64)) % 256,
        "the weights are scaled already; −1, 0 and +1 are wanted": w_t * right,
        "the codes above it are still there: & 3 is missing": (fields[:, :, None] >> shifts).astype(np.int16) - 1,
        "code 0 is −1, 1 is 0 and 2 is +1; you took them for 0, 1 and −1": np.array([0, 1, -1])[w_t + 1],
        "the scale comes last: a block begins with its 64 bytes of codes": (
            (data.reshape(-1, 66)[:, 2:].reshape(-1, 2, 1, 32) >> shifts & 3).astype(np.int8) - 1
        ),
        "the weights of the file are rows, one after the other; you filled columns": w_t.reshape(512, 6).T,
        "the codes of a byte are 32 weights apart, not neighbours, and the first is in the lowest bits": (
            flipped.swapaxes(2, 3)
        ),
    }
    expect_array(mine, w_t, mistakes={sentence: np.reshape(wrong, (6, 512)) for sentence, wrong in mistakes.items()})
    wrong = {
        "Its two bytes are exchanged: the lower one comes first.": scale[::-1].copy().view(np.float16)[0],
        "Those are its bits as an integer; read them as float16.": scale.view(np.uint16)[0],
        "That is read as bfloat16.": (scale.view(np.uint16).astype(np.uint32) << 16).view(np.float32)[0],
        "Those are the block's first two bytes, which are codes; it ends in the scale.": data[:2].view(np.float16)[0],
        "That is 1 over the scale; it is stored as it is.": 1 / np.float16(right),
    }
    expect_number(its_scale, right, mistakes=wrong, hint="The scale is the float16 in the last two bytes of a block.")
    return "A reader of a GGUF type, in four lines."


@exercise("5.5")
def byte_of_five(answer: Any) -> str:
    weights = np.array(list(itertools.product((-1, 0, 1), repeat=5)))
    powers = 3 ** np.arange(5)[::-1]
    number = (weights + 1) @ powers
    backwards = (weights + 1) @ powers[::-1]
    mistakes = {
        "that is the number of 243, as in base 3; TQ1_0 has it as a fraction of 256": number,
        "the fraction is rounded up, so that the digits come back": number * 256 // 243,
        "the fraction is rounded up, not to the nearest": np.rint(number * 256 / 243),
        "the first weight is the highest digit; yours is the lowest": -(-backwards * 256 // 243),
        "a digit is w + 1": -(-(weights @ powers) * 256 // 243),
        "243 are to fill 256, not 255": -(-number * 255 // 243),
    }
    got = [as_number(run(answer, each)) for each in weights.tolist()]
    expect_array(np.array(got), -(-number * 256 // 243), mistakes=mistakes, exact=True)
    return "All 243. Multiply by 3, and what passes 256 is the first digit: no division."


@exercise("5.6")
def proof_of_a_conversion(answer: Any) -> str:
    draw = draws(55)
    before = {
        name: (draw.integers(-1, 2, (8, 16), dtype=np.int8), np.float32(draw.uniform(0.01, 0.1))) for name in "qkv"
    }
    t, s = before["k"]
    n, m = np.argwhere(t != t[0, 0])[0]
    swapped = t.copy()
    swapped[0, 0], swapped[n, m] = t[n, m], t[0, 0]
    cases: list[tuple[dict[str, Any], set[str], str]] = [
        (dict(before), set(), "Two equal files differ in nothing."),
        (before | {"k": (-t, s)}, {"k"}, "In one of the matrices all signs are turned."),
        (before | {"k": (swapped, s)}, {"k"}, "Two weights have changed places: all shares and sums are the same."),
        (before | {"k": (t, 1 / s)}, {"k"}, "The weights are equal, and a scale is not."),
        (
            before | {"k": (t, np.nextafter(s, np.float32(1)))},
            {"k"},
            "A scale is off by its last bit: that is not equal.",
        ),
        ({"q": before["q"], "v": before["v"]}, {"k"}, "A matrix of the first file is missing in the second."),
        (before | {"new": before["q"]}, {"new"}, "The second file has a matrix that the first has not."),
        (before | {"q": (before["q"][0].T, s), "v": (-t, s)}, {"q", "v"}, "Two matrices differ, one of them in shape."),
    ]
    for after, right, what in cases:
        names = run(answer, before, after)
        if not isinstance(names, (list, tuple, Set, np.ndarray)):
            raise Wrong(f"A list of names is wanted, not {describe(names)}.")
        if {str(name) for name in names} != right:
            raise Wrong(f"{what} The names are {sorted(right)}, and yours are {sorted(map(str, names))}.")
    return "That is most of what convert does before it gives a file its name."


TRAPS = ("none", "layout", "scale", "gate")


@exercise("5.7")
def caught_in_a_trap(answer: Any, patients: Mapping[str, Model], model: Model) -> str:
    """patients: models read from files of `model`."""
    evidence = {
        "none": "it is sound: scales far below 1, ReLU², and columns that go with the norm before them",
        "layout": "its columns' non-zeros have nothing to do with the norm before them",
        "scale": "look at w_dequant_scale: the mean of |W| of a trained matrix is far below 1",
        "gate": "its matrices and scales are those of the sound one; it computes something else with them",
    }
    for patient, cause in expect_names(answer, patients, TRAPS):
        right = trap_of(patients[patient], model)
        if cause != right:
            raise Wrong(f"{patient} is not {cause!r}: {evidence[right]}.")
    return "Change the seed for four others."


def trap_of(patient: Model, model: Model) -> str:
    """Which of TRAPS it was read by, if `model` is the right reading."""
    if patient.config.activation != model.config.activation:
        return "gate"
    pairs = zip(dict(patient.weights.linears()).values(), dict(model.weights.linears()).values(), strict=True)
    ternary = [(a, b) for a, b in pairs if isinstance(a, TernaryWeight) and isinstance(b, TernaryWeight)]
    if not all(np.array_equal(a.packed, b.packed) for a, b in ternary):
        return "layout"
    return "none" if all(a.w_dequant_scale == b.w_dequant_scale for a, b in ternary) else "scale"


judged_by_table("5.8")
