"""The page of the site that runs storyteller in the browser: its files, its tokenizer, its numbers, its mistakes."""

import contextlib
import functools
import gzip
import http.server
import importlib
import json
import random
import re
import sys
import threading
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import tokenizers
from chromium import CHROMIUM, Chromium, check_readable
from cli_runs import invoke
from helpers import DATA, first_where, model
from test_site import DOCS

from bitnet_ref import SamplingParams, load
from bitnet_ref.crossval.explain.hypotheses import HYPOTHESES
from bitnet_ref.crossval.explain.variants import Setting
from bitnet_ref.formats.gguf.blocks import BY_NAME, dequantize
from bitnet_ref.formats.gguf.file import open_gguf
from bitnet_ref.formats.gguf.i2_s import i2_s_scale, pack_i2_s, unpack_i2_s
from bitnet_ref.formats.open import ASSETS
from bitnet_ref.generation.sampling import distribution
from bitnet_ref.tokenizers import load_tokenizer_files
from bitnet_ref.tokenizers.regex_cost import GPT2, LLAMA3, QWEN2

sys.path.append(str(DOCS / "extension"))
site_playground = importlib.import_module("site_playground")
BUGS, INVISIBLE = (getattr(importlib.import_module("playground_bugs"), name) for name in ("BUGS", "INVISIBLE"))
EXPECTED = json.loads((DATA / "storyteller" / "expected.json").read_text())["cases"]
PROMPT, TOKENS = "Once upon a time", 33
MAX_BYTES = 20_000_000
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the page and why it has no runtime, or an empty string."""
    folder = tmp_path_factory.mktemp("site") / "playground"
    return folder, site_playground.write_playground(folder)


@contextlib.contextmanager
def serve(folder):
    """The address of a server of this folder."""
    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


@pytest.fixture(scope="module")
def address(site):
    with serve(site[0].parent) as address:
        yield f"{address}playground/"


@pytest.fixture(scope="module")
def browser():
    with Chromium() as browser:
        yield browser


@contextlib.contextmanager
def open_page(browser, address, **look):
    """A page. At the end it must have loaded nothing from another server, and have no errors."""
    page = browser.page(f"{address}index.html", **look)
    yield page
    page.run("1")  # takes in the last events
    assert all(url.startswith((address, "data:image/svg", "blob:")) for url in page.requested), page.requested
    assert page.problems == []


@pytest.fixture(scope="module")
def page(browser, address, site):
    """The page with the model loaded."""
    if site[1]:
        pytest.skip(f"no onnxruntime-web: {site[1]}")
    with open_page(browser, address) as page:
        until_idle(page)
        yield page


def until_idle(page):
    page.until("playground.model !== null && !playground.busy && playground.reading !== null", 60)
    assert page.text("#banner") == ""


def write(page, prompt=PROMPT, **sliders):
    for name, value in {
        "prompt": prompt,
        "temperature": 0,
        "top_k": 0,
        "top_p": 1,
        "min_p": 0,
        "max_tokens": TOKENS,
        **sliders,
    }.items():
        page.run(f"$({json.dumps(name)}).value = {json.dumps(str(value))}")
    page.run("$('sampling').oninput()")
    page.click("#write")
    until_idle(page)


# -- the files ---------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_what_the_page_consists_of(site):
    folder, missing = site
    files = {path.name: path for path in folder.iterdir()}
    total = sum(path.stat().st_size for path in files.values())
    unpacked = sum(len(gzip.decompress(path.read_bytes())) for name, path in files.items() if name.endswith(".gz"))
    print(f"playground: {total} bytes, {unpacked} unpacked, {missing or 'with the runtime'}")
    assert total < MAX_BYTES
    assert {f"{name}.onnx.gz" for name in ("right", *BUGS)} < set(files)
    for path in (DOCS / "playground").iterdir():  # our own text: it can be read, and loads nothing from elsewhere
        text = path.read_text()
        assert max(map(len, text.splitlines())) < 420, path.name
        assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org"}, path.name
        assert "innerHTML" not in text
    assert files["index.html"].read_text().count('<a href="../playground.html') == 2
    facts = json.loads(files["facts.json"].read_text())
    assert (facts["missing"], facts["runtime"]) == ((missing, None) if missing else ("", site_playground.RUNTIME))
    assert all(bug["title"] and bug["text"].endswith(".") for bug in facts["bugs"])


@pytest.mark.thorough
def test_without_npm_the_site_has_the_page_and_it_says_so(tmp_path, monkeypatch, request):
    monkeypatch.setattr(site_playground, "RUNTIME", "onnxruntime-web@0.0.0")
    monkeypatch.setattr(site_playground.shutil, "which", lambda name: None)
    monkeypatch.setattr(site_playground, "BUGS", {})
    assert site_playground.write_playground(tmp_path / "playground", has_guide=False) == "npm is not installed"
    assert "playground.html" not in (tmp_path / "playground" / "index.html").read_text()
    if CHROMIUM is not None:
        browser = request.getfixturevalue("browser")
        with serve(tmp_path) as address, open_page(browser, f"{address}playground/") as page:
            page.until("$('banner').className === 'problem'")
            assert "without onnxruntime-web (npm is not installed)" in page.text("#banner")
            assert "are −1" in page.text("#weights-facts")
            assert page.text("#tokens").split() == ["<s>", *PROMPT.split()]
    monkeypatch.setenv("BITNET_REF_PLAYGROUND", "required")
    with pytest.raises(OSError, match="npm is not installed"):
        site_playground.write_playground(tmp_path / "playground")


@pytest.mark.thorough
@needs_chromium
def test_opened_as_a_file_the_page_says_that_it_needs_a_server(browser, site):
    page = browser.page(f"{site[0].as_uri()}/index.html")
    assert "python -m http.server" in page.text("#banner")
    assert page.run("$('banner').className") == "problem"


@functools.cache
def open_graph(folder, name):
    for file in (folder / f"{name}.onnx", folder / "storyteller.onnx.data"):
        file.write_bytes(gzip.decompress(Path(f"{file}.gz").read_bytes()))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(str(folder / f"{name}.onnx"), options, providers=["CPUExecutionProvider"])


def run_graph(folder, name, ids):
    """ids (N,) -> logits (N, V)"""
    session = open_graph(folder, name)
    feeds = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
    feeds["position_ids"] = np.arange(len(ids))[None]
    empty = [each.name for each in session.get_inputs() if each.name.startswith("past")]
    feeds |= {each: np.empty((1, 2, 0, 64), np.float32) for each in empty}
    return session.run(["logits"], feeds)[0][0]


@pytest.fixture(scope="module")
def graphs(site, tmp_path_factory):
    folder = tmp_path_factory.mktemp("graphs")
    for path in site[0].glob("*.gz"):
        (folder / path.name).hardlink_to(path)
    return folder


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", BUGS)
def test_each_button_makes_the_mistake_that_crossval_names(name, graphs):
    m, ids = model("storyteller"), EXPECTED[0]["prompt_ids"][:3] + EXPECTED[0]["token_ids"][:3]
    hypothesis = next(each for each in HYPOTHESES if each.name == name)
    wrong = hypothesis.change(Setting.of(m, ids)).run()["lm_head.hook_out"]
    errors = np.abs(run_graph(graphs, name, ids) - wrong).max(axis=1)  # of each token
    assert np.median(errors) < 1e-4, "but for tokens of which an int8 rounds the other way"
    assert np.abs(wrong - m.logits(ids)).max() > 0.1


def read_the_guides_table():
    """[(mistake, nats per token, tokens until the text differs or "the same")]"""
    rows = r"^\| (.+?) \| ([\d.]+) \| (\d+|the same) \|$"
    return re.findall(rows, (DOCS / "playground.md").read_text(), re.MULTILINE)


@pytest.mark.thorough
def test_the_divergences_that_the_guide_tells(graphs):
    told = {title: float(nats) for title, nats, _ in read_the_guides_table()}
    ids = model("storyteller").tokenizer.encode(PROMPT)
    ids += model("storyteller").generate(PROMPT, max_tokens=32).token_ids
    right = log_softmax(run_graph(graphs, "right", ids))
    computed = {}
    for name, bug in BUGS.items():
        wrong = log_softmax(run_graph(graphs, name, ids))
        computed[bug.__doc__.partition("\n")[0]] = nats = (np.exp(right) * (right - wrong)).sum(-1).mean()
        assert (nats < 0.01) == (name in INVISIBLE)
    assert set(told) == set(computed)
    for title, nats in told.items():
        assert computed[title] == pytest.approx(nats, rel=0.2), title


def log_softmax(logits):
    wide = logits - logits.max(-1, keepdims=True).astype(np.float64)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


# -- in a browser ------------------------------------------------------------------------------------------------------


def texts():
    """Texts of many kinds: English, all of Unicode's planes, spaces, line ends, special tokens, halves of words."""
    chosen = random.Random(1)
    words = " ".join(case["text"] for case in EXPECTED).split(" ")
    alphabet = [
        chr(n) for n in (*range(0x20, 0x250), *range(0x370, 0x400), 0x4E2D, 0x3042, 0x1F407, 0x10FFFF, 0xFEFF, 0x2581)
    ]
    fixed = [
        "",
        " ",
        "  ",
        "\n",
        " \n\n ",
        "<s>",
        "a</s>b",
        "</s> b<unk>",
        "x<unk>y</s></s>",
        "\0",
        "\r\n\t",
        "e\u0301 é ﬁ ①",
    ]
    yield from fixed
    for _ in range(1500):
        yield "".join(chosen.choices(alphabet, k=chosen.randrange(1, 24)))
        yield " ".join(chosen.choices(words, k=chosen.randrange(1, 12)))[chosen.randrange(3) :]
        yield "".join(
            chosen.choices(["\n", " ", "  ", "the", "</s>", "<s>", "<un", "é", "中", "\u2581", "\U0001f407"], k=8)
        )


