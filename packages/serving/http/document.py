"""The OpenAPI document: FastAPI's own, with the refusals that every endpoint has, and without the 422 that none sends."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

_REFUSALS = {
    "400": "A field that cannot be honoured; `param` names it.",
    "401": "No key, or one that is not the server's.",
    "403": "A key that may not do this.",
    "404": "A name that means nothing here.",
    "409": "Not as things stand: a busy session, another history, a rejected drafter.",
    "413": "A body larger than server.max_request_mib.",
    "429": "Too many generations; Retry-After says when to try again.",
    "500": "The server failed; its log has the cause.",
    "503": "The server is stopping, or its engine failed.",
    "504": "http.request_timeout_s is over.",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code", "param"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "code": {"type": ["string", "null"]},
                "param": {"type": ["string", "null"]},
            },
        }
    },
}
_PROBES = ("/livez", "/readyz", "/healthz")
_STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/sessions/{session_id}/generate")


def install(app: FastAPI) -> None:
    """Replace the document that `app` writes of itself."""
    write = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _completed(write())
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _completed(document: dict[str, Any]) -> dict[str, Any]:
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Error"] = _ERROR
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)
            if path in _STREAMS:
                responses["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
            for status, text in _REFUSALS.items():
                # A probe answers 503 with its own body.
                responses.setdefault(status, {"description": text} | ({} if path in _PROBES else {"content": content}))
    return document
