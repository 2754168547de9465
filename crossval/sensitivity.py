"""The smallest error of each kind that crossval notices, by what the trace holds.

    python crossval/sensitivity.py [--write]

An engine that is right but for one error is judged as another engine's trace. The smallest error that is noticed is
found by bisection. `--write` puts the table into docs/sensitivity.md.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from planted_models import BASE, tensors_for, write

import bitnet_ref
from bitnet_ref.crossval import cross_trace
from bitnet_ref.crossval.explain.variants import Setting, with_matrix
from bitnet_ref.crossval.trace import write_trace

PAGE = Path(__file__).resolve().parent.parent / "docs" / "sensitivity.md"
WIDE = {**BASE, "hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8}
NARROW = {**BASE, "hidden_size": 256, "intermediate_size": 512}
TOKENS = np.random.default_rng(3).integers(0, 64, 16).tolist()
LEVELS: dict[str, Callable[[str], bool]] = {
    "everything": lambda name: True,
    "hook_resid_post, logits": lambda name: name.endswith("hook_resid_post") or name == "lm_head.hook_out",
    "logits": lambda name: name == "lm_head.hook_out",
}
ROW = 5  # the token, position and row that are wrong


def one_weight(s: Setting, size: float) -> Setting:
    done = []

    def change(name: str, w: Any) -> Any:
        if name != "o_proj" or done:
            return w
        done.append(name)
        w_t = w.ternary()
        w_t[7, 9] = -1 if w_t[7, 9] > 0 else 1
        return with_matrix(w, w_t)

    return s.map_ternary(change)


def scale_of(linear: str) -> Callable[[Setting, float], Setting]:
    def make(s: Setting, size: float) -> Setting:
        def change(name: str, w: Any) -> Any:
            return replace(w, w_dequant_scale=np.float32(w.w_dequant_scale * (1 + size))) if name == linear else w

        return s.map_ternary(change)

    return make


def of_op(op: str, change: Callable[..., Any]) -> Callable[[Setting, float], Setting]:
    """change(result, size) of every call of the op."""
    return lambda s, size: s.with_ops(**{op: lambda plain, *args: change(plain(*args), size)})


def at_one_token(y: Any, size: float) -> Any:
    y = np.array(y)
    y[ROW] *= 1 + np.float32(size)
    return y


def one_value(y: Any, size: float) -> Any:
    y = np.array(y)
    y[ROW, 3] += np.abs(y[ROW]).max() * y.dtype.type(size)
    return y


def one_sum(acc: Any, size: float) -> Any:
    acc = acc.copy()
    acc[ROW, 3] += int(size)
    return acc


def one_position(s: Setting, size: float) -> Setting:
    def rope_tables(plain: Any, positions: Any, *rest: Any) -> Any:
        return plain(positions + size * (np.arange(len(positions)) == ROW), *rest)

    return s.with_ops(rope_tables=rope_tables)


def one_mask(s: Setting, size: float) -> Setting:
    return s.with_attention(sees=lambda position, window: (int(position == ROW), position + 1))


def one_epsilon(s: Setting, size: float) -> Setting:
    return s.map_norms(lambda norm: replace(norm, eps=norm.eps * (1 + size)))


def one_theta(s: Setting, size: float) -> Setting:
    return s.with_rope(theta=s.config.rope.theta * (1 + size))


def halves(first: int) -> tuple[float, ...]:
    return tuple(2.0**-n for n in range(first, 25))


FACTOR, SHARE = "x (1 + {:.1e})", "{:.1e} of the largest"
# kind, how it is made, sizes to try from the largest, how a size is said
KINDS: tuple[tuple[str, Callable[[Setting, float], Setting], tuple[float, ...], str], ...] = (
    ("one weight of 1,048,576", one_weight, (1,), "the sign"),
    ("one accumulator of each matrix", of_op("ternary_matmul", one_sum), (1024, 256, 64, 16, 4, 1), "{:.0f}"),
    ("the weight scale of down_proj", scale_of("down_proj"), halves(6), FACTOR),
    ("the weight scale of up_proj", scale_of("up_proj"), halves(6), FACTOR),
    ("RoPE at one position", one_position, halves(0), "{:.1e} positions"),
    ("the first token masked for one token", one_mask, (1,), "one"),
    ("norms of one token", of_op("rms_norm", at_one_token), halves(4), FACTOR),
    ("one value of each norm", of_op("rms_norm", one_value), halves(4), SHARE),
    ("one value of each gate", of_op("gated", one_value), halves(4), SHARE),
    ("one value of the embedding", of_op("embed", one_value), halves(4), SHARE),
    ("the norms' eps", one_epsilon, halves(0), FACTOR),
    ("RoPE's theta", one_theta, halves(0), FACTOR),
    ("attention's 1/sqrt(d)", lambda s, size: s.with_attention(factor=1 + size), halves(4), FACTOR),
)


def smallest(model: Any, make: Any, sizes: tuple[float, ...], folder: Path) -> Iterator[tuple[float | None, str]]:
    """For each level: (the smallest size that is noticed, the first wrong op named then). Found by bisection."""
    setting, runs = Setting.of(model, TOKENS), {}
    for wanted in LEVELS.values():
        low, high, best = 0, len(sizes), (None, "")  # sizes before `low` are noticed, those from `high` on are not
        while low < high:
            middle = (low + high) // 2
            size = sizes[middle]
            tensors = runs[size] = runs.get(size) or make(setting, size).run()
            path = folder / "trace.safetensors"
            write_trace(path, {n: a for n, a in tensors.items() if wanted(n)}, TOKENS, engine="engine under test")
            crossing = cross_trace(model, path, causes=False)
            wrong = next((c.first_divergence for c in crossing.comparisons if not c.agrees), None)
            if wrong is None:
                high = middle
            else:
                low, best = middle + 1, (size, wrong.name)
        yield best


def table() -> str:
    lines = ["| error | " + " | ".join(LEVELS) + " | named |", "|---|" + "---|" * (len(LEVELS) + 1)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for kind, make, sizes, words in KINDS:
            config = WIDE if make is one_weight else NARROW
            model = bitnet_ref.load(write(folder / "model", config, tensors_for(config)), backend="numpy", threads=1)
            results = list(smallest(model, make, sizes, folder))
            cells = ["not noticed" if size is None else words.format(size) for size, _ in results]
            lines.append(f"| {kind} | {' | '.join(cells)} | {results[0][1]} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    text = table()
    print(text, end="")
    if "--write" in sys.argv:
        before, rest = PAGE.read_text(encoding="utf-8").split("| error |", 1)
        PAGE.write_text(f"{before}{text}\n{rest.split(chr(10) * 2, 1)[1]}", encoding="utf-8")
