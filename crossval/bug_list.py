"""The planted bugs: for each an edit of the package's source, a model on which it shows, and the right answer.

The edits share no code with the hypotheses that must find them: a hypothesis replaces an op from outside, an edit
changes the source. The bugs of weights and BitLinear are in `bug_list_linears`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planted_models import TOKENS
from planting import Edit


@dataclass(frozen=True)
class Bug:
    """One mistake and what crossval must report.

    model: of `planted_models`.   ops: globs, one of which the first differing op must match.
    causes: the right names; one must be confirmed and no other may be.   twins: causes that give the same logits by
    algebra, so that logits alone cannot tell them apart.   in_logits: False where the logits are right nevertheless.
    level: where it shows: in the "forward" pass, the "prompt"'s ids, or the continuation ("generation").
    """

    name: str
    model: str
    ops: tuple[str, ...]
    edits: tuple[Edit, ...]
    causes: tuple[str, ...]
    twins: tuple[str, ...] = ()
    in_logits: bool = True
    level: str = "forward"
    tokens: tuple[int, ...] = tuple(TOKENS)


def bug(
    name: str,
    model: str,
    ops: str,
    *edits: tuple[str, str, str],
    cause: str = "",
    also: str = "",
    twin: str = "",
    **fields: Any,
) -> Bug:
    """A `Bug` from (file, old text, new text) edits. Its cause has the bug's name unless another is given.

    also: causes that give the same tensors.   twin: those that give the same logits.
    """
    planted = tuple(Edit(*edit) for edit in edits)
    return Bug(name, model, tuple(ops.split()), planted, (cause or name, *also.split()), tuple(twin.split()), **fields)


LAYERS, MODEL, CACHE, RECORD = "reference/layers.py", "reference/model.py", "reference/cache.py", "backends/record.py"
HF_FOLDER, TOKENIZER = "formats/hf/folder.py", "tokenizers/base.py"

GATE = "blocks.0.mlp.hook_post"
ATTN_SUB = "blocks.0.attn.sub_norm.* blocks.0.attn.o_proj.hook_x_*"
FFN_SUB = "blocks.0.mlp.sub_norm.* blocks.0.mlp.down_proj.hook_x_*"
ROTATED = "blocks.0.attn.hook_rot_q"
SCORES = "blocks.0.attn.hook_attn_scores"
HEAD = "lm_head.hook_out"

GATED = "ACTIVATIONS[activation].function"
NO_ATTN_SUB_NORM = (MODEL, "if w.attn_sub_norm is not None:", "if False:")
NO_FFN_SUB_NORM = (MODEL, "if w.ffn_sub_norm is not None:", "if False:")
OF_ALL_HEADS = """    z = z.reshape(-1, z.shape[1] * z.shape[2])  # (N, H*d)
    if w.attn_sub_norm is not None:  # BitNet
        z = be.rms_norm(z, w.attn_sub_norm)
"""
PER_HEAD = """    wide = z.astype("float64")
    scale = ((wide * wide).mean(axis=-1, keepdims=True) + w.attn_sub_norm.eps) ** 0.5
    z = (wide / scale.astype("float32")).reshape(len(z), -1).astype("float32") * w.attn_sub_norm.weight
"""
NEIGHBOURS = """    y = np.empty_like(x)
    y[..., 0::2] = first * cos - second * sin
    y[..., 1::2] = second * cos + first * sin
    return y
"""
HEAD_LINE = "        logits = self.to_host(self.lm_head(x, w))\n"
HEAD_INT8 = """        table = w.array.astype(np.float32)
        step = np.abs(table).max(axis=1)[:, None] / 127
        eight_bits = np.round(table / step).clip(-127, 127).astype(np.int8)
        logits = self.lm_head(x, type(w)(eight_bits * step))
