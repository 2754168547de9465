"""Requests of every API with changed, missing and hostile fields: an answer or a refusal, and one line of the log."""

import http.client
import json
import logging
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
from helpers import chat_folder
from json_mutants import HOSTILE, change_json, places
from server_runs import RunningServer

SEEDS, MODEL = 8000, "talker"
RIGHT = (200, 400, 404, 413, 422, 429, 501)
TEXTS = [
    "\n2026 INFO injected",
    "a\x1b[2Jb",
    "\u2028x",
    "x" * 3000,
    "../../etc",
    "\"'<>",
    "\ud800",
    "a=b status=500",
    "\0",
]
IDS = [b"ok", b"a b", b"x" * 500, b'"q"', b"id=1", b"a\tb", b"\xe9", b"status=500"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "enum": ["x"]}}, "required": ["a"]}
FUNCTION = {"type": "function", "function": {"name": "get", "description": "d", "parameters": SCHEMA, "strict": True}}
CUSTOM = {"name": "c", "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}}
CHAT = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 3}
CALL = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"a":1}'}}
TURNS = [
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "r"},
]
ITEMS = [
    {"type": "function_call", "call_id": "c", "name": "get", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "x"},
    {"type": "custom_tool_call", "call_id": "d", "name": "c", "input": "i"},
    {"type": "custom_tool_call_output", "call_id": "d", "output": "o"},
]
USES = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "get", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "r"}]},
]
BODIES = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "tools": [FUNCTION], "tool_choice": "required"}),
    ("/v1/chat/completions", {**CHAT, "tools": [{"type": "custom", "custom": CUSTOM}]}),
    (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    ),
    ("/v1/chat/completions", {**CHAT, "guided_grammar": 'root ::= "a" [0-9]+'}),
    ("/v1/chat/completions", {**CHAT, "messages": CHAT["messages"] + TURNS}),
    ("/v1/chat/completions", {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 2, "n": 2, "odd": 1}),
    ("/v1/completions", {"prompt": ["a", [1, 2]], "max_tokens": 2, "echo": True, "logprobs": 1, "stop": ["x"]}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2, "guided_regex": "a+"}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 3, "instructions": "i", "metadata": {}}),
    ("/v1/responses", {"input": ITEMS, "tools": [{"type": "custom", "name": "c"}], "max_output_tokens": 2}),
    (
        "/v1/messages",
        {"max_tokens": 3, "messages": USES, "tools": [{"name": "get", "input_schema": {"type": "object"}}]},
    ),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]}),
    (
        "/api/chat",
        {"messages": USES[:1], "stream": False, "options": {"num_predict": 2}, "format": "json", "tools": [FUNCTION]},
    ),
    ("/api/generate", {"prompt": "x", "stream": False, "options": {"num_predict": 2}, "raw": True, "keep_alive": "5m"}),
    ("/api/show", {}),
    ("/v1/embeddings", {"input": ["a", ""], "encoding_format": "base64"}),
    ("/tokenize", {"prompt": "x", "add_special_tokens": True}),
    ("/detokenize", {"tokens": [1, 2]}),
    ("/completion", {"prompt": "a", "n_predict": 2, "grammar": 'root ::= "a"', "n_probs": 2, "logit_bias": [[1, -1]]}),
    ("/apply-template", {"messages": CHAT["messages"]}),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 2}),
]


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(self.format(record))


def mutate(dice):
    route, body = dice.choice(BODIES)
    body = json.loads(json.dumps({"model": MODEL, **body}))
    for _ in range(dice.choice([0, 1, 1, 2, 3])):
        texts = [place for place in places(body) if isinstance(place[0][place[1]], str)]
        if dice.randrange(3) == 0 and texts:
            container, key = dice.choice(texts)
            container[key] = dice.choice(TEXTS)
        else:
            change_json(dice, body)
    if dice.randrange(10) == 0:
        body[dice.choice([*TEXTS, "tools", "adapter", "lora"])] = dice.choice(HOSTILE)
    return route, body


@pytest.fixture
def log():
    handler, logger = Lines(), logging.getLogger("bitnet_ref")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler.lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def attack(tmp_path, lines, seeds):
    dice, statuses = random.Random("requests"), Counter()
    with RunningServer({MODEL: chat_folder(tmp_path)}, settings={"cache_tokens": 2048}) as server:
        for _ in range(seeds):
            route, body = mutate(dice)
            headers = {"content-type": "application/json"} | (
                {"x-request-id": dice.choice(IDS)} if dice.randrange(2) else {}
            )
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            connection.request("POST", route, json.dumps(body).encode(), headers)
            answer = connection.getresponse()
            data = answer.read()
            connection.close()
            statuses[answer.status] += 1
            assert answer.status in RIGHT, (route, body, data[:500])
            assert answer.headers["x-request-id"], route
            assert b"Traceback" not in data, (route, body)
    assert not [line for line in lines if not line.isprintable()]
    assert len(lines) >= seeds
    print(f"{dict(statuses)}, {len(lines)} lines of the log")


@pytest.mark.thorough
def test_some_mutated_requests(tmp_path, log):
    attack(tmp_path, log, 60)


@pytest.mark.slow
def test_mutated_requests(tmp_path, log):
    attack(tmp_path, log, SEEDS)
