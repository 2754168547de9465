"""The live view of an engine: it moves as the engine does, and leaves no thread behind."""

import gc
import io
import re
import sys
import threading
import time

import pytest
from helpers import model
from rich.console import Console

from bitnet_ref.errors import BackendUnavailable
from bitnet_ref.serving.live import MAX_ROWS, Frame, History, as_table, draw_speeds, figures_html, requests_html
from bitnet_ref.serving.records import RequestProgress

NAME = "bitnet_ref live view"
SLOW = {"max_tokens": 200, "ignore_eos": True}


def wait_for(condition, timeout_s=10.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)


def views():
    return [thread for thread in threading.enumerate() if thread.name == NAME]


@pytest.fixture
def engine():
    with model("storyteller", "numpy").engine(max_batch=2) as engine:
        yield engine


def test_the_widget_follows_the_engine(engine):
    pytest.importorskip("ipywidgets")
    view = engine.live(interval_s=0.01)
    figures, requests, button = view.widget.children
    assert "0 running, 0 waiting" in figures.value
    assert "<td" not in requests.value
    handles = [engine.submit(prompt, **SLOW) for prompt in ("Once upon a time", "The rabbit ran", "Alice")]
    wait_for(lambda: "2 running, 1 waiting" in figures.value)
    wait_for(lambda: requests.value.count("running") == 2 and "waiting" in requests.value)
    tokens = lambda: int(re.search(r"(\d[\d,]*) in all", figures.value)[1].replace(",", ""))  # noqa: E731
    before = tokens()
    wait_for(lambda: tokens() > before + 4)
    first = engine.requests[0]
    assert first.newest_text
    assert first.generated_tokens > 0
    for handle in handles:
        handle.cancel()
    wait_for(lambda: "0 running, 0 waiting" in figures.value)
    assert not button.disabled
    engine.close()
    wait_for(lambda: not view.watching)
    assert "engine closed" in figures.value
    assert button.disabled
    assert views() == []


def test_closing_and_the_button_stop_it(engine):
    pytest.importorskip("ipywidgets")
    with engine.live(interval_s=0.01) as view:
        assert not view.watching  # nothing shown, nothing runs
        assert view.widget is not None
        assert view.watching
    assert not view.watching
    other = engine.live(interval_s=0.01)
    other.widget.children[-1].click()
    wait_for(lambda: not other.watching)
    other.close()
    assert views() == []
    assert not engine.closed


def test_a_closed_view_shows_the_last_frame(engine):
    pytest.importorskip("ipywidgets")
    view = engine.live(interval_s=60)
    figures = view.widget.children[0]
    tokens = engine.generate("Alice", max_tokens=3, ignore_eos=True).token_ids
    assert "0 in all" in figures.value
    view.close()
    assert f"{len(tokens)} in all" in figures.value
    assert "overflow-x:auto" in requests_html(view.frame)


def test_a_dropped_engine_ends_it():
    pytest.importorskip("ipywidgets")
    engine = model("storyteller", "numpy").engine()
    out = engine.generate("Alice", max_tokens=3)
    view = engine.live(interval_s=0.01)
    figures = view.widget.children[0]
    del engine
    gc.collect()
    wait_for(lambda: not view.watching)
    assert f"{len(out.token_ids)} in all" in figures.value


