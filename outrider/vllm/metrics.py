"""Prometheus metrics of the plug-in, beside vLLM's own."""

from collections.abc import Iterable

from prometheus_client import Metric

from outrider.serving.metrics import MetricsServer, Readings, counter, gauge, new_registry
from outrider.vllm.remote_drafts import RemoteDrafts


def expose(address: str, source: RemoteDrafts) -> str:
    """Expose a source's metrics over HTTP until the process ends; return the bound address.

    Raises:
        InvalidArgument: the address is not host:port.
        Unavailable: it cannot be bound.
    """
    registry = new_registry("vllm")
    registry.register(Readings(lambda: _present(source)))
    return MetricsServer(address, registry).start()


def _present(source: RemoteDrafts) -> Iterable[Metric]:
    counts, thread = source.counts, source.thread
    yield gauge("vllm_drafts_connected", "Drafts in rotation.", thread.num_connected)
    yield gauge("vllm_requests_drafted", "Requests whose session a draft has opened.", len(thread.ready))
    yield counter("vllm_steps", "Steps of vLLM's engine.", counts.num_steps)
    yield counter("vllm_proposed_tokens", "Tokens that drafts proposed.", counts.num_proposed)
    yield counter("vllm_verified_tokens", "Of these, those that vLLM verified.", counts.num_verified)
    yield counter("vllm_accepted_tokens", "Of these, those that vLLM accepted.", counts.num_accepted)
    yield counter("vllm_wait_seconds", "Seconds that steps waited for proposals.", counts.wait_s)
    yield counter("vllm_waits", "Steps that waited for proposals.", counts.num_waits)
    yield counter("vllm_silent_waits", "Of these, those in which nothing arrived.", counts.num_silent_waits)
    yield counter("vllm_drafts_lost", "Times that a request lost its draft.", thread.counts.num_lost)
    yield counter(
        "vllm_refused_proposals", "Parts of proposals that were no tokens of vLLM's.", thread.counts.num_refused_parts
    )
