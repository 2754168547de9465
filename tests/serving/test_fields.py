"""Every published field of the APIs that the server speaks is used, ignored or refused by its own name."""

import json
import logging
import re
import threading
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest
from helpers import chat_folder, model
from server_runs import RunningServer, events, until

from bitnet_ref.formats.open import ASSETS
from bitnet_ref.serving.http import fingerprint as fingerprint_module
from bitnet_ref.serving.http import schemas
from bitnet_ref.serving.http.chat_prompt import chat_ids, chat_text
from bitnet_ref.serving.http.fields import OFF, REFUSED, WITHOUT_EFFECT
from bitnet_ref.serving.http.schemas import BODIES, RequestError, check

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "serving" / "published_fields.json").read_text())
CHAT, COMPLETION, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for d in documents or [] %}{{ d.text }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]
PROMPT = "Once upon a time"
ZONE = {"type": "object", "properties": {"zone": {"enum": ["utc", "cet"]}}, "required": ["zone"]}
CLOCK = {"name": "clock", "description": "The time.", "parameters": ZONE}
COOK = {"name": "cook", "parameters": ZONE}
SHELL = {"type": "custom", "custom": {"name": "shell", "description": "Runs a command."}}


def function(declared):
    return {"type": "function", "function": declared}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = chat_folder(tmp_path_factory.mktemp("fields"))
    sources = {"talker": folder, "gpt-4o": folder, "story": ASSETS / "storyteller"}
    with RunningServer(sources, chat_template=TEMPLATE) as running:
        yield running


@pytest.fixture
def ask(server):
    def post(path=CHAT, status=200, **body):
        base = {CHAT: {"messages": HELLO}, COMPLETION: {"prompt": PROMPT}, EMBEDDINGS: {"input": PROMPT}}[path]
        base |= {"model": "talker"} | ({"max_tokens": 6, "temperature": 0} if path != EMBEDDINGS else {})
        got, _, answer = server.post(path, base | body)
        assert got == status, answer
        return answer

    return post


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", PUBLISHED)
def test_every_published_name_is_known(api):
    for path, names in PUBLISHED[api].items():
        if path != "source":
            assert set(names) <= set(BODIES[path][1]["properties"]), path


@pytest.mark.parametrize("path", [CHAT, COMPLETION, EMBEDDINGS])
def test_fields_without_a_meaning_change_nothing(ask, path):
    ignored = {name: {"any": ["thing"]} for name in WITHOUT_EFFECT}
    answer, plain = ask(path, **ignored), ask(path)
    for name in ("choices", "data"):
        assert answer.get(name) == plain.get(name)


def test_fields_that_are_off_change_nothing(ask):
    plain = ask()["choices"]
    for value in OFF:
        assert ask(**dict.fromkeys(REFUSED, value), modalities=["text"])["choices"] == plain


@pytest.mark.parametrize("name", REFUSED)
def test_fields_with_another_meaning_are_refused_by_their_name(ask, name):
    error = ask(status=400, **{name: {"name": "x"}})["error"]
    assert (error["param"], error["message"]) == (name, f"{name}: {REFUSED[name]}")


NEEDED = {"messages": HELLO, "tokens": [5], "max_tokens": 2, "documents": ["x"], "request": {}, "answer": {}}


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_is_refused_on_every_path(path):
    required = {name: NEEDED.get(name, "x") for name in BODIES[path][1]["required"]}
    check({"model": "talker", **required} if path != "/v1/verify" else required, path)
    with pytest.raises(RequestError, match="tempature: there is no such parameter"):
        check({**required, "tempature": 1}, path)
    with pytest.raises(RequestError, match="zzz: there is no such parameter; there are: ") as caught:
        check({**required, "zzz": 1}, path)
    assert not {"verbosity", "audio", "user", "mcp_servers"} & set(re.findall(r"\w+", str(caught.value)))


def test_agents_may_send_fields_of_their_next_version(server):
    """Elsewhere an unknown field is an error, unless the server's owner says otherwise."""
    hello = {"model": "talker", "messages": HELLO, "max_tokens": 1, "zzz": 2}
    assert server.post("/v1/messages", hello)[0] == 200
    assert server.post("/v1/responses", {"model": "talker", "input": HELLO, "max_output_tokens": 1, "zzz": 2})[0] == 200
    assert server.post("/api/chat", {**hello, "stream": False, "options": {"num_predict": 1}})[0] == 200
    assert server.post(CHAT, hello)[0] == 400
    with RunningServer({"talker": server.shelf.places["talker"].source}, unknown_fields="refuse") as other:
        assert other.post("/v1/messages", hello)[0] == 400


