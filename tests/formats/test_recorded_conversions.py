"""What conversions write: every tensor's type, shape and bytes, the metadata and the other files, as recorded.

When a change is meant, running this file records it.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import DATA
from test_convert import INI

import bitnet_ref
from bitnet_ref.formats.convert import convert
from bitnet_ref.formats.gguf.file import GgufFile
from bitnet_ref.formats.onnx.file import OnnxFile
from bitnet_ref.formats.safetensors import SafetensorsFile

RECORDED = DATA / "formats" / "conversions.json"
GGUF = ("gguf-i2_s", "gguf-tq1_0", "gguf-tq2_0")
TILES = {"gguf-tl1": 64, "gguf-tl2": 192}
CASES = (
    *(("golden/bitnet-packed-offline", target) for target in ("hf-bf16", "native", "native-base3", "onnx", *GGUF)),
    *(("golden/bitnet-packed-offline", f"gguf-{kind}") for kind in ("f16", "bf16", "f32", "q8_0")),
    *(("golden/llama-packed-bitlinear", target) for target in ("hf-packed", "native", "onnx", "gguf-f16")),
    *(("golden/llama-packed-skips", target) for target in ("hf-packed", "native-base3", "onnx")),
    *(("golden/llama-bf16-biases", target) for target in ("native", "hf-bf16", "onnx")),
    ("golden/llama-dense", "gguf-q8_0"),
    ("golden/rope-llama3", "gguf-f16"),
    ("golden/rope-yarn", "native"),
    ("golden/onebitllm-silu", "gguf-f16"),
    ("families/qwen3-groups128", "gguf-q2_0"),
    ("families/qwen3-groups128", "hf-unpacked"),
    ("golden/bitnet-packed-offline", "gguf-tl1"),
    ("golden/bitnet-packed-offline", "gguf-tl2"),
    ("families/smollm3", "gguf-f16"),
    ("families/hunyuan", "native"),
    ("families/qwen3_moe-groups128", "native"),
    ("families/qwen3_5-groups128-hybrid", "gguf-pq2_0"),
    ("families/qwen3_5-groups128-hybrid", "gguf-ptq1_0"),
    ("gguf/i2_s.gguf", "hf-packed"),
    ("golden/bitnet-packed-offline", "gguf-iq2_bn"),
    ("families/qwen3-groups128", "mlx-2bit"),
    ("families/qwen3_5-groups128-hybrid", "mlx-2bit"),
    ("containers/gguf-q1_0/model.gguf", "mlx-1bit"),
    ("containers/gguf-q1_0/model.gguf", "gguf-q1_0"),
)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def short(value: Any) -> Any:
    """A long value as its length and digest; the package's version is left out."""
    text = json.dumps(
        value, default=lambda array: array.tolist() if isinstance(array, np.generic | np.ndarray) else str(array)
    )
    text = text.replace(bitnet_ref.__version__, "VERSION")
    return text if len(text) < 1000 else f"{len(text)} characters, {digest(text.encode())}"


def contents(path: Path) -> dict[str, Any]:
    """{name: what it is} of a file."""
    if path.suffix == ".gguf":
        with GgufFile(path) as file:
            tensors = {
                name: f"{tensor.type.name} {list(tensor.shape)} {digest(file.read_raw(name).tobytes())}"
                for name, tensor in file.tensors.items()
            }
            return {
                "tensors": tensors,
                "metadata": {key: f"{v.type} {short(v.value)}" for key, v in file.typed.items()},
            }
    if path.suffix == ".safetensors":
        with SafetensorsFile(path) as file:
            tensors = {
                name: f"{info.dtype} {list(info.shape)} {digest(file.read(name).tobytes())}"
                for name, info in file.tensors.items()
            }
            return {"tensors": tensors, "metadata": {key: short(value) for key, value in file.metadata.items()}}
    if path.suffix == ".onnx":
        file = OnnxFile(path)
        tensors = {}
        for name in file.tensors:
            array = file.read(name)
            # the last bit of a power of doubles is not the same on every processor
            same = array.astype(np.float32) if array.dtype == np.float64 else array
            tensors[name] = f"{array.dtype} {list(array.shape)} {digest(np.ascontiguousarray(same).tobytes())}"
        graph = file.model.graph
        values = [each.SerializeToString(deterministic=True).hex() for each in (*graph.input, *graph.output)]
        versions = [file.model.ir_version, *(each.version for each in file.model.opset_import)]
        nodes = [
            [
                node.name,
                node.op_type,
                list(node.input),
                list(node.output),
                [each.SerializeToString(deterministic=True).hex() for each in node.attribute],
            ]
            for node in graph.node
        ]
        return {
            "tensors": tensors,
            "values": f"{len(values)} values, {digest(json.dumps([versions, *values]).encode())}",
            "nodes": f"{len(nodes)} nodes, {digest(json.dumps(nodes).encode())}",
            "metadata": {key: short(value) for key, value in file.metadata.items()},
        }
    return {"bytes": short(json.loads(path.read_text()) if path.suffix == ".json" else digest(path.read_bytes()))}


def record(source: str, target: str, folder: Path) -> dict[str, Any]:
    suffix = ".gguf" if target.startswith("gguf") else ".bitnet.safetensors" if target.startswith("native") else ""
    out = folder / f"m{suffix}"
    tiles = folder / "tiles.ini" if target in TILES else None
    if tiles is not None:
        tiles.write_text(INI.replace("bk = 64", f"bk = {TILES[target]}"))
    convert(DATA / source, out, target, verify=False, tl_tiles=tiles)
    files = sorted(path for path in out.rglob("*") if path.is_file()) if out.is_dir() else [out]
    return {path.name: contents(path) for path in files if path.suffix != ".data"}


@pytest.mark.sample(6)
@pytest.mark.parametrize(("source", "target"), CASES)
def test_a_conversion(source: str, target: str, tmp_path: Path) -> None:
    if target == "onnx":
        pytest.importorskip("onnx")
    assert record(source, target, tmp_path) == json.loads(RECORDED.read_text())[f"{source} -> {target}"]


if __name__ == "__main__":
    lines = []
    for source, target in CASES:
        with tempfile.TemporaryDirectory() as folder:
            files = record(source, target, Path(folder))
        parts = [f"  {json.dumps(name)}: {json.dumps(facts)}" for name, facts in files.items()]
        lines.append(f"{json.dumps(f'{source} -> {target}')}: {{\n" + ",\n".join(parts) + "\n}")
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
