"""Rooms around the arithmetic, the tests of each, and what those tests say about a mutant.

The lines that each test executes are measured once for each test file, by coverage.py. A mutant is then judged by the
tests that reach its line, the quickest first, until one fails.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import coverage
import pytest
from python_mutants import PACKAGE, Mutant, file_mutants

ROOT = PACKAGE.parent
TEMPORARY = "BITNET_REF_MUTANTS_FOLDER"  # the variable with the folder of all temporary files of a campaign
# A mutant is judged by so many seconds of tests at most: the quickest. Of the processor, as all times of tests here, so
# that it does not matter how busy the machine was when they were measured.
TESTS_LIMIT_S = 60.0
HANGS_S = 200.0  # of the clock: a test that waits for so long, and 20 times its seconds, does not end


@dataclass(frozen=True)
class Room:
    sources: tuple[str, ...]  # patterns of files of the package
    tests: tuple[str, ...]  # files, or folders of files

    def files(self) -> list[str]:
        """Its files, relative to the package."""
        paths = {path for pattern in self.sources for path in PACKAGE.glob(pattern)}
        return sorted(str(path.relative_to(PACKAGE)) for path in paths)

    def test_files(self) -> list[str]:
        """The files of its tests, relative to the repository."""
        paths: list[Path] = []
        for name in self.tests:
            path = ROOT / name
            paths += path.glob("test_*.py") if path.is_dir() else [path]
        return sorted(str(path.relative_to(ROOT)) for path in paths)


ROOMS = {
    "tokenizers": Room(("tokenizers/**/*.py",), ("tests/tokenizers",)),
    "training": Room(
        ("training/data.py", "training/run.py"),
        tuple(f"tests/training/test_{name}.py" for name in ("lora", "text_files", "training_run")),
    ),
    "evaluation": Room(("evaluation/*.py",), ("tests/evaluation",)),
    "inspection": Room(("inspection/*.py",), ("tests/inspection", "tests/cli/test_inspect_command.py")),
    "formats": Room(
        ("formats/*.py", *(f"formats/{name}/*.py" for name in ("convert", "gguf", "hf", "native", "onnx"))),
        ("tests/formats", "tests/test_families.py", "tests/test_families_gguf.py"),
    ),
    "registry": Room(
        ("formats/registry/*.py",),
        tuple(f"tests/formats/test_{name}.py" for name in ("hub_cache", "links", "old_store", "pull")),
    ),
    "cli": Room(
        ("cli/*.py",),
        (
            "tests/cli",
            "tests/crossval/test_crossval_command.py",
            "tests/crossval/test_verdict.py",
            *(f"tests/evaluation/test_{name}.py" for name in ("harness", "perplexity")),
            *(f"tests/formats/test_{name}.py" for name in ("convert", "hub_cache", "links", "old_store", "pull")),
            "tests/inspection/test_reports.py",
            *(f"tests/serving/test_{name}.py" for name in ("adapters", "batch", "server", "verify")),
            *(f"tests/test_bench_{name}.py" for name in ("command", "report", "serve")),
            "tests/training/test_training_run.py",
        ),
    ),
    "serving/http": Room(("serving/http/*.py",), ("tests/serving", "tests/cli/test_serve_hosts.py")),
    "serving": Room(("serving/*.py",), ("tests/serving",)),
}


@dataclass(frozen=True)
class TestLines:
    """What the tests of one file reach."""

    __test__ = False  # not a class of tests

    file: str
    tests: list[str]
    seconds: list[float]  # of the processor, of each test
    lines: dict[str, dict[str, list[int]]]  # source -> line -> indices of tests; none: executed as it was imported
    statements: dict[str, list[int]]  # source -> its lines with statements


Plan = list[tuple[str, dict[str, float]]]  # test file -> its tests in order, and the seconds of each


def measure(file: str, sources: Sequence[str]) -> dict[str, Any]:
    """The TestLines of a test file, as a dict, in this process, which has not imported the package yet.

    A test may fail here, by a time limit that it holds only while nobody measures. Raises RuntimeError if the file
    cannot be run. The measurement is kept in the folder of temporary files until a source or the test file changes.
    """
    texts = [(PACKAGE / source).read_bytes() for source in sources] + [(ROOT / file).read_bytes()]
    parts = [sys.version.encode(), b"processor_s", *map(str.encode, sources), *texts]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]
    kept = Path(tempfile.gettempdir(), f"bitnet_ref_test_lines_{key}.json")
    if kept.exists():
        return dict(json.loads(kept.read_text()))
    os.environ["COVERAGE_CORE"] = "ctrace"  # the one that can tell tests from each other
    meter = coverage.Coverage(data_file=None, config_file=False, include=[str(PACKAGE / source) for source in sources])
    watch = Watch(meter)
    meter.start()
    code = run_pytest(file, watch)
    meter.stop()
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"{file} without any mutant: {watch.failure or repr(code)}")
    data = meter.get_data()
    lines, statements = {}, {}
    for source in sources:
        tests_of_lines = data.contexts_by_lineno(str(PACKAGE / source))
        lines[source] = {str(line): [int(test) for test in tests if test] for line, tests in tests_of_lines.items()}
        statements[source] = meter.analysis2(str(PACKAGE / source))[1]
    result = asdict(TestLines(file, watch.tests, watch.seconds, lines, statements))
    part = kept.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(result))
    part.replace(kept)
    return result


def room_mutants(measured: Sequence[TestLines]) -> list[Mutant]:
    """Every mutant of the lines that the tests of a room reach."""
    reached: dict[str, set[int]] = {}
    for each in measured:
        for source, lines in each.lines.items():
            reached.setdefault(source, set()).update(map(int, lines))
    return [mutant for source in sorted(reached) for mutant in file_mutants(source, reached[source])]


def reached_share(measured: Sequence[TestLines]) -> float:
    """The share of a room's statements that its tests reach."""
    statements = {(source, line) for each in measured for source, lines in each.statements.items() for line in lines}
    reached = {(source, int(line)) for each in measured for source, lines in each.lines.items() for line in lines}
    return len(statements & reached) / len(statements)


