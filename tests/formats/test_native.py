"""formats.native and native_writer: one file that is the whole model, the same bytes every time, and never believed."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import (
    BITNET,
    DATA,
    GOLDEN,
    GOLDEN_CASES,
    TINY,
    cut_to,
    golden,
    raw_safetensors,
    tiny_tensors,
    write_checkpoint,
)
from safetensors import safe_open

import bitnet_ref
from bitnet_ref.errors import ConfigError, FormatError, ShapeError, TokenizerError
from bitnet_ref.formats.checkpoint import LoadOptions, parts
from bitnet_ref.formats.native.model import VERSION, NativeCheckpoint, write_native
from bitnet_ref.formats.open import ASSETS, open_checkpoint
from bitnet_ref.reference.weights import TernaryWeight

STORAGES = ("2bit", "base3")
TOKENIZERS = {
    "tokenizer.model": (ASSETS / "storyteller" / "tokenizer.model").read_bytes(),
    "tokenizer_config.json": b'{"add_bos_token": true,\n "chat_template": "{{ 1 }}"}\n',
    "chat_template.jinja": b"",
    "generation_config.json": b'{"bos_token_id": 1,  "eos_token_id": 2}',
}


def convert(source, target, **options):
    with open_checkpoint(source) as checkpoint:
        return write_native(checkpoint, target, **options)


def everything(path):
    """Every part as bytes, by name."""
    out = {}
    with open_checkpoint(path) as checkpoint:
        for name, part in parts(checkpoint):
            if isinstance(part, np.ndarray):
                out[name] = part.tobytes()
                continue
            out[name, "bias"] = None if part.bias is None else part.bias.tobytes()
            if part.bit_linear is not None:
                out[name] = part.bit_linear.packed.tobytes(), part.bit_linear.w_dequant_scale.tobytes()
                out[name, "norm"] = None if part.norm is None else (part.norm.weight.tobytes(), part.norm.eps)
            else:
                out[name] = part.array.tobytes(), part.array.dtype
        return out, checkpoint.config, checkpoint.tokenizer_files()


@pytest.fixture
def native(tmp_path):
    """A tiny native file: (path, header, data)."""
    write_checkpoint(tmp_path / "hf", BITNET)
    path = tmp_path / "tiny.bitnet.safetensors"
    convert(tmp_path / "hf", path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return path, json.loads(data[8 : 8 + length]), data[8 + length :]


# -- what is in it -----------------------------------------------------------------------------------------------------


@pytest.mark.sample(9)
@pytest.mark.parametrize("case", GOLDEN_CASES)
@pytest.mark.parametrize("storage", STORAGES)
def test_the_same_model(case, storage, tmp_path):
    """Every golden checkpoint: equal parts, equal logits; the config survives whole."""
    path = tmp_path / "x.bitnet.safetensors"
    written = convert(GOLDEN / case, path, storage=storage)
    assert everything(path) == everything(GOLDEN / case)
    with NativeCheckpoint(path) as checkpoint:
        assert checkpoint.verify() == checkpoint.content_hash == written
        assert checkpoint.kind == "native"
    tokens = golden(case)["tokens"].reshape(-1)[:8].tolist()
    want = bitnet_ref.load(GOLDEN / case, backend="numpy").logits(tokens)
    assert np.array_equal(bitnet_ref.load(path, backend="numpy", verify=True).logits(tokens), want)


@pytest.mark.parametrize("storage", STORAGES)
def test_storyteller_generates_the_same(storage, tmp_path):
    path = tmp_path / "storyteller.bitnet.safetensors"
    seen = []
    convert(ASSETS / "storyteller", path, storage=storage, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i + 1, len(seen)) for i in range(len(seen))]
    with NativeCheckpoint(path) as checkpoint:
        planes = 7 * checkpoint.config.num_hidden_layers
        in_base3 = planes if storage == "base3" else 0
        assert checkpoint.evidence == [f"{planes} ternary planes, {in_base3} of them in base 3"]
    shutil.move(path, tmp_path / "moved.bitnet.safetensors")  # it needs nothing beside it
    ours, original = bitnet_ref.load(tmp_path / "moved.bitnet.safetensors"), bitnet_ref.load()
    for prompt in ("Once upon a time", ""):
        a, b = (m.generate(prompt, max_tokens=20, temperature=0.0) for m in (ours, original))
        assert (a.text, a.token_ids, a.finish_reason) == (b.text, b.token_ids, b.finish_reason)
    for name in ("bos_id", "eos_ids", "pad_id", "vocab_size", "chat_template"):
        assert getattr(ours.tokenizer, name) == getattr(original.tokenizer, name)


def test_the_tokenizer_byte_for_byte(tmp_path):
    folder = write_checkpoint(tmp_path / "hf", BITNET)
    for name, data in TOKENIZERS.items():
        (folder / name).write_bytes(data)
    (folder / "README.md").write_text("not part of it")
    path = tmp_path / "x.bitnet.safetensors"
    convert(folder, path)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tokenizer_files() == TOKENIZERS
    tokenizer = bitnet_ref.load(path).tokenizer
    assert tokenizer.eos_ids == bitnet_ref.load(folder).tokenizer.eos_ids == (2,)
    assert tokenizer.path == str(path / "tokenizer.model")


def test_a_model_without_a_tokenizer(native):
    model = bitnet_ref.load(native[0])
    with pytest.raises(TokenizerError, match="no tokenizer here") as caught:
        model.tokenizer.encode("a")
    assert caught.value.path == str(native[0])


def test_other_people_can_read_it(native):
    """The safetensors package: same names, same arrays, every one aligned."""
    path, header, _ = native
    start = os.path.getsize(path) - max(entry["data_offsets"][1] for entry in list(header.values())[1:])
    with safe_open(path, framework="np") as theirs, NativeCheckpoint(path) as ours:
        assert set(theirs.keys()) == set(ours.tensors.names)
        assert theirs.metadata() == ours.metadata
        for name in ours.tensors.names:
            if ours.tensors.info(name).dtype != "BF16":  # which the package cannot give to NumPy
                want = ours.tensors.take(name, ours.tensors.info(name).shape, ("F32", "U8"))
                assert np.array_equal(theirs.get_tensor(name), want)
            width = {"F32": 4, "BF16": 2, "U8": 1}[ours.tensors.info(name).dtype]
            assert (start + header[name]["data_offsets"][0]) % width == 0


def test_base3_is_20_percent_smaller(tmp_path):
    sizes = {}
    for storage in STORAGES:
        path = tmp_path / f"{storage}.bitnet.safetensors"
        convert(ASSETS / "storyteller", path, storage=storage)
        with open_checkpoint(path) as checkpoint:
            infos = [checkpoint.tensors.info(name) for name in checkpoint.tensors.names]
            sizes[storage] = sum(info.nbytes for info in infos if len(info.shape) == 2 and info.dtype == "U8")
    assert 0.8 <= sizes["base3"] / sizes["2bit"] < 0.81  # 256 / 5 is rounded up
    assert everything(tmp_path / "2bit.bitnet.safetensors") == everything(tmp_path / "base3.bitnet.safetensors")


# -- writing -----------------------------------------------------------------------------------------------------------


def test_reproducible(tmp_path):
    """The same bytes again, from another storage too; and those that were written when the format was new."""
    folder = write_checkpoint(tmp_path / "hf", {**BITNET, "num_hidden_layers": 1})
    (folder / "tokenizer.json").write_bytes(b'{"version": "1.0"}')
    (folder / "tokenizer_config.json").write_bytes(TOKENIZERS["tokenizer_config.json"])
    a, b, c = (tmp_path / f"{name}.bitnet.safetensors" for name in "abc")
    assert convert(folder, a) == convert(folder, b)
    convert(folder, c, storage="base3")
    convert(c, c)  # onto itself: the old file is read to its end before it goes
    assert a.read_bytes() == b.read_bytes() == c.read_bytes()
    assert a.read_bytes() == (DATA / "native" / "tiny-v1.bitnet.safetensors").read_bytes()


def hash_by_hand(header, data):
    metadata = {key: value for key, value in header["__metadata__"].items() if key != "content_hash"}
    facts = {"metadata": metadata, "tensors": {}}
    for name, entry in header.items():
        if name != "__metadata__":
            digest = hashlib.sha256(data[slice(*entry["data_offsets"])]).hexdigest()
            facts["tensors"][name] = [entry["dtype"], entry["shape"], digest]
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def test_the_hash_by_hand(native):
    _, header, data = native
    assert header["__metadata__"]["content_hash"] == hash_by_hand(header, data)


def test_a_failure_leaves_the_old_file(native, monkeypatch):
    path, _, _ = native
    before = path.read_bytes()
    with open_checkpoint(path.parent / "hf") as checkpoint, pytest.raises(KeyboardInterrupt):
        write_native(checkpoint, path, progress=interrupt)
    assert path.read_bytes() == before
    assert sorted(p.name for p in path.parent.iterdir()) == ["hf", path.name]


def interrupt(done, total):
    if done == 5:
        raise KeyboardInterrupt


def test_arguments_are_checked(tmp_path):
    with open_checkpoint(write_checkpoint(tmp_path / "hf", BITNET)) as checkpoint:
        with pytest.raises(ConfigError, match="2bit or base3"):
            write_native(checkpoint, tmp_path / "x.bitnet.safetensors", storage="1bit")
        with pytest.raises(ConfigError, match="ends in"):
            write_native(checkpoint, tmp_path / "x.safetensors")


def test_a_checkpoint_unlike_its_config_is_refused(tmp_path):
    with open_checkpoint(write_checkpoint(tmp_path / "hf", TINY)) as checkpoint:
        honest = checkpoint.linear
        checkpoint.linear = lambda name: TernaryWeight.from_ternary(np.ones(honest(name).shape, np.int8), 1.0)
        with pytest.raises(ShapeError, match=r"blocks\.0\.attn\.q_proj as the config has it"):
            write_native(checkpoint, tmp_path / "x.bitnet.safetensors")
    assert os.listdir(tmp_path) == ["hf"]


# -- versions ----------------------------------------------------------------------------------------------------------


def test_version_1_is_read_for_ever():
    """A file written when version 1 was new. When the format changes, this file must still be read."""
    path = DATA / "native" / "tiny-v1.bitnet.safetensors"
    with NativeCheckpoint(path) as checkpoint:
        checkpoint.verify()
    assert np.isfinite(bitnet_ref.load(path, backend="numpy").logits([1, 2, 3])).all()


@pytest.mark.parametrize("version", [str(VERSION + 1), "999999999"])
def test_a_newer_version_is_refused_with_what_to_do(native, version):
    path, header, data = native
    header["__metadata__"]["format_version"] = version
    path.write_bytes(raw_safetensors(header, data))
    with pytest.raises(FormatError, match="install a newer bitnet_ref") as caught:
        bitnet_ref.load(path)
    assert caught.value.field == "__metadata__.format_version"


# -- bad files ---------------------------------------------------------------------------------------------------------


def edit_config(**changes):
    def edit(header, data):
        config = json.loads(header["__metadata__"]["config"])
        header["__metadata__"]["config"] = json.dumps({**config, **changes})
        return data

    return edit


def edit_metadata(key, value):
    def edit(header, data):
        if value is None:
            del header["__metadata__"][key]
        else:
            header["__metadata__"][key] = value
        return data

    return edit


def overwrite(name, at, new):
    """Other bytes in a tensor, from `at`."""

    def edit(header, data):
        begin = header[name]["data_offsets"][0] + at
        return data[:begin] + new + data[begin + len(new) :]

    return edit


def rename(old, new):
    def edit(header, data):
        header[new] = header.pop(old)
        return data

    return edit


Q, META = "blocks.0.attn.q_proj", "__metadata__"
BAD = {
    "no format": (edit_metadata("format", None), f"{META}.format", "not a native file"),
    "the format of another": (edit_metadata("format", "pt"), f"{META}.format", "load the folder"),
    "no version": (edit_metadata("format_version", None), f"{META}.format_version", "whole number"),
    "version 0": (edit_metadata("format_version", "0"), f"{META}.format_version", "whole number"),
    "version 01": (edit_metadata("format_version", "01"), f"{META}.format_version", "whole number"),
    "version ²": (edit_metadata("format_version", "²"), f"{META}.format_version", "whole number"),
    "a version of ten digits": (edit_metadata("format_version", "9" * 10), f"{META}.format_version", "whole number"),
    "a long version": (edit_metadata("format_version", "9" * 5000), f"{META}.format_version", "whole number"),
    "no config": (edit_metadata("config", None), f"{META}.config", "absent"),
    "config no JSON": (edit_metadata("config", "{"), f"{META}.config", "JSON"),
    "config a surrogate": (edit_metadata("config", "\ud800"), f"{META}.config", "UTF-8"),
    "config a list": (edit_metadata("config", "[]"), f"{META}.config", "object"),
    "config a key too many": (edit_config(more=1), f"{META}.config.more", "no field"),
    "config a bad value": (edit_config(head_dim=3), f"{META}.config.head_dim", "even"),
    "2^40 layers": (edit_config(num_hidden_layers=2**40), f"{META}.config.num_hidden_layers", "tensors"),
    "2^40 tokens": (edit_config(vocab_size=2**40), "embedding", "shape"),
    "another width": (edit_config(intermediate_size=28), "blocks.0.ffn_sub_norm", "shape"),
    "a layer less": (edit_config(num_hidden_layers=1), "blocks.1.", "no part of the model"),
    "a layer more": (edit_config(num_hidden_layers=3), "blocks.2.attn_norm", "missing"),
    "dense, says the config": (edit_config(quantization=None), f"{Q}.weight", "missing"),
    "biases, says the config": (edit_config(attention_bias=True), f"{Q}.bias", "missing"),
    "untied, says the config": (edit_config(tie_word_embeddings=False), "lm_head.weight", "missing"),
    "code 3": (overwrite(f"{Q}.packed", 5, b"\xff"), f"{Q}.packed", "code 3"),
    "scale zero": (overwrite(f"{Q}.w_dequant_scale", 0, bytes(4)), f"{Q}.w_dequant_scale", "above zero"),
    "scale NaN": (overwrite(f"{Q}.w_dequant_scale", 0, b"\0\0\xc0\x7f"), f"{Q}.w_dequant_scale", "finite"),
    "scale below all": (overwrite(f"{Q}.w_dequant_scale", 0, b"\1\0\0\0"), f"{Q}.w_dequant_scale", "above zero"),
    "norm Inf": (overwrite("final_norm", 4, b"\0\0\x80\x7f"), "final_norm", "inf"),
    "a tensor of no use": (rename("final_norm", "final_norms"), "final_norm", "missing"),
    "the other storage's name": (rename(f"{Q}.packed", f"{Q}.trits"), f"{Q}.trits", "padding"),
    "a tokenizer elsewhere": (rename(f"{Q}.packed", "tokenizer/../x"), f"{Q}.packed", "missing"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", BAD)
def test_bad_files(name, native):
    check_bad(BAD[name], *native)


def check_bad(case, path, header, data):
    edit, field, message = case
    data = edit(header, data)
    path.write_bytes(raw_safetensors(header, data))
    with pytest.raises(FormatError, match=message) as caught:
        bitnet_ref.load(path, backend="numpy")
    assert caught.value.path == str(path)
    assert field in caught.value.field
    assert caught.value.offset is not None or "missing" in message


BAD_GROUPS = {
    "no size": (rename(f"{Q}.group", "x"), f"{Q}.group", "missing"),
    "groups of 0": (overwrite(f"{Q}.group", 0, bytes(8)), f"{Q}.group", "expected 1 to 256"),
    "groups of another size": (overwrite(f"{Q}.group", 0, b"\x40"), f"{Q}.scales", "shape"),
    "a negative scale": (overwrite(f"{Q}.scales", 1, b"\x80"), f"{Q}.scales", "negative"),
    "an infinite scale": (overwrite("embedding.scales", 0, b"\0\x7c"), "embedding.scales", "inf"),
    "code 3 in a group": (overwrite("embedding.packed", 5, b"\xff"), "embedding.packed", "code 3"),
    "no plane": (rename(f"{Q}.packed", "x"), f"{Q}.packed", "missing"),
    "a dense one beside": (rename("blocks.0.attn_norm", f"{Q}.weight"), "blocks.0.attn_norm", "missing"),
}


@pytest.fixture(scope="module")
def by_groups(tmp_path_factory):
    path = tmp_path_factory.mktemp("groups") / "x.bitnet.safetensors"
    convert(DATA / "families" / "qwen3-groups128", path)
    return path.read_bytes()


@pytest.mark.parametrize("name", BAD_GROUPS)
def test_bad_groups(name, by_groups, tmp_path):
    length = 8 + int.from_bytes(by_groups[:8], "little")
    check_bad(BAD_GROUPS[name], tmp_path / "x.bitnet.safetensors", json.loads(by_groups[8:length]), by_groups[length:])


def test_groups_in_base3(by_groups, tmp_path):
    paths = [tmp_path / f"{name}.bitnet.safetensors" for name in ("a", "b", "again")]
    paths[0].write_bytes(by_groups)
    convert(paths[0], paths[1], storage="base3")
    convert(paths[1], paths[2])
    assert paths[2].read_bytes() == by_groups
    assert everything(paths[1]) == everything(paths[0])
    assert paths[1].stat().st_size < 0.87 * paths[0].stat().st_size


@pytest.mark.parametrize("storage", STORAGES)
def test_padding_has_one_form(storage, tmp_path):
    """Rows of 18 weights end in the middle of a byte; what stands there would be read by nobody."""
    config = {**TINY, "hidden_size": 18, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6}
    config |= {"weight_bits": 1, "input_bits": 8}
    tensors = tiny_tensors(config)
    for i in range(2):
        tensors[f"model.layers.{i}.self_attn.inner_attn_ln.weight"] = np.ones(18, np.float32)
        tensors[f"model.layers.{i}.mlp.ffn_layernorm.weight"] = np.ones(24, np.float32)
    path = tmp_path / "x.bitnet.safetensors"
    convert(write_checkpoint(tmp_path / "hf", config, tensors), path, storage=storage)
    assert everything(path) == everything(tmp_path / "hf")
    data = bytearray(path.read_bytes())
    name = Q + (".packed" if storage == "2bit" else ".trits")
    with NativeCheckpoint(path) as checkpoint:
        info = checkpoint.tensors.info(name)
    last = info.offset + 3 * info.shape[1] - 1  # of row 2
    data[last] = data[last] & 0x3F | 0x80 if storage == "2bit" else data[last] % 27 + 27 * 8
    path.write_bytes(data)
    with pytest.raises(FormatError, match="row 2 goes on after its last weight"):
        bitnet_ref.load(path)


def test_a_byte_that_is_no_five_trits(native):
    path, _, _ = native
    convert(path.parent / "hf", path, storage="base3")
    with NativeCheckpoint(path) as checkpoint:
        at = checkpoint.tensors.info(f"{Q}.trits").offset + 4 * 2 + 1  # 16 inputs: four bytes a row
    data = bytearray(path.read_bytes())
    data[at] = 243
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"holds 243 in byte \[2, 1\]"):
        bitnet_ref.load(path)


@pytest.mark.parametrize("name", ["tokenizer/../x", "tokenizer/", "tokenizer/model.py", "other"])
def test_tensors_of_no_use(native, name):
    path, header, data = native
    end = max(entry["data_offsets"][1] for key, entry in header.items() if key != META)
    header[name] = {"dtype": "U8", "shape": [3], "data_offsets": [end, end + 3]}
    path.write_bytes(raw_safetensors(header, data + b"abc"))
    with pytest.raises(FormatError) as caught:
        bitnet_ref.load(path)
    assert caught.value.field == name


def test_a_tokenizer_of_two_dimensions(native):
    path, header, data = native
    end = max(entry["data_offsets"][1] for key, entry in header.items() if key != META)
    name = "tokenizer/added_tokens.json"
    assert name not in header
    header[name] = {"dtype": "U8", "shape": [1, 3], "data_offsets": [end, end + 3]}
    path.write_bytes(raw_safetensors(header, data + b"abc"))
    with pytest.raises(FormatError, match=r"expected at most \d+ bytes, got the shape \(1, 3\)"):
        bitnet_ref.load(path)


@pytest.mark.thorough
def test_truncated_at_every_byte_of_the_header_and_in_the_data(native):
    path, _, _ = native
    data = path.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    for _ in cut_to(path, [*range(length), *range(length, len(data), 301), len(data) - 1]):
        with pytest.raises(FormatError):
            NativeCheckpoint(path)


def test_the_hash_finds_every_changed_byte(native):
    """Also where the model would still compute: a weight, a scale, the config, the tokenizer."""
    path, header, data = native
    good = bytearray(path.read_bytes())
    start = len(good) - len(data)
    places = [start + entry["data_offsets"][0] for key, entry in header.items() if key != META]
    places += [good.index(b"content_hash") + 25, good.index(b"norm_eps") + 11]
    for at in places:
        changed = bytearray(good)
        changed[at] ^= 1
        path.write_bytes(changed)
        with pytest.raises(FormatError) as caught, NativeCheckpoint(path, LoadOptions(verify=True)):
            pass
        assert caught.value.path == str(path)


def test_a_missing_file():
    with pytest.raises(FormatError, match="no such file"):
        bitnet_ref.load("nowhere.bitnet.safetensors")
    with pytest.raises(FormatError):
        NativeCheckpoint(Path("nowhere.bitnet.safetensors"))
