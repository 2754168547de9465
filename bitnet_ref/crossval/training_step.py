"""A training step on every backend: against NumPy's, and NumPy's own gradients against the slope of its loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ..reference.config import ModelConfig
from ..reference.layers import Array
from ..training import Trainer
from ..training.lora import TARGETS, FrozenModel, LoraTrainer
from ..training.network import Masters, master_shapes
from ..training.optimizer import global_norm
from ..training.trainer import BACKENDS as TRAINING_BACKENDS
from ..training.trainer import to_host
from .tolerances import BFLOAT16_GRADIENTS, GRADIENTS

__all__ = ["TRAINING_BACKENDS", "check_training", "small_models"]

SLOPE_ERROR = 1e-5  # relative, of a central difference in float64: measured 8e-7
NORM_ERROR = 1e-9  # relative, of a sum in float64 in another order: measured 2e-15
UPDATE_ERROR = 1e-6  # relative: the same operations in float32, measured 0
ODD: dict[str, Any] = {  # sizes that leave a rest in every loop of the kernels, and several blocks of queries
    "num_hidden_layers": 1,
    "vocab_size": 90,
    "hidden_size": 42,
    "intermediate_size": 70,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 6,
    "sliding_window": 75,
    "max_position_embeddings": 150,
}


def check_training(backend: str, config: ModelConfig) -> tuple[int, str | None, str]:
    """A step of each of `small_models`.   -> numbers compared, the problem or None, the result"""
    count, errors = 0, []
    for small, masters, tokens in small_models(config):
        count += sum(w.size for w in masters.values())
        for words, check in _CHECKS:
            problem, error = check(backend, small, masters, tokens)
            if problem is not None:
                return count, f"{words}{problem}", ""
            errors.append(error)
    if backend == "numpy":
        return count, None, f"the loss's slope within {max(errors):.1e}"
    return count, None, f"gradients within {max(errors):.1e} of NumPy's"


def small_models(config: ModelConfig) -> Iterator[tuple[ModelConfig, Masters, Array]]:
    """(config, masters, tokens) of a model like this one and of one with odd sizes: few layers, drawn from a seed."""
    usual = replace(config, num_hidden_layers=min(2, config.num_hidden_layers), layer_types=())
    for small in usual, replace(usual, **ODD):
        rng = np.random.default_rng(0)
        shapes = master_shapes(small).items()
        masters = {n: (rng.normal(1.0, 0.02, s) if len(s) == 1 else rng.normal(0.0, 0.02, s)) for n, s in shapes}
        length = min(80 if small is usual else 150, small.context_length)
        yield small, masters, rng.integers(0, small.vocab_size, (3, length))


def _check(backend: str, config: ModelConfig, masters: Masters, tokens: Array) -> tuple[str | None, float]:
    """The problem or None, and the largest relative error."""
    if backend == "numpy":  # without quantisation
        trainer = Trainer(config, masters, backend="numpy")
        trainer.mix = 0.0
        return _slope_of(trainer, masters, tokens)
    narrow = {name: w.astype(np.float32) for name, w in masters.items()}
    ours, theirs = (Trainer(config, narrow, backend=name) for name in ("numpy", backend))
    problem, error = _compare(ours, theirs, tokens)
    return (problem, error) if problem else (_updates(ours, theirs, ours.loss_and_gradients(tokens)[1]), error)


def _check_bfloat16(backend: str, config: ModelConfig, masters: Masters, tokens: Array) -> tuple[str | None, float]:
    """Gradients by products of bfloat16 against NumPy's of float32. Their error is not among those that are told."""
    narrow = {name: w.astype(np.float32) for name, w in masters.items()}
    ours = Trainer(config, narrow, backend="numpy")
    theirs = Trainer(config, narrow, backend=backend, backward_dtype="bfloat16")
    return _compare(ours, theirs, tokens, BFLOAT16_GRADIENTS.relative_l2)[0], 0.0


