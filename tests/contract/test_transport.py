"""What every transport promises. One suite: the fake keeps the contract of the real one."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from contract.ends import MEMORY_BYTES, Ends, Receiver, is_untouched, open_ends, outcome
from pdcluster_connector.transport.base import WriteId, WriteRange, WriteStatus
from pdcluster_protocol.errors import TransferError

BLOCK_BYTES = 4096
NUM_BLOCKS = MEMORY_BYTES // BLOCK_BYTES
CLOSE_LIMIT_S = 2.0
TRIES = 3
"""Whoever is slow is slow each time; a machine that others use too is not."""


KINDS = ("fake", "mooncake", "shared fake", "shared mooncake")


@pytest.fixture(params=[*KINDS, *(f"batches {kind}" for kind in KINDS)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ends(kind: str) -> Iterator[Ends]:
    with open_ends(kind) as pair:
        yield pair


def submit(ends: Ends, receiver: Receiver, source: int, target: int, num_bytes: int) -> WriteId:
    """A write between two offsets."""
    (write,) = submit_all(ends, receiver, [(source, target, num_bytes)])
    return write


def submit_all(ends: Ends, receiver: Receiver, ranges: Sequence[WriteRange]) -> list[WriteId]:
    """Writes between offsets, as many in one call as the transport takes."""
    most = ends.sender.writes_per_submit
    rows = [(ends.source.address + source, receiver.address + target, size) for source, target, size in ranges]
    return [ends.sender.submit_writes(receiver.session, rows[at : at + most]) for at in range(0, len(rows), most)]


@pytest.mark.parametrize("num_bytes", [1, 4095, 64 << 10, 1 << 20, (17 << 20) + 3])
def test_a_write_lands_byte_for_byte_and_touches_nothing_beside_it(ends: Ends, num_bytes: int) -> None:
    receiver = ends.new_receiver()
    write = submit(ends, receiver, 1000, 2000, num_bytes)
    assert outcome(ends.sender, write) is WriteStatus.DONE
    landed = receiver.memory.bytes
    assert landed[2000 : 2000 + num_bytes] == ends.source.bytes[1000 : 1000 + num_bytes]
    assert is_untouched(landed[:2000])
    assert is_untouched(landed[2000 + num_bytes :])


def test_thousands_of_small_writes_each_find_their_block(ends: Ends) -> None:
    receiver = ends.new_receiver()
    blocks = random.Random(5).sample(range(NUM_BLOCKS), 4000)
    last = NUM_BLOCKS - 1
    writes = submit_all(ends, receiver, [(b * BLOCK_BYTES, (last - b) * BLOCK_BYTES, BLOCK_BYTES) for b in blocks])
    assert {outcome(ends.sender, write) for write in writes} == {WriteStatus.DONE}
    for block in blocks:
        mirrored = (NUM_BLOCKS - 1 - block) * BLOCK_BYTES
        assert receiver.memory.bytes[mirrored : mirrored + BLOCK_BYTES] == _block(ends, block)


def test_several_lanes_write_to_several_peers_at_once(ends: Ends) -> None:
    receivers = [ends.new_receiver(), ends.new_receiver()]

    def run_lane(lane: int) -> set[WriteStatus]:
        blocks = range(lane * 100, lane * 100 + 100)
        receiver = receivers[lane % 2]
        writes = submit_all(ends, receiver, [(b * BLOCK_BYTES, b * BLOCK_BYTES, BLOCK_BYTES) for b in blocks])
        return {outcome(ends.sender, write) for write in writes}

    with ThreadPoolExecutor(4) as lanes:
        assert list(lanes.map(run_lane, range(4))) == [{WriteStatus.DONE}] * 4
    for lane in range(4):
        span = slice(lane * 100 * BLOCK_BYTES, (lane + 1) * 100 * BLOCK_BYTES)
        assert receivers[lane % 2].memory.bytes[span] == ends.source.bytes[span]
        assert is_untouched(receivers[1 - lane % 2].memory.bytes[span])


@pytest.mark.parametrize(("offset", "num_bytes"), [(-1, 16), (MEMORY_BYTES - 15, 16), (MEMORY_BYTES, 1), (0, 0)])
def test_a_source_that_is_not_registered_is_refused_before_anything_is_sent(
    ends: Ends, offset: int, num_bytes: int
) -> None:
    receiver = ends.new_receiver()
    with pytest.raises(TransferError, match="not registered"):
        submit(ends, receiver, offset, 0, num_bytes)
    assert outcome(ends.sender, submit(ends, receiver, 0, 64, 64)) is WriteStatus.DONE
    assert is_untouched(receiver.memory.bytes[:64])


@pytest.mark.parametrize("offset", [-BLOCK_BYTES, MEMORY_BYTES, MEMORY_BYTES - 8])
def test_a_target_that_is_not_registered_fails_and_the_next_write_succeeds(ends: Ends, offset: int) -> None:
    receiver = ends.new_receiver()
    assert outcome(ends.sender, submit(ends, receiver, 0, offset, 16)) is WriteStatus.FAILED
    assert outcome(ends.sender, submit(ends, receiver, 0, 0, 16)) is WriteStatus.DONE
    assert is_untouched(receiver.memory.bytes[16:])


@pytest.mark.parametrize("wrong", [-BLOCK_BYTES, MEMORY_BYTES])
def test_a_submit_with_one_wrong_target_fails_and_the_others_of_it_land(ends: Ends, wrong: int) -> None:
    receiver = ends.new_receiver()
    ranges = [(16 * number, 16 * number, 16) for number in range(100)]
    ranges[50] = (0, wrong, 16)
    ends_as = [outcome(ends.sender, write) for write in submit_all(ends, receiver, ranges)]
    assert ends_as.count(WriteStatus.FAILED) == 1
    assert receiver.memory.bytes[: 16 * 50] == ends.source.bytes[: 16 * 50]
    assert receiver.memory.bytes[16 * 51 : 16 * 100] == ends.source.bytes[16 * 51 : 16 * 100]
    assert outcome(ends.sender, submit(ends, receiver, 0, 0, 16)) is WriteStatus.DONE


def test_a_submit_with_one_source_that_is_not_registered_is_refused_as_a_whole(ends: Ends) -> None:
    receiver = ends.new_receiver()
    most = ends.sender.writes_per_submit
    rows = [(ends.source.address + 16 * number, receiver.address + 16 * number, 16) for number in range(most - 1)]
    with pytest.raises(TransferError, match="not registered"):
        ends.sender.submit_writes(receiver.session, [*rows, (ends.source.address - 16, receiver.address, 16)])
    assert outcome(ends.sender, submit(ends, receiver, 0, MEMORY_BYTES - 16, 16)) is WriteStatus.DONE
    assert is_untouched(receiver.memory.bytes[: 16 * most])


def test_a_submit_is_pending_until_its_last_write_is_over(ends: Ends) -> None:
    """Also when one of its writes has failed: the others may still read our memory."""
    receiver = ends.new_receiver()
    assert outcome(ends.sender, submit(ends, receiver, 0, 0, 16)) is WriteStatus.DONE
    receiver.pause()
    most = ends.sender.writes_per_submit
    submits = submit_all(ends, receiver, [(0, MEMORY_BYTES, 16), *[(0, 0, 1 << 20)] * (most - 1)])
    time.sleep(0.2)
    assert ends.sender.write_status(submits[-1]) is WriteStatus.PENDING
    receiver.resume()
    assert outcome(ends.sender, submits[-1]) is WriteStatus.FAILED


def test_every_write_to_a_killed_peer_fails(ends: Ends) -> None:
    receiver = ends.new_receiver()
    assert outcome(ends.sender, submit(ends, receiver, 0, 0, 16)) is WriteStatus.DONE
    receiver.pause()
    pending = submit_all(ends, receiver, [(0, 0, 1 << 20)] * 20)
    receiver.kill()
    later = submit(ends, receiver, 0, 0, 16)
    assert {outcome(ends.sender, write) for write in (*pending, later)} == {WriteStatus.FAILED}


def test_a_write_to_a_peer_that_never_was_ends_badly(ends: Ends) -> None:
    write = ends.sender.submit_writes("127.0.0.1:9", [(ends.source.address, ends.source.address, 16)])
    assert outcome(ends.sender, write) is WriteStatus.FAILED


@pytest.mark.parametrize("is_known", [True, False])
def test_a_stopped_peer_delays_neither_submission_nor_the_writes_to_others(ends: Ends, *, is_known: bool) -> None:
    assert any(seconds_beside_a_stopped_peer(ends, is_known=is_known) < 1.0 for _ in range(TRIES))


def seconds_beside_a_stopped_peer(ends: Ends, *, is_known: bool) -> float:
    """To hand over writes to a peer that is stopped, and to finish one to another. Each call has peers of its own."""
    stopped, healthy = ends.new_receiver(), ends.new_receiver()
    if is_known:
        assert outcome(ends.sender, submit(ends, stopped, 0, 0, 16)) is WriteStatus.DONE
    stopped.pause()
    begun = time.monotonic()
    waiting = submit_all(ends, stopped, [(0, 0, 1 << 20)] * 30)
    assert outcome(ends.sender, submit(ends, healthy, 0, 0, 1 << 20)) is WriteStatus.DONE
    seconds = time.monotonic() - begun
    assert ends.sender.write_status(waiting[-1]) is WriteStatus.PENDING
    stopped.resume()
    assert {outcome(ends.sender, write) for write in waiting} == {WriteStatus.DONE}
    assert stopped.memory.bytes[: 1 << 20] == ends.source.bytes[: 1 << 20]
    return seconds


@pytest.mark.parametrize("is_known", [True, False])
def test_closing_is_quick_while_writes_are_pending_and_ends_them(kind: str, *, is_known: bool) -> None:
    def is_slow() -> bool:
        with open_ends(kind) as ends:
            return seconds_to_close(ends, is_known=is_known) >= CLOSE_LIMIT_S

    assert not all(is_slow() for _ in range(TRIES))


def seconds_to_close(ends: Ends, *, is_known: bool) -> float:
    """While writes to a stopped peer are pending, which end by it."""
    stopped = ends.new_receiver()
    if is_known:
        assert outcome(ends.sender, submit(ends, stopped, 0, 0, 16)) is WriteStatus.DONE
    stopped.pause()
    waiting = submit_all(ends, stopped, [(0, 0, 1 << 20)] * 30)
    begun = time.monotonic()
    ends.sender.close()
    seconds = time.monotonic() - begun
    assert {outcome(ends.sender, write) for write in waiting} == {WriteStatus.FAILED}
    with pytest.raises(TransferError, match="closed"):
        submit(ends, stopped, 0, 0, 16)
    ends.sender.close()
    return seconds


def _block(ends: Ends, block: int) -> bytes:
    return ends.source.bytes[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
