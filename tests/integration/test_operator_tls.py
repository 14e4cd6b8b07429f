"""A pool with TLS inside, as the operator keeps it: it waits for its Secret, and is verified over TLS."""

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


async def test_a_pool_with_tls_inside_needs_its_secret_with_all_keys(rig: Rig) -> None:
    await made(rig, **{"spec.tls": {"secretName": "inside"}})
    assert rig.condition("RouterReady")["message"].endswith(
        "there is no Secret default/inside, and engines and routers cannot start without it: make it with the keys "
        "tls.crt, tls.key and ca.crt, as cert-manager does"
    )
    keep_inside(rig, tls_crt=b"x", tls_key=b"x")
    await rig.look()
    assert "Secret default/inside has no key ca.crt" in rig.condition("RouterReady")["message"]
