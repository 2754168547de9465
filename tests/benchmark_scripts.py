"""The modules of scripts/benchmarks, for their tests."""

import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "scripts" / "benchmarks"
path = list(sys.path)
sys.path.insert(0, str(FOLDER))
adapters, ceilings, cuda_kernels, first_token, gate_zeros, gpu, models, peers, report, serve, servers = map(
    importlib.import_module,
    [
        *("adapters", "ceilings", "cuda_kernels", "first_token", "gate_zeros", "gpu", "models", "peers", "report"),
        *("serve", "servers"),
    ],
)
tokenizer, train_steps = map(importlib.import_module, ("tokenizer", "train_steps"))
sys.path[:] = path  # its modules have names that others import
