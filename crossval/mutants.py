"""Mutants: does a mistake in a line that `generate` executes go unnoticed? Or one in a room around the arithmetic?

    python crossval/mutants.py [--python N] [--kernels N] [--only TEXT] [--list] [--jobs 2] [--json FILE]
    python crossval/mutants.py --rooms ROOM,ROOM [--count N] [--only TEXT] [--list] [--jobs 2] [--json FILE]

Each mutant is one small edit: an operator, a comparison, a constant, an argument, an attribute, a statement that is
dropped. Python files are mutated by their syntax tree, on the lines that the texts below execute. The C and Cython
files are mutated at the places that `kernel_mutants.py` lists, all in one extension that is built once.

A mutant is judged in a process of its own. It first writes some texts (`write_texts`). They are the same as without the
edit ("no change"), or an error is raised ("error"), or they differ without an error: a silent change. Of those we ask
`bitnet-ref doctor --full` and `bitnet-ref crossval backends MODEL`. A silent change that neither notices survives.

A mutant of a room is judged by the room's tests that reach its line. One ends with an exception of other kinds
("error"), or an assertion fails: the silent change is "noticed". If all of them pass, it survives. The rooms:

{rooms}

Exit code 0: every survivor is in `known_mutants.py` with the reason why it may survive. 1: one is not. No file of the
repository is changed: the edited text is compiled as its module is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

from kernel_mutants import KERNELS, build, kernel_places
from known_mutants import KNOWN
from mutant_texts import same, small_models, write_texts
from python_mutants import PACKAGE, Mutant, executed_lines, python_mutants
from room_mutants import ROOMS, TEMPORARY, Plan, TestLines, judge_by_tests, measure, plan, reached_share, room_mutants

TIMEOUT_S, TEXTS_LIMIT_S, CHECKS_LIMIT_S = 1800, 40, 200  # of one mutant: of the clock, and of the processor
TESTS_LIMIT_S = 400  # of the processor, for the tests of one file without a mutant


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant. state: "no change", "error", "noticed" or "survived"."""

    state: str
    detail: str = ""


# -- judging -----------------------------------------------------------------------------------------------------------


def judge(
    mutant: Mutant | None, models: dict[str, str], right: dict[str, Any], extension: Path | None
) -> Iterator[tuple[str, str]]:
    """(state, detail) of a mutant, in this process, which has not imported the package yet. The last one counts; the
    one before it counts if the process ends early. mutant None: nothing is edited."""
    os.environ["BITNET_REF_MUTANT"] = str(mutant.number if mutant else 0)
    sys.meta_path.insert(0, Finder(mutant, extension))
    try:
        texts = write_texts(models, kernels=extension is not None)
        changed = next((name for name, result in texts if not same(result, right[name])), None)
    except Exception as error:
        yield "error", first_line(error)
        return
    if mutant is None:
        if changed is not None:
            yield "error", f"{changed}: differs from run to run"
            return
        changed = "storyteller"
    elif changed is None:
        yield "no change", ""
        return
    yield "noticed", f"{changed}: the checks crashed, or did not end"
    limit_cpu(CHECKS_LIMIT_S)
    # As many mutants at a time as there are processors; but kernels divide rows among threads.
    os.environ["BITNET_REF_NUM_THREADS"] = "2" if mutant and mutant.file.startswith("kernels") else "1"
    model = models[changed.split(",")[0]]
    commands = [["doctor", "--full", "--json"], ["crossval", "backends", model, "--json"]]
    if model != "storyteller" or (mutant and mutant.file.startswith(("backends", "kernels"))):
        commands.reverse()  # what finds it sooner
    for command in commands:
        if outcome := ask(command):
            yield "noticed", f"{changed}; {command[0]}: {outcome}"
            return
    yield "survived", changed


def ask(command: list[str]) -> str:
    """What a `bitnet-ref` command notices, "" when it finds nothing wrong."""
    from bitnet_ref.cli import main
    from bitnet_ref.crossval import opponents

    opponents.diagnose = lambda *_, **__: opponents.Diagnoses()  # the causes of a difference take many runs
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            main(command)
    except SystemExit as end:
        if end.code == 1:  # a comparison differs
            return first_failure(json.loads(out.getvalue()))
        return f"exit code {end.code}" if end.code else ""
    except Exception as error:
        return first_line(error)
    return ""


