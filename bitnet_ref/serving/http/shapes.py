"""OpenAI's requests as this package's parameters."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from ...backends.loaded import LoadedModel
from ...generation.chat import DEFAULT_REPLY_TOKENS, default_reply_tokens
from ...generation.embed import longest_text, token_rows, tokens_after
from ...generation.generate import split_prompts
from ...generation.params import GUIDES, SamplingParams
from ...reference.layers import Floats
from ...tokenizers.base import Tokenizer
from ..engine import Engine
from .chat_prompt import chat_text, plain_message
from .choices import Asked
from .fields import rename_fields
from .replies import ReplyReader, ThinkingBudget, find_thinking, keep_only
from .schemas import PASSED, RequestError
from .tool_formats import find_format
from .tools import InputReader, ToolReader, choose_input, choose_tools, close_objects, read_choice, read_tools

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
FLAGS = ("include_stop_str_in_output", "return_token_ids", "return_tokens_as_token_ids")  # attributes of `Asked` too
MAX_EMBEDDED = 2048  # texts, as OpenAI has it
COMPACT = {"whitespace_flexible": False}  # for llguidance: a small model may else write line ends until max_tokens


Read = Callable[[Mapping[str, Any], str, Engine, str | None], Asked]
"""Reads a body that passed its schema, for a model's name and its engine; with the chat template of the server."""


def read_completion(body: Mapping[str, Any], model_name: str, engine: Engine, chat_template: str | None) -> Asked:
    """The request of a body that passed its schema; without any template. Raises RequestError."""
    default = engine.config.sampling.get("max_tokens") or DEFAULT_COMPLETION_TOKENS
    default = DEFAULT_REPLY_TOKENS if (body.get("n_predict") or 0) < 0 else default
    body = rename_fields(body)
    params, common = _read_common(body, engine)
    prompt, echo, top = body["prompt"], bool(body.get("echo")), body.get("logprobs")
    many = isinstance(prompt, list) and not isinstance(prompt[0], int)
    if body.get("suffix"):
        if many or not isinstance(prompt, str) or echo:
            raise RequestError("expected one prompt, a text, without echo", "suffix")
        prompt = infill_ids(engine.model.tokenizer, prompt, body["suffix"], "suffix")
    params.setdefault("max_tokens", default)
    prompts = prompt if many else [prompt]
    if body.get("add_special_tokens") is False or body.get("truncate_prompt_tokens") is not None:
        adds, tokenizer = body.get("add_special_tokens") is not False, engine.model.tokenizer
        ids = [tokenizer.encode(each, adds) if isinstance(each, str) else each for each in prompts]
        prompts = [truncate_ids(each, body, engine.model, max(1, params["max_tokens"])) for each in ids]
    only_scored = params["max_tokens"] == 0
    if only_scored and not echo:
        raise RequestError("0 asks for no text, unless echo is true; expected at least 1", "max_tokens")
    params["max_tokens"] = max(1, params["max_tokens"])
    if echo and top is not None:
        params.setdefault("prompt_logprobs", top)  # as in vLLM
    n, best_of = params.get("n", 1), body.get("best_of") or params.get("n", 1)
    if best_of < n or (best_of > n and (common["stream"] or "num_beams" in params)):
        raise RequestError(f"expected at least n, {n}, and no more in a stream or with beams; got {best_of}", "best_of")
    params |= {"n": best_of, "echo": True}  # the prompt's text is cut off again; so a space after it is not lost
    return Asked(model_name, prompts, params, False, n, **common, echo=echo, top=top, is_only_scored=only_scored)


