r"""Runs an exported decoder in onnxruntime and records its logits, and the tensors inside that the job asks for.

    echo '[{"model": FILE, "watched": FILE, "outputs": {"hook_embed": "NAME"}, "cache": [6, 2, 64], ...}]' \
        | python record_onnxruntime.py

model: the file as exported; its logits are the ones recorded.   watched: the same with those tensors as outputs.
outputs: our name -> the graph's name.
cache: [layers, kv heads, head_dim].
"""

import numpy as np
import onnxruntime
import plain_trace


def session(path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def feeds(tokens, cache):
    layers, kv_heads, head_dim = cache
    ids = np.array([tokens], dtype=np.int64)
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.size)[None]}
    empty = np.empty((1, kv_heads, 0, head_dim), dtype=np.float32)
    return given | {f"past_key_values.{i}.{part}": empty for i in range(layers) for part in ("key", "value")}


def shaped(name, array):
    """Without the batch axis; heads behind the tokens; int8 where the graph has uint8 with a zero point."""
    array = array[0]
    if array.dtype == np.uint8:
        return (array.astype(np.int16) - 128).astype(np.int8)
    if name.endswith(("hook_rot_q", "hook_rot_k", "hook_v")):
        return np.ascontiguousarray(array.swapaxes(0, 1))  # (H, N, d) -> (N, H, d)
    return array


def run(job):
    given = feeds(job["tokens"], job["cache"])
    seen = {"lm_head.hook_out": session(job["model"]).run(["logits"], given)[0][0]}
    names = list(job["outputs"])
    arrays = session(job["watched"]).run([job["outputs"][name] for name in names], given)
    seen |= {name: shaped(name, array) for name, array in zip(names, arrays, strict=True)}
    return seen, f"onnxruntime {onnxruntime.__version__}", "float32"


if __name__ == "__main__":
    plain_trace.run(run)
