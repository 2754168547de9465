"""The product of 16-bit matrices with float32 sums, by cuBLAS: `cublasGemmEx` in terms of rows.

cuBLAS takes matrices column by column. An array of rows read so is its transpose: y (n, out) is written as
y^T (out, n) = w x^T, where w (out, k), read as (k, out), is transposed back and x, read as (k, n), is as wanted.

CuPy has no bfloat16 arrays in all of its versions, but `gemmEx` is told by number what lies behind a pointer.

Source: cuBLAS documentation, "cublasGemmEx()": of A and B in CUDA_R_16F or CUDA_R_16BF with C in CUDA_R_32F the compute
type is CUBLAS_COMPUTE_32F, and alpha and beta are float32 in the host's memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

OP_N, OP_T = 0, 1  # cublasOperation_t
R_32F, R_16 = 0, {"float16": 2, "bfloat16": 14}  # cudaDataType
COMPUTE_32F = 68  # cublasComputeType_t
GEMM_DEFAULT = -1  # cublasGemmAlgo_t
_ONE, _ZERO = np.array(1, dtype=np.float32), np.array(0, dtype=np.float32)


def gemm_arguments(shape: tuple[int, int, int], x: int, w: int, y: int, kind: str) -> tuple[Any, ...]:
    """What `cupy.cuda.cublas.gemmEx` takes after its handle for y (n, out) = x (n, k) w (out, k)^T.

    shape: (n, out, k).   x, w, y: addresses on the device; x and w of `kind`, y of float32.
    """
    n, out, k = shape
    return (
        *(OP_T, OP_N, out, n, k, _ONE.ctypes.data),
        *(w, R_16[kind], k),
        *(x, R_16[kind], k),
        _ZERO.ctypes.data,
        *(y, R_32F, out),
        *(COMPUTE_32F, GEMM_DEFAULT),
    )
