"""bitnet_ref.api: what `load` and `Model` accept, and how they refuse the rest."""

import gc
import inspect
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
from helpers import BITNET, DATA, GOLDEN, TINY, golden, model, tiny_tensors, write_checkpoint

import bitnet_ref
from bitnet_ref import DeviceOptions, LoadOptions
from bitnet_ref.api import LoadKeywords
from bitnet_ref.backends import loaded
from bitnet_ref.backends.options import ComputeOptions
from bitnet_ref.cli.generation_options import name_model
from bitnet_ref.errors import (
    BackendError,
    BackendUnavailable,
    BitNetRefError,
    ConfigError,
    FormatError,
    GenerationError,
    ShapeError,
    TokenizerError,
)
from bitnet_ref.formats.open import describe_ignored, shipped_models
from bitnet_ref.inspection import inspect_model
from bitnet_ref.reference.cache import TokenBatch
from bitnet_ref.system.options import declared_options

pytestmark = pytest.mark.quick_emulated

# -- load --------------------------------------------------------------------------------------------------------------


def test_public_names():
    names = {"Engine", "EngineConfig", "Model", "__version__", "available_backends", "errors", "load", "load_engine"}
    names |= {"ChatSession", "DeviceOptions", "Generation", "LoadOptions", "RequestHandle", "SamplingParams"}
    names |= {"StreamChunk", "TokenStream", "read_config"}
    assert set(bitnet_ref.__all__) == set(dir(bitnet_ref)) == names
    assert all(hasattr(bitnet_ref, name) for name in names)
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        _ = bitnet_ref.lod
    assert set(bitnet_ref.available_backends()) >= {"numpy", "cython", "cupy"}
    assert bitnet_ref.available_backends()["numpy"] is None


def test_the_shipped_model_is_the_default():
    assert shipped_models() == ["storychat", "storyteller"]
    m = bitnet_ref.load()
    assert m.path.name == "storyteller"
    assert "storyteller" in repr(m)
    assert m.backend.name in repr(m)


def test_a_file_of_that_name_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "storyteller", BITNET)
    assert bitnet_ref.load("storyteller", backend="numpy").config.vocab_size == BITNET["vocab_size"]


@pytest.mark.parametrize("as_type", [str, Path, os.fspath])
def test_paths_as_strings_and_path_objects(tmp_path, as_type):
    folder = write_checkpoint(tmp_path, BITNET)
    assert bitnet_ref.load(as_type(folder), backend="numpy").config.hidden_size == 16
    assert bitnet_ref.load(as_type(folder / "model.safetensors"), backend="numpy").path == folder / "model.safetensors"


@pytest.mark.parametrize(
    "path", ["no-such-model", "storyteller/", "./storyteller", "a/storyteller", "x" * 5000, "a\0b", "", "hf:some/model"]
)
def test_paths_that_lead_nowhere(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BitNetRefError) as caught:
        bitnet_ref.load(path)
    assert isinstance(caught.value, FormatError | ConfigError)
    if path == "no-such-model":
        assert "storyteller" in str(caught.value)


@pytest.mark.parametrize("path", [None, 3, b"storyteller", ["storyteller"], 1.5])
def test_models_of_the_wrong_type(path):
    with pytest.raises((FormatError, TypeError)):
        bitnet_ref.load(path)


def test_other_formats(tmp_path):
    for name in ("model.bin", "model.pt", "config.json", "model"):
        (tmp_path / name).write_bytes(b"something")
        with pytest.raises(FormatError) as caught:
            bitnet_ref.load(tmp_path / name)
        assert caught.value.path == str(tmp_path / name)


def test_weights_beside_those_that_are_read_are_told(tmp_path, caplog):
    folder = write_checkpoint(tmp_path / "m", TINY)
    assert describe_ignored(folder, folder) is None
    for name in ("pytorch_model.bin", "x.gguf", "training_args.bin", "mmproj-f16.gguf", "adapter.bin"):
        (folder / name).touch()
    words = "of m is read model.safetensors; beside it, and not read: pytorch_model.bin, x.gguf"
    bitnet_ref.load(folder, backend="numpy")
    assert words in caplog.text
    assert words in [finding.message for finding in inspect_model(folder).findings]
    file = folder / "model.safetensors"
    assert describe_ignored(file, file) is None


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(ConfigError, match="no such file") as caught:
        bitnet_ref.load(tmp_path)
    assert caught.value.path == str(tmp_path / "config.json")


