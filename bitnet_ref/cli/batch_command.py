"""`bitnet-ref batch`: a file of requests, answered as the server answers them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import __version__
from ..errors import BackendUnavailable, count_of
from ..serving.engine_config import PREFIX, EngineConfig
from .generation_options import (
    INPUT_FILE,
    declared_option,
    load_in_worker,
    load_model,
    lora_option,
    model_opener,
    model_options,
    name_model,
    pop_workers,
    read_adapters,
    read_template,
    read_text,
    server_config,
    spread,
    worker_options,
)
from .shell import LoadingBar, OutputFile, SectionedCommand, common_options, report, say, shell_line

if TYPE_CHECKING:
    from ..api import Model
    from ..serving.http.batch import BatchServer


# options that change answers
DECIDE = ("dtype", "cache_dtype", "activations", "rotation", "dense", "allow_unquantized")


@click.command(cls=SectionedCommand, short_help="Answer a file of OpenAI batch requests.")
@click.argument("source", metavar="IN.jsonl", type=INPUT_FILE)
@click.argument("target", metavar="OUT.jsonl", type=OutputFile())
@click.option("--config", type=click.Path(path_type=Path, exists=True), help="Engine settings (docs/operating.md).")
@click.option("--chat-template", metavar="JINJA", help="Instead of the model's own; @FILE reads it.")
@declared_option(EngineConfig, "generation_defaults")
@lora_option
@click.option(
    "--unknown-fields",
    type=click.Choice(["refuse", "warn"]),
    default="refuse",
    show_default=True,
    help="Make a line with one an error, or leave it out and say so.",
)
@model_options
@worker_options
@common_options
def batch(
    source: Path,
    target: Path,
    config: Path | None,
    chat_template: str | None,
    adapters: tuple[str, ...],
    **options: Any,
) -> None:
    """Answer each request of IN.jsonl, in OpenAI's batch format, as `bitnet-ref serve` does. OUT.jsonl has the answers,
    in the same order.

    \b
    {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once upon a time"}}

    The urls are /v1/completions, /v1/chat/completions and /v1/embeddings. --model may be NAME=MODEL, for the name that
    requests use; they ask for an adapter of --lora as the model MODEL:NAME. What was interrupted goes on from
    OUT.jsonl.partial, if the model's files have the same contents, and the settings are the same.
    """
    if find_spec("fastjsonschema") is None:
        raise BackendUnavailable("batch needs fastjsonschema: pip install 'bitnet-ref[server]'")
    from ..formats.hf.adapter import adapter_files, find_adapter
    from ..formats.open import find_model
    from ..serving.http.batch import run_batch
    from ..system.sharing import model_files

    name, path = name_model(options["model"])
    options["model"] = str(path)
    count, address = pop_workers(options)
    _, loading = model_opener(options, count)
    template = read_template(chat_template)
    base, adapter_folder = find_adapter(path, options["adapter"])
    files = model_files(find_model(base))
    if adapter_folder is not None:
        files += filter(Path.is_file, adapter_files(adapter_folder))
    run: dict[str, Any] = {"version": __version__, "model": name, "template": template, "hashes": hash_files(files)}
    run |= {"files": [file.name for file in files], "config": None if config is None else read_text(config)}
    run |= {key: str(options[key]) for key in DECIDE}
    run |= {variable: value for variable, value in os.environ.items() if variable.startswith(PREFIX)}
    defaults = server_config(config, generation_defaults=options["generation_defaults"]).generation_defaults
    run |= {"generation_defaults": defaults, "unknown_fields": options["unknown_fields"]}
    folders = {adapter: str(folder) for (_, adapter), folder in read_adapters(adapters, [name]).items()}
    if folders:
        run["adapters"] = {key: hash_files(model_files(Path(folder))) for key, folder in folders.items()}
    settings = (name, config, template, defaults, options["unknown_fields"] == "warn", tuple(folders.items()))
    opener = (open_server, loading, *settings)
    alone = None if count or address else serve_lines(load_model(options), *settings)
    answered = [0, 0]  # so many lines, of so many

    def note(done: int, total: int) -> None:
        answered[:] = done, total
        bar(done, total)

    try:
        with spread(opener, count, address, alone) as workers, LoadingBar("requests") as bar:
            summary = run_batch(source, target, workers, run, note)
    except BaseException:
        if answered[1] and Path(f"{target}.partial").exists():
            done, total = answered
            say(
                f"{done} of {total} answers are kept in {target}.partial; this goes on with the others:\n{shell_line()}"
            )
        raise
    if alone is not None:
        alone.engine.close()
    text = f"{count_of(summary.lines, 'answer')} in {target} after {summary.seconds:.1f} s"
    text += f", {count_of(summary.failed, 'error')} among them"
    text += f"; {summary.reused} are of an earlier run" * bool(summary.reused)
    text += f"; {summary.damaged} damaged ones of an earlier run were computed again" * bool(summary.damaged)
    report(vars(summary), lambda out: out.print(text))


def hash_files(files: Sequence[Path]) -> list[str]:
    """The hash of each file, with a bar where it takes long."""
    from ..formats.hashes import file_hash

    done, total = 0, sum(file.stat().st_size for file in files)

    def note(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        bar(done, total)

    with LoadingBar("hashing the model's files") as bar:
        return [file_hash(file, note) for file in files]


def serve_lines(
    model: Model,
    name: str,
    config: Path | None,
    chat_template: str | None,
    defaults: str | None = None,
    ignores_unknown: bool = False,
    adapters: Sequence[tuple[str, str]] = (),
) -> BatchServer:
    """defaults: of `EngineConfig.generation_defaults`. adapters: names of LoRA adapters and their folders."""
    from ..serving.http.batch import BatchServer
    from ..serving.http.schemas import UnknownFields

    settings = server_config(config, generation_defaults=defaults)
    unknown = UnknownFields() if ignores_unknown else None
    engine = model.engine(config=settings)
    for adapter, folder in adapters:
        engine.add_adapter(adapter, folder)
    return BatchServer(engine, name, chat_template, unknown, tuple(adapter for adapter, _ in adapters))


def open_server(loading: tuple[tuple[str, Any], ...], *settings: Any) -> BatchServer:
    """In a worker."""
    return serve_lines(load_in_worker(loading), *settings)