@pytest.mark.thorough
@needs_chromium
def test_the_tokenizer_is_the_packages(browser, address):
    tokenizer = model("storyteller").tokenizer
    cases = list(texts())
    script = """(async () => {
        const { Tokenizer } = await import("./tokenizer.js");
        const { vocabulary, bos } = await (await fetch("facts.json")).json();
        const tokenizer = new Tokenizer(vocabulary, bos);
        return %s.map((text) => { const ids = tokenizer.encode(text); return [ids, tokenizer.decode(ids)]; });
    })()"""
    page = browser.page(f"{address}facts.json")
    for start in range(0, len(cases), 500):
        part = cases[start : start + 500]
        for text, (ids, decoded) in zip(part, page.run(script % json.dumps(part)), strict=True):
            assert ids == tokenizer.encode(text), repr(text)
            assert decoded == tokenizer.decode(ids), repr(text)
    assert len(cases) > 4500


@pytest.mark.thorough
@needs_chromium
def test_the_browsers_tokens_and_integers_equal_numpys(page):
    m = model("storyteller")
    write(page)
    ids = [*m.tokenizer.encode(PROMPT), *m.generate(PROMPT, max_tokens=TOKENS).token_ids]
    assert page.run("playground.reading.ids") == ids
    logits, seen = m.run_with_cache(ids, names_filter=["*hook_x_int8", "*hook_x_scale", "*hook_pattern"])
    last = page.run("Array.from(playground.reading.logits.at(-1))")
    np.testing.assert_allclose(last, logits[-1], rtol=0, atol=5e-5)
    inner = page.run("Object.keys(playground.reading.inner)")
    assert len(inner) == 6 * 9
    for name in inner:
        script = "playground.reading.inner[%s].map((row) => Array.from(row, (each) => each.length ? [...each] : each))"
        rows = page.run(script % json.dumps(name))
        if name.endswith("hook_x_int8"):
            np.testing.assert_array_equal(np.array(rows) - 128, seen[name])
        elif name.endswith("hook_x_scale"):
            np.testing.assert_allclose(rows, seen[name], rtol=1e-5)
        for i, row in enumerate(rows if name.endswith("hook_pattern") else ()):
            np.testing.assert_allclose(row, seen[name][:, i, : len(row[0])], rtol=0, atol=1e-5)
    print(page.text("#facts"))


