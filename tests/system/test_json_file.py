"""json_file: bounded reading that takes no more memory than there is to read."""

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from bitnet_ref.errors import FormatError
from bitnet_ref.system.json_file import MAX_VALUES, read_bounded, read_json_object


def test_a_small_file_takes_little_memory_whatever_the_limit(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    tracemalloc.start()
    try:
        assert read_bounded(tmp_path / "x", FormatError, 1 << 30) == b"abc"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, 300_000])
def test_the_limit(size, tmp_path):
    data = os.urandom(size)
    (tmp_path / "x").write_bytes(data)
    assert read_bounded(tmp_path / "x", FormatError, size) == data
    assert read_bounded(tmp_path / "x", FormatError, size + 1) == data
    if size:
        with pytest.raises(FormatError, match=f"more than {size - 1} bytes"):
            read_bounded(tmp_path / "x", FormatError, size - 1)


@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="needs Linux's /proc, whose files say they have 0 bytes"
)
def test_a_file_of_more_than_it_said():
    path = Path("/proc/self/maps")
    assert path.stat().st_size == 0
    data = read_bounded(path, FormatError, 1 << 24)
    assert b"python" in data
    assert data.endswith(b"\n")
    with pytest.raises(FormatError, match="more than 100 bytes"):
        read_bounded(path, FormatError, 100)


def test_a_pipe_and_a_folder(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(FormatError, match="not a regular file"):
            read_bounded(path, FormatError, 10)


@pytest.mark.thorough
@pytest.mark.parametrize("item", [b"[],", b"{},", b"0,"])
def test_many_small_values(tmp_path, item):
    """An empty list is 3 bytes of text and 64 of memory."""
    path = tmp_path / "x"
    path.write_bytes(b'{"a":[' + item * (MAX_VALUES // 4) + b"0]}")
    assert len(read_json_object(path, FormatError, 1 << 26)["a"]) == MAX_VALUES // 4 + 1
    path.write_bytes(b'{"a":[' + item * MAX_VALUES + b"0]}")
    with pytest.raises(FormatError, match=f"more than {MAX_VALUES} values"):
        read_json_object(path, FormatError, 1 << 26)


def test_truncated_at_every_byte(tmp_path):
    text = json.dumps({"a": [1, 2.5, None, True], "bé": {"c": "x\u2581"}}, ensure_ascii=False).encode()
    for length in range(len(text)):
        (tmp_path / "x").write_bytes(text[:length])
        with pytest.raises(FormatError):
            read_json_object(tmp_path / "x", FormatError, 1 << 20)