def test_unknown_fields_with_a_warning(server, caplog):
    with RunningServer({"talker": server.shelf.places["talker"].source}, unknown_fields="warn") as other:
        body = {"input": HELLO, "max_output_tokens": 2, "tempature": 1, "zzz": 2}
        with caplog.at_level(logging.INFO, "bitnet_ref"):
            for _ in range(2):
                assert other.post("/v1/responses", body)[0] == 200
            bad = {"messages": [{"role": "user", "content": "Hello"}], "zzz": 2, "max_tokens": 0}
            assert other.post("/v1/messages", bad)[0] == 400  # what is known is checked as ever
            until(lambda: sum(hasattr(each, "facts") for each in caplog.records) == 3)
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert [text.partition(": ")[0] for text in warnings] == ["/v1/responses", "/v1/messages"]
    assert "'tempature', 'zzz'" in warnings[0]
    lines = [each.facts for each in caplog.records if hasattr(each, "facts")]
    assert [each["ignored_fields"] for each in lines] == [["tempature", "zzz"]] * 2 + [["zzz"]]


def test_each_unknown_field_is_warned_of_once(caplog, monkeypatch):
    monkeypatch.setattr(schemas, "MAX_WARNED", 22)
    unknown, many = schemas.UnknownFields(), {f"x{number}": 1 for number in range(21)}
    for path, warned in ((CHAT, 20), (CHAT, 0), (COMPLETION, 20), (EMBEDDINGS, 0)):  # then more are not counted
        caplog.clear()
        body = {"model": "m", **many}
        assert unknown.drop(body, path) == list(many)[:20]
        assert body == {"model": "m"}
        assert [each.getMessage().count("'x") for each in caplog.records] == ([warned] if warned else [])
    assert unknown.drop({"y" * 101: 1}, CHAT) == ["y" * 100]


# -- parts of messages -------------------------------------------------------------------------------------------------


def test_other_modalities_and_parts(ask):
    error = ask(status=400, modalities=["text", "audio"])["error"]
    assert "audio is not supported" in error["message"]
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    error = ask(status=400, messages=[{"role": "user", "content": [image]}])["error"]
    assert error["param"] == "messages.0.content[0]"
    assert "image_url is not supported; the models read text only" in error["message"]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "text"}, "messages.0.content[0].text: is missing"),
        ({"type": "refusal", "text": "x"}, "messages.0.content[0].refusal: is missing"),
        ({"type": "txt", "text": "x"}, "messages.0.content[0].type: expected one of text, refusal, got 'txt'"),
    ],
)
def test_parts_that_are_wrong(ask, part, message):
    error = ask(status=400, messages=[{"role": "user", "content": [part]}])["error"]
    assert (error["message"], error["param"]) == (message, message.partition(":")[0])


def test_parts_of_text(ask):
    plain = ask()["choices"]
    cached = [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]
    for parts in (cached, [{"type": "refusal", "refusal": "Hello"}]):
        assert ask(messages=[{"role": "user", "content": parts}])["choices"] == plain


# -- fields of other servers -------------------------------------------------------------------------------------------

COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red"]}}, "required": ["colour"]}
NAMED = {"type": "json_schema", "json_schema": {"name": "x", "schema": COLOUR}}


