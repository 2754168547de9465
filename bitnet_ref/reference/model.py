"""The forward pass, top to bottom.

Axes: N tokens in this call, D hidden, H heads, G kv heads, d head_dim, F ffn, V vocab. `be` is the backend that
computes each op; `Ops` is the plain one. BitNet b1.58 differs from LLaMA in three places: its linears are ternary
(`be.linear` decides by the weight it is given), each block has two more norms (attn_sub_norm, ffn_sub_norm), and 2B-4T
squares a ReLU where LLaMA has SiLU. The same text runs all of the families: what one has beyond the others stands
behind an `if`. docs/families.md says which family has what.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .cache import KVCache, TokenBatch
from .config import ModelConfig
from .layers import softcap
from .ops import Ops
from .weights import LayerWeights, ModelWeights

RopeTables = tuple[NDArray, NDArray]  # cos and sin (N, d/2) of the batch's tokens


def attention_block(
    be: Ops,
    x: NDArray,
    w: LayerWeights,
    cfg: ModelConfig,
    rope: RopeTables,
    batch: TokenBatch,
    cache: KVCache,
    layer: int,
) -> NDArray:
    """Each token attends to the tokens before it in its own sequence.   (N, D) -> (N, D), residual included"""
    if w.delta is not None:  # Qwen3.5, in three of four layers
        return delta_block(be, x, w, cfg, batch, cache, layer)
    h = be.rms_norm(x, w.attn_norm, cfg.norm_eps)  # (N, D)
    q, k, v = be.linears(h, (w.q_proj, w.k_proj, w.v_proj))  # (N, H*d), (N, G*d), (N, G*d)
    q = q.reshape(-1, cfg.num_attention_heads, cfg.head_dim)  # (N, H, d)
    k = k.reshape(-1, cfg.num_key_value_heads, cfg.head_dim)  # (N, G, d)
    v = v.reshape(-1, cfg.num_key_value_heads, cfg.head_dim)  # (N, G, d)
    if w.q_norm is not None and w.k_norm is not None:  # over each head: Qwen3, Gemma3
        q, k = norm_heads(be, q, w.q_norm, cfg), norm_heads(be, k, w.k_norm, cfg)
    q, k = be.rope(q, k, *rope) if cfg.rotary_dim is None else be.rope(q, k, *rope, partial=True)  # Qwen3.5: in part
    if cfg.query_scale != 1:  # scores are q k / sqrt(query_pre_attn_scalar), not q k / sqrt(d): Gemma3
        q = be.scale(q, cfg.query_scale)
    be.append(cache, layer, batch, k, v)
    z = be.attention(q, cache, batch, layer, cfg.window_of(layer))  # (N, H, d)
    z = z.reshape(-1, cfg.num_attention_heads * cfg.head_dim)  # (N, H*d)
    if w.z_proj is not None:  # Qwen3.5
        z = be.output_gate(z, be.linear(h, w.z_proj), "sigmoid")
    if w.attn_sub_norm is not None:  # BitNet
        z = be.rms_norm(z, w.attn_sub_norm, cfg.norm_eps)
    return add_result(be, x, be.linear(z, w.o_proj), w.attn_post_norm, cfg)  # (N, D)


def delta_block(
    be: Ops, x: NDArray, w: LayerWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache, layer: int
) -> NDArray:
    """Each token asks a memory of the tokens before it, and corrects it; see `delta_net.py`.   (N, D) -> (N, D)"""
    delta, shape = w.delta, cfg.delta
    assert delta is not None
    assert shape is not None
    assert w.z_proj is not None
    assert w.a_proj is not None
    assert w.b_proj is not None
    h = be.rms_norm(x, w.attn_norm, cfg.norm_eps)  # (N, D)
    q, k, v, z, a, b = be.linears(h, (w.q_proj, w.k_proj, w.v_proj, w.z_proj, w.a_proj, w.b_proj))
    mixed = be.delta_conv(np.concatenate([q, k, v], axis=1), delta.conv, cache, layer, batch)  # (N, C)
    y = be.delta_rule(mixed, *be.delta_gates(a, b, delta), shape, cache, layer, batch)  # (N, Hv, dv)
    y = be.rms_norm(y.reshape(-1, shape.value_dim), delta.norm, cfg.norm_eps).reshape(z.shape)
    return add_result(be, x, be.linear(be.output_gate(y, z, "silu"), w.o_proj), w.attn_post_norm, cfg)


def norm_heads(be: Ops, x: NDArray, weight: NDArray, cfg: ModelConfig) -> NDArray:
    """An RMSNorm over each head.   (N, H, d) -> (N, H, d)"""
    return be.rms_norm(x.reshape(-1, cfg.head_dim), weight, cfg.norm_eps).reshape(x.shape)


def add_result(be: Ops, x: NDArray, y: NDArray, post_norm: NDArray | None, cfg: ModelConfig) -> NDArray:
    """The residual stream x with a block's result y.   (N, D), (N, D) -> (N, D)"""
    if post_norm is not None:  # Gemma3
        y = be.rms_norm(y, post_norm, cfg.norm_eps)
    if cfg.residual_scale != 1:  # MiniCPM
        y = be.scale(y, cfg.residual_scale)
    return be.add(x, y)


