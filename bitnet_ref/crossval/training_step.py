"""A training step on every backend: against NumPy's, and NumPy's own gradients against the slope of its loss."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..reference.config import ModelConfig
from ..training import Trainer
from ..training.network import Masters, master_shapes
from ..training.optimizer import global_norm
from ..training.trainer import BACKENDS as TRAINING_BACKENDS
from ..training.trainer import to_host
from .tolerances import GRADIENTS

__all__ = ["TRAINING_BACKENDS", "check_training"]

SLOPE_ERROR = 1e-5  # relative, of a central difference in float64: measured 8e-7
NORM_ERROR = 1e-9  # relative, of a sum in float64 in another order: measured 2e-15
UPDATE_ERROR = 1e-6  # relative: the same operations in float32, measured 0


def check_training(backend: str, config: ModelConfig) -> tuple[int, str | None, str]:
    """One step of a model with this config and drawn masters.   -> numbers compared, the problem or None, the result"""
    config = replace(config, num_hidden_layers=min(2, config.num_hidden_layers))
    rng = np.random.default_rng(0)
    shapes = master_shapes(config).items()
    masters = {n: (rng.normal(1.0, 0.02, s) if len(s) == 1 else rng.normal(0.0, 0.02, s)) for n, s in shapes}
    tokens = rng.integers(0, config.vocab_size, (3, min(80, config.context_length)))
    if backend == "numpy":
        return _slope(config, masters, tokens)
    narrow = {name: w.astype(np.float32) for name, w in masters.items()}
    ours, theirs = (Trainer(config, narrow, backend=name) for name in ("numpy", backend))
    (loss, gradients), (their_loss, their_gradients) = (t.loss_and_gradients(tokens) for t in (ours, theirs))
    limit = GRADIENTS["dense" if config.quantization is None or backend == "cython" else "ternary"].relative_l2
    distances = {
        n: float(np.linalg.norm(to_host(their_gradients[n]) - g) / np.linalg.norm(g)) for n, g in gradients.items()
    }
    worst, count = max(distances, key=lambda name: distances[name]), sum(g.size for g in gradients.values())
    if not abs(their_loss - loss) <= limit * loss:
        return count, f"the loss is {their_loss}, NumPy's {loss}", ""
    if not distances[worst] <= limit:
        return count, f"the gradient of {worst} is {distances[worst]:.1e} from NumPy's", ""
    if problem := _updates(ours, theirs, gradients):
        return count, problem, ""
    return count, None, f"gradients within {distances[worst]:.1e} of NumPy's"


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


def _slope(config: ModelConfig, masters: Masters, tokens: np.ndarray) -> tuple[int, str | None, str]:
    """Without quantisation, in float64: the loss's slope along the gradient is the gradient's squared length."""
    trainer = Trainer(config, masters, backend="numpy")
    trainer.mix = 0.0
    _, gradients = trainer.loss_and_gradients(tokens)
    squared, losses = sum(float(np.vdot(g, g)) for g in gradients.values()), []
    step = 1e-4 / squared**0.5
    for sign in (1, -1):
        trainer.masters = {name: masters[name] + sign * step * g for name, g in gradients.items()}
        losses.append(trainer.loss(tokens))
    error = abs((losses[0] - losses[1]) / (2 * step) / squared - 1)
    count = sum(g.size for g in gradients.values())
    if not error <= SLOPE_ERROR:
        return count, f"the loss's slope along its gradient is {error:.1e} from the gradient's squared length", ""
    return count, None, f"the loss's slope within {error:.1e}"
