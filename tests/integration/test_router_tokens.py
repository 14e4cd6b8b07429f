"""Clients that show tokens of an identity provider, over real sockets: who gets in, and who hears of it."""

from __future__ import annotations

import asyncio
import json
import logging
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import pytest

from fakes.http import Message, request_bytes
from fakes.identity import (
    ISSUER,
    RULES,
    KeyServerFake,
    Manner,
    bearer,
    claims_of,
    key_set,
    running_key_fake,
    signing_key,
    token_of,
)
from fakes.router import CHAT, COMPLETIONS, PROMPT, Rig, post, running_rig, until
from integration.authorities import make_authority
from patience import PATIENCE_S
from pdcluster_kube.backoff import Backoff
from pdcluster_router.front.tokens import key_server, start

pytestmark = pytest.mark.anyio

MESSAGES: Final = "/v1/messages"
KEY: Final = "sk-first"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crowded machine may stand still for seconds: each answer of a key server is waited for."""
    monkeypatch.setattr(start, "START_S", PATIENCE_S)
    monkeypatch.setattr(key_server, "ASK_S", PATIENCE_S)
    monkeypatch.setattr(key_server, "EARLY_S", PATIENCE_S)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys.json"
    file.write_bytes(key_set(signing_key()))
    return file


def of_file(file: Path, **more: Any) -> dict[str, Any]:
    return {"jwt_key_set": str(file), "api_key_interval_s": 0.01, **RULES, **more}


def of_url(server: KeyServerFake, **more: Any) -> dict[str, Any]:
    return {"jwt_key_set": server.url, **RULES, **more}


async def refusal(rig: Rig, token: str) -> str:
    answer = await post(rig, headers=bearer(token))
    assert (answer.status, answer.json()["error"]["code"]) == (401, "invalid_token")
    message: str = answer.json()["error"]["message"]
    assert answer.headers["www-authenticate"] == f'Bearer error="invalid_token", error_description="{message}"'
    return message


async def is_admitted(rig: Rig, token: str) -> bool:
    return (await post(rig, headers=bearer(token))).status == 200


async def admitted(rig: Rig, token: str) -> None:
    """The token lets its client in, at last."""
    async with asyncio.timeout(PATIENCE_S):
        while not await is_admitted(rig, token):
            await asyncio.sleep(0.01)


async def health(rig: Rig) -> Message:
    async with asyncio.timeout(PATIENCE_S):
        return await (await rig.client()).get("/health")


# Tokens.


async def test_a_token_lets_its_client_in_and_goes_no_further(key_file: Path, tmp_path: Path) -> None:
    log = tmp_path / "access"
    async with running_rig(**of_file(key_file), engine_api_key="engines", access_log=log) as rig:
        token = token_of("alice@example")
        for path, body in (
            (COMPLETIONS, PROMPT),
            (CHAT, {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
        ):
            assert (await (await rig.client()).post(path, body, bearer(token))).status == 200
        client = await rig.client()
        await client.send(request_bytes("/v1/models", b"", bearer(token), "GET"))
        assert (await client.receive()).status == 200
        for engine in (rig.prefill, rig.decode):
            seen = [one.message for one in engine.seen]
            assert {one.headers.get("authorization") for one in seen} == {"Bearer engines"}
            assert not any(token in str(one.headers) + one.body.decode() for one in seen)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["client"] for line in lines} == {"jwt:alice@example"}
    assert token not in log.read_text()


async def test_anthropics_clients_may_show_it_too(key_file: Path) -> None:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    async with running_rig(**of_file(key_file)) as rig:
        assert (await (await rig.client()).post(MESSAGES, body, {"x-api-key": token_of()})).status == 200
        answer = await (await rig.client()).post(MESSAGES, body, {"x-api-key": token_of(aud="other")})
        assert (answer.status, answer.json()["error"]["type"]) == (401, "authentication_error")
        assert answer.json()["error"]["message"].startswith("aud is other, and pool is expected here")


async def test_a_token_that_is_not_good_reaches_no_engine_and_is_told_why(
    key_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each planted token is in no log, no error and no page."""
    caplog.set_level(logging.DEBUG)
    other = signing_key("second")
    log = tmp_path / "access"
    async with running_rig(**of_file(key_file), access_log=log) as rig:
        bad = {
            token_of(exp=1_700_000_000): "exp is 1700000000, and it is",
            token_of(nbf=4_000_000_000): "nbf or iat is 4000000000",
            token_of(aud="other"): "aud is other, and pool is expected here",
            token_of(iss="https://evil.example"): f"iss is https://evil.example, and {ISSUER} is expected here",
            token_of(sub="a b"): "sub names the client",
            token_of(key=other): "kid is second, and none of the 1 known keys has it",
            other.sign(claims_of(), kid="first"): "the signature of the token is not of the key",
            token_of(key=signing_key("first", "RS256")): "alg is RS256, and the key signs by ES256",
            token_of() + "x": "signature",
            token_of()[:-1]: "signature",
        }
        for token, says in bad.items():
            assert says in await refusal(rig, token)
        assert await refusal(rig, "sk-nothing") == "this is no token (JWT): send one of the identity provider, whole"
        answer = await post(rig)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert f"this router asks for a token (JWT) of {ISSUER}" in answer.json()["error"]["message"]
        assert (rig.prefill.seen, rig.decode.seen) == ([], [])
        assert await rig.metric('pdcluster_router_requests_total{outcome="rejected"}') == len(bad) + 2
        pages = [(await (await rig.internal()).get(path)).body.decode() for path in ("/status", "/pdcluster/pool")]
    for token in bad:
        assert not [text for text in (caplog.text, log.read_text(), *pages) if token.split(".")[2] in text]


