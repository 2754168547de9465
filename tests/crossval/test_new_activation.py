"""CONTRIBUTING's recipe for an activation, carried out in a copy of the package: crossval knows a model with it."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import BITNET, write_checkpoint

FOLDER = Path(__file__).parents[2] / "crossval"
sys.path.insert(0, str(FOLDER))

import planting  # noqa: E402

sys.path[:] = [path for path in sys.path if path != str(FOLDER)]  # its other scripts have the names of packages

TOKENS = [1, 17, 5, 23, 9, 32, 3, 3]
ROW = '    "relu": Activation(lambda x: np.maximum(x, 0), "relu(gate) * up", "relu"),\n'
RECIPE = [planting.Edit("reference/layers.py", "ACTIVATIONS = {\n", f"ACTIVATIONS = {{\n{ROW}")]


@pytest.mark.thorough
def test_a_model_with_relu_is_compared_and_explained(tmp_path):
    config = {**BITNET, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "hidden_act": "relu"}
    folder = write_checkpoint(tmp_path / "m", config)
    with planting.planted(RECIPE) as copy:
        m = copy.load(folder, backend="numpy", threads=1)
        crossval = importlib.import_module(f"{copy.__name__}.crossval")
        trace = importlib.import_module(f"{copy.__name__}.crossval.trace")
        seen = m.run_with_cache(TOKENS)[1]
        trace.write_trace(tmp_path / "right", seen, TOKENS, engine="theirs")
        assert crossval.cross_trace(m, tmp_path / "right").agrees
        later = ("blocks.1", "final", "lm_head")  # which would be wrong, too
        wrong = {name: x for name, x in seen.items() if not any(map(name.__contains__, later))}
        up, gate = (seen[f"blocks.0.mlp.{name}"] for name in ("hook_pre_linear", "hook_pre"))
        wrong["blocks.0.mlp.hook_post"] = np.square(np.maximum(gate, 0)) * up
        trace.write_trace(tmp_path / "wrong", wrong, TOKENS, engine="theirs")
        crossing = crossval.cross_trace(m, tmp_path / "wrong")
        assert crossing.comparisons[0].first_divergence.name == "blocks.0.mlp.hook_post"
        assert crossing.causes
        assert "hook_post" in crossing.worked or "relu(gate)" in crossing.worked
        assert not crossing.causes.failed
        described = [cause.cause for cause in crossing.causes if cause.name == "described"]
        assert any("relu squared where relu belongs" in cause for cause in described), described
