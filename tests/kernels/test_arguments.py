"""Every function of the extension, called with what it must not be called with: it raises and does not crash.

One argument of a good call at a time becomes each of many bad values. A child process makes the calls, because what
this test looks for ends a process.
"""

from pathlib import Path

import numpy as np
import pytest
from helpers import run_python

from bitnet_ref.backends.cpu.extension import _cpu, why_unavailable

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason="the extension is not built")


def floats(*shape):
    return np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)


def good_calls():
    """name -> a call of every function and class of the extension, by argument names."""
    M, N, K, G, d, pages, size = 3, 70, 32, 2, 8, 4, 16
    packed = np.full((N, K // 4), 0b01_10_00_01, dtype=np.uint8)
    panels = np.zeros((2, 512), dtype=np.uint8)
    _cpu.pack_panels(packed, panels, 1, 0)
    weight = {"panels": panels, "n_out": N, "n_in": K, "w_dequant_scale": 0.5, "bias": floats(N), "method": 0}
    strips = np.zeros((N, 64), dtype=np.uint8)
    _cpu.pack_strips(packed, strips, False, 1)
    weight |= {"strips": strips, "by_columns": False}
    count, size, chunks, _, rows = _cpu.group_sizes(N, K, 16, 0)
    group_panels, group_scales = np.zeros((count, size), dtype=np.uint8), np.ones((count * chunks, rows), np.float32)
    _cpu.group_pack_panels(packed, K, 16, 0, group_panels, 1)
    by_groups = {"panels": group_panels, "scales": group_scales, "n_out": N, "n_in": K, "group": 16, "layout": 0}
    by_groups |= {"bias": floats(N), "signs": np.ones(K, np.float32), "order": np.arange(K), "block": 16}
    plain = {**by_groups, "bias": None, "signs": None, "order": None, "block": 0}
    count, size, chunks, _, rows = _cpu.group_sizes(K, N, 16, 0)
    down = {"panels": np.zeros((count, size), np.uint8), "scales": np.ones((count * chunks, rows), np.float32)}
    down = _cpu.ExpertPanels(3 * [_cpu.GroupPanels(**{**plain, **down, "n_out": K, "n_in": N})])
    experts = _cpu.ExpertPanels(3 * [_cpu.GroupPanels(**plain)])
    form = _cpu.ruled_forms()[0]  # of Q8_0
    ruled = {"panels": np.zeros((-(-N // _cpu.ruled_rows), K // form[2] * form[5]), np.uint8), "form": 0}
    ruled |= {"n_out": N, "n_in": K}
    int8, tokens = np.ones((M, K), dtype=np.int8), np.arange(M)
    keys, scales = np.zeros((pages, size, G, d), dtype=np.int8), np.ones((pages, size, G), dtype=np.float32)
    arrays = floats(pages, size, G, d), floats(pages, size, G, d)
    table, screen = np.arange(pages, dtype=np.int32)[None], (np.zeros((N, 64), np.int8), floats(N, 3))
    place = {"layer": _cpu.KVLayer(*arrays), "page_table": table, "slots": 0 * tokens, "positions": tokens}
    turns = {"cos": floats(M, d // 2), "sin": floats(M, d // 2)}
    run = {"threads": 2, "kernels": 0}
    pairs = [(floats(5, K), floats(5, N)), None, (np.ones((3, K), np.uint16), np.ones((3, N), np.uint16))]
    return {
        "kernel_sets": {},
        "LoraFactors": {"pairs": pairs},
        "lora": {
            "x": floats(M, K), "y": floats(M, N), "t": floats(M, 5), "factors": _cpu.LoraFactors(pairs),
            "choice": np.array([0, 2, -1], dtype=np.int32), **run,
        },
        "ternary_methods": {},
        "sum_words": {"words": np.arange(99, dtype=np.uint64), "threads": 2},
        "peak_multiply_adds": {"kernels": 0, "rounds": 1, "threads": 2},
        "pack_panels": {"packed": packed, "panels": panels, "threads": 2, "method": 0},
        "unpack_panels": {"panels": panels, "packed": packed.copy(), "threads": 2, "method": 0},
        "pack_plane": {"plane": packed.copy(), "packed": np.zeros((4 * N, K // 16), np.uint8), "threads": 2},
        "quantize": {"x": floats(M, K), "x_q": int8, "x_quant_scale": floats(M, 1), "kernels": 0},
        "ternary_matmul": {
            "x_q": int8, "x_sum": int8.sum(1, dtype=np.int32), "panels": panels, "acc": np.zeros((M, N), np.int32),
            "method": 0, **run,
        },
        "Panels": weight,
        "StripCounts": {},
        "has_strips": {"kernels": 0},
        "pack_strips": {"packed": packed, "strips": strips.copy(), "by_columns": 0, "threads": 2},
        "group_layout": {"kernels": 0},
        "group_sizes": {"N": N, "K": K, "group": 16, "layout": 0},
        "group_pack_panels": {
            "packed": packed, "K": K, "group": 16, "layout": 0, "panels": group_panels.copy(), "threads": 2
        },
        "GroupPanels": by_groups,
        "group_linears": {
            "x": floats(M, K), "ws": [_cpu.GroupPanels(**by_groups)], "ys": [floats(M, N)], "tape": None, **run
        },
        "ExpertPanels": {"ws": [_cpu.GroupPanels(**plain)]},
        "mixture": {
            "h": floats(M, K), "scores": floats(M, 3), "gate": experts, "up": experts, "down": down, "k": 2,
            "divides": 1, "limit": 7.0, "is_silu": 1, "y": floats(M, K), "tape": None, **run,
        },
        "bit_linears": {
            "x": floats(M, K), "ws": [_cpu.Panels(**weight)], "ys": [floats(M, N)], "tape": None,
            "norm_weight": floats(K), "eps": 1e-5, "gate": 0, "residual": floats(M, N), **run,
            "terms": [(_cpu.LoraFactors(pairs), np.array([0, 2, -1], dtype=np.int32), floats(M, 5), floats(M, N))],
            "normed": floats(M, K),
        },
        "dequantize": {
            "acc": np.ones((M, N), np.int32), "w_dequant_scale": 1.0, "x_quant_scale": 2 + floats(M, 1),
            "y": floats(M, N), "kernels": 0,
        },
        "rms_norm": {"x": floats(M, K), "weight": floats(K), "eps": 1e-5, "y": floats(M, K), "tape": None, **run},
        "gated": {"gate": floats(M, K), "up": floats(M, K), "is_silu": 1, "y": floats(M, K), "tape": None, **run},
        "add": {"x": floats(M, K), "y": floats(M, K), "z": floats(M, K), "is_bias": 0, "threads": 2, "tape": None},
        "take_rows": {"x": floats(M, K), "rows": np.array([2, 0]), "y": floats(2, K), "threads": 2, "tape": None},
        "narrow": {"x": floats(M, K), "to_half": 1, "y": floats(M, K), "threads": 2, "tape": None},
        "rope": {"x": floats(M, G, d), "y": floats(M, G, d), "tape": None, **turns, **run},
        "KVLayer": {"keys": keys, "values": keys.copy(), "key_scales": scales, "value_scales": scales.copy()},
        "append": {**place, "k": floats(M, G, d), "v": floats(M, G, d), "tape": None, **turns, **run},
        "attention": {
            "q": floats(M, 4, d), "window": 2, "z": floats(M, 4, d), "tape": None, **place, **turns, **run
        },
        "ruled_forms": {},
        "RuledPanels": ruled,
        "ruled_linears": {
            "x": floats(M, K), "ws": [_cpu.RuledPanels(**ruled)], "ys": [floats(M, N)], "tape": None,
            "norm_weight": floats(K), "eps": 1e-5, "gate": 0, "residual": floats(M, N), **run,
        },
        "dense_linears": {
            "x": floats(M, K), "ws": [floats(N, K)], "ys": [floats(M, N)], "tape": None, "blocks": [0], **run
        },
        "screen_pack": {"w": floats(N, K), "q": screen[0], "facts": screen[1], **run},
        "screen_rows": {
            "x": floats(M, K), "q": screen[0], "facts": screen[1], "lower": floats(M, N), "upper": floats(M, N), **run
        },
        "dense_rows": {"x": floats(K), "w": floats(N, K), "rows": np.array([5, 69]), "y": floats(2), **run},
        "Tape": {},
        "bound_cpus": {},
        "draw": {
            "logits": floats(N), "temperature": 0.7, "uniform": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1,
            "kernels": 0,
        },
        "greedy_steps": {
            "step": _cpu.Tape(), "head": _cpu.Tape(), "table": floats(N, K), "scale": 2.0, "x": floats(M, K),
            "positions": tokens.copy(), "rope": floats(2, 2, M, d), "full": floats(2, 300, d),
            "local": floats(2, 300, d),
            "hidden": floats(M, K), "logits": floats(M, N), "left": tokens + 2, "ends": np.array([N - 2, 900]),
            "bell": np.zeros(1, np.uint8), "tokens": np.zeros((4, M), np.int64), "values": floats(4, M),
            "states": floats(4, M, K), "rules": np.tile([0.7, 3, 0.9, 0.1], (M, 1)), "uniforms": np.full((4, M), 0.5),
            "threads": 2, "kernels": 0,
        },
        "norm_backward": {
            "dy": floats(M, K), "x": floats(M, K), "weight": floats(K), "eps": 1e-5, "dx": floats(M, K),
            "d_weight": floats(K), "kernels": 0,
        },
        "causal_softmax": {
            "scores": floats(G, M, M + 1).astype(np.float64), "pattern": floats(G, M, M + 1), "start": 5, "window": 2,
            "scale": 0.5, "kernels": 0,
        },
        "softmax_backward": {"d_scores": floats(G, M, K), "pattern": floats(G, M, K), "scale": 0.5, "kernels": 0},
        "relu2_backward": {
            "dy": floats(M, K), "gate": floats(M, K), "up": floats(M, K), "d_gate": floats(M, K), "d_up": floats(M, K),
            "kernels": 0,
        },
        "ternarize": {
            "w": floats(N, K), "w_dequant_scale": 0.5, "packed": packed.copy(), "values": floats(N, K), "kernels": 0
        },
        "rescale": {"x_q": int8, "x_quant_scale": floats(M, 1), "x": floats(M, K), "kernels": 0},
        "sum_of_squares": {"x": floats(K), "kernels": 0},
        "bfloat16_product": {"a": floats(M, K), "b": floats(K, N), "c": floats(M, N), "kernels": 0},
        "has_bfloat16_product": {"kernels": 0},
        "adamw": {
            "w": floats(K), "g": floats(K), "m": floats(K), "v": floats(K), "b1": 0.9, "b2": 0.95, "v_scale": 0.3,
            "eps": 1e-8, "keep": 0.999, "step_size": 0.01, "kernels": 0,
        },
    }  # fmt: skip


def misaligned(array):
    bytes_ = np.zeros(array.nbytes + 1, dtype=np.uint8)[1:]
    copy = bytes_.view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def read_only(array):
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def bad_arrays(array):
    """(what is wrong, the array): what no function may take, then what some may"""
    yield "a number", 3
    yield "a list", array.tolist()
    yield "another dtype", array.astype(np.float32 if array.dtype == np.float64 else np.float64)
    yield "one more axis", array[None]
    yield "one axis less", array[0]
    if array.itemsize > 1:
        yield "misaligned", misaligned(array)
        yield "the other byte order", array.astype(array.dtype.newbyteorder())
    if array.shape[-1] > 1:
        yield "not contiguous", np.repeat(array, 2, axis=-1)[..., ::2]
        yield "backwards", array[..., ::-1]
    yield "absent", None
    yield "read-only", read_only(array)
    for axis in range(array.ndim):
        sizes = [0, array.shape[axis] + 1]
        shapes = [[size if i == axis else n for i, n in enumerate(array.shape)] for size in sizes]
        if array.ndim > 1:  # a size without memory behind it
            shapes.append([2**33 if i == axis else 0 for i in range(array.ndim)])
        for shape in shapes:
            yield f"shape {tuple(shape)}", np.ones(shape, dtype=array.dtype)
    limits = np.iinfo(array.dtype) if array.dtype.kind in "iu" else np.finfo(array.dtype)
    for value in (limits.min, limits.max, *(() if array.dtype.kind in "iu" else (np.nan, np.inf))):
        yield f"all {value}", np.full_like(array, value)


NEVER = ("a number", "a list", "another dtype", "one more axis", "one axis less", "misaligned", "the other byte order",
         "not contiguous", "backwards")  # fmt: skip
# Extremes of what an int holds, and what is none. "peak_multiply_adds" takes as long as it is told to.
NUMBERS = (-1, 0, 1, 2, 3, 255, 4097, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**63), 2**80, None, "x")
REFUSALS = (TypeError, ValueError, OverflowError, MemoryError, AttributeError, BufferError)


def attack():
    """Calls with one bad argument each. -> (number of calls, [[function, argument, what was wrong]] that passed)"""
    total, passed = 0, []
    for name, good in good_calls().items():
        getattr(_cpu, name)(**good)
        for argument, value in good.items():
            bad = bad_arrays(value) if isinstance(value, np.ndarray) else [(repr(n), n) for n in NUMBERS]
            for problem, replacement in bad:
                if argument == "rounds" and isinstance(replacement, int) and replacement > 4096:
                    continue
                total += 1
                try:
                    getattr(_cpu, name)(**{**good_calls()[name], argument: replacement})
                except REFUSALS:
                    continue
                passed.append([name, argument, problem])
    return total, passed


# The sizes that no other argument of the call fixes
FREE_SIZES = {
    ("sum_words", "words"), ("pack_panels", "packed"), ("unpack_panels", "packed"), ("ternary_matmul", "acc"),
    ("append", "page_table"), ("attention", "page_table"), ("dense_rows", "w"), ("screen_pack", "w"),
    ("greedy_steps", "ends"), ("greedy_steps", "table"), ("greedy_steps", "full"), ("greedy_steps", "local"),
    ("greedy_steps", "rules"),  # none: no row draws
    ("screen_rows", "x"), ("pack_strips", "packed"), ("group_pack_panels", "packed"), ("group_linears", "x"),
    ("sum_of_squares", "x"), ("draw", "logits"), ("take_rows", "x"),
}  # fmt: skip
OUTPUTS = {
    "x_q", "x_quant_scale", "acc", "y", "z", "panels", "packed", "keys", "values", "key_scales", "value_scales", "q",
    "facts", "lower", "upper", "tokens", "states", "dx", "d_weight", "scores", "pattern", "d_scores",
    "d_gate", "d_up", "t", "normed", "c",
}  # fmt: skip
INPUTS_OF_THAT_NAME = {
    "packed": "pack_panels pack_strips group_pack_panels",
    "panels": "unpack_panels ternary_matmul Panels GroupPanels RuledPanels",
    "x_q": "ternary_matmul",
}
INPUTS_OF_THAT_NAME |= {"q": "attention screen_rows", "facts": "screen_rows", "y": "add"}
INPUTS_OF_THAT_NAME |= {"scores": "mixture"}
INPUTS_OF_THAT_NAME |= {"x_quant_scale": "dequantize rescale"}
INPUTS_OF_THAT_NAME |= {"acc": "dequantize", "x_q": "ternary_matmul rescale", "pattern": "softmax_backward"}
OUTPUTS_OF = {"rescale": "x", "adamw": "wmv"}  # arguments whose names are inputs' in other functions
CODE = """
import faulthandler, json, sys
faulthandler.enable()
sys.path[:0] = sys.argv[1:]
from test_arguments import attack
print(json.dumps(attack()))
"""


@pytest.mark.thorough
def test_no_bad_argument_passes_or_crashes():
    here = Path(__file__).parent
    total, passed = run_python(CODE, here, here.parent)
    print(f"{total} calls of the extension with a bad argument")
    assert total > 1800
    assert not [each for each in passed if each[2] in NEVER]
    sizes = {(name, argument) for name, argument, problem in passed if problem.startswith("shape")}
    assert sizes == FREE_SIZES
    assert {argument for _, argument, problem in passed if problem == "absent"} == {
        "bias", "norm_weight", "residual", "cos", "sin", "strips", "order", "choice"
    }  # fmt: skip
    for name, argument, problem in passed:
        if problem == "read-only" and argument in OUTPUTS:
            assert name in INPUTS_OF_THAT_NAME[argument].split(), (name, argument)
        assert not (problem == "read-only" and argument in OUTPUTS_OF.get(name, ""))
        if argument in ("kernels", "method"):
            assert problem in ("0", "1", "2", "3", "4"), (name, argument, problem)
        if argument == "threads":
            assert problem in ("1", "2", "3", "255"), (name, argument, problem)
        assert not (name == "attention" and argument == "window" and problem.startswith("-"))


def test_a_call_of_every_function_is_attacked():
    public = {name for name, value in vars(_cpu).items() if not name.startswith("_") and callable(value)}
    assert public == set(good_calls())
