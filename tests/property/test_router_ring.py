"""The memory of requests: whatever ends in whatever order, it keeps to its bytes, and keeps the newest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import drawn
from pdcluster_protocol.kept import MAX_FOUND
from pdcluster_router.core.telemetry.ring import ENTRY_BYTES, Ring
from pdcluster_router.telemetry.kept import (
    MAX_MOMENTS,
    Fate,
    Kept,
    KeptRow,
    MomentPart,
    fate_of,
    request_of,
    some_of,
)
from pdcluster_router.telemetry.metrics import Outcome

OUTCOMES = st.sampled_from([*(outcome.value for outcome in Outcome), ""])


def fitting(entries: Sequence[bytes], max_bytes: int) -> list[bytes]:
    """The newest ones that fit, newest first. One that is too large for all of it was never there."""
    small = [entry for entry in reversed(entries) if len(entry) + ENTRY_BYTES <= max_bytes]
    totals = accumulate(len(entry) + ENTRY_BYTES for entry in small)
    return [entry for entry, total in zip(small, totals, strict=True) if total <= max_bytes]


@settings(max_examples=drawn(900))
@given(st.lists(st.binary(max_size=400)), st.integers(0, 2000))
def test_a_ring_is_the_newest_entries_that_fit(entries: list[bytes], max_bytes: int) -> None:
    ring = Ring(max_bytes)
    for number, entry in enumerate(entries):
        ring.add(entry)
        left = fitting(entries[: number + 1], max_bytes)
        assert list(ring.holding(b"")) == left
        assert ring.num_bytes == sum(map(len, left)) + ENTRY_BYTES * len(left) <= max_bytes
        assert ring.oldest == (left[-1] if left else None)
        assert len(ring) == len(left)


@st.composite
def requests(draw: st.DrawFn) -> tuple[KeptRow, bool]:
    """A request that has ended, of one of few names, and whether something failed on the way."""
    reasons = draw(st.lists(st.text(max_size=300), max_size=4))
    return (
        KeptRow(
            request_id=draw(st.sampled_from(["a", "ab", "b", "décode", 'x"\\y'])),
            transfer_id=draw(st.sampled_from(["", "t1", "t2", "a"])),
            ended_at_unix_s=draw(st.floats(1.0, 2e9)),
            status=draw(st.sampled_from([None, 200, 400, 502])),
            outcome=draw(OUTCOMES),
            moments=[part for reason in reasons for part in (0.5, "prefill_failed", "prefill-0", 1, reason)],
        ),
        draw(st.booleans()),
    )


@settings(max_examples=drawn(450))
@given(st.lists(requests(), max_size=60), st.one_of(st.integers(0, 20_000), st.just(1 << 20)))
def test_what_is_kept_keeps_to_its_bytes_and_is_found_by_its_whole_names_alone(
    ended: list[tuple[KeptRow, bool]], max_bytes: int
) -> None:
    kept = Kept(max_bytes)
    for request, has_failed in ended:
        kept.keep(request, has_failed=has_failed)
        assert kept.num_bytes <= max_bytes
    for name in ("a", "ab", "b", "t1", "décode", 'x"\\y', "none", "ok", "prefill_failed"):
        found = kept.find(name)
        assert all(name in request.names for request in found)
        assert [one.ended_at_unix_s for one in found] == sorted(
            (one.ended_at_unix_s or 0 for one in found), reverse=True
        )
        named = [request for request in (request_of(row) for row, _ in ended) if name in request.names]
        assert all(request in named for request in found)
        assert len(found) == min(len(named), MAX_FOUND) or max_bytes < 8 * 60 * 1500


@settings(max_examples=drawn(450))
@given(st.lists(requests(), max_size=30), st.lists(requests(), max_size=30))
def test_no_request_pushes_out_one_of_another_fate(
    ended: list[tuple[KeptRow, bool]], more: list[tuple[KeptRow, bool]]
) -> None:
    alone, together = Kept(8_000), Kept(8_000)
    for request, has_failed in ended + more:
        is_of_one = fate_of(request, has_failed=has_failed) is Fate.FAILED
        together.keep(request, has_failed=has_failed)
        if is_of_one:
            alone.keep(request, has_failed=has_failed)
    assert alone.since().get("failed") == together.since().get("failed")


@given(st.integers(0, 3 * MAX_MOMENTS))
def test_of_a_long_row_of_moments_the_first_and_the_last_are_kept(num: int) -> None:
    parts: list[MomentPart] = [
        part for number in range(num) for part in (float(number), "decode_lost", "decode-0", 1, "")
    ]
    times = [moment.at_s for moment in request_of(KeptRow("r", moments=some_of(parts))).moments]
    assert len(times) == min(num, MAX_MOMENTS)
    assert not num or (times[0], times[-1]) == (0.0, num - 1.0)
    assert times == sorted(times)
