"""Another trainer's gradients and masters against ours: the first wrong one in the order of the backward pass, and why.

A training trace is a safetensors file with `tokens` (B, T), and any of: `loss` (1,), `grad.NAME`, and `master.NAME`
after one AdamW step, with NAME as on the hub ("model.layers.0.mlp.down_proj.weight"). The metadata key `optimizer` is
JSON: {"lr": ..., "betas": [...], "eps": ..., "weight_decay": ..., "max_norm": null}.

An int8 activation that rounds the other way moves a gradient of a ternary model by up to 4e-3, and some mistakes move
it less. So a trace within the tolerance is still wrong when a known mistake gives all of it `CLEARER` times better.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..errors import FormatError
from ..formats.names import hf_module
from ..formats.safetensors import SafetensorsFile
from ..reference.layers import Array
from ..reference.weights import linear_name
from ..training import AdamW, Trainer, ops
from ..training.network import EMBEDDING, Masters
from ..training.ops import LinearInput
from ..training.optimizer import clip_gradients
from .tolerances import EPSILON, GRADIENTS
from .types import Tensors

PREFIXES = ("grad.", "master.")
CLEARER = 10
_PARTS_BACKWARDS = (
    *("down_proj", "ffn_sub_norm", "up_proj", "gate_proj", "ffn_norm"),
    *("o_proj", "attn_sub_norm", "v_proj", "k_proj", "q_proj", "attn_norm"),
)


@dataclass(frozen=True)
class GradientVerdict:
    """first_wrong: the trace's name of the first tensor that differs; None: all agree.

    distances: relative L2 of each tensor that was compared, in the order of the backward pass.
    cause: the known mistake that reproduces the trace's tensors, if there is one.
    """

    agrees: bool
    first_wrong: str | None
    cause: str | None
    distances: dict[str, float]

    @property
    def sentence(self) -> str:
        if self.agrees:
            return f"AGREES: {len(self.distances)} tensors of the training step"
        distance = self.distances[self.first_wrong or ""]
        cause = self.cause or "none of the known mistakes reproduces it"
        return f"DIFFERS: the first wrong tensor is {self.first_wrong}, {distance:.1e} from the reference's: {cause}"


def is_training_trace(path: Path) -> bool:
    with SafetensorsFile(path) as file:
        return any(name.startswith(PREFIXES) for name in file.tensors)


def cross_gradients(folder: Path, path: Path) -> GradientVerdict:
    """Compare a training trace with the step that `Trainer` takes from the masters in `folder`.

    Raises FormatError for a trace without tokens, or with tensors that the model does not have.
    """
    trainer = Trainer.from_folder(folder)
    with SafetensorsFile(path) as file:
        if "tokens" not in file.tensors:
            raise FormatError("a training trace needs the tensor tokens (B, T)", path=path, field="tokens")
        tensors = {name: file.read(name) for name in file.tensors}
        try:
            settings: dict[str, Any] = json.loads(file.metadata.get("optimizer", "{}"))
            step = TrainingStep(trainer, np.atleast_2d(tensors.pop("tokens")).astype(np.int64), dict(settings))
        except (ValueError, TypeError) as problem:
            raise FormatError("expected a JSON object of AdamW's settings", path=path, field="optimizer") from problem
    return judge(step, tensors, path)


@dataclass(eq=False)
class TrainingStep:
    """A training step from given masters, which can be taken again with one thing changed."""

    trainer: Trainer
    tokens: Array
    settings: dict[str, Any]

    def take(self, mistake: Mistake | None = None, masters: bool = True) -> Masters:
        """ "loss", "grad.NAME" and, if asked, "master.NAME" of the step."""
        own = self.trainer
        changes = {} if mistake is None else mistake.functions
        trainer = Trainer(own.config, own.masters, threads=own.threads, backend="numpy")
        trainer.functions = SimpleNamespace(**{**vars(ops), **changes})
        loss, gradients = trainer.loss_and_gradients(self.tokens)
        if mistake is not None and mistake.gradients is not None:
            gradients = mistake.gradients(trainer, gradients, self.tokens)
        out: Masters = {"loss": np.array([loss]), **{f"grad.{name}": g.copy() for name, g in gradients.items()}}
        if masters:
            s = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "max_norm": None} | self.settings
            update = plain_update if mistake is None or mistake.update is None else mistake.update
            update(trainer.masters, gradients, s)
            out |= {f"master.{name}": w for name, w in trainer.masters.items()}
        return out


def judge(step: TrainingStep, theirs: Tensors, path: Path | None = None) -> GradientVerdict:
    """The verdict on another trainer's tensors of the same step."""
    wants_masters = any(name.startswith("master.") for name in theirs)
    ours = step.take(masters=wants_masters)
    names = [name for name in backward_order(step.trainer) if name in theirs]
    for name in theirs:
        if name not in ours or theirs[name].size != ours[name].size:
            raise FormatError("is no tensor of this model's training step, or of another shape", path=path, field=name)
    quantized = step.trainer.config.quantization is not None
    limit = GRADIENTS["ternary" if quantized else "dense"].relative_l2

    def distances(of: Masters) -> dict[str, float]:
        """A master's distance is that of its change: the weights themselves hardly move."""
        return {name: _distance(*_changes(step.trainer, name, theirs[name], of[name])) for name in names}

    own = distances(ours)
    beyond = [name for name in names if not own[name] <= limit]
    if not beyond and max(own.values(), default=0.0) <= GRADIENTS["dense"].relative_l2:
        return GradientVerdict(True, None, None, own)
    best: tuple[float, Mistake, dict[str, float]] | None = None
    for mistake in known_mistakes(step, ours, theirs):
        of_mistake = distances(step.take(mistake, wants_masters))
        worst = max(of_mistake.values())
        if worst <= limit and (best is None or worst < best[0]):
            best = worst, mistake, of_mistake
    if best is not None and (beyond or CLEARER * best[0] < max(own.values())):
        first = next((name for name in names if own[name] > max(CLEARER * best[2][name], EPSILON)), names[0])
        return GradientVerdict(False, first, best[1].description, own)
    if beyond:
        return GradientVerdict(False, beyond[0], None, own)
    return GradientVerdict(True, None, None, own)