@pytest.mark.sample(3)
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"n_predict": 3}, {"max_tokens": 3}),
        ({"n_predict": -1, "max_tokens": 5}, {"max_tokens": 5}),
        ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"n_cmpl": 2}, {"n": 2}),
        ({"no_stop_trim": True, "stop": ["."]}, {"include_stop_str_in_output": True, "stop": ["."]}),
        ({"regex": "red|blue"}, {"guided_regex": "red|blue"}),
        ({"json_schema": COLOUR}, {"guided_json": COLOUR}),
        ({"ebnf": 'root ::= "red" | "blue"', "grammar": ""}, {"guided_choice": ["red", "blue"]}),
        ({"grammar": 'root ::= "red"\n'}, {"guided_choice": ["red"]}),
        ({"structured_outputs": {"choice": ["red", "blue"]}}, {"guided_choice": ["red", "blue"]}),
        ({"structured_outputs": {"regex": "red|blue", "json": None}}, {"guided_regex": "red|blue"}),
        ({"structured_outputs": {"grammar": 'start: "red"'}}, {"guided_grammar": 'start: "red"'}),
        ({"structured_outputs": {"grammar": 'root ::= "red"'}}, {"guided_grammar": 'start: "red"'}),
        ({"structured_outputs": {"json": json.dumps(COLOUR)}}, {"guided_json": json.dumps(COLOUR)}),
        ({"response_format": {"type": "json_object", "schema": COLOUR}}, {"response_format": NAMED}),
    ],
)
def test_names_of_other_servers(ask, path, theirs, ours):
    if any(name in str(theirs) for name in ("regex", "schema", "root", "structured")):
        pytest.importorskip("llguidance")
    size = {"max_tokens": 20}
    assert ask(path, **size | theirs)["choices"] == ask(path, **size | ours)["choices"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"structured_outputs": {"choice": ["a"], "regex": "a"}}, None),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"tag": 1}}, "tag"),
        ({"grammar": 'root ::= "a'}, "guided_grammar"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"allowed_token_ids": [1 << 20]}, "allowed_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"functions": [CLOCK], "tools": [function(CLOCK)]}, "functions"),
        ({"tools": [{"type": "custom", "function": CLOCK}]}, "tools.0.custom"),
        ({"tools": [function(CLOCK)], "tool_choice": {"type": "function", "custom": {"name": "x"}}}, None),
    ],
)
def test_what_these_fields_refuse(ask, body, param):
    if "grammar" in body:
        pytest.importorskip("llguidance")
    error = ask(status=400, **body)["error"]
    assert param is None or error["param"] == param, error


def test_token_ids_are_returned(server, ask):
    for path in (CHAT, COMPLETION):
        whole = ask(path, return_token_ids=True)
        choice = whole["choices"][0]
        given = (whole if path == CHAT else choice)["prompt_token_ids"]
        assert (len(choice["token_ids"]), len(given)) == (6, whole["usage"]["prompt_tokens"])
        base = {"messages": HELLO} if path == CHAT else {"prompt": PROMPT}
        base |= {"model": "talker", "max_tokens": 6, "temperature": 0, "stream": True, "return_token_ids": True}
        stream = events(server.post(path, base)[2])
        parts = [each["choices"][0] for each in stream]
        assert (stream[0] if path == CHAT else parts[0])["prompt_token_ids"] == given
        assert [each for part in parts for each in part.get("token_ids", [])] == choice["token_ids"]
        assert sum("prompt_token_ids" in str(each) for each in stream) == 1
    text = server.post("/detokenize", {"model": "talker", "tokens": choice["token_ids"]})[2]["prompt"]
    assert text.strip() == choice["text"].strip()


def test_log_probabilities_of_the_prompt(ask):
    scored = ask(COMPLETION, echo=True, logprobs=1)["choices"][0]["logprobs"]
    answer = ask(COMPLETION, prompt_logprobs=1, return_token_ids=True)["choices"][0]
    rows = answer["prompt_logprobs"]
    assert rows[0] is None
    for row, token, logprob in zip(
        rows[1:], answer["prompt_token_ids"][1:], scored["token_logprobs"][1:], strict=False
    ):
        assert row[str(token)]["logprob"] == logprob
        assert row[str(token)]["rank"] == (1 if len(row) == 1 else None)
    both = ask(COMPLETION, echo=True, logprobs=1, prompt_logprobs=3)["choices"][0]
    assert both["prompt_logprobs"] == ask(COMPLETION, prompt_logprobs=3)["choices"][0]["prompt_logprobs"]
    assert both["logprobs"]["token_logprobs"] == scored["token_logprobs"]
    assert len(ask(prompt_logprobs=0, return_token_ids=True)["prompt_logprobs"]) == 13
    named = ask(logprobs=True, return_tokens_as_token_ids=True, return_token_ids=True)["choices"][0]
    written = [each["token"] for each in named["logprobs"]["content"]]
    assert written == [f"token_id:{token}" for token in named["token_ids"]]


