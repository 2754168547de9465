"""conversion: every format to every other keeps every ternary plane, and what cannot prove itself leaves nothing."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import permutations, product
from types import SimpleNamespace

import numpy as np
import pytest
from cli_runs import invoke, invoke_json
from helpers import BITNET as BITNET_CONFIG
from helpers import DATA, GOLDEN, TINY, model, tiny_tensors, write_checkpoint

import bitnet_ref
from bitnet_ref.backends import choose_backend
from bitnet_ref.cli.convert_command import TARGET_NAMES
from bitnet_ref.errors import ConfigError, ConfigWarning, FormatError, StorageError
from bitnet_ref.formats import checkpoint as checkpoint_module
from bitnet_ref.formats.checkpoint import LoadOptions
from bitnet_ref.formats.convert import (
    TARGETS,
    Target,
    _check_destination,
    convert,
    engine_of,
    fits,
    gguf_tokenizer,
    prove,
    remark_on,
)
from bitnet_ref.formats.convert import proof as proof_module
from bitnet_ref.formats.convert.proof import Proof, Tally
from bitnet_ref.formats.gguf.file import GgufFile
from bitnet_ref.formats.open import ASSETS, open_checkpoint, read_tokenizer
from bitnet_ref.formats.safetensors import DTYPES, SafetensorsFile
from bitnet_ref.reference.weights import DenseWeight, TernaryWeight
from bitnet_ref.tokenizers.settings import TOOL_TEMPLATE

BITNET = GOLDEN / "bitnet-packed-offline"
INI = """
[Kernels_0]
m = 256
k = 256
bm = 128
bk = 64
bmm = 32
[Kernels_1]
m = 128
k = 256
bm = 128
bk = 64
bmm = 32
[Kernels_2]
m = 768
k = 256
bm = 128
bk = 64
bmm = 32
[Kernels_3]
m = 256
k = 768
bm = 128
bk = 64
bmm = 32
"""


NOT_FOR_BITLINEARS = ("hf-unpacked", "mlx-2bit", "mlx-1bit")
NOT_FOR_BITLINEARS += ("gguf-q2_0", "gguf-pq2_0", "gguf-ptq1_0", "gguf-stq1_0", "gguf-q1_0")
BITNET_TARGETS = [target for target in TARGETS if target not in NOT_FOR_BITLINEARS]


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    """target -> the ini of its tile sizes, or None"""
    paths = dict.fromkeys(TARGETS)
    for target, big_k in (("gguf-tl1", 64), ("gguf-tl2", 192)):
        paths[target] = tmp_path_factory.mktemp("tiles") / f"{target}.ini"
        paths[target].write_text(INI.replace("bk = 64", f"bk = {big_k}"))
    return paths


def named(folder, target):
    return folder / f"{target}{TARGETS[target].suffix or ''}"


@pytest.fixture(scope="module")
def every_format(tmp_path_factory, tiles):
    """The golden BitNet in each format."""
    folder = tmp_path_factory.mktemp("formats")
    for target in BITNET_TARGETS:
        proof = convert(BITNET, named(folder, target), target, tl_tiles=tiles[target])
        assert proof.holds
        assert proof.planes.equal == proof.planes.total == 14
    return folder


def test_the_shell_offers_every_target():
    assert set(TARGET_NAMES) == set(TARGETS)


def pairs():
    """Every format to every other; by default each to three others, the rest with the slow tests."""
    for first, second in permutations(range(len(BITNET_TARGETS)), 2):
        marks = () if (second - first) % len(BITNET_TARGETS) in (1, 4, 9) else pytest.mark.slow
        yield pytest.param(BITNET_TARGETS[first], BITNET_TARGETS[second], marks=marks)


@pytest.mark.sample(8)
@pytest.mark.parametrize(("first", "second"), list(pairs()))
def test_every_pair_keeps_every_plane(first, second, every_format, tmp_path, tiles):
    """Compared with the golden BitNet itself, so what `convert` proves of each step is not taken for granted."""
    path = named(tmp_path, second)
    options = LoadOptions(tl_tiles=tiles[first])
    convert(named(every_format, first), path, second, options=options, tl_tiles=tiles[second], verify=False)
    with open_checkpoint(BITNET) as source, open_checkpoint(path, LoadOptions(tl_tiles=tiles[second])) as twice:
        proof = prove(source, twice)
    assert proof.planes.equal == proof.planes.total == 14
    assert proof.same_choice


@pytest.mark.sample(3)
@pytest.mark.parametrize("target", BITNET_TARGETS)
def test_the_bytes_are_reproducible(target, every_format, tmp_path, tiles):
    """And the progress counts what is written."""
    steps = []

    def phase(name):
        assert name == "writing"
        return lambda *done: steps.append(done)

    convert(BITNET, named(tmp_path, target), target, tl_tiles=tiles[target], verify=False, phase=phase)
    assert steps == [(i, len(steps)) for i in range(1, len(steps) + 1)]
    assert len(steps) >= 24  # parts of the model
    again, before = named(tmp_path, target), named(every_format, target)
    files = sorted(path.name for path in before.iterdir()) if before.is_dir() else [""]
    assert files
    for name in files:
        assert (again / name).read_bytes() == (before / name).read_bytes()


@pytest.mark.sample(3)
@pytest.mark.thorough
@pytest.mark.parametrize("target", BITNET_TARGETS)
def test_storyteller_still_tells_its_story(target, tmp_path):
    if target in ("gguf-tl1", "gguf-tl2"):
        pytest.skip("another ini than the golden model's")
    proof = convert("storyteller", named(tmp_path, target), target)
    assert proof.tokenizer == "equal"
    m = bitnet_ref.load(named(tmp_path, target))
    expected = model("storyteller", "auto").generate("Once upon a time", max_tokens=8)
    found = m.generate("Once upon a time", max_tokens=8)
    assert (found.text, found.token_ids) == (expected.text, expected.token_ids)


DENSE_TARGETS = ("gguf-f16", "gguf-bf16", "gguf-f32", "gguf-q8_0")


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:.*llama.cpp has no window")
@pytest.mark.parametrize("target", DENSE_TARGETS)
@pytest.mark.parametrize("mistral", [False, True])
def test_a_dense_model(target, mistral, tmp_path):
    config = TINY | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    config |= {"model_type": "mistral", "sliding_window": 3} if mistral else {}
    folder = write_checkpoint(tmp_path / "hf", config, tiny_tensors(config))
    proof = convert(folder, named(tmp_path, target), target)
    assert proof.holds, proof.verdict
    assert proof.exact or target in ("gguf-f16", "gguf-q8_0")  # the source is bfloat16
    if target == "gguf-q8_0":  # half a step of 127, and of the scale's float16
        assert 0 < proof.tensors.largest < 1 / 254 + 1 / 2048
    found = bitnet_ref.load(named(tmp_path, target), backend="numpy")
    assert found.config.quantization is None
    expected, logits = (m.logits([1, 2, 3]) for m in (bitnet_ref.load(folder, backend="numpy"), found))
    assert np.abs(logits - expected).max() <= (0.05 if target == "gguf-q8_0" else 1e-2) * np.abs(expected).max()


def test_convert_says_that_llama_cpp_ignores_a_window(tmp_path):
    config = {**TINY, "model_type": "mistral", "sliding_window": 5}
    folder, path = write_checkpoint(tmp_path / "hf", config), tmp_path / "x.gguf"
    with pytest.warns(
        ConfigWarning, match="llama.cpp has no window .* of more than 5 tokens differ; run it in"
    ) as seen:
        convert(folder, path, "gguf-f32")
    assert [str(each.message).startswith(f"{path}: ") for each in seen] == [True]
    convert(folder, tmp_path / "x.bitnet.safetensors", "native")


def test_int8_blocks_that_are_not_those_of_the_source(tmp_path):
    """A byte of a Q8_0 matrix is another: far within the rounding of the format, but not its rounding."""
    config = TINY | {"intermediate_size": 128, "head_dim": 32, "hidden_size": 64}
    folder, path = write_checkpoint(tmp_path / "hf", config, tiny_tensors(config)), tmp_path / "x.gguf"
    convert(folder, path, "gguf-q8_0")
    with GgufFile(path) as file:
        place = file.tensors["blk.0.ffn_up.weight"]
    data = bytearray(path.read_bytes())
    data[place.offset + 5] ^= 1
    path.write_bytes(data)
    with open_checkpoint(folder) as source, open_checkpoint(path) as written:
        assert prove(source, written).problems == ["blocks.0.mlp.up_proj differs"]


@pytest.mark.parametrize("target", ["gguf-i2_s", "gguf-tq2_0", "gguf-tl2"])
def test_a_refusal_names_formats_that_exist(target, tmp_path):
    folder = write_checkpoint(tmp_path / "hf", TINY, tiny_tensors(TINY))
    with pytest.raises(FormatError, match="this model is dense") as caught:
        convert(folder, tmp_path / "x.gguf", target)
    named_targets = re.findall(r"gguf-[a-z0-9_]+", str(caught.value).partition("; use ")[2])
    assert named_targets == list(DENSE_TARGETS)
    assert set(named_targets) < set(TARGETS)


@pytest.mark.thorough
def test_every_refusal_names_a_format_that_takes_the_model(tmp_path):
    odd = BITNET_CONFIG | {"intermediate_size": 28, "hidden_size": 20, "num_attention_heads": 5}
    cases = [
        write_checkpoint(tmp_path / "odd", odd | {"num_key_value_heads": 1}),
        write_checkpoint(tmp_path / "t", TINY),
    ]
    cases += [
        GOLDEN / name for name in ("llama-packed-rmsnorm", "llama-packed-skips", "rope-dynamic", "onebitllm-silu")
    ]
    taken, refusals = set(), 0
    for case, target in product(cases, TARGETS):
        path, refusal = tmp_path / f"out{TARGETS[target].suffix or ''}", ""
        try:
            convert(case, path, target, verify=False)
        except (FormatError, ConfigError) as error:
            refusal = str(error).partition(";")[2]
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if not refusal:
            taken.add((case, target))
            continue
        hints, refusals = re.findall(r"(?:gguf|hf)-[a-z0-9_]+|native", refusal), refusals + 1
        assert hints, refusal
        assert set(hints) <= set(TARGETS)
        if (case, hints[0]) not in taken:
            convert(case, tmp_path / f"hint{TARGETS[hints[0]].suffix or ''}", hints[0], verify=False, overwrite=True)
            taken.add((case, hints[0]))
    assert refusals > 20


def test_one_of_several_conversions_wins(tmp_path):
    """All but one say that another writes, or has written, the file."""
    gate = threading.Barrier(4)

    def work(target):
        gate.wait()
        try:
            return convert(BITNET, named(tmp_path, target), target) is not None
        except (StorageError, ConfigError) as error:
            return str(error)

    for target in ("gguf-i2_s", "hf-packed"):
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(work, [target] * 4))
        assert results.count(True) == 1, results
        assert all(
            re.search("another process|File exists|there already|not empty", r) for r in results if r is not True
        )


def test_what_is_there_is_not_replaced_unless_asked(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"mine")
    with pytest.raises(ConfigError, match="overwrite=True replaces it"):
        convert(BITNET, path, "gguf-i2_s")
    assert path.read_bytes() == b"mine"
    convert(BITNET, path, "gguf-i2_s", overwrite=True)
    assert path.read_bytes()[:4] == b"GGUF"
    with pytest.raises(ConfigError, match="folder that is there already"):
        convert(BITNET, tmp_path, "hf-packed", overwrite=True)
    for wrong in (tmp_path / "m.bin", tmp_path / "no" / "m.gguf"):
        with pytest.raises(ConfigError):
            convert(BITNET, wrong, "gguf-i2_s")
    with pytest.raises(ConfigError, match="gguf-tq2_0"):
        convert(BITNET, tmp_path / "x", "gguf-tq2")
    assert os.listdir(tmp_path) == ["m.gguf"]


def swapped_planes(path):
    """Two ternary matrices of the written folder exchanged, as a converter with mixed-up names would."""
    file = path / "model.safetensors"
    with SafetensorsFile(file) as tensors:
        a, b = (tensors.tensors[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 1))
    data = bytearray(file.read_bytes())
    data[a.offset : a.offset + a.nbytes], data[b.offset : b.offset + b.nbytes] = (
        data[b.offset : b.offset + b.nbytes],
        data[a.offset : a.offset + a.nbytes],
    )
    file.write_bytes(data)


def inverted_scale(path):
    file = path / "model.safetensors"
    with SafetensorsFile(file) as tensors:
        place = tensors.tensors["model.layers.1.self_attn.o_proj.weight_scale"]
    data = bytearray(file.read_bytes())
    at = slice(place.offset, place.offset + place.nbytes)
    scale = np.frombuffer(bytes(data[at]), DTYPES[place.dtype])
    data[at] = (1 / scale).astype(scale.dtype).tobytes()
    file.write_bytes(data)


def other_activation(path):
    config = path / "config.json"
    config.write_text(config.read_text().replace('"relu2"', '"silu"'))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (swapped_planes, r"blocks\.0\.mlp\.up_proj differs"),
        (inverted_scale, r"blocks\.1\.attn\.o_proj \(scale\) differs"),
        (other_activation, r"config\.activation was 'relu2' and is 'silu'"),
    ],
)
def test_a_conversion_that_went_wrong_is_refused_and_leaves_nothing(spoil, says, tmp_path, monkeypatch):
    good = TARGETS["hf-packed"]

    def write(checkpoint, path, options, progress):
        good.write(checkpoint, path, options, progress)
        spoil(path)

    monkeypatch.setitem(TARGETS, "hf-packed", Target("hf-packed", None, write))
    with pytest.raises(FormatError, match=says):
        convert(BITNET, tmp_path / "out", "hf-packed")
    assert os.listdir(tmp_path) == []


def test_what_a_tally_counts():
    tally = Tally()
    for name, difference in (("a", 0.0), ("b", 0.25), ("c", 0.5), ("d", 0.125), ("e", 0.0)):
        tally.add(name, difference)
    assert tally == Tally(equal=2, total=5, largest=0.5, first="b")


ROUNDED = {"scales": Tally(40, 42, 1.5e-4, "q"), "tensors": Tally(10, 13, 4.9e-4, "norm")}


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        ({}, "identical: 42 ternary planes, every scale and every tensor"),
        (
            {"tokens": 8, "logits_equal": True},
            "identical: 42 ternary planes, every scale and every tensor, and all logits",
        ),
        (
            {"tokens": 8, "logits_difference": 1.2e-6},
            "identical: 42 ternary planes, every scale and every tensor; logits within 1.2e-06: "
            "float matrices are stored otherwise",
        ),
        (
            {"scales": ROUNDED["scales"]},
            "all 42 ternary planes identical; the format rounds 2 of the scales (by at most 1.5e-04 of their size)",
        ),
        (
            {**ROUNDED, "config": {"norm_eps": (1, 2)}, "tokens": 8, "logits_difference": 0.0015, "kl": 1e-9},
            "all 42 ternary planes identical; the format rounds 2 of the scales (by at most 1.5e-04 of their size) and "
            "3 of the other tensors (by at most 4.9e-04 of their size) and config.norm_eps; logits within 1.5e-03, "
            "KL 1e-09, the same most likely token",
        ),
        (
            {"config": {"norm_eps": (1, 2)}, "tokens": 8, "kl": 0.9e-9, "logits_difference": 0.5},
            "all 42 ternary planes identical; the format rounds config.norm_eps; logits within 5.0e-01",
        ),
        (
            {"config": {"norm_eps": (1, 2)}, "tokens": 8, "kl": 0.5, "same_choice": False, "logits_difference": 0.5},
            "all 42 ternary planes identical; the format rounds config.norm_eps; logits within 5.0e-01, KL 5e-01, "
            "not always the same most likely token",
        ),
        ({"problems": ["a differs", "b differs"]}, "a differs; b differs"),
    ],
)
def test_what_a_proof_says(facts, verdict):
    proof = Proof(**{"planes": Tally(42, 42), "scales": Tally(42, 42), "tensors": Tally(13, 13), **facts})
    assert proof.verdict == verdict
    assert proof.holds == ("problems" not in facts)
    assert proof.exact == verdict.startswith("identical")
    assert {key: proof.to_dict()[key] for key in ("holds", "exact", "verdict")} == {
        "holds": proof.holds,
        "exact": proof.exact,
        "verdict": verdict,
    }


@pytest.mark.parametrize(
    ("a", "b", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.0, -4.0], [1.0, 2.5, -4.5], 0.25),
        ([0.0, 2.0], [2.0**-25, 2.0], 2.0**-11),  # what float16 rounds to zero
        ([0.0, 2.0], [2.0**-24, 2.0], 2.0),  # what it does not
        ([2.0**-26], [-(2.0**-26)], 2.0**-11),
        ([1.0, 1.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0, 3.0], 0.5),  # in the last block
        ([1.0], [1.0, 2.0], np.inf),
        ([1.0], None, np.inf),
        (None, [1.0], np.inf),
        (np.array([1, 2], np.uint8), np.array([1, 2], np.uint8), 0.0),
        (np.array([1, 2], np.uint8), np.array([1, 3], np.uint8), 1.0),
        (np.array([1, 2], np.int64), np.array([2, 1], np.int64), 1.0),
    ],
)
def test_the_difference_of_two_tensors(a, b, difference, monkeypatch):
    """Relative to the source's own value."""
    monkeypatch.setattr(proof_module, "_BLOCK_VALUES", 2)
    a, b = (np.array(each, np.float32) if isinstance(each, list) else each for each in (a, b))
    assert proof_module._difference(a, b) == difference


