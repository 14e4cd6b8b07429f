"""What the reference page says of conditions and reasons is what the reducer can say, no less and no more."""

from __future__ import annotations

from itertools import product
from typing import Final

from tools.reference.reasons import REASONS_OF, TRUE_MEANS

from pdcluster_operator.core.status.conditions import Counts, EventReason, Reason, Truth, Type
from pdcluster_operator.core.status.pool_status import Facts, Problems, Verification, reduce_status

DEADLINE_S: Final = 60
ROLES: Final = (
    Counts(),
    Counts(wanted=2, least=1),
    Counts(wanted=2, least=1, replicas=2, updated=2, ready=2, updated_ready=2),
    Counts(wanted=2, least=2, replicas=2, updated=1, ready=1, updated_ready=0),
)
"""Stopped, starting, complete, and in a rollout that lacks one."""


def said() -> set[tuple[Type, Reason, Truth]]:
    """All that the reducer says of every combination of these facts, at first and when the deadline is over."""
    found = set()
    cases = product(ROLES, ROLES, (0, 1), ("", "no"), Verification, (False, True), ("", "it dies"))
    for prefill, decode, routers, refusal, verification, is_paused, loop in cases:
        if bool(prefill.wanted) is not bool(decode.wanted):
            continue
        facts = Facts(
            1,
            "A",
            prefill,
            decode,
            1,
            routers,
            DEADLINE_S,
            refusal,
            verification,
            "timeout",
            is_paused=is_paused,
            problems=Problems(crash_loop=loop),
        )
        first = reduce_status(facts, None, now=0)
        for status in (first, reduce_status(facts, first, now=DEADLINE_S)):
            found |= {(one.type, one.reason, one.truth) for one in status.conditions}
    partly = Facts(1, "A", Counts(), Counts(), 1, 1, DEADLINE_S, unknown_fields=("spec.new",))
    held = Facts(1, "A", ROLES[3], ROLES[3], 1, 1, DEADLINE_S, held_by_groups="group 0 is not ready")
    for facts in (partly, held):
        found |= {(one.type, one.reason, one.truth) for one in reduce_status(facts, None, now=0).conditions}
    return found


def test_a_condition_has_exactly_the_reasons_that_the_page_lists() -> None:
    listed = {(kind, reason, truth) for kind, reasons in REASONS_OF.items() for reason, truth in reasons.items()}
    assert said() == listed


def test_every_condition_and_every_reason_has_a_meaning_in_the_order_of_status() -> None:
    assert list(TRUE_MEANS) == list(REASONS_OF) == list(Type)
    assert [reason for reason in (*Reason, *EventReason) if not reason.means] == []
