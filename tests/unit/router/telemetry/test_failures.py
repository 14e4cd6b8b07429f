"""One line and one count for each failure, with the same keys."""

from __future__ import annotations

import logging

import pytest

from pdcluster_router.core.telemetry.scrub import MAX_REASON_CHARS
from pdcluster_router.telemetry.failures import MAX_LINES_PER_S, Failure, FailureKind, Failures


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def counted() -> list[FailureKind]:
    return []


@pytest.fixture
def failures(clock: Clock, counted: list[FailureKind]) -> Failures:
    return Failures(counted.append, clock)


def test_a_failure_is_one_line_with_all_keys_and_one_count(
    failures: Failures, counted: list[FailureKind], caplog: pytest.LogCaptureFixture
) -> None:
    failures.tell(Failure(FailureKind.PREFILL_FAILED, "R-1", "t-1", 2, "prefill-0", "it answered 500"))
    failures.tell(Failure(FailureKind.QUEUE_FULL))
    assert caplog.messages == [
        "failure kind=prefill_failed request_id=R-1 transfer_id=t-1 attempt=2 engine=prefill-0 reason=it answered 500",
        "failure kind=queue_full request_id=- transfer_id=- attempt=0 engine=- reason=-",
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert counted == [FailureKind.PREFILL_FAILED, FailureKind.QUEUE_FULL]


def test_a_stranger_cannot_write_a_line_of_its_own_or_a_long_one(
    failures: Failures, caplog: pytest.LogCaptureFixture
) -> None:
    failures.tell(Failure(FailureKind.BAD_TOKEN, transfer_id="x\nfailure kind=decode_lost", reason="y\n" * 10_000))
    (line,) = caplog.messages
    assert "\n" not in line
    assert "transfer_id=x_failure_kind=decode_lost attempt=0" in line
    assert len(line) < MAX_REASON_CHARS + 200


def test_a_storm_is_counted_whole_and_logged_in_part(
    failures: Failures, clock: Clock, counted: list[FailureKind], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(1000):
        failures.tell(Failure(FailureKind.CLIENT_GONE))
    failures.tell(Failure(FailureKind.DECODE_LOST))
    assert len(counted) == 1001
    assert len(caplog.messages) == MAX_LINES_PER_S + 2
    assert caplog.messages[-2] == "failure kind=client_gone: more in this second are counted, not logged"
    clock.now += 1.0
    failures.tell(Failure(FailureKind.CLIENT_GONE))
    assert len(caplog.messages) == MAX_LINES_PER_S + 3


def test_kinds_are_words_that_fit_a_label() -> None:
    assert all(kind.value == kind.name.lower() for kind in FailureKind)


def test_the_last_failure_of_an_engine_is_told_with_its_age(failures: Failures, clock: Clock) -> None:
    failures.tell(Failure(FailureKind.PREFILL_FAILED, engine="prefill-0", reason="10.1.2.3:80 answered 500\n"))
    failures.tell(Failure(FailureKind.PREFILL_TIMEOUT, engine="prefill-0"))
    failures.tell(Failure(FailureKind.DECODE_LOST, engine="decode-0", reason="10.1.2.3:80 hung up " + "x" * 999))
    clock.now += 7
    assert failures.last_of("prefill-0") == (7.0, "prefill_timeout")
    age_s, told = failures.last_of("decode-0") or (0.0, "")
    assert (age_s, told[:35], len(told) < 250) == (7.0, "decode_lost: <address> hung up xxxx", True)
    assert failures.last_of("decode-1") is None


def test_of_engines_without_end_the_last_ones_are_remembered(failures: Failures) -> None:
    for number in range(1500):
        failures.tell(Failure(FailureKind.DECODE_LOST, engine=f"decode-{number}"))
    failures.tell(Failure(FailureKind.DECODE_LOST, engine="decode-500"))
    failures.tell(Failure(FailureKind.DECODE_LOST, engine="decode-1500"))
    known = [number for number in range(1501) if failures.last_of(f"decode-{number}") is not None]
    assert known == [500, *range(502, 1501)]


def test_the_words_of_a_last_failure_are_made_once(failures: Failures) -> None:
    """A page asks for them of each engine every 2 s, and to scrub a long reason takes 0.2 ms."""
    failures.tell(Failure(FailureKind.DECODE_LOST, engine="decode-0", reason="it hung up"))
    first, second = failures.last_of("decode-0"), failures.last_of("decode-0")
    assert first is not None
    assert second is not None
    assert first[1] is second[1]
