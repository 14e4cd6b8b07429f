"""TLS of a gRPC port: gRPC makes the handshakes itself, in its own threads and with its own library (BoringSSL).

That library takes fewer kinds of keys than OpenSSL, and gateways like Envoy use it, too. It reads keys of Ed25519 and
P-521, but makes no handshake with them. So the kind of each key is judged, and gRPC tries each pair.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import grpc

from pdcluster_router.files.pem import LONG_KEYS
from pdcluster_router.files.public_key import key_kind_of

_KINDS: Final = ("ECDSA with P-256", "ECDSA with P-384")
_LEAST_RSA_BITS: Final = 2048
"""OpenSSL refuses shorter ones too, at its security level 2. Some builds of it have a lower level."""
_ANY_PORT: Final = "127.0.0.1:0"
_STOP_S: Final = 0.2
"""For the end of a trial alone, which takes 3 ms as a whole. The event loop waits meanwhile, so this is short. By then
the pair has been judged, and gRPC ends a server that takes longer by itself."""


@dataclass(frozen=True, slots=True)
class GrpcFiles:
    """A certificate with those between it and its authority, its key, and the authorities of clients, each in PEM."""

    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes | None
    """None: clients need no certificate."""

    def fault(self) -> str:
        """Why gateways cannot be shown the certificate, and the cure; empty: they can."""
        kind, rsa_bits = key_kind_of(self.cert.decode("ascii", "ignore"))
        if rsa_bits and rsa_bits < _LEAST_RSA_BITS:
            return f"the key is RSA with {rsa_bits} bits, which is too short: {LONG_KEYS}"
        if not rsa_bits and kind not in _KINDS:
            return f"the key is {kind}, with which Envoy and gRPC make no handshake: {LONG_KEYS}"
        return self._fault_in_trial()

    def _fault_in_trial(self) -> str:
        """Opens a port on loopback for some 3 ms: gRPC can be asked in no other way."""
        server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
        try:
            server.add_secure_port(_ANY_PORT, server_credentials(lambda: self))
            return ""
        except RuntimeError:
            return _why_not(server)
        finally:
            server.start()  # A server that was never started leaves its port open.
            server.stop(None).wait(_STOP_S)


def _why_not(server: grpc.Server) -> str:
    """gRPC has one error for all. A port without TLS tells files that it cannot read from a lack of descriptors."""
    try:
        server.add_insecure_port(_ANY_PORT)
    except RuntimeError:
        return "gRPC can open no port on 127.0.0.1 to try them: let this process open more files (ulimit -n)"
    return "gRPC cannot read them: have them issued anew"


def server_credentials(current: Callable[[], GrpcFiles]) -> grpc.ServerCredentials:
    """Credentials that show the files of now to each new connection.

    Clients that must show a certificate show it at each connection: gRPC would resume a client's session, even when its
    certificate has expired since, but with the keys of a new configuration it cannot. It costs no time with one
    authority, and some 2 ms with 140 (0053).

    ``current``: gRPC's threads call it, one at a time. It must not wait.
    """
    given = current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        before, given = given, current()
        return None if given is before and not must_show else _configuration(given)

    must_show = given.ca is not None
    return grpc.dynamic_ssl_server_credentials(_configuration(given), fetch, require_client_authentication=must_show)


def _configuration(files: GrpcFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(files.key, files.cert)], files.ca)
