"""formats.gguf: equal to the gguf package on good files, copies equal to the byte, one clear error for each bad one."""

import math
import struct
import time

import gguf
import numpy as np
import pytest
from helpers import cut_to, rng, with_one_byte_changed
from hypothesis import given
from hypothesis import strategies as st

from bitnet_ref.errors import FormatError
from bitnet_ref.formats.gguf.blocks import MXFP4, SMALL_Q1_0, TYPES, WIDE_Q2_0, GgmlType
from bitnet_ref.formats.gguf.export import _FILE_TYPES, _QUANTIZATION_VERSION, TensorToWrite, write_gguf
from bitnet_ref.formats.gguf.file import SCALARS as VALUE_TYPES
from bitnet_ref.formats.gguf.file import GgufFile, Typed, open_gguf

OF_OTHERS = (  # types of bitnet.cpp, ik_llama.cpp, Prism's and Tencent's llama.cpp, which the package may not know
    *((36, "I2_S", 4, 1, 32), (37, "I8_S", 1, 0), (38, "TL1", 1, 0), (39, "TL2/MXFP4", 1, 0)),
    *((134, "IQ1_BN", 64, 13, 0, 2), (135, "IQ2_BN", 64, 16, 0, 4), (335, "IQ2_BN_R4", 64, 16, 0, 4)),
    *((42, "Q2_0", 64, 18), (43, "STQ1_0", 256, 42), (142, "PQ2_0", 128, 34), (143, "PTQ1_0", 128, 28)),
)


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def u32(value):
    return struct.pack("<I", value)


def u64(value):
    return struct.pack("<Q", value)


def array(code, count, data=b""):
    return u32(9) + u32(code) + u64(count) + data


def info(name="x", dims=(8,), kind=0, offset=0):
    return text(name) + u32(len(dims)) + b"".join(u64(n) for n in dims) + u32(kind) + u64(offset)


def raw_gguf(values=(), infos=(), data=b"", counts=None, version=3, magic=b"GGUF", alignment=32):
    """A file of (key, type and value bytes) pairs and tensor infos, right or wrong."""
    n_tensors, n_values = counts or (len(infos), len(values))
    header = magic + u32(version) + u64(n_tensors) + u64(n_values)
    header += b"".join(text(key) + value for key, value in values) + b"".join(infos)
    return header + bytes(-len(header) % alignment) + data if data else header


def write(path, content):
    path.write_bytes(content)
    return path


def small_file():
    """Every value type, and three tensors."""
    values = [("general.architecture", u32(8) + text("bitnet")), ("general.alignment", u32(4) + u32(16))]
    values += [("a.flag", u32(7) + b"\1"), ("a.f64", u32(12) + struct.pack("<d", -2.5))]
    values += [("a.words", array(8, 3, text("one") + text("") + text("drüi"))), ("a.i16", array(3, 2, b"\xff\xff\2\0"))]
    values += [("a.flags", array(7, 3, b"\0\1\1"))]
    infos = [info("m.weight", (4, 2), 1, 0), info("v", (3,), 0, 16), info("q", (32, 2), 8, 32)]
    data = bytes(range(16)) + np.arange(3, dtype="<f4").tobytes() + bytes(4) + bytes(range(68))
    return raw_gguf(values, infos, data, alignment=16)


# -- good files --------------------------------------------------------------------------------------------------------


def test_what_a_file_says(tmp_path):
    with GgufFile(write(tmp_path / "x.gguf", small_file())) as file:
        assert (file.version, file.alignment) == (3, 16)
        assert file.metadata["general.architecture"] == "bitnet"
        assert file.metadata["a.flag"] is True
        assert file.metadata["a.f64"] == -2.5
        assert file.metadata["a.words"] == ["one", "", "drüi"]
        assert file.metadata["a.i16"].tolist() == [-1, 2]
        assert file.typed["a.flags"].type == "[bool]"
        assert file.typed["a.i16"].type == "[int16]"
        assert list(file.tensors) == ["m.weight", "v", "q"]
        tensor = file.tensors["m.weight"]
        assert (tensor.shape, tensor.type.name, tensor.nbytes) == ((2, 4), "F16", 16)
        assert file.read("m.weight").tobytes() == bytes(range(16))
        assert file.read("v").tolist() == [0.0, 1.0, 2.0]
        assert file.read_raw("q", 34, 3).tolist() == [34, 35, 36]
        with pytest.raises(FormatError, match="got Q8_0"):
            file.read("q")


