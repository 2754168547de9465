"""Makes the tiny checkpoints of tests/data/golden, and some of tests/data/families, and asks Hugging Face transformers
what they compute.

    python tests/data/make_golden.py [case ...]        # needs torch, transformers >= 5, accelerate; no test runs it

Each case is a folder as a hub repository has it, plus `golden.safetensors`: `tokens` (T,), and from eager attention in
float32 `logits` (T, V) and `hidden.N` (T, D) (the residual stream before layer N; the last one after the final norm),
and `logits64` from the same in float64. One int8 that rounds the other way moves a random network's logits by 0.1 or
more, so a ternary case takes the first seed with which no activation lies within MARGIN of a rounding boundary.

The cases bitnet-packed-offline, bitnet-bf16-online, llama-packed-bitlinear, llama-dense and mistral-dense-window8 were
made elsewhere in the same way and are not remade here.
"""

from __future__ import annotations

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # transformers compiles its BitLinear; the plain text is the oracle

import json
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.integrations.bitnet import AutoBitLinear, BitLinear, pack_weights
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HERE = Path(__file__).parent / "golden"
MARGIN = 4e-5  # of an activation times its scale, to the nearest .5
WEIGHT_MARGIN = 2e-6  # of a master weight divided by its scale, to the nearest .5
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass
class Case:
    """config: what config.json says beyond the base; the rest says how the tensors are stored."""

    config: dict
    length: int = 10
    store: str = "dense"  # or "packed", "unpacked", "master"
    dtype: torch.dtype = torch.bfloat16
    shards: int = 1
    duplicate_head: bool = False
    one_token_at_a_time: bool = False  # for RoPE that depends on the length of the call
    one_bit_llm: bool = False
    skipped: tuple[str, ...] = ("lm_head",)
    same_as: dict = field(default_factory=dict)  # another spelling of config, which must give the same logits


BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-05,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
BITNET = {"quant_method": "bitnet"}
SMALL = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 3, "num_key_value_heads": 1}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}

