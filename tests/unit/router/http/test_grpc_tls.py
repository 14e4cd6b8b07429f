"""The handshakes of a gRPC server: what is shown, to whom, and by which versions of TLS."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from fakes.certificates import FOR_CLIENTS, Authority, Issued
from patience import PATIENCE_S
from pdcluster_router.http.grpc_tls import GrpcFiles, server_credentials


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


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=lambda one: one.name)
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


def test_a_pair_is_tried_before_it_is_used(authority: Authority) -> None:
    one, other = authority.issue(), authority.issue()
    assert files_of(one).are_usable()
    assert files_of(one, authority.ca.read_bytes()).are_usable()
    assert not GrpcFiles(one.pem, other.key_pem(), None).are_usable()
    assert not files_of(one, b"nothing").are_usable()
