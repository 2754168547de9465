"""The smallest error of each kind that crossval notices, by what the trace holds.

    python crossval/sensitivity.py [--write]

An engine that is right but for one error is judged as another engine's trace. The smallest error that is noticed is
found by bisection. `--write` puts the table into docs/sensitivity.md.
"""

from __future__ import annotations

import argparse
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
from bitnet_ref.crossval.explain.edits.attention import sees_by
from bitnet_ref.crossval.explain.variants import Setting, with_matrix
from bitnet_ref.crossval.trace import write_trace
from bitnet_ref.families.family import Edit, Hypothesis, after, before, turned_by
from bitnet_ref.reference import layers

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


def of_steps(globs: str, edit_of: Callable[[float], Edit]) -> Callable[[Setting, float], Setting]:
    """edit_of(size) in every step whose name matches."""
    return lambda s, size: Hypothesis(globs, "", "", "", edit_of(size)).change(s)


def one_weight(size: float) -> Edit:
    def change(w: Any) -> Any:
        w_t = w.ternary()
        w_t[7, 9] = -1 if w_t[7, 9] > 0 else 1
        return with_matrix(w, w_t)

    return before(1, change)


def other_eps(size: float) -> Edit:
    return before(1, lambda eps: eps * (1 + size))


def scaled_weight(size: float) -> Edit:
    return before(1, lambda w: replace(w, w_dequant_scale=np.float32(w.w_dequant_scale * (1 + size))))


def one_token(size: float) -> Edit:
    def change(y: Any) -> Any:
        y = np.array(y)
        y[ROW] *= 1 + np.float32(size)
        return y

    return after(change)


def one_value(size: float) -> Edit:
    def change(y: Any) -> Any:
        y = np.array(y)
        y[ROW, 3] += np.abs(y[ROW]).max() * y.dtype.type(size)
        return y

    return after(change)


def one_sum(size: float) -> Edit:
    def change(acc: Any) -> Any:
        acc = acc.copy()
        acc[ROW, 3] += int(size)
        return acc

    return after(change)


def one_position(size: float) -> Edit:
    def edit(step: Any, compute: Any, x: Any, *tables: Any) -> Any:
        positions, config = np.arange(len(x)), step.setting.config
        moved = positions + size * (positions == ROW)
        return compute(x, *layers.rope_tables(moved, config.rope, config.rotary_size, np.float32))

    return edit


def one_mask(size: float) -> Edit:
    return sees_by(lambda i, j, window: (j <= i) & ((i != ROW) | (j > 0)))


def scaled_scores(size: float) -> Edit:
    return after(lambda x: x * np.float32(1 + size))


def one_theta(size: float) -> Edit:
    return turned_by(lambda step: replace(step.setting.config.rope, theta=step.setting.config.rope.theta * (1 + size)))


def halves(first: int) -> tuple[float, ...]:
    return tuple(2.0**-n for n in range(first, 25))


FACTOR, SHARE = "x (1 + {:.1e})", "{:.1e} of the largest"
WEIGHT = "one weight of 1,048,576"
# kind, how it is made, sizes to try from the largest, how a size is said
KINDS: tuple[tuple[str, Callable[[Setting, float], Setting], tuple[float, ...], str], ...] = (
    (
        WEIGHT,
        of_steps("blocks.0.attn.o_proj.hook_acc_int32", one_weight),
        (1,),
        "the sign",
    ),
    ("one accumulator of each matrix", of_steps("*.hook_acc_int32", one_sum), (1024, 256, 64, 16, 4, 1), "{:.0f}"),
    ("the weight scale of down_proj", of_steps("*.down_proj.hook_out", scaled_weight), halves(6), FACTOR),
    ("the weight scale of up_proj", of_steps("*.up_proj.hook_out", scaled_weight), halves(6), FACTOR),
    ("RoPE at one position", of_steps("*.hook_rot_[qk]", one_position), halves(0), "{:.1e} positions"),
    ("the first token masked for one token", of_steps("*.hook_attn_scores", one_mask), (1,), "one"),
    ("norms of one token", of_steps("*.hook_normalized", one_token), halves(4), FACTOR),
    ("one value of each norm", of_steps("*.hook_normalized", one_value), halves(4), SHARE),
    ("one value of each gate", of_steps("*.hook_post", one_value), halves(4), SHARE),
    ("one value of the embedding", of_steps("hook_embed", one_value), halves(4), SHARE),
    (
        "the norms' eps",
        of_steps("*.hook_scale", other_eps),
        halves(0),
        FACTOR,
    ),
    ("RoPE's theta", of_steps("*.hook_rot_[qk]", one_theta), halves(0), FACTOR),
    ("attention's 1/sqrt(d)", of_steps("*.hook_attn_scores", scaled_scores), halves(4), FACTOR),
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
            config = WIDE if kind == WEIGHT else NARROW
            model = bitnet_ref.load(write(folder / "model", config, tensors_for(config)), backend="numpy", threads=1)
            results = list(smallest(model, make, sizes, folder))
            cells = ["not noticed" if size is None else words.format(size) for size, _ in results]
            lines.append(f"| {kind} | {' | '.join(cells)} | {results[0][1]} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/sensitivity.md")
    options = parser.parse_args()
    text = table()
    print(text, end="")
    if options.write:
        before, rest = PAGE.read_text(encoding="utf-8").split("| error |", 1)
        PAGE.write_text(f"{before}{text}\n{rest.split(chr(10) * 2, 1)[1]}", encoding="utf-8")
