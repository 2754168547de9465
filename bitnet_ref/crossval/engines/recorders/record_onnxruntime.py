r"""Runs an exported decoder in onnxruntime and records its logits and the inner tensors that the job asks for.

    echo '[{"model": FILE, "watched": FILE, "outputs": {"hook_embed": "NAME"}, "cache": [6, 2, 64], ...}]' \
        | python record_onnxruntime.py

model: the exported file, whose logits are recorded.   watched: a copy with the inner tensors as outputs;
without it the logits are all.
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


def make_inputs(tokens, past, cache):
    """The inputs of one call, after so many tokens whose keys and values are in the cache."""
    ids, n = np.array([tokens], dtype=np.int64), cache["past_key_values.0.key"].shape[2]
    mask = np.ones((1, n + ids.size), dtype=np.int64)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": past + np.arange(ids.size)[None], **cache}


def empty_cache(layers, kv_heads, head_dim):
    empty = np.empty((1, kv_heads, 0, head_dim), dtype=np.float32)
    return {f"past_key_values.{i}.{part}": empty for i in range(layers) for part in ("key", "value")}


def to_trace(name, array):
    """The array without its batch axis, tokens before heads, and int8 where the graph has uint8 with a zero point."""
    array = array[0]
    if array.dtype == np.uint8:
        return (array.astype(np.int16) - 128).astype(np.int8)
    if name.endswith(("hook_rot_q", "hook_rot_k", "hook_v")):
        return np.ascontiguousarray(array.swapaxes(0, 1))  # (H, N, d) -> (N, H, d)
    return array


def run(job):
    if job.get("sequences"):
        raise plain_trace.Unavailable("two sequences at once: the recorder pads no batch for onnxruntime")
    tokens, calls = job["tokens"], job.get("calls") or [len(job["tokens"])]
    plain, watched = open_session(job["model"]), open_session(job["watched"]) if "watched" in job else None
    names = [name for name in job["outputs"] if plain_trace.wants(job, name)]
    parts: dict[str, list] = {}
    start, caches = 0, [empty_cache(*job["cache"])] * 2
    presents = [name.replace("past_key_values", "present") for name in caches[0]]
    for size in calls:
        ids = tokens[start : start + size]
        logits, *now = plain.run(["logits", *presents], make_inputs(ids, start, caches[0]))
        arrays = now
        if watched is not None:
            wanted = [job["outputs"][name] for name in names]
            arrays = watched.run([*wanted, *presents], make_inputs(ids, start, caches[1]))
        caches = [dict(zip(caches[0], own, strict=True)) for own in (now, arrays[len(names) :])]
        parts.setdefault("lm_head.hook_out", []).append(logits[0])
        for name, array in zip(names, arrays, strict=False):
            parts.setdefault(name, []).append(to_trace(name, array)[-size:])  # of the cache the call's own rows
        start += size
    tensors = {name: np.concatenate(own) for name, own in parts.items()}
    return tensors, f"onnxruntime {onnxruntime.__version__}", "float32"


if __name__ == "__main__":
    plain_trace.run(run)
