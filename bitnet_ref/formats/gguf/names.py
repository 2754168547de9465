"""What a GGUF calls the parts of a model, and the order in which its llama architecture has the rows of q and k."""

from __future__ import annotations

import re
from collections.abc import Iterator

from numpy.typing import NDArray

from ..checkpoint import linear_name
from .file import GgufFile, GgufTensor

# Our name of a part -> a GGUF's
GGUF_LINEARS = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
_IS_LINEAR = re.compile(rf"blk\.[0-9]{{1,7}}\.({'|'.join(GGUF_LINEARS.values())})\.weight").fullmatch


def gguf_name(name: str) -> str:
    """Our name -> the GGUF's, without ".weight": "blocks.0.attn.q_proj" -> "blk.0.attn_q"."""
    outside = {"embedding": "token_embd", "final_norm": "output_norm", "lm_head": "output"}
    if name in outside:
        return outside[name]
    _, index, *_, part = name.split(".")
    return f"blk.{index}.{GGUF_LINEARS.get(part, part)}"


def our_name(tensor: str) -> str:
    """The GGUF's name of a linear of a block -> ours: "blk.0.attn_q.weight" -> "blocks.0.attn.q_proj"."""
    _, index, theirs, _ = tensor.split(".")
    ours = {value: key for key, value in GGUF_LINEARS.items()}
    return linear_name(int(index), ours[theirs])


def permute_rows(w: NDArray, heads: int) -> NDArray:
    """Rows of q or k from the `half` order (ours) to `interleaved`, which llama.cpp's llama architecture has.

    In each head of d rows, row j and row j + d/2, which RoPE turns together, become neighbours 2j and 2j + 1.
    """
    return w.reshape(heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def unpermute_rows(w: NDArray, heads: int) -> NDArray:
    """The inverse of `permute_rows`."""
    return w.reshape(heads, -1, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def block_linears(file: GgufFile) -> Iterator[GgufTensor]:
    """The blocks' linears, without asking the metadata how many there are."""
    for name, tensor in file.tensors.items():
        if _IS_LINEAR(name) and len(tensor.shape) == 2:
            yield tensor
