"""When lines are made and written: a turn after their request, and many at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pdcluster_protocol.access import AccessLine
from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.trace import RequestTrace
from pdcluster_router.core.telemetry.answer_facts import AnswerFacts, StreamFacts
from pdcluster_router.telemetry.access_log import PAUSE_S, AccessLog, EndFacts, add_answer, add_told, end, word_of
from pdcluster_router.telemetry.failures import FailureKind
from pdcluster_router.telemetry.metrics import Outcome


class Loop:
    """Keeps what it is told to call."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []
        self.later: list[tuple[float, Callable[[], None]]] = []

    def call_soon(self, callback: Callable[[], None], /) -> None:
        self.soon.append(callback)

    def call_later(self, delay_s: float, callback: Callable[[], None], /) -> None:
        self.later.append((delay_s, callback))

    def turn(self) -> None:
        due, self.soon = self.soon, []
        for callback in due:
            callback()


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "access"


@pytest.fixture
def log(path: Path, loop: Loop) -> AccessLog:
    return AccessLog(path, lambda _: None, loop)


def ids(path: Path) -> list[str]:
    return [msgspec.json.decode(line, type=AccessLine).request_id for line in path.read_text().splitlines()]


def test_what_is_said_in_the_turn_of_the_end_is_in_the_line(log: AccessLog, loop: Loop, path: Path) -> None:
    line = AccessLine(request_id="before")
    log.ended(lambda: line)
    line.request_id = "after"
    loop.turn()
    log.close()
    assert ids(path) == ["after"]


def test_lines_of_many_turns_are_written_at_once(log: AccessLog, loop: Loop, path: Path) -> None:
    for number in range(6):
        log.ended(lambda number=number: AccessLine(request_id=str(number)))  # type: ignore[misc]  # mypy finds no type
        if number % 2:
            loop.turn()
    assert [delay_s for delay_s, _ in loop.later] == [PAUSE_S]
    loop.later[0][1]()
    log.close()
    assert ids(path) == list("012345")


def test_after_a_write_the_next_line_is_waited_for_anew(log: AccessLog, loop: Loop, path: Path) -> None:
    for name in "ab":
        log.ended(lambda name=name: AccessLine(request_id=name))  # type: ignore[misc]  # as above
        loop.turn()
        loop.later.pop()[1]()
    log.close()
    assert ids(path) == ["a", "b"]


def test_what_ends_last_is_written_though_no_turn_follows(log: AccessLog, path: Path) -> None:
    log.ended(lambda: AccessLine(request_id="last"))
    log.close()
    assert ids(path) == ["last"]


def test_seconds_are_whole_microseconds() -> None:
    line = AccessLine()
    end(line, 10.0, 10.0000014, 10.5)
    assert (line.read_s, line.total_s) == (0.000001, 0.499999)


def test_a_request_that_never_arrived_is_timed_from_its_head() -> None:
    line = AccessLine()
    end(line, 10.0, None, 10.5)
    assert (line.read_s, line.total_s) == (None, 0.5)


def test_each_time_of_a_transfer_has_its_own_begin() -> None:
    trace = RequestTrace(
        transfer_id=TransferId("t"), received_at=1.5, reserved_at=2.0, prefill_sent_at=3.0, prefill_replied_at=4.5
    )
    line = AccessLine()
    add_told(line, EndFacts(outcome=Outcome.OK, failures=(), left_queue_at=1.25, trace=trace), 1.0)
    assert (line.transfer_id, line.queue_s, line.reservation_s, line.prefill_s) == ("t", 0.25, 1.0, 1.5)


def test_what_decode_has_counted_comes_before_what_its_answer_says() -> None:
    answer = AnswerFacts()
    answer.add(b'"usage":{"prompt_tokens":9,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":8}}', 2.0)
    counted, alone = AccessLine(prompt_tokens=7, cached_tokens=0), AccessLine()
    for line in (counted, alone):
        add_answer(line, answer, 1.0)
    assert (counted.prompt_tokens, counted.cached_tokens, counted.output_tokens) == (7, 0, 3)
    assert (alone.prompt_tokens, alone.cached_tokens, alone.output_tokens) == (9, 8, 3)


def test_what_nobody_tells_stays_unknown() -> None:
    line = AccessLine()
    add_told(line, EndFacts(outcome=Outcome.OVERLOADED, failures=(FailureKind.QUEUE_FULL,), left_queue_at=3.0), 1.0)
    add_answer(line, AnswerFacts(), 1.0)
    add_answer(line, StreamFacts(), 1.0)
    assert (line.outcome, line.failures, line.queue_s) == ("overloaded", ("queue_full",), 2.0)
    unknown = (line.reservation_s, line.prefill_s, line.first_byte_s, line.gap_p50_s, line.gap_max_s)
    assert unknown == (None,) * 5
    assert (line.prompt_tokens, line.output_tokens, line.events) == (None, None, 0)


@pytest.mark.parametrize("odd", ["\n", "\u2028", "\x85", "\x9b", "\x7f", "\u202e", "\ud800"])
def test_what_ends_a_line_or_commands_a_terminal_is_in_no_word(odd: str) -> None:
    assert word_of(f"Größe 1{odd}x") == "Größe 1?x"
