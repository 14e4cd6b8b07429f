"""Keys and certificates of one control plane: who the API server is, and what it signs service accounts' tokens with.

Users show tokens, so the authority signs one certificate only, and its key is forgotten.
"""

from __future__ import annotations

import ipaddress
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
    accounts_private: Path
    accounts_public: Path


def write_keys(folder: Path) -> Keys:
    """All of them, new, in ``folder``. For 127.0.0.1 and the names that pods call the API server by."""
    keys = Keys(*(folder / name for name in ("ca.crt", "server.crt", "server.key", "accounts.key", "accounts.pub")))
    authority, server, accounts = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    root = _certificate("pdcluster-tests", authority, "pdcluster-tests", authority, is_authority=True)
    leaf = _certificate("kube-apiserver", server, "pdcluster-tests", authority, is_authority=False)
    keys.ca.write_bytes(root.public_bytes(serialization.Encoding.PEM))
    keys.server_certificate.write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
    _write_private(server, keys.server_key)
    _write_private(accounts, keys.accounts_private)
    keys.accounts_public.write_bytes(
        accounts.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return keys


def _certificate(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    signer: ec.EllipticCurvePrivateKey,
    *,
    is_authority: bool,
) -> x509.Certificate:
    """With the key identifiers that strict checks ask for (Python from 3.13 on)."""
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + LIFE)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if is_authority:
        builder = builder.add_extension(_SIGNS_CERTIFICATES, critical=True)
    else:
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        names = x509.SubjectAlternativeName([address, *map(x509.DNSName, NAMES)])
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(names, critical=False).add_extension(usage, critical=False)
    return builder.sign(signer, hashes.SHA256())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _write_private(key: ec.EllipticCurvePrivateKey, path: Path) -> None:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
