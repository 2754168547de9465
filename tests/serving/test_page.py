"""The page of the server, in headless Chromium, and the state of an engine that it shows."""

import json
import random
import re
import shutil
import socket
import subprocess
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from chromium import check_readable, choose_model, fill_in, needs_chromium
from cli_runs import BACKEND, FAST, process
from engine_checks import check, until
from helpers import chat_folder, model
from server_runs import RunningServer, ServerLimits

from bitnet_ref.formats.open import ASSETS
from bitnet_ref.serving.http import page as page_module
from bitnet_ref.serving.http.schemas import RequestError
from bitnet_ref.serving.metrics import COUNTERS, GAUGES, HISTOGRAMS

STORY, PROMPT, SECRET = (
    ASSETS / "storyteller",
    "Once upon a time",
    "The old man said that he had seen the king of the sea",
)
GRAFANA = Path(__file__).parents[2] / "docs" / "grafana.json"
GONE = ("ERR_CONNECTION_REFUSED", "ERR_EMPTY_RESPONSE", "ERR_CONNECTION_RESET")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    sources = {"storyteller": STORY, "talker": chat_folder(tmp_path_factory.mktemp("page"))}
    with RunningServer(sources, settings={"cache_tokens": 2048}) as server:
        yield server


def slowly(ids, logits, generator):
    time.sleep(0.02)
    return int(np.argmax(logits))


@pytest.fixture
def submit_held():
    """Submits requests that begin together, and go on from their 40th token when the second result is called."""
    started, released = threading.Event(), threading.Event()

    def strategy(ids, logits, generator):
        (started if len(ids) < 40 else released).wait(60)
        return int(np.argmax(logits))

    def submit(engine, count):
        handles = [engine.submit(SECRET, strategy=strategy, max_tokens=100, ignore_eos=True) for _ in range(count)]
        started.set()
        return handles, released.set

    yield submit
    started.set()
    released.set()


# -- the document and the engine's state -------------------------------------------------------------------------------


def test_the_page_is_one_document_that_runs_nothing_else():
    with RunningServer({"storyteller": STORY}, api_keys=("one",)) as server:
        status, headers, text = server.get("/")
        assert (status, headers.get_content_type()) == (200, "text/html")
        policy = headers["content-security-policy"]
        assert "unsafe" not in policy
        assert policy.startswith("default-src 'none'; style-src 'sha256-")
        assert (policy.count("sha256-"), text.count("<style>"), text.count("<script>")) == (8, 1, 7)
        assert not any(word in text for word in ("{{", "innerHTML", "http-equiv", "src=", "eval("))
        assert [each for each in text.split('"') if re.match("https?://", each)] == ["http://www.w3.org/2000/svg"] * 2
        assert len(text) < 100_000
        for path in ("/engine", "/metrics", "/v1/models"):
            assert server.get(path)[0] == 401
        assert server.get("/engine", authorization="Bearer one")[2]["loaded"] is True


