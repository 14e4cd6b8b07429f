"""How writes are handed to Mooncake: one call each, or many in one."""

from __future__ import annotations

import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from fakes.mooncake import StrictEngine
from pdcluster_connector.transport.base import WriteRange, WriteStatus
from pdcluster_connector.transport.submits import BatchSubmits, LibraryBatches, SingleSubmits, choose_submits
from pdcluster_protocol.errors import TransferError

BASE = 0x1000
MANY = 4


def engine(queue_writes: int = 2048) -> StrictEngine:
    made = StrictEngine(queue_writes)
    made.register_memory(BASE, 1 << 20)
    return made


def ranges(count: int) -> list[WriteRange]:
    return [(BASE + 16 * number, 16 * number, 16) for number in range(count)]


def batches(made: StrictEngine) -> BatchSubmits:
    return BatchSubmits(made, made.batches, MANY)


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_single_write_is_asked_about_until_it_is_over_and_never_again(*, has_failed: bool) -> None:
    made = engine()
    submitted = SingleSubmits(made).submit("peer", ranges(1))
    assert submitted.status() is WriteStatus.PENDING
    made.end(1, 0, has_failed=has_failed)
    assert submitted.status() is (WriteStatus.FAILED if has_failed else WriteStatus.DONE)
    assert made.num_batches == 0


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (0, WriteStatus.PENDING),
        (1, WriteStatus.DONE),
        (-1, WriteStatus.FAILED),
        (-2, WriteStatus.LOST),
        (-9, WriteStatus.LOST),
    ],
)
def test_a_write_that_mooncake_has_given_up_waiting_for_may_still_be_read(said: int, status: WriteStatus) -> None:
    class Told:
        def transfer_submit_write(self, *_: object) -> int:
            return 7

        def transfer_check_status(self, batch: int) -> int:
            assert batch == 7
            return said

    assert SingleSubmits(Told()).submit("peer", ranges(1)).status() is status


def test_many_writes_are_one_call() -> None:
    made = engine()
    batches(made).submit("peer", ranges(MANY))
    assert made.calls == [MANY]


@pytest.mark.parametrize("last", range(MANY))
def test_a_batch_is_done_and_freed_when_the_last_of_its_writes_is_over(last: int) -> None:
    made = engine()
    submitted = batches(made).submit("peer", ranges(MANY))
    for number in (number for number in range(MANY) if number != last):
        made.end(1, number)
        assert submitted.status() is WriteStatus.PENDING
    made.end(1, last)
    assert submitted.status() is WriteStatus.DONE
    assert made.num_batches == 0


@pytest.mark.parametrize("failed", range(MANY))
def test_a_batch_with_a_failed_write_has_failed_once_the_others_read_no_more(failed: int) -> None:
    made = engine()
    submitted = batches(made).submit("peer", ranges(MANY))
    made.end(1, failed, has_failed=True)
    assert submitted.status() is WriteStatus.PENDING
    for number in (number for number in range(MANY) if number != failed):
        made.end(1, number)
    assert submitted.status() is WriteStatus.FAILED
    assert made.num_batches == 0


def test_a_single_write_that_is_refused_was_not_submitted_but_of_a_batch_some_may_have_been() -> None:
    full = engine(queue_writes=0)
    with pytest.raises(TransferError, match="refused"):
        SingleSubmits(full).submit("peer", ranges(1))
    made = engine(queue_writes=2)
    assert batches(made).submit("peer", ranges(MANY)).status() is WriteStatus.LOST


def test_a_batch_of_which_mooncake_says_what_is_not_known_is_lost_and_never_freed() -> None:
    made = engine()
    submitted = batches(made).submit("peer", ranges(MANY))
    made.end(1, 0)
    made.lose(1, 1)
    for number in range(2, MANY):
        made.end(1, number)
    assert submitted.status() is WriteStatus.LOST
    assert submitted.status() is WriteStatus.LOST
    assert made.num_batches == 1


class Library:
    """Mooncake's symbols; ``code``: what each call answers."""

    def __init__(self, code: int) -> None:
        self._code = code

    def __getattr__(self, name: str) -> Any:
        return partial(self._answer, name)

    def _answer(self, name: str, *_: object) -> Any:
        return 7 if "allocate" in name else SimpleNamespace(code=self._code)


class Told(Library):
    """As 0.3.13 about a write: ``code`` of the call, and the write's ``state``."""

    def __init__(self, code: int, state: int) -> None:
        super().__init__(code)
        self._state = state

    def _answer(self, name: str, *arguments: Any) -> Any:
        if "getTransferStatus" in name:
            arguments[3]._obj.state = self._state
        return super()._answer(name, *arguments)


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (0, WriteStatus.PENDING),  # WAITING
        (1, WriteStatus.PENDING),  # PENDING
        (2, WriteStatus.LOST),  # INVALID
        (3, WriteStatus.LOST),  # CANCELED
        (4, WriteStatus.DONE),  # COMPLETED
        (5, WriteStatus.PENDING),  # TIMEOUT: it may still be written
        (6, WriteStatus.FAILED),  # FAILED
        (7, WriteStatus.LOST),  # none that is known
    ],
)
def test_each_state_of_mooncakes_has_one_meaning(state: int, status: WriteStatus) -> None:
    assert LibraryBatches(Told(0, state), 1).status(9, 0) is status
    assert LibraryBatches(Told(1, state), 1).status(9, 0) is WriteStatus.LOST, "a call that fails says nothing"


class NoSymbols:
    """A build of Mooncake that exports nothing."""


class Answering(Library):
    """As 0.3.13: there is no first write in an empty batch, which can be freed."""

    def _answer(self, name: str, *_: object) -> Any:
        return 7 if "allocate" in name else SimpleNamespace(code=int("getTransferStatus" in name))


@pytest.mark.parametrize(
    ("protocol", "wanted", "number"),
    [("tcp", 0, 1), ("rdma", 0, 128), ("ascend", 0, 128), ("tcp", 32, 32), ("rdma", 1, 1)],
)
def test_the_way_is_chosen_by_the_protocol_unless_the_user_says_otherwise(
    protocol: str, wanted: int, number: int
) -> None:
    assert choose_submits(protocol, wanted, Binding(), lambda: Answering(0)).writes_per_submit == number


class Binding(StrictEngine):
    def get_engine_ptr(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("library", "said"),
    [(NoSymbols(), "allocateBatchID"), (Library(0), "answers differ"), (Library(1), "answers differ")],
)
def test_a_mooncake_that_cannot_be_asked_gets_a_call_for_each_write(
    caplog: pytest.LogCaptureFixture, library: Any, said: str
) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose_submits("rdma", 0, Binding(), lambda: library).writes_per_submit == 1
    assert caplog.messages[0].startswith("batches not used, each write is a call of its own reason=")
    assert said in caplog.messages[0]
