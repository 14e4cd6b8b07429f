"""Keys that a process keeps for those that start later are those of one URL."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from fakes.identity import AUDIENCE, ISSUER, key_set, running_key_fake, signing_key
from fakes.router import Rig, running_rig
from pdcluster_router.core.clients.tokens.claims import TokenRules
from pdcluster_router.front.tokens.check import TokenCheck
from pdcluster_router.front.tokens.start import running_key_server

pytestmark = pytest.mark.anyio


RULES: Final[dict[str, Any]] = {"jwt_issuer": ISSUER, "jwt_audience": AUDIENCE}


async def has_age(rig: Rig) -> bool:
    return b"token_keys_age_seconds " in (await (await rig.internal()).get("/metrics")).body


async def test_keys_of_a_file_have_no_age(rig: Rig, tmp_path: Path) -> None:
    """A file is read when it changes, so its age would grow while all is well."""
    file = tmp_path / "keys"
    file.write_bytes(key_set(signing_key()))
    async with running_key_fake(key_set(signing_key())) as server:
        for place, is_url in ((file, False), (server.url, True)):
            async with running_rig(jwt_key_set=str(place), **RULES) as told:
                assert await has_age(told) is is_url
    assert not await has_age(rig)


async def problem_with(url: str, folder: Path) -> str:
    """Why a process that starts with this URL cannot check tokens; empty: it can."""
    check = TokenCheck(TokenRules(ISSUER, AUDIENCE, "sub"), lambda: 0.0)
    check.url = url
    async with running_rig() as rig, running_key_server(check, rig.router.settings, rig.router.services, folder):
        return check.problem


async def test_another_url_gets_none_of_the_old_ones_keys(tmp_path: Path) -> None:
    async with running_key_fake(key_set(signing_key())) as server:
        old, new = server.url, f"{server.url}&tenant=2"
        assert not await problem_with(old, tmp_path)
        await server.stop()
        assert await problem_with(new, tmp_path)
        assert not await problem_with(old, tmp_path)
        await server.start()
