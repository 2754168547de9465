"""What a request's JSON may contain. One table of JSON schemas is both the check and the OpenAPI page."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Collection
from functools import cache
from typing import Any, NoReturn

from ...errors import BitNetRefError, describe
from ...generation.params import SamplingParams
from ...system.options import Schema, declared_options, find_surrogate, suggest
from .fields import OFF, REFUSED, WITHOUT_EFFECT, ignored, is_unused, refused

MAX_DEPTH = 64  # of the JSON in a request
MAX_WARNED = 1000  # names of unknown fields, each of which is logged once
SHOWN_FIELDS = 20  # of them in one request

log = logging.getLogger(__name__)


class RequestError(BitNetRefError):
    """An HTTP request that is refused: its status, and `field`, the parameter that is wrong."""

    def __init__(self, message: str, field: str | None = None, status: int = 400, code: str | None = None) -> None:
        self.status, self.code = status, code
        super().__init__(message, field=field)


def or_null(schema: Schema) -> Schema:
    return {**schema, "type": [schema["type"], "null"]}


def describe_number(low: float, high: float, kind: str = "number") -> Schema:
    return {"type": [kind, "null"], "minimum": low, "maximum": high}


def describe_object(properties: Schema, required: tuple[str, ...] = (), **more: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def describe_array(items: Schema, low: int = 0, high: int = 1 << 20) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


BODIES: dict[str, tuple[str, Schema]] = {}
OFF_BY_DEFAULT: set[str] = set()  # paths of `BODIES` that a server has only if it is told so
CALLS: dict[tuple[str, str], Schema] = {}  # path, method -> what is done, of paths without a body


def declare_body(path: str, summary: str, properties: Schema, required: tuple[str, ...] = ()) -> Schema:
    """Note what a POST to this path takes, and nothing else: for `check` and for the page."""
    schema = describe_object(properties, required, additionalProperties=False)
    BODIES[path] = (summary, schema)
    return schema


def declare_call(path: str, method: str, summary: str, kind: str = "application/json", **query: Schema) -> None:
    """Note a path without a body, for the page. query: its parameters."""
    places = [*((name, "path", TEXT) for name in re.findall(r"{(\w+)}", path))]
    places += [(name, "query", schema) for name, schema in query.items()]
    parameters = [
        {"name": name, "in": place, "required": place == "path", "schema": schema} for name, place, schema in places
    ]
    CALLS[path, method] = {"summary": summary, "responses": {"200": _reply({kind: {}})}}
    if parameters:
        CALLS[path, method]["parameters"] = parameters


def _reply(kinds: Schema, text: str = "The result.") -> Schema:
    return {"description": text, "content": {kind: {"schema": schema} for kind, schema in kinds.items()}}


TEXT, MAYBE, FLAG = {"type": "string"}, {"type": ["string", "null"]}, {"type": ["boolean", "null"]}
ANY_OBJECT = {"type": ["object", "null"]}
COUNT = describe_number(0, 2**31 - 1, "integer")
IDS = describe_array({"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, 1, 1 << 17)
TEXTS = {"anyOf": [TEXT, IDS, describe_array({"anyOf": [TEXT, IDS]}, 1, 1 << 17)]}
PART = describe_object({"type": TEXT, "text": TEXT, "refusal": TEXT}, ("type",))  # read by `read_parts`
SHORT_TEXT = {"type": "string", "minLength": 1, "maxLength": 64}
FUNCTION = describe_object({"name": SHORT_TEXT, "parameters": ANY_OBJECT}, ("name",))
NAME = describe_object({"name": SHORT_TEXT}, ("name",))
KINDS_OF_TOOLS = {"enum": ["function", "custom"]}
GRAMMAR = describe_object({"syntax": {"enum": ["lark", "regex"]}, "definition": TEXT}, ("syntax", "definition"))
FORMAT = describe_object({"type": {"enum": ["text", "grammar"]}, "grammar": or_null(GRAMMAR)}, ("type",))
CUSTOM_TOOL = describe_object({"name": SHORT_TEXT, "format": or_null(FORMAT)}, ("name",))
TOOL = describe_object({"type": KINDS_OF_TOOLS, "function": FUNCTION, "custom": CUSTOM_TOOL}, ("type",))
CALL = describe_object({"name": TEXT, "arguments": TEXT}, ("name", "arguments"))
CUSTOM_CALL = describe_object({"name": TEXT, "input": TEXT}, ("name", "input"))
MESSAGE = describe_object(
    {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
        "content": {"anyOf": [MAYBE, describe_array(PART, 0, 1024)]},
        "tool_calls": or_null(describe_array(describe_object({"function": CALL, "custom": CUSTOM_CALL}), 0, 128)),
        "function_call": or_null(CALL),
    },
    ("role",),
)
PASSED = {name: each.schema for name, each in declared_options(SamplingParams).items() if each.in_http}
NAMED_SCHEMA = describe_object(
    {"name": TEXT, "schema": {"type": ["object", "boolean", "null"]}, "strict": FLAG}, ("name", "schema")
)
RESPONSE_FORMAT = describe_object(
    {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "json_schema": or_null(NAMED_SCHEMA),
        "schema": {"type": ["object", "boolean", "null"]},
    },
    ("type",),
)
STRUCTURED_OUTPUTS = describe_object(  # vLLM's
    {
        "json": PASSED["guided_json"],
        "regex": PASSED["guided_regex"],
        "choice": PASSED["guided_choice"],
        "grammar": PASSED["guided_grammar"],
        "json_object": FLAG,
        **ignored(("disable_any_whitespace", "disable_fallback", "disable_additional_properties")),
        **refused(
            {
                "structural_tag": "is not supported; use tools, or json",
                "whitespace_pattern": REFUSED["guided_whitespace_pattern"],
            }
        ),
    },
    additionalProperties=False,
)
BIAS_PAIR = describe_array({"type": ["string", "number", "boolean"]}, 2, 2)  # llama-server's, read by `read_biases`
SAMPLING = {
    **PASSED,
    "logit_bias": {
        **describe_array(BIAS_PAIR, 0, 1 << 16),
        **PASSED["logit_bias"],
        "type": ["object", "array", "null"],
    },
    "model": MAYBE,
    "stream": FLAG,
    "stream_options": or_null(describe_object({"include_usage": FLAG, "continuous_usage_stats": FLAG})),
    "use_beam_search": FLAG,
    "priority": describe_number(-1000, 1000, "integer"),
    "echo": FLAG,
    "response_format": or_null(RESPONSE_FORMAT),
    "structured_outputs": or_null(STRUCTURED_OUTPUTS),
    "allowed_token_ids": or_null(IDS),
    "prompt_logprobs": describe_number(0, 20, "integer"),
    "return_token_ids": FLAG,
    "return_tokens_as_token_ids": FLAG,
    "skip_special_tokens": FLAG,
    "add_special_tokens": FLAG,
    "include_stop_str_in_output": FLAG,
    "truncate_prompt_tokens": describe_number(-1, 2**31 - 1, "integer"),
    "truncation_side": {"enum": ["left", "right", None]},
    "n_predict": describe_number(-2, 2**31 - 1, "integer"),
    "n_cmpl": PASSED["n"],
    "repeat_penalty": PASSED["repetition_penalty"],
    "json_schema": PASSED["guided_json"],
    **dict.fromkeys(("grammar", "regex", "ebnf"), MAYBE),
    "no_stop_trim": FLAG,
    **ignored(WITHOUT_EFFECT),
    **refused(REFUSED),
}
NAMED_TOOL = describe_object({"type": KINDS_OF_TOOLS, "function": NAME, "custom": NAME}, ("type",))
ALLOWED_TOOLS = describe_object(
    {
        "type": {"enum": ["allowed_tools"]},
        "allowed_tools": describe_object(
            {"mode": {"enum": ["auto", "required"]}, "tools": describe_array(NAMED_TOOL, 0, 128)}
        ),
    },
    ("type", "allowed_tools"),
)
EFFORT = {"enum": ["none", "minimal", "low", "medium", "high", "xhigh", "max", None]}

COMPLETION = declare_body(
    "/v1/completions",
    "Continue texts.",
    {
        **SAMPLING,
        "prompt": TEXTS,
        "max_tokens": COUNT,
        "logprobs": describe_number(0, 20, "integer"),
        "best_of": describe_number(1, 1024, "integer"),
        "suffix": MAYBE,
        **refused({"thinking_token_budget": "thinking is told apart in chats only; use /v1/chat/completions"}),
    },
    ("prompt",),
)
CHAT = declare_body(
    "/v1/chat/completions",
    "Reply to a conversation.",
    {
        **SAMPLING,
        "modalities": or_null(describe_array(TEXT, 0, 16)),
        "messages": describe_array(MESSAGE, 1, 4096),
        "max_completion_tokens": SAMPLING["max_tokens"],
        "logprobs": FLAG,
        "top_logprobs": describe_number(0, 20, "integer"),
        "tools": or_null(describe_array(TOOL, 0, 128)),
        "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required", None]}, NAMED_TOOL, ALLOWED_TOOLS]},
        "functions": or_null(describe_array(FUNCTION, 0, 128)),
        "function_call": {"anyOf": [{"enum": ["none", "auto", None]}, NAME]},
        "parallel_tool_calls": FLAG,
        "chat_template_kwargs": ANY_OBJECT,
        "reasoning_effort": EFFORT,
        "enable_thinking": FLAG,
        "include_reasoning": FLAG,
        "thinking_token_budget": describe_number(-1, 2**31 - 1, "integer"),
        "documents": or_null(describe_array({"type": "object"}, 0, 1024)),
        "add_generation_prompt": FLAG,
        "continue_final_message": FLAG,
    },
    ("messages",),
)
declare_body(
    "/v1/embeddings",
    "Texts as vectors.",
    {
        "input": TEXTS,
        "model": MAYBE,
        "encoding_format": {"enum": ["float", "base64", None]},
        "dimensions": describe_number(1, 2**20, "integer"),
        **{name: SAMPLING[name] for name in ("truncate_prompt_tokens", "truncation_side", "add_special_tokens")},
        **ignored((*WITHOUT_EFFECT, "priority")),
        **refused({name: REFUSED[name] for name in ("cache_salt", "lora_path", "chat_template")}),
    },
    ("input",),
)
declare_body(
    "/tokenize",
    "The token ids of a text or a conversation.",
    {
        "model": MAYBE,
        "prompt": or_null(TEXT),
        "messages": or_null(CHAT["properties"]["messages"]),
        "tools": CHAT["properties"]["tools"],
        "add_special_tokens": FLAG,
        "add_generation_prompt": FLAG,
        "continue_final_message": FLAG,
        "return_token_strs": FLAG,
        "chat_template_kwargs": ANY_OBJECT,
        **ignored(("mm_processor_kwargs",)),
        **refused({"chat_template": REFUSED["chat_template"]}),
    },
)
declare_body(
    "/detokenize",
    "The text of token ids.",
    {"model": MAYBE, "tokens": {**IDS, "minItems": 0}, **ignored(("mm_processor_kwargs",))},
    ("tokens",),
)


def parse_json(data: bytes) -> Any:
    """The value of a request's body. Raises RequestError for what is no JSON, is nested deeper than 64, or has what no
    answer could say again: a number that is too large, half of a surrogate pair in a text."""

    def refuse(text: str) -> NoReturn:
        raise ValueError(f"{text} is no JSON number")

    def read_float(text: str) -> float:
        if math.isinf(number := float(text)):
            raise ValueError(f"{text[:40]} is too large a number")
        return number

    try:
        value = json.loads(data.decode("utf-8"), parse_constant=refuse, parse_float=read_float)
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


class UnknownFields:
    """Leaves out the fields of requests that are not known, and logs each name once for each path."""

    def __init__(self) -> None:
        self._warned = set[tuple[str, str]]()

    def drop(self, body: dict[str, Any], path: str) -> list[str]:
        """Remove the fields that this path does not know.   -> their names, at most `SHOWN_FIELDS`"""
        known = BODIES[path][1]["properties"]
        unknown = [name for name in body if name not in known]
        for name in unknown:
            del body[name]
        names = [name[:100] for name in unknown[:SHOWN_FIELDS]]
        new = [name for name in names if (path, name) not in self._warned]
        if new and len(self._warned) < MAX_WARNED:
            self._warned |= {(path, name) for name in new}
            log.warning("%s: fields of a client are not known, and ignored: %s", path, ", ".join(map(repr, new)))
        return names


def _values(value: dict[str, Any] | list[Any]) -> Any:
    return value.values() if isinstance(value, dict) else value


def check(value: Any, path: str) -> None:
    """Raise RequestError, with the place, for a body that this path does not take. Numbers like 1.0, which JSON Schema
    takes for integers, become integers."""
    from fastjsonschema import JsonSchemaValueException

    try:
        _read_integers(_checker(path)(value), BODIES[path][1])
    except JsonSchemaValueException as error:
        name = ".".join(map(str, error.path[1:])) or None
        if error.rule == "additionalProperties" and isinstance(error.value, dict):
            wrong = next(key for key in error.value if key not in error.definition["properties"])
            known = error.definition["properties"]
            used = [key for key, schema in known.items() if not is_unused(schema)]
            raise RequestError(f"there is no such parameter; {suggest(wrong, used, known)}", wrong) from None
        if error.rule == "required" and isinstance(error.value, dict):
            missing = next(key for key in error.definition["required"] if key not in error.value)
            raise RequestError("is missing", f"{name}.{missing}" if name else missing) from None
        if error.rule == "enum" and error.rule_definition == OFF:
            raise RequestError(error.definition["description"], name) from None
        rule = _RULES.get(str(error.rule))
        expected = _in_words(error.definition) if rule is None else rule.format(error.rule_definition)
        message = f"expected {expected}, got {describe(error.value)}"
        raise RequestError(message if name else f"the body: {message}", name) from None


def _read_integers(value: Any, schema: Schema) -> Any:
    """A value that fits its schema, with integers where that wants them; its objects and lists are changed."""
    if isinstance(value, float) and value % 1 == 0 and "integer" in schema.get("type", ()):
        return int(value)
    for each in schema.get("anyOf", ()):
        value = _read_integers(value, each)
    if isinstance(value, dict):
        known = schema.get("properties", {})
        value.update({name: _read_integers(value[name], known[name]) for name in value.keys() & known.keys()})
    elif isinstance(value, list) and "items" in schema:
        value[:] = [_read_integers(each, schema["items"]) for each in value]
    return value


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
    'string, or a list of integer, or a list of (string, or a list of integer)'
    """
    if "anyOf" in schema:
        return ", or ".join(map(_in_words, schema["anyOf"]))
    if schema.get("type") == "array":
        items = _in_words(schema["items"])
        return f"a list of ({items})" if "anyOf" in schema["items"] else f"a list of {items}"
    kinds: Any = schema.get("type", schema.get("enum", "something else"))
    return kinds if isinstance(kinds, str) else " or ".join("null" if kind is None else kind for kind in kinds)


