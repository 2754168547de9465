"""Every engine that runs here, on storyteller and on the golden cases of the tests: which agree with the reference.

    python crossval/run_all.py [--python PATH] [--markdown FILE] [--json FILE] [--receipts FOLDER] [--require]
                               [MODEL ...]

--python names an interpreter that has the engines which this one lacks. Without a MODEL, the models are storyteller
and tests/data/golden. Exit code 0: nothing that ran differs, 1: something does, or is missing with --require.
"""

import argparse
import json
import sys
from pathlib import Path

del sys.path[0]  # this folder: some of its files have the names of packages

from bitnet_ref.api import load  # noqa: E402
from bitnet_ref.crossval import cross_all, default_tokens, make_receipt  # noqa: E402
from bitnet_ref.crossval.engines.outside import ENGINES  # noqa: E402
from bitnet_ref.crossval.receipt import write_receipt  # noqa: E402
from bitnet_ref.formats.safetensors import SafetensorsFile  # noqa: E402

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "data" / "golden"


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
