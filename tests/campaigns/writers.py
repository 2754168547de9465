"""The writers of the package, each with a state before it and a view of the state after it; and faults let into them.

`python writers.py faults|limits|kills WRITER FOLDER ...` runs one campaign in this process and prints its counts as
JSON. `test_writing.py` starts it: for faults with the library of faults.c, which lets one system call fail.
"""

import ctypes
import errno
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
from helpers import BITNET, write_checkpoint
from hub_server import Hub, serving

import bitnet_ref
from bitnet_ref.cli.lab_command import copy_notebooks, find_notebooks
from bitnet_ref.crossval.opponents import Crossing
from bitnet_ref.crossval.receipt import seal, write_receipt
from bitnet_ref.crossval.report import write_html
from bitnet_ref.crossval.trace import record_to_file, write_trace
from bitnet_ref.errors import BitNetRefError, FormatError, RegistryError
from bitnet_ref.formats.checkpoint import LoadOptions
from bitnet_ref.formats.convert import TARGETS, convert
from bitnet_ref.formats.open import find_model
from bitnet_ref.formats.prepared import FOLDER, PreparedFile
from bitnet_ref.formats.registry.links import links, remove_link
from bitnet_ref.formats.registry.old_store import move_old_store
from bitnet_ref.formats.registry.pull import link_model, pull
from bitnet_ref.notebook.profiling.report import write_trace as write_profile
from bitnet_ref.system.json_file import write_json

SHORT_WRITE = -1  # to faults.c
# Removing a folder: if one of these fails, the rest of the folder stays until the next command
REMOVALS = {"unlinkat", "rmdir", "opendir", "open64", "openat64", "lstat64", "fstat64", "close", "rename", "unlink"}
# Blocks of 256, heads of 32: every format can hold it. Tiles of TL1 and TL2: see CONFIG.
SHAPE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 2, "num_hidden_layers": 1}
MODEL = {**BITNET, **SHAPE, "num_key_value_heads": 2, "vocab_size": 64}
SMALL = {**BITNET, "num_hidden_layers": 1}
TILES = {
    kind: f"[Kernels_0]\nm = 256\nk = 256\nbm = 128\nbk = {bk}\nbmm = 32\n" for kind, bk in (("tl1", 64), ("tl2", 96))
}
VERIFIED = ("native", "hf-packed", "gguf-i2_s")  # the formats whose proof, which only reads, is let fail too


