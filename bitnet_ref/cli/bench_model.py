"""`bitnet-ref bench model`: draws what `bitnet_ref.benchmark` measures of a model, and of its peers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from ..errors import BackendError
from .bench_shared import Subject, in_time, in_words, new_table, report, subject_options
from .shell import LoadingBar, common_options, size_in_words

if TYPE_CHECKING:
    from rich.console import Console

    from ..api import Model
    from ..benchmark import Check, ModelBench, PeerBench
    from ..benchmark.models import Profile


PEER_NAMES = ("transformers", "llama-cpp-python")  # the keys of `benchmark.PEERS`


@click.command(short_help="Prompt and decode speed, and memory, of a model.")
@subject_options
@click.option("--prompt", type=click.IntRange(min=1), default=64, show_default=True, help="Prompt tokens.")
@click.option("--new", type=click.IntRange(min=1), default=32, show_default=True, help="Decoded tokens.")
@click.option(
    "--versus", type=click.Choice(PEER_NAMES), multiple=True, help="The same shape there. May be given again."
)
@click.option("--versus-python", metavar="PATH", help="The Python that has it.  [default: this one]")
@click.option("--profile", is_flag=True, help="Run once more and show the time of each operation.")
@common_options
def model(
    subject: Subject, prompt: int, new: int, versus: tuple[str, ...], versus_python: str | None, profile: bool
) -> None:
    """Time MODEL (default: storyteller), or a synthetic one: its prompt, and decoding one token at a time."""
    from ..benchmark import measure_model

    loaded = subject.load()
    with LoadingBar("measuring") as bar:
        found = measure_model(loaded, prompt, new, profile=profile, progress=bar)
    peers = against(versus, loaded, prompt, new, versus_python) if found.check.equal else {}

    def draw(out: Console) -> None:
        draw_model(found, subject.name, subject.shortness, out)
        draw_peers(found, peers, out)

    told = {peer: result if isinstance(result, str) else result.to_dict() for peer, result in peers.items()}
    report(found, draw, model=subject.synthetic or subject.name, versus=told)


def against(
    versus: tuple[str, ...], subject: Model, prompt: int, new: int, python: str | None
) -> dict[str, PeerBench | str]:
    """Each peer's speeds on the model's shape, or the line that says why there are none."""
    from ..benchmark import measure_peer

    found: dict[str, PeerBench | str] = {}
    for name in versus:
        with LoadingBar(f"measuring {name}"):
            try:
                threads = subject.backend.threads
                found[name] = measure_peer(
                    name, subject.config, prompt, new, threads=threads, python=python or sys.executable
                )
            except BackendError as error:
                found[name] = str(error)
    return found


def draw_peers(found: ModelBench, peers: dict[str, PeerBench | str], out: Console) -> None:
    """One line each: its speeds, and ours over them."""
    for name, peer in peers.items():
        if isinstance(peer, str):
            out.print(f"versus {name}: {peer}")
        elif found.prompt_tokens_per_s is not None and found.decode_tokens_per_s is not None:
            ratios = (
                found.decode_tokens_per_s / peer.decode_tokens_per_s,
                found.prompt_tokens_per_s / peer.prompt_tokens_per_s,
            )
            out.print(
                f"versus {name} {peer.version}, {peer.weights}, {in_words(peer.threads)}: decode "
                f"{peer.decode_tokens_per_s:.2f} tok/s best (here {ratios[0]:.2f} x), prompt "
                f"{peer.prompt_tokens_per_s:.1f} ({ratios[1]:.2f} x), "
                f"peak memory {size_in_words(peer.peak_memory_bytes)}"
            )


def draw_model(found: ModelBench, name: str, shortness: str, out: Console) -> None:
    """Facts, speeds against the bound, memory, and the profiles."""
    from rich.text import Text

    from ..benchmark.ceiling import INSTRUCTIONS

    cfg, parts = found.config, found.step_bytes
    table = new_table("", "", header=False)
    layers = shortness or cfg["num_hidden_layers"]
    shape = f"{layers} layers of {cfg['hidden_size']}, ffn {cfg['intermediate_size']}, vocab {cfg['vocab_size']}"
    kernel_set = f" {found.kernel_set}" if found.kernel_set else ""
    table.add_row("model", f"{name}: {shape}")
    table.add_row("backend", f"{found.backend}{kernel_set}, {in_words(found.threads)}")
    table.add_row("check", check_in_words(found.check))
    if found.prompt is None or found.decode is None or found.read is None or found.choose is None:
        out.print(table)
        return
    prompt, decode = found.prompt, found.decode
    table.add_row(
        "prompt",
        f"{found.prompt_tokens_per_s:.1f} tok/s best, {found.prompt_tokens / prompt.median_s:.1f} median "
        f"({found.prompt_tokens} tokens)",
    )
    if found.prompt_bound_tokens_per_s is not None:
        bound = f"{found.prompt_bound_tokens_per_s:.1f} tok/s: rate of {INSTRUCTIONS[found.kernel_set or '']} / "
        table.add_row("bound", f"{bound}multiply-adds of a token's ternary linears")
        table.add_row("of the bound", best_and_median(found.of_prompt_bound, found.of_prompt_bound_median))
    table.add_row(
        "decode",
        f"{found.decode_tokens_per_s:.2f} tok/s best, {found.decode_tokens_per_s_median:.2f} median "
        f"({found.new_tokens} tokens, {in_time(decode.best_s)} and {in_time(decode.median_s)} each)",
    )
    what = "the likeliest and its log probability" if found.head == "exact" else "the likeliest"
    table.add_row("choosing", f"{in_time(found.choose.median_s)} more a token: {what}")
    if found.head == "screened":
        rows = f"{found.head_rows:,.0f} of {cfg['vocab_size']:,} logits computed a token"
        table.add_row("head", f"screened: {rows}, certain bounds on the others")
    pieces = {"ternary": parts.ternary, "dense": parts.dense, "head": parts.head, "cache": parts.cache}
    pieces["other"] = parts.other
    words = ", ".join(f"{part} {size_in_words(size)}" for part, size in pieces.items() if size)
    table.add_row("bytes a token", f"{size_in_words(parts.total)}: {words}")
    median_gb = found.read.giga_per_s_median(found.read_bytes)
    table.add_row("memory read", f"{found.read_gb_per_s:.1f} GB/s best, {median_gb:.1f} median ({found.read_how})")
    table.add_row("bound", f"{found.bound_tokens_per_s:.2f} tok/s: memory read / bytes a token")
    ratio = best_and_median(found.of_bound, found.of_bound_median)
    table.add_row("of the bound", ratio + ("; but the model fits in the cache" if found.fits_in_cache else ""))
    peak = size_in_words(found.peak_memory_bytes or 0)
    table.add_row(
        "peak memory", f"{peak}, {found.of_weight_bytes:.2f} x the weights' {size_in_words(found.weight_bytes)}"
    )
    out.print(table)
    for part, profile in found.profiles.items():
        out.print(Text(f"\nProfile of the {part}: {in_time(profile.step_s / profile.tokens)} a token", style="bold"))
        draw_profile(profile, out)


def best_and_median(best: float | None, median: float | None) -> str:
    return f"{best:.2f} best over best, {median:.2f} median over median"


def draw_profile(profile: Profile, out: Console) -> None:
    """The ops, slowest first; what is outside all of them comes last."""
    table = new_table("operation", "calls", "ms a token", "share", "GB/s")
    for op in profile.ops:
        speed = "" if op.gb_per_s is None else f"{op.gb_per_s:.1f}"
        table.add_row(op.name, str(op.calls), *share(op.total_s, profile), speed)
    table.add_row("outside the operations", "", *share(profile.outside_s, profile), "")
    out.print(table)


def share(taken_s: float, profile: Profile) -> tuple[str, str]:
    return f"{taken_s / profile.tokens * 1e3:.3f}", f"{taken_s / profile.step_s:.1%}"


def check_in_words(check: Check) -> str:
    wrong = check.unequal_accumulators + check.unequal_floats
    exact = f"{check.accumulators + check.floats:,} values of ternary linears " + (
        f"{wrong:,} WRONG" if wrong else "equal"
    )
    logits = f"logits off by {check.logits_error:.0e} ({check.logits_allowed:.0e} allowed)"
    return f"{exact}; {logits}" if check.accumulators else logits
