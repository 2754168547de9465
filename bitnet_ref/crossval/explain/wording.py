"""Words for a cause: names of steps and places, the line of the reference to compare with, one value as an example."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...families import all_steps, family_table
from ...reference import layers, model, ops, quantization
from ...reference.layers import Array
from ..names import LOGITS, hook_of, layer_of, role
from ..types import Tokens
from .variants import Setting, Step

NOUNS = {
    "hook_embed": "the embedding", "ln1": "attn_norm", "ln2": "ffn_norm", "attn.sub_norm": "attn_sub_norm", "mlp.sub_norm": "ffn_sub_norm",
    "ln_final": "the final norm", "attn.hook_q": "q", "attn.hook_k": "k", "attn.hook_v": "v",
    "attn.hook_rot_q": "q after RoPE", "attn.hook_rot_k": "k after RoPE", "attn.hook_attn_scores": "the attention scores",
    "attn.hook_pattern": "the attention pattern", "attn.hook_z": "attention's values", "mlp.hook_pre": "the gate", "mlp.hook_pre_linear": "up",
    "mlp.hook_post": "act(gate) * up", "hook_resid_mid": "the stream after attention", "hook_resid_post": "the stream after the feed-forward",
    "hook_resid_pre": "the stream before the block", "hook_attn_out": "attention's result", "hook_mlp_out": "the feed-forward's result",
    "hook_embed_scaled": "the scaled embedding", "ln_final.hook_scaled": "the head's scaled input",
}  # fmt: skip
HOOKS = {
    "hook_scale": "the length in {}", "hook_normalized": "{}", "hook_x_scale": "the activation scale of {}", "hook_x_int8": "the int8 input of {}",
    "hook_acc_int32": "the accumulators of {}", "hook_out": "the output of {}", "product": "the output of {} before its bias", "hook_uncapped": "the output of {} before its cap",
}  # fmt: skip
# What computes a step: the function and the line of it to compare with.
FUNCTIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "hook_embed": (ops.Ops.embed, "return"), "hook_embed_scaled": (model.embeddings, "return"), "hook_scaled": (model.head_input, "return"),
    "hook_scale": (layers.rms_scale, "np.sqrt"), "hook_normalized": (layers.rms_norm, "return"),
    "hook_x_scale": (quantization.quantize_activations, "x_quant_scale ="), "hook_x_int8": (quantization.quantize_activations, "np.rint"),
    "hook_acc_int32": (quantization.ternary_matmul, "acc["), "product": (layers.dense_matmul, "y[i"), "hook_uncapped": (layers.dense_matmul, "y[i"),
    "hook_out": (quantization.dequantize, "return"), "hook_q": (model.split_heads, "q = q.reshape"), "hook_k": (model.split_heads, "k = k.reshape"),
    "hook_v": (model.split_heads, "v = v.reshape"), "hook_rot_q": (layers.apply_rope, "return"), "hook_rot_k": (layers.apply_rope, "return"),
    "hook_attn_scores": (layers.attention_scores, "return"), "hook_pattern": (layers.softmax, "return"), "hook_z": (layers.attention_values, "z = "),
    "hook_pre": (model.feed_forward_result, "gate, up"), "hook_pre_linear": (model.feed_forward_result, "gate, up"), "hook_post": (layers.gated, "return"),
    "hook_resid_mid": (model.attention_block, "return"), "hook_resid_post": (model.feed_forward, "return"),
}  # fmt: skip


@family_table
def _nouns() -> dict[str, str]:
    """What steps are in a sentence, those of all families."""
    return NOUNS | {step.name: step.noun for step in all_steps() if step.noun}


@family_table
def _functions() -> dict[str, tuple[Callable[..., Any], str]]:
    """What computes steps, those of all families: by the last part of the name."""
    return FUNCTIONS | {hook_of(step.name): step.source for step in all_steps() if step.source is not None}


def noun(name: str) -> str:
    """ "blocks.0.attn.q_proj.hook_out" -> "the output of q_proj"."""
    template, module = _module_of(role(name))
    return template.format(module)


def numbers_in_words(numbers: Tokens, total: int) -> str:
    """[3, 4, 5], 6 -> "3 to 5 (the last 3 of 6)"."""
    n = sorted(numbers)
    steps = set(np.diff(n).tolist())
    if len(n) == 1:
        return f"{n[0]}"
    if steps == {1}:
        place = f"the last {len(n)}" if n[-1] == total - 1 else f"the first {len(n)}" if n[0] == 0 else f"{len(n)}"
        return f"{n[0]} to {n[-1]} ({place} of {total})"
    if len(steps) == 1 and len(n) > 3:
        return f"{n[0]}, {n[1]}, ... {n[-1]} (one in every {steps.pop()}, of {total})"
    return ", ".join(map(str, n)) if len(n) <= 8 else f"{', '.join(map(str, n[:6]))}, ... ({len(n)} of {total})"


def axis_words(shape: tuple[int, ...], by_head: bool, tokens: int) -> tuple[str, ...]:
    """What the axes of a tensor count: (N, C), (N, heads, d), by_head (heads, N, keys), of a norm over heads (N H, C)."""
    if by_head:
        return "head", "token", "key"
    if shape[0] > tokens:
        return "row", "column"
    words = {3: ("token", "head", "number"), 4: ("token", "head", "row", "column")}  # 4: a DeltaNet's memory
    return words.get(len(shape), ("token", "column")[: len(shape)])


def place_in_words(
    name: str, shape: tuple[int, ...], by_head: bool, setting: Setting, axis: int, indices: Tokens
) -> str:
    """Where a tensor is wrong: "heads 0 and 2", with what is right."""
    d, tokens = setting.config.head_dim, len(setting.tokens)
    what, total = axis_words(shape, by_head, tokens)[axis], shape[axis]
    if what == "row" and axis == 0:
        each = total // tokens
        of_rows = ("head", {i % each for i in indices}, each), ("token", {i // each for i in indices}, tokens)
        for part, numbers, count in of_rows:
            if len(numbers) * (total // count) == len(indices):
                what, indices, total = part, sorted(numbers), count
                break
    of_heads = ".attn." in name and not name.endswith(("o_proj.hook_out", "hook_conv"))
    if what == "column" and of_heads and total % d == 0 and total > d:
        heads = sorted({i // d for i in indices})
        if len(heads) * d == len(indices):
            what, indices, total = "head", heads, total // d
    owner = "chosen expert" if ".mlp." in name else "head"
    what, of_each = owner if what == "head" else what, f" of each {owner}" if what == "number" else ""
    rest = [i for i in range(total) if i not in set(indices)]
    named = f"{what}{'s' * (len(rest) > 1)}{of_each} {numbers_in_words(rest, total)}"
    others = "the others" if "..." in named else named
    wrong = f"in {what}{'s' * (len(indices) > 1)}{of_each} {numbers_in_words(indices, total)} only"
    return f"{wrong}; {others} {'is' if len(rest) == 1 else 'are'} right"


def _module_of(part: str) -> tuple[str, str]:
    """ "attn.q_proj.hook_out" -> "the output of {}", "q_proj". A tensor with a noun of its own: "{}", the noun."""
    owner, _, hook = part.rpartition(".")
    nouns = _nouns()
    if part in nouns:
        return "{}", nouns[part]
    owner_in_words = nouns.get(owner, owner.removesuffix(".rms_norm").rpartition(".")[2] or owner)
    return HOOKS.get(hook, hook + " of {}"), owner_in_words


def _joined(words: Sequence[str]) -> str:
    if len(words) > 5:
        return f"{', '.join(words[:3])} and {len(words) - 3} others"
    return " and ".join(", ".join(words).rsplit(", ", 1))


def _modules_in_words(chosen: Sequence[str], every: Sequence[str]) -> str:
    """Modules, of every one that has such a tensor: "q_proj and k_proj", "every linear but o_proj"."""
    others = [module for module in every if module not in chosen]
    if others == ["lm_head"] and len(chosen) > 3:
        return "every linear of the blocks"
    kind = "linear" if all(module.endswith(("_proj", "router", "lm_head")) for module in every) else "norm"
    if len(chosen) < 4 or len(others) > 2:
        return _joined(chosen)
    return f"every {kind}" + (f" but {_joined(others)}" if others else "")


def _roles_in_words(roles: Sequence[str], every: Sequence[str]) -> str:
    """ "q and k"; "the output of q_proj and k_proj"; "the activation scale and the int8 input of every linear"."""
    modules: dict[str, list[str]] = {}
    possible: dict[str, list[str]] = {}
    for parts, by_template in ((roles, modules), (every, possible)):
        for part in parts:
            template, module = _module_of(part)
            by_template.setdefault(template, []).append(module)
    texts = {t: (_modules_in_words(m, possible[t]) if len(t) > 4 else _joined(m)) for t, m in modules.items()}
    of_several = [template for template in texts if list(texts.values()).count(texts[template]) > 1]
    if of_several and len(of_several) == len(texts) and all(template.endswith(" of {}") for template in texts):
        return f"{_joined([template.removesuffix(' of {}') for template in texts])} of {texts[of_several[0]]}"
    return _joined([template.format(words) for template, words in texts.items()])


def _layers_in_words(chosen: Tokens, possible: Tokens) -> str:
    """ "in every layer", "in layer 1 only", "in every layer but 3", "in 7 of 12 layers: 0, 1, 4, ..."."""
    others = [layer for layer in possible if layer not in chosen]
    if not others:
        return "in every layer"
    if len(others) <= 2 and len(chosen) > 3:
        return f"in every layer but {_joined([str(layer) for layer in others])}"
    numbers = numbers_in_words(chosen, len(possible))
    if len(chosen) > 3 and "to" not in numbers and "every" not in numbers:
        return f"in {len(chosen)} of {len(possible)} layers: {', '.join(map(str, chosen[:3]))}, ..."
    return f"in layer{'s' * (len(chosen) > 1)} {numbers} only"


def scope_in_words(names: Iterable[str], every: Iterable[str]) -> str:
    """Which steps, of every one that a run has: "q_proj and k_proj, in layer 1 only"."""
    chosen, every = list(names), list(every)
    roles, possible_roles = (list(dict.fromkeys(map(role, steps))) for steps in (chosen, every))
    in_layers = sorted({layer for name in chosen if (layer := layer_of(name)) is not None})
    possible = sorted({layer for name in every if role(name) in roles and (layer := layer_of(name)) is not None})
    words = _roles_in_words(roles, possible_roles)
    if not in_layers or len(possible) == 1 or (" every " in words and in_layers == possible):
        return words
    return f"{words}, {_layers_in_words(in_layers, possible)}"


def remedy(step: Step) -> str:
    """The line of the reference to compare with."""
    kind = step.kind
    function, mark = _functions().get(kind, (model.forward, "return"))
    if kind == "hook_out" and len(step.inputs) == 2:
        adds = isinstance(step.inputs[1], np.ndarray)
        function, mark = (ops.Ops.add, "return") if adds else (layers.dense_matmul, "y[i")
    if kind == "hook_scale":
        mark = "return"
    if step.name == LOGITS and step.setting.config.logit_softcap is not None:
        function, mark = layers.softcap, "return"
    lines, first = inspect.getsourcelines(function)
    index = max((i for i, line in enumerate(lines) if mark in line), default=0)
    path = Path(inspect.getsourcefile(function) or "")
    return f"Compare with {'/'.join(path.parts[-3:])}:{first + index}, {function.__name__}: {lines[index].strip().split('  #')[0]}"


def _some(values: Array) -> str:
    flat = np.asarray(values).reshape(-1)
    return f"[{', '.join(f'{v:.5g}' for v in flat[:4].tolist())}{f', ... {flat.size} numbers' * (flat.size > 4)}]"


def _length_worked(a: Any, i: tuple[int, ...], right: float) -> str:
    ms = float(np.square(a[0][i[0]].astype(np.float64)).mean())
    return f"x = {_some(a[0][i[0]])}\nmean(x^2) = {ms:.6g}, + eps {a[1]:g} = {ms + a[1]:.6g}, its root = {right:.6g}"


def _score_worked(a: Any, i: tuple[int, ...], right: float) -> str:
    q, key = a[0][i[1], i[0]], a[1][i[2], i[0] * a[1].shape[1] // a[0].shape[1]]
    return f"q = {_some(q)}, k = {_some(key)}\nq k = {float(q.astype(np.float64) @ key):.6g}, / sqrt({len(key)}) = {right:.6g}"


def _sum_worked(a: Any, i: tuple[int, ...], right: float) -> str:
    return f"x = {a[0][i]:.6g}, the block's result = {a[1][i]:.6g}\ntheir sum = {right:.6g}"


def _result_alone(a: Any, i: tuple[int, ...], right: float) -> str:
    return f"the reference computes {right:.6g}"


def _scaled_worked(a: Any, i: tuple[int, ...], right: float) -> str:
    if len(a) < 3:  # a dense product
        return _result_alone(a, i, right)
    scales = f"w_scale = {float(a[1].w_dequant_scale):.6g}, x_scale = {float(a[2][i[0], 0]):.6g}"
    return f"accumulator = {a[0][i]}, {scales}\naccumulator * (w_scale / x_scale) = {right:.6g}"


# One value of a step: its inputs and the reference's steps, of the step's inputs, the value's index and right value.
WORKED: dict[str, Callable[[Any, tuple[int, ...], float], str]] = {
    "hook_scale": _length_worked, "hook_attn_scores": _score_worked, "hook_resid_mid": _sum_worked, "hook_resid_post": _sum_worked, "hook_out": _scaled_worked, "product": _scaled_worked,
    "hook_normalized": lambda a, i, right: f"x = {a[0][i]:.6g}, length = {float(a[1][i[0], 0]):.6g}, weight = {float(a[2][i[-1]]):.6g}\nx / length * weight = {right:.6g}",
    "hook_x_scale": lambda a, i, right: f"x = {_some(a[0][i[0]])}\nmax|x| = {float(np.abs(a[0][i[0]]).max()):.6g}, 127 / max|x| = {right:.6g}",
    "hook_x_int8": lambda a, i, right: f"x = {a[0][i]:.6g}, scale = {float(a[1][i[0], 0]):.6g}, x * scale = {float(a[0][i] * a[1][i[0], 0]):.6f}, rounded to even = {right:g}",
    "hook_acc_int32": lambda a, i, right: f"x = {_some(a[0][i[0]])}, row {i[-1]} of the matrix = {_some(a[1].ternary()[i[-1]])}\ntheir sum of products = {right:g}",
    "hook_pattern": lambda a, i, right: f"scores = {_some(a[0][i[0], i[1]])}\nexp(s - max) / sum = {right:.6g}",
    "hook_post": lambda a, i, right: f"gate = {a[0][i]:.6g}, up = {a[1][i]:.6g}\n{a[2]}(gate) * up = {right:.6g}",
}  # fmt: skip


def example(step: Step, theirs: Array, right: Array) -> str:
    """One value: its inputs, the reference's steps, the engine's value."""
    with np.errstate(all="ignore"):
        error = np.where(np.isfinite(right), np.abs(np.nan_to_num(theirs, nan=np.inf) - right), 0)
    i = tuple(int(n) for n in np.unravel_index(int(error.argmax()), error.shape))
    worked = WORKED.get(step.kind, _result_alone)
    comparable = right[i] and np.isfinite(theirs[i]) and not np.isneginf(right[i])
    ratio = f", {theirs[i] / right[i]:.6g} times as much" if comparable else ""
    place = f"{step.name}[{', '.join(map(str, i))}]"
    return f"{place}\n{worked(step.inputs, i, right[i])}\nthe engine has {theirs[i]:.6g}{ratio}"
