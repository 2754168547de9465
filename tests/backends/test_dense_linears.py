"""Several dense matrices of one x in one call: the bits of each alone, whatever their types, sizes and company."""

import ml_dtypes
import numpy as np
import pytest

from bitnet_ref import available_backends
from bitnet_ref.families.blocks import BLOCK_TYPES, BlockWeight
from bitnet_ref.reference.weights import DenseWeight

pytestmark = pytest.mark.skipif(available_backends()["cython"] is not None, reason="cython kernels are not built")

K, SIZES = 512, (70, 33, 1, 16, 160)


def _weights(rng: np.random.Generator) -> list[DenseWeight]:
    """bfloat16 twice, float32, float16 and Q8_0; one with a bias"""
    floats = [rng.standard_normal((n, K), dtype=np.float32) for n in SIZES]
    raw = rng.integers(0, 256, (SIZES[3], K // 32, 34), dtype=np.uint8)
    raw[:, :, [at + 1 for at in BLOCK_TYPES["Q8_0"].halves]] &= 0xBB
    return [
        DenseWeight(floats[0].astype(ml_dtypes.bfloat16), bias=floats[4][: SIZES[0], 0].copy()),
        DenseWeight(floats[1]),
        DenseWeight(floats[2].astype(np.float16)),
        BlockWeight(raw.reshape(SIZES[3], -1), block_type="Q8_0"),
        DenseWeight(floats[4].astype(ml_dtypes.bfloat16)),
    ]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_together_they_give_the_bits_of_each_alone(threads):
    from bitnet_ref.backends.cpu.backend import CythonBackend
    from bitnet_ref.backends.cpu.extension import simd_variants

    rng = np.random.default_rng(3)
    ws, x = _weights(rng), rng.standard_normal((35, K), dtype=np.float32)
    for simd in [name for name, lacks in simd_variants().items() if lacks is None]:
        be = CythonBackend(threads=threads, simd=simd)
        alone = [CythonBackend(threads=1, simd=simd).linear(x, w).copy() for w in ws]
        for tokens in (slice(0, 1), slice(2, 7), slice(3, 20), slice(0, 35)):
            for y, expected in zip(be.linears(x[tokens], ws), alone, strict=True):
                np.testing.assert_array_equal(y, expected[tokens])
