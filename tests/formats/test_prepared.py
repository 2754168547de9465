"""load(prepared=True): the next start takes what was kept and computes the same; not what is stale or damaged."""

import json
import logging
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import BITNET, DATA, GOLDEN, GOLDEN_CASES, golden, raw_safetensors, rng, tiny_tensors, write_checkpoint

import bitnet_ref
from bitnet_ref import errors
from bitnet_ref.formats import prepared
from bitnet_ref.formats.convert import convert
from bitnet_ref.formats.open import ASSETS
from bitnet_ref.formats.safetensors import SafetensorsFile, content_hash

NO_CYTHON = bitnet_ref.available_backends()["cython"]
pytestmark = pytest.mark.skipif(NO_CYTHON is not None, reason=str(NO_CYTHON))


def load(path, **options):
    return bitnet_ref.load(path, **{"backend": "cython", "threads": 2, "prepared": True, **options})


def kept(path):
    return sorted((path / prepared.FOLDER).iterdir())


def is_kept(model):
    """Whether the weights come from the file: such arrays cannot be written to."""
    inside = []
    for layer in model.weights.layers:
        layer.map_linears(lambda weight: inside.append(getattr(weight, "linear", weight)) or weight)
    inside.append(model.weights.lm_head)
    writeable = {
        weight.panels.flags.writeable if hasattr(weight, "panels") else weight.array.flags.writeable
        for weight in inside
    }
    assert len(writeable) == 1
    return not writeable.pop()


def copied(case, to):
    return shutil.copytree(DATA / case if "/" in case else GOLDEN / case, to / case)


FAMILIES = [f"families/{folder.name}" for folder in sorted((DATA / "families").iterdir())]


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", [*GOLDEN_CASES, *FAMILIES])
def test_every_kind_of_model_computes_the_same_from_its_file(case, tmp_path):
    folder = copied(case, tmp_path)
    tokens = [1, 7, 3, 2, 5] if "/" in case else golden(case)["tokens"].ravel()[:12]
    first, second = load(folder), load(folder)
    assert not is_kept(first)
    assert is_kept(second)
    assert second.config == first.config
    assert second.weights.tied == first.weights.tied
    assert second.weights.nbytes == first.weights.nbytes
    assert np.array_equal(first.logits(tokens), second.logits(tokens))
    assert len(kept(folder)) == 1


@pytest.mark.parametrize("name", ["gguf/tq2_0.gguf", "gguf/i2_s.gguf", "native/tiny-v1.bitnet.safetensors"])
def test_a_model_in_one_file(name, tmp_path):
    path = tmp_path / "m" / os.path.basename(name)
    path.parent.mkdir()
    shutil.copy(DATA / name, path)
    first, second = load(path), load(path)
    assert is_kept(second)
    assert kept(path.parent)[0].name.startswith(path.name)
    assert np.array_equal(first.logits([1, 2, 3]), second.logits([1, 2, 3]))


def test_the_shipped_model_tells_the_same_story(tmp_path):
    folder = shutil.copytree(ASSETS / "storyteller", tmp_path / "storyteller")
    first, second = load(folder, head="screened"), load(folder, head="screened")
    assert is_kept(second)
    assert second.head == "screened"
    assert first.generate("Once upon a time", max_tokens=12).token_ids == (
        second.generate("Once upon a time", max_tokens=12).token_ids
    )


def test_layouts_and_heads_have_files_of_their_own(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "hf", BITNET)
    load(folder)
    assert not is_kept(load(folder, head="screened"))
    assert is_kept(load(folder, head="screened"))
    monkeypatch.setenv("BITNET_REF_WEIGHTS", "table")
    assert not is_kept(load(folder))
    assert len(kept(folder)) == 3


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_changed_model_is_read_anew(name, tmp_path, caplog):
    folder = write_checkpoint(tmp_path / "hf", BITNET)
    load(folder)
    os.utime(folder / name, (1, 1))
    with caplog.at_level(logging.INFO, "bitnet_ref"):
        assert not is_kept(load(folder))
    assert "made from other files" in caplog.text
    assert is_kept(load(folder))