def test_one_byte_at_the_smallest_alignment(tmp_path):
    values = [("general.alignment", u32(4) + u32(1))]
    content = raw_gguf(values, [info("a", (1,), 24), info("b", (1,), 24, 1)], b"\7\x08", alignment=1)
    with GgufFile(write(tmp_path / "x.gguf", content)) as file:
        assert [file.read_raw(name).tolist() for name in file.tensors] == [[7], [8]]


def test_the_bytes_of_a_part_of_a_tensor(tmp_path):
    with GgufFile(write(tmp_path / "x.gguf", small_file())) as file:
        for start, count in ((0, 0), (0, 68), (67, 1), (68, 0)):
            assert file.read_raw("q", start, count).tolist() == list(range(start, start + count))
        for start, count in ((-1, 1), (0, 69), (69, 0), (68, 1), (2, -1)):
            with pytest.raises(ValueError, match=f"^q: bytes {start} to {start + count} of 68$"):
                file.read_raw("q", start, count)


@pytest.mark.parametrize("kind", [37, 38], ids=["I8_S", "TL1"])
def test_a_type_of_unknown_size_takes_what_is_there(kind, tmp_path):
    """Up to the next tensor, or to the end, whatever its shape."""
    content = raw_gguf(infos=[info("a", (7,), kind), info("b", (3, 5), kind, 32)], data=F8 * 2 + b"x")
    with GgufFile(write(tmp_path / "x.gguf", content)) as file:
        assert [(each.shape, each.nbytes) for each in file.tensors.values()] == [((7,), 32), ((5, 3), 33)]


def test_the_types_are_those_of_other_programs():
    others = {row[0]: GgmlType(*row) for row in OF_OTHERS}
    for kind, (values, size) in gguf.GGML_QUANT_SIZES.items():
        if kind.value == 15 or kind.value in others:  # Q8_K: the package counts its 32 sums a byte short
            continue
        assert TYPES[kind.value] == GgmlType(kind.value, kind.name, values, size)
    assert {number: TYPES[number] for number in others} == others
    assert set(TYPES) == {kind.value for kind in gguf.GGML_QUANT_SIZES} | set(others)
    assert [(each.id, each.block_values, each.block_bytes) for each in (WIDE_Q2_0, SMALL_Q1_0, MXFP4)] == [
        *((42, 128, 34), (40, 32, 6), (39, 32, 17))
    ]


def test_the_file_types_are_those_of_other_programs():
    theirs = {kind.name.removeprefix("MOSTLY_").lower(): kind.value for kind in gguf.LlamaFileType}
    others = {"i2_s": 40, "tl1": 38, "tl2": 39, "q2_0": 41, "q1_0": 40, "stq1_0": 42, "iq2_bn": 137}
    assert {name: theirs[name] for name in ("bf16", "q8_0", "tq1_0", "tq2_0")} | others == _FILE_TYPES
    assert _QUANTIZATION_VERSION == gguf.GGML_QUANT_VERSION


def test_the_value_types_are_those_of_the_package():
    names = {kind.value: kind.name.lower() for kind in gguf.GGUFValueType if kind.name != "ARRAY"}
    assert {code: name for code, (name, _) in VALUE_TYPES.items()} | {8: "string"} == names
    for name, layout in VALUE_TYPES.values():
        assert np.dtype(layout) == np.dtype(name)


