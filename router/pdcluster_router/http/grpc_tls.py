"""TLS of a gRPC port: gRPC makes the handshakes itself, in its own threads and with its own library (BoringSSL).

That library takes fewer kinds of keys than OpenSSL, so each pair is tried before gateways are shown it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import grpc

_STOP_S: Final = 5.0
"""For the end of a server without a connection, which takes 3 ms."""


@dataclass(frozen=True, slots=True)
class GrpcFiles:
    """A certificate with those between it and its authority, its key, and the authorities of clients, each in PEM."""

    cert: bytes
    key: bytes
    ca: bytes | None
    """None: clients need no certificate."""

    def are_usable(self) -> bool:
        """Whether gRPC can show the certificate. Opens a port on loopback for some 3 ms, the only way to ask it."""
        server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
        try:
            server.add_secure_port("127.0.0.1:0", server_credentials(lambda: self))
        except RuntimeError:
            return False
        server.start()  # A server that was never started leaves its port open.
        server.stop(None).wait(_STOP_S)
        return True


def server_credentials(current: Callable[[], GrpcFiles]) -> grpc.ServerCredentials:
    """Credentials that show the files of now to each new connection.

    ``current``: gRPC's threads call it, one at a time. It must not wait.
    """
    given = current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        if (files := current()) is given:
            return None
        given = files
        return _configuration(files)

    must_show = given.ca is not None
    return grpc.dynamic_ssl_server_credentials(_configuration(given), fetch, require_client_authentication=must_show)


def _configuration(files: GrpcFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(files.key, files.cert)], files.ca)
