"""The names of `OUTRIDER_` environment variables, and the error messages for unknown and retired ones.

Several processes often share an environment, so each accepts the names of all. The list stands here, below the
services, which do not import each other; a test compares it with their settings.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from difflib import SequenceMatcher
from typing import Final

PREFIX: Final = "OUTRIDER_"

NAMES: Final[tuple[str, ...]] = (
    "acceptance_rule",
    "adaptive_speculation",
    "address",
    "colocated_drafter",
    "colocated_model",
    "colocated_num_layers",
    "compile",
    "device",
    "draft_max_wait_s",
    "draft_retry_s",
    "drafter",
    "drafts",
    "drain_budget_s",
    "dtype",
    "durability",
    "engine",
    "engine_args",
    "failover_timeout_s",
    "generation_config",
    "health_address",
    "http_address",
    "http_hosts",
    "http_origins",
    "idle_ttl_s",
    "invariant",
    "keepalive_s",
    "kubeconfig",
    "kv_blocks",
    "kv_blocks_secret_file",
    "kv_blocks_timeout_s",
    "kv_blocks_url",
    "kv_budget_bytes",
    "lease_s",
    "log_format",
    "log_level",
    "lookahead",
    "max_active_requests",
    "max_connection_age_s",
    "max_decode_slowdown",
    "max_nodes",
    "max_queue_s",
    "max_queued_requests",
    "max_session_len",
    "max_sessions",
    "metrics_address",
    "model",
    "num_layers",
    "num_speculative_tokens",
    "num_threads",
    "otlp_endpoint",
    "quantization",
    "ready_file",
    "redis_timeout_s",
    "redis_url",
    "reflection",
    "replica",
    "served_model_names",
    "session_ttl_s",
    "suffix_scope",
    "target",
    "targets",
    "tenants_file",
    "tls_authority",
    "tls_certificate",
    "tls_key",
    "token",
    "worker_tls_authority",
)
"""The settings of all services, and what the command line reads; as fields, in alphabetical order."""

_FORGETTING: Final = "workers forget idle sessions by themselves, after OUTRIDER_IDLE_TTL_S"
_SLOWDOWN: Final = "OUTRIDER_MAX_DECODE_SLOWDOWN bounds how long prompts hold others up"
RETIRED: Final[Mapping[str, str]] = {
    "colocated_kv_budget_bytes": "it is a quarter of OUTRIDER_KV_BUDGET_BYTES, in addition",
    "connect_timeout_s": "it follows from OUTRIDER_KEEPALIVE_S",
    "dns_interval_s": "names are asked for every five seconds",
    "draft_p_min": "a request sets its own draft_p_min",
    "draft_tls_name": "certificates of drafts have the host or service that OUTRIDER_DRAFTS names",
    "draft_top_k": "a draft samples from its 64 most likely tokens",
    "drain_delay_s": "let a preStop hook of the pod sleep",
    "durability_timeout_s": "a commit waits for two seconds at most",
    "durable_replicas": "the number is part of OUTRIDER_DURABILITY, as in replicas:2",
    "housekeeping_interval_s": _FORGETTING,
    "housekeeping_lease": _FORGETTING,
    "keepalive_timeout_s": "it follows from OUTRIDER_KEEPALIVE_S",
    "kv_block_queue_bytes": "256 MiB of KV blocks wait to be written at most",
    "kv_block_ttl_s": "an unused KV block is gone after an hour, or when its Redis is full",
    "load_interval_s": "it follows from OUTRIDER_KEEPALIVE_S",
    "lookahead_nodes": "it is OUTRIDER_LOOKAHEAD",
    "max_cached_sessions": "it is 16 times OUTRIDER_MAX_SESSIONS",
    "max_concurrent_streams": "a connection has 1,024 calls at most",
    "max_connection_grace_s": "it is OUTRIDER_MAX_CONNECTION_AGE_S, 600 at most",
    "max_message_bytes": "messages have 4 MiB at most",
    "max_pass_rows": f"a pass has 1,024 rows at most; {_SLOWDOWN}",
    "max_pass_s": "a pass takes ten minutes at most",
    "max_proposal_nodes": "a worker holds 1,024 nodes of a proposal",
    "max_step_s": "a step of a draft takes a minute at most",
    "min_ping_interval_s": "it follows from OUTRIDER_KEEPALIVE_S",
    "ngram_max": "n-grams have 2 to 5 tokens",
    "ngram_min": "n-grams have 2 to 5 tokens",
    "prefill_chunk_len": f"a pass has 512 tokens of a prompt at most; {_SLOWDOWN}",
    "target_tls_name": "certificates of targets have the host or service that OUTRIDER_TARGETS names",
    "tree_nodes": "it is OUTRIDER_MAX_NODES",
    "window": "a target runs 64 uncommitted tokens ahead at most",
}
"""Retired settings, and what to do instead: the end of a sentence that begins with the name."""

_LINK: Final = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
"""Variables that Kubernetes injects into pods for a Service named outrider, or outrider-...; in capitals."""


def complaints(variables: Iterable[str], own: Collection[str], retired: Mapping[str, str] = RETIRED) -> list[str]:
    """Return an error message for each variable that begins with `OUTRIDER_` and is unknown or retired.

    Args:
        variables: names of environment variables; their case does not matter, as it does not to settings.
        own: settings of this process, which may be missing in `NAMES`.
        retired: what to do instead of a retired name.
    """
    known = {name.upper() for name in (*NAMES, *own)}
    found = [name for name in sorted(variables) if name.upper().startswith(PREFIX)]
    strange = [name for name in found if not _is_known(name.upper().removeprefix(PREFIX), known)]
    return [_complaint(name, known, retired) for name in strange]


def _is_known(name: str, known: Collection[str]) -> bool:
    return name in known or _LINK.fullmatch(name) is not None


def _complaint(variable: str, known: Collection[str], retired: Mapping[str, str]) -> str:
    name = variable.upper().removeprefix(PREFIX)
    if name.lower() in retired:
        return f"{variable} is no setting any more: {retired[name.lower()]}"
    # The first of equals, so that the message is always the same.
    nearest = max(sorted(known), key=lambda other: SequenceMatcher(None, name, other).ratio())
    return f"{variable} is no setting; the nearest is {PREFIX}{nearest}"
