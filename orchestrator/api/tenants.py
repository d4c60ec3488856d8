"""Tenants: their bearer tokens and limits, from a file that is reloaded when it changes."""

import hashlib
import hmac
import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError

from outrider.errors import InvalidArgument, Unauthenticated
from outrider.tenants import DEFAULT_TENANT

_LOG: Final = logging.getLogger(__name__)
_RELOAD_INTERVAL_S: Final = 1.0
_SCHEME: Final = "bearer "
_HASHED: Final = "sha256:"
_HEADER: Final = "authorization"


class Limits(BaseModel):
    """Limits of a tenant, over all orchestrators of one Redis; 0 is no limit.

    Attributes:
        max_sessions: sessions that exist at once.
        max_streams: requests that generate at once.
        tokens_per_minute: output tokens, beyond which new requests are refused within the same minute.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_sessions: NonNegativeInt = 0
    max_streams: NonNegativeInt = 0
    tokens_per_minute: NonNegativeInt = 0

    @property
    def is_unlimited(self) -> bool:
        """Whether no usage has to be counted."""
        return not (self.max_sessions or self.max_streams or self.tokens_per_minute)


class Tenant(Limits):
    """A tenant.

    Attributes:
        name: owner of its sessions.
        tokens: its bearer tokens; or `sha256:` and the digest of one in hexadecimal, so that the file holds no secret.
    """

    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")] = DEFAULT_TENANT
    tokens: tuple[Annotated[str, Field(min_length=8)], ...] = ()


_FILE: Final = TypeAdapter(dict[str, dict[str, object]])


class Tenants:
    """The tenants of a file, which is reloaded when it changes.

        {"acme": {"tokens": ["sha256:..."], "max_streams": 20, "tokens_per_minute": 100000}, "other": {...}}

    Args:
        path: the file; without one, every caller is the tenant `default`, without limits.

    Raises:
        InvalidArgument: the file cannot be read, is not valid, or has no token.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._checked_s = time.monotonic()
        self._stamp = 0
        self._known: list[tuple[bytes, Tenant]] = []
        self._default = Tenant()
        if path is not None:
            self._stamp, self._known = path.stat().st_mtime_ns if path.exists() else 0, _read(path)

    def of(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Tenant:
        """Return the tenant of a call, by the bearer token in its metadata.

        Raises:
            Unauthenticated: the token is missing or invalid.
        """
        if self._path is None:
            return self._default
        self._reload(self._path)
        given = [value for name, value in metadata or () if name.lower() == _HEADER and isinstance(value, str)]
        if len(given) != 1 or not given[0].lower().startswith(_SCHEME):
            raise Unauthenticated("the call has no bearer token")
        digest = hashlib.sha256(given[0][len(_SCHEME) :].strip().encode()).digest()
        # All are compared, each in constant time, so that the time reveals nothing about any of them.
        found = [tenant for known, tenant in self._known if hmac.compare_digest(known, digest)]
        if not found:
            raise Unauthenticated("invalid token")
        return found[0]

    def _reload(self, path: Path) -> None:
        now = time.monotonic()
        if now - self._checked_s < _RELOAD_INTERVAL_S:
            return
        self._checked_s = now
        try:
            stamp = path.stat().st_mtime_ns
            if stamp != self._stamp:
                self._known = _read(path)
                self._stamp = stamp
                _LOG.info("tenants reloaded", extra={"num_tenants": len({t.name for _, t in self._known})})
        except (OSError, InvalidArgument) as error:
            _LOG.error("tenants not reloaded: %s", error)


def _read(path: Path) -> list[tuple[bytes, Tenant]]:
    try:
        fields = _FILE.validate_json(path.read_bytes())
        tenants = [Tenant.model_validate({**_plain(values), "name": name}) for name, values in fields.items()]
        digests = [(_digest(token), tenant) for tenant in tenants for token in tenant.tokens]
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}", "tenants_file") from error
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise InvalidArgument(f"{path}: {where}: {problem['msg']}", "tenants_file") from error
    except ValueError as error:
        raise InvalidArgument(f"{path}: {error}", "tenants_file") from error
    if not digests:
        raise InvalidArgument(f"{path} has no tenant with a token, so every call would be refused", "tenants_file")
    if len({digest for digest, _ in digests}) < len(digests):
        raise InvalidArgument(f"{path}: it has a token twice", "tenants_file")
    return digests


def _plain(values: Mapping[str, object]) -> dict[str, object]:
    if "name" in values:
        raise ValueError("a tenant's name is its key")
    return dict(values)


def _digest(token: str) -> bytes:
    if not token.startswith(_HASHED):
        return hashlib.sha256(token.encode()).digest()
    digest = bytes.fromhex(token.removeprefix(_HASHED))
    if len(digest) != hashlib.sha256().digest_size:
        raise ValueError("a digest after sha256: has 64 hexadecimal digits")
    return digest
