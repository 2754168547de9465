"""Text files of a corpus, compressed or not, and small ones that would take all memory."""

import lzma
import tracemalloc

import pytest

from bitnet_ref.errors import FormatError
from bitnet_ref.training import data

TEXT = "The fox went home. Il était une fois. " * 300


@pytest.mark.parametrize("form", [lzma.FORMAT_XZ, lzma.FORMAT_ALONE])
def test_compressed_text_is_that_text(tmp_path, form):
    file = tmp_path / "a.txt.xz"
    file.write_bytes(lzma.compress(TEXT.encode(), format=form))
    assert data.read_text(file) == TEXT


def test_the_line_ends_of_windows_are_line_ends(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfOne.\r\n\r\n\r\nTwo\rlines.\r\n")
    assert data.read_text(tmp_path / "a.txt") == "One.\n\n\nTwo\rlines.\n"


def test_several_streams_with_padding_are_one_text(tmp_path):
    file = tmp_path / "a.txt.xz"
    file.write_bytes(lzma.compress(b"one ") + b"\0" * 8 + lzma.compress(b"two ", preset=9) + lzma.compress(b""))
    assert data.read_text(file) == "one two "


@pytest.mark.thorough
def test_a_small_file_of_a_huge_text_is_refused_before_it_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "XZ_FREE_BYTES", 1 << 20)
    for streams in (1, 8):
        file = tmp_path / f"{streams}.txt.xz"
        file.write_bytes(lzma.compress(b"a" * ((24 << 20) // streams)) * streams)
        tracemalloc.start()
        try:
            with pytest.raises(FormatError, match="decompress it first") as caught:
                data.read_text(file)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert caught.value.path == str(file)
        assert peak < 16 << 20  # a dictionary of 8 MiB among it


def test_a_text_of_the_most_bytes_is_read(tmp_path, monkeypatch):
    file, text = tmp_path / "a.txt.xz", "a" * 100_000
    file.write_bytes(lzma.compress(text.encode()))
    free = len(text) - 100 * file.stat().st_size
    monkeypatch.setattr(data, "XZ_FREE_BYTES", free)
    assert data.read_text(file) == text
    monkeypatch.setattr(data, "XZ_FREE_BYTES", free - 1)
    with pytest.raises(FormatError, match="has more than 99999 bytes"):
        data.read_text(file)


def test_a_dictionary_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "XZ_MEMORY_BYTES", 1 << 20)
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"text", preset=6))  # 8 MiB
    with pytest.raises(FormatError, match="cannot be read"):
        data.read_text(tmp_path / "a.txt.xz")


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_torn_file_is_refused(tmp_path, cut):
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(TEXT.encode())[:-cut])
    with pytest.raises(FormatError, match="cannot be read"):
        data.read_text(tmp_path / "a.txt.xz")
