"""The site: what it documents is all that is public, its pictures are true, and every link leads somewhere."""

import base64
import doctest
import functools
import html
import importlib
import inspect
import io
import json
import os
import re
import sys
from pathlib import Path

import pytest
from chromium import Chromium, needs_chromium
from pygments.styles import get_style_by_name
from pygments.token import Error, Whitespace
from test_imports import MODULES, PACKAGE, RANK, imported, room

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.append(str(DOCS / "extension"))

site_code, site_diagrams, site_docstrings, site_pages = map(
    importlib.import_module, ("site_code", "site_diagrams", "site_docstrings", "site_pages")
)

ROOMS = ("generation", "serving", "training", "crossval", "notebook", "errors")
PUBLIC = ["bitnet_ref", *(f"bitnet_ref.{name}" for name in ROOMS)]
DIRECTIVE = re.compile(r"^\.\. auto(module|class|function):: (\S+)\n((?:   :.*\n)*)", re.MULTILINE)


def public_objects():
    """{name: object} of everything public, once each."""
    every = {}
    for module in map(importlib.import_module, PUBLIC):
        for name in module.__all__:
            every.setdefault(id(getattr(module, name)), (f"{module.__name__}.{name}", getattr(module, name)))
    return {name: value for name, value in every.values() if not isinstance(value, str)}


def members(cls):
    """The public methods and properties that the package wrote."""
    for owner in cls.__mro__:
        if owner.__module__.startswith("bitnet_ref"):
            for name, value in vars(owner).items():
                if not name.startswith("_") and isinstance(
                    value, property | classmethod | staticmethod | type(members)
                ):
                    yield name, inspect.getattr_static(owner, name)


def test_every_public_name_has_a_docstring():
    missing, count = [], 0
    for name, value in public_objects().items():
        each = [(name, value)]
        if inspect.isclass(value):
            each += [(f"{name}.{member}", function) for member, function in members(value)]
        count += len(each)
        missing += [path for path, thing in each if not (inspect.getdoc(thing) or "").strip()]
        # a dataclass without a docstring gets its signature as one
        missing += [name] if inspect.isclass(value) and value.__doc__.startswith(f"{value.__name__}(") else []
    assert not missing
    assert count > 150


def test_the_reference_has_every_public_name_once():
    shown = []
    for kind, name, options in DIRECTIVE.findall((DOCS / "api.md").read_text()):
        if kind == "module":
            module = importlib.import_module(name)
            left_out = re.search(r":exclude-members: (.*)|$", options)[1] or ""
            assert ":members:" in options
            shown += [getattr(module, each) for each in {*module.__all__} - {*left_out.split(", ")}]
        else:
            module, _, each = name.rpartition(".")
            shown.append(getattr(importlib.import_module(module), each))
    assert len(shown) == len({id(value) for value in shown})
    missing = [name for name, value in public_objects().items() if value not in shown and not inspect.ismodule(value)]
    assert not missing


def pages():
    """{path: Markdown} of what people read here: in the repository, and on the site."""
    texts = {path: path.read_text() for path in (*ROOT.glob("*.md"), ROOT / "crossval" / "README.md")}
    texts |= {path: path.read_text() for folder in (DOCS, DOCS / "cases") for path in sorted(folder.glob("*.md"))}
    for path in (*ROOT.glob("notebooks/*.ipynb"), ROOT / "notebooks" / "README.md"):
        text = path.read_text()
        if path.suffix == ".ipynb":
            cells = json.loads(text)["cells"]
            text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        texts[path] = text
    return texts


