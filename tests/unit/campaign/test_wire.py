"""Frames and writes in trouble: each trouble does what its name says, in a storm and only then."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from campaign.wire import (
    Dice,
    HeldFrames,
    Storm,
    Trouble,
    WireSettings,
    read_troubles,
    settings_from_env,
    trouble_channel,
    trouble_writes,
)
from pdcluster_connector.transport.base import WriteRange, WriteStatus
from pdcluster_protocol.errors import TransferError

FOR_EVER = Storm(1e12, 1e12, 1e12, {str(os.getpid()): 1e12})


class Wire:
    """One engine's dice, and the folder in which its storm is told."""

    def __init__(self, folder: Path, *certain: Trouble, storm: Storm | None = FOR_EVER) -> None:
        self.log_file = folder / "trouble.log"
        odds = {trouble.value: 1.0 for trouble in certain}
        if storm:
            storm.write(folder / "storm")
        self.dice = Dice(WireSettings("prefill-0", 1, odds, str(folder / "storm"), str(self.log_file)))
        self.dice.late_s = lambda: 0.0  # type: ignore[method-assign]  # a test does not wait


@pytest.mark.parametrize(
    ("storm", "expected"),
    [
        (None, ()),
        (Storm(1.0, 1.0, 1.0), ()),
        (Storm(frames_until=1e12), (Trouble.LOST, Trouble.DOUBLED, Trouble.SWAPPED, Trouble.LATE)),
        (Storm(writes_until=1e12), (Trouble.REFUSED, Trouble.CALLED_FAILED, Trouble.FAILED_EARLY)),
        (Storm(stalls_until=1e12), (Trouble.STALLED,)),
        (Storm(ranks_until={str(os.getpid() + 1): 1e12}), ()),
        (Storm(ranks_until={str(os.getpid()): 1e12}), (Trouble.RANK_REFUSED, Trouble.RANK_LATE)),
    ],
    ids=["none", "over", "frames", "writes", "stalls", "another rank's", "this rank's"],
)
def test_each_storm_brings_its_own_troubles_and_each_is_logged(
    tmp_path: Path, storm: Storm | None, expected: tuple[Trouble, ...]
) -> None:
    """A line that is being written is left out."""
    wire = Wire(tmp_path, *Trouble, storm=storm)
    assert tuple(trouble for trouble in Trouble if wire.dice.falls(trouble)) == expected
    with wire.log_file.open("a") as log:
        log.write('{"at": 1')
    told = [(one.who, one.trouble, one.pid) for one in read_troubles(wire.log_file)]
    assert told == [("prefill-0", trouble.value, os.getpid()) for trouble in expected]


@pytest.mark.parametrize(
    ("trouble", "at_once", "behind_the_next", "in_the_end"),
    [
        (Trouble.LOST, "", "b", ""),
        (Trouble.DOUBLED, "aa", "b", ""),
        (Trouble.SWAPPED, "", "ba", ""),
        (Trouble.LATE, "", "b", "a"),
    ],
)
def test_a_frame_is_lost_doubled_swapped_or_late(
    tmp_path: Path, trouble: Trouble, at_once: str, behind_the_next: str, in_the_end: str
) -> None:
    frames = HeldFrames(Wire(tmp_path, trouble).dice)
    left = [frames.leaving(("a",), 0.0)]
    frames.dice = Wire(tmp_path).dice
    left += [frames.leaving(("b",), 0.1), frames.due(9.0), frames.due(9.0)]
    assert left == [[(frame,) for frame in part] for part in (at_once, behind_the_next, in_the_end, "")]


def test_a_swapped_frame_leaves_once_even_when_none_follows(tmp_path: Path) -> None:
    frames = HeldFrames(Wire(tmp_path, Trouble.SWAPPED).dice)
    assert frames.leaving(("a",), 0.0) == frames.due(0.001) == []
    assert (frames.due(2.0), frames.due(3.0)) == ([("a",)], [])


def channels(dice: Dice) -> type:
    """What ``trouble_channel`` needs of a class of them, in trouble."""

    class Channel:
        def __init__(self) -> None:
            self.sent: list[str] = []

        def send(self, message: str) -> None:
            self.sent.append(message)

        def receive(self) -> bytes | None:
            return b"frame"

    trouble_channel(Channel, dice)
    return Channel


def test_a_channel_sends_as_before_when_it_is_calm_and_a_late_frame_when_it_listens(tmp_path: Path) -> None:
    calm = channels(Wire(tmp_path, *Trouble, storm=None).dice)()
    calm.send("a")
    assert (calm.receive(), calm.sent) == (b"frame", ["a"])
    kind = channels(Wire(tmp_path, Trouble.LATE).dice)
    channel, other = kind(), kind()
    channel.send("a")
    other.receive()
    assert (channel.sent, other.sent) == ([], [])
    channel.receive()
    assert (channel.sent, other.sent) == (["a"], [])


class Transport:
    """Submits every write, and says ``status`` of it."""

    def __init__(self, status: WriteStatus = WriteStatus.DONE) -> None:
        self.status = status
        self.submitted: list[int] = []

    def submit_writes(self, session: str, ranges: Sequence[WriteRange]) -> int:
        self.submitted += [source for source, _, _ in ranges]
        return len(self.submitted)

    def write_status(self, write: int) -> WriteStatus:
        return self.status


@pytest.mark.parametrize(
    ("late", "refused"), [(Trouble.STALLED, Trouble.REFUSED), (Trouble.RANK_LATE, Trouble.RANK_REFUSED)]
)
def test_a_late_write_waits_and_a_refused_one_is_not_submitted(tmp_path: Path, late: Trouble, refused: Trouble) -> None:
    class InTrouble(Transport): ...

    waited: list[float] = []
    dice = Wire(tmp_path, late, refused).dice
    dice.stall_s = lambda: waited.append(0.0) or 0.0  # type: ignore[func-returns-value, method-assign]  # no wait
    trouble_writes(InTrouble, dice)
    transport = InTrouble()
    with pytest.raises(TransferError):
        transport.submit_writes("s", [(1, 2, 3)])
    assert (waited, transport.submitted) == ([0.0], [])


@pytest.mark.parametrize(
    ("trouble", "real"),
    [(Trouble.CALLED_FAILED, WriteStatus.DONE), (Trouble.FAILED_EARLY, WriteStatus.PENDING)],
)
def test_a_write_is_called_failed_although_it_was_submitted(
    tmp_path: Path, trouble: Trouble, real: WriteStatus
) -> None:
    class Lying(Transport): ...

    trouble_writes(Lying, Wire(tmp_path, trouble).dice)
    transport = Lying(real)
    assert transport.write_status(transport.submit_writes("s", ranges=[(1, 2, 3)])) is WriteStatus.FAILED
    assert transport.submitted == [1]


def test_settings_travel_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = WireSettings("decode-1", 5, {"frame lost": 0.5}, "/storm", "/log")
    for name, value in settings.as_env().items():
        monkeypatch.setenv(name, str(value))
    assert settings_from_env() == settings
