"""The APIs of Anthropic, OpenAI's Responses, Ollama and llama-server: what their references and the tests of other
servers describe, request by request."""

import asyncio
import http.client
import json
from contextlib import closing
from copy import deepcopy
from dataclasses import fields
from functools import partial
from itertools import count
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
from cli_runs import BACKEND
from helpers import DATA, chat_folder, model, stop_words
from server_runs import RunningServer, until

from bitnet_ref.errors import BitNetRefError, EngineClosed
from bitnet_ref.formats.open import ASSETS
from bitnet_ref.formats.safetensors import SafetensorsFile
from bitnet_ref.generation.params import SamplingParams
from bitnet_ref.generation.results import Generation, GenerationStats, StreamChunk
from bitnet_ref.serving.engine_config import EngineConfig
from bitnet_ref.serving.http import llama_server, messages, ollama, ranking, responses, shapes
from bitnet_ref.serving.http.choices import Asked, Choice
from bitnet_ref.serving.http.failures import describe_failure
from bitnet_ref.serving.http.replies import KNOWN_MARKS, ReplyReader
from bitnet_ref.serving.http.responses import ResponseStore, read_response
from bitnet_ref.serving.http.schemas import RequestError, describe_api
from bitnet_ref.serving.http.server import StreamEvents
from bitnet_ref.serving.http.shapes import INFILL_TOKENS
from bitnet_ref.serving.http.shelf import Place
from bitnet_ref.serving.http.tools import ToolReader
from bitnet_ref.serving.http.translate import cut_tokens
from bitnet_ref.serving.http.writers import OpenAIWriter, write_json

TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
TRANSLATIONS, ANSWERS = DATA / "serving" / "translations.json", DATA / "serving" / "answers.json"
HELLO = [{"role": "user", "content": "Hello"}]
ZONE = {
    "type": "object",
    "properties": {"zone": {"enum": ["utc", "cet"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
IMAGE = {"type": "image", "source": {}}
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
CLOCK = {"name": "clock", "description": "The time.", "input_schema": ZONE}
CLOCK_ITEM = {"type": "function", "name": "clock", "description": "The time.", "parameters": ZONE}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    sources = {"talker": chat_folder(tmp_path_factory.mktemp("apis")), "storyteller": ASSETS / "storyteller"}
    with RunningServer(sources, chat_template=TEMPLATE, settings={"page_size": 4}, version="1.2.3") as running:
        yield running


@pytest.fixture
def ask(server):
    def post(path, body, status=200):
        got, _, answer = server.post(path, {"model": "talker", **body})
        assert got == status, answer
        return answer

    return post


@pytest.fixture
def prompt(ask):
    """The text that the model reads for a chat."""

    def render(**chat):
        return ask("/apply-template", chat)["prompt"]

    return render


def named_events(text):
    """[(name, JSON)] of server-sent events that have names."""
    found = []
    for event in text.strip().split("\n\n"):
        if event.startswith(":"):
            continue
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert found[-1][0] == found[-1][1]["type"]
    return found


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


# -- Anthropic ---------------------------------------------------------------------------------------------------------


def test_a_message(ask):
    answer = ask(MESSAGES, {"messages": HELLO, "system": "Be brief.", "max_tokens": 8, "temperature": 0})
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "talker")
    assert answer["id"].startswith("msg_")
    chat = [{"role": "system", "content": "Be brief."}, *HELLO]
    same = ask("/v1/chat/completions", {"messages": chat, "max_tokens": 8, "temperature": 0})
    assert answer["content"] == [{"type": "text", "text": same["choices"][0]["message"]["content"]}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    used = answer["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == same["usage"]["prompt_tokens"]
    assert used["output_tokens"] == 8
    counted = ask(f"{MESSAGES}/count_tokens", {"messages": HELLO, "system": [{"type": "text", "text": "Be brief."}]})
    assert counted == {"input_tokens": same["usage"]["prompt_tokens"]}
    tools = {"messages": HELLO, "tools": [CLOCK], "tool_choice": {"type": "none"}}  # which the model is not shown
    used = ask(MESSAGES, {**tools, "max_tokens": 1})["usage"]
    counted = ask(f"{MESSAGES}/count_tokens", tools)["input_tokens"]
    assert counted == used["input_tokens"] + used["cache_read_input_tokens"]


def test_the_events_of_a_message(ask):
    body = {"messages": HELLO, "max_tokens": 8, "temperature": 0}
    whole, stream = ask(MESSAGES, body), named_events(ask(MESSAGES, {**body, "stream": True}))
    names = [name for name, _ in stream]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    start = stream[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    text = "".join(data["delta"]["text"] for name, data in stream if name == "content_block_delta")
    assert text == whole["content"][0]["text"]
    delta = stream[-2][1]
    assert delta["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 8


def test_stop_sequences_and_a_beginning(ask, prompt):
    whole = ask(MESSAGES, {"messages": HELLO, "max_tokens": 30, "temperature": 0})["content"][0]["text"]
    word = whole.split()[1]
    answer = ask(MESSAGES, {"messages": HELLO, "max_tokens": 30, "temperature": 0, "stop_sequences": [word]})
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", word)
    assert answer["content"][0]["text"] == whole[: whole.index(word)]
    begun = [*HELLO, {"role": "assistant", "content": whole[: whole.index(word)].rstrip()}]
    answer = ask(MESSAGES, {"messages": begun, "max_tokens": 8, "temperature": 0})
    used = answer["usage"]  # no new turn was opened
    assert used["input_tokens"] + used["cache_read_input_tokens"] < len(prompt(messages=begun))
    assert whole.startswith(begun[-1]["content"] + answer["content"][0]["text"][:3])


def test_tools_of_a_message(ask):
    pytest.importorskip("llguidance")
    body = {"messages": HELLO, "max_tokens": 60, "tools": [CLOCK]}
    for choice in ({"type": "any"}, {"type": "tool", "name": "clock"}):
        answer = ask(MESSAGES, {**body, "tool_choice": choice})
        (block,) = answer["content"]
        assert (block["type"], block["name"], answer["stop_reason"]) == ("tool_use", "clock", "tool_use")
        assert block["input"]["zone"] in ("utc", "cet")
        stream = named_events(ask(MESSAGES, {**body, "tool_choice": choice, "stream": True}))
        starts = [data for name, data in stream if name == "content_block_start"]
        assert [(s["content_block"]["type"], s["content_block"]["input"]) for s in starts] == [("tool_use", {})]
        deltas = [data["delta"] for name, data in stream if name == "content_block_delta"]
        assert {delta["type"] for delta in deltas} == {"input_json_delta"}
        assert len(deltas) > 3
        assert json.loads("".join(delta["partial_json"] for delta in deltas))["zone"] in ("utc", "cet")
        assert stream[-2][1]["delta"]["stop_reason"] == "tool_use"
    cut = ask(MESSAGES, {**body, "tool_choice": {"type": "any"}, "max_tokens": 16})
    assert (cut["stop_reason"], cut["content"][0]["name"]) == ("max_tokens", "clock")
    none = ask(MESSAGES, {**body, "tool_choice": {"type": "none"}, "max_tokens": 3})
    assert none["content"][0]["type"] == "text"


def test_results_of_tools_are_messages_of_their_own(ask, prompt):
    use = {"type": "tool_use", "id": "t1", "name": "clock", "input": {"zone": "utc"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Five."}]}
    messages = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "text", "text": "See:"}, use]},
        {
            "role": "user",
            "content": [result, {"type": "text", "text": "Thanks", "cache_control": {"type": "ephemeral"}}],
        },
    ]
    call = {"id": "t1", "function": {"name": "clock", "arguments": '{"zone": "utc"}'}}
    chat = [
        *HELLO,
        {"role": "assistant", "content": "See:", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "Five."},
        {"role": "user", "content": "Thanks"},
    ]
    expected = prompt(messages=chat)
    assert 'See:clock({"zone": "utc"})\ntool: Five.\nuser: Thanks\n' in expected
    count = ask("/tokenize", {"messages": chat})["count"]
    assert ask(f"{MESSAGES}/count_tokens", {"messages": messages}) == {"input_tokens": count}
    ask(f"{MESSAGES}/count_tokens", {"messages": messages, "output_config": {"effort": "huge"}}, 400)
    failed = {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": "no such zone"}
    text_first = {"role": "user", "content": [{"type": "text", "text": "So:"}, failed]}
    assert ask(MESSAGES, {"messages": [*messages[:2], text_first], "max_tokens": 2})["content"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"messages": HELLO}, 400, "max_tokens: is missing"),
        ({"messages": [], "max_tokens": 1}, 400, "messages: expected at least 1 items"),
        ({"messages": HELLO, "max_tokens": 1, "model": "x"}, 404, "no model 'x'"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}], "max_tokens": 1},
            400,
            "image is",
        ),
        ({"messages": HELLO, "max_tokens": 1, "tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "bash_2025"),
        ({"messages": HELLO, "max_tokens": 1, "tool_choice": {"type": "any"}}, 400, "no tools to choose"),
        (
            {"messages": HELLO, "max_tokens": 1, "tools": [CLOCK], "tool_choice": {"type": "tool"}},
            400,
            "tool_choice.name",
        ),
        ({"messages": HELLO, "max_tokens": 1, "temperature": 9}, 400, "temperature"),
    ],
)
def test_errors_have_anthropics_form(ask, body, status, message):
    answer = ask(MESSAGES, body, status)
    assert answer["type"] == "error"
    assert answer["error"]["type"] == {400: "invalid_request_error", 404: "not_found_error"}[status]
    assert message in answer["error"]["message"]


def test_the_key_in_anthropics_header(tmp_path):
    with RunningServer({"talker": chat_folder(tmp_path)}, api_keys=("secret",)) as server:
        body = {"messages": HELLO, "max_tokens": 1}
        status, _, answer = server.post(MESSAGES, body)
        assert (status, answer["error"]["type"]) == (401, "authentication_error")
        assert server.post(MESSAGES, body, x_api_key="wrong")[0] == 401
        assert server.post(MESSAGES, body, x_api_key="secret")[0] == 200
        assert server.post(MESSAGES, body, authorization="Bearer secret")[0] == 200


# -- OpenAI's Responses ------------------------------------------------------------------------------------------------


def test_a_response(ask, server):
    body = {"input": "Hello", "instructions": "Be brief.", "max_output_tokens": 8, "temperature": 0}
    answer = ask(RESPONSES, {**body, "metadata": {"a": "b"}})
    chat = [{"role": "system", "content": "Be brief."}, *HELLO]
    same = ask("/v1/chat/completions", {"messages": chat, "max_tokens": 8, "temperature": 0})
    (item,) = answer["output"]
    assert (answer["id"][:5], item["id"][:4], answer["object"]) == ("resp_", "msg_", "response")
    assert item["content"][0]["text"] == same["choices"][0]["message"]["content"]
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["usage"]["total_tokens"] == same["usage"]["total_tokens"]
    assert answer["metadata"] == {"a": "b"}
    assert server.get(f"{RESPONSES}/{answer['id']}")[2] == answer
    items = server.get(f"{RESPONSES}/{answer['id']}/input_items")[2]["data"]
    content = [{"type": "input_text", "text": "Hello"}]
    assert items == [{"id": f"msg_{answer['id']}_0", "type": "message", "role": "user", "content": content}]


def test_the_events_of_a_response(ask):
    body = {"input": "Hello", "max_output_tokens": 8, "temperature": 0}
    whole, stream = ask(RESPONSES, body), named_events(ask(RESPONSES, {**body, "stream": True}))
    assert [data["sequence_number"] for _, data in stream] == list(range(len(stream)))
    names = [name.removeprefix("response.") for name, _ in stream]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(names[4:-4]) == {"output_text.delta"}
    final = stream[-1][1]["response"]
    text = "".join(data["delta"] for name, data in stream if name.endswith("output_text.delta"))
    assert text == final["output"][0]["content"][0]["text"] == whole["output"][0]["content"][0]["text"]
    assert len({data["item_id"] for _, data in stream if "item_id" in data}) == 1
    assert stream[0][1]["response"]["id"] == final["id"]


@pytest.mark.thorough
def test_calls_and_their_outputs(ask):
    pytest.importorskip("llguidance")
    body = {"input": "Hello", "max_output_tokens": 60, "tools": [CLOCK_ITEM, {"type": "web_search"}]}
    body["tools"].append({"type": "namespace", "name": "agents", "tools": [CLOCK_ITEM]})  # as Codex sends
    for choice in ("required", {"type": "function", "name": "clock"}, ALLOWED):
        answer = ask(RESPONSES, {**body, "tool_choice": choice})
        (call,) = answer["output"]
        assert (call["type"], call["name"], answer["status"]) == ("function_call", "clock", "completed")
        assert json.loads(call["arguments"])["zone"] in ("utc", "cet")
    stream = named_events(ask(RESPONSES, {**body, "tool_choice": "required", "stream": True}))
    deltas = [data["delta"] for name, data in stream if name == "response.function_call_arguments.delta"]
    done = next(data for name, data in stream if name == "response.function_call_arguments.done")
    assert len(deltas) > 3
    assert "".join(deltas) == done["arguments"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "Five."}
    after = ask(RESPONSES, {"input": [output], "previous_response_id": answer["id"], "max_output_tokens": 2})
    alone = ask(RESPONSES, {"input": [*HELLO, call, output], "max_output_tokens": 2})
    referred = [*HELLO, {"type": "item_reference", "id": call["id"]}, output]
    for other in (alone, ask(RESPONSES, {"input": referred, "max_output_tokens": 2})):
        assert other["usage"]["input_tokens"] == after["usage"]["input_tokens"]


ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]}


