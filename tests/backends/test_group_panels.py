"""Panels of matrices that are ternary by groups: any number of rows, divided over threads anywhere."""

import numpy as np
import pytest
from helpers import random_ternary, rng

from bitnet_ref.backends.cpu.backend import CythonBackend
from bitnet_ref.backends.cpu.extension import simd_variants, why_unavailable
from bitnet_ref.backends.cpu.weights import GroupPanelWeight
from bitnet_ref.families.groups import GroupTernaryWeight, group_matmul
from bitnet_ref.reference.quantization import pack_ternary

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


@pytest.mark.parametrize("simd", [name for name, lacks in simd_variants().items() if lacks is None])
def test_threads_and_panels_change_nothing(simd):
    """1301 and 2600 rows are several panels, the last one not full; 16 threads divide 64 rows of some of them."""
    dice, k, group = rng(7), 600, 128
    plain = [
        GroupTernaryWeight(
            pack_ternary(random_ternary(dice, n, k)), k, dice.uniform(0.01, 0.1, (n, 5)).astype(np.float16), group
        )
        for n in (1301, 40, 2600)
    ]
    x = dice.standard_normal((5, k)).astype(np.float32)
    results = []
    for threads in (1, 2, 3, 16):
        be = CythonBackend(threads=threads, simd=simd)
        ws = [be.prepare(w) for w in plain]
        results.append(be.linears(x, ws))
        for y, first in zip(results[-1], results[0], strict=True):
            np.testing.assert_array_equal(y, first)
    for w, panels, y in zip(plain, ws, results[0], strict=True):
        assert isinstance(panels, GroupPanelWeight)
        ids = np.array([w.shape[0] - 1, 0, w.shape[0] // 2])
        packed, scales = panels.packed_rows(ids)
        np.testing.assert_array_equal(packed, w.packed[ids])
        np.testing.assert_array_equal(scales, w.scales[ids])
        np.testing.assert_array_equal(y[2:3], CythonBackend(threads=1, simd="scalar").linears(x[2:3], [w])[0])
        exact = group_matmul(x.astype(np.float64), w.packed, k, w.scales, group)
        np.testing.assert_allclose(y, exact, rtol=0, atol=2**-22 * np.abs(exact).max())
