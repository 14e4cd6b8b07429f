"""The handshakes of a gRPC server: what is shown, to whom, and by which versions of TLS."""

from __future__ import annotations

import os
import resource
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from fakes.certificates import FOR_CLIENTS, KINDS, Authority, Issued
from patience import PATIENCE_S
from pdcluster_router.http.grpc_tls import GrpcFiles, server_credentials

LIFE_S = 5.0
"""Of a certificate that is to expire: enough for a handshake on a busy machine."""


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca.crt")


def files_of(issued: Issued, ca: bytes | None = None) -> GrpcFiles:
    return GrpcFiles(issued.pem, issued.key_pem(), ca)


@contextmanager
def listening(shown: list[GrpcFiles]) -> Iterator[int]:
    """The port of a server that shows the last of the files."""
    server = grpc.server(ThreadPoolExecutor(1))
    port: int = server.add_secure_port("127.0.0.1:0", server_credentials(lambda: shown[-1]))
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait(PATIENCE_S)


def client(authority: Authority) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.ca))
    context.set_alpn_protocols(["h2"])
    return context


def shown_at(port: int, context: ssl.SSLContext) -> bytes:
    """The certificate that a client is shown, once the server has said that it takes the client's, too."""
    with (
        socket.create_connection(("127.0.0.1", port), PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as over_tls,
    ):
        if not over_tls.recv(9):  # The head of HTTP/2's settings.
            raise ConnectionResetError("the server has closed the connection")
        return over_tls.getpeercert(binary_form=True) or b""


def der_of(issued: Issued) -> bytes:
    return ssl.PEM_cert_to_DER_cert(issued.pem.decode())


def test_each_new_connection_is_shown_the_files_of_now(authority: Authority) -> None:
    first, second = authority.issue(), authority.issue()
    shown = [files_of(first)]
    with listening(shown) as port:
        assert [shown_at(port, client(authority)) for _ in range(2)] == [der_of(first)] * 2
        shown.append(files_of(second))
        assert [shown_at(port, client(authority)) for _ in range(2)] == [der_of(second)] * 2


def test_a_client_must_show_a_certificate_of_the_authority_of_now(authority: Authority, tmp_path: Path) -> None:
    other, server, own = Authority(tmp_path / "other.crt", "other"), authority.issue(), client(authority)
    shown = [files_of(server, other.ca.read_bytes())]
    with listening(shown) as port:
        with pytest.raises(OSError):  # an alert or a reset, whatever comes first
            shown_at(port, own)
        own.load_cert_chain(*authority.issue(usage=FOR_CLIENTS).write(tmp_path / "own").values())
        with pytest.raises(OSError):  # as above
            shown_at(port, own)
        shown.append(files_of(server, authority.ca.read_bytes()))
        assert shown_at(port, own) == der_of(server)


EACH_VERSION = pytest.mark.parametrize(
    "version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=lambda one: one.name
)


def session_after(
    port: int, context: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> tuple[ssl.SSLSession | None, bool]:
    """The session of a new connection, and whether it went on with ``session``.

    Raises:
        OSError: The server does not take the client.
    """
    with (
        socket.create_connection(("127.0.0.1", port), PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as over_tls,
    ):
        if not over_tls.recv(9):  # As above.
            raise ConnectionResetError("the server has closed the connection")
        return over_tls.session, bool(over_tls.session_reused)


@EACH_VERSION
@pytest.mark.parametrize("must_show", [False, True], ids=["TLS", "mTLS"])
def test_a_session_goes_on_only_where_clients_need_no_certificate(
    must_show: bool, version: ssl.TLSVersion, authority: Authority, tmp_path: Path
) -> None:
    context = client(authority)
    context.minimum_version = context.maximum_version = version
    context.load_cert_chain(*authority.issue(usage=FOR_CLIENTS).write(tmp_path / "own").values())
    with listening([files_of(authority.issue(), authority.ca.read_bytes() if must_show else None)]) as port:
        session, _ = session_after(port, context)
        assert session is not None
        assert session.has_ticket
        _, is_resumed = session_after(port, context, session)
    assert is_resumed is not must_show


@pytest.mark.long
@EACH_VERSION
def test_a_client_whose_certificate_has_expired_meanwhile_is_refused_with_its_session_too(
    version: ssl.TLSVersion, authority: Authority, tmp_path: Path
) -> None:
    context = client(authority)
    context.minimum_version = context.maximum_version = version
    ends_s = time.time() + LIFE_S
    own = authority.issue(usage=FOR_CLIENTS, ends=timedelta(seconds=LIFE_S))
    context.load_cert_chain(*own.write(tmp_path / "own").values())
    with listening([files_of(authority.issue(), authority.ca.read_bytes())]) as port:
        session, _ = session_after(port, context)
        time.sleep(max(ends_s + 1.5 - time.time(), 0))
        with pytest.raises(OSError):  # as above
            session_after(port, context, session)


@EACH_VERSION
def test_both_versions_of_today_are_spoken(version: ssl.TLSVersion, authority: Authority) -> None:
    issued, context = authority.issue(), client(authority)
    context.minimum_version = context.maximum_version = version
    with listening([files_of(issued)]) as port:
        assert shown_at(port, context) == der_of(issued)


def test_no_version_of_yesterday_is_spoken(authority: Authority) -> None:
    context = client(authority)
    context.set_ciphers("DEFAULT@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1 is deprecated"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with listening([files_of(authority.issue())]) as port, pytest.raises(OSError):  # as above
        shown_at(port, context)


def said_to_grpc(port: int, authority: Authority, own: Issued | None = None) -> grpc.StatusCode:
    """What a client of gRPC learns, whose TLS library is Envoy's. ``own``: the certificate that it shows."""
    pair = (own.key_pem(), own.pem) if own else (None, None)
    credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes(), *pair)
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel, pytest.raises(grpc.RpcError) as error:
        channel.unary_unary("/nothing/Nothing")(b"", timeout=PATIENCE_S)
    found = error.value.code()
    assert isinstance(found, grpc.StatusCode)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_is_taken_if_grpc_makes_a_handshake_with_it(kind: str, authority: Authority) -> None:
    files = files_of(authority.issue(key=KINDS[kind]()))
    try:
        with listening([files]) as port:
            agrees = said_to_grpc(port, authority) is grpc.StatusCode.UNIMPLEMENTED
    except RuntimeError:  # It cannot even be read.
        agrees = False
    assert (files.fault() == "") == agrees
    assert agrees == (kind in ("ECDSA with P-256", "ECDSA with P-384", "RSA"))


@pytest.mark.parametrize("kind", ["ECDSA with P-256", "ECDSA with P-384", "ECDSA with P-521", "Ed25519", "RSA"])
def test_gateways_own_keys_are_of_the_same_kinds(kind: str, authority: Authority) -> None:
    own = authority.issue(usage=FOR_CLIENTS, key=KINDS[kind]())
    with listening([files_of(authority.issue(), authority.ca.read_bytes())]) as port:
        agrees = said_to_grpc(port, authority, own) is grpc.StatusCode.UNIMPLEMENTED
    assert agrees == (kind in ("ECDSA with P-256", "ECDSA with P-384", "RSA"))


def test_a_pair_is_tried_before_it_is_used(authority: Authority) -> None:
    one, other = authority.issue(), authority.issue()
    unreadable = "gRPC cannot read them: have them issued anew"
    assert files_of(one).fault() == ""
    assert files_of(one, authority.ca.read_bytes()).fault() == ""
    assert GrpcFiles(one.pem, other.key_pem(), None).fault() == unreadable
    assert files_of(one, b"nothing").fault() == unreadable


def test_a_key_that_is_too_short_is_refused(authority: Authority) -> None:
    files = files_of(authority.issue(key=rsa.generate_private_key(65537, 1024)))
    assert files.fault() == (
        "the key is RSA with 1024 bits, which is too short: give one of RSA with 2048 bits or more, or of ECDSA with "
        "P-256 or P-384"
    )


def test_a_lack_of_descriptors_is_no_fault_of_the_pair(authority: Authority) -> None:
    files = files_of(authority.issue())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with listening([files]):  # Else gRPC would start, and end the process where it finds no descriptor.
        assert files.fault() == ""
        os.close(lowest := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            told = files.fault()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert told == "gRPC can open no port on 127.0.0.1 to try them: let this process open more files (ulimit -n)"
