"""TLS between processes, with certificates from files that may be renewed while the process runs.

A server checks its files at every handshake, an orchestrator at every connection to a worker, so renewal needs no
restart; a client reads them when it first connects to an address.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

import grpc

from outrider.errors import InvalidArgument

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one side of a connection.

    Attributes:
        certificate: the own certificate chain; None presents none.
        key: its private key.
        authority: certificates of the authorities that the other side's certificate must come from. A client without
            any takes the system's; a server without any asks for no certificate.
    """

    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise InvalidArgument("certificate and key go together", "tls_key")

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return a client's credentials from the present content of the files.

        Raises:
            InvalidArgument: a file cannot be read.
        """
        return grpc.ssl_channel_credentials(_read(self.authority), _read(self.key), _read(self.certificate))

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return a server's credentials; each handshake checks whether the files have changed.

        Raises:
            InvalidArgument: there is no certificate, or a file cannot be read.
        """
        if self.certificate is None:
            raise InvalidArgument("a server needs a certificate", "tls_certificate")
        renewal = _Renewal(self)
        # The stubs lack that a fetcher may return None.
        fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", renewal.renewed)
        return grpc.dynamic_ssl_server_credentials(renewal.configuration(), fetch, self.authority is not None)


@dataclass(slots=True)
class _Renewal:
    """Reads a server's files anew once they have changed."""

    files: TlsFiles
    _known: Sequence[tuple[int, int]] = field(default_factory=tuple)

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        self._known = self._stamps()
        pair = (_read(self.files.key) or b"", _read(self.files.certificate) or b"")
        return grpc.ssl_server_certificate_configuration([pair], _read(self.files.authority))

    def renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the new configuration; None, which keeps the old one, where nothing has changed or can be read."""
        try:
            return None if self._stamps() == self._known else self.configuration()
        except (OSError, InvalidArgument) as error:
            _LOG.warning("the certificates could not be reloaded, the old ones stay in use: %s", error)
            return None

    def _stamps(self) -> Sequence[tuple[int, int]]:
        files = (self.files.certificate, self.files.key, self.files.authority)
        found = [path.stat() for path in files if path is not None]
        return [(status.st_mtime_ns, status.st_ino) for status in found]


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}", "tls") from error