@needs_chromium
def test_bad_words_ids_are_kept_out(page):
    generation = json.loads((ASSETS / "storyteller/generation_config.json").read_text())
    assert page.run("playground.facts.banned") == generation["bad_words_ids"]
    script = """(async () => {
        const { ban } = await import("./model.js");
        return %s.map((ids) => Array.from(ban([0, 1, 2, 3], ids, [[1, 2], [3], [2, 1, 0]])).map(Number.isFinite));
    })()"""
    assert page.run(script % json.dumps([[0, 1], [2, 1], [0, 2], [1]])) == [
        [True, True, False, False],
        [False, True, False, False],
        [True, True, True, False],
        [True, True, False, False],
    ]


@needs_chromium
def test_the_sliders_give_the_packages_distributions(page):
    row = np.asarray(model("storyteller").logits(model("storyteller").tokenizer.encode(PROMPT))[-1])
    for settings in (
        {"temperature": 0.8, "top_k": 40},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 0.5, "top_k": 7, "top_p": 0.6},
        {"temperature": 2.0},
        {"temperature": 0.8, "min_p": 0.1},
        {"temperature": 1.5, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
    ):
        ids, probabilities = distribution(row, SamplingParams(**settings))
        script = f"import('./model.js').then((m) => m.distribution({json.dumps(row.tolist())}, {json.dumps(settings)}))"
        ours = page.run(script)
        order = np.argsort(-probabilities, kind="stable")
        assert [each["id"] for each in ours] == ids[order].tolist()
        np.testing.assert_allclose([each["p"] for each in ours], probabilities[order], rtol=1e-9)
    write(page, temperature=0.8, top_k=5, max_tokens=4)
    assert "draws one of 5 tokens by chance" in page.text("#next-facts")
    first = page.run("playground.reading.ids")
    write(page, temperature=0.8, top_k=5, max_tokens=4)
    assert page.run("playground.reading.ids") == first  # the same seed
    page.click("#next button", 1)
    until_idle(page)
    path = page.run("playground.reading.ids")
    assert path[: len(first)] == first
    assert page.run("playground.given") == len(first) + 1
    assert page.run("$('prompt').value") == model("storyteller").tokenizer.decode(path[: len(first) + 1])
    page.click("#write")  # goes on from the token that was chosen
    until_idle(page)
    assert page.run("playground.reading.ids") == path
    seed = int(page.run("$('seed').value"))
    page.click("#another")
    until_idle(page)
    assert int(page.run("$('seed').value")) == seed + 1
    another = page.run("playground.reading.ids")
    assert another[: len(first) + 1] == path[: len(first) + 1] != another
    write(page, page.run("$('prompt').value"), temperature=0.8, top_k=5, max_tokens=4, seed=seed)
    assert page.run("playground.reading.ids") == path


@needs_chromium
def test_a_draw_is_of_the_distribution_and_the_same_for_one_that_is_nearly_the_same(page):
    script = """import('./model.js').then(({ choose, uniforms }) => {
        const draws = uniforms(5), all = [];
        for (let i = 0; i < 20000; i++) {
            const u = draws.next().value;
            all.push(%s.map((ps) => choose(ps.map((p, id) => ({ id, p })).sort((a, b) => b.p - a.p), u)));
        }
        return all;
    })"""
    right, near = [0.05, 0.34, 0.2, 0.41], [0.05, 0.38, 0.19, 0.38]
    ids = np.array(page.run(script % json.dumps([right, near])))
    for column, probabilities in zip(ids.T, (right, near), strict=True):
        np.testing.assert_allclose(np.bincount(column) / len(ids), probabilities, atol=0.015)
    distance = np.abs(np.subtract(right, near)).sum() / 2  # no two draws can differ less often
    assert distance * 0.9 < (ids[:, 0] != ids[:, 1]).mean() < 2 * distance