class Writer:
    """A writer of one file, `self.path`, or of a folder: `before`, `write`, `view`."""

    partial = False  # whether the view may be a mixture of whole files, old and new
    never_fails = False  # whether a fault is only a warning in the log
    removals = frozenset({"unlink"})  # calls whose failure leaves a temporary file, until the next command

    def __init__(self, inputs: Path, root: Path, write=None, name: str = "out", old: bytes | None = b"old"):
        self.inputs, self.action, self.name, self.old = inputs, write, name, old
        self.move_to(root)

    def move_to(self, root: Path) -> None:
        self.root, self.path = root, root / self.name

    @property
    def fault_root(self) -> Path:
        return self.root

    def before(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()
        if self.old is not None:
            self.path.write_bytes(self.old)

    def write(self) -> None:
        self.action(self.path)

    def view(self):
        """{path: content} of all files that are not temporary."""
        files = [path for path in self.root.rglob("*") if path.is_file()]
        names = {str(path.relative_to(self.root)): path for path in files}
        return {name: path.read_bytes() for name, path in names.items() if ".tmp." not in name}

    def leftovers(self) -> list[str]:
        return [str(path) for path in self.root.rglob("*.tmp.*")]

    def repeat(self) -> None:
        """The command again: it works, whatever the first one left."""
        self.write()


class NamesWriter(Writer):
    """The view: the names that were given to local models, each with its path."""

    def before(self) -> None:
        super().before()
        os.environ["BITNET_REF_HOME"] = str(self.root)
        for name in "ab":
            link_model(self.inputs / name, name)

    def view(self):
        return links()


class CacheWriter(Writer):
    """The view: the files of each model that the Hugging Face cache has by its name, or of what has a name."""

    partial = True

    def before(self) -> None:
        super().before()
        os.environ["BITNET_REF_HOME"], os.environ["HF_HUB_CACHE"] = str(self.root / "home"), str(self.root / "hub")

    def view(self):
        models = {}
        for name in ("org/c", "mine"):
            with suppress(FormatError, RegistryError):  # not there, or without its weights
                models[name] = tuple(sorted((path.name, path.read_bytes()) for path in find_model(name).iterdir()))
        return models


class OldStoreWriter(CacheWriter):
    """Moves a store of an earlier version, with a model of the hub and one of this machine."""

    removals = REMOVALS

    def before(self) -> None:
        super().before()
        entries = []
        for name, commit in (("org/c", "c" * 40), ("mine", None)):
            digest = name.encode().hex().rjust(64, "0")
            folder = self.root / "home" / "models" / digest
            shutil.copytree(self.inputs / "c", folder)
            files = {path.name: {} for path in folder.iterdir()}
            of_hub = {"origin": name, "commit": commit, "revision": commit and "main", "main": None}
            entries.append({"name": name, "digest": digest, "files": files, **of_hub})
        (self.root / "home" / "index.json").write_text(json.dumps({"entries": entries}))


class PreparedWriter(Writer):
    """The view: whether prepared weights are there that a start would map. A fault is a line in the log."""

    never_fails = True

    def __init__(self, *args):
        super().__init__(*args, old=None)
        self.expected = bitnet_ref.load(self.inputs / "model", backend="cython", threads=1).logits([1, 2, 3])

    @property
    def fault_root(self) -> Path:
        return self.root / "model" / FOLDER

    def before(self) -> None:
        super().before()
        shutil.copytree(self.inputs / "model", self.root / "model")

    def write(self) -> None:
        model = bitnet_ref.load(self.root / "model", backend="cython", threads=1, prepared=True)
        assert (model.logits([1, 2, 3]) == self.expected).all()

    def view(self):
        backend = bitnet_ref.backends.choose_backend("cython", threads=1)
        return PreparedFile(self.root / "model", backend, LoadOptions()).read() is not None


class LabWriter(Writer):
    partial = True

    def write(self) -> None:
        copy_notebooks(find_notebooks(), self.root / "lab")

    def view(self):
        return {name: len(data) for name, data in super().view().items()}


def make_inputs(inputs: Path) -> None:
    write_checkpoint(inputs / "model", MODEL)
    write_checkpoint(
        inputs / "dense", {key: MODEL[key] for key in MODEL if key != "quantization_config"} | {"model_type": "llama"}
    )
    for kind, text in TILES.items():
        (inputs / f"{kind}.ini").write_text(text)
    for name, layers in (("a", 1), ("b", 2), ("c", 3)):
        write_checkpoint(inputs / name, {**SMALL, "num_hidden_layers": layers})


def make_writer(name: str, inputs: Path, root: Path) -> Writer:
    kind, _, rest = name.partition(":")
    if kind == "convert":
        target = TARGETS[rest]
        tiles = inputs / f"{rest[5:]}.ini" if rest[5:] in TILES else None
        old = None if target.suffix is None else b"old"

        def action(path):
            convert(inputs / "model", path, rest, tl_tiles=tiles, verify=rest in VERIFIED, overwrite=old is not None)

        writer = Writer(inputs, root, action, f"out{target.suffix or ''}", old)
        writer.removals = writer.removals if target.suffix else REMOVALS
        return writer
    if kind == "names":
        actions = {
            "give": lambda path: link_model(inputs / "c", "c"),
            "replace": lambda path: link_model(inputs / "c", "a"),
            "forget": lambda path: remove_link("a"),
        }
        return NamesWriter(inputs, root, actions[rest], old=None)
    if kind == "hub":
        return CacheWriter(inputs, root, lambda path: pull("org/c"), old=None)
    if kind == "old-store":
        return OldStoreWriter(inputs, root, lambda path: move_old_store(), old=None)
    if kind == "prepared":
        return PreparedWriter(inputs, root)
    if kind == "lab":
        return LabWriter(inputs, root, old=None)
    model = bitnet_ref.load(inputs / "a", backend="numpy")
    receipt = seal({"kind": "backends", "results": ["x" * 20_000]})
    logits = model.logits([1, 2, 3])
    actions = {
        "receipt": lambda path: write_receipt(path, receipt),
        "html": lambda path: write_html(path, "title", [Crossing("x")], {}),
        "record": lambda path: record_to_file(model, [1, 2, 3], path),
        "trace": lambda path: write_trace(path, {"logits": logits}, [1, 2, 3], engine="x"),
        "json": lambda path: write_json(path, {"seconds": [0.25] * 5000}),
        "profile": lambda path: write_profile([], {}, path),
        "plot": save_plot,
    }
    return Writer(inputs, root, actions[kind], "out.png" if kind == "plot" else "out")


def save_plot(path: Path) -> None:
    from bitnet_ref.notebook.figures import new_figure, save_figure

    figure, _ = new_figure(size=(2, 2))
    save_figure(figure, path)


GROUPS = ("gguf-q2_0", "gguf-pq2_0", "gguf-ptq1_0")  # which write as the other GGUF kinds, and take no BitNet
WRITERS = (
    *(f"convert:{target}" for target in TARGETS if target not in ("hf-unpacked", *GROUPS)),
    *("names:give", "names:replace", "names:forget", "hub:pull", "old-store", "prepared", "lab"),
    *("receipt", "html", "record", "trace", "json", "profile", "plot"),
)
FAULTS = (errno.ENOSPC, errno.EIO, errno.EINTR, SHORT_WRITE)


def outcome_of(writer: Writer) -> str:
    """ "done", or "error"; anything that is no clear error of this package is raised."""
    try:
        writer.write()
        return "done"
    except BitNetRefError as error:
        message = f"{type(error).__name__}: {error}"
    assert not writer.never_fails, message
    assert "HubError" not in message, message
    assert ".tmp." not in message, f"the message names a temporary file: {message}"
    return "error"


def check(writer: Writer, outcome: str, old, new, called: str = "") -> None:
    """Nothing is torn, and the command works when it is repeated."""
    view = writer.view()
    if writer.partial:
        assert view.items() <= new.items(), "torn"
    else:
        assert view in (old, new), f"torn: {view.keys() if isinstance(view, dict) else view}"
    if outcome == "done" and not writer.never_fails:
        assert view == new, "done, and the old state is there"
    if outcome == "error" and view == new and view != old and not writer.partial:
        assert called in ("fsync", "open64", "stat64", ""), f"an error after the new state was there, in {called}"
    left = writer.leftovers()
    assert not left or called in writer.removals, f"left over after {called}: {left}"
    if view != new or left:
        writer.repeat()
        assert writer.view() == new, "the repeated command did not write"
        assert not writer.leftovers(), f"left over after the repeated command: {writer.leftovers()}"


def faults(writer: Writer, stride: int = 1, *only: int) -> dict:
    """Let every system call fail once (or every `stride`-th), in each way, or in some of FAULTS by their index."""
    library = ctypes.CDLL(None)
    library.fault_name.restype = ctypes.c_char_p
    root = os.fsencode(os.path.realpath(writer.fault_root))
    writer.before()
    old = writer.view()
    writer.write()
    new = writer.view()
    points, outcomes, calls, escapes = 0, Counter(), Counter(), []
    for fault in [FAULTS[index] for index in only] or FAULTS:
        n = total = 0
        while n == 0 or n <= total:
            writer.before()
            library.fault_arm(root, fault, n)
            try:
                outcome = outcome_of(writer)
                library.fault_disarm()
                called = library.fault_name().decode()
                assert n or outcome == "done"
                check(writer, outcome, old, new, called)
            except Exception as problem:
                library.fault_disarm()
                called = library.fault_name().decode()
                name = "short write" if fault == SHORT_WRITE else errno.errorcode[fault]
                escapes.append(f"{name} in call {n}, {called}: {type(problem).__name__}: {problem}"[:400])
                outcome = "escape"
            if n == 0:
                total = library.fault_calls()
            elif called:
                points, outcomes[outcome] = points + 1, outcomes[outcome] + 1
                calls[called] += 1
            n += stride if n else 1
    return {"points": points, "outcomes": outcomes, "calls": calls, "escapes": escapes}


def limits(writer: Writer, count: int = 40) -> dict:
    """No file may become longer than a limit (RLIMIT_FSIZE), from nothing to what the writer needs."""
    writer.before()
    old = writer.view()
    writer.write()
    new = writer.view()
    largest = max(path.stat().st_size for path in writer.root.rglob("*") if path.is_file())
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def at(limit: int) -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            return outcome_of(writer)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    return count_outcomes(writer, old, new, [round(largest * n / (count - 1)) for n in range(count)], at)


def disks(writer: Writer, count: int = 40) -> dict:
    """A small disk (a tmpfs) with less and less space, from what the writer needs to nothing. `rm` always works."""
    mount = writer.root.parent / "disk"
    mount.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", mount], capture_output=True, check=False)
    if done.returncode:
        return {"points": 0, "skipped": done.stderr.decode()}
    try:
        writer.move_to(mount / "root")
        writer.before()
        old, free = writer.view(), shutil.disk_usage(mount).free
        writer.write()
        new, page = writer.view(), os.sysconf("SC_PAGE_SIZE")
        needed = max(free - shutil.disk_usage(mount).free, 0) + 8 * page

        def at(left: int) -> str:
            filler, size = mount / "filler", shutil.disk_usage(mount).free - left
            with open(filler, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(size, 1))
            try:
                outcome = outcome_of(writer)
            finally:
                filler.unlink()
            assert outcome == "done" or new.items() - old.items(), "rm failed on a full disk"
            return outcome

        return count_outcomes(writer, old, new, [needed * n // (count - 1) // page * page for n in range(count)], at)
    finally:
        subprocess.run(["umount", mount], check=True)


def count_outcomes(writer: Writer, old, new, points: list[int], run) -> dict:
    outcomes, escapes = Counter(), []
    for point in points:
        writer.before()
        try:
            outcome = run(point)
            check(writer, outcome, old, new)
        except Exception as problem:
            outcome = "escape"
            escapes.append(f"at {point} bytes: {type(problem).__name__}: {problem}"[:400])
        outcomes[outcome] += 1
    return {"points": len(points), "outcomes": outcomes, "escapes": escapes}


def kills(writer: Writer, count: int = 100) -> dict:
    """A process for each command, killed at a random moment (SIGKILL)."""
    dice, outcomes, escapes = random.Random(7), Counter(), []
    writer.before()
    old, started = writer.view(), time.monotonic()
    assert os.waitstatus_to_exitcode(os.waitpid(fork(writer), 0)[1]) == 0
    seconds, new = 1.1 * (time.monotonic() - started), writer.view()
    for _ in range(count):
        writer.before()
        child = fork(writer)
        time.sleep(dice.random() * seconds)
        os.kill(child, signal.SIGKILL)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        try:
            view = writer.view()
            assert view.items() <= new.items() if writer.partial else view in (old, new), "torn"
            outcomes["killed" if killed else "done", "new" if view == new else "old"] += 1
            if view != new or writer.leftovers():
                writer.repeat()
            assert writer.view() == new, "the repeated command did not write"
            assert not writer.leftovers(), f"left over after the repeated command: {writer.leftovers()}"
        except Exception as problem:
            escapes.append(f"{type(problem).__name__}: {problem}"[:400])
    counts = {f"{end}, {state}": number for (end, state), number in outcomes.items()}
    return {"points": count, "outcomes": counts, "escapes": escapes}


def fork(writer: Writer) -> int:
    """The id of a child process that writes."""
    child = os.fork()
    if child == 0:
        try:
            writer.write()
            os._exit(0)
        finally:
            os._exit(1)
    return child


@contextmanager
def hub_with(model: Path) -> Iterator[None]:
    """A Hugging Face hub on this machine that has "org/c"."""
    constants, hub = pytest.importorskip("huggingface_hub.constants"), Hub()
    hub.put("org/c", "main", {path.name: path.read_bytes() for path in model.iterdir()})
    with serving(hub) as url:
        constants.ENDPOINT, constants.HF_HUB_DISABLE_XET, constants.HF_HUB_DISABLE_PROGRESS_BARS = url, True, True
        constants.HUGGINGFACE_CO_URL_TEMPLATE = url + "/{repo_id}/resolve/{revision}/{filename}"
        yield


def main(campaign: str, names: str, folder: str, *arguments: str) -> None:
    logging.disable(logging.CRITICAL)
    inputs, root = Path(folder) / "inputs", Path(os.path.realpath(folder)) / "root"
    make_inputs(inputs)
    for name in names.split(","):
        with hub_with(inputs / "c") if name == "hub:pull" else nullcontext():
            writer, started = make_writer(name, inputs, root), time.monotonic()
            counts = globals()[campaign](writer, *map(int, arguments))
            print(json.dumps({"writer": name, **counts, "seconds": round(time.monotonic() - started, 1)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
