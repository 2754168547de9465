"""formats.safetensors: equal to the safetensors package on good files, and one clear error for every bad header."""

import os
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import safetensors
from helpers import cut_to, raw_safetensors, rng, safetensors_bytes, with_one_byte_changed
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from bitnet_ref.errors import FormatError, ShapeError
from bitnet_ref.formats import binary_file
from bitnet_ref.formats.safetensors import (
    DTYPES,
    MAX_TENSORS,
    SafetensorsFile,
    SafetensorsWriter,
    content_hash,
    dtype_name,
    write_arrays,
)
from bitnet_ref.system.json_file import MAX_VALUES


def entry(dtype="F32", shape=(2,), begin=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def write(path, content):
    path.write_bytes(content)
    return path


def random_array(dtype, shape):
    generator = rng(len(shape))
    if dtype == np.bool_:
        return generator.integers(0, 2, shape).astype(np.bool_)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return generator.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    return generator.standard_normal(shape).astype(dtype)


# -- good files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_against_the_package(name, tmp_path):
    dtype = DTYPES[name]
    written = {
        "scalar": random_array(dtype, ()),
        "vector": random_array(dtype, (7,)),
        "matrix": random_array(dtype, (3, 5)),
        "nothing": random_array(dtype, (0, 4)),
        "cube": random_array(dtype, (2, 1, 3)),
    }
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(written, path, metadata={"format": "np"})
    with safetensors.safe_open(path, framework="np") as oracle, SafetensorsFile(path) as file:
        assert set(file.tensors) == set(oracle.keys())
        assert file.metadata == oracle.metadata()
        for key, array in written.items():
            mine = file.read(key)
            assert (mine.dtype, mine.shape) == (dtype, array.shape)
            assert mine.flags.writeable
            assert mine.flags.owndata or mine.base is None
            assert file.tensors[key].dtype == name
            assert mine.tobytes() == array.tobytes() == oracle.get_tensor(key).tobytes()


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=str)
def test_writing_is_read_by_the_package(dtype, tmp_path):
    arrays = {"b": random_array(dtype, (4, 6)), "a": random_array(dtype, (5,))}
    arrays["view"] = arrays["b"].T[::2]
    path = tmp_path / "x.safetensors"
    layout = {name: (dtype_name(array.dtype), array.shape) for name, array in arrays.items()}
    with SafetensorsWriter(path, layout, {"made_by": "a test"}) as writer:
        for name, array in arrays.items():
            writer.write(name, array)
    with safetensors.safe_open(path, framework="np") as oracle:
        assert oracle.metadata()["made_by"] == "a test"
        for key, array in arrays.items():
            assert oracle.get_tensor(key).tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_finite_arrays_are_known_without_a_copy(dtype):
    info = ml_dtypes.finfo(dtype)
    good = np.array([0, -0.0, 1.5, -2.5, info.max, info.min, info.tiny], dtype=dtype)
    assert binary_file._is_finite(good) == (dtype is not np.float64 or "float64" in binary_file._EXPONENTS)
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        array = np.array([1, bad, 2], dtype=dtype)
        assert not binary_file._is_finite(array)
        message = f"holds {bad} at index [1]; expected finite numbers"
        assert binary_file.find_not_finite(array) == message
    assert binary_file.find_not_finite(good) is None
    assert not binary_file._is_finite(good[::2])


def test_a_header_longer_than_any(tmp_path):
    """Refused before it is read, where the file has so many bytes."""
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(100_000_100)
    with pytest.raises(FormatError, match="header length: not a safetensors file: its header would have 100000001"):
        SafetensorsFile(path)


def test_an_empty_file_and_a_padded_header(tmp_path):
    with SafetensorsFile(write(tmp_path / "a.safetensors", raw_safetensors({}))) as file:
        assert file.tensors == {}
    content = raw_safetensors(b'{"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}     ', b"\7")
    with SafetensorsFile(write(tmp_path / "b.safetensors", content)) as file:
        assert file.read("x").tolist() == [7]