@pytest.mark.parametrize(
    ("a", "b", "is_near"),
    [
        (0.1, float(np.float32(0.1)), True),
        (0.1, 0.1000001, False),
        (1, 1.0, True),
        ((0.1, "a"), (float(np.float32(0.1)), "a"), True),
        ((0.1,), (0.1, 0.1), False),
        ({"x": 0.1}, {"x": float(np.float32(0.1))}, True),
        ({"x": 0.1}, {"y": 0.1}, False),
        ({"x": (0.1, 2)}, {"x": (0.1, 3)}, False),
        ("a", "b", False),
        (None, None, True),
    ],
)
def test_what_is_near_in_a_configuration(a, b, is_near):
    assert proof_module._nearly(a, b) is is_near


ONES, MATRIX = np.ones(3, np.float32), DenseWeight(np.ones((2, 32), np.float32))
PLANE = np.zeros((4, 2), np.uint8)
BIT = TernaryWeight(PLANE, 8, np.float32(0.99), None)


@pytest.mark.parametrize(
    ("a", "b", "kind", "problem"),
    [
        (ONES, ONES, "native", None),
        (ONES, ONES * (1 + 2.0**-11), "gguf-f16", None),
        (ONES, ONES * (1 + 2.0**-10), "gguf-f16", "x differs"),
        (ONES, ONES * (1 + 2.0**-8), "gguf-bf16", None),
        (ONES, ONES * (1 + 2.0**-7), "gguf-bf16", "x differs"),
        (ONES, None, "native", "x was a vector of 3, and nothing is absent"),
        (ONES, ONES[None], "native", "x was a vector of 3, and x is an array of shape (1, 3)"),
        (MATRIX, ONES, "native", "x was a dense matrix (2, 32), and x is a vector of 3"),
        (MATRIX, DenseWeight(MATRIX.array / 2), "gguf-q8_0", None),
        (MATRIX, DenseWeight(MATRIX.array / 4), "gguf-q8_0", "x differs"),
        (
            MATRIX,
            DenseWeight(MATRIX.array.T.copy()),
            "native",
            "x was a dense matrix (2, 32), and x is a dense matrix (32, 2)",
        ),
        (MATRIX, DenseWeight(MATRIX.array / 2, ONES[:2]), "gguf-q8_0", "x (bias) differs"),
        (BIT, replace(BIT, w_dequant_scale=BIT.w_dequant_scale + np.float32(2.0**-24)), "online", None),
        (BIT, replace(BIT, w_dequant_scale=BIT.w_dequant_scale + np.float32(2.0**-23)), "online", "x (scale) differs"),
        (BIT, replace(BIT, w_dequant_scale=BIT.w_dequant_scale + np.float32(2.0**-12)), "native", None),
        (BIT, replace(BIT, w_dequant_scale=BIT.w_dequant_scale + np.float32(2.0**-10)), "native", "x (scale) differs"),
        (BIT, replace(BIT, packed=PLANE + np.uint8(1)), "online", "x differs"),
    ],
)
def test_how_much_a_format_may_round(a, b, kind, problem, monkeypatch):
    """Here "gguf-q8_0" halves matrices, and that alone; scales of an "online" file are means of masters."""
    parts = iter([[("x", a)], [("x", b)] if b is not None else []])
    monkeypatch.setattr(proof_module, "_computed_parts", lambda checkpoint: next(parts))
    monkeypatch.setattr(proof_module, "part_count", lambda config: 1)
    quantization = SimpleNamespace(quantization_mode="online") if kind == "online" else None
    written = SimpleNamespace(
        kind=kind,
        config=SimpleNamespace(quantization=quantization),
        rounded=lambda name, array: array / 2 if kind == "gguf-q8_0" else array,
    )
    proof = Proof()
    proof_module._compare_parts(SimpleNamespace(config=None), written, proof, None)
    assert proof.problems == ([] if problem is None else [problem])


