"""Why a PDCluster is not ready and what to do, in sentences, from its status and Events (``pdcluster explain``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pdcluster_operator.core.status.conditions import Condition, EventReason, Reason, Status, Truth, Type

_WORTH_A_WORD: Final = frozenset({Reason.ROLLING_OUT, Reason.UNKNOWN_FIELDS})
"""Users are told of a condition with one of these reasons even if it is True."""

WAITS_FOR_PODS: Final = "A rollout is under way, and goes on when the pods do: see what keeps them above."
"""Replaces the cure of ``ROLLING_OUT`` ("nothing to do"), if the cluster has a complaint about a pod."""

NOT_LOOKED_AT: Final = (
    "The operator has not looked at it as it is now, or is of another version. Check that `pdcluster operator` runs "
    "and watches its namespace."
)


def explain(status: Status | None, generation: int) -> tuple[str, ...]:
    """Sentences, with the first thing to mend at the front; one sentence if all is well.

    ``status``: None if there is none. ``generation``: of the spec as it is now.
    """
    if status is None or status.condition(Type.READY) is None or status.observed_generation < generation:
        return (NOT_LOOKED_AT,)
    troubles = [condition for condition in status.conditions if _is_trouble(condition)]
    if status.reason(Type.ACCEPTED) is Reason.REFUSED:
        troubles = troubles[:1]  # All other troubles follow from the refusal.
    is_held = any(_has_complaint(condition) for condition in troubles)
    told = tuple(_sentence(condition, is_held) for condition in _without_repeats(troubles))
    return told or (_all_well(status),)


def explain_events(events: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """A sentence for each Event that tells of no condition. ``events``: reasons and messages, oldest first."""
    known = {reason.value: reason for reason in EventReason}
    told = (_event_sentence(known[word], message) for word, message in events if word in known)
    return tuple(dict.fromkeys(told))


def _event_sentence(reason: EventReason, message: str) -> str:
    """The message without its own cure, and the cure: a message is cut at its largest length."""
    return f"{reason.value} ({message.removesuffix(reason.cure).rstrip(' .')}). {reason.cure}"


def _is_trouble(condition: Condition) -> bool:
    """Whether to tell of this condition: it is not as it should be, or has a reason in ``_WORTH_A_WORD``. Ready is not
    told, because it only sums up the others."""
    if condition.type is Type.READY:
        return False
    if condition.type is Type.DEGRADED:
        return condition.truth is Truth.TRUE
    return condition.truth is not Truth.TRUE or condition.reason in _WORTH_A_WORD


def _without_repeats(troubles: list[Condition]) -> list[Condition]:
    """The conditions without repeats: without Degraded if it says the same as another one, and with only the first of
    those that say that the pool is scaled to zero."""
    first: dict[object, Condition] = {}
    for condition in troubles:
        key = condition.reason if condition.reason is Reason.SCALED_TO_ZERO else (condition.reason, condition.message)
        first.setdefault(key, condition)
    return list(first.values())


def _has_complaint(condition: Condition) -> bool:
    """Whether the message also quotes, behind the numbers, a complaint of the cluster about pods."""
    is_of_pods = condition.reason in (Reason.INSTANCES_NOT_READY, Reason.ROUTERS_NOT_READY)
    return is_of_pods and ": " in condition.message


def _sentence(condition: Condition, is_held: bool) -> str:
    cure = WAITS_FOR_PODS if is_held and condition.reason is Reason.ROLLING_OUT else condition.reason.cure
    return f"{condition.type.value} is {condition.truth.value} ({condition.message}). {cure}"


def _all_well(status: Status) -> str:
    return f"Ready: {status.prefill.ready} prefill and {status.decode.ready} decode instances serve {status.target}."
