"""`TrainingRun`: a training run from a TOML file, with checkpoints that it goes on from to the bit.

In the run's folder: `metrics.csv` (a row per step), `checkpoint.safetensors` (masters, both moments, the step),
`samples.txt`, the encoded texts, and `model`, a Hugging Face folder that `bitnet_ref.load` takes; of a run with `lora`
`adapter` in its place, a folder as peft writes it.
"""

from __future__ import annotations

import csv
import json
import os
import re
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from ..api import load
from ..errors import ConfigError, ConfigWarning, FormatError, NumericsError, TokenizerError, errors_at
from ..families import config_to_dict
from ..formats.checkpoint import read_tokenizer_folder
from ..formats.hashes import weight_hash
from ..formats.hf.config import parse_hf_config
from ..formats.prepared import sum_pages
from ..formats.safetensors import SafetensorsFile, content_hash
from ..reference.config import ModelConfig
from ..system.atomic import atomic_path, explain_os_errors, is_same_file, lock_folder
from ..system.json_file import open_regular, read_toml
from ..system.options import FLAG, TEXT, TEXT_OR_NONE, ListOf, Number, choice, option, read_options, suggest
from ..tokenizers import Tokenizer, load_tokenizer_files
from .data import Progress, TokenFile, open_tokens
from .distil import Distillation
from .lora import LoraTrainer
from .network import Masters, master_shapes
from .optimizer import OPTIMIZERS, SCHEDULES, Schedule
from .trainer import BACKWARD_DTYPES, Trainer, to_host, write_masters

CHECKPOINT, METRICS, SAMPLES, MODEL = "checkpoint.safetensors", "metrics.csv", "samples.txt", "model"
ADAPTER = "adapter"  # in the place of MODEL
COLUMNS = ("step", "tokens", "loss", "validation_loss", "lr", "weight_decay", "gradient_norm", "tokens_per_s")
FACTS = "bitnet_ref.training"  # of a checkpoint's metadata
LOSS = ("logits_weight", "temperature", "relations_weight", "relation_heads", "mix_steps")  # settings that decide it
_SPIKE_STEPS = 32  # steps whose median a spike is measured by
MAX_NUMBER, MAX_AMOUNT = 2**40 - 1, 1e100
MAX_PADDING = 256  # tokens without a piece that a new model may have; vocabularies are padded so far
NUMBER, COUNT = Number(0, MAX_NUMBER, whole=True), Number(1, MAX_NUMBER, whole=True)
AMOUNT = Number(0, MAX_AMOUNT)
PATHS = ListOf(TEXT, "paths", or_one=True)
FILES, MODELS = ("train", "validation"), ("init", "teacher", "lora")  # settings that are paths; of models, or names


