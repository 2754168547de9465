"""`Trainer`: the masters of a model, their gradients, and optimiser steps on batches of tokens."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from ..backends import available_backends, choose_cpu
from ..backends.backend import blas_threads
from ..backends.cuda import open_device
from ..errors import (
    BackendUnavailable,
    ConfigError,
    FormatError,
    NumericsError,
    ShapeError,
    numerics_errors_of,
    require_number,
)
from ..formats.checkpoint import parts, scale_convention
from ..formats.hf.config import read_hf_config
from ..formats.hf.folder import SINGLE_FILE, HfCheckpoint, refuse_adapter
from ..formats.hf.masters import masters_of
from ..formats.hf.writer import hf_config_json
from ..formats.names import hf_module
from ..formats.open import find_model, open_checkpoint
from ..formats.safetensors import SafetensorsWriter
from ..reference.config import ModelConfig, QuantizationConfig
from ..reference.layers import Array, Floats, Ints
from ..reference.weights import DenseWeight
from ..system.atomic import atomic_path, write_file
from ..system.threads import resolve_threads
from . import ops
from .distil import Distillation
from .network import EMBEDDING, Masters, TrainingNetwork, master_shapes
from .optimizer import OPTIMIZERS, Schedule, clip_gradients

Batch = Ints | Sequence[Ints]
BACKENDS = ("numpy", "cython", "cupy")
BACKWARD_DTYPES = ("float32", "bfloat16")


class TrainerOptions(TypedDict, total=False):
    """Keywords of `Trainer`, for what passes them on; a test compares the two."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    schedule: Schedule | None
    max_norm: float | None
    distillation: Distillation | None
    threads: int | None
    backend: str
    optimizer: str
    backward_dtype: str


