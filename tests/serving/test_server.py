"""The HTTP server on a real socket, with the storyteller: OpenAI's own client, and raw requests."""

import asyncio
import http.client
import json
import shutil
import socket
import time
from typing import Literal

import numpy as np
import pytest
from cli_runs import BACKEND, FAST, invoke, invoke_json, process
from engine_checks import check, until
from helpers import GOLDEN, chat_folder, first_where, model, stop_words
from server_runs import RunningServer, ServerLimits, events

from bitnet_ref.cli import serve_command
from bitnet_ref.formats.open import ASSETS
from bitnet_ref.serving import start_engines
from bitnet_ref.serving.http.events import Reply
from bitnet_ref.serving.http.tools import ToolReader

openai = pytest.importorskip("openai", reason="the openai client is not installed")
pydantic = pytest.importorskip("pydantic")  # it comes with openai
STORY, PROMPT = ASSETS / "storyteller", "Once upon a time"
HELLO = [{"role": "user", "content": "Hello"}]
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["utc", "cet"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    return chat_folder(tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="module")
def running(talker):
    """Two models: storyteller, and the same with a chat template."""
    with RunningServer({"storyteller": STORY, "talker": talker}) as server:
        yield server


@pytest.fixture(scope="module")
def client(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def whole():
    """What the model gives alone: its text with the space after the prompt, and its tokens."""
    story = model(STORY, BACKEND, threads=1)

    def generate(prompt=PROMPT, **params):
        out = story.generate(prompt, echo=True, **params)
        return out.text.removeprefix(story.tokenizer.decode(out.prompt_token_ids)), out

    return generate


# -- completions -------------------------------------------------------------------------------------------------------


def test_a_completion_is_what_the_model_gives(client, whole):
    text, out = whole(max_tokens=12)
    answer = client.completions.create(model="storyteller", prompt=PROMPT, max_tokens=12, temperature=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, "length")
    assert text.encode() == b"".join(model(STORY, BACKEND, threads=1).vocabulary.tokens[i] for i in out.token_ids)
    assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": len(out.prompt_token_ids),
        "completion_tokens": 12,
        "total_tokens": len(out.prompt_token_ids) + 12,
    }
    ids = client.completions.create(model="storyteller", prompt=out.prompt_token_ids, max_tokens=12, temperature=0)
    assert ids.choices[0].text == text


def test_every_parameter_reaches_the_engine(client, whole):
    params = {"max_tokens": 10, "temperature": 0.9, "top_p": 0.8, "seed": 7, "stop": ["."], "frequency_penalty": 0.5}
    params |= {"presence_penalty": 0.25, "logit_bias": {"262": -5}}
    more = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1}
    answer = client.completions.create(model="storyteller", prompt=PROMPT, n=2, extra_body=more, **params)
    story = model(STORY, BACKEND, threads=1)
    outs = story.generate(PROMPT, echo=True, n=2, **params, **more)
    before = len(story.tokenizer.decode(outs[0].prompt_token_ids))
    assert [choice.text for choice in answer.choices] == [out.text[before:] for out in outs]
    assert [choice.index for choice in answer.choices] == [0, 1]
    drafted = client.completions.create(
        model="storyteller", prompt=PROMPT, n=2, extra_body={**more, "speculate": "lookup"}, **params
    )
    assert [choice.text for choice in drafted.choices] == [choice.text for choice in answer.choices]
    text, _ = whole(max_tokens=16)
    word = stop_words(text)[-1]
    stopped = client.completions.create(model="storyteller", prompt=PROMPT, temperature=0, stop=word)
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (text[: text.index(word)], "stop")


def test_several_prompts_and_the_best_of_several(client, whole):
    prompts = ["Alice", "The old man", "It was"]
    answer = client.completions.create(model="storyteller", prompt=prompts, max_tokens=5, temperature=0)
    assert [choice.text for choice in answer.choices] == [whole(each, max_tokens=5)[0] for each in prompts]
    best = client.completions.create(model="storyteller", prompt=PROMPT, max_tokens=5, seed=1, n=1, best_of=6)
    outs = model(STORY, BACKEND, threads=1).generate(PROMPT, max_tokens=5, seed=1, n=6, temperature=1.0)
    expected = max(outs, key=lambda out: sum(out.logprobs) / len(out.logprobs))
    assert best.choices[0].text.strip() == expected.text.strip()
    assert best.usage.completion_tokens == 30


