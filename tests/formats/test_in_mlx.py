"""MLX folders that `convert` writes run in mlx-lm by its plain loader, and give our logits.

Its floats are widened to float32 first, as it computes in the file's float16 otherwise.
"""

import json
from importlib.util import find_spec

import numpy as np
import pytest
from helpers import DATA, run_python

import bitnet_ref
from bitnet_ref.crossval.tolerances import LOGITS_FLOOR
from bitnet_ref.formats.convert import convert

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("mlx_lm") is None, reason="needs mlx-lm: pip install 'mlx[cpu]' mlx-lm"),
]
TOKENS = [1, 5, 9, 2, 7, 30, 11, 4]
CASES = [
    ("families/qwen3-groups128", "mlx-2bit"),
    ("families/mixtral-groups128", "mlx-2bit"),
    ("families/qwen3_moe-groups128", "mlx-2bit"),
    ("families/qwen3_5-groups128-hybrid", "mlx-2bit"),
    ("containers/mlx-qwen35-ternary-2bit", "mlx-2bit"),
    ("containers/gguf-tq1_0-default/model.gguf", "mlx-2bit"),  # LLaMA
    ("containers/gguf-q1_0/model.gguf", "mlx-2bit"),
    ("containers/gguf-q1_0/model.gguf", "mlx-1bit"),
]
# Arguments: a file with [folder, ...], one with tokens, and one for {number of the folder: logits}
RUN = """
import json
import sys
from pathlib import Path
import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.utils import load_model

def widen(array):
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array

logits = {}
tokens = mx.array(json.loads(Path(sys.argv[2]).read_text()))[None]
for number, folder in enumerate(json.loads(Path(sys.argv[1]).read_text())):
    model, _ = load_model(Path(folder))
    model.update(tree_map(widen, model.parameters()))
    logits[str(number)] = np.array(model(tokens)[0])
np.savez(sys.argv[3], **logits)
print("null")
"""


def test_written_folders_run(tmp_path):
    folders = [tmp_path / f"{number}-{target}" for number, (_, target) in enumerate(CASES)]
    for folder, (source, target) in zip(folders, CASES, strict=True):
        convert(DATA / source, folder, target)
    (tmp_path / "folders.json").write_text(json.dumps(list(map(str, folders))))
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS))
    run_python(RUN, tmp_path / "folders.json", tmp_path / "tokens.json", tmp_path / "logits.npz")
    theirs = np.load(tmp_path / "logits.npz")
    for number, (folder, case) in enumerate(zip(folders, CASES, strict=True)):
        ours = bitnet_ref.load(folder, backend="numpy").logits(TOKENS)
        np.testing.assert_allclose(theirs[str(number)], ours, rtol=0, atol=LOGITS_FLOOR, err_msg=str(case))
