"""OpenTelemetry traces, for who wants them (`pip install slipstream[otel]`, `tracing.endpoint=URL`): a span per HTTP request,
and in it one per generation, with the field's own attribute names where there are some. No text and no token is in a span.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from runtime.errors import ConfigError
from runtime.types import Done, Event, Failed, Started, Tokens

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

NOT_TRACED = "livez,readyz,healthz,metrics"  # probes would drown the rest


class Tracing:
    def __init__(self, provider: TracerProvider, model: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("slipstream")
        self._model = model

    @staticmethod
    def to(endpoint: str, model: str) -> Tracing:
        """Send spans to an OTLP collector over HTTP. ConfigError if the extra is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor  # noqa: F401, needed by `instrument`
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"tracing.endpoint is {endpoint!r}, which needs OpenTelemetry: pip install 'slipstream[otel]' ({error})."
            ) from error
        provider = TracerProvider(resource=Resource.create({"service.name": "slipstream"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return Tracing(provider, model)

    def instrument(self, app: FastAPI) -> None:
        """Let every HTTP request have a span."""
        from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor

        FastAPIInstrumentor.instrument_app(app, tracer_provider=self._provider, excluded_urls=NOT_TRACED)

    def new_request(self) -> GenerationSpan:
        """The span of a generation that was just asked for, inside the span of the request that asks."""
        return GenerationSpan(self._tracer.start_span("generation", attributes={"gen_ai.request.model": self._model}))

    def stop(self) -> None:
        """Send what waits."""
        self._provider.shutdown()


class GenerationSpan:
    def __init__(self, span: Any) -> None:
        self._span = span
        self._has_tokens = False

    def see(self, event: Event, at: float) -> None:
        if isinstance(event, Started):
            self._span.add_event("started")  # a permit and a place in the batch are there
            self._span.set_attribute("slipstream.session_id", event.session_id)
        elif isinstance(event, Tokens) and not self._has_tokens:
            self._has_tokens = True
            self._span.add_event("first token")
        elif isinstance(event, Done):
            stats, usage = event.speculation, event.usage
            self._span.set_attributes(
                {
                    "gen_ai.usage.input_tokens": usage.prompt_tokens,
                    "gen_ai.usage.output_tokens": usage.completion_tokens,
                    "gen_ai.response.finish_reasons": [event.finish_reason],
                    "slipstream.cached_tokens": usage.cached_tokens,
                    "slipstream.steps": stats.num_steps,
                    "slipstream.accepted": stats.num_accepted,
                    "slipstream.mean_acceptance_length": stats.mean_acceptance_length,
                    "slipstream.drafter_versions": list(event.drafter_versions),
                }
            )
            self._span.end()
        elif isinstance(event, Failed):
            self._span.record_exception(event.error)
            self._span.end()