def test_a_file_of_the_package(tmp_path):
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.u32", 7)
    writer.add_int8("a.i8", -7)
    writer.add_float32("a.f32", 0.1)
    writer.add_bool("a.bool", False)
    writer.add_uint64("a.u64", 2**64 - 1)
    writer.add_token_list(["<s>", "a\u2581b", "\U0001f600"])
    writer.add_token_scores([0.0, -1.5, 3.0])
    writer.add_token_types([3, 1, 1])
    matrix = rng(1).standard_normal((3, 64)).astype(np.float32)
    writer.add_tensor("m", matrix)
    packed = gguf.quantize(matrix, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("v", matrix[0].astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile(path) as file:
        assert file.metadata["a.u32"] == 7
        assert file.metadata["a.i8"] == -7
        assert file.metadata["a.f32"] == np.float32(0.1)
        assert file.metadata["a.bool"] is False
        assert file.metadata["a.u64"] == 2**64 - 1
        assert file.metadata["tokenizer.ggml.tokens"] == ["<s>", "a\u2581b", "\U0001f600"]
        assert file.metadata["tokenizer.ggml.scores"].tolist() == [0.0, -1.5, 3.0]
        assert file.metadata["tokenizer.ggml.token_type"].dtype == np.int32
        np.testing.assert_array_equal(file.read("m"), matrix)
        assert file.tensors["q"].shape == (3, 64)
        assert file.read_raw("q").tobytes() == packed.tobytes()
        np.testing.assert_array_equal(file.read("v"), matrix[0].astype(np.float16))
        seen = []
        write_gguf(tmp_path / "again.gguf", file.typed, copies_of(file), lambda *done: seen.append(done))
        assert seen == [(i + 1, len(file.tensors)) for i in range(len(file.tensors))]
    assert (tmp_path / "again.gguf").read_bytes() == path.read_bytes()


def copies_of(file):
    return [
        TensorToWrite(t.name, t.shape, t.type.name, lambda name=t.name: file.read_raw(name), t.nbytes)
        for t in file.tensors.values()
    ]


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_and_the_copy_of_a_copy(version, tmp_path):
    content = bytearray(small_file())
    content[4] = version
    with GgufFile(write(tmp_path / "a.gguf", bytes(content))) as file:
        write_gguf(tmp_path / "b.gguf", file.typed, copies_of(file))
    with GgufFile(tmp_path / "b.gguf") as file:
        write_gguf(tmp_path / "c.gguf", file.typed, copies_of(file))
    again = (tmp_path / "b.gguf").read_bytes()
    assert again[: len(content)] == small_file()
    assert again[len(content) :].strip(b"\0") == b""
    assert again == (tmp_path / "c.gguf").read_bytes()


SCALARS = st.one_of(
    st.builds(Typed, st.just("uint8"), st.integers(0, 255)),
    st.builds(Typed, st.just("int8"), st.integers(-128, 127)),
    st.builds(Typed, st.just("int32"), st.integers(-(2**31), 2**31 - 1)),
    st.builds(Typed, st.just("uint64"), st.integers(0, 2**64 - 1)),
    st.builds(Typed, st.just("int64"), st.integers(-(2**63), 2**63 - 1)),
    st.builds(Typed, st.just("float64"), st.floats(allow_nan=False)),
    st.builds(Typed, st.just("float32"), st.floats(width=32, allow_nan=False)),
    st.builds(Typed, st.just("bool"), st.booleans()),
    st.builds(Typed, st.just("string"), st.text(max_size=20)),
    st.builds(Typed, st.just("[string]"), st.lists(st.text(max_size=5), max_size=5)),
    st.builds(Typed, st.just("[float32]"), st.lists(st.floats(width=32, allow_nan=False), max_size=5)),
    st.builds(Typed, st.just("[int32]"), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5)),
    st.builds(Typed, st.just("[bool]"), st.lists(st.booleans(), max_size=5)),
)


@pytest.mark.thorough
@given(
    values=st.dictionaries(
        st.text(min_size=1, max_size=12).filter(lambda k: k != "general.alignment"), SCALARS, max_size=6
    ),
    shapes=st.lists(st.lists(st.integers(1, 4), max_size=4), max_size=4),
    alignment=st.sampled_from([None, 8, 32, 64]),
)
def test_there_and_back(values, shapes, alignment, tmp_path_factory):
    if alignment:
        values["general.alignment"] = Typed("uint32", alignment)
    arrays = {f"t{i}": rng(i).standard_normal(shape).astype(np.float32) for i, shape in enumerate(shapes)}
    path = tmp_path_factory.mktemp("gguf") / "x.gguf"
    write_gguf(
        path,
        values,
        [TensorToWrite(n, a.shape, "F32", lambda a=a: a.reshape(-1).view(np.uint8)) for n, a in arrays.items()],
    )
    with GgufFile(path) as file:
        assert list(file.typed) == list(values)
        for key, typed in values.items():
            assert file.typed[key].type == typed.type
            got = file.metadata[key]
            assert (got.tolist() if isinstance(got, np.ndarray) else got) == typed.value
        for name, expected in arrays.items():
            np.testing.assert_array_equal(file.read(name), expected)
            assert file.read(name).shape == expected.shape


@pytest.mark.thorough
def test_a_large_vocabulary_is_read_fast(tmp_path):
    words = [f"word{i}é" for i in range(128_256)]
    merges = [f"wo rd{i}" for i in range(280_147)]
    path = tmp_path / "x.gguf"
    write_gguf(path, {"tokens": Typed("[string]", words), "merges": Typed("[string]", merges)}, [])
    start = time.perf_counter()
    with GgufFile(path) as file:
        taken = time.perf_counter() - start
        assert file.metadata["tokens"] == words
        assert file.metadata["merges"] == merges
    assert taken < 3.0  # 0.2 s on an idle core; a quadratic parse would take minutes


def test_strings_across_the_part_that_is_read_first(tmp_path):
    """Of 65,536 bytes: the second string's length, its text or the end of the file lies there."""
    for size in range(65_466, 65_484):
        words = ["x" * size, "", "y" * (size % 3)]
        content = raw_gguf([("a", array(8, 3, b"".join(map(text, words))))])
        with GgufFile(write(tmp_path / "x.gguf", content)) as file:
            assert file.metadata["a"] == words


def test_the_disk_is_asked_for_the_whole_file(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("bitnet_ref.formats.gguf.export.check_space", lambda path, nbytes: asked.append(nbytes))
    odd = [TensorToWrite(name, (7,), "I8", lambda: np.zeros(7, np.uint8)) for name in ("a", "bc")]
    write_gguf(tmp_path / "x.gguf", {"k": Typed("string", "v")}, odd)
    assert asked == [(tmp_path / "x.gguf").stat().st_size]


def test_writing_refuses_what_the_file_could_not_hold(tmp_path):
    path = tmp_path / "x.gguf"
    for typed in (Typed("uint8", 256), Typed("string", 3), Typed("[int8]", ["x"]), Typed("tuple", 1)):
        with pytest.raises(FormatError, match="cannot be written"):
            write_gguf(path, {"k": typed}, [])
    with pytest.raises(FormatError, match="power of two"):
        write_gguf(path, {"general.alignment": Typed("uint32", 24)}, [])
    with pytest.raises(FormatError, match="expected 8 bytes to write"):
        write_gguf(path, {}, [TensorToWrite("x", (2,), "F32", lambda: np.zeros(7, np.uint8))])
    assert list(tmp_path.iterdir()) == []  # nothing half-written stays


# -- bad files ---------------------------------------------------------------------------------------------------------

F8 = bytes(32)  # the data of one F32 [8]
STRING = u32(8) + text("v")
BAD = {
    # content: (bytes, part of the message, field)
    "empty": (b"", "needs bytes up to 4", "magic"),
    "three bytes": (b"GGU", "3 of at least 4 bytes", "magic"),
    "another magic": (raw_gguf(magic=b"GGML"), "b'GGML'", "magic"),
    "version 0": (raw_gguf(version=0), "got 0", "version"),
    "version 1": (raw_gguf(version=1), "convert it again", "version"),
    "version 4": (raw_gguf(version=4), "got 4", "version"),
    "big-endian": (raw_gguf(version=3 << 24), "big-endian", "version"),
    "2^63 tensors": (raw_gguf(counts=(2**63, 0)), "says 9223372036854775808", "tensor count"),
    "2^64 - 1 values": (raw_gguf(counts=(0, 2**64 - 1)), "18446744073709551615", "metadata count"),
    "more tensors than the file has bytes": (
        raw_gguf(infos=[info()], data=F8, counts=(9, 0)),
        "too few",
        "tensor count",
    ),
    "an array of 2^63 in 45 bytes": (
        raw_gguf([("a", array(0, 2**63))]),
        "says 9223372036854775808",
        "a",
    ),
    "an array of 2^61 float64": (
        raw_gguf([("a", array(12, 2**61, bytes(64)))]),
        f"says {2**61}, but at 8 bytes or more each 64 bytes are too few",
        "a",
    ),
    "an array of 2^63 strings": (
        raw_gguf([("a", array(8, 2**63, bytes(64)))]),
        f"says {2**63}, but at 8 bytes or more each 64 bytes are too few",
        "a",
    ),
    "an array of arrays": (raw_gguf([("a", array(9, 1, array(0, 1, b"\0")))]), "array of arrays", "a"),
    "an array of type 13": (raw_gguf([("a", array(13, 1, b"\0"))]), "element type", "a"),
    "a value of type 13": (raw_gguf([("a", u32(13) + bytes(8))]), "value type", "a"),
    "a bool of 2": (raw_gguf([("a", u32(7) + b"\2")]), "bool of 0 or 1", "a"),
    "bools of 2": (raw_gguf([("a", array(7, 2, b"\1\2"))]), "got 2 at index 1", "a"),
    "a string of 2^64 - 1": (
        raw_gguf([("a", u32(8) + u64(2**64 - 1) + bytes(32))]),
        f"says {2**64 - 1}, but at 1 bytes or more each 32 bytes are too few",
        "a",
    ),
    "a string past the end": (
        raw_gguf([("a", u32(8) + u64(5) + b"four")]),
        "says 5, but at 1 bytes or more each 4 bytes are too few",
        "a",
    ),
    "a string past the end in an array": (
        raw_gguf([("a", array(8, 2, text("ok") + u64(2**62)))]),
        "needs bytes up to",
        "a[1]",
    ),
    "a key of 2^63": (raw_gguf(counts=(0, 1)) + u64(2**63) + bytes(16), "at most 65535", "metadata key 0"),
    "an empty key": (raw_gguf([("", STRING)]), "empty", "metadata key 0"),
    "a key twice": (raw_gguf([("a", STRING), ("a", STRING)]), "occurs twice", "metadata key 1"),
    "a key that is not UTF-8": (raw_gguf([(b"a\xff", STRING)]), "not UTF-8", "metadata key 0"),
    "a string that is not UTF-8": (raw_gguf([("a", u32(8) + text(b"a\xff"))]), "not UTF-8", "a"),
    "strings that are not UTF-8": (raw_gguf([("a", array(8, 1, text(b"ab\xff")))]), "not UTF-8", "a[0]"),
    "alignment 0": (raw_gguf([("general.alignment", u32(4) + u32(0))]), "power of two", "general.alignment"),
    "alignment 24": (raw_gguf([("general.alignment", u32(4) + u32(24))]), "uint32 24", "general.alignment"),
    "alignment as text": (raw_gguf([("general.alignment", STRING)]), "string 'v'", "general.alignment"),
    "alignment as u64": (raw_gguf([("general.alignment", u32(10) + u64(32))]), "uint64 32", "general.alignment"),
    "alignment 2^31": (
        raw_gguf([("general.alignment", u32(4) + u32(2**31))], [info()], F8),
        "of the data, which has 0",
        "x",
    ),
    "a tensor twice": (raw_gguf(infos=[info(), info(offset=32)], data=F8 * 2), "occurred before", "x"),
    "a tensor without name": (raw_gguf(infos=[info("")], data=F8), "plain name", "tensor 0, name"),
    "a name with ../": (raw_gguf(infos=[info("../x")], data=F8), "plain name", "tensor 0, name"),
    "an absolute name": (raw_gguf(infos=[info("/x")], data=F8), "plain name", "tensor 0, name"),
    "a name with NUL": (raw_gguf(infos=[info("a\0b")], data=F8), "plain name", "tensor 0, name"),
    "a name of 65 bytes": (raw_gguf(infos=[info("x" * 65)], data=F8), "at most 64", "tensor 0, name"),
    "a name that is not UTF-8": (raw_gguf(infos=[info(b"x\xff")], data=F8), "not UTF-8", "tensor 0, name"),
    "rank 5": (raw_gguf(infos=[info(dims=(1,) * 5)], data=F8), "at most 4", "x"),
    "rank 2^32 - 1": (raw_gguf(infos=[text("x") + u32(2**32 - 1) + bytes(64)]), "4294967295", "x"),
    "a product that wraps to 0": (raw_gguf(infos=[info(dims=(2**32, 2**32))], data=F8), "4294967296", "x"),
    "a product of 2^62": (raw_gguf(infos=[info(dims=(2**31, 2**31))], data=F8), "an array can have", "x"),
    "a product that wraps to 8": (raw_gguf(infos=[info(dims=(8, 2**61 + 1))], data=F8), "an array can have", "x"),
    "dimension 0": (raw_gguf(infos=[info(dims=(8, 0))], data=F8), "[0, 8]", "x"),
    "dimension 2^63": (raw_gguf(infos=[info(dims=(2**63,))], data=F8), "9223372036854775808", "x"),
    "tensor type 4": (raw_gguf(infos=[info(kind=4)], data=F8), "type 4 is not known", "x"),
    "tensor type 2^31": (raw_gguf(infos=[info(kind=2**31)], data=F8), "type 2147483648", "x"),
    "half a block": (raw_gguf(infos=[info(dims=(128,), kind=35)], data=F8 * 4), "multiple of 256", "x"),
    "blocks across rows": (raw_gguf(infos=[info(dims=(8, 4), kind=8)], data=F8 * 4), "multiple of 32", "x"),
    # Each of these ids has had several meanings, of which one could be read by rows of that length, or a number.
    "rows of 32 under an id of 64 or 32": (raw_gguf(infos=[info(dims=(32,), kind=40)]), "of 64 values for NVFP4", "x"),
    "MXFP4 in rows of 8": (raw_gguf(infos=[info(dims=(8, 4), kind=39)], data=F8), "of 32 values for MXFP4", "x"),
    "a number under an id of blocks": (raw_gguf(infos=[info(dims=(), kind=42)], data=F8), "of 64 values for Q2_0", "x"),
    "an unaligned offset": (raw_gguf(infos=[info(offset=4)], data=F8 * 2), "multiple of the alignment", "x"),
    "an offset past the end": (raw_gguf(infos=[info(offset=32)], data=F8), "bytes 32 to 64", "x"),
    "an offset of 2^64 - 32": (raw_gguf(infos=[info(offset=2**64 - 32)], data=F8), "which has 32", "x"),
    "a size past the end": (raw_gguf(infos=[info(dims=(9,))], data=F8), "bytes 0 to 36", "x"),
    "no data": (raw_gguf(infos=[info()]), "which has", "x"),
    "one byte short": (raw_gguf(infos=[info()], data=F8[:-1]), "the file is cut off (95 of 96 bytes)", "x"),
    "overlapping": (raw_gguf(infos=[info("a"), info("b", (16,), 0, 0)], data=F8 * 3), "overlaps", None),
    "overlapping by a part": (raw_gguf(infos=[info("a", (16,)), info("b", offset=32)], data=F8 * 3), "overlaps", "a"),
    "nothing left for a type of unknown size": (
        raw_gguf(infos=[info("a", kind=38, offset=32)], data=F8),
        "bytes 32 to 32",
        "a",
    ),
}


CUT_OFF = {
    *("empty", "three bytes", "more tensors than the file has bytes", "a string past the end", "alignment 2^31"),
    *("an offset past the end", "a size past the end", "no data", "one byte short"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", BAD)
def test_bad_files(case, tmp_path):
    content, message, field = BAD[case]
    path = write(tmp_path / "x.gguf", content)
    with pytest.raises(FormatError) as caught:
        GgufFile(path)
    assert message in caught.value.message, caught.value
    assert caught.value.message.startswith("the file is cut off") == (case in CUT_OFF)
    assert caught.value.path == str(path)
    assert field is None or caught.value.field == field, caught.value
    assert caught.value.offset is not None
    assert 0 <= caught.value.offset <= max(len(content), 1)
    assert "not UTF-8" not in message or content[caught.value.offset] == 0xFF


def whole_numbers(**values):
    return [(f"split.{key.replace('_', '.')}", u32(4) + u32(value)) for key, value in values.items()]


SECOND = whole_numbers(no=1, count=2)
PARTS = {  # metadata of the first of two parts and of the second: what is wrong, "" for nothing
    "all": (whole_numbers(no=0, count=2, tensors_count=2), SECOND, ""),
    "the first without a number": (whole_numbers(count=2), SECOND, ""),
    "the second without a number": (whole_numbers(no=0, count=2), whole_numbers(count=2), "expected part 2 of 2"),
    "the second without a count": (whole_numbers(no=0, count=2), whole_numbers(no=1), "expected part 2 of 2"),
    "one tensor more": (whole_numbers(count=2, tensors_count=3), SECOND, "says 3; all parts have 2"),
    "a bool": ([("split.count", u32(7) + b"\1")], SECOND, "expected a whole number, got True"),
    "a real number": ([("split.count", u32(6) + bytes(4))], SECOND, "expected a whole number, got 0.0"),
    "below zero": ([("split.no", u32(5) + b"\xff" * 4)], SECOND, "expected a whole number, got -1"),
    "the largest number": (whole_numbers(no=2**31 - 1, count=2), SECOND, "is part 2147483648 of 2 of a model"),
    "beyond it": (whole_numbers(no=2**31, count=2), SECOND, "expected a whole number, got 2147483648"),
}


@pytest.mark.parametrize("case", PARTS)
def test_two_parts(case, tmp_path):
    *values, message = PARTS[case]
    for number, (name, pairs) in enumerate(zip("ab", values, strict=True), 1):
        write(tmp_path / f"x-{number:05}-of-00002.gguf", raw_gguf(pairs, [info(name)], F8))
    if message:
        with pytest.raises(FormatError, match=message):
            open_gguf(tmp_path / "x-00001-of-00002.gguf")
    else:
        with open_gguf(tmp_path / "x-00002-of-00002.gguf") as file:
            assert list(file.tensors) == ["a", "b"]


def test_all_parts_are_read_ahead(tmp_path, monkeypatch):
    for number, pairs in enumerate((whole_numbers(count=2), SECOND), 1):
        write(tmp_path / f"x-{number:05}-of-00002.gguf", raw_gguf(pairs, [info(str(number))], F8))
    asked = []
    monkeypatch.setattr(GgufFile, "read_ahead", lambda file, spans: asked.append((file.path.name, spans)))
    with open_gguf(tmp_path / "x-00001-of-00002.gguf") as file:
        file.read_all_ahead()
        assert asked == [(each.path.name, [(0, each.size)]) for each in (file, *file.further)]


def test_the_last_tensor_of_an_old_type_may_have_bytes_behind_it(tmp_path):
    infos = [info("a", (2048,), 42), info("b", (2048,), 42, 544)]  # 544 bytes in blocks of 128, 576 in those of 64
    with GgufFile(write(tmp_path / "x.gguf", raw_gguf(infos=infos, data=bytes(2 * 544 + 64)))) as file:
        assert [tensor.type.name for tensor in file.tensors.values()] == ["Q2_0 of 128"] * 2


def test_the_hostile_array_is_the_45_bytes_one():
    assert len(BAD["an array of 2^63 in 45 bytes"][0]) <= 50


def test_truncated_at_every_byte(tmp_path):
    content = small_file()
    path = write(tmp_path / "x.gguf", content)
    GgufFile(path).close()
    for size in cut_to(path, range(len(content))):
        with pytest.raises(FormatError, match=rf"the file is cut off \({size:,} of .*\): download it again"):
            GgufFile(path)


def test_every_byte_of_the_header_changed(tmp_path):
    """Whatever the change: a file that reads, or a FormatError."""
    content = small_file()
    path = write(tmp_path / "x.gguf", content)
    refused = 0
    for _ in with_one_byte_changed(path, range(len(content) - 100)):
        try:
            with GgufFile(path) as file:
                for name, tensor in file.tensors.items():
                    assert file.read_raw(name).size == tensor.nbytes <= len(content)
        except FormatError:
            refused += 1
    assert refused > len(content)


def test_a_file_that_shrinks_after_it_was_opened(tmp_path):
    path = write(tmp_path / "x.gguf", raw_gguf(infos=[info()], data=F8))
    with GgufFile(path) as file:
        write(path, raw_gguf(infos=[info()], data=F8[:-5]))
        with pytest.raises(FormatError, match="the file ends after 27 of 32 bytes"):
            file.read("x")


def test_no_file_and_a_folder(tmp_path):
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(FormatError):
            GgufFile(path)


def test_a_type_of_unknown_size_reaches_to_the_next_tensor(tmp_path):
    infos = [info("tl2_scale", (8,), 0, 96), info("tl1", (16, 16), 38, 0), info("tl2", (16,), 39, 128)]
    with GgufFile(write(tmp_path / "x.gguf", raw_gguf(infos=infos, data=bytes(200)))) as file:
        assert file.tensors["tl1"].nbytes == 96
        assert file.tensors["tl2"].nbytes == 200 - 128
        assert math.prod(file.tensors["tl1"].shape) == 256
