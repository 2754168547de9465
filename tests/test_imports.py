"""The package's imports: they point one way, and `import bitnet_ref` loads only what it needs."""

import ast
from functools import cache
from pathlib import Path

import pytest
from helpers import run_python

import bitnet_ref

PACKAGE = Path(bitnet_ref.__file__).parent

# Each row may import from the rows above it, and from its own package. A new module needs a place here.
ROWS = [
    {"errors"},
    {"system"},
    {"reference"},
    {"families"},
    {"kernels"},
    {"tokenizers"},
    {"backends"},
    {"formats"},
    {"generation"},
    {"serving"},
    {"notebook"},
    {"api"},
    {"__init__"},  # the public names, and __version__
    {"training"},
    {"crossval"},
    {"evaluation"},
    {"inspection"},
    {"benchmark"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(ROWS) for name in names}

MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def room(relative):
    """The first name below the package: the module's or subpackage's."""
    return relative.parts[0].removesuffix(".py")


def file_of(parts):
    """The file of a module of the package, given its dotted name below bitnet_ref; None for what is no module."""
    for path in (Path(*parts, "__init__.py"), Path(*parts).with_suffix(".py") if parts else None):
        if path is not None and (PACKAGE / path).is_file():
            return path
    return None


@cache
def imported(relative):
    """(line, file) of each import of the package's own files: also inside functions and under TYPE_CHECKING.

    `from package import name` is an import of the module of that name where there is one, else of the package's
    `__init__`. That a module's packages are imported before it is not counted.
    """
    return tuple(_imported(relative))


def _imported(relative):
    package = list(relative.parent.parts)  # of the file; an __init__.py is its package
    for node in ast.walk(ast.parse((PACKAGE / relative).read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            targets = [name[1:] for name in names if name[0] == "bitnet_ref"]
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "bitnet_ref"):
            module = node.module.split(".") if node.module else []
            base = package[: len(package) - node.level + 1] + module if node.level else module[1:]
            targets = [[*base, alias.name] if file_of([*base, alias.name]) else base for alias in node.names]
        else:
            continue
        for target in targets:
            # a compiled extension is a part of its package
            yield node.lineno, file_of(target) or file_of(target[:-1])


def test_the_walk_sees_imports():
    """That the tests below can fail: these files import what is asserted here."""
    assert {"reference", "errors"} <= {room(path) for _, path in imported(Path("backends/backend.py"))}
    assert Path("api.py") in {path for _, path in imported(Path("__init__.py"))}
    assert Path("tokenizers/base.py") in {path for _, path in imported(Path("backends/loaded.py"))}  # TYPE_CHECKING
    assert Path("backends/cpu/backend.py") in {path for _, path in imported(Path("backends/__init__.py"))}  # a function
    assert Path("kernels/cpu/__init__.py") in {path for _, path in imported(Path("backends/cpu/extension.py"))}


@pytest.mark.parametrize("relative", MODULES, ids=str)
def test_imports_point_one_way(relative):
    mine = room(relative)
    assert mine in RANK, f"{relative}: give {mine} a row in ROWS"
    for line, path in imported(relative):
        theirs = room(path)
        assert theirs in RANK, f"{relative}:{line} imports {theirs}, which has no row in ROWS"
        assert theirs == mine or RANK[theirs] < RANK[mine], f"{relative}:{line}: {mine} imports {theirs}, upwards"


def circles(arrows):
    """The sets of files that import each other, directly or not."""
    reached = {start: _reach(start, arrows) for start in arrows}
    return {frozenset(other for other in reached[a] if a in reached[other]) for a in reached if a in reached[a]}


def _reach(start, arrows):
    """Every file that is imported by this one, or by one of those."""
    reached, waiting = set(), [start]
    while waiting:
        new = arrows[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def test_no_circle_of_files():
    assert circles({1: {2}, 2: {3}, 3: {2}, 4: {4}}) == {frozenset({2, 3}), frozenset({4})}
    arrows = {path: {target for _, target in imported(path)} for path in MODULES}
    assert [sorted(map(str, circle)) for circle in circles(arrows)] == []


def test_the_reference_imports_errors_and_nothing_else():
    for relative in MODULES:
        if room(relative) in ("reference", "system"):
            assert {room(path) for _, path in imported(relative)} <= {"errors", room(relative)}, relative


def test_the_families_import_errors_the_reference_and_each_other():
    for relative in MODULES:
        if room(relative) == "families":
            assert {room(path) for _, path in imported(relative)} <= {"errors", "reference", "families"}, relative


def test_only_the_backends_know_the_kernels():
    users = {str(path) for path in MODULES if "kernels" in {room(target) for _, target in imported(path)}}
    assert users == {"backends/cpu/extension.py"}


def test_few_rooms_stand_at_the_top():
    rooms = {path.name for path in PACKAGE.iterdir()} - {"__pycache__", "py.typed", "__init__.py", "__main__.py"}
    assert len(rooms) <= 19, sorted(rooms)


HEAVY = (
    *("torch", "transformers", "tensorflow", "jax", "cupy", "sentencepiece", "tokenizers", "jinja2", "safetensors"),
    *(
        "huggingface_hub",
        "click",
        "rich",
        "matplotlib",
        "pandas",
        "scipy",
        "IPython",
        "pytest",
        "hypothesis",
        "onnx",
        "llguidance",
        "prometheus_client",
    ),
)
LOADED = (
    "import json, sys; import bitnet_ref; {more}print(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
)


def test_import_loads_only_what_it_needs():
    assert not set(run_python(LOADED.format(more=""))) & set(HEAVY)


def test_loading_and_computing_needs_no_more():
    more = "bitnet_ref.load(backend='numpy').run_with_cache([1, 2]); "
    assert not set(run_python(LOADED.format(more=more))) & set(HEAVY)


BACKENDS = ("bitnet_ref.kernels.cpu._cpu", "bitnet_ref.backends.cpu", "bitnet_ref.backends.cuda", "cupy")


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "more",
    [
        "",
        "bitnet_ref.load(backend='numpy').logits([1, 2]); ",
        "bitnet_ref.load(backend='numpy').run_with_cache([1, 2]); ",
        "bitnet_ref.load(backend='numpy').generate('Once', max_tokens=2); ",
    ],
)
def test_no_backend_is_loaded_before_it_is_chosen(more):
    """Not even by the numpy backend: the compiled extension brings OpenMP and its threads."""
    code = f"import json, sys; import bitnet_ref; {more}print(json.dumps([m for m in {BACKENDS} if m in sys.modules]))"
    assert run_python(code) == []


def test_import_changes_no_global_state():
    """No warning filter, error state, random state, signal handler or environment variable."""
    code = (
        "import json, os, random, signal, warnings\n"
        "import numpy as np\n"
        "def state():\n"
        "    handlers = [str(signal.getsignal(s)) for s in signal.valid_signals()]\n"
        "    return repr((np.geterr(), warnings.filters, dict(os.environ), random.getstate()[1][:9], handlers))\n"
        "before = state()\n"
        "import bitnet_ref\n"
        "bitnet_ref.load().logits([1, 2])\n"
        "print(json.dumps(before == state()))\n"
    )
    assert run_python(code)
