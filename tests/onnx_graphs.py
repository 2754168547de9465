"""Decoders as other exporters name them: the weights and the nodes that take them, without the arithmetic between.

Nothing else of a foreign graph is read, so nothing else is built. The names are what torch.onnx (TorchScript, dynamo)
and onnxruntime-genai's model builder write.
"""

import json

import numpy as np
from onnx import TensorProto, helper, numpy_helper

LINEAR_STYLES = ("named", "torchscript", "dynamo", "genai", "gemm", "genai-qkv")
QUANTIZED_STYLES = ("qdq", "qdq-int2", "nbits-2", "nbits-4", "nbits-8")


class Builder:
    def __init__(self):
        self.nodes, self.tensors = [], []

    def tensor(self, name, array):
        self.tensors.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def node(self, op_type, inputs, name, scope="", **attributes):
        node = helper.make_node(op_type, inputs, [f"{name}_output_0"], name=name, **attributes)
        if scope:
            parts = scope.split(".")
            scopes = ["", *(".".join(parts[: i + 1]) for i in range(len(parts))), "linear"]
            node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(scopes))
        self.nodes.append(node)
        return node.output[0]


def nbits(w_q, scales, zero_points, bits, block):
    """w_q (N, K) codes -> the blob (N, blocks, block * bits / 8) of MatMulNBits; scales and zero points as they are."""
    n, k = w_q.shape
    blocks = -(-k // block)
    codes = np.zeros((n, blocks * block), np.uint8)
    codes[:, :k] = w_q
    return pack(codes, bits).reshape(n, blocks, -1), scales, None if zero_points is None else pack(zero_points, bits)


def pack(codes, bits):
    """codes (n, m) -> bytes (n, ceil(m * bits / 8)), the first in the lowest bits"""
    each = 8 // bits
    padded = np.zeros((len(codes), -(-codes.shape[1] // each) * each), np.uint8)
    padded[:, : codes.shape[1]] = codes
    return sum(padded[:, i::each] << (bits * i) for i in range(each)).astype(np.uint8)


def linear(b, style, x, module, w, bias=None, scale=None):
    """A node that multiplies by w (N, K), or by w * scale with w in {-1, 0, 1}, as `style` writes it."""
    index = len(b.tensors)
    path = "/" + module.replace(".self_attn", "/self_attn").replace(".mlp", "/mlp").replace("model.", "model/")
    path = "/".join(path.rsplit(".", 1)) if module != "lm_head" else path
    genai = module.replace("self_attn", "attn")
    if style == "named":
        turned = b.node("Transpose", [b.tensor(f"{module}.weight", w)], f"t{index}", perm=[1, 0])
        y = b.node("MatMul", [x, turned], f"matmul{index}")
    elif style == "torchscript":
        y = b.node("MatMul", [x, b.tensor(f"onnx::MatMul_{index}", w.T)], f"{path}/MatMul")
    elif style == "dynamo":
        y = b.node("MatMul", [x, b.tensor(f"val_{index}", w.T)], f"node_linear_{index}", scope=module)
    elif style in ("genai", "genai-qkv"):
        name = "/" + genai.replace(".attn.", "/attn/").replace(".mlp.", "/mlp/").replace("model.", "model/")
        y = b.node("MatMul", [x, b.tensor(f"{genai}.MatMul.weight", w.T)], f"{name}/MatMul")
    elif style == "gemm":
        inputs = [x, b.tensor(f"{module}.weight", w), *([b.tensor(f"{module}.bias", bias)] if bias is not None else ())]
        return b.node("Gemm", inputs, f"gemm{index}", transB=1)
    elif style in ("qdq", "qdq-int2"):
        q = helper.make_tensor(f"{module}.weight_quantized", TensorProto.INT2, w.T.shape, w.T.flatten().tolist())
        if style == "qdq":
            q = numpy_helper.from_array(np.ascontiguousarray(w.T), q.name)
        b.tensors.append(q)
        scale = b.tensor(f"{module}.weight_scale", np.array(scale, np.float32))
        wide = b.node("DequantizeLinear", [q.name, scale], f"{path}/weight_DequantizeLinear")
        y = b.node("MatMul", [x, wide], f"{path}/MatMul")
    else:
        bits, block, (n, k) = int(style[-1]), 16, w.shape
        zero = 2 ** (bits - 1)
        blob, scales, _ = nbits(
            w.astype(np.int16) + zero, np.full((n, -(-k // block)), scale, np.float32), None, bits, block
        )
        inputs = [x, b.tensor(f"{genai}.MatMul.qweight", blob), b.tensor(f"{genai}.MatMul.scales", scales)]
        attributes = {"N": n, "K": k, "bits": bits, "block_size": block, "domain": "com.microsoft"}
        y = b.node("MatMulNBits", inputs, f"{path}/MatMul", **attributes)
    return y if bias is None else b.node("Add", [b.tensor(f"{module}.bias", bias), y], f"{path}/Add")


def decoder(weights, style, cfg):
    """The ModelProto of `weights` (bitnet_ref's ModelWeights) in one of the styles."""
    b, quantized = Builder(), style in QUANTIZED_STYLES
    table = b.tensor("model.embed_tokens.weight", weights.embedding.array.astype(np.float32))
    x = b.node("Gather", [table, "input_ids"], "/model/embed_tokens/Gather")

    def one(module, w):
        if quantized and hasattr(w, "w_dequant_scale"):
            linear(b, style, x, module, w.ternary(), w.bias, w.w_dequant_scale)
        else:
            linear(b, "torchscript" if quantized else style, x, module, w.array.astype(np.float32), w.bias)

    for i, layer in enumerate(weights.layers):
        name = f"model.layers.{i}"
        b.tensor(f"{name}.input_layernorm.weight", layer.attn_norm.weight)
        b.tensor(f"{name}.post_attention_layernorm.weight", layer.ffn_norm.weight)
        if layer.attn_sub_norm is not None:
            b.tensor(f"{name}.self_attn.attn_sub_norm.weight", layer.attn_sub_norm.weight)
            b.tensor(f"{name}.mlp.ffn_sub_norm.weight", layer.ffn_sub_norm.weight)
        linears = dict(layer.linears())
        if style == "genai-qkv":
            q, k, v = (linears.pop(f"{part}_proj") for part in "qkv")
            bias = None if q.bias is None else np.concatenate([q.bias, k.bias, v.bias])
            qkv = np.concatenate([q.array, k.array, v.array]).astype(np.float32)
            linear(b, style, x, f"{name}.self_attn.qkv_proj", qkv, bias)
        for part, w in linears.items():
            one(f"{name}.{'self_attn' if part in ('q_proj', 'k_proj', 'v_proj', 'o_proj') else 'mlp'}.{part}", w)
    last = f"model.layers.{len(weights.layers)}.final_norm_layernorm" if "genai" in style else "model.norm"
    b.tensor(f"{last}.weight", weights.final_norm.weight)
    if not weights.tied:
        one("lm_head", weights.lm_head)
    y = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", cfg["vocab_size"]])
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])
    return helper.make_model(helper.make_graph(b.nodes, "main_graph", [ids], [y], b.tensors), producer_name="pytorch")


def write(folder, proto, config):
    """model.onnx, and the config.json beside it"""
    folder.mkdir(exist_ok=True)
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "model.onnx"
