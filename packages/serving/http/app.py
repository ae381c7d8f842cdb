"""The FastAPI application, put together from its routers."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from runtime.errors import ConfigError
from serving.auth import Keys
from serving.config import HttpConfig
from serving.generations import Generations
from serving.http import document, errors
from serving.http.answers import Json
from serving.http.body_limit import BodyLimit
from serving.http.deprecation import Deprecations
from serving.http.gate import HttpGate
from serving.http.openai import ServedModel
from serving.http.openai import router as openai_router
from serving.http.operations import drafters_router, health_router
from serving.http.sessions import router as sessions_router
from serving.lifecycle import Lifecycle
from serving.metrics import ServerMetrics
from serving.session_calls import SessionCalls


def create_app(
    model: ServedModel,
    generations: Generations,
    calls: SessionCalls,
    lifecycle: Lifecycle,
    metrics: ServerMetrics,
    config: HttpConfig,
    *,
    state: Callable[[], str],
    describe: Callable[[], Json],
    max_request_bytes: int,
    keys: Keys | None,
    open_probes: bool,
) -> FastAPI:
    app = FastAPI(title="Slipstream", redirect_slashes=False)
    app.add_middleware(BodyLimit, max_bytes=max_request_bytes)
    app.add_middleware(HttpGate, keys=keys, open_probes=open_probes)  # outside of all that reads: nothing of a stranger is read
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-session-id", "Retry-After", "Deprecation", "Sunset", "Link"],
        )
    app.add_middleware(Deprecations, endpoints=config.deprecated)
    errors.install(app)
    document.install(app)
    app.include_router(openai_router(model, generations, config.request_timeout_s))
    app.include_router(sessions_router(calls, config.request_timeout_s))
    app.include_router(drafters_router(lifecycle))
    app.include_router(health_router(state, describe, metrics))
    for endpoint in config.deprecated:
        if endpoint.path not in (paths := app.openapi()["paths"]):
            raise ConfigError(
                f"http.deprecated.path is {endpoint.path!r}, which is no endpoint; it is one of {', '.join(paths)}."
            )
    return app
