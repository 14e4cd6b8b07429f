"""Which files decode takes for its calls to the router, and that it goes on with the last good ones."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from fakes.certificates import FOR_CLIENTS, Authority
from pdcluster_connector.metaserver_tls import LOOK_S, MetaserverTls, TlsFiles
from pdcluster_protocol.errors import ConfigError


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    authority = Authority(tmp_path / "ca.crt")
    ours = authority.issue(usage=FOR_CLIENTS).write(tmp_path / "decode")
    return TlsFiles(str(authority.ca), str(ours["tls_cert"]), str(ours["tls_key"]))


Break = Callable[[TlsFiles], object]
REFUSED: dict[str, tuple[Break, str]] = {
    "no authorities": (
        lambda files: Path(files.ca).unlink(),
        "metaserver_ca CA: No such file or directory: name a file of certificates in PEM",
    ),
    "nonsense as authorities": (
        lambda files: Path(files.ca).write_bytes(b"nothing"),
        "metaserver_ca CA: no certificate or crl found: name a file of certificates in PEM",
    ),
    "no key": (
        lambda files: Path(files.key).unlink(),
        "metaserver_cert CERT and metaserver_key KEY: No such file or directory: give a certificate and its key in "
        "PEM, no password",
    ),
    "another's key": (
        lambda files: Path(files.key).write_bytes(Authority(Path(files.ca + ".2")).issue().key_pem()),
        "metaserver_cert CERT and metaserver_key KEY: key values mismatch: give a certificate and its key in PEM, no "
        "password",
    ),
    "a key with a password": (
        lambda files: Path(files.key).write_bytes(Authority(Path(files.ca + ".2")).issue().key_pem(b"secret")),
        "metaserver_cert CERT and metaserver_key KEY: ",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_cannot_be_used_are_refused_and_change_nothing_later(
    case: str, files: TlsFiles, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    tls = MetaserverTls(files, clock)
    before = tls.context()
    break_it, message = REFUSED[case]
    break_it(files)
    with pytest.raises(ConfigError) as error:
        MetaserverTls(files)
    for word in ("ca", "cert", "key"):
        message = message.replace(word.upper(), getattr(files, word))
    assert str(error.value).startswith(message)
    clock.now += LOOK_S
    assert tls.context() is before
    clock.now += LOOK_S
    assert tls.context() is before
    assert caplog.text.count("metaserver tls not changed") == 1


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_replaced_files_are_used_after_the_next_look(files: TlsFiles) -> None:
    clock = Clock()
    tls = MetaserverTls(files, clock)
    before = tls.context()
    Path(files.ca).write_bytes(Path(files.ca).read_bytes() * 2)
    clock.now += LOOK_S - 0.1
    assert tls.context() is before
    clock.now += 0.1
    assert tls.context() is not before
    assert isinstance(tls.context(), ssl.SSLContext)


def test_bad_files_are_tried_again_though_they_look_the_same(files: TlsFiles, caplog: pytest.LogCaptureFixture) -> None:
    clock, ca = Clock(), Path(files.ca)
    tls = MetaserverTls(files, clock)
    before, good = tls.context(), ca.read_bytes()
    ca.write_bytes(good.replace(b"-----BEGIN", b"-----BEGUN"))
    changed_ns = ca.stat().st_mtime_ns + 1
    os.utime(ca, ns=(changed_ns, changed_ns))
    for _ in range(2):
        clock.now += LOOK_S
        assert tls.context() is before
    assert caplog.text.count("metaserver tls not changed") == 1
    ca.write_bytes(good)
    os.utime(ca, ns=(changed_ns, changed_ns))
    clock.now += LOOK_S
    assert tls.context() is not before


def test_without_files_the_systems_authorities_are_trusted_and_plain_calls_are_no_mistake() -> None:
    tls = MetaserverTls(TlsFiles())
    assert tls.context() is True
    assert tls.name is None
    assert not tls.is_needed
    assert MetaserverTls(TlsFiles(name="router.svc")).is_needed


@pytest.mark.parametrize("name", ["router..svc", ".svc", "a" * 64])
def test_a_name_that_no_certificate_has_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"metaserver_tls_name .* is no DNS name or address: name one that the "):
        MetaserverTls(TlsFiles(name=name))


def test_half_a_pair_is_refused(files: TlsFiles) -> None:
    with pytest.raises(ConfigError, match=r"metaserver_cert is .* and metaserver_key is not given: give both files"):
        MetaserverTls(TlsFiles(cert=files.cert))
