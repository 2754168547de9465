"""Run with an extension that a sanitizer watches, in place of the package's own.

python instrumented.py EXTENSION suite PYTEST_ARGUMENTS...    tests; each of the bad calls of test_arguments.py
python instrumented.py EXTENSION threads                      passes, an engine and eight threads at once
"""

import importlib.util
import sys
import threading
from pathlib import Path

spec = importlib.util.spec_from_file_location("bitnet_ref.kernels.cpu._cpu", sys.argv[1])
module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

import bitnet_ref  # noqa: E402
from bitnet_ref.backends.cpu import extension  # noqa: E402

assert extension._cpu is module


def run_suite(arguments):
    import pytest

    if status := pytest.main(["-n0", "-q", "-p", "no:cacheprovider", *arguments]):
        sys.exit(int(status))
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    import test_arguments

    print(f"{test_arguments.attack()[0]} bad calls")


def run_threads():
    model = bitnet_ref.load("storyteller", backend="cython", threads=3, head="screened", cache_dtype="int8")
    prompts = ["Once upon a time there was a " * n for n in (1, 2, 7)]
    settings = {"max_tokens": 8, "temperature": 0.0}
    alone = [out.text for out in model.generate(prompts, **settings)]
    wrong = []

    def compare(generate, i):
        if generate(prompts[i], **settings).text != alone[i]:
            wrong.append(i)

    with model.engine() as engine:
        for generate in (engine.generate, model.generate):
            threads = [threading.Thread(target=compare, args=(generate, i % 3)) for i in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert not wrong, wrong
    print("16 texts by threads equal those alone")


if sys.argv[2] == "suite":
    run_suite(sys.argv[3:])
else:
    run_threads()
