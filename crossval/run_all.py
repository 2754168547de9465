"""Every engine that runs here, on storyteller and on the golden cases of the tests: which agree with the reference.

    python crossval/run_all.py [--python PATH] [--markdown FILE] [--json FILE] [--receipts FOLDER] [--require]
                               [MODEL ...]

--python names an interpreter that has the engines which this one lacks. Without a MODEL, the models are storyteller
and tests/data/golden. Exit code 0: nothing that ran differs, 1: something does, or is missing with --require.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

del sys.path[0]  # this folder: some of its files have the names of packages

from bitnet_ref.api import load  # noqa: E402
from bitnet_ref.crossval import cross_backends, default_tokens, make_receipt  # noqa: E402
from bitnet_ref.crossval.engines.outside import ENGINES, cross_engine_on  # noqa: E402
from bitnet_ref.crossval.receipt import figures, write_receipt  # noqa: E402
from bitnet_ref.crossval.report import Crossing, summarize  # noqa: E402
from bitnet_ref.formats.safetensors import SafetensorsFile  # noqa: E402

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "data" / "golden"


Subject = tuple[str, str | os.PathLike[str], Sequence[int] | None]  # name, path, tokens
Report = Callable[[str], None]


@dataclass
class Table:
    """rows: model -> opponent -> its crossing."""

    rows: dict[str, dict[str, Crossing]] = field(default_factory=dict)

    @property
    def opponents(self) -> list[str]:
        names: dict[str, None] = {}
        for row in self.rows.values():
            names |= dict.fromkeys(row)
        return list(names)

    @property
    def agrees(self) -> bool:
        """Whether something ran and nothing that ran differs."""
        ran = [
            crossing.agrees for row in self.rows.values() for crossing in row.values() if crossing.agrees is not None
        ]
        return bool(ran) and all(ran)

    def missing(self) -> list[str]:
        """Opponents that ran on no model at all."""
        return [name for name in self.opponents if all(crossing.agrees is None for crossing in self._column(name))]

    def markdown(self) -> str:
        """One row per model, one column per engine (with all its kernel sets and files), and notes below."""
        ran = [name for name in self.opponents if name not in self.missing()]
        columns = list(dict.fromkeys(_column_of(name) for name in ran))
        lines = ["| |" + "".join(f" {column} |" for column in columns), "|---|" + "---|" * len(columns)]
        for model, row in self.rows.items():
            cells = [
                _cells([crossing for name, crossing in row.items() if _column_of(name) == column]) for column in columns
            ]
            lines.append(f"| {model} |" + "".join(f" {text} |" for text in cells))
        notes: dict[str, None] = {}
        for row in self.rows.values():
            notes |= {f"- \\* {crossing.opponent}: {crossing.rule}": None for crossing in row.values() if crossing.rule}
        notes |= {f"- {name}: {self._column(name)[0].verdict}": None for name in self.missing()}
        return "\n".join([*lines, "", *notes]).rstrip() + "\n"

    def _column(self, name: str) -> list[Crossing]:
        return [row[name] for row in self.rows.values() if name in row]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values: the figures of a receipt."""
        rows = {
            model: {name: crossing.to_dict(figures) for name, crossing in row.items()}
            for model, row in self.rows.items()
        }
        return {"agrees": self.agrees, "missing": self.missing(), "models": rows}


def _column_of(opponent: str) -> str:
    engine, _, variant = opponent.partition(" ")
    return f"{engine} {variant.split(',')[0]}" if engine == "transformers" else engine


def _cells(crossings: Sequence[Crossing]) -> str:
    """One cell for the kernel sets or files of an engine on a model: the worst of them."""
    ran = [crossing for crossing in crossings if crossing.unavailable is None]
    if not ran:
        return "–" if crossings else ""
    worst = max(ran, key=_badness)
    return summarize(worst) if len(ran) == 1 or worst.agrees else f"{summarize(worst)} ({worst.opponent})"


def _badness(crossing: Crossing) -> tuple[bool, float]:
    logits = crossing.comparisons[-1].logits if crossing.comparisons else None
    return not crossing.agrees, 0.0 if logits is None else logits.kl_max


def cross_all(
    subjects: Sequence[Subject],
    pythons: Mapping[str, str | None] | None = None,
    backends: Sequence[str] | None = None,
    report: Report = lambda line: None,
) -> Table:
    """Every subject on our backends and on every engine.

    pythons: the interpreter of each engine, by its name ("" for all others).   backends: their names, None for all.
    report: is called with a line about each step.
    """
    pythons = pythons or {}
    loaded = [(name, load(path, backend="numpy")) for name, path, _ in subjects]
    runs = [
        (name, path, default_tokens(model) if tokens is None else list(tokens))
        for (name, model), (_, path, tokens) in zip(loaded, subjects, strict=True)
    ]
    table = Table({name: {} for name, _, _ in runs})
    for (name, _, tokens), (_, model) in zip(runs, loaded, strict=True):
        report(f"{name}: backends")
        table.rows[name] |= {crossing.opponent: crossing for crossing in cross_backends(model, tokens, backends)}
    for engine in ENGINES:
        report(f"{engine}: {len(runs)} models")
        python = pythons.get(engine, pythons.get(""))
        results = cross_engine_on(engine, [(path, tokens) for _, path, tokens in runs], python=python)
        for (name, _, _), crossings in zip(runs, results, strict=True):
            table.rows[name] |= {crossing.opponent: crossing for crossing in crossings}
    return table


def subjects(models):
    """(name, path, tokens): a golden case has tokens for which no correct engine's activations flip."""
    if not models:
        models = ["storyteller", *sorted(str(path) for path in GOLDEN.iterdir() if path.is_dir())]
    for model in models:
        golden = Path(model) / "golden.safetensors"
        tokens = None
        if golden.is_file():
            with SafetensorsFile(golden) as file:
                tokens = file.read("tokens").tolist()
        yield Path(model).name, model, tokens


def write_receipts(folder, table, runs):
    """One receipt for each model and kind of opponent."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, path, tokens in runs:
        model = load(path, backend="numpy")
        tokens = default_tokens(model) if tokens is None else tokens
        for kind in ("backends", *ENGINES):
            found = [c for c in table.rows[name].values() if kind_of(c.opponent) == kind]
            write_receipt(folder / f"{name}-{kind}.json", make_receipt(kind, str(path), model, tokens, found))


def kind_of(opponent):
    kind = opponent.split()[0].replace(".", "_")
    return kind if kind in ENGINES else "backends"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--python", help="the interpreter of the engines that this one lacks")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--json", type=Path, help="write every figure there")
    parser.add_argument("--receipts", type=Path, help="write receipts into that folder")
    parser.add_argument("--require", action="store_true", help="an engine that cannot run is a failure")
    arguments = parser.parse_args()
    runs = list(subjects(arguments.models))
    pythons = {name: arguments.python for name, engine in ENGINES.items() if engine.missing() is not None}
    table = cross_all(runs, pythons, report=lambda line: print(line, file=sys.stderr))
    if arguments.markdown is not None:
        arguments.markdown.write_text(table.markdown(), encoding="utf-8")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(table.to_dict(), indent=1) + "\n", encoding="utf-8")
    if arguments.receipts is not None:
        write_receipts(arguments.receipts, table, runs)
    print(table.markdown(), end="")
    sys.exit(0 if table.agrees and not (arguments.require and table.missing()) else 1)


if __name__ == "__main__":
    main()
