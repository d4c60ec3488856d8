"""Spans, as a real collector gets them."""

import asyncio
import sys

import pytest
from opentelemetry import trace
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.trace import SpanKind

from outrider.errors import InvalidArgument
from outrider.serving.spans import TRACER, context_of, export_spans, exporting, fail, log_fields, traceparent_of
from tests.serving.collector import collecting, values

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


def test_without_an_endpoint_nothing_is_traced() -> None:
    export_spans("", "target")()
    span = TRACER.start_span("verify", context_of(""))
    assert not span.is_recording()
    assert (traceparent_of(span), log_fields(span)) == ("", {})
    joined = TRACER.start_span("verify", context_of(PARENT))
    assert not joined.is_recording()
    assert (traceparent_of(joined), log_fields(joined)) == (PARENT, {"trace_id": TRACE_ID}), "a caller's goes on"


def test_an_endpoint_needs_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InvalidArgument, match="extra `tracing`") as caught:
        export_spans("http://127.0.0.1:1", "target")
    assert caught.value.field == "otlp_endpoint"


async def test_a_span_joins_the_trace_that_it_is_told_of() -> None:
    async with collecting() as collector:
        provider, close = exporting(collector.endpoint, "target")
        tracer = provider.get_tracer("outrider")
        span = tracer.start_span("verify", context_of(PARENT), SpanKind.SERVER)
        assert log_fields(span) == {"trace_id": TRACE_ID}
        inner = tracer.start_span("inner", context_of(traceparent_of(span)))
        fail(inner, "FENCED")
        inner.end()
        span.end()
        await asyncio.to_thread(close)
        found = {item.name: item for item in collector.spans["outrider-target"]}
    outer, inside = found["verify"], found["inner"]
    assert {item.trace_id.hex() for item in (outer, inside)} == {TRACE_ID}
    assert outer.parent_span_id.hex() == "b7ad6b7169203331"
    assert inside.parent_span_id == outer.span_id
    assert (outer.kind, inside.kind) == (Span.SPAN_KIND_SERVER, Span.SPAN_KIND_INTERNAL)
    assert values(inside.attributes) == {"error.type": "FENCED"}
    assert (inside.status.code, inside.status.message) == (Status.STATUS_CODE_ERROR, "FENCED")
    assert outer.status.code == Status.STATUS_CODE_UNSET


@pytest.mark.parametrize("parent", ["", "nonsense", "00-" + "0" * 32 + "-b7ad6b7169203331-01"])
async def test_without_a_valid_parent_a_trace_begins(parent: str) -> None:
    async with collecting() as collector:
        provider, close = exporting(collector.endpoint, "orchestrator")
        provider.get_tracer("outrider").start_span("generate", context_of(parent)).end()
        await asyncio.to_thread(close)
        (span,) = collector.spans["outrider-orchestrator"]
    assert span.parent_span_id == b""
    assert any(span.trace_id)


async def test_a_collector_that_is_away_holds_nobody_up() -> None:
    provider, close = exporting("http://127.0.0.1:9", "draft")
    tracer = provider.get_tracer("outrider")
    for _ in range(10_000):
        tracer.start_span("draft").end()
    async with asyncio.timeout(5):
        await asyncio.to_thread(close)


def test_a_program_without_a_tracer_of_its_own_sends_no_context() -> None:
    assert traceparent_of(trace.get_tracer("outrider").start_span("outrider.generate")) == ""
