"""`bitnet-ref bench model`: speed, memory and energy of a model, beside its bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from ..errors import count_of
from .bench_shared import (
    Subject,
    describe_conditions,
    draw_table,
    in_time,
    report_bench,
    subject_options,
    token_options,
)
from .shell import LoadingBar, common_options, size_in_words

if TYPE_CHECKING:
    from rich.console import Console

    from ..benchmark.models import ModelBench, RuleBench
    from ..benchmark.validate import Check
    from ..notebook.profiling import Profile


@click.command(short_help="Prompt and decode speed, and memory, of a model.")
@subject_options
@token_options
@click.option("--profile", is_flag=True, help="Run once more, op by op, and show the time of each operation.")
@common_options
def model(subject: Subject, prompt: int, new: int, profile: bool) -> None:
    """Time MODEL (default: storyteller), or a synthetic one: its prompt, and decoding one token at a time.

    A GGUF by llama.cpp's rule (--activations blocks) is timed with float activations too, and what the rule changes is
    measured on a text that the model draws."""
    from ..benchmark.models import measure_model, measure_rule, profile_model
    from ..families.block_rule import INPUTS
    from ..families.blocks import BlockWeight

    loaded = subject.load()
    with LoadingBar("measuring") as bar:
        bench = measure_model(loaded, prompt, new, progress=bar)
    ops = profile_model(loaded, prompt, new) if profile and bench.equal else None
    rule = None
    if subject.activations == "blocks" and bench.equal:
        floats = replace(subject, activations="float").load()
        with LoadingBar("measuring with float activations") as bar:
            rule = measure_rule(loaded, floats, prompt, new, progress=bar)
    has_blocks = any(isinstance(w, BlockWeight) and w.block_type in INPUTS for _, w in loaded.weights.linears())

    def draw(out: Console) -> None:
        draw_model(bench, subject, out)
        if rule is not None:
            draw_rule(rule, out)
        elif has_blocks:
            out.print(
                "Activations stay floats. For llama.cpp's rule, and what it costs: --activations blocks", style="dim"
            )
        if ops is not None:
            draw_profile(ops, out)

    facts = {} if ops is None else {"profile": ops.to_dict()}
    facts |= {} if rule is None else {"rule": rule.to_dict()}
    report_bench(bench, draw, model=subject.synthetic or subject.name, **facts)


def draw_model(bench: ModelBench, subject: Subject, out: Console) -> None:
    draw_table(out, ("", ""), model_rows(bench, subject), left=2)
    describe_conditions(bench.conditions, out)


def draw_rule(rule: RuleBench, out: Console) -> None:
    """Both rules for activations, and their difference."""
    title = f"With float activations, and the difference on {rule.tokens} tokens that it drew"
    out.print(f"\n{title}", style="bold")
    draw_table(out, ("", ""), rule_rows(rule), left=2)


def rule_rows(rule: RuleBench) -> Iterator[tuple[str, str]]:
    floats = rule.floats
    yield "check", describe_check(floats.check)
    if floats.prompt is not None and floats.decode is not None:
        yield "prompt", f"{floats.prompt_tokens_per_s:.1f} tok/s best ({floats.prompt_tokens} tokens)"
        decode = f"{floats.decode_tokens_per_s:.2f} tok/s best, {floats.decode_tokens_per_s_median:.2f} median"
        yield "decode", f"{decode} ({floats.new_tokens} tokens)"
        prompt = processor_time(floats.prompt.processor_s, floats.prompt_tokens)
        yield "processor", f"{processor_time(floats.decode.processor_s)} per decoded token; prompt: {prompt} per token"
    yield "weights", size_in_words(floats.weight_bytes)
    yield "KL divergence", f"{rule.kl_mean:.1e} nats mean, {rule.kl_max:.1e} max"
    if rule.perplexity is not None and rule.floats_perplexity is not None:
        yield "perplexity", f"{rule.perplexity:.4f} by blocks, {rule.floats_perplexity:.4f} with floats"
    yield "most likely", f"the same token at {rule.same_top:.0%} of the places"


def model_rows(bench: ModelBench, subject: Subject) -> Iterator[tuple[str, str]]:
    from ..benchmark.limits import INSTRUCTIONS

    cfg, kernel_set = bench.config, f" {bench.kernel_set}" if bench.kernel_set else ""
    shape = f"{subject.shortened or cfg['num_hidden_layers']} layers of {cfg['hidden_size']}"
    yield "model", f"{subject.name}: {shape}, ffn {cfg['intermediate_size']}, vocab {cfg['vocab_size']}"
    yield "backend", f"{bench.backend}{kernel_set}, {count_of(bench.threads, 'thread')}"
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
    yield (
        "processor",
        f"{processor_time(bench.decode.processor_s)} per decoded token, all threads; prompt: "
        + (f"{processor_time(bench.prompt.processor_s, bench.prompt_tokens)} per token"),
    )
    if bench.joules_per_token is not None:
        joules = f"{bench.joules_per_token:.3f} J per decoded token, prompt: {bench.prompt_joules_per_token:.3f} J"
        yield "energy", f"{joules} per token (processor packages and memory)"
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


def processor_time(value_s: float | None, tokens: int = 1) -> str:
    return "unknown" if value_s is None else in_time(value_s / tokens)


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


def draw_profile(profile: Profile, out: Console) -> None:
    out.print(f"\nProfile, op by op: {profile.caption}", style="bold")
    rows = [
        (
            op.name,
            str(op.calls),
            in_time(op.total_s),
            f"{op.total_s / profile.wall_s:.1%}",
            f"{op.gb_per_s:.1f}" if op.gb_per_s is not None else "",
        )
        for op in profile.ops
    ]
    outside_s = profile.wall_s - sum(op.total_s for op in profile.ops)
    rows.append(("outside the operations", "", in_time(outside_s), f"{outside_s / profile.wall_s:.1%}", ""))
    draw_table(out, ("operation", "calls", "time", "share", "GB/s"), rows)
