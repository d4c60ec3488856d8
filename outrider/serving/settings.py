"""Settings of a process: read once from the environment (prefix OUTRIDER_) and the command line, checked, frozen."""

import argparse
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from outrider.errors import InvalidArgument
from outrider.serving.tls import TlsFiles
from outrider.serving.variables import PREFIX, complaints

SettingsT = TypeVar("SettingsT", bound=BaseSettings)

_CACHED_PER_ACTIVE: Final = 16
"""Sessions that are remembered for each that may run. A conversation waits for its user far longer than it runs, and an
idle session costs little beside its KV cache, which has a budget of its own."""


def _split(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


Listed = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""Type of a setting that holds several values, written with commas between them."""


class ServingSettings(BaseSettings):
    """Settings of every gRPC process; each service adds its own."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", env_ignore_empty=True, protected_namespaces=()
    )

    address: str = Field("127.0.0.1:0", description="Address to listen on, as host:port; port 0 takes a free one.")
    tls_certificate: Path | None = Field(
        None, description="PEM file with this service's certificate chain; with it, the address speaks TLS only."
    )
    tls_key: Path | None = Field(None, description="PEM file with the certificate's private key.")
    tls_authority: Path | None = Field(
        None,
        description="PEM file with the authorities of callers' certificates; with it, callers without one are refused.",
    )
    health_address: str = Field(
        "", description="Plain address that answers health checks only, for probes that present no certificate."
    )
    reflection: bool = Field(
        False,
        description="Answer gRPC server reflection, by which grpcurl and others list services and messages; no "
        "token is required.",
    )
    metrics_address: str = Field(
        "", description="Plain HTTP address that exposes Prometheus metrics, at /metrics; empty disables them."
    )
    otlp_endpoint: str = Field(
        "",
        pattern=r"^(https?://\S+)?$",
        description="Address of an OpenTelemetry collector that gets a span of each request by OTLP over gRPC, such as "
        "http://collector:4317; needs the extra `tracing`. Empty traces nothing.",
    )
    ready_file: Path | None = Field(
        None, description="File that gets the bound address once the process is serving, and is removed when it drains."
    )
    drain_budget_s: float = Field(
        25.0, gt=0, le=3600, description="Seconds from SIGTERM to the end, at most; below the pod's grace period."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Minimum log level.")
    log_format: Literal["json", "text"] = Field("json", description="One JSON object or one line of text per record.")
    keepalive_s: float = Field(
        20.0,
        ge=1,
        le=7200,
        description="Seconds of silence after which a peer is pinged; one that does not answer for as long again, five "
        "at most, is given up. Orchestrators give a connection to a worker as long, and poll its load ten times as "
        "often, every two seconds at least.",
    )
    max_connection_age_s: float | None = Field(
        None,
        ge=1,
        le=604800,
        description="Seconds after which a client is asked to connect anew, so that new pods get load; calls may go on "
        "for as long again, 600 at most.",
    )

    @model_validator(mode="after")
    def _check_tls(self) -> "ServingSettings":
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together")
        if self.tls_authority is not None and self.tls_certificate is None:
            raise ValueError("tls_authority needs tls_certificate")
        return self

    @property
    def tls(self) -> TlsFiles:
        """The certificates of this service."""
        return TlsFiles(self.tls_certificate, self.tls_key, self.tls_authority)


class WorkerSettings(ServingSettings):
    """Settings that targets and drafts share."""

    replica: str = Field("", description="Name of this replica; empty takes the host's name and the process id.")
    max_sessions: int = Field(
        256, ge=1, le=65536, description="Sessions that run at once, at most; 16 times as many are remembered."
    )
    idle_ttl_s: float = Field(900.0, gt=0, le=604800, description="Seconds that an idle session is remembered.")

    @property
    def replica_name(self) -> str:
        """Name of this replica."""
        return self.replica or f"{socket.gethostname()}-{os.getpid()}"

    @property
    def max_cached_sessions(self) -> int:
        """Most sessions that are remembered, running or idle."""
        return _CACHED_PER_ACTIVE * self.max_sessions


def load_settings(kind: type[SettingsT], arguments: Sequence[str] | None = None, *, program: str) -> SettingsT:
    """Return the settings: the command line before the environment, the environment before the defaults.

    `--help` prints every setting and ends the process with 0; wrong values print a line each and end it with 2. So do
    variables that begin with `OUTRIDER_` and that no process reads, and end it with 1.

    Args:
        kind: the settings class.
        arguments: the command line without the program's name; None takes the process's own.
        program: the command as a user types it, such as "python -m target_service".
    """
    parser = _parser(kind, program)
    given = vars(parser.parse_args(arguments))
    if strange := complaints(os.environ, kind.model_fields):
        print(*(f"{program}: {complaint}" for complaint in strange), sep="\n", file=sys.stderr)
        raise SystemExit(1)
    try:
        return kind(**given)
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_input=False):
            print(f"{program}: {_where(problem['loc'])}{problem['msg']}", file=sys.stderr)
        raise SystemExit(2) from None


