"""AdamW and Muon, clipping by the global norm, and learning-rate schedules.

Sources: "Decoupled Weight Decay Regularization" (arXiv:1711.05101), as torch.optim.AdamW computes it; "Muon: An
optimizer for hidden layers in neural networks" (Jordan et al., 2024), with the step size and the weight decay of "Muon
is Scalable for LLM Training" (arXiv:2502.16982).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import ConfigError, require_number
from ..reference.layers import Floats
from . import ops

MUON_MOMENTUM = 0.95
LAYERS = ".layers."  # in the names of their masters, as opposed to the embedding, the last norm and the head


@dataclass
class AdamW:
    """m and v are running means of the gradient and of its square; `step` counts the updates.

        m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
        w = w (1 - lr decay) - lr / (1 - b1^step) m / (sqrt(v / (1 - b2^step)) + eps)

    Only matrices decay: not norms, not biases. Raises ConfigError for betas that give no running means, and for eps 0.
    """

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    step: int = 0
    m: dict[str, Floats] = field(default_factory=dict)
    v: dict[str, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"expected two numbers from 0 to below 1, got {self.betas}", field="betas")
        require_number("eps", self.eps)

    def update(
        self,
        masters: Mapping[str, Floats],
        gradients: Mapping[str, Floats],
        lr: float,
        weight_decay: float,
        run: Callable[..., Iterable[Any]] = map,
        functions: Any = ops,
    ) -> None:
        """One step, in place. run: `map`, or that of a pool of threads. functions: what stands in for `ops`."""
        self.step += 1
        b1, b2 = self.betas
        step_size, v_scale = lr / (1 - b1**self.step), math.sqrt(1 - b2**self.step)

        def update_one(name: str) -> None:
            w = masters[name]
            for moments in self.moments(name, w):
                if name not in moments:
                    moments[name] = np.zeros_like(w)
            keep = 1 - lr * weight_decay if w.ndim > 1 else 1.0
            if len(self.moments(name, w)) == 1:
                ops.muon(w, gradients[name], self.m[name], MUON_MOMENTUM, keep, lr, functions.product)
                return
            rates = ops.AdamRates(b1, b2, v_scale, self.eps, keep, step_size)
            functions.adamw(w, gradients[name], self.m[name], self.v[name], rates)

        list(run(update_one, masters))

    def moments(self, name: str, master: Floats) -> tuple[dict[str, Floats], ...]:
        """The running means that a master has: m and v; of Muon's matrices m alone."""
        return self.m, self.v


class Muon(AdamW):
    """Muon for the matrices of the layers, AdamW for the embedding, the head, norms and biases.

        m = 0.95 m + g        u = g + 0.95 m, made orthogonal: U V^T of its singular value decomposition U S V^T, nearly
        w = w (1 - lr decay) - lr 0.2 sqrt(max(rows, columns)) u

    So each value of u moves by about 0.2 lr, as AdamW's do, and one learning rate is for both.
    """

    def moments(self, name: str, master: Floats) -> tuple[dict[str, Floats], ...]:
        return (self.m,) if master.ndim == 2 and LAYERS in name else (self.m, self.v)


def global_norm(
    gradients: Mapping[str, Floats], run: Callable[..., Iterable[Any]] = map, functions: Any = ops
) -> float:
    """sqrt of the sum of all squares, in float64."""
    return math.sqrt(math.fsum(run(functions.sum_of_squares, gradients.values())))


def clip_gradients(
    gradients: Mapping[str, Floats],
    max_norm: float,
    run: Callable[..., Iterable[Any]] = map,
    functions: Any = ops,
) -> float:
    """Scale all gradients, in place, so that their global norm is at most `max_norm`.   -> the norm before"""
    norm = global_norm(gradients, run, functions)
    if norm > max_norm:
        list(run(lambda g: np.multiply(g, max_norm / norm, out=g), gradients.values()))
    return norm


@dataclass(frozen=True)
class Schedule:
    """Learning rate and weight decay of each step.

    constant: `lr` throughout.
    cosine: from `lr` down to `min_lr` along half a cosine.
    two-stage: the recipe published for b1.58. The rate falls linearly from `lr` towards half way, there drops to
        `second_lr`, and falls linearly to 0; weight decay ends half way. The loss falls once more at the switch.
        Source: "The Era of 1-bit LLMs: Training Tips, Code and FAQ", 2024.
    warmup-stable-decay: `lr` until the last `decay_steps`, in which it falls to `min_lr` as 1 - sqrt(done). It can run
        on without an end in sight, and end from any checkpoint: more steps, of which the last ones decay.
        Source: "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations" (arXiv:2405.18392).
    The first `warmup_steps` raise the rate linearly from 0.
    """

    kind: str = "constant"
    lr: float = 1e-3
    total_steps: int = 0  # 0: unknown; only "constant" allows it
    warmup_steps: int = 0
    min_lr: float = 0.0
    second_lr: float | None = None  # None: two thirds of lr, as in the published 1.5e-3 -> 1e-3
    weight_decay: float = 0.1
    decay_steps: int | None = None  # of "warmup-stable-decay"; None: a fifth of all

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise ConfigError(f"expected one of {', '.join(SCHEDULES)}, got {self.kind!r}", field="schedule")
        for name in ("lr", "min_lr", "weight_decay"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 <= value < math.inf):
                raise ConfigError(f"expected a finite number >= 0, got {value!r}", field=name)
        if self.kind != "constant" and self.total_steps < 1:
            message = f"a {self.kind} schedule needs the number of steps, got {self.total_steps}"
            raise ConfigError(message, field="total_steps")

    def at(self, step: int) -> tuple[float, float]:
        """(learning rate, weight decay) of step 0, 1, ..."""
        lr, decay = SCHEDULES[self.kind](self, step)
        if step < self.warmup_steps:
            lr *= (step + 1) / self.warmup_steps
        return lr, decay


def _cosine(schedule: Schedule, step: int) -> tuple[float, float]:
    done = min(1.0, step / schedule.total_steps)
    lr = schedule.min_lr + (schedule.lr - schedule.min_lr) * (1 + math.cos(math.pi * done)) / 2
    return lr, schedule.weight_decay


def _two_stage(schedule: Schedule, step: int) -> tuple[float, float]:
    remaining = max(0.0, 1 - step / schedule.total_steps)
    if step < schedule.total_steps / 2:
        return schedule.lr * remaining, schedule.weight_decay
    second = schedule.lr * 2 / 3 if schedule.second_lr is None else schedule.second_lr
    return second * remaining, 0.0


def _warmup_stable_decay(schedule: Schedule, step: int) -> tuple[float, float]:
    steps = schedule.total_steps // 5 if schedule.decay_steps is None else schedule.decay_steps
    done = max(0.0, 1 - (schedule.total_steps - step) / max(1, steps))
    return schedule.min_lr + (schedule.lr - schedule.min_lr) * (1 - math.sqrt(min(1.0, done))), schedule.weight_decay


SCHEDULES: dict[str, Callable[[Schedule, int], tuple[float, float]]] = {
    "constant": lambda schedule, step: (schedule.lr, schedule.weight_decay),
    "cosine": _cosine,
    "two-stage": _two_stage,
    "warmup-stable-decay": _warmup_stable_decay,
}

OPTIMIZERS: dict[str, type[AdamW]] = {"adamw": AdamW, "muon": Muon}
