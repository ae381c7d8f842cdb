"""ASGI middleware that lets a request pass if its key may make it; without one it is a 401 before its body is read."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.errors import SlipstreamError
from serving.auth import Keys, authorize
from serving.http.errors import response_of

PROBES = frozenset({"/livez", "/readyz", "/healthz", "/metrics", "/openapi.json"})
ADMIN = "/v1/drafters"


class HttpGate:
    """Leaves the caller's key in `request.state.key`."""

    def __init__(self, app: ASGIApp, keys: Keys | None, open_probes: bool) -> None:
        self._app = app
        self._keys = keys
        self._open = PROBES if open_probes else frozenset()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open:
            path = scope["path"]
            needs_admin = path == ADMIN or path.startswith(f"{ADMIN}/")
            try:
                key = authorize(self._keys, Headers(scope=scope).get("authorization"), needs_admin=needs_admin)
            except SlipstreamError as error:
                await response_of(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["key"] = key
        await self._app(scope, receive, send)
