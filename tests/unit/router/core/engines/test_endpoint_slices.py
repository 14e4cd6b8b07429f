"""EndpointSlices as the API server gives them, and the engines that they name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fakes.slices import endpoint, slice_of
from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.endpoint_slices import Discovered, EndpointSlice, members_of
from pdcluster_router.core.engines.membership import Member


def picture(*slices: dict[str, Any]) -> Discovered:
    """Each slice is newer than the one before it."""
    numbered = [
        {**one, "metadata": {**one["metadata"], "resourceVersion": str(number)}} for number, one in enumerate(slices, 9)
    ]
    return members_of(msgspec.convert(numbered, list[EndpointSlice]))


def states(found: Discovered) -> dict[str, str]:
    return {member.url: member.state.value for member in found.members}


def test_a_slice_names_its_engines_with_role_revision_and_pod() -> None:
    found = picture(slice_of("a", "prefill", endpoint("10.0.0.1", "u1"), revision="abc", port=8100))
    member = Member("http://10.0.0.1:8100", Role.PREFILL, "abc", "u1", "pod-u1")
    assert found == Discovered((member,))


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({}, (True, True, False)),
        ({"ready": None, "serving": None, "terminating": None}, (True, True, False)),
        ({"ready": True}, (True, True, False)),
        ({"ready": False}, (False, False, False)),
        ({"ready": False, "serving": True}, (False, True, False)),
        ({"ready": False, "serving": True, "terminating": True}, (False, True, True)),
        ({"serving": False}, (True, False, False)),
    ],
)
def test_conditions_that_are_unknown_have_the_apis_defaults(
    conditions: dict[str, bool | None], expected: tuple[bool, bool, bool]
) -> None:
    (member,) = picture(slice_of("a", "decode", endpoint("10.0.0.1", "u1", **conditions))).members
    assert (member.is_ready, member.is_serving, member.is_terminating) == expected


def test_an_endpoint_without_conditions_or_pod_is_ready() -> None:
    (member,) = picture(slice_of("a", "decode", {"addresses": ["10.0.0.1"]})).members
    assert (member.state.value, member.uid, member.pod) == ("serving", "", "")


def test_ipv6_addresses_are_in_brackets() -> None:
    (member,) = picture(slice_of("a", "decode", endpoint("fd00::7"), address_type="IPv6")).members
    assert member.url == "http://[fd00::7]:8000"


@pytest.mark.parametrize(
    ("said", "always_https", "scheme"),
    [
        ("https", False, "https"),
        (None, True, "https"),
        ("http", True, "https"),
        (None, False, "http"),
        ("kubernetes.io/h2c", False, "http"),
    ],
)
def test_engines_are_asked_as_their_service_says_or_always_by_https(
    said: str | None, always_https: bool, scheme: str
) -> None:
    one = slice_of("a", "decode", endpoint("10.0.0.1"))
    one["ports"][0]["appProtocol"] = said
    (member,) = members_of(msgspec.convert([one], list[EndpointSlice]), always_https=always_https).members
    assert member.url == f"{scheme}://10.0.0.1:8000"


def test_a_pod_with_both_families_is_one_engine() -> None:
    slices = [
        slice_of("b", "decode", endpoint("fd00::7", "u1"), address_type="IPv6"),
        slice_of("a", "decode", endpoint("10.0.0.1", "u1")),
    ]
    assert list(states(picture(*slices))) == list(states(picture(*reversed(slices)))) == ["http://10.0.0.1:8000"]


def test_of_two_addresses_of_one_pod_and_family_the_newer_slices_wins() -> None:
    found = picture(
        slice_of("c", "decode", endpoint("10.0.0.3", "u0")),
        slice_of("a", "decode", endpoint("10.0.0.1", "u1")),
        slice_of("b", "decode", endpoint("10.0.0.2", "u1")),
    )
    assert [member.url for member in found.members] == ["http://10.0.0.2:8000", "http://10.0.0.3:8000"]


def test_the_first_address_stands_for_all_of_an_endpoint() -> None:
    many = {"addresses": ["10.0.0.1", "10.0.0.2"], "conditions": {}}
    assert list(states(picture(slice_of("a", "decode", many)))) == ["http://10.0.0.1:8000"]


def test_a_cluster_without_revisions_has_one() -> None:
    (member,) = picture(slice_of("a", "decode", endpoint("10.0.0.1"), revision=None)).members
    assert member.revision == ""


@pytest.mark.parametrize(
    ("older", "newer", "expected"),
    [
        ({"ready": True}, {"ready": False}, "starting"),
        ({"ready": False}, {"ready": True}, "serving"),
        ({"ready": False, "serving": True, "terminating": True}, {"ready": True}, "finishing"),
        ({"ready": True}, {"ready": False, "serving": False, "terminating": True}, "leaving"),
    ],
)
def test_of_two_slices_with_one_pod_the_newer_wins_and_terminating_stays(
    older: dict[str, bool], newer: dict[str, bool], expected: str
) -> None:
    slices = [
        slice_of(name, "decode", endpoint("10.0.0.1", "u1", **given))
        for name, given in zip("ab", (older, newer), strict=True)
    ]
    assert states(picture(*slices)) == {"http://10.0.0.1:8000": expected}


def test_between_slices_of_one_version_the_ready_endpoint_wins() -> None:
    slices = [slice_of(str(ready), "decode", endpoint("10.0.0.1", "u1", ready=ready)) for ready in (True, False)]
    for order in (slices, slices[::-1]):
        found = members_of(msgspec.convert(order, list[EndpointSlice]))
        assert states(found) == {"http://10.0.0.1:8000": "serving"}


@pytest.mark.parametrize("is_new_first", [True, False])
def test_at_one_address_the_pod_that_does_not_terminate_wins_whichever_slice_is_newer(is_new_first: bool) -> None:
    gone = slice_of("a", "decode", endpoint("10.0.0.1", "u1", ready=False, terminating=True))
    new = slice_of("b", "decode", endpoint("10.0.0.1", "u2"))
    (member,) = picture(*((new, gone) if is_new_first else (gone, new))).members
    assert (member.uid, member.state.value) == ("u2", "serving")


def test_at_one_address_the_pod_of_the_newer_slice_wins() -> None:
    slices = [slice_of(name, "decode", endpoint("10.0.0.1", name)) for name in ("u1", "u2")]
    (member,) = picture(*slices).members
    assert member.uid == "u2"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"port_name": "grpc"}, "EndpointSlice bad: no port is named http: name the port of its Service so"),
        ({"port": None}, "EndpointSlice bad: no port is named http"),
        ({"address_type": "FQDN"}, "EndpointSlice bad: its addresses are FQDN: only IPv4 and IPv6 can be used"),
        (
            {"role": "router"},
            "EndpointSlice bad: label pdcluster.dev/role is 'router': give its Service prefill or decode",
        ),
    ],
)
def test_a_slice_that_cannot_be_used_is_said_and_the_others_count(changes: dict[str, Any], problem: str) -> None:
    bad = slice_of("bad", changes.pop("role", "decode"), endpoint("10.0.0.1"), **changes)
    found = picture(bad, slice_of("good", "decode", endpoint("10.0.0.2")))
    assert list(states(found)) == ["http://10.0.0.2:8000"]
    assert [told.startswith(problem) for told in found.problems] == [True]


@pytest.mark.parametrize("nothing", [{"endpoints": None}, {"endpoints": []}, {"endpoints": None, "ports": None}])
def test_a_slice_without_endpoints_is_no_problem(nothing: dict[str, Any]) -> None:
    assert picture({**slice_of("a", "decode"), **nothing}) == Discovered()