def test_a_difference_is_relative_to_the_source():
    """Of a matrix, its bias and its scales; halves of the source are half away, and not twice."""
    proof = Proof()
    bit = replace(BIT, bias=ONES)
    for a, b in (
        (DenseWeight(MATRIX.array, ONES[:2]), DenseWeight(MATRIX.array / 4, ONES[:2] / 2)),
        (bit, replace(bit, bias=ONES / 8, w_dequant_scale=bit.w_dequant_scale / 2)),
    ):
        for name, tally, difference in proof_module._differences(a, b, proof):
            tally.add(name, difference)
    assert (proof.planes.total, proof.planes.largest) == (1, 0)
    assert (proof.scales.total, proof.scales.largest, proof.scales.first) == (1, 0.5, " (scale)")
    assert (proof.tensors.total, proof.tensors.largest) == (3, 0.875)
    found = [each for _, _, each in proof_module._differences(MATRIX, DenseWeight(MATRIX.array * 2, ONES[:2]), proof)]
    assert found == [1, np.inf]


def test_what_blocks_round_is_told_of_each_row():
    """By the row's largest value: a small row may lose as much of itself as a large one."""
    a = np.array([[100, -1], [0.25, -0.5], [0, 0]], np.float32)
    b = a + np.array([[0, 0.5], [0.125, 0], [2.0**-26, 0]], np.float32)
    assert proof_module._block_difference(a, b) == 0.5
    assert proof_module._block_difference(a[:2], b[:2]) == 0.25
    assert proof_module._block_difference(a[:1], b[:1]) == np.float32(0.005)


