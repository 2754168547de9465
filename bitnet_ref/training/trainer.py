"""`Trainer`: the masters of a model, their gradients, and optimiser steps on batches of tokens."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.backend import blas_threads
from ..errors import ConfigError, NumericsError, ShapeError
from ..formats.hf.config import read_hf_config
from ..formats.hf.folder import SINGLE_FILE, HfCheckpoint
from ..formats.hf.writer import hf_config_json
from ..formats.safetensors import SafetensorsWriter
from ..reference.config import ModelConfig
from ..reference.weights import DenseWeight
from ..system.atomic import atomic_path
from ..system.threads import resolve_threads
from . import ops
from .distil import Distillation
from .network import EMBEDDING, Lesson, Masters, TrainingNetwork, master_shapes
from .optimizer import AdamW, Schedule, clip_gradients

Batch = NDArray | Sequence[NDArray]


class Trainer:
    """Trains the masters of a model with AdamW.

        trainer = Trainer.from_folder("model", lr=1e-3)
        loss = trainer.step(tokens)  # tokens (B, T) int
        trainer.save("trained")      # a folder that `bitnet_ref.load` takes

    Each sequence of a batch is computed by itself, in one thread, and the sequences' gradients are added in their
    order. So neither the number of threads nor the other sequences of a batch change a bit of a loss.
    """

    def __init__(
        self,
        config: ModelConfig,
        masters: Mapping[str, NDArray],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        schedule: Schedule | None = None,
        max_norm: float | None = None,
        distillation: Distillation | None = None,
        threads: int | None = None,
    ) -> None:
        """masters: hub name -> array of float32, or of float64 to measure rounding; they are copied.

        schedule: the rates of each step; by default `lr` and `weight_decay` throughout.
        max_norm: of all gradients together, larger ones are scaled down to it.
        distillation: a teacher, whose divergences are added to the loss.
        Raises ConfigError for a model that cannot be trained, and for masters that are not this model's.
        """
        self.config = config
        self.masters: Masters = {}
        for name, shape in master_shapes(config).items():
            if name not in masters:
                raise ConfigError(f"the master {name} is missing; expected an array of shape {shape}")
            if masters[name].shape != shape:
                raise ConfigError(f"the master {name} has shape {masters[name].shape}; expected {shape}")
            dtype = np.float64 if masters[name].dtype == np.float64 else np.float32
            self.masters[name] = masters[name].astype(dtype)
        self.schedule = schedule or Schedule(lr=lr, weight_decay=weight_decay)
        self.optimizer = AdamW(betas, eps)
        self.max_norm = max_norm
        if distillation is not None:
            distillation.check(config)
        self.distillation = distillation
        self.threads = resolve_threads(threads)
        self.tokenizer_files: dict[str, bytes] = {}  # name -> content, saved beside the masters
        self.functions: Any = ops  # crossval puts changed ones here
        self.mix = 1.0  # how much the linears are quantised: see `ops.StepLinear`

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str], **settings: Any) -> Trainer:
        """The masters of a Hugging Face folder: config.json beside *.safetensors in float32, bfloat16 or float16.

        settings: as of `Trainer`. Raises FormatError, ConfigError.
        """
        path = Path(folder)
        config = read_hf_config(path / "config.json")
        if config.quantization is not None and config.quantization.scale_convention != "absmean":
            message = "its linears are packed; training needs float masters (linear_class autobitlinear, mode online)"
            raise ConfigError(message, path=path / "config.json", field="quantization_config")
        with HfCheckpoint(path, config=config) as checkpoint:
            masters = {name: checkpoint.tensors.take(name, shape) for name, shape in master_shapes(config).items()}
            if config.tie_word_embeddings:
                checkpoint.check_tied_head(DenseWeight(masters[EMBEDDING]))
            checkpoint.finish()
            files = checkpoint.tokenizer_files()
        trainer = cls(config, masters, **settings)
        trainer.tokenizer_files = files
        return trainer

    # -- losses and gradients ------------------------------------------------------------------------------------------

    def loss(self, tokens: Batch) -> float:
        """The mean loss of a batch, without gradients; see `loss_and_gradients`."""
        rows, network = self._check(tokens), self._network()
        with self._workers() as pool:
            return _mean(list(pool.map(network.sequence_loss, rows)))

    def loss_and_gradients(self, tokens: Batch) -> tuple[float, Masters]:
        """The mean of -log p of every token after the first of its sequence, and its gradients.

        tokens: (B, T) int, T >= 2, or a list of sequences (T,) of any lengths; memory does not grow with B.
        -> loss in nats, {hub name: array like the master}

        Raises ShapeError for other arrays or ids outside the vocabulary, NumericsError naming the first master whose
        gradient holds NaN or Inf.
        """
        rows, network = self._check(tokens), self._network()
        weight = 1 / sum(len(row) - 1 for row in rows)

        def compute(row: NDArray, lesson: Lesson | None) -> tuple[NDArray[np.float64], Masters]:
            return network.sequence_gradients(row, weight, lesson)

        losses: list[NDArray[np.float64]] = []
        gradients: Masters = {}
        with self._workers() as pool:
            for start in range(0, len(rows), self.threads):  # no more gradients are held than there are threads
                part = rows[start : start + self.threads]
                for loss, of_row in pool.map(compute, part, [self._lesson(row) for row in part]):
                    losses.append(loss)
                    for name, gradient in of_row.items():
                        if name in gradients:
                            gradients[name] += gradient
                        else:
                            gradients[name] = gradient
        for name in self.masters:
            if not np.isfinite(gradients[name]).all():
                raise NumericsError(f"training: the gradient of {name} holds NaN or Inf in step {self.optimizer.step}")
        return _mean(losses), gradients

    def step(self, tokens: Batch) -> float:
        """One AdamW step on a batch, as of `loss_and_gradients`.   -> the loss before the step"""
        loss, gradients = self.loss_and_gradients(tokens)
        self.apply(gradients)
        return loss

    def apply(self, gradients: Masters) -> float:
        """One AdamW step with gradients of your own, such as a mean over micro-batches.   -> their global norm"""
        norm = clip_gradients(gradients, math.inf if self.max_norm is None else self.max_norm)
        self.optimizer.update(self.masters, gradients, *self.schedule.at(self.optimizer.step))
        return norm

    def logits(self, tokens: NDArray) -> NDArray:
        """The logits of the training forward pass.   tokens (T,) -> (T, V)"""
        return self._network().logits(self._check(tokens[None], min_tokens=1)[0])

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the masters as a Hugging Face folder, float32, with the tokenizer that was beside them.

        Each file is replaced as a whole; an interrupt leaves the old one or the new one.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        config = json.dumps(hf_config_json(self.config, self.config.quantization), indent=2) + "\n"
        for name, data in {**self.tokenizer_files, "config.json": config.encode()}.items():
            with atomic_path(path / name) as target:
                target.write_bytes(data)
        layout = {name: ("F32", array.shape) for name, array in self.masters.items()}
        with atomic_path(path / SINGLE_FILE) as target, SafetensorsWriter(target, layout, {"format": "pt"}) as writer:
            for name, array in self.masters.items():
                writer.write(name, array.astype(np.float32, copy=False))

    def _lesson(self, row: NDArray) -> Lesson | None:
        return None if self.distillation is None else (self.distillation, self.distillation.values(row[:-1]))

    def _network(self) -> TrainingNetwork:
        return TrainingNetwork(self.config, self.masters, self.mix, self.functions)

    def _check(self, tokens: Batch, min_tokens: int = 2) -> list[NDArray]:
        rows = [np.asarray(row) for row in tokens]
        for row in rows:
            ok = row.ndim == 1 and row.dtype.kind in "iu" and len(row) >= min_tokens
            if not ok or row.min() < 0 or row.max() >= self.config.vocab_size:
                expected = f"sequences of {min_tokens} or more ids from 0 to {self.config.vocab_size - 1}"
                ids = f" with ids from {row.min()} to {row.max()}" if ok else ""
                raise ShapeError("training tokens", expected=expected, got=f"{row.dtype} {row.shape}{ids}")
        if not rows:
            raise ShapeError("training tokens", expected="at least one sequence", got="none")
        return rows

    @contextmanager
    def _workers(self) -> Iterator[ThreadPoolExecutor]:
        """A thread for each sequence in work, in which BLAS uses that thread alone."""
        with blas_threads(1), ThreadPoolExecutor(self.threads) as pool:
            yield pool


def _mean(losses: list[NDArray[np.float64]]) -> float:
    """An exact sum, rounded once: the order of the sequences does not show."""
    values = np.concatenate(losses)
    return math.fsum(values) / len(values)
