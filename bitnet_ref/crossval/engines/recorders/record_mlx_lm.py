"""Runs an MLX folder in mlx-lm by its plain loader, in the folder's dtype, and records its logits.

echo '[{"model": FOLDER, "tokens": [1, 17, 5], "out": FILE}]' | python record_mlx_lm.py
"""

from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
import plain_trace
from mlx_lm.utils import load_model


def run(job):
    model, _ = load_model(Path(job["model"]))
    logits = model(mx.array(job["tokens"])[None])[0]
    dtype = str(logits.dtype).rpartition(".")[2]
    return {"lm_head.hook_out": np.array(logits.astype(mx.float32))}, f"mlx-lm {version('mlx-lm')}", dtype


if __name__ == "__main__":
    plain_trace.run(run)
