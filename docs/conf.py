"""The site: `sphinx-build -W --keep-going docs build/site`. Guides, notebooks with their outputs, and the reference."""

import os
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The package of this source tree, and what is in extension/.
sys.path[:0] = [str(ROOT), str(Path(__file__).parent / "extension")]

project = "bitnet_ref"
author = "The bitnet_ref authors"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
extensions = ["myst_nb", "sphinx.ext.autodoc"]
extensions += ["site_pages", "site_docstrings", "site_diagrams", "site_formulas", "site_playground", "site_slides"]
exclude_patterns = ["extension"]

# Links from a page to a file that is not on the site lead here. Without it they are plain text.
if {"GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_SHA"} <= os.environ.keys():
    repository = "{GITHUB_SERVER_URL}/{GITHUB_REPOSITORY}".format(**os.environ)
    repository_url = f"{repository}/blob/{os.environ['GITHUB_SHA']}"
    html_theme_options = {"footer_icons": [{"name": "repository", "url": repository, "html": "Code", "class": ""}]}

nb_render_markdown_format = "gfm"  # outputs have tables
nb_execution_mode = "off"  # the notebooks are shown as they are stored
nb_mime_priority_overrides = [("*", "application/vnd.jupyter.widget-view+json", None)]  # the stored picture instead
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
about = "Ternary language models (BitNet): a readable NumPy reference, a course, and tools that judge engines."
myst_html_meta = {"description": about, "property=og:description": about, "property=og:site_name": "bitnet_ref"}

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True

highlight_language = "text"
html_theme = "furo"
html_title = f"bitnet_ref {version}"
html_favicon = "extension/favicon.svg"
html_static_path = ["extension/site.css", "two_texts_narrow.svg"]
html_css_files = ["site.css"]
html_show_sphinx = html_show_copyright = False
smartquotes = False  # quotes in the reference are of strings
html_copy_source = False
pygments_style, pygments_dark_style = "default", "monokai"