def first_failure(found: Any) -> str:
    """The first check in a command's JSON that did not pass, from the inside out."""
    children = list(found.values()) if isinstance(found, dict) else found if isinstance(found, list) else []
    for child in children:
        if failure := first_failure(child):
            return failure
    if isinstance(found, dict) and False in (found.get("passed"), found.get("agrees")):
        return ": ".join(
            str(found[key]) for key in ("opponent", "backend", "path", "detail", "verdict") if key in found
        )
    return ""


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


class Finder(importlib.abc.MetaPathFinder):
    """Imports the mutated file from its edited text, and the kernels from the scratch extension."""

    def __init__(self, mutant: Mutant | None, extension: Path | None) -> None:
        self.mutant, self.extension = mutant, extension

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name == "bitnet_ref.kernels.cpu._cpu" and self.extension is not None:
            return importlib.util.spec_from_file_location(name, self.extension)
        if self.mutant is None or not self.mutant.text or not name.startswith("bitnet_ref"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.origin != str(PACKAGE / self.mutant.file):
            return None
        spec.loader = Loader(name, spec.origin)
        spec.loader.text = self.mutant.text
        return spec


class Loader(importlib.machinery.SourceFileLoader):
    text = ""

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.text, self.path, "exec", dont_inherit=True)


def in_child(work: Callable[[], Iterable[Any]]) -> tuple[int, int]:
    """Start `work` in a forked process. Returns its pid, and the pipe on which each result is a line of JSON."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in a shell's background, and tests send it
    limit_cpu(TEXTS_LIMIT_S)
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(silence, stream)
    with os.fdopen(write, "w") as out:
        try:
            for result in work():
                out.write(json.dumps({"result": result}) + "\n")
                out.flush()
        except BaseException:
            out.write(json.dumps({"failed": traceback.format_exc()}) + "\n")
    os._exit(0)


def limit_cpu(seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def run_all(works: Sequence[Callable[[], Iterable[Any]]], jobs: int, done: Callable[[int, Any], None]) -> None:
    """Run each work in a process of its own, `jobs` at a time. done(index, answer) gets its last {"result": ...}, or
    {"failed": traceback}, or None after a crash or time-out without any."""
    waiting, running = list(enumerate(works))[::-1], {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                index, work = waiting.pop()
                pid, pipe = in_child(work)
                running[pipe] = (index, pid, time.monotonic() + TIMEOUT_S, bytearray())
            ready, _, _ = select.select(list(running), [], [], 1.0)
            for pipe, (index, pid, deadline, received) in list(running.items()):
                part = os.read(pipe, 1 << 20) if pipe in ready else None
                if part:
                    received += part
                elif part == b"" or time.monotonic() > deadline:
                    del running[pipe]
                    end_child(pid, pipe)
                    lines = received.splitlines()
                    done(index, json.loads(lines[-1]) if lines else None)
    finally:
        for pipe, (_, pid, _, _) in running.items():
            end_child(pid, pipe)


def end_child(pid: int, pipe: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(pipe)


# -- the command -------------------------------------------------------------------------------------------------------

PRELOADED = (
    "numpy",
    "ml_dtypes",
    "safetensors.numpy",
    "sentencepiece",
    "tokenizers",
    "jinja2",
    "click",
    "rich.console",
)


def run_child(work: Callable[[], Any]) -> Any:
    """The result of `work` in a process of its own."""
    out: list[Any] = []
    run_all([lambda: [work()]], 1, lambda _, answer: out.append(answer))
    if out[0] is None or "failed" in out[0]:
        raise RuntimeError(f"without any mutant: {out[0] and out[0]['failed']}")
    return out[0]["result"]


def choose(mutants: Sequence[Mutant], only: str, count: int | None, seed: int) -> list[Mutant]:
    """`count` of them (None: all), by the hash of each one's name: the choice does not change with other lines."""
    wanted = [mutant for mutant in mutants if only in mutant.name]
    return sorted(wanted, key=lambda mutant: hashlib.sha256(f"{seed} {mutant.name}".encode()).digest())[:count]


def kernel_mutants() -> list[Mutant]:
    folder = KERNELS.removeprefix("bitnet_ref/")
    return [
        Mutant(f"{folder}/{file}", "", *(" ".join(text.split()) for text in (old, new)), number=number)
        for number, (file, old, new) in enumerate(kernel_places(), 1)
    ]


