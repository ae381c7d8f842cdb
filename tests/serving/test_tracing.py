"""Traces arrive at a real OTLP collector: one span per request, one per generation inside it, and no text in either."""

from __future__ import annotations

import gzip
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from runtime.errors import ConfigError
from serving.config import TracingConfig
from serving.tracing import Tracing

from .conftest import StartServer

SECRET = "the-secret-word"


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Its URL, and the spans that came."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_generation_is_a_span_inside_its_requests_span(start_server: StartServer) -> None:
    with collector() as (url, spans):
        running = start_server(tracing=TracingConfig(endpoint=url))
        with running.openai() as openai:
            openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": SECRET}], max_tokens=6)
        running.stop()
        running.ended.result(timeout=30)
    [generation] = [span for span in spans if span.name == "generation"]
    parents = {span.span_id: span for span in spans}
    assert "/v1/chat/completions" in parents[generation.parent_span_id].name
    attributes = {item.key: item.value for item in generation.attributes}
    assert attributes["gen_ai.usage.output_tokens"].int_value <= 6
    assert attributes["slipstream.steps"].int_value >= 1
    assert [event.name for event in generation.events] == ["started", "first token"]
    assert SECRET not in str(spans)


def test_without_the_extra_it_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"slipstream\[otel\]"):
        Tracing.to("http://127.0.0.1:1/v1/traces", "tiny")


def test_the_endpoint_must_be_a_url() -> None:
    with pytest.raises(ConfigError, match=r"tracing\.endpoint"):
        TracingConfig(endpoint="collector:4318")