def _check_adapter(backend: str, config: ModelConfig, masters: Masters, tokens: Array) -> tuple[str | None, float]:
    """The gradients of an adapter's factors: `_check` of these, with the masters as the model below."""
    if backend == "cupy":
        return None, 0.0

    def trainer(name: str, dtype: Any, mix: float) -> LoraTrainer:
        frozen = FrozenModel.of_masters(config, {n: w.astype(dtype) for n, w in masters.items()}, mix)
        made = LoraTrainer(frozen, rank=3, targets=TARGETS, backend=name)
        dice = np.random.default_rng(1)
        for factor in made.masters.values():
            factor[:] = dice.normal(0.0, 0.01, factor.shape)
        return made

    if backend == "numpy":
        wide = trainer(backend, np.float64, 0.0)
        return _slope_of(wide, wide.masters, tokens)
    return _compare(trainer("numpy", np.float32, 1.0), trainer(backend, np.float32, 1.0), tokens)


_CHECKS = (("", _check), ("an adapter: ", _check_adapter), ("products of bfloat16: ", _check_bfloat16))


def _compare(ours: Trainer, theirs: Trainer, tokens: Array, most: float | None = None) -> tuple[str | None, float]:
    """Loss and gradients.   -> the problem or None, the largest relative error

    most: the distance of gradients that is allowed, in the place of the table's.
    """
    config, backend = ours.config, theirs.backend
    (loss, gradients), (their_loss, their_gradients) = (t.loss_and_gradients(tokens) for t in (ours, theirs))
    limit = GRADIENTS["dense" if config.quantization is None or backend == "cython" else "ternary"].relative_l2
    most = limit if most is None else most
    apart = {name: to_host(their_gradients[name]) - g for name, g in gradients.items()}
    distances = {name: float(np.linalg.norm(apart[name]) / np.linalg.norm(g)) for name, g in gradients.items()}
    worst = max(distances, key=lambda name: distances[name])
    if not abs(their_loss - loss) <= limit * loss:
        return f"the loss is {their_loss}, NumPy's {loss}", 0.0
    if not distances[worst] <= most:
        return f"the gradient of {worst} is {distances[worst]:.1e} from NumPy's", 0.0
    return None, distances[worst]


def _updates(ours: Trainer, theirs: Trainer, gradients: Masters) -> str | None:
    """Two optimiser steps by the same gradients: the norms before clipping, and the masters.   -> the problem"""
    for trainer in ours, theirs:
        trainer.max_norm = 0.5 * global_norm(gradients)
    for sign in 1, -3:  # the second one shows the means of the first
        norm, their_norm = (t.apply({n: t.to_device(sign * g) for n, g in gradients.items()}) for t in (ours, theirs))
        if not abs(their_norm / norm - 1) <= NORM_ERROR:
            return f"the gradients' norm is {their_norm}, NumPy's {norm}"
        for name, master in ours.masters.items():
            distance = float(np.linalg.norm(to_host(theirs.masters[name]) - master) / np.linalg.norm(master))
            if not distance <= UPDATE_ERROR:
                return f"the optimiser's {name} is {distance:.1e} from NumPy's"
    return None


def _slope_of(trainer: Trainer, masters: Masters, tokens: Array) -> tuple[str | None, float]:
    """In float64: the loss's slope along the gradient is the gradient's squared length."""
    _, gradients = trainer.loss_and_gradients(tokens)
    squared, losses = sum(float(np.vdot(g, g)) for g in gradients.values()), []
    step = 1e-4 / squared**0.5
    for sign in (1, -1):
        trainer.masters = {name: masters[name] + sign * step * g for name, g in gradients.items()}
        losses.append(trainer.loss(tokens))
    error = abs((losses[0] - losses[1]) / (2 * step) / squared - 1)
    if not error <= SLOPE_ERROR:
        return f"the loss's slope along its gradient is {error:.1e} from the gradient's squared length", 0.0
    return None, error
