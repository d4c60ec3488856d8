"""Spans, as a real collector gets them."""

import asyncio
import sys

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from outrider.errors import InvalidArgument
from outrider.serving.tracing import NoTracer, SpanKind, ambient_tracer, log_fields, new_tracer
from tests.serving.collector import collecting, values

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


def test_without_an_endpoint_nothing_is_traced() -> None:
    tracer = new_tracer("", "target")
    assert isinstance(tracer, NoTracer)
    span = tracer.start("verify", SpanKind.INTERNAL, PARENT)
    assert (span.traceparent, log_fields(span.traceparent)) == ("", {})


def test_an_endpoint_needs_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InvalidArgument, match="extra `tracing`") as caught:
        new_tracer("http://127.0.0.1:1", "target")
    assert caught.value.field == "otlp_endpoint"


async def test_a_span_joins_the_trace_that_it_is_told_of() -> None:
    async with collecting() as collector:
        tracer = new_tracer(collector.endpoint, "target")
        span = tracer.start("verify", SpanKind.SERVER, PARENT, request_id="r", num_prompt_tokens=3)
        assert log_fields(span.traceparent) == {"trace_id": TRACE_ID}
        inner = tracer.start("inner", SpanKind.INTERNAL, span.traceparent)
        inner.event("first_token", address="a:1")
        inner.end("FENCED")
        inner.end()
        span.set(num_rounds=4)
        span.end(wait_s=0.5)
        await asyncio.to_thread(tracer.close)
        found = {item.name: item for item in collector.spans["outrider-target"]}
    outer, inside = found["verify"], found["inner"]
    assert len(collector.spans["outrider-target"]) == 2, "each ends once"
    assert {item.trace_id.hex() for item in (outer, inside)} == {TRACE_ID}
    assert outer.parent_span_id.hex() == "b7ad6b7169203331"
    assert inside.parent_span_id == outer.span_id
    assert (outer.kind, inside.kind) == (Span.SPAN_KIND_SERVER, Span.SPAN_KIND_INTERNAL)
    assert values(outer.attributes) == {
        "outrider.request_id": "r",
        "gen_ai.usage.input_tokens": 3,
        "outrider.num_rounds": 4,
        "outrider.wait_s": 0.5,
    }
    assert (inside.status.code, inside.status.message) == (Status.STATUS_CODE_ERROR, "FENCED")
    assert outer.status.code == Status.STATUS_CODE_UNSET
    assert [(event.name, values(event.attributes)) for event in inside.events] == [
        ("first_token", {"server.address": "a:1"})
    ]


@pytest.mark.parametrize("parent", ["", "nonsense", "00-" + "0" * 32 + "-b7ad6b7169203331-01"])
async def test_without_a_valid_parent_a_trace_begins(parent: str) -> None:
    async with collecting() as collector:
        tracer = new_tracer(collector.endpoint, "orchestrator")
        tracer.start("generate", SpanKind.SERVER, parent).end()
        await asyncio.to_thread(tracer.close)
        (span,) = collector.spans["outrider-orchestrator"]
    assert span.parent_span_id == b""
    assert any(span.trace_id)


async def test_a_collector_that_is_away_holds_nobody_up() -> None:
    tracer = new_tracer("http://127.0.0.1:9", "draft")
    for _ in range(10_000):
        tracer.start("draft", SpanKind.INTERNAL).end()
    async with asyncio.timeout(5):
        await asyncio.to_thread(tracer.close)


def test_a_program_without_a_tracer_of_its_own_sends_no_context() -> None:
    assert ambient_tracer().start("outrider.generate", SpanKind.CLIENT).traceparent == ""