@pytest.mark.parametrize(
    ("storage", "gap", "problem"),
    [
        (("float32", "float32"), 0, None),
        (("float32", "float32"), 3e-5, "the logits differ by 3.0e-05 though all tensors are equal"),
        (("float32", "float16"), 3e-5, None),
        (("float32", "float16"), 5e-5, "the logits differ by 5.0e-05 though all tensors are equal"),
        (("Q4_1", "float32"), 3e-5, None),
    ],
)
def test_how_far_logits_may_differ(storage, gap, problem, monkeypatch):
    """Sums of values that are stored otherwise, in another order: by 1e-5 of the largest logit, 4 here."""
    logits = np.array([[1, -4], [3, 2]], np.float32)
    models = [SimpleNamespace(config=SimpleNamespace(num_hidden_layers=1))] * 2
    arrays = logits, logits + np.array([[gap, 0], [0, 0]], np.float32)
    results = iter([(array, {"lm_head": kind}) for array, kind in zip(arrays, storage, strict=True)])
    monkeypatch.setattr(proof_module, "_logits", lambda *_: next(results))
    proof = Proof()
    proof_module._compare_logits(*models, proof, None)
    assert proof.problems == ([] if problem is None else [problem])


def test_what_a_proof_computes(tmp_path):
    """The logits only of what is equal, and only if asked."""
    for name in ("good", "bad"):
        convert(BITNET, tmp_path / name, "hf-packed", verify=False)
    swapped_planes(tmp_path / "bad")
    with open_checkpoint(BITNET) as source:
        with open_checkpoint(tmp_path / "good") as written:
            steps = {"comparing": [], "computing": []}
            proof = prove(source, written, lambda phase: lambda *done: steps[phase].append(done))
            assert steps == {
                "comparing": [(i, 24) for i in range(1, 25)],
                "computing": [(i, 4) for i in range(1, 5)],
            }
            assert (proof.problems, proof.tokens > 0, proof.logits_equal, proof.logits_difference) == (
                [],
                True,
                True,
                0,
            )
            counts = [
                (tally.equal, tally.total, tally.largest) for tally in (proof.planes, proof.scales, proof.tensors)
            ]
            assert counts == [(14, 14, 0), (14, 14, 0), (10, 10, 0)]
            assert prove(source, written, compute=False).tokens == 0
        with open_checkpoint(tmp_path / "bad") as written:
            proof = prove(source, written)
            assert (len(proof.problems), proof.tokens, proof.logits_equal) == (2, 0, False)
            assert (proof.planes.equal, proof.planes.total, proof.planes.first) == (12, 14, "blocks.0.mlp.up_proj")


