"""Published models: their config.json texts, and tiny checkpoints of their shape with the logits of transformers.

data/published/configs.json.xz: name -> the text, what a reader should do with it ("accept", "refuse", "either") and
why, and the facts that transformers 5.23 reads in it. The folders beside it are as hub repositories have them, with
random weights, compressed; NOTE.txt says what each one is.
"""

import json
import lzma
import shutil
from operator import attrgetter

import numpy as np
import pytest
from helpers import DATA, model
from safetensors.numpy import load_file, save_file

import bitnet_ref
from bitnet_ref.crossval.exercises.lessons.analysis import published_dialect
from bitnet_ref.errors import ConfigError, ConfigWarning, FormatError
from bitnet_ref.formats.checkpoint import scale_convention
from bitnet_ref.inspection import inspect_model

PUBLISHED = DATA / "published"
CONFIGS = json.loads(lzma.decompress((PUBLISHED / "configs.json.xz").read_bytes()))
CASES = sorted(folder.name for folder in PUBLISHED.iterdir() if folder.is_dir())
VISION = [case for case in CASES if case.startswith("vlm-")]
# The oracle's float32 run is within 6e-5 of its float64 run. A wrong key or scale is off by 0.1 and more.
TOLERANCE = 3e-4


@pytest.mark.parametrize("name", CONFIGS)
def test_config_json(name, tmp_path):
    """Warnings are errors here: no published file that is read gives one."""
    case, path = CONFIGS[name], tmp_path / "config.json"
    path.write_text(case["text"])
    config, error = read(path)
    if error is not None:
        assert case["want"] != "accept", str(error)
        absent = ("model_type", "quantization_config.quant_method", "gdn_activation_layout")
        assert error.field in (*json.loads(case["text"]), *absent)
        return
    assert case["want"] != "refuse", case["why"]
    for field, expected in case["facts"].items():
        value = attrgetter(field)(config)
        assert value == (expected if isinstance(expected, str | bool) else pytest.approx(expected, rel=1e-9)), field


def read(path):
    """(the configuration, None) or (None, the error)."""
    try:
        return bitnet_ref.read_config(path), None
    except ConfigError as error:
        return None, error


def test_the_published_files_of_notebook_10(tmp_path):
    """Its excerpts are of published files, and the package reads these as the exercise judges them."""
    notebook = json.loads((DATA.parents[1] / "notebooks" / "10_dialects.ipynb").read_text(encoding="utf-8"))
    sources = ["".join(cell["source"]) for cell in notebook["cells"]]
    names = {}
    exec(next(source for source in sources if source.startswith("published = {")), names)
    for name, excerpt in names["published"].items():
        text = CONFIGS[name.replace("/", "--")]["text"]
        whole = json.loads(text)
        assert {key: whole[key] for key in excerpt} == excerpt, name
        if "quantization" not in whole:
            (tmp_path / "config.json").write_text(text)
            rule = scale_convention(read(tmp_path / "config.json")[0].quantization)
            said = {"divide": "divide", "multiply": "multiply", "absmean": "multiply"}[rule]
            assert published_dialect(excerpt)[0] == f"int8, {said}"


def test_the_reasons_of_refusals(tmp_path):
    expected = {
        "openbmb--MiniCPM-Embedding": "is_causal",
        "community--18": "packed",
        "community--20": "quant_bits",
        "nvidia--Qwen3.6-27B-NVFP4": "quantization_config.quant_method",
    }
    path = tmp_path / "config.json"
    for name, field in expected.items():
        path.write_text(CONFIGS[name]["text"])
        assert read(path)[1].field == field


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory):
    """All cases with their weights unpacked: a folder of model folders."""
    root = tmp_path_factory.mktemp("published")
    for case in CASES:
        shutil.copytree(PUBLISHED / case, root / case)
        for packed in list((root / case).glob("*.xz")):
            packed.with_suffix("").write_bytes(lzma.decompress(packed.read_bytes()))
            packed.unlink()
    return root


@pytest.mark.parametrize("case", CASES)
def test_logits(case, unpacked, backend_name):
    expected = load_file(unpacked / case / "golden.safetensors")
    if backend_name == "cupy" and case in ("minicpm", *VISION):
        pytest.skip("cupy refuses these families by name")
    logits = model(unpacked / case, backend_name).logits(expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_inspect_finds_no_fault(case, unpacked):
    found = inspect_model(unpacked / case)
    assert [each.message for each in found.findings if each.severity != "note" and each.part == "config"] == []
    assert found.errors == []
    assert found.config == model(unpacked / case).config


@pytest.mark.parametrize("case", VISION)
def test_what_a_text_model_leaves_out(case, unpacked, tmp_path):
    """Inspect says it; the parameters are those of the text; a tensor of neither is refused."""
    found = inspect_model(unpacked / case)
    assert any("left out, as text needs none of them" in words for words in found.evidence)
    assert "left out" in {size.kind for size in found.sizes}
    folder = shutil.copytree(unpacked / case, tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    others = ("vis", "multi_modal", "mtp.")
    text = {name: array for name, array in tensors.items() if not any(other in name for other in others)}
    assert len(text) < len(tensors)
    save_file(text, folder / "model.safetensors")
    alone = inspect_model(folder)
    assert alone.parameters == found.parameters
    assert "left out" not in {size.kind for size in alone.sizes}
    save_file({**tensors, "model.audio_tower.weight": np.zeros(3, np.float32)}, folder / "model.safetensors")
    with pytest.raises(FormatError, match="no part of") as caught:
        bitnet_ref.load(folder, backend="numpy")
    assert caught.value.field == "model.audio_tower.weight"


def test_an_untied_head_in_a_vision_model(unpacked, tmp_path):
    """Older files have the head under language_model too."""
    folder = shutil.copytree(unpacked / "vlm-gemma3", tmp_path / "m")
    tensors, golden = load_file(folder / "model.safetensors"), load_file(folder / "golden.safetensors")
    embedding = tensors["language_model.model.embed_tokens.weight"]
    save_file({**tensors, "language_model.lm_head.weight": -embedding}, folder / "model.safetensors")
    with pytest.raises(FormatError, match="tie_word_embeddings") as caught:
        bitnet_ref.load(folder, backend="numpy")
    assert caught.value.field == "language_model.lm_head.weight"
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": False}))
    logits = bitnet_ref.load(folder, backend="numpy").logits(golden["tokens"])
    np.testing.assert_allclose(logits, -golden["logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("case", "whole", "bare"),
    [
        ("vlm-qwen3-5", "model.language_model.", "language_model."),  # Qwen3_5Model
        ("vlm-gemma3", "language_model.model.", "language_model.model."),  # Gemma3Model
        ("vlm-gemma3", "language_model.model.", ""),  # Gemma3TextModel
    ],
)
def test_a_vision_model_saved_without_its_head(case, whole, bare, unpacked, tmp_path):
    """By a base class, whose names have no "model." of the class with the head. Vectors need no head."""
    folder = shutil.copytree(unpacked / case, tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    kept = {bare + name.removeprefix(whole): tensors[name] for name in tensors if name.startswith(whole)}
    save_file(kept, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": False}))
    with pytest.warns(ConfigWarning, match="there is no lm_head.weight"):
        vector = bitnet_ref.load(folder, backend="numpy").embed([1, 2, 3])
    np.testing.assert_array_equal(vector, model(unpacked / case).embed([1, 2, 3]))
