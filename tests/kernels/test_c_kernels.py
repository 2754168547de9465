"""The C kernels by themselves: built with each compiler at hand, for 64-bit Arm under an emulator, under sanitizers."""

import shutil
import subprocess
from pathlib import Path

import pytest

import bitnet_ref

SOURCE = Path(__file__).parent / "check_kernels.c"
HEADERS = Path(bitnet_ref.__file__).parent / "kernels"
FLAGS = ["-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Werror", "-Wno-psabi"]
FLAGS += ["-Wno-unused-function", f"-I{HEADERS}", str(SOURCE), "-lm"]

BUILDS = {
    "gcc": (["gcc", "-O3"], []),
    "clang": (["clang", "-O3", "-Wno-unknown-warning-option"], []),
    "gcc, address and undefined behaviour sanitizers": (["gcc", "-O1", "-g", "-fsanitize=address,undefined"], []),
    "aarch64": (["aarch64-linux-gnu-gcc", "-O3", "-static"], ["qemu-aarch64", "-cpu", "max"]),
}


@pytest.mark.parametrize("build", BUILDS)
def test_every_kernel_set_equals_the_naive_version(build, tmp_path):
    compiler, runner = BUILDS[build]
    for program in (compiler[0], *runner[:1]):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    program = tmp_path / "check_kernels"
    subprocess.run([*compiler, *FLAGS, "-o", str(program)], check=True)
    done = subprocess.run([*runner, str(program), "30"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "scalar: 30 rounds, all equal" in done.stdout
    if runner:
        assert "dotprod: 30 rounds, all equal" in done.stdout