def test_the_state_of_an_engine(server):
    engine = server.engines["storyteller"]
    before = server.get("/engine?model=storyteller")[2]["metrics"]["engine_steps"]
    engine.generate(SECRET, max_tokens=3)
    handles = [engine.submit(SECRET, strategy=slowly, max_tokens=100, priority=n, ignore_eos=True) for n in range(3)]
    until(lambda: all(handle.stats.generated_tokens > 2 for handle in handles))
    state = server.get(f"/engine?model=storyteller&after={before}")[2]
    text = json.dumps(state)
    words = [word for handle in handles for word in SECRET.split() + handle._ticket.rows[0].chunks[0].text.split()]
    assert not any(word in text for word in words if len(word) > 3)
    alive, ended = state["requests"][:3], state["requests"][3]
    assert [each["request_id"] for each in alive] == [handle.request_id for handle in handles]
    assert (ended["state"], ended["pages"], ended["generated_tokens"]) == ("length", [], 3)
    assert ended["arrival_s"] <= ended["start_s"] <= ended["first_token_s"] <= ended["end_s"] <= state["now_s"]
    for each in alive:
        assert (each["state"], each["end_s"], each["priority"]) == (
            "running",
            None,
            each["request_id"] - alive[0]["request_id"],
        )
        assert each["cached_tokens"] > 0
        assert len(each["pages"][0]) >= each["prompt_tokens"] // 4
    first = alive[0]["pages"][0][0]
    assert first == alive[1]["pages"][0][0]
    assert state["pages"]["holders"][first] == 3
    assert (state["pages"]["size"], state["pages"]["total"]) == (4, engine.cache.pages)
    numbers = [step["number"] for step in state["steps"]]
    assert numbers[0] == before + 1
    assert all(b - a == 1 for a, b in pairwise(numbers))
    kinds = {part[2] for step in state["steps"] for part in step["parts"]}
    assert kinds == {"prefill", "decode"}
    assert server.get(f"/engine?model=storyteller&after={10**17}")[2]["steps"] == []
    for handle in handles:
        handle.close()
    until(lambda: not engine.requests)
    state = server.get("/engine?model=storyteller")[2]
    assert [each["state"] for each in state["requests"][:3]] == ["abort"] * 3
    assert (len(state["steps"]) <= page_module.MAX_STEPS, state["limits"]["max_batch"]) == (True, 8)
    for path, message in (
        ("after=-1", "after: expected"),
        (f"after={'9' * 5000}", "after: expected"),
        ("", "model: is missing"),
    ):
        status, _, answer = server.get(f"/engine?{path}{'&model=storyteller' * bool(path)}")
        assert (status, message in answer["error"]["message"]) == (400, True)
    check(engine)


@pytest.mark.thorough
def test_what_is_shown_of_much(server, monkeypatch):
    """The last steps, the first of the unfinished requests with the running ones before, and the pages up to the last
    that holds something."""
    monkeypatch.setattr(page_module, "MAX_STEPS", 3)
    monkeypatch.setattr(page_module, "MAX_REQUESTS", 2)
    monkeypatch.setattr(page_module, "MAX_PAGES", 5)
    with model(STORY, BACKEND, threads=1).engine(max_batch=2, page_size=4) as engine:
        engine.generate("Alice", max_tokens=30)
        with pytest.raises(RequestError, match="replica: expected at most 0, got 1"):
            page_module.describe_engine(engine, 1)
        waiting = [engine.submit("Alice", strategy=slowly, max_tokens=200, priority=int(n == 2)) for n in range(4)]
        states = []

        def shows_the_urgent_one():
            """Not while it takes the place of another one, which is shown as running until it waits."""
            states.append(page_module.describe_engine(engine))
            first = states[-1]["requests"][:2]
            running = [each["request_id"] for each in first if each["state"] == "running"]
            return len(running) == 2 and waiting[2].request_id in running

        until(shows_the_urgent_one)
        state = states[-1]
        last = engine.metrics.counters["engine_steps"]
        assert len(state["steps"]) == 3
        assert last - 1 <= state["steps"][-1]["number"] <= last
        assert (state["replica"], state["closed"]) == (0, False)
        assert state["replicas"] in ([4], [3])  # one that gives its place away is not counted for a moment
        assert state["limits"] == {"max_batch": 2, "max_batch_tokens": 512}
        shown, ended = state["requests"][:2], state["requests"][2:]
        assert waiting[2].request_id in [each["request_id"] for each in shown]
        assert [each["state"] for each in shown] == ["running"] * 2
        hidden = state["hidden_requests"]
        assert {each["state"] for each in ended} == {"length"}
        assert len(ended) + hidden == 3  # a slow machine may have ended one more
        assert state["metrics"]["num_requests_waiting"] == hidden
        assert state["pages"]["holders"][-1] is not None
        assert 1 <= len(state["pages"]["holders"]) <= 5
        assert state["metrics"]["device_utilization"] is None
        assert 0 <= time.perf_counter() - state["now_s"] < 60
        for handle in waiting:
            handle.close()


