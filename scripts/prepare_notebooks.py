"""Write into each notebook where slides begin and which code is folded, and its pictures in 256 colours: a third of the
bytes. What a run notes of itself goes: times, Python's version, the state of widgets, where a print was cut.

    python scripts/prepare_notebooks.py        # after a change of a heading, or after a run

tests/test_notebooks.py checks that each notebook has what `prepare` would write.
"""

import base64
import io
import json
from pathlib import Path

from PIL import Image

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


def prepare(notebook: dict) -> None:
    """For `nbconvert --to slides` a heading begins a slide, and every other text the next one below it.

    Code that JupyterLab folds is folded on the site, too."""
    notebook["metadata"].pop("widgets", None)
    notebook["metadata"]["language_info"] = {"name": "python"}
    for cell in notebook["cells"]:
        cell["metadata"].pop("execution", None)
        if cell["metadata"].get("jupyter", {}).get("source_hidden"):
            cell["metadata"]["tags"] = ["hide-input"]
        cell["metadata"].pop("slideshow", None)
        if cell["cell_type"] == "markdown":
            heading = "".join(cell["source"]).startswith("#")
            cell["metadata"]["slideshow"] = {"slide_type": "slide" if heading else "subslide"}
        if "outputs" in cell:
            cell["outputs"] = with_whole_streams(cell["outputs"])
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output["data"]["image/png"] = in_few_colours(output["data"]["image/png"])


def with_whole_streams(outputs: list[dict]) -> list[dict]:
    """Texts that a slow cell printed one after the other, as one."""
    whole: list[dict] = []
    for output in outputs:
        if whole and output["output_type"] == "stream" and whole[-1].get("name") == output["name"]:
            text = "".join(whole[-1]["text"]) + "".join(output["text"])
            whole[-1] = {**output, "text": text.splitlines(keepends=True)}
        else:
            whole.append(output)
    return whole


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
        prepare(notebook)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
