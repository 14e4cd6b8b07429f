"""The ClientHello that a client claims to send, byte by byte: RFC 8446, sections 4 and 5.1."""

from __future__ import annotations

import pytest

from fakes.hellos import CHANGE, claim, records
from pdcluster_router.core.clients.client_hello import MAX_HELLO_BYTES, BadHello, HelloWatch

SMALL = claim(1000) + bytes(1000)


def all_of(data: bytes) -> tuple[int, bool]:
    """How many of the bytes OpenSSL may have, and whether the ClientHello is over."""
    watch = HelloWatch()
    return watch.feed(data), watch.is_over


OVER: dict[str, tuple[bytes, int]] = {
    "in one record": (records(SMALL), 0),
    "in many records": (records(SMALL, 100), 0),
    "in the smallest records": (records(SMALL, 1), 0),
    "before what may be another": (records(SMALL) + records(claim(10) + bytes(10)), 19),
    "the largest": (records(claim(MAX_HELLO_BYTES) + bytes(MAX_HELLO_BYTES), 1 << 14), 0),
    "of no bytes": (records(claim(0)), 0),
    "behind other records": (CHANGE * 3 + records(SMALL), 0),
    "behind other records that are empty": (b"\x17\x03\x03\x00\x00" * 3 + records(SMALL), 0),
    "another message, which OpenSSL refuses": (records(b"\x10\xff\xff\xff" + bytes(9)), 9),
}


@pytest.mark.parametrize("case", OVER)
def test_the_end_of_a_hello_is_found(case: str) -> None:
    data, num_behind = OVER[case]
    assert all_of(data) == (len(data) - num_behind, True)


@pytest.mark.parametrize("num_bytes", range(9))
def test_without_its_whole_header_nothing_is_said_of_it(num_bytes: int) -> None:
    assert all_of(records(claim(1 << 17))[:num_bytes]) == (num_bytes, False)


@pytest.mark.parametrize("record_bytes", [1, 2, 3, 4, 1000])
@pytest.mark.parametrize("claimed", [MAX_HELLO_BYTES + 1, 1 << 17, (1 << 24) - 1])
def test_a_hello_that_claims_too_much_is_refused_before_its_rest_comes(claimed: int, record_bytes: int) -> None:
    with pytest.raises(BadHello, match=f"a ClientHello of {claimed} bytes, 16384 are allowed"):
        all_of(records(claim(claimed), record_bytes))


def test_more_in_the_same_record_is_refused_for_it_may_be_a_second_hello() -> None:
    with pytest.raises(BadHello, match="more behind its ClientHello in one record"):
        all_of(records(SMALL + claim(1 << 17)))


def test_empty_records_are_refused_for_they_never_end() -> None:
    with pytest.raises(BadHello, match="an empty record in its ClientHello"):
        all_of(records(SMALL[:2]) + b"\x16\x03\x01\x00\x00")