@pytest.mark.thorough
def test_the_best_is_the_likeliest_per_token(client):
    """Of texts of several lengths, by the mean of the log probabilities; the best one first, in each prompt's place."""
    prompts, sampling = [PROMPT, "Alice"], {"max_tokens": 12, "stop": [",", "."], "temperature": 1.0}
    story = model(STORY, BACKEND, threads=1)

    def ranked(prompt, seed):
        outs = story.generate(prompt, n=4, seed=seed, **sampling)
        return sorted(outs, key=lambda out: sum(out.logprobs) / len(out.logprobs), reverse=True)

    def sum_prefers_another(seed):
        best, *others = ranked(PROMPT, seed)
        return any(sum(out.logprobs) > sum(best.logprobs) for out in others)

    seed = first_where(range(50), sum_prefers_another, "a seed with which the mean's best is not the sum's")
    expected = [out.text.strip() for prompt in prompts for out in ranked(prompt, seed)[:2]]
    answer = client.completions.create(model="storyteller", prompt=prompts, n=2, best_of=4, seed=seed, **sampling)
    assert [choice.text.strip() for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


@pytest.mark.sample(3)
@pytest.mark.parametrize("limits", [{"max_tokens": 7}, {"max_tokens": 40, "stop": [" the", "."]}, {"min_tokens": 3}])
@pytest.mark.parametrize("prompts", [[PROMPT], [PROMPT, "The rabbit ran away."]])
def test_usage_of_several_texts_of_a_prompt(client, running, prompts, limits):
    """Each prompt counts once, the new tokens of all its texts count; in one object and at the end of a stream."""
    story = model(STORY, BACKEND, threads=1)
    sampling = {"temperature": 1.2, "seed": 5, "n": 3, "max_tokens": 16, **limits}
    outs = [out for each in prompts for out in story.generate(each, **sampling)]
    assert len({len(out.token_ids) for out in outs}) > 1 or "stop" not in limits
    prompt_tokens = sum(len(story.tokenizer.encode(each)) for each in prompts)
    new = sum(len(out.token_ids) for out in outs)
    expected = {"prompt_tokens": prompt_tokens, "completion_tokens": new, "total_tokens": prompt_tokens + new}
    body = {"model": "storyteller", "prompt": prompts, **sampling}
    _, _, answer = running.post("/v1/completions", body)
    assert len(answer["choices"]) == 3 * len(prompts)
    assert answer["usage"].items() >= expected.items()
    options = {"include_usage": True, "continuous_usage_stats": True}
    for wanted in ({"include_usage": True}, options):
        _, _, text = running.post("/v1/completions", {**body, "stream": True, "stream_options": wanted})
        chunks = events(text)
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"].items() >= expected.items()
        if wanted is options:
            assert chunks[-2]["usage"].items() >= expected.items()


def test_the_form_of_the_answer_is_the_requests_alone(tmp_path):
    body = {"model": "talker", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "seed": 1}
    settings = {"sampling": {"n": 64, "echo": True}}  # more than the batch has room for
    with RunningServer({"talker": chat_folder(tmp_path)}, settings=settings, verify=True) as server:
        _, _, answer = server.post("/v1/chat/completions", body)
        _, _, asked = server.post("/v1/chat/completions", {**body, "n": 2})
        assert server.post("/v1/verify", {"request": body, "answer": answer})[2]["verdict"] == "equal"
    assert [len(each["choices"]) for each in (answer, asked)] == [1, 2]
    assert answer["usage"]["prompt_tokens"] == asked["usage"]["prompt_tokens"]
    assert "Hello" not in answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("limits", [{"max_tokens": 7}, {"max_tokens": 40, "stop": [" the", "."]}])
def test_usage_of_several_replies(client, talker, running, limits):
    params = {"model": "talker", "messages": HELLO, "temperature": 1.2, "seed": 5, "n": 3, **limits}
    story = model(talker, BACKEND, threads=1)
    ids = story.tokenizer.apply_chat_template(HELLO, tokenize=True)
    outs = story.generate(ids, temperature=1.2, seed=5, n=3, **limits)
    new = sum(len(out.token_ids) for out in outs)
    whole = client.chat.completions.create(**params).usage
    assert (whole.prompt_tokens, whole.completion_tokens, whole.total_tokens) == (len(ids), new, len(ids) + new)
    chunks = list(client.chat.completions.create(**params, stream=True, stream_options={"include_usage": True}))
    last = chunks[-1]
    assert (last.choices, all(chunk.usage is None for chunk in chunks[:-1])) == ([], True)
    assert {chunk.choices[0].index for chunk in chunks[:-1]} == {0, 1, 2}
    usage = last.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(ids), new, len(ids) + new)


def test_beams(client, running):
    """vLLM's `use_beam_search`, for completions and chats, alone and beside other requests."""
    story = model(STORY, BACKEND, threads=1)
    for params in ({"n": 3}, {"n": 2, "length_penalty": 0.5, "logprobs": 2}, {"n": 1}):
        beams = {"use_beam_search": True, "length_penalty": params.get("length_penalty", 1.0)}
        asked = {name: value for name, value in params.items() if name != "length_penalty"}
        answer = client.completions.create(
            model="storyteller", prompt=[PROMPT, "Alice"], max_tokens=9, extra_body=beams, **asked
        )
        outs = story.generate([PROMPT, "Alice"], max_tokens=9, num_beams=params["n"], **params)
        outs = [out for each in outs for out in (each if isinstance(each, list) else [each])]
        assert [choice.text.strip() for choice in answer.choices] == [out.text.strip() for out in outs]
        assert [choice.index for choice in answer.choices] == list(range(len(outs)))
        assert answer.usage.completion_tokens == sum(len(out.token_ids) for out in outs)
        if "logprobs" in params:
            assert [each.logprobs.token_logprobs for each in answer.choices] == [out.logprobs for out in outs]
    chat = client.chat.completions.create(
        model="talker", messages=HELLO, max_tokens=5, n=2, extra_body={"use_beam_search": True}
    )
    assert len({choice.message.content for choice in chat.choices}) == 2
    for wrong, message in (
        ({"temperature": 0.7, "n": 2}, "temperature: beam search compares"),
        ({"stop": ["x"], "n": 2}, "stop: beam search compares"),
        ({"stream": True, "n": 2}, "stream: a search by beams"),
        ({"n": 2, "best_of": 3}, "best_of: expected at least n, 2, and no more"),
        ({"n": 100}, "n: expected at most 8"),
        ({"n": 2, "max_tokens": 400}, "maximum context length"),
        ({"n": 2, "speculate": "lookup"}, "speculate: beam search compares"),
    ):
        body = {"model": "storyteller", "prompt": PROMPT, "use_beam_search": True, **wrong}
        status, _, failure = running.post("/v1/completions", body)
        assert (status, message in failure["error"]["message"]) == (400, True), failure
    until(lambda: not running.engines["storyteller"].requests)


