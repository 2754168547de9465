"""The constants of an ONNX graph (a MatMul's weight after transposes, casts and dequantisers), and the parts of a model
among them, found by the names that exporters leave on nodes and initialisers:

    torch.onnx, optimum   model.layers.0.mlp.up_proj.weight, or onnx::MatMul_12 into /model/layers.0/mlp/up_proj/MatMul
    torch.onnx, dynamo    val_108 into a node whose metadata has the module's name (pkg.torch.onnx.name_scopes)
    onnxruntime-genai     model.layers.0.attn.q_proj.MatMul.weight, model.layers.28.final_norm_layernorm.weight

Only names and constants are read. What the graph computes is not analysed: the configuration describes it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import FormatError
from ...families import family_table
from ...reference.layers import Array
from ...reference.weights import linear_name
from ..names import gguf_linears, parts_of_a_block
from .file import DTYPES, OnnxFile, unpack_bits

_MAX_DEPTH = 16  # nodes between an initialiser and its use
_PASSING = ("Identity", "Cast", "Transpose", "DequantizeLinear")
MATMULS = ("MatMul", "Gemm", "MatMulNBits")

# The attributes that are used, and their types in ONNX
_INTEGERS = ("axis", "block_size", "to", "transA", "transB", "N", "K", "bits")
_ATTRIBUTE_TYPES: dict[str, type] = {**dict.fromkeys(_INTEGERS, int), "alpha": float, "beta": float, "perm": list}
_START, _END = r"(?:^|[./'\"])", r"(?=[./'\"]|$)"
_HEAD = re.compile(_START + "lm_head" + _END)
_FINAL_NORM = re.compile(r"(?:^|[./'\"]|model[./])norm" + _END)
_NORM_NODES = (
    *("Mul", "RMSNormalization", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"),
    "LayerNormalization",  # as genai names the first one
)


@family_table
def _norms() -> dict[str, str]:
    """The last word of a Hugging Face name -> our name of that norm; a name of several norms is LLaMA's."""
    norms: dict[str, str] = {}
    for part, names in parts_of_a_block().items():
        for full in names.hf if part.endswith("_norm") else ():
            norms.setdefault(full.rpartition(".")[2], part)
    return norms


@family_table
def _norm() -> re.Pattern[str]:
    names = "|".join([*_norms(), "final_norm_layernorm"])
    return re.compile(_START + rf"layers[./](\d{{1,6}})[./](?:(?:self_attn|attn|mlp)[./])?({names})" + _END)


@family_table
def _linear() -> re.Pattern[str]:
    names, halves = "|".join([*gguf_linears(), "qkv_proj"]), "self_attn|attn|attention|mlp|feed_forward"
    return re.compile(_START + rf"layers[./](\d{{1,6}})[./](?:{halves})[./]({names})" + _END)