def test_metadata_that_are_null(tmp_path):
    """As MLX writes a file without any."""
    path = write(tmp_path / "x", raw_safetensors({"__metadata__": None, "a": entry()}, bytes(8)))
    with safetensors.safe_open(path, "np") as oracle, SafetensorsFile(path) as file:
        assert oracle.keys() == list(file.tensors)
        assert file.metadata == {}


def test_tensors_in_any_order_in_the_header(tmp_path):
    header = {"late": entry("U8", [2], 2, 4), "none": entry("F32", [0], 2, 2), "early": entry("U8", [2], 0, 2)}
    with SafetensorsFile(write(tmp_path / "x.safetensors", raw_safetensors(header, b"\1\2\3\4"))) as file:
        assert file.read("early").tolist() == [1, 2]
        assert file.read("late").tolist() == [3, 4]
        assert file.read("none").shape == (0,)


@pytest.mark.thorough
@given(st.dictionaries(st.text(min_size=1, max_size=8), st.lists(st.integers(0, 4), max_size=3), max_size=4))
def test_any_names_and_shapes(tmp_path_factory, shapes):
    shapes.pop("__metadata__", None)
    arrays = {name: random_array(np.dtype(ml_dtypes.bfloat16), tuple(shape)) for name, shape in shapes.items()}
    path = tmp_path_factory.mktemp("st") / "x.safetensors"
    with SafetensorsFile(write(path, safetensors_bytes(arrays))) as file:
        assert list(file.tensors) == list(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(file.read(name), array)


# -- bad files ---------------------------------------------------------------------------------------------------------

X = b"\0" * 8  # the data of one float32 [2]
BAD = {
    # content: (bytes, part of the message, field)
    "empty": (b"", "at least 8 bytes", None),
    "seven bytes": (b"\1" * 7, "at least 8 bytes", None),
    "header longer than the file": ((1 << 20).to_bytes(8, "little") + b"{}", "1048576 bytes", "header length"),
    "header of 2^63": ((1 << 63).to_bytes(8, "little") + b"{}", "9223372036854775808", "header length"),
    "header of 2^64 - 1": (b"\xff" * 8 + b"{}", "18446744073709551615", "header length"),
    "header one byte past the end": ((3).to_bytes(8, "little") + b"{}", "the file has 10", "header length"),
    "no header": ((0).to_bytes(8, "little"), "not valid JSON", None),
    "not JSON": (raw_safetensors(b"{x}"), "not valid JSON", None),
    "not UTF-8": (raw_safetensors(b'{"\xff": 1}'), "not UTF-8", None),
    "a list": (raw_safetensors([]), "expected a JSON object", None),
    "nested without end": (raw_safetensors(b'{"a":' * 100_000), "nested too deeply", None),
    "an integer of 5000 digits": (raw_safetensors(b'{"a":' + b"1" * 5000 + b"}"), "not usable JSON", None),
    "a tensor twice": (
        raw_safetensors(b'{"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"x":{}}'),
        "occurs twice",
        "x",
    ),
    "dtype twice": (
        raw_safetensors(b'{"x":{"dtype":"U8","dtype":"F32","shape":[0],"data_offsets":[0,0]}}'),
        "occurs twice",
        "dtype",
    ),
    "metadata is a list": (raw_safetensors({"__metadata__": []}), "object of strings", "__metadata__"),
    "metadata with a number": (raw_safetensors({"__metadata__": {"a": 1}}), "object of strings", "__metadata__"),
    "entry is a list": (raw_safetensors({"x": [1]}), "expected an object", "x"),
    "entry is null": (raw_safetensors({"x": None}), "expected an object", "x"),
    "no dtype": (raw_safetensors({"x": {"shape": [2], "data_offsets": [0, 8]}}, X), "expected one of", "x.dtype"),
    "unknown dtype": (raw_safetensors({"x": entry("F8_E4M3", [8])}, X), "'F8_E4M3'", "x.dtype"),
    "dtype is a number": (raw_safetensors({"x": entry(32)}, X), "got 32", "x.dtype"),
    "dtype is a list": (raw_safetensors({"x": entry(["F32"])}, X), "expected one of", "x.dtype"),
    "no shape": (raw_safetensors({"x": {"dtype": "F32", "data_offsets": [0, 8]}}, X), "whole numbers", "x.shape"),
    "shape is a number": (raw_safetensors({"x": {**entry(), "shape": 2}}, X), "whole numbers", "x.shape"),
    "shape with a float": (raw_safetensors({"x": {**entry(), "shape": [2.0]}}, X), "whole numbers", "x.shape"),
    "shape with a string": (raw_safetensors({"x": {**entry(), "shape": ["2"]}}, X), "whole numbers", "x.shape"),
    "shape with true": (raw_safetensors({"x": {**entry(), "shape": [2, True]}}, X), "whole numbers", "x.shape"),
    "negative shape": (raw_safetensors({"x": entry(shape=[-2])}, X), "whole numbers", "x.shape"),
    "two negatives make a plus": (raw_safetensors({"x": entry(shape=[-1, -2])}, X), "whole numbers", "x.shape"),
    "shape beyond 63 bits": (raw_safetensors({"x": entry(shape=[2**63])}, X), "whole numbers", "x.shape"),
    "rank of 9": (raw_safetensors({"x": entry(shape=[1] * 8 + [2])}, X), "at most 8", "x.shape"),
    "2^63 bytes": (raw_safetensors({"x": entry(shape=[2**61])}, X), "no more than", "x.shape"),
    "product that wraps 64 bits": (raw_safetensors({"x": entry(shape=[2**62, 4, 2])}, X), "no more than", "x.shape"),
    "zero beside sizes no array has": (
        raw_safetensors({"x": entry(shape=[2**62, 2**62, 0], end=0)}),
        "no more than an array can have",
        "x.shape",
    ),
    "no offsets": (raw_safetensors({"x": {"dtype": "F32", "shape": [2]}}, X), "[begin, end]", "x.data_offsets"),
    "one offset": (raw_safetensors({"x": {**entry(), "data_offsets": [8]}}, X), "[begin, end]", "x.data_offsets"),
    "three offsets": (
        raw_safetensors({"x": {**entry(), "data_offsets": [0, 8, 8]}}, X),
        "[begin, end]",
        "x.data_offsets",
    ),
    "float offsets": (
        raw_safetensors({"x": {**entry(), "data_offsets": [0, 8.0]}}, X),
        "[begin, end]",
        "x.data_offsets",
    ),
    "negative offsets": (raw_safetensors({"x": entry(begin=-8, end=0)}, X), "[begin, end]", "x.data_offsets"),
    "end before begin": (raw_safetensors({"x": entry(begin=8, end=0)}, X), "expected 8 bytes", "x.data_offsets"),
    "too few bytes": (raw_safetensors({"x": entry(end=7)}, X[:7]), "expected 8 bytes", "x.data_offsets"),
    "too many bytes": (raw_safetensors({"x": entry(end=9)}, X + b"\0"), "expected 8 bytes", "x.data_offsets"),
    "past the end": (
        raw_safetensors({"x": entry(begin=4, end=12)}, X),
        "8 bytes of data, got [4, 12]",
        "x.data_offsets",
    ),
    "far past the end": (raw_safetensors({"x": entry(begin=2**62, end=2**62 + 8)}, X), "within", "x.data_offsets"),
    "overlap": (raw_safetensors({"x": entry(), "y": entry(begin=4, end=12)}, X + X[:4]), "overlaps", "y.data_offsets"),
    "the same bytes twice": (raw_safetensors({"x": entry(), "y": entry()}, X), "overlaps", "y.data_offsets"),
    "a hole at the start": (raw_safetensors({"x": entry(begin=1, end=9)}, X + b"\0"), "hole", "x.data_offsets"),
    "a hole between": (
        raw_safetensors({"x": entry(), "y": entry(begin=9, end=17)}, X + X + b"\0"),
        "hole",
        "y.data_offsets",
    ),
    "bytes left over": (raw_safetensors({"x": entry()}, X + b"\0"), "the tensors end at", None),
    "bytes and no tensors": (raw_safetensors({}, X), "the tensors end at", None),
    "cut data": (raw_safetensors({"x": entry()}, X[:-1]), "within", "x.data_offsets"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(case, tmp_path):
    content, message, field = BAD[case]
    path = write(tmp_path / "bad.safetensors", content)
    with pytest.raises(FormatError) as caught:
        SafetensorsFile(path)
    assert message in caught.value.message
    assert caught.value.path == str(path)
    assert caught.value.field == field
    if field is not None and "." in field:
        assert caught.value.offset == 8 or message in ("overlaps", "hole")


@pytest.mark.thorough
def test_more_tensors_than_any_model_has(tmp_path):
    text = b'"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    header = b"{" + b",".join(text % number for number in range(MAX_TENSORS + 1)) + b"}"
    with pytest.raises(FormatError, match=f"at most {MAX_TENSORS} tensors"):
        SafetensorsFile(write(tmp_path / "x", raw_safetensors(header)))
    with pytest.raises(FormatError, match=f"more than {MAX_VALUES} values"):
        SafetensorsFile(write(tmp_path / "x", raw_safetensors(b'{"a":[' + b"[]," * MAX_VALUES + b"[]]}")))


def test_truncated_at_every_byte(tmp_path):
    tensors = {
        "a": random_array(DTYPES["F32"], (2, 3)),
        "b\u2581": random_array(DTYPES["BF16"], ()),
        "none": np.ones(0),
    }
    save_file(tensors, tmp_path / "whole", {"key": "välue"})
    path = tmp_path / "whole"
    SafetensorsFile(path).close()
    for _ in cut_to(path, range(path.stat().st_size)):
        with pytest.raises(FormatError, match=r"the file is cut off \(.*\): download it again") as caught:
            SafetensorsFile(path)
        assert caught.value.path == str(path)


def test_every_byte_of_the_header_changed(tmp_path):
    """Whatever the change: a file that reads, or a FormatError."""
    content = safetensors_bytes({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float16)})
    refused, last = 0, 8 + int.from_bytes(content[:8], "little")
    for _ in with_one_byte_changed(write(tmp_path / "x", content), range(last)):
        try:
            with SafetensorsFile(tmp_path / "x") as file:
                for name, info in file.tensors.items():
                    assert file.read(name).nbytes == info.nbytes <= len(content)
        except FormatError:
            refused += 1
    assert refused > 3 * last


def test_offsets_in_errors_are_absolute(tmp_path):
    header = {"x": entry(), "y": entry(begin=9, end=17)}
    path = write(tmp_path / "x.safetensors", raw_safetensors(header, bytes(17)))
    with pytest.raises(FormatError) as caught:
        SafetensorsFile(path)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    assert caught.value.offset == 8 + length + 9
    with pytest.raises(FormatError, match="not valid JSON") as caught:
        SafetensorsFile(write(path, raw_safetensors(b'{"x": y}')))
    assert caught.value.offset == 8 + 6


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(FormatError, match="no such file"):
        SafetensorsFile(tmp_path / "none.safetensors")
    with pytest.raises(FormatError, match="directory"):
        SafetensorsFile(tmp_path)


def test_a_file_that_shrinks_while_it_is_open(tmp_path):
    """No SIGBUS, no short array: the reader does not map the file, and counts what it reads."""
    array = np.arange(5000, dtype=np.float32)
    path = write(tmp_path / "x.safetensors", safetensors_bytes({"x": array}))
    with SafetensorsFile(path) as file:
        np.testing.assert_array_equal(file.read("x"), array)
        os.truncate(path, 1000)
        with pytest.raises(FormatError, match="the file ends after") as caught:
            file.read("x")
        assert caught.value.field == "x"
        assert caught.value.offset == file.tensors["x"].offset


def test_reading_ahead_asks_for_every_byte_once_and_never_far_ahead(tmp_path, monkeypatch):
    monkeypatch.setattr(binary_file, "_READ_BYTES", 700)
    monkeypatch.setattr(binary_file, "_ADVISED_BYTES", 1000)
    monkeypatch.setattr(binary_file, "_AHEAD_BYTES", 2500)
    asked: list[tuple[int, int]] = []

    def advise(descriptor, start, count, advice):
        asked.append((start, count))
        assert start + count - file._file.tell() <= 2500 + 1000  # the file is read in its order here

    monkeypatch.setattr(os, "posix_fadvise", advise, raising=False)
    monkeypatch.setattr(os, "POSIX_FADV_WILLNEED", 3, raising=False)
    arrays = {f"t{i}": np.arange(n, dtype=np.float32) for i, n in enumerate((2000, 1, 0, 5000))}
    with SafetensorsFile(write(tmp_path / "x.safetensors", safetensors_bytes(arrays))) as file:
        spans = sorted((info.offset, info.nbytes) for info in file.tensors.values())
        file.read_ahead(spans)
        for name in sorted(arrays, key=lambda name: file.tensors[name].offset):
            np.testing.assert_array_equal(file.read(name), arrays[name])
        assert sum(count for _, count in asked) == sum(size for _, size in spans)
        assert all(before[0] + before[1] == after[0] for before, after in pairwise(asked))
        file.read_ahead(spans)
        os.truncate(file.path, 1000)
        with pytest.raises(FormatError, match="the file ends after"):
            file.read("t3")


@pytest.mark.parametrize("short", [False, True])
def test_a_large_tensor_is_read_by_several_threads(short, tmp_path, monkeypatch):
    """Also where a call gives fewer bytes than it was asked for, and where the file has become shorter."""
    monkeypatch.setattr(binary_file, "_LARGE_BYTES", 5000)
    monkeypatch.setattr(binary_file, "_MAX_PART", 700)
    plain, calls = os.preadv, []

    def preadv(descriptor, buffers, offset):
        calls.append(offset)
        return plain(descriptor, [buffers[0][:400]] if short else buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    array = np.arange(5000, dtype=np.float32)
    with SafetensorsFile(write(tmp_path / "x.safetensors", safetensors_bytes({"x": array}))) as file:
        file.read_ahead([(info.offset, info.nbytes) for info in file.tensors.values()])
        np.testing.assert_array_equal(file.read("x"), array)
        assert sorted(calls) == [file.tensors["x"].offset + start for start in range(0, array.nbytes, 700)]
        os.truncate(file.path, 9000)
        with pytest.raises(FormatError, match="the file ends after"):
            file.read("x")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_the_first_value_that_is_not_finite(dtype):
    """Every pattern of sign, exponent and some mantissas."""
    width = 8 * np.dtype(dtype).itemsize
    bits = np.arange(1 << 16, dtype=np.uint64) << np.uint64(width - 16)
    bits = np.concatenate([bits, bits | np.uint64(1), np.roll(bits, 1) - np.uint64(1)]).astype(f"u{width // 8}")
    values = bits.view(dtype)
    with np.errstate(invalid="ignore"):
        finite = np.isfinite(values.astype(np.float64))
    assert binary_file.find_not_finite(values[finite]) is None
    assert binary_file.find_not_finite(values[:0]) is None
    assert "at index [0]" in binary_file.find_not_finite(values[~finite])
    good = values[finite][:50]
    for value in values[~finite][:: 97 if width > 16 else 11]:
        message = binary_file.find_not_finite(np.concatenate([good, [value], good[:3]]).astype(dtype))
        assert message == f"holds {float(value)} at index [50]; expected finite numbers"


def test_no_reading_ahead_where_the_system_takes_no_advice(tmp_path, monkeypatch):
    array = np.arange(5000, dtype=np.float32)
    path = write(tmp_path / "x.safetensors", safetensors_bytes({"x": array}))

    def refuse(*_):
        raise OSError("no advice")

    monkeypatch.setattr(os, "posix_fadvise", refuse, raising=False)
    for _ in range(2):
        with SafetensorsFile(path) as file:
            file.read_ahead([(0, file.size)])
            np.testing.assert_array_equal(file.read("x"), array)
        monkeypatch.delattr(os, "posix_fadvise", raising=False)


def test_a_bad_file_is_closed_again(tmp_path):
    path = write(tmp_path / "x.safetensors", b"")
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    for _ in range(5):
        with pytest.raises(FormatError):
            SafetensorsFile(path)
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before


# -- the streaming writer ----------------------------------------------------------------------------------------------


def test_the_streaming_writer_writes_the_package_s_bytes(tmp_path):
    names = ("F32", "U8", "BF16", "I64", "F16", "BOOL")
    arrays = {f"t{i}.{name}": random_array(DTYPES[name], (i, 3)) for i, name in enumerate(names)}
    arrays["größe"] = random_array(DTYPES["F32"], ())
    save_file(arrays, tmp_path / "package")
    layout = {name: (dtype_name(array.dtype), array.shape) for name, array in arrays.items()}
    for order in (list(arrays), sorted(arrays, reverse=True)):
        with SafetensorsWriter(tmp_path / "ours", {n: layout[n] for n in order}) as writer:
            for name in order:
                writer.write(name, arrays[name])
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "package").read_bytes()


def test_the_streaming_writer_insists_on_its_layout(tmp_path):
    layout = {"a": ("F32", (2,)), "b": ("U8", (3,))}
    with pytest.raises(ValueError, match="not written: b"), SafetensorsWriter(tmp_path / "x", layout) as writer:
        writer.write("a", np.zeros(2, np.float32))
    with SafetensorsWriter(tmp_path / "x", layout, {"format": "np"}) as writer:
        for wrong in (np.zeros(3, np.float32), np.zeros(2, np.float16)):
            with pytest.raises(ShapeError, match="F32"):
                writer.write("a", wrong)
        writer.write("a", np.arange(2, dtype=np.float32))
        writer.write("b", np.arange(3, dtype=np.uint8))
    with SafetensorsFile(tmp_path / "x") as file:
        assert file.metadata == {"format": "np"}
        np.testing.assert_array_equal(file.read("b"), [0, 1, 2])


@pytest.mark.parametrize("size", [1, 4, 5, 23, 24, 25])
def test_a_tensor_in_blocks(size, tmp_path):
    """Blocks of `size` bytes, the last one shorter, are the tensor and nothing of its neighbours."""
    save_file(
        {name: np.full(12, number, np.uint16) for number, name in enumerate("abc", 1)}, tmp_path / "m.safetensors"
    )
    with SafetensorsFile(tmp_path / "m.safetensors") as file:
        blocks = [bytes(block) for block in file.blocks("b", size)]
    assert b"".join(blocks) == b"\2\0" * 12
    assert {len(block) for block in blocks[:-1]} <= {size}
    assert len(blocks) == -(-24 // size)


def test_where_the_data_begin(tmp_path):
    for alignment in (8, 64, 4096):
        write_arrays(tmp_path / "x", {"a": np.arange(3, dtype=np.uint8)}, {}, alignment=alignment)
        with SafetensorsFile(tmp_path / "x") as file:
            assert (file.tensors["a"].offset % alignment, file.read("a").tolist()) == (0, [0, 1, 2])


def test_the_hash_of_a_content():
    """It is stored in native files: a change of it would make them unreadable."""
    tensors = {"t": ("F32", (2, 3), "00"), "s": ("U8", (), "ff")}
    digest = content_hash({"b": "2", "a": "ä", "content_hash": "x"}, tensors)
    assert digest == "sha256:00b1024c5aa23d12b9cba52f372c27b081dff9e06331dcd5598fc64bdf402e52"
    assert digest == content_hash({"a": "ä", "b": "2"}, dict(reversed(tensors.items())))


def test_the_disk_is_asked_for_the_whole_file(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("bitnet_ref.formats.safetensors.check_space", lambda path, nbytes: asked.append(nbytes))
    with SafetensorsWriter(tmp_path / "x", {"a": ("F32", (3, 5)), "b": ("U8", (7,))}) as writer:
        writer.write("a", np.zeros((3, 5), dtype=np.float32))
        writer.write("b", np.zeros(7, dtype=np.uint8))
    assert asked == [(tmp_path / "x").stat().st_size]
