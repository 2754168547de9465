"""Records the modules of any PyTorch model as a trace, through forward hooks. Import it or paste it: it needs PyTorch.

    record(model, [1, 17, 5], "my_run.safetensors", names={"transformer.h.{}.ln_1": "blocks.{}.ln1.hook_normalized"})

Modules are known by the names that Hugging Face checkpoints have; `names` adds others: a module's path -> the trace
name of its output, with {} for the number of the layer. An unknown name records nothing.
"""

import json
import re

import numpy as np
import torch

# Below a layer: path of a module -> trace name of its output below the block
OUTPUTS = {
    "": "hook_resid_post",
    "input_layernorm": "ln1.hook_normalized",
    "self_attn.q_proj": "attn.q_proj.hook_out",
    "self_attn.k_proj": "attn.k_proj.hook_out",
    "self_attn.v_proj": "attn.v_proj.hook_out",
    "self_attn.q_norm": "attn.q_norm.hook_normalized",
    "self_attn.k_norm": "attn.k_norm.hook_normalized",
    "self_attn.attn_sub_norm": "attn.sub_norm.hook_normalized",
    "self_attn.inner_attn_ln": "attn.sub_norm.hook_normalized",
    "self_attn.o_proj": "attn.o_proj.hook_out",
    "post_attention_layernorm": "ln2.hook_normalized",
    "mlp.gate": "mlp.router.hook_out",
    "mlp.gate_proj": "mlp.gate_proj.hook_out",
    "mlp.up_proj": "mlp.up_proj.hook_out",
    "mlp.ffn_sub_norm": "mlp.sub_norm.hook_normalized",
    "mlp.ffn_layernorm": "mlp.sub_norm.hook_normalized",
    "mlp.down_proj": "mlp.down_proj.hook_out",
    "post_feedforward_layernorm": "ln2_post.hook_normalized",
    "linear_attn.in_proj_z": "attn.z_proj.hook_out",
    "linear_attn.in_proj_a": "attn.a_proj.hook_out",
    "linear_attn.in_proj_b": "attn.b_proj.hook_out",
    "linear_attn.out_proj": "attn.o_proj.hook_out",
}
# ... -> trace name of its input. Of several modules that read the same tensor the first call counts.
INPUTS = {
    "input_layernorm": "hook_resid_pre",
    "post_attention_layernorm": "hook_resid_mid",
    "self_attn.attn_sub_norm": "attn.hook_z",
    "self_attn.inner_attn_ln": "attn.hook_z",
    "self_attn.o_proj": "attn.hook_z",
    "mlp.ffn_sub_norm": "mlp.hook_post",
    "mlp.ffn_layernorm": "mlp.hook_post",
    "mlp.down_proj": "mlp.hook_post",
    "linear_attn.out_proj": "attn.hook_gated_z",
}
# In a layer that has a norm after each half (Gemma, OLMo-2), `post_attention_layernorm` is the first of these.
OUTPUTS_POST_NORMS = {
    "post_attention_layernorm": "ln1_post.hook_normalized",
    "pre_feedforward_layernorm": "ln2.hook_normalized",
    "post_feedforward_layernorm": "ln2_post.hook_normalized",
}
INPUTS_POST_NORMS = {"pre_feedforward_layernorm": "hook_resid_mid"}
INPUTS_WITHOUT_NORMS = {"self_attn.q_proj": "hook_resid_pre", "mlp.gate_proj": "hook_resid_mid"}  # OLMo-2
OUTSIDE = {"embed_tokens": "hook_embed", "norm": "ln_final.hook_normalized", "lm_head": "lm_head.hook_out"}
_LAYER = re.compile(r"(?:.*\.)?(?:layers|blocks|h)\.(\d+)(?:\.(.*))?")


def is_gated(modules, attention):
    """head_dim of an attention whose q_proj has a gate for each number of its result (Qwen3.5); 0 for others."""
    q, o = (modules.get(f"{attention}.{name}") for name in ("q_proj", "o_proj"))
    rows, columns = getattr(q, "out_features", 0), getattr(o, "in_features", 0)
    return modules[attention].head_dim if rows and rows == 2 * columns else 0