@pytest.mark.parametrize("skipped", [[], ["model.layers.1.mlp", "o_proj"]])
def test_a_proof_computes_the_models_logits_with_one_layer_in_memory(skipped, tmp_path, monkeypatch):
    quantization = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    quantization |= {"modules_to_not_convert": ["lm_head", *skipped]}
    folder = write_checkpoint(tmp_path, {**TINY, "num_hidden_layers": 4, "quantization_config": quantization})
    layers, alive, done = [], [], []

    def read_layer(checkpoint, index, prepare):
        layer = checkpoint_module.read_layer(checkpoint, index, prepare)
        layers.append((index, weakref.ref(layer.q_proj)))
        alive.append(sum(each() is not None for _, each in layers))
        return layer

    monkeypatch.setattr(proof_module, "read_layer", read_layer)
    with open_checkpoint(folder) as checkpoint:
        logits, storage = proof_module._logits(checkpoint, choose_backend("numpy"), lambda: done.append(1))
        tokens = np.linspace(0, checkpoint.config.vocab_size - 1, len(logits)).astype(np.int64)
    np.testing.assert_array_equal(logits, bitnet_ref.load(folder, backend="numpy").logits(tokens))
    assert ([index for index, _ in layers], len(done)) == ([0, 1, 2, 3], 4)
    assert max(alive) <= 2  # the next one is read while the pass has the last
    dense = (
        {"1.gate_proj", "1.up_proj", "1.down_proj", "0.o_proj", "1.o_proj", "2.o_proj", "3.o_proj"}
        if skipped
        else set()
    )
    assert storage == dict.fromkeys({"lm_head", *dense}, "bfloat16")