def judge_all(
    mutants: Sequence[Mutant], extension: Path | None, models: dict[str, str], jobs: int, control: bool
) -> list[tuple[Mutant, Verdict]]:
    """The verdicts, printed as they come. control: also that the checks pass without any edit, else RuntimeError."""
    right = run_child(lambda: texts_of(models, extension))
    judged: list[Mutant | None] = [None, *mutants] if control else [*mutants]
    verdicts = verdicts_of(judged, [partial(judge, mutant, models, right, extension) for mutant in judged], jobs)
    if control and verdicts.pop(0).state != "survived":
        raise RuntimeError("without an edit the checks find something, see above")
    return list(zip(mutants, verdicts, strict=True))


def verdicts_of(
    judged: Sequence[Mutant | None], works: Sequence[Callable[[], Iterable[Any]]], jobs: int
) -> list[Verdict]:
    """The verdict of each work, printed as it comes; None stands for no edit."""
    verdicts: dict[int, Verdict] = {}

    def done(index: int, answer: dict[str, Any] | None) -> None:
        if answer is not None and "failed" in answer:
            raise RuntimeError(answer["failed"])
        verdict = verdicts[index] = Verdict(*answer["result"] if answer else ("error", "crashed or did not end"))
        mutant = judged[index]
        print(
            f"{len(verdicts):5} {verdict.state:9}  {mutant.name if mutant else 'no edit'}  [{verdict.detail}]",
            flush=True,
        )

    run_all(works, jobs, done)
    return [verdicts[index] for index in range(len(works))]


def texts_of(models: dict[str, str], extension: Path | None) -> dict[str, Any]:
    """The texts without an edit."""
    sys.meta_path.insert(0, Finder(None, extension))
    return dict(write_texts(models, kernels=extension is not None))


def judge_rooms(names: Sequence[str], wish: argparse.Namespace) -> int:
    """Judge mutants of rooms by the tests of each. Returns the exit code."""
    room_of, chosen = {}, []
    for name, measured in measure_rooms(names, wish.jobs).items():
        print(f"{name}: its tests reach {reached_share(measured):.1%} of its statements", flush=True)
        for mutant in choose(room_mutants(measured), wish.only, wish.count, wish.seed):
            room_of[mutant.file] = name
            chosen.append((mutant, plan(mutant, measured)))
    if wish.list:
        print("\n".join(mutant.name for mutant, _ in chosen))
        return 0
    if not wish.no_control:
        check_tests([tests for _, tests in chosen], wish.jobs)
    mutants = [mutant for mutant, _ in chosen]
    verdicts = verdicts_of(mutants, [partial(judge_in_room, mutant, tests) for mutant, tests in chosen], wish.jobs)
    return report(list(zip(mutants, verdicts, strict=True)), room_of, wish.json)


def check_tests(plans: Sequence[Plan], jobs: int) -> None:
    """Run the tests of the plans without an edit. Raises RuntimeError if one fails."""
    tests: dict[str, dict[str, float]] = {}
    for tests_of_mutant in plans:
        for file, seconds in tests_of_mutant:
            tests.setdefault(file, {}).update(seconds)
    works = [partial(judge_in_room, None, [part]) for part in tests.items()]
    if any(verdict.state != "survived" for verdict in verdicts_of([None] * len(works), works, jobs)):
        raise RuntimeError("without an edit a test fails, see above")


def measure_rooms(names: Sequence[str], jobs: int) -> dict[str, list[TestLines]]:
    """Which lines of each room each of its tests reaches."""
    runs = [(name, file) for name in names for file in ROOMS[name].test_files()]
    runs.sort(key=lambda run: len(ROOMS[run[0]].test_files()))  # not a room of one long file alone, at last
    answers: dict[int, Any] = {}
    run_all([partial(measured_alone, file, ROOMS[name].files()) for name, file in runs], jobs, answers.__setitem__)
    measured: dict[str, list[TestLines]] = {name: [] for name in names}
    for index, (name, file) in enumerate(runs):
        answer = answers[index]
        if answer is None or "failed" in answer:
            raise RuntimeError(answer["failed"] if answer else f"{file} crashed or did not end without any mutant")
        measured[name].append(TestLines(**answer["result"]))
    return measured


def measured_alone(file: str, sources: Sequence[str]) -> Iterator[dict[str, Any]]:
    limit_cpu(TESTS_LIMIT_S)
    yield measure(file, sources)


def judge_in_room(mutant: Mutant | None, tests: Plan) -> Iterator[tuple[str, str]]:
    sys.meta_path.insert(0, Finder(mutant, None))
    limit_cpu(TESTS_LIMIT_S)
    return judge_by_tests(tests)


