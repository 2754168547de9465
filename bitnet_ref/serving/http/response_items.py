"""The items of OpenAI's Responses: an input as the messages of a chat, and the items and events of a reply."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .events import Block
from .parts import read_parts, refuse_part
from .schemas import RequestError
from .tools import custom_arguments, custom_input, function_tool
from .translate import join_system

TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
REASONING_PARTS = {"reasoning_text": "text", "summary_text": "text"}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
ITEMS = ("message", "reasoning", "function_call", "function_call_output", "item_reference")
HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "computer", "mcp", "local_shell")
LEFT_OUT = (*HOSTED, "namespace")  # the model does not hear of them; a namespace has the sub-agents of Codex
FindItem = Callable[[str], dict[str, Any] | None]


def read_items(items: Sequence[Any], find: FindItem) -> list[dict[str, Any]]:
    """Items as the messages of a chat. find: an item of an earlier response by its id. Raises RequestError."""
    messages: list[dict[str, Any]] = []
    thoughts = ""
    for number, item in enumerate(items):
        place = f"input[{number}]"
        if not isinstance(item, Mapping):
            raise RequestError("expected an object", place)
        if item.get("type") == "item_reference" or (set(item) == {"id"}):
            found = find(str(item.get("id")))
            if found is None:
                raise RequestError(f"there is no item {str(item.get('id'))[:100]!r}", place, 404)
            item = found
        kind = item.get("type", "message")
        if kind == "reasoning":
            thoughts += read_parts(item.get("content") or item.get("summary"), place, REASONING_PARTS)
            continue
        if kind == "message":
            role = ROLES.get(str(item.get("role")))
            if role is None:
                raise RequestError(f"expected one of {', '.join(ROLES)}", f"{place}.role")
            text = read_parts(item.get("content"), f"{place}.content", TEXT_PARTS)
            message: dict[str, Any] = {"role": role, "content": text}
        elif kind in ("function_call", "custom_tool_call"):
            message = _read_call(item, place)
            last = messages[-1] if messages else {}
            if last.get("role") == "assistant" and not thoughts:  # one message with its calls
                last.setdefault("tool_calls", []).extend(message["tool_calls"])
                continue
        elif kind in ("function_call_output", "custom_tool_call_output"):
            text = read_parts(item.get("output"), f"{place}.output", TEXT_PARTS)
            message = {"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": text}
        else:
            raise refuse_part(kind, place, ITEMS)
        if thoughts and message["role"] == "assistant":
            message["reasoning_content"] = thoughts
        thoughts = ""
        messages.append(message)
    return join_system(messages)


def _read_call(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    name, arguments = item.get("name"), item.get("arguments")
    if item.get("type") == "custom_tool_call":
        arguments = custom_arguments(str(item.get("input", "")))
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise RequestError("a call needs a name and arguments, both texts", place)
    call = {"id": str(item.get("call_id", "")), "type": "function"}
    calls = [{**call, "function": {"name": name, "arguments": arguments}}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def nest_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools as a chat has them.

    Tools that OpenAI runs itself, like web_search, and namespaces of tools are left out. Raises RequestError.
    """
    nested = []
    for number, tool in enumerate(tools):
        kind, place = str(tool.get("type")), f"tools[{number}]"
        if kind.startswith(LEFT_OUT):
            continue
        if kind not in ("function", "custom") or not isinstance(tool.get("name"), str):
            raise RequestError(f"expected a function or a custom tool with a name, got {kind[:60]!r}", place)
        nested.append(_nest(tool) if kind == "custom" else function_tool(tool, place))
    return nested


def nest_choice(choice: Any) -> Any:
    """`tool_choice` as a chat has it. Raises RequestError."""
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [_nest(each) for each in choice["tools"] if isinstance(each, Mapping) and "name" in each]
        return _nest({**choice, "tools": tools})
    if choice.get("type") in ("function", "custom") and isinstance(choice.get("name"), str):
        return _nest(choice)
    raise RequestError("expected auto, none, required, a function or allowed_tools", "tool_choice")


def _nest(value: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(value.get("type"))
    return {"type": kind, kind: {name: each for name, each in value.items() if name != "type"}}


# -- replies -----------------------------------------------------------------------------------------------------------

PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def write_item(block: Block, item_id: str, status: str, custom: frozenset[str]) -> dict[str, Any]:
    """A block of a reply as an item."""
    is_empty = status == "in_progress"
    text = "" if is_empty else block.text
    if block.kind == "text":
        content = [] if is_empty else [text_part(text)]
        return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": content}
    if block.kind == "reasoning":
        content = [] if is_empty else [{"type": "reasoning_text", "text": text}]
        return {"id": item_id, "type": "reasoning", "status": status, "summary": [], "content": content}
    call = {"id": item_id, "status": status, "call_id": block.call_id, "name": block.name}
    if block.name in custom:
        return {**call, "type": "custom_tool_call", "input": custom_input(text)}
    return {**call, "type": "function_call", "arguments": text}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
