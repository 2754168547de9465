"""Builds a decoder as an ONNX graph: the forward pass in ONNX's primitive operators.

The nodes follow the numerical contract exactly: the same roundings in the same places, float64 where `layers` uses it.
So the int8 activations and the exact accumulators equal those of the NumPy backend. Inputs, outputs and node names are
those of the usual exporters (optimum, torch.onnx).

Axes: B batch, S tokens of this call, P past tokens, T = P + S; the rest as in `model`. R = H / G queries a kv head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...errors import ConfigError
from ...families import differences_from_llama
from ...reference import quantization
from ...reference.layers import Array, Floats
from ...reference.weights import Norm, TernaryLinear, linear_name
from ..checkpoint import Checkpoint, Progress, part_count, read_part, ticker
from ..names import hf_module
from .file import DATA_TYPES, PACKED_SUFFIX, SCALE_SUFFIX, import_onnx

OPSET, IR_VERSION = 18, 8  # the first opset whose Reduce operators all take their axes as an input
_CODE_TABLE = quantization.unpack_ternary(np.arange(256, dtype=np.uint8)[:, None], 4)  # byte -> its 4 weights
_FLOAT, _DOUBLE = np.float32, np.float64
# (name, array, whether it must be inside) -> TensorProto, with the array in it or in a file beside
AddTensor = Callable[[str, Array, bool], Any]


class GraphBuilder:
    """The nodes and initialisers of a graph, with names like those of torch's exporter. Calling it adds a node."""

    def __init__(self, add_tensor: AddTensor) -> None:
        self._onnx = import_onnx()
        self._add_tensor = add_tensor
        self._scope, self._counts, self._constants = "", dict[str, int](), dict[tuple[Any, ...], str]()
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []

    def __call__(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Add a node. Returns the name of its output."""
        return self.add(op_type, *inputs, **attributes)[0]

    def add(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: Any) -> list[str]:
        """Add a node. Returns the names of its outputs."""
        base = f"{self._scope}/{op_type}"
        count = self._counts[base] = self._counts.get(base, -1) + 1
        name = f"{base}_{count}" if count else base
        names = [f"{name}_output_{i}" for i in range(outputs)]
        self.nodes.append(self._onnx.helper.make_node(op_type, inputs, names, name=name, **attributes))
        return names

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Nodes added inside are named below `name`."""
        outer, self._scope = self._scope, f"{self._scope}/{name}"
        yield
        self._scope = outer

    def weight(self, name: str, array: Array) -> str:
        """An initialiser of that name."""
        self.initializers.append(self._add_tensor(name, array, False))
        return name

    def constant(self, value: Any, dtype: type) -> str:
        """A small initialiser; equal values share one."""
        array: Array = np.asarray(value, dtype=dtype)
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = f"constant_{len(self._constants)}"
            self.initializers.append(self._add_tensor(self._constants[key], array, True))  # shapes are inferred from it
        return self._constants[key]

    def ints(self, *values: int) -> str:
        return self.constant(values, np.int64)

    def cast(self, x: str, dtype: type) -> str:
        return self("Cast", x, to=DATA_TYPES[np.dtype(dtype)])


class DecoderGraph:
    """Builds the graph of one model, reading its checkpoint one matrix at a time."""

    def __init__(self, checkpoint: Checkpoint, add_tensor: AddTensor, progress: Progress | None = None) -> None:
        checkpoint.require_plain_basis("ONNX")
        if differences := differences_from_llama(checkpoint.config):
            message = f"ONNX files of {checkpoint.config.model_type} models are not written; convert to native instead"
            raise ConfigError(message, field=differences[0])
        if checkpoint.config.rope.rope_type == "longrope":
            message = "longrope scaling is not written into ONNX files; convert to native instead"
            raise ConfigError(message, field="rope.rope_type")
        self.source, self.cfg, self.g = checkpoint, checkpoint.config, GraphBuilder(add_tensor)
        self._tick = ticker(progress, part_count(self.cfg))
        self._quantized: dict[str, tuple[str, str]] = {}  # an activation -> its integers and scale, shared by linears
        self._activations = {"relu2": self.relu2, "silu": self.silu}
        if self.cfg.activation not in self._activations:
            message = f"expected one of {', '.join(self._activations)} for ONNX, got {self.cfg.activation!r}"
            raise ConfigError(message, field="hidden_act")

    def build(self) -> Any:
        """The GraphProto."""
        helper, cfg, g = import_onnx().helper, self.cfg, self.g
        tensor_type = import_onnx().TensorProto
        cache_shape = ("batch_size", cfg.num_key_value_heads, "past_sequence_length", cfg.head_dim)
        present_shape = ("batch_size", cfg.num_key_value_heads, "total_sequence_length", cfg.head_dim)
        inputs: list[tuple[str, int, tuple[str | int, ...]]] = [
            ("input_ids", tensor_type.INT64, ("batch_size", "sequence_length")),
            ("attention_mask", tensor_type.INT64, ("batch_size", "total_sequence_length")),
            ("position_ids", tensor_type.INT64, ("batch_size", "sequence_length")),
        ]
        outputs: list[tuple[str, int, tuple[str | int, ...]]] = [
            ("logits", tensor_type.FLOAT, ("batch_size", "sequence_length", cfg.vocab_size))
        ]
        for i in range(cfg.num_hidden_layers):
            for part in ("key", "value"):
                inputs.append((f"past_key_values.{i}.{part}", tensor_type.FLOAT, cache_shape))
                outputs.append((f"present.{i}.{part}", tensor_type.FLOAT, present_shape))
        with g.scope("model"):
            table, table_dtype = self.table()
            with g.scope("embed_tokens"):
                x = self.widen(g("Gather", table, "input_ids", axis=0), table_dtype)  # (B, S, D)
            rope, mask = self.rope_tables(), self.mask()
            for i in range(cfg.num_hidden_layers):
                with g.scope(f"layers.{i}"):
                    x = self.block(x, i, rope, mask)
            x = self.norm(x, "final_norm")
        if cfg.tie_word_embeddings:
            with g.scope("lm_head"):
                self.matmul(x, table, table_dtype)
        else:
            self.linear(x, "lm_head")
        g.nodes[-1].output[0] = "logits"
        self.source.finish()
        make = helper.make_tensor_value_info
        return helper.make_graph(
            g.nodes, "decoder", [make(*item) for item in inputs], [make(*item) for item in outputs], g.initializers
        )

    # -- once for all layers -------------------------------------------------------------------------------------------

    def table(self) -> tuple[str, np.dtype]:
        """The embedding (V, D), in its stored dtype"""
        embedding = read_part(self.source, "embedding")  # a dense one
        self._tick()
        if self.cfg.tie_word_embeddings:
            self.source.check_tied_head(embedding)
        rows = embedding.array
        return self.g.weight(f"{hf_module('embedding')}.weight", rows), rows.dtype

    def rope_tables(self) -> tuple[str, str]:
        """cos and sin of every token's angles, (B, 1, S, d/2) float32: the angles in float64, rounded once."""
        g, head_dim = self.g, self.cfg.head_dim
        rope: Any = self.cfg.rope
        with g.scope("rotary_emb"):
            position = g("Unsqueeze", g.cast("position_ids", _DOUBLE), g.ints(1, 3))  # (B, 1, S, 1)
            if rope.rope_type == "dynamic":
                trained = float(rope.original_max_position_embeddings)
                length = g("Max", g("Add", position, g.constant(1.0, _DOUBLE)), g.constant(trained, _DOUBLE))
                stretch = g("Div", length, g.constant(trained, _DOUBLE))
                growth = g("Mul", g("Sub", stretch, g.constant(1.0, _DOUBLE)), g.constant(rope.factor, _DOUBLE))
                growth = g("Add", growth, g.constant(1.0, _DOUBLE))
                power = g("Pow", growth, g.constant(head_dim / (head_dim - 2), _DOUBLE))
                base = g("Mul", power, g.constant(rope.theta, _DOUBLE))
                exponent = -np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
                inv_freq = g("Pow", base, g.constant(exponent, _DOUBLE))  # (B, 1, S, d/2)
            else:
                inv_freq = g.constant(rope.frequencies(head_dim), _DOUBLE)  # (d/2,)
            angles = g("Mul", position, inv_freq)
            # cos x = sin(x + pi/2): onnxruntime 1.20 has no float64 Cos, and the last bit of float64 does not matter
            tables = [g("Sin", g("Add", angles, g.constant(np.pi / 2, _DOUBLE))), g("Sin", angles)]
            if rope.rope_type == "yarn":
                tables = [g("Mul", table, g.constant(rope.attention_factor, _DOUBLE)) for table in tables]
            cos, sin = (g.cast(table, _FLOAT) for table in tables)
            return cos, sin

    def mask(self) -> str:
        """Which keys each query sees: (B, 1, R*S, T) bool. Row r*S + s is token s for the r-th query of a group."""
        g, cfg = self.g, self.cfg
        with g.scope("mask"):
            past = g("Gather", g("Shape", "past_key_values.0.key"), g.constant(2, np.int64), axis=0)
            length = g("Gather", g("Shape", "input_ids"), g.constant(1, np.int64), axis=0)
            one, zero = g.constant(1, np.int64), g.constant(0, np.int64)
            total = g("Add", past, length)
            rows = g("Unsqueeze", g("Range", past, total, one), g.ints(1))  # (S, 1)
            columns = g("Range", zero, total, one)  # (T,)
            allowed = g("LessOrEqual", columns, rows)  # (S, T)
            if cfg.sliding_window is not None:
                first = g("Sub", rows, g.constant(cfg.sliding_window - 1, np.int64))
                allowed = g("And", allowed, g("GreaterOrEqual", columns, first))
            given = g("Unsqueeze", g.cast("attention_mask", np.bool_), g.ints(1, 2))  # (B, 1, 1, T)
            allowed = g("And", allowed, given)  # (B, 1, S, T)
            return g("Tile", allowed, g.ints(1, 1, cfg.num_attention_heads // cfg.num_key_value_heads, 1))

    # -- one block -----------------------------------------------------------------------------------------------------

    def block(self, x: str, index: int, rope: tuple[str, str], mask: str) -> str:
        """(B, S, D) -> (B, S, D)"""
        g = self.g
        h = self.norm(x, f"blocks.{index}.attn_norm")
        with g.scope("self_attn"):
            x = g("Add", x, self.attention(h, index, rope, mask))
        h = self.norm(x, f"blocks.{index}.ffn_norm")
        with g.scope("mlp"):
            return g("Add", x, self.feed_forward(h, index))

    def attention(self, h: str, index: int, rope: tuple[str, str], mask: str) -> str:
        """(B, S, D) -> (B, S, D)"""
        g, cfg, kv_heads, head_dim = self.g, self.cfg, self.cfg.num_key_value_heads, self.cfg.head_dim

        def heads(part: str, count: int) -> str:  # (B, S, D) -> (B, count, S, d)
            y = self.linear(h, linear_name(index, part))
            return g("Transpose", g("Reshape", y, g.ints(0, 0, count, head_dim)), perm=[0, 2, 1, 3])

        q = self.apply_rope(heads("q_proj", cfg.num_attention_heads), rope)
        k = self.apply_rope(heads("k_proj", kv_heads), rope)
        v = heads("v_proj", kv_heads)
        for part, new in (("key", k), ("value", v)):
            g("Concat", f"past_key_values.{index}.{part}", new, axis=2)  # (B, G, T, d)
            g.nodes[-1].output[0] = f"present.{index}.{part}"
        q = g.cast(g("Reshape", q, g.ints(0, kv_heads, -1, head_dim)), _DOUBLE)  # (B, G, R*S, d)
        keys, values = (g.cast(f"present.{index}.{part}", _DOUBLE) for part in ("key", "value"))  # (B, G, T, d)
        # q k^T. Not Transpose and MatMul: onnxruntime up to 1.23 fuses these into an operator it lacks in float64
        scores = g("Einsum", q, keys, equation="bgqd,bgtd->bgqt")  # (B, G, R*S, T)
        scores = g.cast(g("Mul", scores, g.constant(head_dim**-0.5, _DOUBLE)), _FLOAT)
        # The lowest number, not -inf: a row of padding, which sees no key, then stays finite
        scores = g("Where", mask, scores, g.constant(np.finfo(np.float32).min, _FLOAT))
        z = g("MatMul", g.cast(self.softmax(scores), _DOUBLE), values)  # (B, G, R*S, d)
        z = g("Reshape", g.cast(z, _FLOAT), g.ints(0, cfg.num_attention_heads, -1, head_dim))  # (B, H, S, d)
        z = g("Reshape", g("Transpose", z, perm=[0, 2, 1, 3]), g.ints(0, 0, cfg.query_size))  # (B, S, H*d)
        if cfg.sub_norms:
            z = self.norm(z, f"blocks.{index}.attn_sub_norm")
        return self.linear(z, linear_name(index, "o_proj"))

    def apply_rope(self, x: str, rope: tuple[str, str]) -> str:
        """`layers.apply_rope`: x (B, H, S, d) -> (B, H, S, d)"""
        g, (cos, sin), half = self.g, rope, self.cfg.head_dim // 2
        first, second = g.add("Split", x, g.ints(half, half), outputs=2, axis=-1)
        left = g("Sub", g("Mul", first, cos), g("Mul", second, sin))
        right = g("Add", g("Mul", second, cos), g("Mul", first, sin))
        return g("Concat", left, right, axis=-1)

    def softmax(self, scores: str) -> str:
        """`layers.softmax`: over the last axis, exponentials and their sum in float64"""
        g = self.g
        largest = g("ReduceMax", scores, g.ints(-1), keepdims=1)
        e = g("Exp", g.cast(g("Sub", scores, largest), _DOUBLE))
        return g.cast(g("Div", e, g("ReduceSum", e, g.ints(-1), keepdims=1)), _FLOAT)

    def feed_forward(self, h: str, index: int) -> str:
        """(B, S, D) -> (B, S, D)"""
        g, cfg = self.g, self.cfg
        gate, up = (self.linear(h, linear_name(index, part)) for part in ("gate_proj", "up_proj"))
        with g.scope("act_fn"):
            act = self._activations[cfg.activation](gate)
        h = g("Mul", act, up)
        if cfg.sub_norms:
            h = self.norm(h, f"blocks.{index}.ffn_sub_norm")
        return self.linear(h, linear_name(index, "down_proj"))

    def relu2(self, x: str) -> str:
        positive = self.g("Relu", x)
        return self.g("Mul", positive, positive)

    def silu(self, x: str) -> str:
        """`layers.silu`, in float64"""
        g = self.g
        wide, zero, one = g.cast(x, _DOUBLE), g.constant(0.0, _DOUBLE), g.constant(1.0, _DOUBLE)
        e = g("Exp", g("Neg", g("Abs", wide)))
        numerator = g("Mul", wide, g("Where", g("GreaterOrEqual", wide, zero), one, e))
        return g.cast(g("Div", numerator, g("Add", e, one)), _FLOAT)

    # -- norms and linears ---------------------------------------------------------------------------------------------

    def norm(self, x: str, name: str) -> str:
        """One of the model's own norms"""
        self._tick()
        module = hf_module(name)
        with self.g.scope(module.rpartition(".")[2]):
            return self.rms_norm(x, f"{module}.weight", self.source.norm(name), self.cfg.norm_eps)

    def rms_norm(self, x: str, name: str, weight: Floats, eps: float) -> str:
        """`layers.rms_norm`: the mean of squares in float64"""
        g = self.g
        wide = g.cast(x, _DOUBLE)
        mean_square = g("ReduceMean", g("Mul", wide, wide), g.ints(-1), keepdims=1)
        scale = g.cast(g("Sqrt", g("Add", mean_square, g.constant(eps, _DOUBLE))), _FLOAT)
        return g("Mul", g("Div", x, scale), g.weight(name, weight))

    def linear(self, x: str, name: str) -> str:
        """x W^T + bias.   (B, S, K) -> (B, S, out)"""
        w, name = read_part(self.source, name), hf_module(name)
        self._tick()
        with self.g.scope(name.rpartition(".")[2]):
            ternary = w.bit_linear
            if ternary is None:
                array = w.array
                y = self.matmul(x, self.g.weight(f"{name}.weight", array), array.dtype)
            else:
                y = self.ternary_product(x, name, ternary, w.norm)
            return y if w.bias is None else self.g("Add", y, self.g.weight(f"{name}.bias", w.bias))

    def ternary_product(self, x: str, name: str, ternary: TernaryLinear, norm: Norm | None) -> str:
        """(B, S, K) -> (B, S, out), without the bias"""
        g = self.g
        if norm is not None:
            x = self.rms_norm(x, f"{name}.rms_norm.weight", norm.weight, norm.eps)
        x_u8, x_quant_scale = self.quantize_activations(x)
        acc = g("MatMulInteger", x_u8, self.ternary(name, ternary), g.constant(128, np.uint8))  # int32, exact
        w_dequant_scale = g.weight(name + SCALE_SUFFIX, np.asarray(ternary.w_dequant_scale, dtype=np.float32))
        return self.dequantize(g.cast(acc, _FLOAT), w_dequant_scale, x_quant_scale)

    def dequantize(self, acc: str, w_dequant_scale: str, x_quant_scale: str) -> str:
        return self.g("Mul", acc, self.g("Div", w_dequant_scale, x_quant_scale))

    def quantize_activations(self, x: str) -> tuple[str, str]:
        """`quantization.quantize_activations`, token by token -> (B, S, K) uint8 = x_q + 128, x_quant_scale (B, S, 1).

        The 128 is a zero point that MatMulInteger subtracts again: onnxruntime has fast kernels for uint8 times int8
        and none for int8 times int8 (22 times slower on a processor with VNNI).
        """
        if x not in self._quantized:
            g = self.g
            x_quant_scale = self.activation_scale(x)
            x_q = self.round(g("Mul", x, x_quant_scale))
            x_q = g("Clip", x_q, g.constant(-128.0, _FLOAT), g.constant(127.0, _FLOAT))
            self._quantized[x] = g.cast(g("Add", x_q, g.constant(128.0, _FLOAT)), np.uint8), x_quant_scale
        return self._quantized[x]

    def activation_scale(self, x: str) -> str:
        """(B, S, K) -> (B, S, 1): 127 / max|x| of each token"""
        g = self.g
        largest = g("ReduceMax", g("Abs", x), g.ints(-1), keepdims=1)
        return g("Div", g.constant(127.0, _FLOAT), g("Max", largest, g.constant(quantization.SCALE_FLOOR, _FLOAT)))

    def round(self, x: str) -> str:
        """Half to even"""
        return self.g("Round", x)

    def ternary(self, name: str, w: TernaryLinear) -> str:
        """The matrix (K, out) int8, unpacked from the 2-bit initialiser (out, ceil(K/4)) uint8 of `quantization`.

        onnxruntime computes these four nodes once, when it loads the model. So the file is a quarter of the size, and
        the product as fast as with int8 in the file.
        """
        g, (n, k) = self.g, w.shape
        packed = w.plain().packed
        codes = g("Cast", g.weight(name + PACKED_SUFFIX, packed), to=DATA_TYPES[np.dtype(np.int32)])
        w_t = g("Gather", g.constant(_CODE_TABLE, np.int8), codes, axis=0)  # (out, ceil(K/4), 4)
        w_t = g("Reshape", w_t, g.ints(n, packed.shape[1] * quantization.CODES_PER_BYTE))
        if k % quantization.CODES_PER_BYTE:
            w_t = g("Slice", w_t, g.ints(0), g.ints(k), g.ints(1))
        return g("Transpose", w_t, perm=[1, 0])

    def matmul(self, x: str, matrix: str, dtype: np.dtype) -> str:
        """x times the transpose of a dense initialiser, in float32"""
        return self.g("MatMul", x, self.g("Transpose", self.widen(matrix, dtype), perm=[1, 0]))

    def widen(self, x: str, dtype: np.dtype) -> str:
        return x if dtype == np.float32 else self.g.cast(x, _FLOAT)