def test_a_file_that_may_not_be_read(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may read every file")
    folder = write_checkpoint(tmp_path, BITNET)
    (folder / "model.safetensors").chmod(0)
    with pytest.raises(FormatError, match="Permission denied"):
        bitnet_ref.load(folder)


def test_unknown_backends():
    with pytest.raises(BackendUnavailable, match="auto, numpy, cython, cupy"):
        bitnet_ref.load(backend="cuda")


@pytest.mark.parametrize(
    ("backend", "dtype", "choices"),
    [
        ("auto", "int8", r"float32 \(numpy, cython, cupy\) or float64 \(numpy\) or float16 \(cupy\)"),
        ("numpy", "bfloat16", r"float32 .* or float64"),
        ("cython", "float64", r"float32 "),
        ("cupy", "float64", r"float32 .* or float16 .* or bfloat16"),
    ],
)
def test_a_dtype_that_the_backend_does_not_have(backend, dtype, choices):
    """The backend that was asked for is named, also "auto", and whether or not it can run here."""
    with pytest.raises(ConfigError, match=f"backend '{backend}' computes in {choices}.*, got '{dtype}'") as caught:
        bitnet_ref.load(backend=backend, dtype=dtype)
    assert caught.value.field == "dtype"


# -- options -----------------------------------------------------------------------------------------------------------


def test_options_come_in_groups_or_flat(tmp_path):
    folder = write_checkpoint(tmp_path, {**BITNET})
    calls = {"flat": [], "group": [], "both": []}

    def into(name):
        return lambda done, total: calls[name].append((done, total))

    def options(name):
        return bitnet_ref.LoadOptions(progress=into(name), verify=True)

    models = [
        bitnet_ref.load(folder, backend="numpy", progress=into("flat"), cache_tokens=64),
        bitnet_ref.load(
            folder, backend="numpy", options=options("group"), device=bitnet_ref.DeviceOptions(cache_tokens=64)
        ),
        bitnet_ref.load(folder, backend="numpy", options=options("group"), progress=into("both")),
    ]
    assert calls["flat"] == calls["group"] == calls["both"]
    assert calls["flat"][-1][0] == calls["flat"][-1][1] > 0
    for m in models:
        np.testing.assert_array_equal(m.logits([1, 2]), models[0].logits([1, 2]))


def test_groups_reach_where_flat_keywords_do(tmp_path):
    folder = write_checkpoint(tmp_path, BITNET)
    for wrong in ({"device": bitnet_ref.DeviceOptions(gpu_layers=2)}, {"gpu_layers": 2}):
        with pytest.raises(BackendUnavailable, match="devices and gpu_layers"):
            bitnet_ref.load(folder, backend="numpy", **wrong)
    shared = [
        bitnet_ref.load(folder, backend="numpy", **options)
        for options in ({"share": True}, {"options": bitnet_ref.LoadOptions(share=True)})
    ]
    assert shared[0] is shared[1]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("memory_limits", "did you mean 'memory_limit'"),
        ("preparde", "did you mean 'prepared'"),
        ("thread", "did you mean 'threads'"),
        ("xyz", "there are: .*cache_tokens.*verify"),
    ],
)
def test_an_unknown_option_has_a_hint(name, hint):
    with pytest.raises(ConfigError, match=f"load has no such parameter; {hint}") as caught:
        bitnet_ref.load(**{name: 1})
    assert caught.value.field == name


@pytest.mark.parametrize("function", [bitnet_ref.load, bitnet_ref.load_engine])
def test_the_signature_of_load_has_every_declared_option(function):
    """Its own keywords, what help() shows, and the types for editors."""
    shown = inspect.signature(function).parameters
    types = get_type_hints(LoadKeywords)
    for group in (ComputeOptions, DeviceOptions, LoadOptions):
        for name, declared in declared_options(group).items():
            assert shown[name].default == declared.default, name
            assert types[name] == get_type_hints(group)[name], name
            assert f"\n{name}: {declared.help[:20]}" in inspect.getdoc(function)
    assert not any(each.kind is each.VAR_KEYWORD for each in shown.values())
    own = {name: declared.default for name, declared in declared_options(ComputeOptions).items()}
    assert bitnet_ref.load.__kwdefaults__ == {**own, "device": None, "options": None}


