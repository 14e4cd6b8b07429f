"""The rooms of each package: imports go inwards only, and in no circle."""

from __future__ import annotations

import pytest
from tools.rooms import PACKAGES, Plan, plans


@pytest.fixture(scope="module")
def found() -> dict[str, Plan]:
    return {plan.package: plan for plan in plans()}


@pytest.mark.parametrize("package", PACKAGES)
def test_rooms_import_inwards_and_in_no_circle(found: dict[str, Plan], package: str) -> None:
    assert found[package].arrows, "else nothing is shown"
    assert found[package].circles == []
    assert found[package].upward == frozenset()
    assert found[package].unordered == frozenset()


def test_the_router_has_the_rooms_that_its_page_names(found: dict[str, Plan]) -> None:
    rooms = {"front", "requests", "engines", "http", "telemetry", "files", "processes", "core", "settings"}
    assert found["pdcluster_router"].rooms == rooms | {"services", "__main__"}


def test_a_circle_is_found_once_and_what_only_leads_to_it_is_not_in_it() -> None:
    arrows = {("a", "b"), ("b", "c"), ("c", "a"), ("d", "a"), ("a", "e")}
    plan = Plan("p", frozenset("abcde"), 5, frozenset(arrows), frozenset())
    assert plan.circles == [("a", "b", "c")]
