"""`LoraTrainer`: trains the factors of a LoRA adapter; the model below stays as it is, ternary or dense.

    y = linear(x) + c B (A x),  dB = c dy^T (A x),  dA = c (dy B)^T x,  dx += c (dy B) A

The linears' own gradients stop at their inputs: straight through a quantisation, as in `ops`. A is drawn as peft draws
it, uniform within 1/sqrt(K), and B is zeros, so that training begins at the model itself (Hu et al. 2021,
arXiv:2106.09685).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..backends.backend import plain_weights
from ..backends.loaded import LoadedModel
from ..errors import ConfigError, ShapeError
from ..families.linear_norms import NormedLinear
from ..families.lora import Adapter, LoraTerm, OnLinear
from ..formats.checkpoint import is_ternary, read_tokenizer_folder
from ..formats.hf.adapter import CONFIG_FILE, WEIGHTS_FILE
from ..formats.names import hf_module
from ..reference.config import ModelConfig
from ..reference.layers import Array, Floats
from ..reference.weights import LinearWeight, TernaryWeight, linear_name
from ..system.atomic import write_file
from .network import EMBEDDING, LinearGroup, Masters, SequencePass, TrainingNetwork, master_shapes
from .ops import LinearInput, StepLinear
from .trainer import Trainer, write_masters

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraTrainer(Trainer):
    """Trains an adapter with AdamW. `masters` are its factors, by peft's names.

    trainer = LoraTrainer(bitnet_ref.load("storyteller"), rank=8)
    loss = trainer.step(tokens)   # tokens (B, T) int
    trainer.save("adapter")       # a folder that peft and `bitnet_ref.load` take
    """

    def __init__(
        self,
        model: LoadedModel | FrozenModel,
        *,
        rank: int = 8,
        alpha: float = 16.0,
        targets: Sequence[str] = ("q_proj", "v_proj"),
        seed: int = 0,
        base: str | None = None,
        **settings: Any,
    ) -> None:
        """rank, alpha: r and lora_alpha; the factor is alpha / rank. targets: names of linears, in every layer.
        base: what the adapter names as its base; by default the model's path. settings: as of `Trainer`.

        Raises ConfigError for linears that there are not, and for a model of which training has no gradient.
        """
        if unknown := [name for name in targets if name not in TARGETS]:
            raise ConfigError(f"expected some of {', '.join(TARGETS)}, got {unknown[0]!r}", field="lora_targets")
        if rank < 1 or not targets or not alpha > 0:
            raise ConfigError("expected a rank of 1 or more, an alpha above 0, and targets", field="lora_rank")
        self.rank, self.alpha, self.targets = rank, alpha, tuple(dict.fromkeys(targets))
        self.frozen = model if isinstance(model, FrozenModel) else FrozenModel.of(model)
        self.base = base or (str(model.path.resolve()) if model.path is not None else "")
        dice, factors = np.random.default_rng([seed, 2]), Masters()
        for module, linear in self.frozen.linears.items():
            if module.rpartition(".")[2] in self.targets:
                (out, columns), dtype = linear.values.shape, linear.values.dtype
                bound = columns**-0.5
                factors[lora_name(module, "A")] = dice.uniform(-bound, bound, (rank, columns)).astype(dtype)
                factors[lora_name(module, "B")] = np.zeros((out, rank), dtype=dtype)
        super().__init__(model.config, factors, **settings)
        if self.backend == "cupy":
            raise ConfigError("adapters are trained on the processor: numpy or cython", field="backend")
        if model.path is not None and model.path.is_dir():
            self.tokenizer_files = read_tokenizer_folder(model.path)

    def check_masters(self, masters: Mapping[str, Floats]) -> Masters:
        master_shapes(self.config)  # raises for a model without gradients
        return {name: array.copy() for name, array in masters.items()}

    @property
    def factor(self) -> float:
        return self.alpha / self.rank

    def adapter(self) -> Adapter:
        """The adapter as it is now, for `LoadedModel.put_adapter`."""
        terms: dict[str, LoraTerm] = {}
        for module, name in self.frozen.names.items():
            if lora_name(module, "A") in self.masters:
                a, b = (self.masters[lora_name(module, letter)].astype(np.float32) for letter in "AB")
                terms[name] = LoraTerm(a, b, self.factor)
        return Adapter(terms)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the adapter as peft reads it: adapter_config.json and adapter_model.safetensors, float32."""
        path = Path(folder)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self.rank,
            "lora_alpha": self.alpha if self.alpha % 1 else int(self.alpha),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "modules_to_save": None,
            "target_modules": list(self.targets),
            "use_dora": False,
            "use_rslora": False,
        }
        write_file(path / CONFIG_FILE, (json.dumps(config, indent=2) + "\n").encode())
        factors = {f"base_model.model.{name}": array for name, array in self.masters.items()}
        write_masters(path / WEIGHTS_FILE, factors, {"format": "pt"})

    def network(self, run: Callable[..., Any]) -> TrainingNetwork:
        return LoraNetwork(self, run)