def anchors(text):
    """GitHub's names of the headings."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)", prose, re.MULTILINE)
    }


def broken_links(path, text, texts):
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        target, _, anchor = link.partition("#")
        target = (path.parent / target).resolve() if target else path
        if not target.exists() or (anchor and anchor not in anchors(texts.get(target, ""))):
            yield f"{path.relative_to(ROOT)}: {link}"


def test_every_link_leads_somewhere():
    texts = pages()
    assert [link for path, text in texts.items() for link in broken_links(path, text, texts)] == []
    wrong = "[a](nothing.md) [b](README.md#nothing) [c](README.md#use-it) [d](docs)"
    assert [link.split(": ")[1] for link in broken_links(ROOT / "README.md", wrong, texts)] == [
        "nothing.md",
        "README.md#nothing",
    ]


FOLDERS = (
    "crossval",
    "docs",
    "notebooks",
    "scripts",
    "scripts/benchmarks",
    "scripts/training",
    "tests",
)  # whose files are called by their names alone
# also names of modules
OBJECTS = {"blocks", "engine", "matrix", "model", "profile", "settings", "step", "tokenizer", "trainer"}
OTHER_NAMES = {"bitnet_ref.trace", "eval_ppl.py", "llama.cpp"}  # a trace's format; a file, and a project
OTHER_NAMES |= {"answers.jsonl.partial", "config.yaml"}  # files of users
SUFFIXES = (".csv", ".jinja", ".json", ".proto", ".safetensors", ".toml")


def missing_names(text):
    """The names in backticks that look like a module, a name in one, or a source file of ours, and are none."""
    stems = {}
    for path in MODULES:
        name = ".".join(("bitnet_ref", *path.with_suffix("").parts)).removesuffix(".__init__")
        stems.setdefault(name.rpartition(".")[2], []).append(name)
    files = {path.name for folder in (ROOT, *map(ROOT.joinpath, FOLDERS)) for path in folder.glob("*.*")}
    files |= {path.name for folder in (PACKAGE, ROOT / "tests") for path in folder.rglob("*.*")}
    for name in re.findall(r"`((?:\w+\.)+\w+)(?:\(\))?`", text):
        first, _, rest = name.partition(".")
        if name in OTHER_NAMES or name.endswith(SUFFIXES):
            continue
        if name.endswith((".py", ".h", ".cu", ".cuh", ".pyx", ".pxi")):
            is_there = name in files
        else:
            is_there = first not in stems or first in OBJECTS or any(has(each, rest) for each in stems[first])
        if not is_there:
            yield name


def has(module, path):
    """Whether the module has this attribute, or module and attribute, as far as can be told without optional
    packages."""
    try:
        value = importlib.import_module(module)
        for name in path.split("."):
            if not hasattr(value, name):
                importlib.import_module(f"{value.__name__}.{name}")
            value = getattr(value, name)
    except ModuleNotFoundError as problem:
        return not problem.name.startswith("bitnet_ref.")
    except AttributeError:  # of a class, which has no modules
        return False
    return True


@pytest.mark.thorough
def test_every_name_in_backticks_exists():
    texts = pages() | {PACKAGE / path: (PACKAGE / path).read_text() for path in MODULES}
    del texts[ROOT / "CHANGELOG.md"]  # names of its time
    missing = [f"{path.relative_to(ROOT)}: {name}" for path, text in texts.items() for name in missing_names(text)]
    assert missing == []
    assert list(missing_names("`formats.hf_config` `formats.hf.config` `reference.weights.No()` `none.py`")) == [
        *("formats.hf_config", "reference.weights.No", "none.py")
    ]


def test_the_site_and_its_slides_have_an_icon():
    """Without one each browser asks for /favicon.ico, and gets a 404."""
    (name,) = re.findall(r'^html_favicon = "(.+)"', (DOCS / "conf.py").read_text(), re.MULTILINE)
    assert (DOCS / name).read_text().startswith("<svg ")
    slides = (DOCS / "extension" / "site_slides.py").read_text()
    assert slides.count(f'<link rel="icon" href="{Path(name).name}">') == slides.count("<title>")


def test_every_guide_is_in_the_table_of_contents():
    listed = re.findall(r"^([\w/]+)$", (DOCS / "index.md").read_text(), re.MULTILINE)
    copies = [path.removesuffix(".md") for path in site_pages.COPIES.values() if path.endswith(".md")]
    guides = [path.stem for path in DOCS.glob("*.md") if path.stem != "index"]
    expected = [*guides, *copies, "notebooks/README", "cases/README"]
    assert sorted(listed) == sorted(expected), "docs/index.md: give each guide a line in a table of contents"


@pytest.mark.parametrize("module", [site_code, site_pages, site_docstrings])
def test_examples(module):
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted > 1


def test_the_home_page_has_doors_in_place_of_the_readmes_table():
    """The README's table is for GitHub: on the site the playground is a click away."""
    home, readme = (DOCS / "index.md").read_text(), (ROOT / "README.md").read_text()
    assert all(
        readme.count(each) == 1 for each in re.findall(r'^:(?:start-after|end-before): "(.+)"$', home, re.MULTILINE)
    )
    doors = re.findall(r'class="door" href="(.+?)"', home)
    pages = [
        DOCS / path.replace(".html", ".md") for path in doors if not path.startswith(("playground/", "notebooks/"))
    ]
    assert len(doors) == 3
    assert all(page.is_file() for page in pages)
    assert site_pages.path_on_site("notebooks/tinybitnet.py") == "tinybitnet.md"