def test_without_ipywidgets_it_is_a_still(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    view = engine.live()
    assert view.interval_s == 0.5
    with pytest.raises(BackendUnavailable, match=r"pip install 'bitnet-ref\[notebooks\]'"):
        assert view.widget is not None
    engine.generate("Alice", max_tokens=3)
    bundle = view._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"}
    assert bundle["text/html"].startswith("the live view needs ipywidgets: pip install 'bitnet-ref[notebooks]'<br><")
    assert "3 in all" in bundle["text/html"]
    assert "3 in all" in bundle["text/plain"]
    assert views() == []


def test_a_terminal_shows_the_same(engine):
    handle = engine.submit("Once upon a time", **SLOW)
    wait_for(lambda: handle.stats.generated_tokens > 3)
    out = Console(file=io.StringIO(), width=120)
    out.print(engine.live())
    text = out.file.getvalue()
    handle.cancel()
    for words in ("1 running, 0 waiting", "cache in use", "between tokens", "p95", "newest text"):
        assert words in text


SNAPSHOT = {
    "num_requests_running": 1,
    "num_requests_waiting": 0,
    "kv_cache_usage_perc": 0.25,
    "time_to_first_token_seconds": {"p50": None, "p95": None, "p99": None},
    "inter_token_latency_seconds": {"p50": 0.005, "p95": 0.01, "p99": 0.02},
}


def frames(*seen):
    history = History()
    return [history.frame(now, {**SNAPSHOT, "generation_tokens": tokens}, [], False) for now, tokens in seen]


def progress(number, state, text=""):
    return RequestProgress(number, state, 10 + number, 20 + number, 1.25, text)


def test_speed_is_of_the_last_minute():
    *_, last = frames((29.5, 0), (30, 3000), (30, 3000), (80, 3000), (90, 3600))
    assert (last.tokens, last.seconds, last.tokens_per_s) == (3600, 60, 10)  # what came before does not count
    assert last.speeds == (0.0, 60.0)
    (only,) = frames((5, 10))
    assert (only.seconds, only.tokens_per_s, only.speeds) == (0, 0, ())


def test_a_frame_is_the_snapshot_of_a_moment():
    requests = [progress(1, "waiting"), progress(2, "running", "a\nb"), progress(3, "running"), progress(4, "paused")]
    frame = History().frame(3.0, {**SNAPSHOT, "num_requests_waiting": 7, "generation_tokens": 1234}, requests, True)
    assert frame == Frame(
        running=1,
        waiting=7,
        cache_share=0.25,
        tokens=1234,
        tokens_per_s=0.0,
        seconds=0.0,
        speeds=(),
        latencies={
            "time_to_first_token_seconds": (None, None, None),
            "inter_token_latency_seconds": (0.005, 0.01, 0.02),
        },
        requests=[requests[1], requests[2], requests[0], requests[3]],
        ended=True,
    )
    assert frame.lines() == [
        ("requests", "1 running, 7 waiting, engine closed"),
        ("cache in use", "25%"),
        ("tokens", "1,234 in all, 0.0 per second in the last 0 s"),
        ("first token", "p50 -, p95 -, p99 -"),
        ("between tokens", "p50 5.0 ms, p95 10.0 ms, p99 20.0 ms"),
    ]
    assert frame.rows()[:3] == [
        ("2", "running", "12", "22", "1.2", "a b"),
        ("3", "running", "13", "23", "1.2", ""),
        ("1", "waiting", "11", "21", "1.2", ""),
    ]
    assert frame.footer == ""
    cells = re.findall(r"<th>(.*?)</th><td>(.*?)</td>", figures_html(frame))
    assert cells == frame.lines()
    table = requests_html(frame)
    assert re.findall(r"<th>(.*?)</th>", table) == ["request", "state", "prompt", "new", "seconds", "newest text"]
    assert re.findall(r"<td[^>]*>(.*?)</td>", table) == [cell for row in frame.rows() for cell in row]
    assert "<th>" not in requests_html(frames((0, 0))[0])


def test_speeds_are_drawn_from_left_to_right_the_fastest_at_the_top():
    drawn = draw_speeds([0.0, 50.0, 100.0])
    assert 'points="0.0,48.0 150.0,26.0 300.0,4.0"' in drawn
    assert "up to 100<" in drawn
    assert 'points="0.0,4.0"' in draw_speeds([0.5])
    assert 'points="0.0,48.0"' in draw_speeds([0.0])
    assert 'points=""' in draw_speeds([])


def test_the_table_of_a_terminal():
    out = io.StringIO()
    requests = [progress(number, "running", "the sea [b]") for number in range(MAX_ROWS + 1)]
    frame = History().frame(0.0, {**SNAPSHOT, "generation_tokens": 0}, requests, False)
    Console(file=out, width=100).print(as_table(frame))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert lines[:6] == [
        "requests        1 running, 0 waiting",
        "cache in use    25%",
        "tokens          0 in all, 0.0 per second in the last 0 s",
        "first token     p50 -, p95 -, p99 -",
        "between tokens  p50 5.0 ms, p95 10.0 ms, p99 20.0 ms",
        "request  state    prompt  new  seconds  newest text",
    ]
    assert lines[6] == "0        running  10      20   1.2      the sea [b]"
    assert lines[-1] == "and 1 more"
    assert len(lines) == 6 + MAX_ROWS + 1


def test_text_of_requests_is_escaped_and_their_number_limited():
    hostile = "<script>alert(1)</script>\n\x1b[2J"
    states = [RequestProgress(i, "running", 3, 1, 0.1, hostile) for i in range(MAX_ROWS + 3)]
    frame = History().frame(0.0, {**SNAPSHOT, "generation_tokens": 0}, states, False)
    page = requests_html(frame)
    assert "<script>" not in page
    assert "\x1b" not in page
    assert page.count("<tr>") == 1 + MAX_ROWS
    assert page.endswith("and 3 more")
