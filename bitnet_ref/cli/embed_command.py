"""`bitnet-ref embed`: texts as vectors, for search and for comparing texts."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from click.core import ParameterSource
from numpy.typing import NDArray

from ..errors import ConfigError, FormatError, GenerationError, count_of
from ..generation.embed import (
    PRECISIONS,
    instruction_prompt,
    published_prompts,
    quantize_embeddings,
    token_rows,
)
from ..reference.layers import Array
from ..system.atomic import atomic_path
from .generation_options import (
    INPUT_FILE,
    is_model,
    load_model,
    model_opener,
    model_options,
    pop_workers,
    read_text,
    spread,
    worker_options,
)
from .shell import LoadingBar, OutputFile, SectionedCommand, common_options, print_json, say, wants_json

if TYPE_CHECKING:
    from ..api import Model
    from ..system.workers import Workers

BATCH = 32  # texts between two reports of progress


@click.command(cls=SectionedCommand, short_help="Turn texts into vectors.")
@click.argument("texts", nargs=-1)
@click.option("--file", "file", type=INPUT_FILE, help="Texts, one for each line, empty ones too.")
@click.option(
    "--out", type=OutputFile(".npy", ".jsonl"), help="Write the vectors there: .npy, or .jsonl with the texts."
)
@click.option("--instruct", metavar="TASK", help='Put "Instruct: TASK\\nQuery:" before each text (queries, Qwen3).')
@click.option("--prompt", metavar="TEXT", help="Put TEXT before each text. Default: the model's default prompt.")
@click.option("--prompt-name", metavar="NAME", help="Put the model's own prompt of that name before each text.")
@click.option(
    "--dimensions", type=click.IntRange(1), metavar="N", help="The first N numbers of each vector, to length 1."
)
@click.option("--quantize", type=click.Choice(PRECISIONS), help="int8: by the texts' own ranges; binary: a bit each.")
@model_options
@worker_options
@common_options
def embed(
    texts: tuple[str, ...],
    file: Path | None,
    out: Path | None,
    instruct: str | None,
    prompt: str | None,
    prompt_name: str | None,
    dimensions: int | None,
    quantize: str | None,
    **options: Any,
) -> None:
    """A vector for each of TEXTS (and of --file): the final hidden state at the last token, of length 1.

    Without --out the similarity of each text to the first is shown; --json gives the vectors.
    """
    lines = [] if file is None else lines_of(file)
    rows = [*texts, *lines]
    if not rows:
        raise click.UsageError("no texts: give some, or --file")
    if sum(each is not None for each in (instruct, prompt, prompt_name)) > 1:
        raise click.UsageError("--instruct, --prompt and --prompt-name exclude each other")
    warn_of_names_among(texts)
    count, address = pop_workers(options)
    opener = model_opener(options, count)
    model = load_model(options)
    before = instruction_prompt(instruct) if instruct is not None else prompt
    if prompt_name is not None:
        before = prompt_of(model, prompt_name)
    check_blank_lines(model, lines, before, file)
    vectors = embed_all(spread(opener, count, address, model), rows, before, dimensions)
    numbers = vectors if quantize is None else quantize_embeddings(vectors, quantize)
    if out is not None:
        save(out, rows, numbers)
        say(f"{count_of(len(rows), 'vector')} of {numbers.shape[1]} {numbers.dtype} numbers in {out}")
    if wants_json():
        shown = {} if out is not None else {"vectors": [row.tolist() for row in numbers]}
        print_json({"texts": len(rows), "dimensions": vectors.shape[1], "dtype": str(numbers.dtype), **shown})
    elif out is None:
        say("similarity to the first text:")
        for text, similarity in zip(rows, vectors @ vectors[0], strict=True):
            click.echo(f"{similarity:7.4f}  {text}")


def lines_of(file: Path) -> list[str]:
    """The lines of a file of texts, empty ones too: vector i is that of line i."""
    text = read_text(file).removeprefix("\ufeff").replace("\r\n", "\n")
    return text.removesuffix("\n").split("\n") if text else []  # splitlines() would also split at form feeds, U+2028


def check_blank_lines(model: Model, lines: list[str], prompt: str | None, file: Path | None) -> None:
    """Raise FormatError for the first blank line of which the model's tokenizer makes no token."""
    first_numbers: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            first_numbers.setdefault(line, number)
    for line, number in first_numbers.items():
        try:
            token_rows(model, [line], prompt)
        except GenerationError as error:
            message = f"the line is blank: {error.message}; put a text there, or delete it"
            raise FormatError(message, path=file, field=f"line {number}") from error


def warn_of_names_among(texts: tuple[str, ...]) -> None:
    """Remark that the first text names a model, where --model is not given, or a file: other commands take it there."""
    source = click.get_current_context().get_parameter_source("model")
    if source is ParameterSource.DEFAULT and texts and is_model(texts[0]):
        say(f"{texts[0]!r} is taken as a text; a model is given by --model")
    elif texts and os.path.isfile(texts[0]):
        say(f"{texts[0]!r} is taken as a text; a file of texts is given by --file")


def embed_all(workers: Workers, rows: list[str], prompt: str | None, dimensions: int | None) -> NDArray[np.float32]:
    parts: dict[int, NDArray[np.float32]] = {}
    starts = range(0, len(rows), BATCH)
    with workers, LoadingBar(f"embedding {count_of(len(rows), 'text')}") as bar:
        batches = ((prompt, dimensions, rows[start : start + BATCH]) for start in starts)
        for index, vectors in workers.map(embed_batch, batches):
            parts[index] = vectors
            bar(min(len(parts) * BATCH, len(rows)), len(rows))
    return np.concatenate([parts[index] for index in range(len(starts))])


def embed_batch(model: Model, batch: tuple[str | None, int | None, list[str]]) -> NDArray[np.float32]:
    prompt, dimensions, texts = batch
    return model.embed(texts, prompt=prompt, dimensions=dimensions)


def prompt_of(model: Model, name: str) -> str:
    """The prompt of that name in the model's config_sentence_transformers.json. Raises ConfigError."""
    prompts = published_prompts(model.texts_path)
    if name not in prompts:
        known = ", ".join(prompts) or "none (it has no config_sentence_transformers.json with prompts)"
        raise ConfigError(f"the model has no prompt of that name; there are: {known}", field=name)
    return prompts[name]


def save(path: Path, rows: list[str], numbers: Array) -> None:
    data = io.BytesIO()
    if path.suffix == ".npy":
        np.save(data, numbers)
    else:
        for text, vector in zip(rows, numbers.tolist(), strict=True):
            data.write(json.dumps({"text": text, "embedding": vector}, ensure_ascii=False).encode() + b"\n")
    with atomic_path(path) as temporary:
        temporary.write_bytes(data.getvalue())
