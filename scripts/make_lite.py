"""Builds a JupyterLite site of notebooks 1 to 3b: `python scripts/make_lite.py OUTPUT`.

Needs build, ipywidgets, jupyterlite-core and jupyterlite-pyodide-kernel. The site holds the package as a wheel without
kernels. The browser loads Pyodide with NumPy, matplotlib, sentencepiece and ml_dtypes from Pyodide's server, and what
else the package needs from there or from PyPI.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ("01_ternary_weights", "02_bitlinear", "03a_one_head", "03b_storyteller")
INSTALL = {
    "cell_type": "code",
    "execution_count": None,
    "id": "install",
    "metadata": {},
    "outputs": [],
    "source": ["%pip install -q bitnet-ref matplotlib ipywidgets  # into this page; the first time takes a minute"],
}


def main(output: Path) -> None:
    """Builds the wheel, puts the installing cell in front of each notebook, and runs JupyterLite's build."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # JupyterLite looks for wheels in pypi/.
        wheel = (
            "build",
            "--wheel",
            "--outdir",
            str(folder / "pypi"),
            str(ROOT),
        )
        subprocess.run([sys.executable, "-m", *wheel], check=True, env={**os.environ, "BITNET_REF_EXTENSION": "off"})
        (folder / "files").mkdir()
        for name in NOTEBOOKS:
            notebook = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))
            notebook["cells"].insert(0, INSTALL)
            (folder / "files" / f"{name}.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
        site = ("jupyter", "lite", "build", "--lite-dir", str(folder), "--contents", str(folder / "files"))
        subprocess.run([*site, "--output-dir", str(output.resolve()), "--no-sourcemaps"], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