def test_links_to_files_that_are_not_on_the_site():
    text = "[`a`](../../setup.py) [b](https://x.org/a.md) [c](#d) [e](../files.md#f) ![g](h.png)"
    arguments = text, "docs/cases/x.md", "cases/x.md"
    rest = "[b](https://x.org/a.md) [c](#d) [e](../files.md#f) ![g](h.png)"
    assert site_pages.rewrite_links(*arguments, None) == f"`a` {rest}"
    assert site_pages.rewrite_links(*arguments, "https://r") == f"[`a`](https://r/setup.py) {rest}"
    assert site_pages.rewrite_links("[r](..)", "docs/x.md", "x.md", "https://r/blob/1") == "[r](https://r)"
    assert site_pages.rewrite_links("[w](wrong.md)", "docs/x.md", "x.md", None) == "[w](wrong.md)", "MyST warns of it"
    assert site_pages.rewrite_links("[u](docs/using.md)", "README.md", "first_text.md", None) == "[u](using.md)"


@pytest.mark.thorough
def test_the_picture_of_the_house_is_true():
    rooms = site_diagrams.room_order()
    assert rooms == sorted(RANK, key=RANK.get)
    for name in rooms:
        mine = [path for path in MODULES if room(path) == name]
        assert {PACKAGE / path for path in mine} == set(site_diagrams.files_of(name))
        expected = {room(path) for file in mine for _, path in imported(file)} - {name}
        assert site_diagrams.rooms_imported_by(name) == expected, name
    picture = site_diagrams.draw_house()
    assert "#dc2626" not in picture, "an import that points up is red"
    assert "crossval imports api" in picture
    assert "api imports crossval" not in picture


