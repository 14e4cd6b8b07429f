"""The certificate that gateways are shown: OpenSSL proves it, and gRPC must be able to use it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed448

from fakes.certificates import Authority, Issued
from pdcluster_protocol.errors import ConfigError
from pdcluster_router.front.certificates import PICKER_PORT, PickerCertificate


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca.crt")


def certificate_of(folder: Path, ca: Path | None = None) -> PickerCertificate:
    return PickerCertificate(folder / "tls.crt", folder / "tls.key", 3600, PICKER_PORT, ca)


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name)
def test_keys_of_the_usual_curves_are_used(curve: ec.EllipticCurve, authority: Authority, tmp_path: Path) -> None:
    issued = authority.issue(key=ec.generate_private_key(curve))
    issued.write(tmp_path)
    files = certificate_of(tmp_path).grpc_files
    assert (files.cert, files.key, files.ca) == (issued.pem, issued.key_pem(), None)


def test_a_key_that_grpc_cannot_use_is_refused_with_the_files_and_the_cure(
    authority: Authority, tmp_path: Path
) -> None:
    authority.issue(key=ed448.Ed448PrivateKey.generate()).write(tmp_path)
    with pytest.raises(ConfigError) as error:
        certificate_of(tmp_path)
    assert str(error.value) == (
        f"--picker-tls-cert {tmp_path / 'tls.crt'} and --picker-tls-key {tmp_path / 'tls.key'}: gRPC cannot use them: "
        "give a key of another kind, as RSA, or ECDSA with P-256"
    )


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
    authority.issue(key=ed448.Ed448PrivateKey.generate()).write(tmp_path)
    certificate.watch.reload()
    assert certificate.grpc_files is first
    assert caplog.text.count("tls certificate not changed reason=--picker-tls-cert") == 1
    new = authority.issue()
    new.write(tmp_path)
    certificate.watch.reload()
    assert certificate.grpc_files.cert == new.pem


class RenewedMeanwhile(PickerCertificate):
    """The key is renewed before gRPC's copy of it is read, once."""

    renewed: Issued | None = None

    def _load_once(self) -> None:
        super()._load_once()
        if self.renewed is not None:
            issued, self.renewed = self.renewed, None
            issued.write(self._pair.key.parent)
            raise ConfigError("the pair did not fit")


def test_files_that_are_renewed_while_they_are_read_are_read_again(authority: Authority, tmp_path: Path) -> None:
    authority.issue().write(tmp_path)
    certificate = RenewedMeanwhile(tmp_path / "tls.crt", tmp_path / "tls.key", 3600, PICKER_PORT)
    certificate.renewed = new = authority.issue()
    certificate.watch.reload()
    assert certificate.grpc_files.cert == new.pem


def test_trying_a_pair_leaves_no_descriptor_and_no_thread(authority: Authority, tmp_path: Path) -> None:
    authority.issue().write(tmp_path)
    certificate = certificate_of(tmp_path)
    before = [len(list(os.scandir(f"/proc/self/{kind}"))) for kind in ("fd", "task")]
    for _ in range(20):
        certificate.watch.reload()
    after = [len(list(os.scandir(f"/proc/self/{kind}"))) for kind in ("fd", "task")]
    assert max(now - then for now, then in zip(after, before, strict=True)) < 10
