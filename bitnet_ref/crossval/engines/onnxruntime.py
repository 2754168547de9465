"""onnxruntime, on the file that `convert --to onnx` writes. A copy of the file has the inner tensors as outputs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ...api import load
from ...errors import BackendUnavailable
from ...formats.onnx.export import export_onnx
from ...formats.onnx.file import import_onnx
from ...formats.open import open_checkpoint
from ...reference.config import ModelConfig
from .engine import Attempt, ExternalEngine, Prepared, explain_by_contract, judge_by_contract

ENGINE = ExternalEngine("onnxruntime", ("onnxruntime", "numpy"), "onnxruntime")
_LINEARS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}


def attempts(path: Path) -> list[Attempt]:
    """One attempt: the exported file on the CPU provider."""
    missing = None
    try:
        import_onnx()  # the exporter needs it
    except BackendUnavailable as error:
        missing = str(error)
    return [Attempt(ENGINE.name, partial(_prepare, path), judge_by_contract, missing, explain_by_contract)]


def _prepare(path: Path, folder: Path) -> Prepared:
    onnx = import_onnx()
    file, watched = folder / "model.onnx", folder / "watched.onnx"
    with open_checkpoint(path) as checkpoint:
        export_onnx(file, checkpoint)
    model = load(path, backend="numpy")
    graph = onnx.load(str(file), load_external_data=False)
    outputs = dict(named_outputs(graph.graph.node, model.config))
    present = {output.name for output in graph.graph.output}
    graph.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted({*outputs.values()} - present))
    watched.write_bytes(graph.SerializeToString())
    cache = [model.config.num_hidden_layers, model.config.num_key_value_heads, model.config.head_dim]
    return model, {"model": str(file), "watched": str(watched), "outputs": outputs, "cache": cache}


def named_outputs(nodes: Any, config: ModelConfig) -> Iterator[tuple[str, str]]:
    """(our name, the graph's name) of the inner tensors of an exported decoder, found by the scopes of its nodes."""
    scopes: dict[str, list[Any]] = {}
    for node in nodes:
        scopes.setdefault(node.name.rpartition("/")[0], []).append(node)

    def last(scope: str, kind: str = "") -> str:
        return str([node for node in scopes[scope] if kind in ("", node.op_type)][-1].output[0])

    def linear(name: str, scope: str) -> Iterator[tuple[str, str]]:
        yield f"{name}.hook_out", last(scope)
        product = next((node for node in scopes[scope] if node.op_type == "MatMulInteger"), None)
        if product is not None:
            yield f"{name}.hook_x_int8", product.input[0]
            yield f"{name}.hook_acc_int32", product.output[0]
            # w_scale / x_scale: the divisor
            yield f"{name}.hook_x_scale", next(node for node in scopes[scope][::-1] if node.op_type == "Div").input[1]

    yield "hook_embed", last("/model/embed_tokens")
    for i in range(config.num_hidden_layers):
        block, scope = f"blocks.{i}", f"/model/layers.{i}"
        attn, mlp = f"{scope}/self_attn", f"{scope}/mlp"
        yield f"{block}.ln1.hook_normalized", last(f"{scope}/input_layernorm")
        yield f"{block}.ln2.hook_normalized", last(f"{scope}/post_attention_layernorm")
        for part, linears in _LINEARS.items():
            for name in linears:
                yield from linear(f"{block}.{part.replace('self_', '')}.{name}", f"{scope}/{part}/{name}")
        yield f"{block}.attn.hook_rot_q", next(n for n in scopes[attn] if n.op_type == "Concat").output[0]
        yield f"{block}.attn.hook_rot_k", f"present.{i}.key"
        yield f"{block}.attn.hook_v", f"present.{i}.value"
        yield f"{block}.attn.hook_z", last(attn, "Reshape")
        yield f"{block}.hook_resid_mid", last(attn, "Add")
        yield f"{block}.mlp.hook_post", last(mlp, "Mul")
        yield f"{block}.hook_resid_post", last(mlp, "Add")
        if config.sub_norms:
            yield f"{block}.attn.sub_norm.hook_normalized", last(f"{attn}/attn_sub_norm")
            yield f"{block}.mlp.sub_norm.hook_normalized", last(f"{mlp}/ffn_sub_norm")
    yield "ln_final.hook_normalized", last("/model/norm")
