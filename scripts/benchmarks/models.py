"""`bitnet-ref bench model`, with what only this project compares it with: other engines, and a share of zeros.

    python scripts/benchmarks/models.py --synthetic 2b-4t --versus transformers

The other engine gets the same shape, or the same dense GGUF, in the same run.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

import click
from commands import Script, start
from gate_zeros import SparseGates
from peers import PEERS, PeerBench, measure_peer

from bitnet_ref.benchmark import SHAPES, measure_model, synthetic_model
from bitnet_ref.cli.bench_model import draw_model
from bitnet_ref.cli.bench_shared import Subject, report_bench, subject_options, token_options
from bitnet_ref.cli.shell import AnyFunction, LoadingBar, common_options, size_in_words
from bitnet_ref.errors import BackendError, count_of

if TYPE_CHECKING:
    from rich.console import Console

    from bitnet_ref.api import Model
    from bitnet_ref.benchmark.models import ModelBench


def versus_options(function: AnyFunction) -> AnyFunction:
    """--versus and --versus-python"""
    help = "The same shape there, or the same dense GGUF. May be repeated."
    versus = click.option("--versus", type=click.Choice(tuple(PEERS)), multiple=True, help=help)
    return versus(
        click.option("--versus-python", metavar="PATH", help="The Python that has it.  [default: this one]")(function)
    )


@click.command(cls=Script)
@subject_options
@token_options
@click.option("--gate-zeros", type=float, help="The share of zeros among the synthetic model's ReLU^2 gates.")
@versus_options
@common_options
def main(
    subject: Subject,
    prompt: int,
    new: int,
    gate_zeros: float | None,
    versus: tuple[str, ...],
    versus_python: str | None,
) -> None:
    """Time MODEL (default: storyteller), or a synthetic one, and the same shape on other engines."""
    loaded = subject.load() if gate_zeros is None else load_sparse(subject, gate_zeros)
    with LoadingBar("measuring") as bar:
        bench = measure_model(loaded, prompt, new, progress=bar)
    names = versus if bench.equal else ()
    peers = {name: measure_versus(name, loaded, prompt, new, versus_python) for name in names}

    def draw(out: Console) -> None:
        draw_model(bench, subject, out)
        for name, peer in peers.items():
            out.print(f"versus {name}{describe_peer(bench, peer)}")

    facts = {name: peer if isinstance(peer, str) else peer.to_dict() for name, peer in peers.items()}
    report_bench(bench, draw, model=subject.synthetic or subject.name, versus=facts)


def load_sparse(subject: Subject, gate_zeros: float) -> Model:
    """The synthetic model with that share of zeros."""
    if subject.synthetic is None:
        raise click.UsageError("--gate-zeros shapes a synthetic model; give --synthetic too")
    draw = partial(SparseGates, gate_zeros=gate_zeros)
    with LoadingBar(f"making {subject.synthetic}") as bar:
        backend, shape = subject.open_backend(), SHAPES[subject.synthetic]
        return synthetic_model(shape, backend, 0, bar, subject.layers, subject.dense, draw)


def measure_versus(name: str, model: Model, prompt: int, new: int, python: str | None) -> PeerBench | str:
    """The peer's speeds on the model's shape or its dense GGUF, or the line that says why there are none."""
    threads, python = model.backend.threads, python or sys.executable
    dense_file = model.config.quantization is None and model.path is not None and model.path.suffix == ".gguf"
    file = model.path if dense_file else None
    with LoadingBar(f"measuring {name}"):
        try:
            return measure_peer(name, model.config, prompt, new, threads=threads, python=python, file=file)
        except BackendError as error:
            return str(error)


def describe_peer(bench: ModelBench, peer: PeerBench | str) -> str:
    if isinstance(peer, str):
        return f": {peer}"
    assert bench.decode_tokens_per_s is not None
    assert bench.prompt_tokens_per_s is not None
    decode, prompt = peer.decode_tokens_per_s, peer.prompt_tokens_per_s
    return (
        f" {peer.version}, {peer.weights}, {count_of(peer.threads, 'thread')}: decode {decode:.2f} tok/s best "
        f"(here {bench.decode_tokens_per_s / decode:.2f} x), prompt {prompt:.1f} "
        f"({bench.prompt_tokens_per_s / prompt:.2f} x), peak memory {size_in_words(peer.peak_memory_bytes)}"
    )


if __name__ == "__main__":
    start(main)