@pytest.mark.parametrize("backend", ["numpy", "cython"])
def test_a_memory_limit_is_kept_or_refused(backend):
    with pytest.raises(BackendUnavailable, match=f"memory_limit .* backend '{backend}' computes on the CPU"):
        bitnet_ref.load(backend=backend, memory_limit="8GiB")


def test_an_unquantised_bitnet_must_be_asked_for(tmp_path):
    config = {key: value for key, value in BITNET.items() if key != "quantization_config"}
    tensors = tiny_tensors({**TINY, "tie_word_embeddings": True})
    for i in range(2):
        tensors[f"model.layers.{i}.self_attn.attn_sub_norm.weight"] = np.ones(16, np.float32)
        tensors[f"model.layers.{i}.mlp.ffn_sub_norm.weight"] = np.ones(24, np.float32)
    folder = write_checkpoint(tmp_path, config, tensors)
    with pytest.raises(ConfigError, match="allow_unquantized"):
        bitnet_ref.load(folder, backend="numpy")
    m = bitnet_ref.load(folder, backend="numpy", allow_unquantized=True)
    assert m.logits([1, 2]).shape == (2, 40)


# -- tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [[1, 5, 9], (1, 5, 9), np.array([1, 5, 9], np.int32), np.array([1, 5, 9], np.uint8)])
def test_token_ids_of_any_integer_type(tokens):
    m = model(GOLDEN / "llama-dense")
    np.testing.assert_array_equal(m.logits(tokens), m.logits([1, 5, 9]))


BAD_TOKENS = [
    *(
        [],
        [[]],
        [[1], []],
        [[1], 2],
        [1, [2]],
        [[1], [2.5]],
        [[[1]]],
        [[1], [320]],
        ((1, 2), "12"),
        [1.0, 2.0],
        ["1"],
        "12",
        None,
        5,
        [True, False],
        [None],
        [1, -1],
        [320],
        [1, 10**30],
    ),
    *(np.zeros((2, 2, 2), np.int64), np.zeros((0, 2), np.int64), np.zeros((2, 0), np.int64), np.array(3)),
    *(np.array([], np.int64), [2**63], {1, 2}, {1: 2}, b"12"),
]


@pytest.mark.parametrize("tokens", BAD_TOKENS, ids=lambda value: repr(value)[:16])
def test_token_ids_that_are_none(tokens):
    m = model(GOLDEN / "llama-dense")
    is_text = isinstance(tokens, str)  # needs a tokenizer
    has_text = isinstance(tokens, list | tuple) and any(isinstance(row, str) for row in tokens)
    with pytest.raises(TokenizerError if is_text or has_text else GenerationError):
        m.logits(tokens)
    with pytest.raises(TokenizerError if is_text else GenerationError):
        m.run_with_cache(tokens)


def test_the_bad_token_is_named():
    with pytest.raises(GenerationError, match=r"token id 320 at index 2 .* vocabulary of 320"):
        model(GOLDEN / "llama-dense").logits([1, 2, 320])


def test_logits_of_a_batch(backend_name):
    """Each row's logits are those of its tokens alone; rows may have different lengths."""
    m = model(GOLDEN / "llama-dense", backend_name)
    rows = [[1, 5, 9], [7], [3, 3, 3, 8, 2]]
    batches = [rows, tuple(map(tuple, rows)), [np.array(row) for row in rows]]
    for batch in batches:
        for found, row in zip(m.logits(batch), rows, strict=True):
            np.testing.assert_array_equal(found, m.logits(row))
    matrix = m.logits(np.array([[1, 2], [3, 4]]))
    assert isinstance(matrix, list)
    np.testing.assert_array_equal(matrix[1], m.logits([3, 4]))
    assert [each.shape for each in m.logits([[1, 2]])] == [(2, 320)]