def lora_name(module: str, letter: str) -> str:
    """ "model.layers.0.self_attn.q_proj", "A" -> the factor's name, without peft's prefix."""
    return f"{module}.lora_{letter}.weight"


@dataclass(frozen=True, eq=False)
class FrozenModel:
    """What the passes read of the model below, in float32, or in float64 to measure rounding.

    arrays: everything but the linears' matrices, by hub name. linears: these, by module. names: the linears' own, by
    module.
    """

    config: ModelConfig
    arrays: Masters
    linears: dict[str, StepLinear]
    names: dict[str, str]
    path: Path | None = None

    @classmethod
    def of(cls, model: LoadedModel) -> FrozenModel:
        """A loaded model, whatever its backend and format. Raises ConfigError."""
        w, arrays = plain_weights(model.weights), Masters()
        if any(weight.kind == "ruled" for _, weight in w.linears()):
            message = "training has no gradient of inputs that are rounded by blocks; load the model without"
            raise ConfigError(message, field="activations")
        linears: dict[str, StepLinear] = {}
        arrays[EMBEDDING] = _dense(w.embedding)
        if not w.tied:
            arrays[f"{hf_module('lm_head')}.weight"] = _dense(w.lm_head)
        arrays[f"{hf_module('final_norm')}.weight"] = w.final_norm.weight
        for index, layer in enumerate(w.layers):
            for short, norm in layer.norms():
                arrays[f"{hf_module(f'blocks.{index}.{short}')}.weight"] = norm.weight
            for short, weight in layer.linears():
                module = hf_module(linear_name(index, short))
                if isinstance(weight, OnLinear):
                    message = "has an adapter on already; give its base, or a folder without the adapter's files"
                    raise ConfigError(f"the model {message} (load: adapter='none')", field="lora")
                if weight.bias is not None:
                    arrays[f"{module}.bias"] = weight.bias
                if isinstance(weight, NormedLinear):
                    arrays[f"{module}.rms_norm.weight"] = weight.own_norm.weight
                    weight = weight.linear
                linears[module] = _step_linear(weight)
        return cls(model.config, arrays, linears, _linear_names(model.config), model.path)

    @classmethod
    def of_masters(cls, config: ModelConfig, masters: Masters, mix: float = 1.0) -> FrozenModel:
        """The model that these masters of a `Trainer` make. mix: as of `StepLinear.quantize`; 0 leaves them dense."""
        arrays, linears, names = dict(masters), dict[str, StepLinear](), _linear_names(config)
        for module, name in names.items():
            master = arrays.pop(f"{module}.weight")
            quantized = mix > 0 and is_ternary(config, name)
            linears[module] = StepLinear.quantize([master], mix) if quantized else StepLinear.dense([master])
        return cls(config, arrays, linears, names)


def _linear_names(config: ModelConfig) -> dict[str, str]:
    """{"model.layers.0.self_attn.q_proj": "blocks.0.attn.q_proj", ...}"""
    names = [linear_name(i, short) for i in range(config.num_hidden_layers) for short in config.linear_shapes(i)]
    return {hf_module(name): name for name in names}