def test_beams_of_which_a_guide_allows_fewer(running):
    pytest.importorskip("llguidance")
    prompts, guide = [PROMPT, "Alice"], {"guided_regex": "[!?]"}
    body = {"model": "storyteller", "prompt": prompts, "use_beam_search": True, "n": 6, **guide}
    answer = running.post("/v1/completions", body)[2]
    groups = model(STORY, BACKEND, threads=1).generate(prompts, n=6, num_beams=6, **guide)
    outs = [out for group in groups for out in group]
    assert 2 <= len(outs) < 12
    assert [choice["text"].strip() for choice in answer["choices"]] == [out.text.strip() for out in outs]
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(outs)))
    assert answer["usage"]["completion_tokens"] == sum(len(out.token_ids) for out in outs)


def test_the_prompts_own_log_probabilities(client):
    """As an evaluation asks for them: echo, logprobs, and no new token."""
    story, text = model(STORY, BACKEND, threads=1), "The rabbit ran away."
    answer = client.completions.create(model="storyteller", prompt=text, max_tokens=0, echo=True, logprobs=3)
    choice, ids = answer.choices[0], story.tokenizer.encode(text)
    logits = story.logits(ids).astype(np.float64)
    expected = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))[range(len(ids) - 1), ids[1:]]
    assert choice.text == text
    assert choice.logprobs.token_logprobs[0] is None
    assert np.allclose(choice.logprobs.token_logprobs[1:], expected, atol=1e-9)
    assert "".join(choice.logprobs.tokens[1:]).strip() == text
    assert [len(top) in (3, 4) for top in choice.logprobs.top_logprobs[1:]] == [True] * (len(ids) - 1)
    for token, place in zip(choice.logprobs.tokens[1:], choice.logprobs.text_offset[1:], strict=True):
        assert text[place:].lstrip().startswith(token.strip())
    assert answer.usage.completion_tokens == 0
    more = client.completions.create(
        model="storyteller", prompt=text, max_tokens=4, echo=True, logprobs=3, temperature=0
    ).choices[0]
    assert more.text.startswith(text)
    assert len(more.logprobs.tokens) == len(ids) + 4
    assert more.logprobs.token_logprobs[: len(ids)] == choice.logprobs.token_logprobs
    tail = list(zip(more.logprobs.tokens, more.logprobs.text_offset, strict=True))[len(ids) :]
    assert all(more.text[place:].startswith(token) for token, place in tail), tail


def test_streams(client, whole):
    text, out = whole(max_tokens=20)
    params = {"model": "storyteller", "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "logprobs": 1}
    chunks = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **params))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == text
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens, chunks[0].usage) == ([], 20, None)
    logprobs = [each for chunk in chunks[:-1] for each in chunk.choices[0].logprobs.token_logprobs]
    assert logprobs == out.logprobs
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 19 + ["length"]
    both = list(client.completions.create(stream=True, n=3, **(params | {"echo": True, "seed": 1, "temperature": 1.0})))
    joined = ["".join(c.text for chunk in both for c in chunk.choices if c.index == index) for index in range(3)]
    at_once = client.completions.create(n=3, **(params | {"echo": True, "seed": 1, "temperature": 1.0}))
    assert joined == [choice.text for choice in at_once.choices]


# -- chats -------------------------------------------------------------------------------------------------------------


def test_chats(client, running, talker):
    model_alone = model(talker, BACKEND, threads=1)
    expected = model_alone.generate(model_alone.tokenizer.apply_chat_template(HELLO, tokenize=True), max_tokens=9)
    answer = client.chat.completions.create(
        model="talker", messages=HELLO, max_completion_tokens=9, temperature=0, logprobs=True, top_logprobs=2
    )
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", expected.text)
    entries = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == expected.logprobs
    assert b"".join(bytes(entry.bytes) for entry in entries).decode().strip() == expected.text.strip()
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    chunks = list(
        client.chat.completions.create(
            model="talker",
            messages=parts,
            max_tokens=9,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == expected.text
    assert (chunks[-2].choices[0].finish_reason, chunks[-1].choices) == ("length", [])
    assert chunks[-1].usage.completion_tokens == 9
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model="storyteller", messages=HELLO)


def test_replies_that_match_a_schema(client):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    answer = client.chat.completions.create(
        model="talker",
        messages=HELLO,
        max_tokens=30,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
    )
    assert json.loads(answer.choices[0].message.content)["n"] in (1, 2)
    assert answer.choices[0].finish_reason == "stop"
    del schema["additionalProperties"]  # where it says nothing of others, there are none
    guided = client.chat.completions.create(
        model="talker", messages=HELLO, max_tokens=30, extra_body={"guided_json": schema}
    )
    assert json.loads(guided.choices[0].message.content).keys() == {"n"}
    for text in (json.dumps(schema), json.dumps({**schema, "required": ["n", "m"]})):  # as a text: the same
        guided = client.chat.completions.create(
            model="talker", messages=HELLO, max_tokens=60, seed=1, extra_body={"guided_json": text}
        )
        assert guided.choices[0].message.content.startswith('{"n":')
    free = client.chat.completions.create(
        model="talker", messages=HELLO, max_tokens=8, response_format={"type": "json_object"}
    )
    assert free.choices[0].message.content.lstrip().startswith("{")
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError, match="response_format: Invalid type"):
        client.chat.completions.create(model="talker", messages=HELLO, response_format=bad)


