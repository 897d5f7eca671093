"""Hold the gateway's TLS certificates, for REST and gRPC, and read them again while it serves."""

from __future__ import annotations

import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc

from foretoken.errors import ConfigError


@dataclass(frozen=True)
class CertificateFiles:
    """Files in PEM form.

    Attributes:
        certfile: the server's certificate, with those between it and the root.
        keyfile: its private key.
        ca_certs: roots that clients' certificates must lead to; None: clients need none.
    """

    certfile: Path
    keyfile: Path
    ca_certs: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Return a context for REST. Raises ConfigError that names the file."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            # Without a password, OpenSSL would ask for one at the terminal.
            context.load_cert_chain(self.certfile, self.keyfile, password="")
        except OSError as error:
            raise ConfigError(self._fault(error)) from None
        if self.ca_certs is not None:
            try:
                context.load_verify_locations(self.ca_certs)
            except OSError as error:
                raise ConfigError(f"--ssl-ca-certs {self.ca_certs}: cannot be used: {_words(error)}") from None
            # Public calls need no certificate. One that is shown must be good.
            context.verify_mode = ssl.CERT_OPTIONAL
            # A resumed session would not be checked again: its certificate may have expired.
            context.options |= ssl.OP_NO_TICKET
            context.num_tickets = 0
        return context

    def grpc_configuration(self) -> grpc.ServerCertificateConfiguration:
        """Return what gRPC needs of the files, which ``context`` has checked."""
        pair = (self.keyfile.read_bytes(), self.certfile.read_bytes())
        return grpc.ssl_server_certificate_configuration(
            [pair], None if self.ca_certs is None else self.ca_certs.read_bytes()
        )

    def _fault(self, error: OSError) -> str:
        """Return what is wrong with the certificate or its key.

        OpenSSL often says only "PEM lib".
        """
        certificate, key = f"--ssl-certfile {self.certfile}", f"--ssl-keyfile {self.keyfile}"
        if isinstance(error, ssl.SSLError):
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(self.certfile)
            except OSError:
                return f"{certificate}: cannot be used: it holds no certificate in PEM form"
            if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
                return f"{key}: cannot be used: it is not the key of the certificate in {certificate}"
            if "PEM" in str(error):
                return f"{key}: cannot be used: it holds no private key in PEM form without a password"
        return f"{certificate}, {key}: cannot be used: {_words(error)}"


class Certificates:
    """The certificates in use. New connections get the latest; open ones keep theirs."""

    def __init__(self, files: CertificateFiles) -> None:
        """Read the files. Raises ConfigError that names the file at fault."""
        self._files = files
        self.rest = files.context()
        configuration = files.grpc_configuration()
        # Holds what gRPC has not fetched yet. gRPC asks from threads of its own.
        self._unfetched: deque[grpc.ServerCertificateConfiguration] = deque(maxlen=1)
        # The stubs forget that None means no change.
        fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", self._fetch)
        self.grpc = grpc.dynamic_ssl_server_credentials(
            configuration, fetch, require_client_authentication=files.ca_certs is not None
        )

    def reload(self) -> None:
        """Read the files again. Raises ConfigError, and keeps what is in use, for a bad one."""
        self.rest = self._files.context()
        self._unfetched.append(self._files.grpc_configuration())

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Return a new configuration; None while it is the same."""
        try:
            return self._unfetched.pop()
        except IndexError:
            return None


def _words(error: OSError) -> str:
    return error.strerror or str(error)
