"""The slot of one request: what its client is told of its key's rates, also when it gives them back."""

from __future__ import annotations

from pdcluster_router.core.clients.key_limits import KeyLimits, KeyUse
from pdcluster_router.core.clients.key_slot import KeySlot


def slot_of(use: KeyUse, num_tokens: int, now: float) -> KeySlot:
    assert use.enter(num_tokens, now=now) is None
    return KeySlot(use, num_tokens, now)


def lines_of(slot: KeySlot) -> list[str]:
    return slot.lines.decode().splitlines()


def test_a_slot_that_gives_back_tells_what_is_left_after_that() -> None:
    use = KeyUse()
    use.limit(KeyLimits(requests_per_minute=6))
    slots = [slot_of(use, 0, 0.0) for _ in range(2)]
    assert lines_of(slots[1]) == [
        "x-ratelimit-limit-requests: 6",
        "x-ratelimit-remaining-requests: 4",
        "x-ratelimit-reset-requests: 20s",
    ]
    slots[1].waits_for_a_place()
    slots[1].give_back(5.0)
    assert lines_of(slots[1])[1:] == ["x-ratelimit-remaining-requests: 5", "x-ratelimit-reset-requests: 5s"]


def test_a_slot_that_has_left_gives_nothing_back_and_one_that_never_waited_neither() -> None:
    use = KeyUse()
    use.limit(KeyLimits(requests_per_minute=6))
    slots = [slot_of(use, 0, 0.0) for _ in range(2)]
    slots[0].waits_for_a_place()
    slots[0].leave()
    for slot in slots:
        slot.give_back(0.0)
    assert lines_of(slots[1])[1] == "x-ratelimit-remaining-requests: 4"
