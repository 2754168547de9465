"""Every .cu file compiles for sm_80 and sm_90, and keeps its numbers in registers: with NVRTC, as on a GPU, and nvcc.

NVRTC is looked for where pip puts it (nvidia-cuda-nvrtc), beside CUDA, and on the system's path.
"""

import ctypes
import ctypes.util
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from bitnet_ref.backends.cuda.sources import FOLDER, NVRTC_OPTIONS, files, flattened

ARCHITECTURES = ("sm_80", "sm_90")
REQUIRED = set(os.environ.get("BITNET_REF_REQUIRE_CUDA_COMPILERS", "").split(","))


def missing(name, why):
    """Skips, or fails where the compiler is required."""
    if name in REQUIRED:
        pytest.fail(f"BITNET_REF_REQUIRE_CUDA_COMPILERS names {name}: {why}")
    pytest.skip(why)


@cache
def nvrtc():
    """The library, or None."""
    places = [Path(entry, "nvidia") for entry in sys.path if entry]
    found = [str(path) for place in places for path in sorted(place.glob("*/lib/libnvrtc.so.*"))]
    found += [name for name in (ctypes.util.find_library("nvrtc"), "/usr/local/cuda/lib64/libnvrtc.so") if name]
    for name in found:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def nvrtc_compile(library, source, name, options):
    """-> (whether it compiled, the log, the bytes of machine code)"""
    program = ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
    arguments = [option.encode() for option in options]
    status = library.nvrtcCompileProgram(program, len(arguments), (ctypes.c_char_p * len(arguments))(*arguments))
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    code = ctypes.c_size_t(0)
    if status == 0:
        library.nvrtcGetCUBINSize(program, ctypes.byref(code))
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return status == 0, log.value.decode(), code.value


RESOURCES = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores.*?Used (\d+) registers", re.S
)


def nothing_to_speak_of_spills(account, what):
    """ptxas's own account: a kernel that spills registers, or indexes them at run time, is slow without being wrong."""
    kernels = {name: tuple(map(int, facts)) for name, *facts in RESOURCES.findall(account)}
    assert kernels, account
    print(*(f"{what} {name}: {facts[2]} registers" for name, facts in kernels.items()), sep="\n")
    most = 16  # bytes: two or three registers that are used once a block cost nothing
    assert {name: facts for name, facts in kernels.items() if max(facts[:2]) > most} == {}


def test_there_are_files():
    assert "ternary.cu" in files()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("file", files())
def test_nvrtc_compiles(file, architecture):
    library = nvrtc()
    if library is None:
        missing("nvrtc", "NVRTC is not installed: pip install nvidia-cuda-nvrtc")
    options = [f"-arch={architecture}", *NVRTC_OPTIONS, "--ptxas-options=-v"]
    good, log, size = nvrtc_compile(library, flattened(file), file, options)
    assert good, log
    assert "warning" not in log, log
    assert size > 0
    nothing_to_speak_of_spills(log, f"{file} {architecture}")


def test_nvrtc_says_where_an_error_is():
    """That the test above can fail, and that lines are those of the files."""
    library = nvrtc()
    if library is None:
        missing("nvrtc", "NVRTC is not installed: pip install nvidia-cuda-nvrtc")
    source = flattened("ternary.cu") + "\n__global__ void f() { g(); }\n"
    good, log, _ = nvrtc_compile(library, source, "ternary.cu", ["-arch=sm_90", *NVRTC_OPTIONS])
    last_line = (FOLDER / "ternary.cu").read_text().count("\n") + 2
    assert not good
    assert f'ternary.cu({last_line}): error: identifier "g" is undefined' in log


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("file", files())
def test_nvcc_compiles_and_nothing_to_speak_of_spills(file, architecture, tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        missing("nvcc", "nvcc is not installed")
    command = [nvcc, "-std=c++17", "--fmad=false", f"-arch={architecture}", "-Xptxas", "-v", "-cubin"]
    command += ["-o", str(tmp_path / "kernels.cubin"), str(FOLDER / file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    nothing_to_speak_of_spills(done.stderr, f"{file} {architecture}")
