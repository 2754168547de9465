"""Common mistakes of engines, each a small edit of the exported graph. All graphs use the same file of weights.

The title and the text of a mistake are its docstring: the first line, and the rest.
"""

import ml_dtypes
import numpy as np

from bitnet_ref.formats.onnx.graph import DecoderGraph


class Silu(DecoderGraph):
    """SiLU in place of ReLU²

    LLaMA's activation, which most engines have as their default. BitNet b1.58 gates with relu(x)².
    """

    def relu2(self, x):
        return self.silu(x)


class NoSquare(DecoderGraph):
    """ReLU without the square

    The gate is relu(x), not relu(x)². The norm behind it hides the wrong size.
    """

    def relu2(self, x):
        return self.g("Relu", x)


class NoSubNorm(DecoderGraph):
    """Sub-norms left out

    BitNet has an RMSNorm before o_proj and before down_proj that LLaMA does not have.
    """

    def norm(self, x, name):
        normed = super().norm(x, name)
        return x if name.endswith("sub_norm") else normed


class NoRope(DecoderGraph):
    """RoPE left out

    Queries and keys are not rotated, so attention does not know the order of the tokens.
    """

    def apply_rope(self, x, rope):
        return self.g("Concat", x, axis=-1)


class Interleaved(DecoderGraph):
    """RoPE on neighbouring pairs

    Numbers 0 and 1, 2 and 3, ... of a head are rotated together, as in Meta's own files. This model pairs number i with
    number i + 32.
    """

    def apply_rope(self, x, rope):
        order = np.arange(self.cfg.head_dim).reshape(-1, 2).T.reshape(-1)  # 0, 2, 4, ..., 1, 3, 5, ...
        apart = self.g("Gather", x, self.g.ints(*order), axis=-1)
        return self.g("Gather", super().apply_rope(apart, rope), self.g.ints(*np.argsort(order)), axis=-1)


class Queries(DecoderGraph):
    """A layer's queries are changed after their rotation."""

    rotations = 0

    def apply_rope(self, x, rope):
        self.rotations += 1  # the queries' and the keys' in turn
        x = super().apply_rope(x, rope)
        return self.change_queries(x) if self.rotations % 2 else x


class NoRoot(Queries):
    """1/√d left out

    The scores of attention are not divided by the root of the head's size, 8, so each head sees little but one token.
    """

    def change_queries(self, x):
        return self.g("Mul", x, self.g.constant(self.cfg.head_dim**0.5, np.float32))


class WrongGroups(Queries):
    """Queries read the wrong keys

    Heads 0 and 1 share the first keys and values, heads 2 and 3 the second. Here heads 0 and 2 share the first.
    """

    def order(self):
        """The query heads of the first keys, then those of the second, and so on."""
        return np.arange(self.cfg.num_attention_heads).reshape(-1, self.cfg.num_key_value_heads).T.reshape(-1)

    def change_queries(self, x):
        return self.g("Gather", x, self.g.ints(*self.order()), axis=1)

    def norm(self, x, name):
        if name.endswith("attn_sub_norm"):  # (B, S, H*d): the heads go back to their places
            columns = np.arange(self.cfg.query_size).reshape(self.cfg.num_attention_heads, -1)
            x = self.g("Gather", x, self.g.ints(*columns[np.argsort(self.order())].reshape(-1)), axis=-1)
        return super().norm(x, name)


class NoMask(DecoderGraph):
    """The causal mask left out

    Each token of the prompt sees the tokens after it. Text that is written token by token has none after it.
    """

    def mask(self):
        mask = super().mask()
        return self.g("Or", mask, self.g("Not", mask))


class Truncate(DecoderGraph):
    """Truncation in place of rounding

    Activations become int8 by cutting their fractions off, as a cast in C does.
    """

    def round(self, x):
        return self.g.cast(self.g.cast(x, np.int32), np.float32)


class OneScale(DecoderGraph):
    """One activation scale for all tokens

    The largest number of the whole prompt sets the scale, so a token's text depends on what it is computed with.
    """

    def activation_scale(self, x):
        return self.g("ReduceMin", super().activation_scale(x), self.g.ints(1), keepdims=1)


class WeightScale(DecoderGraph):
    """The weight scale the other way

    The product is divided by the matrix's scale, not multiplied. Files of both conventions exist.
    """

    def dequantize(self, acc, w_dequant_scale, x_quant_scale):
        return self.g("Div", self.g("Div", acc, w_dequant_scale), x_quant_scale)


class PlusOne(DecoderGraph):
    """Norms multiply by 1 + weight

    Gemma stores weight - 1, so its norms add 1. BitNet stores the weight itself.
    """

    def rms_norm(self, x, name, weight, eps):
        y = super().rms_norm(x, name, weight, eps)
        return self.g("Add", y, self.g.nodes[-1].input[0])  # x / rms * weight, and x / rms


class Bfloat16(DecoderGraph):
    """Sums in bfloat16

    The exact sums of a product are rounded to 8 bits of precision, as in an engine that computes in bfloat16.
    """

    def dequantize(self, acc, w_dequant_scale, x_quant_scale):
        acc = self.g.cast(self.g.cast(acc, ml_dtypes.bfloat16), np.float32)
        return super().dequantize(acc, w_dequant_scale, x_quant_scale)


class BitOrder(DecoderGraph):
    """Four weights of a byte in reverse

    A byte holds four weights. They are read from its high bits first, not from its low bits.
    """

    def ternary(self, name, w):
        order = np.arange(w.shape[1]).reshape(-1, 4)[:, ::-1].reshape(-1)
        return self.g("Gather", super().ternary(name, w), self.g.ints(*order), axis=0)


# By crossval's names of these mistakes: a test holds each graph equal to NumPy with that mistake.
BUGS = {
    "silu_for_relu2": Silu,
    "relu_not_squared": NoSquare,
    "sub_norms_missing": NoSubNorm,
    "norm_weight_plus_one": PlusOne,
    "rope_missing": NoRope,
    "rope_interleaved": Interleaved,
    "scores_not_scaled": NoRoot,
    "gqa_heads_interleaved": WrongGroups,
    "no_causal_mask": NoMask,
    "truncated": Truncate,
    "activation_scale_per_tensor": OneScale,
    "bf16_accumulators": Bfloat16,
    "scale_inverted": WeightScale,
    "four_in_a_byte_reversed": BitOrder,
}
INVISIBLE = {"truncated", "activation_scale_per_tensor", "bf16_accumulators"}  # by reading: under 0.01 nats per token
