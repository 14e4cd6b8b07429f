"""How much the receiver hears before it looks at deadlines again."""

from __future__ import annotations

from itertools import repeat

import pytest

from pdcluster_connector.core.writers import PeerId
from pdcluster_connector.side_channel import Received
from pdcluster_connector.worker.receiver import frames_of_a_turn
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.side_channel import MAX_FRAME_BYTES


def frame_of(num_bytes: int) -> Received:
    return Received(PeerId(b"noise"), ProtocolError("noise"), num_bytes)


@pytest.mark.parametrize(
    ("num_bytes", "num_frames"),
    [
        pytest.param(60, 1000, id="small ones are bounded by their number"),
        pytest.param(MAX_FRAME_BYTES, 2, id="large ones by their bytes: each is hashed whole before it is refused"),
        pytest.param(100 * MAX_FRAME_BYTES, 1, id="a message of many parts is one"),
    ],
)
def test_a_flood_ends_a_turn(num_bytes: int, num_frames: int) -> None:
    flood = repeat(frame_of(num_bytes))
    assert len(list(frames_of_a_turn(lambda: next(flood)))) == num_frames


def test_a_turn_ends_when_nothing_is_there() -> None:
    frames = iter([frame_of(60), frame_of(60), None])
    assert len(list(frames_of_a_turn(lambda: next(frames)))) == 2
