"""Within the machine that amx_machine.py makes: the built extension with AMX's kernels, by the package and its tests.

Run it anywhere: without AMX it takes the best kernel set there is. `--record FILE` writes down every file it opened and
every library it loaded, which is then all that a machine without a disk needs.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
DATA = (TESTS / "data" / "storyteller", ROOT / "bitnet_ref" / "assets")
opened: set[str] = set()


def record(event: str, args: tuple) -> None:
    if event == "open" and isinstance(args[0], str):
        opened.add(os.path.abspath(args[0]))


def files_in_use() -> list[str]:
    """What was opened for reading and still exists, and what the process has mapped: the interpreter, the libraries."""
    mapped = {
        line.split(maxsplit=5)[5].strip() for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line
    }
    modules = {module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)}
    # what a library opens by itself, unseen
    data = {str(path) for folder in DATA for path in folder.rglob("*")}
    paths = opened | data | mapped | modules | {os.path.realpath(path) for path in mapped}
    return sorted(path for path in paths if os.path.isfile(path) and not path.startswith(("/proc/", "/sys/", "/dev/")))


def storyteller(kernel_set: str) -> None:
    """Golden logits, and a text by threads of more than one kind, token for token what NumPy says"""
    import numpy as np
    from safetensors.numpy import load_file

    import bitnet_ref

    golden = load_file(TESTS / "data" / "storyteller" / "golden.safetensors")
    fast, plain = (bitnet_ref.load("storyteller", backend=name, threads=2) for name in ("cython", "numpy"))
    assert fast.backend.simd == kernel_set, fast.backend.simd
    logits = fast.logits(golden["tokens"])
    apart = float(np.abs(logits - golden["logits"])[:32].max())
    assert apart < 1e-4, apart
    assert np.array_equal(logits.argmax(-1), golden["logits"].argmax(-1))
    prompt = "Once upon a time, there was a little girl who had a dog and a cat, and they lived in a house by the sea."
    texts = [model.generate(prompt, max_tokens=8) for model in (fast, plain)]
    assert texts[0].token_ids == texts[1].token_ids, texts
    print(f"{kernel_set}: golden logits {apart:.1e} apart; generate: {texts[0].text!r}, as NumPy", flush=True)


def main() -> int:
    if recording := sys.argv[1:2] == ["--record"]:
        sys.addaudithook(record)
    sys.path.insert(0, str(ROOT))
    os.chdir(TESTS)
    import pytest

    from bitnet_ref.backends.cpu.backend import choose_simd, simd_variants

    for name, lacks in simd_variants().items():
        print(f"{name}: {lacks or 'can run here, and its sums are right'}", flush=True)
    storyteller(choose_simd())
    # pytest starts faulthandler, whose signal stack must be large enough for the tiles or permission is lost
    code = pytest.main(
        ["-q", "-n0", "-p", "no:cacheprovider", "-k", f"{choose_simd()} and not table and not dense and not 1.6"]
        + [str(TESTS / "contract" / name) for name in ("test_integer_product.py", "test_batch_invariance.py")]
    )
    print(f"contract tests with {choose_simd()}: exit code {int(code)}", flush=True)
    if recording:
        Path(sys.argv[2]).write_text("\n".join(files_in_use()))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
