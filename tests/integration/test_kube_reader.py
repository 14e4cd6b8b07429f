"""The client of the API server over TLS: who the server is decides, and nothing is left open."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fakes.api_server import ApiServer
from fakes.http import read_head
from fakes.router import until
from fakes.slices import endpoint, slice_of
from integration.authorities import api_behind, make_authority
from pdcluster_kube.access import KubeAccess
from pdcluster_kube.reader import ApiStatusError, KubeReader
from pdcluster_protocol.errors import Unavailable
from pdcluster_router.core.engines.endpoint_slices import SliceCache
from pdcluster_router.engines.discovery import Source

pytestmark = pytest.mark.anyio

SOURCE = Source("default", "c", watch_timeout_s=60)


async def test_an_api_server_of_the_given_authority_is_read_and_watched(tmp_path: Path) -> None:
    ca_file, context = make_authority(tmp_path, "ours")
    async with api_behind(context) as api:
        client = KubeReader(KubeAccess(api.url, ca_file, None), timeout_s=30)
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
            await KubeReader(KubeAccess(api.url, theirs, token_file), timeout_s=30).read(SOURCE.list_path)
        assert api.asked == []


async def test_an_authority_file_that_is_renewed_counts_for_the_next_request(tmp_path: Path) -> None:
    ca_file, context = make_authority(tmp_path, "ours")
    right = ca_file.read_bytes()
    theirs, _ = make_authority(tmp_path, "theirs")
    ca_file.write_bytes(theirs.read_bytes())
    async with api_behind(context) as api:
        client = KubeReader(KubeAccess(api.url, ca_file, None), timeout_s=30)
        with pytest.raises(Unavailable):
            await client.read(SOURCE.list_path)
        ca_file.write_bytes(right)
        assert b"10.0.0.1" in await client.read(SOURCE.list_path)


async def test_no_token_follows_a_redirect(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("secret")
    elsewhere = ApiServer()
    await elsewhere.start()

    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await read_head(reader)
        writer.write(f"HTTP/1.1 302 X\r\nlocation: {elsewhere.url}{asked.path}\r\ncontent-length: 0\r\n\r\n".encode())
        await reader.read()
        writer.close()

    server = await asyncio.start_server(redirect, "127.0.0.1", 0)
    access = KubeAccess(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None, token_file)
    with pytest.raises(ApiStatusError, match="302"):
        await KubeReader(access, timeout_s=30).read(SOURCE.list_path)
    assert elsewhere.asked == []
    await elsewhere.stop()
    server.close()


async def test_an_answer_with_neither_a_length_nor_chunks_is_not_taken_for_a_whole_one() -> None:
    """A lost connection would end it in the same way, and half a list would count as all."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n{}\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    access = KubeAccess(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None, None)
    reader = KubeReader(access, timeout_s=30)
    with pytest.raises(Unavailable, match="neither a length nor chunks"):
        await reader.read(SOURCE.list_path)
    with pytest.raises(Unavailable, match="neither a length nor chunks"):
        async with reader.stream(SOURCE.list_path, limit_s=30) as lines:
            await lines.next()
    server.close()
