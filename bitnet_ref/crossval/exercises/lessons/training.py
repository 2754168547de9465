"""Notebook 9: training. Gradients are judged with the wrong formulas that people write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ....reference import quantization
from ....reference.config import ModelConfig
from ....reference.layers import Array
from ..answers import as_array, as_number, as_parts, expect_array, expect_number
from ..declare import Wrong, draws, exercise, run, said_of

if TYPE_CHECKING:
    from ....training import Schedule, Trainer


@exercise("9.1")
def backward_of_a_bitlinear(answer: Any) -> str:
    draw = draws(93)
    dy, x, w = (draw.normal(size=shape).astype(np.float32) for shape in ((5, 16), (5, 24), (16, 24)))
    w *= np.float32(0.02)
    w_t, s = quantization.quantize_weights(w)
    x_q, a = quantization.quantize_activations(x)
    dx, dw = as_parts(run(answer, dy, x, w), 2, "Two gradients are wanted, dx and dW.")
    if as_array(dx).shape == w.shape and as_array(dw).shape == x.shape:
        raise Wrong("The two gradients are exchanged: dx, of the shape of x, comes first.")
    x_float = x_q / a
    of_x = {
        "the float masters are used; the forward pass used the rounded weights, W_t · s": dy @ w,
        "the scale s is missing": dy @ w_t,
        "it is divided by s instead of multiplied": dy @ w_t / s,
        "the activations' scale a does not belong here": dy @ (w_t * s) / a,
        "the activations' scale a does not belong here (and multiplies)": dy @ (w_t * s) * a,
        "only the signs of W are used; a rounded weight may also be 0": dy @ (np.sign(w) * s),
        "the slope of rounding is taken, 0; straight through, it counts as 1": 0 * x,
        "the mean over outputs is taken; the sum is right": dy @ (w_t * s) / len(w),
    }
    of_w = {
        "x is used as it was before rounding; the forward pass used x_q / a": dy.T @ x,
        "x_q is to be divided by its scale a": dy.T @ x_q.astype(np.float32),
        "x_q is multiplied by its scale a instead of divided": dy.T @ (x_q * a),
        "x_q is divided by one scale for all; each token has its own a": dy.T @ (x_q / a.min()),
        "x is used as it was before rounding, and the scale s does not belong here": dy.T @ x * s,
        "the slope of rounding is taken, 0; straight through, it counts as 1": 0 * w,
        "the scale s does not belong here: straight through, W_q stands for W": dy.T @ x_float * s,
        "the mean over tokens is taken; the sum is right": dy.T @ x_float / len(x),
        "it is divided by s": dy.T @ x_float / s,
        "what would flip a weight is set to 0; straight through, nothing is": np.where(w_t == 0, 0, dy.T @ x_float),
        "large masters get no gradient; straight through, all get theirs": np.where(np.abs(w) < s, dy.T @ x_float, 0),
    }
    for name, got, right, mistakes in (
        ("dx", dx, dy @ (w_t * s), of_x),
        ("dW", dw, dy.T @ x_float, of_w),
    ):
        with said_of(f"{name}:"):
            expect_array(got, right, mistakes=mistakes)
    return "Both gradients."


@exercise("9.2")
def runaway_master(answer: Any) -> str:
    value = as_number(answer)
    w = 0.0
    for _ in range(400):
        w -= 0.08 * (np.clip(np.rint(w), -1, 1) - 1.7)
    if abs(value - w) < 0.06:
        return "The way back to 0 is as long. Weight decay is what holds such masters."
    if abs(value - 1.7) < 0.3:
        raise Wrong("The weight cannot be 1.7, so the gradient never becomes 0: the master does not stop there.")
    if abs(value - 400 * 0.08 * 1.7) < 1:
        raise Wrong("On stair 1 the gradient is 1 − 1.7 = −0.7, no longer −1.7.")
    if abs(value - 400 * 0.08 * 0.7) < 0.06:
        raise Wrong("That is 400 steps of 0.08 · 0.7. The first steps, on stair 0, are longer.")
    if abs(value - 1) < 0.3 or abs(value - 0.5) < 0.3:
        raise Wrong("The weight stays 1, but its master goes on: what is the gradient when q = 1?")
    if value < 0:
        raise Wrong("The gradient is negative (q − t = −0.7), and descent goes against it: upwards.")
    size = "too large" if value > w else "too small"
    raise Wrong(f"{value:g} is {size}, by {abs(value - w):.2g}. Each of the 400 steps adds 0.08 · (1.7 − q).")


@exercise("9.3")
def step_of_a_bitlinear(answer: Any) -> str:
    draw = draws(94)
    w, x, target = (draw.normal(size=shape).astype(np.float32) for shape in ((6, 24), (5, 24), (5, 6)))
    w_t, s = quantization.quantize_weights(w)
    x_q, a = quantization.quantize_activations(x)
    x_float, rate = x_q / a, 0.25
    dy = (x_float @ (w_t * s).T - target) / len(x)
    right = w - rate * (dy.T @ x_float)
    mistakes = {
        "the step goes up the slope: the gradient is subtracted": w + rate * (dy.T @ x_float),
        "the mean over tokens is missing: dy is the error divided by their number": w
        - rate * len(x) * (dy.T @ x_float),
        "dy is divided by all outputs; the mean is over tokens": w - rate / len(target.T) * (dy.T @ x_float),
        "the square's factor 2 is in it; the loss has one half": w - 2 * rate * (dy.T @ x_float),
        "the forward pass takes the float masters; it rounds them": w
        - rate * ((x_float @ w.T - target) / len(x)).T @ x_float,
        "the forward pass takes x before rounding": w - rate * ((x @ (w_t * s).T - target) / len(x)).T @ x_float,
        "the gradient takes x before rounding": w - rate * (dy.T @ x),
        "nothing is rounded: that is a float layer's step; take x_q / a and W_t · s": w
        - rate * ((x @ w.T - target) / len(x)).T @ x,
        "the forward pass rounds nothing; it takes x_q / a and W_t · s": w
        - rate * ((x @ w.T - target) / len(x)).T @ x_float,
        "the weights are not rounded in the forward pass, nor x in the gradient": w
        - rate * ((x_float @ w.T - target) / len(x)).T @ x,
        "x is taken before rounding, in both passes": w - rate * ((x @ (w_t * s).T - target) / len(x)).T @ x,
        "the scale s is missing in the forward pass": w - rate * ((x_float @ w_t.T - target) / len(x)).T @ x_float,
        "the rounded weight is moved; the master is": w_t * s - rate * (dy.T @ x_float),
        "the new master is rounded; it stays a float": np.multiply(*quantization.quantize_weights(right)),
        "the product of two int8 arrays is summed in int8 and overflows: make one of them wider, or scale it, first": w
        - rate * (((x_q @ w_t.T) * (s / a) - target) / len(x)).T @ x_float,
        "that is the gradient; the new master is wanted": dy.T @ x_float,
        "the rate is missing": w - dy.T @ x_float,
        "nothing moved": w,
    }
    expect_array(run(answer, w, x, target, rate), right, mistakes=mistakes)
    return "All of training is this step, for every matrix, some thousand times."


@exercise("9.4")
def steps_to_a_threshold(answer: Any, master: Array) -> str:
    scale, size = quantization.absmean_scale(master), np.abs(master)
    inside = size[size < scale / 2]
    right = float(np.median(scale / 2 - inside) / 0.01)
    stair_0 = "Only the weights on stair 0, nearer to 0 than the threshold."
    distances = {
        "The threshold is at half of the scale.": np.median(scale - inside),
        "That is the way to 0; the threshold is on the other side.": np.median(inside),
        stair_0: np.median(np.abs(scale / 2 - size)),
        f"{stair_0} Those that are beyond it count as negative distances here.": np.median(scale / 2 - size),
        "That is the mean; the median is asked.": np.mean(scale / 2 - inside),
        "Masters are of both signs: take |master| before the distance.": np.median(
            scale / 2 - master[size < scale / 2]
        ),
        "That is half of the stair; take the median of the masters that are there.": scale / 4,
        "That is the distance: divide it by the rate.": right * 0.01 * 0.01,
        "That is the distance times the rate: divide by it.": right * 0.01**3,
    }
    value = as_number(answer)
    # Of an untrained matrix the median and the mean differ by a few thousandths, so no more than rounding is allowed.
    if abs(value - right) <= 5e-4 * right or value == round(right, 2) or value == np.ceil(right):
        return "Masters ten times as large need ten times as many: their size sets the pace."
    if value in (np.floor(right), round(right), round(right, 1)):
        raise Wrong(
            f"{value:g} is rounded too far. Give the number as the formula gives it, or whole steps, rounded up."
        )
    for sentence, distance in distances.items():
        if abs(value - distance / 0.01) <= 5e-4 * abs(distance / 0.01) or value == round(float(distance) / 0.01, 2):
            raise Wrong(sentence)
    raise Wrong(
        f"{value:.3g} is too {'many' if value > right else 'few'}: how far is the median weight from scale / 2?"
    )


@dataclass
class Losses:
    """Of a run with branches: on the exam and in training after each step of the trunk, and at each branch's end."""

    exams: list[float]
    trained: list[float]
    ends: list[float]
    trained_ends: list[float]


