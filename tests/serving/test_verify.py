"""Answers that can be checked: the fingerprint, `bitnet-ref verify` and /v1/verify. Each altered answer is caught."""

import copy
import json
import math
import random
import re
import shutil

import pytest
from cli_runs import BACKEND, FAST, invoke, invoke_json
from helpers import chat_folder, first_where, model
from server_runs import RunningServer, ServerLimits
from test_apis import ANSWERS, CLOCK, CLOCK_ITEM, HELLO, TEMPLATE, ZONE

import bitnet_ref
from bitnet_ref.formats.open import ASSETS
from bitnet_ref.serving import EngineConfig, start_engines
from bitnet_ref.serving.http import fingerprint as fingerprint_module
from bitnet_ref.serving.http.batch import BatchServer
from bitnet_ref.serving.http.fingerprint import differing_parts, fingerprint_of
from bitnet_ref.serving.http.first_token import read_replies
from bitnet_ref.serving.http.verify import CannotCheck, Recomputation, check_line, compare

STORY = ASSETS / "storyteller"
CHAT, COMPLETION, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
PROMPT = "Once upon a time"
TOOL = {"type": "function", "function": {"name": "clock", "parameters": ZONE}}
SHELL = {"type": "custom", "custom": {"name": "shell"}}
USERS = [{"role": "user", "content": "The king and the wood"}]
SEEDED = {"seed": 5, "temperature": 0.9}
ASKED = {  # name -> path, request
    "greedy": (COMPLETION, {"prompt": PROMPT, "max_tokens": 16, "temperature": 0}),
    "several": (COMPLETION, {"prompt": [PROMPT, "The fox"], "n": 2, "max_tokens": 8, "logprobs": 2, **SEEDED}),
    "best": (COMPLETION, {"prompt": PROMPT, "best_of": 3, "max_tokens": 6, **SEEDED}),
    "echo": (COMPLETION, {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 5, "temperature": 0}),
    "scored": (COMPLETION, {"prompt": PROMPT, "echo": True, "logprobs": 0, "max_tokens": 0}),
    "beams": (COMPLETION, {"prompt": PROMPT, "use_beam_search": True, "n": 2, "max_tokens": 6}),
    "stopped": (COMPLETION, {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "stop": [" the", " a", " was"]}),
    "chat": (CHAT, {"messages": HELLO, "max_tokens": 12, "logprobs": True, "top_logprobs": 3, **SEEDED}),
    "call": (CHAT, {"messages": HELLO, "max_tokens": 40, "tools": [TOOL], "tool_choice": "required", **SEEDED}),
    "schema": (CHAT, {"messages": HELLO, "max_tokens": 20, "guided_json": {"type": "integer"}, **SEEDED}),
    "function": (
        *(CHAT,),
        {
            "messages": HELLO,
            "max_tokens": 40,
            "functions": [TOOL["function"]],
            "function_call": {"name": "clock"},
            **SEEDED,
        },
    ),
    "custom tool": (
        *(CHAT,),
        {"messages": HELLO, "max_tokens": 24, "tools": [SHELL], "tool_choice": "required", **SEEDED},
    ),
    "of vllm": (
        *(COMPLETION,),
        {"prompt": "The", "max_tokens": 2, "temperature": 0, "return_token_ids": True, "prompt_logprobs": 1},
    ),
    "response": (RESPONSES, {"input": "Hello", "max_output_tokens": 12, **SEEDED}),
    "response call": (RESPONSES, {"input": "Hi", "tools": [CLOCK_ITEM], "tool_choice": "required", "temperature": 0}),
    "message": (MESSAGES, {"messages": USERS, "max_tokens": 12, **SEEDED}),
    "message call": (
        *(MESSAGES,),
        {"messages": HELLO, "max_tokens": 40, "tools": [CLOCK], "tool_choice": {"type": "any"}, "temperature": 0},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_folder(tmp_path_factory.mktemp("verify"))


@pytest.fixture(scope="module")
def server(folder):
    sources = {"talker": folder, "storyteller": STORY}
    with RunningServer(sources, chat_template=TEMPLATE, settings={"sampling": {}}, verify=True) as running:
        yield running


@pytest.fixture(scope="module")
def answers(server):
    """name -> (request, answer)"""
    given = {}
    for name, (path, body) in ASKED.items():
        request = {"model": "talker", **body}
        status, _, answer = server.post(path, request)
        assert status == 200, answer
        given[name] = request, answer
    assert given["stopped"][1]["choices"][0]["finish_reason"] == "stop"
    return given


@pytest.fixture(scope="module")
def alone(folder):
    """An engine with nothing else to do."""
    with model(folder, BACKEND, threads=1).engine(prefix_sharing=False) as engine:
        yield engine


def check(engine, request, answer, **options):
    again = Recomputation(engine, TEMPLATE, request, answer, **options)
    choices = again.submit()
    return again.judge([choice.result() for choice in choices])


def test_a_token_may_be_called_as_a_field_is():
    """What is not compared elsewhere is, where the keys are texts of tokens or what a request said."""
    for name, path in (("top_logprobs", "/v1/completions"), ("metadata", "/v1/responses")):
        answers = [{name: {"id": value, "created": None}} for value in (-1.0, -5.0)]
        assert [each.field for each in compare(*answers, path).differences] == [f"{name}.id"]
    answers = [{"id": value, "usage": {"prompt_tokens_details": value}, "x": None} for value in (1, 2)]
    assert compare(*answers, "/v1/completions").verdict == "equal"


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", ASKED)
def test_what_was_served_comes_again(name, answers, alone, server):
    request, answer = answers[name]
    found = check(alone, request, answer)
    assert (found.verdict, found.differences, found.first_token) == ("equal", [], None)
    assert found.tokens > 0
    assert found.fingerprint == answer["system_fingerprint"]
    status, _, verdict = server.post("/v1/verify", {"request": request, "answer": answer})
    assert (status, verdict["verdict"]) == (200, "equal")
    assert verdict["fingerprint"] == found.fingerprint


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ASKED)
def test_clients_write_null_for_what_is_absent(name, answers, alone):
    """As the openai client's model_dump_json does, with ids and times of their own."""
    request, answer = copy.deepcopy(answers[name])
    answer |= {"service_tier": None, "id": "other", "created": 7}
    for choice in answer.get("choices", []):
        choice |= {"note": None}
    assert check(alone, {**request, "stream": True}, answer).verdict == "equal"


def places(value, place=()):
    """Every (keys, leaf) of a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*place, key))
    if not isinstance(value, dict | list):
        yield place, value


def changed(value, place, leaf):
    other = copy.deepcopy(value)
    holder = other
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = leaf
    return other


UNSAID = ("id", "call_id", "created", "created_at", "cached_tokens", "cache_read_input_tokens")


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ASKED)
def test_every_altered_field_is_caught(name, answers, alone):
    """Each leaf of the answer in turn, but ids, times and what was cached."""
    request, answer = answers[name]
    count = 0
    again = Recomputation(alone, TEMPLATE, request, answer)
    results = [choice.result() for choice in again.submit()]
    for place, leaf in places(answer):
        if place[-1] in UNSAID or place[0] in ("object", "type") or "cache_creation_input_tokens" in place:
            continue
        if leaf is None:
            other = "x"
        elif isinstance(leaf, bool):
            other = not leaf
        elif isinstance(leaf, str):
            other = leaf + "x"
        else:
            other = leaf + 1
        again.answer = changed(answer, place, other)
        found = again.judge(results)
        assert found.verdict == "differs", place
        assert found.differences
        count += 1
    assert count > 5


def pieces_and_word(model, out):
    """The greedy text in its tokens, and the place of one that is a whole word: not the first, and not like "queen"."""
    pieces = [model.vocabulary.tokens[token].decode(errors="replace") for token in out.token_ids]

    def is_a_word(at):
        return re.fullmatch(" [a-pr-z][a-z]*", pieces[at]) and not pieces[at + 1][0].isalpha()

    return pieces, first_where(range(2, len(pieces) - 1), is_a_word, f"a word that is one token in {pieces}")


def test_one_word(answers, alone):
    """The token, its place, both probabilities."""
    request, answer = copy.deepcopy(answers["greedy"])
    out = alone.model.generate(PROMPT, max_tokens=16)
    pieces, at = pieces_and_word(alone.model, out)
    assert answer["choices"][0]["text"] == "".join(pieces)
    answer["choices"][0]["text"] = "".join([*pieces[:at], " queen", *pieces[at + 1 :]])
    found = check(alone, request, answer)
    assert found.verdict == "differs"
    first = found.first_token
    tokens = alone.model.vocabulary.tokens
    assert (first.choice, first.position, first.computed.text) == (0, at, pieces[at])
    assert out.token_ids[at] == first.computed.id
    assert first.computed.p == pytest.approx(2.718281828 ** out.logprobs[first.position])
    assert " queen".startswith(first.answered.text)
    assert tokens[first.answered.id].decode() == first.answered.text
    scored = bitnet_ref.generation.score.score(
        alone.model, [*out.prompt_token_ids, *out.token_ids[: first.position]], [[first.answered.id]]
    )
    assert first.answered.p == pytest.approx(2.718281828 ** scored[0].total)
    assert [each.field for each in found.differences] == ["choices[0].text"]


def test_a_text_that_is_cut_or_goes_on(answers, alone):
    request, answer = copy.deepcopy(answers["greedy"])
    text = answer["choices"][0]["text"]
    answer["choices"][0]["text"] = text + " and ran"
    first = check(alone, request, answer).first_token
    assert (first.position, first.computed, first.answered.text) == (16, None, " and")
    pieces, at = pieces_and_word(alone.model, alone.model.generate(PROMPT, max_tokens=16))
    answer["choices"][0]["text"] = "".join(pieces[:at])
    first = check(alone, request, answer).first_token
    assert (first.position, first.computed.text, first.answered.text) == (at, pieces[at], "</s>")
    answer["choices"][0]["text"] = "Æ"  # of bytes
    assert check(alone, request, answer).first_token.position == 0


def test_the_second_of_several_texts(answers, alone):
    request, answer = copy.deepcopy(answers["several"])
    answer["choices"][3]["text"] = "Zebra" + answer["choices"][3]["text"]
    found = check(alone, request, answer)
    assert (found.first_token.choice, found.first_token.position) == (3, 0)


def test_an_altered_call(answers, alone):
    """The arguments of a call are text of the model; of messages they are an object, which may be written otherwise."""
    for name, place in (
        ("call", ("choices", 0, "message", "tool_calls", 0, "function", "arguments")),
        ("response call", ("output", 0, "arguments")),
        ("message call", ("content", 0, "input", "zone")),
    ):
        request, answer = answers[name]
        leaf = dict(places(answer))[place]
        other = {"utc": "cet", "cet": "utc"}.get(leaf) or (leaf.replace("utc", "no") if "utc" in leaf else leaf + " ")
        found = check(alone, request, changed(answer, place, other))
        assert found.verdict == "differs"
        assert found.first_token is not None
        assert found.first_token.position > 0


def test_why_it_ended_how_many_and_which_model(answers, alone):
    """No token differs, and the answer is refused."""
    request, answer = answers["chat"]
    for place, leaf in (
        (("choices", 0, "finish_reason"), "stop"),
        (("usage", "completion_tokens"), 11),
        (("usage", "prompt_tokens"), 1),
        (("model",), "gpt-4o"),
        (("choices", 0, "logprobs", "content", 2, "token"), " queen"),
        (("choices", 0, "logprobs", "content", 2, "logprob"), -9.0),
    ):
        found = check(alone, request, changed(answer, place, leaf))
        assert (found.verdict, found.first_token) == ("differs", None)
        assert len(found.differences) == 1


def test_another_model(answers, tmp_path, folder):
    """The same name, other weights: the tokens differ, and so does the fingerprint."""
    request, answer = answers["greedy"]
    other = tmp_path / "talker"
    shutil.copytree(folder, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 50.0}))
    with bitnet_ref.load(other, backend="numpy").engine() as engine:
        found = check(engine, request, answer)
    assert found.verdict == "differs"
    assert found.first_token is not None
    assert found.differences[-1].field == "system_fingerprint"
    assert differing_parts(found.fingerprint, answer["system_fingerprint"]) == ["the weights or the config"]


def test_a_fingerprint_alone(answers, alone):
    request, answer = copy.deepcopy(answers["greedy"])
    del answer["system_fingerprint"]
    assert check(alone, request, answer).verdict == "equal"  # of a client that does not keep it
    answer["system_fingerprint"] = "br1-000000000000-" + alone_parts(answers)
    found = check(alone, request, answer)
    assert found.verdict == "differs"
    assert "no token differs" in found.reason
    assert "the weights or the config" in found.reason
    answer["system_fingerprint"] = "fp_44709d6fcb"
    assert "of another form" in check(alone, request, answer).reason


def alone_parts(answers):
    return answers["greedy"][1]["system_fingerprint"].split("-", 2)[2]


@pytest.mark.parametrize(
    ("change", "answer", "reason"),
    [
        ({"temperature": 0.5}, {}, "sampled at temperature 0.5 without a seed"),
        ({"temperature": None}, {}, "sampled at temperature 1 without a seed"),
        ({"tempature": 1}, {}, "the request is refused: tempature"),
        ({"max_tokens": 10**9}, {}, "the request is refused"),
        ({}, {"object": "text_completion.chunk"}, "none of chat.completion"),
        ({}, {"object": "chat.completion.chunk"}, "a piece of a stream"),
        ({}, {"object": None, "error": {"message": "no"}}, "the answer is an error"),
        ({}, {"object": 7}, "its object or type is 7"),
        ({"suffix": "x"}, {}, "the request is refused: suffix"),
    ],
)
def test_what_cannot_be_checked(change, answer, reason, answers, alone, server):
    request, served = answers["greedy"]
    request, served = {**request, **change}, {**served, **answer}
    with pytest.raises(CannotCheck, match=reason):
        check(alone, request, served)
    status, _, verdict = server.post("/v1/verify", {"request": request, "answer": served})
    assert (status, verdict["verdict"]) == (200, "unchecked")
    assert reason in verdict["reason"]


def test_a_response_whose_conversation_is_not_there(answers, alone):
    request, answer = answers["response"]
    with pytest.raises(CannotCheck, match="there is no stored response 'resp_1'"):
        check(alone, {**request, "previous_response_id": "resp_1"}, answer)


@pytest.mark.parametrize("reply", ["thinking", "only thinking", "calls", "a custom tool", "nothing"])
def test_an_answer_has_the_same_texts_in_each_api(reply):
    recorded = json.loads(ANSWERS.read_text())
    openai, anthropic, responses = (
        read_replies(recorded[f"{api}, {reply}, whole"])[0] for api in ("openai", "anthropic", "responses")
    )
    assert responses == openai
    assert anthropic == [json.loads(part) if str(part).startswith('{"') else part for part in openai]


@pytest.mark.parametrize(
    ("answer", "replies"),
    [
        ({"choices": 5}, []),
        ({"choices": [5, {"text": "a"}, {"text": 5}]}, [None, ["", "a"], None]),
        ({"choices": [{"message": 5, "text": "a"}, {"message": {"content": None}}]}, [["", "a"], ["", ""]]),
        ({"choices": [{"message": {"tool_calls": [5]}}, {"message": {"tool_calls": [{}]}}]}, [None, None]),
        ({"choices": [{"message": {"tool_calls": 5, "content": "a"}}]}, [["", "a"]]),
        ({"choices": [{"message": {"function_call": {"name": "f", "arguments": "{"}}}]}, [["", "", "f", "{"]]),
        ({"content": [5]}, [None]),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, [["", "ab"]]),
        ({"content": [{"type": "tool_use", "name": "f", "partial_json": "{", "input": {}}]}, [["", "", "f", "{"]]),
        ({"output": "a"}, [["", ""]]),
        ({"output": [{"type": "message", "content": [5, {"text": "a"}]}]}, [["", "a"]]),
        ({}, [["", ""]]),
    ],
)
def test_the_texts_of_any_answer(answer, replies):
    assert read_replies(answer) == replies


@pytest.mark.thorough
def test_an_answer_may_be_anything(answers, alone):
    """No answer breaks the comparison, whatever it has where."""
    shuffled = random.Random(7)
    values = [None, True, 7, -1.5, "x", "\ud800", [], {}, [None], {"text": 5}, [[1]], {"function": None}]
    for name in ("several", "call", "response", "message call"):
        request, answer = answers[name]
        again = Recomputation(alone, TEMPLATE, request, answer)
        results = [choice.result() for choice in again.submit()]
        every = [place for place, _ in places(answer)]
        for _ in range(150):
            place = shuffled.choice(every)
            place = place[: shuffled.randint(1, len(place))]
            again.answer = changed(answer, place, shuffled.choice(values))
            assert again.judge(results).verdict in ("equal", "differs")


def test_the_route_is_off_unless_it_is_wanted(server, folder):
    assert "/v1/verify" in server.get("/openapi.json")[2]["paths"]
    with RunningServer({"talker": folder}) as other:
        assert other.post("/v1/verify", {"request": {}, "answer": {}})[0] == 404
        assert "/v1/verify" not in other.get("/openapi.json")[2]["paths"]


def test_the_route_refuses_what_it_cannot_read(server):
    for body in ({}, {"request": {}}, {"request": [], "answer": {}}, {"request": {}, "answer": {}, "more": 1}):
        assert server.post("/v1/verify", body)[0] == 400
    good = {"object": "text_completion"}
    assert server.post("/v1/verify", {"request": {"model": "none", "prompt": "a"}, "answer": good})[0] == 404
    assert server.post("/v1/verify", {"request": {"prompt": "a"}, "answer": good})[0] == 400  # which model?


def test_the_route_obeys_the_limits_of_the_server(folder):
    limits = ServerLimits(max_body_bytes=500)
    with RunningServer({"talker": folder}, limits, verify=True) as server:
        body = {"request": {"prompt": "a" * 500}, "answer": {}}
        assert server.post("/v1/verify", body)[0] == 413


# -- the fingerprint ---------------------------------------------------------------------------------------------------


def fingerprint(source, template=None, backend="numpy", config=None, **loading):
    loaded = bitnet_ref.load(source, backend=backend, share=False, **loading)
    with loaded.engine(config=EngineConfig.of(**(config or {}))) as engine:
        return fingerprint_of(engine, template)


def test_backends_and_threads_have_no_part_in_it(backend_name):
    first = fingerprint(STORY)
    assert first.startswith("br1-")
    assert [len(part) for part in first.split("-")] == [3, 12, 8, 8]
    for options in ({"threads": 1}, {"threads": 2}, {"config": {"max_batch": 3, "prefix_sharing": False}}):
        assert fingerprint(STORY, backend=backend_name, **options) == first
    with start_engines(model(STORY, backend_name, threads=2), EngineConfig(replicas=1)) as engine:
        assert fingerprint_of(engine, None) == first


def test_it_is_computed_once_for_an_engine_and_its_model(monkeypatch):
    made, compute = [], fingerprint_module.config_hash
    monkeypatch.setattr(fingerprint_module, "config_hash", lambda config: made.append(config) or compute(config))
    with start_engines(model(STORY, "numpy"), EngineConfig()) as engine:
        first = [fingerprint_of(engine, template) for template in (None, None, "x", "x")]
        assert (first[0], first[2], len(made)) == (first[1], first[3], 2)
        engine._worker.model = engine.model.renew()  # as after a failure of the device
        assert (fingerprint_of(engine, "x"), len(made)) == (first[2], 3)


@pytest.mark.thorough
def test_what_has_a_part_in_it(tmp_path):
    folder = chat_folder(tmp_path)
    first = fingerprint(folder)
    weights, text, numbers = "the weights or the config", "the tokenizer or the chat template", "the dtypes, the rules"
    for words, found in (
        (weights, fingerprint_with(folder, tmp_path / "a", "config.json", rms_norm_eps=2e-5)),
        (text, fingerprint(folder, "{{ messages }}")),
        (text, fingerprint_with(folder, tmp_path / "b", "tokenizer_config.json", add_eos_token=True)),
        (numbers, fingerprint(folder, dtype="float64")),
        (numbers, fingerprint(folder, cache_dtype="float16")),
        (numbers, fingerprint(folder, config={"sampling": {"top_k": 5}})),
        (numbers, fingerprint(folder, config={"generation_defaults": "model"})),
    ):
        (part,) = differing_parts(first, found)
        assert part.startswith(words)
    assert fingerprint_with(folder, tmp_path / "c", "generation_config.json", temperature=0.1) == first  # plain


def fingerprint_with(folder, copied, name, **facts):
    shutil.copytree(folder, copied)
    (copied / name).write_text(json.dumps({**json.loads((copied / name).read_text()), **facts}))
    return fingerprint(copied)


def test_streams_have_it_too(server, answers):
    expected = answers["greedy"][1]["system_fingerprint"]
    body = {"model": "talker", "prompt": PROMPT, "max_tokens": 2, "temperature": 0, "stream": True}
    assert server.post(COMPLETION, body)[2].count(f'"system_fingerprint":"{expected}"') == 2
    body = {"model": "talker", "input": "Hello", "max_output_tokens": 2, "temperature": 0, "stream": True}
    assert f'"system_fingerprint":"{expected}"' in server.post(RESPONSES, body)[2]


# -- files of batches --------------------------------------------------------------------------------------------------


def line(custom_id, url=COMPLETION, **body):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


LINES = [
    line("sampled", prompt=PROMPT, max_tokens=8),  # its seed is made of the line
    line("chat", CHAT, messages=HELLO, max_tokens=6, logprobs=True),
    line("wrong", prompt=7),
    line("vectors", "/v1/embeddings", input=["a king"]),
]


@pytest.fixture(scope="module")
def batch(folder, tmp_path_factory):
    """The files of a batch: requests and answers."""
    parent = tmp_path_factory.mktemp("batch")
    source, target = parent / "in.jsonl", parent / "out.jsonl"
    source.write_text("\n".join(LINES) + "\n")
    done = invoke("batch", source, target, "--model", f"talker={folder}", *FAST)
    assert done.exit_code == 0, done.output
    return source, target


def test_a_batch_says_what_computed_it_and_is_checked(batch, folder):
    source, target = batch
    answered = [json.loads(each)["response"]["body"] for each in target.read_text().splitlines()]
    first = answered[0]["system_fingerprint"]
    assert first == answered[1]["system_fingerprint"]
    facts = invoke_json("verify", source, target, "--model", f"talker={folder}", *FAST, code=2)
    assert facts["lines"] == {"equal": 3, "differs": 0, "unchecked": 1}
    assert [(each["custom_id"], each["verdict"]) for each in facts["checks"]] == [("vectors", "unchecked")]


@pytest.mark.parametrize(
    ("number", "place", "leaf"),
    [
        (0, ("response", "body", "choices", 0, "text"), " Never."),
        (0, ("custom_id",), "chat"),
        (1, ("response", "body", "usage", "total_tokens"), 1),
        (2, ("response", "body", "error", "message"), "fine"),
        (2, ("response", "status_code"), 500),
    ],
)
def test_a_line_that_was_altered(number, place, leaf, batch, folder, tmp_path):
    source, target = batch
    lines = target.read_text().splitlines()
    lines[number] = json.dumps(changed(json.loads(lines[number]), place, leaf))
    (tmp_path / "out.jsonl").write_text(lines[number] + "\n")
    invoke_json("verify", source, tmp_path / "out.jsonl", "--model", f"talker={folder}", *FAST, code=1)


def test_a_line_that_was_written_anew_has_no_seed(batch, alone):
    source, target = batch
    asked, answered = (path.read_text().splitlines()[0] for path in (source, target))
    server = BatchServer(alone, "talker")
    found = check_line(server, asked.replace(", ", ",").encode(), answered.encode())
    assert found.verdict == "unchecked"
    assert "without a seed" in found.reason
    assert "byte for byte" in found.reason
    for bad in (b"nonsense", b"[]", b'{"custom_id": "sampled"}'):
        assert check_line(server, bad, answered.encode()).verdict == "unchecked"
        assert check_line(server, asked.encode(), bad).verdict == "unchecked"


# -- the shell ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path, folder):
    """A request and its answer, by a server without a template of its own."""
    config = EngineConfig(max_batch=4)
    with model(folder, BACKEND, threads=1).engine(config=config) as engine:
        request = {"model": "storyteller", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        answer = {"object": "text_completion", "model": "storyteller"}
        again = Recomputation(engine, None, request, answer)
        choices = again.submit()
        whole = again.asked.response(choices, [choice.result() for choice in choices])
    (tmp_path / "request.json").write_text(json.dumps(request))
    (tmp_path / "answer.json").write_text(json.dumps(whole, indent=1))
    return tmp_path / "request.json", tmp_path / "answer.json"


def test_the_command(files, folder):
    request, answer = files
    found = invoke("verify", request, answer, "--model", folder, "--generation-defaults", "plain", *FAST)
    assert found.exit_code == 0, found.output
    assert found.stdout.startswith("EQUAL: every field is equal\n  12 tokens computed again on ")
    facts = invoke_json("verify", request, answer, "--model", folder, "--generation-defaults", "plain", *FAST)
    assert (facts["verdict"], facts["tokens"], facts["backend"]) == ("equal", 12, BACKEND)
    answered = json.loads(answer.read_text())
    out = model(folder, BACKEND, threads=1).generate(PROMPT, max_tokens=12)
    pieces, at = pieces_and_word(model(folder, BACKEND, threads=1), out)
    answered["choices"][0]["text"] = "".join([*pieces[:at], " queen", *pieces[at + 1 :]])
    answer.write_text(json.dumps(answered))
    found = invoke("verify", request, answer, *FAST)  # the model that the answer names
    assert found.exit_code == 1
    shown = found.stdout.splitlines()
    assert shown[0] == "DIFFERS: the answer is another one"
    p = math.exp(out.logprobs[at])
    assert f"    computed  {pieces[at]!r}, token {out.token_ids[at]}, p {p:.3g}" in shown
    assert any(each.startswith("    answer    ' que") for each in shown)
    request.write_text(json.dumps({**json.loads(request.read_text()), "temperature": 1}))
    found = invoke("verify", request, answer, *FAST)
    assert found.exit_code == 2
    assert found.stdout.startswith("CANNOT BE CHECKED: the answer was sampled at temperature 1 without a seed")


def test_names_of_models(files, folder):
    request, answer = files
    served = json.loads(answer.read_text())
    found = invoke("verify", request, answer, "--model", f"other={folder}", *FAST)
    assert found.exit_code == 1  # a server that calls its model `other` says so
    assert "model: computed 'other', the answer has 'storyteller'" in found.stdout
    for path in files:  # a server may call it anything: what --model gives is loaded
        path.write_text(json.dumps({**json.loads(path.read_text()), "model": "no-model-here"}))
    plain = ("--generation-defaults", "plain", *FAST)
    assert invoke("verify", request, answer, "--model", folder, *plain).exit_code == 0
    answer.write_text(json.dumps({name: served[name] for name in served if name != "model"}))
    assert "give --model" in invoke("verify", request, answer, *FAST).stderr
    answer.write_text("[]")
    assert invoke("verify", request, answer, "--model", folder, *FAST).exit_code == 3
