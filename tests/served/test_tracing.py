"""One request, one trace: through client, orchestrator, draft and target, with real processes and a real collector."""

import json
from dataclasses import replace

import pytest
from opentelemetry import trace
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outrider.client import Generation, GenerationRequest, LocalStack
from outrider.parameters import SamplingParameters
from tests.served.stacks import markov_stack, until_all_in_rotation
from tests.serving.collector import Collector, collecting, values

NUM_TOKENS = 300
"""More than the window, so that the target cannot be done before the draft has proposed."""
SERVICES = ("outrider-orchestrator", "outrider-target", "outrider-draft")


@pytest.fixture
def client_spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What the program that the client is part of traces."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


async def test_a_request_is_one_trace(client_spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting() as collector:
        monkeypatch.setenv("OUTRIDER_OTLP_ENDPOINT", collector.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        async with LocalStack(markov_stack()) as stack, stack.client() as client:
            await until_all_in_rotation(stack)
            done = await client.complete(request())
            await collector.until(lambda found: all(found.spans.get(service) for service in SERVICES))
    (whole,) = client_spans.get_finished_spans()
    check(collector, done, format(whole.context.trace_id, "032x"), format(whole.context.span_id, "016x"))


def check(collector: Collector, done: Generation, trace_id: str, client_id: str) -> None:
    spans: dict[str, Span] = {}
    for service in SERVICES:
        (spans[service],) = collector.spans[service]
    served, verified, drafted = (spans[service] for service in SERVICES)
    assert {span.trace_id.hex() for span in spans.values()} == {trace_id}
    assert served.parent_span_id.hex() == client_id
    assert verified.parent_span_id == drafted.parent_span_id == served.span_id
    assert done.accepted is not None and done.statistics is not None
    request_id = done.accepted.request_id
    about = values(served.attributes)
    assert about["outrider.session_id"] == done.accepted.session_id
    assert (about["gen_ai.usage.input_tokens"], about["gen_ai.usage.output_tokens"]) == (3, NUM_TOKENS)
    assert about["outrider.outcome"] == "length"
    assert [event.name for event in served.events if event.name in ("admitted", "target", "first_token")] == [
        "admitted",
        "target",
        "first_token",
    ]
    assert all(values(span.attributes)["outrider.request_id"] == request_id for span in spans.values())
    rounds = values(verified.attributes)
    assert rounds["outrider.num_rounds"] == done.statistics.num_target_passes
    assert rounds["outrider.num_accepted"] == done.statistics.num_accepted_tokens
    assert rounds["gen_ai.usage.output_tokens"] == NUM_TOKENS
    assert float(str(rounds["outrider.model_s"])) > 0
    assert int(str(values(drafted.attributes)["outrider.num_nodes"])) > 0


async def test_log_records_name_request_and_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async with collecting() as collector:
        monkeypatch.setenv("OUTRIDER_OTLP_ENDPOINT", collector.endpoint)
        options = markov_stack()
        environment = {**options.orchestrator_environment, "OUTRIDER_LOG_FORMAT": "json"}
        async with (
            LocalStack(replace(options, orchestrator_environment=environment)) as stack,
            stack.client() as client,
        ):
            done = await client.complete(request())
            log = stack.orchestrators[0].log
        records = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        (ended,) = [record for record in records if record.get("message") == "request ended"]
    assert done.accepted is not None
    assert (ended["request_id"], ended["session_id"]) == (done.accepted.request_id, done.accepted.session_id)
    assert (ended["outcome"], ended["num_output_tokens"], ended["tenant"]) == ("length", NUM_TOKENS, "default")
    (served,) = collector.spans["outrider-orchestrator"]
    assert ended["trace_id"] == served.trace_id.hex()


def request() -> GenerationRequest:
    parameters = SamplingParameters(seed=1, max_tokens=NUM_TOKENS, ignore_eos=True)
    return GenerationRequest(token_ids=(1, 2, 3), parameters=parameters)