class Constants:
    """The values of a graph that are known without running it."""

    def __init__(self, file: OnnxFile) -> None:
        self.file = file
        self._producers = {output: node for node in file.model.graph.node for output in node.output if output}

    def root(self, value: str) -> str | None:
        """The initialiser that a value is computed from by transposing, casting or dequantising, or None."""
        for _ in range(_MAX_DEPTH + 1):
            if value in self.file.tensors:
                return value
            node = self._producers.get(value)
            if node is None or node.op_type not in _PASSING or not node.input:
                return None
            value = node.input[0]
        return None

    def value(self, name: str, depth: int = 0) -> Array:
        """The array of a value that has a root."""
        if name in self.file.tensors:
            return self.file.read(name)
        node = self._producers.get(name)
        if node is None or node.op_type not in _PASSING or not node.input or depth == _MAX_DEPTH:
            raise self.file.fail(name, "is computed as the model runs; expected a constant")
        x, given = self.value(node.input[0], depth + 1), self._attributes(node)
        if node.op_type == "Transpose":
            perm = given.get("perm", list(range(x.ndim))[::-1])
            if sorted(perm) != list(range(x.ndim)):
                raise self.fail(node, f"expected perm to permute {x.ndim} axes, got {perm}")
            return x.transpose(perm)
        if node.op_type == "Cast":
            if given.get("to") not in DTYPES:
                raise self.fail(node, f"casts to type {given.get('to')}, which is not supported")
            with np.errstate(over="ignore", invalid="ignore"):
                return x.astype(DTYPES[given["to"]])
        return self._dequantized(node, x, given, depth) if node.op_type == "DequantizeLinear" else x

    def matrix(self, node: Any) -> Array:
        """The weight (out, in) of a node among MATMULS."""
        given = self._attributes(node)
        if node.op_type == "MatMulNBits":
            return self._n_bits(node, given)
        w = self.value(node.input[1])
        if w.ndim != 2:
            raise self.fail(node, f"expected a matrix, got an array of shape {list(w.shape)}")
        if node.op_type == "MatMul":
            return w.T
        if given.get("transA", 0) or given.get("alpha", 1.0) != 1.0 or given.get("beta", 1.0) != 1.0:
            raise self.fail(node, "expected transA 0, alpha 1 and beta 1")
        return w if given.get("transB", 0) else w.T

    def _attributes(self, node: Any) -> dict[str, Any]:
        """The numbers and lists of numbers among a node's attributes, checked against `_ATTRIBUTE_TYPES`."""
        given: dict[str, Any] = {}
        for attribute in node.attribute:
            if attribute.type in (1, 2, 7):
                value = {1: attribute.f, 2: attribute.i, 7: list(attribute.ints)}[attribute.type]
                given[attribute.name] = value
        for name, expected in _ATTRIBUTE_TYPES.items():
            if name in given and not isinstance(given[name], expected):
                raise self.fail(node, f"expected {name} to be of type {expected.__name__}, got {given[name]}")
        return given

    def fail(self, node: Any, message: str) -> FormatError:
        return self.file.fail(f"node {node.name or node.op_type}", message)

    def _dequantized(self, node: Any, x: Array, given: dict[str, Any], depth: int) -> Array:
        """(x - zero_point) * scale, with one scale for all values, per index of `axis`, or per block along it."""
        if x.dtype.kind not in "iu" or x.dtype.itemsize > 4 or len(node.input) < 2:
            raise self.fail(node, f"expected integers of at most 32 bits and a scale, got {x.dtype}")
        scale = self.value(node.input[1], depth + 1).astype(np.float32)
        zero = np.zeros((), np.int64)
        if len(node.input) > 2 and node.input[2]:
            zero = self.value(node.input[2], depth + 1)
            if zero.dtype.kind not in "iu" or zero.size != scale.size:
                raise self.fail(node, f"expected a whole zero point for each of {scale.size} scales")
            zero = zero.astype(np.int64).reshape(scale.shape)
        axis, block = given.get("axis", 1), given.get("block_size", 0)
        if scale.size == 0:
            raise self.fail(node, "has no scale")
        if scale.size == 1:
            return self._scaled(node, x, zero.reshape(()), scale.reshape(()))
        axis += x.ndim if axis < 0 else 0
        if not 0 <= axis < x.ndim:
            raise self.fail(node, f"has no axis {axis} in shape {list(x.shape)}")
        length = x.shape[axis]
        zero = np.broadcast_to(zero, scale.shape)
        if block:
            blocks = -(-length // block) if block > 0 else 0
            expected = (*x.shape[:axis], blocks, *x.shape[axis + 1 :])
            if scale.shape != expected:
                raise self.fail(node, f"expected scales of shape {list(expected)}, got {list(scale.shape)}")
            block_of = np.arange(length) // block
            return self._scaled(node, x, zero.take(block_of, axis), scale.take(block_of, axis))
        if scale.shape != (length,):
            raise self.fail(node, f"expected {length} scales, got shape {list(scale.shape)}")
        along = tuple(length if i == axis else 1 for i in range(x.ndim))
        return self._scaled(node, x, zero.reshape(along), scale.reshape(along))

    def _n_bits(self, node: Any, given: dict[str, Any]) -> NDArray[np.float32]:
        """com.microsoft.MatMulNBits: rows of K numbers in blocks, each with a scale and perhaps a zero point."""
        n, k, bits, block = (given.get(name, {"bits": 4}.get(name, 0)) for name in ("N", "K", "bits", "block_size"))
        if bits not in (2, 4, 8) or not 0 < block <= 2**20 or block * bits % 8 or n < 1 or k < 1:
            raise self.fail(node, f"expected bits 2, 4 or 8, got {bits}; block_size {block}, N {n}, K {k}")
        if len(node.input) < 3 or (len(node.input) > 4 and node.input[4]):
            raise self.fail(node, "expected a matrix and scales, and no g_idx")
        blocks = -(-k // block)
        codes, scale = self.value(node.input[1]), self.value(node.input[2])
        if codes.dtype != np.uint8 or codes.size != math.prod((n, blocks, block * bits // 8)):
            expected = f"{n} rows of {blocks} blocks of {block * bits // 8} bytes"
            raise self.fail(node, f"expected {expected}, got {codes.dtype} {list(codes.shape)}")
        if scale.size != n * blocks or scale.dtype.kind in "iub":
            raise self.fail(node, f"expected {n} x {blocks} scales, got {scale.dtype} {list(scale.shape)}")
        zero: Array = np.full((), 2 ** (bits - 1), dtype=np.int16)
        if len(node.input) > 3 and node.input[3]:
            zero = self.value(node.input[3])
            row = -(-blocks * bits // 8)
            if zero.dtype == np.uint8 and zero.size == n * row:
                zero = unpack_bits(zero.reshape(n, row), bits)[:, :blocks]
            elif zero.dtype.kind in "iub" or zero.size != n * blocks:
                raise self.fail(node, f"expected {n} rows of {row} bytes of zero points, got {list(zero.shape)}")
            zero = zero.astype(np.float32).reshape(n, blocks, 1)
        q = unpack_bits(codes.reshape(n, blocks, -1), bits)  # (N, blocks, block)
        w = self._scaled(node, q, zero, scale.astype(np.float32).reshape(n, blocks, 1))
        return w.reshape(n, -1)[:, :k]

    def _scaled(self, node: Any, q: Array, zero: Array, scale: Array) -> NDArray[np.float32]:
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            w: NDArray[np.float32] = (q.astype(np.float32) - zero.astype(np.float32)) * scale
        if not np.isfinite(w).all():
            raise self.fail(node, "gives numbers that are not finite")
        return w


class ModelNames:
    """The parts of a model in a graph, by our names: `linears`, `norms` and `embedding`.

    If q, k and v are one matrix, it is "blocks.N.attn.qkv_proj".
    """

    def __init__(self, file: OnnxFile, constants: Constants) -> None:
        self.file, self.constants = file, constants
        self.linears: dict[str, Any] = {}  # -> the MatMul node
        self.norms: dict[str, str] = {}  # -> its initialiser
        self.embedding: str | None = None
        self._readers: dict[str, list[Any]] = {}
        for node in file.model.graph.node:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)
        for name in file.tensors:
            self._place_norm(name, name)
        for node in file.model.graph.node:
            if node.op_type in MATMULS and len(node.input) > 1:
                self._place_linear(node)
            elif node.op_type in _NORM_NODES:
                vectors = [name for name in node.input if name in file.tensors and len(file.shape(name)) == 1]
                for text in self._texts(node) if vectors else ():
                    self._place_norm(text, vectors[-1])
            elif node.op_type == "Gather" and len(node.input) > 1:
                self._place_embedding(node)

    def bias(self, node: Any) -> str | None:
        """The constant vector that is added to a MatMul's product, or None."""
        place = {"Gemm": 2, "MatMulNBits": 5}.get(node.op_type)
        if place is not None and len(node.input) > place and node.input[place]:
            given: str = node.input[place]
            return given
        readers = self._readers.get(node.output[0], ()) if node.output else ()
        added = (name for reader in readers if reader.op_type == "Add" for name in reader.input)
        for name in (name for name in added if name != node.output[0]):
            root = self.constants.root(name)
            if root is not None and len(self.file.shape(root)) == 1:
                return str(name)
        return None

    def _texts(self, node: Any) -> Iterator[str]:
        """The texts that may contain the name of a node's module: its name and its metadata."""
        yield node.name
        for entry in node.metadata_props:
            if entry.key == "pkg.torch.onnx.name_scopes":
                yield entry.value

    def _place_linear(self, node: Any) -> None:
        root = self.constants.root(node.input[1])
        if root is None:
            return  # a product of two activations
        for text in (root, *self._texts(node)):
            if match := _linear().search(text):
                layer, linear = int(match[1]), match[2]
                name = f"blocks.{layer}.attn.qkv_proj" if linear == "qkv_proj" else linear_name(layer, linear)
            elif _HEAD.search(text):
                name = "lm_head"
            else:
                continue
            if name in self.linears and self.linears[name].input[1] != node.input[1]:
                message = "two matrices have this name; of a model exported more than once, give one part"
                raise self.file.fail(name, message)
            self.linears.setdefault(name, node)
            return

    def _place_norm(self, text: str, tensor: str) -> None:
        if len(self.file.shape(tensor)) != 1 or text.endswith(".bias"):
            return
        if match := _norm().search(text):
            name = f"blocks.{int(match[1])}.{_norms()[match[2]]}" if match[2] in _norms() else "final_norm"
        elif _FINAL_NORM.search(text) and "layers" not in text:
            name = "final_norm"
        else:
            return
        self.norms.setdefault(name, tensor)

    def _place_embedding(self, node: Any) -> None:
        root = self.constants.root(node.input[0])
        if root is None or len(self.file.shape(root)) != 2:
            return
        named = any("embed_tokens" in text for text in (root, *self._texts(node)))
        if named or (self.embedding is None and node.input[1] == "input_ids"):
            self.embedding = node.input[0]