@dataclass(frozen=True)
class RunSettings:
    """The tables [data] and [training] of a run's TOML file.

    train, validation: text files (.txt, .txt.xz), or one .npy of token ids. tokenizer: a folder.
    teacher: a model to learn from, with the weights of `Distillation`.
    lora: a model, by path or name, that stays as it is while an adapter is trained, of rank lora_rank and the factor
        lora_alpha / lora_rank on the linears lora_targets of every layer.
    init: a folder to start from; its config is the model's, unless the file has a table [model]. Its tokenizer is taken
        where no other is named.
    ternary: make a ternary model of init, which is any model that loads; without a table [model].
    steps, batch, context: optimiser steps, sequences per step, tokens per sequence.
    mix_steps: over how many steps quantisation fades in ("lambda warm-up"), for a float model that becomes ternary.
    validate_every, save_every, sample_every: steps between; 0: only at the end. spike: the run stops when a step's loss
    is so many times the median of the last 32.
    """

    train: tuple[str, ...] = option((), PATHS)
    validation: tuple[str, ...] = option((), PATHS)
    tokenizer: str | None = option(None, TEXT_OR_NONE)
    init: str | None = option(None, TEXT_OR_NONE)
    ternary: bool = option(False, FLAG)
    lora: str | None = option(None, TEXT_OR_NONE)
    lora_rank: int = option(8, COUNT)
    lora_alpha: float = option(16.0, AMOUNT)
    lora_targets: tuple[str, ...] = option(("q_proj", "v_proj"), ListOf(TEXT, "linears"))
    teacher: str | None = option(None, TEXT_OR_NONE)
    logits_weight: float = option(1.0, AMOUNT)
    temperature: float = option(5.0, AMOUNT)
    relations_weight: float = option(0.0, AMOUNT)
    relation_heads: int = option(1, COUNT)
    steps: int = option(1000, COUNT)
    batch: int = option(8, COUNT)
    context: int = option(256, COUNT)
    seed: int = option(0, NUMBER)
    optimizer: str = option("adamw", choice(*OPTIMIZERS))
    backward_dtype: str = option("float32", choice(*BACKWARD_DTYPES))
    schedule: str = option("two-stage", choice(*SCHEDULES))
    lr: float = option(1.5e-3, AMOUNT)
    second_lr: float | None = option(None, Number(0, MAX_AMOUNT, optional=True))
    min_lr: float = option(0.0, AMOUNT)
    warmup_steps: int = option(100, NUMBER)
    decay_steps: int | None = option(None, Number(0, MAX_NUMBER, whole=True, optional=True))
    weight_decay: float = option(0.1, AMOUNT)
    init_std: float = option(0.02, AMOUNT)
    beta1: float = option(0.9, AMOUNT)
    beta2: float = option(0.95, AMOUNT)
    eps: float = option(1e-8, AMOUNT)
    max_norm: float = option(1.0, AMOUNT)
    mix_steps: int = option(0, NUMBER)
    validate_every: int = option(500, NUMBER)
    validation_sequences: int = option(64, COUNT)
    save_every: int = option(200, NUMBER)
    sample_every: int = option(0, NUMBER)
    sample_prompt: str = option("Once upon a time", TEXT)
    spike: float = option(3.0, Number(1, MAX_AMOUNT, above=True))

    def __post_init__(self) -> None:
        read_options(self, ConfigError)
        if not self.train:
            raise ConfigError("expected at least one text file or a .npy file of token ids", field="train")
        if self.ternary and self.init is None:
            raise ConfigError("expected init: the model of which to make a ternary one", field="ternary")
        if self.lora is not None and (
            other := next((key for key in ("init", "ternary", "mix_steps") if getattr(self, key)), None)
        ):
            raise ConfigError("has no effect with lora: the model stays as it is", field=other)


def read_run(path: str | os.PathLike[str]) -> tuple[RunSettings, dict[str, Any] | None]:
    """A run's TOML file -> its settings, and its [model] table (the keys of a config.json) if it has one.

    Paths in the file are relative to its folder. Raises FormatError, ConfigError naming an unknown key and the nearest.
    """
    path = Path(path)
    tables = read_toml(path, FormatError)
    known, values = [field.name for field in fields(RunSettings)], {}
    for table, content in tables.items():
        if table not in ("data", "training", "model") or not isinstance(content, dict):
            raise ConfigError("expected the tables [model], [data] and [training]", path=path, field=table[:100])
    for table in ("data", "training"):
        for key, value in tables.get(table, {}).items():
            if key not in known:
                message = f"is no setting of a run; {suggest(key, known)}"
                raise ConfigError(message, path=path, field=f"{table}.{key}"[:100])
            values[key] = value
    with errors_at(path):
        settings = RunSettings(**values)
    folder = path.parent
    paths: dict[str, Any] = {key: [str(folder / name) for name in getattr(settings, key)] for key in FILES}
    if settings.tokenizer is not None:
        paths["tokenizer"] = str(folder / settings.tokenizer)
    for key in MODELS:
        name = getattr(settings, key)
        if name is not None and _is_path(folder / name):
            paths[key] = str(folder / name)
    return replace(settings, **paths), tables.get("model")


@dataclass(frozen=True)
class StepMetrics:
    """One row of metrics.csv. Losses in nats per token; gradient_norm is the one before clipping."""

    step: int
    tokens: int
    loss: float
    validation_loss: float | None
    lr: float
    weight_decay: float
    gradient_norm: float
    tokens_per_s: float


