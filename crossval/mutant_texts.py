"""The texts by which a mutant is judged: what `generate` gives for some models, backends and parameters."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROMPT = "Once upon a time, the little rabbit ran down the hill and said to the other rabbits"
SAMPLED = {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 7}
PENALTIES = {"presence_penalty": 0.3, "frequency_penalty": 0.2, "typical_p": 0.95, "logit_bias": {300: 2.0}}
RULED = {"activations": "blocks"}
KERNEL_VARIANTS: dict[str, dict[str, dict[str, Any]]] = {  # {model: {the name of a variant: arguments of `load`}}
    "blocks": {"exact": {}, "by ggml's rule": RULED},
    "groups": {"exact": {}},
    "hadamard": {"exact": {}},
    "mixture": {"exact": {}},
    "ruled mixture": {"by ggml's rule": RULED},
    "sparse": {"strips": {}},
    "adapted": {"adapter": {}},
}
SAME_KERNELS = {"avxvnni", "amx"}  # these sets compute these models by the functions of avx2 and avx512,
OWN_KERNELS = {("blocks", "exact", "amx")}  # but these
ADAPTERS = (None, "own", None)  # of the requests of one batch


def write_texts(models: dict[str, str], kernels: bool = False) -> Iterator[tuple[str, Any]]:
    """(name, token ids, text and log probabilities) of each generation.

    models: {name: path}. kernels: also on every kernel set and weight layout of the extension, training steps, and the
    models of `kernel_models.py`, if they are among these.
    """
    import bitnet_ref

    if kernels:
        yield "storyteller, training", list(_training(bitnet_ref.load(models["storyteller"]).config))
    for name, path in models.items():
        if name in KERNEL_VARIANTS:
            yield from _kernel_texts(name, path)
            continue
        for label, options, environment in _variants(kernels):
            if label.startswith("scalar" if name == "storyteller" else "numpy"):
                continue  # slow, and the other models show as much
            with _environment(environment):
                model = bitnet_ref.load(path, **options)
                for what, result in _generations(model, name == "storyteller", label):
                    yield f"{name}, {label}, {what}", _plain(result)


def _variants(kernels: bool) -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    """(name, arguments of `load`, environment). One thread but for the first: several mutants are judged at a time."""
    yield "cython", {"backend": "cython", "threads": 2}, {}
    yield "screened head", {"backend": "cython", "head": "screened", "threads": 1}, {}
    for dtype in ("float16", "int8"):
        yield f"{dtype} cache", {"backend": "cython", "cache_dtype": dtype, "threads": 1}, {}
    if not kernels:
        yield "numpy", {"backend": "numpy", "threads": 1}, {}
        return
    from bitnet_ref.kernels.cpu import _cpu

    options = {  # each with some layout: they do not depend on it
        "2-bit": {"cache_dtype": "float16"},
        "table": {"head": "screened"},
        "1.6-bit": {"cache_dtype": "int8"},
    }
    for layout, _, sets in reversed(_cpu.ternary_methods()):
        for simd in [simd for simd, lacks in reversed(_cpu.kernel_sets()) if lacks is None and simd in sets]:
            environment = {"BITNET_REF_SIMD": simd, "BITNET_REF_WEIGHTS": layout}
            yield f"{simd}, {layout}", {"backend": "cython", "threads": 1, **options[layout]}, environment


def _kernel_texts(name: str, path: str) -> Iterator[tuple[str, Any]]:
    """A model of `kernel_models.py` on each kernel set: many tokens, one at a time, some with an adapter."""
    import bitnet_ref
    from bitnet_ref.kernels.cpu import _cpu

    sets = [simd for simd, lacks in reversed(_cpu.kernel_sets()) if lacks is None]
    greedy: dict[str, Any] = {"max_tokens": 4, "logprobs": 2, "ignore_eos": True}
    for variant, options in KERNEL_VARIANTS[name].items():
        for simd in sets:
            if simd in SAME_KERNELS and (name, variant, simd) not in OWN_KERNELS:
                continue
            with _environment({"BITNET_REF_SIMD": simd, "BITNET_REF_STRIPS": "always"}):
                model = bitnet_ref.load(path, backend="cython", threads=1, **options)
            label = f"{name}, {variant}, {simd}"
            ids = [(7 + 5 * i) % (model.config.vocab_size - 4) + 3 for i in range(90)]
            prompts = [ids[:58], ids[60:65], ids[70:77]]
            yield f"{label}, batch", _plain(model.generate(prompts, **greedy))
            yield f"{label}, one", _plain(model.generate(ids[:29], **greedy))
            if (folder := Path(path, "adapter")).is_dir():
                model.add_adapter("own", folder)
                yield f"{label}, adapter, batch", _plain(model.generate(prompts, adapter="own", **greedy))
                yield f"{label}, adapter, one", _plain(model.generate(ids[:29], adapter="own", **greedy))
                with model.engine(max_batch=3, page_size=8) as engine:
                    handles = [
                        engine.submit(p, adapter=own, **greedy) for p, own in zip(prompts, ADAPTERS, strict=True)
                    ]
                    yield f"{label}, some with an adapter", [_plain(handle.result()) for handle in handles]


def _training(config: Any) -> Iterator[float]:
    """Numbers that a change of a training step by 0.1% moves: of the loss, each gradient, and each master's update."""
    import numpy as np

    from bitnet_ref.crossval.training_step import small_models
    from bitnet_ref.training import Trainer

    for small, masters, tokens in small_models(config):
        rates = {"lr": 0.05, "weight_decay": 0.5, "max_norm": 0.01}
        narrow = {name: w.astype(np.float32) for name, w in masters.items()}
        trainer = Trainer(small, narrow, backend="cython", threads=1, **rates)
        loss, gradients = trainer.loss_and_gradients(tokens)
        yield loss
        for sign in (1, -3):
            trainer.apply({name: sign * g for name, g in gradients.items()})
        updates = {name: w - masters[name] for name, w in trainer.masters.items()}
        for array in [*gradients.values(), *updates.values()]:
            direction = np.random.default_rng(1).standard_normal(array.shape)
            size = float(np.linalg.norm(array))
            yield from (float(np.log(size)), float((direction * array).sum() / size))


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]


