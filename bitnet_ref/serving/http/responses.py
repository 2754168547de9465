"""OpenAI's Responses: `/v1/responses`, with a bounded store of the last ones.

Source: OpenAI's API reference, "Responses" and "Streaming events".
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...generation.results import Generation
from ..engine import Engine
from . import schemas
from .choices import Asked, Choice
from .events import Block
from .fields import OF_ACCOUNTS, ignored, refused
from .response_items import PREFIXES, nest_choice, nest_tools, new_id, read_items, text_part, write_item
from .schemas import (
    ANY_OBJECT,
    FLAG,
    MAYBE,
    PASSED,
    RequestError,
    describe_array,
    describe_number,
    describe_object,
    or_null,
)
from .translate import ask_chat, join_system
from .writers import BlockWriter, write_event

if TYPE_CHECKING:
    from .server import Server

PATH = "/v1/responses"
STORED_RESPONSES, STORED_BYTES = 1024, 64 << 20
schemas.declare_body(
    PATH,
    "Reply to an input of items.",
    {
        "model": MAYBE,
        "input": {"anyOf": [{"type": "string"}, describe_array({"type": "object"}, 1, 4096)]},
        "instructions": MAYBE,
        "previous_response_id": MAYBE,
        "stream": FLAG,
        "store": FLAG,
        "max_output_tokens": {"type": ["integer", "null"], "minimum": 1, "maximum": 2**31 - 1},
        "temperature": describe_number(0, 2),
        "top_p": describe_number(0, 1),
        "seed": PASSED["seed"],
        "tools": or_null(describe_array({"type": "object"}, 0, 128)),
        "tool_choice": {"type": ["string", "object", "null"]},
        "parallel_tool_calls": FLAG,
        "reasoning": or_null(describe_object({"effort": MAYBE})),
        "text": or_null(describe_object({"format": ANY_OBJECT})),
        "metadata": ANY_OBJECT,
        **ignored(
            (
                *(name for name in OF_ACCOUNTS if name not in ("store", "metadata")),
                *("access_programs", "background_options", "client_metadata", "context_management", "image"),
                *("include", "max_tool_calls", "stream_options", "truncation"),
            )
        ),
        **refused(
            {
                "background": "a response is made while its client waits; leave it out, or use stream",
                "conversation": "conversations are not kept; use previous_response_id",
                "prompt": "prompts are not kept; use input and instructions",
                "top_logprobs": "log probabilities are not in responses; use /v1/chat/completions",
            }
        ),
    },
    ("input",),
)
schemas.declare_call(f"{PATH}/{{id}}", "get", "A stored response.")
schemas.declare_call(f"{PATH}/{{id}}", "delete", "Forget a response.")
schemas.declare_call(f"{PATH}/{{id}}/cancel", "post", "End a response that is being made.")
schemas.declare_call(f"{PATH}/{{id}}/input_items", "get", "The input of a stored response.")


class ResponseStore:
    """The last responses, with the messages that led to them. The oldest leave when there are too many."""

    def __init__(self, max_responses: int = STORED_RESPONSES, max_bytes: int = STORED_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[dict[str, Any], list[Any], list[dict[str, Any]], int]] = OrderedDict()
        self._items: dict[str, dict[str, Any]] = {}
        self._nbytes = 0
        self.running: WeakValueDictionary[str, Choice] = WeakValueDictionary()  # those of streams

    def put(self, response: dict[str, Any], items: list[Any], messages: list[dict[str, Any]]) -> None:
        """items: the input. messages: the conversation before the reply."""
        nbytes = len(json.dumps([response, items, messages]))
        if nbytes > self._max_bytes:
            return
        with self._lock:
            self._kept[response["id"]] = (response, items, messages, nbytes)
            self._items |= {item["id"]: item for item in response["output"]}
            self._nbytes += nbytes
            while len(self._kept) > self._max_responses or self._nbytes > self._max_bytes:
                self._forget(next(iter(self._kept)))

    def find(self, name: str, field: str = "id") -> tuple[dict[str, Any], list[Any], list[dict[str, Any]]]:
        """The response, its input and the conversation before it. Raises RequestError, for the field that names it."""
        with self._lock:
            if name not in self._kept:
                message = f"there is no stored response {name[:100]!r}; the server keeps the last ones only"
                raise RequestError(message, field, 404, None if field == "id" else "previous_response_not_found")
            return self._kept[name][:3]

    def find_item(self, name: str) -> dict[str, Any] | None:
        """An item of a stored response."""
        with self._lock:
            return self._items.get(name)

    def delete(self, name: str) -> None:
        self.find(name)
        with self._lock:
            if name in self._kept:
                self._forget(name)

    def _forget(self, name: str) -> None:
        response, _, _, nbytes = self._kept.pop(name)
        self._nbytes -= nbytes
        for item in response["output"]:
            self._items.pop(item["id"], None)


def make_routes(server: Server) -> list[Route]:
    store = ResponseStore()

    async def stored(request: Request) -> Response:
        name = request.path_params["id"]
        if request.method == "DELETE":
            store.delete(name)
            return JSONResponse({"id": name, "object": "response", "deleted": True})
        return JSONResponse(store.find(name)[0])

    async def cancel(request: Request) -> Response:
        name = request.path_params["id"]
        choice = store.running.get(name)
        if choice is None:
            return JSONResponse(store.find(name)[0])  # it has ended
        choice.handle.close()
        return JSONResponse({"id": name, "object": "response", "status": "cancelled"})

    async def input_items(request: Request) -> Response:
        name = request.path_params["id"]
        items = [_stored_item(item, f"msg_{name}_{number}") for number, item in enumerate(store.find(name)[1])]
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {}
        return JSONResponse({"object": "list", "data": items, "has_more": False, **ends})

    return [
        server.route_texts(PATH, partial(read_response, store=store)),
        Route(f"{PATH}/{{id}}", stored, methods=["GET", "DELETE"]),
        Route(f"{PATH}/{{id}}/cancel", cancel, methods=["POST"]),
        Route(f"{PATH}/{{id}}/input_items", input_items, methods=["GET"]),
    ]


def _stored_item(item: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An item of the input as OpenAI lists it: messages may be given without type and id, with a text as content."""
    item = {"id": name, "type": "message", **item}
    if item["type"] == "message" and isinstance(item.get("content"), str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        item["content"] = [{"type": kind, "text": item["content"]}]
    return item


def read_response(
    body: Mapping[str, Any], name: str, engine: Engine, chat_template: str | None, store: ResponseStore
) -> Asked:
    """The request of a body that passed its schema. Raises RequestError."""
    items = body["input"] if isinstance(body["input"], list) else [{"role": "user", "content": body["input"]}]
    messages: list[dict[str, Any]] = []
    if body.get("previous_response_id") is not None:
        messages = list(store.find(body["previous_response_id"], "previous_response_id")[2])
    messages += read_items(items, store.find_item)
    system = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    chat = {
        **{name: body.get(name) for name in ("model", "stream", "temperature", "seed", "parallel_tool_calls")},
        "messages": join_system([*system, *messages]),
        "max_tokens": body.get("max_output_tokens"),
        "top_p": body.get("top_p") or None,
        "tools": nest_tools(body.get("tools") or []) or None,
        "tool_choice": nest_choice(body.get("tool_choice")),
        "reasoning_effort": (body.get("reasoning") or {}).get("effort"),
        "response_format": _read_format((body.get("text") or {}).get("format") or {}),
    }

    def writer(asked: Asked, choices: Sequence[Choice]) -> ResponseWriter:
        return ResponseWriter(asked, choices, body, (items, messages), store)

    return ask_chat(chat, name, engine, chat_template, writer, "text.format")


def _read_format(form: Mapping[str, Any]) -> dict[str, Any] | None:
    if form.get("type") != "json_schema":
        return {"type": form["type"]} if "type" in form else None
    if "schema" not in form:
        raise RequestError("is missing", "text.format.schema")
    return {"type": "json_schema", "json_schema": {"name": str(form.get("name", "reply")), "schema": form["schema"]}}


class ResponseWriter(BlockWriter):
    """A response, or the events of its stream."""

    def __init__(
        self,
        asked: Asked,
        choices: Sequence[Choice],
        body: Mapping[str, Any],
        conversation: tuple[list[Any], list[dict[str, Any]]],
        store: ResponseStore,
    ) -> None:
        super().__init__(asked, choices)
        self.id, self._numbers, self._ids = new_id("resp"), 0, list[str]()
        self._body, self._conversation, self._custom, self._store = body, conversation, asked.custom, store
        self._created = int(time.time())
        if asked.stream:
            store.running[self.id] = self.choice
            self._opening = "".join(
                self._event(kind, response=self._response("in_progress"))
                for kind in ("response.created", "response.in_progress")
            )

    def opening(self) -> str:
        return self._opening

    def open_block(self, block: Block) -> str:
        self._ids.append(new_id("ctc" if block.name in self._custom else PREFIXES[block.kind]))
        item = write_item(block, self._ids[-1], "in_progress", self._custom)
        text = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "text":
            text += self._block_event("response.content_part.added", block, part=text_part(""))
        return text

    def add_text(self, block: Block, text: str) -> str:
        if block.kind == "call" and block.name in self._custom:
            return ""  # its input is one text, known at its end
        more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        return self._block_event(f"response.{NAMES[block.kind]}.delta", block, delta=text, **more)

    def close_block(self, block: Block) -> str:
        item = self._item(block)
        if block.kind == "call" and block.name in self._custom:
            given = item["input"]
            text = self._block_event("response.custom_tool_call_input.delta", block, delta=given)
            text += self._block_event("response.custom_tool_call_input.done", block, input=given)
        else:
            more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
            name = "arguments" if block.kind == "call" else "text"
            more |= {"name": block.name} if block.kind == "call" else {}
            text = self._block_event(f"response.{NAMES[block.kind]}.done", block, **{name: block.text}, **more)
        if block.kind == "text":
            text += self._block_event("response.content_part.done", block, part=text_part(block.text))
        return text + self._event("response.output_item.done", output_index=block.index, item=item)

    def closing(self) -> str:
        ends = ""
        if self.finish is None:
            self.finish = "cancelled"
            ends = self.end_blocks()
        response = self._finish()
        kind = "completed" if response["status"] == "completed" else "incomplete"
        return ends + self._event(f"response.{kind}", response=response)

    def failure(self, status: int, facts: Mapping[str, Any]) -> str:
        self._store.running.pop(self.id, None)
        error = facts["error"]
        failed = {"code": error["code"] or error["type"], "message": error["message"]}
        return self._event("response.failed", response={**self._response("failed"), "error": failed})

    def whole(self, results: Sequence[Generation]) -> dict[str, Any]:
        self.read_whole(results[0])
        return self._finish()

    def _finish(self) -> dict[str, Any]:
        """The whole response, which is stored."""
        self._store.running.pop(self.id, None)
        statuses = {"stop": "completed", "tool_calls": "completed", "cancelled": "cancelled"}
        status = statuses.get(self.finish or "", "incomplete")
        response = self._response(status)
        if status == "incomplete":
            reason = "max_output_tokens" if self.finish == "length" else "content_filter"
            response["incomplete_details"] = {"reason": reason}
        response["output"] = [self._item(block) for block in self.blocks]
        response["usage"] = self._usage()
        if self._body.get("store") is not False:
            items, messages = self._conversation
            replied = [*messages, *read_items(response["output"], lambda name: None)]
            self._store.put(response, items, replied)
        return response

    def _item(self, block: Block) -> dict[str, Any]:
        is_cut = self.finish not in ("stop", "tool_calls") and block is self.blocks[-1] and self.finish is not None
        return write_item(block, self._ids[block.index], "incomplete" if is_cut else "completed", self._custom)

    def _usage(self) -> dict[str, Any]:
        prompt, cached, new = self.counts
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": new,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": prompt + new,
        }

    def _response(self, status: str) -> dict[str, Any]:
        body, params = self._body, {**self.asked.defaults, **self.asked.params}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            **{name: body.get(name) for name in ("instructions", "max_output_tokens", "previous_response_id")},
            "model": self.asked.model_name,
            "output": [],
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "reasoning": {"effort": (body.get("reasoning") or {}).get("effort"), "summary": None},
            "store": body.get("store") is not False,
            "temperature": params.get("temperature"),
            "text": {"format": (body.get("text") or {}).get("format") or {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": params.get("top_p", 1.0),
            "truncation": "disabled",
            "usage": None,
            "metadata": body.get("metadata") or {},
            "system_fingerprint": self.asked.fingerprint,
        }

    def _block_event(self, kind: str, block: Block, **facts: Any) -> str:
        place: dict[str, Any] = {"item_id": self._ids[block.index], "output_index": block.index}
        if block.kind != "call":
            place["content_index"] = 0
        return self._event(kind, **place, **facts)

    def _event(self, kind: str, **facts: Any) -> str:
        number, self._numbers = self._numbers, self._numbers + 1
        return write_event({"type": kind, "sequence_number": number, **facts}, kind)


NAMES = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
