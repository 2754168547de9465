"""Python packages that claim b1.58, as they install: which lines of their BitLinear are wrong, and how.

    python crossval/packages.py [--write] NAME=PYTHON ...

`bitnet-ref crossval linear` judges each package's layers in the interpreter that is named, which needs torch and the
package only. `--write` puts the rows of these packages into docs/cases/packages.md, with the day; the others stay.
What needs a GPU's kernels (onebitllms, bitmat-tl) runs in Triton's interpreter on the processor. The names: see LAYERS.
"""

import datetime
import subprocess
import sys
from pathlib import Path

from bitnet_ref.crossval.linear import cross_linear

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER.parent / "docs" / "cases" / "packages.md"
OWN = f"{FOLDER / 'package_layers.py'}:"
ONLINE = "in_features, out_features, bias=bias, online_quant=True"
ABSMEAN = 'in_features, out_features, bias=bias, weight_measure="AbsMean", norm=None'

LAYERS = {  # package on PyPI -> (label, target, arguments)
    "bitlinear-pytorch": [("BitLinear", "bitlinear_pytorch:BitLinear", "")],
    "bitlinear": [
        ("BitLinear", "bitlinear:BitLinear", ""),
        ('BitLinear, "AbsMean", no norm', "bitlinear:BitLinear", ABSMEAN),
    ],
    "bitmat-tl": [("BitLinear in training, without its norm", f"{OWN}OfBitmat", "")],
    "bitnet": [("BitLinear", f"{OWN}of_bitnet", "")],
    "bitnet-dllm": [("BitLinear", "bitnet_dllm.bitlinear:BitLinear", "")],
    "frankenstein-transformer": [("BitLinear", "src.model.attention.common:BitLinear", "")],
    "mybitnet": [("BitLinear", f"{OWN}of_mybitnet", ""), ("BitLinear158b", f"{OWN}of_mybitnet_158b", "")],
    "onebitllms": [("BitNetLinear", f"{OWN}of_onebitllms", "")],
    "transformers": [
        ("AutoBitLinear, online", "transformers.integrations.bitnet:AutoBitLinear", ONLINE),
        ("AutoBitLinear, offline", f"{OWN}of_transformers_offline", ""),
        ("BitLinear", f"{OWN}of_transformers_packed", ""),
    ],
}
COLUMNS = {  # of the table -> the lines that it holds
    "norm inside": ("norm inside",),
    "activations": ("activation scale", "activation rounding"),
    "weights": ("weight scale", "weight rounding"),
    "output": ("rescaling", "bias", "together"),
    "dX": ("dX",),
    "dW": ("dW", "dbias"),
    "stored again": ("stored weights", "train and eval"),
}
HEAD = ["| package | layer | " + " | ".join(COLUMNS) + " |", "|" + "---|" * (2 + len(COLUMNS))]


def cell(lines):
    """What is wrong with these lines; else "right", or what was chosen."""
    bad = [each for each in lines if each.status in ("WRONG", "not explained")]
    wrong = [f"{each.line}: {each.text}" if "bias" in each.line else each.text for each in bad]
    if wrong:
        return "**" + "; ".join(wrong) + "**"
    choices = [each.text.partition(",")[0] for each in lines if each.status == "a choice"]
    if choices or [each.line for each in lines] == ["norm inside"]:
        return "; ".join(choices) or lines[0].text
    return "right" if any(each.status == "right" for each in lines) else "-"


def row(package, label, verdict):
    if verdict.failed is not None:
        cells = [f"could not be run: {verdict.failed.splitlines()[0][:120]}", *["-"] * (len(COLUMNS) - 1)]
    else:
        cells = [cell([each for each in verdict.lines if each.line in names]) for names in COLUMNS.values()]
    return " | ".join(["", package, label, *(each.replace("|", "\\|") for each in cells), ""]).strip()


def version_of(package, python):
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def rows(package, python):
    name = f"{package} {version_of(package, python)}"
    for label, target, args in LAYERS[package]:
        yield row(name, label, cross_linear(target, python=python, args=args))


def main(arguments):
    pythons = dict(each.split("=", 1) for each in arguments if "=" in each)
    if not pythons or set(pythons) - set(LAYERS):
        sys.exit(__doc__)
    made = {package: list(rows(package, python)) for package, python in pythons.items()}
    print("\n".join([*HEAD, *(each for lines in made.values() for each in lines)]))
    if "--write" in arguments:
        write(made)


def write(made):
    """Replace the rows of these packages on the page."""
    before, rest = PAGE.read_text(encoding="utf-8").split("| package |", 1)
    old, _, after = rest.partition("\n\n")
    kept = {}
    for line in old.splitlines():
        if line.startswith("| "):
            kept.setdefault(line.split()[1], []).append(line)
    day = datetime.date.today().isoformat()
    before = before.split("Measured last on", 1)[0].rstrip()
    table = [line for package in sorted({**kept, **made}) for line in ({**kept, **made})[package]]
    text = "\n".join([f"{before}\n\nMeasured last on {day}.\n", *HEAD, *table])
    PAGE.write_text(f"{text}\n" + (f"\n{after}" if after else ""), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
