"""The forward pass, top to bottom.

Axes: N tokens in this call, D hidden, H heads, G kv heads, d head_dim, F ffn, V vocab. `be` is the backend that
computes each op; `backends/numpy_backend.py` is the plain one. BitNet b1.58 differs from LLaMA in three places:
its linears are ternary (`be.linear` knows by the weight it is given), each block has two more norms (attn_sub_norm,
ffn_sub_norm), and 2B-4T squares a ReLU where LLaMA has SiLU. The same text runs all of the families.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numpy.typing import NDArray

from .cache import KVCache, TokenBatch
from .config import ModelConfig
from .weights import LayerWeights, ModelWeights

if TYPE_CHECKING:
    from ..backends import Backend


def forward(be: Backend, w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache) -> NDArray:
    """Logits of the wanted tokens of `batch`; the cache gains the keys and values of all of them.   -> (wanted, V)"""
    return be.lm_head(final_hidden(be, w, cfg, batch, cache), w.lm_head)


def final_hidden(be: Backend, w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache) -> NDArray:
    """All of the above but the head: what the head sees of the wanted tokens.   -> (wanted, D)"""
    batch = be.place(batch)
    x = be.embed(w.embedding, batch.tokens)  # (N,) -> (N, D)
    rope = be.rope_tables(batch.positions, cfg.rope, cfg.head_dim)  # cos, sin: (N, d/2) each
    for index, layer in enumerate(w.layers):
        x = be.at_layer(index, x)  # the same x; it only moves where layers are divided over several devices
        x = be.add(x, attention_block(be, x, layer, cfg, rope, batch, cache, index))  # (N, D)
        x = be.add(x, feed_forward(be, x, layer, cfg))  # (N, D)
    if batch.wanted is not None:
        x = be.take_rows(x, batch.wanted)  # (wanted, D)
    return be.rms_norm(x, w.final_norm, cfg.norm_eps)


def attention_block(
    be: Backend,
    x: NDArray,
    w: LayerWeights,
    cfg: ModelConfig,
    rope: tuple[NDArray, NDArray],
    batch: TokenBatch,
    cache: KVCache,
    layer: int,
) -> NDArray:
    """Each token asks the tokens before it, in its own sequence.   (N, D) -> (N, D)"""
    h = be.rms_norm(x, w.attn_norm, cfg.norm_eps)  # (N, D)
    q, k, v = be.linears(h, (w.q_proj, w.k_proj, w.v_proj))  # (N, H*d), (N, G*d), (N, G*d)
    q = q.reshape(-1, cfg.num_attention_heads, cfg.head_dim)  # (N, H, d)
    k = k.reshape(-1, cfg.num_key_value_heads, cfg.head_dim)  # (N, G, d)
    v = v.reshape(-1, cfg.num_key_value_heads, cfg.head_dim)  # (N, G, d)
    q, k = be.rope(q, k, *rope)
    cache.append(layer, batch, k, v)
    z = be.attention(q, cache, batch, layer, cfg.sliding_window)  # (N, H, d)
    z = z.reshape(-1, cfg.query_size)  # (N, H*d)
    if w.attn_sub_norm is not None:
        z = be.rms_norm(z, w.attn_sub_norm, cfg.norm_eps)
    return be.linear(z, w.o_proj)  # (N, D)


def feed_forward(be: Backend, x: NDArray, w: LayerWeights, cfg: ModelConfig) -> NDArray:
    """A gated two-layer network on each token by itself.   (N, D) -> (N, D)"""
    h = be.rms_norm(x, w.ffn_norm, cfg.norm_eps)  # (N, D)
    gate, up = be.linears(h, (w.gate_proj, w.up_proj))  # (N, F) each; ternary layers share one activation quantisation
    h = be.gated(gate, up, cfg.activation)  # relu(gate)^2 * up, or silu(gate) * up
    if w.ffn_sub_norm is not None:
        h = be.rms_norm(h, w.ffn_sub_norm, cfg.norm_eps)
    return be.linear(h, w.down_proj)  # (N, D)
