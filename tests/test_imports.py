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
    {"kernels"},
    {"tokenizers"},
    {"backends"},
    {"formats"},
    {"generation"},
    {"notebook"},
    {"serving"},
    {"api"},
    {"__init__"},  # the public names, and __version__
    {"crossval"},
    {"inspection"},
    {"benchmark"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(ROWS) for name in names}

MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def top(parts):
    """The first name below the package: the module's or subpackage's."""
    return parts[0] if parts else "__init__"


def is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def runtime_nodes(tree):
    """Every statement but those under `if TYPE_CHECKING:`. No expression holds an import."""
    for child in ast.iter_child_nodes(tree):
        if is_type_checking(child):
            for other in child.orelse:
                yield other
                yield from runtime_nodes(other)
        elif not isinstance(child, ast.expr):
            yield child
            yield from runtime_nodes(child)


@cache
def imported(relative):
    """(line, top name) of each import of the package's own modules in that file."""
    return tuple(_imported(relative))


def _imported(relative):
    package = list(relative.parent.parts)  # of the file; an __init__.py is its package
    for node in runtime_nodes(ast.parse((PACKAGE / relative).read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name.split(".")
                if name[0] == "bitnet_ref":
                    yield node.lineno, top(name[1:])
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0 and (node.module or "").split(".")[0] != "bitnet_ref":
                continue
            base = (node.module or "").split(".")[1:] if node.level == 0 else package[: len(package) - node.level + 1]
            names = base + (node.module.split(".") if node.level and node.module else [])
            if names:
                yield node.lineno, top(names)
                continue
            for alias in node.names:  # from . import x: a module, or a name that __init__ defines
                yield node.lineno, alias.name if alias.name in RANK else "__init__"


def test_the_walk_sees_imports():
    """That the test can fail: these files import what is asserted here."""
    assert {"reference", "errors"} <= {name for _, name in imported(Path("backends/backend.py"))}
    assert "api" in {name for _, name in imported(Path("__init__.py"))}


@pytest.mark.parametrize("relative", MODULES, ids=str)
def test_imports_point_one_way(relative):
    mine = top(relative.with_suffix("").parts)
    assert mine in RANK, f"{relative}: give {mine} a row in ROWS"
    for line, theirs in imported(relative):
        assert theirs in RANK, f"{relative}:{line} imports {theirs}, which has no row in ROWS"
        assert theirs == mine or RANK[theirs] < RANK[mine], f"{relative}:{line}: {mine} imports {theirs}, upwards"


def test_only_the_backends_know_the_kernels():
    users = {str(path) for path in MODULES if "kernels" in {name for _, name in imported(path)}}
    assert users <= {"backends/cpu/backend.py", "backends/cuda/backend.py", "crossval/doctor.py"}


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