@exercise("9.falls")
def falls_around_a_switch(
    answer: Any,
    tiny: ModelConfig,
    new_trainer: Callable[[ModelConfig, int, Schedule], Trainer],
    branch: Callable[[Trainer, Schedule], Trainer],
    batches: Callable[[int], Iterator[Array]],
    exam: Array,
) -> str:
    """tiny: the shape that the check trains. new_trainer, branch, batches, exam: the notebook's own."""
    from ....training import Schedule  # trains: only this exercise needs it

    half, width, seed = 6, 2, 3
    plans = [
        Schedule("two-stage", lr=0.03, second_lr=rate, total_steps=2 * half, warmup_steps=2) for rate in (0.03, 0.005)
    ]
    whole, rest = range(half), range(half, half + width)  # numbers of the batches

    def losses_of(
        of_weights: int,
        of_batches: int,
        *,
        after: Sequence[Sequence[int]] = (rest, rest),
        followed: Sequence[Schedule] = plans,
        in_turn: bool = False,
    ) -> Losses:
        """after: the batches of each branch. followed: its plan. in_turn: a branch begins where the last one ended."""
        drawn = [tokens for _, tokens in zip(range(half + 2 * width + 1), batches(of_batches), strict=False)]
        trainer = new_trainer(tiny, of_weights, plans[0])
        losses = Losses([float(trainer.loss(exam))], [0.0], [], [])
        for number in whole:
            losses.trained.append(float(trainer.step(drawn[number])))
            losses.exams.append(float(trainer.loss(exam)))
        for plan, numbers in zip(followed, after, strict=True):
            one = branch(trainer, plan)
            losses.trained_ends.append([float(one.step(drawn[number])) for number in numbers][-1])
            losses.ends.append(float(one.loss(exam)))
            if in_turn:
                trainer = one
        return losses

    def around(losses: Losses, first: int = half - width, middle: int = half) -> Array:
        exams = losses.exams
        return np.array([exams[first] - exams[middle], *(exams[middle] - end for end in losses.ends)])

    own = losses_of(seed, 1 + seed)
    exams, right = own.exams, around(own)
    mistakes = {
        "a fall is the loss before minus the loss after": -right,
        "it is measured one step too early: after step number n, n + 1 steps are done": around(
            own, half - width - 1, half - 1
        ),
        "these are the losses of training; measure trainer.loss(exam)": around(
            Losses(own.trained, [], own.trained_ends, [])
        ),
        "the falls after `half` are from `half` on, not from `half - width`": np.array(
            [right[0], *(exams[half - width] - end for end in own.ends)]
        ),
        "the fall before `half` is of its last `width` steps, not from the beginning on": np.array(
            [exams[0] - exams[half], *right[1:]]
        ),
        "those are losses; the falls are differences": np.array([exams[half], *own.ends]),
        "they are divided by the steps; the whole falls are asked": right / width,
        "the seed is not used: new_trainer and batches need it": around(losses_of(0, 1)),
        "the weights begin with `seed`, and not with 0": around(losses_of(0, 1 + seed)),
        "the batches are those of 1 + seed": around(losses_of(seed, 1)),
        "the batches are those of 1 + seed, not of the seed": around(losses_of(seed, seed)),
        "from `half` on the batches are drawn anew; call batches(1 + seed) once, and go on with it": around(
            losses_of(seed, 1 + seed, after=[range(width)] * 2)
        ),
        "each branch has other batches; keep `width` of them in a list, for all branches": around(
            losses_of(seed, 1 + seed, after=[rest, range(half + width, half + 2 * width)])
        ),
        "zip takes one batch too many where range comes second, and it is lost; put range first": around(
            losses_of(seed, 1 + seed, after=[range(half + 1, half + 1 + width)] * 2)
        ),
        "a branch begins where the last one ended; each begins with the trainer of `half` steps": around(
            losses_of(seed, 1 + seed, in_turn=True)
        ),
        "a branch begins where the last one ended, and has other batches than that": around(
            losses_of(seed, 1 + seed, in_turn=True, after=[rest, range(half + width, half + 2 * width)])
        ),
        "all branches follow the first plan; each has its own": around(
            losses_of(seed, 1 + seed, followed=[plans[0]] * 2)
        ),
        "the trainer itself is trained on, by the first plan; branch gives a copy for each plan": around(
            losses_of(seed, 1 + seed, followed=[plans[0]] * 2, in_turn=True)
        ),
    }
    wanted = "Two things are wanted: the fall before `half`, and a list of the falls after it, one for each plan."
    before, after = as_parts(run(answer, tiny, plans, half, width, seed), 2, wanted)
    if np.ndim(before) or np.ndim(after) != 1:
        raise Wrong(wanted)
    mine = np.array([as_number(before), *as_array(after)])
    expect_array(mine, right, mistakes=mistakes)
    return "Now it can be asked of any model and any schedules."