CASES = {
    # -- ternary
    "llama-packed-rmsnorm": Case(  # an RMSNorm and a bias inside each linear; scales divide
        {"attention_bias": True, "quantization_config": {**BITNET, "use_rms_norm": True, "rms_norm_eps": 1e-4}},
        length=8,
        store="packed",
    ),
    "llama-packed-skips": Case(  # some linears left dense, and the head ternary
        {
            "quantization_config": {
                **BITNET,
                "modules_to_not_convert": ["model.layers.0.mlp", "o_proj"],
                "linear_class": "autobitlinear",
                "quantization_mode": "offline",
            }
        },
        length=8,
        store="packed",
        skipped=("model.layers.0.mlp", "o_proj"),
    ),
    "llama-unpacked-offline": Case(  # planes saved as -1.0, 0.0, 1.0; the bias is scaled with the sum
        {
            "attention_bias": True,
            "mlp_bias": True,
            "quantization_config": {**BITNET, "linear_class": "autobitlinear", "quantization_mode": "offline"},
        },
        length=8,
        store="unpacked",
    ),
    "onebitllm-silu": Case(  # LLaMA names, sub-norms under their 1bitLLM names, sizes that are no multiple of 4
        {
            "hidden_size": 54,
            "intermediate_size": 75,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "architectures": ["BitnetForCausalLM"],
            "weight_bits": 1,
            "input_bits": 8,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
        },
        length=8,
        store="master",
        one_bit_llm=True,
    ),
    # -- dense
    "llama-f16-sharded": Case({"torch_dtype": "float16"}, dtype=torch.float16, shards=3),
    "llama-f32-headdim": Case(  # H * d = 96 is not D = 48
        {**SMALL, "head_dim": 32, "torch_dtype": "float32"}, dtype=torch.float32
    ),
    "llama-bf16-biases": Case({"attention_bias": True, "mlp_bias": True, "dtype": "bfloat16"}),
    "llama-tied-duplicate": Case({"tie_word_embeddings": True, "dtype": "bfloat16"}, duplicate_head=True),
    "mistral-window3": Case(
        {
            **SMALL,
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "head_dim": 24,
            "sliding_window": 3,
        },
        length=9,
    ),
    "mistral-window1": Case(
        {**SMALL, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 1}, length=5
    ),
    # -- families
    "../families/olmo2": Case(  # a head whose norms are of all heads together
        {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "num_key_value_heads": 1}, length=12
    ),
    "../families/granite": Case(  # no factor is a power of two, none is that of LLaMA
        {
            "model_type": "granite",
            "architectures": ["GraniteForCausalLM"],
            "tie_word_embeddings": True,
            "attention_multiplier": 0.4,
            "embedding_multiplier": 6.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.22,
        },
        length=12,
    ),
    # -- RoPE, in both spellings
    "rope-linear": Case(
        {**SMALL, "rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        length=20,
        same_as={**SMALL, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}},
    ),
    "rope-dynamic": Case(
        {**SMALL, "max_position_embeddings": 8, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        length=16,
        one_token_at_a_time=True,
        same_as={
            **SMALL,
            "max_position_embeddings": 8,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        },
    ),
    "rope-llama3": Case(
        {**SMALL, "rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3}},
        length=20,
        same_as={**SMALL, "rope_theta": 10000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    ),
    "rope-yarn": Case(
        {**SMALL, "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "beta_fast": 4.0, **YARN}},
        length=20,
        same_as={**SMALL, "rope_scaling": {"type": "yarn", "beta_fast": 4.0, **YARN}},
    ),
}

# inv_freq of published settings: (rope_parameters, head_dim, max_position_embeddings, length of the call)
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.7, 2.9, 4.5, 8.0, 16.5, 30.0, 32.0],
}
ROPE_TABLES = {
    "2B-4T": ({"rope_type": "default", "rope_theta": 500000.0}, 128, 4096, None),
    "Llama-3.1-8B": (
        {**LLAMA3, "rope_type": "llama3", "rope_theta": 500000.0, "original_max_position_embeddings": 8192},
        *(128, 131072, None),
    ),
    "Llama-3.2-1B": (
        {**LLAMA3, "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 8192},
        *(64, 131072, None),
    ),
    "linear-2.5": ({"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}, 128, 4096, None),
    "yarn-Qwen2.5": (
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
        *(128, 32768, None),
    ),
    "yarn-mscale": (
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        *(64, 163840, None),
    ),
    "yarn-untruncated": (
        {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
            "attention_factor": 1.25,
        },
        *(64, 131072, None),
    ),
    "dynamic-short": ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, 128, 4096, 4096),
    "dynamic-long": ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, 128, 4096, 6001),
    "longrope-short": (LONGROPE, 16, 131072, 4096),
    "longrope-long": ({**LONGROPE, "factor": 8.0}, 16, 131072, 4097),
    "longrope-scaled": ({**LONGROPE, "attention_factor": 1.5}, 16, 4096, 5000),
}


def linear_shapes(cfg: dict) -> dict[str, tuple[int, int]]:
    d_model, d_ffn, heads = cfg["hidden_size"], cfg["intermediate_size"], cfg["num_attention_heads"]
    head_dim = cfg.get("head_dim") or d_model // heads
    query, kv = heads * head_dim, cfg["num_key_value_heads"] * head_dim
    attention = {"q_proj": (query, d_model), "k_proj": (kv, d_model), "v_proj": (kv, d_model)}
    mlp = {"gate_proj": (d_ffn, d_model), "up_proj": (d_ffn, d_model), "down_proj": (d_model, d_ffn)}
    return {**attention, "o_proj": (d_model, query), **mlp}


def make_tensors(case: Case, cfg: dict, seed: int) -> dict[str, torch.Tensor]:
    """Random tensors under the names of transformers, stored as the case says."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    def norm(name: str, size: int) -> None:
        tensors[name] = (1 + normal(size, std=0.2)).to(case.dtype)

    def linear(module: str, n_out: int, n_in: int, bias: bool) -> None:
        w = normal(n_out, n_in, std=1.3 * n_in**-0.5)
        if bias:
            tensors[f"{module}.bias"] = normal(n_out, std=0.3).to(case.dtype)
        if case.store == "dense" or any(module.startswith(name) or module.endswith(name) for name in case.skipped):
            tensors[f"{module}.weight"] = w.to(case.dtype)
            return
        quantization_config = cfg["quantization_config"]
        if quantization_config.get("use_rms_norm"):
            norm(f"{module}.rms_norm.weight", n_in)
        w = w.to(case.dtype).float()
        mean = w.abs().mean().clamp(min=1e-5)
        if case.store == "master":
            tensors[f"{module}.weight"] = w.to(case.dtype)
            return
        ternary = (w / mean).round().clamp(-1, 1)
        scale = mean if quantization_config.get("linear_class") == "autobitlinear" else 1 / mean
        tensors[f"{module}.weight_scale"] = scale.reshape(1).to(case.dtype)
        tensors[f"{module}.weight"] = ternary.to(case.dtype) if case.store == "unpacked" else pack_weights(ternary)

    d_model = cfg["hidden_size"]
    tensors["model.embed_tokens.weight"] = normal(cfg["vocab_size"], d_model, std=0.5).to(case.dtype)
    shapes = linear_shapes(cfg)
    for i in range(cfg["num_hidden_layers"]):
        block = f"model.layers.{i}."
        if cfg["model_type"] == "olmo2":
            norm(block + "self_attn.q_norm.weight", shapes["q_proj"][0])
            norm(block + "self_attn.k_norm.weight", shapes["k_proj"][0])
            norm(block + "post_feedforward_layernorm.weight", d_model)
        else:
            norm(block + "input_layernorm.weight", d_model)
        norm(block + "post_attention_layernorm.weight", d_model)
        if case.one_bit_llm:
            norm(block + "self_attn.attn_sub_norm.weight", shapes["o_proj"][1])
            norm(block + "mlp.ffn_sub_norm.weight", shapes["down_proj"][1])
        for name, shape in shapes.items():
            attention = name in ATTENTION
            bias = cfg.get("attention_bias" if attention else "mlp_bias", False)
            linear(f"{block}{'self_attn' if attention else 'mlp'}.{name}", *shape, bias)
    norm("model.norm.weight", d_model)
    if not cfg["tie_word_embeddings"]:
        linear("lm_head", cfg["vocab_size"], d_model, bias=False)
    elif case.duplicate_head:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    return tensors


def write_folder(folder: Path, cfg: dict, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(cfg, indent=2) + "\n")
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, weight_map = sorted(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i::shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


@torch.no_grad()
def run_oracle(folder: Path, tokens: torch.Tensor, dtype: torch.dtype, step: bool) -> tuple[dict, float]:
    """What transformers computes, and the least distance of a scaled activation to a rounding boundary."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    margin = 1.0

    def watch(module: torch.nn.Module, inputs: tuple) -> None:
        nonlocal margin
        x = inputs[0].float()
        if module.rms_norm is not None:
            x = module.rms_norm(x)
        scaled = x * (127 / x.abs().max(dim=-1, keepdim=True).values.clamp(min=1e-5))
        margin = min(margin, (scaled.remainder(1.0) - 0.5).abs().min().item())

    for module in model.modules():
        if isinstance(module, BitLinear | AutoBitLinear):
            module.register_forward_pre_hook(watch)
        for tensors in (module._parameters, module._buffers):  # left in part in the file's dtype; widening is exact
            for _name, tensor in tensors.items():
                if tensor is not None and tensor.dtype in (torch.bfloat16, torch.float16):
                    tensor.data = tensor.data.to(dtype)
    if step:
        outs, past = [], None
        for token in tokens:
            out = model(token.reshape(1, 1), past_key_values=past, use_cache=True, output_hidden_states=True)
            past = out.past_key_values
            outs.append(out)
    else:
        outs = [model(tokens[None], use_cache=False, output_hidden_states=True)]
    found = {"logits": torch.cat([out.logits[0] for out in outs])}
    for n in range(len(outs[0].hidden_states)):
        found[f"hidden.{n}"] = torch.cat([out.hidden_states[n][0] for out in outs])
    return found, margin


def weight_margin(tensors: dict[str, torch.Tensor]) -> float:
    least = 1.0
    for name, w in tensors.items():
        if name.endswith("_proj.weight") and w.is_floating_point():
            scaled = w.double() / w.double().abs().mean()
            least = min(least, ((scaled.abs() - 0.5).abs()).min().item())
    return least


def make_case(name: str, case: Case) -> None:
    published = {**BASE, **case.config}
    asked = dict(published)
    if case.one_bit_llm:  # the oracle knows this architecture under BitNet's names
        asked = {key: value for key, value in asked.items() if key not in ("weight_bits", "input_bits")}
        online = {**BITNET, "linear_class": "autobitlinear", "quantization_mode": "online"}
        asked |= {"model_type": "bitnet", "architectures": ["BitNetForCausalLM"], "quantization_config": online}
    for seed in range(200):
        tensors = make_tensors(case, asked, seed)
        if case.store == "master" and weight_margin(tensors) < WEIGHT_MARGIN:
            continue
        tokens = torch.from_numpy(np.random.default_rng(seed).integers(3, asked["vocab_size"], case.length))
        tokens[0] = 1
        with tempfile.TemporaryDirectory() as temporary:
            write_folder(Path(temporary), asked, tensors, case.shards)
            found, margin = run_oracle(Path(temporary), tokens, torch.float32, case.one_token_at_a_time)
            if margin < MARGIN:
                continue
            in_double, _ = run_oracle(Path(temporary), tokens, torch.float64, case.one_token_at_a_time)
            if case.same_as:
                write_folder(Path(temporary), {**BASE, **case.same_as}, tensors)
                other, _ = run_oracle(Path(temporary), tokens, torch.float32, case.one_token_at_a_time)
                assert torch.equal(other["logits"], found["logits"]), f"{name}: the two spellings differ"
                plain = {k: v for k, v in case.config.items() if k not in ("rope_scaling", "rope_parameters")}
                write_folder(Path(temporary), {**BASE, **plain}, tensors)
                other, _ = run_oracle(Path(temporary), tokens, torch.float32, case.one_token_at_a_time)
                assert (other["logits"] - found["logits"]).abs().max() > 0.01, f"{name}: the scaling does not show"
        break
    else:
        raise SystemExit(f"{name}: no seed with a margin of {MARGIN}")
    if case.one_bit_llm:
        renamed = {"self_attn.attn_sub_norm": "self_attn.inner_attn_ln", "mlp.ffn_sub_norm": "mlp.ffn_layernorm"}
        for theirs, published_name in renamed.items():
            tensors = {key.replace(theirs, published_name): value for key, value in tensors.items()}
    shutil.rmtree(HERE / name, ignore_errors=True)
    write_folder(HERE / name, published, tensors, case.shards)
    if case.same_as:
        other = {**BASE, **case.same_as}
        (HERE / name / "config-other-spelling.json").write_text(json.dumps(other, indent=2) + "\n")
    golden = {key: value.float().contiguous() for key, value in found.items()}
    golden |= {"logits64": in_double["logits"].double().contiguous(), "tokens": tokens.int()}
    save_file(golden, HERE / name / "golden.safetensors", metadata={"margin": f"{margin:.2e}"})
    double_error = (in_double["logits"] - found["logits"].double()).abs().max().item()
    print(f"{name:24} seed {seed:3} margin {margin:.1e} largest logit {found['logits'].abs().max():.2f} "
          f"float32 - float64 {double_error:.1e}")  # fmt: skip


def make_rope_tables() -> None:
    tables = {}
    for name, (params, head_dim, max_positions, length) in ROPE_TABLES.items():
        hf = LlamaConfig(
            hidden_size=4 * head_dim,
            num_attention_heads=4,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rope_parameters=dict(params),
        )
        if params["rope_type"] == "default":
            inv_freq, attention_factor = 1.0 / params["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim), 1.0
        else:
            inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[params["rope_type"]](hf, seq_len=length)
        tables[name] = {
            "rope_parameters": params,
            "head_dim": head_dim,
            "max_position_embeddings": max_positions,
            "length": length,
            "attention_factor": attention_factor,
            "inv_freq": inv_freq.tolist(),
        }
    (HERE / "rope_tables.json").write_text(json.dumps(tables, indent=1) + "\n")


if __name__ == "__main__":
    wanted = sys.argv[1:] or list(CASES)
    for wanted_name in wanted:
        make_case(wanted_name, CASES[wanted_name])
    make_rope_tables()