def test_tools(talker):
    pytest.importorskip("llguidance")
    template = (
        "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with (
        RunningServer({"talker": talker}, chat_template=template) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client,
    ):
        params = {"model": "talker", "messages": HELLO, "tools": [CLOCK], "max_tokens": 40}
        for choice in ("required", {"type": "function", "function": {"name": "clock"}}):
            reply = client.chat.completions.create(tool_choice=choice, **params).choices[0]
            assert (reply.finish_reason, reply.message.content) == ("tool_calls", None)
            (call,) = reply.message.tool_calls
            assert call.function.name == "clock"
            assert json.loads(call.function.arguments)["zone"] in ("utc", "cet")
        chunks = list(client.chat.completions.create(tool_choice="required", stream=True, **params))
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        assert {call.index for call in calls} == {0}
        assert [call.function.name for call in calls if call.function.name] == ["clock"]
        assert len(calls) > 3  # the arguments come as they are made
        assert json.loads("".join(call.function.arguments for call in calls))["zone"] in ("utc", "cet")
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        auto = client.chat.completions.create(**(params | {"max_tokens": 5})).choices[0]
        assert (auto.message.tool_calls, auto.finish_reason) == (None, "length")
        answered = [
            *HELLO,
            {"role": "assistant", "content": None, "tool_calls": [call.model_dump() for call in [call]]},
        ]
        answered.append({"role": "tool", "tool_call_id": "1", "content": "It is five."})
        assert client.chat.completions.create(**(params | {"messages": answered, "max_tokens": 5})).choices
        for wrong in ({"type": "function", "function": {"name": "cook"}}, "sometimes"):
            with pytest.raises(openai.BadRequestError, match="tool_choice"):
                client.chat.completions.create(tool_choice=wrong, **params)


def test_openais_typed_replies_and_its_stream_helper(client, talker):
    """pydantic classes as the form of a reply and of a call, whole and by the helper that puts chunks together."""
    pytest.importorskip("llguidance")

    class Clock(pydantic.BaseModel):
        zone: Literal["utc", "cet"]

    class Reply(pydantic.BaseModel):
        clock: Clock
        exact: bool

    asked = {"model": "talker", "messages": HELLO, "max_tokens": 80}
    reply = client.chat.completions.parse(response_format=Reply, **asked).choices[0].message.parsed
    assert reply.clock.zone in ("utc", "cet")
    with client.chat.completions.stream(response_format=Reply, logprobs=True, **asked) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Reply)
    assert {"content.delta", "content.done", "logprobs.content.done"} <= kinds
    template = "{{ tools }}{{ messages[0].content }}"
    with (
        RunningServer({"talker": talker}, chat_template=template) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as other,
    ):
        tools = {"tools": [openai.pydantic_function_tool(Clock)], "tool_choice": "required"}
        with other.chat.completions.stream(**asked, **tools) as stream:
            message = stream.get_final_completion().choices[0].message
        assert isinstance(message.tool_calls[0].function.parsed_arguments, Clock)


CLOCK_ARGUMENTS = '{"zone": "utc"}'
CALL = f'{{"name": "clock", "arguments": {CLOCK_ARGUMENTS}}}'
REPLIES = [
    ("It is five.", "It is five.", []),
    (f"<tool_call>\n{CALL}\n</tool_call>", "", ["utc"]),
    (
        f"Let me see.\n<tool_call>{CALL}</tool_call> <tool_call>{CALL.replace('utc', 'cet')}",
        "Let me see.",
        ["utc", "cet"],
    ),
    (f" {CALL.replace('arguments', 'parameters')}", "", ["utc"]),
    ("a <tool_cat> <tool_call>{]</tool_call>", None, []),  # what is no call stays text
    ("<tool_call>" + CALL.replace("clock", "cook"), None, []),
    ('{"a": 1}', None, []),
    ("x <tool", None, []),
    (f"Sure: {CALL}", None, []),  # an object after other text is text, wherever its piece begins
    (f"<tool_call><tool_call>{CALL}</tool_call>", "<tool_call>", ["utc"]),
    (f"<tool_call>{CALL}</tool_call> and <tool_call>", "and <tool_call>", ["utc"]),
    (" \n ", None, []),
]


@pytest.mark.parametrize(("text", "content", "zones"), REPLIES, ids=range(len(REPLIES)))
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_in_a_text_that_comes_in_pieces(text, content, zones, size):
    def read(reader):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        return Reply([event for piece in pieces for event in reader.push(piece, None)] + reader.push("", "stop"))

    reply = read(ToolReader({"clock": {}}, is_forced=False))
    first = read(ToolReader({"clock": {}}, is_forced=False, one_call=True))
    assert [(call.name, call.text) for call in first.calls] == [("clock", CLOCK_ARGUMENTS)] * bool(reply.calls)
    assert reply.join("text").strip() == (text if content is None else content).strip()
    assert [json.loads(call.text)["zone"] for call in reply.calls] == zones


