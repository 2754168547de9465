"""Runs a folder of bfloat16 masters (`convert --to hf-online`) in Litespark-inference and writes its logits as a trace.

    PYTHON crossval/record_litespark.py FOLDER TRACE --tokens 65 [--one-by-one] [--embedding int4] [--falcon]

PYTHON: an interpreter that has litespark-inference. The tokens are 3, 10, 17, ... of the vocabulary. The embedding is
kept in bfloat16 unless another is asked for; Litespark's own default is int4. --one-by-one: a call for each token.
--falcon: the loader of Falcon-E, for a folder of packed planes in LLaMA's shape.
`bitnet-ref crossval trace FOLDER TRACE` judges what was written.
"""

import argparse
import sys
from importlib.metadata import version
from pathlib import Path

sys.path[0] = str(Path(__file__).parent.parent / "bitnet_ref" / "crossval" / "engines" / "recorders")

import numpy as np  # noqa: E402
import plain_trace  # noqa: E402
from litespark_inference.torchless import kernel, loader, runtime  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("trace")
    parser.add_argument("--tokens", type=int, default=24, help="how many")
    parser.add_argument("--one-by-one", action="store_true")
    parser.add_argument("--embedding", default="bf16", choices=("bf16", "int8", "int4"))
    parser.add_argument("--falcon", action="store_true")
    options = parser.parse_args()
    files = options.folder / "config.json", options.folder / "model.safetensors"
    loader._resolve_hf_snapshot = lambda repo: files  # it takes names of the hub only
    load = (lambda **given: loader.load_falcon_edge("", **given)) if options.falcon else loader.load_bitnet_2b
    model = load(embed_dtype=options.embedding)
    ids = [(3 + 7 * i) % model.config.vocab_size for i in range(options.tokens)]
    state = runtime.init_state(model, options.tokens + 1)
    if options.one_by_one or options.falcon:
        forward_one = runtime.falcon_forward_one if options.falcon else runtime.forward_one
        logits = np.stack([np.array(forward_one(model, state, i)) for i in ids])
    else:
        logits = runtime.forward_prefill_all_logits(model, state, ids)
    engine = f"litespark-inference {version('litespark-inference')}, {kernel._ARCH_TAG}"
    plain_trace.write(options.trace, {"logits": logits.astype(np.float32)}, ids, engine)


if __name__ == "__main__":
    main()
