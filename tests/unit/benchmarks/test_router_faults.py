"""What a client's end is called, and the table of all of them."""

from __future__ import annotations

from collections import Counter

import pytest
from benchmarks.fault_engines import DONE, EVENTS, PLAIN, STREAM, Fault
from benchmarks.router_contenders import Contender, Flow
from benchmarks.router_faults import CASES, Ends, EngineFault, Leaving, Outcome, Stops, judge, rows_of

from pdcluster_protocol.labels import Role


@pytest.mark.parametrize(
    ("status", "body", "is_stream", "outcome"),
    [
        (200, STREAM, True, Outcome.RIGHT),
        (200, PLAIN, False, Outcome.RIGHT),
        (502, b'{"error":{}}', True, Outcome.ERROR),
        (500, b"", False, Outcome.ERROR),
        (200, EVENTS[0] + b'data: {"error": {}}\n\n' + DONE, True, Outcome.ERROR),
        (200, STREAM.removesuffix(DONE), True, Outcome.FALSE),
        (200, b"".join(EVENTS[1:]) + DONE, True, Outcome.FALSE),
        (200, b"", True, Outcome.FALSE),
        (200, PLAIN[:-1], False, Outcome.FALSE),
    ],
)
def test_an_end_is_right_only_if_each_byte_is_there(
    status: int, body: bytes, is_stream: bool, outcome: Outcome
) -> None:
    assert judge(status, body, is_stream=is_stream) is outcome


def test_there_are_twelve_faults_with_a_name_each() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == 12
    assert EngineFault(Role.DECODE, Fault.DIES_IN_ANSWER).name == "a decode engine dies in the middle of its answer"
    assert Leaving(Role.PREFILL).name == "clients leave while prefill works"


def test_a_row_has_each_routers_ends_and_the_last_row_their_sums() -> None:
    ends = [Ends(Counter({Outcome.ERROR: 1, Outcome.RIGHT: 3}), float(seconds)) for seconds in range(10)]
    found: dict[Contender, list[Ends | Stops]] = {
        Contender("ours", Flow.PREFILL_DECODE): [*ends, Stops(0.04), Stops(None)]
    }
    rows = rows_of(found)
    assert rows[0] == (CASES[0].name, "3 right, 1 error; 0.0 s")
    assert rows[10:12] == [(CASES[10].name, "stops in 0.0 s"), (CASES[11].name, "goes on")]
    assert rows[12] == ("**all**", "30 right, 10 error; slowest: 4.5 s in the median; 1 of 2 stop")
