r"""Runs a GGUF in llama.cpp, through llama-cpp-python, and records the tensors of its graph that have a trace name.

    echo '[{"model": FILE, "tokens": [1, 17], "out": FILE, "interleaved": false, "heads": [4, 2]}]' \
        | python record_llama_cpp.py

ggml calls back for each tensor that it has computed; llama.cpp names them (attn_norm-0, Qcur-0, ...). The KV cache is
float32 and flash attention is off, because both would round differently.
interleaved: RoPE rotates neighbours (the architecture llama); q and k are put back into the order of halves.
heads: the number of query and kv heads.
calls: how many tokens each call computes.   sequences: lengths of several sequences, in one batch.
"""

import ctypes
import os
import re
import sys
from glob import glob

import llama_cpp
import numpy as np
import plain_trace
from llama_cpp import llama_cpp as api

# llama.cpp's name -> ours below blocks.N. A name may come several times, because the tensor is reshaped.
BLOCK = {
    "attn_norm": "ln1.hook_normalized",
    "Qcur": "attn.q_proj.hook_out",
    "Kcur": "attn.k_proj.hook_out",
    "Vcur": "attn.v_proj.hook_out",
    "Qcur_normed": "attn.q_norm.hook_normalized",
    "Kcur_normed": "attn.k_norm.hook_normalized",
    "attn_post_norm": "ln1_post.hook_normalized",
    "ffn_post_norm": "ln2_post.hook_normalized",
    "sa_out": "hook_resid_mid",
    "Qcur ROPE": "attn.hook_rot_q",
    "Kcur ROPE": "attn.hook_rot_k",
    "kq_soft_max": "attn.hook_pattern",
    "kqv_out": "attn.hook_z",
    "attn_sub_norm": "attn.sub_norm.hook_normalized",
    "attn_out": "attn.o_proj.hook_out",
    "attn_o_out": "attn.o_proj.hook_out",
    "ffn_inp": "hook_resid_mid",
    "ffn_norm": "ln2.hook_normalized",
    "ffn_gate": "mlp.gate_proj.hook_out",
    "ffn_gate_b": "mlp.gate_proj.hook_out",
    "ffn_up": "mlp.up_proj.hook_out",
    "ffn_up_b": "mlp.up_proj.hook_out",
    "ffn_swiglu": "mlp.hook_post",
    "ffn_sub_out": "mlp.hook_post",
    "ffn_sub_norm": "mlp.sub_norm.hook_normalized",
    "ffn_out": "mlp.down_proj.hook_out",
    "ffn_down": "mlp.down_proj.hook_out",
    "l_out": "hook_resid_post",
}
WHOLE = {"embd": "hook_embed", "inp_embd": "hook_embed", "result_norm": "ln_final.hook_normalized"}
WHOLE |= {"inp_scaled": "hook_embed_scaled"}
WHOLE |= {"result_output": "lm_head.hook_out"}
MOVES = ("RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE")  # ops that change no number
BY_HEAD = re.compile(r".*\.attn\.([qk]_norm\.hook_normalized|hook_rot_[qk])")  # (1, N, H, d)
SCALED = ("Qcur",)  # tensors that some graphs scale after RoPE, and give the same name
F32 = 0


