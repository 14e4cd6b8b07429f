"""The certificate that gateways are shown: OpenSSL proves it, and gateways and gRPC must be able to use it."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path, PosixPath

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from fakes.certificates import KINDS, Authority
from pdcluster_protocol.errors import ConfigError
from pdcluster_router.files.pem import KeyPair
from pdcluster_router.front.certificates import PICKER_PORT, PickerCertificate, load_certificate

DAY = timedelta(days=1)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca.crt")


def certificate_of(folder: Path, ca: Path | None = None) -> PickerCertificate:
    return PickerCertificate(folder / "tls.crt", folder / "tls.key", 3600, PICKER_PORT, ca)


@pytest.mark.parametrize("kind", ["ECDSA with P-256", "ECDSA with P-384", "RSA"])
def test_keys_that_gateways_take_are_used(kind: str, authority: Authority, tmp_path: Path) -> None:
    issued = authority.issue(key=KINDS[kind]())
    issued.write(tmp_path)
    files = certificate_of(tmp_path).grpc_files
    assert (files.cert, files.key, files.ca) == (issued.pem, issued.key_pem(), None)


@pytest.mark.parametrize("kind", ["ECDSA with P-521", "Ed25519", "Ed448"])
def test_a_key_that_gateways_do_not_take_is_refused_with_the_files_its_kind_and_the_cure(
    kind: str, authority: Authority, tmp_path: Path
) -> None:
    authority.issue(key=KINDS[kind]()).write(tmp_path)
    with pytest.raises(ConfigError) as error:
        certificate_of(tmp_path)
    assert str(error.value) == (
        f"--picker-tls-cert {tmp_path / 'tls.crt'} and --picker-tls-key {tmp_path / 'tls.key'}: the key is {kind}, "
        "with which Envoy and gRPC make no handshake: give one of RSA with 2048 bits or more, or of ECDSA with P-256 "
        "or P-384"
    )


def test_a_key_that_is_too_short_is_refused_with_the_cure(authority: Authority, tmp_path: Path) -> None:
    authority.issue(key=rsa.generate_private_key(65537, 1024)).write(tmp_path)
    with pytest.raises(ConfigError) as error:
        certificate_of(tmp_path)
    assert str(error.value) == (
        f"--picker-tls-cert {tmp_path / 'tls.crt'} and --picker-tls-key {tmp_path / 'tls.key'}: the key is too short: "
        "give one of RSA with 2048 bits or more, or of ECDSA with P-256 or P-384"
    )


def test_a_pair_with_those_between_it_and_its_authority_is_used(authority: Authority, tmp_path: Path) -> None:
    issued = authority.issue(issuer=authority.middle())
    issued.write(tmp_path)
    assert certificate_of(tmp_path).grpc_files.cert == issued.pem


def test_a_certificate_that_no_gateway_would_take_today_is_refused(authority: Authority, tmp_path: Path) -> None:
    authority.issue(begins=DAY, ends=2 * DAY).write(tmp_path)
    with pytest.raises(ConfigError, match=r"certificate is not yet valid: give one that gateways take today"):
        certificate_of(tmp_path)


def test_errors_name_the_flags_of_this_port(authority: Authority, tmp_path: Path) -> None:
    authority.issue().write(tmp_path)
    nothing = tmp_path / "gateways.crt"
    nothing.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"--picker-client-ca .*: it has no certificate in PEM"):
        certificate_of(tmp_path, nothing)
    (tmp_path / "tls.key").unlink()
    with pytest.raises(ConfigError, match=r"--picker-tls-key .*: No such file or directory"):
        certificate_of(tmp_path)


def test_a_renewal_gives_new_files_and_a_bad_one_none(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority.issue().write(tmp_path)
    certificate = certificate_of(tmp_path, authority.ca)
    first = certificate.grpc_files
    assert first.ca == authority.ca.read_bytes()
    authority.issue(key=KINDS["Ed25519"]()).write(tmp_path)
    certificate.watch.reload()
    assert certificate.grpc_files is first
    assert caplog.text.count("tls certificate not changed reason=--picker-tls-cert") == 1
    new = authority.issue()
    new.write(tmp_path)
    certificate.watch.reload()
    assert certificate.grpc_files.cert == new.pem


class Swapped(PosixPath):
    """A file in whose place another one is put just before one of its uses."""

    uses_left = 0
    swap: Callable[[], object]

    def __fspath__(self) -> str:
        self.uses_left -= 1
        if self.uses_left == 0:
            self.swap()
        return super().__fspath__()


EACH_USE = pytest.mark.parametrize("use", range(1, 9))
"""The watch looks, we read, OpenSSL reads, and we read again, at most twice."""


@EACH_USE
@pytest.mark.parametrize("name", ["tls.crt", "tls.key"])
def test_a_pair_that_was_never_proven_is_never_used(name: str, use: int, authority: Authority, tmp_path: Path) -> None:
    old, new, tomorrow = authority.issue(), authority.issue(), authority.issue(begins=DAY, ends=2 * DAY)
    old.write(tmp_path)
    paths = {one: Swapped(tmp_path / one) for one in ("tls.crt", "tls.key")}
    certificate = PickerCertificate(paths["tls.crt"], paths["tls.key"], 3600, PICKER_PORT)
    new.write(tmp_path)
    paths[name].swap = lambda: tomorrow.write(tmp_path)
    paths[name].uses_left = use
    certificate.watch.reload()
    assert pair_of(certificate) in {(one.pem, one.key_pem()) for one in (old, new)}


@EACH_USE
def test_authorities_that_were_never_read_by_openssl_are_never_used(
    use: int, authority: Authority, tmp_path: Path
) -> None:
    authority.issue().write(tmp_path)
    ca = Swapped(authority.ca)
    good = ca.read_bytes()
    certificate = certificate_of(tmp_path, ca)
    ca.swap = lambda: authority.ca.write_bytes(b"nothing")
    ca.uses_left = use
    certificate.watch.reload()
    assert certificate.grpc_files.ca == good


def pair_of(certificate: PickerCertificate) -> tuple[bytes, bytes]:
    return certificate.grpc_files.cert, certificate.grpc_files.key


def test_a_pair_that_is_renewed_while_it_is_read_is_read_again(authority: Authority, tmp_path: Path) -> None:
    old, new = authority.issue(), authority.issue()
    old.write(tmp_path)
    key = Swapped(tmp_path / "tls.key")
    certificate = PickerCertificate(tmp_path / "tls.crt", key, 3600, PICKER_PORT)
    key.swap, key.uses_left = lambda: new.write(tmp_path), 3
    certificate.watch.reload()
    assert pair_of(certificate) == (new.pem, new.key_pem())


def test_trying_a_pair_leaves_no_descriptor_and_no_thread(authority: Authority, tmp_path: Path) -> None:
    authority.issue().write(tmp_path)
    certificate = certificate_of(tmp_path)
    before = [len(list(os.scandir(f"/proc/self/{kind}"))) for kind in ("fd", "task")]
    for _ in range(20):
        certificate.watch.reload()
    after = [len(list(os.scandir(f"/proc/self/{kind}"))) for kind in ("fd", "task")]
    assert max(now - then for now, then in zip(after, before, strict=True)) < 10


def test_no_key_is_in_what_is_printed(authority: Authority, tmp_path: Path) -> None:
    authority.issue().write(tmp_path)
    certificate = certificate_of(tmp_path)
    assert "PRIVATE" not in repr(certificate.grpc_files)
    pair = KeyPair(tmp_path / "tls.crt", tmp_path / "tls.key", *PICKER_PORT[:2], "gateways")
    assert "PRIVATE" not in repr(load_certificate(pair))
