"""load(prepared=True): the next start maps what was kept and computes the same; what is stale is not used."""

import json
import logging
import os
import shutil

import numpy as np
import pytest
from helpers import BITNET, DATA, GOLDEN, GOLDEN_CASES, golden, rng, write_checkpoint

import bitnet_ref
from bitnet_ref import errors
from bitnet_ref.formats import prepared
from bitnet_ref.formats.open import ASSETS

NO_CYTHON = bitnet_ref.available_backends()["cython"]
pytestmark = pytest.mark.skipif(NO_CYTHON is not None, reason=str(NO_CYTHON))


def load(path, **options):
    return bitnet_ref.load(path, **{"backend": "cython", "threads": 2, "prepared": True, **options})


def kept(path):
    return sorted((path / prepared.FOLDER).iterdir())


def is_mapped(model):
    """Whether the weights are the file's pages, which cannot be written to."""
    writeable = {
        weight.array.flags.writeable if hasattr(weight, "array") else weight.panels.flags.writeable
        for _, weight in model.weights.linears()
    }
    assert len(writeable) == 1
    return not writeable.pop()


def copied(case, to):
    return shutil.copytree(GOLDEN / case, to / case)


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_every_kind_of_model_computes_the_same_from_its_map(case, tmp_path):
    folder = copied(case, tmp_path)
    tokens = golden(case)["tokens"].ravel()[:12]
    first, second = load(folder), load(folder)
    assert not is_mapped(first)
    assert is_mapped(second)
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
    assert is_mapped(second)
    assert kept(path.parent)[0].name.startswith(path.name)
    assert np.array_equal(first.logits([1, 2, 3]), second.logits([1, 2, 3]))


def test_the_shipped_model_tells_the_same_story(tmp_path):
    folder = shutil.copytree(ASSETS / "storyteller", tmp_path / "storyteller")
    first, second = load(folder, head="screened"), load(folder, head="screened")
    assert is_mapped(second)
    assert second.head == "screened"
    assert first.generate("Once upon a time", max_tokens=12).token_ids == (
        second.generate("Once upon a time", max_tokens=12).token_ids
    )


def test_layouts_and_heads_have_files_of_their_own(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "hf", BITNET)
    load(folder)
    assert not is_mapped(load(folder, head="screened"))
    assert is_mapped(load(folder, head="screened"))
    monkeypatch.setenv("BITNET_REF_WEIGHTS", "table")
    assert not is_mapped(load(folder))
    assert len(kept(folder)) == 3


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_changed_model_is_read_anew(name, tmp_path, caplog):
    folder = write_checkpoint(tmp_path / "hf", BITNET)
    load(folder)
    os.utime(folder / name, (1, 1))
    with caplog.at_level(logging.INFO, "bitnet_ref"):
        assert not is_mapped(load(folder))
    assert "made from other files" in caplog.text
    assert is_mapped(load(folder))


def test_another_option_is_another_model(tmp_path):
    folder = copied("llama-dense", tmp_path)
    load(folder)
    assert not is_mapped(load(folder, allow_unquantized=True))


def test_without_asking_nothing_is_kept_nor_used(tmp_path):
    folder = write_checkpoint(tmp_path / "hf", BITNET)
    assert not is_mapped(load(folder, prepared=False))
    assert not (folder / prepared.FOLDER).exists()
    load(folder)
    assert not is_mapped(load(folder, prepared=False))


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
    """A file's bytes with something wrong in the header, or the end missing."""
    header = 8 + int.from_bytes(data[:8], "little")
    if how == "cut":
        return data[: int(dice.integers(0, len(data)))]
    out = bytearray(data)
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


@pytest.mark.parametrize("how", ["cut", "bytes", "letters"])
def test_a_damaged_file_is_made_again(how, tmp_path):
    folder = write_checkpoint(tmp_path / "hf", BITNET)
    expected = load(folder, head="screened").logits([1, 2, 3])
    [file] = kept(folder)
    data = file.read_bytes()
    dice = rng(7)
    again = 0
    for _ in range(25):
        file.write_bytes(damaged(data, how, dice))
        model = load(folder, head="screened")
        if is_mapped(model):  # the damage was in a scale, or in no field at all: nothing that can be seen
            assert model.logits([1, 2, 3]).shape == expected.shape
            continue
        again += 1
        assert np.array_equal(model.logits([1, 2, 3]), expected)
        assert file.read_bytes() == data
    assert again > 10


def test_shapes_of_another_model_are_damage(tmp_path, caplog):
    folder = write_checkpoint(tmp_path / "hf", BITNET)
    other = write_checkpoint(tmp_path / "other", {**BITNET, "vocab_size": 48})
    for path in (folder, other):
        load(path)
    [mine], [theirs] = kept(folder), kept(other)
    data = theirs.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    with bitnet_ref.formats.safetensors.SafetensorsFile(mine) as file:
        header["__metadata__"] |= {key: file.metadata[key] for key in ("made_from", "config")}
    text = json.dumps(header).encode()
    mine.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    assert not is_mapped(load(folder))
    assert "is damaged (" in caplog.text


def test_a_model_file_that_is_wrong_still_says_so(tmp_path):
    folder = write_checkpoint(tmp_path / "hf", BITNET)
    load(folder)
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(100)
    with pytest.raises(errors.FormatError, match=r"model\.safetensors"):
        load(folder)