def _generations(model: Any, has_text: bool, label: str) -> Iterator[tuple[str, Any]]:
    """Short ones on every variant, to see arithmetic; one of each kind where the code is Python's."""
    ids = [(7 + 5 * i) % 60 + 3 for i in range(90)]
    prompts = [PROMPT, "The king", "She looked at"] if has_text else [ids[:21], ids[30:32], ids[40:45]]
    yield "batch", model.generate(prompts, max_tokens=5, logprobs=2)
    if label == "numpy":
        return
    yield "long prompt", model.generate(PROMPT * 10 if has_text else ids, max_tokens=3)
    if label not in ("cython", "screened head"):
        return
    yield "greedy", model.generate(prompts[0], max_tokens=24)
    if not has_text:
        with model.engine(max_batch=2, max_batch_tokens=16, page_size=8) as engine:
            yield "engine", engine.generate(prompts, max_tokens=12)
        return
    yield "sampled", model.generate(prompts[0], max_tokens=16, logprobs=1, **SAMPLED)
    yield "drawn", model.generate(prompts[0], max_tokens=16, temperature=0.8, seed=3)
    limits = {"temperature": 1.0, "top_k": 200, "top_p": 0.9, "min_p": 0.01}
    yield "drawn in a batch", model.generate(prompts, max_tokens=16, seed=4, **limits)
    yield "two of each", model.generate(prompts[:2], max_tokens=8, n=2, **(SAMPLED | PENALTIES))
    yield "beams", model.generate(prompts[1], max_tokens=6, num_beams=2)
    yield "stop", model.generate(prompts[0], max_tokens=40, stop=[" and", "the"], min_tokens=4)
    with model.stream(prompts[2], max_tokens=6) as chunks:
        yield "stream", [(chunk.text, chunk.token_id) for chunk in chunks]


def _plain(value: Any) -> Any:
    """The values that must not change: token ids, texts, reasons, log probabilities; no times."""
    if hasattr(value, "token_ids"):
        return [
            _plain(getattr(value, name)) for name in ("token_ids", "text", "finish_reason", "logprobs", "top_logprobs")
        ]
    if hasattr(value, "__dataclass_fields__"):
        return [_plain(getattr(value, name)) for name in value.__dataclass_fields__]
    if isinstance(value, dict):
        return [[_plain(key), _plain(each)] for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, str) else float(value)


def same(a: Any, b: Any) -> bool:
    """Equal texts and ids, and log probabilities closer than 0.001: a smaller change is within the float tolerances."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) < 1e-3
    return bool(a == b)


def small_models(folder: Path) -> dict[str, str]:
    """{name: path} of models with what storyteller lacks: SiLU, biases, a window, three query heads for each kv head, a
    head of their own, and sizes that leave a rest in every loop of the kernels."""
    import numpy as np
    from planted_models import BASE, tensors_for, write

    sizes = {"hidden_size": 132, "intermediate_size": 204, "num_attention_heads": 6, "head_dim": 22, "vocab_size": 70}
    small = {**BASE, **sizes, "hidden_act": "silu", "tie_word_embeddings": False}
    windowed = {**small, "model_type": "mistral", "sliding_window": 20}
    biased = {**small, "model_type": "llama", "attention_bias": True, "mlp_bias": True}
    tensors, dice = tensors_for(biased, embedding_std=0.5), np.random.default_rng(5)
    for name, tensor in list(tensors.items()):
        if name.endswith("_proj.weight"):
            rows = len(tensor) * (4 if tensor.dtype == np.uint8 else 1)
            tensors[name.replace("weight", "bias")] = dice.normal(size=rows, scale=0.3).astype(np.float32)
    paths = (
        write(folder / "windowed", windowed, tensors_for(windowed, embedding_std=0.5)),
        write(folder / "biased", biased, tensors),
    )
    return {path.name: str(path) for path in paths}
