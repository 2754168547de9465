"""`bitnet-ref bench model`: speed and memory of a model, beside its bounds and other engines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import click

from ..errors import BackendError
from .bench_shared import Subject, draw_table, in_threads, in_time, report_bench, subject_options
from .shell import AnyFunction, LoadingBar, common_options, size_in_words

if TYPE_CHECKING:
    from rich.console import Console

    from ..api import Model
    from ..benchmark.models import ModelBench, PassProfile
    from ..benchmark.peers import PeerBench
    from ..benchmark.validate import Check

PEER_NAMES = ("transformers", "llama-cpp-python", "ik-llama-cpp-python")  # the keys of `benchmark.PEERS`


def versus_options(function: AnyFunction) -> AnyFunction:
    """--versus and --versus-python"""
    help = "The same shape there, or the same dense GGUF. May be repeated."
    versus = click.option("--versus", type=click.Choice(PEER_NAMES), multiple=True, help=help)
    return versus(
        click.option("--versus-python", metavar="PATH", help="The Python that has it.  [default: this one]")(function)
    )


@click.command(short_help="Prompt and decode speed, and memory, of a model.")
@subject_options
@click.option("--prompt", type=click.IntRange(min=1), default=64, show_default=True, help="Prompt tokens.")
@click.option("--new", type=click.IntRange(min=1), default=32, show_default=True, help="Decoded tokens.")
@versus_options
@click.option("--profile", is_flag=True, help="Run once more, op by op, and show the time of each operation.")
@common_options
def model(
    subject: Subject, prompt: int, new: int, versus: tuple[str, ...], versus_python: str | None, profile: bool
) -> None:
    """Time MODEL (default: storyteller), or a synthetic one: its prompt, and decoding one token at a time."""
    from ..benchmark import measure_model

    loaded = subject.load()
    with LoadingBar("measuring") as bar:
        bench = measure_model(loaded, prompt, new, profile=profile, progress=bar)
    names = versus if bench.equal else ()
    peers = {name: measure_versus(name, loaded, prompt, new, versus_python) for name in names}

    def draw(out: Console) -> None:
        draw_table(out, ("", ""), model_rows(bench, subject), left=2, header=False)
        for part, passes in bench.profiles.items():
            draw_profile(part, passes, out)
        for name, peer in peers.items():
            out.print(f"versus {name}{describe_peer(bench, peer)}")

    facts = {name: peer if isinstance(peer, str) else peer.to_dict() for name, peer in peers.items()}
    report_bench(bench, draw, model=subject.synthetic or subject.name, versus=facts)


def measure_versus(name: str, model: Model, prompt: int, new: int, python: str | None) -> PeerBench | str:
    """The peer's speeds on the model's shape or its dense GGUF, or the line that says why there are none."""
    from ..benchmark import measure_peer

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
        f" {peer.version}, {peer.weights}, {in_threads(peer.threads)}: decode {decode:.2f} tok/s best "
        f"(here {bench.decode_tokens_per_s / decode:.2f} x), prompt {prompt:.1f} "
        f"({bench.prompt_tokens_per_s / prompt:.2f} x), peak memory {size_in_words(peer.peak_memory_bytes)}"
    )


def model_rows(bench: ModelBench, subject: Subject) -> Iterator[tuple[str, str]]:
    from ..benchmark.ceiling import INSTRUCTIONS

    cfg, kernel_set = bench.config, f" {bench.kernel_set}" if bench.kernel_set else ""
    shape = f"{subject.shortened or cfg['num_hidden_layers']} layers of {cfg['hidden_size']}"
    yield "model", f"{subject.name}: {shape}, ffn {cfg['intermediate_size']}, vocab {cfg['vocab_size']}"
    yield "backend", f"{bench.backend}{kernel_set}, {in_threads(bench.threads)}"
    yield "check", describe_check(bench.check)
    if bench.prompt is None or bench.decode is None or bench.read is None or bench.choose is None:
        return
    prompt_median = bench.prompt_tokens / bench.prompt.median_s
    prompt = f"{bench.prompt_tokens_per_s:.1f} tok/s best, {prompt_median:.1f} median"
    yield "prompt", f"{prompt} ({bench.prompt_tokens} tokens)"
    if bench.prompt_bound_tokens_per_s is not None:
        rate = f"{bench.prompt_bound_tokens_per_s:.1f} tok/s: rate of {INSTRUCTIONS[bench.kernel_set or '']}"
        yield "bound", f"{rate} / multiply-adds of a token's ternary linears"
        if any(bench.not_multiplied.values()):
            yield "not multiplied", f"{in_shares(bench.not_multiplied)}: it meets zeros; the bound is without it"
        yield "of the bound", best_and_median(bench.of_prompt_bound, bench.of_prompt_bound_median)
    speeds = f"{bench.decode_tokens_per_s:.2f} tok/s best, {bench.decode_tokens_per_s_median:.2f} median"
    times = f"{in_time(bench.decode.best_s)} and {in_time(bench.decode.median_s)} each"
    yield "decode", f"{speeds} ({bench.new_tokens} tokens, {times})"
    choice = "the most likely and its log probability" if bench.head == "exact" else "the most likely"
    yield "choosing", f"{in_time(bench.choose.median_s)} more per token: {choice}"
    if bench.head == "screened":
        rows = f"{bench.head_rows:,.0f} of {cfg['vocab_size']:,} logits computed per token"
        yield "head", f"screened: {rows}, proven bounds on the others"
    if bench.skipped:
        yield "not read", f"{in_shares(bench.skipped)}: it meets zeros (strips of {size_in_words(bench.strip_bytes)})"
    parts = {name: size for name, size in vars(bench.step_bytes).items() if size}
    pieces = ", ".join(f"{name} {size_in_words(size)}" for name, size in parts.items())
    yield "bytes per token", f"{size_in_words(bench.step_bytes.total)}: {pieces}"
    median_gb = bench.read.giga_per_s(bench.read_bytes, "median_s")
    yield "memory read", f"{bench.read_gb_per_s:.1f} GB/s best, {median_gb:.1f} median ({bench.read_how})"
    yield "bound", f"{bench.bound_tokens_per_s:.2f} tok/s: memory read / bytes per token"
    in_cache = "; but the model fits in the cache" if bench.fits_in_cache else ""
    yield "of the bound", best_and_median(bench.of_bound, bench.of_bound_median) + in_cache
    weights = f"{bench.of_weight_bytes:.2f} x the weights' {size_in_words(bench.weight_bytes)}"
    yield "peak memory", f"{size_in_words(bench.peak_memory_bytes or 0)}, {weights}"


def in_shares(shares: Mapping[str, float]) -> str:
    """{"up_proj": 0.8} -> "80% of up_proj" """
    return ", ".join(f"{share:.0%} of {linear}" for linear, share in shares.items())


def best_and_median(best: float | None, median: float | None) -> str:
    return f"{best:.2f} best over best, {median:.2f} median over median"


def describe_check(check: Check) -> str:
    exact = f"{check.accumulators + check.floats:,} values of ternary linears " + (
        f"{check.unequal:,} WRONG" if check.unequal else "equal"
    )
    logits = f"logits off by {check.logits_error:.0e} ({check.logits_allowed:.0e} allowed)"
    return f"{exact}; {logits}" if check.accumulators else logits


def draw_profile(part: str, profile: PassProfile, out: Console) -> None:

    def times(taken_s: float) -> tuple[str, str]:
        return f"{taken_s / profile.tokens * 1e3:.3f}", f"{taken_s / profile.step_s:.1%}"

    per_token = in_time(profile.step_s / profile.tokens)
    out.print(f"\nProfile of the {part}, op by op: {per_token} per token", style="bold")
    rows = [
        (op.name, str(op.calls), *times(op.total_s), "" if op.gb_per_s is None else f"{op.gb_per_s:.1f}")
        for op in profile.ops
    ]
    rows.append(("outside the operations", "", *times(profile.outside_s), ""))
    draw_table(out, ("operation", "calls", "ms per token", "share", "GB/s"), rows)
