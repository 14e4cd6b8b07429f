"""Whose requests were ahead of one in the queue: how many of them are looked at."""

from __future__ import annotations

import pytest

from pdcluster_protocol.kept import KeptRequest, QueueAhead
from pdcluster_protocol.labels import Role
from pdcluster_protocol.secret import make_secret
from pdcluster_router.front.requests_page import with_lines
from pdcluster_router.services import Services
from pdcluster_router.settings.router_settings import build_settings

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("most", "told"), [(1, {"b": 1}), (2, {"a": 1, "b": 1}), (3, {"a": 2, "b": 1}), (99, {"a": 2, "b": 1})]
)
async def test_the_last_ones_are_looked_at_and_none_before_or_behind(most: int, told: dict[str, int]) -> None:
    urls = {"prefill_urls": ["http://p:1"], "decode_urls": ["http://d:1"]}
    services = Services(build_settings(**urls, internal_port=9), make_secret("s" * 32))
    for name in ("before", "a", "a", "b", "behind"):
        services.admissions.shared[Role.DECODE].turn_log.note(name, 1)
    ahead = QueueAhead(queue=Role.DECODE.value, first_turn=1, num_requests=3)
    found = with_lines(services, KeptRequest(request_id="R", ahead=ahead), most).ahead
    assert found is not None
    assert {line.client: line.num_requests for line in found.lines} == told
    assert found.num_known == sum(told.values())
    await services.close()