def backward_order(trainer: Trainer) -> Iterator[str]:
    """The trace's names in the order in which a training step computes them."""
    yield "loss"
    modules = [hf_module("lm_head"), hf_module("final_norm")]
    for layer in reversed(range(trainer.config.num_hidden_layers)):
        for part in _PARTS_BACKWARDS:
            modules.append(hf_module(linear_name(layer, part) if part.endswith("_proj") else f"blocks.{layer}.{part}"))
    modules.append(hf_module("embedding"))
    names = [f"{module}{end}" for module in modules for end in (".weight", ".bias", ".rms_norm.weight")]
    for prefix in PREFIXES:
        yield from (f"{prefix}{name}" for name in names if name in trainer.masters)


def _changes(trainer: Trainer, name: str, theirs: Array, ours: Array) -> tuple[Array, Array]:
    theirs = theirs.reshape(ours.shape).astype(np.float64)
    if not name.startswith("master."):
        return theirs, ours
    before = trainer.masters[name.removeprefix("master.")].astype(np.float64)
    return theirs - before, ours - before


def _distance(theirs: Array, ours: Array) -> float:
    """Relative L2; 1 for what should be zero and is not."""
    size = float(np.linalg.norm(ours))
    error = float(np.linalg.norm(theirs - ours))
    return error / size if size else float(error > 0)


@dataclass(frozen=True)
class Mistake:
    """A change of the training step: of functions of `ops`, of all gradients, or of the optimiser's update."""

    description: str
    functions: Mapping[str, Any]
    gradients: Callable[[Trainer, Masters, Array], Masters] | None = None
    update: Callable[[Masters, Masters, dict[str, Any]], None] | None = None


def known_mistakes(step: TrainingStep, ours: Masters, theirs: Tensors) -> Iterator[Mistake]:
    """Every mistake on the list, and a common factor of all gradients if there is one."""
    names = [name for name in theirs if name.startswith("grad.")]
    ratios = [float(np.vdot(theirs[n], ours[n]) / np.vdot(ours[n], ours[n])) for n in names if ours[n].any()]
    if ratios and max(ratios) - min(ratios) < 1e-3 * abs(max(ratios)) and abs(ratios[0] - 1) > 1e-3:
        factor = sum(ratios) / len(ratios)
        tokens = step.tokens.size
        known: dict[float, str] = {tokens - len(step.tokens): "summed over the tokens, where their mean belongs"}
        known[1 - len(step.tokens) / tokens] = "a mean over all tokens of a sequence, of which the first has no loss"
        near = next((text for value, text in known.items() if math.isclose(value, factor, rel_tol=1e-3)), None)
        text = f"every gradient is {factor:.4g} times the reference's" + (f": the loss is {near}" if near else "")
        yield Mistake(text, {}, lambda trainer, g, tokens: {n: factor * x for n, x in g.items()})
    yield from MISTAKES


def is_matrix(w: Array) -> bool:
    return w.ndim > 1


def plain_update(
    masters: Masters, gradients: Masters, s: dict[str, Any], decays: Callable[[Array], bool] = is_matrix
) -> None:
    """The first step of AdamW with the settings `s`, in place."""
    clip_gradients(gradients, s["max_norm"] or math.inf)
    for w in masters.values():
        w *= 1 - s["lr"] * s["weight_decay"] if decays(w) else 1
    AdamW(tuple(s["betas"]), s["eps"]).update(masters, gradients, s["lr"], 0.0)


