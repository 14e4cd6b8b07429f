"""Certificates of tests, and the fake API server behind them."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fakes.api_server import ApiServer
from fakes.slices import endpoint, slice_of


def make_authority(folder: Path, name: str) -> tuple[Path, ssl.SSLContext]:
    """A certificate for 127.0.0.1 that signs itself: its file, and a server's context with it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(hours=1))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    certificate = builder.add_extension(address, critical=False).sign(key, hashes.SHA256())
    ca_file, key_file = folder / f"{name}.crt", folder / f"{name}.key"
    ca_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ca_file, key_file)
    return ca_file, context


@asynccontextmanager
async def api_behind(context: ssl.SSLContext) -> AsyncIterator[ApiServer]:
    api = ApiServer()
    api.put(slice_of("s", "decode", endpoint("10.0.0.1")))
    await api.start(context=context)
    try:
        yield api
    finally:
        await api.stop()
