"""A fuzzing campaign: mutate the files of a good model, load, compute, report the outcome. Two ways:

    python tests/fuzz/campaign.py weights 0 100            # seeds 0 to 99 in one process
    python tests/fuzz/campaign.py --forked gguf 0 40000    # each seed in a child of its own (Linux)

Kinds: config, weights, index, tokenizer, native, gguf, onnx, container (files that other people's tools wrote). A seed
always makes the same files. Whatever they are, the outcome must be a model that computes (or a tokenizer that encodes)
or one of bitnet_ref's errors about files; no warning but ConfigWarning and no other exception. In one process, also no
allocation by Python or NumPy beyond the files' size and SPARE_BYTES; prints a JSON line before each seed and one after
it.

Forked, the child has 5 CPU-seconds, and as address space what the process had before plus the files' size plus 1 GiB,
whoever allocates it. Death by a signal, a timeout and every other exception is a find: it is printed with its seed, its
files are kept (--keep FOLDER, by default bitnet-ref-finds in the temporary folder), and the campaign goes on. The last
line has the count of every outcome; the exit status is 1 if there were finds. `--progress N`: a line every N seeds.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no threads: a forked child would wait for them
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
from checkpoint_mutants import (
    copy_tokenizer,
    mutate_checkpoint,
    mutate_native,
    mutate_tokenizer,
    write_base,
    write_native_base,
)
from container_mutants import copy_container, mutate_container
from forked import run_in_child
from gguf_mutants import TILES_FILE, mutate_gguf, write_gguf_base
from onnx_mutants import mutate_onnx, write_onnx_base

import bitnet_ref
from bitnet_ref.errors import BitNetRefError, ConfigError, ConfigWarning, FormatError, TokenizerError
from bitnet_ref.inspection import inspect_model
from bitnet_ref.tokenizers import Tokenizer, load_tokenizer

SPARE_BYTES = 256 << 20
FORKED_SPARE_BYTES = 1 << 30
FORKED_CPU_S = 5
FORKED_OUTCOMES = {"ok", "FormatError", "ConfigError", "TokenizerError", "NumericsError"}
TOKENS = [1, 3, 2, 5]
TEXT = "Once upon a time, a wörld of \U0001f600 began.\n"
KINDS = ("config", "weights", "index", "tokenizer", "native", "gguf", "onnx", "container")
MUTATORS = {"native": mutate_native, "gguf": mutate_gguf, "onnx": mutate_onnx, "container": mutate_container}
WRITERS = {"native": write_native_base, "gguf": write_gguf_base, "onnx": write_onnx_base, "container": copy_container}


def mutate(kind: str, seed: int, folder: Path) -> Path:
    """Write the files of a seed into the empty folder; returns what to load."""
    dice = random.Random(f"{kind} {seed}")
    if kind == "tokenizer":
        mutate_tokenizer(dice, folder)
    elif kind in ("config", "weights", "index"):
        mutate_checkpoint(kind, dice, folder)
    else:
        return MUTATORS[kind](dice, folder)
    return folder


def write_good(kind: str, dice: random.Random, folder: Path) -> Path:
    """A file or folder as it is before it is mutated."""
    if kind == "tokenizer":
        copy_tokenizer(folder)
    elif kind in WRITERS:
        return WRITERS[kind](folder, dice)
    else:
        write_base(folder, dice, sharded=kind == "index")
    return folder


def use_checkpoint(path: Path, backend: str) -> bitnet_ref.Model:
    tiles = path.parent / TILES_FILE
    m = bitnet_ref.load(path, backend=backend, threads=1, tl_tiles=tiles if tiles.exists() else None)
    tokens = [token % m.config.vocab_size for token in TOKENS][: m.config.context_length]
    logits = m.logits(tokens)
    assert logits.shape == (len(tokens), m.config.vocab_size)
    assert np.isfinite(logits).all()
    return m


def use_tokenizer(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    assert all(isinstance(i, int) and 0 <= i < tokenizer.vocab_size for i in ids)
    assert isinstance(tokenizer.decode(ids), str)
    assert all(isinstance(i, int) for i in tokenizer.eos_ids)


def outcome(use: Callable[[], object], folder: Path) -> str:
    """The class name of the error of ours, or "ok"; anything else is raised."""
    try:
        use()
        return "ok"
    except BitNetRefError as raised:
        error = raised
    str(error).encode("utf-8", "backslashreplace")
    if isinstance(error, FormatError | ConfigError | TokenizerError):
        assert error.path is not None, f"an error about a file that does not name it: {error}"
        assert str(folder) in error.path
    return type(error).__name__


def run(kind: str, first: int, last: int) -> None:
    """All seeds in this process."""
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", ConfigWarning)
    warnings.filterwarnings("ignore", ".* layers fit in ")  # of an emulated card
    backends = [name for name, why_not in bitnet_ref.available_backends().items() if why_not is None]
    tracemalloc.start()
    for seed in range(first, last):
        print(json.dumps({"seed": seed}), flush=True)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            path = mutate(kind, seed, folder)
            size = sum(path.stat().st_size for path in folder.iterdir())
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            if kind == "tokenizer":
                found = outcome(lambda path=path: use_tokenizer(load_tokenizer(path)), folder)
            else:
                backend = backends[seed % len(backends)]
                found = outcome(lambda path=path, backend=backend: use_checkpoint(path, backend), folder)
            taken = tracemalloc.get_traced_memory()[1] - before
            assert taken < size + SPARE_BYTES, f"seed {seed}: {taken} bytes allocated for files of {size}"
        print(json.dumps({"seed": seed, "outcome": found}), flush=True)


def use_all(kind: str, path: Path, folder: Path) -> str:
    """What a forked child does: load and compute; then the tokenizer in the file, and an inspection of the folder."""
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", ConfigWarning)
    if kind == "tokenizer":
        return outcome(lambda: use_tokenizer(load_tokenizer(path)), folder)
    loaded: list[bitnet_ref.Model] = []
    found, more = outcome(lambda: loaded.append(use_checkpoint(path, "numpy")), folder), "ok"
    if kind == "gguf" and loaded:
        more = outcome(lambda: use_tokenizer(loaded[0].tokenizer), folder)
    assert more in FORKED_OUTCOMES, f"a {more} from the tokenizer, after a load that was {found}"
    if kind != "tokenizer":
        more = outcome(lambda: inspect_model(path), folder)
    assert more in FORKED_OUTCOMES, f"a {more} after the load, which was {found}"
    return found


def run_forked(kind: str, first: int, last: int, keep: Path, progress: int) -> int:
    """Each seed in a child. Returns how many finds there were."""
    started, counts, finds = time.perf_counter(), Counter[str](), []
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    for number in range(12):  # good files: what the children will need of the package and others is loaded here, once
        with tempfile.TemporaryDirectory(dir=memory) as name:
            use_all(kind, write_good(kind, random.Random(number), Path(name)), Path(name))
    gc.freeze()  # or every child's garbage collector would write to, and so copy, all of the memory
    for seed in range(first, last):
        with tempfile.TemporaryDirectory(dir=memory) as name:
            folder = Path(name)
            path = mutate(kind, seed, folder)
            allowed = sum(path.stat().st_size for path in folder.iterdir()) + FORKED_SPARE_BYTES
            found, detail = run_in_child(
                lambda path=path, folder=folder: use_all(kind, path, folder), allowed, FORKED_CPU_S
            )
            counts[found] += 1
            if found not in FORKED_OUTCOMES:
                finds.append(seed)
                shutil.copytree(folder, keep / f"{kind}-{seed}", dirs_exist_ok=True)
                print(json.dumps({"seed": seed, "find": found, "detail": detail[-4000:]}), flush=True)
        done = seed + 1 - first
        if done % progress == 0 or seed + 1 == last:
            line = {"kind": kind, "done": done, "outcomes": dict(counts), "finds": finds}
            print(json.dumps({**line, "seconds": round(time.perf_counter() - started, 1)}), flush=True)
    return len(finds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--forked", action="store_true")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "bitnet-ref-finds")
    parser.add_argument("--progress", type=int, default=1000)
    given = parser.parse_args()
    if given.forked:
        sys.exit(run_forked(given.kind, given.first, given.last, given.keep, given.progress) > 0)
    run(given.kind, given.first, given.last)