async def test_keys_and_tokens_work_side_by_side_each_with_its_limits(key_file: Path, tmp_path: Path) -> None:
    """Alice's key and alice's token are two clients."""
    keys = tmp_path / "keys"
    whose = "alice prompt_tokens_per_minute=1000\njwt:alice max_concurrent=5 prompt_tokens_per_minute=1000\n"
    keys.write_text(f"{sha256(KEY.encode()).hexdigest()} {whose}defaults prompt_tokens_per_minute=1\n")
    trace = tmp_path / "trace"
    async with running_rig(**of_file(key_file), api_key_file=keys, trace_file=trace) as rig:
        assert await is_admitted(rig, KEY)
        assert await is_admitted(rig, token_of("alice"))
        assert (await post(rig, headers=bearer("sk-other"))).json()["error"]["code"] == "invalid_api_key"
        assert " or an API key" in (await post(rig)).json()["error"]["message"]
        limited = await post(rig, headers=bearer(token_of("bob")))
        assert (limited.status, limited.json()["error"]["code"]) == (413, "prompt_over_limit")
        assert "and the client jwt:bob may send 1 a minute" in limited.json()["error"]["message"]
        name = "pdcluster_router_key_limited_total"
        assert await rig.metric(f'{name}{{client="jwt:*",limit="prompt_tokens_per_minute"}}') == 1
        assert await rig.metric('pdcluster_router_key_running{client="jwt:alice"}') == 0
    assert [json.loads(line)["client"] for line in trace.read_text().splitlines()] == ["alice", "jwt:alice"]


# Keys in a file.


async def test_a_changed_key_set_is_taken_and_one_that_cannot_be_used_is_told_once(
    key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    second = signing_key("second")
    async with running_rig(**of_file(key_file)) as rig:
        assert await is_admitted(rig, token_of())
        key_file.write_bytes(key_set(second))
        await admitted(rig, token_of(key=second))
        assert "kid is first" in await refusal(rig, token_of())
        key_file.write_text("<html>")
        await until(lambda: "token keys not changed" in caplog.text)
        assert await is_admitted(rig, token_of(key=second))
    assert caplog.text.count("token keys not changed reason=--jwt-key-set") == 1


async def test_a_request_whose_key_goes_before_its_body_is_whole_is_judged_again(key_file: Path) -> None:
    async with running_rig(**of_file(key_file)) as rig:
        client = await rig.client()
        body = json.dumps(PROMPT).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {token_of()}\r\n"
        await client.send(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:5])
        await until(lambda: rig.router.clients.num_open == 1)
        before = rig.router.access.keys
        key_file.write_bytes(key_set(signing_key("second")))
        await until(lambda: rig.router.access.keys is not before)
        await client.send(body[5:])
        async with asyncio.timeout(PATIENCE_S):
            assert (await client.receive()).status == 401
        assert rig.decode.seen == []


# Keys at a URL.


async def test_the_keys_of_a_url_are_known_before_the_first_request_and_read_again() -> None:
    second = signing_key("second")
    async with (
        running_key_fake(key_set(signing_key())) as server,
        running_rig(**of_url(server, jwt_interval_s=0.02)) as rig,
    ):
        assert await is_admitted(rig, token_of())
        server.document = key_set(second)
        await admitted(rig, token_of(key=second))
        assert not await is_admitted(rig, token_of())


