"""Draws correct float32 engines, shows crossval parts of what they compute and counts those that it accuses.

    python crossval/correct_engines.py [--seeds 0:500] [--json FILE]

An engine is the reference's text with other arithmetic: every norm, product, gate and attention in float32, sums in a
drawn order, attention whole or by tiles of keys, RoPE's angles in float32, BitLinears scaled in another order. It runs
over 24 to 512 tokens of models of all families and shows one of the traces that README names. Crossval must say that it
agrees, and must not name a cause. Of logits alone it may say that it cannot tell.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from planted_models import BASE, ONLINE, tensors_for, write

import bitnet_ref
from bitnet_ref.backends import Backend
from bitnet_ref.backends.observe import observe
from bitnet_ref.backends.record import Recorder
from bitnet_ref.backends.run import run
from bitnet_ref.crossval.compare import compare
from bitnet_ref.crossval.explain.diagnose import diagnose
from bitnet_ref.crossval.explain.near_halves import follow_flips
from bitnet_ref.families.groups import group_linear
from bitnet_ref.reference.cache import TokenBatch

F32 = np.float32
DATA = Path(__file__).parents[1] / "tests" / "data"
TOKENS = (24, 48, 100, 200, 512)
TEXT = (Path(__file__).parents[1] / "notebooks/alice.txt").read_text()

# -- the engines -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sums:
    """How an engine sums products over an axis: in blocks of so many, each block by BLAS, in this direction."""

    block: int
    backwards: bool

    def parts(self, length: int) -> list[slice]:
        parts = [slice(start, start + self.block) for start in range(0, length, self.block)]
        return parts[::-1] if self.backwards else parts

    def products(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """a (..., N, K) @ b (..., K, M), in float32"""
        total = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), dtype=F32)
        for part in self.parts(a.shape[-1]):
            total += a[..., part] @ b[..., part, :]
        return total

    def of(self, x: np.ndarray) -> np.ndarray:
        """x (..., K) -> (..., 1)"""
        total = np.zeros((*x.shape[:-1], 1), dtype=F32)
        for part in self.parts(x.shape[-1]):
            total += x[..., part].sum(-1, keepdims=True, dtype=F32)
        return total


class CorrectEngine(Backend):
    """Another engine's arithmetic, all of it in float32."""

    def __init__(self, sums: Sums, tile: int | None, angles: bool, scaling: int, seed: int) -> None:
        """tile: keys that attention takes at a time.   angles: RoPE's in float32.   scaling: of BitLinears, 0 to 2."""
        super().__init__("float32", 1)
        self.sums, self.tile, self.angles, self.scaling = sums, tile, angles, scaling
        self.rng = np.random.default_rng(seed)

    def rms_norm(self, x: np.ndarray, norm: Any) -> np.ndarray:
        mean = self.sums.of(np.square(x)) / F32(x.shape[1])
        return x * (F32(1) / np.sqrt(mean + F32(norm.eps))) * norm.weight

    def rope_tables(self, positions: np.ndarray, rope: Any, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
        if not self.angles or rope.rope_type != "default":
            return super().rope_tables(positions, rope, head_dim)
        exponents = np.arange(0, head_dim, 2, dtype=F32) / F32(head_dim)
        angles = positions.astype(F32)[:, None] * (F32(1) / F32(rope.theta) ** exponents)
        return np.cos(angles), np.sin(angles)

    def quantize_activations(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        largest = np.maximum(np.abs(x).max(-1, keepdims=True), F32(1e-5))
        if self.scaling < 2:
            return super().quantize_activations(x)
        inverse = largest / F32(127)
        return np.clip(np.rint(x / inverse), -128, 127).astype(np.int8), F32(1) / inverse

    def dequantize(self, acc: np.ndarray, w: Any, x_quant_scale: np.ndarray) -> np.ndarray:
        if self.scaling == 1:
            return acc.astype(F32) / x_quant_scale * F32(w.w_dequant_scale)
        return acc.astype(F32) * F32(w.w_dequant_scale) / x_quant_scale

    def dense_matmul(self, x: np.ndarray, w: Any) -> np.ndarray:
        return self.sums.products(x, _floats(w).T)

    def attention(self, q: np.ndarray, cache: Any, batch: Any, layer: int, window: int | None) -> np.ndarray:
        keys, values = cache.stored(layer, batch)
        group = q.shape[1] // keys.shape[1]
        k, v = (np.repeat(each, group, axis=1).transpose(1, 0, 2) for each in (keys, values))  # (H, N, d)
        q = q.transpose(1, 0, 2) * F32(q.shape[2] ** -0.5)
        i, j = np.arange(q.shape[1])[:, None], np.arange(q.shape[1])
        hidden = (j > i) | (i - j >= (window or len(j)))
        tile, total, most = self.tile or len(j), np.zeros_like(q), np.full((*q.shape[:2], 1), -np.inf, dtype=F32)
        weight = np.zeros_like(most)
        for start in range(0, len(j), tile):  # rescaled as larger scores come
            part = slice(start, start + tile)
            scores = self.sums.products(q, k[:, part].transpose(0, 2, 1))
            scores[:, hidden[:, part]] = -np.inf
            larger = np.maximum(most, scores.max(-1, keepdims=True))
            e = np.exp(scores - np.where(np.isneginf(larger), 0, larger))
            keep = np.exp(np.where(np.isneginf(most), -np.inf, most - larger))
            total, weight = total * keep + self.sums.products(e, v[:, part]), weight * keep + self.sums.of(e)
            most = larger
        return np.ascontiguousarray((total / weight).transpose(1, 0, 2))

    def gated(self, gate: np.ndarray, up: np.ndarray, activation: str) -> np.ndarray:
        if activation != "silu":
            return super().gated(gate, up, activation)
        return gate / (F32(1) + np.exp(-gate)) * up

    def compute(self, name: str, function: Callable[..., np.ndarray], *args: Any) -> np.ndarray:
        """An op of a family: its products as above, the others with the rounding of a few operations."""
        if function is group_linear and args[1].rotation is None:
            return self.sums.products(args[0], _floats(args[1]).T)
        y = function(*args)
        noise = self.rng.uniform(-2, 2, y.shape).astype(F32) * F32(np.finfo(F32).eps)
        return y + noise * (y if "share" in name or "expert_weights" in name else np.abs(y).max(-1, keepdims=True))


@lru_cache(maxsize=256)
def _floats(w: Any) -> np.ndarray:
    return np.asarray(w.rows(slice(None), F32), dtype=F32)


class Shown(dict[str, np.ndarray]):
    """A trace of another engine."""

    own_engine = False


# -- what it shows -----------------------------------------------------------------------------------------------------

FIRST_FIVE = ("hook_embed", "blocks.0.attn.q_proj.hook_out", "blocks.0.attn.hook_z", "lm_head.hook_out")
SHOWN: dict[str, Callable[[str], bool]] = {
    "logits": lambda name: name == "lm_head.hook_out",
    "stream": lambda name: name.endswith("hook_resid_post") or name == "lm_head.hook_out",
    "five": lambda name: name.endswith("hook_resid_post") or name in FIRST_FIVE,
    "modules": lambda name: name.endswith((".hook_out", "hook_normalized", "hook_resid_post", "hook_embed")),
    "floats": lambda name: not name.endswith(("hook_x_int8", "hook_acc_int32", "hook_x_scale")),
    "all": lambda name: True,
}


# -- the models --------------------------------------------------------------------------------------------------------

LARGE: dict[str, dict[str, Any]] = {
    "bitnet, 8 layers": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 256},
    "bitlinear llama, 12 layers": {
        "model_type": "llama", "hidden_act": "silu", "quantization_config": ONLINE, "hidden_size": 256,
        "intermediate_size": 640, "num_hidden_layers": 12, "vocab_size": 256,
    },
}  # fmt: skip


@cache
def model_of(name: str) -> Any:
    if name in LARGE:
        config = {**BASE, **LARGE[name], "max_position_embeddings": 1024}
        with tempfile.TemporaryDirectory() as folder:
            path = write(Path(folder) / "m", config, tensors_for(config, seed=1, embedding_std=0.5))
            return bitnet_ref.load(path, backend="numpy", threads=1)
    folder = DATA / ("golden" if (DATA / "golden" / name).exists() else "families")
    return bitnet_ref.load(name if name == "storyteller" else folder / name, backend="numpy", threads=1)


MODELS = (
    *("storyteller",) * 4,
    *LARGE,
    *sorted(path.name for path in (DATA / "families").iterdir() if (path / "model.safetensors").exists()),
    "bitnet-packed-offline", "bitnet-bf16-online", "llama-dense",
)  # fmt: skip


# -- one draw ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What crossval said of one correct engine. wrong: "" if it agrees."""

    seed: int
    model: str
    tokens: int
    shown: str
    engine: str
    flips: int
    wrong: str
    cause: str
    seconds: float
    untold: str  # the verdict that it cannot be told from the logits alone


@lru_cache(maxsize=4)
def reference(name: str, tokens: tuple[int, ...]) -> Any:
    model = model_of(name)
    return model.run_with_cache(list(tokens))[1]


def outcome(seed: int, budget_s: float = 60.0) -> Outcome:
    rng = np.random.default_rng([23, seed])
    name = MODELS[seed % len(MODELS)]
    model = model_of(name)
    most = min(model.config.context_length, 512)
    count = min(int(rng.choice(TOKENS)), most)
    if name == "storyteller":
        ids = model.tokenizer.encode(TEXT[(start := int(rng.integers(len(TEXT) - 4000))) : start + 4000])[:count]
    else:
        ids = rng.integers(0, model.config.vocab_size, count).tolist()
    engine = CorrectEngine(
        Sums(int(rng.choice([1, 8, 32, 256, 1 << 20])), bool(rng.integers(2))),
        [None, 16, 64][rng.integers(3)],
        bool(rng.integers(2)),
        int(rng.integers(3)),
        seed,
    )
    text = f"{engine.sums}, tile {engine.tile}, angles {engine.angles}, scaling {engine.scaling}"
    shown = list(SHOWN)[rng.integers(len(SHOWN))]
    recorder = Recorder(engine, model.config, SHOWN[shown])
    batch = TokenBatch.of([(0, 0, np.asarray(ids, dtype=np.int64))])
    run(observe(engine, recorder), model.weights, model.config, batch, model.new_cache(1, len(ids)))
    trace = Shown(recorder.seen)
    if rng.random() < 0.2:
        trace["lm_head.hook_out"] = trace["lm_head.hook_out"][-1:]
    started = time.process_time()
    comparison = follow_flips(model, ids, trace, compare(reference(name, tuple(ids)), trace, model.config, ids))
    diagnoses = diagnose(model, ids, trace, comparison, budget_s=budget_s)
    cause = next((str(d) for d in diagnoses if d.confirmed), "")
    verdict = "" if comparison.agrees else comparison.verdict
    wrong, untold = ("", verdict) if comparison.undecided else (verdict, "")
    seconds = time.process_time() - started
    return Outcome(seed, name, len(ids), shown, text, comparison.n_flips, wrong, cause, seconds, untold)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:500", help="first:stop")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds that the search for a cause may take")
    parser.add_argument("--json", type=Path, help="write every outcome there")
    args = parser.parse_args()
    first, stop = map(int, args.seeds.split(":"))
    outcomes = []
    for seed in range(first, stop):
        outcomes.append(o := outcome(seed, args.budget))
        if verdict := o.wrong or o.untold:
            print(f"{o.seed} {o.model}, {o.tokens} tokens, {o.shown}, {o.engine}: {verdict}\n    {o.cause}", flush=True)
    accused, caused = (sum(map(bool, each)) for each in zip(*((o.wrong, o.cause) for o in outcomes), strict=True))
    flipped = sum(o.flips > 0 for o in outcomes)
    untold = sum(bool(o.untold) for o in outcomes)
    print(
        f"{len(outcomes)} correct engines, {flipped} with flips: {accused} differ, {caused} are given a cause, "
        f"{untold} cannot be told"
    )
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1))
    return 1 if accused else 0


if __name__ == "__main__":
    sys.exit(main())
