"""A training step on every backend: against NumPy's, and NumPy's own gradients against the slope of its loss."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..reference.config import ModelConfig
from ..training import Trainer
from ..training.network import Masters, master_shapes
from ..training.trainer import BACKENDS as TRAINING_BACKENDS
from ..training.trainer import to_host
from .tolerances import GRADIENTS

__all__ = ["TRAINING_BACKENDS", "check_training"]

SLOPE_ERROR = 1e-5  # relative, of a central difference in float64: measured 8e-7


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
    return count, None, f"gradients within {distances[worst]:.1e} of NumPy's"


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
