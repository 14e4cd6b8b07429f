"""A pool with TLS inside is verified over TLS, and by the name in its certificate."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fakes.certificates import Authority
from fakes.operator_rig import Rig, made, running_rig, running_router

pytestmark = pytest.mark.anyio


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running_rig() as one:
        yield one


def keep_inside(rig: Rig, **files: bytes) -> None:
    """The Secret of a pool with TLS inside; its keys have a point in place of each ``_``."""
    data = {key.replace("_", "."): b64encode(text).decode() for key, text in files.items()}
    rig.store.create(
        ("secrets", "default", "inside"), {"apiVersion": "v1", "kind": "Secret", "metadata": {}, "data": data}
    )


async def test_a_pool_with_tls_inside_is_verified_over_tls(rig: Rig, tmp_path: Path) -> None:
    authority, name = Authority(tmp_path / "ca.crt"), "pool-router-internal.default.svc"
    async with running_router(context=authority.issue(names=(name,)).server(tmp_path / "router")) as with_tls:
        rig.router.port = with_tls.port
        keep_inside(rig, tls_crt=b"x", tls_key=b"x", ca_crt=authority.ca.read_bytes())
        await made(rig, **{"spec.tls": {"secretName": "inside"}})
        assert rig.condition("Ready")["status"] == "True"
        assert set(with_tls.hosts) == {f"{name}:8001"}
        assert rig.router.orders == []