INFILL_TOKENS = (  # before the prefix, before the suffix, before the middle, as published tokenizers name them
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SantaCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek: the hole is where the middle goes
    ("<|fim_begin|>", "<|fim_hole|>", "<|fim_end|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)


def infill_ids(tokenizer: Tokenizer, prefix: str, suffix: str, field: str) -> list[int]:
    """The prompt that asks for what is between two texts. Raises RequestError without tokens for that."""
    for names in INFILL_TOKENS:
        marks = [tokenizer.token_to_id(name) for name in names]
        if None not in marks:
            before, after = (tokenizer.encode(text, add_special_tokens=False) for text in (prefix, suffix))
            front = tokenizer.encode("")[:1] if tokenizer.bos_id in tokenizer.encode("")[:1] else []
            return [*front, *marks[:1], *before, *marks[1:2], *after, *marks[2:]]  # type: ignore[list-item]
    message = "this model's tokenizer has no tokens for filling in the middle, so it can only continue a text"
    raise RequestError(message, field)


def read_chat(body: Mapping[str, Any], model_name: str, engine: Engine, chat_template: str | None) -> Asked:
    """The request of a body that passed its schema, with the conversation as token ids. Raises RequestError."""
    body = _with_tools(rename_fields(body))
    if other := [kind for kind in body.get("modalities") or [] if kind != "text"]:
        raise RequestError(f"{other[0][:40]} is not supported; the models write text only", "modalities")
    params, common = _read_common(body, engine)
    if body.get("max_completion_tokens") is not None:
        params["max_tokens"] = body["max_completion_tokens"]
    if body.get("top_logprobs") is not None and not body.get("logprobs"):
        raise RequestError("needs logprobs=true", "top_logprobs")
    tokenizer, template = engine.model.tokenizer, chat_template
    if template is None:
        template = tokenizer.template_for(bool(body.get("tools"))) or ""
    one_call, form = body.get("parallel_tool_calls") is False, find_format(template)
    functions, custom = read_tools(body.get("tools") or [])
    choice, body["tools"] = read_choice(body.get("tool_choice"), functions)
    tools: ToolReader | InputReader | None
    tools, guide = choose_tools(body["tools"], choice, one_call, form)
    if whole := choose_input(body["tools"], choice, custom):
        tools = whole[0]
        params = {name: value for name, value in params.items() if name not in GUIDES} | whole[1]
    elif guide is not None:
        params["guided_json"], common["guide_field"] = guide, "tools"
        _tighten(params)
    text = chat_text(engine.model, body, chat_template, tools is not None)
    ids, thinking = tokenizer.encode(text, body.get("add_special_tokens") is True), find_thinking(template, text)
    ids = truncate_ids(ids, body, engine.model, params.get("max_tokens") or 1)
    if body.get("continue_final_message"):
        params["echo"], thinking = True, None  # the echo is cut off again, but not the space after it
    if thinking is not None:
        end = token_ids_of(tokenizer, thinking.end)
        if thinking.begins_inside and any(params.get(name) not in (None, (), []) for name in GUIDES):
            params["guide_after"] = end
        if (body.get("thinking_token_budget") or 0) >= 0 and body.get("thinking_token_budget") is not None:
            budget = body["thinking_token_budget"]
            start = [] if thinking.begins_inside else token_ids_of(tokenizer, thinking.start)
            params.setdefault("processors", []).append(ThinkingBudget(len(ids), budget, start, end))
    marks = (*(form.marks if tools is not None else ()), *((thinking.start, thinking.end) if thinking else ()))
    shown = [token for mark in marks if (token := tokenizer.token_to_id(mark)) is not None]
    params["shown_tokens"] = [*params.get("shown_tokens", ()), *shown]
    sampling = SamplingParams.of(**engine.config.over_defaults(params))
    if sampling.max_tokens is None:
        params["max_tokens"] = default_reply_tokens(engine.model, len(ids), sampling, engine.cache.capacity)
    top = (body.get("top_logprobs") or 0) if body.get("logprobs") else None
    asked = Asked(model_name, [ids], params, True, params.get("n", 1), **common, top=top)
    asked.reply, asked.custom = ReplyReader(thinking, tools), frozenset(custom)
    asked.has_functions = bool(body.get("functions"))
    asked.hides_reasoning = body.get("include_reasoning") is False
    last = body["messages"][-1]
    if body.get("echo") and last["role"] == "assistant":
        asked.prefix = plain_message(last, len(body["messages"]) - 1)["content"]
    return asked


def truncate_ids(ids: list[int], body: Mapping[str, Any], model: LoadedModel, room: int, after: int = 0) -> list[int]:
    """The last tokens of a prompt, or the first, by vLLM's `truncate_prompt_tokens` and `truncation_side`.

    room: new tokens for which -1 leaves room in the context. after: tokens that follow the text, which stay, as in
    Hugging Face's tokenizers and in Ollama: a vector may be read at the last of them.
    """
    size = body.get("truncate_prompt_tokens")
    if size is None:
        return ids
    size = size if size >= 0 else max(1, model.context_length - room)
    if size == 0:
        raise RequestError("expected at least 1, or -1", "truncate_prompt_tokens")
    if body.get("truncation_side") != "right":
        return ids[-size:]
    if len(ids) <= size:
        return ids
    kept = after if after < size else 0
    return [*ids[: size - kept], *ids[len(ids) - kept :]]


def _with_tools(body: dict[str, Any]) -> dict[str, Any]:
    """The same request with OpenAI's older `functions` and `function_call` as tools."""
    choice = body.get("function_call")
    if body.get("functions"):
        if body.get("tools"):
            raise RequestError("expected tools or functions, not both", "functions")
        body["tools"] = [{"type": "function", "function": each} for each in body["functions"]]
        body["parallel_tool_calls"] = False
    if choice is not None:
        body["tool_choice"] = choice if isinstance(choice, str) else {"type": "function", "function": choice}
    return body


def token_ids_of(tokenizer: Tokenizer, mark: str) -> list[int]:
    """The ids of a mark in the middle of a text: its own token where it has one."""
    token = tokenizer.token_to_id(mark)
    return tokenizer.encode(mark, add_special_tokens=False) if token is None else [token]


def name_marks(tokenizer: Tokenizer) -> dict[str, str | None]:
    """The tokens that begin and end a text, by name."""
    marks = {"bos_token": tokenizer.bos_id, "eos_token": next(iter(tokenizer.eos_ids), None)}
    return {key: None if token is None else tokenizer.id_to_token(token) for key, token in marks.items()}


def _read_common(body: Mapping[str, Any], engine: Engine) -> tuple[dict[str, Any], dict[str, Any]]:
    params = {name: body[name] for name in PASSED if body.get(name) is not None}
    if isinstance(params.get("logit_bias"), list):
        params["logit_bias"] = read_biases(params["logit_bias"], engine.model.tokenizer)
    if params.get("top_k") == -1:  # vLLM's "no limit"
        params["top_k"] = 0
    if params.get("seed") == -1:  # a random one, for vLLM, llama-server and Ollama, whatever the server's default is
        params["seed"] = None
    elif "seed" in params:
        params["seed"] %= 2**64
    if body.get("use_beam_search"):  # vLLM's: n is the number of beams
        if body.get("stream"):
            raise RequestError("a search by beams has no text before its end", "stream")
        params |= {"num_beams": params.get("n", 1), "temperature": params.get("temperature", 0.0)}
    if body.get("prompt_logprobs") is not None:
        if body.get("stream"):
            raise RequestError("are not given in a stream", "prompt_logprobs")
        params["prompt_logprobs"] = body["prompt_logprobs"]
    if body.get("allowed_token_ids"):
        size = engine.model.config.vocab_size
        if (largest := max(body["allowed_token_ids"])) >= size:
            message = f"expected ids below {size}, the size of the vocabulary, got {largest}"
            raise RequestError(message, "allowed_token_ids")
        allowed = np.unique(np.asarray(body["allowed_token_ids"], np.int64))
        params["processors"] = [lambda _, logits: keep_only(allowed, logits)]
    if body.get("skip_special_tokens") is False:
        params["shown_tokens"] = engine.model.tokenizer.special_ids
    guide_field = _read_guide(body, params)
    if "temperature" not in engine.config.sampling:
        params.setdefault("temperature", 1.0)  # OpenAI's
    top = body.get("top_logprobs") or 0 if isinstance(body.get("logprobs"), bool) else body.get("logprobs")
    if top is not None and body.get("logprobs") is not False:
        params["logprobs"] = top
    options = body.get("stream_options") or {}
    stream = bool(body.get("stream"))
    if body.get("stream_options") is not None and not stream:
        raise RequestError("needs stream=true", "stream_options")
    return params, {
        "stream": stream,
        "usage_in_stream": bool(options.get("include_usage")),
        "usage_in_chunks": bool(options.get("include_usage") and options.get("continuous_usage_stats")),
        "priority": body.get("priority") or 0,
        "defaults": engine.config.sampling,
        "guide_field": guide_field,
        "shows_prompt_logprobs": body.get("prompt_logprobs") is not None,
        **{name: bool(body.get(name)) for name in FLAGS},
    }


def read_biases(pairs: list[list[Any]], tokenizer: Tokenizer) -> dict[int, float]:
    """`logit_bias` as llama-server has it, pairs of a token id or a text and a number or false, as OpenAI has it.

    The tokens of a text each get its number, and false is -100, which no model outweighs. Raises RequestError.
    """
    biases = dict[int, float]()
    for number, (target, bias) in enumerate(pairs):
        is_id = isinstance(target, int | float) and not isinstance(target, bool) and target >= 0 and target % 1 == 0
        if not (is_id or isinstance(target, str)) or isinstance(bias, str) or bias is True:
            message = "expected a token id or a text, and a number from -100 to 100 or false"
            raise RequestError(message, f"logit_bias[{number}]")
        ids = tokenizer.encode(target, add_special_tokens=False) if isinstance(target, str) else [int(target)]
        biases |= dict.fromkeys(ids, -100.0 if bias is False else bias)
    return biases


def _read_guide(body: Mapping[str, Any], params: dict[str, Any]) -> str:
    """What the text must match, by OpenAI's `response_format` or vLLM's `structured_outputs`: which it was, or ""."""
    read_from = ""
    form, outputs = body.get("response_format") or {}, body.get("structured_outputs") or {}
    if form.get("type", "text") != "text":
        schema = form.get("schema")  # llama-server's
        if form["type"] == "json_schema":
            if not form.get("json_schema"):
                raise RequestError("is missing", "response_format.json_schema")
            schema = form["json_schema"]["schema"] if form["json_schema"]["schema"] is not None else {}
        params["guided_json"], read_from = {"type": "object"} if schema is None else schema, "response_format"
    if outputs.get("json_object"):
        params["guided_json"] = {"type": "object"}
    for guide in GUIDES:
        if outputs.get(guide.removeprefix("guided_")) not in (None, ""):
            params[guide], read_from = outputs[guide.removeprefix("guided_")], "structured_outputs"
    _tighten(params)
    return read_from


def _tighten(params: dict[str, Any]) -> None:
    """A schema for JSON without white space or properties that it does not name."""
    schema = params.get("guided_json")
    with suppress(ValueError, RecursionError):  # a text that is no JSON, or nested too deep, is refused later
        schema = json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(schema, dict):
            params["guided_json"] = {"x-guidance": COMPACT, **close_objects(schema)}


def embedding_ids(model: LoadedModel, body: Mapping[str, Any]) -> list[list[int]]:
    """The token ids of each text (or list of token ids) of a request for embeddings."""
    parts, _ = split_prompts(body["input"])
    if len(parts) > MAX_EMBEDDED:
        raise RequestError(f"expected at most {MAX_EMBEDDED} texts, got {len(parts)}", "input")
    if body.get("add_special_tokens") is False:
        parts = [model.tokenizer.encode(part, False) if isinstance(part, str) else part for part in parts]
    room = model.context_length - longest_text(model)
    after = [tokens_after(model) if isinstance(part, str) else 0 for part in parts]
    rows = token_rows(model, parts, any_length=True)
    return [truncate_ids(ids.tolist(), body, model, room, end) for ids, end in zip(rows, after, strict=True)]


def embedding_response(body: Mapping[str, Any], model_name: str, vectors: Floats, tokens: int) -> dict[str, Any]:
    """vectors (B, D); tokens: of all texts."""
    if body.get("encoding_format") == "base64":
        coded: list[Any] = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
    else:
        coded = vectors.tolist()
    data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(coded)]
    counts = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model_name, "usage": counts}
