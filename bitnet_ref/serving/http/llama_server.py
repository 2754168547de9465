"""llama-server's own paths: `/completion`, `/infill`, `/apply-template`, `/props` and `/slots`.

Source: llama.cpp's tools/server/README.md. The fields are those of `/v1/completions`, which know llama-server's names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...generation.chat import DEFAULT_REPLY_TOKENS
from ...generation.results import Generation, StreamChunk
from ..engine import Engine
from . import schemas
from .chat_prompt import chat_text
from .choices import Asked, Choice, Writer
from .schemas import CHAT, COMPLETION, IDS, MAYBE, TEXT, describe_number, describe_object
from .shapes import infill_ids, name_marks
from .translate import ask_completion
from .writers import write_event

if TYPE_CHECKING:
    from .server import Server

OTHERS = ("prompt", "n", "n_cmpl", "best_of", "use_beam_search", "echo", "logprobs", "suffix", "stream_options")
SAMPLING = {
    **{name: schema for name, schema in COMPLETION["properties"].items() if name not in OTHERS},
    "max_tokens": describe_number(-2, 2**31 - 1, "integer"),
    "n_probs": describe_number(0, 20, "integer"),
}
schemas.declare_body(
    "/completion",
    "Continue a text, in llama-server's form.",
    {**SAMPLING, "prompt": {"anyOf": [TEXT, IDS]}},
    ("prompt",),
)
schemas.declare_body(
    "/infill",
    "Fill in what is between two texts, in llama-server's form.",
    {
        **SAMPLING,
        "input_prefix": TEXT,
        "input_suffix": TEXT,
        "prompt": MAYBE,
        "input_extra": {
            "type": ["array", "null"],
            "maxItems": 256,
            "items": describe_object({"text": TEXT, "filename": MAYBE}, ("text",)),
        },
    },
    ("input_prefix", "input_suffix"),
)
schemas.declare_body(
    "/apply-template",
    "A conversation as the text that the model reads.",
    {name: CHAT["properties"][name] for name in ("messages", "tools", "model")},
    ("messages",),
)
schemas.declare_call("/props", "get", "The model and its defaults, in llama-server's form.")
schemas.declare_call("/slots", "get", "The requests that run, without their texts.")


def make_routes(server: Server) -> list[Route]:
    async def apply_template(request: Request) -> Response:
        body = await server.body(request)
        async with server.borrow(body) as (_, engine):
            text = await server.work(chat_text, engine.model, body, server.chat_template, bool(body.get("tools")))
            return JSONResponse({"prompt": text})

    async def props(request: Request) -> Response:
        async with server.borrow(dict(request.query_params)) as (name, engine):
            tokenizer = engine.model.tokenizer
            sampling = engine.config.sampling.items()
            params = {name.replace("repetition", "repeat"): n for name, n in sampling if isinstance(n, int | float)}
            settings = {"n_ctx": engine.model.context_length, "params": params}
            return JSONResponse(
                {
                    "default_generation_settings": settings,
                    "total_slots": sum(each.config.max_batch for each in engine.engines),
                    "model_alias": name,
                    "chat_template": server.chat_template or tokenizer.chat_template or "",
                    "modalities": {"vision": False, "audio": False},
                    "build_info": f"bitnet_ref {server.version}",
                    **{key: name or "" for key, name in name_marks(tokenizer).items()},
                }
            )

    async def slots(request: Request) -> Response:
        """A slot for each running request, and idle ones up to the batch."""
        async with server.borrow(dict(request.query_params)) as (_, engine):
            size = sum(each.config.max_batch for each in engine.engines)
            idle = {"id_task": -1, "n_ctx": engine.model.context_length, "is_processing": False}
            rows: list[dict[str, Any]] = [{"id": number, **idle} for number in range(size)]
            for row, each in zip(rows, [each for each in engine.requests if each.state == "running"], strict=False):
                row |= {"id_task": each.request_id, "is_processing": True}
                row["next_token"] = {"n_decoded": each.generated_tokens}
            return JSONResponse(rows)

    return [
        server.route_texts("/completion", read_completion),
        server.route_texts("/infill", read_infill),
        Route("/apply-template", apply_template, methods=["POST"]),
        Route("/props", props, methods=["GET"]),
        Route("/slots", slots, methods=["GET"]),
    ]


def read_completion(body: Mapping[str, Any], name: str, engine: Engine, chat_template: str | None) -> Asked:
    """The request of a body that passed its schema. Raises RequestError."""
    return _ask(body, body["prompt"], name, engine)


def read_infill(body: Mapping[str, Any], name: str, engine: Engine, chat_template: str | None) -> Asked:
    """The same for what is between two texts. `input_extra` stands before the prefix, `prompt` after it."""
    extra = "".join(f"{part['text']}\n" for part in body.get("input_extra") or [])
    prefix = extra + body["input_prefix"] + (body.get("prompt") or "")
    ids = infill_ids(engine.model.tokenizer, prefix, body["input_suffix"], "input_suffix")
    return _ask(body, ids, name, engine)


def _ask(body: Mapping[str, Any], prompt: str | list[int], name: str, engine: Engine) -> Asked:
    common = {each: body[each] for each in SAMPLING if each in body and each not in ("n_predict", "n_probs")}
    wanted = body.get("n_predict") if body.get("n_predict") is not None else body.get("max_tokens")
    if wanted is None:
        wanted = engine.config.sampling.get("max_tokens")
    common["max_tokens"] = DEFAULT_REPLY_TOKENS if wanted is None or wanted < 0 else max(1, wanted)
    if body.get("n_probs"):
        common["logprobs"] = body["n_probs"]
    asked = ask_completion({**common, "prompt": prompt}, name, engine, CompletionWriter)
    asked.is_only_scored = wanted == 0  # the prompt is computed, and no token is given
    return asked


class CompletionWriter(Writer):
    """A completion of llama-server, or the events of its stream."""

    def __init__(self, asked: Asked, choices: Sequence[Choice]) -> None:
        super().__init__(asked, choices)
        self.choice = choices[0]
        self._finish: str | None = None
        self._stop: str | int | None = None

    def part(self, choice: Choice, chunk: StreamChunk) -> str:
        part = choice.part(chunk) or {"text": ""}
        if chunk.finish_reason is not None:
            self._finish, self._stop = chunk.finish_reason, chunk.stop_reason
        ids = self._given([chunk.token_id])
        facts = {"index": 0, "content": part["text"], "tokens": ids, "stop": False}
        return write_event({**facts, **self._probabilities(ids, part.get("logprobs"))})

    def closing(self) -> str:
        return write_event({"index": 0, "content": "", "tokens": [], **self._end()})

    def failure(self, status: int, facts: Mapping[str, Any]) -> str:
        return write_event(facts)

    def whole(self, results: Sequence[Generation]) -> dict[str, Any]:
        result = results[0]
        written = self.choice.whole(result, 0)
        self._finish, self._stop = result.finish_reason, result.stop_reason
        ids = self._given(result.token_ids)
        probabilities = self._probabilities(ids, written.get("logprobs"))
        return {"index": 0, "content": written["text"], "tokens": ids, **self._end(), **probabilities}

    def _given(self, ids: list[int]) -> list[int]:
        return [] if self.asked.is_only_scored else ids

    def _probabilities(self, ids: Sequence[int], logprobs: Mapping[str, Any] | None) -> dict[str, Any]:
        if not logprobs:
            return {}
        columns, entries = [logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs")], []
        for token, text, ln_p, top in zip(ids, *columns, strict=False):
            likeliest = [{"token": name, "logprob": each} for name, each in (top or {}).items()]
            entries.append({"id": token, "token": text, "logprob": ln_p, "top_logprobs": likeliest})
        return {"completion_probabilities": entries}

    def _end(self) -> dict[str, Any]:
        stats = self.choice.handle.stats
        is_word = self._finish == "stop" and isinstance(self._stop, str)
        kind = "limit" if self._finish == "length" else "word" if is_word else "eos"
        prompt, new = stats.prompt_tokens, 0 if self.asked.is_only_scored else stats.generated_tokens
        computed = prompt - stats.cached_tokens
        return {
            "id_slot": 0,
            "stop": True,
            "model": self.asked.model_name,
            "tokens_predicted": new,
            "tokens_evaluated": prompt,
            "tokens_cached": stats.cached_tokens,
            "truncated": stats.dropped_tokens > 0,
            "stop_type": kind,
            "stopping_word": self._stop if is_word else "",
            "timings": {
                "prompt_n": computed,
                "prompt_ms": stats.prefill_s * 1e3,
                "prompt_per_second": stats.prompt_tokens_per_s,
                "predicted_n": new,
                "predicted_ms": stats.decode_s * 1e3,
                "predicted_per_second": stats.generated_tokens_per_s,
            },
        }
