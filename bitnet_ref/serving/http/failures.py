"""An error as an HTTP status, and as OpenAI's JSON."""

from __future__ import annotations

import logging
from typing import Any

from ...errors import (
    BackendError,
    BitNetRefError,
    ContextOverflow,
    EngineClosed,
    GenerationError,
    OutOfMemory,
    QueueFull,
    RequestTimeout,
    TokenizerError,
    describe_error,
)
from ...generation.sequence import SEE_TRUNCATE
from .schemas import RequestError

log = logging.getLogger(__name__)
STATUSES: dict[type[BitNetRefError], int] = {  # the first that fits
    QueueFull: 429,
    RequestTimeout: 504,
    EngineClosed: 503,
    OutOfMemory: 503,
    TokenizerError: 400,
    GenerationError: 400,
}
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def blame(error: BaseException) -> BaseException:
    """A request's error; BackendError if it failed by a fault of the engine, and not by its own parameters."""
    cause = error.__cause__
    is_fault = type(error) is GenerationError and not isinstance(cause, GenerationError | TokenizerError | None)
    return BackendError(str(error)) if is_fault else error


def describe_failure(error: BaseException) -> tuple[int, dict[str, Any]]:
    """The status of an error, and OpenAI's JSON for it."""
    message, param, code, status = str(error), None, None, 500
    if isinstance(error, RequestError):
        param, code, status = error.field, error.code, error.status
    elif isinstance(error, BitNetRefError):
        status = next((number for kind, number in STATUSES.items() if isinstance(error, kind)), 500)
        param = error.field if status == 400 else None
        message = error.message if param is None else f"{param}: {error.message}"  # without the path of a file
        if isinstance(error, ContextOverflow):  # clients look for OpenAI's code or for its words
            message = message.replace(SEE_TRUNCATE, "")
            code, message = "context_length_exceeded", f"This model's maximum context length is exceeded: {message}"
    if status == 500:
        log.error("a request failed: %s", describe_error(error), exc_info=error)
        message = "a fault of the server; its log has the cause"
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def shape_failure(path: str, status: int, facts: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's JSON of an error in the form of the API that this path belongs to."""
    message = facts["error"]["message"]
    if path.startswith("/v1/messages"):
        kind = ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    if path.startswith("/api/"):
        return {"error": message}
    return facts