def test_what_a_proof_says_of_configurations(tmp_path):
    """What was, then what is; a number that is the same float32 is no problem, and is noted."""
    plain = write_checkpoint(tmp_path / "plain", TINY)
    for changes, config, problems in (
        ({}, {}, []),
        ({"rms_norm_eps": 0.5}, {"norm_eps": (1e-5, 0.5)}, ["config.norm_eps was 1e-05 and is 0.5"]),
        ({"rms_norm_eps": float(np.float32(1e-5))}, {"norm_eps": (1e-5, float(np.float32(1e-5)))}, []),
        ({"model_type": "mistral", "sliding_window": None, "bos_token_id": 2}, {}, []),
    ):
        changed = write_checkpoint(tmp_path / "changed", TINY | changes)
        with open_checkpoint(plain) as source, open_checkpoint(changed) as written:
            proof = prove(source, written, compute=False)
        assert (proof.config, proof.problems) == (config, problems)


def test_what_a_proof_says_of_tokenizers(tmp_path):
    """Of each thing that may differ, and of the model that has it."""
    sizes = {"vocab_size": 4096, "eos_token_id": 2}
    plain = write_checkpoint(tmp_path / "plain", TINY | sizes)
    shutil.copy(ASSETS / "storyteller" / "tokenizer.model", plain)

    def compare(**files):
        changed = shutil.copytree(plain, tmp_path / "changed", dirs_exist_ok=True)
        for name, content in files.items():
            (changed / name.replace("_json", ".json")).write_text(json.dumps(content))
        with open_checkpoint(plain) as source, open_checkpoint(changed) as written:
            proof = prove(source, written, compute=False)
        shutil.rmtree(changed)
        return proof.tokenizer, proof.problems

    assert compare() == ("equal", [])
    assert compare(config_json=TINY | sizes | {"eos_token_id": 3}) == (
        "equal",
        ["the end tokens were [2] and are [2, 3]"],
    )
    for files, difference in (
        ({"tokenizer_config_json": {"bos_token": "</s>"}}, "BOS, text to ids"),
        ({"tokenizer_config_json": {"chat_template": "x"}}, "chat template, template for tools"),
        (
            {"tokenizer_config_json": {"chat_template": [{"name": n, "template": n} for n in ("default", "tool_use")]}},
            "chat template, template for tools",
        ),
        ({"tokenizer_config_json": {"add_bos_token": False}}, "text to ids"),
    ):
        assert compare(**files) == (f"differs in {difference}", [f"the tokenizer differs in {difference}"])
    name, problems = compare(tokenizer_config_json=[])
    assert name.startswith("cannot be read from changed: ")
    assert problems == [f"the tokenizer {name}"]
    (plain / "tokenizer_config.json").write_text("[]")
    name, problems = compare(tokenizer_config_json={})
    assert name.startswith("cannot be read from plain: ")
    assert problems == []
    (plain / "tokenizer_config.json").unlink()
    (plain / "tokenizer.model").rename(tmp_path / "tokenizer.model")
    assert compare() == ("none", [])
    written = shutil.copytree(plain, tmp_path / "without")
    (tmp_path / "tokenizer.model").rename(plain / "tokenizer.model")
    with open_checkpoint(plain) as source, open_checkpoint(written) as without:
        proof = prove(source, without, compute=False)
        assert (proof.tokenizer, proof.problems) == ("left behind", ["the tokenizer was left behind"])


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["hf-packed", "native", "onnx", "gguf-i2_s"])
def test_the_template_for_tools_goes_along(target, tmp_path):
    """From a folder, where it is in a folder of its own, and from a GGUF, which has a key for it."""
    if target == "onnx":
        pytest.importorskip("onnx")
    folder = shutil.copytree(ASSETS / "storychat", tmp_path / "from hf")
    (folder / TOOL_TEMPLATE).parent.mkdir()
    (folder / TOOL_TEMPLATE).write_text("with {{ tools }}")
    convert(folder, tmp_path / "from.gguf", "gguf-i2_s", compute=False)
    for number, source in enumerate((folder, tmp_path / "from.gguf")):
        path = tmp_path / f"{number}{TARGETS[target].suffix or ''}"
        assert convert(source, path, target, compute=False).tokenizer == "equal"
        assert read_tokenizer(path).template_for(with_tools=True) == "with {{ tools }}"


def test_which_formats_hold_a_model(tiles):
    """Each is tried. What takes part of a BitNet: all but those whose inputs stay in float; of these none."""
    steps = []
    rows = {
        fit.target: fit for fit in fits(BITNET, tl_tiles=tiles["gguf-tl1"], progress=lambda *done: steps.append(done))
    }
    assert steps == [(i, len(TARGETS)) for i in range(1, len(TARGETS) + 1)]
    assert list(rows) == list(TARGETS)
    held = {target for target, fit in rows.items() if fit.proof is not None}
    assert held == {*BITNET_TARGETS} - {"gguf-tl2"}
    assert "tile sizes" in rows["gguf-tl2"].reason
    assert "activations stay floats, and here they are int8" in rows["gguf-q1_0"].reason
    exact = {target for target in held if rows[target].proof.exact}
    assert exact == held - {"gguf-q8_0"}  # its scales fit into float16
    assert {rows[target].engine for target in held} == {
        *("transformers", "bitnet.cpp", "ik_llama.cpp", "onnxruntime", "bitnet_ref")
    }
    of_one = ("gguf-tl2", "gguf-pq2_0", "gguf-stq1_0", "gguf-q2_0", "mlx-1bit")  # the engine of a format, if it is one
    engines = ["bitnet.cpp", "PrismML's llama.cpp", "AngelSlim's llama.cpp", "", "mlx-lm"]
    assert [rows[target].engine for target in of_one] == engines
    dense = {fit.target: fit.reason for fit in fits(GOLDEN / "llama-dense") if fit.proof is None}
    assert "this model is dense" in dense["gguf-tq1_0"]
    assert "no matrix of this model is ternary by groups" in dense["mlx-2bit"]