@cache
def _checker(path: str) -> Callable[[Any], Any]:
    import fastjsonschema

    return fastjsonschema.compile(BODIES[path][1], use_default=False, detailed_exceptions=True)


# -- the OpenAPI page --------------------------------------------------------------------------------------------------

declare_call("/v1/models", "get", "The models.")
declare_call("/v1/models/{name}", "get", "One model.")
declare_call("/tokenizer_info", "get", "A model's tokenizer.", model=TEXT)
declare_call("/", "get", "A page for people: chats, completions, and the engine at work.", "text/html")
PLACE: Schema = {"type": "integer", "minimum": 0}
ENGINE = "What an engine has done since step `after`, without its texts; for the page."
declare_call("/engine", "get", ENGINE, model=TEXT, replica=PLACE, after=PLACE)
declare_call("/health", "get", "200 when the models are loaded, 503 before.")
declare_call("/metrics", "get", "For Prometheus, as text.", "text/plain")
declare_call("/openapi.json", "get", "This page.")


def describe_api(version: str, more: Collection[str] = ()) -> Schema:
    """The page, in OpenAPI 3.1. more: of `OFF_BY_DEFAULT`, the paths that this server has."""
    failure = describe_object(
        {"error": describe_object({"message": TEXT, "type": TEXT, "param": {}, "code": {}}, ("message",))}, ("error",)
    )
    ollamas = describe_object({"error": TEXT}, ("error",))
    paths: dict[str, Any] = {}
    for path, (summary, schema) in BODIES.items():
        if path in OFF_BY_DEFAULT and path not in more:
            continue
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        kinds: Schema = {"application/json": {}}
        if "stream" in schema["properties"]:
            kinds["application/x-ndjson" if path.startswith("/api/") else "text/event-stream"] = {}
        paths[path] = {"post": {"summary": summary, "requestBody": body, "responses": {"200": _reply(kinds)}}}
    for (path, method), operation in CALLS.items():
        paths.setdefault(path, {})[method] = {**operation}
    for path, methods in paths.items():
        kinds = {"application/json": ollamas if path.startswith("/api/") else failure}
        bad = _reply(kinds, "What was wrong.")
        for operation in methods.values():
            failures = {"4XX": bad, "503": _reply({"application/json": {}}, "Not now.")}
            operation["responses"] = {**operation["responses"], **failures}
    paths["/"]["get"]["security"] = paths["/health"]["get"]["security"] = []
    return {
        "openapi": "3.1.0",
        "info": {"title": "bitnet_ref", "version": version},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }
