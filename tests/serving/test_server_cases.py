"""What clients rely on, request by request: the behaviour that the tests of llama.cpp's server and of vLLM's OpenAI
entrypoint describe, where it applies, and OpenAI's own reference.

A case is (path, body, expectation). The expectation is a function of the answer, which for a stream is the list of its
events, or (status, parameter, part of the message) of an error.
"""

import base64
import http.client
import json
import re
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from cli_runs import BACKEND
from helpers import chat_folder, first_where, model
from server_runs import RunningServer, ServerLimits, events, until

from bitnet_ref.errors import (
    BackendError,
    ContextOverflow,
    EngineClosed,
    GenerationError,
    OutOfMemory,
    QueueFull,
    RequestTimeout,
    TokenizerError,
)
from bitnet_ref.formats.open import ASSETS
from bitnet_ref.generation.streaming import TextStream
from bitnet_ref.serving.http.choices import Choice
from bitnet_ref.serving.http.failures import blame, describe_failure
from bitnet_ref.serving.http.schemas import RequestError, describe_api, parse_json

OPENAPI = Path(__file__).parents[1] / "data" / "serving" / "openapi.json"
STORY, P = ASSETS / "storyteller", "Once upon a time"
NULLABLE = (
    *("best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty", "seed"),
    *("stop", "stream", "stream_options", "suffix", "temperature", "top_p", "user"),
)
USER = [{"role": "user", "content": "Hello"}]
COMPLETION, CHAT, EMBED = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tool(name, **parameters):
    return {
        "type": "function",
        "function": {"name": name, "description": "-", "strict": True, "parameters": parameters},
    }


def one_of(*values):
    return {"enum": list(values)}


