"""Laws of the part that a request in parts waits for most."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdcluster_protocol.kept import KeptRequest, Milestone, Moment
from pdcluster_router.core.telemetry.why import furthest_behind
from pdcluster_router.telemetry.failures import FailureKind

_WORDS = st.sampled_from([*(one.value for one in Milestone), FailureKind.DECODE_LOST.value])
_MOMENTS = st.lists(st.tuples(st.integers(0, 5), _WORDS), max_size=4).map(
    lambda drawn: tuple(Moment(float(at_s), what) for at_s, what in sorted(drawn, key=lambda one: one[0]))
)
PARTS = st.lists(_MOMENTS, max_size=5).map(
    lambda all_moments: [KeptRequest(request_id=f"R-{n}", moments=one) for n, one in enumerate(all_moments)]
)


def flows(part: KeptRequest) -> bool:
    return bool(part.moments) and part.moments[-1].what == "first_byte"


def last_s(part: KeptRequest) -> float:
    return part.moments[-1].at_s if part.moments else 0.0


@given(PARTS)
def test_a_part_is_found_whose_answer_does_not_flow_if_there_is_one_and_none_like_it_has_stood_still_longer(
    parts: list[KeptRequest],
) -> None:
    found = furthest_behind(iter(parts))
    assert (found is None) == (not parts)
    if found is not None:
        alike = [part for part in parts if flows(part) == flows(found)]
        assert found in parts
        assert flows(found) == all(map(flows, parts))
        assert last_s(found) == min(map(last_s, alike))
        assert found == next(part for part in alike if last_s(part) == last_s(found))


def test_known_answers() -> None:
    def part(name: str, *moments: tuple[float, str]) -> KeptRequest:
        return KeptRequest(request_id=name, moments=tuple(Moment(at_s, what) for at_s, what in moments))

    queued = part("queued")
    late = part("late", (0.1, "decode_sent"), (5.0, "prefill_sent"))
    early = part("early", (0.2, "decode_sent"), (4.0, "reserved"))
    again = part("again", (0.3, "first_byte"), (4.5, "decode_lost"))
    flowing, flowed = part("flowing", (6.0, "first_byte")), part("flowed", (3.0, "first_byte"))
    assert furthest_behind([flowed, late, queued]) == queued
    assert furthest_behind([flowed, late, early, again]) == early
    assert furthest_behind([flowed, late, again]) == again
    assert furthest_behind([flowing, flowed]) == flowed
    assert furthest_behind([]) is None
