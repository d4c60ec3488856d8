"""Traces: a span for each process that a request passes, joined by the W3C trace context that goes with the request.

Nothing is traced unless a process is told where to send its spans. Then it needs the extra `tracing`, and variables of
OpenTelemetry decide the rest, such as `OTEL_TRACES_SAMPLER`. Spans tell times, counts and ids, never a text.
"""

import sys
from enum import Enum
from typing import Protocol

from outrider.errors import InvalidArgument

Attribute = str | bool | int | float


class SpanKind(Enum):
    """Which end of a call a span is about."""

    SERVER = "server"
    CLIENT = "client"
    INTERNAL = "internal"


class Span(Protocol):
    """A part of a request's way. Its methods may be called from any thread; they never wait, and never fail."""

    @property
    def traceparent(self) -> str:
        """What has spans of other processes join this one; empty where nothing is traced."""

    def set(self, **attributes: Attribute) -> None:
        """Notes what has become known of the whole."""

    def event(self, name: str, **attributes: Attribute) -> None:
        """Notes that something happens now."""

    def end(self, error: str = "", **attributes: Attribute) -> None:
        """Ends the span; a second end changes nothing.

        Args:
            error: reason of the error that ended it; empty where it is none.
            attributes: what there is to say of the whole.
        """


class Tracer(Protocol):
    """Makes spans."""

    def start(self, name: str, kind: SpanKind, parent: str = "", **attributes: Attribute) -> Span:
        """Begins a span.

        Args:
            name: what it is about.
            kind: which end of a call it is.
            parent: `traceparent` of the span that it joins; without a valid one it begins a trace.
            attributes: what is known of it.
        """

    def close(self) -> None:
        """Sends what waits to be sent. Blocks, for some seconds at most."""


class NoSpan:
    """The span of what is not traced."""

    traceparent = ""

    def set(self, **attributes: Attribute) -> None:
        """Does nothing."""

    def event(self, name: str, **attributes: Attribute) -> None:
        """Does nothing."""

    def end(self, error: str = "", **attributes: Attribute) -> None:
        """Does nothing."""


class NoTracer:
    """Traces nothing."""

    _SPAN = NoSpan()

    def start(self, name: str, kind: SpanKind, parent: str = "", **attributes: Attribute) -> Span:
        """Returns a span that is none."""
        return self._SPAN

    def close(self) -> None:
        """Does nothing."""


def new_tracer(endpoint: str, service: str) -> Tracer:
    """Returns what traces a process.

    Args:
        endpoint: http:// or https:// address of an OpenTelemetry collector that takes OTLP over gRPC; empty traces
            nothing.
        service: name of the service.

    Raises:
        InvalidArgument: the extra `tracing` is not installed.
    """
    if not endpoint:
        return NoTracer()
    try:
        from outrider.serving.opentelemetry import exporting_tracer

        return exporting_tracer(endpoint, service)
    except ImportError as error:
        raise InvalidArgument(f"needs the extra `tracing` of outrider ({error})", "otlp_endpoint") from None


def ambient_tracer() -> Tracer:
    """Returns what joins the traces that the program makes by itself, where it has OpenTelemetry; for clients."""
    if "opentelemetry" not in sys.modules:
        return NoTracer()
    from outrider.serving.opentelemetry import program_tracer

    return program_tracer()


def log_fields(traceparent: str) -> dict[str, str]:
    """Returns what log records need to be found by a trace: its id; nothing where nothing is traced."""
    parts = traceparent.split("-")
    return {"trace_id": parts[1]} if len(parts) > 1 else {}