@pytest.mark.parametrize("path", [GOLDEN / "llama-dense", DATA / "families" / "qwen3_5-groups128-hybrid"])
def test_logits_in_several_passes(backend_name, monkeypatch, path):
    """Of more tokens than a pass takes: each is full but the last, so a row may begin in one and end in another."""
    if backend_name == "cupy" and "qwen3_5" in path.name:
        pytest.skip("cupy has no kernels for this family")
    m, passes = model(path, backend_name), []
    rows = [[1, 5, 9], [7, 2], [3, 3, 3, 8, 2, 4, 1], [6]]
    expected = [m.logits(row) for row in rows]
    monkeypatch.setattr(loaded, "LOGITS_TOKENS", 3)
    monkeypatch.setattr(m, "run", lambda batch, cache: passes.append(len(batch)) or type(m).run(m, batch, cache))
    for found, right in zip(m.logits(rows), expected, strict=True):
        np.testing.assert_array_equal(found, right)
    assert passes == [3, 3, 3, 3, 1]
    np.testing.assert_array_equal(m.logits(rows[2]), expected[2])


def test_logits_of_texts(backend_name):
    m = model("storyteller", backend_name)
    texts = ["The rabbit ran", ""]
    expected = [m.logits(m.tokenizer.encode(text)) for text in texts]
    np.testing.assert_array_equal(m.logits(texts[0]), expected[0])
    for logits, row in zip(m.logits(texts), expected, strict=True):
        np.testing.assert_array_equal(logits, row)


def test_the_context_is_the_limit(tmp_path):
    m = bitnet_ref.load(write_checkpoint(tmp_path, {**BITNET, "max_position_embeddings": 6}), backend="numpy")
    assert m.logits([1] * 6).shape == (6, 40)
    with pytest.raises(GenerationError, match="7 tokens do not fit the model's context of 6"):
        m.logits([1] * 7)


# -- the model ---------------------------------------------------------------------------------------------------------


