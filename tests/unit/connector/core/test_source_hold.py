"""Source holds: a request's blocks are free when vLLM has ended it and no lane reads them, and that is said once."""

from __future__ import annotations

from itertools import permutations

import pytest

from pdcluster_connector.core.source_hold import SourceHolds
from pdcluster_protocol.ids import RequestId

R, S = RequestId("r"), RequestId("s")


def held() -> SourceHolds[str]:
    holds: SourceHolds[str] = SourceHolds()
    holds.begin(R, ["a", "b"])
    return holds


@pytest.mark.parametrize("order", list(permutations(["vllm", "a", "b"])))
def test_a_request_is_free_when_vllm_has_ended_it_and_its_last_reader_released_it(order: tuple[str, ...]) -> None:
    holds = held()
    for event in order:
        assert holds.take_free() == set()
        if event == "vllm":
            holds.finish(R)
        else:
            holds.released(R, event)
    assert holds.take_free() == {R}


def test_a_free_request_is_named_once() -> None:
    holds = held()
    holds.reader_ended("a")
    holds.reader_ended("b")
    holds.finish(R)
    assert [holds.take_free(), holds.take_free()] == [{R}, set()]
    holds.finish(R)
    assert holds.take_free() == set()


def test_the_same_reader_twice_does_not_stand_for_the_other() -> None:
    holds = held()
    holds.finish(R)
    holds.released(R, "a")
    holds.released(R, "a")
    assert holds.take_free() == set()
    assert holds.readers(R) == {"b"}


def test_a_reader_that_ends_releases_every_request_of_its() -> None:
    holds = held()
    holds.begin(S, ["b"])
    holds.finish(S)
    holds.reader_ended("b")
    assert holds.take_free() == {S}
    assert holds.readers(R) == {"a"}


def test_what_is_unknown_is_over() -> None:
    holds = held()
    holds.released(S, "a")
    holds.finish(S)
    assert holds.readers(S) == frozenset()
    assert holds.take_free() == set()


def test_a_request_is_held_once() -> None:
    with pytest.raises(AssertionError, match="held already"):
        held().begin(R, ["a"])
