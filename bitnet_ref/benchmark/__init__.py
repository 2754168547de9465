"""How fast it is, beside what the machine can do: the measurements behind `bitnet-ref bench`, for notebooks too.

Two rules. Nothing is timed before it has been compared with the NumPy reference: a result that differs has no speed.
And because a time means little on a machine that others use too, each is taken several times, in turn with a plain read
of memory, and reported as the best, the median, and a ratio to what the read reached in the same minute.

    timing.py      what every result is, and repetitions in turn    ceiling.py    memory, and each product instruction
    validate.py    the comparison with the reference                kernels.py    a ternary linear, on every kernel set
    synthetic.py   random models of known shapes                    models.py     a whole model: prompt and decoding
    serve.py       the engine under load                            peers.py      the same shape on other engines
    tokenizer.py   encoding, decoding, streaming                    cuda_kernels.py  the ternary kernels of a GPU
    gpu.py         all that is asked of a GPU, in one run   report.py     all that docs/speed.md says, in one run
"""

from ..crossval.precision import measure_cache
from .ceiling import MemoryReader, measure_ceiling
from .cuda_kernels import measure_cuda_kernels
from .gpu import GpuPlan, measure_gpu
from .kernels import candidates, measure_kernels
from .models import bytes_of_step, measure_model
from .peers import PEERS, measure_peer
from .report import measure_report
from .serve import Load, measure_serve
from .synthetic import SHAPES, random_ternary_weight, synthetic_model
from .tokenizer import measure_tokenizer
from .validate import check_linear, check_model

__all__ = [
    "PEERS",
    "SHAPES",
    "GpuPlan",
    "Load",
    "MemoryReader",
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
    "measure_report",
    "measure_serve",
    "measure_tokenizer",
    "random_ternary_weight",
    "synthetic_model",
]