@pytest.mark.thorough
@pytest.mark.parametrize(
    "text",
    [
        " " * 500_000,
        "<tool_call>x" + " " * 500_000 + "y",
        "<tool_call>" * 50_000,
        "<tool_call></tool_call>" * 25_000,
        "<tool_call" * 50_000,
        "<tool_call>" + "{" * 500_000,
        "{" * 500_000,
        "<" * 500_000,
    ],
    ids=lambda text: f"{text[:12]}...",
)
def test_calls_are_found_in_one_pass(text):
    """A search that begins again with each piece, mark or space takes minutes here, and this test would not end."""
    for size in (100, len(text)):
        reader = ToolReader({"clock": {}}, is_forced=False)
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        reply = Reply([event for piece in pieces for event in reader.push(piece, None)] + reader.push("", "stop"))
        assert (reply.join("text"), reply.calls) == (text, [])


# -- the rest of the API -----------------------------------------------------------------------------------------------


def test_embeddings(client):
    story = model(STORY, BACKEND, threads=1)
    answer = client.embeddings.create(model="storyteller", input=["Alice", "The old man"])
    assert np.array_equal([row.embedding for row in answer.data], story.embed(["Alice", "The old man"]))
    plain = client.embeddings.create(model="storyteller", input="Alice", encoding_format="float")
    assert np.array_equal(plain.data[0].embedding, story.embed("Alice"))
    assert plain.usage.prompt_tokens == len(story.tokenizer.encode("Alice"))


def test_models_tokens_and_health(client, running):
    assert [each.id for each in client.models.list()] == ["storyteller", "talker"]
    assert client.models.retrieve("talker").id == "talker"
    story = model(STORY, BACKEND, threads=1)
    _, _, facts = running.post("/tokenize", {"model": "storyteller", "prompt": PROMPT, "return_token_strs": True})
    assert facts["tokens"] == story.tokenizer.encode(PROMPT)
    assert (facts["count"], facts["max_model_len"], facts["token_strs"][0]) == (5, 256, "<s>")
    _, _, chat = running.post("/tokenize", {"model": "talker", "messages": HELLO})
    assert chat["tokens"] == model(
        running.shelf.places["talker"].source, BACKEND, threads=1
    ).tokenizer.apply_chat_template(HELLO, tokenize=True)
    _, _, text = running.post("/detokenize", {"model": "storyteller", "tokens": facts["tokens"]})
    assert text == {"prompt": "<s> " + PROMPT}
    _, _, info = running.get("/tokenizer_info?model=talker")
    assert (info["bos_token"], info["vocab_size"]) == ("<s>", story.tokenizer.vocab_size)
    assert running.get("/health")[::2] == (200, {"status": "ok"})
    status, headers, metrics = running.get("/metrics")
    assert (status, headers.get_content_type()) == (200, "text/plain")
    for name in ("storyteller", "talker"):
        assert f'bitnet_ref:num_requests_running{{model_name="{name}"}} 0.0' in metrics
    assert metrics.count("# TYPE bitnet_ref:num_requests_running ") == 1
    _, _, page = running.get("/openapi.json")
    assert {route.path.replace(":path", "") for route in running.app.routes} == set(page["paths"])


BAD = [
    (
        {"prompt": 5},
        "prompt: expected string, or a list of integer, or a list of (string, or a list of integer)",
        "prompt",
    ),
    ({}, "prompt: is missing", "prompt"),
    ({"prompt": ""}, None, None),
    ({"prompt": []}, "prompt", "prompt"),
    ({"prompt": PROMPT, "temprature": 1}, "did you mean 'temperature'", "temprature"),
    ({"prompt": PROMPT, "temperature": 9}, "temperature: expected at most 2, got 9", "temperature"),
    ({"prompt": PROMPT, "temperature": "1"}, "temperature: expected number or null", "temperature"),
    ({"prompt": PROMPT, "suffix": "."}, "suffix: this model", "suffix"),
    ({"prompt": PROMPT, "max_tokens": 1000}, "context is 256; lower max_tokens", None),
    ({"prompt": PROMPT, "max_tokens": 0}, "max_tokens: 0", "max_tokens"),
    ({"prompt": PROMPT, "n": 9}, "n: expected at most 8", "n"),
    ({"prompt": PROMPT, "n": 3, "best_of": 2}, "best_of: expected at least n", "best_of"),
    ({"prompt": PROMPT, "logit_bias": {"99999": 1}}, "logit_bias: token id 99999", "logit_bias"),
    ({"prompt": [99999]}, "token id 99999", None),
    ({"prompt": "\ud800"}, "half of a surrogate pair", None),
    ({"prompt": PROMPT, "model": "x"}, "there is no model 'x'", "model"),
    ({"prompt": PROMPT, "stream_options": {"include_usage": True}}, "stream_options: needs", "stream_options"),
    ({"prompt": PROMPT, "guided_regex": "("}, "guided_regex", "guided_regex"),
    ({"prompt": PROMPT, "speculate": "yes"}, "speculate: expected one of ['lookup', None]", "speculate"),
    ([], "the body: expected object", None),
]


@pytest.mark.parametrize(("body", "message", "param"), BAD, ids=range(len(BAD)))
def test_bad_requests_say_what_was_wrong(running, body, message, param):
    status, _, answer = running.post("/v1/completions", {"model": "storyteller", **body} if body != [] else [])
    if message is None:
        assert status == 200  # an empty text has a BOS
        return
    assert status == (404 if param == "model" else 400), answer
    assert message in answer["error"]["message"]
    assert answer["error"]["param"] == param
    assert answer["error"]["type"] in ("invalid_request_error", "not_found_error")


