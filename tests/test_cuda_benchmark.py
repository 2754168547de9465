"""scripts/benchmarks/cuda_kernels.py: what it compares, counts and says, on the emulation. No time is of interest."""

import json

import numpy as np
import pytest
from benchmark_scripts import cuda_kernels
from click.testing import CliRunner

from bitnet_ref.backends.cuda.emulation import build as emulated_build
from bitnet_ref.backends.cuda.emulation.device import EmulatedDevice
from bitnet_ref.backends.cuda.ternary import KERNELS, TernaryKernels
from bitnet_ref.errors import ShapeError

pytestmark = [pytest.mark.card, pytest.mark.skipif(emulated_build.compiler() is None, reason="no C++ compiler")]
SMALL = {"cold_bytes": 10_000, "copy_bytes": 4096}


def test_every_kernel_that_suits_is_compared_and_timed():
    found = cuda_kernels.measure_cuda_kernels(EmulatedDevice(), [(20, 300)], [1, 3, 40], repeats=2, **SMALL)
    assert found.equal
    assert found.emulated
    assert found.copy_gb_per_s > 0
    by_tokens = {m: [r for r in found.results if r.tokens == m] for m in (1, 3, 40)}
    assert [r.kernel for r in by_tokens[1]] == ["ternary_gemv_dp4a", "ternary_gemv_mma_8", "ternary_row"]
    assert [r.kernel for r in by_tokens[40]] == ["ternary_gemm"]
    for results in by_tokens.values():
        assert sum(r.chosen for r in results) == 1
    first = by_tokens[1][0]
    assert (first.weight_bytes, first.copies) == (2 * 3 * 512, 4)  # tiles, and as many as pass 10,000 bytes
    assert first.gb_per_s == pytest.approx(first.weight_bytes / first.timing.median_s / 1e9)
    assert first.share_of_copy == pytest.approx(first.gb_per_s / found.copy_gb_per_s)
    facts = json.loads(json.dumps(found.to_dict()))
    assert facts["results"][0]["kernel"] == "ternary_gemv_dp4a"
    assert facts["results"][0]["share_of_copy"] == pytest.approx(first.share_of_copy)


def test_the_targets_are_those_of_one_token():
    def result(n_out, n_in, tokens=1, chosen=True):
        sizes = n_out, n_in, tokens, 1, 1
        return cuda_kernels.CudaKernelResult(
            "ternary_gemv_dp4a", chosen, (1, 1, 1), 32, *sizes, 0, 0, None
        ).target_share

    assert result(13824, 2560) == 0.60
    assert result(2560, 6912) == 0.35
    assert result(13824, 2560, tokens=8) is None
    assert result(13824, 2560, chosen=False) is None


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 32, 33, 128, 2048])
def test_only_kernels_that_take_the_tokens(tokens):
    names = cuda_kernels.kernels_for(tokens)
    assert names
    assert set(names) <= set(KERNELS)


def test_a_wrong_kernel_gets_no_speed(monkeypatch):
    right = TernaryKernels.matmul

    def wrong(self, x_q, w, kernel=None):
        return right(self, x_q, w, kernel).view(np.ndarray) + np.int32(kernel == "ternary_gemv_mma_8")

    monkeypatch.setattr(TernaryKernels, "matmul", wrong)
    found = cuda_kernels.measure_cuda_kernels(EmulatedDevice(), [(20, 300)], [1], repeats=1, **SMALL)
    assert not found.equal
    assert [(r.unequal_accumulators, r.timing is None) for r in found.results] == [(0, False), (20, True), (0, False)]


def test_arguments():
    for shapes, tokens, repeats in (([], [1], 1), ([(1, 1)], [], 1), ([(0, 1)], [1], 1), ([(1, 1)], [1], 0)):
        with pytest.raises(ShapeError, match="at least one shape"):
            cuda_kernels.measure_cuda_kernels(EmulatedDevice(), shapes, tokens, repeats=repeats)


def test_the_command(monkeypatch):
    monkeypatch.setenv("BITNET_REF_CUDA", "emulated")
    command = ["--shape", "200x5000", "--tokens", "1", "--repeats", "1", "--cold-mb", "1"]
    done = CliRunner().invoke(cuda_kernels.main, command)
    assert done.exit_code == 0, done.output
    assert "Emulated on the host: the times say nothing about a GPU." in done.output
    assert "200 x 5000, " in done.output
    assert ", 4 copies" in done.output
    assert "* row" in done.output
    assert "All 3 equal the NumPy reference" in done.output


def test_no_gpu_is_exit_code_4(monkeypatch):
    monkeypatch.setenv("BITNET_REF_CUDA", "nowhere")
    done = CliRunner().invoke(cuda_kernels.main, [])
    assert done.exit_code == 4
    assert "expected gpu" in done.output
