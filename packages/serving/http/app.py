"""The FastAPI application, put together from its routers."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI

from serving.generations import Generations
from serving.http import errors
from serving.http.answers import Json
from serving.http.body_limit import BodyLimit
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
) -> FastAPI:
    app = FastAPI(title="Slipstream", redirect_slashes=False)
    app.add_middleware(BodyLimit, max_bytes=max_request_bytes)
    errors.install(app)
    app.include_router(openai_router(model, generations))
    app.include_router(drafters_router(lifecycle))
    app.include_router(health_router(state, describe, metrics))
    return app
