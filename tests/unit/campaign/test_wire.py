"""Frames and writes in trouble: each trouble does what its name says, in a storm and only then."""

from __future__ import annotations

import json
import os
import time
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

FOR_EVER = Storm(1e12, 1e12, 1e12)


class Wire:
    """One engine's dice, and the folder in which its storm is told."""

    def __init__(self, folder: Path, *certain: Trouble) -> None:
        self.storm_file, self.log_file = folder / "storm", folder / "trouble.log"
        odds = {trouble.value: 1.0 for trouble in certain}
        self.dice = Dice(WireSettings("prefill-0", 1, odds, str(self.storm_file), str(self.log_file)))

    def logged(self) -> list[str]:
        lines = self.log_file.read_text().splitlines() if self.log_file.exists() else []
        return [json.loads(line)["trouble"] for line in lines]


def stormy(folder: Path, *certain: Trouble) -> Wire:
    wire = Wire(folder, *certain)
    FOR_EVER.write(wire.storm_file)
    return wire


def test_without_a_storm_nothing_happens(tmp_path: Path) -> None:
    wire = Wire(tmp_path, *Trouble)
    assert not any(wire.dice.falls(trouble) for trouble in Trouble)
    assert wire.logged() == []


def test_after_the_storm_nothing_happens(tmp_path: Path) -> None:
    wire = Wire(tmp_path, *Trouble)
    over = time.monotonic() - 1
    Storm(over, over, over).write(wire.storm_file)
    assert not any(wire.dice.falls(trouble) for trouble in Trouble)


@pytest.mark.parametrize(
    ("storm", "expected"),
    [
        (Storm(frames_until=1e12), {Trouble.LOST, Trouble.DOUBLED, Trouble.SWAPPED, Trouble.LATE}),
        (Storm(writes_until=1e12), {Trouble.REFUSED, Trouble.CALLED_FAILED, Trouble.FAILED_EARLY}),
        (Storm(stalls_until=1e12), {Trouble.STALLED}),
    ],
    ids=["frames", "writes", "stalls"],
)
def test_each_storm_brings_its_own_troubles_and_each_is_logged(
    tmp_path: Path, storm: Storm, expected: set[Trouble]
) -> None:
    wire = Wire(tmp_path, *Trouble)
    storm.write(wire.storm_file)
    assert {trouble for trouble in Trouble if wire.dice.falls(trouble)} == expected
    assert set(wire.logged()) == {trouble.value for trouble in expected}


def test_the_writes_of_one_rank_are_in_trouble_in_its_process_alone(tmp_path: Path) -> None:
    wire = Wire(tmp_path, *Trouble)
    Storm(ranks_until={str(os.getpid() + 1): 1e12}).write(wire.storm_file)
    assert not any(wire.dice.falls(trouble) for trouble in Trouble)
    own = Wire(tmp_path, *Trouble)
    Storm(ranks_until={str(os.getpid()): 1e12}).write(own.storm_file)
    assert {trouble for trouble in Trouble if own.dice.falls(trouble)} == {Trouble.RANK_REFUSED, Trouble.RANK_LATE}


def test_the_log_says_which_process_was_in_trouble_and_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    wire = stormy(tmp_path, Trouble.LOST)
    assert read_troubles(wire.log_file) == []
    assert wire.dice.falls(Trouble.LOST)
    with wire.log_file.open("a") as log:
        log.write('{"at": 1')
    (told,) = read_troubles(wire.log_file)
    assert (told.who, told.trouble, told.pid) == ("prefill-0", "frame lost", os.getpid())


def test_a_late_write_of_a_rank_waits_and_a_refused_one_is_not_submitted(tmp_path: Path) -> None:
    class OfARank(Transport):
        pass

    waited: list[float] = []

    def stall_s() -> float:
        waited.append(0.0)
        return 0.0

    dice = Wire(tmp_path, Trouble.RANK_LATE, Trouble.RANK_REFUSED).dice
    dice.stall_s = stall_s  # type: ignore[method-assign]  # a test does not wait
    Storm(ranks_until={str(os.getpid()): 1e12}).write(tmp_path / "storm")
    trouble_writes(OfARank, dice)
    transport = OfARank()
    with pytest.raises(TransferError):
        transport.submit_writes("s", [(1, 2, 3)])
    assert (waited, transport.submitted) == ([0.0], [])