CLOCK = tool(
    "clock", type="object", properties={"zone": one_of("utc", "cet")}, required=["zone"], additionalProperties=False
)
NOTHING = {"type": "function", "function": {"name": "stop"}}
REF = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "required": ["x"], "additionalProperties": False}
TREE = {
    "type": "object",
    "properties": {"v": one_of(1), "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def story():
    return model(STORY, BACKEND, threads=1)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    sources = {"storyteller": STORY, "talker": chat_folder(tmp_path_factory.mktemp("cases"))}
    with RunningServer(sources, chat_template=TEMPLATE, settings={"page_size": 4}) as running:
        yield running


def text(answer, index=0):
    """The text of a choice, of a whole answer or of a stream."""
    if isinstance(answer, list):
        choices = [choice for event in answer for choice in event["choices"] if choice["index"] == index]
        return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)
    choice = answer["choices"][index]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def finish(answer, index=0):
    choices = (
        answer["choices"] if isinstance(answer, dict) else [choice for event in answer for choice in event["choices"]]
    )
    reasons = [c["finish_reason"] for c in choices if c["index"] == index and c["finish_reason"] is not None]
    assert len(reasons) == 1, "one finish_reason for each choice"
    return reasons[0]


def usage(answer):
    u = (answer if isinstance(answer, dict) else answer[-1])["usage"]
    assert u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"]
    return u["prompt_tokens"], u["completion_tokens"]


def calls(answer):
    message = answer["choices"][0]["message"]
    assert message.get("content") in (None, ""), message
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", ())]


def greedy(ask, prompt=P, **body):
    return text(ask(COMPLETION, {"prompt": prompt, "temperature": 0, **body}))


def continued(ask):
    """The token ids of a conversation whose last message goes on."""
    messages = [*USER, {"role": "assistant", "content": "The little"}]
    ids = ask("/tokenize", {"model": "talker", "messages": messages, "continue_final_message": True})["tokens"]
    assert ask("/detokenize", {"tokens": ids})["prompt"].endswith("user: Hello\nassistant: The little")
    return ids


# Each function gets the answer, a function that asks for more, and the model itself.
GOOD = {
    # llama.cpp: completions
    "length": (
        COMPLETION,
        {"prompt": P, "max_tokens": 8},
        lambda a, ask, m: finish(a) == "length" and usage(a) == (5, 8),
    ),
    "default of 16 tokens": (COMPLETION, {"prompt": P, "ignore_eos": True}, lambda a, ask, m: usage(a) == (5, 16)),
    "max_tokens null": (
        COMPLETION,
        {"prompt": P, "max_tokens": None, "ignore_eos": True},
        lambda a, ask, m: usage(a) == (5, 16),
    ),
    "max_tokens 1": (COMPLETION, {"prompt": P, "max_tokens": 1}, lambda a, ask, m: usage(a) == (5, 1)),
    "all fields null": (
        COMPLETION,
        {"prompt": P} | dict.fromkeys(NULLABLE),
        lambda a, ask, m: a["object"] == "text_completion" and a["id"].startswith("cmpl-"),
    ),
    "a stream equals the whole": (
        COMPLETION,
        {"prompt": P, "max_tokens": 12, "temperature": 0, "stream": True},
        lambda a, ask, m: text(a) == greedy(ask, max_tokens=12) and len({event["id"] for event in a}) == 1,
    ),
    "finish in the last chunk, with text": (
        COMPLETION,
        {"prompt": P, "max_tokens": 5, "temperature": 0, "stream": True},
        lambda a, ask, m: (
            finish(a) == "length" and a[-1]["choices"][0]["finish_reason"] and a[-1]["choices"][0]["text"]
        ),
    ),
    "the same seed": (
        COMPLETION,
        {"prompt": P, "seed": 42, "temperature": 1.0},
        lambda a, ask, m: text(a) == text(ask(COMPLETION, {"prompt": P, "seed": 42, "temperature": 1.0, "n": 3})),
    ),
    "other seeds": (
        COMPLETION,
        {"prompt": P, "seed": 0},
        lambda a, ask, m: len({text(a), *(text(ask(COMPLETION, {"prompt": P, "seed": s})) for s in (1, 2, -3))}) == 4,
    ),
    "token ids": (
        COMPLETION,
        {"prompt": [1, 403, 280, 260], "max_tokens": 4, "temperature": 0},
        lambda a, ask, m: usage(a) == (4, 4) and text(a) == greedy(ask, [1, 403, 280, 260], max_tokens=4, n=2),
    ),
    "lists of token ids": (
        COMPLETION,
        {"prompt": [[1, 403], [1, 403]], "temperature": 0},
        lambda a, ask, m: text(a) == text(a, 1) and [c["index"] for c in a["choices"]] == [0, 1],
    ),
    "two prompts, n of each": (
        COMPLETION,
        {"prompt": [P, "Alice"], "n": 2, "seed": 3, "max_tokens": 6},
        lambda a, ask, m: (
            [text(a, i) for i in (0, 1)]
            == [text(ask(COMPLETION, {"prompt": P, "n": 2, "seed": 3, "max_tokens": 6}), i) for i in (0, 1)]
            and len(a["choices"]) == 4
            and usage(a)[1] == 24
        ),
    ),
    "two prompts in a stream": (
        COMPLETION,
        {"prompt": [P, P], "stream": True, "temperature": 0},
        lambda a, ask, m: text(a, 0) == text(a, 1) != "" and all(len(event["choices"]) == 1 for event in a),
    ),
    "an empty prompt": (COMPLETION, {"prompt": "", "max_tokens": 3}, lambda a, ask, m: usage(a) == (1, 3)),
    "logit_bias forbids": (
        COMPLETION,
        {"prompt": P, "temperature": 0, "max_tokens": 1, "logit_bias": {"X": -100}},
        lambda a, ask, m: text(a) != greedy(ask, max_tokens=1),
    ),
    "logit_bias forces": (
        COMPLETION,
        {"prompt": P, "max_tokens": 3, "logit_bias": {"280": 100}},
        lambda a, ask, m: text(a) == m.tokenizer.decode([280]).strip() * 3,
    ),
    "penalties": (
        COMPLETION,
        {"prompt": P, "max_tokens": 40, "temperature": 0, "frequency_penalty": 2, "presence_penalty": 2},
        lambda a, ask, m: len(set(text(a).split())) > len(set(greedy(ask, max_tokens=40).split())),
    ),
    "top_k 1 is greedy": (
        COMPLETION,
        {"prompt": P, "top_k": 1, "temperature": 1.5},
        lambda a, ask, m: text(a) == greedy(ask),
    ),
    "top_k -1 is none": (
        COMPLETION,
        {"prompt": P, "top_k": -1, "seed": 4},
        lambda a, ask, m: text(a) == text(ask(COMPLETION, {"prompt": P, "seed": 4})),
    ),
    "the empty stop list": (COMPLETION, {"prompt": P, "stop": [], "max_tokens": 2}, lambda a, ask, m: usage(a)[1] == 2),
    "min_tokens": (
        COMPLETION,
        {"prompt": P, "min_tokens": 20, "max_tokens": 20, "logit_bias": {"2": 100}},
        lambda a, ask, m: usage(a)[1] == 20,
    ),
    "the end token is no text": (
        COMPLETION,
        {"prompt": P, "logit_bias": {"2": 100}},
        lambda a, ask, m: (text(a), finish(a)) == ("", "stop"),
    ),
    "stop_token_ids": (
        COMPLETION,
        {"prompt": P, "stop_token_ids": [280], "logit_bias": {"280": 100}},
        lambda a, ask, m: finish(a) == "stop" and a["choices"][0]["stop_reason"] == 280,
    ),
    "bad_words": (
        COMPLETION,
        {"prompt": P, "temperature": 0, "max_tokens": 30, "bad_words": ["e"]},  # which any text has
        lambda a, ask, m: "e" not in text(a) and "e" in greedy(ask, max_tokens=30),
    ),
    # vLLM: completions
    "no logprobs": (COMPLETION, {"prompt": P, "logprobs": None}, lambda a, ask, m: a["choices"][0]["logprobs"] is None),
    "logprobs 0": (
        COMPLETION,
        {"prompt": P, "logprobs": 0, "max_tokens": 3},
        lambda a, ask, m: [len(top) for top in a["choices"][0]["logprobs"]["top_logprobs"]] == [1, 1, 1],
    ),
    "logprobs 5": (
        COMPLETION,
        {"prompt": P, "logprobs": 5, "max_tokens": 3},
        lambda a, ask, m: all(5 <= len(top) <= 6 for top in a["choices"][0]["logprobs"]["top_logprobs"]),
    ),
    "the text is its tokens": (
        COMPLETION,
        {"prompt": P, "logprobs": 1, "max_tokens": 20},
        lambda a, ask, m: (
            "".join(a["choices"][0]["logprobs"]["tokens"]) == text(a)
            and all(
                text(a)[at:].startswith(token)
                for token, at in zip(*(a["choices"][0]["logprobs"][k] for k in ("tokens", "text_offset")), strict=True)
            )
        ),
    ),
    "echo": (COMPLETION, {"prompt": P, "echo": True}, lambda a, ask, m: text(a).startswith(P) and usage(a)[1] == 16),
    "echo of token ids": (
        COMPLETION,
        {"prompt": [1, 403, 280], "echo": True, "temperature": 0},
        lambda a, ask, m: text(a) == m.tokenizer.decode([1, 403, 280]) + greedy(ask, [1, 403, 280]),
    ),
    "echo in a stream": (
        COMPLETION,
        {"prompt": [P, "Alice"], "echo": True, "stream": True, "temperature": 0},
        lambda a, ask, m: (text(a), text(a, 1)) == (P + greedy(ask), "Alice" + greedy(ask, "Alice")),
    ),
    "echo with logprobs 0": (
        COMPLETION,
        {"prompt": P, "echo": True, "logprobs": 0, "max_tokens": 5},
        lambda a, ask, m: (
            [len(top or ()) for top in a["choices"][0]["logprobs"]["top_logprobs"]] == [0] + [1] * 9
            and a["choices"][0]["logprobs"]["token_logprobs"][0] is None
        ),
    ),
    "echo with logprobs and n": (
        COMPLETION,
        {"prompt": P, "echo": True, "logprobs": 1, "max_tokens": 2, "n": 2},
        lambda a, ask, m: (
            len({tuple(c["logprobs"]["token_logprobs"][1:5]) for c in a["choices"]}) == 1
            and all(len(c["logprobs"]["tokens"]) == 7 for c in a["choices"])
        ),
    ),
    "echo, logprobs and no new token": (
        COMPLETION,
        {"prompt": P, "echo": True, "logprobs": 1, "max_tokens": 0},
        lambda a, ask, m: text(a) == P and usage(a) == (5, 0) and len(a["choices"][0]["logprobs"]["tokens"]) == 5,
    ),
    "the same in a stream": (
        COMPLETION,
        {"prompt": P, "echo": True, "logprobs": 1, "max_tokens": 0, "stream": True},
        lambda a, ask, m: text(a) == P and len(a[0]["choices"][0]["logprobs"]["tokens"]) == 5,
    ),
    "n differ in a stream": (
        COMPLETION,
        {"prompt": P, "n": 3, "seed": 42, "stream": True},
        lambda a, ask, m: len({text(a, i) for i in range(3)}) == 3 and all(finish(a, i) for i in range(3)),
    ),
    "best_of": (
        COMPLETION,
        {"prompt": P, "n": 2, "best_of": 4, "seed": 1, "max_tokens": 4},
        lambda a, ask, m: len(a["choices"]) == 2 and usage(a)[1] == 16,
    ),
    "usage at the end": (
        COMPLETION,
        {"prompt": P, "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}},
        lambda a, ask, m: usage(a) == (5, 5) and a[-1]["choices"] == [] and all(e["usage"] is None for e in a[:-1]),
    ),
    "usage in every chunk": (
        COMPLETION,
        {
            "prompt": P,
            "max_tokens": 5,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
        lambda a, ask, m: (
            all(e["usage"]["total_tokens"] == 5 + e["usage"]["completion_tokens"] for e in a)
            and a[-1]["usage"]["completion_tokens"] == 5
            and sorted(e["usage"]["completion_tokens"] for e in a) == [e["usage"]["completion_tokens"] for e in a]
        ),
    ),
    "no usage unless asked": (
        COMPLETION,
        {"prompt": P, "stream": True, "stream_options": {"include_usage": False, "continuous_usage_stats": True}},
        lambda a, ask, m: all(event.get("usage") is None for event in a),
    ),
    "empty stream options": (
        COMPLETION,
        {"prompt": P, "stream": True, "stream_options": {}},
        lambda a, ask, m: all(event.get("usage") is None for event in a),
    ),
    "cached tokens": (
        COMPLETION,
        {"prompt": list(range(300, 340)), "max_tokens": 1},
        lambda a, ask, m: (
            ask(COMPLETION, {"prompt": list(range(300, 340)), "max_tokens": 1})["usage"]["prompt_tokens_details"][
                "cached_tokens"
            ]
            >= 32
        ),
    ),
    "a regular expression": (
        COMPLETION,
        {"prompt": P, "guided_regex": " (the|a) (cat|dog)", "max_tokens": 20},
        lambda a, ask, m: re.fullmatch(r" ?(the|a) (cat|dog)", text(a)) and finish(a) == "stop",
    ),
    "a choice": (
        COMPLETION,
        {"prompt": P, "guided_choice": ["yes", "no"], "max_tokens": 20},
        lambda a, ask, m: text(a) in ("yes", "no"),
    ),
    "a grammar": (
        COMPLETION,
        {"prompt": P, "guided_grammar": 'start: "a" "b" ("c" | "d")', "max_tokens": 40},
        lambda a, ask, m: text(a) in ("abc", "abd"),
    ),
    # chats
    "a reply": (
        CHAT,
        {"messages": USER, "max_tokens": 4},
        lambda a, ask, m: (
            (a["object"], a["choices"][0]["message"]["role"]) == ("chat.completion", "assistant")
            and a["id"].startswith("chatcmpl-")
            and usage(a)[1] == 4
        ),
    ),
    "max_completion_tokens": (
        CHAT,
        {"messages": USER, "max_completion_tokens": 3, "ignore_eos": True},
        lambda a, ask, m: usage(a)[1] == 3,
    ),
    "parts of text": (
        CHAT,
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in ("Hel", "lo")]}],
            "temperature": 0,
        }
        | {"max_tokens": 5},
        lambda a, ask, m: (
            text(a) == text(ask(CHAT, {"messages": USER, "temperature": 0, "max_tokens": 5, "model": "talker"}))
        ),
    ),
    "every role and more fields": (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "Be short.", "name": "s"},
                {"role": "developer", "content": "Be kind."},
                *USER,
                {"role": "assistant", "content": None, "refusal": None},
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "1", "type": "function", "function": NOTHING["function"] | {"arguments": ""}}
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "done", "extra": 0},
            ],
            "max_tokens": 2,
        },
        lambda a, ask, m: a["choices"][0]["message"]["content"] is not None,
    ),
    "the role comes first": (
        CHAT,
        {"messages": USER, "max_tokens": 4, "stream": True, "n": 2, "stream_options": {"include_usage": True}},
        lambda a, ask, m: (
            [(e["choices"][0]["index"], e["choices"][0]["delta"]) for e in a[:2]]
            == [(i, {"role": "assistant", "content": ""}) for i in (0, 1)]
            and not any("role" in c["delta"] for e in a[2:] for c in e["choices"])
            and {finish(a, 0), finish(a, 1)} <= {"length", "stop"}
            and a[-1]["choices"] == []
            and {e["object"] for e in a} == {"chat.completion.chunk"}
        ),
    ),
    "a chat's stream equals the whole": (
        CHAT,
        {"messages": USER, "max_tokens": 15, "temperature": 0, "stream": True},
        lambda a, ask, m: text(a) == text(ask(CHAT, {"messages": USER, "max_tokens": 15, "temperature": 0})),
    ),
    "no logprobs in a chat": (
        CHAT,
        {"messages": USER, "logprobs": False, "max_tokens": 2},
        lambda a, ask, m: a["choices"][0]["logprobs"] is None,
    ),
    "no top logprobs": (
        CHAT,
        {"messages": USER, "logprobs": True, "top_logprobs": 0, "max_tokens": 2},
        lambda a, ask, m: [e["top_logprobs"] for e in a["choices"][0]["logprobs"]["content"]] == [[], []],
    ),
    "top logprobs with bytes": (
        CHAT,
        {"messages": USER, "logprobs": True, "top_logprobs": 10, "max_tokens": 5, "temperature": 0},
        lambda a, ask, m: all(
            len(e["top_logprobs"]) == 10
            and e["logprob"] <= 0
            and e["top_logprobs"][0]["token"] == e["token"]
            and bytes(e["bytes"]).decode() == e["token"]
            for e in a["choices"][0]["logprobs"]["content"]
        ),
    ),
    "logprobs in a chat's stream": (
        CHAT,
        {"messages": USER, "logprobs": True, "top_logprobs": 2, "max_tokens": 6, "stream": True},
        lambda a, ask, m: (
            "".join(t["token"] for e in a[1:] for t in e["choices"][0]["logprobs"]["content"]).strip()
            == text(a).strip()
        ),
    ),
    "response_format text": (
        CHAT,
        {"messages": USER, "max_tokens": 2, "response_format": {"type": "text"}},
        lambda a, ask, m: text(a),
    ),
    "json_object": (
        CHAT,
        {"messages": USER, "max_tokens": 30, "response_format": {"type": "json_object"}},
        lambda a, ask, m: text(a).startswith("{"),
    ),
    "json_schema": (
        CHAT,
        {"messages": USER, "max_tokens": 30}
        | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "foooooo"}}}},
        lambda a, ask, m: text(a) == '"foooooo"' and finish(a) == "stop",
    ),
    "json_schema with definitions": (
        CHAT,
        {"messages": USER, "max_tokens": 40, "response_format": {"type": "json_schema"}}
        | {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": REF | {"$defs": {"X": one_of(7)}}, "strict": True},
            }
        },
        lambda a, ask, m: json.loads(text(a)) == {"x": 7},
    ),
    "continue the last message": (
        CHAT,
        {"messages": [*USER, {"role": "assistant", "content": "The little"}], "max_tokens": 6, "temperature": 0}
        | {"continue_final_message": True, "add_generation_prompt": False},
        lambda a, ask, m: text(a) == greedy(ask, continued(ask), max_tokens=6) and text(a)[0] == " ",
    ),
    "continue it in a stream": (
        CHAT,
        {
            "messages": [*USER, {"role": "assistant", "content": [{"type": "text", "text": "The little"}]}],
            "max_tokens": 6,
        }
        | {"continue_final_message": True, "add_generation_prompt": False, "stream": True, "temperature": 0},
        lambda a, ask, m: text(a) == greedy(ask, continued(ask), max_tokens=6) and text(a)[0] == " ",
    ),
    "without a generation prompt": (
        CHAT,
        {"messages": USER, "add_generation_prompt": False, "max_tokens": 5, "temperature": 0, "logprobs": True},
        lambda a, ask, m: (
            a["usage"]["prompt_tokens"]
            == ask("/tokenize", {"messages": USER, "add_generation_prompt": False, "model": "talker"})["count"]
        ),
    ),
    # tools
    "required": (
        CHAT,
        {"messages": USER, "tools": [CLOCK], "tool_choice": "required", "max_tokens": 60, "parallel_tool_calls": False},
        lambda a, ask, m: (
            calls(a)[0] in [("clock", {"zone": z}) for z in ("utc", "cet")]
            and finish(a) == "tool_calls"
            and a["choices"][0]["message"]["tool_calls"][0]["id"].startswith("call_")
        ),
    ),
    "named among others": (
        CHAT,
        {"messages": USER, "tools": [NOTHING, CLOCK], "max_tokens": 60}
        | {"tool_choice": {"type": "function", "function": {"name": "clock"}}},
        lambda a, ask, m: calls(a)[0][0] == "clock",
    ),
    "a tool without parameters": (
        CHAT,
        {
            "messages": USER,
            "tools": [tool("stop", type="object", properties={}, required=[], additionalProperties=False)],
        }
        | {"tool_choice": "required", "max_tokens": 40},
        lambda a, ask, m: calls(a) == [("stop", {})],
    ),
    "two tools whose definitions have one name": (
        CHAT,
        {
            "messages": USER,
            "tools": [tool("a", **REF, **{"$defs": {"X": one_of(1)}}), tool("b", **REF, **{"$defs": {"X": one_of(2)}})],
            "tool_choice": {"type": "function", "function": {"name": "a"}},
            "max_tokens": 60,
        },
        lambda a, ask, m: (
            calls(a) == [("a", {"x": 1})]
            and {json.dumps(calls(ask(CHAT, {**ASKED_REFS, "seed": seed}))) for seed in range(8)}
            <= {json.dumps([("a", {"x": 1})]), json.dumps([("b", {"x": 2})])}
        ),
    ),
    "definitions under their old name": (
        CHAT,
        {
            "messages": USER,
            "tools": [
                tool(
                    "a",
                    type="object",
                    properties={"x": {"$ref": "#/definitions/X"}},
                    required=["x"],
                    additionalProperties=False,
                    definitions={"X": one_of(3)},
                )
            ],
            "tool_choice": "required",
            "max_tokens": 60,
        },
        lambda a, ask, m: calls(a) == [("a", {"x": 3})],
    ),
    "a tool with an $id": (
        CHAT,
        {"messages": USER, "tools": [tool("a", **{"$id": "https://a.example/x", **REF, "$defs": {"X": one_of(4)}})]}
        | {"tool_choice": "required", "max_tokens": 60},
        lambda a, ask, m: calls(a) == [("a", {"x": 4})],
    ),
    "a tool with a property called $ref": (
        CHAT,
        {"messages": USER, "tools": [tool("a", **{**REF, "properties": {"$ref": one_of("x")}, "required": ["$ref"]})]}
        | {"tool_choice": "required", "max_tokens": 60},
        lambda a, ask, m: calls(a) == [("a", {"$ref": "x"})],
    ),
    "a tool that refers to itself": (
        CHAT,
        {
            "messages": USER,
            "tools": [tool("tree", **TREE)],
            "tool_choice": "required",
            "max_tokens": 200,
            "temperature": 0,
        }
        | {"messages": [{"role": "user", "content": "x"}], "logit_bias": {}},
        lambda a, ask, m: finish(a) == "length" or list(calls(a)[0][1]) == ["v", "next"],
    ),
    "a call that max_tokens cuts": (
        CHAT,
        {"messages": USER, "tools": [CLOCK], "tool_choice": "required", "max_tokens": 1},
        lambda a, ask, m: (
            finish(a) == "length"
            and a["choices"][0]["message"]["content"] is None
            and [c["function"] for c in a["choices"][0]["message"]["tool_calls"]]
            == [{"name": "clock", "arguments": ""}]
        ),
    ),
    "the same in a stream, cut": (
        CHAT,
        {"messages": USER, "tools": [CLOCK], "tool_choice": "required", "max_tokens": 3, "stream": True},
        lambda a, ask, m: finish(a) == "length" and text(a) == "",
    ),
    "a call in a stream": (
        CHAT,
        {"messages": USER, "tools": [CLOCK], "tool_choice": "required", "max_tokens": 60, "stream": True},
        lambda a, ask, m: (
            finish(a) == "tool_calls"
            and text(a) == ""
            and {c["index"] for e in a for c in e["choices"][0]["delta"].get("tool_calls", ())} == {0}
        ),
    ),
    "tool_choice none": (
        CHAT,
        {"messages": USER, "tools": [CLOCK], "tool_choice": "none", "max_tokens": 4, "temperature": 0},
        lambda a, ask, m: (
            text(a) == text(ask(CHAT, {"messages": USER, "max_tokens": 4, "temperature": 0}))
            and "tool_calls" not in a["choices"][0]["message"]
        ),
    ),
    "tool_choice auto": (
        CHAT,
        {"messages": USER, "tools": [CLOCK], "tool_choice": "auto", "max_tokens": 4},
        lambda a, ask, m: finish(a) == "length" and text(a),
    ),
    "no tools": (
        CHAT,
        {"messages": USER, "tools": [], "tool_choice": None, "max_tokens": 4},
        lambda a, ask, m: text(a) is not None,
    ),
    # embeddings
    "one text": (
        EMBED,
        {"input": "I believe the meaning of life is"},
        lambda a, ask, m: (
            abs(np.linalg.norm(a["data"][0]["embedding"]) - 1) < 1e-5
            and a["usage"]["prompt_tokens"] == a["usage"]["total_tokens"] > 5
        ),
    ),
    "equal texts": (
        EMBED,
        {"input": ["This is a test"] * 5},
        lambda a, ask, m: len({str(each["embedding"]) for each in a["data"]}) == 1 and a["data"][4]["index"] == 4,
    ),
    "token ids for embedding": (
        EMBED,
        {"input": [[12, 34, 56], [12, 34, 56]]},
        lambda a, ask, m: a["data"][0]["embedding"] == a["data"][1]["embedding"] and a["usage"]["prompt_tokens"] == 6,
    ),
    "an empty text": (EMBED, {"input": ""}, lambda a, ask, m: len(a["data"]) == 1),
    "base64": (
        EMBED,
        {"input": "Alice", "encoding_format": "base64"},
        lambda a, ask, m: (
            list(struct.unpack("<256f", base64.b64decode(a["data"][0]["embedding"]))) == m.embed("Alice").tolist()
        ),
    ),
    "the first dimensions": (
        EMBED,
        {"input": "Alice", "dimensions": 16},
        lambda a, ask, m: a["data"][0]["embedding"] == m.embed("Alice", dimensions=16).tolist(),
    ),
    # tokens
    "tokens and back": (
        "/tokenize",
        {"prompt": "What is the capital of France ?"},
        lambda a, ask, m: (
            ask("/detokenize", {"tokens": a["tokens"][1:]})["prompt"].strip() == "What is the capital of France ?"
            and a["tokens"][0] == m.tokenizer.bos_id
        ),
    ),
    "tokens without BOS": (
        "/tokenize",
        {"prompt": "What", "add_special_tokens": False},
        lambda a, ask, m: m.tokenizer.bos_id not in a["tokens"] and a["token_strs"] is None,
    ),
    "the pieces of tokens": (
        "/tokenize",
        {"prompt": "with unicode 媽 and emoji 🤗", "return_token_strs": True},
        lambda a, ask, m: len(a["token_strs"]) == a["count"] and all(a["token_strs"]),
    ),
    "a conversation's tokens": (
        "/tokenize",
        {"model": "talker", "messages": USER, "tools": [CLOCK]},
        lambda a, ask, m: "clock" in ask("/detokenize", {"tokens": a["tokens"]})["prompt"],
    ),
    "no tokens": ("/detokenize", {"tokens": []}, lambda a, ask, m: a == {"prompt": ""}),
}
ASKED_REFS = {**GOOD["two tools whose definitions have one name"][1], "tool_choice": "required", "model": "talker"}