def test_another_option_is_another_model(tmp_path):
    folder = copied("llama-dense", tmp_path)
    load(folder)
    assert not is_kept(load(folder, allow_unquantized=True))


def test_without_asking_nothing_is_kept_nor_used(tmp_path):
    folder = write_checkpoint(tmp_path / "hf", BITNET)
    assert not is_kept(load(folder, prepared=False))
    assert not (folder / prepared.FOLDER).exists()
    load(folder)
    assert not is_kept(load(folder, prepared=False))


def test_backends_that_compute_from_the_files_own_layout_keep_nothing(tmp_path):
    folder = write_checkpoint(tmp_path / "hf", BITNET)
    load(folder, backend="numpy")
    assert not (folder / prepared.FOLDER).exists()


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    folder = write_checkpoint(tmp_path / "hf", BITNET)
    (folder / prepared.FOLDER).write_text("in the way")
    model = load(folder)
    assert "are not kept" in caplog.text
    assert np.isfinite(model.logits([1, 2])).all()


def damaged(data, how, dice):
    """A file's bytes with something wrong anywhere, in the header, or the end missing."""
    header = 8 + int.from_bytes(data[:8], "little")
    if how == "cut":
        return data[: int(dice.integers(0, len(data)))]
    out = bytearray(data)
    if how == "bit":
        out[int(dice.integers(0, len(data)))] ^= 1 << int(dice.integers(0, 8))
        return bytes(out)
    if how == "bytes":
        for at in dice.integers(0, header, 3):
            out[at] = dice.integers(0, 256)
        return bytes(out)
    # a number or a letter of the tree of weights is another, and the header is still JSON
    start = data.index(b'"weights"')
    places = [at for at in range(start, header) if chr(data[at]).isalnum()]
    for at in dice.choice(places, 2):
        out[at] = ord("7") if chr(data[at]).isdigit() else ord("q")
    return bytes(out)


@pytest.mark.sample(3)
@pytest.mark.parametrize("how", ["cut", "bit", "bytes", "letters"])
def test_a_damaged_file_is_made_again(how, tmp_path):
    folder = write_checkpoint(tmp_path / "hf", BITNET)
    expected = load(folder, head="screened").logits([1, 2, 3])
    [file] = kept(folder)
    data = file.read_bytes()
    dice = rng(7)
    again = 0
    for _ in range(25):
        if (damage := damaged(data, how, dice)) == data:
            continue
        again += 1
        file.write_bytes(damage)
        model = load(folder, head="screened")
        assert not is_kept(model)
        assert np.array_equal(model.logits([1, 2, 3]), expected)
        assert file.read_bytes() == data
    assert again > 10


def test_a_sum_is_of_a_page():
    """What moves from one page to the next changes it; the numbers are those that files hold."""
    pages = np.arange(2 * 512, dtype=np.uint64).reshape(2, 512)
    expected = prepared.sha256(pages.sum(axis=1).tobytes() + b"rest")
    assert prepared.sum_pages(pages.tobytes() + b"rest") == expected


def swap_words(file):
    """Exchange two different words of a page of data: the sums stay the same."""
    with SafetensorsFile(file) as opened:
        at = opened.tensors["weights.embedding.stored"].offset
    data = bytearray(file.read_bytes())
    assert data[at : at + 8] != data[at + 8 : at + 16]
    data[at : at + 16] = data[at + 8 : at + 16] + data[at : at + 8]
    file.write_bytes(data)


