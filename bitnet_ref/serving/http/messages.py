"""Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`.

Source: Anthropic's API reference, "Messages" and "Streaming Messages". Images and tools that run on a server are
refused; `cache_control`, `metadata`, `service_tier` and other published fields without a meaning here are ignored.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...generation.results import Generation
from ..engine import Engine
from . import schemas
from .chat_prompt import chat_ids
from .choices import Asked
from .events import Block
from .failures import shape_failure
from .fields import ignored, refused
from .parts import read_field, read_parts, refuse_part
from .schemas import COUNT, FLAG, MAYBE, PASSED, RequestError, describe_array, describe_number, describe_object, or_null
from .tools import function_call, function_tool
from .translate import ask_chat, join_system
from .writers import BlockWriter, write_event

if TYPE_CHECKING:
    from .server import Server

PATH, COUNT_PATH = "/v1/messages", "/v1/messages/count_tokens"
STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
TEXT_PARTS = {"text": "text"}
BLOCKS = {"anyOf": [{"type": "string"}, describe_array({"type": "object"}, 0, 4096)]}
FORMAT = describe_object({"type": {"enum": ["json_schema"]}, "schema": {}}, ("type",))
TOOL = describe_object({"name": {"type": "string", "minLength": 1, "maxLength": 128}}, ("name",))
CONVERSATION = {
    "model": MAYBE,
    "messages": describe_array(
        describe_object({"role": {"enum": ["user", "assistant", "system"]}, "content": BLOCKS}, ("role", "content")),
        *(1, 4096),
    ),
    "system": {"anyOf": [*BLOCKS["anyOf"], {"type": "null"}]},
    "tools": or_null(describe_array(TOOL, 0, 128)),
    "tool_choice": or_null(describe_object({"type": {"enum": ["auto", "any", "tool", "none"]}}, ("type",))),
    "thinking": or_null(
        describe_object({"type": {"enum": ["enabled", "disabled", "adaptive"]}, "budget_tokens": COUNT}, ("type",))
    ),
    "output_config": or_null(describe_object({"effort": MAYBE, "format": or_null(FORMAT)})),
    **ignored(  # what Anthropic does on its own servers
        (
            *("betas", "billing_policy", "cache_control", "compaction", "context_management", "diagnostics"),
            *("fallback_credit_token", "fallbacks", "inference_geo", "metadata", "service_tier", "speed", "thread"),
            *("user_profile_id", "workspace_id"),
        )
    ),
    **refused(
        {
            "container": "code is not run here; give the model a tool that runs it",
            "mcp_servers": "the server calls no others; give the model the tools of an MCP server",
        }
    ),
}
schemas.declare_body(
    PATH,
    "Reply to a conversation, in Anthropic's form.",
    {
        **CONVERSATION,
        "max_tokens": {"type": "integer", "minimum": 1, "maximum": 2**31 - 1},
        "stream": FLAG,
        "stop_sequences": or_null(describe_array({"type": "string"}, 0, 64)),
        "temperature": describe_number(0, 2),
        "top_p": describe_number(0, 1),
        "top_k": describe_number(-1, 2**31 - 1, "integer"),
        "seed": PASSED["seed"],
    },
    ("messages", "max_tokens"),
)
schemas.declare_body(COUNT_PATH, "The tokens of a conversation, in Anthropic's form.", CONVERSATION, ("messages",))


def make_routes(server: Server) -> list[Route]:
    async def count(request: Request) -> Response:
        body = await server.body(request)
        async with server.borrow(body) as (_, engine):

            def tokens() -> int:
                chat = {key: value for key, value in read_body(body).items() if value is not None}
                schemas.check(chat, "/v1/chat/completions")
                has_tools = bool(chat.get("tools")) and chat.get("tool_choice") != "none"
                return len(chat_ids(engine.model, chat, server.chat_template, has_tools))

            return JSONResponse({"input_tokens": await server.work(tokens)})

    return [server.route_texts(PATH, read_message), Route(COUNT_PATH, count, methods=["POST"])]


# -- requests ----------------------------------------------------------------------------------------------------------


def read_message(body: Mapping[str, Any], name: str, engine: Engine, chat_template: str | None) -> Asked:
    """The request of a body that passed its schema. Raises RequestError."""
    return ask_chat(read_body(body), name, engine, chat_template, MessageWriter, "output_config.format")


def read_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same request as a chat. Raises RequestError."""
    system = read_parts(body.get("system"), "system", TEXT_PARTS)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for number, message in enumerate(body["messages"]):
        messages += _read_message(message, f"messages[{number}].content")
    last = messages[-1]
    goes_on = last["role"] == "assistant" and bool(last["content"].strip()) and not last.get("tool_calls")
    tools, choice = [_read_tool(tool) for tool in body.get("tools") or []], body.get("tool_choice") or {}
    config = body.get("output_config") or {}
    form = config.get("format")
    thinking = body.get("thinking") or {}
    return {
        **{name: body.get(name) for name in ("model", "max_tokens", "stream", "temperature", "top_k", "seed")},
        "messages": join_system(messages),
        "continue_final_message": goes_on or None,
        "add_generation_prompt": False if goes_on else None,
        "stop": [text for text in body.get("stop_sequences") or [] if text] or None,
        "top_p": body.get("top_p") or None,
        "tools": tools or None,
        "tool_choice": _read_choice(choice) if tools or choice.get("type") not in (None, "auto", "none") else None,
        "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") is True else None,
        "enable_thinking": {"disabled": False, "enabled": True, "adaptive": True}.get(thinking.get("type", "")),
        "thinking_token_budget": thinking.get("budget_tokens") if thinking.get("type") == "enabled" else None,
        "reasoning_effort": config.get("effort"),
        "response_format": None
        if form is None
        else {"type": "json_schema", "json_schema": {"name": "reply", "schema": form.get("schema")}},
    }


