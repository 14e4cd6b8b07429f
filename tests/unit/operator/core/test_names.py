"""Names of children: readable where they can be, valid and distinct always."""

from __future__ import annotations

import re
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_operator.api.base import MAX_LABEL
from pdcluster_operator.core.names import (
    MAX_WORKLOAD,
    child_name,
    cluster_label,
    discovery_service_name,
    role_name,
    workload_name,
)
from pdcluster_protocol.labels import Role

DNS_1035: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL_VALUE: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
REVISION, TEMPLATE = "0a1b2c3d", "4e5f6a7b"

PART: Final = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?", fullmatch=True)
CLUSTERS: Final = st.lists(PART, min_size=1, max_size=6).map(".".join).filter(lambda name: len(name) <= 253)
"""What Kubernetes takes as the name of an object: a DNS-1123 subdomain."""


def all_names(cluster: str) -> list[str]:
    return [
        child_name(cluster, "router"),
        *(role_name(cluster, role) for role in Role),
        *(discovery_service_name(cluster, role, REVISION) for role in Role),
        *(workload_name(cluster, role, REVISION, TEMPLATE) for role in Role),
    ]


def test_short_names_say_what_they_are() -> None:
    assert all_names("chat") == [
        "chat-router",
        "chat-prefill",
        "chat-decode",
        "chat-prefill-0a1b2c3d",
        "chat-decode-0a1b2c3d",
        "chat-prefill-0a1b2c3d-4e5f6a7b",
        "chat-decode-0a1b2c3d-4e5f6a7b",
    ]


@pytest.mark.parametrize(
    ("cluster", "name"),
    [
        pytest.param("a" * 26, "a" * 26 + "-prefill-0a1b2c3d-4e5f6a7b", id="52 characters fit"),
        pytest.param("a" * 27, "a" * 27 + "-prefill-0a1b2c3-????????", id="53 are cut"),
        pytest.param("a" * 42 + "-b", "a" * 42 + "-????????", id="never two dashes"),
        pytest.param("7b.chat", "pd-7b-chat-prefill-0a1b2c3d-4e5f6a7b-????????", id="a digit first, and a dot"),
    ],
)
def test_other_names_are_cut_and_carry_a_hash_of_the_whole(cluster: str, name: str) -> None:
    named = workload_name(cluster, Role.PREFILL, REVISION, TEMPLATE)
    assert re.fullmatch(name.replace("?" * 8, "[0-9a-f]{8}"), named), named


@given(CLUSTERS)
def test_names_are_valid_for_every_kind_and_short_enough_for_its_pods(cluster: str) -> None:
    names = all_names(cluster)
    assert all(DNS_1035.fullmatch(name) and len(name) <= MAX_LABEL for name in names)
    assert all(len(name) <= MAX_WORKLOAD for name in (names[0], *names[-2:]))
    assert len(set(names)) == len(names)


@given(CLUSTERS, CLUSTERS)
def test_two_clusters_never_share_a_child(one: str, other: str) -> None:
    if one != other:
        assert not set(all_names(one)) & set(all_names(other))


@pytest.mark.parametrize(("one", "other"), [("a.b", "a-b"), ("7b", "pd-7b"), ("a" * 90, "a" * 91), ("a.b-c", "a-b.c")])
def test_clusters_whose_names_look_alike_never_share_a_child(one: str, other: str) -> None:
    assert not set(all_names(one)) & set(all_names(other))
    assert cluster_label(one) != cluster_label(other)


@given(CLUSTERS)
def test_a_clusters_label_is_its_name_where_a_label_may_be_so_long(cluster: str) -> None:
    value = cluster_label(cluster)
    assert LABEL_VALUE.fullmatch(value)
    assert len(value) <= MAX_LABEL
    assert value == cluster or len(cluster) > MAX_LABEL
