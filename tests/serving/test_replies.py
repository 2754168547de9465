"""Thinking apart from the answer: in pieces of any size, in every API, and with a budget of tokens."""

import json

import numpy as np
import pytest
from cli_runs import BACKEND
from helpers import ASSETS, chat_folder, model
from server_runs import RunningServer, events

from bitnet_ref.errors import GenerationError
from bitnet_ref.serving.http.events import CallArguments, CallStart, Reply
from bitnet_ref.serving.http.replies import ReplyReader, ThinkingBudget, ThinkingMarks, find_thinking
from bitnet_ref.serving.http.tools import ToolReader

THINK = ThinkingMarks("<think>", "</think>")
INSIDE = ThinkingMarks("<think>", "</think>", begins_inside=True)
TEXTS = [
    (THINK, "<think>\none\n\ntwo\n</think>\n\nIt is.", "one\n\ntwo", "It is."),
    (THINK, "\n<think></think>\n\nIt is.", "", "It is."),
    (THINK, "It is <think> not.", "", "It is <think> not."),
    (THINK, "<thin", "", "<thin"),
    (THINK, "<think>never </thi ends ", "never </thi ends", ""),
    (INSIDE, "one </think>It is.", "one", "It is."),
    (INSIDE, "\n<think>\none</think> It is. ", "one", "It is. "),
    (INSIDE, "</think>It is.", "", "It is."),
    (INSIDE, "one", "one", ""),
    (INSIDE, "</think>It <", "", "It <"),
    (THINK, "<think>one</think>It </", "one", "It </"),
    (None, "<think>one</think>It is.", "", "<think>one</think>It is."),
    (ThinkingMarks("[THINK]", "[/THINK]"), "[THINK]one[/THINK]two", "one", "two"),
]