def test_who_runs_what_was_written(tmp_path):
    """What llama.cpp does not load is said: the architecture with relu2 and sub-norms, and norms inside of linears."""

    def remark(source, target):
        convert(source, tmp_path / "x.gguf", target, verify=False, overwrite=True)
        return remark_on(tmp_path / "x.gguf", target)

    assert (
        remark(BITNET, "gguf-tq2_0") == "its architecture is bitnet-b1.58, which bitnet.cpp runs and llama.cpp does not"
    )
    assert remark(BITNET, "gguf-iq2_bn") is None
    assert "norms inside (attn_q_norm_in)" in remark(DATA / "families" / "embedding-gemma3", "gguf-f16")
    assert remark(GOLDEN / "llama-dense", "gguf-f16") is None


def test_who_runs_every_format():
    """What does not depend on the model, and the rest by its architecture: a BitNet's own, or llama.cpp's."""
    own = {
        "bitnet.cpp": {"gguf-i2_s", "gguf-tl1", "gguf-tl2"},
        "PrismML's llama.cpp": {"gguf-pq2_0", "gguf-ptq1_0"},
        "mlx-lm": {target for target in TARGETS if target.startswith("mlx-")},
        "bitnet_ref": {"native", "native-base3"},
        "ik_llama.cpp": {"gguf-iq2_bn"},
        "AngelSlim's llama.cpp": {"gguf-stq1_0"},
        "onnxruntime": {"onnx"},
        "transformers": {target for target in TARGETS if target.startswith("hf-")},
    }
    others = {*TARGETS} - {target for targets in own.values() for target in targets}
    assert others
    assert all(target.startswith("gguf-") for target in others)
    bitnet, llama = (bitnet_ref.read_config(path) for path in (BITNET, GOLDEN / "llama-dense"))
    for config, engine in ((bitnet, "bitnet.cpp"), (llama, "llama.cpp")):
        assert {target: engine_of(config, target) for target in TARGETS} == {
            **{target: name for name, targets in own.items() for target in targets},
            **dict.fromkeys(others, engine),
        }
    normed = replace(bitnet, quantization=replace(bitnet.quantization, use_rms_norm=True))
    for target in TARGETS:
        assert engine_of(normed, target) == ("" if target.startswith("gguf-") else engine_of(bitnet, target))


def test_what_bf16_holds_of_a_ternary_model(tmp_path):
    """A remark about what has no masters, and none about what has, or is dense."""
    words = "hf-bf16 holds -1, 0, +1 beside weight_scale, and no masters: what quantises when it loads would take "
    words += "mean|W| of these for the scale; hf-online is for that, and for training on"
    for name, source, target, remark in (
        ("a", BITNET, "hf-bf16", words),
        ("b", BITNET, "hf-online", None),
        ("c", BITNET, "hf-packed", None),
        ("d", GOLDEN / "llama-dense", "hf-bf16", None),
    ):
        convert(source, tmp_path / name, target, verify=False)
        assert remark_on(tmp_path / name, target) == remark


@pytest.mark.parametrize(
    ("name", "target", "overwrite", "message"),
    [
        ("x.bin", "native", False, "native is a file whose name ends in .bitnet.safetensors, got '{}'"),
        ("x.bin", "gguf-f16", False, "gguf-f16 is a file whose name ends in .gguf, got '{}'"),
        ("none/x.gguf", "gguf-f16", False, "there is no folder '{}' to write into"),
        ("none/x", "hf-packed", False, "there is no folder '{}' to write into"),
        ("folder.gguf", "gguf-f16", True, "'{}' is a folder that is there already; remove it, or give another name"),
        ("folder.gguf", "hf-packed", True, "'{}' is a folder that is there already; remove it, or give another name"),
        ("file.gguf", "gguf-f16", False, "'{}' is there already; overwrite=True replaces it"),
        ("file.gguf", "hf-packed", False, "'{}' is there already; overwrite=True replaces it"),
        ("file.gguf", "hf-packed", True, "hf-packed is a folder, and '{}' is a file"),
        ("new.gguf", "gguf-f16", False, None),
        ("file.gguf", "gguf-f16", True, None),
        ("new", "hf-packed", False, None),
    ],
)
def test_where_a_result_may_be(name, target, overwrite, message, tmp_path):
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "file.gguf").touch()
    path = tmp_path / name
    if message is None:
        _check_destination(TARGETS[target], path, overwrite)
        return
    with pytest.raises(ConfigError) as caught:
        _check_destination(TARGETS[target], path, overwrite)
    assert caught.value.message == message.format(path.parent if "no folder" in message else path)
    assert list(caught.value.mentions) == ["overwrite=True"]


