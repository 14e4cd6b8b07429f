"""The row of requests that wait on a connection is used as uvicorn uses its deque."""

from __future__ import annotations

from collections import deque

import hypothesis.strategies as st
from hypothesis import given

from pdcluster_router.http.slots import READING, ROUTER, UVICORN, Pipeline


@given(st.lists(st.sampled_from(["appendleft", "popleft", "pop", "clear"])))
def test_it_does_what_a_deque_does(steps: list[str]) -> None:
    ours, theirs = Pipeline(), deque[int]()
    for number, step in enumerate(steps):
        if step == "appendleft":
            ours.appendleft(number)
            theirs.appendleft(number)
        elif theirs:
            assert getattr(ours, step)() == getattr(theirs, step)()
        assert list(ours) == list(theirs)
        assert bool(ours) == bool(theirs)


def test_each_attribute_has_one_slot() -> None:
    names = [*UVICORN, *READING, *ROUTER]
    assert len(names) == len(set(names))
