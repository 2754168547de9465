"""Plants mistakes of decoding, chunks, caches and batches in a real engine with a cache, and counts which are named.

    python crossval/call_mistakes.py [--shown full|thin] [NAME ...]

The engine is this package's own forward pass, call by call, with a cache. A mistake is made where engines make them: in the
positions of a batch, in what stands in the cache between two calls, in which entries attention reads. No edit of the
search's is used. `full` shows every tensor that the engine has, `thin` the residual stream and the logits.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import bitnet_ref
from bitnet_ref.backends import Backend
from bitnet_ref.backends.observe import observe
from bitnet_ref.backends.paged_cache import EngineKVCache
from bitnet_ref.backends.record import Recorder
from bitnet_ref.crossval.calls import placed_by_calls
from bitnet_ref.crossval.compare import compare
from bitnet_ref.crossval.explain.diagnose import diagnose
from bitnet_ref.crossval.explain.near_halves import follow_flips
from bitnet_ref.reference import layers
from bitnet_ref.reference.cache import TokenBatch
from bitnet_ref.reference.model import forward

DATA = Path(__file__).parents[1] / "tests" / "data"
SHOWN: dict[str, Callable[[str], bool]] = {
    # of attention's scores the recorder would show the right ones: they are computed from the cache, not by the engine
    "full": lambda name: not name.endswith(("hook_attn_scores", "hook_pattern")),
    "thin": lambda name: name.endswith("hook_resid_post") or name == "lm_head.hook_out",
}


@dataclass(frozen=True)
class Mistake:
    """One mistake of an engine. causes: the hypotheses that say it.

    positions: (positions, the call's first token) -> those that RoPE turns by.
    read: (keys, values (N, G, d) of the calls before, this run) -> as attention reads them.
    visible: (position, the call's first token, its end) -> the positions that a token reads.
    states: (DeltaNet's memories, their convolutions' inputs, an earlier copy of both) changes them before a later call.
    int8: (a call's int8 activations, x * scale, its first token) -> as a kernel of its own rounds them.
    in_front: how many of the tokens stand before the sequence, which are of another or padding, and seen by mistake.
    """

    name: str
    causes: tuple[str, ...]
    positions: Callable[[np.ndarray, int], np.ndarray] | None = None
    read: Callable[..., tuple[np.ndarray, np.ndarray]] | None = None
    visible: Callable[[int, int, int], Iterable[int]] | None = None
    states: Callable[..., None] | None = None
    int8: Callable[[np.ndarray, np.ndarray, int], np.ndarray] | None = None
    in_front: str = ""
    calls: tuple[int, ...] = (14, 1, 1, 1, 4, 3)
    model: str = "storyteller"


class Decoder(Backend):
    """The reference with a mistake. `start`, `end`: of the call that is computed.   offset: tokens in front."""

    def __init__(self, model: Any, mistake: Mistake, other: EngineKVCache | None = None, offset: int = 0) -> None:
        super().__init__("float32", 1)
        self.model, self.mistake, self.other, self.offset = model, mistake, other, offset
        self.start = self.end = 0

    def rope_tables(self, positions: np.ndarray, rope: Any, head_dim: int) -> Any:
        change = self.mistake.positions
        wrong = positions if change is None else change(positions, self.start - self.offset * (self.start > 0))
        return super().rope_tables(wrong, rope, head_dim)

    def quantize_activations(self, x: np.ndarray) -> Any:
        x_q, scale = super().quantize_activations(x)
        return (x_q if self.mistake.int8 is None else self.mistake.int8(x_q, x * scale, self.start)), scale

    def attention(self, q: np.ndarray, cache: Any, batch: Any, layer: int, window: int | None) -> np.ndarray:
        keys, values = (x.copy() for x in cache.visible(layer, 0, self.end - 1, None))
        if self.mistake.read is not None and self.start:
            read = self.mistake.read(keys[: self.start], values[: self.start], self, layer)
            keys[: self.start], values[: self.start] = read
        rows = []
        for one, position in zip(q, batch.positions.tolist(), strict=True):
            every = (
                range(position + 1)
                if self.mistake.visible is None
                else self.mistake.visible(position, self.start, self.end)
            )
            seen = [j for j in every if 0 <= j < self.end and (window is None or position - j < window)]
            rows.append(layers.attention_values(layers.softmax(layers.attention_scores(one, keys[seen])), values[seen]))
        return np.stack(rows)


def run_mistaken(
    model: Any,
    ids: Sequence[int],
    mistake: Mistake,
    shown: Callable[[str], bool],
    front: Sequence[int] = (),
    other: Sequence[int] = (),
) -> dict[str, Any]:
    """The engine's tensors, joined over its calls.   front: tokens before the sequence, of the first call."""
    beside = None
    if other:
        beside = model.new_cache(1, max(len(other), len(ids)))
        forward(
            Backend("float32", 1),
            model.weights,
            model.config,
            TokenBatch.of([(0, 0, np.asarray(other, dtype=np.int64))]),
            beside,
        )
    be = Decoder(model, mistake, beside, len(front))
    tokens, parts = np.asarray([*front, *ids], dtype=np.int64), dict[str, list[np.ndarray]]()
    cache, earlier = model.new_cache(1, len(tokens)), None
    for number, size in enumerate(mistake.calls):
        be.start, be.end = be.end, be.end + size + len(front) * (number == 0)
        if number and mistake.states is not None:
            states = (cache.states.memory[:, 0, 0], cache.states.inputs[:, 0, 0])
            now = [x.copy() for x in states]
            mistake.states(*states, earlier or [0 * x for x in now])
            earlier = now
        recorder = Recorder(be, model.config, shown)
        batch = TokenBatch.of([(0, be.start, tokens[be.start : be.end])])
        with np.errstate(all="ignore"):
            forward(observe(be, recorder), model.weights, model.config, batch, cache)
        for name, array in recorder.seen.items():
            parts.setdefault(name, []).append(array)
    return {name: np.concatenate(arrays)[len(front) :] for name, arrays in parts.items()}


# -- the mistakes ------------------------------------------------------------------------------------------------------


def _rotated(keys: np.ndarray, be: Decoder, layer: int) -> np.ndarray:
    rope = be.model.config.ropes[be.model.config.rope_of(layer)]
    tables = rope.tables(np.arange(len(keys)), be.model.config.rotary_size, np.float32)
    return layers.apply_rope(keys, *tables)


def _unrotated(keys: np.ndarray, be: Decoder, layer: int) -> np.ndarray:
    rope = be.model.config.ropes[be.model.config.rope_of(layer)]
    cos, sin = rope.tables(np.arange(len(keys)), be.model.config.rotary_size, np.float32)
    return layers.apply_rope(keys, cos, -sin)


def _normed(keys: np.ndarray, be: Decoder, layer: int) -> np.ndarray:
    norm = be.model.weights.layers[layer].k_norm
    return layers.rms_norm(keys.reshape(-1, len(norm.weight)), norm.weight, norm.eps).reshape(keys.shape)


def _beside(be: Decoder, layer: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    return be.other.visible(layer, 0, n - 1, None)  # type: ignore[union-attr]


def _back(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x[:1], x[:-1]])


def _int8(x: np.ndarray) -> np.ndarray:
    scale = np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-12)) / np.float32(127)
    return np.rint(x / scale) * scale


def _keep(memory: np.ndarray, inputs: np.ndarray, earlier: Any) -> None:
    memory[:] = 0


def _set(which: int, change: Callable[[np.ndarray, Any], Any]) -> Callable[..., None]:
    def states(*arrays: Any) -> None:
        arrays[which][:] = change(arrays[which], arrays[2][which])

    return states


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


QWEN, HYBRID, WINDOW = "qwen3-groups128", "qwen3_5-groups128-hybrid", "mistral-dense-window8"
# fmt: off
MISTAKES = (
    Mistake("positions_restart", ("positions_restart",), positions=lambda p, s: p - s),
    Mistake("positions_too_high", ("positions_too_high",), positions=lambda p, s: p + (s > 0)),
    Mistake("positions_too_low", ("positions_too_low",), positions=lambda p, s: p - (s > 0)),
    Mistake("positions_of_the_first", ("positions_of_the_first",), positions=lambda p, s: np.where(s > 0, s, p)),
    Mistake("positions_twice", ("positions_twice",), positions=lambda p, s: p + s),
    Mistake("positions_stuck", ("positions_stuck",), positions=lambda p, s: np.minimum(p, 14)),
    Mistake("table_ends", ("rope_table_ends_at_18",), positions=lambda p, s: np.minimum(p, 17)),
    Mistake("table_wraps", ("rope_table_wraps_at_18",), positions=lambda p, s: p % 18),
    Mistake("no_cache", ("calls_no_cache",), visible=lambda p, s, e: range(s, p + 1)),
    Mistake("itself_only", ("calls_itself_only",), visible=lambda p, s, e: range(p + 1) if s == 0 else [p]),
    Mistake("mask_without_offset", ("calls_mask_without_offset",), visible=lambda p, s, e: range(p - s + 1)),
    Mistake("future_in_call", ("calls_call_sees_its_future",), visible=lambda p, s, e: range(e)),
    Mistake("future_in_chunk", ("calls_later_call_sees_its_future",), visible=lambda p, s, e: range(e if s else p + 1)),
    Mistake("without_itself", ("calls_cache_without_itself",), visible=lambda p, s, e: range(p) if s else range(p + 1)),
    Mistake("last_of_prompt_lost", ("calls_last_of_prompt_lost",), visible=lambda p, s, e: [j for j in range(p + 1) if not s or j != 13]),
    Mistake("one_short", ("calls_cache_one_short",), visible=lambda p, s, e: [j for j in range(p + 1) if not s or j != s - 1]),
    Mistake("first_lost", ("calls_first_token_lost",), visible=lambda p, s, e: range(1 if s else 0, p + 1)),
    Mistake("prompt_lost", ("calls_first_call_lost",), visible=lambda p, s, e: range(14 if s else 0, p + 1)),
    Mistake("one_slot", ("calls_one_slot_for_decoding",), visible=lambda p, s, e: [j for j in range(p + 1) if not s or j < 14 or j >= s]),
    Mistake("prompt_only", ("calls_prompt_only",), visible=lambda p, s, e: range(14 if s else p + 1)),
    Mistake("last_call_only", ("calls_last_call_only",), visible=lambda p, s, e: [j for j in range(p + 1) if j >= {0: 0, 14: 0, 15: 14, 16: 15, 17: 16, 21: 17}[s]]),
    Mistake("ring_of_17", ("ring_of_17",), visible=lambda p, s, e: range(max(0, e - 17) if s else 0, p + 1)),
    Mistake("ring_of_20", ("ring_of_20",), visible=lambda p, s, e: range(max(0, e - 20) if s else 0, p + 1)),
    Mistake("narrow_in_decoding", ("window_of_14_in_decoding",), visible=lambda p, s, e: range(max(0, p - 13) if s else 0, p + 1)),
    Mistake("window_short_in_decoding", ("window_one_too_short_in_later_calls", "window_of_7_in_decoding"), visible=lambda p, s, e: range(max(0, p - 6) if s else 0, p + 1), model=WINDOW),
    Mistake("turned_twice", ("cache_turned_twice",), read=lambda k, v, be, i: (_rotated(k, be, i), v)),
    Mistake("not_turned", ("cache_not_turned",), read=lambda k, v, be, i: (_unrotated(k, be, i), v)),
    Mistake("normed_twice", ("cache_normed_twice",), read=lambda k, v, be, i: (_normed(k, be, i), v), model=QWEN),
    Mistake("row_before", ("cache_row_before",), read=lambda k, v, be, i: (_back(k), _back(v))),
    Mistake("keys_before", ("cache_row_before_of_keys",), read=lambda k, v, be, i: (_back(k), v)),
    Mistake("values_before", ("cache_row_before_of_values",), read=lambda k, v, be, i: (k, _back(v))),
    Mistake("never_written", ("cache_zeros",), read=lambda k, v, be, i: (0 * k, 0 * v)),
    Mistake("values_lost", ("cache_zero_values",), read=lambda k, v, be, i: (k, 0 * v)),
    Mistake("heads_next", ("cache_heads_next",), read=lambda k, v, be, i: (np.roll(k, 1, 1), np.roll(v, 1, 1))),
    Mistake("cache_bfloat16", ("cache_bfloat16",), read=lambda k, v, be, i: (k.astype(ml_dtypes.bfloat16), v.astype(ml_dtypes.bfloat16))),
    Mistake("cache_fp8", ("cache_fp8",), read=lambda k, v, be, i: (k.astype(ml_dtypes.float8_e4m3fn), v.astype(ml_dtypes.float8_e4m3fn))),
    Mistake("cache_int8", ("cache_int8",), read=lambda k, v, be, i: (_int8(k), _int8(v))),
    Mistake("cache_of_other", ("cache_of_other_0",), read=lambda k, v, be, i: _beside(be, i, len(k)), in_front="beside"),
    Mistake("keys_of_other", ("keys_of_other_0",), read=lambda k, v, be, i: (_beside(be, i, len(k))[0], v), in_front="beside"),
    Mistake("sees_other", ("sees_other_0",), in_front="other"),
    Mistake("sees_other_from_0", ("sees_other_0_from_0",), positions=lambda p, s: np.where(p < 9, p, p - 9), in_front="other"),
    Mistake("padding_bleeds", ("sees_padding_0",), in_front="padding"),
    Mistake("prompt_truncates", ("truncated_in_first_call",), int8=lambda x, wide, s: x if s else np.trunc(wide).astype(np.int8)),
    Mistake("decoding_truncates", ("truncated_in_later_calls",), int8=lambda x, wide, s: np.trunc(wide).astype(np.int8) if s else x),
    Mistake("state_lost", ("state_lost",), states=_set(0, lambda x, old: 0), model=HYBRID),
    Mistake("state_of_call_before", ("state_of_call_before",), states=_set(0, lambda x, old: old), model=HYBRID),
    Mistake("state_transposed", ("state_transposed",), states=_set(0, lambda x, old: x.swapaxes(-1, -2)), model=HYBRID),
    Mistake("state_bfloat16", ("state_in_bfloat16",), states=_set(0, lambda x, old: x.astype(ml_dtypes.bfloat16)), model=HYBRID),
    Mistake("conv_lost", ("conv_state_lost",), states=_set(1, lambda x, old: 0), model=HYBRID),
    Mistake("conv_after_silu", ("conv_state_after_silu",), states=_set(1, lambda x, old: _silu(x)), model=HYBRID),
    Mistake("conv_state_old", ("conv_state_of_call_before",), states=_set(1, lambda x, old: old), model=HYBRID),
    Mistake("conv_state_moved", ("conv_state_one_late",), states=_set(1, lambda x, old: np.roll(x, 1, axis=-2)), model=HYBRID),
)
# fmt: on


# -- the hunt ----------------------------------------------------------------------------------------------------------


class Shown(dict[str, np.ndarray]):
    """A trace of another engine, that says in which calls it was computed."""

    own_engine = False
    calls: tuple[int, ...] = ()
    others: Sequence[Sequence[int]] = ()


@dataclass(frozen=True)
class Outcome:
    """What crossval said of one mistake. place: its words for the call.   causes: names that were confirmed."""

    mistake: str
    first: str | None
    place: str
    causes: list[str]
    words: list[str]
    right: bool
    seconds: float


@cache
def model_of(name: str) -> Any:
    folder = next((DATA / each / name for each in ("golden", "families") if (DATA / each / name).exists()), name)
    return bitnet_ref.load(folder, backend="numpy", threads=1)


@cache
def reference_of(name: str, ids: tuple[int, ...]) -> Any:
    return model_of(name).run_with_cache(list(ids))[1]


def tokens_of(model: Any, n: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(3, model.config.vocab_size, n).tolist()


def hunt(mistake: Mistake, shown: str) -> Outcome:
    """Plant one mistake and let crossval find it."""
    model, n = model_of(mistake.model), sum(mistake.calls)
    lengths = {"padding": n + 6, "beside": n}  # of the other sequence
    ids, other = tokens_of(model, n), tokens_of(model, lengths.get(mistake.in_front, 9), seed=2)
    front = {"other": other, "padding": [0] * 6}.get(mistake.in_front, [])
    tensors = run_mistaken(model, ids, mistake, SHOWN[shown], front, other if mistake.in_front == "beside" else ())
    trace = Shown(tensors)
    trace.calls, trace.others = mistake.calls, [other] if mistake.in_front else []
    started = time.process_time()
    found = follow_flips(model, ids, trace, compare(reference_of(mistake.model, tuple(ids)), trace, model.config, ids))
    first = None if found.first_divergence is None else found.first_divergence
    diagnoses = diagnose(model, ids, trace, found, budget_s=120)
    confirmed = [d for d in diagnoses if d.confirmed]
    names = [d.name for d in confirmed]
    place = "" if first is None or first.token is None else placed_by_calls(first.token, mistake.calls)
    right = bool(names) and set(names) <= set(mistake.causes)
    words = [d.cause for d in confirmed]
    return Outcome(mistake.name, first and first.name, place, names, words, right, time.process_time() - started)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these mistakes")
    parser.add_argument("--shown", choices=list(SHOWN), default="full", help="what the engine's trace has")
    args = parser.parse_args()
    known = [m.name for m in MISTAKES]
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"no such mistake: {', '.join(unknown)}; there are: {', '.join(known)}")
    chosen = [m for m in MISTAKES if not args.names or m.name in args.names]
    outcomes = []
    for mistake in chosen:
        outcomes.append(o := hunt(mistake, args.shown))
        print(
            f"{'ok   ' if o.right else 'WRONG' if o.causes else 'none '} {o.mistake}, {o.seconds:.1f} s: {o.first}; {o.place}; {o.causes} {o.words if not o.right else ''}",
            flush=True,
        )
    named, wrong = sum(o.right for o in outcomes), sum(bool(o.causes) and not o.right for o in outcomes)
    print(f"{len(outcomes)} mistakes, {args.shown} traces: {named} causes named, {wrong} wrong ones")
    return 0 if named == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
