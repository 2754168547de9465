"""How fast it is, held against what the machine can do: the measurements behind `bitnet-ref bench`, for notebooks too.

Two rules. Nothing is timed before it has been compared with the NumPy reference: a result that differs has no speed.
And a time means little on a machine that others use too, so each is taken several times, in turn with a plain read of
memory, and reported as the best and the median and as a ratio to what the read gave in the same minute.

    timing.py     repetitions of several actions in turn      bandwidth.py  the ceiling: memory, read and nothing else
    validate.py   the comparison with the reference           kernels.py    one ternary linear, on every kernel set
    synthetic.py  random models of known shapes               models.py     a whole model: prompt and decode
    peers.py      the same shape on other engines             tokenizer.py  encoding, decoding, streaming
    cache.py      what a narrow KV cache costs                serve.py      the engine under load
    cuda_kernels.py  the ternary kernels of a GPU             gpu.py        all that is asked of one, in one run
"""

from .bandwidth import MemoryReader
from .cache import CacheBench, CacheError, measure_cache
from .ceiling import Ceiling, measure_ceiling
from .cuda_kernels import CudaKernelBench, CudaKernelResult, measure_cuda_kernels
from .gpu import GpuBench, Plan, measure_gpu
from .kernels import KernelBench, KernelResult, candidates, measure_kernels
from .models import ModelBench, StepBytes, bytes_of_step, measure_model
from .peers import PEERS, PeerBench, measure_peer
from .serve import Load, LoadPoint, ServeBench, Together, measure_serve
from .synthetic import SHAPES, random_ternary_weight, synthetic_model
from .timing import Timing
from .tokenizer import TokenizerBench, measure_tokenizer
from .validate import Check, check_linear, check_model

__all__ = [
    "PEERS",
    "SHAPES",
    "CacheBench",
    "CacheError",
    "Ceiling",
    "Check",
    "CudaKernelBench",
    "CudaKernelResult",
    "GpuBench",
    "KernelBench",
    "KernelResult",
    "Load",
    "LoadPoint",
    "MemoryReader",
    "ModelBench",
    "PeerBench",
    "Plan",
    "ServeBench",
    "StepBytes",
    "Timing",
    "Together",
    "TokenizerBench",
    "bytes_of_step",
    "candidates",
    "check_linear",
    "check_model",
    "measure_cache",
    "measure_ceiling",
    "measure_cuda_kernels",
    "measure_gpu",
    "measure_kernels",
    "measure_model",
    "measure_peer",
    "measure_serve",
    "measure_tokenizer",
    "random_ternary_weight",
    "synthetic_model",
]
