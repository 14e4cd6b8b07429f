"""Which certificates a router takes, and what it says of those that it does not."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from fakes.certificates import FOR_CLIENTS, Authority, Issued
from pdcluster_protocol.errors import ConfigError
from pdcluster_router.files.pem import KeyPair, PairPem
from pdcluster_router.front.certificates import CLIENT_PORT, INTERNAL_PORT, Certificate, load_certificate

DAY = timedelta(days=1)
Break = Callable[[Authority, Path, Path], object]
"""Makes something wrong of a good certificate and its key."""


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca.crt")


def write(issued: Issued, cert: Path, key: Path) -> None:
    cert.write_bytes(issued.pem)
    key.write_bytes(issued.key_pem())


def files(folder: Path) -> tuple[Path, Path]:
    return folder / "tls.crt", folder / "tls.key"


def pair(cert: Path, key: Path) -> KeyPair:
    return KeyPair(cert, key, *CLIENT_PORT, "clients")


def folder_at(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe_at(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


class RenewedMeanwhile(ssl.SSLContext):
    """Both files are renewed before OpenSSL reads them, once."""

    renew: Callable[[], None] | None = None

    def load_cert_chain(self, *args: Any, **kwargs: Any) -> None:
        if self.renew is not None:
            self.renew()
            self.renew = None
        super().load_cert_chain(*args, **kwargs)


def test_files_that_are_renewed_while_they_are_read_are_read_again(authority: Authority, tmp_path: Path) -> None:
    both = files(tmp_path)
    write(authority.issue(), *both)
    newer = authority.issue()
    context = RenewedMeanwhile(ssl.PROTOCOL_TLS_SERVER)
    context.renew = lambda: write(newer, *both)
    assert pair(*both).load_into(context) == PairPem(newer.pem.decode(), newer.key_pem())


REFUSED: dict[str, tuple[Break, str]] = {
    "no certificate file": (
        lambda _, cert, __: cert.unlink(),
        "--tls-cert CERT: No such file or directory: name a file that this process can read",
    ),
    "no key file": (
        lambda _, __, key: key.unlink(),
        "--tls-key KEY: No such file or directory: name a file that this process can read",
    ),
    "a folder in the place of the key": (
        lambda _, __, key: folder_at(key),
        "--tls-key KEY: Is a directory: name a file that this process can read",
    ),
    "a pipe in the place of the certificate": (
        lambda _, cert, __: pipe_at(cert),
        "--tls-cert CERT: it has no certificate in PEM: name the one to show, and those between behind it",
    ),
    "an empty certificate": (
        lambda _, cert, __: cert.write_bytes(b""),
        "--tls-cert CERT: it has no certificate in PEM: name the one to show, and those between behind it",
    ),
    "a key as certificate": (
        lambda _, cert, key: cert.write_bytes(key.read_bytes()),
        "--tls-cert CERT: it has no certificate in PEM: name the one to show, and those between behind it",
    ),
    "a certificate as key": (
        lambda _, cert, key: key.write_bytes(cert.read_bytes()),
        "--tls-key KEY: it has no private key in PEM: name the one of --tls-cert",
    ),
    "a key that is too large a file": (
        lambda _, __, key: key.write_bytes(b"x" * (2 << 20)),
        "--tls-key KEY: it is larger than 1048576 bytes: name another file",
    ),
    "a key with a password": (
        lambda authority, _, key: key.write_bytes(authority.issue().key_pem(b"secret")),
        "--tls-key KEY: the key has a password: give one without, readable by this process only",
    ),
    "the key of another certificate": (
        lambda authority, _, key: key.write_bytes(authority.issue().key_pem()),
        "--tls-cert CERT and --tls-key KEY: the key is not that of the certificate: give two that belong together",
    ),
    "a key that is too short": (
        lambda authority, cert, key: write(authority.issue(key=rsa.generate_private_key(65537, 1024)), cert, key),
        "--tls-cert CERT and --tls-key KEY: the key is too short: give one of RSA with 2048 bits or more, or of ECDSA "
        "with P-256 or P-384",
    ),
    "half a certificate": (
        lambda _, cert, __: cert.write_bytes(cert.read_bytes()[:300]),
        "--tls-cert CERT and --tls-key KEY: OpenSSL cannot read it: "
        "give a whole certificate and its key in PEM, the one to show first",
    ),
    "half a key": (
        lambda _, __, key: key.write_bytes(key.read_bytes()[:100]),
        "--tls-cert CERT and --tls-key KEY: OpenSSL cannot read it: "
        "give a whole certificate and its key in PEM, the one to show first",
    ),
    "the authority's certificate in front of the server's": (
        lambda authority, cert, _: cert.write_bytes(authority.ca.read_bytes() + cert.read_bytes()),
        "--tls-cert CERT and --tls-key KEY: the key is not that of the certificate: give two that belong together",
    ),
    "an expired certificate": (
        lambda authority, cert, key: write(authority.issue(begins=-2 * DAY, ends=-DAY), cert, key),
        "--tls-cert CERT: certificate has expired: give one that clients take today",
    ),
    "a certificate of tomorrow": (
        lambda authority, cert, key: write(authority.issue(begins=DAY, ends=2 * DAY), cert, key),
        "--tls-cert CERT: certificate is not yet valid: give one that clients take today",
    ),
    "a certificate for clients": (
        lambda authority, cert, key: write(authority.issue(usage=FOR_CLIENTS), cert, key),
        "--tls-cert CERT: unsuitable certificate purpose: give one that clients take today",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_client_would_take_is_refused_with_one_line(case: str, authority: Authority, tmp_path: Path) -> None:
    cert, key = files(tmp_path)
    write(authority.issue(), cert, key)
    break_it, told = REFUSED[case]
    break_it(authority, cert, key)
    with pytest.raises(ConfigError) as error:
        load_certificate(pair(cert, key))
    assert str(error.value) == told.replace("CERT", str(cert)).replace("KEY", str(key))


def test_a_good_certificate_says_until_when_it_is(authority: Authority, tmp_path: Path) -> None:
    cert, key = files(tmp_path)
    write(authority.issue(ends=3 * DAY), cert, key)
    proven = load_certificate(pair(cert, key))
    assert proven.expires_at == pytest.approx(time.time() + 3 * 86400, abs=600)
    assert proven.context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_a_certificate_comes_with_those_between_it_and_its_authority(authority: Authority, tmp_path: Path) -> None:
    cert, key = files(tmp_path)
    write(authority.issue(issuer=authority.middle()), cert, key)
    assert cert.read_bytes().count(b"BEGIN CERTIFICATE") == 2
    load_certificate(pair(cert, key))


def test_what_is_around_a_certificate_in_its_file_does_not_matter(authority: Authority, tmp_path: Path) -> None:
    cert, key = files(tmp_path)
    write(authority.issue(), cert, key)
    cert.write_bytes("Bag Attributes: für ein Gerät\n".encode() + cert.read_bytes())
    load_certificate(pair(cert, key))


def test_a_bad_replacement_changes_nothing_and_is_told(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = files(tmp_path)
    write(authority.issue(), cert, key)
    certificate = Certificate(cert, key, 3600)
    before = certificate.context
    key.write_bytes(authority.issue().key_pem())
    certificate.watch.reload()
    assert certificate.context is before
    assert caplog.text.count("tls certificate not changed") == 1
    write(authority.issue(), cert, key)
    certificate.watch.reload()
    assert certificate.context is not before


# The internal port, where callers may have to show who they are.


def internal(cert: Path, key: Path, ca: Path) -> Certificate:
    return Certificate(cert, key, 3600, INTERNAL_PORT, ca)


def test_authorities_of_callers_that_cannot_be_used_are_refused_and_change_nothing(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = files(tmp_path)
    write(authority.issue(), cert, key)
    ca = tmp_path / "callers.crt"
    ca.write_bytes(authority.ca.read_bytes())
    certificate = internal(cert, key, ca)
    before = certificate.context
    assert before.verify_mode is ssl.CERT_REQUIRED
    ca.write_bytes(b"nothing")
    with pytest.raises(ConfigError) as error:
        internal(cert, key, ca)
    told = f"--internal-client-ca {ca}: it has no certificate in PEM: name the file with the certificates to trust"
    assert str(error.value) == told
    certificate.watch.reload()
    assert certificate.context is before
    assert caplog.text.count("tls certificate not changed") == 1


def test_errors_of_the_internal_port_name_its_own_flags(authority: Authority, tmp_path: Path) -> None:
    cert, key = files(tmp_path)
    write(authority.issue(), cert, key)
    key.unlink()
    with pytest.raises(ConfigError, match=r"--internal-tls-key .*: No such file or directory"):
        internal(cert, key, authority.ca)
