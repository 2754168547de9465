"""Fixtures of the whole suite: the backends, and a Hypothesis profile that gives every run the same examples."""

import os

# Before NumPy comes, and for the processes that tests start: the suite's products are small, and threads of the BLAS
# would mostly wait for each other (a quarter of its time). tests/contract has them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Some hundred tests start a Python: each would compile the whole package anew if none might keep what it compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import gc
import signal
import sys
import weakref
import zlib
from collections import Counter

import pytest
from engine_checks import check
from helpers import model
from hypothesis import HealthCheck, settings

import bitnet_ref
from bitnet_ref.backends import Backend, choose_backend, cuda
from bitnet_ref.backends.cpu.backend import CythonBackend
from bitnet_ref.backends.cpu.extension import DEFAULT_LAYOUT, layouts, simd_variants
from bitnet_ref.backends.loaded import LoadedModel

# A shell without job control starts what runs behind it without SIGINT and SIGQUIT, and nohup without SIGHUP. Tests
# send all of them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for name in ("SIGHUP", "SIGQUIT"):
    if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is signal.SIG_IGN:
        signal.signal(getattr(signal, name), signal.SIG_DFL)

settings.register_profile(
    "suite",
    derandomize=True,
    database=None,
    deadline=None,  # a deadline is a timing assert
    max_examples=50,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the fixtures used below hold no state
)
settings.load_profile("suite")

# The CuPy backend runs on a GPU where there is one; elsewhere its kernels are emulated, if there is a C++ compiler.
# With neither its tests are skipped, with the reason. BITNET_REF_CUDA, if it is set, decides.
if "BITNET_REF_CUDA" not in os.environ and cuda.why_unavailable() is not None:
    os.environ["BITNET_REF_CUDA"] = "emulated"
    if cuda.why_unavailable() is not None:
        del os.environ["BITNET_REF_CUDA"]


def pytest_report_header():
    where = "emulated" if cuda.emulation_wanted() else "a GPU"
    return f"cupy backend: {cuda.why_unavailable() or where}"


sys.dont_write_bytecode = False  # pytest's rewriting of the suite's asserts is half of the time of collecting them

os.environ["COLUMNS"] = "100"  # the width of tables, whatever runs the tests
REQUIRED = {name for name in os.environ.get("BITNET_REF_REQUIRE_BACKENDS", "").split(",") if name}


def check_available(name):
    reason = bitnet_ref.available_backends().get(name, "no backend has this name")
    if reason is not None and name in REQUIRED:
        pytest.fail(f"BITNET_REF_REQUIRE_BACKENDS names {name}, which cannot run here: {reason}")
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(params=sorted(set(bitnet_ref.available_backends()) | REQUIRED))
def backend_name(request):
    """Every backend in turn. One that cannot run here is skipped with its reason, or fails where it is required."""
    check_available(request.param)
    return request.param


KERNEL_SETS = [f"cython:{name}" for name in simd_variants()]
KERNEL_SETS += [  # of each other layout the scalar kernel and the other one there is, which further sets share
    f"cython:{name}:{layout}"
    for layout, (_, sets) in layouts().items()
    for name in sets[:2]
    if layout != DEFAULT_LAYOUT
]


@pytest.fixture(params=[*sorted(set(bitnet_ref.available_backends()) | REQUIRED), *KERNEL_SETS])
def be(request) -> Backend:
    """Every backend in turn with two threads, and the cython one with each instruction set and layout of weights."""
    name, kernel_set, layout, *_ = [*request.param.split(":"), None, None]
    check_available(name)
    if not kernel_set:
        return choose_backend(name, threads=2)
    if (lacks := simd_variants()[kernel_set]) is not None:
        pytest.skip(f"{kernel_set} cannot run here: {lacks}")
    return CythonBackend(threads=2, simd=kernel_set, layout=layout or DEFAULT_LAYOUT)


EMULATED = os.environ.get("BITNET_REF_CUDA") == "emulated"
FOLDERS_OF_BACKENDS = ("contract", "backends", "kernels")


def is_of_cupy(item):
    return hasattr(item, "callspec") and "cupy" in item.callspec.id.split("-")


def pytest_addoption(parser):
    parser.addoption("--part", metavar="I/N", default="0/1", help="one of N parts of the chosen tests: 0/N to N-1/N")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Without a GPU the CUDA backend's own tests (`card`) are `emulated`, and so are the cupy cases of the others in
    folders of the backends and in files marked `quick_emulated`; the rest, and those `long_emulated`, are `slow`."""
    for item in items if EMULATED else ():
        marks = {mark.name for mark in item.iter_markers()}
        quick = item.path.parent.name in FOLDERS_OF_BACKENDS or "quick_emulated" in marks
        if is_of_cupy(item) and ("long_emulated" in marks or not quick):
            item.add_marker(pytest.mark.slow)
        elif ("card" in marks or is_of_cupy(item)) and "slow" not in marks:
            item.add_marker(pytest.mark.emulated)
    leave_samples(items)
    part, parts = map(int, config.getoption("part").split("/"))
    places = [zlib.crc32(item.nodeid.encode()) % parts for item in items]
    config.hook.pytest_deselected(items=[item for item, place in zip(items, places, strict=True) if place != part])
    items[:] = [item for item, place in zip(items, places, strict=True) if place == part]


def leave_samples(items):
    """Of the cases of a test that is marked `sample(N)` the suite runs every Nth; the others become `thorough`.

    The Nth moves on by one with each N cases: where parameters are multiplied, each value of each has its turn.
    """
    counts = Counter()
    for item in items:
        mark = item.get_closest_marker("sample")
        if mark is None or any(item.get_closest_marker(name) for name in ("slow", "emulated", "thorough")):
            continue
        (every,) = mark.args
        test = item.nodeid.partition("[")[0]
        group, place = divmod(counts[test], every)
        counts[test] += 1
        if place != group % every:
            item.add_marker(pytest.mark.thorough)


def pytest_collection_finish():
    """The thousands of tests that were collected stay to the end: no garbage collection need look at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def a_store_of_its_own(tmp_path_factory):
    """No test sees, or changes, the models that the user has pulled."""
    before = os.environ.get("BITNET_REF_HOME")
    os.environ["BITNET_REF_HOME"] = str(tmp_path_factory.mktemp("store"))
    os.environ["HF_HUB_CACHE"] = str(tmp_path_factory.mktemp("hub"))
    yield
    del os.environ["BITNET_REF_HOME"]
    if before is not None:
        os.environ["BITNET_REF_HOME"] = before


@pytest.fixture(scope="session")
def reference() -> Backend:
    """The NumPy backend, which the others are measured against."""
    return Backend("float32", threads=1)


@pytest.fixture(scope="session")
def in_double() -> Backend:
    """The NumPy backend in float64, the yardstick of everybody's rounding error."""
    return Backend("float64", threads=1)


@pytest.fixture
def story():
    return model("storyteller", "auto")


@pytest.fixture
def engine(story):
    with story.engine(max_batch=4, max_batch_tokens=32, page_size=4) as engine:
        yield engine
        engine.close()
        check(engine)


@pytest.fixture
def caches(monkeypatch):
    """Weak references to every cache that models make from here on."""
    caches = []
    new_cache = LoadedModel.new_cache

    def watched(self, *args, **kwargs):
        cache = new_cache(self, *args, **kwargs)
        caches.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(LoadedModel, "new_cache", watched)
    return caches
