"""What a router process says at its start where its settings for tokens cannot be used."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Final

import pytest

from fakes.identity import ISSUER, bearer, key_set, signing_key, token_of
from fakes.router import PROMPT
from integration.router_scene import running_scene
from patience import PATIENCE_S

pytestmark = pytest.mark.anyio

ENGINES: Final = ("--prefill=http://127.0.0.1:1", "--decode=http://127.0.0.1:1", "--port=0")
RULES: Final = (f"--jwt-issuer={ISSUER}", "--jwt-audience=pool")


async def said_at_its_end(*flags: str, before: str = "") -> str:
    main = f"import sys; {before}from pdcluster_router.__main__ import main; sys.exit(main(sys.argv[1:]))"
    router = await asyncio.create_subprocess_exec(
        sys.executable, "-c", main, *ENGINES, *flags, stdout=PIPE, stderr=PIPE
    )
    _, said = await asyncio.wait_for(router.communicate(), PATIENCE_S)
    assert router.returncode == 2
    (line,) = said.decode().splitlines()
    return line


@pytest.mark.parametrize("package", ["jwt", "cryptography"])
async def test_without_the_extras_packages_one_line_names_the_extra(package: str) -> None:
    flags = ("--jwt-key-set=https://host/jwks", *RULES)
    said = await said_at_its_end(*flags, before=f"sys.modules['{package}'] = None; ")
    assert "--jwt-key-set: " in said
    assert said.endswith("pip install 'pdcluster[router,jwt]'")


async def test_a_file_that_is_no_key_set_and_rules_that_are_missing_are_told_with_the_cure(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    flag = f"--jwt-key-set={file}"
    assert f"{file}: No such file or directory: name a file" in await said_at_its_end(flag, *RULES)
    file.write_text("<html>")
    assert f"{file}: it is no key set: name a JSON document" in await said_at_its_end(flag, *RULES)
    assert "--jwt-issuer and --jwt-audience: --jwt-key-set needs it" in await said_at_its_end(flag)


async def test_a_router_with_a_key_set_serves_clients_with_tokens_and_warns_of_no_open_port(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_bytes(key_set(signing_key()))
    async with running_scene(f"--jwt-key-set={file}", *RULES) as router:
        assert not any("clients are not authenticated" in line for line in router.said)
        assert (await router.ask(PROMPT)).status == 401
        assert (await router.ask(PROMPT, headers=bearer(token_of()))).status == 200
        token = token_of(aud="other")
        assert (await router.ask(PROMPT, headers=bearer(token))).status == 401
        assert token.split(".")[2] not in router.log.read_text()