@pytest.mark.thorough
@needs_chromium
def test_the_page_says_why_two_texts_are_the_same_or_differ_by_a_choice(page):
    def break_it(name):
        page.click("#bugs button", list(BUGS).index(name))
        page.until("playground.broken !== null && !playground.busy", 60)
        return page.text("#right-text"), page.text("#broken-text"), page.text("#texts-facts")

    sampled = {"temperature": 0.8, "min_p": 0.1, "max_tokens": 8}
    write(page, **sampled, seed=2)
    right, broken, facts = break_it("bf16_accumulators")
    assert right == broken
    assert facts == "This mistake is too small to see: the texts are the same."
    page.click("#look-broken")
    assert "Choose one yourself" not in page.text("#next-facts")
    assert page.run("[$('next').children.length, $('next').querySelectorAll('button').length]") == [10, 0]
    page.click("#mend")
    assert page.run("$('next').querySelectorAll('button').length") == 10
    assert break_it("rope_missing")[2] == ""

    def texts_are_the_same(seed):  # in a short beginning there is little to see
        write(page, "The", **sampled, seed=seed)
        right, broken, _ = break_it("no_causal_mask")
        return right == broken

    first_where(range(20), texts_are_the_same, "a seed whose text does not show the mistake")
    facts = page.text("#texts-facts")
    assert "The chart reads the whole text as a prompt" in facts

    def texts_differ(seed):
        write(page, temperature=0.8, max_tokens=24, seed=seed)
        right, broken, _ = break_it("truncated")
        return right != broken

    first_where(range(20), texts_differ, "a seed by which a choice falls on the other side")
    facts = page.text("#texts-facts")
    assert "One choice fell on the other side" in facts
    ids, given, other = page.run("[playground.reading.ids, playground.given, playground.broken.ids]")
    at = given + next(i for i, (a, b) in enumerate(zip(ids[given:], other, strict=False)) if a != b)
    logits = page.run(f"[playground.reading, playground.broken.reading].map((each) => [...each.logits[{at - 1}]])")
    first = ids[at]
    for row in logits:
        assert f" of {100 * np.exp(log_softmax(np.array(row))[first]):#.3g}% by " in facts
    page.run("$('temperature').value = 0; $('sampling').oninput()")  # the right text is then written anew, as the other
    right, broken, _ = break_it("bf16_accumulators")
    assert right == broken == model("storyteller").tokenizer.decode(page.run("playground.reading.ids"))
    assert page.run("import('./main.js').then((m) => m.shorten('a\\n\\nb\\n\\n\\n\\nc'))") == "a\n\nb\n⏎ × 4\nc"


@pytest.mark.thorough
@needs_chromium
def test_a_broken_model_beside_the_right_one(page, graphs):
    m = model("storyteller")
    page.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1)
    write(page, max_tokens=12)
    ids = page.run("playground.reading.ids")
    assert ids[-12:] == list(m.generate(PROMPT, max_tokens=12).token_ids)
    page.click("#bugs button", list(BUGS).index("rope_missing"))
    page.until("playground.broken !== null && !playground.busy", 60)
    right, wrong = (log_softmax(run_graph(graphs, name, ids)) for name in ("right", "rope_missing"))
    nats = (np.exp(right) * (right - wrong)).sum(-1)
    shown = np.array(page.run("playground.broken.nats"))
    np.testing.assert_allclose(shown, nats, rtol=1e-3, atol=1e-6)
    assert f"{shown.mean():.4f} nats" in page.text("#kl-facts")
    assert page.text("#right-text") != page.text("#broken-text")
    text = list(ids[:-12])
    for _ in range(12):
        text.append(int(run_graph(graphs, "rope_missing", text)[-1].argmax()))
    assert page.run("playground.broken.ids") == text[-12:]
    before = page.text("#next-facts"), page.text("#int8-facts")
    page.click("#look-broken")
    assert "the broken model" in page.text("#next-facts")
    page.click("#mend")
    assert (page.text("#next-facts"), page.text("#int8-facts")) == before
    assert page.run("$('broken').hidden")
    page.call("Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1)


@pytest.mark.thorough
@needs_chromium
def test_the_page_writes_the_texts_that_the_guide_tells(page):
    write(page, max_tokens=32)
    told, seen = {title: tokens for title, _, tokens in read_the_guides_table()}, {}
    for i, bug in enumerate(BUGS.values()):
        page.click("#bugs button", i)
        page.until("playground.broken !== null && !playground.busy", 60)
        right, wrong = page.run("[playground.reading.ids.slice(playground.given), playground.broken.ids]")
        pairs = zip(right, [*wrong, *[None] * 32], strict=False)
        first = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), "the same")
        seen[bug.__doc__.partition("\n")[0]] = str(first)
    assert seen == told
    page.click("#mend")


@pytest.mark.thorough
@needs_chromium
def test_keys_and_names_on_a_phone_and_a_desk(page):
    write(page, max_tokens=8)
    page.click("#bugs button")
    page.until("playground.broken !== null && !playground.busy", 60)
    page.run("document.querySelector('.token[tabindex=\"0\"]').focus()")
    page.press("Home")
    page.press("ArrowRight")
    assert page.run("[playground.at, document.activeElement.textContent]") == [1, " Once"]
    for plot, key, detail, text in (
        ("weights", "ArrowRight", "weights-detail", "Output 0, input 1"),
        ("int8", "ArrowRight", "int8-detail", "Number 1 is"),
        ("attention", "Home", "attention-detail", "(token 1) reads"),
        ("kl", "ArrowRight", "kl-detail", "After “␣upon”"),
    ):
        page.run(f"$('{plot}').focus()")
        page.press(key)
        assert text in page.text(f"#{detail}"), plot
        drawn = (
            f"new Set($('{plot}').getContext('2d').getImageData(0, 0, $('{plot}').width, $('{plot}').height).data).size"
        )
        assert page.run(drawn) > 5, plot
    page.run("$('attention').focus()")
    for key in ("Escape", *["ArrowUp"] * 2, *["ArrowRight"] * 4):
        page.press(key)
    assert re.search(r"\(token 0\) cannot read .*: it comes later\.$", page.text("#attention-detail"))
    for look in (
        {"width": 1200},
        {"width": 1200, "dark": True},
        {"width": 360, "height": 740},
        {"width": 360, "height": 740, "dark": True},
    ):
        page.look(**look)
        page.run("new Promise((resolve) => setTimeout(resolve, 100))")
        check_readable(page, str(look))
    # text that was typed a moment ago is read before anything else; tokens that are not read yet cannot be chosen
    page.run("$('prompt').value = 'The rabbit ran <b>'.repeat(6); $('prompt').oninput()")
    page.run("document.querySelector('.token').focus()")
    page.press("End")
    page.run("$('one').click()")
    until_idle(page)
    tokenizer = model("storyteller").tokenizer
    ids = tokenizer.encode("The rabbit ran <b>" * 6)
    assert page.run("playground.reading.ids.slice(0, -1)") == ids
    assert page.run("[playground.given, document.querySelector('#tokens b')]") == [len(ids), None]
    page.run("$('prompt').value = 'word '.repeat(300)")
    page.click("#write")
    page.until("!playground.busy && $('banner').className === 'problem'")
    assert "the model reads 256" in page.text("#banner")
    page.look(1200)