def test_a_custom_tool(ask):
    pytest.importorskip("llguidance")
    tools = [{"type": "custom", "name": "shell", "description": "Runs a command."}]
    body = {"input": "Hello", "tools": tools, "tool_choice": "required", "max_output_tokens": 200}
    call = ask(RESPONSES, body)["output"][0]
    assert (call["type"], call["name"]) == ("custom_tool_call", "shell")
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
    assert ask(RESPONSES, {"input": [*HELLO, {**call, "input": "ls"}, output], "max_output_tokens": 1})["output"]


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "json_schema", "name": "x", "schema": {"const": "foo"}}, '"foo"'),
        ({"type": "json_object"}, "{"),
        ({"type": "text"}, ""),
    ],
)
def test_the_format_of_a_response(ask, form, expected):
    pytest.importorskip("llguidance")
    answer = ask(RESPONSES, {"input": "Hello", "text": {"format": form}, "max_output_tokens": 10})
    assert answer["output"][0]["content"][0]["text"].startswith(expected)


def test_the_store(ask, server):
    first = ask(RESPONSES, {"input": "Hello", "max_output_tokens": 3, "temperature": 0})
    text = first["output"][0]["content"][0]["text"]
    second = ask(RESPONSES, {"input": "More", "previous_response_id": first["id"], "max_output_tokens": 3})
    chat = [*HELLO, {"role": "assistant", "content": text}, {"role": "user", "content": "More"}]
    assert second["usage"]["input_tokens"] == ask("/tokenize", {"messages": chat})["count"]
    unstored = ask(RESPONSES, {"input": "Hello", "max_output_tokens": 1, "store": False})
    assert server.get(f"{RESPONSES}/{unstored['id']}")[0] == 404
    status, _, answer = server.request("DELETE", f"{RESPONSES}/{first['id']}", None, {})
    assert (status, answer) == (200, {"id": first["id"], "object": "response", "deleted": True})
    assert server.get(f"{RESPONSES}/{first['id']}")[0] == 404
    assert server.request("DELETE", f"{RESPONSES}/{first['id']}", None, {})[0] == 404
    ask(RESPONSES, {"input": "More", "previous_response_id": first["id"], "max_output_tokens": 3}, 404)
    body = {"model": "talker", "input": "More", "previous_response_id": first["id"]}
    error = server.post(RESPONSES, body)[2]["error"]
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")


