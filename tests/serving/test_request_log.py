"""The line of the log that each request leaves, answered or refused, and its id."""

import json
import logging
from types import SimpleNamespace

import pytest
from server_runs import RunningServer, until

from bitnet_ref.formats.open import ASSETS
from bitnet_ref.serving.http import server as server_module
from bitnet_ref.serving.http.admission import ServerLimits
from bitnet_ref.serving.http.request_log import JsonLines, RequestRecord, write_line

KEY = {"authorization": "Bearer k"}
PROMPT = {"model": "storyteller", "prompt": "Once upon a time", "max_tokens": 4}


@pytest.fixture(scope="module")
def server():
    options = {"api_keys": ("k",), "hosts": ("127.0.0.1",), "origins": ("https://a.example",)}
    with RunningServer(
        {"storyteller": ASSETS / "storyteller"}, ServerLimits(max_body_bytes=2000), **options
    ) as running:
        yield running


@pytest.fixture
def last_line(caplog):
    """The facts of the one request that was made."""
    caplog.set_level(logging.DEBUG, "bitnet_ref.requests")

    def read():
        until(lambda: any(hasattr(each, "facts") for each in caplog.records))
        (record,) = [each for each in caplog.records if hasattr(each, "facts")]
        caplog.clear()
        assert record.getMessage() == " ".join(record.getMessage().splitlines())
        written = json.loads(JsonLines().format(record))
        assert {name: written.pop(name) for name in ("level", "logger")} == {
            "level": record.levelname,
            "logger": "bitnet_ref.requests",
        }
        assert written.pop("time")
        assert written == record.facts
        return record.facts | {"level": record.levelname}

    return read


def test_a_request_has_one_line(server, last_line):
    for stream in (False, True):
        status, headers, _ = server.post("/v1/completions", {**PROMPT, "n": 2, "stream": stream}, **KEY)
        line = last_line()
        assert (status, headers["x-request-id"]) == (200, line.pop("id"))
        times = [line.pop(name) for name in ("queue_s", "first_token_s", "total_s")]
        assert times == sorted(times)
        assert line.pop("cached_tokens") in (0, 4)
        facts = {"method": "POST", "path": "/v1/completions", "status": 200, "client": "127.0.0.1", "level": "INFO"}
        assert line == facts | {"model": "storyteller", "prompt_tokens": 5, "completion_tokens": 8}


def test_anthropics_clients_look_for_another_header(server, last_line):
    headers = server.post("/v1/messages", {"messages": []}, **KEY)[1]
    assert last_line()["id"] == headers["request-id"] == headers["x-request-id"]


def test_beams_and_vectors(server, last_line):
    server.post("/v1/completions", {**PROMPT, "n": 3, "use_beam_search": True}, **KEY)
    line = last_line()
    assert (line["prompt_tokens"], line["completion_tokens"]) == (5, 12)
    for path, body in (
        ("/v1/embeddings", {"input": "Once upon a time"}),
        ("/api/embed", {"input": "Once upon a time"}),
        ("/score", {"text_1": "Alice", "text_2": "rabbit"}),
    ):
        server.post(path, {"model": "storyteller", **body}, **KEY)
        line = last_line()
        assert line["prompt_tokens"] >= 5
        assert "completion_tokens" not in line


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "model", "error"),
    [
        ("/v1/completions", PROMPT, {}, 401, None, "invalid_api_key"),
        ("/v1/completions", {**PROMPT, "model": "x\n=1"}, KEY, 404, "x\n=1", "model"),
        ("/v1/completions", {**PROMPT, "tempature": 1}, KEY, 400, "storyteller", "tempature"),
        ("/v1/completions", {"prompt": "x" * 3000}, KEY, 413, None, "invalid_request_error"),
        ("/v1/completions", {**PROMPT, "max_tokens": 5000}, KEY, 400, "storyteller", "context_length_exceeded"),
        ("/no/%0Asuch", {}, KEY, 404, None, "not_found_error"),
        ("/v1/completions", PROMPT, {"host": "evil.example"}, 400, None, "invalid_request_error"),
    ],
)
def test_refused_requests_have_a_line_too(server, last_line, path, body, headers, status, model, error):
    got, answered, _ = server.post(path, body, x_request_id="mine", **headers)
    line = last_line()
    assert (got, line["status"], line.get("model"), line["error"]) == (status, status, model, error)
    assert (answered["x-request-id"], line["id"], line["level"]) == ("mine", "mine", "INFO")