def _dense(w: LinearWeight) -> Floats:
    return w.rows(slice(None), np.float32)


def _step_linear(w: LinearWeight) -> StepLinear:
    n_out = w.shape[0]
    if isinstance(w, TernaryWeight):
        scales = np.full(n_out, w.w_dequant_scale, dtype=np.float32)
        return StepLinear(w.ternary().astype(np.float32), scales, (n_out,))
    try:
        return StepLinear(np.ascontiguousarray(_dense(w), dtype=np.float32), None, (n_out,), 0.0)
    except ShapeError as problem:
        raise ConfigError(f"training has no gradient of {w.kind} linears", field="lora") from problem


class LoraNetwork(TrainingNetwork):
    """The network with frozen linears, and a term of each that has factors."""

    def __init__(self, trainer: LoraTrainer, run: Callable[..., Any]) -> None:
        self.factors, self.factor, self.frozen = trainer.masters, trainer.factor, trainer.frozen
        super().__init__(trainer.config, trainer.frozen.arrays, functions=trainer.functions, run=run)

    def _step_linears(self, modules: tuple[str, ...], quantized: bool, mix: float) -> StepLinear:
        parts = [self.frozen.linears[module] for module in modules]
        if len(parts) == 1:
            return parts[0]
        if len({part.scales is None for part in parts}) > 1:
            raise ConfigError(f"training needs {', '.join(modules)} all ternary, or none", field="lora")
        scales = [part.scales for part in parts if part.scales is not None]
        values = np.concatenate([part.values for part in parts])
        sizes = tuple(size for part in parts for size in part.sizes)
        return StepLinear(values, np.concatenate(scales) if scales else None, sizes, parts[0].mix)

    def _linear_backward(
        self, dys: list[Floats], saved: LinearInput, group: LinearGroup, state: SequencePass
    ) -> Floats:
        """dX = dY W_q alone."""
        dy, w = dys[0] if len(dys) == 1 else np.concatenate(dys, axis=1), group.weight
        dx: Floats = self.ops.product(dy if w.scales is None else dy * w.scales, w.values)
        return dx

    def _outer_gradients(self, state: SequencePass, *_: Any) -> None:
        """None of the embedding or the head; and those of norms and the like, which passes have left, are dropped."""
        state.gradients = {name: each for name, each in state.gradients.items() if name in self.factors}

    def _linears(
        self, x: Floats, layer: int, shorts: tuple[str, ...], state: SequencePass
    ) -> tuple[list[Floats], Callable[[Sequence[Floats]], Floats]]:
        outputs, base_backward = super()._linears(x, layer, shorts, state)
        saved: dict[int, tuple[str, Floats]] = {}  # index of the linear -> its module, and A x
        for index, short in enumerate(shorts):
            module = hf_module(linear_name(layer, short))
            if lora_name(module, "A") not in self.factors:
                continue
            t = _wide_product(x, self.factors[lora_name(module, "A")])
            scaled = self.factors[lora_name(module, "B")] * self.factor
            outputs[index] = outputs[index] + _wide_product(t, scaled)
            saved[index] = module, t

        def backward(dys: Sequence[Floats]) -> Floats:
            dx = base_backward(dys)
            for index, (module, t) in saved.items():
                dy, a = dys[index] * self.factor, self.factors[lora_name(module, "A")]
                dt = dy @ self.factors[lora_name(module, "B")]
                state.gradients[lora_name(module, "B")] = dy.T @ t
                state.gradients[lora_name(module, "A")] = dt.T @ x
                dx = dx + dt @ a
            return dx

        return outputs, backward


def _wide_product(x: Floats, w: Array) -> Floats:
    """x w^T, summed in float64 and rounded once, as the model computes a term."""
    y: Floats = (x.astype(np.float64) @ w.T.astype(np.float64)).astype(x.dtype)
    return y
