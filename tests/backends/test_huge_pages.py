"""Memory for weights: arrays that do not overlap, aligned, in private maps that ask for huge pages, given back."""

import gc
import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from bitnet_ref import errors
from bitnet_ref.backends.cpu.backend import CythonBackend
from bitnet_ref.backends.cpu.memory import ALIGNMENT, HUGE_PAGE, MAP_BYTES, HugePages
from bitnet_ref.backends.cpu.memory import MIN_MAPPED_BYTES as MIN_BYTES
from bitnet_ref.reference.weights import TernaryWeight

linux = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no MADV_HUGEPAGE")


def flags_of(address):
    """The kernel's flags of the map that holds an address, as /proc/self/smaps writes them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no map holds {address:#x}")


def maps():
    """How many maps of the size of ours this process has, at least; neighbours may be shown as one."""
    sizes = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) rw-p", Path("/proc/self/maps").read_text(), re.M)
    return sum((int(end, 16) - int(start, 16)) // MAP_BYTES for start, end in sizes)


def test_arrays_do_not_overlap_and_keep_their_bytes():
    pages = HugePages()
    shapes = [
        (3,),
        (1, MIN_BYTES),
        (7, 9999),
        (1000, 256),
        (11, MIN_BYTES + 1),
        (2, MAP_BYTES // 2 + 5),
        (64, 4096),
    ]
    arrays = [pages.empty(shape) for shape in shapes]
    for value, array in enumerate(arrays):
        array.fill(value)
    for value, (shape, array) in enumerate(zip(shapes, arrays, strict=True)):
        assert array.shape == shape
        assert (array == value).all()


@linux
def test_large_arrays_are_aligned_and_lie_where_huge_pages_were_asked_for():
    pages = HugePages()
    arrays = [
        pages.empty((3, MIN_BYTES)),
        pages.empty((1, 2 * MIN_BYTES + 1)),
        pages.empty((2, MAP_BYTES)),
    ]
    for array in arrays:
        assert array.ctypes.data % ALIGNMENT == 0
        flags = flags_of(array.ctypes.data)
        assert "hg" in flags
        assert "sh" not in flags  # shared memory gets none
    assert arrays[0].ctypes.data % HUGE_PAGE == 0
    assert arrays[2].ctypes.data % HUGE_PAGE == 0


@linux
def test_a_map_is_given_back_with_its_last_array():
    gc.collect()
    before = maps()
    for _ in range(20):
        pages = HugePages()
        arrays = [pages.empty((1, MAP_BYTES)) for _ in range(3)]
    del pages, arrays
    gc.collect()
    assert maps() <= before + 1


@linux
def test_without_address_space_an_ordinary_array_is_given(monkeypatch):
    monkeypatch.setattr("bitnet_ref.backends.cpu.memory.HUGE_PAGE", 1 << 62)  # no map is that large
    array = HugePages().empty((4, MIN_BYTES))
    assert array.shape == (4, MIN_BYTES)


@linux
def test_prepared_panels_lie_there():
    try:
        backend = CythonBackend(threads=2)
    except errors.BackendUnavailable as reason:
        pytest.skip(str(reason))
    w_t = np.random.default_rng(0).integers(-1, 2, (700, 512), dtype=np.int8)
    prepared = backend.prepare(TernaryWeight.from_ternary(w_t, 0.5))
    assert "hg" in flags_of(prepared.panels.ctypes.data)
    assert np.array_equal(prepared.ternary(), w_t)
