"""Run by `peers.py` in a process of its own: a model of a given shape on another engine, timed.

No part of bitnet_ref is imported here, so that time and memory are the engine's.

    python peer_process.py transformers '{"config": {...}, "prompt": 64, "new": 16, "repeats": 3, "threads": 2}'

Prints one line of JSON. Decoding is greedy, one token per step, as in our own loop. The weights are random, which speed
does not depend on.

transformers: dense bfloat16, as most users run a BitNet there. "device": "cuda" runs it on the GPU; "quantized": true
takes its own BitNet linears, which keep four ternary weights per byte and unpack them at each call.
llama-cpp-python: the GGUF at "file", float16 cache, its default. The peak memory includes the file, which is mapped.
"""

import json
import os
import random
import resource
import sys
import time

MAX_CODE = 2  # of the 2-bit codes 0, 1 and 2, for the weights -1, 0 and 1


def time_transformers(asked):
    try:
        import torch
        import transformers
    except ImportError as error:
        return {"missing": str(error)}
    device, quantized = asked.get("device", "cpu"), asked.get("quantized", False)
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} sees no GPU")
    torch.set_num_threads(asked["threads"])
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**asked["config"])
    config._attn_implementation = "sdpa"
    with torch.device("meta"):  # transformers would draw billions of normal numbers
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if quantized:
        model = with_bitnet_linears(model, transformers)
    model = model.to_empty(device=device).eval()
    model.tie_weights()
    with torch.no_grad():
        fill(model, torch)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)  # its table is no parameter

    def seconds(forward):
        """-> the result, and the seconds until a GPU has computed it"""
        wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        wait()
        started = time.perf_counter()
        out = forward()
        wait()
        return out, time.perf_counter() - started

    prompt_s, decode_s, weights = [], [], "dense bfloat16"
    tokens = torch.randint(0, config.vocab_size, (1, asked["prompt"])).to(device)
    with torch.inference_mode():
        if quantized:
            weights = "BitLinear, packed uint8"
            try:
                model(tokens)  # its parts go through torch.compile, which needs a C compiler and Python's headers
            except Exception as error:
                weights += f", eager ({type(error).__name__} in torch.compile)"
                torch.compiler.set_stance("force_eager")
        for _ in range(asked["repeats"]):
            out, taken_s = seconds(lambda: model(tokens, use_cache=True, logits_to_keep=1))
            prompt_s.append(taken_s)
        for _ in range(asked["new"]):
            token, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            out, taken_s = seconds(lambda token=token, cache=cache: model(token, past_key_values=cache, use_cache=True))
            decode_s.append(taken_s)
    return {
        "version": f"{transformers.__version__}, torch {torch.__version__}",
        "weights": weights,
        "prompt_s": prompt_s,
        "decode_s": decode_s,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else peak_memory_bytes(),
    }


def with_bitnet_linears(model, transformers):
    """The model with transformers' own layers for packed ternary weights in place of all linears but the head."""
    from transformers.integrations.bitnet import replace_with_bitnet_linear

    settings = transformers.BitNetQuantConfig(linear_class="bitlinear", quantization_mode="offline")
    return replace_with_bitnet_linear(model, modules_to_not_convert=["lm_head"], quantization_config=settings)


def fill(model, torch):
    """Fill parameters with normal numbers times 0.02, packed weights with valid codes, their scales with 1."""
    device = next(model.parameters()).device
    normal = torch.randn(1 << 20, dtype=torch.float32).mul_(0.02).to(torch.bfloat16).to(device)
    codes = torch.randint(0, MAX_CODE + 1, (4, 1 << 20), dtype=torch.uint8)
    packed = sum(code << 2 * place for place, code in enumerate(codes)).to(device)
    for parameter in {id(p): p for p in model.parameters()}.values():
        repeat(parameter, normal)
    for name, buffer in model.named_buffers():
        if buffer.dtype == torch.uint8:
            repeat(buffer, packed)
        elif name.endswith("weight_scale"):
            buffer.fill_(1)


def repeat(tensor, tile):
    flat = tensor.view(-1)
    for start in range(0, len(flat), len(tile)):
        piece = flat[start : start + len(tile)]
        piece.copy_(tile[: len(piece)])


def time_llama_cpp(asked):
    try:
        import llama_cpp
        from llama_cpp import llama_cpp as api
    except ImportError as error:
        return {"missing": str(error)}
    if "file" not in asked:
        return {}  # the question was only whether it is installed
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
        """-> seconds until the last token's logits are there, and the most likely token"""
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
    return {
        "version": llama_cpp.__version__,
        "weights": "TQ2_0, head float16",
        "prompt_s": prompt_s,
        "decode_s": decode_s,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def peak_memory_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules have names that others import
    engines = {"transformers": time_transformers, "llama-cpp-python": time_llama_cpp}
    print(json.dumps(engines[sys.argv[1]](json.loads(sys.argv[2]))))
