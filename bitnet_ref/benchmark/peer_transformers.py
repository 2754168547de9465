"""Run by `peers.py` in a process of its own: a model of a given shape in Hugging Face transformers, timed. No part of
bitnet_ref is imported here, so that time and memory are the peer's.

    python peer_transformers.py '{"config": {...}, "prompt": 64, "new": 16, "threads": 2}'

Prints one line of JSON. The weights are dense bfloat16, as most users run a BitNet in transformers; they are random,
which speed does not depend on.
"""

import json
import resource
import sys
import time


def main(asked):
    try:
        import torch
        import transformers
    except ImportError as error:
        return {"missing": str(error)}
    torch.set_num_threads(asked["threads"])
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**asked["config"])
    config._attn_implementation = "sdpa"
    with torch.device("meta"):  # transformers would draw billions of normal numbers
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu").eval()
    model.tie_weights()
    tile = torch.randn(1 << 20, dtype=torch.float32).mul_(0.02).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in {id(p): p for p in model.parameters()}.values():
            flat = parameter.view(-1)
            for start in range(0, len(flat), len(tile)):
                piece = flat[start : start + len(tile)]
                piece.copy_(tile[: len(piece)])
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)  # its table is no parameter

    prompt_s, decode_s = [], []
    tokens = torch.randint(0, config.vocab_size, (1, asked["prompt"]))
    with torch.inference_mode():
        for _ in range(asked["repeats"]):
            started = time.perf_counter()
            out = model(tokens, use_cache=True, logits_to_keep=1)
            prompt_s.append(time.perf_counter() - started)
        for _ in range(asked["new"]):
            token = out.logits[:, -1:].argmax(-1)
            started = time.perf_counter()
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            decode_s.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "version": f"{transformers.__version__}, torch {torch.__version__}",
        "weights": "dense bfloat16",
        "prompt_s": prompt_s,
        "decode_s": decode_s,
        "peak_memory_bytes": peak,
    }


if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules have names that others import
    print(json.dumps(main(json.loads(sys.argv[1]))))