def test_allowed_tokens(ask):
    free = ask(COMPLETION, return_token_ids=True)["choices"][0]["token_ids"]
    allowed = sorted(set(free) - set(free[:1]))
    for path in (CHAT, COMPLETION):
        ids = ask(path, allowed_token_ids=allowed, return_token_ids=True)["choices"][0]["token_ids"]
        assert set(ids) <= set(allowed)
        assert ids != free


def test_special_tokens_of_prompt_and_text(ask, tmp_path):
    with_bos, without = (ask(COMPLETION, add_special_tokens=adds, return_token_ids=True) for adds in (True, False))
    ids = with_bos["choices"][0]["prompt_token_ids"]
    assert without["choices"][0]["prompt_token_ids"] == ids[1:]
    assert (
        ask(return_token_ids=True)["prompt_token_ids"]
        == ask(return_token_ids=True, add_special_tokens=True)["prompt_token_ids"]
    )  # the template has written BOS, which is not doubled
    talker = model(chat_folder(tmp_path))
    plain, special = (
        chat_ids(talker, {"messages": HELLO, "add_special_tokens": adds}, "{{ messages[0].content }}", False)
        for adds in (False, True)
    )
    assert special == [1, *plain]  # as `/tokenize` answers
    bias = {"logit_bias": {"1": 100}, "max_tokens": 2}
    for path, read in ((COMPLETION, lambda each: each["text"]), (CHAT, lambda each: each["message"]["content"])):
        assert "<s>" not in read(ask(path, **bias)["choices"][0])
        assert read(ask(path, **bias, skip_special_tokens=False)["choices"][0]).count("<s>") == 2


