"""The long campaign on the ternary product: 10,000 random shapes on each kernel set, against integers in NumPy."""

import numpy as np
import pytest
from helpers import rng

from bitnet_ref.backends.cpu.backend import CythonBackend
from bitnet_ref.backends.cpu.extension import simd_variants
from bitnet_ref.reference.weights import TernaryWeight

SHAPES = 10_000


@pytest.mark.slow
@pytest.mark.parametrize("simd", list(simd_variants()))
def test_random_shapes_are_exact(simd):
    """Sizes 1 to 300 by 1 to 3000, 1 to 64 tokens, 1 to 4 threads."""
    if (lacks := simd_variants()[simd]) is not None:
        pytest.skip(lacks)
    random = rng(10_000)
    backends = [CythonBackend(threads=threads, simd=simd) for threads in (1, 2, 3, 4)]
    codes = random.integers(-1, 2, size=(300, 3000), dtype=np.int8)
    values = random.integers(-128, 128, size=(64, 3000), dtype=np.int8)
    for _ in range(SHAPES):
        n_out, n_in, n_tokens = (
            random.integers(1, 301),
            random.integers(1, 3001),
            random.choice([1, 2, 3, 5, 6, 7, 13, 64]),
        )
        row, column, token = random.integers(301 - n_out), random.integers(3001 - n_in), random.integers(65 - n_tokens)
        w_t = codes[row : row + n_out, column : column + n_in]
        x_q = values[token : token + n_tokens, column : column + n_in]
        weight = TernaryWeight.from_ternary(w_t, 1.0)
        acc = backends[random.integers(4)].ternary_matmul(np.ascontiguousarray(x_q), weight)
        # float32 holds these sums exactly, and BLAS is many times faster than NumPy's integer product
        expected = x_q.astype(np.float32) @ w_t.T.astype(np.float32)
        assert np.array_equal(acc, expected), (n_out, n_in, n_tokens)