@pytest.mark.parametrize("name", ["tools", "functions"])
def test_a_template_without_a_place_for_tools(running, name):
    clock = {"name": "clock"}
    given = clock if name == "functions" else {"type": "function", "function": clock}
    body = {"model": "talker", "messages": HELLO, name: [given]}
    status, _, answer = running.post("/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, name)
    assert answer["error"]["message"] == f"{name}: the chat template of this model has no place for tools"


def test_bad_http(running):
    json_type = {"content_type": "application/json"}
    for body, headers, status, message in [
        ("{", json_type, 400, "no JSON"),
        ('{"prompt": NaN}', json_type, 400, "NaN is no JSON number"),
        ("[" * 100_000, json_type, 400, "the body"),
        ("[" * 100 + "]" * 100, json_type, 400, "nested deeper"),
        ('{"prompt": "x"}', {"content_type": "text/plain"}, 415, "application/json"),
        (json.dumps({"prompt": "x" * (5 << 20)}), json_type, 413, "maximum"),
    ]:
        got, _, answer = running.request("POST", "/v1/completions", body, headers)
        assert (got, message in answer["error"]["message"]) == (status, True), answer
    for host in ("x/health?", "x#", "x:y", "[", "ü"):  # no part of what a request is for
        status, _, answer = running.post("/v1/completions", {}, host=host.encode())
        assert (status, answer["error"]["param"]) == (400, "prompt"), answer
    assert running.get("/v1/completions")[0] == 405
    assert running.get("/nothing")[2]["error"]["type"] == "not_found_error"


@pytest.mark.slow
def test_an_idle_connection_stays_open(running):
    """Longer than the 5 s for which httpx keeps one: else the server closes it while the next request is on its way."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
    for pause_s in (7, 0):
        connection.request("GET", "/health")
        assert connection.getresponse().read() == b'{"status":"ok"}'
        assert connection.sock is not None
        time.sleep(pause_s)
    connection.close()


# -- keys, limits, models ----------------------------------------------------------------------------------------------


def test_keys_hosts_and_origins():
    options = {"api_keys": ("one", "two"), "origins": ("https://a.example",), "hosts": ("127.0.0.1",)}
    with RunningServer({"storyteller": STORY}, **options) as server:
        for key, status in (("one", 200), ("two", 200), ("three", 401), ("", 401)):
            assert server.get("/v1/models", authorization=f"Bearer {key}")[0] == status
        status, headers, answer = server.get("/metrics")
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert server.get("/health")[0] == 200
        for host in ("evil.example", "127.0.0.1.evil.example", "evil.example/127.0.0.1", "", "[::1]:80"):
            status, headers, answer = server.get("/health", host=host)
            assert (status, headers["content-type"]) == (400, "application/json"), host
            assert "is not called" in answer["error"]["message"]
        preflight = {"origin": "https://b.example", "access-control-request-method": "POST"}
        status, headers, answer = server.request("OPTIONS", "/v1/completions", None, preflight)
        assert (status, headers["content-type"]) == (400, "application/json")
        assert "CORS origin" in answer["error"]["message"]
        assert headers["access-control-allow-origin"] is None
        good = server.request("OPTIONS", "/v1/completions", None, {**preflight, "origin": "https://a.example"})
        assert (good[0], good[1]["access-control-allow-origin"]) == (200, "https://a.example")
        _, headers, _ = server.get("/health", origin="https://a.example")
        assert headers["access-control-allow-origin"] == "https://a.example"
        assert server.get("/health", origin="https://b.example")[1]["access-control-allow-origin"] is None


def test_a_full_server_says_when_to_come_back_and_a_late_request_ends():
    limits = ServerLimits(max_streams=2, body_timeout_s=0.3, request_timeout_s=0.4)
    long = {"prompt": PROMPT, "max_tokens": 250, "ignore_eos": True, "stream": True}
    with RunningServer({"storyteller": STORY}, limits, settings={"max_batch": 1, "max_queue": 2}) as server:
        engine = server.engines["storyteller"]
        engine.generate("Alice", max_tokens=2)
        engine._worker.pool.clear_idle()
        slow = [engine.submit("Alice", strategy=sleepy, max_tokens=60) for _ in range(2)]
        until(lambda: engine.requests[0].state == "running")
        status, _, answer = server.post("/v1/completions", {"prompt": PROMPT, "n": 1})
        assert (status, answer["error"]["type"]) == (504, "server_error")  # it waited behind these
        waiting = [server.open_request("/v1/completions", long)]
        until(lambda: engine.metrics.snapshot()["num_requests_waiting"] == 2)
        status, headers, answer = server.post("/v1/completions", {"prompt": PROMPT})
        assert (status, headers["retry-after"]) == (429, "1"), answer
        assert "queue is full" in answer["error"]["message"]
        for handle in slow:
            handle.close()
        for connection in waiting:
            connection.close()
        with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
            connection.sendall(
                b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{"
            )
            assert connection.recv(100).startswith(b"HTTP/1.1 408")
        until(lambda: not engine.requests)
    check(engine)


def sleepy(ids, logits, generator):
    time.sleep(0.05)
    return 5


@pytest.mark.thorough
def test_models_come_and_go():
    sources = {"a": STORY, "b": GOLDEN / "bitnet-packed-offline"}
    with RunningServer(sources, budget=105_000_000, idle_s=0.2, settings={"cache_tokens": 256}) as server:
        until(lambda: not loaded(server))
        status, _, answer = server.post("/v1/completions", {"model": "b", "prompt": [5, 6], "max_tokens": 2})
        assert (status, "tokenizer" in answer["error"]["message"]) == (400, True)
        assert server.post("/v1/completions", {"model": "a", "prompt": "Alice"})[0] == 200


def test_a_model_that_is_busy_stays():
    sources = {"a": STORY, "b": GOLDEN / "bitnet-packed-offline"}
    with RunningServer(sources, budget=bytes_held(STORY, 2048), settings={"cache_tokens": 2048}) as server:
        assert loaded(server) == ["a"]
        busy = {"model": "a", "prompt": "Alice", "stream": True, "max_tokens": 200, "ignore_eos": True, "n": 8}
        stream = server.open_request("/v1/completions", busy)
        until(lambda: server.shelf.places["a"].engine.requests)
        assert server.post("/tokenize", {"model": "b", "prompt": "x"})[0] == 503
        stream.close()
        until(lambda: server.post("/tokenize", {"model": "b", "prompt": "x"})[0] == 400)
        assert loaded(server) == ["b"]


def test_the_model_that_was_unused_longest_leaves(tmp_path):
    tiny = GOLDEN / "bitnet-packed-offline"
    sources = {name: shutil.copytree(tiny, tmp_path / name) for name in "abcd"}
    with RunningServer(sources, budget=bytes_held(tiny, 256), settings={"cache_tokens": 256}) as server:
        assert loaded(server) == ["a"]  # at first as many as the budget allows
        server.shelf._budget = 3 * server.shelf.places["a"].nbytes
        for name in "bcad":
            assert server.post("/tokenize", {"model": name, "prompt": "x"})[0] == 400  # it has no tokenizer
        assert loaded(server) == ["a", "c", "d"]


def bytes_held(path, cache_tokens):
    with start_engines(model(path, BACKEND, threads=1), cache_tokens=cache_tokens, max_batch=8, page_size=4) as engine:
        return engine.model.weights.nbytes + engine.cache.nbytes


def loaded(server):
    return [name for name, place in server.shelf.places.items() if place.engine is not None]


# -- clients that go away, or read slowly ------------------------------------------------------------------------------


def test_a_client_that_goes_away_frees_its_pages(talker):
    with RunningServer({"storyteller": STORY}, settings={"max_batch_tokens": 9}) as server:
        engine = server.engines["storyteller"]
        prompt, long = list(range(5, 205)), {"max_tokens": 40, "ignore_eos": True}
        for body in (
            {"prompt": prompt, **long},
            {"prompt": prompt, "stream": True, **long},
            {"prompt": "Alice", "max_tokens": 250, "n": 4, "stream": True, "ignore_eos": True},
            {"prompt": ["Alice"] * 9, "max_tokens": 250, "ignore_eos": True},  # the ninth waits for a place
        ):
            connection = server.open_request("/v1/completions", body)
            until(lambda: engine.metrics.snapshot()["num_requests_running"])
            steps = engine.metrics.counters["engine_steps"]
            connection.close()
            until(lambda: not engine.requests)
            assert engine.metrics.counters["engine_steps"] - steps < 25  # of 23 or 250 that were to come
            engine._worker.pool.clear_idle()
        assert engine.metrics.finished["abort"] == 15
        assert server.shelf.places["storyteller"].users == 0
    check(engine)


@pytest.mark.thorough
def test_a_reader_that_stops_pauses_itself_alone(whole):
    settings = {"max_unread": 4, "max_batch": 4}
    body = {"prompt": PROMPT, "max_tokens": 250, "logprobs": 20, "temperature": 0, "stream": True, "ignore_eos": True}
    with RunningServer({"storyteller": STORY}, settings=settings) as server:
        engine = server.engines["storyteller"]
        connection = server.open_request("/v1/completions", {**body, "n": 2}, receive_buffer=2048)
        until(lambda: engine.metrics.snapshot()["num_requests_paused"] == 2)
        answer = server.post("/v1/completions", {"prompt": "Alice", "temperature": 0, "max_tokens": 20})[2]
        assert answer["choices"][0]["text"] == whole("Alice", max_tokens=20)[0]
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += connection.recv(1 << 16)
        connection.close()
        text = "".join(part for part in data.decode().split("\r\n") if part.startswith(("data", ": ")))
        got = [choice for event in events(text) for choice in event["choices"]]
        expected = whole(max_tokens=250, ignore_eos=True)[0]
        for index in range(2):
            assert "".join(choice["text"] for choice in got if choice["index"] == index) == expected
    check(engine)


# -- asynchronous clients, and the process -----------------------------------------------------------------------------


@pytest.mark.thorough
def test_many_asynchronous_streams_equal_their_single_runs(running, whole):
    prompts = ["Alice", "The old man", "It was", PROMPT, "The rabbit ran", "She"]

    async def read(client, number):
        stream = await client.completions.create(
            model="storyteller",
            prompt=prompts[number % len(prompts)],
            max_tokens=15,
            temperature=0.8,
            seed=number,
            stream=True,
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def read_all():
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="any") as client:
            return await asyncio.gather(*(read(client, number) for number in range(24)))

    for number, text in enumerate(asyncio.run(read_all())):
        assert text == whole(prompts[number % len(prompts)], max_tokens=15, temperature=0.8, seed=number)[0]


@pytest.mark.thorough
def test_the_command_drains_when_it_is_ended(whole):
    command = process(
        "serve", "--port", "0", "--json", *FAST, "--allow-origin", "x", stdout=-1, text=True, module="bitnet_ref"
    )
    try:
        facts = json.loads(command.stdout.readline())
        port = int(facts["url"].rpartition(":")[2])
        assert facts["models"] == ["storyteller"]
        with openai.OpenAI(base_url=f"{facts['url']}/v1", api_key="any") as client:
            stream = client.completions.create(
                model="storyteller", prompt=PROMPT, max_tokens=250, temperature=0, stream=True
            )
            first = next(iter(stream)).choices[0].text
            command.terminate()
            text = first + "".join(chunk.choices[0].text for chunk in stream)
        assert text == whole(max_tokens=250)[0]
        assert command.wait(20) == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 1)
    finally:
        command.kill()
        command.communicate()


@pytest.mark.thorough
def test_chains_of_references_end_no_server(talker, tmp_path):
    """Each was a stack overflow, which ends the process: so the server is one of its own."""
    pytest.importorskip("llguidance")
    grammar = "start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(5000)) + 'a5000: "x"\n'
    schema = {"$ref": "#/$defs/0", "$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(5000)}}
    schema["$defs"]["5000"] = {"type": "string"}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    bodies = [
        ("/v1/completions", {"prompt": PROMPT, "guided_grammar": grammar}),
        ("/v1/completions", {"prompt": PROMPT, "guided_grammar": grammar.replace("a", "A").replace("stArt", "start")}),
        ("/v1/completions", {"prompt": PROMPT, "guided_json": schema, "stream": True}),
        ("/v1/completions", {"prompt": PROMPT, "guided_json": json.dumps(schema), "n": 2}),
        ("/v1/completions", {"prompt": PROMPT, "guided_grammar": grammar, "n": 2, "use_beam_search": True}),
        ("/v1/chat/completions", {"messages": HELLO, "guided_grammar": grammar}),
        ("/v1/chat/completions", {"messages": HELLO, "response_format": named}),
        ("/v1/chat/completions", {"messages": HELLO, "tools": [tool], "tool_choice": "required"}),
    ]
    template = "{% if tools %}Call. {% endif %}{{ messages[0].content }}"
    options = ("--port", "0", "--json", *FAST, "--chat-template", template)
    command = process("serve", talker, *options, stdout=-1, text=True, module="bitnet_ref")
    try:
        url = json.loads(command.stdout.readline())["url"].removeprefix("http://")
        for path, body in bodies:
            connection = http.client.HTTPConnection(url, timeout=60)
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            error = json.loads(answer.read())["error"]
            connection.close()
            assert (answer.status, "expected at most 2000" in error["message"]) == (400, True), (body.keys(), error)
            assert error["param"] in ("guided_grammar", "guided_json", "response_format", "tools")
        with openai.OpenAI(base_url=f"http://{url}/v1", api_key="any") as client:
            assert client.completions.create(model=talker.name, prompt=PROMPT, max_tokens=3).usage.completion_tokens
    finally:
        command.kill()
        command.communicate()
    requests = tmp_path / "requests.jsonl"
    lines = [
        {"custom_id": str(number), "method": "POST", "url": path, "body": body}
        for number, (path, body) in enumerate([bodies[0], ("/v1/completions", {"prompt": PROMPT, "max_tokens": 3})])
    ]
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    batch = process("batch", requests, tmp_path / "out.jsonl", *FAST, stdout=-1, module="bitnet_ref")
    batch.communicate(timeout=120)
    answers = [json.loads(line)["response"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [answer["status_code"] for answer in answers] == [400, 200]


@pytest.mark.parametrize(
    ("arguments", "variable"),
    [
        (("--api-key", ""), None),
        (("--api-key", " \t"), "k"),
        (("--api-key", "k", "--api-key", ""), None),
        ((), ""),
        ((), " "),
    ],
)
def test_a_blank_key_is_refused(monkeypatch, arguments, variable):
    monkeypatch.setattr(serve_command, "listen", lambda *_: pytest.fail("the server starts"))
    if variable is not None:
        monkeypatch.setenv("BITNET_REF_API_KEY", variable)
    message = invoke_json("serve", *arguments, code=2)["error"]["message"]
    assert "a key is blank; give one, or leave --api-key out and unset BITNET_REF_API_KEY" in message
    assert len(invoke("serve", *arguments).stderr.splitlines()) == 1


def test_the_variable_holds_one_key_and_the_option_goes_before_it(monkeypatch):
    monkeypatch.setenv("BITNET_REF_API_KEY", " correct horse battery ")
    assert serve_command.check_keys(()) == ("correct horse battery",)
    assert serve_command.check_keys(("a", "b c")) == ("a", "b c")


def test_a_template_that_is_none_is_an_error_at_the_start(tmp_path):
    (tmp_path / "chat.jinja").write_text("a\n{% if %}")
    result = invoke("serve", "--port", "0", "--chat-template", f"@{tmp_path / 'chat.jinja'}")
    assert result.exit_code == 3
    assert "chat.jinja, chat_template line 2: Expected an expression" in result.stderr


def test_a_server_that_cannot_start_says_why(monkeypatch, running):
    message = invoke_json("serve", "--port", running.port, code=3)["error"]["message"]
    assert message.startswith("cannot listen on 127.0.0.1")
    assert "--port (0: a free port)" in message
    assert "no address of this machine" in invoke_json("serve", "--host", "8.8.8.8.8", code=2)["error"]["message"]
    assert invoke_json("serve", "nothing-here", code=3)["error"]["type"] == "FormatError"
    assert invoke("serve", "a=storyteller", "a=storyteller").exit_code == 2
    assert invoke("serve", "--memory-budget", "much").exit_code == 2
    monkeypatch.setattr(serve_command, "NEEDED", ("starlette", "no_such_package"))
    error = invoke_json("serve", code=4)["error"]
    assert error["message"] == "serve needs no_such_package: pip install 'bitnet-ref[server]'"
