"""Words for a cause: names of steps and places, the line of the reference to compare with, one value as an example."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...reference import delta_net, layers, model, ops, quantization
from ...reference.config import ModelConfig
from .variants import Step

NOUNS = {
    "hook_embed": "the embedding", "ln1": "attn_norm", "ln2": "ffn_norm", "attn.sub_norm": "attn_sub_norm", "mlp.sub_norm": "ffn_sub_norm",
    "ln_final": "the final norm", "attn.q_norm": "q_norm", "attn.k_norm": "k_norm", "attn.hook_q": "q", "attn.hook_k": "k", "attn.hook_v": "v",
    "attn.hook_rot_q": "q after RoPE", "attn.hook_rot_k": "k after RoPE", "attn.hook_attn_scores": "the attention scores",
    "attn.hook_pattern": "the attention pattern", "attn.hook_z": "attention's values", "mlp.hook_pre": "the gate", "mlp.hook_pre_linear": "up",
    "mlp.hook_post": "act(gate) * up", "hook_resid_mid": "the stream after attention", "hook_resid_post": "the stream after the feed-forward",
    "hook_resid_pre": "the stream before the block", "hook_attn_out": "attention's result", "hook_mlp_out": "the feed-forward's result",
    "attn.hook_scaled_q": "q times the query scale", "hook_embed_scaled": "the scaled embedding", "ln_final.hook_scaled": "the head's scaled input", "attn.hook_gated_z": "attention's gated values",
    "attn.hook_conv": "DeltaNet's convolution", "attn.hook_log_decay": "the log of DeltaNet's decay", "attn.hook_beta": "DeltaNet's beta", "attn.hook_delta_out": "the answer of DeltaNet's memory", "attn.delta_norm": "delta_norm",
}  # fmt: skip
HOOKS = {
    "hook_scale": "the length in {}", "hook_normalized": "{}", "hook_x_scale": "the activation scale of {}", "hook_x_int8": "the int8 input of {}",
    "hook_acc_int32": "the accumulators of {}", "hook_out": "the output of {}", "product": "the output of {} before its bias", "hook_uncapped": "the output of {} before its cap",
}  # fmt: skip
# What computes a step: the function and the line of it to compare with.
FUNCTIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "hook_embed": (ops.Ops.embed, "return"), "hook_scale": (layers.rms_scale, "np.sqrt"), "hook_normalized": (layers.rms_norm, "return"),
    "hook_x_scale": (quantization.quantize_activations, "x_quant_scale ="), "hook_x_int8": (quantization.quantize_activations, "x_q ="),
    "hook_acc_int32": (quantization.ternary_matmul, "acc["), "product": (layers.dense_matmul, "y[i"), "hook_uncapped": (layers.dense_matmul, "y[i"),
    "hook_out": (quantization.dequantize, "return"), "hook_q": (model.attention_block, "q = q.reshape"), "hook_k": (model.attention_block, "k = k.reshape"),
    "hook_v": (model.attention_block, "v = v.reshape"), "hook_rot_q": (layers.apply_rope, "return"), "hook_rot_k": (layers.apply_rope, "return"),
    "hook_attn_scores": (layers.attention_scores, "return"), "hook_pattern": (layers.softmax, "return"), "hook_z": (layers.attention_values, "z = "),
    "hook_pre": (model.feed_forward, "gate, up"), "hook_pre_linear": (model.feed_forward, "gate, up"), "hook_post": (layers.gated, "return"),
    "hook_conv": (delta_net.causal_conv, "return"), "hook_log_decay": (ops.Ops.delta_gates, "log_alpha ="), "hook_beta": (ops.Ops.delta_gates, "return"),
    "hook_delta_out": (delta_net.delta_recurrence, "y[t]"), "hook_gated_z": (ops.Ops.output_gate, "return"),
    "hook_resid_mid": (model.add_result, "return"), "hook_resid_post": (model.add_result, "return"),
}  # fmt: skip


def layer_of(name: str) -> int | None:
    return int(name.split(".")[1]) if name.startswith("blocks.") else None


def role(name: str) -> str:
    """The name without its block."""
    return name.split(".", 2)[2] if name.startswith("blocks.") else name


def noun(name: str) -> str:
    """ "blocks.0.attn.q_proj.hook_out" -> "the output of q_proj"."""
    part = role(name)
    if part in NOUNS:
        return NOUNS[part]
    owner, _, hook = part.rpartition(".")
    return HOOKS.get(hook, hook + " of {}").format(
        NOUNS.get(owner, owner.removesuffix(".rms_norm").rpartition(".")[2] or owner)
    )


def numbers_in_words(numbers: Sequence[int], total: int) -> str:
    """[3, 4, 5], 6 -> "3 to 5 (the last 3 of 6)"."""
    n = sorted(numbers)
    steps = set(np.diff(n).tolist())
    if len(n) == 1:
        return f"{n[0]}"
    if steps == {1}:
        place = f"the last {len(n)}" if n[-1] == total - 1 else f"the first {len(n)}" if n[0] == 0 else f"{len(n)}"
        return f"{n[0]} to {n[-1]} ({place} of {total})"
    if len(steps) == 1 and len(n) > 3:
        return f"{n[0]}, {n[1]}, ... {n[-1]} (every {steps.pop()}th of {total})"
    return ", ".join(map(str, n)) if len(n) <= 8 else f"{', '.join(map(str, n[:6]))}, ... ({len(n)} of {total})"


def axis_words(shape: tuple[int, ...], by_head: bool) -> tuple[str, ...]:
    """What the axes of a tensor count: (N, C), (N, heads, d), or by_head (heads, N, keys)."""
    if by_head:
        return "head", "token", "key"
    return ("token", "head", "number") if len(shape) == 3 else ("token", "column")[: len(shape)]


def place_in_words(
    name: str, shape: tuple[int, ...], by_head: bool, cfg: ModelConfig, axis: int, indices: Sequence[int]
) -> str:
    """Where a tensor is wrong: "heads 0 and 2", with what is right."""
    what, total = axis_words(shape, by_head)[axis], shape[axis]
    d = cfg.head_dim
    of_heads = ".attn." in name and not name.endswith(("o_proj.hook_out", "hook_conv"))
    if what == "column" and of_heads and total % d == 0 and total > d:
        heads = sorted({i // d for i in indices})
        if len(heads) * d == len(indices):
            what, indices, total = "head", heads, total // d
    rest = [i for i in range(total) if i not in set(indices)]
    of_each = " of each head" if what == "number" else ""
    named = f"{what}{'s' * (len(rest) > 1)}{of_each} {numbers_in_words(rest, total)}"
    others = "the others" if "..." in named else named
    wrong = f"in {what}{'s' * (len(indices) > 1)}{of_each} {numbers_in_words(indices, total)} only"
    return f"{wrong}; {others} {'is' if len(rest) == 1 else 'are'} right"


def scope_in_words(names: Iterable[str], every: Iterable[str]) -> str:
    """Which steps, of every one that a run has: "q_proj and k_proj, in layer 1 only"."""
    chosen, every = list(names), list(every)
    same_kind = [name for name in every if name.rpartition(".")[2] in {n.rpartition(".")[2] for n in chosen}]
    roles = list(dict.fromkeys(role(name) for name in chosen))
    if len(chosen) == len(same_kind) > 2 and len(roles) > 2:
        return f"everywhere ({noun(chosen[0])} and all others)"
    in_layers = sorted({layer for name in chosen if (layer := layer_of(name)) is not None})
    possible = sorted({layer for name in every if role(name) in roles and (layer := layer_of(name)) is not None})
    words = " and ".join(", ".join(noun(r) for r in roles).rsplit(", ", 1))
    if not in_layers or len(possible) == 1:
        return words
    if in_layers == possible:
        return f"{words}, in every layer"
    return f"{words}, in layer{'s' * (len(in_layers) > 1)} {numbers_in_words(in_layers, len(possible))} only"


def remedy(step: Step) -> str:
    """The line of the reference to compare with."""
    kind = step.name.rpartition(".")[2]
    function, mark = FUNCTIONS.get(kind, (model.forward, "return"))
    if kind == "hook_out" and len(step.inputs) == 2:
        function, mark = (
            (ops.Ops.add, "return") if isinstance(step.inputs[1], np.ndarray) else (layers.dense_matmul, "y[i")
        )
    if kind == "hook_scale":
        mark = "return"
    lines, first = inspect.getsourcelines(function)
    index = max((i for i, line in enumerate(lines) if mark in line), default=0)
    path = Path(inspect.getsourcefile(function) or "")
    return f"Compare with {'/'.join(path.parts[-3:])}:{first + index}, {function.__name__}: {lines[index].strip().split('  #')[0]}"


def _some(values: NDArray) -> str:
    flat = np.asarray(values).reshape(-1)
    return (
        "["
        + ", ".join(f"{v:.5g}" for v in flat[:4].tolist())
        + (f", ... {flat.size} numbers]" if flat.size > 4 else "]")
    )


def example(step: Step, theirs: NDArray, right: NDArray) -> str:
    """One value: its inputs, the reference's steps, the engine's value."""
    with np.errstate(all="ignore"):
        error = np.where(np.isfinite(right), np.abs(np.nan_to_num(theirs, nan=np.inf) - right), 0)
    index = tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape))
    kind, a, i = step.name.rpartition(".")[2], step.inputs, index
    j = i[-1]
    lines: list[str] = []
    if kind == "hook_scale":
        ms = float(np.square(a[0][i[0]].astype(np.float64)).mean())
        lines = [
            f"x = {_some(a[0][i[0]])}",
            f"mean(x^2) = {ms:.6g}, + eps {a[1]:g} = {ms + a[1]:.6g}, its root = {right[i]:.6g}",
        ]
    elif kind == "hook_normalized":
        lines = [
            f"x = {a[0][i]:.6g}, length = {float(a[1][i[0], 0]):.6g}, weight = {float(a[2][j]):.6g}",
            f"x / length * weight = {right[i]:.6g}",
        ]
    elif kind == "hook_x_scale":
        lines = [
            f"x = {_some(a[0][i[0]])}",
            f"max|x| = {float(np.abs(a[0][i[0]]).max()):.6g}, 127 / max|x| = {right[i]:.6g}",
        ]
    elif kind == "hook_x_int8":
        lines = [
            f"x = {a[0][i]:.6g}, scale = {float(a[1][i[0], 0]):.6g}, x * scale = {float(a[0][i] * a[1][i[0], 0]):.6f}, rounded to even = {right[i]:g}"
        ]
    elif kind == "hook_acc_int32":
        lines = [
            f"x = {_some(a[0][i[0]])}, row {j} of the matrix = {_some(a[1].ternary()[j])}",
            f"their sum of products = {right[i]:g}",
        ]
    elif kind in ("hook_out", "product") and len(a) == 3:
        lines = [
            f"accumulator = {a[0][i]}, w_scale = {float(a[1].w_dequant_scale):.6g}, x_scale = {float(a[2][i[0], 0]):.6g}",
            f"accumulator * (w_scale / x_scale) = {right[i]:.6g}",
        ]
    elif kind == "hook_attn_scores":
        key = a[1][j, i[0] * a[1].shape[1] // a[0].shape[1]]
        dot = float(a[0][i[1], i[0]].astype(np.float64) @ key)
        lines = [
            f"q = {_some(a[0][i[1], i[0]])}, k = {_some(key)}",
            f"q k = {dot:.6g}, / sqrt({len(key)}) = {right[i]:.6g}",
        ]
    elif kind == "hook_pattern":
        lines = [f"scores = {_some(a[0][i[0], i[1]])}", f"exp(s - max) / sum = {right[i]:.6g}"]
    elif kind == "hook_post":
        lines = [f"gate = {a[0][i]:.6g}, up = {a[1][i]:.6g}", f"{a[2]}(gate) * up = {right[i]:.6g}"]
    elif kind in ("hook_resid_mid", "hook_resid_post"):
        lines = [f"x = {a[0][i]:.6g}, the block's result = {a[1][i]:.6g}", f"their sum = {right[i]:.6g}"]
    else:
        lines = [f"the reference computes {right[i]:.6g}"]
    ratio = (
        f", {theirs[i] / right[i]:.6g} times as much"
        if right[i] and np.isfinite(theirs[i]) and not np.isneginf(right[i])
        else ""
    )
    return "\n".join([f"{step.name}[{', '.join(map(str, index))}]", *lines, f"the engine has {theirs[i]:.6g}{ratio}"])
