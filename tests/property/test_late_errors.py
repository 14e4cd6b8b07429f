"""Whatever a device tells late, to whom, of which operation: no answer from KV that was never computed, and an end."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import drawn
from fakes.late_errors import Kind
from integration.late_rig import Prompt, Rig, late_rig
from pdcluster_protocol.labels import Role

A: Final = Prompt("a", 0, (1, 2, 3), (7, 8, 4), is_compared=True)
B: Final = Prompt("b", 1, (4, 5, 6), (9, 3, 5), is_compared=False)
C: Final = Prompt("c", 0, (7, 8), (20, 21), is_compared=False)
D: Final = Prompt("d", 1, (9, 10, 11, 12), (30, 33, 31, 35), is_compared=True)
ALL: Final = (A, B, C, D)
AFTER: Final = tuple(Prompt(f"after {n}", n % 2, (13 + n,), (40 + n,), is_compared=n > 1) for n in range(4))
STEPS: Final = (
    ((A, slice(0, 2)), (B, slice(0, 2))),
    ((A, slice(2, None)), (C, slice(0, None)), (D, slice(0, 2))),
    ((B, slice(2, None)), (D, slice(2, None))),
)
"""Steps share kernels, and each lane has prompts that are compared and others."""
MOST_OPERATIONS: Final = 60
"""Of three steps: nine kernels, and the sums."""


def run(rig: Rig, order: list[int]) -> None:
    """All steps are given at once; the forward pass goes on as ``order`` says, and then to its end."""
    forward = rig.runtime.default
    forward.hold()
    for prompt in ALL:
        rig.expect(prompt)
    for step in STEPS:
        rig.forward(*step)
    for count in order:
        forward.let(count)
        forward.settle_soon()
        rig.step()
    forward.release()


@pytest.mark.long
@settings(max_examples=drawn(30), deadline=None)
@given(
    side=st.sampled_from(Role),
    kind=st.sampled_from(Kind),
    num_before=st.integers(0, MOST_OPERATIONS),
    order=st.lists(st.integers(1, 4), max_size=6),
)
def test_no_answer_comes_from_what_a_device_did_not_do_and_every_request_ends(
    side: Role, kind: Kind, num_before: int, order: list[int]
) -> None:
    with late_rig(side) as rig:
        late = rig.runtime.late
        late.fail(kind, num_before=num_before)
        run(rig, order)
        received = [rig.require_true_end(prompt) for prompt in ALL]
        assert all(received) or late.has_failed, "lost for nothing"
        late.forgo()
        ends = []
        for prompt in AFTER:
            rig.expect(prompt)
            rig.forward((prompt, slice(0, None)))
            ends.append(rig.require_true_end(prompt))
        assert kind is Kind.STAYS or sum(ends) >= len(ends) - 1, "it goes on as before once it was told"
        rig.require_released(*ALL, *AFTER)
