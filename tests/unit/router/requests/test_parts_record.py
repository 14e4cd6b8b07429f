"""The record of a request in parts: which of its parts the client still waits for."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from fakes.quiet_world import PATIENT
from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.secret import make_secret
from pdcluster_router.core.apis.client_apis import OPENAI
from pdcluster_router.core.apis.rewrite import parse_body
from pdcluster_router.requests.part import PartCycle, PartError
from pdcluster_router.requests.parts_record import PartsRecord
from pdcluster_router.requests.record import Record
from pdcluster_router.requests.request import ClientRequest
from pdcluster_router.services import Services
from pdcluster_router.settings.router_settings import build_settings

pytestmark = pytest.mark.anyio


class Unasked:
    """A whole whose parts say nothing."""

    def part_begins(self, headers: bytes) -> None: ...

    def part_says(self, part: PartCycle, chunk: bytes) -> None: ...

    def part_ends(self, part: PartCycle) -> None: ...

    def part_fails(self, part: PartCycle, error: PartError) -> None: ...

    def part_displaces(self) -> None: ...

    def part_is_sent(self, part: PartCycle) -> None: ...


@pytest.fixture
async def services() -> AsyncIterator[Services]:
    urls = {"prefill_urls": ["http://p:1"], "decode_urls": ["http://d:1"]}
    made = Services(build_settings(**urls, internal_port=9), make_secret("s" * 32))
    yield made
    await made.close()


def request_to(services: Services, request_id: str = "R") -> ClientRequest:
    return ClientRequest(
        path=b"/v1/completions",
        headers=b"",
        body=parse_body(b'{"model": "m", "prompt": "a prompt"}'),
        client="",
        request_id=request_id,
        api=OPENAI,
        timeouts=PATIENT,
        terms=services.terms,
        has_transfer=True,
        received_at=services.now(),
    )


def parts_of(num_parts: int) -> list[PartCycle]:
    return [PartCycle(Unasked(), number, b"/v1/completions", f"R-{number}", 0) for number in range(num_parts)]


def unanswered(record: PartsRecord) -> list[str]:
    return [row.request_id for row in record.unanswered()]


async def test_the_client_waits_for_parts_at_engines_and_in_the_queue_whose_answers_are_not_whole(
    services: Services,
) -> None:
    parts = parts_of(3)
    parts[0].teller = Record(services, request_to(services, "R-0"), TransferId("t"), services.now())
    record = PartsRecord(services, request_to(services), parts, 1)
    assert unanswered(record) == ["R-0", "R-1", "R-2"]
    assert [row.transfer_id for row in record.unanswered()] == ["t", "", ""]
    parts[1].response_complete = True
    assert unanswered(record) == ["R-0", "R-2"]
    parts[0].response_complete = parts[2].response_complete = True
    assert unanswered(record) == []


async def test_a_request_that_has_ended_waits_for_no_part_although_parts_have_no_answer(services: Services) -> None:
    record = PartsRecord(services, request_to(services), parts_of(2), 1)
    record.client_gone("reading")
    assert unanswered(record) == []