def test_looking_at_an_engine_does_not_load_it(server):
    with RunningServer({"a": STORY, "b": ASSETS / "storychat"}, budget=200_000_000, idle_s=0.05) as other:
        until(lambda: all(place.engine is None for place in other.shelf.places.values()))
        assert other.get("/engine?model=a")[2] == {"model": "a", "loaded": False}
        assert other.shelf.places["a"].engine is None


def test_a_fault_of_the_server_is_no_traceback(server, monkeypatch):
    from bitnet_ref.serving.http import server as app

    def fail(*_, **__):
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(app, "describe_engine", fail)
    status, headers, answer = server.get("/engine?model=storyteller")
    assert (status, headers.get_content_type()) == (500, "application/json")
    assert answer["error"]["message"] == "a fault of the server; its log has the cause"


def test_every_metric_of_the_dashboard_exists(server):
    prometheus = pytest.importorskip("prometheus_client.parser")
    families = prometheus.text_string_to_metric_families(server.get("/metrics")[2])
    exported = {sample.name for family in families for sample in family.samples}
    dashboard = json.loads(GRAFANA.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    named = {name for query in queries for name in re.findall(r"[a-z_]+:?[a-z_0-9]*_[a-z_0-9]+", query)}
    named -= {"bitnet_ref:device_utilization", "histogram_quantile", "model_name", "finished_reason", "__rate_interval"}
    assert {name for name in named if name.startswith(("bitnet_ref:", "process_"))} == named
    assert named <= exported
    shown = {name.removeprefix("bitnet_ref:") for name in named} | {"device_utilization"}  # only with a card
    missing = {name for name in (*COUNTERS, *GAUGES, *HISTOGRAMS) if not any(each.startswith(name) for each in shown)}
    assert missing == set(), "metrics that no panel shows"
    assert "bitnet_ref:request_success_total" in named


# -- in a browser ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")
def test_durations():
    calls = "for (const value of [0.5, 0.9996, 59.94, 99.96, 119.7, 125.2]) console.log(seconds(value));"
    script = (page_module.FILES / "parts.js").read_text() + calls
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["500 ms", "1.0 s", "59.9 s", "1 min 40 s", "2 min 0 s", "2 min 5 s"]


@pytest.mark.thorough
@needs_chromium
def test_completion_and_what_a_token_might_have_been(open_page):
    page = open_page()
    page.until("model !== null")
    fill_in(page, temperature=0, max_tokens=12)
    page.click("#complete")
    page.until("!completing && tokens.length === 12")
    story = model(STORY, BACKEND, threads=1)
    out = story.generate(PROMPT, max_tokens=12, logprobs=10, echo=True)
    assert page.text("#tokens").split() == out.text.split()
    assert "12 tokens · " in page.text("#complete-facts")
    page.click(".token", 3)
    assert page.run("document.querySelectorAll('.token[aria-pressed=true]').length") == 1
    shown = [
        text.replace("␣", " ").replace("⏎", "\n")
        for text in page.run("[...document.querySelectorAll('#bars b')].map((b) => b.textContent)")
    ]
    tokens = story.vocabulary.tokens
    assert shown[:10] == [tokens[token].decode() for token in out.top_logprobs[3]]
    shares = page.run("[...document.querySelectorAll('#bars .choice')].map((row) => row.lastChild.textContent)")
    assert shares[0] == f"{np.exp(out.logprobs[3]):.1%}"
    widths = page.run("[...document.querySelectorAll('#bars .fill')].map((fill) => fill.getBoundingClientRect().width)")
    assert widths[0] == max(widths)
    assert widths[:10] == sorted(widths[:10], reverse=True)
    page.press("ArrowRight")  # the keyboard goes on from where the pointer was
    assert page.run("tokens.indexOf(chosen)") == 4
    page.press("ArrowLeft")
    page.click("#bars button", 0)  # the second likeliest instead
    page.until("!completing && tokens.length === 12")
    prompt = PROMPT + "".join(tokens[token].decode() for token in out.token_ids[:3]) + shown[1]
    assert page.run("$('prompt').value") == prompt
    other = story.generate(prompt, max_tokens=12, echo=True).text
    assert page.text("#tokens").split() == other.split()
    page.run("$('echo').checked = true")
    page.click("#complete")
    page.until("!completing && tokens.length > 12")
    assert page.text("#tokens").removeprefix("<s>").split() == other.split()
    page.click(".token", 0)
    assert "nothing predicted it" in page.text("#bars-title")
    page.run("$('prompt').value = '\U0001f407 Alice \U0001f3a9 said'")  # letters of two units in JavaScript
    page.click("#complete")
    page.until("!completing && tokens.length > 12")
    text, last = page.run("[result.text, [tokens.at(-1).text, tokens.at(-1).offset]]")
    assert text[last[1] :] == last[0]
    page.click(".token", page.run("tokens.length - 12"))  # the first that the model wrote
    page.click("#bars button", 0)
    page.until("!completing && tokens.length > 12")
    assert page.run("$('prompt').value").startswith("\U0001f407 Alice \U0001f3a9 said")


@pytest.mark.thorough
@needs_chromium
def test_chats_stop_and_go_on(server, open_page):
    page = open_page(problems=("400",))
    page.until("model !== null")
    page.click("#tab-chat")
    assert "has no chat template" in page.text("#chat")
    choose_model(page, "talker")
    fill_in(page, temperature=0, max_tokens=9)
    page.click("#chat-text")
    page.type("Hello")
    page.press("Enter")
    page.until("!chatting && conversation.nodes.length === 2")
    story = model(server.shelf.places["talker"].source, BACKEND, threads=1)
    talk = [{"role": "user", "content": "Hello"}]
    expected = story.generate(story.tokenizer.apply_chat_template(talk, tokenize=True), max_tokens=9).text
    assert page.run("conversation.nodes[1].content") == expected
    fill_in(page, max_tokens=200)
    engine = server.engines["talker"]
    aborts = engine.metrics.finished["abort"]
    blocker = engine.submit("Alice", strategy=slowly, max_tokens=250, ignore_eos=True)  # steps take 20 ms
    page.type("<img src=x onerror=alert(1)>")
    page.press("Enter")
    page.until("document.querySelectorAll('.assistant > .text')[1]?.textContent.length > 20")
    page.press("Escape")
    page.until("!chatting")
    until(lambda: engine.metrics.finished["abort"] == aborts + 1)
    blocker.close()
    assert 20 < len(page.run("conversation.nodes[3].content")) < 600
    assert page.run("document.querySelector('.message img')") is None
    fill_in(page, max_tokens=255)
    page.run("$('messages').lastChild.querySelector('.actions button:nth-child(3)').click()")
    page.until("!chatting && problem")
    assert "context is 256" in page.text("p.problem")
    assert page.run("shownPath()") == [0, 1, 2, 3]  # the earlier reply is shown again
    page.click("#chat-new")
    assert page.run("conversation.nodes.length + $('messages').children.length") == 0
    with RunningServer({"talker": server.shelf.places["talker"].source}) as chats:
        page = open_page(chats.url)
        page.until("model !== null")
        assert page.run("[view, location.hash]") == ["chat", "#chat"]


HOSTILE = """<script>window.bad = 1</script> <img src=x onerror="window.bad = 1"> [a](javascript:window.bad=1)
[b](data:text/html,x) [c](JaVaScRiPt:x) [d](/engine) ![e](https://example.com/e.png) <svg onload=bad()> **<b>*x**

| a | <iframe src=//x> |
|---|---|
| `<b>` | [f](vbscript:x) |

> - <style>*{display:none}</style>

```html" onclick="bad()
<script>window.bad = 1</script>
"""


@pytest.mark.thorough
@needs_chromium
def test_hostile_markdown_does_nothing(open_page):
    page = open_page()
    show = "showMarkdown($('messages'), %s); [...$('messages').querySelectorAll('*')].map((each) => each.localName)"
    allowed = {
        "p",
        "a",
        "br",
        "hr",
        "strong",
        "em",
        "del",
        "code",
        "div",
        "button",
        "span",
        "pre",
        "blockquote",
        "ul",
        "ol",
        "li",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
    }
    nested = [mark * 20_000 for mark in ("> ", "[", "*", "`", "- ", "](", "*a ", "_a", "`" * 3 + "\n")]
    for text in (HOSTILE, *nested, "a" * 100_000, *(HOSTILE[:end] for end in range(0, len(HOSTILE), 7))):
        begin = time.monotonic()
        assert set(page.run(show % json.dumps(text))) <= allowed, text[:80]
        assert time.monotonic() - begin < 10
    dice = random.Random(0)
    marks = [*"`*_~[]()<>!#|-+>\\ \n\t", "\n\n", "\n  ", "\n   ", "1. ", "- ", "* ", "](", "```", "a", *HOSTILE.split()]
    for _ in range(40):  # each block must end after it begins, or the tab hangs
        texts = ["".join(dice.choice(marks) for _ in range(dice.choice([2, 6, 40]))) for _ in range(100)]
        names = page.run(f"{json.dumps(texts)}.flatMap((text) => ({show % 'text'}))".replace("; [", ", ["))
        assert set(names) <= allowed | {"h3", "h4", "h5", "h6"}
    for text, tag in (("  * x", "ul"), ("a\n\n  * x", "ul"), ("   1. x\n   2. y", "ol"), ("- a\n\n   * b\nc", "ul")):
        assert tag in page.run(show % json.dumps(text))
    heading = page.run(f"{show % json.dumps('## a # b ##')}; $('messages').firstChild.textContent")
    assert heading == "a # b"
    page.run(show % json.dumps(HOSTILE))
    assert page.run("[...$('messages').querySelectorAll('a')].map((a) => a.href)") == ["https://example.com/e.png"]
    code = page.run("$('messages').querySelector('pre').textContent")
    assert code == "<script>window.bad = 1</script>\n"
    assert page.run("window.bad === undefined")


@pytest.mark.thorough
@needs_chromium
def test_a_conversation_outlives_a_reload(open_page):
    page = open_page()
    page.until("model !== null")
    page.click("#tab-chat")
    choose_model(page, "talker")
    fill_in(page, temperature=0, max_tokens=4)
    page.click("#chat-text")
    page.type("Hello")
    page.press("Enter")
    page.until("!chatting && conversation.nodes.length === 2")
    before = page.run("conversation.nodes")
    page.reload()
    page.until("conversation.nodes.length === 2")
    assert page.run("conversation.nodes") == before
    page.until("document.querySelectorAll('.message').length === 2")


@pytest.mark.thorough
@needs_chromium
def test_the_engine_live(server, open_page, submit_held):
    page = open_page()
    page.until("model !== null")
    page.click("#tab-engine")
    page.until("!$('engine-live').hidden")
    assert page.run("$('replicas').hidden")  # there is one engine
    engine = server.engines["storyteller"]
    handles, release = submit_held(engine, 3)
    ids = [handle.request_id for handle in handles]
    page.until("requests.filter((each) => each.state === 'running').length === 3")
    page.until("steps.at(-1)?.parts.map(([, , kind]) => kind).join() === 'decode,decode,decode'")
    assert [page.text(f"#requests li:nth-child({n}) .state") for n in (1, 2, 3)] == ["running"] * 3
    assert "3 unfinished" in page.text("#requests-facts")
    page.click("#requests button", 0)
    page.until("document.querySelector('.story li:last-child').innerText.includes('pages held')")
    assert "submitted" in page.text(".story")
    story = page.run("tellStory({...requests[0], drafted_tokens: 7, accepted_tokens: 5}, now).textContent")
    assert "5 of 7 draft tokens accepted" in story
    assert "draft" not in page.text(".story")
    page.run("$('pages').focus()")
    page.run(f"pageAt = requests.find((each) => each.request_id === {ids[0]}).pages[0][0] - 1")
    page.press("ArrowRight")
    names = ", ".join(f"#{number}" for number in ids)
    assert f"shared by 3 texts of {names}, tokens 0 to 3." in page.text("#pages-detail")
    colours = page.run(
        "new Set($('pages').getContext('2d').getImageData(0, 0, $('pages').width, $('pages').height).data).size"
    )
    assert colours > 5
    page.run("$('steps').focus()")
    page.press("End")
    assert f"#{ids[2]} decode" in page.text("#steps-detail")
    page.press("Escape")
    assert "Point at a step" in page.text("#steps-detail")
    page.click("#pause")
    for handle in handles:
        handle.close()
    release()
    page.click("#pause")
    page.until("requests.every((each) => each.end_s !== null)")
    assert page.text("#requests .state") == "cancelled"
    assert SECRET.split()[3] not in page.text("body")
    check(engine)


@pytest.mark.thorough
@needs_chromium
def test_each_of_several_engines(open_page, submit_held, tmp_path):
    with RunningServer({"storyteller": STORY}, settings={"replicas": 3, "cache_tokens": 2048}) as server:
        first, second, third = server.engines["storyteller"].engines
        page = open_page(server.url, GONE, width=360, height=740)
        page.until("model !== null")
        page.click("#tab-engine")
        handles, release = submit_held(second, 2)
        page.until("$('replica').options[1]?.textContent === '2 of 3: 2 requests'")
        assert page.run("requests.length") == 0  # of the first
        page.run("$('replica').value = 1; $('replica').onchange()")
        page.until("requests.length === 2 && steps.length > 2")
        assert page.run("requests.map((each) => each.request_id)") == [handle.request_id for handle in handles]
        assert page.run("$('replica').value") == "1"
        check_readable(page, "replicas")
        page.screenshot(tmp_path / "replicas.png")
        state = server.get("/engine?replica=1")[2]
        assert (state["replica"], state["replicas"], len(state["requests"])) == (1, [0, 2, 0], 2)
        assert server.get("/engine?replica=0")[2]["requests"] == []
        for text, message in (("3", "replica: expected at most 2, got 3"), ("-1", "replica: expected a whole number")):
            status, _, answer = server.get(f"/engine?replica={text}")
            assert (status, message in answer["error"]["message"]) == (400, True)
        page.run("window.real = fetch; window.fetch = async () => new Response('{}', {status: 500})")
        page.until("$('banner').textContent === 'The server answered 500.'")
        page.run("window.fetch = real")
        page.until("$('banner').hidden")
        for handle in handles:
            handle.close()
        release()
        until(lambda: not server.engines["storyteller"].requests)
        page.run("$('replica').value = 2; $('replica').onchange()")
        page.until("requests.length === 0")
    for engine in (first, second, third):
        check(engine)


@pytest.mark.thorough
@needs_chromium
def test_a_key_and_a_server_that_is_busy_loads_or_is_gone(open_page):
    problems = ("401", "429", "503", *GONE)
    with RunningServer({"storyteller": STORY}, ServerLimits(max_streams=1), api_keys=("one",)) as server:
        server.shelf.is_ready = False
        page = open_page(server.url, problems, width=360, height=740)
        page.until("$('banner').textContent.includes('is loading')")
        server.shelf.is_ready = True
        page.until("$('key-dialog').open")
        assert page.run("document.activeElement.id") == "key"
        page.type("two")
        page.press("Enter")
        page.until("$('key-problem').textContent.includes('does not accept')")
        page.type("one")
        page.press("Enter")
        page.until("model !== null && !$('key-dialog').open")
        assert page.run("[sessionStorage.getItem(KEY), localStorage.length, document.cookie]") == ["one", 0, ""]
        page.click("#key-button")
        page.click("#key-cancel")
        assert page.run("sessionStorage.getItem(KEY)") == "one"
        body = {"prompt": "Alice", "n": 8, "max_tokens": 250, "stream": True, "ignore_eos": True, "logprobs": 20}
        with socket.create_connection(("127.0.0.1", server.port)) as reader:  # one that does not read
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            data = json.dumps(body).encode()
            head = (
                f"host: x\r\nauthorization: Bearer one\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
            )
            reader.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + data)
            until(lambda: server.engines["storyteller"].requests)
            page.click("#complete")
            page.until("!completing")
            assert page.text("#complete-facts").startswith("The server is full: ")
            assert page.text("#complete-facts").endswith("Try again in 1 s.")
    page.click("#complete")
    page.until("!completing")
    assert page.text("#complete-facts") == "The server does not answer."
    page.until("$('banner').textContent === 'The server does not answer. Trying again.'")  # said after a second request


