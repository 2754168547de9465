"""All edits of a step that have no unknown constant, each in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from ....families.family import after, before, heads_apart, instead
from ....reference import layers
from ....reference.weights import LinearWeight
from ...names import is_by_head
from ..variants import Step
from .attention import PATTERNS, kv_maps, ropes, scores, turned_by_own
from .by_token import ACTIVATION_SCALES, INT8_RULES, LENGTHS, NORMS, RESIDUALS, gates, lengths_of_blocks, mean_square
from .changes import changes
from .kinds import Description, Row, from_run, normed_by, norms_of, take_row, with_part
from .products import DEQUANTIZED, merged, products, whole_tiles

# fmt: off
FORMULAS: dict[str, Callable[[Step], Iterable[Row]]] = {
    "hook_scale": lambda step: LENGTHS, "hook_normalized": lambda step: NORMS, "hook_x_scale": lambda step: ACTIVATION_SCALES, "hook_x_int8": lambda step: INT8_RULES,
    "hook_rot_q": ropes, "hook_rot_k": ropes, "hook_pattern": lambda step: PATTERNS, "hook_post": gates,
    "hook_resid_mid": lambda step: RESIDUALS, "hook_resid_post": lambda step: RESIDUALS,
}  # the tables by kind of step


def own_descriptions(step: Step) -> Iterator[Description]:
    """Other formulas of this step."""
    kind, x = step.kind, step.inputs
    rows = [*FORMULAS[kind](step)] if kind in FORMULAS else []
    of_linear = len(x) > 1 and isinstance(x[1], LinearWeight) and kind != "hook_embed"
    if of_linear and len(x) == 3:
        rows += DEQUANTIZED
        yield from whole_tiles()
        yield from merged(step)
    if kind == "hook_normalized":
        width = len(x[2])
        sizes = [size for size in sorted({step.setting.config.head_dim, 16, 32, 64, 128, width // 2}) if width % size == 0 and size < width]
        eps = norms_of(step)[step.owner].eps
        rows += [(1.2, f"each {size} columns are divided by their own length", lambda x, r, w, size=size: x / lengths_of_blocks(x, size, eps) * w) for size in sizes]
        rows.append((1.2, "the weight multiplies the norm's input, before its length is taken", lambda x, r, w: layers.rms_norm(x * w, np.ones_like(w), eps)))
        rows.append((1.4, "the norm is applied twice", lambda x, r, w: layers.rms_norm(x / r * w, w, eps)))
    if kind == "hook_scale" and (heads := len(x[0]) // len(step.setting.tokens)) > 1:  # a norm over heads
        rows.append((1.2, "the mean of squares runs over all heads of a token together", lambda x, eps: np.repeat(np.sqrt(mean_square(x.reshape(len(x) // heads, -1)) + eps), heads, 0)))
    yield from (Description(cost, text, instead(formula)) for cost, text, formula in rows)
    if kind == "hook_normalized":
        yield from with_part(1.1, "the weight of {} is taken", step, lambda other: isinstance(other, np.ndarray) and other.shape == x[2].shape, lambda compute, other, x, r, w: compute(x, r, other))
    if kind == "hook_attn_scores":
        yield from scores(step)
    if kind == "hook_z":
        yield from kv_maps("the values")
    if kind in ("hook_resid_mid", "hook_resid_post"):
        for norm in norms_of(step).values():
            if norm.weight.shape == step.result.shape[1:] and norm.name.startswith(step.owner + "."):
                for words, index in (("the sum", None), ("{in0}", 0), ("{in1}", 1)):
                    yield Description(1.2, f"{words} is normed, with the weight of {norm.name.split('.')[-1]}", normed_by(index, norm.name, step.name))
    if kind == "hook_v":
        yield Description(1.1, "v is turned by RoPE as well", after(lambda v: turned_by_own(v, step)))
    if of_linear and len(x) == 3:
        yield from with_part(1.1, "the scale of {} is taken", step, lambda other: isinstance(other, LinearWeight) and other.bit_linear is not None, lambda compute, other, acc, w, s: acc.astype(np.float32) * (other.bit_linear.w_dequant_scale / s))
    elif of_linear:
        yield from products(step)
    if kind == "hook_embed":
        yield from (Description(1, f"the row of the {words} id is taken", take_row(shift)) for words, shift in (("next", 1), ("previous", -1)))
        if step.setting.weights.lm_head is not x[0] and step.setting.weights.lm_head.kind == "dense":
            yield Description(1, "the rows of lm_head are taken for those of the embedding", before(0, lambda w: step.setting.weights.lm_head))


def descriptions(step: Step) -> Iterator[Description]:
    """Every description of a step that has no unknown constant. Those of the step's own formula come first."""
    yield from own_descriptions(step)
    for cost, text, change in changes(heads_apart(step.result, step), is_by_head(step.name)):
        yield Description(cost, text.replace("{x}", "{it}"), after(change))
    arrays = [i for i, x in enumerate(step.inputs) if isinstance(x, np.ndarray) and x.ndim > 1 and x.dtype.kind in "fi"]
    arrays = [i for i in arrays if i == 0 or not step.name.endswith(("hook_rot_q", "hook_rot_k"))]
    for index in arrays:
        for cost, text, change in changes(heads_apart(step.inputs[index], step), step.name.endswith("hook_pattern")):
            yield Description(cost + 0.2, text.replace("{x}", f"{{in{index}}}"), before(index, change))
    for name, other in reversed(list(step.seen.items())):
        far = 0.0 if name.split(".")[:2] == step.name.split(".")[:2] else 0.5
        if name == step.name or other.dtype.kind != step.result.dtype.kind or name.endswith("hook_x_scale"):
            continue
        if other.size == step.result.size:
            yield Description(1 + far, f"{{it}} is {{{name}}} itself", from_run(None, name, step.name))
        for index in arrays:
            if other.size == step.inputs[index].size and other.dtype == step.inputs[index].dtype:
                yield Description(1.1 + far, f"{{{name}}} is taken for {{in{index}}}", from_run(index, name, step.name))
    if len(arrays) == 2 and step.inputs[arrays[0]].shape == step.inputs[arrays[1]].shape:
        yield Description(1.1, "{in0} and {in1} are exchanged", lambda s, f, *a: f(a[1], a[0], *a[2:]))
