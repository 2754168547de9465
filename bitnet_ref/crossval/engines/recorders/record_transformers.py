"""Runs a Hugging Face folder in transformers, with eager attention, and records inputs and outputs of its modules.

    echo '[{"model": FOLDER, "tokens": [1, 17, 5], "out": FILE, "dtype": "float32"}]' | python record_transformers.py

dtype: null is the folder's own, by `from_pretrained` without further arguments.
one_at_a_time: one call per token, with a cache; for RoPE that depends on the length of the call.
calls: how many tokens each call takes, with a cache.   sequences: lengths of several sequences, in one padded batch.
"""

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # transformers would compile its BitLinear
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import plain_trace
import torch
import transformers
from torch_hooks import Hooks, run_in_calls
from transformers import AutoModelForCausalLM
from transformers.integrations.bitnet import BitLinear
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


class BitLinearHooks(Hooks):
    """With the integers of transformers' BitLinear, and the norm that a linear may have of its own."""

    def __init__(self, model):
        super().__init__(model)
        for path, module in model.named_modules():
            if path.endswith("_proj"):
                _, _, layer, part = path.replace("self_attn.", "attn.").split(".", 3)
                self.linear(module, f"blocks.{layer}.{part}")

    def linear(self, module, name):
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
    model_type = transformers.PretrainedConfig.get_config_dict(folder)[0].get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise plain_trace.Unavailable(f"transformers {transformers.__version__} has no model type {model_type!r}")
    if dtype is None:
        return AutoModelForCausalLM.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", local_files_only=True
    )
    return widen(model, dtype) if dtype == torch.float32 else model.eval()


@torch.no_grad()
def record(job, model, patterns=True):
    """-> name -> array"""
    hooks, tokens, calls = BitLinearHooks(model), job["tokens"], job.get("calls")
    if job.get("sequences"):
        return record_batch(model, hooks, plain_trace.parts(job))
    if job.get("one_at_a_time"):
        calls = [1] * len(tokens)
    if calls:
        return run_in_calls(model, hooks, tokens, calls)
    model(torch.tensor([tokens]), use_cache=False, output_attentions=patterns)
    return {name: arrays[0] for name, arrays in hooks.seen.items()}


def record_batch(model, hooks, parts):
    """Several sequences in one call, padded on their left; the batch is run once for each, which is recorded."""
    longest = max(map(len, parts))
    ids = torch.tensor([[0] * (longest - len(part)) + part for part in parts])
    mask = torch.tensor([[0] * (longest - len(part)) + [1] * len(part) for part in parts])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    seen: dict[str, list] = {}
    hooks.rows = len(parts)
    for hooks.row, part in enumerate(parts):
        hooks.seen.clear()
        model(ids, attention_mask=mask, position_ids=positions, use_cache=False)
        for name, (array, *_) in hooks.seen.items():
            if not name.endswith("hook_pattern"):
                seen.setdefault(name, []).append(array[longest - len(part) :])
    return {name: np.concatenate(arrays) for name, arrays in seen.items()}


def run(job):
    torch.set_num_threads(min(4, torch.get_num_threads()))
    model = load(job["model"], None if job["dtype"] is None else getattr(torch, job["dtype"]))
    seen = record(job, model, plain_trace.wants(job, "blocks.0.attn.hook_pattern"))
    dtype = str(model.dtype).removeprefix("torch.")
    return seen, f"transformers {transformers.__version__}, torch {torch.__version__}", dtype


if __name__ == "__main__":
    plain_trace.run(run)
