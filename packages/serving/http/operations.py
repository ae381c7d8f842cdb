"""What operators and their tools call: drafter versions, health, metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from runtime.eagle3 import RejectReason
from runtime.errors import DrafterRejected
from runtime.registry import DrafterEntry, LifecycleEvent
from serving.http.answers import Json
from serving.http.errors import NotFound
from serving.lifecycle import Lifecycle
from serving.metrics import ServerMetrics


def drafters_router(lifecycle: Lifecycle) -> APIRouter:
    """Listing reads the registry's files, activating loads weights: both are plain functions, which run in threads."""
    routes = APIRouter(prefix="/v1/drafters")

    @routes.get("")
    def list_drafters() -> Json:
        return {
            "object": "list",
            "active": lifecycle.active_version,
            "data": [_entry(entry) for entry in lifecycle.entries()],
            "history": [_event(event) for event in lifecycle.history()],
        }

    @routes.post("/{version}/activate")
    def activate(version: str) -> Json:
        try:
            event = lifecycle.activate(version)
        except DrafterRejected as error:
            if error.reason == RejectReason.UNKNOWN_VERSION:
                raise NotFound(error.message, "drafter_not_found", "version") from error
            raise
        return {"object": "drafter.activation", **_event(event)}

    return routes


def health_router(state: Callable[[], str], describe: Callable[[], Json], metrics: ServerMetrics) -> APIRouter:
    """state: "serving", "stopping" or "failed"."""
    routes = APIRouter()

    @routes.get("/livez")
    async def livez() -> Json:
        return {"status": "alive"}

    @routes.get("/readyz")
    async def readyz() -> JSONResponse:
        now = state()
        return JSONResponse({"status": now}, 200 if now == "serving" else 503)

    @routes.get("/healthz")
    async def healthz() -> JSONResponse:
        now = state()
        return JSONResponse({"status": now, **describe()}, 200 if now == "serving" else 503)

    @routes.get("/metrics", response_class=PlainTextResponse)
    def scrape() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return routes


def _entry(entry: DrafterEntry) -> dict[str, Any]:
    return {
        "version": entry.version,
        "state": entry.state.value,
        "reason": entry.reason or None,
        "active": entry.is_active,
        "embedded": entry.is_embedded,
        "parent": entry.parent,
        "step": entry.step,
        "metrics": dict(entry.metrics),
        "created_at": entry.created_at,
    }


def _event(event: LifecycleEvent) -> dict[str, Any]:
    return {
        "event": event.kind,
        "version": event.version,
        "previous": event.previous,
        "reason": event.reason,
        "message": event.message,
        "seconds": event.seconds,
        "at": event.at,
    }
