"""A router reads its settings anew on SIGHUP: what it takes holds for new requests, and nothing that runs is cut."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from fakes.engine import FakeEngine, Wire
from fakes.faults import Fault, Gate
from fakes.http import RawClient
from fakes.kube_rig import FoundRig, num_seen
from fakes.router import COMPLETIONS, PATIENT, PROMPT, STREAM, post, running_server, send, until
from integration.ports import fresh_port
from patience import PATIENCE_S
from pdcluster_protocol.pool_page import POOL_PATH
from pdcluster_protocol.secret import SECRET_VARIABLE
from pdcluster_router.settings.router_settings import Settings, build_settings

pytestmark = pytest.mark.anyio


@dataclass
class ToldRig(FoundRig):
    """A ``Rig`` whose settings a test may change while it runs."""

    told: dict[str, Any] = field(default_factory=dict)

    async def tell(self, **told: Any) -> None:
        """The router is told these too, and has taken what it takes."""
        self.told |= told
        wanted = build_settings(**self.told)
        hang_up(self)
        await until(lambda: all(getattr(self.router.settings, name) == getattr(wanted, name) for name in told))


def hang_up(rig: ToldRig) -> None:
    """What SIGHUP does; a test of a whole process sends it."""
    rig.server._reload()


@asynccontextmanager
async def running_told_rig(*, pairs: int = 1, **settings: Any) -> AsyncIterator[ToldRig]:
    """A router of one pair, of several that run."""
    wire = Wire()
    prefills, decodes = ([FakeEngine(wire) for _ in range(pairs)] for _ in range(2))
    for engine in (*prefills, *decodes):
        await engine.start()
    told: dict[str, Any] = {**PATIENT, "prefill_urls": (prefills[0].url,), "decode_urls": (decodes[0].url,), **settings}

    def reread() -> Settings:
        return build_settings(**told)

    async with running_server(reread, **told) as (server, url):
        rig = ToldRig(server, url, prefills=prefills, decodes=decodes, told=told)
        await rig.usable(prefills[0], decodes[0])
        yield rig
        await rig.settled()
    for engine in (*prefills, *decodes):
        await engine.stop()


async def test_other_engines_get_what_comes_and_a_running_stream_goes_on() -> None:
    async with running_told_rig(pairs=2, probe_interval_s=0.05) as rig:
        (old_prefill, prefill), (old_decode, decode) = rig.prefills, rig.decodes
        old_decode.close_gate(Gate.ANSWER)
        running = await send(rig, STREAM)
        await until(lambda: len(old_prefill.seen) == 1)
        await rig.tell(prefill_urls=(prefill.url,), decode_urls=(decode.url,))
        await rig.usable(prefill, decode)
        assert (await post(rig)).status == 200
        old_decode.open_gate(Gate.ANSWER)
        answer = await running.receive()
        assert answer.status == 200
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert num_seen(old_prefill, old_decode, prefill, decode) == [1, 1, 1, 1]
        await rig.becomes(old_decode, "")


async def test_a_connection_is_kept_and_its_next_request_has_the_new_timeout() -> None:
    async with running_told_rig() as rig:
        client = await rig.client()
        assert (await client.post(COMPLETIONS, PROMPT)).status == 200
        await rig.tell(request_timeout_s=0.2)
        rig.decode.close_gate(Gate.ANSWER)
        answer = await client.post(COMPLETIONS, PROMPT)
        assert answer.status == 504
        assert answer.json()["error"]["code"] == "deadline_passed"


async def test_a_request_that_runs_keeps_its_own_timeout() -> None:
    async with running_told_rig() as rig:
        rig.decode.close_gate(Gate.ANSWER)
        running = await send(rig)
        await until(lambda: len(rig.decode.seen) == 1)
        await rig.tell(request_timeout_s=0.05)
        assert (await post(rig)).status == 504
        rig.decode.open_gate(Gate.ANSWER)
        assert (await running.receive()).status == 200


async def test_more_attempts_are_made() -> None:
    async with running_told_rig(pairs=2, max_decode_attempts=1) as rig:
        both: dict[str, Any] = {"decode_urls": tuple(engine.url for engine in rig.decodes), "probe_interval_s": 0.05}
        await rig.tell(**both)
        await rig.usable(*rig.decodes)
        for engine in rig.decodes:
            engine.fault = Fault.ERROR_500
        assert (await post(rig)).status == 500
        assert sum(num_seen(*rig.decodes)) == 1
        await rig.tell(max_decode_attempts=2)
        assert (await post(rig)).status == 500
        assert sum(num_seen(*rig.decodes)) == 3


async def test_a_request_that_waits_enters_when_there_is_more_room() -> None:
    async with running_told_rig(max_prefill_backlog_tokens=4) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        first, second = await send(rig), await send(rig)
        third = [await send(rig) for _ in range(3)]
        await until(lambda: rig.router.services.num_queued > 0)
        await rig.tell(max_prefill_backlog_tokens=4000)
        await until(lambda: rig.router.services.num_queued == 0)
        rig.prefill.open_gate(Gate.PREFILL)
        for client in (first, second, *third):
            assert (await client.receive()).status == 200
        await until(lambda: _backlog(rig) == 0)


def _backlog(rig: ToldRig) -> int:
    return sum(admission.backlog_tokens for admission in rig.router.services.admissions)


async def test_less_room_gives_back_all_that_was_taken() -> None:
    async with running_told_rig(max_prefill_backlog_tokens=4000) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        clients = [await send(rig) for _ in range(4)]
        await until(lambda: len(rig.prefill.seen) == 4)
        await rig.tell(max_prefill_backlog_tokens=4)
        clients += [await send(rig) for _ in range(4)]
        await until(lambda: rig.router.services.num_queued == 4)
        rig.prefill.open_gate(Gate.PREFILL)
        for client in clients:
            assert (await client.receive()).status == 200
        await until(lambda: _backlog(rig) == 0)


async def test_a_full_queue_refuses() -> None:
    async with running_told_rig(max_prefill_backlog_tokens=1, max_queued_requests=10) as rig:
        await rig.tell(max_queued_requests=0)
        rig.prefill.close_gate(Gate.PREFILL)
        running = await send(rig)
        await until(lambda: len(rig.prefill.seen) == 1)
        assert (await post(rig)).status == 429
        rig.prefill.open_gate(Gate.PREFILL)
        assert (await running.receive()).status == 200


async def test_a_shorter_queue_keeps_those_that_wait_whatever_key_comes(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{sha256(b'a').hexdigest()} a\n{sha256(b'b').hexdigest()} b\n")
    async with running_told_rig(max_prefill_backlog_tokens=1, api_key_file=keys) as rig:
        rig.prefill.close_gate(Gate.PREFILL)
        clients = [await send(rig, authorization="Bearer a") for _ in range(6)]
        await until(lambda: rig.router.services.num_queued == 5)
        await rig.tell(max_queued_requests=2)
        assert (await post(rig, headers={"authorization": "Bearer b"})).status == 429
        assert rig.router.services.num_queued == 5
        rig.prefill.open_gate(Gate.PREFILL)
        for client in clients:
            assert (await client.receive()).status == 200


async def test_an_alias_that_a_start_refuses_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with running_told_rig() as rig:
        rig.told["model_aliases"] = ("m=other",)
        hang_up(rig)
        await until(lambda: "settings not changed reason=--model-alias m=other: " in caplog.text)
        assert (await post(rig)).status == 200
        assert rig.decode.seen[-1].body["model"] == "m"


async def test_decode_engines_that_no_gateway_can_be_told_are_refused_where_gateways_ask(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_told_rig(picker_port=fresh_port()) as rig:
        rig.told["decode_urls"] = ("http://localhost:8000",)
        hang_up(rig)
        await until(lambda: "settings not changed reason=--decode http://localhost:8000: gateways take" in caplog.text)
        assert (await post(rig)).status == 200


async def test_an_answer_that_was_asked_for_by_an_old_name_is_not_told_with_the_new_model() -> None:
    async with running_told_rig(model_aliases=("nick=m",)) as rig:
        assert (await post(rig, {**PROMPT, "model": "nick"})).status == 200
        assert await aliases_told(rig) == ["m"]
        await rig.tell(model_aliases=("nick=n",))
        assert await aliases_told(rig) == [""]


async def aliases_told(rig: ToldRig) -> list[str]:
    """Of the last requests: the model that each one's name stood for."""
    page = (await (await rig.internal()).get("/pdcluster/status")).json()
    return [one.get("alias_of", "") for one in page["recent"]]