def inspect_views(page, server):
    """No view is wider than the screen, all text can be read, and all controls have names."""
    page.until("model !== null")
    fill_in(page, temperature=1, max_tokens=30, seed=3)
    for view in ("completion", "chat", "engine"):
        page.click(f"#tab-{view}")
        if view == "completion":
            page.click("#complete")
            page.until("!completing && tokens.length")
            page.click(".token", 2)
        elif view == "chat":
            choose_model(page, "talker")
            page.click("#chat-text")
            page.type("Hello, how are you? " * 3 + "a" * 70)
            page.press("Enter")
            page.until("!chatting && conversation.nodes.length === 2")
        else:
            page.until("steps.length > 5 && requests.length")
            page.click("#requests button")
            page.run("$('steps').focus()")
            page.press("End")
        check_readable(page, view)


@pytest.mark.thorough
@needs_chromium
def test_a_phone(server, open_page, tmp_path):
    page = open_page(width=360, height=740, dark=True)
    inspect_views(page, server)
    small = page.run("[...document.querySelectorAll('.tabs button')].map((b) => b.getBoundingClientRect().height)")
    assert min(small) >= 44  # for fingers
    page.screenshot(tmp_path / "phone.png")
    Image = pytest.importorskip("PIL.Image")
    with Image.open(tmp_path / "phone.png") as image:
        assert image.size == (720, 1480)
        assert len(image.convert("RGB").getcolors(1 << 20)) > 50


@needs_chromium
@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back(browser):
    def start(port):
        command = process("serve", "--port", port, "--json", *FAST, stdout=-1, text=True, module="bitnet_ref")
        return command, json.loads(command.stdout.readline())["url"]

    command, url = start(0)
    try:
        page = browser.page(f"{url}/")
        page.until("model !== null")
        fill_in(page, max_tokens=250)
        page.run("$('prompt').value = 'Alice'")
        page.click("#complete")
        page.until("tokens.length > 2 && tokens.length < 200")
        command.kill()
        page.until("!completing")
        assert page.text("#complete-facts") == "The connection ended before the text did."
        page.until("$('banner').textContent === 'The server does not answer. Trying again.'")
        command.communicate()
        command, _ = start(url.rpartition(":")[2])
        page.until("$('banner').hidden")
        page.click("#complete")
        page.until("!completing")
        assert "tokens/s" in page.text("#complete-facts")
    finally:
        command.kill()
        command.communicate()


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 390, 899, 900, 1280, 1920])
def test_screens(server, open_page, width, dark):
    inspect_views(open_page(width=width, dark=dark), server)
