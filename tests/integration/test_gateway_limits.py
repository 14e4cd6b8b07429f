"""What bounds and guards a gateway's requests: keys, room, time, and gateways that are set up wrongly."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Final

import pytest
from grpc import aio

from fakes.certificates import Authority
from fakes.faults import Gate
from fakes.http import request_bytes
from fakes.router import COMPLETIONS, PROMPT, STREAM, running_rig
from gateway.rig import gateway, get, require_same
from integration.ports import fresh_port
from patience import PATIENCE_S

pytestmark = pytest.mark.anyio

GRPCS_OWN_S: Final = 120.0
"""How long gRPC would wait for a handshake by itself."""


@pytest.mark.parametrize("mode", ["NONE", "STREAMED", "BUFFERED_PARTIAL"])
async def test_a_gateway_that_is_set_up_wrongly_is_told_the_cure(mode: str) -> None:
    async with gateway({"request_body_mode": mode, "request_trailer_mode": "SKIP"}) as both:
        answer = await both.envoy.ask(PROMPT)
        assert (answer.status, answer.json()["error"]["code"]) == (500, "bad_gateway_mode")
        assert f"request_body_mode is {mode}" in answer.json()["error"]["message"]
        assert (await get(both, "/v1/models")).status == 200


async def test_a_client_that_sends_no_body_is_told_in_time() -> None:
    async with gateway(client_read_timeout_s=0.3) as both:
        client = await both.envoy.client()
        await client.send(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\n{")
        async with asyncio.timeout(PATIENCE_S):
            answer = await client.receive()
        assert (answer.status, answer.json()["error"]["code"]) == (408, "client_too_slow")


@pytest.mark.parametrize(
    ("has_tls", "said"),
    [
        (False, b""),
        (False, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        (True, b""),
        (True, b"\x16\x03\x01\x02\x00\x01"),
    ],
    ids=["plain, nothing", "plain, a preface", "TLS, nothing", "TLS, the begin of a hello"],
)
async def test_a_connection_that_never_becomes_one_of_grpc_is_closed_in_time(
    has_tls: bool, said: bytes, authority: Authority, tmp_path: Path
) -> None:
    files = authority.issue().write(tmp_path / "picker") if has_tls else {}
    settings = {f"picker_{name}": path for name, path in files.items()}
    async with running_rig(picker_port=(port := fresh_port()), client_read_timeout_s=0.3, **settings):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said)
        async with asyncio.timeout(GRPCS_OWN_S / 2):
            await reader.read()
        writer.close()


async def test_keys_are_asked_for_and_stay_in_the_router(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{hashlib.sha256(b'alice-key').hexdigest()}  alice\n")
    async with gateway(api_key_file=keys, engine_api_key="engines-own") as both:
        require_same(*await both.both(PROMPT))
        require_same(*await both.both(PROMPT, authorization="Bearer wrong"))
        require_same(*await both.both(PROMPT, authorization="Bearer alice-key"))
        assert [seen.message.headers["authorization"] for seen in both.rig.decode.seen] == ["Bearer engines-own"] * 2
        assert (await get(both, "/v1/models")).status == 401
        assert (await get(both, "/v1/models", {"x-api-key": "alice-key"})).status == 200
        assert both.rig.decode.list_headers["authorization"] == "Bearer engines-own"
        assert "x-api-key" not in both.rig.decode.list_headers


async def test_too_many_requests_at_a_time_are_told_so() -> None:
    async with gateway(max_connections=1) as both:
        both.rig.prefill.close_gate(Gate.PREFILL)
        first = await both.envoy.client()
        await first.send(request_bytes(COMPLETIONS, json.dumps(PROMPT).encode()))
        await both.rig.prefill.next_request()
        answer = await both.envoy.ask(PROMPT)
        assert (answer.status, answer.json()["error"]["code"]) == (503, "too_many_connections")
        both.rig.prefill.open_gate(Gate.PREFILL)
        assert (await first.receive()).status == 200


async def test_bodies_take_the_routers_common_room() -> None:
    async with gateway(max_buffered_bytes=1 << 20) as both:
        both.rig.prefill.close_gate(Gate.PREFILL)
        large = {**PROMPT, "prompt": "x" * 500_000}
        first = await both.envoy.client()
        await first.send(request_bytes(COMPLETIONS, json.dumps(large).encode()))
        await both.rig.prefill.next_request()
        answer = await both.envoy.ask(large)
        assert (answer.status, answer.json()["error"]["code"]) == (503, "no_room")
        both.rig.prefill.open_gate(Gate.PREFILL)
        assert (await first.receive()).status == 200
        assert both.rig.router.room.used_bytes == 0


async def test_a_request_is_in_the_access_log_as_any(tmp_path: Path) -> None:
    async with gateway(access_log=tmp_path / "log", trusted_proxies=("127.0.0.0/8",)) as both:
        for body in (PROMPT, b"{", STREAM):
            await both.envoy.ask(body, headers={"x-request-id": "R-1", "x-forwarded-for": "192.0.2.7"})
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["status"] for line in lines] == [200, 400, 200]
    assert {line["request_id"] for line in lines} == {"R-1"}
    assert {line["client_address"] for line in lines} == {"192.0.2.7"}
    assert lines[0]["decode_engine"] == lines[2]["decode_engine"] == "decode-0"


async def test_probes_learn_whether_the_picker_is_ready() -> None:
    async with gateway() as both, aio.insecure_channel(f"127.0.0.1:{both.rig.router.settings.picker_port}") as channel:

        async def check(service: str) -> bytes:
            asked = b"" if not service else b"\x0a%c%b" % (len(service), service.encode())
            answer: bytes = await channel.unary_unary("/grpc.health.v1.Health/Check")(asked, timeout=PATIENCE_S)
            return answer

        ready = ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
        assert [await check(service) for service in ready] == [b"\x08\x01"] * 4
        with pytest.raises(aio.AioRpcError, match="NOT_FOUND"):
            await check("nothing")
        both.rig.router.drain()
        assert [await check(service) for service in ready] == [b"\x08\x01"] * 2 + [b"\x08\x02"] * 2


async def test_a_bug_of_ours_fails_one_request_and_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway() as both:
        with monkeypatch.context() as patch:
            patch.setattr(both.rig.router.services, "decode_params", _fails)
            answer = await both.envoy.ask(PROMPT)
        assert (answer.status, answer.json()["error"]["code"]) == (500, "internal_error")
        assert (await both.envoy.ask(PROMPT)).status == 200


def _fails(*_: object, **__: object) -> None:
    raise RuntimeError("a bug")