def test_the_picture_of_a_layer_shows_the_whole_trace():
    steps = site_diagrams.trace_steps()
    assert [name for group, values in steps for name, _ in values if not group] == [
        *("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
    ]
    assert {group for group, _ in steps if group} == set(site_diagrams.STEPS)
    assert site_diagrams.draw_layer().count(" int32</text>") == 7  # one for each BitLinear


def test_figures_of_notebooks_have_their_texts_on_the_site():
    """myst-nb writes the file's name where a cell does not say what its picture shows."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            texts = [
                output["metadata"]["image/png"]["alt"]
                for output in cell.get("outputs", [])
                if "image/png" in output.get("data", {})
            ]
            site_pages.describe_figures(cell)
            assert cell["metadata"].get("mystnb", {}).get("image", {}).get("alt", "") == " ".join(texts)


def test_panels_of_a_figure_are_pictures_that_make_up_the_whole():
    image = pytest.importorskip("PIL.Image", reason="pip install '.[docs]'")
    cells = json.loads((ROOT / "notebooks" / "03a_one_head.ipynb").read_text(encoding="utf-8"))["cells"]
    (output,) = [each for each in cells[31]["outputs"] if "image/png" in each["data"]]
    whole = image.open(io.BytesIO(base64.b64decode(output["data"]["image/png"])))
    site_pages.part_panels(output)
    html = output["data"]["text/html"]
    panels = [image.open(io.BytesIO(base64.b64decode(data))) for data in re.findall(r"base64,([^\"]+)", html)]
    assert len(panels) == 2
    joined = image.new("RGBA", whole.size)
    for panel, left in zip(panels, (0, panels[0].width), strict=True):
        joined.paste(panel.convert("RGBA"), (left, 0))
    assert joined.tobytes() == whole.convert("RGBA").tobytes()
    assert "scores, masked" in html


def test_figures_fit_a_phone_but_for_two():
    """A search's tree and a profile's icicles scroll to the side."""
    pytest.importorskip("PIL", reason="pip install '.[docs]'")
    wide = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            for output in cell.get("outputs", []):
                if "image/png" in output.get("data", {}):
                    site_pages.part_panels(output)
                    wide += [] if "text/html" in output["data"] else [path.stem]
    assert wide == ["07a_one_text", "07b_many_texts"]


def test_code_can_be_read_on_its_background():
    """The WCAG's contrast of 4.5, for all but spaces and errors, on the site and the slides."""
    sources = [(DOCS / name).read_text() for name in ("conf.py", "extension/site_slides.py")]
    names = [re.search(r'"(\w+)", "monokai"', source)[1] for source in sources]

    def light(colour):
        parts = [int(colour[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for style in map(get_style_by_name, [*names, "monokai"]):
        for kind, look in style:
            if look["color"] and kind not in (Whitespace, Error):
                low, high = sorted(light(colour) for colour in (look["color"], style.background_color.lstrip("#")))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (style.__name__, kind)


@pytest.mark.skipif("BITNET_REF_SITE" not in os.environ, reason="BITNET_REF_SITE names no built site")
@needs_chromium
def test_no_page_of_the_built_site_scrolls_sideways():
    site, seen = Path(os.environ["BITNET_REF_SITE"]), 0
    with Chromium() as browser:
        for path in sorted(site.rglob("*.html")):
            if not {"slides", "playground", "_modules"} & set(path.relative_to(site).parts):
                page, seen = browser.page(path.as_uri()), seen + 1
                for width in (390, 1024, 1200, 1440):
                    page.look(width)
                    assert page.run("document.documentElement.scrollWidth") <= width, (path.name, width)
    assert seen > 50


@pytest.mark.thorough
@needs_chromium
def test_slides_are_slides_and_need_no_network(tmp_path):
    """Opened as files, without a server. A figure has a heading, and fills what is free; next to no slide scrolls."""
    for package in ("latex2mathml", "mdit_py_plugins"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[docs]'")
    site_slides = importlib.import_module("site_slides")
    try:
        site_slides.write_slides(tmp_path / "slides", '<a href="../teaching.html">Back</a>')
    except OSError as missing:
        pytest.skip(str(missing))
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    script = """(async () => {
        const seen = [];
        for (const slide of Reveal.getSlides()) {
            const { h, v } = Reveal.getIndices(slide);
            Reveal.slide(h, v ?? 0);
            const pictures = [...slide.querySelectorAll("img")];
            await Promise.all(pictures.map((each) => each.decode()));
            const fill = (each) => {
                const { naturalWidth: width, naturalHeight: height } = each;
                const scale = Math.min(each.clientWidth / width, each.clientHeight / height);
                return Math.max((scale * width) / slide.clientWidth, (scale * height) / each.clientHeight);
            };
            const figure = pictures.map((each) => [each.alt, each.clientHeight, fill(each), slide.children.length]);
            const high = slide.scrollHeight > slide.clientHeight + 6, wide = slide.scrollWidth > slide.clientWidth + 2;
            seen.push({ figure, high, wide });
        }
        return seen;
    })()"""
    with Chromium() as browser:
        index = browser.page((tmp_path / "slides" / "index.html").as_uri())
        assert index.run("[...document.links].map((link) => link.getAttribute('href'))") == [
            "../teaching.html",
            *(f"{path.stem}.html" for path in notebooks),
        ]
        for path in notebooks[:4]:
            page = browser.page((tmp_path / "slides" / f"{path.stem}.html").as_uri(), width=1280, height=720)
            page.until("globalThis.Reveal?.isReady()")
            seen = page.run(script)
            assert len(seen) > 20
            assert sum(slide["high"] for slide in seen) <= 1, path.stem
            assert not any(slide["wide"] for slide in seen)
            figures = [figure for slide in seen for figure in slide["figure"]]
            pictures = path.read_text(encoding="utf-8").count('"image/png": "')
            assert len(figures) == pictures > 1
            for alt, height, fill, parts in figures:
                assert len(alt) > 20, path.stem
                assert fill > 0.95, (path.stem, alt)
                assert 300 < height < 720, (path.stem, alt)
                assert 2 <= parts <= 4, (path.stem, alt)
            page.run("Reveal.slide(0, 0)")
            page.run("""for (let i = 1; i < Reveal.getTotalSlides(); i++)
                document.dispatchEvent(new KeyboardEvent("keydown", { keyCode: 39 }))""")
            assert page.run("Reveal.getSlidePastCount() + 1 === Reveal.getTotalSlides()"), "a page that arrows skip"
            assert all(url.startswith(("file://", "data:")) for url in page.requested)
            assert page.run("document.querySelector('.back').getAttribute('href')") == "index.html"
            assert page.problems == []
        phone = browser.page(page.run("location.href"), width=390, height=844)
        phone.until("globalThis.Reveal?.isReady()")
        assert phone.run("27 * Reveal.getScale()") > 15, "pixels of its letters"
        assert not any(slide["wide"] and not slide["figure"] for slide in phone.run(script))


@functools.cache
def html_of_slides():
    """[(notebook, HTML of one slide without its pictures)]"""
    for package in ("latex2mathml", "mdit_py_plugins"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[docs]'")
    site_slides = importlib.import_module("site_slides")
    slides = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        page = site_slides.page_of(json.loads(path.read_text(encoding="utf-8")))[1]
        page = re.sub(r"base64,[^\"]*", "", page[page.index("<section") :])
        slides += [(path.stem, slide) for slide in re.split("<section[^>]*>", page) if slide]
    return slides


@pytest.mark.thorough
def test_no_slide_has_a_question_and_its_answer():
    asking = 0
    for name, slide in html_of_slides():
        slide = slide.replace('<pre class="given">', "<p>")
        questions = [*re.finditer(r"\?(</strong>)?</p>|<strong>([^<]*[Gg]uess|On paper|By hand first|Predict)", slide)]
        if questions:
            assert not re.search("<img|<pre", slide[questions[-1].end() :]), (name, slide)
            asking += 1
    assert asking > 100


def test_slides_have_headings_and_no_placeholders():
    """Each exercise stands with its minutes, and without the code and the check that a student would run."""
    for name, slide in html_of_slides():
        assert re.match(r'<h\d( class="again")?>([A-Z0-9]|<code>)', slide), (name, slide)
        assert not re.search(r"= setup\(\)|# TODO|&quot;(not written|no judge) yet", slide), (name, slide)
        for output in re.findall(r'<pre class="output">(.*?)</pre>', slide, flags=re.DOTALL):
            assert not re.search(r"^(.*: )?not? \w+ yet|exercises are right", output, flags=re.MULTILINE), name
    tasks = sum(slide.count('class="turn">About') for _, slide in html_of_slides())
    assert tasks == len(importlib.import_module("bitnet_ref.crossval.exercises.teacher").EXERCISES)


def test_links_of_slides_lead_to_slides():
    pages = {"index", *(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))}
    for name, slide in html_of_slides():
        for link in re.findall(r'href="([^"]+)"', slide):
            assert link.startswith("https://") or link.removesuffix(".html") in pages, (name, link)


@pytest.mark.thorough
def test_slides_cut_no_sentence():
    site_slides = pytest.importorskip("site_slides", reason="pip install '.[docs]'")
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        for part in site_slides.parts_of(json.loads(path.read_text(encoding="utf-8"))):
            assert not re.match(r"\$\$|[a-z]+[ ,]", part.text), (path.stem, part.text)


def test_slides_define_what_they_speak_of_and_hide_what_did_not_run():
    slides = html_of_slides()
    cases = "".join(re.sub("<[^>]*>", "", slide) for name, slide in slides if name == "11_case_files")
    for given in ("12 tokens: Once upon", 'name = "blocks', "q_proj = model", "seen = ..."):
        assert given in html.unescape(cases), given
    assert cases.index("What happened in case 2") < cases.index("confirmed: I2_S")
    for name, slide in slides:
        assert not re.search(r"RECORDED =|is not installed|<strong>Live|[a-z]:</p>\s*<p>[A-Z]", slide), (name, slide)


def test_tables_that_notebooks_print_are_tables_on_the_site():
    """myst-nb reads Markdown of outputs as CommonMark, which has no tables, unless it is told otherwise."""
    outputs = [path for path in (ROOT / "notebooks").glob("*.ipynb") if "|---|" in path.read_text(encoding="utf-8")]
    assert outputs
    assert 'nb_render_markdown_format = "gfm"' in (DOCS / "conf.py").read_text(encoding="utf-8")