BAD = {
    # llama.cpp and vLLM: what is refused
    "too long": (COMPLETION, {"prompt": "I believe the meaning of life is" * 64}, 400, None, "length is exceeded"),
    "too long in a stream": (COMPLETION, {"prompt": "life is" * 200, "stream": True}, 400, None, "length is exceeded"),
    "a chat too long": (CHAT, {"messages": USER * 100}, 400, None, "length is exceeded"),
    "no prompt": (COMPLETION, {}, 400, "prompt", "missing"),
    "a null prompt": (COMPLETION, {"prompt": None}, 400, "prompt", "expected string"),
    "an empty list of ids": (COMPLETION, {"prompt": [[]]}, 400, "prompt", "prompt"),
    "ids and texts in one": (COMPLETION, {"prompt": [1, "Alice"]}, 400, "prompt", "prompt"),
    "a negative id": (COMPLETION, {"prompt": [-1]}, 400, "prompt", "prompt"),
    "an id out of the vocabulary": (COMPLETION, {"prompt": [999999]}, 400, None, "not in the vocabulary"),
    "an id that is true": (COMPLETION, {"prompt": [True]}, 400, "prompt", "prompt"),
    "21 logprobs": (COMPLETION, {"prompt": P, "logprobs": 21}, 400, "logprobs", "at most 20"),
    "30 logprobs in a stream": (COMPLETION, {"prompt": P, "logprobs": 30, "stream": True}, 400, "logprobs", "most 20"),
    "logprobs true": (COMPLETION, {"prompt": P, "logprobs": True}, 400, "logprobs", "integer"),
    "a suffix": (COMPLETION, {"prompt": P, "suffix": "."}, 400, "suffix", "no tokens for filling in the middle"),
    "best_of below n": (COMPLETION, {"prompt": P, "n": 2, "best_of": 1}, 400, "best_of", "at least n"),
    "best_of in a stream": (COMPLETION, {"prompt": P, "best_of": 2, "stream": True}, 400, "best_of", "stream"),
    "max_tokens 0": (COMPLETION, {"prompt": P, "max_tokens": 0}, 400, "max_tokens", "at least 1"),
    "max_tokens -1": (COMPLETION, {"prompt": P, "max_tokens": -1}, 400, "max_tokens", "at least 0"),
    "n 0": (COMPLETION, {"prompt": P, "n": 0}, 400, "n", "at least 1"),
    "top_p 1.5": (COMPLETION, {"prompt": P, "top_p": 1.5}, 400, "top_p", "at most 1"),
    "temperature -1": (COMPLETION, {"prompt": P, "temperature": -1}, 400, "temperature", "at least 0"),
    "penalty 3": (COMPLETION, {"prompt": P, "presence_penalty": 3}, 400, "presence_penalty", "at most 2"),
    "a bias of 101": (COMPLETION, {"prompt": P, "logit_bias": {"5": 101}}, 400, "logit_bias.5", "at most 100"),
    "a bias for no token": (COMPLETION, {"prompt": P, "logit_bias": {"x": 1}}, 400, "logit_bias", "token id"),
    "a bias out of the vocabulary": (COMPLETION, {"prompt": P, "logit_bias": {"70000": 1}}, 400, "logit_bias", "70000"),
    "an empty stop": (COMPLETION, {"prompt": P, "stop": ""}, 400, "stop", "stop"),
    "a seed of 2^64": (COMPLETION, {"prompt": P, "seed": 2**64}, 400, "seed", "at most"),
    "a seed of 0.5": (COMPLETION, {"prompt": P, "seed": 0.5}, 400, "seed", "integer"),
    "a broken regex": (COMPLETION, {"prompt": P, "guided_regex": "[.*"}, 400, "guided_regex", "guided_regex"),
    "a broken grammar": (COMPLETION, {"prompt": P, "guided_grammar": "start: x"}, 400, "guided_grammar", "grammar"),
    "two guides": (COMPLETION, {"prompt": P, "guided_regex": "a", "guided_choice": ["a"]}, 400, None, "guided"),
    "stream options without a stream": (
        *(COMPLETION, {"prompt": P, "stream": False, "stream_options": {"include_usage": None}}),
        *(400, "stream_options", "stream=true"),
    ),
    "empty stream options without a stream": (
        *(CHAT, {"messages": USER, "stream_options": {}}),
        *(400, "stream_options", "stream=true"),
    ),
    "no messages": (CHAT, {"messages": None}, 400, "messages", "messages"),
    "an empty conversation": (CHAT, {"messages": []}, 400, "messages", "at least 1"),
    "messages as a text": (CHAT, {"messages": "string"}, 400, "messages", "list"),
    "a message that is a number": (CHAT, {"messages": [123]}, 400, "messages.0", "object"),
    "a message without a role": (CHAT, {"messages": [{}]}, 400, "messages.0.role", "missing"),
    "a role that is a number": (CHAT, {"messages": [{"role": 123}]}, 400, "messages.0.role", "one of"),
    "content that is a number": (
        *(CHAT, {"messages": [{"role": "user", "content": 123}]}),
        *(400, "messages.0.content", "string"),
    ),
    "an image": (
        *(CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
        *(400, "messages.0.content[0]", "image_url is not supported"),
    ),
    "21 top logprobs": (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "most 20"),
    "top logprobs alone": (CHAT, {"messages": USER, "top_logprobs": 2}, 400, "top_logprobs", "logprobs=true"),
    "max_tokens 0 in a chat": (CHAT, {"messages": USER, "max_tokens": 0}, 400, "max_tokens", "at least 1"),
    "a response format of sound": (
        *(CHAT, {"messages": USER, "response_format": {"type": "sound"}}),
        *(400, "response_format.type", "one of"),
    ),
    "json_schema without one": (
        *(CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}),
        *(400, "response_format.json_schema", "missing"),
    ),
    "a schema of no type": (
        CHAT,
        {
            "messages": USER,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "hiccup"}}},
        },
        *(400, "response_format", "hiccup"),
    ),
    "a tool that is not there": (
        *(CHAT, {"messages": USER, "tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}}),
        *(400, "tool_choice", "no tool"),
    ),
    "a named tool without tools": (
        *(CHAT, {"messages": USER, "tool_choice": {"type": "function", "function": {"name": "x"}}}),
        *(400, "tool_choice", "no tools"),
    ),
    "required without tools": (CHAT, {"messages": USER, "tool_choice": "required"}, 400, "tool_choice", "no tools"),
    "an empty tool_choice": (CHAT, {"messages": USER, "tools": [CLOCK], "tool_choice": {}}, 400, "tool_choice", "tool"),
    "a tool without a name": (
        *(CHAT, {"messages": USER, "tools": [{"type": "function", "function": {}}]}),
        *(400, "tools.0.function.name", "missing"),
    ),
    "a tool that takes a list": (
        *(CHAT, {"messages": USER, "tools": [tool("a", type="array")], "tool_choice": "required"}),
        *(400, "tools", "parameters of a"),
    ),
    "a tool whose definition is not there": (
        *(CHAT, {"messages": USER, "tools": [tool("a", **REF)], "tool_choice": "required"}),
        *(400, "tools", "does not exist"),
    ),
    "continue a user's message": (
        *(CHAT, {"messages": USER, "continue_final_message": True}),
        *(400, "continue_final_message", "assistant"),
    ),
    "continue and begin": (
        CHAT,
        {"messages": [{"role": "assistant", "content": "x"}], "continue_final_message": True}
        | {"add_generation_prompt": True},
        *(400, "continue_final_message", "add_generation_prompt"),
    ),
    "a template in a request": (
        CHAT,
        {"messages": USER, "chat_template": "x"},
        400,
        "chat_template",
        "the server's option --chat-template",
    ),
    "no input": (EMBED, {"input": []}, 400, "input", "input"),
    "input that is an object": (EMBED, {"input": {"content": "x"}}, 400, "input", "input"),
    "input too long": (EMBED, {"input": "This is a test " * 512}, 400, None, "length is exceeded"),
    "other dimensions": (EMBED, {"input": "x", "dimensions": 257}, 400, "dimensions", "1 to 256"),
    "an unknown encoding": (EMBED, {"input": "x", "encoding_format": "hex"}, 400, "encoding_format", "one of"),
    "an unknown model": (COMPLETION, {"model": "gpt-9", "prompt": P}, 404, "model", "no model 'gpt-9'"),
    "both a prompt and messages": ("/tokenize", {"prompt": P, "messages": USER}, 400, "prompt", "either"),
    "neither": ("/tokenize", {}, 400, "prompt", "either"),
    "tokens out of the vocabulary": ("/detokenize", {"tokens": [999999]}, 400, None, "999999"),
    "tokens as a text": ("/detokenize", {"tokens": "x"}, 400, "tokens", "list"),
}


def with_model(path, body):
    return {"model": "talker" if path == CHAT else "storyteller", **body}


@pytest.fixture(scope="module")
def ask(server):
    def post(path, body):
        status, _, answer = server.post(path, with_model(path, body))
        assert status == 200, answer
        return events(answer) if body.get("stream") else answer

    return post


@pytest.mark.parametrize("name", GOOD)
def test_requests(server, ask, story, name):
    path, body, is_right = GOOD[name]
    if "X" in (body.get("logit_bias") or ()):
        first = story.generate(P, max_tokens=1).token_ids[0]
        body = {**body, "logit_bias": {str(first): -100}}
    answer = ask(path, body)
    assert is_right(answer, ask, story), json.dumps(answer)[:3000]


@pytest.mark.parametrize("name", BAD)
def test_refusals(server, name):
    path, body, status, param, message = BAD[name]
    got, _, answer = server.post(path, with_model(path, body))
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (got, error["param"], message in error["message"]) == (status, param, True), answer
    assert (error["code"] == "context_length_exceeded") == ("maximum context length" in error["message"])
    assert "overflow=" not in error["message"]  # a parameter of Python
    assert server.post(COMPLETION, {"model": "storyteller", "prompt": P, "max_tokens": 1})[0] == 200  # it goes on


@pytest.mark.thorough
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_wherever_they_end(ask, stream):
    """Every piece of the text as a stop string: those inside a token, those of several, the earliest of two."""
    base = {"prompt": P, "temperature": 0, "max_tokens": 14}
    whole = text(ask(COMPLETION, base))
    for size in (1, 2, 5, 9):
        for start in range(0, len(whole) - size, 4):
            stop = whole[start : start + size]
            answer = ask(COMPLETION, {**base, "stop": [stop, "never"], "stream": stream})
            assert text(answer) == whole[: whole.index(stop)], stop
            assert finish(answer) == "stop"

    def is_found_first(at):
        return whole.index(whole[at : at + 2]) == at < whole.index(whole[at + 3 : at + 6])

    at = first_where(range(1, len(whole) - 6), is_found_first, f"two stop strings in {whole!r}, the earlier one new")
    stop = [whole[at + 3 : at + 6], whole[at : at + 2]]
    assert text(ask(COMPLETION, {**base, "stop": stop, "stream": stream})) == whole[:at]


def test_http_errors_have_openais_form(server):
    """404, 405, 415, 413, HEAD and OPTIONS, without a request's fault reaching the log as one of the server's."""
    wrong = [
        ("GET", "/v1/nothing", None, {}, 404),
        ("POST", "/v1/nothing", "{}", {}, 404),
        ("GET", "/v1/models/nothing", None, {}, 404),
        ("GET", "/v1/models/a/b/c", None, {}, 404),
        ("GET", COMPLETION, None, {}, 405),
        ("DELETE", "/v1/models", None, {}, 405),
        ("OPTIONS", CHAT, None, {"origin": "https://a.example"}, 405),
        ("POST", CHAT, "a=b", {"content_type": "application/x-www-form-urlencoded"}, 415),
        ("POST", CHAT, "{}", {}, 415),
        ("POST", CHAT, "", {"content_type": "application/json"}, 400),
        ("POST", CHAT, "\xff", {"content_type": "application/json"}, 400),
        ("POST", CHAT, "[1]", {"content_type": "application/json; charset=utf-8"}, 400),
        ("POST", EMBED, " " * (5 << 20), {"content_type": "application/json"}, 413),
        ("GET", "/tokenizer_info?model=nothing", None, {}, 404),
    ]
    for method, path, body, headers, status in wrong:
        got, received, answer = server.request(method, path, body, headers)
        assert (got, received.get_content_type()) == (status, "application/json"), (method, path, answer)
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert answer["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert server.get(COMPLETION)[1]["allow"] == "POST"


def test_health_and_models_while_loading(tmp_path):
    server = RunningServer({"storyteller": STORY, "talker": chat_folder(tmp_path)})
    server.hold.clear()
    server.thread.start()
    try:
        until(lambda: server.uvicorn.started)
        assert server.get("/health")[::2] == (503, {"status": "loading"})
        assert [each["loaded"] for each in server.get("/v1/models")[2]["data"]] == [False, False]
        waiting = server.open_request(COMPLETION, {"model": "talker", "prompt": P, "max_tokens": 1})
        server.hold.set()
        assert waiting.recv(100).startswith(b"HTTP/1.1 200")  # it waited for its model
        until(lambda: server.get("/health")[0] == 200)
        waiting.close()
    finally:
        server.hold.set()
        server.__exit__()


def test_the_api_is_the_recorded_one():
    """What clients may send, with its limits. A change that is meant is recorded by running this file."""
    assert describe_api("1.2.3") == json.loads(OPENAPI.read_text())


def test_whole_answers(server, story):
    """Every key of the answers, with the values that the model gives."""

    def asked(path, body, name="storyteller"):
        status, _, answer = server.post(path, {"model": name, **body})
        assert status == 200
        assert 0 <= time.time() - answer.pop("created") < 60
        assert len(answer.pop("id")) == (len("chatcmpl-") if path == CHAT else len("cmpl-")) + 32
        return answer

    def by_text(top):
        return {tokens[token].decode(): logprob for token, logprob in reversed(list(top.items()))}

    tokens, params = story.vocabulary.tokens, {"max_tokens": 3, "temperature": 0.8, "seed": 7, "logprobs": 1}
    prompts = [P, "The king of the"]
    choices, offsets = [], []
    for prompt in prompts:
        for out in story.generate(prompt, n=2, echo=True, **params):
            words = [tokens[token].decode() for token in out.token_ids]
            offsets.append([len("".join(words[:index])) for index in range(3)])
            logprobs = {
                "tokens": words,
                "token_logprobs": out.logprobs,
                "top_logprobs": [by_text(top) for top in out.top_logprobs],
                "text_offset": offsets[-1],
            }
            ends = {"logprobs": logprobs, "finish_reason": "length", "stop_reason": None}
            choices.append({"index": len(choices), "text": "".join(words), **ends})
    counts = [len(story.tokenizer.encode(prompt)) for prompt in prompts]
    answer = asked(COMPLETION, {"prompt": prompts, "n": 2, **params})
    cached = answer["usage"].pop("prompt_tokens_details")
    assert set(cached) == {"cached_tokens"}
    assert answer == {
        "object": "text_completion",
        "model": "storyteller",
        "system_fingerprint": answer["system_fingerprint"],
        "choices": choices,
        "usage": {"prompt_tokens": sum(counts), "completion_tokens": 12, "total_tokens": sum(counts) + 12},
    }
    talker = model(server.shelf.places["talker"].source, BACKEND, threads=1)
    prompt = talker.tokenizer.apply_chat_template(USER, tokenize=True, chat_template=TEMPLATE)
    out = talker.generate(prompt, max_tokens=3, top_k=0, logprobs=2)
    body = {"messages": USER, "max_tokens": 3, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    answer = asked(CHAT, body, "talker")
    assert answer.pop("usage")["completion_tokens"] == 3

    def entry(token, logprob):
        return {"token": tokens[token].decode(), "logprob": logprob, "bytes": list(tokens[token])}

    content = [
        {**entry(token, logprob), "top_logprobs": [entry(*each) for each in top.items()][:2]}
        for token, logprob, top in zip(out.token_ids, out.logprobs, out.top_logprobs, strict=True)
    ]
    assert answer == {
        "object": "chat.completion",
        "model": "talker",
        "system_fingerprint": answer["system_fingerprint"],
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": out.text, "refusal": None},
                "logprobs": {"content": content, "refusal": None},
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
    }


def test_whole_streams(server, story):
    usage = {"include_usage": True, "continuous_usage_stats": True}
    server.post(COMPLETION, {"model": "storyteller", "prompt": P, "max_tokens": 1})  # its first page is cached
    body = {"prompt": P, "max_tokens": 3, "temperature": 0, "stream": True, "stream_options": usage}
    _, headers, answer = server.post(COMPLETION, {"model": "storyteller", **body})
    assert (headers.get_content_type(), headers["cache-control"]) == ("text/event-stream", "no-cache")
    out = story.generate(P, max_tokens=3)
    words, count = [story.vocabulary.tokens[token].decode() for token in out.token_ids], 5
    got = events(answer)
    frame = {"object": "text_completion", "model": "storyteller"}
    frame |= {name: got[0][name] for name in ("id", "created", "system_fingerprint")}
    new = [event["usage"].pop("completion_tokens") for event in got]
    assert [event.pop("usage") for event in got] == [
        {"prompt_tokens": count, "total_tokens": count + each, "prompt_tokens_details": {"cached_tokens": 4}}
        for each in new
    ]
    assert all(index < each <= 3 for index, each in zip((0, 1, 2, 2), new, strict=True))  # those that were read by then
    ends = [None, None, "length"]
    assert got == [
        *(
            {
                **frame,
                "choices": [
                    {"index": 0, "text": word, "logprobs": None, "finish_reason": end, "stop_reason": None},
                ],
            }
            for word, end in zip(words, ends, strict=True)
        ),
        {**frame, "choices": []},
    ]


def test_what_else_a_server_tells(server, story):
    talker = server.shelf.places["talker"].source
    entry = {"object": "model", "created": 0, "owned_by": "bitnet_ref", "loaded": True, "max_model_len": 256}
    assert server.get("/v1/models")[2] == {
        "object": "list",
        "data": [{"id": name, **entry} for name in ("storyteller", "talker")],
    }
    assert server.get("/v1/models/talker")[2] == {"id": "talker", **entry}
    ids = story.tokenizer.encode(P)
    facts = {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": None}
    assert server.post("/tokenize", {"model": "storyteller", "prompt": P})[2] == facts
    bare = server.post("/tokenize", {"model": "storyteller", "prompt": P, "add_special_tokens": False})[2]
    assert bare == {**facts, "count": len(ids) - 1, "tokens": ids[1:]}
    info = {"tokenizer_class": type(story.tokenizer).__name__, "vocab_size": 4096, "model_max_length": 256}
    info |= {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    assert server.get("/tokenizer_info?model=talker")[2] == {"model": "talker", **info}
    assert talker.name == "talker"
    vectors = story.embed(["Alice", "The old man"])
    count = sum(len(story.tokenizer.encode(text)) for text in ("Alice", "The old man"))
    assert server.post(EMBED, {"model": "storyteller", "input": ["Alice", "The old man"]})[2] == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": row.tolist()} for index, row in enumerate(vectors)
        ],
        "model": "storyteller",
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }


@pytest.mark.parametrize(
    ("error", "status", "facts"),
    [
        (RequestError("no", "p", 404, "c"), 404, ("p: no", "not_found_error", "p", "c")),
        (RequestError("no"), 400, ("no", "invalid_request_error", None, None)),
        (QueueFull("full"), 429, ("full", "rate_limit_error", None, None)),
        (RequestTimeout("late"), 504, ("late", "server_error", None, None)),
        (EngineClosed("closed"), 503, ("closed", "server_error", None, None)),
        (OutOfMemory("big"), 503, ("big", "server_error", None, None)),
        (
            TokenizerError("odd", path="/secret", field="prompt"),
            400,
            ("prompt: odd", "invalid_request_error", "prompt", None),
        ),
        (GenerationError("odd", field="n"), 400, ("n: odd", "invalid_request_error", "n", None)),
        (
            ContextOverflow("long"),
            400,
            (
                "This model's maximum context length is exceeded: long",
                "invalid_request_error",
                None,
                "context_length_exceeded",
            ),
        ),
        (BackendError("gone"), 500, ("a fault of the server; its log has the cause", "server_error", None, None)),
        (ValueError("odd"), 500, ("a fault of the server; its log has the cause", "server_error", None, None)),
    ],
)
def test_errors_as_openai_writes_them(error, status, facts):
    assert describe_failure(error) == (
        status,
        {"error": dict(zip(("message", "type", "param", "code"), facts, strict=True))},
    )


def test_whose_fault_an_error_is():
    """The engine's, unless the request's own parameters are the cause."""

    def caused(cause, kind=GenerationError):
        error = kind("failed")
        error.__cause__ = cause
        return error

    for error in (caused(None), caused(TokenizerError("x")), caused(GenerationError("x")), RequestTimeout("late")):
        assert blame(error) is error
    late = caused(ValueError("x"), RequestTimeout)
    assert blame(late) is late
    blamed = blame(caused(ValueError("x")))
    assert (type(blamed), str(blamed)) == (BackendError, "failed")


def test_an_id_without_a_token_has_no_text(story):
    """The embedding may have more rows than there are tokens."""
    choice = Choice.__new__(Choice)
    choice._decoder, choice._offset = TextStream(story.tokenizer, ()), 0
    first, size = story.tokenizer.encode("Alice")[1], story.tokenizer.vocab_size
    offsets = [choice._push(token) for token in (first, size, size + 9, first)]
    assert offsets[0] == 0
    assert offsets[1] == offsets[2] == offsets[3] > 0


def test_json_that_is_read():
    assert parse_json(b'{"a": [1, 2.5, null, "\\u00e9"]}') == {"a": [1, 2.5, None, "é"]}
    assert parse_json(b"[" * 65 + b"]" * 65) is not None  # the last level is within 64 others
    for wrong in (b"[" * 66 + b"]" * 66, b'{"a":' * 66 + b"1" + b"}" * 66, b"NaN", b"[Infinity]", b"\xff", b"{"):
        with pytest.raises(RequestError, match="the body is n") as error:
            parse_json(wrong)
        assert (error.value.status, error.value.field) == (400, None)


@pytest.mark.parametrize("error", [None, OutOfMemory("too large")])
def test_whoever_starts_the_server_is_told_when_it_has_loaded(error):
    server, told = RunningServer({"storyteller": STORY}), []
    server.app.state.on_loaded = told.append
    if error is not None:
        server.shelf._open = lambda path, room: (_ for _ in ()).throw(error)
    server.thread.start()
    until(lambda: told)
    assert told == [error]
    assert server.shelf.is_ready == (error is None)
    server.__exit__()


def test_the_last_request_and_text_that_are_taken():
    body = {"model": "storyteller", "max_tokens": 1}
    limits, settings = ServerLimits(max_streams=2), {"max_queue": 6, "max_batch": 4}
    with RunningServer({"storyteller": STORY}, limits, settings=settings) as server:
        assert server.post(COMPLETION, {**body, "prompt": [P] * 3, "n": 2})[0] == 200
        status, _, answer = server.post(COMPLETION, {**body, "prompt": [P] * 3, "n": 3})
        assert (status, "9 texts are more than" in answer["error"]["message"]) == (400, True)
        endless = {**body, "prompt": P, "stream": True, "max_tokens": 200, "ignore_eos": True}
        waiting = [server.open_request(COMPLETION, endless) for _ in range(2)]
        until(lambda: len(server.engines["storyteller"].requests) == 2)
        status, headers, answer = server.post(COMPLETION, {**body, "prompt": P})
        assert (status, headers["retry-after"]) == (429, "1")
        assert answer["error"]["message"] == "2 requests are running, which is the maximum"
        for connection in waiting:
            connection.close()
        until(lambda: server.post(COMPLETION, {**body, "prompt": P})[0] == 200)


def test_metrics_have_vllms_names(server, ask):
    ask(COMPLETION, {"prompt": P, "max_tokens": 3, "n": 2})
    _, _, page = server.get("/metrics")
    named = set(re.findall(r"^# TYPE bitnet_ref:(\w+) ", page, re.M))
    assert named >= {
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total"),
        *("prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total"),
        *("request_success_total", "time_to_first_token_seconds", "inter_token_latency_seconds"),
        *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
        *("request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens"),
    }
    assert {"process_resident_memory_bytes", "process_cpu_seconds_total"} <= set(
        re.findall(r"^# TYPE (\w+)", page, re.M)
    )
    count = re.search(r'request_generation_tokens_count\{[^}]*model_name="storyteller"[^}]*\} (\S+)', page)
    assert float(count[1]) > 0


def test_a_page_that_is_not_allowed_gets_no_headers():
    limits = ServerLimits(max_body_bytes=2000)
    asked = {"access_control_request_method": "POST", "access_control_request_headers": "authorization, content-type"}
    with RunningServer({"storyteller": STORY}, limits, origins=("https://a.example",), api_keys=("k",)) as server:
        for origin, status in (("https://a.example", 200), ("https://b.example", 400), ("null", 400)):
            got, headers, _ = server.request("OPTIONS", COMPLETION, None, {"origin": origin, **asked})
            assert (got, headers["access-control-allow-origin"]) == (status, origin if status == 200 else None)
        key = {"authorization": "Bearer k", "origin": "https://a.example"}
        status, headers, answer = server.post(COMPLETION, {"prompt": "x" * 3000}, **key)
        assert (status, headers["access-control-allow-origin"]) == (413, "https://a.example")
        for sent in ({}, {"authorization": "Bearer "}, {"authorization": "Basic k"}, {"authorization": "Bearer kk"}):
            status, headers, answer = server.post(COMPLETION, {"prompt": P}, origin="https://a.example", **sent)
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
            assert headers["access-control-allow-origin"] == "https://a.example"  # so that the page can read why
        assert server.post(COMPLETION, {"prompt": P}, authorization="bearer k")[0] == 200


def test_a_body_in_chunks(server):
    """Transfer-Encoding: chunked, in pieces that cut characters."""
    data = json.dumps({"model": "storyteller", "prompt": "é🤗", "max_tokens": 1}, ensure_ascii=False).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    pieces = (data[at : at + 1] for at in range(len(data)))
    connection.request("POST", COMPLETION, pieces, {"content-type": "application/json"}, encode_chunked=True)
    assert connection.getresponse().status == 200
    connection.close()


if __name__ == "__main__":
    text = json.dumps(describe_api("1.2.3"), indent=1)
    text = re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda part: " ".join(part.group().split()), text)  # the innermost in a line
    OPENAPI.write_text(text + "\n")