@pytest.mark.thorough
@needs_chromium
def test_the_first_text_plays_by_itself_and_an_empty_one_is_refused(browser, address, page):
    timers = "let wait = setTimeout; window.timers = []; window.setTimeout = (f, ms) => (timers.push(ms), wait(f, ms))"
    with open_page(browser, address, first=timers) as first:
        first.until("playground.playsItself || (playground.reading !== null && !playground.busy)", 60)
        assert 300 not in first.run("timers"), "what is read after a rest of the keys would stop the text"
        assert first.text("#banner") == "", "the page says that it loads while it writes"
        until_idle(first)
        settings = first.run("['temperature', 'top_p', 'min_p', 'top_k'].map((name) => Number($(name).value))")
        assert settings == [0.7, 0.95, 0, 0], "as bitnet-ref generate"
        assert len(first.run("playground.reading.ids.slice(playground.given)")) == 32
        assert first.text("#facts").startswith("32 new tokens")
        for text in ("", "  \n"):
            first.run(f"$('prompt').value = {json.dumps(text)}; $('prompt').oninput()")
            first.click("#write")
            first.until("!playground.busy && $('banner').className === 'problem'")
            assert "The field is empty" in first.text("#banner")
            assert [first.text(f"#{each}") for each in ("tokens", "facts", "next-facts", "next")] == [""] * 4
        first.click("#bugs button", 3)
        first.until("!playground.busy && $('break-facts').className.includes('problem')")
        assert first.text("#banner") == ""  # it is told in one place
        assert first.run("$('break-facts').previousSibling === document.querySelectorAll('#bugs button')[3]")
        first.run("$('prompt').value = '中'; $('prompt').oninput()")
        first.until("!playground.busy && playground.given !== Infinity")
        assert "<0xE4> is a byte of a character" in first.text("#facts")
        assert first.text("#break-facts") == ""
        for seed in ("", "-5", "1.5", str(2**32)):
            first.run(f"$('seed').value = '{seed}'; $('sampling').oninput()")
            first.click("#write")
            first.until("!playground.busy && $('banner').className === 'problem'")
            assert (
                first.text("#banner")
                == first.text("#seed-problem")
                == "The seed must be a whole number from 0 to 4294967295."
            )
        write(first, max_tokens=2, seed=2**32 - 1)
        assert first.text("#banner") == first.text("#seed-problem") == ""
        assert "the model will always choose the first of these" in first.text("#next-facts")


@needs_chromium
def test_the_tour_lights_up_what_it_tells_and_tells_the_models_numbers(page):
    m, ids = model("storyteller"), model("storyteller").tokenizer.encode(PROMPT)
    write(page, max_tokens=1)
    page.run("document.querySelectorAll('.token')[4].click()")  # the last that was given
    names = ["blocks.0.attn.q_proj.hook_x_int8", "blocks.0.attn.hook_pattern", "hook_embed"]
    _, seen = m.run_with_cache(ids, names_filter=names)
    weights = m.weights.layers[0].q_proj.ternary()[0]
    pattern = min(seen["blocks.0.attn.hook_pattern"][:, -1], key=max)  # of the head that spreads the most
    embedded = seen["hook_embed"][-1]
    zeros = int((seen["blocks.0.attn.q_proj.hook_x_int8"][-1] == 0).sum())
    expected = {
        1: f"up to ±{np.abs(embedded).max():.3g}",
        3: f" {zeros} of its 256 numbers became 0",
        4: f"adds {(weights > 0).sum()} of the 256 numbers, subtracts {(weights < 0).sum()}",
        5: f"by 4 radians, the last by {4 * 10000 ** (-62 / 64):.2g}",
        2: "multiplied by a learned weight",
        6: f"most: {pattern.max():.2f}",
        8: m.tokenizer.decode(m.generate(ids, max_tokens=1).token_ids).strip(),
    }
    page.run(
        "document.querySelector('#layer [data-step=\"1\"] rect').dispatchEvent(new Event('click', {bubbles: true}))"
    )
    for step in range(1, 9):
        assert page.text("#tour-step").startswith(f"{step} of 8")
        assert expected.get(step, "") in page.text("#tour-text") + page.text("#tour-detail")
        assert page.run("[...$('layer').querySelectorAll('.lit')].map((part) => part.dataset.step)") == [str(step)]
        assert page.run("!$('tour-plot').hidden") == (step != 6)
        assert page.run("$('tour-shares').children.length") == (len(ids) if step == 6 else 0)
        assert page.run("[$('tour-back').disabled, $('tour-next').disabled]") == [step == 1, step == 8]
        page.run("$('tour-next').click()")
    page.run("document.querySelectorAll('.token')[2].click()")
    page.run(
        "document.querySelector('#layer [data-step=\"6\"] rect').dispatchEvent(new Event('click', {bubbles: true}))"
    )
    assert page.run("$('tour-shares').children.length") == 3, "a token of the beginning reads those up to itself"


