"""Mistakes in the gate, the norms, the embedding and the head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ....families.family import Hypothesis, after, before, instead, is_listed_norm, leave_out, norm_each_head
from ....reference import layers
from ....reference.layers import ACTIVATIONS
from ....reference.weights import LinearWeight
from ..number_formats import INT8_ROWS
from ..roundings import with_matrix_in
from ..variants import Step

gate_mistake = partial(Hypothesis, "*.mlp.hook_post")
attn_sub_norm_mistake = partial(Hypothesis, "*.attn.sub_norm.hook_normalized")
length_mistake = partial(Hypothesis, "*.hook_scale")
norm_mistake = partial(Hypothesis, "*.hook_normalized")
head_mistake = partial(Hypothesis, "lm_head.hook_out")


def _has_activation(name: str) -> Callable[[Step], bool]:
    return lambda step: step.inputs[2] == name


def _lacks_sub_norms(step: Step) -> bool:
    """Whether o_proj or down_proj reads its floats here, and without a norm before it."""
    is_product = isinstance(step.inputs[-1], LinearWeight) and step.inputs[0].dtype.kind == "f"
    reads = step.name.endswith(("hook_x_scale", "hook_x_int8")) or is_product
    return reads and not step.setting.config.sub_norms and not step.setting.config.has_states


def _eps(value: float) -> Hypothesis:
    return length_mistake(
        f"norm_eps_{value:g}",
        f"the norms' eps is {value:g}, not the model's own",
        "Read rms_norm_eps from the config; class defaults differ.",
        before(1, lambda eps: value),
        lambda step: step.inputs[1] != value and is_listed_norm(step),
    )


# fmt: off
HYPOTHESES = (
    gate_mistake("silu_for_relu2", "silu where the model has relu squared",
        "Read hidden_act: relu2 is relu(gate)^2.",
        before(2, lambda name: "silu"), _has_activation("relu2")),
    gate_mistake("relu2_for_silu", "relu squared where the model has silu",
        "Read hidden_act: silu is x * sigmoid(x).",
        before(2, lambda name: "relu2"), _has_activation("silu")),
    gate_mistake("activation_on_the_product", "the activation is applied to gate * up, not to the gate alone",
        "Compute act(gate) * up: the activation sees the gate only.",
        instead(lambda gate, up, name: ACTIVATIONS[name].function(gate * up))),
    gate_mistake("relu_not_squared", "relu without the square",
        "relu2 is relu(gate)^2.",
        instead(lambda gate, up, name: np.maximum(gate, 0) * up), _has_activation("relu2")),
    gate_mistake("activation_on_up", "gate and up exchanged: the activation is on up",
        "Activate the gate projection.", instead(lambda gate, up, name: gate * ACTIVATIONS[name].function(up))),
    attn_sub_norm_mistake("attn_sub_norm_missing", "attn_sub_norm is left out",
        "Normalise attention's output before o_proj.", leave_out),
    Hypothesis("*.mlp.sub_norm.hook_normalized", "ffn_sub_norm_missing", "ffn_sub_norm is left out",
        "Normalise act(gate) * up before down_proj.", leave_out),
    Hypothesis("*.sub_norm.hook_normalized", "sub_norms_missing", "both sub-norms are left out, as in LLaMA",
        "BitNet blocks have two more norms: before o_proj and before down_proj.", leave_out),
    Hypothesis("*.o_proj.hook_* *.down_proj.hook_*", "sub_norms_added",
        "there are sub-norms, of weight 1, where the model has none",
        "Without sub-norms (use_sub_norms: false) o_proj and down_proj take their inputs as they are.",
        lambda step, compute, x, *rest: compute(x / layers.rms_scale(x, step.setting.config.norm_eps), *rest),
        _lacks_sub_norms),
    attn_sub_norm_mistake("attn_sub_norm_per_head", "attn_sub_norm divides each head by its own length",
        "The sub-norm's mean of squares runs over the full width H*d, not over one head.",
        norm_each_head, lambda step: step.setting.config.num_attention_heads > 1),
    *(_eps(value) for value in (1e-5, 1e-6, 1e-8)),
    length_mistake("norm_eps_outside_the_root", "eps is added to the root, not to the mean of squares under it",
        "x / sqrt(mean(x^2) + eps).", lambda step, compute, x, eps: compute(x, 0.0) + np.float32(eps)),
    norm_mistake("norm_weight_plus_one", "norms multiply by 1 + weight, as in Gemma",
        "Multiply by the weight.", before(2, lambda weight: weight + np.float32(1)), is_listed_norm),
    norm_mistake("norm_weight_ignored", "norms do not multiply by their weight",
        "Multiply by the weight.", before(2, np.ones_like), is_listed_norm),
    Hypothesis("*.hook_scale *.hook_normalized", "layer_norm_for_rms_norm", "the mean is subtracted, as in LayerNorm",
        "RMSNorm does not subtract the mean.", before(0, lambda x: x - x.mean(axis=-1, keepdims=True))),
    head_mistake("head_int8_rows", "lm_head is quantised to int8, with one scale per row",
        "lm_head is not quantised.", with_matrix_in(INT8_ROWS),
        lambda step: bool(step.inputs[1].kind == "dense")),
    head_mistake("logits_of_the_previous_position", "row i of the logits is that of the previous token",
        "After a batched prefill, the row to read is (first row of the sequence) + length - 1.",
        after(lambda y: np.roll(y, 1, axis=0)), lambda step: len(step.setting.tokens) > 1),
)
