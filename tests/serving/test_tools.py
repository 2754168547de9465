"""Calls in a reply's text: the model's own words are handed on, and reading them takes one pass."""

import json
import time

import pytest

from bitnet_ref.serving.http.chat_prompt import _plain_call
from bitnet_ref.serving.http.events import Block, CallArguments, CallStart, Text
from bitnet_ref.serving.http.ollama import _arguments_of
from bitnet_ref.serving.http.schemas import RequestError, parse_json
from bitnet_ref.serving.http.tools import ToolReader
from bitnet_ref.serving.http.writers import write_json

TOOLS = {"look": {"type": "object"}}


def read(text, is_forced=False, pieces=1):
    """The text that is no call, and the arguments of each call."""
    reader, events = ToolReader(TOOLS, is_forced), []
    size = max(1, len(text) // pieces)
    parts = [text[start : start + size] for start in range(0, len(text), size)] or [""]
    for number, part in enumerate(parts):
        events += reader.push(part, "stop" if number == len(parts) - 1 else None)
    calls = ["" for event in events if isinstance(event, CallStart)]
    for event in events:
        if isinstance(event, CallArguments):
            calls[event.index] += event.text
    return "".join(event.text for event in events if isinstance(event, Text)), calls


@pytest.mark.parametrize(
    "arguments",
    [
        '{"x": 1e999}',
        '{"x": "\\ud800"}',
        '{"x": 1.10, "x":  2}',
        '{ "x":[1 , 2]\n}',
        '{"x": 123456789012345678901}',
        "{}",
    ],
)
def test_arguments_are_the_models_own_text(arguments):
    for text in (
        f'{{"name": "look", "arguments": {arguments}}}',
        f'<tool_call>\n{{"arguments":{arguments} , "name": "look"}}\n</tool_call>',
    ):
        certain, calls = read(text)
        assert (certain, calls) == ("", [arguments])
        json.dumps(calls, ensure_ascii=False).encode()  # as the server writes them
    assert read('{"name": "look", "parameters": ' + arguments + "}") == ("", [arguments])


@pytest.mark.parametrize("arguments", ["Infinity", "[]", "1" * 5000])
def test_what_is_no_object_is_no_call(arguments):
    text = f'{{"name": "look", "arguments": {arguments}}}'
    assert read(text) == (text, [])


@pytest.mark.parametrize("arguments", ['{"x": Infinity}', '{"x": -Infinity}', '{"x": NaN}', '{"x": 1,}', '{"x" 1}'])
def test_an_object_that_is_no_json_is_handed_on(arguments):
    """It was streamed as the model wrote it, before its end was known; the reply itself stays JSON."""
    text, calls = read(f'{{"name": "look", "arguments": {arguments}}}')
    assert (text, calls) == ("", [arguments])
    json.loads(json.dumps(calls), parse_constant=pytest.fail)


@pytest.mark.parametrize("arguments", ['{"x": 1e999}', '{"x": NaN}', '{"x": "\\ud800"}', '{"x": ' + "[" * 5000 + "}"])
def test_arguments_that_json_cannot_say_again_stay_text(arguments):
    """Ollama's and Anthropic's replies, and templates, have the value of the arguments."""
    block = Block("call", 0, "look", text=arguments)
    reply = {"tool_calls": [{"function": {"name": "look", "arguments": _arguments_of(block)}}]}
    assert json.loads(write_json(reply).encode())["tool_calls"][0]["function"]["arguments"] == arguments
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
    assert _plain_call(call, "messages[0]")["function"]["arguments"] == arguments
    assert Block("call", 0, text='{"x": [1, "\\ud83d\\ude00"]}').arguments == {"x": [1, "\U0001f600"]}


def test_no_arguments_are_an_empty_object():
    assert read('{"name": "look"}') == ("", ["{}"])


SHAPES = {
    "spaces": "<tool_call>" + " " * 1000,
    "marks": "<tool_call>" * 100,
    "ends": "<tool_call></tool_call>" * 60,
    "half marks": "<tool_cal" * 120,
    "an object": '{"name": "look", "arguments": {"x": "' + "y" * 1000,
    "objects": "{" * 1000,
    "quotes": '{"' * 500,
    "commas": "{" + '"x": 1,' * 150,
    "a blank": "\n \t" * 350,
}


@pytest.mark.sample(3)
@pytest.mark.thorough
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pieces", [1, 1 << 20], ids=["whole", "in characters"])
def test_the_time_grows_with_the_length(shape, pieces):
    """4 times the characters take 4 times as long; 16 times where each is looked at by each."""

    def least_s(times):
        spent = []
        for _ in range(2):
            started = time.thread_time()
            read(SHAPES[shape] * times, pieces=pieces)
            spent.append(time.thread_time() - started)
        return min(spent)

    times = 32 if pieces == 1 else 8
    assert least_s(4 * times) < 9 * least_s(times) + 0.02


@pytest.mark.parametrize(
    "body",
    ['{"a": "\\ud800"}', '{"\\udfff": 1}', '[["\\uD83D"]]', '"\\ude00\\ud83d"', '{"a": {"b": ["x", "y\\udc80"]}}'],
)
def test_half_of_a_pair_in_a_body_is_a_requests_error(body):
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        parse_json(body.encode())


def test_whole_pairs_and_other_escapes_are_text():
    assert parse_json(b'["\\ud83d\\ude00", "\\u0000\\\\ud800"]') == ["\U0001f600", "\0\\ud800"]
