"""Which clients of a story take their answers as streams."""

from __future__ import annotations

from e2e.load import CROWD, ONE_IS_A_STREAM, Place, crowd


def test_of_a_crowd_fewer_clients_than_that_ever_take_whole_answers() -> None:
    load = crowd(Place("192.0.2.1", 8000), {})
    ways = [{load.is_stream(turn) for turn in range(client, 1000, CROWD)} for client in range(CROWD)]
    assert all(len(way) == 1 for way in ways), "each client keeps its way"
    assert ways.count({False}) == ONE_IS_A_STREAM - 1 > 0
