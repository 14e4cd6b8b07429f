"""Certificates and keys of tests, each of a kind that a router takes or refuses."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

FOR_SERVERS: Final = ExtendedKeyUsageOID.SERVER_AUTH
FOR_CLIENTS: Final = ExtendedKeyUsageOID.CLIENT_AUTH
_HOUR: Final = timedelta(hours=1)
Key: TypeAlias = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey | rsa.RSAPrivateKey
KINDS: Final[Mapping[str, Callable[[], Key]]] = {
    "ECDSA with P-256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "ECDSA with P-384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "ECDSA with P-521": lambda: ec.generate_private_key(ec.SECP521R1()),
    "ECDSA with another curve": lambda: ec.generate_private_key(ec.BrainpoolP256R1()),
    "Ed25519": ed25519.Ed25519PrivateKey.generate,
    "Ed448": ed448.Ed448PrivateKey.generate,
    "RSA": lambda: rsa.generate_private_key(65537, 2048),
}
"""A new key of each kind, by the name that the router has for it."""


@dataclass(frozen=True, slots=True)
class Issuer:
    """Signs others' certificates."""

    name: x509.Name
    key: ec.EllipticCurvePrivateKey
    pem: bytes


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate, with its issuer's behind it where that is none that clients know, and its key, in PEM."""

    pem: bytes
    key: Key

    def key_pem(self, password: bytes | None = None) -> bytes:
        hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        return self.key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden)

    def write(self, folder: Path) -> dict[str, Any]:
        """As Kubernetes names them in a Secret; the router's settings for them."""
        folder.mkdir(exist_ok=True)
        cert, key = folder / "tls.crt", folder / "tls.key"
        cert.write_bytes(self.pem)
        key.write_bytes(self.key_pem())
        return {"tls_cert": cert, "tls_key": key}

    def server(self, folder: Path, *, asks: Path | None = None) -> ssl.SSLContext:
        """A server that shows it. ``asks``: the authorities of certificates that clients must show."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.write(folder).values())
        if asks is not None:
            context.load_verify_locations(asks)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


@dataclass(slots=True)
class Authority:
    """A certificate authority; ``ca`` is for clients to trust."""

    ca: Path
    name: str = "tests"
    _root: Issuer = field(init=False)

    def __post_init__(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        self._root = Issuer(_name(self.name), key, b"")
        self.ca.write_bytes(_sign(self._root, self._root.name, key, is_authority=True))

    def issue(
        self,
        *,
        begins: timedelta = -_HOUR,
        ends: timedelta = _HOUR,
        usage: x509.ObjectIdentifier | None = FOR_SERVERS,
        issuer: Issuer | None = None,
        names: Sequence[str] = ("127.0.0.1",),
        key: Key | None = None,
    ) -> Issued:
        """For these DNS names or IP addresses, valid from ``begins`` to ``ends`` from now. ``usage`` None: for any.
        ``key`` None: a new one, which all take."""
        signs = issuer or self._root
        key = key or ec.generate_private_key(ec.SECP256R1())
        pem = _sign(signs, _name("router"), key, begins=begins, ends=ends, usage=usage, names=names)
        return Issued(pem + signs.pem, key)

    def middle(self) -> Issuer:
        """Signed by the authority; clients do not know it."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("middle")
        return Issuer(name, key, _sign(self._root, name, key, is_authority=True))


def _sign(
    issuer: Issuer,
    name: x509.Name,
    key: Key,
    *,
    begins: timedelta = -_HOUR,
    ends: timedelta = _HOUR,
    usage: x509.ObjectIdentifier | None = FOR_SERVERS,
    names: Sequence[str] = (),
    is_authority: bool = False,
) -> bytes:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(issuer.name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now + begins).not_valid_after(now + ends)
    builder = builder.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    if not is_authority:
        builder = builder.add_extension(x509.SubjectAlternativeName(list(map(_general_name, names))), critical=False)
    if not is_authority and usage is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    return builder.sign(issuer.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _general_name(name: str) -> x509.GeneralName:
    is_address = name.replace(".", "").isdigit() or ":" in name
    return x509.IPAddress(ipaddress.ip_address(name)) if is_address else x509.DNSName(name)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
