"""The limit of open files is raised to the system's, where the system grants it."""

from __future__ import annotations

import resource

import pytest

from pdcluster_protocol.open_files import raise_open_file_limit


def test_the_limit_is_raised_to_the_systems() -> None:
    asked: list[tuple[int, tuple[int, int]]] = []
    raise_open_file_limit(lambda what, limits: asked.append((what, limits)))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert asked == [(resource.RLIMIT_NOFILE, (hard, hard))]


@pytest.mark.parametrize(
    "refusal", [ValueError("not allowed to raise maximum limit"), OSError("not permitted")], ids=repr
)
def test_a_system_that_does_not_grant_its_own_limit_leaves_the_old_one(refusal: Exception) -> None:
    def refuse(_what: int, _limits: tuple[int, int]) -> None:
        raise refusal

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_open_file_limit(refuse)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