def _update_without_correction(masters: Masters, gradients: Masters, s: dict[str, Any]) -> None:
    clip_gradients(gradients, s["max_norm"] or math.inf)
    b1, b2 = s["betas"]
    for name, w in masters.items():
        g = gradients[name]
        w *= 1 - s["lr"] * s["weight_decay"] if is_matrix(w) else 1
        w -= s["lr"] * (1 - b1) * g / (np.sqrt((1 - b2) * np.square(g)) + s["eps"])


def _update_with_l2(masters: Masters, gradients: Masters, s: dict[str, Any], clip_first: bool = True) -> None:
    if clip_first:
        clip_gradients(gradients, s["max_norm"] or math.inf)
    total = {n: g + s["weight_decay"] * masters[n] if is_matrix(g) else g for n, g in gradients.items()}
    if not clip_first:
        clip_gradients(total, s["max_norm"] or math.inf)
    AdamW(tuple(s["betas"]), s["eps"]).update(masters, total, s["lr"], 0.0)


def _gate_without_two(dy: Array, gate: Array, up: Array, activation: str) -> tuple[Array, Array]:
    d_gate, d_up = ops.gated_backward(dy, gate, up, activation)
    return (d_gate / 2 if activation == "relu2" else d_gate), d_up


def _of_ternary(
    change: Callable[[Array, Array, Array, np.float32], Array],
) -> Callable[[Trainer, Masters, Array], Masters]:
    """Changes the gradient of each ternary master: change(gradient, w, w_t, scale)."""

    def apply(trainer: Trainer, gradients: Masters, tokens: Array) -> Masters:
        out = dict(gradients)
        for name, w in trainer.masters.items():
            if name.endswith("_proj.weight") and trainer.config.quantization is not None:
                out[name] = change(gradients[name], w, *ops.quantization.quantize_weights(w))
        return out

    return apply


def _through_the_scale(g: Array, w: Array, w_t: Array, s: np.float32) -> Array:
    d_scale = np.einsum("nk,nk->", g, w_t - w / s, dtype=np.float64)
    return g + np.float32(d_scale / w.size) * np.sign(w)


def _tied_head_once(part: str) -> Callable[[Trainer, Masters, Array], Masters]:
    """Only the "embedding" part, or only the "head" part, of a tied matrix's gradient."""

    def apply(trainer: Trainer, gradients: Masters, tokens: Array) -> Masters:
        if not trainer.config.tie_word_embeddings:
            return gradients
        masters = trainer.masters | {f"{hf_module('lm_head')}.weight": trainer.masters[EMBEDDING].copy()}
        untied = Trainer(replace(trainer.config, tie_word_embeddings=False), masters, threads=trainer.threads)
        _, apart = untied.loss_and_gradients(tokens)
        return gradients | {EMBEDDING: apart[EMBEDDING if part == "embedding" else f"{hf_module('lm_head')}.weight"]}

    return apply


# fmt: off
MISTAKES: tuple[Mistake, ...] = (
    Mistake("RMSNorm's gradient lacks the mean: r depends on every value of the row",
        {"rms_norm_backward": lambda dy, x, weight, r: (dy * weight / r, np.einsum("td,td->d", dy, x / r))}),
    Mistake("dW is made of the activations before their quantisation; dW = dY^T X_q",
        {"linear": lambda x, w: (ops.linear(x, w)[0], LinearInput(x))}),
    Mistake("the ReLU^2 gate's derivative lacks its factor 2", {"gated_backward": _gate_without_two}),
    Mistake("queries' and keys' gradients are not turned back by RoPE's angle",
        {"rope_backward": lambda dy, cos, sin: dy}),
    Mistake("the gradient also goes through the weight's scale", {}, _of_ternary(_through_the_scale)),
    Mistake("weights beyond the scale get no gradient: the clip is not passed straight through",
        {}, _of_ternary(lambda g, w, w_t, s: g * (np.abs(w) <= s))),
    Mistake("the tied matrix has the gradient of the embedding alone; the head's is missing",
        {}, _tied_head_once("embedding")),
    Mistake("the tied matrix has the gradient of the head alone; the embedding's is missing",
        {}, _tied_head_once("head")),
    Mistake("norms and biases decay too", {}, None, lambda m, g, s: plain_update(m, g, s, decays=lambda w: True)),
    Mistake("nothing decays", {}, None, lambda m, g, s: plain_update(m, g, s | {"weight_decay": 0.0})),
    Mistake("Adam's bias correction is missing", {}, None, _update_without_correction),
    Mistake("the decay is added to the gradient (L2) instead of to the weight", {}, None, _update_with_l2),
    Mistake("gradients are clipped after the decay was added to them",
        {}, None, lambda m, g, s: _update_with_l2(m, g, s, clip_first=False)),
)