def test_a_lost_frame_does_not_leave_and_a_doubled_one_leaves_twice(tmp_path: Path) -> None:
    assert HeldFrames(stormy(tmp_path, Trouble.LOST).dice).leaving(("a",), 0.0) == []
    assert HeldFrames(stormy(tmp_path, Trouble.DOUBLED).dice).leaving(("a",), 0.0) == [("a",), ("a",)]


def test_a_swapped_frame_leaves_behind_the_next_one(tmp_path: Path) -> None:
    frames = HeldFrames(stormy(tmp_path, Trouble.SWAPPED).dice)
    assert frames.leaving(("a",), 0.0) == []
    frames.dice = Wire(tmp_path).dice
    assert frames.leaving(("b",), 0.1) == [("b",), ("a",)]
    assert frames.due(9.0) == []


@pytest.mark.parametrize("trouble", [Trouble.SWAPPED, Trouble.LATE])
def test_a_held_frame_leaves_once_even_when_none_follows(tmp_path: Path, trouble: Trouble) -> None:
    frames = HeldFrames(stormy(tmp_path, trouble).dice)
    assert frames.leaving(("a",), 0.0) == []
    assert frames.due(0.001) == []
    assert frames.due(2.0) == [("a",)]
    assert frames.due(3.0) == []


class Channel:
    """What ``trouble_channel`` needs of one."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def send(self, message: str) -> None:
        self.sent.append(message)

    def receive(self) -> bytes | None:
        return b"frame"


class Transport:
    """Every write is DONE."""

    status = WriteStatus.DONE

    def __init__(self) -> None:
        self.submitted: list[int] = []

    def submit_writes(self, session: str, ranges: Sequence[WriteRange]) -> int:
        self.submitted += [source for source, _, _ in ranges]
        return len(self.submitted)

    def write_status(self, write: int) -> WriteStatus:
        return self.status


def test_a_troubled_channel_sends_as_before_when_it_is_calm(tmp_path: Path) -> None:
    class Calm(Channel):
        pass

    trouble_channel(Calm, Wire(tmp_path, *Trouble).dice)
    channel = Calm()
    channel.send("a")
    assert channel.receive() == b"frame"
    assert channel.sent == ["a"]


def test_a_frame_that_was_late_leaves_when_its_channel_listens(tmp_path: Path) -> None:
    class Late(Channel):
        pass

    dice = stormy(tmp_path, Trouble.LATE).dice
    dice.late_s = lambda: 0.0  # type: ignore[method-assign]  # a test does not wait
    trouble_channel(Late, dice)
    channel, other = Late(), Late()
    channel.send("a")
    assert channel.sent == []
    other.receive()
    channel.receive()
    assert (channel.sent, other.sent) == (["a"], [])


def test_a_refused_write_is_not_submitted(tmp_path: Path) -> None:
    class Refusing(Transport):
        pass

    trouble_writes(Refusing, stormy(tmp_path, Trouble.REFUSED).dice)
    transport = Refusing()
    with pytest.raises(TransferError):
        transport.submit_writes("s", [(1, 2, 3)])
    assert transport.submitted == []


@pytest.mark.parametrize(
    ("trouble", "real"),
    [(Trouble.CALLED_FAILED, WriteStatus.DONE), (Trouble.FAILED_EARLY, WriteStatus.PENDING)],
)
def test_a_write_is_called_failed_although_it_was_submitted(
    tmp_path: Path, trouble: Trouble, real: WriteStatus
) -> None:
    class Lying(Transport):
        status = real

    trouble_writes(Lying, stormy(tmp_path, trouble).dice)
    transport = Lying()
    assert transport.write_status(transport.submit_writes("s", ranges=[(1, 2, 3)])) is WriteStatus.FAILED
    assert transport.submitted == [1]


def test_settings_travel_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = WireSettings("decode-1", 5, {"frame lost": 0.5}, "/storm", "/log")
    for name, value in settings.as_env().items():
        monkeypatch.setenv(name, str(value))
    assert settings_from_env() == settings
