"""Spans by OpenTelemetry; import this only where there is something to trace, as it needs the extra `tracing`."""

import threading
from collections.abc import Callable
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import outrider
from outrider.serving.tracing import Attribute, Span, SpanKind, Tracer

_NAME: Final = "outrider"
_EXPORT_S: Final = 5
_CLOSE_S: Final = 2.0
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_KINDS: Final = {
    SpanKind.SERVER: trace.SpanKind.SERVER,
    SpanKind.CLIENT: trace.SpanKind.CLIENT,
    SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
}

_STANDARD: Final = {
    "model": "gen_ai.request.model",
    "num_prompt_tokens": "gen_ai.usage.input_tokens",
    "num_output_tokens": "gen_ai.usage.output_tokens",
    "address": "server.address",
}
"""Names of the semantic conventions; the others are ours."""


class _Span:
    """See `outrider.serving.tracing.Span`."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(self._span, Context()))
        return carrier.get("traceparent", "")

    def set(self, **attributes: Attribute) -> None:
        self._span.set_attributes(_named(attributes))

    def event(self, name: str, **attributes: Attribute) -> None:
        self._span.add_event(name, _named(attributes))

    def end(self, error: str = "", **attributes: Attribute) -> None:
        if not self._span.is_recording():
            return
        self.set(**attributes)
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class _Tracer:
    """See `outrider.serving.tracing.Tracer`.

    Args:
        provider: makes the spans.
        context: what spans without a parent join; None for whatever the program is in.
        close: sends what waits to be sent.
    """

    def __init__(
        self, provider: trace.TracerProvider, context: Context | None, close: Callable[[], None] = lambda: None
    ) -> None:
        self._tracer = provider.get_tracer(_NAME, outrider.__version__)
        self._context = context
        self._close = close

    def start(self, name: str, kind: SpanKind, parent: str = "", **attributes: Attribute) -> Span:
        context = self._context
        if parent:
            context = _PROPAGATOR.extract({"traceparent": parent}, context)
        return _Span(self._tracer.start_span(name, context, _KINDS[kind], _named(attributes)))

    def close(self) -> None:
        self._close()


def exporting_tracer(endpoint: str, service: str) -> Tracer:
    """Returns a tracer that sends its spans by OTLP over gRPC, in a thread of its own; when it cannot, they are lost.

    Args:
        endpoint: http:// or https:// address of the collector.
        service: name of the service.

    Raises:
        ImportError: the SDK, or its exporter, is not installed.
    """
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    about = {"service.namespace": _NAME, "service.name": f"{_NAME}-{service}", "service.version": outrider.__version__}
    provider = TracerProvider(resource=Resource.create(about))
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=_EXPORT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))

    def close() -> None:
        # The SDK tries for half a minute, which a process that ends does not have; after this it gives up.
        patience = threading.Timer(_CLOSE_S, exporter.shutdown)
        patience.start()
        provider.shutdown()
        patience.cancel()

    return _Tracer(provider, Context(), close)


def program_tracer() -> Tracer:
    """Returns a tracer of the provider that the program has set; one of nothing where it has set none."""
    return _Tracer(trace.get_tracer_provider(), None)


def _named(attributes: dict[str, Attribute]) -> dict[str, Attribute]:
    """Returns the attributes under our name, but those that have a standard one."""
    return {_STANDARD.get(name, f"{_NAME}.{name}"): value for name, value in attributes.items()}
