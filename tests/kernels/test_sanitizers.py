"""The extension under sanitizers: the golden cases, the contract, bad calls; its threads, and those of an engine.

GCC's OpenMP library is not instrumented, and ThreadSanitizer would see races in everything that its barriers order.
LLVM's tells the sanitizer of them through Archer, a tool that it loads.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from test_c_kernels import NOT_INLINED

import bitnet_ref
from bitnet_ref.backends.cpu.extension import why_unavailable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_unavailable() is not None, reason="the extension is not built"),
    pytest.mark.skipif(sys.platform != "linux", reason="Linux only"),
]
HERE = Path(__file__).parent
KERNELS = Path(bitnet_ref.__file__).parent / "kernels" / "cpu"
FLAGS = ["-std=c11", "-g1", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-w", "-fPIC", "-shared"]
FLAGS += ["-O0", *NOT_INLINED, f"-I{KERNELS}", f"-I{sysconfig.get_paths()['include']}"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The extension in C: what the build left, or translated anew."""
    c_file, pyx = KERNELS / "_cpu.c", KERNELS / "_cpu.pyx"
    texts = [*KERNELS.glob("*.pyx"), *KERNELS.glob("*.pxi")]
    if c_file.exists() and c_file.stat().st_mtime >= max(path.stat().st_mtime for path in texts):
        return c_file
    compiler = pytest.importorskip("Cython.Compiler.Main")
    c_file = tmp_path_factory.mktemp("source") / "_cpu.c"
    compiler.compile(str(pyx), output_file=str(c_file), language_level=3)
    return c_file


def build(folder, compiler, *arguments):
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    extension = folder / f"_cpu{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run([compiler, *FLAGS, *arguments, "-o", extension], check=True)
    return extension


def library(compiler, name):
    """The path of a library of the compiler; skips the test where there is none."""
    done = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    if not os.path.isabs(path := done.stdout.strip()):
        pytest.skip(f"{compiler} has no {name}")
    return path


def run(extension, *arguments, **env):
    command = [sys.executable, HERE / "instrumented.py", extension, *arguments]
    env = {**os.environ, **env, "PYTHONPATH": f"{KERNELS.parents[2]}"}
    return subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def test_golden_cases_and_contract_under_address_and_undefined_behaviour_sanitizers(source, tmp_path):
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
    extension = build(tmp_path, "gcc", *sanitizers, "-fopenmp", source)
    settings = {"LD_PRELOAD": library("gcc", "libasan.so"), "UBSAN_OPTIONS": "print_stacktrace=1"}
    settings |= {"ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1"}
    tests = [HERE.parent / name for name in ("test_golden.py", "contract")]
    done = run(extension, "suite", *tests, "-k", "not numpy and not cupy", **settings)
    assert done.returncode == 0, done.stdout[-5000:]
    assert (calls := re.search(r"(\d+) bad calls", done.stdout)), done.stdout[-5000:]
    assert int(calls[1]) > 1800


def threads_under_tsan(folder, source):
    """The output of the threads' run, with the extension that clang builds from that source."""
    archer = Path(shutil.which("clang") or "").resolve().parent.parent / "lib" / "libarcher.so"
    if not archer.exists():
        pytest.skip("no clang with libarcher.so; on Debian: apt install clang libomp-dev")
    extension = build(folder, "clang", "-fsanitize=thread", "-fopenmp=libomp", source)
    settings = {"LD_PRELOAD": library("gcc", "libtsan.so"), "OMP_TOOL_LIBRARIES": str(archer)}
    settings |= {"ARCHER_OPTIONS": "verbose=1", "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=1"}
    done = run(extension, "threads", **settings)
    assert "Archer detected OpenMP application with TSan" in done.stdout, done.stdout[-3000:]
    return done.stdout


def test_threads_do_not_race(source, tmp_path):
    output = threads_under_tsan(tmp_path, source)
    assert "WARNING: ThreadSanitizer" not in output, output[:5000]
    assert "16 texts by threads" in output, output[-3000:]


def test_a_planted_race_is_reported(source, tmp_path):
    """All threads take the scratch memory of the first."""
    planted = tmp_path / "planted.c"
    text, count = re.subn(r"\bomp_get_thread_num\(\)", "0", source.read_text())
    assert count >= 4
    planted.write_text(text)
    assert "WARNING: ThreadSanitizer: data race" in threads_under_tsan(tmp_path, planted)
