"""A backend is `Backend` with some methods replaced: the same names, parameters and defaults, and fused = composed."""

import copy
import inspect
from functools import partial

import numpy as np
import pytest
from helpers import GOLDEN, call, golden, model, prepared, random_ternary, rng

import bitnet_ref
from bitnet_ref.backends import Backend, choose_backend
from bitnet_ref.errors import BackendUnavailable, BitNetRefError
from bitnet_ref.families.linear_norms import NormedLinear
from bitnet_ref.reference.weights import DenseWeight, Norm, TernaryWeight


def public_methods(cls):
    return {name: f for name, f in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")}


def test_same_methods_parameters_and_defaults(be):
    base, mine = public_methods(Backend), public_methods(type(be))
    assert set(mine) == set(base)
    for name in base:
        a, b = inspect.signature(base[name]).parameters, inspect.signature(mine[name]).parameters
        (_, *plain), (_, *own) = a.values(), b.values()  # without `self`
        shape = [(p.name, p.kind, p.default) for p in plain]
        assert [(p.name, p.kind, p.default) for p in own] == shape, name
    mine = list(inspect.signature(type(be)).parameters)
    assert mine[:2] == list(inspect.signature(Backend).parameters)[:2]
    assert set(mine) >= set(inspect.signature(Backend).parameters)  # a backend may take more of its own


def test_every_public_method_has_a_docstring(be):
    for name, method in public_methods(type(be)).items():
        assert inspect.getdoc(method), name


def test_name_and_dtype(backend_name):
    be = choose_backend(backend_name, threads=2)
    assert be.name == backend_name
    assert be.dtype == np.float32
    assert be.threads == 2


def test_a_dtype_that_no_backend_has(backend_name):
    with pytest.raises(BitNetRefError, match="int8"):
        choose_backend(backend_name, dtype="int8")


def test_unavailable_backends_say_why():
    for name, reason in bitnet_ref.available_backends().items():
        if reason is not None:
            assert len(reason) > 20
            with pytest.raises(BackendUnavailable, match=name):
                choose_backend(name)


def test_an_unknown_backend_names_the_known_ones():
    with pytest.raises(BackendUnavailable, match=r"'tpu'.*numpy"):
        choose_backend("tpu")


def test_auto_gives_float64_to_numpy():
    assert choose_backend("auto", dtype="float64").name == "numpy"
    assert choose_backend("auto").dtype == np.float32


def test_fused_linears_equal_the_composition_of_primitives(be):
    """`Backend.linears`, called on this backend, is the composition of this backend's own primitives."""
    generator = rng(8)
    x = generator.standard_normal((6, 40)).astype(np.float32)
    planes = [TernaryWeight.from_ternary(random_ternary(generator, n, 40), 0.1) for n in (24, 8, 9)]
    bias = generator.standard_normal(9).astype(np.float32)
    norm = Norm(generator.standard_normal(40).astype(np.float32), 1e-6)
    ws = (
        planes[0],
        NormedLinear(norm, TernaryWeight(planes[1].packed, 40, np.float32(0.2))),
        TernaryWeight(planes[2].packed, 40, np.float32(0.2), bias),
        DenseWeight(generator.standard_normal((11, 40)).astype(np.float32), bias[[0] * 11]),
    )
    ws = prepared(be, *ws)
    composed = copy.copy(be)
    composed.linears = partial(Backend.linears, composed)
    for fused, expected in zip(call(be, "linears", x, ws), call(composed, "linears", x, ws), strict=True):
        np.testing.assert_array_equal(fused, expected)
    for w in ws:
        np.testing.assert_array_equal(call(be, "linear", x, w), call(composed, "linears", x, (w,))[0])


@pytest.mark.parametrize("case", ["bitnet-packed-offline", "llama-packed-rmsnorm", "mistral-dense-window8"])
def test_recording_changes_nothing(case, backend_name):
    """The recorder runs every fused operation as its composition, and the logits are the same to the bit."""
    m = model(GOLDEN / case, backend_name)
    logits, _ = m.run_with_cache(golden(case)["tokens"], names_filter=[])
    np.testing.assert_array_equal(logits, m.logits(golden(case)["tokens"]))
