"""A decode rank lets a prefill rank write only if both have the same LoRA adapter for the request."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from pdcluster_connector.core.receiving import Reply
from pdcluster_connector.core.reception import ReceptionCommand
from pdcluster_protocol.adapters import AdapterContent, difference
from pdcluster_protocol.side_channel import Denial, Grant
from unit.connector.core.test_reception import EXPECTED, FIRST, GRANT, PEER, SECOND, T, hear, open_, reception

SQL, SQL_2 = (AdapterContent("sql", content, "use") for content in ("aa", "bb"))


@pytest.mark.parametrize(
    ("prefill", "decode"), [(SQL, SQL), (None, None), (AdapterContent("another name", "aa", "use"), SQL)]
)
def test_a_rank_whose_adapter_has_the_content_of_decodes_may_write(
    prefill: AdapterContent | None, decode: AdapterContent | None
) -> None:
    made = reception()
    assert list(made.expect(dataclasses.replace(EXPECTED, adapter=decode), now=0.0)) == []
    assert hear(made, msgspec.structs.replace(open_(), adapter=prefill)) == GRANT


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize(("prefill", "decode"), [(SQL, SQL_2), (None, SQL), (SQL, None)])
def test_a_rank_with_another_adapter_gets_no_grant_and_the_reason_names_both_engines(
    prefill: AdapterContent | None, decode: AdapterContent | None, *, is_early: bool
) -> None:
    made, opening = reception(), msgspec.structs.replace(open_(), adapter=prefill)
    told: list[ReceptionCommand] = list(made.hear(PEER, opening, now=0.5)) if is_early else []
    told += made.expect(dataclasses.replace(EXPECTED, adapter=decode), now=1.0)
    told += [] if is_early else made.hear(PEER, opening, now=1.0)
    reason = difference(prefill=prefill, decode=decode, prefill_id="p", decode_id="d")
    assert told == [Reply(PEER, Denial(T, FIRST, reason))]
    assert list(made.hear(PEER, msgspec.structs.replace(opening, attempt=SECOND, token=open_(SECOND).token), now=1.0))
    assert hear(made, msgspec.structs.replace(open_(SECOND), adapter=decode), now=2.0) == Grant(T, SECOND, 9000)
