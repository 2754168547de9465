"""Ollama's API: `/api/chat`, `/api/generate`, embeddings, and what its clients ask about the models.

Source: Ollama's docs/api.md. Streams are lines of JSON, and the default. Options without a meaning here (`num_ctx`,
`mirostat`, `num_gpu`, ...) are ignored. Models are not pulled, created or deleted.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...backends.loaded import LoadedModel
from ...generation.chat import DEFAULT_REPLY_TOKENS
from ...generation.results import Generation
from ...system.sharing import date_of, model_files
from ..engine import Engine
from . import schemas
from .choices import Asked
from .events import Block
from .fields import ignored, refused
from .replies import KNOWN_MARKS
from .schemas import FLAG, MAYBE, TEXT, RequestError, describe_array, describe_number, describe_object, or_null
from .shapes import INFILL_TOKENS, infill_ids
from .tools import function_call, function_tool
from .translate import ask_chat, ask_completion
from .writers import BlockWriter, write_json

if TYPE_CHECKING:
    from .server import Server
    from .shelf import Place

KEEP = {"type": ["string", "number", "null"]}
IMAGES = {"images": {"type": ["array", "null"]}}
COMMON = {
    "model": MAYBE,
    "stream": FLAG,
    "format": {"anyOf": [{"enum": ["", "json", None]}, {"type": "object"}]},
    "options": {"type": ["object", "null"]},
    "think": {"enum": [True, False, "low", "medium", "high", "max", None]},
    "keep_alive": KEEP,
    **ignored(("truncate", "shift")),
    **refused(dict.fromkeys(("logprobs", "top_logprobs"), "are not in this API's answers; use /v1/chat/completions")),
}
TOOL = describe_object({"function": describe_object({"name": TEXT}, ("name",))}, ("function",))
MESSAGE = describe_object(
    {
        "role": {"enum": ["system", "user", "assistant", "tool"]},
        "content": MAYBE,
        "thinking": MAYBE,
        **IMAGES,
        "tool_calls": or_null(describe_array(TOOL)),
    },
    ("role",),
)
TOOLS = or_null(describe_array(TOOL, 0, 128))
schemas.declare_body(
    "/api/chat",
    "Reply to a conversation, in Ollama's form.",
    {**COMMON, "messages": or_null(describe_array(MESSAGE, 0, 4096)), "tools": TOOLS},
)
schemas.declare_body(
    "/api/generate",
    "Continue a text, in Ollama's form.",
    {
        **COMMON,
        **dict.fromkeys(("prompt", "suffix", "system"), MAYBE),
        "raw": FLAG,
        **IMAGES,
        **ignored(("width", "height", "steps")),
        **refused(
            {
                "template": "a request cannot bring a template; use raw, or the server's option --chat-template",
                "context": "token ids of an earlier answer are not taken up; use /api/chat",
            }
        ),
    },
)
schemas.declare_body(
    "/api/show",
    "What a model is, in Ollama's form.",
    {"model": MAYBE, "name": MAYBE, **ignored(("verbose", "system", "template", "options"))},
)
schemas.declare_body(
    "/api/embed",
    "Texts as vectors, in Ollama's form.",
    {
        "model": MAYBE,
        "input": {"anyOf": [TEXT, describe_array(TEXT, 0, 2048)]},
        "truncate": FLAG,
        "dimensions": describe_number(1, 2**20, "integer"),
        "keep_alive": KEEP,
        **ignored(("options",)),
    },
    ("input",),
)
schemas.declare_body(
    "/api/embeddings",
    "A text as a vector, in Ollama's older form.",
    {"model": MAYBE, "prompt": TEXT, "keep_alive": KEEP, **ignored(("options",))},
    ("prompt",),
)
schemas.declare_call("/api/tags", "get", "The models, in Ollama's form.")
schemas.declare_call("/api/ps", "get", "The loaded models, in Ollama's form.")
schemas.declare_call("/api/version", "get", "The version of the server.")

SAME = ("temperature", "top_k", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "seed", "stop")
OPTIONS = {**{name: name for name in SAME}, "repeat_penalty": "repetition_penalty"}  # Ollama's name -> ours
NS = 1_000_000_000


def make_routes(server: Server) -> list[Route]:
    async def generate(request: Request) -> Response:
        field, read = ("messages", read_chat) if request.scope["path"] == "/api/chat" else ("prompt", read_generate)
        body = await server.body(request)
        name = server.shelf.name(body.get("model"))
        keep(server.shelf.places[name], body.get("keep_alive"))
        if not body.get(field):  # it asks to load the model, or with keep_alive 0 to drop it
            return await load(name, field, body.get("keep_alive"))
        return await server.answer(request, body, read)

    async def load(name: str, field: str, keep_alive: Any) -> Response:
        reason = "load"
        if keep_alive is not None and read_seconds(keep_alive) == 0:
            reason = "unload"
        else:
            async with server.shelf.borrow(server.shelf.places[name]):
                pass
        empty: dict[str, Any] = {"message": {"role": "assistant", "content": ""}}
        empty = empty if field == "messages" else {"response": ""}
        return JSONResponse({"model": name, "created_at": now(), **empty, "done": True, "done_reason": reason})

    async def embed(request: Request) -> Response:
        started = time.perf_counter()
        body = await server.body(request)
        is_old = request.scope["path"] == "/api/embeddings"
        texts = body["prompt"] if is_old else body["input"]
        keep(server.shelf.place(body.get("model")), body.get("keep_alive"))
        if texts == []:
            return JSONResponse({"model": body.get("model"), "embeddings": []})
        given = {"input": texts, "dimensions": body.get("dimensions")}
        if body.get("truncate") is not False:
            given |= {"truncate_prompt_tokens": -1, "truncation_side": "right"}
        name, vectors, tokens = await server.read_texts(request, body, lambda model: server.embed(model, given))
        rows = vectors.tolist()
        if is_old:
            return JSONResponse({"embedding": rows[0]})
        took = {"total_duration": int((time.perf_counter() - started) * NS), "load_duration": 0}
        return JSONResponse({"model": name, "embeddings": rows, **took, "prompt_eval_count": tokens})

    async def show(request: Request) -> Response:
        body = await server.body(request)
        given = {"model": body.get("model") or body.get("name")}
        async with server.borrow(given) as (name, engine):
            place = server.shelf.places[name]
            template = server.chat_template or engine.model.tokenizer.template_for(True)
            return JSONResponse(await server.work(describe_model, place, engine, template))

    async def tags(request: Request) -> Response:
        places = server.shelf.places.items()
        return JSONResponse({"models": await server.work(lambda: [describe_place(*each) for each in places])})

    async def running(request: Request) -> Response:
        places = [(name, each) for name, each in server.shelf.places.items() if each.engine is not None]
        facts = await server.work(lambda: [describe_place(*each) for each in places])
        for each, (_, place) in zip(facts, places, strict=True):
            context = place.engine.model.context_length if place.engine is not None else 0
            each |= {"expires_at": FOREVER, "size_vram": 0, "context_length": context}
        return JSONResponse({"models": facts})

    async def version(request: Request) -> Response:
        return JSONResponse({"version": server.version})

    posts = {"/api/chat": generate, "/api/generate": generate, "/api/show": show, "/api/embed": embed}
    posts["/api/embeddings"] = embed
    gets = {"/api/tags": tags, "/api/ps": running, "/api/version": version}
    routes = [Route(path, function, methods=["POST"]) for path, function in posts.items()]
    return routes + [Route(path, function, methods=["GET"]) for path, function in gets.items()]


# -- requests ----------------------------------------------------------------------------------------------------------


def read_seconds(value: str | float) -> float | None:
    """Of `keep_alive`: a number of seconds, or a text like "5m" or "1h30m". None: for ever (negative). Raises
    RequestError.

    >>> [read_seconds(value) for value in (0, 1e-5, "90", "5m", "1h30m", "-1s", -1)]
    [0, 1e-05, 90.0, 300.0, 5400.0, None, None]
    """
    if not isinstance(value, str):
        return None if value < 0 else value
    text = value.strip()
    parts = re.findall(r"(\d{1,9}(?:\.\d{1,9})?)(ms|h|m|s|$)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text.removeprefix("-"):
        raise RequestError(f"expected seconds or a text like '5m', got {text[:40]!r}", "keep_alive")
    units = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "": 1.0}
    return None if text.startswith("-") else sum(float(number) * units[unit] for number, unit in parts)


def keep(place: Place, keep_alive: str | float | None) -> None:
    """Note how long the model is to stay after its last use; it has an effect where the server has `--idle-s`."""
    if keep_alive is not None:
        (place.base or place).keep_s = read_seconds(keep_alive)


def read_chat(body: Mapping[str, Any], name: str, engine: Engine, chat_template: str | None) -> Asked:
    """The request of a body that passed its schema. Raises RequestError."""
    messages = [_read_message(message, f"messages[{n}]") for n, message in enumerate(body["messages"])]
    tools = [function_tool(tool["function"], "tools") for tool in body.get("tools") or []]
    chat = {**_read_common(body), "messages": messages, "tools": tools or None}
    return ask_chat(chat, name, engine, chat_template, ChatWriter, "format")


def _read_message(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    _refuse_images(message, place)
    plain: dict[str, Any] = {"role": message["role"], "content": message.get("content") or ""}
    if message.get("thinking"):
        plain["reasoning_content"] = message["thinking"]
    if message["role"] == "tool":
        name = message.get("tool_name") or message.get("name")
        plain |= {"tool_call_id": str(message.get("tool_call_id") or name or ""), "name": str(name or "")}
    if calls := message.get("tool_calls"):
        named = [(call.get("id") or f"call_{number}", call["function"]) for number, call in enumerate(calls)]
        plain["tool_calls"] = [function_call(name, each["name"], each.get("arguments")) for name, each in named]
    return plain


def _refuse_images(body: Mapping[str, Any], place: str) -> None:
    if body.get("images"):
        raise RequestError("images are not supported; the models read text only", f"{place}.images")


def _read_common(body: Mapping[str, Any]) -> dict[str, Any]:
    """What chats and completions share: the options under our names."""
    options = body.get("options") or {}
    common: dict[str, Any] = {ours: options[name] for name, ours in OPTIONS.items() if options.get(name) is not None}
    wanted = options.get("num_predict")
    if wanted is not None and not (isinstance(wanted, int | float) and wanted % 1 == 0):
        raise RequestError("expected a whole number", "options.num_predict")
    if wanted is not None and wanted > 0:
        common["max_tokens"] = wanted
    form = body.get("format")
    if form:
        common["guided_json"] = {"type": "object"} if form == "json" else form
    think = body.get("think")
    if isinstance(think, str):
        common["reasoning_effort"] = think
    elif think is not None:
        common["enable_thinking"] = think
    stream = body.get("stream") is not False
    return {**common, "model": body.get("model"), "stream": stream}


def read_generate(body: Mapping[str, Any], name: str, engine: Engine, chat_template: str | None) -> Asked:
    """A prompt, which is a message unless `raw` is set or the model does not chat. Raises RequestError."""
    _refuse_images(body, "prompt")
    tokenizer, common = engine.model.tokenizer, _read_common(body)
    is_raw = body.get("raw") or body.get("suffix") or (chat_template or tokenizer.chat_template) is None
    if not is_raw:
        system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
        chat = {**common, "messages": [*system, {"role": "user", "content": body["prompt"]}]}
        return ask_chat(chat, name, engine, chat_template, GenerateWriter, "format")
    prompt: Any = body["prompt"]
    if body.get("suffix"):
        prompt = infill_ids(tokenizer, prompt, body["suffix"], "suffix")
    elif body.get("system"):
        prompt = f"{body['system']}\n\n{prompt}"
    given = {key: value for key, value in common.items() if key not in ("reasoning_effort", "enable_thinking")}
    given.setdefault("max_tokens", engine.config.sampling.get("max_tokens") or DEFAULT_REPLY_TOKENS)
    return ask_completion({**given, "prompt": prompt}, name, engine, GenerateWriter)


# -- replies -----------------------------------------------------------------------------------------------------------


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class ChatWriter(BlockWriter):
    """Lines of JSON with a piece of a message each. A call stands whole in one of them."""

    media_type = "application/x-ndjson"
    quiet = ""

    def add_text(self, block: Block, text: str) -> str:
        if block.kind == "call":
            return ""
        return self._line(**self._fields([Block(block.kind, 0, text=text)]), done=False)

    def close_block(self, block: Block) -> str:
        return self._line(**self._fields([block]), done=False) if block.kind == "call" else ""

    def closing(self) -> str:
        return self._line(**self._fields([]), **self._end())

    def failure(self, status: int, facts: Mapping[str, Any]) -> str:
        return write_json({"error": facts["error"]["message"]}) + "\n"

    def whole(self, results: Sequence[Generation]) -> dict[str, Any]:
        self.read_whole(results[0])
        return self._frame(**self._fields(self.blocks), **self._end())

    def _fields(self, blocks: Sequence[Block]) -> dict[str, Any]:
        return {"message": {"role": "assistant", **self._texts(blocks, "content")}}

    def _texts(self, blocks: Sequence[Block], name: str) -> dict[str, Any]:
        fields: dict[str, Any] = {name: "".join(block.text for block in blocks if block.kind == "text")}
        if thoughts := [block.text for block in blocks if block.kind == "reasoning"]:
            fields["thinking"] = "".join(thoughts)
        if calls := [block for block in blocks if block.kind == "call"]:
            fields["tool_calls"] = [
                {"id": each.call_id, "function": {"name": each.name, "arguments": _arguments_of(each)}}
                for each in calls
            ]
        return fields

    def _end(self) -> dict[str, Any]:
        stats, (prompt, _, new) = self.choice.handle.stats, self.counts
        prefill, decode = int(stats.prefill_s * NS), int(stats.decode_s * NS)
        return {
            "done": True,
            "done_reason": "length" if self.finish == "length" else "stop",
            "total_duration": prefill + decode,
            "load_duration": 0,
            "prompt_eval_count": prompt,
            "prompt_eval_duration": prefill,
            "eval_count": new,
            "eval_duration": decode,
        }

    def _frame(self, **facts: Any) -> dict[str, Any]:
        return {"model": self.asked.model_name, "created_at": now(), **facts}

    def _line(self, **facts: Any) -> str:
        return write_json(self._frame(**facts)) + "\n"


def _arguments_of(block: Block) -> Any:
    """The arguments as an object; those of a call that was cut, as the text that came."""
    return block.text if block.arguments is None else block.arguments


class GenerateWriter(ChatWriter):
    """The same for `/api/generate`."""

    def _fields(self, blocks: Sequence[Block]) -> dict[str, Any]:
        return self._texts(blocks, "response")


# -- models ------------------------------------------------------------------------------------------------------------

FOREVER = "2318-01-01T00:00:00Z"


def describe_place(name: str, place: Place) -> dict[str, Any]:
    """A model's entry in `/api/tags`. digest: of the names, sizes and times of its files."""
    files = [(file, file.stat()) for file in sorted(model_files(place.source))]
    identity = "\n".join(f"{file.name} {each.st_size} {each.st_mtime_ns}" for file, each in files)
    changed = max((each.st_mtime for _, each in files), default=0.0)
    return {
        "name": name,
        "model": name,
        "modified_at": date_of(changed).isoformat().replace("+00:00", "Z"),
        "size": sum(each.st_size for _, each in files),
        "digest": hashlib.sha256(identity.encode()).hexdigest(),
        "details": _details(place.source, None if place.engine is None else place.engine.model),
    }


