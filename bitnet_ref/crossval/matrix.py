"""Who agrees with whom: a table of models and engines, with a receipt behind each cell.

A cell's receipt is written, whole, when the cell is computed. So a run that was interrupted goes on where it ended, and
a cell is computed again when its model has changed or when its engine could not run.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .. import __version__
from ..api import Model, load
from ..errors import BitNetRefError, ConfigError, printable
from ..formats.hashes import config_hash, weight_hash
from ..formats.open import find_model
from ..formats.safetensors import SafetensorsFile
from ..system.atomic import atomic_path
from ..system.sharing import file_identity, model_files
from ..system.workers import Workers
from .engines.outside import ENGINES, cross_engine
from .opponents import cross_backends, default_tokens
from .receipt import make_receipt, read_receipt, write_receipt
from .report import Crossing, html_page
from .types import Tokens

BACKENDS = "backends"
Task = tuple[str, str, str | None]  # a model, an engine, and the interpreter that has it


@dataclass(frozen=True)
class Cell:
    """agrees: None if the engine could not run.   text: the verdict in a few words.   receipt: its file, if any."""

    model: str
    engine: str
    agrees: bool | None
    text: str
    receipt: Path | None = None


def compute_matrix(
    models: Sequence[str],
    engines: Sequence[str],
    folder: Path,
    pythons: Mapping[str, str],
    report: Callable[[str], None],
    workers: Workers,
) -> list[Cell]:
    """Every model on every engine. The receipts are in `folder`, and those that are there already are used.

    engines: "backends" (all of ours), the name of a backend or kernel set, or a name of ENGINES.
    pythons: the interpreter of an engine, by its name. workers: compute the cells, with no resource.
    Raises ConfigError for two models of one name.
    """
    names = [_file_name(model) for model in models]
    if len(set(names)) < len(names):
        raise ConfigError(f"two models would have the same receipts: {', '.join(names)}", field="models")
    folder.mkdir(parents=True, exist_ok=True)
    cells: dict[tuple[str, str], Cell] = {}
    tasks: list[Task] = []
    places: list[Path] = []
    for source, name in zip(models, names, strict=True):
        try:
            model, tokens = _load(source)
        except BitNetRefError as error:
            cells |= {(source, engine): Cell(source, engine, None, f"does not load: {error}") for engine in engines}
            continue
        for engine in engines:
            path = folder / f"{name}--{_file_name(engine)}.json"
            receipt = _finished(path, model, tokens)
            report(f"{source}, {engine}: {'kept' if receipt else 'computing'}")
            if receipt is None:
                tasks.append((source, engine, pythons.get(engine)))
                places.append(path)
            else:
                cells[source, engine] = _cell(source, engine, receipt, path)
    for index, receipt in workers.map(compute_receipt, tasks):
        source, engine, _ = tasks[index]
        write_receipt(places[index], receipt)
        cells[source, engine] = _cell(source, engine, receipt, places[index])
    return [cells[source, engine] for source in models for engine in engines]


def _load(source: str) -> tuple[Model, list[int]]:
    """The model, and the tokens that it is compared on. The last one stays, until its files change."""
    return _load_files(source, tuple(map(file_identity, model_files(find_model(source)))))


@lru_cache(maxsize=1)
def _load_files(source: str, _: tuple[object, ...]) -> tuple[Model, list[int]]:
    model = load(source, backend="numpy")
    return model, _golden_tokens(model) or default_tokens(model)


def compute_receipt(_: object, task: Task) -> dict[str, Any]:
    """The receipt of a cell, here or in a worker."""
    source, engine, python = task
    model, tokens = _load(source)
    kind = engine if engine in ENGINES else BACKENDS
    return make_receipt(kind, source, model, tokens, _cross(engine, source, model, tokens, python))


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text.replace("/", " ").split()[-1])


def _golden_tokens(model: Model) -> list[int] | None:
    """The tokens of a golden case beside the model: no correct engine's activations flip on them."""
    golden = Path(model.path) / "golden.safetensors" if model.path is not None else None
    if golden is None or not golden.is_file():
        return None
    with SafetensorsFile(golden) as file:
        return [int(token) for token in file.read("tokens")] if "tokens" in file.tensors else None