def test_the_store_is_bounded():
    def response(name):
        return {"id": name, "output": [{"id": f"item {name}"}]}

    store = ResponseStore(max_responses=3, max_bytes=1000)
    for number in range(5):
        store.put(response(f"r{number}"), [], [])
    with pytest.raises(RequestError, match="the last ones only"):
        store.find("r1")
    assert store.find("r4")[0]["id"] == "r4"
    assert store.find_item("item r1") is None
    assert store.find_item("item r4") == {"id": "item r4"}
    store.put(response("large"), ["x" * 2000], [])  # more than all may have
    store.put(response("half"), ["x" * 900], [])
    with pytest.raises(RequestError):
        store.find("r4")
    assert store.find("half")
    size = len(json.dumps([response("a"), [], []]))
    full = ResponseStore(max_responses=2, max_bytes=2 * size)
    for name in "ab":
        full.put(response(name), [], [])
    assert full.find("a")  # two of two, with all bytes
    full.put(response("c"), ["x" * (size - 2)], [])  # as large as all may be
    assert full.find("c")


def test_a_response_is_cancelled(server):
    """The stream ends, and its pages are free."""
    body = {"model": "talker", "input": "Hello", "max_output_tokens": 200, "stream": True}
    data = ""
    with closing(server.open_request(RESPONSES, body, receive_buffer=2048)) as connection:
        while '"object":"response"' not in data:
            data += connection.recv(4096).decode()
        name = data[data.index("resp_") :].partition('"')[0]
        status, _, answer = server.request("POST", f"{RESPONSES}/{name}/cancel", None, {})
        assert status == 200
        assert answer["status"] in ("cancelled", "incomplete")
        while not data.endswith("0\r\n\r\n"):
            data += connection.recv(65536).decode()
    assert "response.incomplete" in data
    until(lambda: not server.engines["talker"].requests)
    assert server.get(f"{RESPONSES}/{name}")[2]["status"] in ("cancelled", "incomplete")


def test_the_events_of_a_response_that_is_cancelled(tmp_path):
    story, store = model(chat_folder(tmp_path), BACKEND, threads=1), ResponseStore()
    with story.engine(sampling={"seed": 0}) as engine:
        asked = read_response({"input": "Hello", "stream": True}, "talker", engine, None, store)
        (choice,) = choices = asked.submit(engine)
        writer = asked.writer(asked, choices)
        assert dict(store.running) == {writer.id: choice}
        text = writer.opening()
        while "output_text.delta" not in text:
            text += writer.part(choice, next(choice.handle)) or ""
        choice.handle.close()
        events = named_events(text + writer.closing())
    assert not store.running
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    kinds = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert [name for name, _ in events[-4:]] == [f"response.{kind}" for kind in kinds]
    response = events[-1][1]["response"]
    assert (response["status"], response["output"]) == ("cancelled", [events[-2][1]["item"]])
    assert response["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input: is missing"),
        ({"input": [{"type": "computer_call"}]}, "computer_call"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image is not supported"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0]"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema: is missing"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0]"),
        ({"input": "x", "tools": [CLOCK_ITEM], "tool_choice": {"type": "x"}}, "tool_choice"),
        ({"input": "x", "reasoning": {"effort": "huge"}}, "reasoning_effort"),
    ],
)
def test_bad_responses(ask, body, message):
    assert message in ask(RESPONSES, body, 400)["error"]["message"]


# -- Ollama ------------------------------------------------------------------------------------------------------------


def test_an_ollama_chat(ask):
    options = {"num_predict": 8, "temperature": 0, "num_ctx": 4096, "mirostat": 0}
    body = {"model": "talker:latest", "messages": HELLO, "options": options}
    stream = lines(ask("/api/chat", body))  # a stream is the default
    whole = ask("/api/chat", {**body, "stream": False})
    assert [line["done"] for line in stream] == [False] * (len(stream) - 1) + [True]
    assert "".join(line["message"]["content"] for line in stream) == whole["message"]["content"]
    same = ask("/v1/chat/completions", {"messages": HELLO, "max_tokens": 8, "temperature": 0})
    assert whole["message"]["content"] == same["choices"][0]["message"]["content"]
    assert (whole["done_reason"], whole["eval_count"]) == ("length", 8)
    assert whole["prompt_eval_count"] == same["usage"]["prompt_tokens"]
    assert whole["eval_duration"] > 0


def test_formats_and_options_of_ollama(ask):
    pytest.importorskip("llguidance")
    body = {"messages": HELLO, "stream": False, "options": {"num_predict": 60}}
    answer = ask("/api/chat", {**body, "format": ZONE})
    assert json.loads(answer["message"]["content"])["zone"] in ("utc", "cet")
    assert ask("/api/chat", {**body, "format": "json", "options": {"num_predict": 3}})["message"]["content"][0] == "{"
    seeded = {**body, "options": {"num_predict": 6, "seed": 3, "temperature": 0.9, "top_k": 50, "stop": ["zzz"]}}
    assert ask("/api/chat", seeded)["message"] == ask("/api/chat", seeded)["message"]
    for wrong, name in (({"num_predict": "x"}, "num_predict"), ({"top_p": 7}, "top_p"), ({"stop": 5}, "stop")):
        assert name in ask("/api/chat", {**body, "options": wrong}, 400)["error"]


def test_ollamas_tools(ask):
    pytest.importorskip("llguidance")
    call = {"function": {"name": "clock", "arguments": {"zone": "utc"}}}
    messages = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_name": "clock", "content": "Five."})
    answer = ask("/api/chat", {"messages": messages, "stream": False, "options": {"num_predict": 1}})
    of_chat = [{**call, "function": {"name": "clock", "arguments": '{"zone": "utc"}'}}]
    chat = [*HELLO, {**messages[1], "tool_calls": of_chat}, {"role": "tool", "content": "Five."}]
    assert answer["prompt_eval_count"] == ask("/tokenize", {"messages": chat})["count"]
    # The format makes the model write what its template's form of calls is.
    form = {"type": "object", "properties": {"name": {"const": "clock"}, "arguments": ZONE}}
    form |= {"required": ["name", "arguments"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "clock", "parameters": ZONE}}
    body = {"messages": HELLO, "tools": [tool], "format": form, "options": {"num_predict": 80}}
    whole = ask("/api/chat", {**body, "stream": False})["message"]
    stream = lines(ask("/api/chat", body))
    for message in (whole, next(line["message"] for line in stream if line["message"].get("tool_calls"))):
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == "clock"
        assert call["function"]["arguments"]["zone"] in ("utc", "cet")
        assert message["content"] == ""
    assert sum("tool_calls" in line["message"] for line in stream) == 1