def plan(mutant: Mutant, measured: Sequence[TestLines]) -> Plan:
    """The tests that judge a mutant, of the files in which a test reaches its line.

    First the tests that reach the line, or one that uses the constant which the line gives: it is executed as its file
    is imported. Then the others: what a fixture made once is measured with the first test that asked for it. Of both
    the quickest come first: one, and more for TESTS_LIMIT_S.
    """
    ranked = []
    telling = telling_lines(mutant)
    for each in measured:
        lines = each.lines.get(mutant.file, {})
        if str(mutant.line) not in lines:
            continue
        reach_line = {test for line in telling for test in lines.get(line, ())}
        for i, test in enumerate(each.tests):
            ranked.append((i not in reach_line, each.seconds[i], each.file, test))
    chosen: dict[str, dict[str, float]] = {}
    totals = {False: 0.0, True: 0.0}
    for is_other, seconds, file, test in sorted(ranked):
        totals[is_other] += seconds
        if chosen and totals[is_other] > TESTS_LIMIT_S:
            continue
        chosen.setdefault(file, {})[test] = seconds
    return list(chosen.items())


def telling_lines(mutant: Mutant) -> list[str]:
    """The mutant's line, and those of its file that use the constant which it gives, if it does."""
    text = mutant.text.splitlines()
    constant = re.match(r"([A-Z_][A-Z0-9_]*)\b.* = ", "".join(text[mutant.line - 1 : mutant.line]))
    uses = [] if constant is None else [n for n, line in enumerate(text, 1) if re.search(rf"\b{constant[1]}\b", line)]
    return [str(line) for line in {mutant.line, *uses}]


def judge_by_tests(tests: Plan) -> Iterator[tuple[str, str]]:
    """(state, detail) of the mutant that this process imports: "noticed" if an assertion of a test fails, "error" if
    a test ends with another exception, else "survived"."""
    count = 0
    for file, seconds in tests:
        choice = Choice(seconds)
        try:
            code = run_pytest(file, choice, "-x")
        except Exception as error:  # of pytest as it ends: a thread of a test that passed ended with an exception
            yield choice.failure or ("error", f"{file}: {type(error).__name__}")
            return
        count += len(seconds)
        if code != pytest.ExitCode.OK:
            yield choice.failure or ("error", f"{file}: {code!r}")
            return
    yield "survived", f"{count} tests pass"


def run_pytest(file: str, plugin: object, *options: str) -> int:
    """Its exit code for a test file, with its temporary files and working directory in a folder of this process: what
    a mutant writes by a wrong name is gone with it."""
    scripts = str(Path(__file__).parent)  # has files of the names of packages
    sys.path[:] = [path for path in sys.path if path != scripts]
    sys.modules["__main__"] = ModuleType("__main__")  # a process that a test spawns would import the script again
    with tempfile.TemporaryDirectory(dir=os.environ.get(TEMPORARY), ignore_cleanup_errors=True) as folder:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
        working = Path(folder, "working")
        working.mkdir()
        os.chdir(working)
        options = ("-m", "not slow and not emulated and not notebooks", *options)  # the thorough ones too
        project = (f"--rootdir={ROOT}", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider")
        try:
            return pytest.main([str(ROOT / file), *project, "-n0", "-q", "--tb=no", *options], plugins=[plugin])
        finally:
            os.chdir(ROOT)


class Failures:
    """A plugin of pytest that keeps the state and detail of the first failure."""

    def __init__(self) -> None:
        self.failure: tuple[str, str] | None = None

    def pytest_exception_interact(self, node: pytest.Item | pytest.Collector, call: pytest.CallInfo[Any]) -> None:
        assert call.excinfo is not None
        error = call.excinfo.value
        errors = error.exceptions if isinstance(error, BaseExceptionGroup) else [error]
        asserted = any(isinstance(each, AssertionError | pytest.fail.Exception) for each in errors)
        message = " ".join(str(error).split())[:120]
        self.failure = self.failure or (
            "noticed" if asserted else "error",
            f"{node.nodeid}: {type(error).__name__}: {message}",
        )


def processor_s() -> float:
    """The seconds of the processor that this process and the ones that it waited for have used."""
    return sum(os.times()[:4])


class Watch(Failures):
    """Tells coverage.py which test runs, and times it."""

    def __init__(self, meter: coverage.Coverage) -> None:
        super().__init__()
        self.meter = meter
        self.tests: list[str] = []
        self.seconds: list[float] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.meter.switch_context(str(len(self.tests)))
        began = processor_s()
        result = yield
        self.tests.append(item.nodeid)
        self.seconds.append(round(processor_s() - began, 4))
        self.meter.switch_context("")
        return result


class Choice(Failures):
    """Runs the tests of a plan in its order. A test that takes far longer than without a mutant ends the process."""

    def __init__(self, seconds: dict[str, float]) -> None:
        super().__init__()
        self.seconds = seconds

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self.seconds]
        order = list(self.seconds)
        items.sort(key=lambda item: order.index(item.nodeid))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        seconds = self.seconds[item.nodeid]
        with contextlib.suppress(ValueError):  # a limit that a test set for this process
            used = resource.getrusage(resource.RUSAGE_SELF)
            hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
            resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + 10 + 5 * seconds), hard))
        signal.alarm(int(HANGS_S + 20 * seconds))
