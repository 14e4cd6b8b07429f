"""What is wrong in a message is looked for within bounds, whatever the message is."""

from __future__ import annotations

from typing import Any

import pytest

from pdcluster_protocol.bounds import MAX_LOOKED_AT
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.params import parse_decode_params, parse_reservation, to_wire
from unit.protocol.test_params import PARAMS, RESERVATION


@pytest.mark.parametrize("depth", [1_000, 100_000])
@pytest.mark.parametrize("name", ["version", "attempt", "token", "deadline_ms", "remote_block_ids", "colour"])
@pytest.mark.parametrize("parse", [parse_decode_params, parse_reservation])
def test_a_list_in_lists_is_refused_at_any_depth(parse: Any, name: str, depth: int) -> None:
    wire = to_wire(PARAMS if parse is parse_decode_params else RESERVATION)
    with pytest.raises(ProtocolError, match=r"^kv_transfer_params ") as refused:
        parse(wire | {name: nested(depth)})
    assert len(str(refused.value)) < 500


def nested(depth: int) -> list[object]:
    value: list[object] = [1]
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("before", "message"),
    [(100, r"attempt\[100\] is 0, and must be in"), (MAX_LOOKED_AT, "Expected `int`, got `array`")],
)
def test_what_is_wrong_is_looked_for_at_the_beginning_of_a_large_message_alone(before: int, message: str) -> None:
    """A value costs as much to look at as a number."""
    with pytest.raises(ProtocolError, match=message):
        parse_decode_params(to_wire(PARAMS) | {"attempt": [*([[]] * before), 0]})
