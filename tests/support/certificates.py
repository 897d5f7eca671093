"""Makes certificates with openssl, for tests of TLS. No key outlives a test's folder."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

LOCAL = "DNS:localhost,IP:127.0.0.1"


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, as PEM files."""

    chain: Path
    key: Path


class Authority:
    """An authority of its own, with its key in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.certificate = folder / "ca.pem"
        self._key = self._new_key("ca")
        self._openssl(
            *("req", "-x509", "-new", "-key", str(self._key), "-subj", "/CN=authority of a test"),
            *("-days", "2", "-out", str(self.certificate)),
        )

    def issue(self, name: str, *, names: str = LOCAL, days: int = 2, usage: str = "serverAuth,clientAuth") -> Issued:
        """Sign a certificate.

        ``names``: its alternative names; ``days``: negative for one that has expired.
        """
        key, chain, request = self._new_key(name), self._folder / f"{name}.pem", self._folder / f"{name}.csr"
        extensions = self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={names}\nextendedKeyUsage={usage}\n")
        self._openssl("req", "-new", "-key", str(key), "-subj", f"/CN={name}", "-out", str(request))
        self._openssl(
            *("x509", "-req", "-in", str(request), "-CA", str(self.certificate), "-CAkey", str(self._key)),
            *("-CAcreateserial", "-days", str(days), "-extfile", str(extensions), "-out", str(chain)),
        )
        return Issued(chain, key)

    def encrypted(self, key: Path) -> Path:
        """Return a copy of a key that needs a password."""
        copy = key.with_suffix(".locked")
        self._openssl("pkey", "-in", str(key), "-aes256", "-passout", "pass:secret", "-out", str(copy))
        return copy

    def _new_key(self, name: str) -> Path:
        key = self._folder / f"{name}.key"
        self._openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", str(key))
        return key

    def _openssl(self, *words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True)