@pytest.mark.thorough
def test_the_table_of_formats():
    rows = {row["target"]: row for row in invoke_json("convert", "--matrix", GOLDEN / "llama-dense")}
    assert (rows["native"]["holds"], rows["gguf-q8_0"]["holds"], rows["gguf-i2_s"]["holds"]) == (
        "exact",
        "rounded",
        "no",
    )
    assert rows["gguf-q8_0"]["reason"].startswith("rounds ")
    assert rows["gguf-q8_0"]["engine"] == "llama.cpp"
    assert rows["native"]["bytes"] > 10_000
    assert invoke("convert", "--matrix", BITNET, "x").exit_code == 2
    for words in ((), ("x",), ("--to", "native")):
        assert "give DESTINATION and --to FORMAT, or --matrix" in invoke("convert", BITNET, *words).stderr
    assert invoke("convert", BITNET, "x", "--to", "native", "--split-size", "2X").exit_code == 2


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
@pytest.mark.parametrize("target", ["hf-packed", "gguf-i2_s"])
def test_killed_at_random_the_target_is_absent_or_whole(target, tmp_path):
    """500 conversions each, killed at random moments: 1,000 in all."""
    kills_at_random(target, tmp_path, 500)


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
def test_killed_a_few_times(tmp_path):
    kills_at_random("gguf-i2_s", tmp_path, 6)


def kills_at_random(target, folder, count):
    """A server forks a child for each conversion, so that a kill comes within the conversion and not the imports."""
    path, dice = named(folder, target), random.Random(7)
    server = (
        "import os, sys\n"
        "from bitnet_ref.formats.convert import convert\n"
        "import bitnet_ref.formats.hf.writer, bitnet_ref.formats.gguf.export, bitnet_ref.backends.cpu.backend\n"
        "for line in sys.stdin:\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        convert(*sys.argv[1:4])\n"
        "        os._exit(0)\n"
        "    print(child, flush=True)\n"
        "    print(os.waitpid(child, 0)[1], flush=True)\n"
    )
    command = [sys.executable, "-c", server, str(BITNET), str(path), target]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        seconds, whole, killed = 1.0, 0, 0
        for index in range(count):
            started = time.monotonic()
            process.stdin.write("\n")
            process.stdin.flush()
            child = int(process.stdout.readline())
            if index:  # the first runs to its end and says how long one takes
                time.sleep(dice.random() * seconds)
                with contextlib.suppress(ProcessLookupError):  # it was done
                    os.kill(child, signal.SIGKILL)
            status = int(process.stdout.readline())
            if not index:
                assert status == 0
                seconds = 1.2 * (time.monotonic() - started)
            killed += status != 0
            left = [name for name in os.listdir(folder) if name != path.name]
            assert len(left) <= 1, left
            if path.exists():
                with open_checkpoint(BITNET) as source, open_checkpoint(path) as written:
                    assert prove(source, written, compute=False).exact or target != "hf-packed"
                whole += 1
                if path.is_dir():
                    for file in path.iterdir():
                        file.unlink()
                    path.rmdir()
                else:
                    path.unlink()
        process.stdin.close()
    assert whole
    assert killed
    convert(BITNET, path, target, verify=False)
    assert os.listdir(folder) == [path.name]


def test_a_gguf_has_a_token_for_each_row_of_the_embedding(tmp_path):
    """As llama.cpp requires, whose vocabulary is as long as this array."""
    folder = write_checkpoint(tmp_path / "m", TINY | {"vocab_size": 4099, "eos_token_id": 2})
    shutil.copy(ASSETS / "storyteller" / "tokenizer.model", folder)
    assert convert(folder, tmp_path / "m.gguf", "gguf-f16", compute=False).tokenizer == "equal"
    with GgufFile(tmp_path / "m.gguf") as file:
        assert len(file.metadata["tokenizer.ggml.tokens"]) == 4099
    assert read_tokenizer(tmp_path / "m.gguf").vocab_size == 4096


def test_end_tokens_that_the_config_alone_names_take_the_free_keys():
    with open_checkpoint(ASSETS / "storyteller") as checkpoint:
        named = checkpoint.config.eos_token_ids[:1]
        checkpoint.config = replace(checkpoint.config, eos_token_ids=(*named, 7, 9))
        metadata = gguf_tokenizer(checkpoint)
    ids = [metadata[f"tokenizer.ggml.{name}_token_id"].value for name in ("eos", "eot", "eom")]
    assert ids == [*named, 7, 9]


@pytest.mark.filterwarnings("ignore:.*has no place for modules.json")
def test_a_gguf_says_that_an_embedding_model_pools_the_last_token(tmp_path):
    """Without the key llama.cpp gives a vector for each token; a language model has none."""
    folder = shutil.copytree(DATA / "families" / "embedding-qwen3", tmp_path / "m")
    for expected in (None, 3):
        convert(folder, tmp_path / f"{expected}.gguf", "gguf-f16", verify=False)
        with GgufFile(tmp_path / f"{expected}.gguf") as file:
            assert file.metadata.get("qwen3.pooling_type") == expected
        kinds = [{"type": f"sentence_transformers.models.{kind}"} for kind in ("Transformer", "Pooling", "Normalize")]
        (folder / "modules.json").write_text(json.dumps(kinds))


def test_a_base_model_keeps_its_one_end_token(tmp_path):
    """As Qwen's have it: their vocabulary has the chat models' <|im_end|>, which without an eot would end texts."""
    folder = write_checkpoint(tmp_path / "m", TINY | {"vocab_size": 4100, "eos_token_id": 2})
    shutil.copy(ASSETS / "storyteller" / "tokenizer.model", folder)
    added = {"4096": {"content": "<|im_start|>", "special": True}, "4097": {"content": "<|im_end|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added, "legacy": False}))
    assert convert(folder, tmp_path / "m.gguf", "gguf-f16", compute=False).problems == []
    with GgufFile(tmp_path / "m.gguf") as file:
        assert [file.metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot")] == [2, 2]
