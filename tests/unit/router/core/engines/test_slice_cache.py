"""Lists and watch events as the API server sends them, and the waiting between two tries."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fakes.slices import endpoint, slice_of
from pdcluster_protocol.errors import ProtocolError, Unavailable
from pdcluster_router.core.engines.endpoint_slices import SliceCache


def one(name: str, host: str, version: str = "7") -> dict[str, Any]:
    made = slice_of(name, "decode", endpoint(host))
    return {**made, "metadata": {**made["metadata"], "resourceVersion": version}}


def event(kind: str, what: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": what}).encode()


def cache_with(*slices: dict[str, Any]) -> SliceCache:
    cache = SliceCache()
    cache.replace(json.dumps({"metadata": {"resourceVersion": "5"}, "items": list(slices)}).encode())
    return cache


def hosts(cache: SliceCache) -> list[str]:
    return [member.url.split("/")[2].split(":")[0] for member in cache.picture.members]


def test_events_change_what_was_listed_and_move_the_version_on() -> None:
    cache = cache_with(one("a", "10.0.0.1"))
    assert (hosts(cache), cache.resource_version) == (["10.0.0.1"], "5")
    assert cache.apply(event("ADDED", one("b", "10.0.0.2", "8")))
    assert cache.apply(event("MODIFIED", one("a", "10.0.0.3", "9")))
    assert (hosts(cache), cache.resource_version) == (["10.0.0.2", "10.0.0.3"], "9")
    assert cache.apply(event("DELETED", one("b", "10.0.0.2", "10")))
    assert (hosts(cache), cache.resource_version) == (["10.0.0.3"], "10")


def test_a_bookmark_is_a_version_and_no_slice() -> None:
    cache = cache_with(one("a", "10.0.0.1"))
    bookmark = {"kind": "EndpointSlice", "metadata": {"resourceVersion": "99", "creationTimestamp": None}}
    assert not cache.apply(event("BOOKMARK", {**bookmark, "addressType": "", "endpoints": None, "ports": None}))
    assert (hosts(cache), cache.resource_version) == (["10.0.0.1"], "99")


def test_a_new_list_is_all_there_is() -> None:
    cache = cache_with(one("a", "10.0.0.1"), one("b", "10.0.0.2"))
    cache.replace(b'{"metadata": {"resourceVersion": "6"}, "items": null}')
    assert (hosts(cache), cache.resource_version) == ([], "6")


def test_an_error_event_ends_the_watch_and_changes_nothing() -> None:
    cache = cache_with(one("a", "10.0.0.1"))
    with pytest.raises(Unavailable, match="410 too old"):
        cache.apply(event("ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"}))
    assert (hosts(cache), cache.resource_version) == (["10.0.0.1"], "5")


@pytest.mark.parametrize(
    "line", [b"<html>", b"[]", b'{"type": "ADDED"}', b'{"type": "WHAT", "object": {}}', event("ADDED", {"metadata": 7})]
)
def test_what_is_no_event_changes_nothing(line: bytes) -> None:
    cache = cache_with(one("a", "10.0.0.1"))
    with pytest.raises(ProtocolError):
        cache.apply(line)
    assert (hosts(cache), cache.resource_version) == (["10.0.0.1"], "5")


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"metadata": {}, "items": [7]}'])
def test_what_is_no_list_changes_nothing(body: bytes) -> None:
    cache = cache_with(one("a", "10.0.0.1"))
    with pytest.raises(ProtocolError):
        cache.replace(body)
    assert hosts(cache) == ["10.0.0.1"]
