"""Memory that is used again: never while an array of it lives, and not without end."""

import gc
import threading

import numpy as np
import pytest

from bitnet_ref.backends.cpu import memory
from bitnet_ref.backends.cpu.memory import Buffers

BIG = 512, 1024  # 2 MB


def address(array) -> int:
    return array.__array_interface__["data"][0]


def test_what_was_given_up_is_given_out_again():
    results = Buffers()
    first = results.empty(BIG)
    where = address(first)
    del first
    assert address(results.empty((1024, 500))) == where  # another shape, a little smaller
    assert results.empty(BIG).shape == BIG
    assert results.empty(BIG).dtype == np.float32


@pytest.mark.parametrize(
    "part", [lambda x: x, lambda x: x[3:5], lambda x: x.reshape(64, -1).T, memoryview, lambda x: x.view(np.int32)[::7]]
)
def test_what_is_held_in_any_form_is_not(part):
    results = Buffers()
    held = part(results.empty(BIG))
    others = [results.empty(BIG) for _ in range(3)]
    assert not any(np.shares_memory(np.asarray(held), other) for other in others)
    assert len({address(other) for other in others}) == 3


def test_a_small_need_does_not_take_a_large_piece():
    results = Buffers()
    large = results.empty((8 * BIG[0], BIG[1]))
    where, size = address(large), large.nbytes
    del large
    assert not where <= address(results.empty(BIG)) < where + size


def test_each_thread_has_its_own():
    results = Buffers()
    mine = address(results.empty(BIG))
    theirs = []

    def take() -> None:
        held = results.empty(BIG)
        theirs.append(address(held))

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
        thread.join()
    assert mine not in theirs
    assert address(results.empty(BIG)) == mine


def test_no_more_is_kept_than_the_limit(monkeypatch):
    monkeypatch.setattr(memory, "MAX_FREE_BYTES", 5 << 20)
    results = Buffers()
    held = [results.empty(BIG) for _ in range(9)]
    assert len(results.pool.buffers) == 9  # in use: none of them can go
    del held
    gc.collect()
    results.empty((3 * BIG[0], BIG[1]))
    buffers_left = results.pool.buffers
    assert sum(block.size for block in buffers_left[:-1]) <= 5 << 20
