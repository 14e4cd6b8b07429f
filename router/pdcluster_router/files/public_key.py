"""The kind of the public key in a certificate: some TLS libraries make no handshake with keys that OpenSSL takes.

Imports ``cryptography``, of ``pdcluster[picker]``: 0.1 s of CPU.
"""

from __future__ import annotations

from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.x509.oid import PublicKeyAlgorithmOID

_CURVES: Final = {"secp256r1": "P-256", "secp384r1": "P-384", "secp521r1": "P-521"}
"""Curves by the names that cryptography has for them."""


def key_kind_of(pem: str) -> tuple[str, int]:
    """The kind of key of the first certificate in ``pem``, and the bits of its modulus if it is RSA, else 0.

    ``("ECDSA with P-256", 0)``, ``("RSA", 2048)``, ``("Ed25519", 0)``, ``("an unknown kind", 0)``.
    """
    try:
        certificate = x509.load_pem_x509_certificate(pem.encode())
        key = certificate.public_key()
    except (ValueError, x509.InvalidVersion, UnsupportedAlgorithm):
        return "an unknown kind", 0
    if certificate.public_key_algorithm_oid == PublicKeyAlgorithmOID.RSASSA_PSS:
        return "RSA for PSS alone", 0
    if isinstance(key, rsa.RSAPublicKey):
        return "RSA", key.key_size
    if isinstance(key, ec.EllipticCurvePublicKey):
        return f"ECDSA with {_CURVES.get(key.curve.name, 'another curve')}", 0
    names = {ed25519.Ed25519PublicKey: "Ed25519", ed448.Ed448PublicKey: "Ed448"}
    return next((name for kind, name in names.items() if isinstance(key, kind)), "an unknown kind"), 0
