"""What a request's JSON may contain. One table of JSON schemas is both the check and the OpenAPI page."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from functools import cache
from typing import Any, NoReturn

from ...errors import BitNetRefError, describe
from ...generation.params import SamplingParams
from ...system.options import Schema, declared_options, find_surrogate, suggest

MAX_DEPTH = 64  # of the JSON in a request


class RequestError(BitNetRefError):
    """An HTTP request that is refused: its status, and the parameter that is wrong."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        self.param, self.status, self.code = param, status, code
        super().__init__(message)


def _or_null(schema: Schema) -> Schema:
    return {**schema, "type": [schema["type"], "null"]}


def _number(low: float, high: float, kind: str = "number") -> Schema:
    return {"type": [kind, "null"], "minimum": low, "maximum": high}


def _object(properties: Schema, required: tuple[str, ...] = (), **more: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def _array(items: Schema, low: int = 0, high: int = 1 << 20) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


or_null, describe_number, describe_object, describe_array = _or_null, _number, _object, _array  # for the other APIs
TEXT, FLAG = {"type": "string"}, {"type": ["boolean", "null"]}
ANYTHING, ANY_OBJECT = Schema(), {"type": ["object", "null"]}
COUNT = _number(0, 2**31 - 1, "integer")
IDS = _array({"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, 1, 1 << 17)
TEXTS = {"anyOf": [TEXT, _array(TEXT, 1, 2048), IDS, _array(IDS, 1, 2048)]}
PART = _object({"type": TEXT, "text": TEXT, "refusal": TEXT}, ("type",))  # read by `read_parts`
FUNCTION = _object({"name": {"type": "string", "minLength": 1, "maxLength": 64}, "parameters": ANY_OBJECT}, ("name",))
TOOL = _object({"type": {"enum": ["function"]}, "function": FUNCTION}, ("type", "function"))
CALL = _object({"name": TEXT, "arguments": TEXT}, ("name", "arguments"))
MESSAGE = _object(
    {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [{"type": ["string", "null"]}, _array(PART, 0, 1024)]},
        "tool_calls": _or_null(_array(_object({"function": CALL}, ("function",)), 0, 128)),
    },
    ("role",),
)
IGNORED = dict.fromkeys(  # fields that change nothing here: accounts, caches and services of OpenAI
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "moderation", "verbosity", "prediction"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    ),
    ANYTHING,
)
REFUSED = {  # fields with a meaning that this server does not have, and what to do instead; null and [] are accepted
    "audio": "audio is not supported; the models write text only",
    "web_search_options": "web search is not supported; give the model a function that searches",
    "functions": "was replaced by tools; use tools",
    "function_call": "was replaced by tool_choice; use tool_choice",
}
PASSED = {name: each.schema for name, each in declared_options(SamplingParams).items() if each.in_http}
SAMPLING = {
    **PASSED,
    "model": {"type": ["string", "null"]},
    "stream": FLAG,
    "stream_options": _or_null(_object({"include_usage": FLAG, "continuous_usage_stats": FLAG})),
    "use_beam_search": FLAG,
    "priority": _number(-1000, 1000, "integer"),
    **IGNORED,
}
NAMED_SCHEMA = _object(
    {"name": TEXT, "schema": {"type": ["object", "boolean", "null"]}, "strict": FLAG}, ("name", "schema")
)
RESPONSE_FORMAT = _object(
    {"type": {"enum": ["text", "json_object", "json_schema"]}, "json_schema": _or_null(NAMED_SCHEMA)}, ("type",)
)
NAME = _object({"name": TEXT}, ("name",))
NAMED_TOOL = _object({"type": {"enum": ["function"]}, "function": NAME}, ("type", "function"))

EFFORT = {"enum": ["none", "minimal", "low", "medium", "high", "xhigh", "max", None]}

COMPLETION = _object(
    {
        **SAMPLING,
        "prompt": TEXTS,
        "max_tokens": COUNT,
        "echo": FLAG,
        "logprobs": _number(0, 20, "integer"),
        "best_of": _number(1, 1024, "integer"),
        "suffix": {"type": ["string", "null"]},
    },
    ("prompt",),
    additionalProperties=False,
)
CHAT = _object(
    {
        **SAMPLING,
        **dict.fromkeys(REFUSED, ANYTHING),
        "modalities": _or_null(_array(TEXT, 0, 16)),
        "messages": _array(MESSAGE, 1, 4096),
        "max_completion_tokens": SAMPLING["max_tokens"],
        "logprobs": FLAG,
        "top_logprobs": _number(0, 20, "integer"),
        "response_format": _or_null(RESPONSE_FORMAT),
        "tools": _or_null(_array(TOOL, 0, 128)),
        "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required", None]}, NAMED_TOOL]},
        "parallel_tool_calls": FLAG,
        "chat_template_kwargs": ANY_OBJECT,
        "reasoning_effort": EFFORT,
        "enable_thinking": FLAG,
        "thinking_token_budget": COUNT,
        "add_generation_prompt": FLAG,
        "continue_final_message": FLAG,
    },
    ("messages",),
    additionalProperties=False,
)
EMBEDDING = _object(
    {
        "input": TEXTS,
        "model": SAMPLING["model"],
        "encoding_format": {"enum": ["float", "base64", None]},
        "dimensions": _number(1, 2**20, "integer"),
        **IGNORED,
    },
    ("input",),
    additionalProperties=False,
)
TOKENIZE = _object(
    {
        "model": SAMPLING["model"],
        "prompt": _or_null(TEXT),
        "messages": _or_null(CHAT["properties"]["messages"]),
        "tools": CHAT["properties"]["tools"],
        "add_special_tokens": FLAG,
        "add_generation_prompt": FLAG,
        "continue_final_message": FLAG,
        "return_token_strs": FLAG,
    },
    additionalProperties=False,
)
DETOKENIZE = _object(
    {"model": SAMPLING["model"], "tokens": {**IDS, "minItems": 0}}, ("tokens",), additionalProperties=False
)