def _details(source: Path, model: LoadedModel | None) -> dict[str, Any]:
    family = "" if model is None else model.config.model_type
    layers = () if model is None else model.weights.layers
    return {
        "parent_model": "",
        "format": "gguf" if source.suffix == ".gguf" else "bitnet_ref",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "" if model is None else _size_name(_count_parameters(model)),
        "quantization_level": ", ".join(sorted({linear.kind for layer in layers for _, linear in layer.linears()})),
    }


def _count_parameters(model: LoadedModel) -> int:
    """Of all matrices; a tied head counts once."""
    own = [] if model.config.tie_word_embeddings else [model.weights.embedding]
    return sum(math.prod(weight.shape) for weight in (*own, *(weight for _, weight in model.weights.linears())))


def _size_name(count: int) -> str:
    """
    >>> [_size_name(n) for n in (2_412_820_480, 15_200_000)]
    ['2.4B', '15.2M']
    """
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def describe_model(place: Place, engine: Engine, template: str | None) -> dict[str, Any]:
    """The answer of `/api/show`. parameters: the server's defaults, which are usually the model's own."""
    model = engine.model
    tokenizer, config = model.tokenizer, model.config
    defaults = {
        theirs: engine.config.sampling[ours] for theirs, ours in OPTIONS.items() if ours in engine.config.sampling
    }
    name = config.model_type
    capabilities = ["completion", "embedding"]
    if template and "tools" in template:
        capabilities.append("tools")
    if template and any(marks.end in template for marks in KNOWN_MARKS):
        capabilities.append("thinking")
    if any(all(tokenizer.token_to_id(each) is not None for each in names) for names in INFILL_TOKENS):
        capabilities.append("insert")
    info = {
        "general.architecture": name,
        "general.parameter_count": _count_parameters(model),
        f"{name}.context_length": model.context_length,
        f"{name}.embedding_length": config.hidden_size,
        f"{name}.block_count": config.num_hidden_layers,
        f"{name}.attention.head_count": config.num_attention_heads,
        f"{name}.attention.head_count_kv": config.num_key_value_heads,
    }
    facts = describe_place(place.name, place)
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{key} {value}" for key, value in defaults.items()),
        "template": template or "",
        "details": facts["details"],
        "model_info": info,
        "capabilities": capabilities,
        "modified_at": facts["modified_at"],
    }
