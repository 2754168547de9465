"""bitnet_ref.threads: the count comes from the argument, two variables or the machine, and nothing else passes."""

import os

import pytest

from bitnet_ref.backends import choose_backend
from bitnet_ref.errors import BackendError
from bitnet_ref.threads import MOST_THREADS, available_cpus, resolve_threads, thread_choice


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    monkeypatch.delenv("BITNET_REF_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_the_order_of_sources(monkeypatch):
    assert thread_choice() == (available_cpus(), "CPUs available to this process")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert thread_choice() == (3, "OMP_NUM_THREADS")
    monkeypatch.setenv("BITNET_REF_NUM_THREADS", "5")
    assert thread_choice() == (5, "BITNET_REF_NUM_THREADS")
    assert thread_choice(2) == (2, "argument")


def test_the_first_level_of_omp_num_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", " 4 ,2,1")
    assert resolve_threads() == 4


@pytest.mark.parametrize("text", ["", "  "])
def test_empty_variables_are_not_set(monkeypatch, text):
    monkeypatch.setenv("BITNET_REF_NUM_THREADS", text)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert resolve_threads() == 7


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "0x2", "²", "9" * 5000, str(MOST_THREADS + 1), "1e2"])
@pytest.mark.parametrize("variable", ["BITNET_REF_NUM_THREADS", "OMP_NUM_THREADS"])
def test_bad_variables_are_named(monkeypatch, variable, text):
    monkeypatch.setenv(variable, text)
    with pytest.raises(BackendError, match=f"^{variable}: expected a whole number of threads"):
        resolve_threads()


@pytest.mark.parametrize("threads", [0, -3, 1.0, "2", True, MOST_THREADS + 1, 2**31, 10**30])
def test_bad_arguments(threads, backend_name):
    with pytest.raises(BackendError, match=r"^threads: expected"):
        choose_backend(backend_name, threads=threads)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity")
def test_affinity_is_honoured():
    cpus = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cpus)})
        assert available_cpus() == 1
    finally:
        os.sched_setaffinity(0, cpus)
    assert 1 <= available_cpus() <= len(cpus)