class Hooks:
    """`seen`: trace name -> arrays, one for each call of the model, without its batch axis."""

    def __init__(self, model, names=None):
        self.seen = {}
        self.row, self.rows = 0, 1  # which sequence of a batch is recorded, of how many
        self.head_divisor = getattr(getattr(model, "config", None), "logits_scaling", None) or 1  # Granite's
        modules = dict(model.named_modules())
        for path, module in modules.items():
            for pattern, name in (names or {}).items():
                match = re.fullmatch(re.escape(pattern).replace(r"\{\}", r"(\d+)"), path)
                if match is not None:
                    self.output(module, name.format(*match.groups()))
            match = _LAYER.fullmatch(path)
            if match is None:
                self.outside(module, path.rpartition(".")[2])
                continue
            block, part = f"blocks.{match[1]}", match[2] or ""
            layer = path.removesuffix(part)
            outputs, inputs = OUTPUTS, INPUTS
            if f"{layer}post_feedforward_layernorm" in modules:
                without = {each: name for each, name in INPUTS.items() if each not in OUTPUTS_POST_NORMS}
                has_norms = f"{layer}pre_feedforward_layernorm" in modules
                more = INPUTS_POST_NORMS if has_norms else INPUTS_WITHOUT_NORMS
                outputs, inputs = {**OUTPUTS, **OUTPUTS_POST_NORMS}, {**without, **more}
            gate = is_gated(modules, f"{layer}self_attn")
            if part in inputs:
                self.input(module, f"{block}.{'attn.hook_gated_z' if gate and 'o_proj' in part else inputs[part]}")
            if part == "self_attn.q_proj" and gate:  # of each head the query, then the gate
                self.parts(module, [f"{block}.attn.{name}.hook_out" for name in ("q_proj", "z_proj")], by_head=gate)
            elif part == "linear_attn.in_proj_qkv":
                key_dim = modules[f"{layer}linear_attn"].key_dim
                linears = [f"{block}.attn.{name}.hook_out" for name in ("q_proj", "k_proj", "v_proj")]
                self.parts(module, linears, sizes=(key_dim, key_dim))
            elif part in ("self_attn.q_norm", "self_attn.k_norm"):
                self.head_norm(module, f"{block}.{outputs[part]}")
            elif part in outputs:
                self.output(module, f"{block}.{outputs[part]}")
            if part == "self_attn":
                self.pattern(module, f"{block}.attn.hook_pattern")

    def outside(self, module, part):
        """A module outside of the layers. An embedding with a scale of its own (Gemma) gives the scaled rows; a head
        whose result is divided afterwards (Granite) does not give the logits."""
        if part == "lm_head" and self.head_divisor != 1:
            module.register_forward_hook(
                lambda _module, _inputs, out: self.keep(OUTSIDE[part], out / self.head_divisor)
            )
        elif part in OUTSIDE:
            scaled = part == "embed_tokens" and float(getattr(module, "embed_scale", 1)) != 1
            self.output(module, "hook_embed_scaled" if scaled else OUTSIDE[part])

    def keep(self, name, tensor, dtype=torch.float32):
        self.seen.setdefault(name, []).append(tensor.detach()[self.row].to(dtype).cpu().numpy().copy())

    def output(self, module, name):
        def hook(_module, _inputs, out):
            tensor = out[0] if isinstance(out, tuple) else out
            self.keep(name, tensor if tensor.dim() > 2 else tensor.unflatten(0, (self.rows, -1)))  # a router's has none

        module.register_forward_hook(hook)

    def parts(self, module, names, sizes=(), by_head=0):
        """A linear whose output holds several. sizes: of all but the last.   by_head: head_dim; of each head a part."""

        def hook(_module, _inputs, out):
            if by_head:
                heads = out.view(*out.shape[:2], -1, len(names), by_head)  # (B, N, H, 2, d)
                tensors = [heads[:, :, :, i].flatten(2) for i in range(len(names))]
            else:
                tensors = out.split([*sizes, out.shape[-1] - sum(sizes)], dim=-1)
            for name, tensor in zip(names, tensors, strict=True):
                self.keep(name, tensor)

        module.register_forward_hook(hook)

    def head_norm(self, module, name):
        """A norm of heads, called with (1, N, H, d), or with (1, H, N, d) as in Gemma."""
        linear = name.replace("_norm.hook_normalized", "_proj.hook_out")

        def hook(_module, inputs, out):
            rows = self.seen[linear][-1]  # (N, H*d)
            x = inputs[0].detach()[self.row].to(torch.float32).cpu().numpy()
            is_by_token = len(x) == len(rows) and (x.reshape(rows.shape) == rows).all()
            self.keep(name, out if is_by_token else out.transpose(1, 2))

        module.register_forward_hook(hook)

    def input(self, module, name):
        calls = [0]  # of this module: one whose input another has recorded in this call records nothing

        def hook(_module, inputs):
            calls[0] += 1
            if len(self.seen.get(name, ())) < calls[0]:
                self.keep(name, inputs[0])

        module.register_forward_pre_hook(hook)

    def pattern(self, module, name):
        def hook(_module, _inputs, out):
            if isinstance(out, tuple) and len(out) > 1 and torch.is_tensor(out[1]) and out[1].dim() == 4:
                self.keep(name, out[1])  # (1, H, N, N), of eager attention

        module.register_forward_hook(hook)


def run_in_calls(model, hooks, token_ids, calls, **options):
    """Run the model over so many tokens in each call, with its cache.   -> name -> array, without attention patterns"""
    past, start, device = None, 0, next(model.parameters()).device
    for size in calls:
        ids = torch.tensor([token_ids[start : start + size]], device=device)
        past = model(ids, past_key_values=past, use_cache=True, **options).past_key_values
        start += size
    named = {name: arrays for name, arrays in hooks.seen.items() if not name.endswith("hook_pattern")}
    return {name: np.concatenate(arrays) for name, arrays in named.items()}


@torch.no_grad()
def record(model, token_ids, path, names=None, engine="PyTorch", calls=None, **options):
    """Run the model over the tokens and write what its modules compute.   options: of the model's call

    calls: how many tokens each call takes, [16, 1, 1]; None for one call.
    """
    from safetensors.numpy import save_file

    hooks, first = Hooks(model, names), next(model.parameters())
    if calls:
        tensors = run_in_calls(model, hooks, token_ids, calls, **options)
    else:
        model(torch.tensor([token_ids], device=first.device), **options)
        tensors = {name: arrays[0] for name, arrays in hooks.seen.items()}
    metadata = {"format": "bitnet_ref.trace", "version": "1", "engine": engine, "token_ids": json.dumps(token_ids)}
    metadata["engine_dtype"] = str(first.dtype).removeprefix("torch.")
    metadata |= {"calls": json.dumps(calls)} if calls else {}
    save_file(tensors, path, metadata)