def _read_message(message: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    """One message as those of a chat: results of tools are messages of their own."""
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    messages: list[dict[str, Any]] = []
    text, thoughts, calls = [], [], []
    for number, block in enumerate(content):
        kind, where = block.get("type"), f"{place}[{number}]"
        if kind == "text":
            text.append(read_field(block, "text", where))
        elif kind == "thinking":
            thoughts.append(read_field(block, "thinking", where))
        elif kind == "tool_use":
            calls.append(function_call(block.get("id", ""), read_field(block, "name", where), block.get("input")))
        elif kind == "tool_result":
            if text:
                messages.append({"role": role, "content": "\n".join(text)})
                text = []
            result = read_parts(block.get("content"), f"{where}.content", TEXT_PARTS)
            messages.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": result})
        elif kind == "document" and isinstance(block.get("source"), Mapping) and block["source"].get("type") == "text":
            text.append(str(block["source"].get("data", "")))
        elif kind != "redacted_thinking":
            raise refuse_part(kind, where, ("text", "thinking", "tool_use", "tool_result"))
    if text or thoughts or calls or not messages:
        joined: dict[str, Any] = {"role": role, "content": "".join(text) if role == "assistant" else "\n".join(text)}
        if thoughts:
            joined["reasoning_content"] = "".join(thoughts)
        messages.append(joined | ({"tool_calls": calls} if calls else {}))
    return messages


def _read_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        kind = str(tool["type"])[:60]
        raise RequestError(f"{kind!r} would run on a server, and this one has only the client's tools", "tools")
    return function_tool(tool, "tools", "input_schema")


def _read_choice(choice: Mapping[str, Any]) -> Any:
    kind = choice.get("type", "auto")
    if kind == "tool":
        if not isinstance(choice.get("name"), str):
            raise RequestError("is missing", "tool_choice.name")
        return {"type": "function", "function": {"name": choice["name"]}}
    return {"any": "required"}.get(kind, kind)


# -- replies -----------------------------------------------------------------------------------------------------------


class MessageWriter(BlockWriter):
    """A message, or the events of its stream."""

    def __init__(self, asked: Asked, choices: Sequence[Any]) -> None:
        super().__init__(asked, choices)
        self.quiet = self._event("ping")
        self.id = f"msg_{uuid.uuid4().hex}"

    def opening(self) -> str:
        return self._event("message_start", message=self._message([], None, output_tokens=0)) + self.quiet

    def open_block(self, block: Block) -> str:
        return self._event("content_block_start", index=block.index, content_block=self._content(block, empty=True))

    def add_text(self, block: Block, text: str) -> str:
        kind, name = DELTAS[block.kind]
        return self._event("content_block_delta", index=block.index, delta={"type": kind, name: text})

    def close_block(self, block: Block) -> str:
        sign = ""
        if block.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": ""}
            sign = self._event("content_block_delta", index=block.index, delta=delta)
        return sign + self._event("content_block_stop", index=block.index)

    def closing(self) -> str:
        end = self._event("message_delta", delta=self._stop(), usage=self._usage())
        return end + self._event("message_stop")

    def failure(self, status: int, facts: Mapping[str, Any]) -> str:
        return write_event(shape_failure(PATH, status, dict(facts)), "error")

    def whole(self, results: Sequence[Generation]) -> dict[str, Any]:
        self.read_whole(results[0])
        return self._message([self._content(block) for block in self.blocks], self._stop())

    def _message(
        self, content: list[dict[str, Any]], stop: Mapping[str, Any] | None, output_tokens: int | None = None
    ) -> dict[str, Any]:
        facts = {"id": self.id, "type": "message", "role": "assistant", "model": self.asked.model_name}
        ends = stop or {"stop_reason": None, "stop_sequence": None}
        usage = self._usage() if output_tokens is None else {**self._usage(), "output_tokens": output_tokens}
        return {**facts, "content": content, **ends, "usage": usage, "system_fingerprint": self.asked.fingerprint}

    def _stop(self) -> dict[str, Any]:
        is_sequence = self.finish == "stop" and isinstance(self.stop, str)
        reason = "stop_sequence" if is_sequence else STOPS.get(self.finish or "", self.finish)
        return {"stop_reason": reason, "stop_sequence": self.stop if is_sequence else None}

    def _usage(self) -> dict[str, int]:
        prompt, cached, new = self.counts
        inputs = {"input_tokens": prompt - cached, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}
        return {**inputs, "output_tokens": new}

    def _content(self, block: Block, empty: bool = False) -> dict[str, Any]:
        text = "" if empty else block.text
        if block.kind == "text":
            return {"type": "text", "text": text}
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
        call = {"type": "tool_use", "id": block.call_id.replace("call_", "toolu_"), "name": block.name}
        if empty:
            return {**call, "input": {}}
        arguments = block.arguments
        cut = {"partial_json": text} if arguments is None else {}
        return {**call, "input": arguments or {}, **cut}

    def _event(self, kind: str, **facts: Any) -> str:
        return write_event({"type": kind, **facts}, kind)


DELTAS = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}
DELTAS["call"] = ("input_json_delta", "partial_json")
