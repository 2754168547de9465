"""The judge on engines that are right: it must find no difference in any of them.

Each random model runs on every backend and kernel set that the processor has, by every execution path, and on two other
engines that are right as well: one computes in float64, one in float32 with sums in another order (`other_engine`).
Theirs are the int8 activations that flip. docs/sensitivity.md has the counts.
"""

import tempfile
import time
from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np
import other_engine
import pytest
from helpers import BITNET, TINY, rng, tiny_tensors, write_checkpoint

import bitnet_ref
from bitnet_ref.backends import Backend
from bitnet_ref.backends.cpu.extension import why_unavailable
from bitnet_ref.crossval import cross_backends, cross_trace
from bitnet_ref.crossval.trace import write_trace

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason="the extension is not built")
LONG = 2048  # tokens of every tenth model
KINDS = ("ternary", "norm in each linear", "groups", "dense", "window", "sub-norms, packed")


def random_model(folder, seed, long):
    """A model of one of KINDS with random sizes, and tokens for it."""
    random, kind = rng(21, seed), KINDS[seed % len(KINDS)]
    heads, head_dim = int(random.choice([1, 2, 4, 6])), int(random.choice([4, 8, 16, 30]))
    kv_heads = int(random.choice([n for n in range(1, heads + 1) if heads % n == 0]))
    quantization = dict(BITNET["quantization_config"])
    packed = kind == KINDS[-1]
    head_dim -= head_dim % 4 if packed else 0  # packed rows come in fours
    if not packed:
        quantization["quantization_mode"] = "online"
    if kind == "norm in each linear":
        quantization |= {"use_rms_norm": True, "rms_norm_eps": 1e-6}
    config = {
        **TINY,
        "vocab_size": int(random.integers(3, 300)),
        "hidden_size": 4 * int(random.integers(2, 65)) if packed else int(random.integers(8, 260)),
        "intermediate_size": 4 * int(random.integers(4, 150)) if packed else int(random.integers(16, 600)),
        "num_hidden_layers": int(random.integers(1, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": str(random.choice(["relu2", "silu"])),
        "max_position_embeddings": 2 * LONG,
        "tie_word_embeddings": bool(random.integers(2)),
    }
    if kind in ("ternary", "norm in each linear", KINDS[-1]):
        config |= {"model_type": "bitnet" if kind != "norm in each linear" else "llama"}
        config |= {"quantization_config": quantization}
    if kind == "groups":
        config |= {"model_type": "qwen3"}
    if kind == "window":
        config |= {"model_type": "mistral", "sliding_window": int(random.integers(1, 40))}
    if kind in ("groups", "dense", "window"):
        config["hidden_act"] = "silu"
    tensors = tiny_tensors(config if packed else {**config, "model_type": "llama"}, seed=seed)
    query = heads * head_dim
    for i in range(config["num_hidden_layers"]):
        block = f"model.layers.{i}."
        sizes = {}
        if kind == "ternary":
            sizes |= {"self_attn.attn_sub_norm": query, "mlp.ffn_sub_norm": config["intermediate_size"]}
        if kind == "groups":
            sizes |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
        for name in [n for n in tensors if kind == "norm in each linear" and n.startswith(block) and "_proj" in n]:
            sizes[name.removeprefix(block).removesuffix(".weight") + ".rms_norm"] = tensors[name].shape[1]
        for name, size in sizes.items():
            tensors[f"{block}{name}.weight"] = (1 + random.standard_normal(size) * 0.1).astype(ml_dtypes.bfloat16)
        if kind == "groups":
            for name in [n for n in tensors if n.startswith(block) and "_proj" in n]:
                tensors[name] = in_groups(random, *tensors[name].shape)
    write_checkpoint(folder, config, tensors)
    model = bitnet_ref.load(folder, backend="numpy", threads=1)
    return model, random.integers(0, config["vocab_size"], LONG if long else random.integers(1, 100)).tolist()


def in_groups(random, n, k, group=16):
    scales = random.uniform(0.5, 2, (n, -(-k // group))) * k**-0.5
    w_t = random.integers(-1, 2, (n, k))
    return (w_t * np.repeat(scales.astype(np.float16), group, axis=1)[:, :k]).astype(np.float16)


def other_engines(model, tokens):
    """(name, its trace) of engines that are right and are not ours."""
    ids = model.check_tokens(tokens)
    _, wide = model.on(Backend("float64", 1)).run_with_cache(ids)
    yield "float64", {name: a.astype(np.float32) if a.dtype == np.float64 else a for name, a in wide.items()}
    yield "other sums", other_engine.run(model, tokens)


def judge_all(folder, seed, long, counts):
    """-> the false alarms, as sentences"""
    model, tokens = random_model(folder, seed, long)
    crossings = [c for c in cross_backends(model, tokens) if c.unavailable is None]
    for name, tensors in other_engines(model, tokens):
        path = folder / "trace.safetensors"
        write_trace(path, tensors, tokens, engine=name)
        crossing = cross_trace(model, path, causes=False)
        crossings.append(crossing)
        path.unlink()
    for crossing in crossings:
        counts["comparisons"] += len(crossing.comparisons)
        counts["execution paths"] += len(crossing.paths)
        counts["tensors"] += sum(len(c.ops) for c in crossing.comparisons)
        counts["flips"] += sum(c.n_flips for c in crossing.comparisons)
        counts["runs with flips"] += any(c.n_flips for c in crossing.comparisons)
        counts[f"runs of {crossing.opponent}"] += 1
    counts["tokens"] += len(tokens)
    kind = KINDS[seed % len(KINDS)]
    return [f"{seed} ({kind}, {len(tokens)} tokens): {c.opponent}: {c.verdict}" for c in crossings if not c.agrees]


def campaign(seeds, is_long):
    counts, alarms, start = Counter(), [], time.monotonic()
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            alarms += judge_all(Path(folder), seed, is_long(seed), counts)
    print(f"\n{len(seeds)} random models, {time.monotonic() - start:.0f} s:", dict(counts))
    return alarms


@pytest.mark.slow
def test_no_false_alarm_in_200_models():
    assert campaign(range(200), lambda seed: seed % 10 == 0) == []
