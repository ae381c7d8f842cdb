"""ASGI middleware that marks endpoints as going: RFC 9745's Deprecation, RFC 8594's Sunset, and a link to what replaces them.

Every response of such an endpoint bears the headers, refusals included.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime
from email.utils import format_datetime

from starlette.datastructures import MutableHeaders
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.config import DeprecatedEndpoint


class Deprecations:
    def __init__(self, app: ASGIApp, endpoints: Sequence[DeprecatedEndpoint]) -> None:
        self._app = app
        self._headers = [(compile_path(endpoint.path)[0], headers_of(endpoint)) for endpoint in endpoints]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].rstrip("/") if scope["type"] == "http" else ""
        stamps = next((headers for pattern, headers in self._headers if pattern.match(path)), None)
        if stamps is None:
            await self._app(scope, receive, send)
            return

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in stamps.items():
                    headers.append(name, value)
            await send(message)

        await self._app(scope, receive, stamped)


def headers_of(endpoint: DeprecatedEndpoint) -> dict[str, str]:
    since = datetime.now(UTC) if endpoint.since is None else _midnight(endpoint.since)
    return {
        "Deprecation": f"@{int(since.timestamp())}",
        "Sunset": format_datetime(_midnight(endpoint.sunset), usegmt=True),
        "Link": f'<{endpoint.successor}>; rel="successor-version"',
    }


def _midnight(day: str) -> datetime:
    return datetime.combine(date.fromisoformat(day), datetime.min.time(), UTC)