@pytest.mark.thorough
@needs_chromium
@pytest.mark.parametrize(("width", "height"), [(390, 664), (360, 740), (844, 390), (1200, 900)])
def test_each_step_of_the_tour_is_on_the_screen_and_next_stays_in_its_place(page, width, height):
    page.look(width, height)
    page.run("$('layer').querySelector('[data-step=\"1\"] rect').dispatchEvent(new Event('click', {bubbles: true}))")
    page.run("scrollBy(0, $('tour-next').getBoundingClientRect().bottom - innerHeight)")  # at the lower edge
    places = set()
    for step in range(2, 9):
        page.run("$('tour-next').click()")
        box = "(part) => [part.getBoundingClientRect().top, part.getBoundingClientRect().bottom]"
        boxes = page.run(f"[...$('layer').querySelectorAll('.lit'), $('tour-text'), $('tour-next')].map({box})")
        assert all(top >= 0 and bottom <= height for top, bottom in boxes), (step, boxes)
        places.add(boxes[-1][0])
    assert len(places) == 1
    page.look(1200)


@pytest.mark.thorough
@needs_chromium
def test_the_game_counts_what_the_reader_finds(page):
    found, counted, drawn = 0, 0, []
    for number in range(1, 6):
        page.click("#game-next")
        page.until("!playground.busy && !$('choose-a').hidden && !$('choose-a').disabled", 60)
        game = page.run("playground.game")
        assert game["round"] == number
        drawn.append(game["bug"]["name"])
        texts = page.text("#game-a"), page.text("#game-b")
        assert texts[0] != texts[1]
        other = "b" if game["broken"] == "a" else "a"
        choice = {2: other, 3: "none"}.get(number, game["broken"])
        page.click(f"#choose-{choice}")
        counts = game["nats"] >= 0.01
        counted += counts
        found += choice == game["broken"] and counts
        answer = page.text("#game-answer")
        assert answer.startswith("Yes.") == (choice == game["broken"] or (choice == "none" and not counts))
        names = [page.text(f"#name-{side}") for side in (game["broken"], other)]
        assert names == [f"{game['broken'].upper()}: broken", f"{other.upper()}: right"]
        assert ("the round does not count" in answer) != counts
        assert all(text.endswith(" ...") for text in texts)
        assert f"{found} of {counted} found" in answer
        assert game["bug"]["title"] in answer
    assert len(set(drawn)) == 5
    assert drawn[0] not in INVISIBLE
    assert len(INVISIBLE & set(drawn)) <= 1
    assert "The game is over" in answer
    assert page.text("#game-next") == "Play again"


@pytest.mark.thorough
@needs_chromium
def test_a_round_that_cannot_be_won_does_not_count_and_equal_texts_are_no_round(page):
    page.run("window.random = Math.random, window.all = playground.facts.bugs, window.calls = 0")
    page.run("playground.facts.bugs = all.filter((bug) => bug.name === 'rope_missing'), playground.game.round = 5")
    page.click("#game-next")
    page.until("!playground.busy && !$('choose-a').hidden", 60)
    page.click("#choose-a")
    # the first draw takes a mistake whose texts are equal, as its graph is the right one
    page.run("window.graph = playground.graphs.bf16_accumulators")
    page.run("playground.graphs.bf16_accumulators = playground.graphs.right")
    page.run("playground.facts.bugs = all.filter((bug) => ['truncated', 'bf16_accumulators'].includes(bug.name))")
    page.run("Math.random = () => [0.99][calls++] ?? random()")
    page.click("#game-next")
    page.until("!playground.busy && !$('choose-none').hidden", 100)
    assert page.run("calls") >= 3 + 3 + 1
    assert page.text("#game-a") != page.text("#game-b")
    score = page.run("[playground.game.score, playground.game.counted]")
    page.click("#choose-none")
    assert page.text("#game-answer").startswith("Yes. The mistake: ")
    assert "cannot be seen by reading, so the round does not count" in page.text("#game-answer")
    assert page.run("[playground.game.score, playground.game.counted]") == score
    page.run("playground.facts.bugs = all, Math.random = random, playground.game.round = 5")
    page.run("playground.graphs.bf16_accumulators = graph")


# -- the reader's own model --------------------------------------------------------------------------------------------

GOLDEN, GGUF = DATA / "golden", DATA / "gguf"
IDS = [1, 17, 45, 9]


def in_folder(folder):
    return [path for path in sorted(folder.iterdir()) if path.name != "golden.safetensors" and path.suffix != ".md"]


@pytest.fixture(scope="module")
def own_models(tmp_path_factory):
    """name -> (files to drop, what the package loads)"""
    folder, story = tmp_path_factory.mktemp("own"), ASSETS / "storyteller"
    out = {
        path.stem: ([path], path)
        for path in (GGUF / "f16.gguf", GGUF / "i2_s.gguf", GGUF / "tq1_0.gguf", GGUF / "tq2_0.gguf")
    }
    for name in ("bitnet-bf16-online", "bitnet-packed-offline", "llama-packed-bitlinear", "llama-packed-skips"):
        out[name] = (in_folder(GOLDEN / name), GOLDEN / name)
    native, qwen = DATA / "native" / "tiny-v1.bitnet.safetensors", DATA / "families" / "qwen3-groups128" / "q2_0.gguf"
    out |= {"native": ([native], native), "storyteller": (in_folder(story), story), "groups": ([qwen], qwen)}
    for source, kind, name in (
        (story, "gguf-tq2_0", "story.gguf"),
        (story, "gguf-i2_s", "story-i2_s.gguf"),
        (story, "gguf-q8_0", "story-q8_0.gguf"),
        (story, "native-base3", "story.bitnet.safetensors"),
        (GOLDEN / "llama-packed-bitlinear", "gguf-f16", "llama.gguf"),  # rows of q and k are permuted there
    ):
        path = folder / name
        assert invoke("convert", source, path, "--to", kind, "--no-engine").exit_code == 0
        out[name] = ([path], path)
    assert invoke("convert", story, folder / "story-parts", "--to", "hf-packed", "--split-size", "2M").exit_code == 0
    out["story-parts"] = (in_folder(folder / "story-parts"), folder / "story-parts")
    options = ("--to", "gguf-tq2_0", "--split-size", "2M")
    assert invoke("convert", story, folder / "story-gguf-parts", *options).exit_code == 0
    parts = sorted((folder / "story-gguf-parts").glob("*.gguf"))
    out["story-gguf-parts"] = (parts[::-1], parts[0])
    for layout in ("arm", "interleaved"):
        path = folder / f"story-{layout}.gguf"
        path.write_bytes(in_layout(folder / "story-i2_s.gguf", layout))
        out[path.name] = ([path], path)
    return out


