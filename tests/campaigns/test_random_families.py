"""Random shapes of every family, through every format that can hold them, on NumPy and on the kernels.

Each case is drawn from its number: the shape, the options of its family, the size of its groups, which matrices are
ternary. NumPy's logits of its Hugging Face folder are compared with those of transformers, where that is installed,
and with those of every file it converts to. What a format cannot hold must be refused with a BitNetRefError.
"""

import shutil
from collections import Counter
from importlib.util import find_spec

import numpy as np
import pytest
from helpers import rng

import bitnet_ref
from bitnet_ref.benchmark.synthetic import RandomCheckpoint
from bitnet_ref.errors import BitNetRefError
from bitnet_ref.formats.checkpoint import arrays_of_layer, has_bias, linear_shape, norm_sizes
from bitnet_ref.formats.convert import TARGETS, convert
from bitnet_ref.formats.hf.config import parse_hf_config
from bitnet_ref.formats.hf.writer import write_hf
from bitnet_ref.reference.weights import DenseWeight

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "qwen3_5_text")
FORMATS = ("native", "gguf-f16", "gguf-q2_0", "gguf-pq2_0", "gguf-ptq1_0", "hf-unpacked", "onnx")
TOLERANCE = 3e-4  # of logits of about 1, between float32 engines
THETAS = {"sliding_attention": 1e4, "full_attention": 1e6}
BACKENDS = [name for name, why in bitnet_ref.available_backends().items() if why is None and name != "cupy"]


def random_config(number):
    """The config.json of a case, for `parse_hf_config` and transformers alike."""
    random, family = rng(22, number), FAMILIES[number % len(FAMILIES)]

    def pick(*values):
        return values[random.integers(len(values))]

    layers, kv, window = pick(1, 2, 4), pick(1, 2, 3), pick(3, 5, 8)
    raw = {
        "model_type": family,
        "dtype": "float16",
        "num_hidden_layers": layers,
        "num_key_value_heads": kv,
        "num_attention_heads": kv * pick(1, 2, 3),
        "head_dim": pick(16, 32, 64),
        "hidden_act": "silu",
        "hidden_size": pick(128, 192, 256, 320),
        "intermediate_size": pick(128, 256, 384),
        "vocab_size": pick(97, 160),
        "max_position_embeddings": 128,
        "rms_norm_eps": pick(1e-5, 1e-6),
        "tie_word_embeddings": pick(True, False),
        "rope_parameters": {"rope_type": "default", "rope_theta": pick(1e4, 1e6)},
    }
    if family == "llama":
        raw["attention_bias"] = pick(True, False)
    elif family == "mistral":
        raw["sliding_window"] = pick(None, window)
    elif family == "qwen2":
        raw["head_dim"] = None
    elif family == "gemma3_text":
        # transformers computes a window's mask even where no layer has one
        kinds = ["sliding_attention", *(pick("sliding_attention", "full_attention") for _ in range(layers - 1))]
        raw |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": pick(24, 64), "layer_types": kinds}
        raw |= {"sliding_window": window, "final_logit_softcapping": pick(None, 5.0)}
        ropes = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in THETAS.items()}
        raw["rope_parameters"] = ropes
        del raw["hidden_act"]
    elif family == "qwen3_5_text":
        kinds = [pick("linear_attention", "full_attention") for _ in range(layers)]
        key_heads = pick(1, 2)
        raw |= {"layer_types": kinds, "linear_conv_kernel_dim": pick(2, 4), "linear_num_key_heads": key_heads}
        raw |= {"linear_key_head_dim": pick(16, 32), "linear_value_head_dim": pick(32, 64)}
        raw |= {"linear_num_value_heads": key_heads * pick(1, 2)}
        raw["rope_parameters"] |= {"partial_rotary_factor": pick(0.5, 1.0)}
    if family in ("llama", "qwen2", "gemma3_text"):  # transformers wants a multiple of the heads
        raw["hidden_size"] = 32 * raw["num_attention_heads"] * pick(1, 2)
    return {key: value for key, value in raw.items() if value is not None}