def test_the_prompt_is_cut(ask):
    ids = ask(COMPLETION, return_token_ids=True)["choices"][0]["prompt_token_ids"]
    cut = ask(COMPLETION, return_token_ids=True, truncate_prompt_tokens=2)["choices"][0]
    assert cut["prompt_token_ids"] == ids[-2:]
    cut = ask(COMPLETION, return_token_ids=True, truncate_prompt_tokens=2, truncation_side="right")["choices"][0]
    assert cut["prompt_token_ids"] == ids[:2]
    long = [{"role": "user", "content": "Hello there. " * 200}]
    ask(status=400, messages=long)
    assert ask(messages=long, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 250
    vectors = ask(EMBEDDINGS, input=[PROMPT, ids[:2]], truncate_prompt_tokens=2, truncation_side="right")
    assert vectors["data"][0]["embedding"] == vectors["data"][1]["embedding"]
    assert vectors["usage"]["prompt_tokens"] == 4
    ask(EMBEDDINGS, status=400, input=long[0]["content"])
    assert ask(EMBEDDINGS, input=long[0]["content"], truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 256


def test_inputs_of_texts_and_token_ids(ask):
    ids = ask(COMPLETION, return_token_ids=True)["choices"][0]["prompt_token_ids"]
    same = ask(EMBEDDINGS, input=[PROMPT, ids])["data"]
    assert same[0]["embedding"] == same[1]["embedding"]
    pair = ask(COMPLETION, prompt=[PROMPT, ids])["choices"]
    assert pair[0]["text"] == pair[1]["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_string_stays(server, ask, stream):
    free = ask(COMPLETION, max_tokens=30)["choices"][0]["text"]
    stop = free[10:14]
    body = {"model": "talker", "prompt": PROMPT, "max_tokens": 30, "temperature": 0, "stream": stream, "stop": stop}
    answer = server.post(COMPLETION, {**body, "include_stop_str_in_output": True})[2]
    parts = [each["choices"][0] for each in events(answer)] if stream else answer["choices"]
    assert "".join(part["text"] for part in parts) == free[: free.index(stop) + len(stop)]
    assert parts[-1]["stop_reason"] == stop


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_begins_with_the_last_message(server, ask, stream):
    talk = [*HELLO, {"role": "assistant", "content": "I am"}]
    goes_on = {"messages": talk, "continue_final_message": True, "add_generation_prompt": False}
    plain = ask(**goes_on)["choices"][0]["message"]["content"]
    body = {"model": "talker", "max_tokens": 6, "temperature": 0, **goes_on, "echo": True, "stream": stream}
    answer = server.post(CHAT, body)[2]
    if stream:
        text = "".join(each["choices"][0]["delta"].get("content", "") for each in events(answer))
    else:
        text = answer["choices"][0]["message"]["content"]
    assert text == "I am" + plain
    assert ask(echo=True)["choices"] == ask()["choices"]  # the user's words are no part of a reply


def test_developers_are_the_system_where_the_template_knows_none(server, tmp_path):
    talk = [{"role": "developer", "content": "Be brief."}, *HELLO]
    prompt = server.post("/apply-template", {"model": "talker", "messages": talk})[2]["prompt"]
    assert prompt.startswith("<s>system: Be brief.\nuser: Hello\n")
    talker = model(chat_folder(tmp_path))
    assert chat_text(talker, {"messages": talk}, "{{ messages[0].role }}{# developer #}", False) == "developer"


def test_documents_reach_the_template(ask):
    assert ask(documents=[{"text": "Hello world"}])["usage"]["prompt_tokens"] > ask()["usage"]["prompt_tokens"]


# -- tools -------------------------------------------------------------------------------------------------------------


def test_functions_in_openais_older_form(server, ask):
    pytest.importorskip("llguidance")
    body = {"functions": [CLOCK], "function_call": {"name": "clock"}, "max_tokens": 40}
    choice = ask(**body)["choices"][0]
    call = choice["message"]["function_call"]
    assert (call["name"], choice["finish_reason"], choice["message"]["content"]) == ("clock", "function_call", None)
    assert json.loads(call["arguments"])["zone"] in ("utc", "cet")
    stream = events(
        server.post(CHAT, {"model": "talker", "messages": HELLO, "temperature": 0, "stream": True, **body})[2]
    )
    parts = [each["choices"][0]["delta"].get("function_call", {}) for each in stream]
    assert [part["name"] for part in parts if "name" in part] == ["clock"]
    assert "".join(part.get("arguments", "") for part in parts) == call["arguments"]
    assert stream[-1]["choices"][0]["finish_reason"] == "function_call"
    talk = [*HELLO, {"role": "assistant", "content": None, "function_call": call}]
    talk.append({"role": "function", "name": "clock", "content": "It is five."})
    modern = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [function(call)]}]
    modern.append({"role": "tool", "name": "clock", "content": "It is five."})
    assert ask(messages=talk)["choices"] == ask(messages=modern)["choices"]
    assert (
        ask(functions=[CLOCK], function_call="none")["choices"]
        == ask(tools=[function(CLOCK)], tool_choice="none")["choices"]
    )


def test_only_allowed_tools_are_called(ask):
    pytest.importorskip("llguidance")
    tools = [function(COOK), function(CLOCK), SHELL]
    for kind, name in (("function", "clock"), ("custom", "shell")):
        allowed = {"mode": "required", "tools": [{"type": kind, kind: {"name": name}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        message = ask(tools=tools, tool_choice=choice, max_tokens=40)["choices"][0]["message"]
        assert message["tool_calls"][0][kind]["name"] == name
    choice["allowed_tools"] = {"mode": "required", "tools": [{"type": "function", "function": {"name": "other"}}]}
    assert ask(status=400, tools=tools, tool_choice=choice)["error"]["param"] == "tool_choice"


SUM_IN_LARK = """start: number " + " number
number: /[1-9]/"""


@pytest.mark.parametrize(("syntax", "definition"), [("lark", SUM_IN_LARK), ("regex", r"[1-9] \+ [1-9]")])
def test_the_format_of_a_custom_tool(server, ask, syntax, definition):
    """Its input matches the grammar, in every API that has such tools; also a regular expression beside other tools."""
    pytest.importorskip("llguidance")
    format_ = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    add = {"type": "custom", "custom": {"name": "add", "format": format_}}
    named = {"type": "custom", "custom": {"name": "add"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    for body in (
        {"tools": [add], "tool_choice": "required"},
        {"tools": [add, function(CLOCK)], "tool_choice": named, "max_tokens": 40},
        {"tools": [add, function(CLOCK)], "tool_choice": allowed, "response_format": {"type": "json_object"}},
    ):
        base = {"messages": HELLO, "model": "talker", "max_tokens": 40, "temperature": 1, "seed": 3} | body
        choice = server.post(CHAT, base)[2]["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert re.fullmatch(r"[1-9] \+ [1-9]", call["custom"]["input"]), call
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        stream = events(server.post(CHAT, base | {"stream": True})[2])
        parts = [each for event in stream for each in event["choices"][0]["delta"].get("tool_calls", ())]
        assert [part["custom"] for part in parts] == [call["custom"]]
    flat = {"type": "custom", "name": "add", "format": {"type": "grammar", "syntax": syntax, "definition": definition}}
    body = {"model": "talker", "input": "Hello", "tools": [flat], "tool_choice": "required", "max_output_tokens": 40}
    item = server.post("/v1/responses", body)[2]["output"][-1]
    assert item["type"] == "custom_tool_call"
    assert re.fullmatch(r"[1-9] \+ [1-9]", item["input"])
    body = {"tools": [add, function(CLOCK)], "tool_choice": "required"}
    if syntax == "lark":
        assert ask(status=400, **body)["error"]["param"] == "tool_choice"
    else:
        ask(**body)
    cut = ask(tools=[add], tool_choice="required", max_tokens=1)["choices"][0]
    assert cut["message"]["tool_calls"][0]["custom"]["input"] in "123456789"
    assert cut["finish_reason"] == "length"
    format_["grammar"] = {"syntax": syntax, "definition": "start: (" if syntax == "lark" else "("}
    ask(status=400, tools=[add], tool_choice="required")
    flat["format"] = {"type": "grammar", "syntax": "abnf", "definition": "x"}
    error = server.post("/v1/responses", {"model": "talker", "input": "Hello", "tools": [flat]})
    assert error[0] == 400, error


def test_the_fields_that_zed_sends(server):
    """By the `Request` of its crate open_ai; the program itself has a window and is not run."""
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": '{"zone":"utc"}'}}
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "What time"}, {"type": "text", "text": "is it?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "I look."},
        {"role": "tool", "content": "noon", "tool_call_id": "call_1"},
    ]
    body = {"model": "talker", "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    body |= {"max_completion_tokens": 6, "stop": ["."], "temperature": 0.0, "tools": [function(CLOCK)]}
    body |= {"tool_choice": "auto", "parallel_tool_calls": False, "prompt_cache_key": "a", "reasoning_effort": "low"}
    status, _, answer = server.post(CHAT, body)
    assert status == 200, answer
    *parts, last = events(answer)
    assert all({"index", "delta", "finish_reason"} <= part["choices"][0].keys() for part in parts)
    assert last["usage"].keys() >= {"prompt_tokens", "completion_tokens", "total_tokens"}
    body["messages"][3]["content"] = []  # a tool without a result
    assert server.post(CHAT, body)[0] == 200
    # With "chat_completions": false in its settings: by responses, which it keeps itself
    said = [
        {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "Be short."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What time is it?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "I look."}]},
        {
            "type": "message",
            "role": "assistant",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "One moment.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "call_1", "name": "clock", "arguments": '{"zone":"utc"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "noon"}]},
    ]
    body = {"model": "talker", "input": said, "store": False, "stream": True, "temperature": 0.0, "tool_choice": "auto"}
    body |= {"include": ["reasoning.encrypted_content"], "max_output_tokens": 6, "parallel_tool_calls": False}
    body |= {"prompt_cache_key": "a", "reasoning": {"effort": "low", "summary": "auto"}}
    body["tools"] = [{"type": "function", **CLOCK}]
    status, _, answer = server.post("/v1/responses", body)
    assert status == 200, answer
    got = [json.loads(line.removeprefix("data: ")) for line in answer.splitlines() if line.startswith("data: ")]
    assert got[-1]["type"] in ("response.completed", "response.incomplete")
    assert got[-1]["response"]["usage"].keys() >= {"input_tokens", "output_tokens", "total_tokens"}
    assert {each["type"] for each in got} >= {"response.output_item.added", "response.output_item.done"}
    # Its predictions of edits, by "open_ai_compatible_api" and by Ollama's API
    stops = [f"<|stop_{number}|>" for number in range(14)]
    body = {"model": "talker", "prompt": "def f", "max_tokens": 6, "stop": stops}
    status, _, answer = server.post(COMPLETION, body)
    assert status == 200, answer
    assert answer.keys() >= {"id", "object", "created", "model", "choices", "usage"}
    body = {"model": "talker", "prompt": "def f", "raw": True, "stream": False}
    status, _, answer = server.post("/api/generate", {**body, "options": {"num_predict": 6, "stop": stops}})
    assert (status, "response" in answer) == (200, True), answer


def test_the_event_loop_hashes_no_weights(server, ask, monkeypatch):
    """After a device failed the engine has another model, whose fingerprint no request has asked for yet."""
    ask(COMPLETION)
    threads, compute = [], fingerprint_module._fingerprint

    def note(*args):
        threads.append(threading.current_thread())
        return compute(*args)

    monkeypatch.setattr(fingerprint_module, "_fingerprint", note)
    monkeypatch.setattr(fingerprint_module, "_kept", WeakKeyDictionary())
    for _ in range(2):
        ask(COMPLETION)
    assert len(threads) == 1
    assert threads[0] is not server.thread


def test_integers_that_have_a_point(server, ask):
    """JSON Schema takes 2.0 for an integer, and some languages write integers so."""
    plain = {"n": 2, "top_k": 5, "seed": 3, "logprobs": 2, "stop_token_ids": [9], "priority": 1, "temperature": 1}
    plain |= {"prompt": [[1, 262], [1, 371]], "max_tokens": 3, "best_of": 2}
    pointed = {key: json.loads(re.sub(r"(\d+)", r"\1.0", json.dumps(value))) for key, value in plain.items()}
    assert ask(COMPLETION, **pointed)["choices"] == ask(COMPLETION, **plain)["choices"]
    assert ask(max_tokens=2.0, logprobs=True, top_logprobs=1.0)["usage"]["completion_tokens"] == 2
    assert ask(COMPLETION, 400, max_tokens=2.5)["error"]["param"] == "max_tokens"
    assert server.post("/detokenize", {"tokens": [1.0, 262.0], "model": "story"})[2] == {"prompt": "<s> a"}
    for count, status in ((2.0, 200), (2.5, 400)):
        body = {"model": "talker", "messages": HELLO, "stream": False, "options": {"num_predict": count}}
        assert server.post("/api/chat", body)[0] == status


def test_biases_as_pairs(ask):
    """llama-server's form gives what OpenAI's gives; a text means its tokens, and false none of them."""
    base = ask(COMPLETION, return_token_ids=True)["choices"][0]["token_ids"]
    plain = ask(COMPLETION, logit_bias={str(base[0]): -100}, return_token_ids=True)["choices"][0]["token_ids"]
    assert plain[0] != base[0]
    for bias in (-100, False):
        pairs = [[base[0], bias]]
        assert ask(COMPLETION, logit_bias=pairs, return_token_ids=True)["choices"][0]["token_ids"] == plain
    ask(logit_bias=[["dragon", -5], [3, 1.5]])
    for wrong in ([[-1, 1]], [[1, True]], [[1, "x"]], [[1.5, 1]], [[1]], [1], [[1, 101]], [[1 << 30, 1]]):
        error = ask(COMPLETION, status=400, logit_bias=wrong)["error"]
        assert error["param"].startswith("logit_bias"), error


def test_a_custom_tool(server, ask):
    """Its input is one text; in a stream it comes whole."""
    pytest.importorskip("llguidance")
    body = {"tools": [SHELL], "tool_choice": {"type": "custom", "custom": {"name": "shell"}}, "max_tokens": 30}
    (call,) = ask(**body)["choices"][0]["message"]["tool_calls"]
    assert (call["type"], call["custom"]["name"]) == ("custom", "shell")
    stream = events(
        server.post(CHAT, {"model": "talker", "messages": HELLO, "temperature": 0, "stream": True, **body})[2]
    )
    parts = [each for event in stream for each in event["choices"][0]["delta"].get("tool_calls", [])]
    assert [(part["index"], part["custom"]) for part in parts] == [(0, call["custom"])]
    talk = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    talk.append({"role": "tool", "tool_call_id": call["id"], "content": "done"})
    assert ask(messages=talk)["choices"]
    talk[1]["tool_calls"] = [{"type": "function"}]
    assert ask(status=400, messages=talk)["error"]["param"] == "messages.1.tool_calls.0.function"


def test_thinking_that_is_not_wanted(server):
    template = TEMPLATE + "{# <think> </think> #}<think>"
    with RunningServer({"talker": server.shelf.places["talker"].source}, chat_template=template) as other:
        body = {"messages": HELLO, "max_tokens": 6, "temperature": 0}
        message = other.post(CHAT, body)[2]["choices"][0]["message"]
        assert message["reasoning_content"]
        message = other.post(CHAT, {**body, "include_reasoning": False})[2]["choices"][0]["message"]
        assert "reasoning_content" not in message
