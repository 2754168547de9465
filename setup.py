"""Builds the one compiled part of bitnet_ref, `bitnet_ref.kernels.cpu._cpu`. Everything else is in pyproject.toml.

The extension is optional: without a working C compiler the package installs as pure NumPy, says so here, and
`bitnet-ref doctor` says so again. `BITNET_REF_EXTENSION=required` turns a failed build into an error (CI, wheels);
`BITNET_REF_EXTENSION=off` does not try.
"""

import os
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

WISH = os.environ.get("BITNET_REF_EXTENSION", "auto")
if WISH not in ("auto", "required", "off"):
    raise SystemExit(f"BITNET_REF_EXTENSION={WISH!r}: expected auto, required or off")

# -ffp-contract=off and no -ffast-math: the numerical contract forbids fused multiply-add and reordering in float32.
C_FLAGS = ["-O3", "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
C_FLAGS += ["-Wno-unused-function", "-Wno-psabi", "-g0"]  # Python's own flags may ask for 4 MB of debug information


class BuildExt(build_ext):
    """build_ext that adds OpenMP where the compiler has it and explains a failure instead of dying of it."""

    def build_extension(self, ext: Extension) -> None:
        openmp = self.openmp_flags()
        ext.extra_compile_args = [*C_FLAGS, *openmp]
        ext.extra_link_args = openmp
        compile_one_by_one = self.compiler.compile

        def compile_side_by_side(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_one_by_one([source], **options), sources)
                return [path for paths in objects for path in paths]

        self.compiler.compile = compile_side_by_side
        if not openmp:
            print("bitnet_ref: this compiler has no OpenMP; the kernels will run on one thread")
        try:
            super().build_extension(ext)
        except Exception as error:
            if WISH == "required":
                raise
            print(
                f"bitnet_ref: the C extension was not built ({error}).\n"
                "bitnet_ref: installing as pure NumPy. For the fast kernels install a C compiler "
                "(Debian/Ubuntu: apt install gcc; macOS: xcode-select --install) and install again."
            )

    def copy_extensions_to_source(self) -> None:
        """Editable installs: copy what was built, and nothing where the build failed."""
        self.extensions = [ext for ext in self.extensions if Path(self.get_ext_fullpath_built(ext)).exists()]
        super().copy_extensions_to_source()

    def get_ext_fullpath_built(self, ext: Extension) -> str:
        return os.path.join(self.build_lib, self.get_ext_filename(self.get_ext_fullname(ext.name)))

    def openmp_flags(self) -> list[str]:
        """The flags with which a two-line OpenMP program compiles and links, or [] if none does."""
        source = "#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n"
        for flags in (["-fopenmp"], ["-Xpreprocessor", "-fopenmp", "-lomp"]):
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "try_openmp.c"
                file.write_text(source)
                compiler = getattr(self.compiler, "compiler", None)  # absent on MSVC, which is not supported
                if not compiler:
                    return []
                command = [*compiler, str(file), *flags, "-o", str(file.with_suffix(""))]
                try:
                    done = subprocess.run(command, capture_output=True, check=False)
                except OSError:  # no compiler at all: the build itself will say so
                    return []
                if done.returncode == 0:
                    return flags
        return []


class BuildPy(build_py):
    """build_py that also puts the repository's notebooks into the wheel, where `bitnet-ref lab` looks for them."""

    def notebooks(self) -> list[str]:
        suffixes = (".ipynb", ".py", ".md", ".txt")
        return [str(path) for path in sorted(Path("notebooks").glob("*")) if path.suffix in suffixes]

    def run(self) -> None:
        super().run()
        target = Path(self.build_lib, "bitnet_ref", "notebooks")
        for notebook in [] if self.editable_mode else self.notebooks():
            target.mkdir(parents=True, exist_ok=True)
            self.copy_file(notebook, str(target / Path(notebook).name))

    def get_source_files(self) -> list[str]:
        """What goes into the source distribution, from which a wheel may be built."""
        return [*super().get_source_files(), *self.notebooks()]


def declare_types(kernels: Path) -> None:
    """Write `_types.pxi`: the structs and function types of the C headers that the Cython files use."""
    headers = "\n".join(path.read_text() for path in sorted(kernels.glob("*.h")))
    headers = re.sub(r"/\*.*?\*/|//[^\n]*", "", headers, flags=re.DOTALL)
    for name, arguments in re.findall(r"#define (\w+_ARGS) ((?:[^\n]*\\\n)*[^\n]*)", headers):
        headers = headers.replace(f"({name},", f"({arguments},".replace("\\\n", ""))

    def declare(declaration: str) -> str:
        text = re.sub(r"\[\w+\]", "[1]", " ".join(declaration.split()))  # Cython wants a number and does not use it
        text = re.sub(r"\bfrom\b", 'from_ "from"', text)  # a word of Python's own
        return text + (" noexcept nogil" if "(*" in text else "")

    types = {}
    for members, name in re.findall(r"typedef struct \{([^{}]*)\} (\w+);", headers):
        lines = [f"        {declare(member)}" for member in members.split(";") if member.strip()]
        types[name] = "\n".join([f"    ctypedef struct {name}:", *lines])
    for function, name in re.findall(r"typedef ([\w ]+\(\*(\w+)\)\([^;]*\));", headers):
        types[name] = f"    ctypedef {declare(function)}"

    used: list[str] = []  # each after those that it is made of

    def use(text: str) -> None:
        for name in re.findall(r"\w+", text):
            if name in types and name not in used:
                use(types[name].replace(name, ""))
                used.append(name)

    sources = [path for path in sorted(kernels.glob("_cpu*.p*")) if path.suffix in (".pyx", ".pxi")]
    use("\n".join(path.read_text() for path in sources))
    text = "\n".join(['cdef extern from "kernels.h" nogil:', *(types[name] for name in used), ""])
    file = kernels / "_types.pxi"
    if not file.exists() or file.read_text() != text:  # with a new time the extension would be compiled again
        file.write_text(text)


def extensions() -> list[Extension]:
    if WISH == "off":
        return []
    from Cython.Build import cythonize

    kernels = Path("bitnet_ref/kernels/cpu")
    declare_types(kernels)
    extension = Extension(
        "bitnet_ref.kernels.cpu._cpu",
        [str(kernels / "_cpu.pyx"), *(str(path) for path in sorted(kernels.glob("sets_*.c")))],
        include_dirs=[str(kernels)],
        define_macros=[("BITNET_REF_UNITS", "1"), ("_GNU_SOURCE", "1")],
        depends=[str(path) for kind in ("*.h", "*.pxi") for path in sorted(kernels.glob(kind))],
        optional=WISH == "auto",
    )
    return cythonize([extension], language_level=3)


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExt, "build_py": BuildPy})
