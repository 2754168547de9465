"""`bitnet-ref bench`: the group of what measures."""

from __future__ import annotations

import click

from .bench_cache import cache
from .bench_ceiling import ceiling
from .bench_gpu import gpu
from .bench_kernels import cuda, kernels
from .bench_model import model
from .bench_serve import serve
from .bench_tokenizer import tokenizer
from .shell import common_options


@click.group(short_help="Measure speed and memory, against what this machine can do.")
@common_options
def bench() -> None:
    """Measure speed and memory, against what this machine can do.

    Everything is compared with the NumPy reference first: what differs gets no speed, and the exit code is 1. Times
    are the best of several, taken in turn with a plain read of memory, which is the ceiling.
    """


for command in (kernels, cuda, gpu, ceiling, model, serve, tokenizer, cache):
    bench.add_command(command)
