"""Learning from a teacher: its probabilities, and how its tokens relate to each other.

    logits      KL(teacher || student) of the next-token distributions, both softened by a temperature
    relations   KL of softmax(A A^T / sqrt(d_r)), for A the queries, keys and values of one layer, cut into heads of d_r

Both are means over tokens, added to the cross-entropy with weights. Source: "BitNet Distillation" (arXiv:2510.13998),
sections 3.2 and 3.3; the relations are those of "MiniLMv2" (arXiv:2012.15828).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..backends.loaded import LoadedModel
from ..errors import ConfigError
from ..reference import layers
from ..reference.config import ModelConfig
from ..reference.layers import Floats

HOOKS = ("hook_q", "hook_k", "hook_v")  # before RoPE


@dataclass(frozen=True, eq=False)
class TeacherValues:
    """What a student is compared with in one sequence: logits (T, V), relations of q, k and v (heads, T, T) each."""

    logits: Floats
    relations: tuple[Floats, ...]


@dataclass(frozen=True, eq=False)
class Distillation:
    """The teacher, and how its lessons are weighted.

    teacher: a model with the student's vocabulary, on any backend.
    layer, teacher_layer: whose relations are compared; None: the last one.
    """

    teacher: LoadedModel
    logits_weight: float = 1.0
    temperature: float = 5.0
    relations_weight: float = 0.0
    relation_heads: int = 1
    layer: int | None = None
    teacher_layer: int | None = None

    def check(self, student: ModelConfig) -> None:
        """Raises ConfigError when the student cannot be compared with the teacher."""
        teacher = self.teacher.config
        if teacher.vocab_size != student.vocab_size:
            message = f"the teacher's vocabulary has {teacher.vocab_size} tokens, the student's {student.vocab_size}"
            raise ConfigError(message, field="distil")
        if not self.temperature > 0:
            raise ConfigError(f"expected a temperature above 0, got {self.temperature}", field="temperature")
        for config, layer in ((student, self.layer), (teacher, self.teacher_layer)):
            if layer is not None and not 0 <= layer < config.num_hidden_layers:
                raise ConfigError(f"expected a layer below {config.num_hidden_layers}, got {layer}", field="layer")
            for size in (config.query_size, config.kv_size):
                if self.relation_heads < 1 or size % self.relation_heads:
                    message = f"expected a divisor of {size}, got {self.relation_heads}"
                    raise ConfigError(message, field="relation_heads")

    def values(self, tokens: NDArray[np.int64]) -> TeacherValues:
        """What the teacher gives for one sequence.   tokens (T,)"""
        if not self.relations_weight:
            return TeacherValues(self.teacher.logits(tokens), ())
        config = self.teacher.config
        layer = config.num_hidden_layers - 1 if self.teacher_layer is None else self.teacher_layer
        names = [f"blocks.{layer}.attn.{hook}" for hook in HOOKS]
        logits, seen = self.teacher.run_with_cache(tokens.tolist(), names)
        return TeacherValues(logits, tuple(relation(seen[name], self.relation_heads)[0] for name in names))


def soft_cross_entropy(logits: Floats, teacher: Floats, temperature: float) -> tuple[NDArray[np.float64], Floats]:
    """KL(p || q) of each token, p = softmax(teacher / temperature), q = softmax(logits / temperature).

    (T, V), (T, V) -> (T,) float64, and its gradient (q - p) / temperature (T, V)
    """
    teacher = np.asarray(teacher.astype(logits.dtype), like=logits)
    log_p, log_q = (_log_softmax(x / x.dtype.type(temperature)) for x in (teacher, logits))
    p = np.exp(log_p)
    divergence = np.einsum("tv,tv->t", p, log_p - log_q, dtype=np.float64)
    return divergence, (np.exp(log_q) - p) / logits.dtype.type(temperature)


def relation(states: Floats, heads: int) -> tuple[Floats, Floats]:
    """softmax(A A^T / sqrt(d_r)).   states (T, H, d) -> (heads, T, T), A (heads, T, d_r)"""
    a = states.reshape(len(states), heads, -1).transpose(1, 0, 2)
    return layers.softmax(a @ a.transpose(0, 2, 1) * a.dtype.type(a.shape[2] ** -0.5)), a


def relation_loss(states: Floats, teacher: Floats) -> tuple[float, Floats]:
    """The mean over heads and tokens of KL(teacher || relation(states)), and its gradient.

    With S = A A^T / sqrt(d_r) and R = softmax(S): dS = (R - R_teacher) / (heads T), dA = (dS + dS^T) A / sqrt(d_r).
    states (T, H, d), teacher (heads, T, T) -> loss, d states (T, H, d)
    """
    teacher = np.asarray(teacher, like=states)
    student, a = relation(states, len(teacher))
    heads, tokens, size = a.shape
    tiny = np.finfo(student.dtype).tiny
    logs = np.log(np.maximum(teacher, tiny)) - np.log(np.maximum(student, tiny))
    loss = float(np.einsum("hij,hij->", teacher, logs, dtype=np.float64)) / (heads * tokens)
    d_scores = (student - teacher) / student.dtype.type(heads * tokens)
    d_a = (d_scores + d_scores.transpose(0, 2, 1)) @ a * a.dtype.type(size**-0.5)
    return loss, d_a.transpose(1, 0, 2).reshape(states.shape)


def _log_softmax(x: Floats) -> Floats:
    shifted: Floats = x - x.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted
