"""Runs a Hugging Face folder in transformers, with eager attention, and records inputs and outputs of its modules.

    echo '[{"model": FOLDER, "tokens": [1, 17, 5], "out": FILE, "dtype": "float32"}]' | python record_transformers.py

one_at_a_time: one call per token, with a cache; for RoPE that depends on the length of the call.
"""

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # transformers would compile its BitLinear
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import plain_trace
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.integrations.bitnet import BitLinear

LINEARS = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
LINEARS += [f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
SUB_NORMS = {"self_attn.attn_sub_norm": "hook_z", "mlp.ffn_sub_norm": "hook_post"}  # and the names of their inputs
READERS = {"hook_z": "self_attn.o_proj", "hook_post": "mlp.down_proj"}  # of the same tensors, without sub-norms


class Hooks:
    """Records module inputs and outputs. `seen`: name -> one array per call, each along its tokens."""

    def __init__(self, model):
        self.seen = {}
        body = model.model
        self.output(body.embed_tokens, "hook_embed")
        for i, layer in enumerate(body.layers):
            self.block(layer, f"blocks.{i}")
        self.output(body.norm, "ln_final.hook_normalized")
        self.linear(model.lm_head, "lm_head")

    def keep(self, name, tensor, dtype=None):
        values = tensor.detach()[0].to(torch.float32 if dtype is None else dtype)
        self.seen.setdefault(name, []).append(values.cpu().numpy().copy())

    def output(self, module, name):
        module.register_forward_hook(
            lambda _m, _inputs, out: self.keep(name, out[0] if isinstance(out, tuple) else out)
        )

    def input(self, module, name):
        module.register_forward_pre_hook(lambda _m, inputs: self.keep(name, inputs[0]))

    def block(self, layer, block):
        self.input(layer.input_layernorm, f"{block}.hook_resid_pre")
        self.output(layer.input_layernorm, f"{block}.ln1.hook_normalized")
        self.input(layer.post_attention_layernorm, f"{block}.hook_resid_mid")
        self.output(layer.post_attention_layernorm, f"{block}.ln2.hook_normalized")
        self.output(layer, f"{block}.hook_resid_post")
        modules = dict(layer.named_modules())
        for path in LINEARS:
            self.linear(modules[path], f"{block}.{our_name(path)}")
        for path, name in SUB_NORMS.items():
            parent = f"{block}.{our_name(path).rpartition('.')[0]}"
            if path in modules:
                self.input(modules[path], f"{parent}.{name}")
                self.output(modules[path], f"{parent}.sub_norm.hook_normalized")
            else:
                self.input(modules[READERS[name]], f"{parent}.{name}")
        attention = layer.self_attn
        attention.register_forward_hook(lambda _m, _i, out: self.pattern(f"{block}.attn.hook_pattern", out))

    def pattern(self, name, out):
        if isinstance(out, tuple) and out[1] is not None:
            self.keep(name, out[1])  # (1, H, N, N)

    def linear(self, module, name):
        self.output(module, f"{name}.hook_out")
        if getattr(module, "rms_norm", None) is not None:
            self.output(module.rms_norm, f"{name}.rms_norm.hook_normalized")
        if not isinstance(module, BitLinear):
            return  # AutoBitLinear multiplies dequantised floats: there are no integers
        quantize, rescale = module.activation_quant, module.post_quant_process

        def activation_quant(x, *args):
            x_q, scale = quantize(x, *args)
            self.keep(f"{name}.hook_x_int8", x_q, torch.int8)
            self.keep(f"{name}.hook_x_scale", scale)
            return x_q, scale

        def post_quant_process(acc, *args):
            self.keep(f"{name}.hook_acc_int32", acc, torch.int32)
            return rescale(acc, *args)

        module.activation_quant, module.post_quant_process = activation_quant, post_quant_process


def our_name(path):
    """self_attn.q_proj -> attn.q_proj"""
    return path.replace("self_attn.", "attn.")


def widen(model, dtype):
    """transformers 5 leaves some parameters of a packed model in the file's dtype; widening is exact."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is not None and tensor.dtype in (torch.bfloat16, torch.float16):
                    tensor.data = tensor.data.to(dtype)
        if isinstance(module, BitLinear):
            module.dtype = dtype
    return model.eval()


def load(folder, dtype):
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", local_files_only=True
    )
    return widen(model, dtype) if dtype == torch.float32 else model.eval()


@torch.no_grad()
def record(folder, tokens, dtype, one_at_a_time=False):
    """-> name -> array"""
    torch.set_num_threads(min(4, torch.get_num_threads()))
    model = load(folder, dtype)
    hooks = Hooks(model)
    if not one_at_a_time:
        model(torch.tensor([tokens]), use_cache=False, output_attentions=True)
        return {name: arrays[0] for name, arrays in hooks.seen.items()}
    past = None
    for token in tokens:
        past = model(torch.tensor([[token]]), past_key_values=past, use_cache=True).past_key_values
    named = {name: arrays for name, arrays in hooks.seen.items() if not name.endswith("hook_pattern")}
    return {name: np.concatenate(arrays) for name, arrays in named.items()}


def run(job):
    seen = record(job["model"], job["tokens"], getattr(torch, job["dtype"]), job.get("one_at_a_time", False))
    return seen, f"transformers {transformers.__version__}, torch {torch.__version__}", job["dtype"]


if __name__ == "__main__":
    plain_trace.run(run)
