"""What `convert` and `train` write runs in transformers by plain `from_pretrained`, and gives our logits.

Each folder is loaded with no dtype and with dtype="auto". In the file's dtype the logits are held to what that dtype
allows. In float32, into which crossval widens every tensor of the file, they differ by at most LOGITS_FLOOR.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers import BITNET, DATA, GOLDEN, TINY, golden, rng, run_python, tiny_tensors, write_checkpoint
from safetensors.numpy import load_file

import bitnet_ref
from bitnet_ref.crossval.engines import transformers as engine
from bitnet_ref.crossval.tolerances import LOGITS_FLOOR, NARROW_FLOATS
from bitnet_ref.errors import ConfigError
from bitnet_ref.formats.convert import convert
from bitnet_ref.training import RunSettings, TrainingRun

MISSING = [name for name in engine.ENGINE.modules if find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed: pip install {engine.ENGINE.pip}"),
]
RECORDERS = Path(engine.__file__).parent / "recorders"
TARGETS = ("hf-packed", "hf-bf16", "hf-online", "hf-unpacked")

PUBLISHED = ["bitnet-packed-offline", "bitnet-bf16-online", "llama-packed-bitlinear", "llama-packed-rmsnorm"]
PUBLISHED += ["llama-packed-skips", "llama-unpacked-offline", "llama-f16-sharded", "llama-tied-duplicate"]
FAMILIES = ["embedding-gemma3", "embedding-qwen3", "qwen2-bias-linear-norms", "qwen3-groups128"]
FAMILIES += ["qwen3_5-groups128-hybrid"]
TIED = TINY | {"tie_word_embeddings": True}
BIASED = TINY | {"attention_bias": True}
DENSE = {"trilm": TINY, "trilm-tied": TIED, "float32-biases": BIASED, "bfloat16-tied": TIED}
ONLINE = BITNET | {"quantization_config": BITNET["quantization_config"] | {"quantization_mode": "online"}}
TRAINED = {"bitnet": ONLINE, "untied": ONLINE | {"tie_word_embeddings": False}, "dense": TINY, "biased": BIASED}
SOURCES = ["storyteller", *PUBLISHED, *FAMILIES, *DENSE]
WRITTEN = [f"{case}-{kind}" for case in SOURCES for kind in TARGETS] + [f"train-{case}" for case in TRAINED]
TERNARY = {"storyteller", *PUBLISHED[:-2], *FAMILIES[:3]}
REFUSED = {(case, "hf-unpacked") for case in TERNARY} | {  # biases that are not exact beside the scale
    ("llama-packed-rmsnorm", "hf-bf16"),
    ("qwen2-bias-linear-norms", "hf-packed"),
    *((case, "hf-online") for case in SOURCES if case not in TERNARY),
}

# Arguments: a file {name: [folder, tokens]}, the folder of recorders, a file for {name.plain, .auto, .wide: logits}.
# Prints {name: [dtype of the plain logits, of the auto ones]}.
RUN = """
import json
import sys
sys.path.insert(0, sys.argv[2])
import record_transformers
import numpy as np
import torch
from transformers import AutoModelForCausalLM

def run(model, tokens):
    with torch.no_grad():
        return model.eval()(torch.tensor([tokens]), use_cache=False).logits[0]

logits, dtypes = {}, {}
for name, (folder, tokens) in json.load(open(sys.argv[1])).items():
    plain = AutoModelForCausalLM.from_pretrained(folder)
    auto = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    of_file = {"plain": run(plain, tokens), "auto": run(auto, tokens)}
    dtypes[name] = [str(each.dtype).removeprefix("torch.") for each in of_file.values()]
    of_file["wide"] = run(record_transformers.load(folder, torch.float32), tokens)
    logits |= {f"{name}.{way}": each.float().numpy() for way, each in of_file.items()}
