"""Which engines are known, and what becomes of each: a table of (what we have, what is listed, what to do)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdcluster_protocol.labels import Role
from pdcluster_router.core.membership import Add, Command, Drain, Known, Member, Remove, Revive, State, plan

READY = Member("http://d:1", Role.DECODE, "r1", "uid-1")
NOT_READY = replace(READY, is_ready=False, is_serving=False)
FINISHING = replace(READY, is_ready=False, is_terminating=True)
STOPPED = replace(FINISHING, is_serving=False)
KEY = READY.key


@pytest.mark.parametrize(
    ("member", "state"),
    [
        (READY, State.SERVING),
        (NOT_READY, State.NOT_READY),
        (FINISHING, State.FINISHING),
        (STOPPED, State.LEAVING),
        # A Service that publishes addresses that are not ready calls a terminating pod ready.
        (replace(FINISHING, is_ready=True), State.FINISHING),
    ],
)
def test_terminating_counts_more_than_ready(member: Member, state: State) -> None:
    assert member.state is state


@pytest.mark.parametrize(
    ("known", "is_busy", "listed", "commands"),
    [
        (None, False, READY, [Add(READY)]),
        (None, False, FINISHING, [Add(FINISHING)]),
        (State.SERVING, True, READY, []),
        (State.SERVING, True, NOT_READY, [Drain(KEY, State.NOT_READY)]),
        (State.SERVING, False, FINISHING, [Drain(KEY, State.FINISHING)]),
        (State.SERVING, True, None, [Drain(KEY, State.LEAVING)]),
        (State.SERVING, False, None, [Remove(KEY)]),
        (State.NOT_READY, False, READY, [Revive(KEY)]),
        (State.FINISHING, True, STOPPED, [Drain(KEY, State.LEAVING)]),
        (State.FINISHING, False, STOPPED, [Drain(KEY, State.LEAVING)]),
        (State.FINISHING, True, None, [Drain(KEY, State.LEAVING)]),
        (State.LEAVING, True, None, []),
        (State.LEAVING, False, None, [Remove(KEY)]),
        (State.LEAVING, True, READY, [Revive(KEY)]),
        (State.LEAVING, False, STOPPED, []),
    ],
)
def test_what_we_have_follows_what_is_listed(
    known: State | None, is_busy: bool, listed: Member | None, commands: list[Command]
) -> None:
    have = {} if known is None else {KEY: Known(known, is_busy)}
    assert plan(have, [] if listed is None else [listed]) == commands


@pytest.mark.parametrize(
    "other",
    [replace(READY, uid="uid-2"), replace(READY, revision="r2"), replace(READY, url="http://d:2")],
    ids=["pod", "revision", "address"],
)
def test_another_pod_revision_or_address_is_another_engine(other: Member) -> None:
    have = {KEY: Known(State.SERVING, is_busy=True)}
    assert plan(have, [other]) == [Drain(KEY, State.LEAVING), Add(other)]


def test_only_engines_that_may_get_work_now_or_later_are_probed() -> None:
    assert {state for state in State if state.is_probed} == {State.SERVING, State.NOT_READY}
