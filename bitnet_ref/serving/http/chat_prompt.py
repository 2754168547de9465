"""A conversation as the text that the model reads, by its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ...backends.loaded import LoadedModel
from .events import read_value
from .parts import CHAT_PARTS, read_parts
from .schemas import RequestError
from .tools import custom_arguments, read_tools


def chat_ids(model: LoadedModel, body: Mapping[str, Any], chat_template: str | None, with_tools: bool) -> list[int]:
    """The conversation of a body in the form of the model's chat template, as token ids."""
    return model.tokenizer.encode(
        chat_text(model, body, chat_template, with_tools), bool(body.get("add_special_tokens"))
    )


def chat_text(model: LoadedModel, body: Mapping[str, Any], chat_template: str | None, with_tools: bool) -> str:
    """The conversation of a body in the form of the model's chat template."""
    tokenizer, tools = model.tokenizer, read_tools(body.get("tools") or [])[0] if with_tools else None
    template = chat_template or tokenizer.template_for(bool(tools)) or ""
    if tools and "tools" not in template:
        name = "functions" if body.get("functions") else "tools"
        raise RequestError("the chat template of this model has no place for tools", name)
    variables = {**thinking_variables(body), **(body.get("chat_template_kwargs") or {})}
    for name in ("messages", "tools", "documents", "add_generation_prompt"):
        if name in variables:
            raise RequestError(f"{name} is set by the server", "chat_template_kwargs")
    if body.get("documents"):
        variables["documents"] = body["documents"]
    messages = [plain_message(message, number) for number, message in enumerate(body["messages"])]
    if "developer" not in template:  # OpenAI's newer name of the system's role
        messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
    begins = body.get("add_generation_prompt")
    last, name = messages[-1], "continue_final_message"
    goes_on = bool(body.get(name))
    if goes_on and (begins or last["role"] != "assistant" or not last["content"].strip()):
        raise RequestError("expected a last message of the assistant, and add_generation_prompt=false", name)
    text = tokenizer.apply_chat_template(
        messages, not goes_on and begins is not False, tools=tools, chat_template=chat_template, variables=variables
    )
    if goes_on:
        content = next((form for form in (last["content"], last["content"].strip()) if form in text), None)
        if content is None:
            raise RequestError("the chat template changes the text of the last message", name)
        text = text[: text.rindex(content) + len(content)]
    return text


def thinking_variables(body: Mapping[str, Any]) -> dict[str, Any]:
    """What templates read of `reasoning_effort` and `enable_thinking`: the effort, and whether the model thinks."""
    effort, thinks = body.get("reasoning_effort"), body.get("enable_thinking")
    if thinks is None and effort is not None:
        thinks = effort != "none"
    variables = {} if effort is None else {"reasoning_effort": effort}
    return variables if thinks is None else {**variables, "enable_thinking": thinks, "thinking": thinks}


def plain_message(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """As templates expect it: text in one piece, and the arguments of tool calls as values."""
    plain = {**message, "content": read_parts(message.get("content"), f"messages.{number}.content", CHAT_PARTS)}
    calls = list(message.get("tool_calls") or [])
    if plain["role"] == "function":
        plain["role"] = "tool"
    if function := plain.pop("function_call", None):
        calls = [{"type": "function", "function": function}]
    if calls:
        plain["tool_calls"] = [_plain_call(call, f"messages.{number}.tool_calls.{n}") for n, call in enumerate(calls)]
    return plain


def _plain_call(call: Mapping[str, Any], place: str) -> dict[str, Any]:
    function = call.get("function")
    if custom := call.get("custom"):
        function = {"name": custom["name"], "arguments": custom_arguments(custom["input"])}
    if function is None:
        raise RequestError("is missing", f"{place}.function")
    rest = {name: value for name, value in call.items() if name != "custom"}
    with suppress(ValueError):
        function = {**function, "arguments": read_value(function["arguments"])}
    return {**rest, "type": "function", "function": dict(function)}
