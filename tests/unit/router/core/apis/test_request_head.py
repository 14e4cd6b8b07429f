"""Targets, ids and headers for one hop. What goes over the wire is in ``integration/test_router_wire.py``."""

from __future__ import annotations

import pytest

from pdcluster_router.core.apis.openai_errors import RefusedRequest
from pdcluster_router.core.apis.request_head import MAX_ID_BYTES, origin_form, path_of, read_head


@pytest.mark.parametrize(
    ("target", "path", "origin"),
    [
        (b"/v1/completions", b"/v1/completions", b"/v1/completions"),
        (b"/v1/%63ompletions?a=%62", b"/v1/completions", b"/v1/%63ompletions?a=%62"),
        (b"http://a:80/x?y", b"/x", b"/x?y"),
        (b"HTTPS://a/x#z", b"/x", b"/x#z"),
        (b"http://a", b"/", b"/"),
        (b"http://a?x", b"/", b"/?x"),
        (b"http://a/x?y=http://b/z", b"/x", b"/x?y=http://b/z"),
        (b"/http://a/x", b"/http://a/x", b"/http://a/x"),
        (b"*", b"*", b"*"),
    ],
)
def test_targets(target: bytes, path: bytes, origin: bytes) -> None:
    assert (path_of(target), origin_form(target)) == (path, origin)


@pytest.mark.parametrize(
    ("given", "taken"),
    [(b"a" * MAX_ID_BYTES, True), (b"a" * (MAX_ID_BYTES + 1), False), (b"", False), (b"a b", False), (b"\xe9", False)],
)
def test_ids_are_short_and_visible(given: bytes, taken: bool) -> None:
    head = read_head("1.1", [(b"host", b"a"), (b"x-request-id", given)])
    assert head.request_id == (given if taken else b"")


def test_length_and_expectation_are_read_and_headers_stay_when_none_is_for_one_hop() -> None:
    headers = [(b"host", b"a"), (b"content-length", b"7"), (b"expect", b"100-Continue"), (b"connection", b"close")]
    head = read_head("1.1", headers)
    assert (head.content_length, head.expects_continue, head.headers) == (7, True, headers)


@pytest.mark.parametrize("hosts", [[], [(b"host", b"a"), (b"host", b"a")]], ids=["none", "two"])
def test_a_request_names_one_host(hosts: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(RefusedRequest) as refused:
        read_head("1.1", [*hosts, (b"x-request-id", b"a")])
    assert (refused.value.error.status, refused.value.error.code) == (400, "invalid_http")


def test_an_expectation_that_is_not_known_is_refused_in_its_own_words() -> None:
    with pytest.raises(RefusedRequest) as refused:
        read_head("1.1", [(b"host", b"a"), (b"expect", b"tea \xe9")])
    assert (refused.value.error.status, refused.value.error.code) == (417, "expectation_failed")
    assert "'tea " in refused.value.error.message
