"""The forward pass, top to bottom.

Axes: N tokens in this call, D hidden, H heads, G kv heads, d head_dim, F ffn, V vocab. `be` is the backend that
computes each op; `Ops` is the plain one. BitNet b1.58 differs from LLaMA in three places: its linears are ternary
(`be.linear` decides by the weight it is given), each block has two more norms (attn_sub_norm, ffn_sub_norm), and 2B-4T
squares a ReLU where LLaMA has SiLU. The same text runs all of the families.
"""

from __future__ import annotations

from collections.abc import Sequence

from numpy.typing import NDArray

from .cache import KVCache, TokenBatch
from .config import ModelConfig
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
    h = be.rms_norm(x, w.attn_norm, cfg.norm_eps)  # (N, D)
    q, k, v = be.linears(h, (w.q_proj, w.k_proj, w.v_proj))  # (N, H*d), (N, G*d), (N, G*d)
    q = q.reshape(-1, cfg.num_attention_heads, cfg.head_dim)  # (N, H, d)
    k = k.reshape(-1, cfg.num_key_value_heads, cfg.head_dim)  # (N, G, d)
    v = v.reshape(-1, cfg.num_key_value_heads, cfg.head_dim)  # (N, G, d)
    q, k = be.rope(q, k, *rope)
    be.append(cache, layer, batch, k, v)
    z = be.attention(q, cache, batch, layer, cfg.sliding_window)  # (N, H, d)
    z = z.reshape(-1, cfg.num_attention_heads * cfg.head_dim)  # (N, H*d)
    if w.attn_sub_norm is not None:
        z = be.rms_norm(z, w.attn_sub_norm, cfg.norm_eps)
    return be.add(x, be.linear(z, w.o_proj))  # (N, D)


def feed_forward(be: Ops, x: NDArray, w: LayerWeights, cfg: ModelConfig) -> NDArray:
    """A gated two-layer network on each token by itself.   (N, D) -> (N, D), residual included"""
    h = be.rms_norm(x, w.ffn_norm, cfg.norm_eps)  # (N, D)
    gate, up = be.linears(h, (w.gate_proj, w.up_proj))  # (N, F) each; ternary layers share one quantisation of h
    h = be.gated(gate, up, cfg.activation)  # relu(gate)^2 * up, or silu(gate) * up
    if w.ffn_sub_norm is not None:
        h = be.rms_norm(h, w.ffn_sub_norm, cfg.norm_eps)
    return be.add(x, be.linear(h, w.down_proj))  # (N, D)


class PlainBackend(Ops):
    """The plain ops, and the two blocks, which are the text above. A fast backend may override a whole block."""

    attention_block = attention_block
    feed_forward = feed_forward


def decoder_layers(
    be: PlainBackend,
    x: NDArray,
    layers: Sequence[LayerWeights],
    cfg: ModelConfig,
    rope: RopeTables,
    batch: TokenBatch,
    cache: KVCache,
) -> NDArray:
    """All blocks, one after another; the cache gains the keys and values of the batch.   (N, D) -> (N, D)"""
    for index, layer in enumerate(layers):
        x = be.attention_block(x, layer, cfg, rope, batch, cache, index)
        x = be.feed_forward(x, layer, cfg)
    return x


def final_hidden(be: PlainBackend, w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache) -> NDArray:
    """The input of the head, for the wanted tokens of the batch.   -> (wanted, D)"""
    x = be.embed(w.embedding, batch.tokens)  # (N,) -> (N, D)
    rope = be.rope_tables(batch.positions, cfg.rope, cfg.head_dim)
    x = decoder_layers(be, x, w.layers, cfg, rope, batch, cache)
    if batch.wanted is not None:
        x = be.take_rows(x, batch.wanted)
    return be.rms_norm(x, w.final_norm, cfg.norm_eps)


def forward(be: PlainBackend, w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache) -> NDArray:
    """Logits of the wanted tokens of the batch.   -> (wanted, V)"""
    return be.lm_head(final_hidden(be, w, cfg, batch, cache), w.lm_head)
