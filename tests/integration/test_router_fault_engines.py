"""The engines of ``benchmarks.router_faults``, with our own router: each fault has its effect, and without one every
answer is right."""

from __future__ import annotations

from collections import Counter

import pytest
from benchmarks.fault_engines import Fault
from benchmarks.router_contenders import CONTENDERS, OURS, Flow
from benchmarks.router_faults import Ends, EngineFault, Leaving, Outcome, Stops, run_case

from patience import PATIENCE_S
from pdcluster_protocol.labels import Role

pytestmark = [pytest.mark.anyio, pytest.mark.costly]

OUR_ROUTER = next(one for one in CONTENDERS if one.name == OURS and one.flow is Flow.PREFILL_DECODE)
NUM = 4


async def outcomes_of(case: EngineFault) -> Counter[Outcome]:
    ends = await run_case(OUR_ROUTER, case, NUM, PATIENCE_S)
    assert isinstance(ends, Ends)
    return ends.outcomes


@pytest.mark.parametrize("is_stream", [True, False])
async def test_without_a_fault_each_answer_is_right(is_stream: bool) -> None:
    outcomes = await outcomes_of(EngineFault(Role.DECODE, Fault.NONE, is_stream))
    assert outcomes == {Outcome.RIGHT: NUM}


async def test_a_stream_that_decode_breaks_off_ends_with_an_error() -> None:
    outcomes = await outcomes_of(EngineFault(Role.DECODE, Fault.DIES_IN_ANSWER))
    assert outcomes[Outcome.ERROR] > 0
    assert outcomes[Outcome.ERROR] + outcomes[Outcome.RIGHT] == NUM


async def test_a_short_answer_that_decode_breaks_off_is_given_by_another_engine() -> None:
    outcomes = await outcomes_of(EngineFault(Role.DECODE, Fault.DIES_IN_ANSWER, is_stream=False))
    assert outcomes == {Outcome.RIGHT: NUM}


@pytest.mark.parametrize("role", Role)
async def test_engines_stop_for_clients_that_leave(role: Role) -> None:
    stops = await run_case(OUR_ROUTER, Leaving(role), NUM, PATIENCE_S, PATIENCE_S)
    assert isinstance(stops, Stops)
    assert stops.after_s is not None
