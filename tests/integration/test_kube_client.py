"""The client of the API server over TLS: who the server is decides, and nothing is left open."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fakes.kube_api import FakeKubeApi, endpoint, slice_of
from fakes.router import until
from pdcluster_protocol.errors import Unavailable
from pdcluster_router.core.endpoint_slices import SliceCache
from pdcluster_router.engines.discovery import Source
from pdcluster_router.engines.kube_client import KubeAccess, KubeClient

pytestmark = pytest.mark.anyio

SOURCE = Source("ns", "c", watch_timeout_s=60)


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
async def api_behind(context: ssl.SSLContext) -> AsyncIterator[FakeKubeApi]:
    api = FakeKubeApi()
    api.put(slice_of("s", "decode", endpoint("10.0.0.1")))
    await api.start(context=context)
    try:
        yield api
    finally:
        await api.stop()


async def test_an_api_server_of_the_given_authority_is_read_and_watched(tmp_path: Path) -> None:
    ca_file, context = make_authority(tmp_path, "ours")
    async with api_behind(context) as api:
        client = KubeClient(KubeAccess(api.url, ca_file, None), timeout_s=30)
        cache = SliceCache()
        cache.replace(await client.read(SOURCE.list_path))
        async with client.stream(SOURCE.watch_path(cache.resource_version), limit_s=30) as lines:
            api.put(slice_of("s", "decode", endpoint("10.0.0.2")))
            assert cache.apply(await lines.next() or b"")
        assert [member.url for member in cache.picture.members] == ["http://10.0.0.2:8000"]
        await until(lambda: api.num_watches == 0)


async def test_an_api_server_of_another_authority_hears_nothing_from_us(tmp_path: Path) -> None:
    theirs, _ = make_authority(tmp_path, "theirs")
    _, context = make_authority(tmp_path, "ours")
    token_file = tmp_path / "token"
    token_file.write_text("secret")
    async with api_behind(context) as api:
        with pytest.raises(Unavailable, match="verif"):
            await KubeClient(KubeAccess(api.url, theirs, token_file), timeout_s=30).read(SOURCE.list_path)
        assert api.asked == []


async def test_an_authority_file_that_is_renewed_counts_for_the_next_request(tmp_path: Path) -> None:
    ca_file, context = make_authority(tmp_path, "ours")
    right = ca_file.read_bytes()
    theirs, _ = make_authority(tmp_path, "theirs")
    ca_file.write_bytes(theirs.read_bytes())
    async with api_behind(context) as api:
        client = KubeClient(KubeAccess(api.url, ca_file, None), timeout_s=30)
        with pytest.raises(Unavailable):
            await client.read(SOURCE.list_path)
        ca_file.write_bytes(right)
        assert b"10.0.0.1" in await client.read(SOURCE.list_path)