def test_ollamas_generate(ask):
    options = {"num_predict": 5, "temperature": 0}
    chat = ask("/api/generate", {"prompt": "Hello", "stream": False, "options": options})
    assert (
        chat["response"]
        == ask("/api/chat", {"messages": HELLO, "stream": False, "options": options})["message"]["content"]
    )
    raw = {"prompt": "Once upon a time", "raw": True, "options": options}
    same = ask("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0})
    assert "".join(line["response"] for line in lines(ask("/api/generate", raw))) == same["choices"][0]["text"]
    loaded = ask("/api/generate", {"prompt": ""})
    assert loaded.pop("created_at").endswith("Z")
    assert loaded == {"model": "talker", "response": "", "done": True, "done_reason": "load"}
    unloaded = ask("/api/chat", {"keep_alive": 0})
    assert (unloaded["message"], unloaded["done_reason"]) == ({"role": "assistant", "content": ""}, "unload")
    assert "filling in the middle" in ask("/api/generate", {"prompt": "a", "suffix": "b"}, 400)["error"]
    assert "images" in ask("/api/generate", {"prompt": "a", "images": ["x"]}, 400)["error"]
    assert "seed" in ask("/api/generate", {**raw, "options": {"seed": "x"}}, 400)["error"]
    assert "keep_alive" in ask("/api/generate", {"prompt": "a", "keep_alive": "soon"}, 400)["error"]


def test_what_ollamas_clients_ask_about_models(server, ask):
    tags = server.get("/api/tags")[2]["models"]
    assert [each["name"] for each in tags] == ["talker", "storyteller"]
    assert len({each["digest"] for each in tags}) == 2
    assert server.get("/api/version")[2] == {"version": "1.2.3"}
    details = {
        "parent_model": "",
        "format": "bitnet_ref",
        "family": "bitnet",
        "families": ["bitnet"],
        "parameter_size": "5.8M",
        "quantization_level": "ternary",
    }
    assert all(each["details"] == details for each in tags)
    forever = {"expires_at": "2318-01-01T00:00:00Z", "size_vram": 0, "context_length": 256}
    assert server.get("/api/ps")[2]["models"] == [each | forever for each in tags]
    shown = ask("/api/show", {})
    assert shown["model_info"] == {
        "general.architecture": "bitnet",
        "general.parameter_count": 5767168,
        "bitnet.context_length": 256,
        "bitnet.embedding_length": 256,
        "bitnet.block_count": 6,
        "bitnet.attention.head_count": 4,
        "bitnet.attention.head_count_kv": 2,
    }
    assert (shown["details"], shown["modified_at"]) == (details, tags[0]["modified_at"])
    assert shown["capabilities"] == ["completion", "embedding", "tools"]
    assert "no model 'x'" in ask("/api/show", {"model": "x"}, 404)["error"]


def test_a_head_of_its_own_counts_among_the_parameters():
    folder = DATA / "families" / "olmo2"
    with SafetensorsFile(folder / "model.safetensors") as file:
        shapes = [info.shape for info in file.tensors.values()]
    matrices = [rows * columns for rows, columns in (shape for shape in shapes if len(shape) == 2)]
    assert ollama._count_parameters(model(folder, backend=BACKEND)) == sum(matrices)


def test_what_ollamas_clients_are_told_of_a_file_that_is_not_loaded(tmp_path):
    assert ollama.describe_place("m", Place("m", tmp_path))["modified_at"] == "1970-01-01T00:00:00Z"  # its files left
    path = DATA / "gguf" / "tq2_0.gguf"
    entry = ollama.describe_place("m", Place("m", path))
    assert (entry["size"], entry["details"]["format"]) == (path.stat().st_size, "gguf")
    assert {entry["details"][name] for name in ("family", "parameter_size", "quantization_level")} == {""}
    assert entry["details"]["families"] == []


def test_what_a_model_can_do_is_seen_in_its_template():
    engine = SimpleNamespace(
        model=model(ASSETS / "storyteller", BACKEND, threads=1),
        config=SimpleNamespace(sampling={"repetition_penalty": 1.5, "stop": "END", "logprobs": 1}),
    )
    for template, able in ((None, []), ("x", []), ("tools", ["tools"]), ("</think>", ["thinking"])):
        shown = ollama.describe_model(Place("m", ASSETS / "storyteller"), engine, template)
        assert (shown["template"], shown["capabilities"]) == (template or "", ["completion", "embedding", *able])
    assert shown["parameters"] == "stop END\nrepeat_penalty 1.5"
    assert [ollama._size_name(count) for count in (10**9, 10**9 - 1)] == ["1.0B", "1000.0M"]


def test_how_long_a_model_stays():
    good = {"5m": 300, "1h30m": 5400, "90": 90, "1.5s": 1.5, "200ms": 0.2, " 2h ": 7200, "-1s": None, "-1": None}
    assert {text: ollama.read_seconds(text) for text in good} == good
    assert [ollama.read_seconds(number) for number in (0, 2.5, -1)] == [0, 2.5, None]
    for text in ("", "m", "5m soon", "5 m", "--5m", "1234567890", "5d"):
        with pytest.raises(RequestError, match="keep_alive: expected seconds or a text like '5m', got"):
            ollama.read_seconds(text)


def test_ollamas_embeddings(ask, server):
    texts = ["Alice", "The old man"]
    new = ask("/api/embed", {"input": texts})
    same = [row["embedding"] for row in ask("/v1/embeddings", {"input": texts})["data"]]
    assert new["embeddings"] == same
    assert ask("/api/embeddings", {"prompt": "Alice"}) == {"embedding": same[0]}
    assert 0 < new["total_duration"] < 60e9
    assert (new["load_duration"], new["prompt_eval_count"]) == (
        0,
        sum(ask("/tokenize", {"prompt": t})["count"] for t in texts),
    )
    assert ask("/api/embed", {"input": [], "keep_alive": 600})["embeddings"] == []
    place = server.shelf.places["talker"]
    assert place.keep_s == 600
    place.keep_s = None
    long = {"input": "Hello there. " * 200}
    cut = ask("/v1/embeddings", {**long, "truncate_prompt_tokens": 256, "truncation_side": "right"})
    assert ask("/api/embed", long)["embeddings"][0] == cut["data"][0]["embedding"]
    assert "context" in ask("/api/embed", {**long, "truncate": False}, 400)["error"]
    assert len(ask("/api/embed", {"input": "a", "dimensions": 3})["embeddings"][0]) == 3
    assert "dimensions" in ask("/api/embed", {"input": "a", "dimensions": 300}, 400)["error"]


def test_the_tokens_of_texts_for_vectors():
    story = model(ASSETS / "storyteller", BACKEND, threads=1)
    ids = story.tokenizer.encode("Alice")
    for more, expected in (({}, ids), ({"add_special_tokens": True}, ids), ({"add_special_tokens": False}, ids[1:])):
        assert shapes.embedding_ids(story, {"input": ["Alice", [7, 8]], **more}) == [expected, [7, 8]]


def test_a_model_leaves_when_a_client_wants(tmp_path):
    with RunningServer({"talker": chat_folder(tmp_path)}, idle_s=2.0) as server:
        assert server.get("/api/ps")[2]["models"]
        assert server.post("/api/generate", {"keep_alive": 0})[2]["done_reason"] == "unload"
        until(lambda: not server.get("/api/ps")[2]["models"], timeout_s=1.5)


def test_a_stream_that_is_closed_early_ends_its_tasks():
    async def main():
        class Never:
            def __aiter__(self):
                return self

            async def __anext__(self):
                await asyncio.Event().wait()

        choices = [SimpleNamespace(handle=Never()) for _ in range(2)]
        events = StreamEvents(SimpleNamespace(media_type="text/event-stream", choices=choices))
        await asyncio.sleep(0)
        await events.aclose()
        assert all(task.cancelled() for task in events._tasks)

    try:
        asyncio.run(main())
    except asyncio.CancelledError:
        pytest.fail("closing waits for the tasks, and is not cancelled with them")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_no_answer_has_a_number_that_json_lacks(number):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json({"logprob": number})
    assert write_json({"é": [1, None]}) == '{"é":[1,null]}'


# -- llama-server ------------------------------------------------------------------------------------------------------


def test_llama_servers_completion(ask):
    body = {"prompt": "Once upon a time", "n_predict": 8, "temperature": 0}
    whole = ask("/completion", body)
    same = ask("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0})
    assert whole["content"] == same["choices"][0]["text"]
    assert (whole["stop"], whole["stop_type"], whole["tokens_predicted"]) == (True, "limit", 8)
    assert len(whole["tokens"]) == 8
    stream = [json.loads(line[6:]) for line in ask("/completion", {**body, "stream": True}).split("\n\n") if line]
    assert "".join(each["content"] for each in stream) == whole["content"]
    assert [each["stop"] for each in stream] == [False] * (len(stream) - 1) + [True]
    word = stop_words(whole["content"])[-1]
    cut = ask("/completion", {**body, "stop": [word]})
    assert (cut["stop_type"], cut["stopping_word"]) == ("word", word)
    assert cut["content"] == whole["content"][: whole["content"].index(word)]
    probable = ask("/completion", {**body, "n_probs": 2, "n_predict": 3})["completion_probabilities"]
    assert [len(each["top_logprobs"]) for each in probable] == [2, 2, 2]
    assert [each["id"] for each in probable] == whole["tokens"][:3]
    none = ask("/completion", {**body, "n_predict": 0, "n_probs": 2})  # only fills the cache
    assert (none["content"], none["tokens"], none["completion_probabilities"]) == ("", [], [])
    assert (none["tokens_predicted"], none["tokens_evaluated"], none["stop_type"]) == (0, 5, "limit")
    stream = [
        json.loads(line[6:])
        for line in ask("/completion", {**body, "n_predict": 0, "stream": True}).split("\n\n")
        if line
    ]
    assert [(each["content"], each["tokens"]) for each in stream] == [("", [])] * 2
    pytest.importorskip("llguidance")
    assert ask("/completion", {**body, "grammar": 'root ::= " red"'})["content"] == " red"
    assert "GBNF" in ask("/completion", {**body, "grammar": 'root ::= "a'}, 400)["error"]["message"]


def test_llama_servers_other_paths(server, ask):
    assert ask("/apply-template", {"messages": HELLO})["prompt"] == "<s>user: Hello\nassistant: "
    props = server.get("/props?model=talker")[2]
    assert props == {
        "default_generation_settings": {"n_ctx": 256, "params": {"seed": 0}},
        "total_slots": 8,
        "model_alias": "talker",
        "chat_template": TEMPLATE,
        "modalities": {"vision": False, "audio": False},
        "build_info": "bitnet_ref 1.2.3",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    slots = server.get("/slots?model=talker")[2]
    idle = {"id_task": -1, "n_ctx": 256, "is_processing": False}
    assert slots == [{"id": number, **idle} for number in range(8)]
    message = ask("/infill", {"input_prefix": "a", "input_suffix": "b"}, 400)["error"]["message"]
    assert "no tokens for filling in the middle" in message


def test_filling_in_the_middle(tmp_path):
    """A tokenizer with the tokens, and the model's continuation of them."""
    folder = chat_folder(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    from bitnet_ref.serving.http.shapes import infill_ids
    from bitnet_ref.tokenizers import load_tokenizer

    plain = load_tokenizer(folder)
    with pytest.raises(RequestError, match="filling in the middle"):
        infill_ids(plain, "a", "b", "suffix")
    added = {str(plain.vocab_size + n): {"content": name, "special": True} for n, name in enumerate(names)}
    config["added_tokens_decoder"] = config.get("added_tokens_decoder", {}) | added
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder)
    marks = [tokenizer.token_to_id(name) for name in names]
    before, after = (tokenizer.encode(text, add_special_tokens=False) for text in ("One", "two"))
    expected = [tokenizer.bos_id, marks[0], *before, marks[1], *after, marks[2]]
    assert infill_ids(tokenizer, "One", "two", "suffix") == expected


def test_ranking(ask):
    documents = ["The rabbit ran away.", {"text": "A ship at sea."}, "Alice"]
    answer = ask("/v1/rerank", {"query": "a rabbit", "documents": documents, "return_documents": True})
    scores = [each["relevance_score"] for each in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert sorted(each["index"] for each in answer["results"]) == [0, 1, 2]
    assert all(0 < score < 1 for score in scores)
    assert {each["document"]["text"] for each in answer["results"]} >= {"A ship at sea."}
    assert len(ask("/rerank", {"query": "a", "documents": documents, "top_n": 1})["results"]) == 1
    pairs = ask("/score", {"text_1": "a rabbit", "text_2": ["The rabbit ran away.", "Alice"]})["data"]
    by_index = {each["index"]: each["relevance_score"] for each in answer["results"]}
    assert [each["score"] for each in pairs] == [by_index[0], by_index[2]]
    assert "text_1" in ask("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, 400)["error"]["message"]
    each_with_its_own = {"text_1": ["a rabbit", "b"], "text_2": ["The rabbit ran away.", "c"]}
    told = [ask("/score", each_with_its_own | more)["data"] for more in ({}, {"instruction": ranking.INSTRUCTION})]
    assert told[0] == told[1]
    assert (told[0][0]["score"], len(told[0])) == (by_index[0], 2)


def test_what_a_judge_reads_and_says(monkeypatch):
    tokenizer, asked = ByteTokenizer(None), []

    def score_groups(model, groups):
        asked.extend((show(ids), *map(show, words)) for ids, words in groups)
        totals = [(-1.0, -1.0), (-1.0, -3.0), (-2000.0, 0.0)]
        return [[SimpleNamespace(total=each) for each in pair] for pair in totals]

    monkeypatch.setattr(ranking, "score_groups", score_groups)
    judge = SimpleNamespace(tokenizer=tokenizer)
    question = "<Instruct>: find\n<Query>: q\n<Document>: d"
    scores, tokens = ranking.judge_pairs(judge, "find", [("q", "d")])
    assert scores == pytest.approx([0.5, 1 / (1 + np.exp(-2)), 0.0])
    assert asked == [(f"<s>{ranking.JUDGE}\n\n{question}\n\nAnswer:", "yes", "no")]
    assert tokens == len(asked[0][0]) - len("<s>") + 1
    tokenizer.chat_template = "."
    ranking.judge_pairs(judge, "find", [("q", "d")])
    messages = [{"role": "system", "content": ranking.JUDGE}, {"role": "user", "content": question}]
    assert asked[1][0] == f"{json.dumps([messages, None, {'enable_thinking': False}, None])}."


def test_vectors_of_any_length_are_compared_by_their_angle():
    async def embed(model, given):
        assert given == {"input": ["a", "b", "c"]}
        return np.array([[0.3, 0.4], [0.0, 0.5], [0.0, 0.0]]), 7

    bert = SimpleNamespace(texts_path=None, config=SimpleNamespace(pooling="mean"))
    pairs = [("a", "b"), ("a", "a"), ("b", "c")]
    scores, tokens = asyncio.run(ranking.score_all(SimpleNamespace(embed=embed), bert, pairs, ""))
    assert (scores, tokens) == (pytest.approx([0.8, 1.0, 0.0]), 7)
    assert not ranking.is_embedding_model(SimpleNamespace(texts_path=None, config=SimpleNamespace(pooling="last")))


def test_ranking_by_vectors(tmp_path):
    """A model with sentence-transformers' files is asked for vectors; a text fits itself."""
    folder = chat_folder(tmp_path)
    (folder / "modules.json").write_text("[]")
    with RunningServer({"vectors": folder}) as server:
        body = {"query": "Alice", "documents": ["A ship at sea.", "Alice"]}
        first = server.post("/rerank", body)[2]["results"][0]
        assert first["index"] == 1
        assert first["relevance_score"] == pytest.approx(1, abs=1e-6)


# -- all of them -------------------------------------------------------------------------------------------------------


def test_a_client_of_any_api_that_goes_away_frees_its_pages(server):
    for path, body in (
        (MESSAGES, {"messages": HELLO, "max_tokens": 200}),
        (RESPONSES, {"input": "Hello", "max_output_tokens": 200}),
        ("/api/chat", {"messages": HELLO, "options": {"num_predict": 200}}),
        ("/completion", {"prompt": "Once", "n_predict": 200}),
    ):
        with closing(server.open_request(path, {"model": "talker", "stream": True, **body})) as connection:
            assert b"200 OK" in connection.recv(2000)
    until(lambda: not server.engines["talker"].requests)


def test_other_types_than_json_are_refused(server):
    for path in (MESSAGES, RESPONSES, "/api/chat", "/rerank", "/completion"):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request("POST", path, b"{}", {"content-type": "text/plain", "origin": "http://a.example"})
        assert connection.getresponse().status == 415
        connection.close()


def test_ollamas_clients_need_not_name_the_type(server):
    """As in Ollama's own examples with curl; a web page of another site always sends its origin."""
    data = json.dumps({"model": "talker", "messages": HELLO, "stream": False, "options": {"num_predict": 1}})
    kind = {"content-type": "application/x-www-form-urlencoded"}
    assert server.request("POST", "/api/chat", data, kind)[0] == 200
    for header in ("origin", "sec-fetch-site"):
        assert server.request("POST", "/api/chat", data, {**kind, header: "http://a.example"})[0] == 415
    assert server.request("POST", "/v1/messages", data, kind)[0] == 415


def test_every_path_is_in_the_documentation():
    docs = Path(__file__).parents[2] / "docs"
    text = (docs / "serving.md").read_text(encoding="utf-8")
    for path in describe_api("1")["paths"]:
        assert f"`{path.replace('{id}', 'ID').replace('{name}', 'NAME')}`" in text or path.endswith(
            ("cancel", "_items")
        )


def test_errors_have_the_documented_form(server):
    kinds = {"object": dict, "string": str}  # the latter is Ollama's
    for path, methods in describe_api("1")["paths"].items():
        if "requestBody" in methods.get("post", {}):
            documented = methods["post"]["responses"]["4XX"]["content"]["application/json"]["schema"]
            status, _, answer = server.request("POST", path, b"{", {"content-type": "application/json"})
            assert status == 400
            assert isinstance(answer["error"], kinds[documented["properties"]["error"]["type"]]), path


def test_a_reply_has_room_where_the_prompt_is_cut(tmp_path):
    long = [{"role": "user", "content": "Hello there. " * 100}]
    settings = {"sampling": {"overflow": "truncate", "ignore_eos": True}}
    with RunningServer({"talker": chat_folder(tmp_path)}, settings=settings) as server:
        chat = server.post("/v1/chat/completions", {"messages": long})[2]
        message = server.post(MESSAGES, {"messages": long, "max_tokens": 4096})[2]
        assert (chat["usage"]["completion_tokens"], message["usage"]["output_tokens"]) == (64, 64)


def test_a_guide_of_a_request_replaces_the_servers(tmp_path):
    with RunningServer({"talker": chat_folder(tmp_path)}, settings={"sampling": {"guided_choice": ["yes"]}}) as server:
        guide = {"structured_outputs": {"regex": "no+"}, "max_tokens": 4}
        chat = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], **guide})[2]
        text = server.post("/completion", {"prompt": "Alice", **guide})[2]["content"]
        assert [each.rstrip("o") for each in (chat["choices"][0]["message"]["content"], text)] == ["n", "n"]


def test_a_number_that_no_answer_can_repeat_is_refused(server):
    for body in (
        '{"input": "x", "metadata": {"a": 1e999}}',
        '{"input": [{"role": "user", "content": "x", "a": -1e999}]}',
    ):
        status, _, answer = server.request("POST", RESPONSES, body, {"content-type": "application/json"})
        assert (status, "1e999 is too large a number" in answer["error"]["message"]) == (400, True)
    body = '{"input": "x", "model": "talker", "max_output_tokens": 1, "metadata": {"a": 1e300}}'
    answer = server.request("POST", RESPONSES, body, {"content-type": "application/json"})[2]
    assert answer["metadata"] == {"a": 1e300}


def test_the_seed_minus_one_is_a_random_one(ask):
    """As in vLLM, llama-server and Ollama."""
    options = {"num_predict": 12, "seed": -1, "temperature": 2}
    bodies = {
        "/v1/completions": {"prompt": "Once", "max_tokens": 12, "seed": -1, "temperature": 2},
        "/completion": {"prompt": "Once", "n_predict": 12, "seed": -1, "temperature": 2},
        "/api/generate": {"prompt": "Once", "raw": True, "stream": False, "options": options},
    }
    for path, body in bodies.items():
        answers = [ask(path, body) for _ in range(3)]
        texts = [e["choices"][0]["text"] if "choices" in e else e.get("content", e.get("response")) for e in answers]
        assert len(set(texts)) > 1, path


def test_whole_numbers_may_have_a_point(ask):
    """JSON Schema takes 1.0 for an integer, where no list of parameters refuses it."""
    assert len(ask("/rerank", {"query": "a", "documents": ["b", "c"], "top_n": 1.0})["results"]) == 1
    assert ask("/completion", {"prompt": [5.0, 6.0], "n_predict": 2})["tokens_predicted"] == 2
    thinking = {"type": "enabled", "budget_tokens": 4.0}
    assert ask(MESSAGES, {"messages": HELLO, "max_tokens": 3, "thinking": thinking})["usage"]["output_tokens"] == 3


def test_a_stream_that_fails_says_so_in_its_own_form(tmp_path):
    """An engine that is closed under a stream: the last event is an error, with no word of an end."""
    story, facts = model(chat_folder(tmp_path), BACKEND, threads=1), describe_failure(EngineClosed("it was closed"))
    store = ResponseStore()
    with story.engine() as engine:
        for read, expected in ((messages.read_message, "overloaded_error"), (ollama.read_chat, '{"error":"')):
            asked = read({"messages": HELLO, "max_tokens": 4}, "talker", engine, None)
            assert expected in asked.writer(asked, asked.submit(engine)).failure(*facts)
        asked = read_response({"input": "Hello", "stream": True}, "talker", engine, None, store)
        writer = asked.writer(asked, asked.submit(engine))
        (name,) = store.running
        ((kind, failed),) = named_events(writer.failure(*facts))
        assert (kind, failed["response"]["id"], failed["response"]["status"]) == ("response.failed", name, "failed")
        assert "it was closed" in failed["response"]["error"]["message"]
        assert not store.running


# -- all of them -------------------------------------------------------------------------------------------------------


DEFAULTS = EngineConfig()
SPECIAL = ("<s>", "</s>", "<think>", "</think>", "<tool_call>", "</tool_call>", *INFILL_TOKENS[0])


class ByteTokenizer:
    """A token for each byte, then the special ones. Its chat template writes down what it is given."""

    bos_id, eos_ids, special_ids = 256, {257}, list(range(256, 256 + len(SPECIAL)))

    def __init__(self, chat_template):
        self.chat_template = chat_template

    def encode(self, text, add_special_tokens=True):
        return [self.bos_id] * add_special_tokens + [*text.encode()]

    def token_to_id(self, name):
        return 256 + SPECIAL.index(name) if name in SPECIAL else None

    def template_for(self, has_tools):
        return self.chat_template

    def apply_chat_template(self, messages, adds=True, tools=None, chat_template=None, variables=None, tokenize=False):
        end = self.chat_template if adds else ""
        text = f"{json.dumps([messages, tools, variables, chat_template], ensure_ascii=False)}{end}"
        return self.encode(text, add_special_tokens=False) if tokenize else text


def an_engine(template=None, **sampling):
    config = SimpleNamespace(vocab_size=300, context_length=1000)
    model = SimpleNamespace(tokenizer=ByteTokenizer(template), config=config, context_length=1000)
    settings = EngineConfig(sampling=sampling) if sampling else DEFAULTS
    return SimpleNamespace(model=model, config=settings, cache=SimpleNamespace(capacity=800))


def show(ids):
    return ids if isinstance(ids, str) else "".join(SPECIAL[each - 256] if each > 255 else chr(each) for each in ids)


def show_asked(asked):
    """What a request that was read asks for, as JSON; without what it does not say."""
    facts = {each.name: getattr(asked, each.name) for each in fields(Asked) if each.name not in ("id", "created")}
    defaults = vars(Asked("m", [], {}, False))
    reply, params = facts.pop("reply"), facts["params"]
    facts = {name: value for name, value in facts.items() if value != defaults[name]}
    facts["prompts"] = list(map(show, facts["prompts"]))
    if asked.custom:
        facts["custom"] = list(asked.custom)
    for name in {"shown_tokens", "guide_after"} & params.keys():
        params[name] = show(params[name])
    for number, each in enumerate(params.get("processors", ())):
        facts[f"processor {number}"] = vars(each) or np.flatnonzero(each(None, np.zeros(300)) == 0).tolist()
    params.pop("processors", None)
    if reply._thinking is not None:
        facts["thinking"] = vars(reply._thinking)
    if (tools := reply._tools) is not None:
        names = "tools", "_name", "is_forced", "_one_call"
        facts["tools"] = {name: vars(tools)[name] for name in names if name in vars(tools)}
        facts["form"] = tools.form.name if hasattr(tools, "form") else None
    return facts


def translate(case):
    """What a body asks for, of another API as OpenAI's chats and completions say it, or why it is refused."""
    body, asked = deepcopy(case["body"]), []

    def ask(given, name, engine, *_):
        asked.append({key: value for key, value in given.items() if value is not None})
        return SimpleNamespace()

    class Store:
        def find(self, name, field):
            return {"resp_1": ({}, [], [*HELLO, {"role": "assistant", "content": "Hi"}])}[name]

        def find_item(self, name):
            reply = [{"type": "output_text", "text": "Hi"}]
            return {"msg_1": {"id": name, "type": "message", "role": "assistant", "content": reply}}.get(name)

    engine = an_engine(case.get("own_template"), **case.get("sampling", {}))
    read = {
        "/v1/completions": shapes.read_completion,
        "/v1/chat/completions": shapes.read_chat,
        "/v1/messages": messages.read_message,
        "/v1/responses": partial(responses.read_response, store=Store()),
        "/api/chat": ollama.read_chat,
        "/api/generate": ollama.read_generate,
        "/completion": llama_server.read_completion,
        "/infill": llama_server.read_infill,
    }[case["path"]]
    with pytest.MonkeyPatch.context() as patch:
        for module in (messages, responses, ollama, llama_server):
            for name in ("ask_chat", "ask_completion"):
                patch.setattr(module, name, ask, raising=False)
        try:
            result = read(body, "m", engine, case.get("template"))
        except BitNetRefError as problem:
            return {"refused": str(problem)}
    return json.loads(json.dumps({"asked": asked[0], **vars(result)} if asked else show_asked(result)))


def test_what_bodies_ask_for():
    """A change that is meant is recorded by running this file."""
    for case in json.loads(TRANSLATIONS.read_text()):
        expected = case.pop("result")
        assert translate(case) == expected, case


WORDS = [b"", b"Once", b" upon", b" a", b" time", b"\xe2\x82", b"\xac"]
CALLED = '<tool_call>{"name": "clock", "arguments": {"zone": "utc"}}</tool_call>'
SQL = CALLED.replace("clock", "sql").replace('"zone": "utc"', '"input": "SELECT 1"')
# The pieces of a reply, why it ended, and the string or token that ended it
REPLIES = {
    "text": (("Once", " upon", " a"), "length", None),
    "a stop string": (("Once", ""), "stop", "END"),
    "an end token": (("Once", ""), "stop", 2),
    "nothing": (("",), "filtered", "no"),
    "thinking": (("<think>H", "m.</think>", "\n\nYes", "."), "stop", 2),
    "only thinking": (("<think>H", "m."), "length", None),
    "calls": (("See: ", CALLED[:50], CALLED[50:], CALLED.replace("utc", "cet")), "stop", 2),
    "a call that is cut": (("<think>Hm</think>" + CALLED[:45], CALLED[45:50]), "length", None),
    "a custom tool": ((SQL[:60], SQL[60:] + CALLED), "stop", 2),
    "a custom tool's call that is cut": ((SQL[:60],), "length", None),
    "no end": (("Once", " upon"), None, None),
}
SEVERAL = {"n": 2, "top": 2, "params": {"n": 3, "echo": True, "prompt_logprobs": 1}, "shows_prompt_logprobs": True}
SETTINGS = {"store": False, "parallel_tool_calls": False, "tool_choice": "required", "metadata": {"a": "b"}}
SETTINGS |= {"tools": [CLOCK_ITEM], "text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "low"}}
SAMPLING = {"temperature": 0.5, "top_p": 0.9}
FRAMES = {"stream": True, "usage_in_stream": True, "usage_in_chunks": True}
ERROR = {"message": "out of order", "type": "server_error", "param": None}
# Of chats and completions: the name of a reply and what is asked for beside the text
ASKED = {
    "a chat with usage": ("text", {"is_chat": True, **FRAMES}),
    "the usage of a stream": ("text", {"is_chat": True, "stream": True, "usage_in_stream": True}),
    "a chat with log probabilities": ("text", {"is_chat": True, "top": 1, "return_token_ids": True}),
    "a stream with log probabilities": ("text", {"is_chat": True, "top": 0, "return_token_ids": True, "stream": True}),
    "names of ids": ("text", {"is_chat": True, "top": 1, "return_tokens_as_token_ids": True}),
    "functions": ("calls", {"is_chat": True, "has_functions": True}),
    "a stream of functions": ("calls", {"is_chat": True, "has_functions": True, "stream": True}),
    "thinking that is not wanted": ("thinking", {"is_chat": True, "hides_reasoning": True}),
    "a beginning": ("text", {"is_chat": True, "prefix": "So "}),
    "a beginning of a stream": ("text", {"is_chat": True, "prefix": "So ", "stream": True}),
    "the best of several": ("text", SEVERAL),
    "several": ("text", {**SEVERAL, "n": 3}),
    "fewer texts than beams": ("text", {"n": 3, "params": {"n": 3, "num_beams": 3}}),
    "a completion": ("a stop string", {"params": {"echo": True}, "include_stop_str_in_output": True}),
    "an echo": ("text", {"params": {"echo": True}, "echo": True, "top": 2}),
    "an echo in a stream": ("text", {"params": {"echo": True}, "echo": True, "top": 2, **FRAMES}),
    "ids in log probabilities": ("text", {"top": 1, "return_tokens_as_token_ids": True, "stream": True}),
    "only scored": ("text", {"params": {"echo": True}, "echo": True, "top": 1, "is_only_scored": True}),
    "only scored in a stream": (
        "text",
        {"params": {"echo": True}, "is_only_scored": True, "return_token_ids": True, "stream": True},
    ),
}


class WordDecoder:
    """Of a tokenizer whose texts begin with a space, which is no part of them."""

    text = ""

    def push(self, token):
        before, self.text = self.text, self.text + WORDS[token].decode("utf-8", "ignore")
        return self.text.lstrip()[len(before.lstrip()) :]


def make_writer(api, stream, reply="text", body=MappingProxyType({"input": "Hi", "instructions": "Be"}), **asked):
    """(the writer of an API for a request, the chunks of each of its texts)"""
    _, finish, stop = REPLIES[reply]
    store = responses.ResponseStore(max_responses=1)

    def write_response(asked, choices):
        items = [{"role": "user", "content": "Hi"}]
        return responses.ResponseWriter(asked, choices, body, (items, items), store)

    writers = {
        "openai": OpenAIWriter,
        "anthropic": messages.MessageWriter,
        "responses": write_response,
        "ollama": ollama.ChatWriter,
        "ollama's generate": ollama.GenerateWriter,
        "llama-server": llama_server.CompletionWriter,
    }
    model = SimpleNamespace(
        vocabulary=SimpleNamespace(name=WORDS.__getitem__),
        tokenizer=SimpleNamespace(
            stream_decoder=lambda shown: WordDecoder(),
            has_id=lambda token: True,
            encode=lambda text, add_special_tokens=True: ["<s>"] * add_special_tokens + text.split(),
        ),
    )
    asked = Asked("m", [[0, 1, 2]], **{"params": {}, "is_chat": api not in ("openai", "llama-server"), **asked})
    asked.stream, asked.fingerprint = stream, "fp"
    if asked.is_chat:
        tools = ToolReader({"clock": {}, "sql": {}}, False)
        asked.reply, asked.custom = ReplyReader(KNOWN_MARKS[0], tools), frozenset(["sql"])
    choices, chunks, results = [], [], []
    for index in range(asked.params.get("n", 1)):
        pieces = REPLIES[reply][0] * (1 + index % 2)
        ids, last = [3 + number % 4 for number in range(len(pieces))], len(pieces) - 1
        tops = [{token: (-0.75, -0.5, -1.0)[index], 1: -1.5} for token in ids]
        ends = [(finish, stop) if number == last else (None, None) for number in range(len(pieces))]
        steps = zip(pieces, ids, ends, tops, strict=True)
        chunks.append([StreamChunk(piece, token, top[token], *end, top) for piece, token, end, top in steps])
        stats = GenerationStats("numpy", 3, 1, len(ids), 0.25, 0.5, len(ids) - 1, dropped_tokens=int(stop == 2))
        prompt = [None, {1: -0.25, 4: -0.125}, {2: -0.5}]
        logprobs, echo = [top[token] for token, top in zip(ids, tops, strict=True)], ""
        if "echo" in asked.params:
            first, echo = vars(chunks[-1][0]), "Once upon"
            chunks[-1][0] = StreamChunk(**{**first, "text": echo + first["text"]})
        result = Generation(echo + "".join(pieces), ids, finish, logprobs, [0, 1, 2], stats, stop, tops, prompt)
        facts = {"prompt_token_ids": [0, 1, 2], "echo": "Once upon", "prompt_logprobs": prompt, "stats": stats}
        results.append(result)
        handle = SimpleNamespace(**facts, result=partial(pick_results, results, result, asked))
        choices.append(Choice(asked, index, handle, model, index))
    return writers[api](asked, choices), chunks


def pick_results(results, own, asked):
    """What a handle gives: of beams all texts, and here one fewer than was asked for."""
    return results[:-1] if "num_beams" in asked.params else own


def write_reply(api, stream, code="", **asked):
    """What an API writes, as JSON: an object, or the events of a stream. Ids are numbers, and time stands still.

    code: of an error that ends a stream."""
    numbers = count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uuid.uuid4", lambda: SimpleNamespace(hex=str(next(numbers))))
        patch.setattr("time.time", lambda: 5.0)
        patch.setattr(ollama, "now", lambda: "now")
        writer, chunks = make_writer(api, stream, **asked)
        if not stream:
            return json.loads(write_json(writer.whole([choice.result() for choice in writer.choices])))
        text = writer.opening()
        for choice, of_choice in zip(writer.choices, chunks, strict=True):
            parts = [writer.part(choice, chunk) for chunk in of_choice]
            text += "".join(writer.text(part) for part in parts if part is not None)
        text += writer.failure(500, {"error": {**ERROR, "code": code}}) if code != "" else writer.closing()
    if api.startswith("ollama"):
        return lines(text)
    pieces = [piece.split("data: ") for piece in text.removesuffix("\n\n").split("\n\n")]
    return [[name.strip(), data if data == "[DONE]" else json.loads(data)] for name, data in pieces]


def all_replies():
    """{api, reply and "stream" or "whole": what is written}"""
    asked = {f"openai, {name}": ("openai", {"reply": reply, **more}) for name, (reply, more) in ASKED.items()}
    for api in ("openai", "anthropic", "responses", "ollama", "ollama's generate", "llama-server"):
        of_text = [name for name in REPLIES if "tool" not in name and "call" not in name and "thinking" not in name]
        for reply in of_text if api in ("ollama's generate", "llama-server") else REPLIES:
            more = {"is_chat": True} if api == "openai" else {"top": 1} if api == "llama-server" else {}
            asked[f"{api}, {reply}"] = (api, {"reply": reply, **more})
        asked[f"{api}, a failure"] = (api, {"reply": "no end", "code": "out"})
        asked[f"{api}, a failure without a code"] = (api, {"reply": "no end", "code": None})
    asked["llama-server, only scored"] = ("llama-server", {"reply": "text", "is_only_scored": True})
    asked["responses, settings"] = ("responses", {"reply": "text", "body": SETTINGS, "params": SAMPLING})
    replies = {}
    for name, (api, options) in asked.items():
        given = options.pop("stream", None)
        for stream in (True, False) if given is None else (given,):
            if not ((stream and "n" in options.get("params", {})) or (not stream and options["reply"] == "no end")):
                replies[f"{name}, {'stream' if stream else 'whole'}"] = write_reply(api, stream, **options)
    return replies


@pytest.mark.parametrize(
    ("tokens", "wanted", "left", "sampling"),
    [
        (780, 21, 20, {}),
        (780, 20, 20, {}),
        (780, None, None, {}),
        (780, None, 20, {"max_tokens": 30}),
        (798, 9, 2, {}),
        (799, 9, 1, {}),
        (800, 9, 9, {}),  # the engine refuses it
        (780, 21, 21, {"overflow": "sliding"}),
        (900, 500, 200, {"overflow": "truncate"}),
    ],
)
def test_replies_are_cut_to_what_fits(tokens, wanted, left, sampling):
    for prompt in ([7] * tokens, "x" * (tokens - 1)):  # a token begins each text
        asked = Asked("m", [prompt], {} if wanted is None else {"max_tokens": wanted}, False)
        assert cut_tokens(asked, an_engine(**sampling), OpenAIWriter).params.get("max_tokens") == left
    with pytest.raises(RequestError, match="prompt: expected one"):
        cut_tokens(Asked("m", ["a", "b"], {}, False), an_engine(), OpenAIWriter)


def test_what_a_request_submits():
    def submit(prompts, priority=0, **params):
        calls = []

        def note(name, prompt, echo, **options):
            calls.append((name, prompt, options))
            return [SimpleNamespace(prompt_token_ids=[7])] * options["n"]

        engine = SimpleNamespace(
            config=SimpleNamespace(max_queue=4, params=lambda given: SamplingParams()),
            model=SimpleNamespace(vocabulary=None, tokenizer=SimpleNamespace(stream_decoder=lambda shown: None)),
            submit=lambda prompt, **options: note("submit", prompt, **options)[0],
            streams=partial(note, "streams"),
        )
        choices = Asked("m", prompts, params, False, priority=priority).submit(engine, 9.0)
        return [(choice.index, choice._rank) for choice in choices], calls

    rest = {"priority": 0, "timeout_s": 9.0}
    assert submit(["a"]) == ([(0, 0)], [("streams", "a", {**rest, "n": 1})])
    two, options = [(0, 0), (1, 1), (2, 0), (3, 1)], {**rest, "priority": 2, "n": 2}
    assert submit(["a", "b"], 2, n=2) == (two, [("streams", "a", options), ("streams", "b", options)])
    options = {**rest, "n": 2, "num_beams": 2}
    assert submit(["a"], n=2, num_beams=2) == (two[:2], [("submit", "a", options)])
    options = {**rest, "n": 1, "num_beams": 1}
    assert submit(["a"], n=1, num_beams=1) == (two[:1], [("streams", "a", options)])
    with pytest.raises(RequestError, match="prompt: 5 texts are more than this server's queue holds"):
        submit(["a"], n=5)


def test_what_each_api_writes():
    """A change that is meant is recorded by running this file."""
    recorded, written = json.loads(ANSWERS.read_text()), all_replies()
    assert written.keys() == recorded.keys()
    for name, reply in written.items():
        assert reply == recorded[name], name


if __name__ == "__main__":
    replies = [f"{json.dumps(name)}: {json.dumps(each, ensure_ascii=False)}" for name, each in all_replies().items()]
    ANSWERS.write_text("{\n" + ",\n".join(replies) + "\n}\n")
    cases = [{**case, "result": translate(case)} for case in json.loads(TRANSLATIONS.read_text())]
    TRANSLATIONS.write_text("[\n" + ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases) + "\n]\n")
