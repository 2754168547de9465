"""Run by `peers.py` in a process of its own: a model of a given shape on another engine, timed.

No part of bitnet_ref is imported here, so that time and memory are the engine's.

    python peer_process.py transformers '{"config": {...}, "prompt": 64, "new": 16, "repeats": 3, "threads": 2}'

Prints one line of JSON. Decoding is greedy, one token per step, as in our own loop. The weights are random, which speed
does not depend on.

transformers: dense bfloat16, as most users run a BitNet there. "device": "cuda" runs it on the GPU; "quantized": true
takes its own BitNet linears, which keep four ternary weights per byte and unpack them at each call.
llama-cpp-python: the GGUF at "file", float16 cache, its default. The peak memory includes the file, which is mapped.
ik-llama-cpp-python: the same; with "quantize" its llama-quantize first makes that type of the file's ternary matrices.
It repacks its matrices after loading, unless "repack" is false. "logits" adds the prompt's tokens and last logits.
"""

import ctypes
import importlib.metadata
import json
import os
import random
import resource
import subprocess
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

    def clear_cache(context):
        api.llama_memory_clear(api.llama_get_memory(context), True)

    if "file" not in asked:
        return {}  # the question was only whether it is installed
    return time_gguf(asked, api, llama_cpp.__version__, clear_cache)


def time_ik_llama_cpp(asked):
    try:
        from ik_llama_cpp import _ctypes_api as api
        from ik_llama_cpp.quantize import find_quantize_bin
    except (ImportError, OSError) as error:
        return {"missing": str(error)}
    if "file" not in asked:
        return {}
    if kind := asked.get("quantize"):
        requantized = asked["file"] + "." + kind.lower()
        types = "--allow-requantize", "--token-embedding-type", "f16", "--output-tensor-type", "f16"
        command = [str(find_quantize_bin()), *types, asked["file"], requantized, kind, str(asked["threads"])]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
            sys.exit(f"llama-quantize cannot make {kind}")
        asked = {**asked, "file": requantized}
    options = {"use_mmap": False, "repack_tensors": True} if asked.get("repack", True) else {}
    describe_system = api._lib.llama_print_system_info
    describe_system.restype = ctypes.c_char_p
    built_for = [name for name in ("AVX512_VNNI", "AVX2", "NEON") if f"{name} = 1" in describe_system().decode()]
    version = ", ".join([importlib.metadata.version("ik-llama-cpp-python"), *built_for[:1]])
    measured = time_gguf(asked, api, version, api.llama_kv_cache_clear, **options)
    return {**measured, "weights": measured["weights"] + ", repacked" * bool(options)}


def time_gguf(asked, api, version, clear_cache, **options):
    """The file in llama.cpp or ik_llama.cpp, whose functions have the same names. options: of the model."""
    api.llama_backend_init()
    model_params = api.llama_model_default_params()
    for name, value in {"n_gpu_layers": 0, **options}.items():
        setattr(model_params, name, value)
    model = api.llama_model_load_from_file(os.fsencode(asked["file"]), model_params)
    if not model:
        sys.exit("cannot load the file")
    context_params = api.llama_context_default_params()
    context_params.n_ctx = asked["prompt"] + asked["new"]
    context_params.n_batch = context_params.n_ubatch = max(64, asked["prompt"])
    context_params.n_threads = context_params.n_threads_batch = asked["threads"]
    context = api.llama_init_from_model(model, context_params)
    if not context:
        sys.exit("cannot make a context")
    vocabulary = asked["config"]["vocab_size"]
    batch = api.llama_batch_init(max(1, asked["prompt"]), 0, 1)

    def step(tokens, start):
        """-> seconds until the last token's logits are there, and the logits"""
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, start + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, i == len(tokens) - 1
        started = time.perf_counter()
        if api.llama_decode(context, batch) != 0:
            sys.exit("cannot decode the tokens")
        logits = api.llama_get_logits_ith(context, -1)  # it waits for them
        return time.perf_counter() - started, logits[:vocabulary]

    tokens = random.Random(1).choices(range(vocabulary), k=asked["prompt"])
    prompt_s, decode_s = [], []
    for _ in range(asked["repeats"]):
        clear_cache(context)
        taken, logits = step(tokens, 0)
        prompt_s.append(taken)
    prompt_logits = logits
    for position in range(asked["prompt"], asked["prompt"] + asked["new"]):
        taken, logits = step([max(range(vocabulary), key=logits.__getitem__)], position)
        decode_s.append(taken)
    description = ctypes.create_string_buffer(256)
    api.llama_model_desc(model, description, len(description))
    return {
        "version": version,
        "weights": description.value.decode(),
        "prompt_s": prompt_s,
        "decode_s": decode_s,
        "peak_memory_bytes": peak_memory_bytes(),
        **({"tokens": tokens, "logits": prompt_logits} if asked.get("logits") else {}),
    }


def peak_memory_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules have names that others import
    engines = {
        "transformers": time_transformers,
        "llama-cpp-python": time_llama_cpp,
        "ik-llama-cpp-python": time_ik_llama_cpp,
    }
    print(json.dumps(engines[sys.argv[1]](json.loads(sys.argv[2]))))
