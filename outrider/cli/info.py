"""`outrider info`: the workers of an orchestrator, their load, and why one is out of rotation."""

import asyncio
import json
from typing import Any

import click
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table

from outrider.cli.connection import client_of
from outrider.cli.examples import ExampleCommand
from outrider.cli.options import required_address_option
from outrider.errors import OutriderError
from outrider.serving.channel import open_channel
from outrider.serving.status import peer_errors
from outrider.v1 import generation_pb2, worker_pb2
from outrider.v1.worker_pb2_grpc import WorkerServiceStub

_LOAD_TIMEOUT_S = 2.0
_FINGERPRINT_LEN = 12

Worker = tuple[generation_pb2.WorkerStatus, worker_pb2.GetLoadResponse | None]


@click.command(
    cls=ExampleCommand,
    short_help="Show targets and drafts, and why one is out of rotation.",
    examples=(
        "outrider info --address 127.0.0.1:50050",
        "outrider info --address 127.0.0.1:50050 --json",
    ),
)
@required_address_option
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object.")
def info(addresses: tuple[str, ...], wants_json: bool) -> None:
    """Show every target and draft: model, fingerprints, limits, load, and why one is kept out of rotation.

    The load comes from each worker directly; it is missing where a worker cannot be reached from here.
    """
    models, workers = asyncio.run(_ask(addresses))
    if wants_json:
        click.echo(json.dumps(_as_json(models, workers)))
        return
    console = Console()
    for worker in workers:
        console.print(_table(*worker))
    console.print(f"num_speculative_tokens by default: {models.default_num_speculative_tokens}")


async def _ask(addresses: tuple[str, ...]) -> tuple[generation_pb2.ListModelsResponse, list[Worker]]:
    async with client_of(addresses) as client:
        models = await client.list_models()
    loads = await asyncio.gather(*(_load(worker.address) for worker in models.workers))
    return models, list(zip(models.workers, loads, strict=True))


async def _load(address: str) -> worker_pb2.GetLoadResponse | None:
    """Return the worker's load; None where it cannot be reached."""
    async with open_channel(address) as channel:
        try:
            with peer_errors():
                stub = WorkerServiceStub(channel)
                return await stub.GetLoad(worker_pb2.GetLoadRequest(), timeout=_LOAD_TIMEOUT_S)
        except OutriderError:
            return None


def _as_json(models: generation_pb2.ListModelsResponse, workers: list[Worker]) -> dict[str, Any]:
    described = []
    for status, load in workers:
        entry = _plain(status)
        entry["load"] = _plain(load) if load is not None else None
        described.append(entry)
    return {"workers": described, "default_num_speculative_tokens": models.default_num_speculative_tokens}


def _plain(message: Any) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def _table(status: generation_pb2.WorkerStatus, load: worker_pb2.GetLoadResponse | None) -> Table:
    about = status.info
    role = worker_pb2.WorkerRole.Name(about.role).removeprefix("WORKER_ROLE_").lower()
    state = "in rotation" if status.in_rotation else f"out of rotation: {status.reason}"
    table = Table(title=f"{role} {status.address}", title_justify="left", show_header=False, min_width=60)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in {"state": state, **_identity(about), **_limits(about), **_load_rows(load)}.items():
        if value:
            table.add_row(name, value)
    return table


def _identity(about: worker_pb2.GetInfoResponse) -> dict[str, str]:
    return {
        "replica": about.replica,
        "model": about.model,
        "drafter": about.drafter,
        "made for target": about.target_fingerprint[:_FINGERPRINT_LEN],
        "model fingerprint": about.model_fingerprint[:_FINGERPRINT_LEN],
        "tokenizer fingerprint": about.tokenizer_fingerprint[:_FINGERPRINT_LEN],
        "numerics": about.numerics,
        "features": _features(about),
        "acceptance rules": ", ".join(about.acceptance_rules),
        "version": about.version,
    }


def _features(about: worker_pb2.GetInfoResponse) -> str:
    """Return the target's layers whose features a draft reads, and their bytes a token."""
    if not about.feature_layers:
        return ""
    layers = ", ".join(map(str, about.feature_layers))
    return f"of target layers {layers}: {2 * len(about.feature_layers) * about.hidden_size:,} bytes a token"


def _limits(about: worker_pb2.GetInfoResponse) -> dict[str, str]:
    limits = {
        "token ids in the vocabulary": about.vocabulary_size,
        "tokens in a session": about.max_session_len,
        "sessions at once": about.max_sessions,
        "nodes in a proposal": about.max_proposal_nodes,
        "KV cache bytes": about.kv_budget_bytes,
    }
    return {f"at most: {name}": f"{value:,}" for name, value in limits.items() if value}


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def _load_rows(load: worker_pb2.GetLoadResponse | None) -> dict[str, str]:
    if load is None:
        return {"load": "unknown"}
    draining = ", draining" if load.draining else ""
    return {
        "sessions": f"{load.num_active_sessions} generating, {load.num_cached_sessions} cached{draining}",
        "KV cache": f"{_mib(load.kv_used_bytes)} in use, {_mib(load.kv_reusable_bytes)} reusable",
        "prefix cache hits": f"{load.num_prefix_hit_tokens:,} tokens",
        "evictions": f"{load.num_evicted_pages:,} pages evicted, {load.num_preemptions:,} sessions preempted",
        "since the start": f"{load.num_passes:,} passes, {load.num_tokens:,} tokens",
        "time in the model": f"{load.model_time_s:,.1f} s",
        "stale messages": f"{load.num_stale_messages:,}",
        **_block_rows(load),
    }


def _block_rows(load: worker_pb2.GetLoadResponse) -> dict[str, str]:
    if not load.HasField("kv_blocks"):
        return {}
    blocks = load.kv_blocks
    return {
        "KV blocks": f"{blocks.num_written:,} written, {blocks.num_restored:,} restored",
        "KV blocks lost": f"{blocks.num_dropped:,} dropped, {blocks.num_refused:,} refused, "
        f"{blocks.num_failures:,} calls failed",
        "restoring": f"{_mib(int(min(blocks.restore_bytes_per_s, 2.0**62)))} a second, as measured",
    }