async def test_tokens_of_a_key_that_is_not_known_do_not_bring_one_question_each() -> None:
    second = signing_key("second")
    async with running_key_fake(key_set(signing_key())) as server, running_rig(**of_url(server)) as rig:
        for _ in range(20):
            assert "kid is second" in await refusal(rig, token_of(key=second))
        assert server.num_questions == 1


async def test_one_token_of_a_key_that_is_not_known_brings_the_next_question_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also a token that comes soon after a question."""
    monkeypatch.setattr(key_server, "EARLY_S", 0.2)
    second = signing_key("second")
    async with running_key_fake(key_set(signing_key())) as server, running_rig(**of_url(server)) as rig:
        server.document = key_set(signing_key(), second)
        assert "kid is second" in await refusal(rig, token_of(key=second))
        await until(lambda: server.num_questions == 2)
        await admitted(rig, token_of(key=second))


@pytest.mark.parametrize(
    ("manner", "says"),
    [
        (Manner.GARBAGE, "it is no key set"),
        (Manner.ENDLESS, "larger than 1048576 bytes"),
        (Manner.SILENT, "no whole answer within 0.2 s"),
        (Manner.BUSY, "status 503: name the URL of the key set itself"),
        (Manner.MOVED, "status 302"),
    ],
)
async def test_a_server_that_stops_answering_well_leaves_the_old_keys_and_is_told_once(
    manner: Manner, says: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        running_key_fake(key_set(signing_key())) as server,
        running_rig(**of_url(server, jwt_interval_s=0.02)) as rig,
    ):
        monkeypatch.setattr(key_server, "_BACKOFF", Backoff(0.01, 0.02))
        if manner is Manner.SILENT:
            monkeypatch.setattr(key_server, "ASK_S", 0.2)
        server.manner = manner
        asked = server.num_questions
        await until(lambda: "token keys not read" in caplog.text and server.num_questions > asked + 4)
        assert await is_admitted(rig, token_of())
        assert (await health(rig)).status == 200
        line = next(line for line in caplog.text.splitlines() if "token keys not read" in line)
        assert says in line
        assert "age_s=" in line
        monkeypatch.setattr(key_server, "ASK_S", PATIENCE_S)
        server.manner = Manner.WELL
        await until(lambda: "token keys are read again" in caplog.text)
    assert manner is Manner.SILENT or caplog.text.count("token keys not read") == 1  # A good answer may be late, too.


async def test_without_its_keys_a_router_is_not_ready_and_lets_no_token_in_until_they_come(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(key_server, "_BACKOFF", Backoff(0.01, 0.02))
    keys = tmp_path / "keys"
    keys.write_text(f"{sha256(KEY.encode()).hexdigest()} team-a\n")
    async with running_key_fake(key_set(signing_key())) as server:
        await server.stop()
        async with running_rig(**of_url(server), api_key_file=keys) as rig:
            answer = await post(rig, headers=bearer(token_of()))
            assert (answer.status, answer.json()["error"]["code"]) == (503, "no_token_keys")
            assert answer.headers["retry-after"] == "2"
            said = await health(rig)
            assert (said.status, said.json()["error"]["code"]) == (503, "not_ready")
            assert f"the keys of {ISSUER} are not known yet" in said.json()["error"]["message"]
            assert await is_admitted(rig, KEY)
            await until(lambda: "token keys not read" in caplog.text)
            await server.start()
            await admitted(rig, token_of())
            assert (await health(rig)).status == 200
    assert "cannot connect" in caplog.text


async def test_a_router_ends_at_once_while_its_key_server_is_silent() -> None:
    async with (
        running_key_fake(key_set(signing_key())) as server,
        running_rig(**of_url(server, jwt_interval_s=0.01)) as rig,
    ):
        server.manner = Manner.SILENT
        asked = server.num_questions
        await until(lambda: server.num_questions > asked)
        assert await is_admitted(rig, token_of())


async def test_keys_come_over_tls_of_an_authority_that_this_system_trusts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ca_file, tls = make_authority(tmp_path, "ours")
    monkeypatch.setattr(key_server, "_BACKOFF", Backoff(0.01, 0.02))
    async with running_key_fake(key_set(signing_key()), tls) as server:
        async with running_rig(**of_url(server)) as rig:
            assert (await post(rig, headers=bearer(token_of()))).status == 503
            assert server.num_questions == 0
        assert "name a file with it in SSL_CERT_FILE" in caplog.text
        monkeypatch.setenv("SSL_CERT_FILE", str(ca_file))
        async with running_rig(**of_url(server)) as rig:
            assert await is_admitted(rig, token_of())
