"""What a gateway is told to change of a head, and which engines it may be told."""

from __future__ import annotations

import pytest

from pdcluster_router.core.requests.gateway_headers import (
    NO_CHANGES,
    SUBSET_KEY,
    SUBSET_SPACE,
    HeaderChanges,
    changes_between,
    endpoint_of,
    endpoints_in,
    headers_in,
    is_among,
)


def test_only_what_differs_is_set_and_what_is_not_wanted_is_removed() -> None:
    had = [(b"a", b"1"), (b"b", b"2"), (b"x-api-key", b"secret")]
    wanted = [(b"a", b"1"), (b"b", b"3"), (b"c", b"4")]
    assert changes_between(had, wanted) == HeaderChanges(((b"b", b"3"), (b"c", b"4")), (b"x-api-key",))


def test_of_a_header_that_is_there_twice_all_values_are_set_anew() -> None:
    had, wanted = [(b"a", b"1"), (b"a", b"2")], [(b"a", b"1"), (b"a", b"3")]
    assert changes_between(had, wanted).set == ((b"a", b"1"), (b"a", b"3"))
    assert changes_between(had, had) == NO_CHANGES


@pytest.mark.parametrize("name", [b":path", b"host", b"content-length", b"transfer-encoding", b"x-envoy-attempt-count"])
def test_headers_that_the_gateway_writes_by_itself_stay(name: bytes) -> None:
    assert changes_between([(name, b"1")], []) == NO_CHANGES
    assert changes_between([], [(name, b"1")]) == NO_CHANGES


def test_a_body_that_is_replaced_has_its_length() -> None:
    assert NO_CHANGES.with_length(12) == HeaderChanges(((b"content-length", b"12"),))


def test_lines_become_headers_in_lower_case() -> None:
    assert headers_in(b"Content-Type: a: b\r\nx-y:z\r\n") == [(b"content-type", b"a: b"), (b"x-y", b"z")]
    assert headers_in(b"") == []


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://10.0.0.1", "10.0.0.1:80"),
        ("https://10.0.0.1", "10.0.0.1:443"),
        ("http://[fd00::1]:8000", "[fd00::1]:8000"),
        ("http://decode-0.decode:8000", ""),
        ("http://localhost:8000", ""),
    ],
)
def test_an_engine_is_known_by_its_address(url: str, endpoint: str) -> None:
    assert endpoint_of(url) == endpoint


@pytest.mark.parametrize(
    ("said", "endpoints"),
    [
        (["10.0.0.1:1", "10.0.0.2:1"], {"10.0.0.1:1", "10.0.0.2:1"}),
        ("10.0.0.1:1, 10.0.0.2:1", {"10.0.0.1:1", "10.0.0.2:1"}),
        (["10.0.0.1:1,10.0.0.2:1"], {"10.0.0.1:1", "10.0.0.2:1"}),
        ([], set()),
        ("", set()),
        ([1.0, None], set()),
        (7.0, set()),
    ],
)
def test_a_subset_is_a_list_or_a_text_and_an_empty_one_allows_none(said: object, endpoints: set[str]) -> None:
    assert endpoints_in({SUBSET_SPACE: {SUBSET_KEY: said}}) == frozenset(endpoints)


@pytest.mark.parametrize("metadata", [{}, {SUBSET_SPACE: {}}, {SUBSET_SPACE: "x"}, {"envoy.lb": {SUBSET_KEY: ["a"]}}])
def test_without_a_subset_any_engine_may_be_picked(metadata: dict[str, object]) -> None:
    assert endpoints_in(metadata) is None


def test_an_engine_without_an_address_is_never_picked() -> None:
    assert not is_among("", None)
    assert not is_among("", frozenset({""}))
    assert is_among("10.0.0.1:1", None)
    assert not is_among("10.0.0.1:1", frozenset())


def test_an_address_without_a_port_stands_for_all_its_ports() -> None:
    assert is_among("10.0.0.1:1", frozenset({"10.0.0.1"}))
    assert is_among("[fd00::1]:1", frozenset({"fd00::1"}))
    assert not is_among("10.0.0.1:1", frozenset({"10.0.0.1:2"}))
