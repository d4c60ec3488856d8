"""Settings of the orchestrator process."""

import re
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, field_validator, model_validator

from orchestrator.store.connection import Durability, DurabilityLevel
from outrider.discovery.endpoints import parse_place
from outrider.errors import InvalidArgument
from outrider.parameters import AcceptanceRule
from outrider.serving.settings import Listed, ServingSettings
from outrider.serving.tls import TlsFiles

# Disks sync every second; a replica or disk that takes twice as long has failed.
_DURABILITY_TIMEOUT_S: Final = 2.0
_DURABILITY: Final = re.compile(r"none|disk|(disk|replicas):([1-9]|1[0-6])")


class OrchestratorSettings(ServingSettings):
    """The orchestrator service: forwards proposals and verdicts, commits to Redis, streams to clients."""

    targets: Listed = Field(
        (),
        description="Places of the targets, with commas between several: host:port, dns:///host:port (all addresses of "
        "a name) or kubernetes://[NAMESPACE]/SERVICE:PORT (the pods of a service, watched).",
    )
    drafts: Listed = Field((), description="Places of the drafts, as for targets; none means plain decoding.")
    kubeconfig: Path | None = Field(
        None, description="Kubeconfig file for kubernetes:// places outside a cluster; unset uses the pod's account."
    )
    worker_tls_authority: Path | None = Field(
        None,
        description="PEM file with the certificate authorities of the workers; with it, calls of workers use TLS, with "
        "this service's own certificate. Theirs must have the host or service that TARGETS and DRAFTS name.",
    )
    tenants_file: Path | None = Field(
        None,
        description="JSON file with tenants, their tokens and limits; with it, calls without a valid token are "
        "refused.",
    )
    replica: str = Field(
        "",
        max_length=253,
        pattern=r"^[A-Za-z0-9._:-]*$",
        description="Name of this orchestrator, in the header X-Outrider-Replica of its responses; empty sends none.",
    )
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="URL of the Redis or Valkey with the sessions; rediss:// uses TLS, with ?ssl_ca_certs=FILE for an "
        "authority that the system does not trust.",
    )
    redis_timeout_s: float = Field(1.0, gt=0, le=60, description="Timeout of each Redis call, in seconds.")
    durability: str = Field(
        "none",
        description="Condition for a commit: none (Redis has it), replicas:N (N replicas have it too; WAIT), disk or "
        "disk:N (Redis and N replicas have it on disk; WAITAOF, which takes up to a second with `appendfsync "
        "everysec`). A commit that takes over two seconds is UNAVAILABLE.",
    )
    lease_s: float = Field(10.0, ge=0.5, le=600, description="Seconds until a lease that is not renewed ends.")
    session_ttl_s: float = Field(86400.0, ge=1, le=31536000, description="Seconds until an unused session expires.")
    num_speculative_tokens: int = Field(
        5, ge=0, le=64, description="Maximum number of tokens of a proposal's main line that a round verifies."
    )
    lookahead: int = Field(
        64,
        ge=0,
        le=1024,
        description="Maximum number of nodes that a draft proposes ahead of the target's verdicts; 0 lets drafts wait "
        "for each verdict, for draft and target on the same cores.",
    )
    http_address: str = Field(
        "", description="Address of the HTTP API, as host:port; port 0 takes a free one, empty serves no HTTP."
    )
    http_hosts: Listed = Field(
        (),
        description="Names that the Host of an HTTP request may have, with commas between several. By default a "
        "loopback address takes `localhost` and addresses, so that no web page reaches it by a name of its own; any "
        "other address takes all names.",
    )
    http_origins: Listed = Field(
        (), description="Origins of web pages that may call the HTTP API, such as https://chat.example; others may not."
    )
    served_model_names: Listed = Field(
        (),
        description="Names of the model over HTTP, with commas between several; the default is the target's hub id, or "
        "the name of its folder.",
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="Defaults of sampling parameters: auto takes those of the model's generation_config.json, none "
        "does not.",
    )
    acceptance_rule: AcceptanceRule = Field(
        AcceptanceRule.COUPLED,
        description="Acceptance rule of requests that name none, where the targets serve it; targets that embed a "
        "serving engine serve `engine` only.",
    )
    draft_max_wait_s: float = Field(
        0.1,
        ge=0,
        le=60,
        description="Longest wait of the target for a proposal, in seconds; after it, the round is plain decoding.",
    )
    max_active_requests: int = Field(
        256, ge=1, le=65536, description="Maximum number of requests that generate at once."
    )
    max_queued_requests: int = Field(
        256, ge=0, le=65536, description="Maximum number of requests that wait for admission."
    )
    max_queue_s: float = Field(30.0, ge=0, le=3600, description="Longest wait for admission, in seconds.")
    failover_timeout_s: float = Field(
        15.0, gt=0, le=600, description="Longest time without any target before a request fails as UNAVAILABLE."
    )
    draft_retry_s: float = Field(
        1.0, gt=0, le=600, description="Seconds until a request that lost its draft uses another one."
    )

    @model_validator(mode="after")
    def _check_places(self) -> "OrchestratorSettings":
        for field in ("targets", "drafts"):
            for place in getattr(self, field):
                try:
                    parse_place(place, field)
                except InvalidArgument as error:
                    raise ValueError(error.message) from None
        return self

    @field_validator("durability")
    @classmethod
    def _check_durability(cls, text: str) -> str:
        _parse_durability(text)
        return text

    @property
    def durable(self) -> Durability:
        """The condition for a commit."""
        return _parse_durability(self.durability)

    @property
    def worker_tls(self) -> TlsFiles | None:
        """Certificate for workers and their authorities; None where they are called without TLS."""
        if self.worker_tls_authority is None:
            return None
        return TlsFiles(self.tls_certificate, self.tls_key, self.worker_tls_authority)


def _parse_durability(text: str) -> Durability:
    if not _DURABILITY.fullmatch(text):
        raise ValueError(f"{text!r} is none of none, disk, disk:N and replicas:N, with N from 1 to 16")
    level, _, num = text.partition(":")
    return Durability(DurabilityLevel(level), int(num or 0), _DURABILITY_TIMEOUT_S)