def test_verify_compares_every_byte(tmp_path):
    """Two words that change places in one page leave its sum as it was: only `verify` sees it."""
    folder = write_checkpoint(tmp_path / "hf", {**BITNET, "vocab_size": 400})
    expected = load(folder).logits([1, 2, 3])
    assert is_kept(load(folder, verify=True))
    [file] = kept(folder)
    swap_words(file)
    assert is_kept(load(folder))  # which is why there is `verify`
    model = load(folder, verify=True)
    assert not is_kept(model)
    assert np.array_equal(model.logits([1, 2, 3]), expected)
    assert is_kept(load(folder, verify=True))


def test_verify_compares_the_model_too(tmp_path):
    path = tmp_path / "tiny.bitnet.safetensors"
    shutil.copy(DATA / "native" / "tiny-v1.bitnet.safetensors", path)
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    load(path)
    assert is_kept(load(path))
    with pytest.raises(errors.FormatError, match="was changed or damaged"):
        load(path, verify=True)


@pytest.mark.parametrize("in_place", [True, False])
def test_another_model_of_the_same_size_and_time(in_place, tmp_path):
    folder, other = (write_checkpoint(tmp_path / f"{n}", BITNET, tiny_tensors(BITNET, seed=n)) for n in (0, 1))
    load(folder)
    file, new = folder / "model.safetensors", (other / "model.safetensors").read_bytes()
    before = file.stat()
    assert before.st_size == len(new)
    if not in_place:
        file.unlink()
    file.write_bytes(new)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    model = load(folder)
    assert not is_kept(model)
    assert np.array_equal(model.logits([1, 2]), load(other).logits([1, 2]))
    shared = [load(folder, share=True, prepared=False)]
    file.write_bytes((other / "model.safetensors").read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert load(folder, share=True, prepared=False) is not shared[0]


def test_data_beside_an_onnx_file_belongs_to_the_model(tmp_path):
    pytest.importorskip("onnx")
    convert(DATA / "native" / "tiny-v1.bitnet.safetensors", tmp_path / "m", "onnx")
    path = tmp_path / "m" / "model.onnx"
    load(path)
    assert is_kept(load(path))
    (tmp_path / "m" / "of any name").write_text("x")
    assert not is_kept(load(path))


def test_a_folder_that_was_copied_with_its_prepared_weights(tmp_path):
    """They may have come from a stranger."""
    folder = write_checkpoint(tmp_path / "hf", BITNET)
    load(folder)
    shutil.copytree(folder, tmp_path / "copy")
    assert not is_kept(load(tmp_path / "copy"))


@pytest.mark.parametrize("change", ["cut", "overwritten"])
def test_what_happens_to_the_file_later_changes_nothing(change, tmp_path):
    folder = write_checkpoint(tmp_path / "hf", BITNET)
    expected = load(folder).logits([1, 2, 3])
    model = load(folder)
    assert is_kept(model)
    [file] = kept(folder)
    with open(file, "r+b") as opened:
        opened.truncate(100 if change == "cut" else None)
        opened.write(b"\xff" * (50 if change == "cut" else file.stat().st_size))
    assert np.array_equal(model.logits([1, 2, 3]), expected)


def test_mapped(tmp_path):
    folder = write_checkpoint(tmp_path / "hf", BITNET)
    expected = load(folder, prepared="mapped").logits([1, 2, 3])
    model = load(folder, prepared="mapped")
    assert is_kept(model)
    assert np.array_equal(model.logits([1, 2, 3]), expected)
    [file] = kept(folder)
    assert str(file) in Path("/proc/self/maps").read_text()
    with pytest.raises(errors.ConfigError, match="prepared"):
        load(folder, prepared="wrapped")


@pytest.mark.parametrize("what", ["file", "folder"])
def test_links_are_neither_read_nor_written(what, tmp_path, caplog):
    folder = write_checkpoint(tmp_path / "hf", BITNET)
    load(folder)
    [file] = kept(folder)
    link = file if what == "file" else file.parent
    link.rename(tmp_path / "outside")
    link.symlink_to(tmp_path / "outside")
    before = [(path, path.stat().st_mtime_ns) for path in (tmp_path / "outside").rglob("*")]
    assert not is_kept(load(folder))
    assert "is a link" in caplog.text
    assert "are not kept" in caplog.text
    assert link.is_symlink()
    assert before == [(path, path.stat().st_mtime_ns) for path in (tmp_path / "outside").rglob("*")]


def test_a_pipe_among_the_prepared_weights(tmp_path):
    folder = write_checkpoint(tmp_path / "hf", BITNET)
    load(folder)
    [file] = kept(folder)
    file.unlink()
    os.mkfifo(file)
    assert not is_kept(load(folder))
    assert is_kept(load(folder))


def parts(file):
    """The header and the arrays of a safetensors file."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def sealed(header, data, alignment=64):
    """A file of this header and data whose hashes are right: what a forger makes, not an accident."""
    metadata = header["__metadata__"]
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    for key in ("content_hash", "full_hash"):
        metadata.pop(key, None)
    for key, digest in (("full_hash", prepared.sha256), ("content_hash", prepared.sum_pages)):
        arrays = {name: data[slice(*entry["data_offsets"])] for name, entry in tensors.items()}
        facts = {name: (entry["dtype"], tuple(entry["shape"]), digest(arrays[name])) for name, entry in tensors.items()}
        metadata[key] = content_hash(metadata, facts)
    text = json.dumps(header).encode()
    return raw_safetensors(text + b" " * (-(8 + len(text)) % alignment), data)


@pytest.mark.thorough
def test_a_forged_file_whose_arrays_are_not_aligned(tmp_path, caplog):
    folder = write_checkpoint(tmp_path / "hf", BITNET)
    expected = load(folder).logits([1, 2, 3])
    [file] = kept(folder)
    header, data = parts(file)
    forged = sealed(header, data, alignment=1)
    for pad in range(64):  # whatever the header's length is
        text = forged[8 : 8 + int.from_bytes(forged[:8], "little")] + b" " * pad
        file.write_bytes(raw_safetensors(text, data))
        model = load(folder)
        assert np.array_equal(model.logits([1, 2, 3]), expected)
        assert is_kept(model) == ((8 + len(text)) % 4 == 0)
    assert "is a multiple of the size" in caplog.text


def test_names_of_a_forged_file_are_logged_with_escapes(tmp_path, caplog):
    folder = write_checkpoint(tmp_path / "hf", BITNET)
    load(folder)
    [file] = kept(folder)
    header, data = parts(file)
    header["__metadata__"]["weights"] = json.dumps({"kind": "DenseWeight", "name": "x", "fields": {"\x1b[2J\nok": 1}})
    file.write_bytes(sealed(header, data))
    assert not is_kept(load(folder))
    assert "\\x1b[2J\\nok" in caplog.text
    assert "\x1b" not in caplog.text


def test_a_forged_shape_of_a_screen_is_damage(tmp_path, caplog):
    folder = write_checkpoint(tmp_path / "hf", BITNET)
    load(folder, head="screened")
    [file] = kept(folder)
    header, data = parts(file)
    for name, entry in header.items():
        if name.endswith("facts"):
            entry["shape"].reverse()
    file.write_bytes(sealed(header, data))
    assert not is_kept(load(folder, head="screened"))
    assert "facts and rows_q" in caplog.text


def test_a_forged_eps_of_any_norm_is_damage(tmp_path, caplog):
    folder = write_checkpoint(tmp_path / "hf", BITNET)
    load(folder)
    [file] = kept(folder)
    header, data = parts(file)
    weights = header["__metadata__"]["weights"]
    places = [match.span(1) for match in re.finditer(r'"eps": ?([^,}]+)', weights)]
    assert len(places) > 4 * BITNET["num_hidden_layers"]
    for start, stop in places:
        header["__metadata__"]["weights"] = f'{weights[:start]}"x"{weights[stop:]}'
        file.write_bytes(sealed(header, data))
        assert not is_kept(load(folder))
        assert "eps" in caplog.text
        caplog.clear()


def test_shapes_of_another_model_are_damage(tmp_path, caplog):
    folder = write_checkpoint(tmp_path / "hf", BITNET)
    other = write_checkpoint(tmp_path / "other", {**BITNET, "vocab_size": 48})
    for path in (folder, other):
        load(path)
    [mine], [theirs] = kept(folder), kept(other)
    header, data = parts(theirs)
    with SafetensorsFile(mine) as file:
        header["__metadata__"] |= {key: file.metadata[key] for key in ("made_from", "config")}
    mine.write_bytes(sealed(header, data))
    assert not is_kept(load(folder))
    assert "is damaged (" in caplog.text


def in_layer(index, **parts):
    """A change of weights: parts of one layer, each by a function."""

    def change(w):
        layer = w.layers[index]
        made = replace(layer, **{name: make(getattr(layer, name)) for name, make in parts.items()})
        return replace(w, layers=(*w.layers[:index], made, *w.layers[index + 1 :]))

    return change


class OtherLayer:
    """Stands for a layer of another family."""

    def __init__(self, layer):
        self.layer = layer

    def __getattr__(self, name):
        return getattr(self.layer, name)


PLAIN, NORMED, HYBRID = (
    *(GOLDEN / "llama-bf16-biases", GOLDEN / "llama-packed-rmsnorm"),
    DATA / "containers" / "mlx-qwen35-ternary-2bit",
)
WRONG = {  # field: (the model, what is changed in its weights)
    "weights": (PLAIN, lambda w: OtherLayer(w)),
    "layers": (PLAIN, lambda w: replace(w, layers=w.layers[:1])),
    "embedding": (PLAIN, lambda w: replace(w, embedding=replace(w.embedding, stored=w.embedding.stored[:-1]))),
    "lm_head": (PLAIN, lambda w: replace(w, lm_head=replace(w.lm_head, stored=w.lm_head.stored[:-1]))),
    "final_norm": (PLAIN, lambda w: replace(w, final_norm=replace(w.final_norm, weight=w.final_norm.weight[:-1]))),
    "final_norm.eps": (PLAIN, lambda w: replace(w, final_norm=replace(w.final_norm, eps="1"))),
    "blocks.0": (PLAIN, lambda w: replace(w, layers=(OtherLayer(w.layers[0]), *w.layers[1:]))),
    "blocks.1.ffn_norm": (PLAIN, in_layer(1, ffn_norm=lambda norm: replace(norm, weight=norm.weight[1:]))),
    "blocks.1.attn.q_proj.bias": (PLAIN, in_layer(1, q_proj=lambda w: replace(w, bias=w.bias[1:]))),
    "blocks.0.attn.q_proj.input_norm": (
        NORMED,
        in_layer(0, q_proj=lambda w: replace(w, own_norm=replace(w.norm, weight=w.norm.weight[1:]))),
    ),
    "blocks.0.delta.conv": (HYBRID, in_layer(0, conv=lambda array: array[1:])),
    "dense matrix": (PLAIN, lambda w: replace(w, embedding=replace(w.embedding, stored=w.embedding.stored.view("i2")))),
}


@pytest.mark.parametrize("field", WRONG)
def test_each_part_is_that_of_the_config(field):
    path, change = WRONG[field]
    model = bitnet_ref.load(path, backend="cython")
    prepared._check(model.weights, model.config)
    with pytest.raises(errors.FormatError) as caught:
        prepared._check(change(model.weights), model.config)
    assert caught.value.field == field


def test_a_model_file_that_is_wrong_still_says_so(tmp_path):
    folder = write_checkpoint(tmp_path / "hf", BITNET)
    load(folder)
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(100)
    with pytest.raises(errors.FormatError, match=r"model\.safetensors"):
        load(folder)
