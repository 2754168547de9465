"""What computes: the options of `load` and of the engine that choose a backend and say what GPUs do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import BackendUnavailable
from ..reference.config import ModelConfig
from ..system.options import BYTES, Number, Values, choice, option, read_options
from . import DTYPES, NAMES
from .backend import HEADS
from .paged_cache import CACHE_DTYPES

DEFAULT_CACHE_TOKENS = 4096  # upper limit of the room left for a cache if the user gives no number


def _numbers(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _is_devices(value: Any) -> bool:
    numbers = _numbers(value) if isinstance(value, int | Iterable) else ()
    return bool(numbers) and all(map(COUNT.accepts, numbers)) and len({*numbers}) == len(numbers)


COUNT = Number(0, whole=True)
DEVICES = Values(
    lambda value: value is None or _is_devices(value),
    "different numbers of cards like [0, 1]",
    convert=lambda value: None if value is None else _numbers(value),
)
LAYERS = Values(
    lambda value: value is None or (isinstance(value, str) and value == "all") or COUNT.accepts(value),
    "a number of layers, or 'all'",
)


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """The backend of a model, and its numbers.

    Computing:
    backend: What computes. "numpy" is the reference, "cython" is compiled, "cupy" is for NVIDIA (with
        BITNET_REF_CUDA=emulated the same kernels on the processor, slowly); "auto" is the fastest that can run here.
    threads: CPU threads. The default is cut to the cgroup's limit. By default BITNET_REF_NUM_THREADS, OMP_NUM_THREADS,
        or one per physical core.
    dtype: Computing in: float64 needs numpy, 16 bits need cupy. "float32" is the contract; "float64" is to measure its
        error by; "float16" and "bfloat16" are for the cache, the head and dense matrices.
    cache_dtype: Stored keys and values: narrow dtypes change the logits (bench cache). "float16" takes half the bytes
        of "float32", "int8" (one scale per token and kv head) a quarter. By default as dtype.
    head: Find tokens by int8 bounds on the logits (the same tokens), or compute all logits. "screened" (cython)
        computes greedy and top-k tokens from the few rows of the head that an int8 copy, with proven bounds, leaves in
        question: the same tokens, half the bytes read, half as many more held. "exact" computes every logit. "auto"
        screens a head of 16 MiB or more. A model of 256 MiB or more makes its int8 copy, and strips of rows to skip,
        with its first passes, so that a text begins sooner; `weights` has all of them.
    """

    backend: str = option("auto", choice("auto", *NAMES))
    threads: int | None = option(None, Number(1, whole=True, optional=True))
    dtype: str = option("float32", choice(*DTYPES))
    cache_dtype: str | None = option(None, choice(None, *CACHE_DTYPES))
    head: str = option("auto", choice(*HEADS))


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """What GPUs compute, and how much of their memory they may use (cupy). Raises BackendUnavailable.

    GPUs (cupy):
    memory_limit: Maximum memory of each GPU, in bytes or like "8GiB". By default what is free.
    devices: GPUs that share the layers. The number of one, or those of several: [0, 1]. They share the layers by their
        bytes. By default 0.
    gpu_layers: Layers on GPUs, or "all"; the CPU has the rest. OutOfMemory if they do not fit. Where the number is not
        given, a warning says how many stay on the CPU. By default as many as fit.
    cache_tokens: Tokens of cache to leave room for on the GPUs. By default the model's context, at most 4096.
    """

    memory_limit: int | str | None = option(None, BYTES, metavar="BYTES")
    devices: int | Sequence[int] | None = option(None, DEVICES, metavar="N,N")
    gpu_layers: int | str | None = option(None, LAYERS, metavar="N")
    cache_tokens: int | None = option(None, Number(1, 2**40, whole=True, optional=True), in_shell=False)

    def __post_init__(self) -> None:
        read_options(self, BackendUnavailable)

    def tokens(self, config: ModelConfig) -> int:
        """The tokens of cache to leave room for."""
        return self.cache_tokens or min(config.context_length, DEFAULT_CACHE_TOKENS)