class DrawnCheckpoint(RandomCheckpoint):
    """The values of a case, float16: matrices that are ternary by groups, some of them dense; the same at each call."""

    def __init__(self, config, number):
        super().__init__(config)
        self.number, random = number, rng(23, number)
        self.group, self.dense_share = int(random.choice([32, 64, 128, 256])), float(random.choice([0, 0, 0.3]))

    def draw(self, name, *shape, around=0.0, spread=0.1):
        values = around + spread * rng(24, self.number, *name.encode()).standard_normal(shape)
        return values.astype(np.float16).astype(np.float32)

    def norm(self, name):
        sizes = {"final_norm": self.config.hidden_size, **norm_sizes(self.config)}
        return self.draw(name, sizes[name], around=1.0)

    def embedding(self):
        return self.linear("embedding")

    def linear(self, name):
        shape = linear_shape(self.config, name)
        w, random = self.draw(name, *shape, spread=1.0), rng(25, self.number, *name.encode())
        if random.random() >= self.dense_share:
            scales = 0.5 + random.random((shape[0], -(-shape[1] // self.group)))
            w = np.clip(np.round(w), -1, 1) * np.repeat(scales, self.group, axis=1)[:, : shape[1]]
        size = 0.5 if name == "embedding" else shape[1] ** -0.5
        is_biased = name.startswith("blocks") and has_bias(self.config, name)
        return DenseWeight((w * size).astype(np.float16), self.draw(f"{name}.bias", shape[0]) if is_biased else None)

    def array(self, name):
        _, index, _, part = name.split(".")
        values = self.draw(f"{part} {index}", *arrays_of_layer(self.config, int(index))[name], spread=0.3)
        return np.exp(values) if part == "decay" else 1 + values if part == "norm" else values


def check(folder, number):
    """The outcomes of a case: (format, "equal" or "refused") for each, and "transformers" where it judged."""
    raw = random_config(number)
    config = parse_hf_config(raw, folder)
    source = folder / "source"
    source.mkdir()
    write_hf(DrawnCheckpoint(config, number), source, "hf-unpacked")
    tokens = rng(26, number).integers(0, config.vocab_size, 2 + number % 17)
    expected = bitnet_ref.load(source, backend="numpy").logits(tokens)
    allowed = TOLERANCE * max(1.0, float(np.abs(expected).max()))
    outcomes, seen = [], {"source": source}
    for name in FORMATS:
        seen[name] = folder / f"{name}{TARGETS[name].suffix or ''}"
        try:
            convert(source, seen[name], name, verify=number % 4 == 0)
            outcomes.append((name, "written"))
        except BitNetRefError:
            outcomes.append((name, "refused"))
            del seen[name]
    for name, path in seen.items():
        for backend in BACKENDS:
            gap = np.abs(bitnet_ref.load(path, backend=backend, threads=2).logits(tokens) - expected).max()
            assert gap <= allowed, f"case {number}, {raw['model_type']}, {name} on {backend}: off by {gap:.1e}"
            outcomes.append((backend, "equal"))
    if find_spec("transformers") and find_spec("torch"):
        outcomes.append(("transformers", "equal"))
        gap = np.abs(logits_of_transformers(source, tokens) - expected).max()
        assert gap <= allowed, f"case {number}, {raw['model_type']}, transformers: off by {gap:.1e}"
    return raw["model_type"], outcomes


def logits_of_transformers(folder, tokens):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.from_numpy(tokens)[None], use_cache=False).logits[0].numpy()


@pytest.mark.filterwarnings("ignore:.*planes without keys", "ignore:.*: llama.cpp")
@pytest.mark.slow
@pytest.mark.parametrize("cases", [48])
def test_every_format_gives_the_same_logits(cases, tmp_path):
    counts, families = Counter(), Counter()
    for number in range(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        family, outcomes = check(folder, number)
        families[family] += 1
        counts.update(outcomes)
        shutil.rmtree(folder)
    print(f"{cases} cases {dict(families)}: { ({' '.join(key): count for key, count in sorted(counts.items())}) }")
    assert counts["native", "written"] == cases
    assert counts["gguf-f16", "written"] >= cases // 2
