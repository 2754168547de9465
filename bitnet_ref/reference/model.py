"""The forward pass, top to bottom.

Axes: N tokens in this call, D hidden, H heads, G kv heads, d head_dim, F ffn, V vocab. `be` is the backend that
computes each op; `Ops` is the plain one. BitNet b1.58 differs from LLaMA in three places: its linears are ternary, each
block has two more norms (attn_sub_norm, ffn_sub_norm), and 2B-4T squares a ReLU where LLaMA has SiLU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .cache import KVCache, TokenBatch
from .config import ModelConfig
from .layers import Floats, Ints, softcap
from .ops import Ops
from .weights import LayerWeights, ModelWeights

RopeTables = tuple[Floats, Floats]  # cos and sin (N, d/2) of the batch's tokens


class BlockPlace(NamedTuple):
    """Where a block computes: its layer, the tokens, their positions' RoPE, and the keys and values before them."""

    rope: RopeTables
    batch: TokenBatch
    cache: KVCache
    layer: int


def attention_block(be: Ops, x: Floats, w: LayerWeights, cfg: ModelConfig, at: BlockPlace) -> Floats:
    """Each token attends to the tokens before it in its own sequence.   (N, D) -> (N, D), residual included"""
    h = be.rms_norm(x, w.attn_norm)  # (N, D)
    q, k, v = split_heads(cfg, *be.linears(h, (w.q_proj, w.k_proj, w.v_proj)))  # (N, H, d), (N, G, d), (N, G, d)
    q, k = be.rope(q, k, *at.rope)
    be.append(at.cache, at.layer, at.batch, k, v)
    z = be.attention(q, at.cache, at.batch, at.layer, cfg.window_of(at.layer))  # (N, H, d)
    return be.add(x, attention_result(be, z, w))  # (N, D)


def split_heads(cfg: ModelConfig, q: Floats, k: Floats, v: Floats) -> tuple[Floats, Floats, Floats]:
    """q (N, H*d), k and v (N, G*d) -> (N, H, d), (N, G, d), (N, G, d)"""
    q = q.reshape(-1, cfg.num_attention_heads, cfg.head_dim)
    k = k.reshape(-1, cfg.num_key_value_heads, cfg.head_dim)
    v = v.reshape(-1, cfg.num_key_value_heads, cfg.head_dim)
    return q, k, v


def attention_result(be: Ops, z: Floats, w: LayerWeights) -> Floats:
    """What attention adds to the residual stream.   z (N, H, d) -> (N, D)"""
    z = z.reshape(-1, z.shape[1] * z.shape[2])  # (N, H*d)
    if w.attn_sub_norm is not None:  # BitNet
        z = be.rms_norm(z, w.attn_sub_norm)
    return be.linear(z, w.o_proj)


def feed_forward(be: Ops, x: Floats, w: LayerWeights, cfg: ModelConfig) -> Floats:
    """A gated two-layer network on each token by itself.   (N, D) -> (N, D), residual included"""
    return be.add(x, feed_forward_result(be, x, w, cfg))


def feed_forward_result(be: Ops, x: Floats, w: LayerWeights, cfg: ModelConfig) -> Floats:
    """What the feed-forward network adds to the residual stream.   (N, D) -> (N, D)"""
    h = be.rms_norm(x, w.ffn_norm)  # (N, D)
    gate, up = be.linears(h, (w.gate_proj, w.up_proj))  # (N, F) each; ternary layers share one quantisation of h
    h = be.gated(gate, up, cfg.activation)  # relu(gate)^2 * up, or silu(gate) * up
    if w.ffn_sub_norm is not None:  # BitNet
        h = be.rms_norm(h, w.ffn_sub_norm)
    return be.linear(h, w.down_proj)


class PlainBackend(Ops):
    """The plain ops, and the two halves of a block as compositions of them. A fast backend may override a half."""

    def attention_block(self, x: Floats, w: LayerWeights, cfg: ModelConfig, at: BlockPlace) -> Floats:
        """The text above, or that of the layer's family."""
        return (w.attention_text or attention_block)(self, x, w, cfg, at)

    def feed_forward(self, x: Floats, w: LayerWeights, cfg: ModelConfig) -> Floats:
        """The text above, or that of the layer's family."""
        return (w.feed_forward_text or feed_forward)(self, x, w, cfg)


def rope_tables_of(be: Ops, cfg: ModelConfig, positions: Ints) -> list[RopeTables]:
    """The tables of each of the config's RoPEs."""
    return [be.rope_tables(positions, rope, cfg.rotary_size) for rope in cfg.ropes]


def decoder_layers(
    be: PlainBackend,
    x: Floats,
    layers: Sequence[LayerWeights],
    cfg: ModelConfig,
    ropes: Sequence[RopeTables],
    batch: TokenBatch,
    cache: KVCache,
    wanted: Ints | None = None,
) -> Floats:
    """All blocks, one after another; the cache gains the keys and values of the batch.   (N, D) -> (wanted, D)

    wanted: the tokens for which the last feed-forward is computed. None: all.
    """
    for index, layer in enumerate(layers):
        x = be.attention_block(x, layer, cfg, BlockPlace(ropes[cfg.rope_of(index)], batch, cache, index))
        if wanted is not None and index == len(layers) - 1:
            x = be.take_rows(x, wanted)
        if len(x):  # of most pieces of a long prompt no token is wanted
            x = be.feed_forward(x, layer, cfg)
    return x


def embeddings(be: Ops, w: ModelWeights, cfg: ModelConfig, tokens: Ints) -> Floats:
    """The beginning of the residual stream.   tokens (N,) -> (N, D)"""
    x = be.embed(w.embedding, tokens)
    return x if cfg.embedding_scale == 1 else be.scale(x, cfg.embedding_scale, "hook_embed_scaled")


def head_input(be: Ops, w: ModelWeights, cfg: ModelConfig, x: Floats) -> Floats:
    """What the head takes, of the residual stream after the last layer.   (N, D) -> (N, D)"""
    x = be.rms_norm(x, w.final_norm)
    return x if cfg.head_scale == 1 else be.scale(x, cfg.head_scale, "ln_final.hook_scaled")


def final_hidden(be: PlainBackend, w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache) -> Floats:
    """The input of the head, for the wanted tokens of the batch.   -> (wanted, D)"""
    x = embeddings(be, w, cfg, batch.tokens)  # (N, D)
    x = decoder_layers(be, x, w.layers, cfg, rope_tables_of(be, cfg, batch.positions), batch, cache, batch.wanted)
    return head_input(be, w, cfg, x)


def forward(be: PlainBackend, w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache) -> Floats:
    """Logits of the wanted tokens of the batch.   -> (wanted, V)"""
    logits = be.lm_head(final_hidden(be, w, cfg, batch, cache), w.lm_head)
    return logits if cfg.logit_softcap is None else softcap(logits, cfg.logit_softcap)