def test_a_fault_has_an_id_too(server, last_line, monkeypatch):
    monkeypatch.setattr(server_module, "embedding_response", lambda *_: 1 / 0)
    status, headers, _ = server.post("/v1/embeddings", {"input": "x"}, origin="https://a.example", **KEY)
    line = last_line()
    assert (status, line["status"], headers["x-request-id"], line["error"]) == (500, 500, line["id"], "server_error")


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é"])
def test_an_id_that_cannot_be_written_is_replaced(server, last_line, given):
    _, headers, _ = server.get("/health", x_request_id=given.encode("latin-1"))
    line = last_line()
    assert headers["x-request-id"] == line["id"] != given
    assert line["level"] == "DEBUG"  # it is asked for all the time


def test_a_stream_whose_client_leaves(last_line):
    with RunningServer({"storyteller": ASSETS / "storyteller"}) as running:
        connection = running.open_request("/v1/completions", {**PROMPT, "max_tokens": 200, "stream": True})
        connection.recv(1000)
        connection.close()
        line = last_line()
    assert (line["status"], line["error"]) == (200, "client_gone")
    assert line["completion_tokens"] < 200


def test_other_records_as_json():
    try:
        raise ValueError("x\ny")
    except ValueError as error:
        record = logging.LogRecord("a", logging.ERROR, "", 0, "failed: %s", ("z\n",), (type(error), error, None))
    line = JsonLines().format(record)
    assert "\n" not in line
    assert json.loads(line)["message"] == "failed: z\n"
    assert json.loads(line)["exception"] == "ValueError: x\ny"


def test_the_facts_of_several_texts():
    """Two texts of each of two prompts. The last has not started, and the one before it has no token yet."""

    def choice(number, start_s, first_s, prompt_tokens):
        facts = {"request_id": number, "arrival_s": 10.5 - number / 8, "start_s": start_s, "first_token_s": first_s}
        story = SimpleNamespace(**facts, prompt_tokens=prompt_tokens, cached_tokens=number, generated_tokens=3 + number)
        return SimpleNamespace(handle=SimpleNamespace(story=story), asked=SimpleNamespace(params={"n": 2}))

    texts = [
        choice(0, 11.00004, 12.0, 5),
        choice(1, 11.5, 11.75006, 5),
        choice(2, 12.0, None, 7),
        choice(3, None, None, 7),
    ]
    counts = {"prompt_tokens": 5 + 7, "cached_tokens": 0 + 2, "completion_tokens": 3 + 4 + 5 + 6}
    times = {"queue_s": 0.875, "first_token_s": 1.6251}  # since the first of them arrived, at 10.125
    assert RequestRecord("x", choices=texts).facts() == counts | times
    assert RequestRecord("x", choices=texts[3:]).facts()["queue_s"] is None
    assert (RequestRecord("x").facts(), RequestRecord("x", prompt_tokens=0).facts()) == ({}, {"prompt_tokens": 0})


@pytest.mark.parametrize(
    ("path", "status", "level"),
    [
        ("/health", 200, "DEBUG"),
        ("/health", 503, "INFO"),
        ("/engine", 200, "DEBUG"),
        ("/v1/models", 200, "INFO"),
        ("/" + "x" * 300, None, "INFO"),
    ],
)
def test_a_whole_line(path, status, level, caplog):
    caplog.set_level(logging.DEBUG, "bitnet_ref.requests")
    write_line({"method": "GET", "path": path}, RequestRecord("i", status, ignored_fields=["a", "b"]), 1.23456)
    (record,) = caplog.records
    line = f'id=i method=GET path={path[:200]} status={status or 499} client="" total_s=1.2346 ignored_fields=a,b'
    assert (record.levelname, record.getMessage()) == (level, line)
