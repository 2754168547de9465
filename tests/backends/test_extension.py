"""Which method multiplies: what there is, why not, the argument, the environment, and weights of another layout."""

import numpy as np
import pytest
from helpers import prepared, random_ternary, rng, run_python

from bitnet_ref.backends import Backend, choose_backend
from bitnet_ref.backends.cpu import extension
from bitnet_ref.backends.cpu.backend import CythonBackend
from bitnet_ref.backends.cpu.extension import choose_simd, layouts, simd_variants, why_unavailable
from bitnet_ref.errors import BackendUnavailable
from bitnet_ref.reference.weights import TernaryWeight

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason="the extension is not built")
LAYOUTS = ("2-bit", "table", "1.6-bit")


@pytest.fixture(autouse=True)
def _no_wish(monkeypatch):
    monkeypatch.delenv("BITNET_REF_WEIGHTS", raising=False)
    monkeypatch.delenv("BITNET_REF_SIMD", raising=False)


def test_the_scalar_set_has_every_method_and_takes_2_bits():
    found = {method.name: method for method in extension.describe_methods("scalar")}
    assert tuple(found) == tuple(layouts()) == LAYOUTS
    assert [method.chosen for method in found.values()] == [True, False, False]
    assert all(method.reason is None and "scalar" in method.kernel_sets for method in found.values())
    assert found["1.6-bit"].bits_per_weight == 1.6


def test_a_set_without_a_kernel_says_who_has_one():
    if "avx2" not in layouts()["2-bit"][1]:
        pytest.skip("an x86-64 build")
    with pytest.raises(BackendUnavailable, match=r"avx2.*no kernel for 1\.6-bit.*scalar, avx512, amx"):
        extension.choose_layout("1.6", "avx2")


@pytest.mark.parametrize(
    ("wish", "layout"), [("1.6", "1.6-bit"), ("1.6-bit", "1.6-bit"), ("2", "2-bit"), ("table", "table")]
)
def test_the_environment_chooses_and_the_argument_has_the_last_word(monkeypatch, wish, layout):
    monkeypatch.setenv("BITNET_REF_WEIGHTS", wish)
    assert CythonBackend(threads=1, simd="scalar").layout == layout
    assert [m.why for m in extension.describe_methods("scalar") if m.chosen] == ["BITNET_REF_WEIGHTS asks for it"]
    assert CythonBackend(threads=1, simd="scalar", layout="2-bit").layout == "2-bit"


def test_an_unknown_layout_is_refused(monkeypatch):
    monkeypatch.setenv("BITNET_REF_WEIGHTS", "3")
    with pytest.raises(BackendUnavailable, match=r"'3'; there are: 2-bit, table, 1\.6-bit"):
        CythonBackend(threads=1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("n", "k"), [(64, 16), (65, 20), (3, 41), (130, 100)])
def test_prepared_weights_come_back_and_are_as_large_as_said(layout, n, k):
    w_t = random_ternary(rng(n, k), n, k)
    be = CythonBackend(threads=1, simd="scalar", layout=layout)
    (w,) = prepared(be, TernaryWeight.from_ternary(w_t, 0.5))
    np.testing.assert_array_equal(w.ternary(), w_t)
    assert w.nbytes == -(-n // 64) * -(-k // (20 if layout == "1.6-bit" else 16)) * 256


def test_weights_of_another_layout_are_refused():
    one, other = (CythonBackend(threads=1, simd="scalar", layout=layout) for layout in ("2-bit", "table"))
    (w,) = prepared(one, TernaryWeight.from_ternary(random_ternary(rng(1), 8, 8), 1.0))
    for call in (lambda: other.ternary_matmul(np.ones((1, 8), np.int8), w), lambda: other.linear(np.ones((1, 8)), w)):
        with pytest.raises(BackendUnavailable, match="prepared as 2-bit panels on a backend of table ones"):
            call()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 16, 17, 40])