"""
HIDDEN_LINE = "        x = be.hidden(w, cfg, batch, cache, path)\n"
HIDDEN_SHIFTED = HIDDEN_LINE + "        x = x[[i - 1 for i in range(len(x))]]\n"
VISIBLE = "self.keys[layer, slot, start : position + 1], self.values[layer, slot, start : position + 1]"

# fmt: off
BLOCK_BUGS = (
    # -- the gate
    bug("silu_for_relu2", "bitnet", GATE, (LAYERS, f"{GATED}(gate) * up", "silu(gate) * up")),
    bug("relu2_for_silu", "silu", GATE, (LAYERS, f"{GATED}(gate) * up", "relu2(gate) * up")),
    bug("activation_on_the_product", "bitnet", GATE, (LAYERS, f"{GATED}(gate) * up", f"{GATED}(gate * up)")),
    # -- norms
    bug("attn_sub_norm_missing", "bitnet", ATTN_SUB, NO_ATTN_SUB_NORM),
    bug("ffn_sub_norm_missing", "bitnet", FFN_SUB, NO_FFN_SUB_NORM),
    bug("sub_norms_missing", "bitnet", ATTN_SUB, NO_ATTN_SUB_NORM, NO_FFN_SUB_NORM),
    bug("attn_sub_norm_per_head", "bitnet", ATTN_SUB, (MODEL, OF_ALL_HEADS, PER_HEAD)),
    bug("norm_eps_1e-06", "bitnet", "blocks.0.ln1.hook_scale", (LAYERS, "mean_square + eps", "mean_square + 1e-6")),
    bug("norm_weight_plus_one", "bitnet",
        "blocks.0.ln1.hook_normalized",
        (HF_FOLDER, "(name, (size,)).astype(np.float32)", "(name, (size,)).astype(np.float32) + 1")),
    # -- RoPE
    bug("rope_interleaved", "bitnet",
        ROTATED, (LAYERS, "rest = x[..., :half], x[..., half : 2 * half],", "rest = x[..., 0::2], x[..., 1::2],"),
        (LAYERS,
            "    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)\n",
            NEIGHBOURS),
        twin="qk_unpermuted_twice"),
    bug("rope_theta_10000", "bitnet",
        ROTATED, ("reference/config.py", "return self.theta ** -", "return 10000.0 ** -")),
    bug("positions_from_one", "bitnet",
        ROTATED, (MODEL, "cfg, batch.positions), batch", "cfg, batch.positions + 1), batch"), in_logits=False),
    # -- what a token sees
    bug("cache_misses_the_newest", "bitnet",
        SCORES, (CACHE, VISIBLE, VISIBLE.replace("position + 1", "max(position, 1)")),
        (RECORD, "columns = slice(position + 1 - len(keys), position + 1)", "columns = slice(0, len(keys))")),
    bug("cache_misses_the_oldest", "bitnet",
        SCORES, (CACHE, "start = 0 if window is None", "start = min(position, 1) if window is None")),
    bug("window_one_too_long", "window", SCORES, (CACHE, "position - window + 1)", "position - window)")),
    bug("window_one_too_short", "window", SCORES, (CACHE, "position - window + 1)", "position - window + 2)")),
    bug("gqa_heads_interleaved", "bitnet",
        SCORES, (LAYERS, "q.reshape(kv_heads, -1, head_dim)", "q.reshape(-1, kv_heads, head_dim).swapaxes(0, 1)"),
        (LAYERS, "scores.reshape(-1, n_keys)", "scores.swapaxes(0, 1).reshape(-1, n_keys)"),
        (LAYERS, "pattern.reshape(kv_heads, -1, n_keys)", "pattern.reshape(-1, kv_heads, n_keys).swapaxes(0, 1)"),
        (LAYERS, "return z.reshape(-1, head_dim)", "return z.swapaxes(0, 1).reshape(-1, head_dim)")),
    # -- the head
    bug("head_int8_rows", "bitnet", HEAD, ("backends/backend.py", HEAD_LINE, HEAD_INT8)),
    bug("logits_of_the_previous_position", "bitnet", HEAD, ("backends/run.py", HIDDEN_LINE, HIDDEN_SHIFTED)),
    # -- prompts, stopping, stepping
    bug("bos_twice", "chat",
        "token_ids",
        (TOKENIZER, "prefix = [token for token in prefix if token != self.bos_id]", "prefix = list(prefix)"),
        level="prompt"),
    bug("template_space_missing", "chat",
        "token_ids", ("tokenizers/templates/chat_template.py", "{{ 'Assistant: ' }}", "{{ 'Assistant:' }}"),
        level="prompt"),
    bug("eot_not_a_stop", "chat",
        "generated_ids", (TOKENIZER, "turn = self.token_to_id(END_OF_TURN)", "turn = None"), level="generation"),
    bug("prefill_logits_of_the_previous_position", "chat",
        "generated_ids", (CACHE, "ends[list(logits_of_last)] - 1", "ends[list(logits_of_last)] - 2"),
        level="generation", twin="last_token_dropped"),
    bug("decode_overwrites_the_last_entry", "storyteller",
        "generated_ids",
        ("generation/stepper.py", "Piece(row, slot, start, ids", "Piece(row, slot, start - (count == 1), ids"),
        level="generation"),
)
