"""Keys and certificates of one control plane: who the API server is, and what it signs service accounts' tokens with.

Users show tokens, so the authority signs two certificates only, and its key is forgotten: the API server's, and the one
that it shows to kubelets, when there are any.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFE: Final = timedelta(days=2)
NAMES: Final = ("localhost", "kubernetes.default.svc", "kubernetes.default", "kubernetes")
_AUTHORITY: Final = "pdcluster-tests"
_SIGNS_CERTIFICATES: Final = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


@dataclass(frozen=True, slots=True)
class Keys:
    """Files in PEM."""

    ca: Path
    server_certificate: Path
    server_key: Path
    client_certificate: Path
    """Of the API server as a kubelet's client."""
    client_key: Path
    accounts_private: Path
    accounts_public: Path


_FILES: Final = ("ca.crt", "server.crt", "server.key", "client.crt", "client.key", "accounts.key", "accounts.pub")


def write_keys(folder: Path, addresses: Sequence[str] = ("127.0.0.1",)) -> Keys:
    """All of them, new, in ``folder``. For ``addresses`` and the names that pods call the API server by."""
    keys = Keys(*(folder / name for name in _FILES))
    authority, server, client, accounts = (ec.generate_private_key(ec.SECP256R1()) for _ in range(4))
    signing = _Signer(authority)
    keys.ca.write_bytes(_pem(signing.own()))
    keys.server_certificate.write_bytes(_pem(signing.of_server(server, addresses)))
    keys.client_certificate.write_bytes(_pem(signing.of_client(client)))
    _write_private(server, keys.server_key)
    _write_private(client, keys.client_key)
    _write_private(accounts, keys.accounts_private)
    keys.accounts_public.write_bytes(
        accounts.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return keys


class _Signer:
    """The authority. Certificates have the key identifiers that strict checks ask for (Python from 3.13 on)."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key = key

    def own(self) -> x509.Certificate:
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        builder = self._builder(_name(_AUTHORITY), self._key).add_extension(constraints, critical=True)
        return builder.add_extension(_SIGNS_CERTIFICATES, critical=True).sign(self._key, hashes.SHA256())

    def of_server(self, key: ec.EllipticCurvePrivateKey, addresses: Sequence[str]) -> x509.Certificate:
        by_address = [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
        names = x509.SubjectAlternativeName([*by_address, *map(x509.DNSName, NAMES)])
        builder = self._builder(_name("kube-apiserver"), key).add_extension(names, critical=False)
        return self._leaf(builder, ExtendedKeyUsageOID.SERVER_AUTH)

    def of_client(self, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
        """May do everything: kubelets ask the API server itself what it may."""
        builder = self._builder(_name("kube-apiserver", group="system:masters"), key)
        return self._leaf(builder, ExtendedKeyUsageOID.CLIENT_AUTH)

    def _leaf(self, builder: x509.CertificateBuilder, usage: x509.ObjectIdentifier) -> x509.Certificate:
        constraints = x509.BasicConstraints(ca=False, path_length=None)
        builder = builder.add_extension(constraints, critical=True)
        return builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False).sign(self._key, hashes.SHA256())

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(_name(_AUTHORITY))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + LIFE)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(issuer_id, critical=False)
        )


def _name(text: str, group: str = "") -> x509.Name:
    """``group``: what Kubernetes reads as the user's group."""
    groups = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group)] if group else []
    return x509.Name([*groups, x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _write_private(key: ec.EllipticCurvePrivateKey, path: Path) -> None:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
