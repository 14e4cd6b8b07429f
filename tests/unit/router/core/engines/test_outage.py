"""What one probe says of an engine, and when its silent requests are lost: known answers."""

from __future__ import annotations

import errno
import socket

import pytest

from pdcluster_router.core.engines.outage import Outage, Sign, sign_of_failure, sign_of_status

GONE_S, SILENT_S, MOST_S = 30.0, 120.0, 3.0


def why(outage: Outage, quiet_since: float = 0.0) -> str:
    return outage.why_lost(quiet_since, gone_s=GONE_S, silent_s=SILENT_S)


def probed(*signs: Sign, every_s: float = 1.0, begin: float = 1000.0) -> tuple[Outage, float]:
    """An engine with these probes, and the time of the last one."""
    outage = Outage()
    for index, sign in enumerate(signs):
        outage.saw(sign, now=begin + index * every_s, most_s=MOST_S)
    return outage, begin + (len(signs) - 1) * every_s


@pytest.mark.parametrize(
    ("status", "sign"), [(200, Sign.WELL), (503, Sign.DEAD), (404, Sign.UNKNOWN), (401, Sign.UNKNOWN)]
)
def test_what_an_answer_says(status: int, sign: Sign) -> None:
    assert sign_of_status(status) is sign


@pytest.mark.parametrize(
    ("error_number", "sign"),
    [
        (errno.ECONNREFUSED, Sign.DEAD),
        (errno.EHOSTUNREACH, Sign.SILENT),
        (0, Sign.SILENT),
        (socket.EAI_NONAME, Sign.UNKNOWN),
    ],
)
def test_what_a_probe_without_an_answer_says(error_number: int, sign: Sign) -> None:
    assert sign_of_failure(error_number, is_ours=False) is sign
    assert sign_of_failure(error_number, is_ours=True) is Sign.UNKNOWN


def test_a_dead_engine_loses_its_requests_after_its_time_and_says_what_helps() -> None:
    assert not why(probed(*[Sign.DEAD] * 30)[0])
    reason = why(probed(*[Sign.DEAD] * 31)[0])
    assert "30 s" in reason
    assert "--engine-gone" in reason
    assert "restart it" in reason


def test_a_silent_engine_has_longer() -> None:
    assert not why(probed(*[Sign.SILENT] * 120)[0])
    assert "--idle-timeout" in why(probed(*[Sign.SILENT] * 121)[0])


def test_a_silent_probe_among_dead_ones_leaves_only_the_longer_time() -> None:
    signs = [Sign.DEAD] * 29 + [Sign.SILENT] + [Sign.DEAD] * 29
    assert not why(probed(*signs)[0])
    assert why(probed(*signs, *[Sign.DEAD] * 2)[0])
    assert why(probed(*([Sign.DEAD, Sign.SILENT] * 61))[0])


@pytest.mark.parametrize("sign", [Sign.WELL, Sign.UNKNOWN])
def test_one_probe_that_does_not_fail_ends_an_outage(sign: Sign) -> None:
    assert not why(probed(*[Sign.DEAD] * 300, sign)[0])
    assert not why(probed(*[Sign.DEAD] * 300, sign, *[Sign.DEAD] * 30)[0])


def test_a_request_that_came_or_had_a_byte_later_has_its_own_time() -> None:
    outage, now = probed(*[Sign.DEAD] * 300)
    assert not why(outage, now - 29.0)
    assert why(outage, now - 30.0)


def test_the_time_in_which_the_router_itself_stood_still_does_not_count() -> None:
    outage, now = probed(Sign.DEAD, Sign.DEAD)
    outage.saw(Sign.DEAD, now=now + 3600.0, most_s=MOST_S)
    assert not why(outage)
    for second in range(1, 27):
        outage.saw(Sign.DEAD, now=now + 3600.0 + second, most_s=MOST_S)
    assert why(outage)


def test_an_engine_that_was_never_probed_loses_nothing() -> None:
    assert not why(Outage())