def parse_json(data: bytes) -> Any:
    """The value of a request's body. Raises RequestError for what is no JSON, is nested deeper than 64, or has half of
    a surrogate pair in a text: no tokenizer, header or file takes that."""

    def refuse(text: str) -> NoReturn:
        raise ValueError(f"{text} is no JSON number")

    try:
        value = json.loads(data.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as problem:
        raise RequestError(f"the body is no JSON: {problem}") from problem
    level, depth = [value], 0
    while level := [inner for each in level if isinstance(each, dict | list) for inner in _values(each)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise RequestError(f"the body is nested deeper than {MAX_DEPTH}")
    if b"\\u" in data and (half := find_surrogate(value)) is not None:
        raise RequestError(f"the body has {half!r} in a text, half of a surrogate pair, which is no character")
    return value


def _values(value: dict[str, Any] | list[Any]) -> Any:
    return value.values() if isinstance(value, dict) else value


def check(value: Any, path: str) -> None:
    """Raise RequestError, with the place, for a body that this path does not take."""
    from fastjsonschema import JsonSchemaValueException

    try:
        _checker(path)(value)
    except JsonSchemaValueException as error:
        name = ".".join(map(str, error.path[1:])) or None
        if error.rule == "additionalProperties" and isinstance(error.value, dict):
            wrong = next(key for key in error.value if key not in error.definition["properties"])
            known = error.definition["properties"]
            raise RequestError(f"{wrong}: there is no such parameter; {suggest(wrong, known)}", wrong) from None
        if error.rule == "required" and isinstance(error.value, dict):
            name = next(key for key in error.definition["required"] if key not in error.value)
            raise RequestError(f"{'.'.join([*map(str, error.path[1:]), name])}: is missing", name) from None
        rule = _RULES.get(str(error.rule))
        expected = _in_words(error.definition) if rule is None else rule.format(error.rule_definition)
        got = describe(error.value)
        raise RequestError(f"{name or 'the body'}: expected {expected}, got {got}", name) from None


_RULES = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "enum": "one of {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
}


def _in_words(schema: Schema) -> str:
    """
    >>> _in_words(TEXTS)
    'string, or a list of string, or a list of integer, or a list of a list of integer'
    """
    if "anyOf" in schema:
        return ", or ".join(map(_in_words, schema["anyOf"]))
    if schema.get("type") == "array":
        return f"a list of {_in_words(schema['items'])}"
    kinds: Any = schema.get("type", schema.get("enum", "something else"))
    return kinds if isinstance(kinds, str) else " or ".join("null" if kind is None else kind for kind in kinds)


@cache
def _checker(path: str) -> Callable[[Any], Any]:
    import fastjsonschema

    return fastjsonschema.compile(BODIES[path][1], use_default=False, detailed_exceptions=True)


# -- the OpenAPI page --------------------------------------------------------------------------------------------------

BODIES: dict[str, tuple[str, Schema]] = {
    "/v1/completions": ("Continue texts.", COMPLETION),
    "/v1/chat/completions": ("Reply to a conversation.", CHAT),
    "/v1/embeddings": ("Texts as vectors.", EMBEDDING),
    "/tokenize": ("The token ids of a text or a conversation.", TOKENIZE),
    "/detokenize": ("The text of token ids.", DETOKENIZE),
}
OFF_BY_DEFAULT: set[str] = set()  # paths of `BODIES` that a server has only if it is told so
OTHER: dict[str, dict[str, str]] = {}  # path -> method -> what it does, for what has no body


def declare_body(path: str, summary: str, schema: Schema) -> None:
    """Note what a POST to this path takes: for `check` and for the page."""
    BODIES[path] = (summary, schema)


def declare_call(path: str, method: str, summary: str) -> None:
    """Note a path without a body, for the page."""
    OTHER.setdefault(path, {})[method] = summary


READ = {
    "/v1/models": "The models.",
    "/v1/models/{name}": "One model.",
    "/tokenizer_info": "A model's tokenizer.",
    "/": "A page for people: chats, completions, and the engine at work.",
    "/engine": "What an engine has done since step `after`, without its texts; for the page.",
    "/health": "200 when the models are loaded, 503 before.",
    "/metrics": "For Prometheus, as text.",
    "/openapi.json": "This page.",
}
KINDS = {"/": "text/html", "/metrics": "text/plain"}
PARAMETERS = {
    "/v1/models/{name}": [{"name": "name", "in": "path", "required": True, "schema": TEXT}],
    "/tokenizer_info": [{"name": "model", "in": "query", "required": False, "schema": TEXT}],
    "/engine": [
        {"name": "model", "in": "query", "required": False, "schema": TEXT},
        *(
            {"name": name, "in": "query", "required": False, "schema": {"type": "integer", "minimum": 0}}
            for name in ("replica", "after")
        ),
    ],
}


def describe_api(version: str, more: Collection[str] = ()) -> Schema:
    """The page, in OpenAPI 3.1. more: of `OFF_BY_DEFAULT`, the paths that this server has."""
    failure = _object(
        {"error": _object({"message": TEXT, "type": TEXT, "param": {}, "code": {}}, ("message",))}, ("error",)
    )
    ollamas = _object({"error": TEXT}, ("error",))
    paths: dict[str, Any] = {}
    for path, (summary, schema) in BODIES.items():
        if path in OFF_BY_DEFAULT and path not in more:
            continue
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        kinds: Schema = {"application/json": {}} | {kind: {} for kind in _stream_kinds(path, schema)}
        paths[path] = {"post": {"summary": summary, "requestBody": body, "responses": {"200": _reply("", kinds)}}}
    for path, summary in READ.items():
        good = _reply("", {KINDS.get(path, "application/json"): {}})
        paths[path] = {"get": {"summary": summary, "responses": {"200": good}}}
        if path in PARAMETERS:
            paths[path]["get"]["parameters"] = PARAMETERS[path]
    for path, methods in OTHER.items():
        for method, summary in methods.items():
            good = _reply("", {"application/json": {}})
            paths.setdefault(path, {})[method] = {"summary": summary, "responses": {"200": good}}
            if "{" in path:
                names = [{"name": "id", "in": "path", "required": True, "schema": TEXT}]
                paths[path][method]["parameters"] = names
    for path, methods in paths.items():
        kinds = {"application/json": ollamas if path.startswith("/api/") else failure}
        bad = _reply("What was wrong.", kinds)
        for operation in methods.values():
            operation["responses"] |= {"4XX": bad, "503": _reply("Not now.", {"application/json": {}})}
    paths["/"]["get"]["security"] = paths["/health"]["get"]["security"] = []
    return {
        "openapi": "3.1.0",
        "info": {"title": "bitnet_ref", "version": version},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def _stream_kinds(path: str, schema: Schema) -> list[str]:
    """The type of the streams that a path may answer with."""
    if "stream" not in schema["properties"]:
        return []
    return ["application/x-ndjson" if path.startswith("/api/") else "text/event-stream"]


def _reply(text: str, kinds: Schema) -> Schema:
    return {
        "description": text or "The result.",
        "content": {kind: {"schema": schema} for kind, schema in kinds.items()},
    }