np.savez(sys.argv[3], **logits)
print(json.dumps(dtypes))
"""


def draw(case):
    """Tensors of a dense model. "trilm": matrices with a sign per weight and two scales, as TriLM has them."""
    config, seed = DENSE[case], list(DENSE).index(case)
    dtype = {"trilm": np.float16, "float32-biases": np.float32}.get(case, ml_dtypes.bfloat16)
    tensors = tiny_tensors(config, dtype, seed)
    for name, w in list(tensors.items()):
        if case.startswith("trilm") and "_proj" in name:
            scales = np.where(np.arange(len(w)) < len(w) // 2, 0.25, 0.375)[:, None]
            tensors[name] = (rng(seed, *name.encode()).integers(-1, 2, w.shape) * scales).astype(dtype)
        if case == "float32-biases" and "self_attn" in name:
            bias = rng(seed, *name.encode()).standard_normal(len(w))
            tensors[name.replace(".weight", ".bias")] = bias.astype(dtype)
    return tensors


def source_of(case, folder):
    """A model to convert, and tokens without a rounding flip in float32."""
    if case == "storyteller":
        return case, load_file(DATA / "storyteller" / "golden.safetensors")["tokens"][:32]
    if case in PUBLISHED:
        return GOLDEN / case, golden(case)["tokens"]
    if case in FAMILIES:
        return DATA / "families" / case, load_file(DATA / "families" / case / "golden.safetensors")["tokens"]
    return write_checkpoint(folder / case, DENSE[case], draw(case)), rng(5).integers(0, TINY["vocab_size"], 12)


def train(case, folder):
    """A run of two steps.   -> the folder of its model"""
    np.save(folder / "tokens.npy", rng(6).integers(0, TINY["vocab_size"], 200).astype(np.uint16))
    settings = RunSettings(train=(str(folder / "tokens.npy"),), steps=2, batch=2, context=8)
    TrainingRun(settings, folder / f"run-{case}", TRAINED[case], threads=1).run()
    return folder / f"run-{case}" / "model"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """name -> (folder, tokens) of everything that is written. What is refused is absent."""
    folder, out = tmp_path_factory.mktemp("written"), {}
    for case in SOURCES:
        source, tokens = source_of(case, folder)
        for kind in TARGETS:
            try:
                convert(source, folder / f"{case}-{kind}", kind)
            except ConfigError:
                continue
            out[f"{case}-{kind}"] = folder / f"{case}-{kind}", tokens.tolist()
    for case in TRAINED:
        out[f"train-{case}"] = train(case, folder), rng(5).integers(0, TINY["vocab_size"], 12).tolist()
    return out


@pytest.fixture(scope="module")
def theirs(written, tmp_path_factory):
    """(name -> dtypes, "name.way" -> logits) of transformers."""
    folder = tmp_path_factory.mktemp("transformers")
    jobs = {name: [str(path), tokens] for name, (path, tokens) in written.items()}
    (folder / "jobs.json").write_text(json.dumps(jobs))
    dtypes = run_python(RUN, folder / "jobs.json", RECORDERS, folder / "logits.npz")
    return dtypes, np.load(folder / "logits.npz")


@pytest.mark.parametrize("name", WRITTEN)
def test_a_written_folder_runs(name, written, theirs):
    case, _, _ = name.partition("-hf-")
    if (case, name.removeprefix(f"{case}-")) in REFUSED:
        assert name not in written
        return
    folder, tokens = written[name]
    dtypes, logits = theirs
    ours = bitnet_ref.load(folder, backend="numpy").logits(tokens)
    dtype = json.loads((folder / "config.json").read_text())["dtype"]
    assert dtypes[name] == [dtype, dtype]
    np.testing.assert_array_equal(logits[f"{name}.plain"], logits[f"{name}.auto"])
    if dtype != "float32":
        error = np.linalg.norm(logits[f"{name}.plain"] - ours) / np.linalg.norm(ours)
        assert error <= NARROW_FLOATS[dtype].relative_l2
    np.testing.assert_allclose(logits[f"{name}.wide"], ours, rtol=0, atol=LOGITS_FLOOR)
