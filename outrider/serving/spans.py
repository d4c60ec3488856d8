"""What spans need beside the API of OpenTelemetry: the context that goes with a request, and the SDK that exports them.

Without an SDK a span is nothing but the context of its parent. The SDK comes with the extra `tracing`; variables of
OpenTelemetry decide how it works, such as `OTEL_TRACES_SAMPLER`. Spans hold times, counts and ids, never a text.
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
"""Makes the spans of a service."""
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_EXPORT_S: Final = 5
_CLOSE_S: Final = 2.0


def context_of(traceparent: str) -> Context:
    """Returns the context for a span that joins this one of another process; without a valid one it begins a trace."""
    return _PROPAGATOR.extract({"traceparent": traceparent}, Context()) if traceparent else Context()


def traceparent_of(span: Span) -> str:
    """Returns the W3C trace context by which spans of other processes join this one; empty where there is no trace."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier.get("traceparent", "")


def log_fields(span: Span) -> dict[str, str]:
    """Returns what log records need to be found by a trace: its id; nothing where there is no trace."""
    context = span.get_span_context()
    return {"trace_id": trace.format_trace_id(context.trace_id)} if context.is_valid else {}


def fail(span: Span, reason: str) -> None:
    """Notes the error that is about to end a span, by the conventions of OpenTelemetry."""
    span.set_attribute("error.type", reason)
    span.set_status(Status(StatusCode.ERROR, reason))


def export_spans(endpoint: str, service: str) -> Callable[[], None]:
    """Has the spans of this process exported; returns what sends those that wait at its end, and blocks for seconds.

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
    """Returns what makes spans and sends them by OTLP over gRPC, from a thread of its own, and what closes it in time.

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
        # The SDK tries for half a minute, which a process that ends does not have; after this it gives up.
        patience = threading.Timer(_CLOSE_S, exporter.shutdown)
        patience.start()
        provider.shutdown()
        patience.cancel()

    return provider, close
