"""vllm-ascend's released connector, in vLLM 0.23's scheduler, is served by our router; the fake posts what it posts."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import pytest
from vllm.config import KVTransferConfig

from ascend.release import released_sources
from fakes.http import Message, RawClient
from fakes.layerwise import posted
from fakes.router import CHAT, COMPLETIONS, running_server, until
from patience import PATIENCE_S
from pdcluster_cli.models.tiny_model import ensure_tiny_model
from pdcluster_connector.settings import Settings
from pdcluster_protocol.labels import Role
from pdcluster_protocol.launch import kv_transfer_config
from versions.environment import install
from versions.table import VERSIONS

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(1800)]  # its packages are installed once

ROOT: Final = Path(__file__).resolve().parents[2]
PROMPT: Final = {"model": "m", "prompt": "once upon a time"}
ASKED: Final = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@dataclass(frozen=True)
class Peer:
    """URLs of both engines. ``torn``: whether ranks of two prefill engines are taken for a whole push."""

    prefill: str
    decode: str
    torn: bool

    async def ask(self, url: str, path: str, body: object | None = None) -> Any:
        client = await RawClient.connect(url)
        try:
            answer = await (client.get(path) if body is None else client.post(path, body))
            return answer.json()
        finally:
            client.leave()

    async def compute(self, *, may_compute: bool = True, must_fail: bool = False) -> None:
        await self.ask(self.prefill, "/compute", {"may_compute": may_compute, "must_fail": must_fail})

    async def orders(self) -> list[dict[str, Any]]:
        orders: list[dict[str, Any]] = (await self.ask(self.prefill, "/state"))["orders"]
        return orders

    async def num_ended(self) -> int:
        """Requests that decode has answered or aborted."""
        return int((await self.ask(self.decode, "/state"))["ended"])

    async def num_lost_blocks(self) -> int:
        state = await self.ask(self.decode, "/state")
        return int(state["free_at_start"] - state["free"])


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    paths = (ROOT / "tests/ascend/stand_in", ROOT / "tests", released_sources())
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "VLLM_PLUGINS": "",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [str(install(VERSIONS[0])), "-m", "ascend.layerwise_peer", str(ensure_tiny_model())]
    log = tmp_path_factory.mktemp("peer") / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            said = next((line for line in process.stdout if line.startswith("peer ")), None)
            assert said is not None, log.read_text()[-3000:]
            yield Peer(**json.loads(said.removeprefix("peer ")))
        finally:
            process.terminate()


@asynccontextmanager
async def routed(peer: Peer) -> AsyncIterator[str]:
    """Our router in front of both."""
    urls = {"prefill_urls": [peer.prefill], "decode_urls": [peer.decode]}
    async with running_server(engine_dialect="vllm-ascend", **urls) as (server, url):
        await until(lambda: all(engine.is_healthy for engine in server.router.services.all_engines()))
        yield url
        await until(lambda: not server.router.services.transfers)


async def answer_to(url: str, path: str, body: object) -> Message:
    async with asyncio.timeout(PATIENCE_S):
        return await (await RawClient.connect(url)).post(path, body, {"x-request-id": "a-clients-own"})


async def new_orders(peer: Peer, num_before: int) -> list[dict[str, Any]]:
    async with asyncio.timeout(PATIENCE_S):
        while len(orders := await peer.orders()) <= num_before:
            await asyncio.sleep(0.01)
    return orders[num_before:]


def shape_of(value: Any) -> Any:
    """Types in place of values: of a list the type of its first element."""
    if isinstance(value, dict):
        return {key: shape_of(part) for key, part in value.items()}
    return [shape_of(value[0])] if isinstance(value, list) and value else type(value).__name__


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, ASKED)])
async def test_the_released_connector_is_served_and_the_fake_posts_what_it_posts(
    peer: Peer, path: str, body: dict[str, Any]
) -> None:
    await peer.compute()
    num_before = len(await peer.orders())
    async with routed(peer) as url:
        answer = await answer_to(url, path, body)
        assert (answer.status, answer.json()["choices"][0]["text"]) == (200, "x")
    (order,) = await new_orders(peer, num_before)
    said = order["kv_transfer_params"]
    assert said["remote_block_ids"][0], "else nothing was reserved"
    assert shape_of(said) == shape_of(posted(said["request_id"]))
    assert await peer.num_lost_blocks() == 0


async def test_a_prefill_that_fails_is_one_error_though_decode_never_looks_at_its_call(peer: Peer) -> None:
    await peer.compute(must_fail=True)
    num_before = await peer.num_ended()
    async with routed(peer) as url:
        answer = await answer_to(url, COMPLETIONS, PROMPT)
        assert (answer.status, answer.json()["error"]["code"]) == (502, "prefill_failed")
    async with asyncio.timeout(PATIENCE_S):
        while await peer.num_ended() == num_before:
            await asyncio.sleep(0.01)
    assert await peer.num_lost_blocks() == 3, "docs/operations.md says that a push that failed costs decode its blocks"


async def test_a_client_that_leaves_costs_decode_no_block(peer: Peer) -> None:
    await peer.compute(may_compute=False)
    num_before, num_lost = len(await peer.orders()), await peer.num_lost_blocks()
    async with routed(peer) as url:
        client = await RawClient.connect(url)
        leaving = asyncio.create_task(client.post(COMPLETIONS, PROMPT))
        await new_orders(peer, num_before)
        assert await peer.num_lost_blocks() == num_lost + 3
        client.leave()
        await asyncio.gather(leaving, return_exceptions=True)
        await peer.compute()
        async with asyncio.timeout(PATIENCE_S):
            while await peer.num_lost_blocks() != num_lost:
                await asyncio.sleep(0.01)


def test_ranks_of_two_prefill_engines_look_like_a_whole_push_to_it(peer: Peer) -> None:
    assert peer.torn, "else a reservation could be used twice: docs/decisions/0015"


@pytest.mark.parametrize("role", Role)
def test_its_own_check_of_a_connectors_settings_takes_ours(role: Role) -> None:
    """vllm-ascend looks for sizes under ``prefill`` and ``decode``, also in the settings of other connectors."""
    (source,) = (
        node
        for node in ast.parse((released_sources() / "vllm_ascend" / "utils.py").read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "check_kv_extra_config"
    )
    source.args.args[0].annotation = None
    names: dict[str, Any] = {}
    exec(compile(ast.Module([source], []), "utils.py", "exec"), names)  # the released function itself
    parallel = SimpleNamespace(tensor_parallel_size=2, data_parallel_size=1)

    def check(settings: dict[str, Any]) -> None:
        transfer = KVTransferConfig(**kv_transfer_config(role, "e", settings, "fail"))
        names["check_kv_extra_config"](SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel))

    check(msgspec.to_builtins(Settings()))
    with pytest.raises(ValueError, match="conflicting tensor parallel size"):
        check({role.value: {"tp_size": 4}})