async def test_models_have_other_names() -> None:
    async with running_told_rig(unknown_models="refuse") as rig:
        asked = {**PROMPT, "model": "nick"}
        assert (await post(rig, asked)).status == 404
        await rig.tell(model_aliases=("nick=m",))
        assert (await post(rig, asked)).status == 200
        assert rig.decode.seen[-1].body["model"] == "m"
        listed = json.loads((await (await rig.client()).get("/v1/models")).body)
        assert "nick" in [model["id"] for model in listed["data"]]
        await rig.tell(model_aliases=(), unknown_models="ask")
        assert (await post(rig, asked)).status == 200
        assert rig.decode.seen[-1].body["model"] == "nick"


async def test_silent_streams_get_comments_from_now_on() -> None:
    async with running_told_rig(keep_alive_s=0) as rig:
        await rig.tell(keep_alive_s=0.1)
        rig.decode.close_gate(Gate.ANSWER)
        client = await send(rig, STREAM)
        await until(lambda: rig.router.keep_alives.num_comments > 1)
        await rig.tell(keep_alive_s=0)
        rig.decode.open_gate(Gate.ANSWER)
        answer = await client.receive()
        assert answer.status == 200
        num_comments = rig.router.keep_alives.num_comments
        assert answer.body.count(b"\n:") + answer.body.startswith(b":") == num_comments


