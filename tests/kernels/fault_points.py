"""Run with fail_allocation.c loaded: every allocation of the CPU kernels fails once, in each of several uses of them.

    LD_PRELOAD=.../fail_allocation.so python fault_points.py FOLDER_OF_TESTS

After each failure: the use raised MemoryError or OutOfMemory (or went on without that memory), nothing leaked, and the
same use once more gives the right result. Prints {use: failures} as JSON.
"""

import ctypes
import gc
import json
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from helpers import DATA, GOLDEN, rng

import bitnet_ref
from bitnet_ref.backends.cpu.backend import CythonBackend
from bitnet_ref.backends.cpu.extension import _cpu, layouts_for, simd_variants
from bitnet_ref.errors import OutOfMemory
from bitnet_ref.reference.cache import TokenBatch

allocator = ctypes.CDLL(None)
allocator.watch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
mappings = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(_cpu.__file__)]
(code,) = [addresses for addresses, rights, *_ in mappings if "x" in rights]
allocator.watch(*(int(address, 16) for address in code.split("-")))


def fail_each(use):
    """use() -> a comparable result. Returns how many allocations it makes that failed, each once."""
    expected, n = use(), 0
    gc.collect()
    gc.freeze()
    live = allocator.count_live()
    while True:
        n += 1
        allocator.fail_at(n)
        try:
            result, error = use(), None
        except (MemoryError, OutOfMemory) as problem:
            result, error = None, type(problem).__name__
        reached = allocator.count_calls() >= n
        allocator.fail_at(0)
        assert reached or error is None, f"allocation {n} did not fail, and yet {error}"
        assert error or result == expected, f"wrong result after allocation {n} failed"
        if not reached:
            return n - 1
        assert use() == expected, f"wrong result in the use after that in which allocation {n} failed"
        gc.collect()  # tapes
        assert allocator.count_live() == live, f"{allocator.count_live() - live} leaked after allocation {n} failed"


def texts(model, prompts, **settings):
    def use():
        return [out.token_ids for out in model.generate(prompts, temperature=0.0, **settings)]

    return use


def passes(model, path):
    """A prompt, then three tokens one by one, by a path of the backend."""
    tokens = rng(3).integers(1, 50, 12)

    def use():
        cache = model.new_cache(1, 16)
        parts = [(0, tokens[:9]), *((9 + i, tokens[9 + i : 10 + i]) for i in range(3))]
        logits = [model.run(TokenBatch.of([(0, at, ids)]), cache, path=path).all() for at, ids in parts]
        return [each.tobytes() for each in logits]

    return use


def uses():
    usable = [name for name, lacks in simd_variants().items() if lacks is None]
    simd = usable[-1]  # the others allocate at the same places
    for layout in layouts_for(simd):
        be = CythonBackend(threads=2, simd=simd, layout=layout)
        cases = ["bitnet-packed-offline", *(["llama-dense"] if layout == "2-bit" else [])]
        for case in cases:
            for path in ("ops", "replayed"):
                yield f"{case} {layout} {path}", passes(bitnet_ref.load(GOLDEN / case).on(be), path)
        if layout == layouts_for(simd)[0]:  # ternary by groups, whose layout is the set's; turned into their basis
            for file in ("", "pq2_0-hadamard.gguf"):
                groups = bitnet_ref.load(DATA / "families" / "qwen3-groups128" / file).on(be)
                yield f"groups {file}", passes(groups, "replayed")
    model = bitnet_ref.load("storyteller", backend="cython", threads=2, head="screened", cache_dtype="int8")
    prompts = ["Once upon a time there was a rabbit who", "The little", "A"]
    for each in (prompts, prompts[-1:]):
        yield f"{len(each)} texts of storyteller", texts(model, each, max_tokens=4)


print(json.dumps({name: fail_each(use) for name, use in uses()}))