def _finished(path: Path, model: Model, tokens: Tokens) -> dict[str, Any] | None:
    """The cell's receipt, if it is of this version, this model and these tokens, and its engine ran."""
    try:
        receipt = read_receipt(path)
    except BitNetRefError:
        return None
    mine = {"config_sha256": config_hash(model.config), "weights_sha256": weight_hash(model.weights)}
    same = mine.items() <= receipt["subject"].items() and receipt["subject"]["token_ids"] == list(tokens)
    ran = any(result["agrees"] is not None and result["failed"] is None for result in receipt["results"])
    return receipt if same and ran and receipt["bitnet_ref"] == __version__ else None


def _cross(engine: str, source: str, model: Model, tokens: Tokens, python: str | None) -> list[Crossing]:
    try:
        if engine in ENGINES:
            return cross_engine(engine, source, tokens, python=python)
        return cross_backends(model, tokens, None if engine == BACKENDS else [engine])
    except Exception as error:  # one cell's crash is that cell's result
        return [Crossing(engine, failed=f"{type(error).__name__}: {error}")]


def _cell(source: str, engine: str, receipt: Mapping[str, Any], path: Path) -> Cell:
    results = receipt["results"]
    ran = [result for result in results if result["agrees"] is not None]
    if not ran:
        return Cell(source, engine, None, results[0]["verdict"] if results else "has no variant for this model", path)
    if wrong := next((result for result in ran if not result["agrees"]), None):
        first = next((c["first_divergence"] for c in wrong["comparisons"] if not c["agrees"]), None)
        text = f"first at {first}" if first else wrong["verdict"]
        return Cell(source, engine, False, f"DIFFERS ({wrong['opponent']}): {text}", path)
    last = [result["comparisons"][-1] for result in ran if result["comparisons"]]
    kl = [each["logits"]["kl_max"] for each in last if each["logits"] is not None]
    text = f"agrees, KL {max(*kl, 0.0):.0e}" if kl and max(kl) > 0 else "equal"
    return Cell(source, engine, True, text + " (by its own rule)" * any(result["rule"] for result in ran), path)


def write_matrix(path: Path, cells: Sequence[Cell]) -> None:
    """The table as HTML or, if the file's name does not end with .html, as Markdown. Each cell links to its receipt."""
    engines = list(dict.fromkeys(cell.engine for cell in cells))
    by_place = {(cell.model, cell.engine): cell for cell in cells}
    rows = {model: [by_place[model, engine] for engine in engines] for model in dict.fromkeys(c.model for c in cells)}
    text = _as_html(engines, rows) if path.suffix == ".html" else _as_markdown(engines, rows)
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _link(cell: Cell) -> str:
    return "" if cell.receipt is None else quote(os.fsencode(f"{cell.receipt.parent.name}/{cell.receipt.name}"))


def _as_markdown(engines: Sequence[str], rows: Mapping[str, Sequence[Cell]]) -> str:
    lines = ["| |" + "".join(f" {engine} |" for engine in engines), "|---|" + "---|" * len(engines)]
    for model, cells in rows.items():
        texts = [re.sub(r"([|\[\]])", r"\\\1", printable(cell.text)) for cell in cells]
        links = [f"[{text}]({_link(c)})" if c.receipt else text for text, c in zip(texts, cells, strict=True)]
        lines.append(f"| {printable(model)} |" + "".join(f" {link} |" for link in links))
    return "\n".join(lines) + "\n"


def _as_html(engines: Sequence[str], rows: Mapping[str, Sequence[Cell]]) -> str:
    def e(text: str) -> str:
        return html.escape(printable(text))

    head = "".join(f"<th>{e(engine)}</th>" for engine in engines)
    body = ""
    for model, cells in rows.items():
        texts = [f'<a href="{e(_link(c))}">{e(c.text)}</a>' if c.receipt else e(c.text) for c in cells]
        body += f"<tr><th>{e(model)}</th>{''.join(f'<td>{text}</td>' for text in texts)}</tr>"
    style = "body{font:15px system-ui,sans-serif}td,th{padding:.3em .8em;text-align:left;border-bottom:1px solid #ddd}"
    return html_page("Who agrees with whom", style, f"<table><tr><th></th>{head}</tr>{body}</table>")
