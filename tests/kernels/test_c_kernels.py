"""The C kernels by themselves: built with each compiler at hand, for 64-bit Arm under an emulator, under sanitizers.

AMX's instructions run in amx_machine.py, which no test starts: it builds a whole machine."""

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bitnet_ref

SOURCE = Path(__file__).parent / "check_kernels.c"
HEADERS = Path(bitnet_ref.__file__).parent / "kernels" / "cpu"
FLAGS = ["-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Werror", "-Wno-psabi"]
FLAGS += ["-Wno-unused-function", f"-I{HEADERS}", f"-I{SOURCE.parent}", str(SOURCE), "-lm"]
# The two sets that few processors have, run by other means: tiles in plain C, and AVX-512VL's encoding of vpdpbusd.
FLAGS += ["-DBITNET_REF_AMX_EMULATED", "-DBITNET_REF_AVXVNNI_AS_EVEX"]
# Most of the compiler's work: kernels that are copied for each shape and kind of number. -O0 leaves out the rest of it.
NOT_INLINED = ["-Dalways_inline=unused"]

BUILDS = {
    "gcc": (["gcc", "-O3"], []),
    "clang": (["clang", "-O3", "-Wno-unknown-warning-option"], []),
    "gcc, address and undefined behaviour sanitizers": (
        ["gcc", "-O0", *NOT_INLINED, "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover"],
        [],
    ),
    "aarch64": (["aarch64-linux-gnu-gcc", "-O3", "-static"], ["qemu-aarch64", "-cpu", "max"]),
}


@pytest.mark.slow  # the suite checks the kernels in the extension, by the contract's tests
@pytest.mark.parametrize("build", BUILDS)
def test_every_kernel_set_equals_the_naive_version(build, tmp_path):
    compiler, runner = BUILDS[build]
    for program in (compiler[0], *runner[:1]):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    program = tmp_path / "check_kernels"
    subprocess.run([*compiler, *FLAGS, "-o", str(program)], check=True)
    rounds = 8 if "sanitizers" in build else 30  # under them a round takes eight times as long
    done = subprocess.run([*runner, str(program), str(rounds)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    sets = {"scalar", *(["dotprod"] if runner else [])}
    if f"avx512: {rounds} rounds" in done.stdout:  # which both stand on
        sets |= {"amx", "avxvnni"}
    for name in sets:
        assert f"{name}: {rounds} rounds, all equal" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="x86-64 Linux only")
def test_what_linux_asks_of_a_program_with_tiles(tmp_path):
    """Where there are tiles. Elsewhere: that the program builds, and says what is missing."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    program = tmp_path / "check_amx_linux"
    source = SOURCE.with_name("check_amx_linux.c")
    flags = [flag for flag in FLAGS if flag not in (str(SOURCE), "-lm", "-DBITNET_REF_AMX_EMULATED")]
    subprocess.run(["gcc", "-O0", *NOT_INLINED, "-pthread", *flags, str(source), "-lm", "-o", str(program)], check=True)
    done = subprocess.run([str(program), "50"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all equal" in done.stdout or "not run: the processor has no A" in done.stdout


# What each set is for, in the mnemonics of objdump. AVX-VNNI's vpdpbusd is a VEX instruction.
INSTRUCTIONS = {
    "avx2": r"\bvpmaddubsw\b.*%ymm",
    "avxvnni": r"\{vex\} vpdpbusd\b",
    "avx512": r"\bvpdpbusd\b.*%zmm",
    "amx": r"\btdpbsud\b",
    "amx's screen": r"\btdpbssd\b",
    "amx's bfloat16": r"\btdpbf16ps\b",
    "amx's configuration": r"\bldtilecfg\b",
    "amx's release": r"\btilerelease\b",
}


@pytest.mark.thorough
@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="x86-64 Linux only")
def test_the_extension_holds_the_instructions_of_every_set():
    _cpu = pytest.importorskip("bitnet_ref.kernels.cpu._cpu")
    if shutil.which("objdump") is None:
        pytest.skip("objdump is not installed")
    done = subprocess.run(["objdump", "-d", _cpu.__file__], capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if re.search("vpmaddubsw|vpdpbusd|tdpb|tile", line)]
    assert {name for name, wanted in INSTRUCTIONS.items() if any(re.search(wanted, line) for line in lines)} == set(
        INSTRUCTIONS
    )
