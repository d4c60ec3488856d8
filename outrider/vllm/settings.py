"""Settings of the plug-in for vLLM: from the environment only, since vLLM has the command line."""

from pathlib import Path

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from outrider.discovery.endpoints import KubernetesPlace, parse_place
from outrider.errors import InvalidArgument
from outrider.serving.settings import Listed
from outrider.serving.tls import TlsFiles
from outrider.serving.variables import PREFIX


class DraftingSettings(BaseSettings):
    """Drafts for a vLLM server: where they are, and how its scheduler uses them."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", env_ignore_empty=True)

    drafts: Listed = Field(
        (),
        description="Places of the drafts, with commas between several: host:port or dns:///host:port.",
        validate_default=True,
    )
    lookahead: int = Field(
        64, ge=0, le=1024, description="Maximum number of nodes that a draft proposes ahead of vLLM's tokens."
    )
    draft_max_wait_s: float = Field(
        0.1,
        ge=0,
        le=60,
        description="Longest wait of a step for proposals, in seconds; 0 never waits.",
    )
    adaptive_speculation: bool = Field(
        True, description="Wait for proposals, and verify them, only where that is measured to pay."
    )
    draft_retry_s: float = Field(
        1.0, gt=0, le=600, description="Seconds until a request that lost its draft uses another one."
    )
    keepalive_s: float = Field(
        20.0, ge=1, le=7200, description="Seconds of silence after which a draft is pinged; see the orchestrator's."
    )
    tls_certificate: Path | None = Field(None, description="PEM file with the certificate that drafts are shown.")
    tls_key: Path | None = Field(None, description="PEM file with the certificate's private key.")
    worker_tls_authority: Path | None = Field(
        None, description="PEM file with the certificate authorities of the drafts; with it, they are called with TLS."
    )
    metrics_address: str = Field(
        "", description="Plain HTTP address that exposes the plug-in's Prometheus metrics, at /metrics; empty: none."
    )

    @field_validator("drafts")
    @classmethod
    def _check_drafts(cls, places: tuple[str, ...]) -> tuple[str, ...]:
        if not places:
            raise ValueError("must name a draft at least, such as host:port")
        for place in places:
            try:
                parsed = parse_place(place, "drafts")
            except InvalidArgument as error:
                raise ValueError(error.message) from None
            # vLLM's environment has no client of Kubernetes; a headless service has a name with all addresses.
            if isinstance(parsed, KubernetesPlace):
                raise ValueError(f"{place!r} must be host:port or dns:///host:port here")
        return places

    @model_validator(mode="after")
    def _check(self) -> "DraftingSettings":
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together")
        return self

    @property
    def worker_tls(self) -> TlsFiles | None:
        """Certificate for drafts and their authorities; None where they are called without TLS."""
        if self.worker_tls_authority is None:
            return None
        return TlsFiles(self.tls_certificate, self.tls_key, self.worker_tls_authority)
