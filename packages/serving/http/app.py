"""The FastAPI application, put together from its routers."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI

from serving.auth import Keys
from serving.generations import Generations
from serving.http import errors
from serving.http.answers import Json
from serving.http.body_limit import BodyLimit
from serving.http.gate import HttpGate
from serving.http.openai import ServedModel
from serving.http.openai import router as openai_router
from serving.http.operations import drafters_router, health_router
from serving.lifecycle import Lifecycle
from serving.metrics import ServerMetrics


def create_app(
    model: ServedModel,
    generations: Generations,
    lifecycle: Lifecycle,
    metrics: ServerMetrics,
    *,
    state: Callable[[], str],
    describe: Callable[[], Json],
    max_request_bytes: int,
    keys: Keys | None,
    open_probes: bool,
) -> FastAPI:
    app = FastAPI(title="Slipstream", redirect_slashes=False)
    app.add_middleware(BodyLimit, max_bytes=max_request_bytes)
    app.add_middleware(HttpGate, keys=keys, open_probes=open_probes)  # the outermost: nothing of a stranger is read
    errors.install(app)
    app.include_router(openai_router(model, generations))
    app.include_router(drafters_router(lifecycle))
    app.include_router(health_router(state, describe, metrics))
    return app