@pytest.mark.parametrize(("marks", "text", "reasoning", "answer"), TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_thinking_in_pieces(marks, text, reasoning, answer, size):
    reader = ReplyReader(marks).copy()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    found = [event for piece in pieces for event in reader.push(piece, None)] + reader.push("", "stop")
    reply = Reply(found)
    assert (reply.join("reasoning"), reply.join("text")) == (reasoning, answer)


def test_a_call_after_the_thinking():
    reader = ReplyReader(INSIDE, ToolReader({"g": {}}, False))
    text = 'I use <tool_call>{"name": "g"}</tool_call>?</think>\n<tool_call>{"name": "g"}</tool_call>'
    found = reader.push(text, "stop")
    assert found[0].text == 'I use <tool_call>{"name": "g"}</tool_call>?'
    assert found[1:] == [CallStart(0, "g"), CallArguments(0, "{}")]


def test_the_marks_of_templates():
    assert find_thinking("{{ '</think>' }}", "user: x\n") == THINK
    assert find_thinking("{{ '</think>' }}", "<assistant><think>\n") == INSIDE
    assert find_thinking("{{ '</think>' }}", "<think>\n\n</think>\n\n") == THINK
    for start, end in (
        ("[THINK]", "[/THINK]"),
        ("<|thought_start|>", "<|thought_end|>"),
        ("<|channel>thought", "<channel|>"),
        ("<seed:think>", "</seed:think>"),
    ):
        assert find_thinking(f"{{{{ '{end}' }}}}", "x") == ThinkingMarks(start, end)
    assert find_thinking("plain", "<think>") is None


def test_a_budget_forces_the_end_mark_once():
    logits = np.zeros(10, dtype=np.float32)

    def allowed(new, budget):
        ids = np.array([9, 9, *new], dtype=np.int64)
        return np.flatnonzero(np.isfinite(budget(ids, logits))).tolist()

    inside = ThinkingBudget(2, 3, [], [7, 8])
    free = list(range(10))
    assert allowed([1, 2], inside) == free
    assert allowed([1, 2, 3], inside) == [7]
    assert allowed([1, 2, 3, 7], inside) == [8]
    assert allowed([1, 2, 3, 7, 8], inside) == free
    assert allowed([1, 7, 8], inside) == free  # it has ended by itself
    begins = ThinkingBudget(2, 1, [5], [7])
    assert allowed([5, 1], begins) == [7]
    assert allowed([4, 1], begins) == free  # it does not think


def test_special_tokens_that_are_shown():
    """Marks of calls and of thinking are special tokens of some models; their text is needed."""
    story = model(ASSETS / "storyteller", BACKEND, threads=1)
    end = story.tokenizer.eos_ids[0]
    params = {"max_tokens": 2, "logit_bias": {end: 100}, "ignore_eos": True}
    assert story.generate("Once", **params).text == ""
    assert story.generate("Once", shown_tokens=[end], **params).text == "</s></s>"


def test_a_guide_that_begins_later():
    pytest.importorskip("llguidance")
    story = model(ASSETS / "storyteller", BACKEND, threads=1)
    free = story.generate("Once upon a time", max_tokens=6)
    after = free.token_ids[2:4]
    params = {"guided_regex": " (yes|no)", "max_tokens": 20}
    out = story.generate("Once upon a time", guide_after=after, **params)
    assert out.token_ids[:4] == free.token_ids[:4]  # nothing was changed before
    assert out.text.removeprefix(story.tokenizer.decode(free.token_ids[:4])).strip() in ("yes", "no")
    assert out.finish_reason == "stop"
    never = story.generate("Once upon a time", guide_after=[story.tokenizer.eos_ids[0]], **params)
    assert never.token_ids[:6] == free.token_ids
    with pytest.raises(GenerationError, match="guide_after"):
        story.generate("Once", guide_after=after, num_beams=2, **params)


# -- over HTTP ---------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ '<think>' + m.reasoning_content + '</think>' if m.reasoning_content }}"
    "{{ m.content }}\n{% endfor %}{% if reasoning_effort %}effort {{ reasoning_effort }}\n{% endif %}assistant: "
    "{% if enable_thinking is not defined or enable_thinking %}<think>{% else %}<think></think>{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]
ZONE = {
    "type": "object",
    "properties": {"zone": {"enum": ["utc"]}},
    "required": ["zone"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with RunningServer({"talker": chat_folder(tmp_path_factory.mktemp("think"))}, chat_template=TEMPLATE) as running:
        yield running


def ask(server, path, body):
    status, _, answer = server.post(path, body)
    assert status == 200, answer
    return answer


def test_thinking_in_each_api(server):
    budget = {"messages": HELLO, "temperature": 0}
    message = ask(server, "/v1/chat/completions", {**budget, "thinking_token_budget": 4, "max_tokens": 40})["choices"][
        0
    ]
    thought = message["message"]["reasoning_content"]
    assert len(model(ASSETS / "storyteller", BACKEND, threads=1).tokenizer.encode(thought)) <= 6
    assert message["message"]["content"]
    plain = ask(server, "/v1/chat/completions", {**budget, "max_tokens": 12})["choices"][0]["message"]
    assert (plain["content"], bool(plain["reasoning_content"])) == (None, True)  # it still thinks
    off = ask(server, "/v1/chat/completions", {**budget, "max_tokens": 4, "reasoning_effort": "none"})
    assert "reasoning_content" not in off["choices"][0]["message"]

    stream = events(
        ask(server, "/v1/chat/completions", {**budget, "thinking_token_budget": 4, "max_tokens": 40, "stream": True})
    )
    deltas = [event["choices"][0]["delta"] for event in stream]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == thought
    assert "".join(delta.get("content") or "" for delta in deltas) == message["message"]["content"]

    anthropic = ask(
        server,
        "/v1/messages",
        {**budget, "max_tokens": 40, "thinking": {"type": "enabled", "budget_tokens": 4}},
    )
    assert [block["type"] for block in anthropic["content"]] == ["thinking", "text"]
    assert anthropic["content"][0]["thinking"] == thought
    response = ask(server, "/v1/responses", {"input": "Hello", "max_output_tokens": 8, "temperature": 0})
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] >= 6
    ollama = {"messages": HELLO, "stream": False, "options": {"num_predict": 8, "temperature": 0}}
    assert ask(server, "/api/chat", {**ollama, "think": True})["message"]["thinking"]
    assert "thinking" not in ask(server, "/api/chat", {**ollama, "think": False})["message"]


def test_thinking_and_effort_reach_the_template(server):
    def tokens(path, body, count):
        return count(ask(server, path, body))

    def of_chat(**more):
        body = {"messages": HELLO, "max_tokens": 1, **more}
        return tokens("/v1/chat/completions", body, lambda answer: answer["usage"]["prompt_tokens"])

    assert of_chat(reasoning_effort="high") == of_chat(chat_template_kwargs={"reasoning_effort": "high"}) > of_chat()
    assert of_chat(enable_thinking=False) == of_chat(chat_template_kwargs={"enable_thinking": False}) > of_chat()
    response = {"input": "Hello", "max_output_tokens": 1, "reasoning": {"effort": "high"}}
    assert tokens("/v1/responses", response, lambda a: a["usage"]["input_tokens"]) == of_chat(reasoning_effort="high")


def test_a_guide_holds_after_the_thinking(server):
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "zone", "schema": ZONE}}
    body = {"messages": HELLO, "thinking_token_budget": 5, "max_tokens": 60, "response_format": form}
    message = ask(server, "/v1/chat/completions", body)["choices"][0]["message"]
    assert message["reasoning_content"]
    assert json.loads(message["content"]) == {"zone": "utc"}
    tool = {"type": "function", "function": {"name": "clock", "parameters": ZONE}}
    body = {"messages": HELLO, "thinking_token_budget": 5, "max_tokens": 90, "tools": [tool], "tool_choice": "required"}
    choice = ask(server, "/v1/chat/completions", body)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"]
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"zone": "utc"}
