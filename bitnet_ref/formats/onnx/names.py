"""Finds the parts of a model in an exported decoder by the names that exporters leave on nodes and initialisers.

    torch.onnx, optimum   model.layers.0.mlp.up_proj.weight, or onnx::MatMul_12 into /model/layers.0/mlp/up_proj/MatMul
    torch.onnx, dynamo    val_108 into a node whose metadata has the module's name (pkg.torch.onnx.name_scopes)
    onnxruntime-genai     model.layers.0.attn.q_proj.MatMul.weight, model.layers.28.final_norm_layernorm.weight

Only names and constants are read. What the graph computes is not analysed: the configuration describes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ...reference.weights import linear_name
from ..names import BLOCK_PART_OF_HF, GGUF_LINEARS
from .constants import MATMULS, Constants
from .file import OnnxFile

_NORMS = {theirs: ours for theirs, ours in BLOCK_PART_OF_HF.items() if ours.endswith("_norm")}
_START, _END = r"(?:^|[./'\"])", r"(?=[./'\"]|$)"
_LINEAR = re.compile(
    _START + r"layers[./](\d{1,6})[./](?:self_attn|attn|attention|mlp|feed_forward)[./]"
    rf"({'|'.join(GGUF_LINEARS)}|qkv_proj)" + _END
)
_HEAD = re.compile(_START + "lm_head" + _END)
_NORM = re.compile(
    _START + r"layers[./](\d{1,6})[./](?:(?:self_attn|attn|mlp)[./])?"
    rf"({'|'.join(_NORMS)}|final_norm_layernorm)" + _END
)
_FINAL_NORM = re.compile(r"(?:^|[./'\"]|model[./])norm" + _END)
_NORM_NODES = (
    *("Mul", "RMSNormalization", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"),
    "LayerNormalization",  # as genai names the first one
)


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
            return node.input[place]
        for reader in self._readers.get(node.output[0], ()) if node.output else ():
            others = [name for name in reader.input if name != node.output[0]] if reader.op_type == "Add" else []
            for name in others:
                root = self.constants.root(name)
                if root is not None and len(self.file.shape(root)) == 1:
                    return name
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
            if match := _LINEAR.search(text):
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
        if match := _NORM.search(text):
            name = f"blocks.{int(match[1])}.{_NORMS[match[2]]}" if match[2] in _NORMS else "final_norm"
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