@exercise("9.spread")
def difference_and_its_error(answer: Any) -> str:
    draw = draws(95)
    for seeds in (3, 6):
        # for each rate, the loss of each seed: the best rate of `one` is its third, that of `other` its second
        of_one = np.array([4.6, 4.3, 4.0, 4.2])[:, None] + draw.permutation(np.linspace(-0.1, 0.1, seeds))
        of_other = np.array([4.1, 3.6, 4.2, 4.4])[:, None] + draw.permutation(np.linspace(0, 0.5, seeds) ** 2)
        of_one[1, 0], of_other[2, 1] = 3.7, 3.1  # single lucky seeds, of rates that are not the best
        one, other = (dict(zip((0.01, 0.02, 0.04, 0.08), each.tolist(), strict=True)) for each in (of_one, of_other))
        compare_two(answer, one, other, of_one[2], of_other[1])
    return "Now ask it of your models."


def compare_two(
    answer: Any,
    one: Mapping[float, Sequence[float]],
    other: Mapping[float, Sequence[float]],
    a: Array,
    b: Array,
) -> None:
    """Raises Wrong unless the difference and the error are right.   a, b: the losses at the best rates."""
    wanted = "Two numbers are wanted: the difference, and its standard error."
    difference, error = as_parts(run(answer, one, other), 2, wanted)
    all_a, all_b = np.array([*one.values()]), np.array([*other.values()])
    lucky = all_a[np.argmin(all_a.min(axis=1))].mean() - all_b[np.argmin(all_b.min(axis=1))].mean()
    gap = float(a.mean() - b.mean())
    of_gap = {
        "It is the loss of `one` minus that of `other`; yours is the other way.": -gap,
        "Each has a best rate of its own; yours takes that of `one` for both.": a.mean() - all_b[2].mean(),
        "Each has a best rate of its own; yours takes that of `other` for both.": all_a[1].mean() - b.mean(),
        "Those are the luckiest seeds; compare the means of all seeds.": all_a.min() - all_b.min(),
        "That is the best seed at each best rate; compare the means of all seeds.": a.min() - b.min(),
        "The best rate is that of the lowest mean; yours is that of the luckiest seed.": lucky,
        "That is the mean of all rates; take the best rate of each.": all_a.mean() - all_b.mean(),
        "Lower is better: the best rate has the lowest loss.": all_a.mean(axis=1).max() - all_b.mean(axis=1).max(),
        "Those are medians; the means are asked.": np.median(a) - np.median(b),
    }
    expect_number(
        difference, gap, within=1e-6, mistakes=of_gap, hint="The difference of the two lowest means of the seeds."
    )
    n, va, vb = len(a), float(a.var(ddof=1)), float(b.var(ddof=1))
    right = float(np.sqrt((va + vb) / n))
    of_error = {
        "np.std divides by n; for the spread of a few seeds say ddof=1.": np.sqrt((a.var() + b.var()) / n),
        "That is the spread of single seeds; a mean of n varies less: divide the squares by n.": np.sqrt(va + vb),
        "That is the spread of single seeds, and with ddof=0.": np.sqrt(a.var() + b.var()),
        "The squares are added, and then the root is taken.": np.sqrt(va / n) + np.sqrt(vb / n),
        "The squares are added, each divided by n, and then the root is taken.": np.sqrt(va) + np.sqrt(vb),
        "n stands under the root.": np.sqrt(va + vb) / n,
        "The root is missing.": (va + vb) / n,
        "The spread of `other` is missing.": np.sqrt(va / n),
        "The spread of `one` is missing.": np.sqrt(vb / n),
        "n is the number of seeds of one kind.": np.sqrt((va + vb) / (2 * n)),
        "The squares are added, also for a difference.": np.sqrt(abs(va - vb) / n),
        "The number of seeds is not always 3: take len.": np.sqrt((va + vb) / 3),
        "n is the number of seeds, not of rates.": np.sqrt((va + vb) / 4),
        "That pairs the seeds; the formula takes the two spreads apart.": np.std(a - b, ddof=1) / np.sqrt(n),
        "The deviations are to be squared under the root.": np.sqrt(np.sqrt(va) / n + np.sqrt(vb) / n),
        "That is the difference over its error; the error itself is asked.": gap / right,
    }
    expect_number(
        error, right, within=1e-6, mistakes=of_error, hint="The root of the two squared deviations, each over n."
    )


@exercise("9.twice")
def scale_of_a_second_rounding(answer: Any, master: Array) -> str:
    w_t, s = quantization.quantize_weights(master)
    share, scale = float((w_t != 0).mean()), float(s)
    mistakes = {
        "The scale is the mean of |W|, and the zeros count: is it s again after the first rounding?": 1.0,
        "The other way: the second scale over the first.": 1 / share,
        "That is the share of zeros.": 1 - share,
        "That is the share of +1; |−1| counts as much.": (w_t == 1).mean(),
        "That is the second scale itself; over the first, s.": scale * share,
        "That is the first scale. By which factor is the second another?": scale,
        "That is the percentage; a factor is wanted.": 100 * share,
        "Rounded three times, that would be; after two it is the factor once.": share**2,
    }
    expect_number(answer, share, within=0.011, mistakes=mistakes, hint="The mean of |W_t · s|, over s.")
    return "The share of weights that are not 0. The −1, 0 and +1 stay: 1 / share is above a half."
