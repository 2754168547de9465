"""Run by `peers.py` in a process of its own: a GGUF in llama.cpp, through llama-cpp-python, timed. No part of
bitnet_ref is imported here, so that time and memory are the peer's.

    python peer_llama_cpp.py '{"file": "model.gguf", "config": {...}, "prompt": 64, "new": 16, "threads": 2, ...}'

Prints one line of JSON. It decodes greedily with the logits of one token a step, as our own loop does; the cache is
float16, its default. The memory is the process's peak, in which the file counts, as it is mapped.
"""

import json
import os
import random
import resource
import sys
import time


def main(asked):
    try:
        import llama_cpp
        from llama_cpp import llama_cpp as api
    except ImportError as error:
        return {"missing": str(error)}
    if "file" not in asked:
        return {}  # only whether it is installed
    quiet = api.llama_log_callback(lambda level, text, _user: sys.stderr.write(text.decode()) if level >= 4 else None)
    api.llama_log_set(quiet, None)
    api.llama_backend_init()
    options = api.llama_model_default_params()
    options.n_gpu_layers = 0
    model = api.llama_model_load_from_file(os.fsencode(asked["file"]), options)
    if not model:
        sys.exit("llama.cpp cannot load the file")
    settings = api.llama_context_default_params()
    settings.n_ctx = asked["prompt"] + asked["new"]
    settings.n_batch = settings.n_ubatch = max(64, asked["prompt"])
    settings.n_threads = settings.n_threads_batch = asked["threads"]
    context = api.llama_init_from_model(model, settings)
    if not context:
        sys.exit("llama.cpp cannot make a context")
    vocabulary = asked["config"]["vocab_size"]
    batch = api.llama_batch_init(max(1, asked["prompt"]), 0, 1)

    def step(tokens, start):
        """Seconds of a decode that asks for the last token's logits, and the likeliest token."""
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, start + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, i == len(tokens) - 1
        started = time.perf_counter()
        if api.llama_decode(context, batch) != 0:
            sys.exit("llama.cpp could not decode the tokens")
        api.llama_synchronize(context)
        taken = time.perf_counter() - started
        logits = api.llama_get_logits_ith(context, -1)[:vocabulary]
        return taken, max(range(vocabulary), key=logits.__getitem__)

    tokens = [random.Random(1).randrange(vocabulary) for _ in range(asked["prompt"])]
    prompt_s, decode_s = [], []
    for _ in range(asked["repeats"]):
        api.llama_memory_clear(api.llama_get_memory(context), True)
        taken, token = step(tokens, 0)
        prompt_s.append(taken)
    for position in range(asked["prompt"], asked["prompt"] + asked["new"]):
        taken, token = step([token], position)
        decode_s.append(taken)
    api.llama_batch_free(batch)
    api.llama_free(context)
    api.llama_model_free(model)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "version": llama_cpp.__version__,
        "weights": "TQ2_0, head float16",
        "prompt_s": prompt_s,
        "decode_s": decode_s,
        "peak_memory_bytes": peak,
    }


if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules have names that others import
    print(json.dumps(main(json.loads(sys.argv[1]))))