async def test_watched_streams_are_looked_at_sooner() -> None:
    async with running_told_rig(keep_alive_s=3600) as rig:
        rig.decode.close_gate(Gate.ANSWER)
        client = await send(rig, STREAM)
        await until(lambda: len(rig.decode.seen) == 1)
        await rig.tell(keep_alive_s=0.1)
        await until(lambda: rig.router.keep_alives.num_comments > 1)
        rig.decode.open_gate(Gate.ANSWER)
        assert (await client.receive()).status == 200


async def test_bodies_of_new_connections_may_be_larger() -> None:
    async with running_told_rig(max_body_bytes=1024) as rig:
        large = {**PROMPT, "prompt": "x" * 2000}
        assert (await post(rig, large)).status == 413
        await rig.tell(max_body_bytes=4096)
        assert (await post(rig, large)).status == 200


async def test_the_page_of_the_pool_tells_the_policy_that_holds() -> None:
    async with running_told_rig() as rig:
        await rig.tell(policy="affinity")
        assert (await (await rig.internal()).get(POOL_PATH)).json()["policy"] == "affinity"
        assert (await post(rig)).status == 200


async def test_what_cannot_be_used_changes_nothing_and_what_needs_a_restart_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with running_told_rig() as rig:
        rig.told["idle_timeout_s"] = -1
        hang_up(rig)
        await until(lambda: "settings not changed reason=--idle-timeout is -1" in caplog.text)
        assert (await post(rig)).status == 200
        rig.told |= {"idle_timeout_s": 50.0, "host": "0.0.0.0", "advertise_url": "http://h:1"}
        hang_up(rig)
        await until(lambda: "need a restart have changed settings=--host,--advertise-url" in caplog.text)
        assert "settings read anew changed=--idle-timeout" in caplog.text
        assert rig.router.settings.idle_timeout_s == 50.0
        assert rig.router.settings.host == "127.0.0.1"
        assert (await post(rig)).status == 200


async def test_a_file_that_is_written_anew_is_read_by_a_whole_router(tmp_path: Path) -> None:
    wire = Wire()
    prefill, old, new = FakeEngine(wire), FakeEngine(wire), FakeEngine(wire)
    for engine in (prefill, old, new):
        await engine.start()
    told = tmp_path / "settings"
    told.write_text(_file_of(prefill, old))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdcluster_router", "--settings", str(told)),
        stdout=PIPE,
        stderr=STDOUT,
        env={**os.environ, SECRET_VARIABLE: "the secret of the tests"},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            url = (await process.stdout.readline()).decode().split()[-1]
            told.write_text(_file_of(prefill, old) + "idle-timeout = 50\n")
            process.send_signal(signal.SIGHUP)  # It has read the file, and does not serve yet.
            await line_with(process.stdout, "settings read anew changed=--idle-timeout")
            client = await RawClient.connect(url)
            assert (await client.post(COMPLETIONS, PROMPT)).status == 200
            told.write_text(_file_of(prefill, new) + 'idle-timeout = "x"\n')
            process.send_signal(signal.SIGHUP)
            await line_with(process.stdout, "settings not changed reason=--settings ")
            assert (await client.post(COMPLETIONS, PROMPT)).status == 200
            assert num_seen(old, new) == [2, 0]
            told.write_text(_file_of(prefill, new, port=1))
            process.send_signal(signal.SIGHUP)
            await line_with(process.stdout, "settings that need a restart have changed settings=--port")
            while num_seen(new) == [0]:
                assert (await client.post(COMPLETIONS, PROMPT)).status == 200
    finally:
        process.terminate()
        assert await process.wait() == 0
        for engine in (prefill, old, new):
            await engine.stop()


def _file_of(prefill: FakeEngine, decode: FakeEngine, port: int = 0) -> str:
    return f'port = {port}\nprefill = ["{prefill.url}"]\ndecode = ["{decode.url}"]\n'


async def line_with(lines: asyncio.StreamReader, words: str) -> None:
    """Reads until such a line has come."""
    while words not in (line := (await lines.readline()).decode()):
        assert line, f"the router has ended without {words}"
