"""The kind of the key in a certificate, as OpenSSL's own reader has it."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from fakes.certificates import KINDS, Authority
from pdcluster_router.files.public_key import key_kind_of


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


def test_an_empty_text_has_no_kind() -> None:
    assert key_kind_of("") == ("an unknown kind", 0)