def in_layout(path, layout):
    """The bytes of an I2_S file, as another build of bitnet.cpp would have written it."""
    data = bytearray(path.read_bytes())
    with open_gguf(path) as file:
        for name, tensor in file.tensors.items():
            if tensor.type.name == "I2_S":
                raw = file.read_raw(name)
                packed = pack_i2_s(unpack_i2_s(raw, tensor.shape), i2_s_scale(raw), layout).tobytes()
                at = data.index(raw.tobytes())
                data[at : at + len(packed)] = packed
    return bytes(data)


def drop(page, files):
    document = page.call("DOM.getDocument")["root"]["nodeId"]
    node = page.call("DOM.querySelector", nodeId=document, selector="#own-files")["nodeId"]
    page.call("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in files])
    page.until("!$('own-files').disabled", 60)
    return page.text("#own-facts")


@pytest.mark.thorough
@needs_chromium
def test_own_models_give_the_packages_tokens(browser, address, own_models):
    with open_page(browser, address) as page:
        page.run("$('max_tokens').value = 12, $('temperature').value = $('min_p').value = 0")
        for name, (files, path) in own_models.items():
            facts, m = drop(page, files), load(path, backend="numpy")
            for layout in ("arm", "interleaved"):
                assert (layout in name) == (f"order of {layout}, as the weights show" in facts), facts
            kind = "matrices have a scale for each group" if name == "groups" else "equals plain JavaScript’s"
            assert kind in facts, (name, facts)
            tokenizer = m.tokenizer if "no tokenizer" not in facts else None
            assert tokenizer is not None or "story" not in name
            ids = IDS if tokenizer is None else tokenizer.encode(PROMPT)
            ids = [each % m.config.vocab_size for each in ids]
            text = " ".join(map(str, ids)) if tokenizer is None else PROMPT
            page.run(f"$('own-prompt').value = {json.dumps(text)}; playground.own = null")
            page.click("#own-write")
            own = page.until("playground.own", 60)
            assert own["given"] == ids, name
            greedy = m.generate(ids, max_tokens=12)
            assert own["ids"] == list(greedy.token_ids), name
            last = m.logits([*ids, *own["ids"][: -1 if len(own["ids"]) == 12 else None]])[-1]
            np.testing.assert_allclose(own["logits"], last, rtol=0, atol=1e-5, err_msg=name)
            if tokenizer is not None:
                assert page.text("#own-text") == tokenizer.decode([*ids, *own["ids"]]), name


@pytest.mark.thorough
@needs_chromium
def test_what_the_page_cannot_run_it_refuses(browser, address, own_models, tmp_path):
    data = (GGUF / "tq2_0.gguf").read_bytes()
    files = {"cut.gguf": data[:5000], "short.gguf": data[:-100], "text.gguf": b"no model", "empty.safetensors": b""}
    files |= {"README.md": b"# model", "text.safetensors": b"hello world"}
    files["code3.gguf"] = data[:-66] + b"\xff" * 66
    dense = (GOLDEN / "llama-dense" / "model.safetensors").read_bytes()
    files |= {"short.safetensors": dense[:-100], "cut.safetensors": dense[:50]}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    golden = DATA / "families" / "qwen3-groups128"
    cases = {
        tmp_path / "cut.gguf": "beyond the end of the file|damaged or cut off",
        tmp_path / "short.gguf": "goes beyond the end of the file: it is cut off, fetch it again",
        tmp_path / "short.safetensors": "goes beyond the end of the file: it is cut off, fetch it again",
        tmp_path / "text.gguf": "^text.gguf is not a GGUF file",
        tmp_path / "README.md": "^README.md is not a model. Drop a .gguf or .safetensors file.$",
        tmp_path / "empty.safetensors": "^empty.safetensors is empty",
        tmp_path / "text.safetensors": "^text.safetensors is not a safetensors file, whatever its name says",
        tmp_path / "cut.safetensors": r"header: of \d+ bytes in a file of 50",
        tmp_path / "code3.gguf": "invalid ternary code 3",
        golden / "q2_0-legacy128.gguf": "id 42 has blocks of another size",
        golden / "pq2_0-hadamard.gguf": "is of type 142",
        GOLDEN / "bitnet-packed-offline" / "model.safetensors": "^model.safetensors comes with a config.json",
    }
    folders = {
        "llama-packed-rmsnorm": "use_rms_norm",
        "llama-unpacked-offline": "does not run",
        "llama-dense": "quant_method",
        "llama-f16-sharded": "quant_method",
    }
    with open_page(browser, address) as page:
        for path, words in cases.items():
            assert re.search(words, facts := drop(page, [path])), facts
            assert page.run("$('own-form').hidden && $('own-facts').className.includes('problem')")
        for name, words in folders.items():
            assert words in (facts := drop(page, in_folder(GOLDEN / name))), facts
        assert "These are 2 models. Drop one" in drop(page, [GGUF / "tq1_0.gguf", GGUF / "tq2_0.gguf"])
        first_only = [path for path in own_models["story-parts"][0] if "-00002-" not in path.name]
        assert "the tensor is missing" in drop(page, first_only)
        first, *others = sorted(own_models["story-gguf-parts"][0])
        assert f"one of {len(others) + 1} parts, and 1 is here" in drop(page, [first])
        assert "one of" in drop(page, others)
        x, y = page.run("""(() => {
            $('break-title').scrollIntoView({block: 'center'});  // anywhere on the page
            const box = $('break-title').getBoundingClientRect();
            return [box.left + 20, box.top + 5];
        })()""")
        data = {"items": [], "files": [str(each) for each in own_models["story.gguf"][0]], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):  # a file that is dropped with the pointer is run after all these
            page.call("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)
        page.until("!$('own-form').hidden", 30)
        page.run("$('own-prompt').value = ' '; playground.own = null")
        page.click("#own-write")
        assert "The field is empty" in page.text("#own-facts")
        assert page.run("playground.own") is None
        for look in ({"width": 390, "height": 844}, {"width": 1200, "dark": True}):
            page.look(**look)
            check_readable(page, str(look))


@needs_chromium
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_blocks_of_floats_are_the_packages(kind, browser, address):
    size = BY_NAME[kind]
    raw = np.random.default_rng(3).integers(0, 256, (40, size.block_bytes), dtype=np.uint8)
    for at in {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}.get(kind, [0]):  # the scales are finite
        raw[:, at : at + 2] = np.random.default_rng(4).normal(size=40).astype(np.float16)[:, None].view(np.uint8)
    expected = dequantize(raw.ravel(), kind, (40, size.block_values))
    page = browser.page(f"{address}facts.json")
    script = "import('./files.js').then((m) => Array.from(m.decodeFloats(%s, Uint8Array.from(%s))))"
    values = page.run(script % (json.dumps(kind), raw.ravel().tolist()))
    np.testing.assert_array_equal(np.array(values, dtype=np.float32), expected.ravel())


@pytest.mark.thorough
@needs_chromium
def test_own_models_sample_by_the_settings(browser, address, own_models):
    files, _ = own_models["story.gguf"]
    with open_page(browser, address) as page:
        drop(page, files)
        texts = []
        for sliders in (
            {"temperature": 1},
            {"temperature": 1},
            {"temperature": 1, "seed": 2},
            {"min_p": 0.5, "top_k": 1},
        ):
            for name, value in {"max_tokens": 12, **sliders}.items():
                page.run(f"$('{name}').value = '{value}'")
            page.run("playground.own = null")
            page.click("#own-write")
            texts.append(page.until("playground.own", 60)["ids"])
        assert texts[0] == texts[1] != texts[2]
        assert texts[3] == list(model("storyteller").generate(PROMPT, max_tokens=12).token_ids)
        page.run(f"$('own-prompt').value = {json.dumps('a ' * 240)}; playground.own = null")
        page.run("$('own-write').click(); $('own-stop').click()")  # while the model reads
        own = page.until("playground.own", 60)
        assert (len(own["given"]) > 200, own["ids"]) == (True, [])


@pytest.mark.thorough
@needs_chromium
def test_own_models_need_no_server_once_the_page_is_loaded(browser, site, page):
    with serve(site[0]) as address:
        own = browser.page(f"{address}index.html")
        until_idle(own)
    for name in ("tq1_0", "tq2_0"):  # the server is gone
        assert "equals plain JavaScript’s" in drop(own, [GGUF / f"{name}.gguf"])
    own.click("#own-write")
    assert own.until("playground.own", 60)["ids"]


def byte_level_bpe(pattern, ignore_merges):
    """tokenizer.json of a small byte-level BPE that cuts texts by a pattern."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=ignore_merges))
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    last = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, last])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    options = {"initial_alphabet": last.alphabet(), "special_tokens": ["<s>"], "show_progress": False}
    tokenizer.train_from_iterator(texts(), tokenizers.trainers.BpeTrainer(vocab_size=900, **options))
    begin = {"single": "<s> $A", "pair": "<s> $A $B", "special_tokens": [("<s>", 0)]}
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(**begin)
    return tokenizer.to_str()


@pytest.mark.sample(3)
@needs_chromium
@pytest.mark.parametrize(
    ("name", "pattern"), [("gpt-2", GPT2), ("llama-bpe", LLAMA3), ("qwen2", QWEN2)], ids=("gpt-2", "llama-3", "qwen2")
)
def test_byte_level_bpe_in_the_browser_is_the_packages(name, pattern, browser, address):
    data = byte_level_bpe(pattern, ignore_merges=name == "llama-bpe")
    files = {"tokenizer.json": data.encode()}
    tokenizer, cases = load_tokenizer_files(files), list(texts())[::4]
    own = json.loads(data)["model"]
    pieces, merges = sorted(own["vocab"], key=own["vocab"].get), [" ".join(merge) for merge in own["merges"]]
    gguf = json.dumps([pieces, merges, [3] + [1] * (len(pieces) - 1), name, True, 0])  # 3: a control token
    page = browser.page(f"{address}facts.json")
    script = """(async () => {
        const { BytePairTokenizer } = await import("./tokenizer.js");
        const both = [BytePairTokenizer.fromJson(%s, 900), BytePairTokenizer.open(...%s)];
        return %s.map((text) => both.map((each) => [each.encode(text), each.decode(each.encode(text))]));
    })()"""
    for text, both in zip(cases, page.run(script % (data, gguf, json.dumps(cases))), strict=True):
        for ids, decoded in both:
            assert ids == tokenizer.encode(text), repr(text)
            assert decoded == tokenizer.decode(ids), repr(text)