def environment_settings(kind: type[SettingsT]) -> SettingsT:
    """Return the settings of a process that has no command line of its own: from the environment, else the defaults.

    Args:
        kind: the settings class.

    Raises:
        InvalidArgument: a value is wrong, or a variable begins with `OUTRIDER_` and no process reads it.
    """
    if strange := complaints(os.environ, kind.model_fields):
        raise InvalidArgument("; ".join(strange), "environment")
    try:
        return kind()
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        lines = [
            f"{PREFIX}{str(item['loc'][0]).upper()}: {item['msg']}" if item["loc"] else item["msg"] for item in problems
        ]
        raise InvalidArgument("; ".join(lines), "environment") from None


def settings_table(kind: type[BaseSettings]) -> str:
    """Return the settings as a Markdown table; docs/settings.md is made of it."""
    rows = [
        f"| `{PREFIX}{name.upper()}` | {_default(field, '`{}`')} | {_explained(field)} |"
        for name, field in kind.model_fields.items()
    ]
    return "\n".join(["| variable | default | meaning |", "|---|---|---|", *rows]) + "\n"


def _parser(kind: type[BaseSettings], program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=(kind.__doc__ or "").partition("\n")[0],
        epilog=f"Each option can be given as an environment variable too: --log-level is {PREFIX}LOG_LEVEL.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for name, field in kind.model_fields.items():
        text = f"{_explained(field)} (default: {_default(field, '{}')})".replace("%", "%%")
        parser.add_argument(_option(name), dest=name, metavar=_metavar(field), help=text)
    return parser


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _where(location: tuple[int | str, ...]) -> str:
    """Return how the user wrote the setting; nothing for a rule over several settings."""
    name = str(location[0]) if location else ""
    return f"{_option(name)} ({PREFIX}{name.upper()}): " if name else ""


def _default(field: FieldInfo, form: str) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "unset"
    if isinstance(value, tuple | list):
        value = ",".join(str(part) for part in value)
    text = str(value.value if isinstance(value, Enum) else value)
    return form.format(text) if text else "empty"


def _explained(field: FieldInfo) -> str:
    """Return the description with the bounds behind it."""
    bounds = ", ".join(_bounds(field))
    return f"{field.description or ''} [{bounds}]" if bounds else field.description or ""


def _bounds(field: FieldInfo) -> Iterator[str]:
    choices = [str(value.value if isinstance(value, Enum) else value) for value in _choices(field.annotation)]
    if choices:
        yield ", ".join(choices)
    for constraint in field.metadata:
        for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            if (bound := getattr(constraint, attribute, None)) is not None:
                yield f"{sign} {bound:g}" if isinstance(bound, float) else f"{sign} {bound}"


def _choices(annotation: Any) -> list[object]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return list(annotation)
    if get_origin(annotation) in (Union, UnionType):
        return [choice for part in get_args(annotation) for choice in _choices(part)]
    return []


def _metavar(field: FieldInfo) -> str:
    parts = get_args(field.annotation) if get_origin(field.annotation) in (Union, UnionType) else (field.annotation,)
    named = [part for part in parts if part is not NoneType and isinstance(part, type)]
    return named[0].__name__.upper() if named and not issubclass(named[0], Enum) else "VALUE"