def test_threads_may_share_a_model():
    m = model("storyteller", "numpy")
    prompts = [[1, 3797, 537, n] for n in range(12)]
    expected = [m.logits(prompt) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        for got, want in zip(pool.map(m.logits, prompts), expected, strict=True):
            np.testing.assert_array_equal(got, want)


def test_dtype_of_the_logits():
    tokens = golden("bitnet-packed-offline")["tokens"]
    assert model(GOLDEN / "bitnet-packed-offline").logits(tokens).dtype == np.float32
    assert model(GOLDEN / "bitnet-packed-offline", dtype="float64").logits(tokens).dtype == np.float64


def test_a_model_without_a_folder_or_a_tokenizer(tmp_path):
    m = model(GOLDEN / "llama-dense")
    with pytest.raises(TokenizerError):
        _ = bitnet_ref.Model(m.config, m.weights, m.backend).tokenizer
    with pytest.raises(TokenizerError):
        _ = m.tokenizer
    assert "in memory" in repr(bitnet_ref.Model(m.config, m.weights, m.backend))


# -- intermediates -----------------------------------------------------------------------------------------------------


def test_intermediates_of_a_text(backend_name):
    m = model("storyteller", backend_name)
    ids = m.tokenizer.encode("Once upon")
    logits, seen = m.run_with_cache("Once upon", names_filter="blocks.0.hook_resid_pre")
    np.testing.assert_array_equal(logits, m.logits(ids))
    assert seen["blocks.0.hook_resid_pre"].shape == (len(ids), 256)
    with pytest.raises(GenerationError, match="non-empty"):
        m.run_with_cache([])


@pytest.mark.parametrize(
    "names_filter", ["blocks.9.*", "block.0.hook_resid_pre", ["x", "y"], lambda name: name == "hook"]
)
def test_a_names_filter_that_matches_nothing_says_what_names_are_like(names_filter):
    m = model(GOLDEN / "llama-dense")
    with pytest.raises(GenerationError, match=r"matches none of .*blocks\.0\.attn\.hook_pattern"):
        m.run_with_cache([1, 2], names_filter=names_filter)


@pytest.mark.parametrize("names_filter", [5, True, b"*", ["*", 5], {1: 2}])
def test_a_names_filter_of_a_wrong_type(names_filter):
    with pytest.raises(GenerationError, match="names_filter: expected a glob, a list of globs, or a function"):
        model(GOLDEN / "llama-dense").run_with_cache([1, 2], names_filter=names_filter)


@pytest.mark.parametrize("sizes", [(-1, 5), (1, -3)])
def test_a_cache_of_less_than_nothing(sizes):
    with pytest.raises(ShapeError, match="expected sizes of at least 0, got"):
        model(GOLDEN / "llama-dense").new_cache(*sizes)


def test_an_empty_name_is_no_model(monkeypatch):
    """It was the folder one is in: what a variable that was not set loaded depended on where."""
    monkeypatch.chdir(GOLDEN / "llama-dense")
    for load in (bitnet_ref.load, inspect_model, name_model):
        for name in ("", "mine=") if load is name_model else ("",):
            with pytest.raises(FormatError, match="expected a model's name or path, got an empty text"):
                load(name)
    assert bitnet_ref.load(".", backend="numpy").config.model_type == "llama"


def test_filters_of_every_kind():
    m = model(GOLDEN / "llama-dense")
    everything = set(m.run_with_cache([1, 2])[1])
    assert m.run_with_cache([1, 2], names_filter=[])[1] == {}
    for names_filter in ("*.hook_z", ["*.hook_z"], lambda name: name.endswith("hook_z")):
        names = set(m.run_with_cache([1, 2], names_filter=names_filter)[1])
        assert names == {name for name in everything if name.endswith("hook_z")} != set()


# -- closing -----------------------------------------------------------------------------------------------------------


def test_a_closed_model_is_one_error(backend_name):
    m = bitnet_ref.load(GOLDEN / "bitnet-packed-offline", backend=backend_name)
    cache = m.new_cache(1, 4)
    batch = TokenBatch.of([(0, 0, [1, 2])])
    m.run(batch, cache)
    m.close()
    m.close()  # again is nothing
    uses = [
        lambda: m.logits([1, 2]),
        lambda: m.logits([[1, 2], [3]]),
        lambda: m.run_with_cache([1, 2]),
        lambda: m.run(batch, cache),
        lambda: m.new_cache(1, 4),
        lambda: m.weights,
        lambda: m.generate([1, 2], max_tokens=1),
        lambda: next(iter(m.stream([1, 2], max_tokens=1))),
        lambda: m.engine(),
        lambda: m.on(m.backend),
    ]
    for use in uses:
        with pytest.raises(BackendError, match=r"this model was closed .* load it again") as caught:
            use()
        assert type(caught.value) is BackendError
    assert m.is_closed
    assert "closed" in repr(m)


@pytest.mark.sample(2)
@pytest.mark.parametrize("head", ["exact", "screened"])
def test_closing_frees_the_weights(head, backend_name):
    if head == "screened" and backend_name != "cython":
        pytest.skip("only cython screens")
    m = bitnet_ref.load("storyteller", backend=backend_name, head=head)
    m.logits([1, 2])
    weights = [m.weights, *(linear for _, linear in m.weights.linears()), m.weights.embedding]
    held = [weakref.ref(weight) for weight in weights]
    if head == "screened":  # what lies in a mapping of its own, of which the backend keeps the rest
        held.append(weakref.ref(m.weights.lm_head.rows_q.base))
    with m.engine(max_batch=1) as engine:
        engine.generate("Alice", max_tokens=2)
    del weights, engine
    gc.disable()  # none by chance
    try:
        m.close()
        assert [ref() for ref in held] == [None] * len(held)
    finally:
        gc.enable()


def test_a_shared_model_that_was_closed_is_loaded_anew(tmp_path):
    folder = write_checkpoint(tmp_path, BITNET)
    first = bitnet_ref.load(folder, backend="numpy", share=True)
    first.close()
    second = bitnet_ref.load(folder, backend="numpy", share=True)
    assert second is not first
    assert second.logits([1, 2]).shape == (2, 40)


@pytest.mark.parametrize("name", ["1_Pooling/config.json", "additional_chat_templates/tool_use.jinja"])
def test_an_edit_in_a_subfolder_is_another_model(tmp_path, name):
    folder = write_checkpoint(tmp_path, BITNET)
    first = bitnet_ref.load(folder, backend="numpy", share=True)
    (folder / name).parent.mkdir()
    (folder / name).write_text('{"pooling_mode_mean_tokens": true}')
    assert bitnet_ref.load(folder, backend="numpy", share=True) is not first


def test_what_a_notebook_prints_fits_a_cell():
    m = model("storyteller")
    _, seen = m.run_with_cache([1, 2, 3])
    shown = [m, m.weights, m.weights.layers[0], m.weights.embedding, seen]
    assert max(len(repr(each)) for each in shown) < 1000
    assert "hook_embed" in repr(seen)
    assert len(seen._repr_html_()) < 4000
    assert "and 292 more" in seen._repr_html_()
