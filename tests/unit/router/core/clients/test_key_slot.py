"""The slot of one request: what its client is told of its key's rates, also when it gives them back."""

from __future__ import annotations

from pdcluster_router.core.clients.key_limits import KeyLimits, KeyUse
from pdcluster_router.core.clients.key_slot import KeySlot, rate_lines


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


def test_a_slot_that_has_left_gives_no_tokens_back_either() -> None:
    use = KeyUse()
    use.limit(KeyLimits(requests_per_minute=6, prompt_tokens_per_minute=600))
    slot = slot_of(use, 200, 0.0)
    slot.waits_for_a_place()
    slot.leave()
    slot.give_back(0.0)
    assert lines_of(slot)[4] == "x-ratelimit-remaining-tokens: 400"


def test_prompt_tokens_are_told_beside_requests_or_alone_in_whole_tokens_and_thousandths_of_a_second() -> None:
    use = KeyUse()
    use.limit(KeyLimits(requests_per_minute=6, prompt_tokens_per_minute=7_000))
    slot = slot_of(use, 1_234, 0.0)
    tokens = [
        "x-ratelimit-limit-tokens: 7000",
        "x-ratelimit-remaining-tokens: 5766",
        "x-ratelimit-reset-tokens: 10.577s",
    ]
    assert lines_of(slot)[3:] == tokens
    assert len(lines_of(slot)) == 6
    use.limit(KeyLimits(prompt_tokens_per_minute=7_000))
    assert rate_lines(use, 0.0).decode().splitlines() == tokens
    use.limit(KeyLimits(max_concurrent=9))
    assert rate_lines(use, 0.0) == b""


def test_tokens_of_a_request_that_gets_no_place_are_told_as_there_again() -> None:
    use = KeyUse()
    use.limit(KeyLimits(prompt_tokens_per_minute=600))
    slot = slot_of(use, 600, 0.0)
    assert lines_of(slot)[1] == "x-ratelimit-remaining-tokens: 0"
    slot.waits_for_a_place()
    slot.give_back(0.0)
    assert lines_of(slot)[1:] == ["x-ratelimit-remaining-tokens: 600", "x-ratelimit-reset-tokens: 0s"]
