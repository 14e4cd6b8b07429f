"""The kind of the key in a certificate, as OpenSSL's own reader has it."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from fakes.certificates import KINDS, Authority
from pdcluster_router.files.public_key import key_kind_of

END = "-----END CERTIFICATE-----\n"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca.crt")


@pytest.mark.parametrize("kind", KINDS)
def test_the_key_of_the_first_certificate_has_its_kind(kind: str, authority: Authority) -> None:
    issued = authority.issue(key=KINDS[kind](), issuer=authority.middle())
    assert issued.pem.count(b"BEGIN CERTIFICATE") == 2
    assert key_kind_of(f"Bag Attributes\n{issued.pem.decode()}") == (kind, 2048 if kind == "RSA" else 0)


@pytest.mark.parametrize("bits", [1024, 3072])
def test_rsa_says_its_bits(bits: int, authority: Authority) -> None:
    assert key_kind_of(authority.issue(key=rsa.generate_private_key(65537, bits)).pem.decode()) == ("RSA", bits)


@pytest.mark.parametrize("body", ["", "eA==", "MAA=", "MIA=", "MYQ=", "x"])
def test_what_is_no_certificate_has_no_kind(body: str) -> None:
    pem = f"-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----\n"
    assert key_kind_of(pem) == ("an unknown kind", 0)


@pytest.mark.parametrize(
    ("was", "now", "kind"),
    [
        # OpenSSL's own reader takes both.
        ("a003020102", "a003020103", ("an unknown kind", 0)),  # a version that no certificate has
        ("300d06092a864886f70d0101010500", "300d06092a864886f70d01010a3000", ("RSA for PSS alone", 0)),
    ],
)
def test_what_few_certificates_have_is_no_surprise(
    was: str, now: str, kind: tuple[str, int], authority: Authority
) -> None:
    der = ssl.PEM_cert_to_DER_cert(authority.issue(key=KINDS["RSA"]()).pem.decode().partition("-----END")[0] + END)
    changed = der.replace(bytes.fromhex(was), bytes.fromhex(now), 1)
    assert changed != der
    assert key_kind_of(ssl.DER_cert_to_PEM_cert(changed)) == kind


def test_an_empty_text_has_no_kind() -> None:
    assert key_kind_of("") == ("an unknown kind", 0)
