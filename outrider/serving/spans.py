"""Spans of requests: trace context between processes, and the setup of OpenTelemetry's SDK where there is an endpoint.

A span is made for each request, and no pass pays for one: a target's ends with the sums of its rounds. Without an SDK
spans are no-ops. The SDK comes with the extra `tracing` and is configured by its own variables, such as
`OTEL_TRACES_SAMPLER`. Spans hold times, counts and ids, never a text.
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import outrider
from outrider.errors import InvalidArgument

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

TRACER: Final = trace.get_tracer("outrider", outrider.__version__)
"""The tracer of this process's spans."""
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_EXPORT_S: Final = 5
_CLOSE_S: Final = 2.0


def context_of(traceparent: str) -> Context:
    """Return the context for a span below one of another process; an empty one, which begins a trace, if invalid."""
    return _PROPAGATOR.extract({"traceparent": traceparent}, Context()) if traceparent else Context()


def traceparent_of(span: Span) -> str:
    """Return the W3C trace context by which spans of other processes join this one; empty where there is no trace."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier.get("traceparent", "")


def log_fields(span: Span) -> dict[str, str]:
    """Return the trace id as log fields; none where there is no trace."""
    context = span.get_span_context()
    return {"trace_id": trace.format_trace_id(context.trace_id)} if context.is_valid else {}


def fail(span: Span, reason: str) -> None:
    """Record the error that ends a span, by the conventions of OpenTelemetry."""
    span.set_attribute("error.type", reason)
    span.set_status(Status(StatusCode.ERROR, reason))


def export_spans(endpoint: str, service: str) -> Callable[[], None]:
    """Export the spans of this process; return a function that sends the remaining ones and blocks for 2 s at most.

    Args:
        endpoint: see `exporting`; empty exports nothing.
        service: name of the service.

    Raises:
        InvalidArgument: the extra `tracing` is not installed.
    """
    if not endpoint:
        return lambda: None
    try:
        provider, close = exporting(endpoint, service)
    except ImportError as error:
        raise InvalidArgument(f"needs the extra `tracing` of outrider ({error})", "otlp_endpoint") from None
    trace.set_tracer_provider(provider)
    return close


def exporting(endpoint: str, service: str) -> "tuple[TracerProvider, Callable[[], None]]":
    """Return a provider that exports spans by OTLP over gRPC from a thread of its own, and the function that closes it.

    Spans that cannot be sent are lost.

    Args:
        endpoint: http:// or https:// address of an OpenTelemetry collector.
        service: name of the service.

    Raises:
        ImportError: the SDK, or its exporter, is not installed.
    """
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = {"service.namespace": "outrider", "service.name": f"outrider-{service}"}
    provider = TracerProvider(resource=Resource.create({**name, "service.version": outrider.__version__}))
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=_EXPORT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))

    def close() -> None:
        # The SDK would retry for half a minute, longer than a process that drains has.
        patience = threading.Timer(_CLOSE_S, exporter.shutdown)
        patience.start()
        provider.shutdown()
        patience.cancel()

    return provider, close
