"""`bitnet-ref perplexity` and `bitnet-ref eval`: how good a model is."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import BackendUnavailable
from ..evaluation import PROTOCOLS
from .generation_options import (
    INPUT_FILE,
    is_model,
    load_model,
    loading_options,
    model_opener,
    pop_workers,
    read_text,
    spread,
    worker_options,
)
from .shell import LoadingBar, OutputFile, SectionedCommand, common_options, make_table, report, say, wants_json

if TYPE_CHECKING:
    from rich.console import Console

    from ..evaluation import Perplexity

LENGTH_HELP = (
    "Tokens read at a time; another length is another figure.  "
    "[default: 512 for llama.cpp, else 2048; at most the model's context]"
)
STATE_HELP = "Written every 5 s; the same command goes on from there."


@click.command(cls=SectionedCommand, short_help="The perplexity of a text, by a named protocol.")
@click.argument("model", default="storyteller")
@click.option("--text", "texts", type=INPUT_FILE, multiple=True, help="A document; may be repeated.  [required]")
@click.option("--protocol", type=click.Choice(PROTOCOLS), multiple=True, help="May be repeated.  [default: llama.cpp]")
@click.option("--length", type=int, metavar="N", help=LENGTH_HELP)
@click.option("--state", type=OutputFile(), help=STATE_HELP)
@loading_options
@worker_options
@common_options
def perplexity(
    model: str,
    texts: tuple[Path, ...],
    protocol: tuple[str, ...],
    length: int | None,
    state: Path | None,
    **options: Any,
) -> None:
    """The perplexity of MODEL on a text, with its standard error, as others in the field compute it.

    \b
    llama.cpp  chunks of 512 tokens, the second half of each scored (llama-perplexity)
    gptq       blocks of 2,048 tokens, as in papers on quantisation
    1bitllm    lines packed behind BOS, up to 2,048 tokens: the BitNet authors' script
    lm-eval    every token of each document once (loglikelihood_rolling)

    docs/evaluation.md says why their figures differ.
    """
    from ..evaluation import perplexity as measure

    if not texts:
        is_text = Path(model).is_file() and not is_model(model)
        line = f"{model} --text FILE" if not is_text else f"--text {model}"
        question = f"Is {model} the text? " * is_text
        raise click.UsageError(f"Missing option '--text'. {question}Write: bitnet-ref perplexity {line}")
    protocols = protocol or ("llama.cpp",)
    if state is not None and len(protocols) > 1:
        raise click.UsageError("--state: expected one --protocol")
    documents = [read_text(path) for path in texts]
    count, address = pop_workers(options)
    options["model"] = model
    opener = model_opener(options, count)
    loaded = load_model(options)
    results = []
    with spread(opener, count, address, loaded) as workers:
        for each in protocols:
            with LoadingBar(f"{each}: windows") as bar:
                results.append(measure(loaded, documents, each, length, state=state, workers=workers, progress=bar))
    for result in results:
        if length is None and result.length < (usual := PROTOCOLS[result.protocol].length):
            say(f"{result.protocol}: windows of {result.length} tokens, the model's context, instead of {usual}")
    facts = {
        "model": model,
        "texts": [_identity(path, text) for path, text in zip(texts, documents, strict=True)],
        "results": [asdict(result) for result in results],
    }
    report(facts, lambda out: draw(results, out))


def _identity(path: Path, text: str) -> dict[str, Any]:
    """Which text it is: figures of other files of the same name do not compare."""
    data = text.encode()  # the bytes of the file, which is UTF-8
    return {"path": str(path), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def draw(results: list[Perplexity], out: Console) -> None:
    rows = [
        (
            each.protocol,
            f"{each.perplexity:.4f}",
            f"{each.stderr:.4f}",
            f"{each.bits_per_byte:.4f}",
            f"{each.tokens:,}",
            f"{each.length:,}",
            f"{each.tokens_per_s:,.0f}",
        )
        for each in results
    ]
    columns = ("|protocol", ">|perplexity", ">|+/-", ">|bits per byte", ">|tokens", ">|length", ">|tokens/s")
    out.print(make_table(columns, rows))


@click.command("eval", cls=SectionedCommand, short_help="Tasks of lm-eval: multiple choice, texts, perplexities.")
@click.argument("model", default="storyteller")
@click.option("--tasks", required=True, metavar="A,B", help='Tasks, groups, tags, or patterns like "mmlu_*".')
@click.option("--include", "folders", type=click.Path(exists=True, file_okay=False), multiple=True, help="More tasks.")
@click.option("--shots", type=click.IntRange(min=0), help="Examples before each question.  [default: the task's]")
@click.option("--limit", type=click.IntRange(min=1), help="So many documents of each task.  [default: all]")
@click.option(
    "--length", type=click.IntRange(min=2), metavar="N", help="Tokens read at a time.  [default: the context]"
)
@click.option("--chat-template", "with_chat_template", is_flag=True, help="Put questions into the chat template.")
@loading_options
@common_options
def evaluate(model: str, tasks: str, **options: Any) -> None:
    """Run tasks of lm-eval (lm-evaluation-harness) on MODEL, through its own `simple_evaluate`.

    Tasks of its catalogue fetch their data from the Hugging Face hub; --include names a folder with tasks of one's own.
    """
    if find_spec("lm_eval") is None:
        raise BackendUnavailable("eval needs lm-eval: pip install 'bitnet-ref[eval]'")
    if not (chosen := [name for name in tasks.split(",") if name]):
        raise click.UsageError(f"--tasks: expected names of tasks, got {tasks!r}")
    from ..evaluation.harness import evaluate as run

    names = ("folders", "shots", "limit", "length", "with_chat_template")
    settings = {name: options.pop(name) for name in names}
    loaded = load_model({"model": model, **options})
    with LoadingBar("requests") as bar:
        results = run(loaded, chosen, progress=bar, **settings)
    if not wants_json():
        say(f"{model} on {loaded.backend.name}")
    report({"model": model, **results}, lambda out: draw_tasks(results, out))


def draw_tasks(results: dict[str, Any], out: Console) -> None:
    rows = []
    for task, metrics in results["results"].items():
        for key, value in metrics.items():
            metric, _, kind = key.partition(",")
            if isinstance(value, float | int) and kind and "_stderr" not in metric:
                error = metrics.get(f"{metric}_stderr,{kind}")
                rows.append((task, metric, f"{value:.4f}", f"{error:.4f}" if isinstance(error, float) else ""))
    out.print(make_table(("|task", "|metric", ">|value", ">|+/-"), rows))