def feed_forward(be: Ops, x: NDArray, w: LayerWeights, cfg: ModelConfig) -> NDArray:
    """A gated two-layer network on each token by itself.   (N, D) -> (N, D), residual included"""
    h = be.rms_norm(x, w.ffn_norm, cfg.norm_eps)  # (N, D)
    gate, up = be.linears(h, (w.gate_proj, w.up_proj))  # (N, F) each; ternary layers share one quantisation of h
    h = be.gated(gate, up, cfg.activation)  # relu(gate)^2 * up, or silu(gate) * up
    if w.ffn_sub_norm is not None:  # BitNet
        h = be.rms_norm(h, w.ffn_sub_norm, cfg.norm_eps)
    return add_result(be, x, be.linear(h, w.down_proj), w.ffn_post_norm, cfg)  # (N, D)


class PlainBackend(Ops):
    """The plain ops, and the two blocks, which are the text above. A fast backend may override a whole block."""

    attention_block = attention_block
    feed_forward = feed_forward


def rope_tables_of(be: Ops, cfg: ModelConfig, positions: NDArray) -> tuple[RopeTables, RopeTables]:
    """RoPE's tables of the layers that attend to all tokens, and of those that attend to a window."""
    full = be.rope_tables(positions, cfg.rope, cfg.rotary_size)
    return full, full if cfg.local_rope is None else be.rope_tables(positions, cfg.local_rope, cfg.rotary_size)


def decoder_layers(
    be: PlainBackend,
    x: NDArray,
    layers: Sequence[LayerWeights],
    cfg: ModelConfig,
    ropes: tuple[RopeTables, RopeTables],
    batch: TokenBatch,
    cache: KVCache,
    wanted: NDArray[np.int64] | None = None,
) -> NDArray:
    """All blocks, one after another; the cache gains the keys and values of the batch.   (N, D) -> (wanted, D)

    wanted: which tokens are read after the last layer, so that its feed-forward computes no others. None: all.
    """
    for index, layer in enumerate(layers):
        x = be.attention_block(x, layer, cfg, ropes[cfg.is_sliding(index)], batch, cache, index)
        if wanted is not None and index == len(layers) - 1:
            x = be.take_rows(x, wanted)
        if len(x):  # of most pieces of a long prompt no token is wanted
            x = be.feed_forward(x, layer, cfg)
    return x


def embeddings(be: Ops, w: ModelWeights, cfg: ModelConfig, tokens: NDArray) -> NDArray:
    """The beginning of the residual stream.   tokens (N,) -> (N, D)"""
    x = be.embed(w.embedding, tokens)
    return x if cfg.embedding_scale == 1 else be.scale(x, cfg.embedding_scale)  # Gemma3, MiniCPM


def head_input(be: Ops, w: ModelWeights, cfg: ModelConfig, x: NDArray) -> NDArray:
    """What the head takes, of the residual stream after the last layer.   (N, D) -> (N, D)"""
    x = be.rms_norm(x, w.final_norm, cfg.norm_eps)
    return x if cfg.head_scale == 1 else be.scale(x, cfg.head_scale)  # MiniCPM


def final_hidden(be: PlainBackend, w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache) -> NDArray:
    """The input of the head, for the wanted tokens of the batch.   -> (wanted, D)"""
    x = embeddings(be, w, cfg, batch.tokens)  # (N, D)
    x = decoder_layers(be, x, w.layers, cfg, rope_tables_of(be, cfg, batch.positions), batch, cache, batch.wanted)
    return head_input(be, w, cfg, x)


def forward(be: PlainBackend, w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache) -> NDArray:
    """Logits of the wanted tokens of the batch.   -> (wanted, V)"""
    logits = be.lm_head(final_hidden(be, w, cfg, batch, cache), w.lm_head)
    return logits if cfg.logit_softcap is None else softcap(logits, cfg.logit_softcap)
