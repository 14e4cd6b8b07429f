"""On which terms a gateway's request is served."""

from __future__ import annotations

import asyncio

import pytest

from pdcluster_protocol.labels import Role
from pdcluster_router.core.apis.client_apis import MESSAGES, RESPONSES, ClientApi
from pdcluster_router.core.apis.messages import parse_messages
from pdcluster_router.core.apis.openai_errors import RefusedRequest
from pdcluster_router.core.engines.membership import Member
from pdcluster_router.core.engines.policies.least_tokens import least_tokens
from pdcluster_router.core.requests.pairing import Retries, Timeouts
from pdcluster_router.engines.roster import Roster, Terms
from pdcluster_router.http.connections import PoolLimits
from pdcluster_router.requests.gateway import UNREAD_IDLE_S, for_gateway, may_be_whole
from pdcluster_router.requests.request import ClientRequest

pytestmark = pytest.mark.anyio


class Here:
    """A gateway as far as terms look at one."""

    def __init__(self, endpoints: frozenset[str] | None = None, *, carries_answer: bool = True) -> None:
        self.endpoints = endpoints
        self.carries_answer = carries_answer

    def post(self, *_: object) -> None: ...


def roster(*urls: str) -> Roster:
    assert asyncio.get_running_loop()
    found = Roster(PoolLimits(1, 1.0, 1.0), least_tokens, lambda: None, lambda _: None, lambda: 0.0)
    members = [Member(url, Role.DECODE) for url in urls]
    found.update([Member("http://10.9.0.1:1", Role.PREFILL), *members])
    for engine in found.all_engines():
        engine.is_healthy = True
    found.refresh()
    return found


def request(found: Roster, api: ClientApi = MESSAGES) -> ClientRequest:
    return ClientRequest(
        path=b"/v1/messages",
        headers=b"",
        request_id="r",
        api=api,
        body=parse_messages(b'{"messages": []}'),
        timeouts=Timeouts(None, 300.0),
        terms=Terms(found.place_decode, found.place_prefill, Retries(), {}),
        has_transfer=True,
        client="",
        received_at=0.0,
    )


async def test_decode_is_asked_once_and_prefill_as_often_as_ever() -> None:
    asked = request(roster("http://10.0.0.1:1"))
    retries = for_gateway(asked, Here(), 3600.0).terms.retries  # type: ignore[arg-type]  # no call is made of it
    assert (retries.max_decode_attempts, retries.max_prefill_attempts) == (1, asked.terms.retries.max_prefill_attempts)


async def test_only_engines_that_the_gateway_allows_and_can_name_are_placed() -> None:
    found = roster("http://10.0.0.1:1", "http://10.0.0.2:1", "http://named:1")
    asked = request(found)

    def placed(endpoints: frozenset[str] | None) -> set[str]:
        terms = for_gateway(asked, Here(endpoints), 3600.0).terms  # type: ignore[arg-type]  # as above
        engines = [terms.place_decode(asked, ()) for _ in range(32)]
        return {engine.url for engine in engines if engine is not None}

    assert placed(None) <= {"http://10.0.0.1:1", "http://10.0.0.2:1"}
    assert placed(frozenset({"10.0.0.2:1", "10.7.7.7:1"})) == {"http://10.0.0.2:1"}
    assert placed(frozenset()) == set()


async def test_an_answer_that_goes_by_unread_has_its_time_as_a_whole() -> None:
    asked = request(roster("http://10.0.0.1:1"))
    read, unread = (for_gateway(asked, Here(carries_answer=carries), 3600.0) for carries in (True, False))  # type: ignore[arg-type]  # as above
    assert (read.timeouts, read.api) == (asked.timeouts, asked.api)
    assert (unread.timeouts.first_byte_s, unread.timeouts.idle_s, unread.api.unfinished) == (
        3600.0,
        UNREAD_IDLE_S,
        None,
    )
    assert unread.timeouts.transfer_s == asked.timeouts.transfer_s


async def test_an_answer_that_does_not_show_its_client_that_it_is_broken_never_goes_by_unread() -> None:
    asked = request(roster("http://10.0.0.1:1"), RESPONSES)
    assert for_gateway(asked, Here(), 3600.0).api is RESPONSES  # type: ignore[arg-type]  # as above
    with pytest.raises(RefusedRequest) as refused:
        for_gateway(asked, Here(carries_answer=False), 3600.0)  # type: ignore[arg-type]  # as above
    assert refused.value.error.code == "responses_not_served"
    assert "response_body_mode NONE" in refused.value.error.message


def test_an_answer_to_a_request_that_waits_is_never_whole() -> None:
    assert not may_be_whole(None)
