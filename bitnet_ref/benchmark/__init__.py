"""How fast it is, beside what the machine can do: the measurements behind `bitnet-ref bench`, for notebooks too.

Two rules. Nothing is timed before it has been compared with the NumPy reference: a result that differs has no speed.
And because a time means little on a machine that others use too, each is taken several times, in turn with a plain read
of memory, and reported as the best, the median, and a ratio to what the read reached in the same minute; processor time
stands beside it.

    timing.py      wall time, processor time, energy    energy.py    the processor's counters
    validate.py    the comparison with the reference    limits.py    memory, and product instructions
    synthetic.py   random models of known shapes        kernels.py   a ternary linear
    models.py      a whole model                        serve.py     the engine under load

What compares this package with others, or with targets of its own, is in the repository's scripts/benchmarks.
"""

from .kernels import candidates, measure_kernels
from .limits import MemoryReader
from .models import bytes_of_step, measure_model, measure_rule
from .serve import Load, measure_serve
from .synthetic import SHAPES, random_ternary_weight, synthetic_model
from .validate import check_linear, check_model

__all__ = [
    "SHAPES",
    "Load",
    "MemoryReader",
    "bytes_of_step",
    "candidates",
    "check_linear",
    "check_model",
    "measure_kernels",
    "measure_model",
    "measure_rule",
    "measure_serve",
    "random_ternary_weight",
    "synthetic_model",
]
