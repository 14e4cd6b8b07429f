"""Each finding of the router's review, sent anew over raw sockets to a router process with fake engines."""

from __future__ import annotations

import pytest

from integration.review import high, low, medium
from integration.review.table import NAMES, TABLE

pytestmark = pytest.mark.anyio
ROOMS = (high, medium, low)


def test_each_finding_has_its_row() -> None:
    assert tuple(TABLE) == NAMES
    assert {finding.check.__module__ for finding in TABLE.values()} == {room.__name__ for room in ROOMS}


@pytest.mark.parametrize("name", NAMES)
async def test_finding(name: str) -> None:
    await TABLE[name].check()