class Trainer:
    """Trains the masters of a model with AdamW or Muon.

        trainer = Trainer.from_folder("model", lr=1e-3)
        loss = trainer.step(tokens)  # tokens (B, T) int
        trainer.save("trained")      # a folder that `bitnet_ref.load` takes

    Each sequence of a batch is computed by itself, in one thread, and the sequences' gradients are added in their
    order. So neither the number of threads nor the other sequences of a batch change a bit of a loss.
    """

    def __init__(
        self,
        config: ModelConfig,
        masters: Mapping[str, Floats],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        schedule: Schedule | None = None,
        max_norm: float | None = None,
        distillation: Distillation | None = None,
        threads: int | None = None,
        backend: str = "auto",
        optimizer: str = "adamw",
        backward_dtype: str = "float32",
    ) -> None:
        """masters: hub name -> array of float32, or of float64 to measure rounding; they are copied.

        schedule: the rates of each step; by default `lr` and `weight_decay` throughout.
        max_norm: of all gradients together, larger ones are scaled down to it.
        optimizer: "adamw", or "muon", which takes Muon for the matrices of the layers.
        distillation: a teacher, whose divergences are added to the loss.
        backward_dtype: "float32", or "bfloat16", to which the operands of the gradients' products with matrices, and of
        Muon's, are rounded; the loss stays as it is.
        backend: "numpy" (the functions of `ops.py`), "cython" (kernels, float32 only), "auto": the faster of these two,
        or "cupy": the functions of `ops.py` on a card, where masters, gradients and moments then are; no threads.
        Raises ConfigError for a model that cannot be trained, and for masters that are not this model's;
        BackendUnavailable.
        """
        self.config = config
        self.masters = self.check_masters(masters)
        self.schedule = schedule or Schedule(lr=lr, weight_decay=weight_decay)
        if optimizer not in OPTIMIZERS:
            raise ConfigError(f"expected one of {', '.join(OPTIMIZERS)}, got {optimizer!r}", field="optimizer")
        self.optimizer = OPTIMIZERS[optimizer](betas, eps)
        if max_norm is not None:
            require_number("max_norm", max_norm)
        self.max_norm = max_norm
        if distillation is not None:
            distillation.check(config)
        self.distillation = distillation
        self.threads = resolve_threads(threads)
        self.tokenizer_files: dict[str, bytes] = {}  # name -> content, saved beside the masters
        wide = any(master.dtype == np.float64 for master in self.masters.values())
        self.backend = choose_cpu("float64" if wide else "float32") if backend == "auto" else backend
        self.functions: Any = choose_functions(self.backend, wide, backward_dtype)  # crossval puts changed ones here
        self._arrays: Any = np
        if self.backend == "cupy":
            self.threads, self._arrays = 1, card_arrays()
        self.masters = {name: self.to_device(master) for name, master in self.masters.items()}
        self.mix = 1.0  # how much the linears are quantised: see `ops.StepLinear`

    def check_masters(self, masters: Mapping[str, Floats]) -> Masters:
        """Copies of the masters, which must be all of this model's. Raises ConfigError."""
        checked = Masters()
        for name, shape in master_shapes(self.config).items():
            if name not in masters:
                raise ConfigError(f"the master {name} is missing; expected an array of shape {shape}")
            if masters[name].shape != shape:
                raise ConfigError(f"the master {name} has shape {masters[name].shape}; expected {shape}")
            dtype = np.float64 if masters[name].dtype == np.float64 else np.float32
            checked[name] = to_host(masters[name]).astype(dtype)
        return checked

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str], **settings: Unpack[TrainerOptions]) -> Trainer:
        """The masters of a Hugging Face folder: config.json beside *.safetensors in float32, bfloat16 or float16.

        settings: as of `Trainer`. Raises FormatError, ConfigError.
        """
        path = Path(folder)
        if path.is_file():
            message = "is a file; without --ternary, training begins from a Hugging Face folder (convert makes one)"
            raise FormatError(message, path=path)
        refuse_adapter(path)
        config = read_hf_config(path / "config.json")
        if scale_convention(config.quantization) not in (None, "absmean"):
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

    @classmethod
    def from_model(cls, model: str | os.PathLike[str], **settings: Unpack[TrainerOptions]) -> Trainer:
        """A ternary model that begins from any model that loads: each linear of the blocks becomes a BitLinear.

        Masters are the model's own floats; of a BitNet without masters values that round to its planes
        (`masters_of`). settings: as of `Trainer`. Raises FormatError, ConfigError.
        """
        with open_checkpoint(find_model(model)) as checkpoint:
            checkpoint.require_plain_basis("training's")
            quantized = checkpoint.config.quantization or QuantizationConfig("autobitlinear", "online", ("lm_head",))
            online = replace(quantized, linear_class="autobitlinear", quantization_mode="online")
            config = replace(checkpoint.config, quantization=online)
            master_shapes(config)  # before anything is read: what cannot be trained
            masters = Masters()
            for name, part in parts(checkpoint):
                module = hf_module(name)
                if isinstance(part, np.ndarray):
                    masters[f"{module}.weight"] = part
                    continue
                weight: Any = part
                ternary, own = part.bit_linear, checkpoint.master(name)
                if ternary is None:
                    own = weight.array
                elif own is None:
                    own = masters_of(name, ternary.ternary(), ternary.w_dequant_scale)
                masters[f"{module}.weight"] = own
                if part.bias is not None:
                    masters[f"{module}.bias"] = part.bias
                if part.norm is not None:
                    masters[f"{module}.rms_norm.weight"] = part.norm.weight
            files = checkpoint.tokenizer_files()
        trainer = cls(config, masters, **settings)
        trainer.tokenizer_files = files
        return trainer

    # -- losses and gradients ------------------------------------------------------------------------------------------

    def loss(self, tokens: Batch) -> float:
        """The mean loss of a batch, without gradients; see `loss_and_gradients`."""
        rows = self._check(tokens)
        with self._workers() as pool:
            return _mean([to_host(loss) for loss in pool.map(self.network(pool.map).sequence_loss, rows)])

    def loss_and_gradients(self, tokens: Batch) -> tuple[float, Masters]:
        """The mean of -log p of every token after the first of its sequence, and its gradients.

        tokens: (B, T) int, T >= 2, or a list of sequences (T,) of any lengths; memory does not grow with B.
        -> loss in nats, {hub name: array like the master}

        Raises ShapeError for other arrays or ids outside the vocabulary; NumericsError naming the norm or linear whose
        input holds NaN or Inf, or the first master whose gradient does.
        """
        rows = self._check(tokens)
        weight = 1 / sum(len(row) - 1 for row in rows)
        losses: list[NDArray[np.float64]] = []
        gradients: Masters = {}
        in_work: deque[Future[tuple[NDArray[np.float64], Masters]]] = deque()
        with numerics_errors_of(f"training step {self.optimizer.step + 1}"), self._workers() as pool:
            network = self.network(pool.map)
            for row in [*rows, *[None] * (self.threads + 1)]:
                if row is not None:
                    teacher = self.distillation
                    lesson = None if teacher is None else (teacher, teacher.values(row[:-1]))
                    in_work.append(pool.submit(network.sequence_gradients, row, weight, lesson))
                if in_work and (row is None or len(in_work) > self.threads):  # at most threads + 1 sequences' gradients
                    loss, of_row = in_work.popleft().result()
                    losses.append(to_host(loss))
                    for name, gradient in of_row.items():  # new arrays: using them again is no faster, 200 MB more
                        if name in gradients:
                            gradients[name] += gradient
                        else:
                            gradients[name] = gradient
            finite = pool.map(lambda name: bool(np.isfinite(gradients[name]).all()), self.masters)
            for name, is_finite in zip(self.masters, finite, strict=True):
                if not is_finite:
                    raise NumericsError(f"the gradient of {name} holds NaN or Inf", tensor=name)
        return _mean(losses), gradients

    def step(self, tokens: Batch) -> float:
        """One optimiser step on a batch, as of `loss_and_gradients`.   -> the loss before the step"""
        loss, gradients = self.loss_and_gradients(tokens)
        self.apply(gradients)
        return loss

    def apply(self, gradients: Masters) -> float:
        """One optimiser step with gradients of your own, such as a mean over micro-batches.   -> their global norm"""
        with self._workers() as pool:
            tools = pool.map, self.functions
            norm = clip_gradients(gradients, math.inf if self.max_norm is None else self.max_norm, *tools)
            self.optimizer.update(self.masters, gradients, *self.schedule.at(self.optimizer.step), *tools)
        return norm

    def logits(self, tokens: NDArray[np.int64]) -> Floats:
        """The logits of the training forward pass.   tokens (T,) -> (T, V)"""
        (row,) = self._check(tokens[None], min_tokens=1)
        with self._workers() as pool:
            return to_host(self.network(pool.map).logits(row))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the masters as a Hugging Face folder, float32, with the tokenizer that was beside them.

        Each file is replaced as a whole; an interrupt leaves the old one or the new one.
        """
        path = Path(folder)
        config = json.dumps(hf_config_json(self.config, self.config.quantization, "F32"), indent=2) + "\n"
        for name, data in {**self.tokenizer_files, "config.json": config.encode()}.items():
            write_file(path / name, data)
        write_masters(path / SINGLE_FILE, self.masters, {"format": "pt"})

    def to_device(self, array: Array) -> Array:
        """The array where this trainer computes: on the card, or as it is."""
        here: Array = self._arrays.asarray(array)
        return here

    def network(self, run: Callable[..., Any]) -> TrainingNetwork:
        """The network of one step. run: `map`, or that of a pool of threads."""
        return TrainingNetwork(self.config, self.masters, self.mix, self.functions, run)

    def _check(self, tokens: Batch, min_tokens: int = 2) -> list[Ints]:
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
    def _workers(self) -> Iterator[ThreadPoolExecutor | NoPool]:
        """A thread for each sequence in work, in which BLAS uses that thread alone. One thread, or a card: this one."""
        if self.backend == "cupy":
            yield NoPool()
            return
        with blas_threads(1):
            if self.threads == 1:  # a pool's hand-over takes an eighth of a small model's step
                yield NoPool()
                return
            with ThreadPoolExecutor(self.threads) as pool:
                yield pool


class NoPool:
    """What a pool of threads does, at once in the thread that asks."""

    map = staticmethod(map)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args))
        return future


def choose_functions(backend: str, wide: bool, backward_dtype: str = "float32") -> Any:
    """The functions of `ops`, or what stands in for them. wide: for masters of float64."""
    if backward_dtype not in BACKWARD_DTYPES:
        message = f"expected one of {', '.join(BACKWARD_DTYPES)}, got {backward_dtype!r}"
        raise ConfigError(message, field="backward_dtype")
    if backend not in BACKENDS:
        raise BackendUnavailable(
            f"no backend trains under the name {backend!r}; there are: auto, {', '.join(BACKENDS)}"
        )
    if reason := available_backends()[backend]:
        raise BackendUnavailable(f"backend {backend!r} cannot run here: {reason}")
    functions: Any = ops
    if backend == "cython":
        if wide:
            raise ConfigError("the backend 'cython' trains masters of float32; take numpy for float64", field="dtype")
        from .compiled import compiled_ops

        functions = compiled_ops()
    if backward_dtype == "float32":
        return functions
    return SimpleNamespace(**{**vars(functions), "product": functions.product_bfloat16})


def card_arrays() -> Any:
    """The module of the card's arrays: CuPy's, or NumPy's under emulation. Raises BackendUnavailable."""
    return open_device().xp


def write_masters(path: Path, masters: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Replace a .safetensors file by one of these arrays in float32, which come from the card one at a time."""
    layout = {name: ("F32", array.shape) for name, array in masters.items()}
    with atomic_path(path) as target, SafetensorsWriter(target, layout, metadata) as writer:
        for name, array in masters.items():
            writer.write(name, to_host(array).astype(np.float32, copy=False))


def to_host(array: Any) -> Array:
    """A NumPy array of the same values."""
    host: Array = array if isinstance(array, np.ndarray) else array.get()
    return host


def _mean(losses: list[NDArray[np.float64]]) -> float:
    """An exact sum, rounded once: the order of the sequences does not show."""
    values = np.concatenate(losses)
    return math.fsum(values) / len(values)