def report(verdicts: Sequence[tuple[Mutant, Verdict]], rooms: dict[str, str], file: Path | None) -> int:
    """Print how many of each state in each room, and the survivors. rooms: {file: room}. Returns the exit code."""
    states = ("no change", "error", "noticed", "survived")
    counts = Counter((rooms[mutant.file], verdict.state) for mutant, verdict in verdicts)
    counts += Counter(("all", verdict.state) for _, verdict in verdicts)
    print(f"\n{'room':24}{'mutants':>9}" + "".join(f"{state:>11}" for state in states))
    for room in [*sorted(set(rooms.values())), "all"]:
        row = [counts[room, state] for state in states]
        print(f"{room:24}{sum(row):9}" + "".join(f"{count:11}" for count in row))
    survivors = [mutant for mutant, verdict in verdicts if verdict.state == "survived"]
    unknown = [mutant for mutant in survivors if mutant.name not in KNOWN]
    for mutant in survivors:
        print(f"\nsurvived: {mutant.name}\n    {KNOWN.get(mutant.name, 'NOT KNOWN TO BE EQUIVALENT')}")
    silent = counts["all", "noticed"] + len(survivors)
    noticed = f"{counts['all', 'noticed']} noticed, {len(survivors)} not"
    print(f"\n{silent} silent changes: {noticed}; of these {len(unknown)} are not in known_mutants.py")
    if file is not None:
        rows = [[mutant.name, mutant.file, verdict.state, verdict.detail] for mutant, verdict in verdicts]
        file.write_text(json.dumps(rows, indent=1, ensure_ascii=False))
    return 1 if unknown else 0


def main() -> int:
    description = (__doc__ or "").format(
        rooms="\n".join(f"    {name:14}{' '.join(room.tests)}" for name, room in ROOMS.items())
    )
    arguments = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--python", type=int, metavar="N", help="so many mutants of Python files (default: all)")
    arguments.add_argument("--kernels", type=int, metavar="N", help="so many mutants of the kernels (default: all)")
    arguments.add_argument("--rooms", metavar="ROOM,ROOM", help='mutants of these rooms ("all": of each) instead')
    arguments.add_argument("--count", type=int, metavar="N", help="so many mutants of each room (default: all)")
    arguments.add_argument("--only", default="", metavar="TEXT", help="only mutants with this text in their name")
    arguments.add_argument("--seed", type=int, default=19, help="another choice of N")
    arguments.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    arguments.add_argument("--list", action="store_true", help="name the mutants and stop")
    arguments.add_argument(
        "--no-control", action="store_true", help="do not check first that all is well without edits"
    )
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts there too")
    wish = arguments.parse_args()
    rooms = [] if wish.rooms is None else [*ROOMS] if wish.rooms == "all" else wish.rooms.split(",")
    if unknown := [name for name in rooms if name not in ROOMS]:
        arguments.error(f"--rooms: no room is named {', '.join(unknown)}; there are {', '.join(ROOMS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))  # ends the children too
    sys.path.insert(0, str(PACKAGE.parent))  # the package of this working tree, whatever is installed
    for name in PRELOADED:  # once, for all the processes that are forked from this one
        importlib.import_module(name)
    if rooms:
        with tempfile.TemporaryDirectory(prefix="bitnet-ref-mutants-", ignore_cleanup_errors=True) as folder:
            os.environ[TEMPORARY] = folder
            return judge_rooms(rooms, wish)
    with tempfile.TemporaryDirectory(prefix="bitnet-ref-mutants-") as folder:
        models = run_child(lambda: small_models(Path(folder))) | {"storyteller": "storyteller"}
        python = kernels = []
        if wish.python != 0:
            executed = run_child(lambda: executed_lines(lambda: dict(write_texts(models))))
            python = choose(python_mutants(executed), wish.only, wish.python, wish.seed)
        if wish.kernels != 0:
            kernels = choose(kernel_mutants(), wish.only, wish.kernels, wish.seed)
        if wish.list:
            print("\n".join(mutant.name for mutant in [*python, *kernels]))
            return 0
        control = not wish.no_control
        verdicts = judge_all(python, None, models, wish.jobs, control and not kernels) if python else []
        if kernels:
            models |= run_child(lambda: importlib.import_module("kernel_models").kernel_models(Path(folder)))
            verdicts += judge_all(kernels, build(PACKAGE.parent), models, wish.jobs, control)
    return report(verdicts, {mutant.file: str(Path(mutant.file).parent) for mutant, _ in verdicts}, wish.json)


if __name__ == "__main__":
    sys.exit(main())
