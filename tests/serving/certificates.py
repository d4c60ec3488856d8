"""Certificates of an authority that lives as long as a test."""

from pathlib import Path

import trustme

from outrider.serving.tls import TlsFiles


class Authority:
    """Issues certificates into a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._authority = trustme.CA()
        self.file = folder / "authority.pem"
        self._authority.cert_pem.write_to_path(self.file)

    def issue(self, name: str, *hosts: str) -> tuple[Path, Path]:
        """Writes a new certificate and its key; returns the files, which are the same for the same name.

        It is for these hosts, or for this machine where there are none.
        """
        issued = self._authority.issue_cert(*(hosts or ("127.0.0.1", "localhost")), common_name=name)
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        # Renamed into place, as whoever renews certificates does.
        for path, content in ((certificate, b"".join(item.bytes() for item in issued.cert_chain_pems)), (key, None)):
            partial = path.with_suffix(".partial")
            partial.write_bytes(content if content is not None else issued.private_key_pem.bytes())
            partial.replace(path)
        return certificate, key

    def files(self, name: str, *, trusts: bool = True) -> TlsFiles:
        """Issues a certificate, for a side that asks the other one for a certificate of this authority too."""
        return TlsFiles(*self.issue(name), self.file if trusts else None)
