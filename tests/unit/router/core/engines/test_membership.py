"""Which engines are known, and what becomes of each: a table of (what we have, what is listed, what to do)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.membership import (
    Add,
    EngineState,
    KnownEngine,
    Member,
    NewState,
    Remove,
    RosterChange,
    plan,
)

READY = Member("http://d:1", Role.DECODE, "r1", "uid-1")
NOT_READY = replace(READY, is_ready=False, is_serving=False)
FINISHING = replace(READY, is_ready=False, is_terminating=True)
STOPPED = replace(FINISHING, is_serving=False)
KEY = READY.key


@pytest.mark.parametrize(
    ("member", "state"),
    [
        (READY, EngineState.SERVING),
        (NOT_READY, EngineState.STARTING),
        (FINISHING, EngineState.FINISHING),
        (STOPPED, EngineState.LEAVING),
        # A Service that publishes addresses that are not ready calls a terminating pod ready.
        (replace(FINISHING, is_ready=True), EngineState.FINISHING),
    ],
)
def test_terminating_counts_more_than_ready(member: Member, state: EngineState) -> None:
    assert member.state is state


@pytest.mark.parametrize(
    ("known", "is_busy", "listed", "commands"),
    [
        (None, False, READY, [Add(READY)]),
        (None, False, FINISHING, [Add(FINISHING)]),
        (None, False, NOT_READY, [Add(NOT_READY)]),
        (EngineState.STARTING, False, NOT_READY, []),
        (EngineState.STARTING, False, READY, [NewState(KEY, EngineState.SERVING)]),
        (EngineState.STARTING, False, FINISHING, [NewState(KEY, EngineState.FINISHING)]),
        (EngineState.SERVING, True, READY, []),
        (EngineState.SERVING, True, NOT_READY, [NewState(KEY, EngineState.NOT_READY)]),
        (EngineState.SERVING, False, FINISHING, [NewState(KEY, EngineState.FINISHING)]),
        (EngineState.SERVING, True, None, [NewState(KEY, EngineState.LEAVING)]),
        (EngineState.SERVING, False, None, [Remove(KEY)]),
        (EngineState.NOT_READY, False, NOT_READY, []),
        (EngineState.NOT_READY, False, READY, [NewState(KEY, EngineState.SERVING)]),
        (EngineState.FINISHING, True, STOPPED, [NewState(KEY, EngineState.LEAVING)]),
        (EngineState.FINISHING, False, STOPPED, [NewState(KEY, EngineState.LEAVING)]),
        (EngineState.FINISHING, True, None, [NewState(KEY, EngineState.LEAVING)]),
        (EngineState.LEAVING, True, None, []),
        (EngineState.LEAVING, False, None, [Remove(KEY)]),
        (EngineState.LEAVING, True, READY, [NewState(KEY, EngineState.SERVING)]),
        (EngineState.LEAVING, True, NOT_READY, [NewState(KEY, EngineState.STARTING)]),
        (EngineState.LEAVING, False, STOPPED, []),
    ],
)
def test_what_we_have_follows_what_is_listed(
    known: EngineState | None, is_busy: bool, listed: Member | None, commands: list[RosterChange]
) -> None:
    have = {} if known is None else {KEY: KnownEngine(known, is_busy)}
    assert plan(have, [] if listed is None else [listed]) == commands


@pytest.mark.parametrize(
    "other",
    [replace(READY, uid="uid-2"), replace(READY, revision="r2"), replace(READY, url="http://d:2")],
    ids=["pod", "revision", "address"],
)
def test_another_pod_revision_or_address_is_another_engine(other: Member) -> None:
    have = {KEY: KnownEngine(EngineState.SERVING, is_busy=True)}
    assert plan(have, [other]) == [NewState(KEY, EngineState.LEAVING), Add(other)]


def test_only_engines_that_may_get_work_now_or_later_are_probed() -> None:
    terminating = {EngineState.FINISHING, EngineState.LEAVING}
    assert {state for state in EngineState if not state.is_probed} == terminating
    assert {state for state in EngineState if not state.was_ready} == terminating | {EngineState.STARTING}
