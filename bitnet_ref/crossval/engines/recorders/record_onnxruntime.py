r"""Runs an exported decoder in onnxruntime and records its logits and the inner tensors that the job asks for.

    echo '[{"model": FILE, "watched": FILE, "outputs": {"hook_embed": "NAME"}, "cache": [6, 2, 64], ...}]' \
        | python record_onnxruntime.py

model: the exported file, whose logits are recorded.   watched: a copy with the inner tensors as outputs.
outputs: our name -> the graph's name.   cache: [layers, kv heads, head_dim].
"""

import numpy as np
import onnxruntime
import plain_trace


def open_session(path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def make_inputs(tokens, cache):
    layers, kv_heads, head_dim = cache
    ids = np.array([tokens], dtype=np.int64)
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.size)[None]}
    empty = np.empty((1, kv_heads, 0, head_dim), dtype=np.float32)
    return inputs | {f"past_key_values.{i}.{part}": empty for i in range(layers) for part in ("key", "value")}


def to_trace(name, array):
    """The array without its batch axis, tokens before heads, and int8 where the graph has uint8 with a zero point."""
    array = array[0]
    if array.dtype == np.uint8:
        return (array.astype(np.int16) - 128).astype(np.int8)
    if name.endswith(("hook_rot_q", "hook_rot_k", "hook_v")):
        return np.ascontiguousarray(array.swapaxes(0, 1))  # (H, N, d) -> (N, H, d)
    return array


def run(job):
    inputs = make_inputs(job["tokens"], job["cache"])
    tensors = {"lm_head.hook_out": open_session(job["model"]).run(["logits"], inputs)[0][0]}
    names = [name for name in job["outputs"] if plain_trace.wants(job, name)]
    arrays = open_session(job["watched"]).run([job["outputs"][name] for name in names], inputs)
    tensors |= {name: to_trace(name, array) for name, array in zip(names, arrays, strict=True)}
    return tensors, f"onnxruntime {onnxruntime.__version__}", "float32"


if __name__ == "__main__":
    plain_trace.run(run)
