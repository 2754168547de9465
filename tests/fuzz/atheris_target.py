"""Coverage-guided fuzzing with atheris: what the targets atheris_safetensors, _gguf, _onnx and _uses share.

    pip install 'bitnet-ref[fuzz]'
    python tests/fuzz/atheris_gguf.py -max_total_time=600                  # from good files: tests/data, and small ones
    python tests/fuzz/atheris_gguf.py CORPUS_FOLDER -max_total_time=600    # the same, and what it learns is kept there

Options are libFuzzer's. Half of the mutations are libFuzzer's, half know the format (see the *_mutants.py). An input is
a model's file; the target opens it and reads all of its weights and its tokenizer. One of bitnet_ref's errors
is fine. Every other exception, a warning, 5 seconds, 2 GiB, or a crash ends the run, and the input is left as
crash-*, timeout-* or oom-*; run the target with that file to see it again.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent.parent))

import atheris

# Only what is imported here for the first time is instrumented: nothing may import bitnet_ref before this module.
with atheris.instrument_imports(include=["bitnet_ref.formats", "bitnet_ref.tokenizers", "bitnet_ref.crossval"]):
    import bitnet_ref.crossval.receipt
    import bitnet_ref.crossval.report
    import bitnet_ref.formats.gguf.model
    import bitnet_ref.formats.hf.folder
    import bitnet_ref.formats.native.model
    import bitnet_ref.formats.onnx.model
    import bitnet_ref.tokenizers.hf_tokenizer
    import bitnet_ref.tokenizers.templates.chat_template
    import bitnet_ref.tokenizers.templates.filters
    import bitnet_ref.tokenizers.templates.limits
    import bitnet_ref.tokenizers.templates.sandbox  # noqa: F401
    from bitnet_ref.errors import BitNetRefError, ConfigWarning
    from bitnet_ref.formats.checkpoint import read_weights
    from bitnet_ref.formats.open import open_checkpoint
    from bitnet_ref.tokenizers import load_tokenizer_files

MAX_BYTES = 1 << 18  # of an input, and of a seed
LIMITS = ("-timeout=5", "-rss_limit_mb=2048", f"-max_len={MAX_BYTES}")


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """In memory where there is such a place: every input is written to a file."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


def read_all(path: Path) -> None:
    """What `load` does with a file before it computes."""
    with open_checkpoint(path) as checkpoint:
        read_weights(checkpoint)
        files = checkpoint.tokenizer_files()
    if "tokenizer.json" in files or "tokenizer.model" in files:
        load_tokenizer_files(files, path=path)


def fuzz(
    name: Callable[[bytes], str],
    prepare: Callable[[Path], object],
    seeds: Iterable[bytes],
    mutate: Callable[[random.Random, bytes], bytes],
    use: Callable[[Path], object] = read_all,
) -> None:
    """Run libFuzzer, with sys.argv's options, on what `use` does with a file.

    name: of the file that an input becomes. prepare: writes what stands beside it, into the folder. mutate: changes an
    input in its format's own terms; it may raise when the input is none.
    """
    with temporary_folder() as folder, temporary_folder() as corpus:
        prepare(Path(folder))
        for number, seed in enumerate(seeds):
            if len(seed) <= MAX_BYTES:
                (Path(corpus) / f"{number:03d}").write_bytes(seed)

        def one_input(data: bytes) -> None:
            path = Path(folder) / name(data)
            path.write_bytes(data)
            with warnings.catch_warnings(), suppress(BitNetRefError):
                warnings.simplefilter("error")
                warnings.simplefilter("ignore", ConfigWarning)
                use(path)

        def mutator(data: bytes, max_size: int, seed: int) -> bytes:
            dice = random.Random(seed)
            if dice.randrange(2):
                with suppress(Exception):
                    return mutate(dice, data)[:max_size]
            return atheris.Mutate(data, max_size)

        given = sys.argv[1:]
        single = any(Path(argument).is_file() for argument in given)  # an input to run again: no corpus
        atheris.Setup([sys.argv[0], *LIMITS, *given, *([] if single else [corpus])], one_input, custom_mutator=mutator)
        atheris.Fuzz()


def files_of(write: Callable[[random.Random, Path], Path], count: int) -> Iterable[bytes]:
    """The bytes of the files that `write` writes by the numbers 0 to count - 1; each once."""
    seen: set[bytes] = set()
    for number in range(count):
        with tempfile.TemporaryDirectory() as folder:
            data = write(random.Random(number), Path(folder)).read_bytes()
        if data not in seen:
            seen.add(data)
            yield data
