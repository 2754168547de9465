"""Run by `peers.py` in a process of its own: a model of a given shape in Hugging Face transformers, timed. No part of
bitnet_ref is imported here, so that time and memory are the peer's.

    python peer_transformers.py '{"config": {...}, "prompt": 64, "new": 16, "threads": 2}'

Prints one line of JSON. The weights are dense bfloat16, as most users run a BitNet in transformers; they are random,
which speed does not depend on. "device": "cuda" runs it on the GPU; "quantized": true takes transformers' own BitNet
linears, which keep four ternary weights a byte and unpack them at each call.
"""

import json
import resource
import sys
import time

LAST_CODE = 2  # of the 2-bit codes 0, 1 and 2, for the weights -1, 0 and 1


def main(asked):
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
        """What it gives, and the seconds until all of that is there."""
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
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "version": f"{transformers.__version__}, torch {torch.__version__}",
        "weights": weights,
        "prompt_s": prompt_s,
        "decode_s": decode_s,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else peak,
    }


def with_bitnet_linears(model, transformers):
    """The model with transformers' own layers for packed ternary weights in place of all linears but the head."""
    from transformers.integrations.bitnet import replace_with_bitnet_linear

    how = transformers.BitNetQuantConfig(linear_class="bitlinear", quantization_mode="offline")
    return replace_with_bitnet_linear(model, modules_to_not_convert=["lm_head"], quantization_config=how)


def fill(model, torch):
    """Parameters with normal numbers of 0.02, packed weights with valid codes, their scales with 1."""
    device = next(model.parameters()).device
    normal = torch.randn(1 << 20, dtype=torch.float32).mul_(0.02).to(torch.bfloat16).to(device)
    codes = torch.randint(0, LAST_CODE + 1, (4, 1 << 20), dtype=torch.uint8)
    packed = sum(code << 2 * place for place, code in enumerate(codes)).to(device)
    for parameter in {id(p): p for p in model.parameters()}.values():
        repeat(parameter, normal)
    for name, buffer in model.named_buffers():
        if buffer.dtype == torch.uint8:
            repeat(buffer, packed)
        elif name.endswith("weight_scale"):
            buffer.fill_(1)


def repeat(tensor, tile):
    """Fill the tensor with the tile, over and over."""
    flat = tensor.view(-1)
    for start in range(0, len(flat), len(tile)):
        piece = flat[start : start + len(tile)]
        piece.copy_(tile[: len(piece)])


if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules have names that others import
    print(json.dumps(main(json.loads(sys.argv[1]))))
