"""The examples in public docstrings run and give what they show."""

import doctest
import importlib
import pkgutil

import pytest

import bitnet_ref

MODULES = [
    info.name
    for info in pkgutil.walk_packages(bitnet_ref.__path__, "bitnet_ref.")
    if not info.name.endswith(("__main__", "._cpu"))
    and ".recorders." not in info.name  # scripts for another interpreter, which may have no bitnet_ref
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    if name.startswith("bitnet_ref.serving.http"):
        pytest.importorskip("starlette", reason="starlette is not installed")
    if name == "bitnet_ref.evaluation.harness":
        pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    modules = [importlib.import_module(f"bitnet_ref.{name}") for name in ("reference.quantization", "reference.cache")]
    assert all(any(test.examples for test in finder.find(module)) for module in modules)
