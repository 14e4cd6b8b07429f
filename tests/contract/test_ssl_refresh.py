"""vLLM's ``--enable-ssl-refresh`` takes each renewal of a mounted Secret from the copy of ``pdcluster mirror``."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
from vllm.entrypoints.launchers.utils.ssl import SSLCertRefresher

from fakes.certificates import Authority, Issued
from fakes.mounted_secret import MountedSecret
from patience import PATIENCE_S
from pdcluster_cli.pod.mirror import Mirror

pytestmark = pytest.mark.anyio


async def shown_by(port: int) -> bytes:
    """The certificate that a client is shown."""
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
    found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return found


def as_shown(issued: Issued) -> bytes:
    return ssl.PEM_cert_to_DER_cert(issued.pem.decode())


async def test_each_renewal_is_shown_to_clients(tmp_path: Path) -> None:
    authority, copies = Authority(tmp_path / "authority.crt"), tmp_path / "copies"
    copies.mkdir()
    secret = MountedSecret(tmp_path / "secret", authority, authority.issue())
    mirror = Mirror(secret.folder, copies)
    mirror.update()
    cert, key, ca = (str(copies / name) for name in ("tls.crt", "tls.key", "ca.crt"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    refresher = SSLCertRefresher(ssl_context=context, key_path=key, cert_path=cert, ca_path=ca)
    try:
        async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context) as server:
            port = server.sockets[0].getsockname()[1]
            first = await shown_by(port)
            async with asyncio.timeout(PATIENCE_S):
                while await shown_by(port) == first:  # The refresher takes its time to begin.
                    secret.publish(authority.issue())
                    mirror.update()
                    await asyncio.sleep(0.1)
                for _ in range(3):
                    renewed = authority.issue()
                    secret.publish(renewed)
                    mirror.update()
                    while await shown_by(port) != as_shown(renewed):
                        await asyncio.sleep(0.05)
    finally:
        refresher.stop()
