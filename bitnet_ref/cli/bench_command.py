"""`bitnet-ref bench`: draws what `bitnet_ref.benchmark` measures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..backends import HEADS, NAMES
from ..errors import BackendError
from .generation_options import content_of
from .shell import (
    DIFFERS,
    AnyFunction,
    LoadingBar,
    common_options,
    print_json,
    show,
    size_in_words,
    wants_json,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..api import Model
    from ..benchmark import (
        CacheBench,
        Ceiling,
        Check,
        CudaKernelBench,
        KernelBench,
        ModelBench,
        PeerBench,
        TokenizerBench,
    )
    from ..benchmark.models import Profile

SYNTHETIC = ("2b-4t", "1b", "7b")  # the keys of `benchmark.SHAPES`, which --help need not import
PEER_NAMES = ("transformers", "llama-cpp-python")  # the keys of `benchmark.PEERS`
MOST_TOKENS = 1 << 20


@click.group(short_help="Measure speed and memory, against what this machine can do.")
@common_options
def bench() -> None:
    """Measure speed and memory, against what this machine can do.

    Everything is compared with the NumPy reference first: what differs gets no speed, and the exit code is 1. Times
    are the best of several, taken in turn with a plain read of memory, which is the ceiling.
    """


class WholeNumbers(click.ParamType):
    """Whole numbers with a separator: "6912x2560" -> (6912, 2560)."""

    def __init__(self, name: str, separator: str, count: int | None = None) -> None:
        self.name, self.separator, self.count = name, separator, count

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = value.lower().split(self.separator)
        good = all(word.isascii() and word.isdecimal() and 1 <= int(word[:9]) <= MOST_TOKENS for word in words)
        if not good or (self.count is not None and len(words) != self.count):
            self.fail(f"expected {self.name}, whole numbers from 1 to {MOST_TOKENS}, got {value!r}", param, ctx)
        return tuple(map(int, words))


def machine_options(function: AnyFunction) -> AnyFunction:
    """--threads and --simd"""
    threads = click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: one a core]")
    simd = click.option("--simd", metavar="SET", help="Kernel set of the cython backend (scalar, avx2, avx512, ...).")
    return threads(simd(function))


# -- kernels -----------------------------------------------------------------------------------------------------------


@bench.command(short_help="The ternary product, on every backend and kernel set.")
@click.option("--shape", "shapes", type=WholeNumbers("NxK", "x", 2), multiple=True, help="[default: those of 2B-4T]")
@click.option("--tokens", type=WholeNumbers("M,M,...", ","), default="1,4,16,64,512", show_default=True)
@click.option("--backend", type=click.Choice(("all", *NAMES)), default="all", show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=7, show_default=True)
@click.option("--methods", is_flag=True, help="Every method of each kernel set, not only the one it takes.")
@machine_options
@common_options
def kernels(
    shapes: tuple[tuple[int, int], ...],
    tokens: tuple[int, ...],
    backend: str,
    repeats: int,
    methods: bool,
    threads: int | None,
    simd: str | None,
) -> None:
    """Time one ternary linear (quantise, multiply, dequantise) on every backend and kernel set that can run here.

    Its weights come from memory, not from the cache: a call takes another copy each time.
    """
    from ..benchmark import candidates, measure_kernels
    from ..benchmark.kernels import SHAPES_2B_4T

    refuse_simd(simd, backend)
    backends = candidates(backend, threads, simd, methods)
    with LoadingBar("measuring") as bar:
        found = measure_kernels(backends, shapes or SHAPES_2B_4T, tokens, repeats=repeats, progress=bar)
    report(found, lambda out: draw_kernels(found, out))


def draw_kernels(found: KernelBench, out: Console) -> None:
    """A table for each shape and token count, the read of memory above all of them."""
    from rich.text import Text

    if found.read_gb_per_s is not None:
        out.print(
            f"memory, read by {in_words(found.threads)} ({found.read_how}): {found.read_gb_per_s:.1f} GB/s at best"
        )
    shape: tuple[int, int] | None = None
    table = None
    for result in found.results:
        if shape != (result.out_features, result.in_features):
            if table is not None:
                out.print(table)
            shape = result.out_features, result.in_features
            sizes = {r.weight_bytes for r in found.results if (r.out_features, r.in_features) == shape}
            words = " or ".join(size_in_words(size) for size in sorted(sizes))
            out.print(Text(f"\n{shape[0]} x {shape[1]}, {words}", style="bold"))
            table = new_table(
                "kernel", "tokens", "best", "median", "G MAC/s", "GB/s", "read GB/s", "ratio: best", "median"
            )
        assert table is not None
        name = " ".join(filter(None, (result.backend, result.kernel_set, result.layout)))
        timing = result.timing
        if timing is None:
            table.add_row(name, str(result.tokens), *differs(result.check, 7))
            continue
        table.add_row(
            *(name, str(result.tokens), in_time(timing.best_s), in_time(timing.median_s)),
            *(f"{result.g_multiply_adds_per_s:.1f}", f"{result.gb_per_s:.2f}", f"{result.read_gb_per_s:.1f}"),
            *(f"{result.of_read:.2f}", f"{result.of_read_median:.2f}"),
        )
    if table is not None:
        out.print(table)
    if found.equal:
        out.print(f"\nAll {len(found.results)} equal the NumPy reference: int32 accumulators and float32 results.")


# -- cuda --------------------------------------------------------------------------------------------------------------


@bench.command(short_help="The ternary kernels of a GPU, against a copy within its memory.")
@click.option("--shape", "shapes", type=WholeNumbers("NxK", "x", 2), multiple=True, help="[default: those of 2B-4T]")
@click.option("--tokens", type=WholeNumbers("M,M,...", ","), default="1,8,16,32,64,128,2048", show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=15, show_default=True)
@click.option("--device", type=click.IntRange(min=0), default=0, show_default=True, help="Number of the GPU.")
@click.option(
    "--cold-mb", type=click.IntRange(min=1), help="Weights to read in turn.  [default: 3 second-level caches]"
)
@common_options
def cuda(
    shapes: tuple[tuple[int, int], ...], tokens: tuple[int, ...], repeats: int, device: int, cold_mb: int | None
) -> None:
    """Time the ternary kernels of a GPU, each launch on weights that its caches do not hold.

    For one token, the target is a share of the speed of a plain copy: 60% at 13824x2560, 35% elsewhere.
    BITNET_REF_CUDA=emulated runs the same on the host: it shows that they are right, not how fast they are.
    """
    from ..backends.cuda import open_device
    from ..benchmark.cuda_kernels import SHAPES_2B_4T_FUSED, measure_cuda_kernels

    gpu = open_device(device)
    sizes = {} if cold_mb is None else {"cold_bytes": cold_mb << 20, "copy_bytes": cold_mb << 20}
    with LoadingBar("measuring") as bar:
        found = measure_cuda_kernels(gpu, shapes or SHAPES_2B_4T_FUSED, tokens, repeats=repeats, progress=bar, **sizes)
    gpu.close()
    report(found, lambda out: draw_cuda(found, out))


def draw_cuda(found: CudaKernelBench, out: Console) -> None:
    """A row for each kernel; the one that runs by itself is marked, and held to its target."""
    from rich.text import Text

    out.print(f"{found.device}: a copy moves {found.copy_gb_per_s:,.1f} GB/s (read and written, median)")
    if found.emulated:
        out.print("Emulated on the host: the times say nothing about a GPU.", style="yellow")
    shape: tuple[int, int] | None = None
    table = None
    for result in found.results:
        if shape != (result.out_features, result.in_features):
            if table is not None:
                out.print(table)
            shape = result.out_features, result.in_features
            words = f"{size_in_words(result.weight_bytes)}, {result.copies} copies"
            out.print(Text(f"\n{shape[0]} x {shape[1]}, {words}", style="bold"))
            table = new_table("kernel", "tokens", "blocks", "best", "median", "GB/s", "of copy", "target", "TOP/s")
        assert table is not None
        name = ("* " if result.chosen else "  ") + result.kernel.removeprefix("ternary_")
        name += ", overlapped" if result.overlapped else ""
        blocks = "x".join(str(size) for size in result.grid if size > 1) or "1"
        row = [name, str(result.tokens), f"{blocks} of {result.block}"]
        share, target = found.share(result), result.target_share
        if result.timing is None or share is None:
            table.add_row(*row, "DIFFERS", f"{result.unequal_accumulators} acc", f"{result.unequal_floats} floats")
            continue
        row += [in_time(result.timing.best_s), in_time(result.timing.median_s), f"{result.gb_per_s:,.1f}"]
        verdict = "" if target is None or found.emulated else f"{target:.0%} {'met' if share >= target else 'missed'}"
        table.add_row(*row, f"{share:.1%}", verdict, f"{result.tera_operations_per_s:.2f}")
    if table is not None:
        out.print(table)
    out.print("\n* runs by itself at this shape and number of tokens")
    if found.equal:
        out.print(f"All {len(found.results)} equal the NumPy reference: int32 accumulators and float32 results.")


# -- ceiling -----------------------------------------------------------------------------------------------------------


@bench.command(short_help="What memory and the product instructions can do at most.")
@click.option("--threads", type=click.IntRange(min=1), help="Up to so many.  [default: all there are]")
@click.option("--repeats", type=click.IntRange(min=1), default=15, show_default=True)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write a roofline: .png, .svg or .pdf.")
@common_options
def ceiling(threads: int | None, repeats: int, plot: Path | None) -> None:
    """Measure what bounds every kernel: a plain read of memory, and each instruction set's product on registers alone.

    On one thread and on more, all in turn, so that shares of these come from one run.
    """
    from ..backends.cython_backend import why_unavailable
    from ..benchmark.ceiling import measure_ceiling, save_roofline

    if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
        raise click.UsageError(f"--plot {plot}: expected a file that ends in .png, .svg or .pdf")
    found = measure_ceiling(threads, repeats=repeats)
    if plot is not None:
        save_roofline(found, plot)
    if wants_json():
        print_json(found.to_dict())
    else:
        show(lambda out: draw_ceiling(found, out, why_unavailable()))


def draw_ceiling(found: Ceiling, out: Console, no_extension: str | None) -> None:
    table = new_table("ceiling", "threads", "best", "median", "")
    for read in found.reads:
        median = read.nbytes / read.timing.median_s / 1e9
        table.add_row(f"memory, {read.how}", str(read.threads), f"{read.gb_per_s:.1f}", f"{median:.1f}", "GB/s")
    for peak in found.peaks:
        median = peak.multiply_adds / peak.timing.median_s / 1e9
        name, best = f"{peak.kernel_set}: {peak.instruction}", f"{peak.g_multiply_adds_per_s:.1f}"
        table.add_row(name, str(peak.threads), best, f"{median:.1f}", "G MAC/s")
    out.print(table)
    for name, why in found.lacks.items():
        out.print(f"{name}: {why}", style="dim")
    if no_extension is not None:
        out.print(no_extension, style="yellow")


# -- model -------------------------------------------------------------------------------------------------------------


@bench.command(short_help="Prompt and decode speed, and memory, of a model.")
@click.argument("model", required=False)
@click.option("--synthetic", type=click.Choice(SYNTHETIC), help="Random weights of this shape instead of a MODEL.")
@click.option("--layers", type=click.IntRange(min=1), help="Only so many layers of the synthetic model.")
@click.option("--prompt", type=click.IntRange(min=1), default=64, show_default=True, help="Prompt tokens.")
@click.option("--new", type=click.IntRange(min=1), default=32, show_default=True, help="Decoded tokens.")
@click.option("--backend", type=click.Choice(("auto", *NAMES)), default="auto", show_default=True)
@click.option(
    "--versus", type=click.Choice(PEER_NAMES), multiple=True, help="The same shape there. May be given again."
)
@click.option("--versus-python", metavar="PATH", help="The Python that has it.  [default: this one]")
@click.option("--head", type=click.Choice(HEADS), default="auto", show_default=True, help="As in generate.")
@click.option("--profile", is_flag=True, help="Run once more and show the time of each operation.")
@machine_options
@common_options
def model(
    model: str | None,
    synthetic: str | None,
    layers: int | None,
    prompt: int,
    new: int,
    backend: str,
    head: str,
    versus: tuple[str, ...],
    versus_python: str | None,
    profile: bool,
    threads: int | None,
    simd: str | None,
) -> None:
    """Time MODEL (default: storyteller), or a synthetic one: its prompt, and decoding one token at a time."""
    from ..benchmark import measure_model

    if model is not None and synthetic is not None:
        raise click.UsageError("give a MODEL or --synthetic, not both")
    if layers is not None and synthetic is None:
        raise click.UsageError("--layers shortens a synthetic model; give --synthetic too")
    refuse_simd(simd, backend)
    subject = ready(model, synthetic, layers, backend, threads, simd, head)
    with LoadingBar("measuring") as bar:
        found = measure_model(subject, prompt, new, profile=profile, progress=bar)
    name = f"{synthetic}, random weights" if synthetic else str(model or "storyteller")
    peers = against(versus, subject, prompt, new, versus_python) if found.check.equal else {}

    def draw(out: Console) -> None:
        draw_model(found, name, shortened(synthetic, layers), out)
        draw_peers(found, peers, out)

    told = {peer: result if isinstance(result, str) else result.to_dict() for peer, result in peers.items()}
    report(found, draw, model=synthetic or name, versus=told)


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


def ready(
    model: str | None,
    synthetic: str | None,
    layers: int | None,
    backend: str,
    threads: int | None,
    simd: str | None,
    head: str = "auto",
) -> Model:
    """The model to measure, on the backend and kernel set asked for."""
    from ..api import Model, load
    from ..backends import choose_backend
    from ..backends.cython_backend import CythonBackend

    chosen = choose_backend("cython" if simd else backend, threads=threads, head=head)
    if simd:
        chosen = CythonBackend("float32", threads, simd, head=head)
    if synthetic is not None:
        from ..benchmark import SHAPES, synthetic_model

        with LoadingBar(f"making {synthetic}") as bar:
            return synthetic_model(SHAPES[synthetic], chosen, progress=bar, layers=layers)
    name = model or "storyteller"
    with LoadingBar(f"loading {name}") as bar:
        loaded = load(name, backend=chosen.name, threads=threads, head=head, progress=bar)
    return Model(loaded.config, loaded.weights, chosen, loaded.path)  # every kernel set reads the same layout


def shortened(synthetic: str | None, layers: int | None) -> str:
    """ "10 of its 30", or "" for a whole model."""
    from ..benchmark import SHAPES

    whole = SHAPES[synthetic].num_hidden_layers if synthetic else layers
    return f"{layers} of its {whole}" if synthetic and layers not in (None, whole) else ""


def draw_model(found: ModelBench, name: str, shortness: str, out: Console) -> None:
    """Facts, speeds against the bound, memory, and the profiles."""
    from rich.text import Text

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
    median_gb = found.read_bytes / found.read.median_s / 1e9
    table.add_row("memory read", f"{found.read_gb_per_s:.1f} GB/s best, {median_gb:.1f} median ({found.read_how})")
    table.add_row("bound", f"{found.bound_tokens_per_s:.2f} tok/s: memory read / bytes a token")
    ratio = f"{found.of_bound:.2f} best over best, {found.of_bound_median:.2f} median over median"
    table.add_row("of the bound", ratio + ("; but the model fits in the cache" if found.fits_in_cache else ""))
    peak = size_in_words(found.peak_memory_bytes or 0)
    table.add_row(
        "peak memory", f"{peak}, {found.of_weight_bytes:.2f} x the weights' {size_in_words(found.weight_bytes)}"
    )
    out.print(table)
    for part, profile in found.profiles.items():
        out.print(Text(f"\nProfile of the {part}: {in_time(profile.step_s / profile.tokens)} a token", style="bold"))
        draw_profile(profile, out)


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


# -- tokenizer ---------------------------------------------------------------------------------------------------------


@bench.command(short_help="Encoding, decoding and streaming of the shipped tokenizer.")
@click.option("--texts", type=click.IntRange(min=1), default=256, show_default=True, help="How many texts.")
@click.option("--words", type=click.IntRange(min=1), default=60, show_default=True, help="Words in each.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Runs of each.")
@common_options
def tokenizer(texts: int, words: int, repeats: int) -> None:
    """Time the shipped tokenizer: tokens a second, one text at a time and batched."""
    from ..benchmark import measure_tokenizer

    found = measure_tokenizer(texts, words, repeats)
    report(found, lambda out: draw_tokenizer(found, out))


def draw_tokenizer(found: TokenizerBench, out: Console) -> None:
    out.print(f"{found.texts} texts, {found.tokens} tokens; loaded in {found.load_s * 1e3:.0f} ms")
    for name, equal in found.checks.items():
        if not equal:
            out.print(f"DIFFERS: {name.replace('_', ' ')}", style="bold red")
    table = new_table("", "tokens/s best", "median")
    for name, timing in found.timings.items():
        table.add_row(name, f"{found.tokens_per_s(name):,.0f}", f"{found.tokens / timing.median_s:,.0f}")
    if found.timings:
        out.print(table)


# -- cache -------------------------------------------------------------------------------------------------------------


@bench.command(short_help="What a float16 or int8 KV cache changes, and its bytes.")
@click.argument("model", required=False)
@click.option("--text", help="A text, or @FILE.  [default: a short story]")
@click.option("--backend", type=click.Choice(("auto", *NAMES)), default="auto", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: one a core]")
@common_options
def cache(model: str | None, text: str | None, backend: str, threads: int | None) -> None:
    """Measure each cache dtype on a text, against the float32 cache of the same MODEL (default: storyteller)."""
    from ..api import load
    from ..benchmark import measure_cache

    words = content_of(text)
    with LoadingBar("loading") as bar:
        subject = load(model or "storyteller", backend=backend, threads=threads, progress=bar)
    with LoadingBar("measuring"):
        found = measure_cache(subject, words)
    if wants_json():
        print_json({"model": model or "storyteller", **found.to_dict()})
    else:
        show(lambda out: draw_cache(found, out))


def draw_cache(found: CacheBench, out: Console) -> None:
    out.print(f"{found.tokens} tokens, {found.backend}; next-token logits against those with the float32 cache")
    table = new_table("cache", "bytes/token", "max |d logit|", "mean KL", "max KL", "same greedy choice")
    for error in found.errors:
        table.add_row(
            *(error.dtype, f"{error.bytes_per_token:,}", f"{error.max_logit_error:.1e}"),
            *(f"{error.kl_mean:.1e}", f"{error.kl_max:.1e}", f"{error.greedy_agreement:.2%}"),
        )
    out.print(table)


# -- shared ------------------------------------------------------------------------------------------------------------


def report(found: KernelBench | CudaKernelBench | ModelBench | TokenizerBench, draw: Any, **more: Any) -> None:
    """JSON or the drawing, and exit code 1 when something differs from the reference."""
    if wants_json():
        print_json({**more, **found.to_dict()})
    else:
        show(draw)
    if not (found.check.equal if hasattr(found, "check") else found.equal):
        raise click.exceptions.Exit(DIFFERS)


def refuse_simd(simd: str | None, backend: str) -> None:
    if simd is not None and backend not in ("auto", "all", "cython"):
        raise click.UsageError(f"--simd chooses a kernel set of the cython backend; --backend is {backend}")


def new_table(*columns: str, header: bool = True) -> Table:
    """The first column left, the others, which are numbers, right."""
    from rich.table import Table

    table = Table(box=None, show_header=header, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for index, column in enumerate(columns):
        number = header and index > 0
        table.add_column(column, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table


def differs(check: Check, columns: int) -> list[str]:
    """Cells of a row without speeds."""
    return ["DIFFERS", f"{check.unequal_accumulators} acc", f"{check.unequal_floats} floats", *[""] * (columns - 3)]


def check_in_words(check: Check) -> str:
    wrong = check.unequal_accumulators + check.unequal_floats
    exact = f"{check.accumulators + check.floats:,} values of ternary linears " + (
        f"{wrong:,} WRONG" if wrong else "equal"
    )
    logits = f"logits off by {check.logits_error:.0e} ({check.logits_allowed:.0e} allowed)"
    return f"{exact}; {logits}" if check.accumulators else logits


def in_words(threads: int) -> str:
    return f"{threads} thread{'s' if threads != 1 else ''}"


def in_time(value_s: float) -> str:
    """0.00123 -> "1.23 ms" """
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if value_s * scale >= 1:
            return f"{value_s * scale:.2f} {unit}"
    return f"{value_s * 1e6:.1f} us"