def test_linears_of_every_method_equal_the_reference(layout, tokens):
    """The fused call, more tokens than the tables of one call hold, and a bad token far behind."""
    be, reference = CythonBackend(threads=2, layout=layout, simd="scalar"), Backend(threads=1)
    ws = [TernaryWeight.from_ternary(random_ternary(rng(n), n, 70), 0.25) for n in (5, 64, 70)]
    x = rng(tokens).standard_normal((tokens, 70), dtype=np.float32)
    for got, expected in zip(be.linears(x, prepared(be, *ws)), reference.linears(x, ws), strict=True):
        np.testing.assert_array_equal(got, expected)
    x[-1, 3] = np.nan
    with pytest.raises(Exception, match=f"token {tokens - 1} holds NaN"):
        be.linears(x, prepared(be, *ws))


@pytest.mark.thorough
@pytest.mark.parametrize("wish", ["1.6", "table"])
def test_a_model_writes_the_same_text_by_every_method(wish):
    code = (
        "import json, os; os.environ['BITNET_REF_SIMD'] = 'scalar'; {wish}import bitnet_ref\n"
        "model = bitnet_ref.load(backend='cython', threads=1)\n"
        "print(json.dumps(model.generate('Once', max_tokens=3, temperature=0.0).token_ids))"
    )
    asked = f"os.environ['BITNET_REF_WEIGHTS'] = '{wish}'; "
    assert run_python(code.format(wish=asked)) == run_python(code.format(wish=""))


def test_a_set_with_wrong_sums_is_not_taken(monkeypatch):
    """As a kernel would be that goes wrong only on a processor that nobody has tried it on."""
    real = extension._cpu
    bad = [name for name, lacks in simd_variants().items() if lacks is None][-1]
    number = list(simd_variants()).index(bad)

    class Wrong:
        def __getattr__(self, name):
            return getattr(real, name)

        def ternary_matmul(self, x_q, x_sum, panels, acc, threads, kernels, method):
            real.ternary_matmul(x_q, x_sum, panels, acc, threads, kernels, method)
            if kernels == number and len(acc) > 1:
                acc[-1, -1] += 1

    monkeypatch.setattr(extension, "_cpu", Wrong())
    simd_variants.cache_clear()
    try:
        assert "its sums differ from those of the scalar kernels" in simd_variants()[bad]
        assert choose_simd() != bad
        with pytest.raises(BackendUnavailable, match="cannot run here"):
            choose_simd(bad)
    finally:
        simd_variants.cache_clear()


def test_the_layouts_of_a_kernel_set():
    assert extension.layouts_for("scalar") == list(LAYOUTS)
    for name in simd_variants():
        assert extension.layouts_for(name)[0] == "2-bit"


def test_without_the_extension_the_reason_is_said(monkeypatch, tmp_path):
    """A wheel without it, or a compiler that was missing: no kernel set, and an error that says what to install."""
    monkeypatch.setattr(extension, "_cpu", None)
    monkeypatch.setattr(extension, "_import_error", "was not built", raising=False)
    for cached in (simd_variants, layouts):
        cached.cache_clear()
    try:
        assert simd_variants() == layouts() == {}
        assert extension.describe_methods() == []
        (tmp_path / "clone").mkdir()
        (tmp_path / "clone" / "setup.py").touch()
        for folder, remedy in (("clone", " in these sources; start Python in"), ("site-packages", "; install a C")):
            monkeypatch.setattr(extension, "__file__", str(tmp_path / folder / "bitnet_ref/backends/cpu/extension.py"))
            with pytest.raises(BackendUnavailable, match=f"the compiled extension was not built{remedy}"):
                choose_simd()
        with pytest.raises(BackendUnavailable, match="no kernel sets"):
            choose_simd("scalar")
        with pytest.raises(BackendUnavailable, match="backend 'cython' cannot run here: the compiled extension"):
            choose_backend("cython")
        assert choose_backend("auto", dtype="float64").name == "numpy"
    finally:
        for cached in (simd_variants, layouts):
            cached.cache_clear()
