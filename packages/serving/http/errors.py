"""Every refusal over HTTP in OpenAI's envelope: {"error": {"message", "type", "code", "param"}}.

The one table from exception classes to HTTP statuses. A body that does not fit its schema is a 400 that names the field,
never FastAPI's 422.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import logging
import math
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from runtime.errors import (
    CapacityExhausted,
    DrafterNotFound,
    DrafterRejected,
    EngineUnavailable,
    HistoryDiverged,
    HistoryMismatch,
    InvalidRequest,
    PermissionDenied,
    SavedSessionRejected,
    SessionBusy,
    SessionNotFound,
    SlipstreamError,
    Unauthenticated,
)

log = logging.getLogger(__name__)

UNKNOWN_PARAMETER = "unknown_parameter"  # code of a refusal, and how the schemas tell of it

STATUSES: dict[type[SlipstreamError], int] = {
    InvalidRequest: 400,
    Unauthenticated: 401,
    PermissionDenied: 403,
    SessionNotFound: 404,
    DrafterNotFound: 404,
    SessionBusy: 409,
    HistoryMismatch: 409,
    HistoryDiverged: 409,
    DrafterRejected: 409,
    SavedSessionRejected: 409,
    CapacityExhausted: 429,
    EngineUnavailable: 503,
}
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; it is for the logs of what stands in between


class NotFound(SlipstreamError, LookupError):
    """A name in a path or a field that means nothing here."""

    def __init__(self, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.reason = code
        self.param = param


class RequestTimeout(SlipstreamError, TimeoutError):
    """http.request_timeout_s is over."""

    reason = "REQUEST_TIMEOUT"


@asynccontextmanager
async def until(deadline: float | None) -> AsyncIterator[None]:
    """RequestTimeout when the event loop's clock passes the deadline; None: never."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError as error:
        if isinstance(error, SlipstreamError):
            raise
        raise RequestTimeout("The server's time for one request is over; ask for fewer tokens.") from error


def status_of(error: Exception) -> int:
    if isinstance(error, NotFound):
        return 404
    if isinstance(error, RequestTimeout):
        return 504
    if isinstance(error, SavedSessionRejected) and error.reason == "SAVED_NOT_FOUND":
        return 404
    if isinstance(error, SavedSessionRejected) and error.reason == "SAVED_STORAGE":
        return 507  # insufficient storage
    return next((STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES), 500)


def envelope(message: str, status: int, code: str | None, param: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "code": code, "param": param}}


def envelope_of(error: Exception) -> dict[str, Any]:
    """What is not one of our own errors says only that the fault is the server's: its text may hold secrets."""
    if not isinstance(error, SlipstreamError):
        return envelope("The server failed on this request; its log has the cause.", 500, "internal")
    return envelope(error.message, status_of(error), error.reason.lower(), getattr(error, "param", None))


def install(app: FastAPI) -> None:
    app.add_exception_handler(SlipstreamError, _own)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unexpected)


def response_of(error: Exception) -> JSONResponse:
    headers = {}
    if isinstance(error, CapacityExhausted):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = 'Bearer realm="slipstream"'
    return JSONResponse(envelope_of(error), status_of(error), headers)


def _let_go(error: BaseException | None) -> None:
    """Of the frames that it and what led to it came through. They have the request's body and mostly the error itself, so all of
    that would stay until the garbage collector comes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


async def _own(request: Request, error: Exception) -> JSONResponse:
    _let_go(error)
    return response_of(error)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    return response_of(error)  # the server around us logs the traceback


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    _let_go(error)
    allowed = (error.headers or {}).get("Allow", "another method")
    messages = {
        400: "The body cannot be read as JSON: it is not UTF-8, nested too deeply, or has a number of thousands of digits.",
        404: f"There is nothing at {request.url.path}; /openapi.json lists what there is.",
        405: f"{request.method} is not allowed at {request.url.path}; use {allowed}.",
    }
    codes = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
    body = envelope(messages.get(error.status_code, error.detail), error.status_code, codes.get(error.status_code))
    return JSONResponse(body, error.status_code, error.headers)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    _let_go(error)
    first = error.errors()[0]
    inner = (first["ctx"]["name"],) if first["type"] == UNKNOWN_PARAMETER else ()
    param = None if first["type"] == "json_invalid" else param_of((*first["loc"], *inner))
    if param is None and first["type"] != "json_invalid":
        sent = request.headers.get("content-type", "nothing")
        found = "empty" if first["type"] == "missing" else shown(first["input"])
        if sent.partition(";")[0].strip() == "application/json":
            message = f"The body must be a JSON object; it is {found}."
        else:
            message = f"The body must be a JSON object, sent with Content-Type: application/json, which was {sent[:80]!r}."
    else:
        message = _sentence(first, param)
    return JSONResponse(envelope(message, 400, _code(first), param), 400)


def param_of(loc: Sequence[str | int]) -> str | None:
    """("body", "messages", 0, "content") is messages[0].content; None for the body as a whole."""
    path = ""
    for part in loc[1:]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.lstrip(".") or None


def unknown_parameter(param: str, known: Iterable[str]) -> str:
    """Says that `param` is not there, and which of the `known` names of its place it may have been meant to be."""
    near = difflib.get_close_matches(param.rpartition(".")[2], known, n=1, cutoff=0.7)
    return f"{param} is not a parameter that this server supports. Leave it out{f', or write {near[0]}' if near else ''}."


def shown(value: Any) -> str:
    """A value of a body as its sender wrote it, shortened."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return json.dumps(value[:60] if isinstance(value, str) else value, default=repr)[:80]


def _code(error: dict[str, Any]) -> str:
    codes = {UNKNOWN_PARAMETER: UNKNOWN_PARAMETER, "missing": "missing_required_parameter"}
    return codes.get(error["type"], "invalid_value")


def _sentence(error: dict[str, Any], param: str | None) -> str:
    match error["type"]:
        case "json_invalid":
            return f"The body is not valid JSON: {error.get('ctx', {}).get('error', error['msg'])}."
        case "missing":
            return f"{param} is required."
        case "unknown_parameter":
            return unknown_parameter(str(param), error["ctx"]["known"])
        case "value_error":
            return str(error["ctx"]["error"])
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{param} is {shown(error['input'])}; it should be an object."
    why = str(error["msg"]).removeprefix("Input ")
    return f"{param} is {shown(error['input'])}; it {why}." if why != error["msg"] else f"{param} is not usable: {why}."
