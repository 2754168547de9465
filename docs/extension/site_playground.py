"""The page where storyteller writes in the browser: docs/playground, its graphs, its weights and onnxruntime-web.

    python docs/extension/site_playground.py FOLDER     writes the page alone

onnxruntime-web is downloaded by npm, once. Without npm the page is written all the same, and says what is missing;
BITNET_REF_PLAYGROUND=required makes that an error.
"""

import base64
import gzip
import hashlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import onnx
from onnx import numpy_helper
from playground_bugs import BUGS, INVISIBLE

from bitnet_ref.crossval.engines.onnxruntime import named_outputs
from bitnet_ref.formats.names import hf_module
from bitnet_ref.formats.onnx.export import export_onnx
from bitnet_ref.formats.onnx.file import PACKED_SUFFIX, SCALE_SUFFIX
from bitnet_ref.formats.onnx.graph import DecoderGraph
from bitnet_ref.formats.open import ASSETS, find_model, open_checkpoint
from bitnet_ref.reference.weights import linear_name
from bitnet_ref.tokenizers.sentencepiece_model import read_model

ROOT = Path(__file__).parents[2]
RUNTIME = "onnxruntime-web@1.23.2"
INTEGRITY = "sha512-T09JUtMn+CZLk3mFwqiH0lgQf+4S7+oYHHtk6uhaYAAJI95bTcKi5bOOZYwORXfS/RLZCjDDEXGWIuOCAFlEjg=="
RUNTIME_FILES = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm.gz")  # .gz: by us
NAMES = (  # of a layer's linears
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
READ_BY = {
    "q_proj": "q_proj, k_proj, v_proj",
    "o_proj": "o_proj",
    "gate_proj": "gate_proj, up_proj",
    "down_proj": "down_proj",
}


def download_runtime():
    """The folder with RUNTIME_FILES. Raises OSError with one line that says why there is none."""
    return download(RUNTIME, INTEGRITY, {name: f"dist/{name.removesuffix('.gz')}" for name in RUNTIME_FILES})


def download(package, integrity, files):
    """A folder with files {our name: path in the package} of an npm package; what ends in .gz is compressed by us.

    Raises OSError with one line that says why there is none.
    """
    folder = ROOT / "build" / package.replace("@", "-")
    if all((folder / name).is_file() for name in files):
        return folder
    if (npm := shutil.which("npm")) is None:
        raise OSError("npm is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as part:
        options = ("--ignore-scripts", "--silent", "--fetch-retries=1", "--pack-destination", part)
        try:
            subprocess.run([npm, "pack", package, *options], check=True, capture_output=True, timeout=60, cwd=part)
        except (subprocess.SubprocessError, OSError) as problem:
            raise OSError(f"npm pack {package} failed: {problem}") from problem
        archive = next(Path(part).glob("*.tgz"))
        digest = "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if digest != integrity:
            raise OSError(f"{package} from npm: expected {integrity}, got {digest}")
        with tarfile.open(archive) as packed:
            for name, path in files.items():
                data = packed.extractfile(f"package/{path}").read()
                (Path(part) / name).write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
                os.replace(Path(part) / name, folder / name)
    return folder


def export_graph(checkpoint, folder, graph_type, outputs):
    """The exported graph of a type, with these inner tensors as outputs ({our name: how to find it}), and its data."""
    path, data = export_onnx(folder / "storyteller.onnx", checkpoint, graph_type=graph_type)
    model = onnx.load(str(path), load_external_data=False)
    inner = find_inner(model.graph.node, checkpoint.config)
    for name, output in inner.items():
        model.graph.node.append(onnx.helper.make_node("Identity", [output], [name]))
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
    outputs |= inner
    return model, data.read_bytes()


def find_inner(nodes, config):
    """{trace name: tensor of the graph} of what the page shows of each layer: the pattern, and integers with scales."""
    named = dict(named_outputs(nodes, config))
    inner = {}
    for i in range(config.num_hidden_layers):
        scope = f"/model/layers.{i}/self_attn"
        # the values' product reads the float64 copy of the pattern
        product = next(n for n in nodes if n.op_type == "MatMul" and n.name.rpartition("/")[0] == scope)
        inner[f"blocks.{i}.attn.hook_pattern"] = next(n for n in nodes if product.input[0] in n.output).input[0]
        for part in READ_BY:
            name = f"{linear_name(i, part)}.hook_x_"
            inner |= {name + kind: named[name + kind] for kind in ("int8", "scale")}
    return inner


def describe_matrices(model, config):
    """[{name, rows, columns, offset, scale}] of the ternary matrices in the file of weights."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for i in range(config.num_hidden_layers):
        for part in NAMES:
            name = linear_name(i, part)
            packed, scale = (tensors[hf_module(name) + suffix] for suffix in (PACKED_SUFFIX, SCALE_SUFFIX))
            offset = next(int(entry.value) for entry in packed.external_data if entry.key == "offset")
            shape = {"rows": packed.dims[0], "columns": 4 * packed.dims[1]}
            yield {"name": name, **shape, "offset": offset, "scale": float(numpy_helper.to_array(scale))}


def write_compressed(path, data):
    path.write_bytes(gzip.compress(data, mtime=0))


def write_playground(folder, has_guide=True):
    """Write the page into a folder. Returns why it has no runtime, or an empty string.

    has_guide: the site's page about it is in the folder above; without it the links to it are left out.
    """
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs" / "playground", folder)
    if not has_guide:
        page = (folder / "index.html").read_text(encoding="utf-8")
        page = re.sub(r'\s*<a href="\.\./playground\.html.*?</a>', "", page)
        (folder / "index.html").write_text(page, encoding="utf-8")
    for name in ("page.css", "parts.js"):
        shutil.copy2(ASSETS / "page" / name, folder)
    missing = ""
    try:
        runtime = download_runtime()
        for name in RUNTIME_FILES:
            shutil.copy2(runtime / name, folder)
    except OSError as problem:
        missing = str(problem)
        if os.environ.get("BITNET_REF_PLAYGROUND") == "required":
            raise
    with tempfile.TemporaryDirectory() as temporary, open_checkpoint(find_model("storyteller")) as checkpoint:
        config, weights, matrices = checkpoint.config, None, []
        inner = {}
        for name, graph_type in {"right": DecoderGraph, **BUGS}.items():
            model, data = export_graph(checkpoint, Path(temporary), graph_type, inner)
            if weights is None:
                weights, matrices = data, list(describe_matrices(model, config))
                table = next(t for t in model.graph.initializer if t.name == "model.embed_tokens.weight")
                embedding = {each.key: int(each.value) for each in table.external_data if each.key != "location"}
            assert data == weights, f"{name}: every graph reads the same file of weights"
            write_compressed(folder / f"{name}.onnx.gz", model.SerializeToString(deterministic=True))
        write_compressed(folder / "storyteller.onnx.data.gz", weights)
        pieces = read_model(checkpoint.tokenizer_files()["tokenizer.model"], None)
    facts = {
        "runtime": None if missing else RUNTIME,
        "missing": missing,
        "config": {
            "layers": config.num_hidden_layers,
            "heads": config.num_attention_heads,
            "kvHeads": config.num_key_value_heads,
            "headSize": config.head_dim,
            "theta": config.rope.theta,
            "vocabulary": config.vocab_size,
            "context": config.max_position_embeddings,
        },
        "bos": config.bos_token_id,
        "ends": list(config.eos_token_ids),
        "banned": json.loads(checkpoint.tokenizer_files()["generation_config.json"]).get("bad_words_ids", []),
        "readBy": READ_BY,
        "linears": {part: linear_name(0, part).split(".")[2] for part in NAMES},
        "embedding": embedding,
        "matrices": matrices,
        "bugs": [describe_bug(name, bug) for name, bug in BUGS.items()],
        "vocabulary": {"pieces": pieces.pieces, "scores": pieces.scores, "types": pieces.types},
    }
    (folder / "facts.json").write_text(json.dumps(facts, ensure_ascii=False), encoding="utf-8")
    return missing


def describe_bug(name, bug):
    title, _, text = inspect.getdoc(bug).partition("\n\n")
    return {"name": name, "title": title, "text": " ".join(text.split()), "invisible": name in INVISIBLE}


def write(app, problem):
    if (
        problem is None
        and app.builder.name == "html"
        and (missing := write_playground(Path(app.outdir) / "playground"))
    ):
        print(f"playground: without onnxruntime-web ({missing}); the page says so")


def setup(app):
    app.connect("build-finished", write)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    print(write_playground(Path(sys.argv[1]), has_guide=False) or "with onnxruntime-web")
