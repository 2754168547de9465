"""Write into each notebook its badges (open in Colab, open in Binder), the cell that installs the package in Colab, and
where slides begin; and its pictures in 256 colours, which take a third of the bytes.

    python scripts/prepare_notebooks.py        # after a change of REPOSITORY or of a heading, or after a run

tests/test_notebooks.py checks that each notebook has what `prepare` would write.
"""

import base64
import io
import json
from pathlib import Path

from PIL import Image

REPOSITORY = "bitnet-ref/bitnet_ref"  # owner/name on GitHub: the one place that the badges' addresses come from
NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
COLAB = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
BINDER = "[![Open in Binder](https://mybinder.org/badge_logo.svg)]"
INSTALL = """import sys

if "google.colab" in sys.modules:  # Colab does not have the package
    %pip install -q bitnet-ref"""


def badges(name: str) -> str:
    """The line of badges of the notebook of that file name."""
    colab = f"https://colab.research.google.com/github/{REPOSITORY}/blob/main/notebooks/{name}"
    binder = f"https://mybinder.org/v2/gh/{REPOSITORY}/main?labpath=notebooks/{name}"
    return f"{COLAB}({colab}) {BINDER}({binder})"


def prepare(notebook: dict, name: str) -> None:
    """Put the badges below the title, and the installing cell before the first code cell; replaces older ones. For
    `nbconvert --to slides` a heading begins a slide, and every other text the next one below it."""
    cells = notebook["cells"]
    title, *rest = "".join(cells[0]["source"]).split("\n\n")
    rest = rest[1:] if rest[0].startswith("[![Open in Colab]") else rest
    cells[0]["source"] = "\n\n".join([title, badges(name), *rest]).splitlines(keepends=True)
    first = next(cell for cell in cells if cell["cell_type"] == "code")
    if first["id"] != "colab":
        first = {"cell_type": "code", "execution_count": None, "id": "colab", "metadata": {}, "outputs": []}
        cells.insert(1, first)
    first["source"] = INSTALL.splitlines(keepends=True)
    for cell in cells:
        cell["metadata"].pop("slideshow", None)
        if cell["cell_type"] == "markdown":
            heading = "".join(cell["source"]).startswith("#")
            cell["metadata"]["slideshow"] = {"slide_type": "slide" if heading else "subslide"}
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output["data"]["image/png"] = in_few_colours(output["data"]["image/png"])


def in_few_colours(png: str) -> str:
    """A PNG in base64 with a palette of 256 colours; as it is if it has one."""
    picture = Image.open(io.BytesIO(base64.b64decode(png)))
    if picture.mode == "P":
        return png
    small = io.BytesIO()
    # the method that keeps transparency, which the figures have for a background
    palette = picture.convert("RGBA").quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    palette.save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def main() -> None:
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        prepare(notebook, path.name)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
