"""Pages of the site that lie outside docs/, and the links between all of them, as they stand in the repository."""

import base64
import io
import json
import os
import re
import shutil
from html import escape
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Copied into docs/ before each build, where git ignores them: {path in the repository: path below docs/}
COPIES = {
    "notebooks": "notebooks",
    "crossval/README.md": "repository/crossval.md",
    "CONTRIBUTING.md": "repository/contributing.md",
    "CHANGELOG.md": "repository/changelog.md",
    "SECURITY.md": "repository/security.md",
}
SHOWN = {"README.md": "index.md", "notebooks/tinybitnet.py": "tinybitnet.md"}  # files inside a page of docs/
LINK = re.compile(r"\[(?P<text>[^]\n]+)]\((?P<path>[^)\s:#]+)(?P<anchor>#[^)\s]*)?\)")
# Below the title of each notebook
LESSON = (
    "*To do this lesson yourself: `bitnet-ref lab` in a clone ([install](../install.md)), "
    "or download [this notebook](path:{name}).*\n\n"
)
# A README lists its folder's pages; on the site they are also below it in the sidebar.
FOLDER_PAGES = "\n\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"


def copy_pages(app):
    """Copy COPIES. Files keep their times, so that Sphinx reads again only those that changed."""
    for source, target in COPIES.items():
        source, target = ROOT / source, Path(app.srcdir) / target
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        else:
            shutil.copy2(source, target)


def path_on_site(path):
    """The path below docs/ of a file of the repository, or None if the site does not have it.

    >>> path_on_site("docs/cases/README.md"), path_on_site("notebooks/alice.txt"), path_on_site("setup.py")
    ('cases/README.md', 'notebooks/alice.txt', None)
    """
    if path in SHOWN:
        return SHOWN[path]
    first, _, rest = path.partition("/")
    if first == "docs" and (ROOT / path).is_file():
        return rest
    if first in COPIES and (ROOT / path).is_file():
        return f"{COPIES[first]}/{rest}"
    return COPIES.get(path)


def path_in_repository(path):
    """The inverse of `path_on_site`, for a page.

    >>> path_in_repository("repository/crossval.md")
    'crossval/README.md'
    """
    for source, target in COPIES.items():
        if path == target or path.startswith(target + "/"):
            return source + path[len(target) :]
    return f"docs/{path}"


def rewrite_links(text, origin, page, repository_url):
    """The text of `origin`, a file of the repository, with links that are right on a page below docs/.

    >>> rewrite_links("[a](../setup.py), [b](../notebooks/README.md#c)", "docs/files.md", "files.md", None)
    'a, [b](notebooks/README.md#c)'
    """

    def rewrite(match):
        path = os.path.normpath(os.path.join(os.path.dirname(origin), match["path"]))
        if (target := path_on_site(path)) is not None:
            return f"[{match['text']}]({os.path.relpath(target, os.path.dirname(page))}{match['anchor'] or ''})"
        if not (ROOT / path).exists():
            return match[0]  # MyST warns of it
        if repository_url is None:
            return match["text"]
        address = repository_url.partition("/blob/")[0] if path == "." else f"{repository_url}/{path}"
        return f"[{match['text']}]({address})"

    return LINK.sub(rewrite, text)


def read_page(app, docname, source):
    path = Path(app.env.doc2path(docname, base=False)).as_posix()
    if path.endswith(".md"):
        source[0] = rewrite_links(source[0], path_in_repository(path), path, app.config.repository_url)
        if path.endswith("/README.md"):
            source[0] += FOLDER_PAGES
    elif path.endswith(".ipynb"):  # Sphinx wants to know the lexer of the cells
        notebook = json.loads(source[0])
        notebook["metadata"]["language_info"]["pygments_lexer"] = "python"
        title, _, *text = notebook["cells"][0]["source"]
        notebook["cells"][0]["source"] = [title, "\n", LESSON.format(name=os.path.basename(path)), *text]
        for cell in notebook["cells"]:
            describe_figures(cell)
            for output in cell.get("outputs", []):
                part_panels(output)
        source[0] = json.dumps(notebook)


def describe_figures(cell):
    """Put the text of a cell's figures where myst-nb looks for it; without it, it would write their file names."""
    metadata = [output.get("metadata", {}).get("image/png", {}) for output in cell.get("outputs", [])]
    if texts := [each["alt"] for each in metadata if "alt" in each]:
        cell["metadata"]["mystnb"] = {"image": {"alt": " ".join(texts)}}


def part_panels(output):
    """Make a picture for each panel of a figure, so that they stand below one another on a phone."""
    from PIL import Image  # the tests of links do not need it

    about = output.get("metadata", {}).get("image/png", {})
    if "gaps" not in about:
        return
    figure = Image.open(io.BytesIO(base64.b64decode(output["data"]["image/png"])))
    edges = [*pairwise([0, *about["gaps"], figure.width])]
    if max(right - left for left, right in edges) > 640:  # it could not be read in the width of a phone, and scrolls
        return
    pictures = []
    for left, right in edges:
        panel = io.BytesIO()
        figure.crop((left, 0, right, figure.height)).save(panel, "PNG")
        data = base64.b64encode(panel.getvalue()).decode()
        share = f"--share: {(right - left) / figure.width:.3%}"
        pictures.append(f'<img alt="" width="{right - left}" style="{share}" src="data:image/png;base64,{data}">')
    label = f'role="img" aria-label="{escape(about["alt"])}" style="max-width: {figure.width}px"'
    output["data"] = {"text/html": f'<div class="panels" {label}>{"".join(pictures)}</div>'}


def read_include(app, relative_path, docname, content):
    origin = os.path.relpath(os.path.normpath(Path(app.srcdir) / relative_path), ROOT)
    page = Path(app.env.doc2path(docname, base=False)).as_posix()
    content[0] = rewrite_links(content[0], origin, page, app.config.repository_url)


def setup(app):
    app.add_config_value("repository_url", None, "env", [str, type(None)])
    app.connect("builder-inited", copy_pages)
    app.connect("source-read", read_page)
    app.connect("include-read", read_include)
    return {"parallel_read_safe": True}