class TrainingRun:
    """A run in a folder: `TrainingRun(settings, folder, model).run()`; `resume=True` goes on from its checkpoint.

    Killed at any moment and resumed on the same backend, it gives the same losses, to the bit, as if it had not been
    interrupted. The folder is locked until `run` ends, or until the object is no more.
    """

    def __init__(
        self,
        settings: RunSettings,
        folder: str | os.PathLike[str],
        model: dict[str, Any] | None = None,
        *,
        resume: bool = False,
        threads: int | None = None,
        backend: str = "auto",
        progress: Progress | None = None,
    ) -> None:
        """model: the keys of a config.json; None with `settings.init`. backend: as of `Trainer`. progress: of encoding
        the texts.

        Raises FormatError, ConfigError, TokenizerError; FormatError too when the folder has a run and `resume` is not
        asked, and when its checkpoint is of another model or other settings; StorageError when another run has the
        folder now.
        """
        self.settings, self.folder = settings, Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check_files_apart()
        self._unlock = lock_folder(self.folder, self)
        try:
            self._prepare(model, resume, threads, backend, progress)
        except BaseException:
            self._unlock()
            raise

    def _prepare(
        self,
        model: dict[str, Any] | None,
        resume: bool,
        threads: int | None,
        backend: str,
        progress: Progress | None,
    ) -> None:
        """Open what the run reads, and bring the folder to the state of its checkpoint."""
        settings, checkpoint = self.settings, self.folder / CHECKPOINT
        self.saved_step = 0  # of the checkpoint; 0 without one
        if not resume:
            self._check_no_run()
        rates = (settings.lr, settings.steps, settings.warmup_steps, settings.min_lr, settings.second_lr)
        schedule = Schedule(settings.schedule, *rates, settings.weight_decay, settings.decay_steps)
        distillation, self._teacher_hash = None, ""
        if settings.teacher is not None:
            weights = (settings.logits_weight, settings.temperature, settings.relations_weight, settings.relation_heads)
            distillation = Distillation(teacher := load(settings.teacher), *weights)
            self._teacher_hash = weight_hash(teacher.weights)
        options: dict[str, Any] = {name: getattr(settings, name) for name in ("eps", "optimizer", "backward_dtype")}
        options |= {"betas": (settings.beta1, settings.beta2), "max_norm": settings.max_norm or None}
        options |= {"schedule": schedule, "distillation": distillation, "threads": threads, "backend": backend}
        if settings.lora is not None:
            if model is not None:
                raise ConfigError("expected no table [model] with lora: the model is that of lora", field="model")
            base = load(settings.lora, backend="numpy")
            self._base_hash = weight_hash(base.weights)
            name = None if _is_path(settings.lora) else settings.lora
            self.trainer: Trainer = LoraTrainer(base, **self._adapter, seed=settings.seed, base=name, **options)
        elif model is None:
            if settings.init is None:
                raise ConfigError("expected a table [model], or init = a folder to start from", field="model")
            begin = Trainer.from_model if settings.ternary else Trainer.from_folder
            self.trainer = begin(settings.init, **options)
        else:
            if settings.ternary:
                raise ConfigError(
                    "is for init without a table [model], whose keys say what is ternary", field="ternary"
                )
            config = parse_hf_config(model, Path("[model]"))
            self.trainer = Trainer(config, self._first_masters(config), **options)
            if settings.init is not None:
                self.trainer.tokenizer_files = read_tokenizer_folder(Path(settings.init))
        if settings.mix_steps and self.trainer.config.quantization is None:
            message = "fades quantisation in, and this model has none: say --ternary (ternary = true)"
            raise ConfigError(message, field="mix_steps")
        if settings.tokenizer is not None:
            folder = Path(settings.tokenizer)
            self.trainer.tokenizer_files = read_tokenizer_folder(folder)
            if not self.trainer.tokenizer_files:
                missing = "the folder has no tokenizer" if folder.is_dir() else "there is no such folder"
                raise TokenizerError(f"{missing}; expected tokenizer.model or tokenizer.json in it", path=folder)
        files = self.trainer.tokenizer_files
        self.tokenizer: Tokenizer | None = load_tokenizer_files(files) if files else None
        self._check_sizes()
        self.train = self._open(settings.train, progress)
        self.validation = self._open(settings.validation, progress) if settings.validation else None
        self._recent: deque[float] = deque(maxlen=_SPIKE_STEPS)
        if checkpoint.exists():
            self._read_checkpoint(checkpoint)
        self._cut_metrics()
        self._cut_samples()

    @property
    def _adapter(self) -> dict[str, Any]:
        """What the settings say of the adapter."""
        return {name: getattr(self.settings, f"lora_{name}") for name in ("alpha", "rank", "targets")}

    def _check_no_run(self) -> None:
        """Raise FormatError where a run's checkpoint or model would be replaced. Metrics alone are begun anew."""
        if (checkpoint := self.folder / CHECKPOINT).exists():
            raise FormatError("a run is here already; resume it, or choose another folder", path=checkpoint)
        for name in (MODEL, ADAPTER):
            if (model := self.folder / name).exists():
                message = f"is here already, without {CHECKPOINT} to resume from; choose another folder, or delete it"
                raise FormatError(message, path=model)

    def _check_files_apart(self) -> None:
        """Raise ConfigError where the run would replace what it reads."""
        names = (CHECKPOINT, METRICS, SAMPLES, MODEL if self.settings.lora is None else ADAPTER)
        for field in ("train", "validation", "tokenizer", "init", "teacher", "lora"):
            value = getattr(self.settings, field)
            for path in map(Path, value if isinstance(value, tuple) else [value] if value else []):
                for name in names:
                    if is_same_file(path, target := self.folder / name) or is_same_file(path.parent, target):
                        raise ConfigError(f"{path} would be replaced by the run; name another folder", field=field)

    def _first_masters(self, config: ModelConfig) -> Masters:
        """Of `init` where it has them, else drawn: norms 1, biases 0, matrices N(0, init_std^2)."""
        init, masters = self.settings.init, Masters()
        initial = Masters() if init is None else Trainer.from_folder(init, backend="numpy").masters
        rng = np.random.default_rng([self.settings.seed, 1])
        for name, shape in master_shapes(config).items():
            if name in initial and initial[name].shape == shape:
                masters[name] = initial[name]
            elif name in initial or (initial and len(shape) > 1):
                raise ConfigError(f"{init} has no {name} of shape {shape}", field="init")
            elif len(shape) > 1:
                masters[name] = rng.standard_normal(shape, dtype=np.float32) * np.float32(self.settings.init_std)
            else:
                masters[name] = np.full(shape, 0 if name.endswith(".bias") else 1, dtype=np.float32)
        return masters

    def _check_sizes(self) -> None:
        config, settings, distillation = self.trainer.config, self.settings, self.trainer.distillation
        lengths = {"model": config.context_length}
        if distillation is not None:
            lengths["teacher"] = distillation.teacher.context_length
        for name, length in lengths.items():
            if settings.context > length:
                message = f"expected at most the {name}'s context of {length} tokens, got {settings.context}"
                raise ConfigError(message, field="context")
        if self.tokenizer is None:
            return
        message = f"the tokenizer has {self.tokenizer.vocab_size} tokens, the model's vocabulary {config.vocab_size}"
        if self.tokenizer.vocab_size > config.vocab_size:
            raise ConfigError(message, field="vocab_size")
        count = len(self.tokenizer.encode(settings.sample_prompt))
        if settings.sample_every and count >= config.context_length:
            short = f"expected fewer tokens than the model's context of {config.context_length}, got {count}"
            raise ConfigError(short, field="sample_prompt")
        is_new = settings.init is None and settings.lora is None
        if is_new and config.vocab_size - self.tokenizer.vocab_size > MAX_PADDING:
            message += f"; the others have no text: set vocab_size = {self.tokenizer.vocab_size}"
            warnings.warn(message, ConfigWarning, stacklevel=3)

    def _open(self, files: tuple[str, ...], progress: Progress | None) -> TokenFile:
        paths = [Path(file) for file in files]
        vocab_size, tokenizer_files = self.trainer.config.vocab_size, self.trainer.tokenizer_files
        return open_tokens(paths, tokenizer_files, vocab_size, self.folder, progress)

    # -- running -------------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return self.trainer.optimizer.step

    def run(self, report: Callable[[StepMetrics], None] | None = None, writer: Any = None) -> StepMetrics:
        """Train to the last step.   report: called after each. writer: a TensorBoard SummaryWriter.

        Raises NumericsError, naming the tensor, for NaN and for a loss that leaps; the last checkpoint stays as it is.
        """
        self._unlock()
        self._unlock = lock_folder(self.folder, self)  # an earlier call has released it
        try:
            return self._run(report, writer)
        finally:
            self._unlock()

    def _run(self, report: Callable[[StepMetrics], None] | None, writer: Any) -> StepMetrics:
        settings, row = self.settings, None
        while self.step < settings.steps:
            row = self._one_step()
            is_saved = self.step == settings.steps or (settings.save_every and self.step % settings.save_every == 0)
            with self._appending(METRICS) as file:
                out = csv.writer(file)
                if file.tell() == 0:
                    out.writerow(COLUMNS)
                out.writerow(["" if value is None else value for value in asdict(row).values()])
                if is_saved:
                    file.flush()
                    os.fsync(file.fileno())
            if is_saved:
                self.save()
            if self.tokenizer is not None and settings.sample_every and self.step % settings.sample_every == 0:
                self._sample()
            if writer is not None:
                for name, value in asdict(row).items():
                    if value is not None and name != "step":
                        writer.add_scalar(name, value, row.step)
            if report is not None:
                report(row)
        if row is None:
            raise ConfigError(f"the run is finished: {self.step} of {settings.steps} steps are done", field="steps")
        return row

    def _one_step(self) -> StepMetrics:
        settings, trainer, started = self.settings, self.trainer, time.perf_counter()
        trainer.mix = min(1.0, (self.step + 1) / settings.mix_steps) if settings.mix_steps else 1.0
        batch = self.train.batch(self.step, settings.batch, settings.context, settings.seed)
        lr, weight_decay = trainer.schedule.at(self.step)
        advice = f"{'Resume from the checkpoint' if self.saved_step else 'Begin anew'} with a lower lr or max_norm"
        try:
            loss, gradients = trainer.loss_and_gradients(batch)
        except NumericsError as error:
            raise NumericsError(f"{error.message}. {advice}", tensor=error.tensor) from error
        if len(self._recent) == _SPIKE_STEPS and loss > settings.spike * median(self._recent):
            largest = max(gradients, key=lambda name: float(np.abs(gradients[name]).max()))
            raise NumericsError(
                f"the loss leapt to {loss:.3f} in step {self.step + 1} (median of the last {_SPIKE_STEPS}: "
                f"{median(self._recent):.3f}); the largest gradient is that of {largest}. {advice}",
                tensor=largest,
            )
        norm = trainer.apply(gradients)
        self._recent.append(loss)
        seconds = time.perf_counter() - started
        tokens = sum(len(row) - 1 for row in batch)
        last = self.step == settings.steps
        every = settings.validate_every
        validate = self.validation is not None and (last or (every and self.step % every == 0))
        validation = self.validation_loss() if validate else None
        return StepMetrics(self.step, self.step * tokens, loss, validation, lr, weight_decay, norm, tokens / seconds)

    def validation_loss(self) -> float:
        """The mean loss over the first sequences of the validation text."""
        assert self.validation is not None
        context = self.settings.context
        count = min(self.settings.validation_sequences, self.validation.windows(context))
        return self.trainer.loss([self.validation.window(index, context) for index in range(count)])

    def _sample(self) -> None:
        self.trainer.save(self.output)
        prompt = self.settings.sample_prompt
        text: Any = load(self.output).generate(prompt)
        with self._appending(SAMPLES) as file:
            file.write(f"step {self.step}: {prompt}{text.text}\n\n")

    @contextmanager
    def _appending(self, name: str) -> Iterator[TextIO]:
        """A file of the run's folder, open to add to it. Raises StorageError."""
        path = self.folder / name
        with explain_os_errors(path), open(path, "a", newline="", encoding="utf-8") as file:
            yield file

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def output(self) -> Path:
        """The folder of what is trained, ready to load."""
        return self.folder / (MODEL if self.settings.lora is None else ADAPTER)

    def save(self) -> None:
        """Replace the model's folder, then the checkpoint, so that a run whose last checkpoint is there has its model.
        An interrupt leaves the old file or the new one."""
        optimizer, masters = self.trainer.optimizer, self.trainer.masters
        arrays = {
            f"{kind}.{name}": array
            for kind, part in (("master", masters), ("m", optimizer.m), ("v", optimizer.v))
            for name, array in part.items()
        }
        self.trainer.save(self.output)
        facts = {"step": optimizer.step, "recent": list(self._recent), "identity": self._identity()}
        metadata = {FACTS: json.dumps(facts)}
        hashes = {name: ("F32", array.shape, _hash_array(to_host(array))) for name, array in arrays.items()}
        metadata["content_hash"] = content_hash(metadata, hashes)
        write_masters(self.folder / CHECKPOINT, arrays, metadata)
        self.saved_step = self.step

    def _identity(self) -> dict[str, Any]:
        """What must not differ between a checkpoint and the run that goes on from it; data and teacher by content."""
        settings = self.settings
        data: dict[str, Any] = {
            key: getattr(settings, key) for key in ("batch", "context", "seed", "optimizer", "backward_dtype")
        }
        data["tokens"] = len(self.train)
        data["loss"] = {key: getattr(settings, key) for key in LOSS}
        data |= {"corpus": self.train.content_hash, "teacher": self._teacher_hash}
        data["validation corpus"] = None if self.validation is None else self.validation.content_hash
        lora = {} if settings.lora is None else {"lora": {"base": self._base_hash, **self._adapter}}
        return {"config": config_to_dict(self.trainer.config), **data, **lora}

    def _read_checkpoint(self, path: Path) -> None:
        trainer, optimizer = self.trainer, self.trainer.optimizer
        with SafetensorsFile(path) as file:
            try:
                facts = json.loads(file.metadata[FACTS])
                step, recent, identity = int(facts["step"]), list(map(float, facts["recent"])), dict(facts["identity"])
            except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as problem:
                raise FormatError("this is no checkpoint of a training run", path=path) from problem
            if set(file.metadata) != {FACTS}:  # only checkpoints before 28 November 2026 have no hash
                infos = file.tensors.items()
                hashes = {name: (info.dtype, info.shape, _hash_array(file.read(name))) for name, info in infos}
                if file.metadata.get("content_hash") != content_hash(file.metadata, hashes):
                    message = "the checkpoint is damaged: its content is not what its hash says"
                    raise FormatError(message, path=path, field="content_hash")
            ours = json.loads(json.dumps(self._identity()))
            identity.setdefault("optimizer", "adamw")  # as of version 0.1
            identity.setdefault("backward_dtype", "float32")  # as before it was a setting
            if "corpus" not in identity:  # of version 0.1
                message = f"{path}: the checkpoint does not say of which texts it is; they must be the same"
                warnings.warn(message, ConfigWarning, stacklevel=2)
            ours = {key: value for key, value in ours.items() if key in identity}  # older ones say less
            if different := _differences(identity, ours):
                raise FormatError(f"the checkpoint is of another run: {', '.join(different)}", path=path)
            for kind, part in (("master", trainer.masters), ("m", optimizer.m), ("v", optimizer.v)):
                for name, master in trainer.masters.items():
                    if part is optimizer.v and len(optimizer.moments(name, master)) == 1:
                        continue
                    tensor = f"{kind}.{name}"
                    if tensor not in file.tensors or file.tensors[tensor].shape != master.shape:
                        raise FormatError("the tensor is missing, or of another shape", path=path, field=tensor)
                    part[name] = trainer.to_device(file.read(tensor).copy())
        optimizer.step = self.saved_step = step
        self._recent.extend(recent)

    def _cut_metrics(self) -> None:
        """Drop the rows after the checkpoint: their steps are done again."""
        path = self.folder / METRICS
        if not path.is_file():
            return
        with open_regular(path, FormatError) as file:
            lines = file.read().decode("utf-8", "replace").splitlines()
        rows = [row for row in csv.reader(lines) if len(row) == len(COLUMNS)]
        rows = [row for row in rows if not row[0].isdecimal() or float(row[0]) <= self.step]
        with atomic_path(path) as target, open(target, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)

    def _cut_samples(self) -> None:
        """Drop the samples after the checkpoint: they are drawn again."""
        path = self.folder / SAMPLES
        if not path.is_file():
            return
        with open_regular(path, FormatError) as file:
            text = file.read().decode("latin-1")  # a character for each byte
        starts = re.finditer(r"(?:\A|(?<=\n\n))step (\d{1,13}): ", text)
        later = next((each.start() for each in starts if int(each[1]) > self.step), None)
        if later is not None:
            with explain_os_errors(path):
                os.truncate(path, later)


def _is_path(model: str | Path) -> bool:
    """Whether it is a file, a folder or FOLDER:FILE; else it is a model's name."""
    return os.path.exists(model) or os.path.isdir(os.fspath(model).rpartition(":")[0])


def _hash_array(array: NDArray[Any]) -> str:
    return sum_pages(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """["hidden_size 64, here 32", ...]: the values that differ, of nested tables too."""
    found = []
    for key, value in ours.items():
        other = theirs.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            found += _differences(other, value)
        elif other != value:
            found.append(f"{key} {other}, here {value}")
    return found