class GgmlTensor(ctypes.Structure):
    """The first fields of ggml.h's struct ggml_tensor."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    )


def load_ggml():
    """The ggml library that llama-cpp-python has loaded."""
    folder = os.path.join(os.path.dirname(llama_cpp.__file__), "lib")
    for pattern in ("*ggml-base.so", "*ggml-base.dylib", "*ggml-base.dll"):
        for path in glob(os.path.join(folder, pattern)):
            lib = ctypes.CDLL(path)
            for function in (lib.ggml_get_name, lib.ggml_op_desc):
                function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
            lib.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_size_t] * 2
            return lib
    sys.exit(f"no ggml-base library in {folder}")


class Watch:
    def __init__(self, lib, job):
        self.lib, self.job, self.n, self.seen = lib, job, len(job["tokens"]), {}
        self.in_one_call = not (job.get("calls") or job.get("sequences"))
        self.interleaved, self.heads = job["interleaved"], job["heads"]
        self.callback = api.ggml_backend_sched_eval_callback(self)

    def __call__(self, tensor, ask, _user):
        name = self.name(tensor)
        if name is not None and not plain_trace.wants(self.job, name):
            name = None
        if name is not None and name.endswith("hook_pattern") and not self.in_one_call:
            name = None  # its columns are the cache's slots
        if not ask and name is not None:
            self.seen[name] = self.value(tensor, name)  # the last of that name: a bias comes after its product
        return name is not None if ask else True

    def name(self, tensor):
        """Our name of a tensor of the graph; None if it has none."""
        given, op = self.lib.ggml_get_name(tensor).decode(), self.lib.ggml_op_desc(tensor).decode()
        if given in WHOLE:
            is_scaled = WHOLE[given] == "hook_embed" and op == "SCALE"  # Granite's rows have their scale by now
            return "hook_embed_scaled" if is_scaled else WHOLE[given]
        kind, _, layer = given.rpartition("-")
        if op in MOVES or not layer.isdigit():
            return None
        if op == "SCALE" and kind in SCALED:
            return None
        short = BLOCK.get(f"{kind} ROPE" if op == "ROPE" else kind)
        return None if short is None else f"blocks.{layer}.{short}"

    def value(self, tensor, name):
        head = ctypes.cast(tensor, ctypes.POINTER(GgmlTensor)).contents
        shape, strides = list(head.ne)[::-1], list(head.nb)[::-1]
        if head.type != F32 or strides[3] != 4 or any(strides[i] != strides[i + 1] * shape[i + 1] for i in range(3)):
            sys.exit(f"{name}: expected float32 without holes, got ggml type {head.type}, strides {strides}")
        array = np.empty(shape, dtype=np.float32)
        self.lib.ggml_backend_tensor_get(tensor, array.ctypes.data, 0, array.nbytes)
        if name.endswith("hook_pattern"):
            return array[0, :, : self.n, : self.n].copy()  # (H, N, cache), padded
        rows = array.reshape(-1, *shape[2:]) if BY_HEAD.fullmatch(name) else array.reshape(-1, shape[3])
        return self.to_halves(rows, name) if self.interleaved else rows

    def to_halves(self, rows, name):
        """q and k from the order of interleaved RoPE to the order of halves."""
        for letter, count in zip("qk", self.heads, strict=True):
            if name.endswith((f"{letter}_proj.hook_out", f"rot_{letter}")):
                pairs = rows.reshape(len(rows), count, -1, 2)
                return np.ascontiguousarray(pairs.swapaxes(2, 3)).reshape(rows.shape)
        return rows


def record(job):
    """-> name -> array"""
    path, tokens, parts = job["model"], job["tokens"], plain_trace.parts(job)
    errors: list[str] = []
    keep_errors = api.llama_log_callback(lambda level, text, _u: errors.append(text.decode()) if level == 4 else None)
    api.llama_log_set(keep_errors, None)
    api.llama_backend_init()
    options = api.llama_model_default_params()
    options.n_gpu_layers = 0
    model = api.llama_model_load_from_file(path.encode(), options)
    if not model:
        sys.exit(f"llama.cpp cannot load the file: {' '.join(''.join(errors).split())}")
    watch = Watch(load_ggml(), job)
    settings = api.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = max(64, len(tokens))
    settings.n_seq_max = len(parts)
    settings.kv_unified = True  # so that the tokens of several sequences are computed together, in their order
    settings.n_threads = settings.n_threads_batch = min(4, os.cpu_count() or 1)
    settings.flash_attn_type = 0
    settings.type_k = settings.type_v = F32
    settings.cb_eval = watch.callback
    context = api.llama_init_from_model(model, settings)
    if not context:
        sys.exit("llama.cpp cannot make a context")
    rows = [(token, position, slot) for slot, part in enumerate(parts) for position, token in enumerate(part)]
    batch, start = api.llama_batch_init(len(tokens), 0, 1), 0
    seen: dict[str, list] = {}
    for size in job.get("calls") or [len(tokens)]:
        batch.n_tokens = size
        for i, (token, position, slot) in enumerate(rows[start : start + size]):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, True
            batch.seq_id[i][0] = slot
        if api.llama_decode(context, batch) != 0:
            sys.exit("llama.cpp could not decode the tokens")
        start += size
        for name, array in watch.seen.items():
            seen.setdefault(name, []).append(array)
        watch.seen = {}
    api.llama_batch_free(batch)
    api.llama_free(context)
    api.llama_model_free(model)
    return {name: arrays[0] if watch.in_one_call else np.concatenate(arrays) for name, arrays in seen.items()}


def run(job):
    return record(job), f"llama.cpp (llama-cpp-python {llama_cpp.__version__})", "float32"


if __name__ == "__main__":
    plain_trace.run(run)
