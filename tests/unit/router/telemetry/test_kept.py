"""Which requests are remembered together, and what their entries take."""

from __future__ import annotations

import sys

import pytest

from pdcluster_protocol.kept import MAX_FOUND, KeptRequest
from pdcluster_router.core.telemetry.ring import ENTRY_BYTES
from pdcluster_router.telemetry.kept import (
    MAX_MODEL_BYTES,
    MAX_REASON_CHARS,
    Fate,
    Kept,
    KeptRow,
    _encode,
    _is_named,
    fate_of,
    reason_of,
    request_of,
)
from pdcluster_router.telemetry.metrics import Outcome


@pytest.mark.parametrize(
    ("outcome", "status", "has_failed", "fate"),
    [
        (Outcome.OK, 200, False, Fate.SERVED),
        (Outcome.OK, 200, True, Fate.FAILED),
        (Outcome.REJECTED, 400, False, Fate.REFUSED),
        (Outcome.OVERLOADED, 429, True, Fate.REFUSED),
        (Outcome.LIMITED, 429, False, Fate.REFUSED),
        (Outcome.CLIENT_GONE, None, True, Fate.REFUSED),
        (Outcome.ENGINE_ERROR, 404, False, Fate.REFUSED),
        (Outcome.ENGINE_ERROR, 500, True, Fate.FAILED),
        (Outcome.ENGINE_ERROR, None, True, Fate.FAILED),
        (Outcome.PREFILL_FAILED, 502, True, Fate.FAILED),
        (Outcome.UNAVAILABLE, 503, True, Fate.FAILED),
        (Outcome.LOST, 200, True, Fate.FAILED),
        (Outcome.TIMEOUT, 504, True, Fate.FAILED),
    ],
)
def test_what_any_client_can_have_in_masses_pushes_out_nothing_that_broke(
    outcome: Outcome, status: int | None, has_failed: bool, fate: Fate
) -> None:
    request = KeptRow(request_id="r", outcome=outcome.value, status=status)
    assert fate_of(request, has_failed=has_failed) is fate


def test_a_bug_of_ours_is_a_failure() -> None:
    assert fate_of(KeptRow(request_id="r", status=500), has_failed=False) is Fate.FAILED


def test_an_entry_takes_no_more_than_is_counted() -> None:
    empty = sys.getsizeof(b"")
    assert empty + 8 + 15 + 8 <= ENTRY_BYTES, "its object, its place, rounding to 16 bytes, the allocator's own"


def test_a_reason_has_no_address_and_is_not_long() -> None:
    assert reason_of("cannot connect to 10.1.2.3:8000\n") == "cannot connect to <address>"
    assert len(reason_of("x" * 9999)) == MAX_REASON_CHARS


def test_of_a_name_that_all_requests_have_the_newest_are_told() -> None:
    kept = Kept(1 << 20)
    for number in range(5 * MAX_FOUND):
        kept.keep(KeptRow("a", ended_at_unix_s=float(number), outcome="ok" if number % 2 else "lost"))
    ends = [request.ended_at_unix_s for request in kept.find("a")]
    assert ends == [float(5 * MAX_FOUND - 1 - number) for number in range(MAX_FOUND)]


def test_nothing_is_found_where_nothing_is_kept() -> None:
    kept = Kept(0)
    kept.keep(KeptRow(request_id="r"))
    assert (kept.find("r"), kept.since(), kept.num_bytes, kept.is_on) == ([], {}, 0, False)


@pytest.mark.parametrize(
    ("text", "model"),
    [
        (b"", ""),
        (b'"m\\u00e9"', "m\u00e9"),
        (b'"a\\nb"', "a?b"),
        (b'"' + b"x" * MAX_MODEL_BYTES + b'"', "?"),
        (b'"\xff"', ""),
    ],
)
def test_a_models_name_is_one_short_word(text: bytes, model: str) -> None:
    assert request_of(KeptRow("r", model_text=text)).model == model


def test_a_row_has_the_fields_that_are_told() -> None:
    added = ("method", "cause", "cure", "alias_of")
    told = [name for name in KeptRequest.__struct_fields__ if name not in added]
    assert [name.removesuffix("_text") for name in KeptRow.__struct_fields__] == told


def test_a_long_name_of_a_model_pushes_out_nothing() -> None:
    kept = Kept(1 << 14)
    kept.keep(KeptRow("first", outcome="ok"))
    kept.keep(KeptRow("long", outcome="ok", model_text=b'"' + b"x" * 5000 + b'"'))
    assert [kept.find(name)[0].model for name in ("first", "long")] == ["", "?"]
    assert kept.num_bytes < 500


@pytest.mark.parametrize("request_id", ["r", "x" * 31, "x" * 32, "x" * 128, "x" * 300])
@pytest.mark.parametrize("transfer_id", ["", "t" * 32])
def test_only_the_places_of_the_two_ids_are_looked_at(request_id: str, transfer_id: str) -> None:
    row = KeptRow(request_id, transfer_id, "trace", "client", outcome="ok", moments=(0.0, "what", "engine"))
    entry = _encode(row)
    for name in (request_id, transfer_id):
        assert not name or _is_named(entry, _encode(name))
    for name in ("trace", "client", "ok", "what", "engine", "x" * 99, "none"):
        assert not _is_named(entry, _encode(name))


def test_three_eighths_are_for_what_was_served_a_half_for_failures_and_an_eighth_for_refusals() -> None:
    num_bytes = {}
    for outcome in ("ok", "lost", "rejected"):
        kept = Kept(80_000)
        for _ in range(5000):
            kept.keep(KeptRow("r", outcome=outcome))
        num_bytes[outcome] = round(kept.num_bytes, -3)
    assert num_bytes == {"ok": 30_000, "lost": 40_000, "rejected": 10_000}


def test_the_newest_of_a_fate_are_told_the_newest_first() -> None:
    kept = Kept(1 << 20)
    for number in range(5):
        kept.keep(KeptRow(f"good-{number}", outcome="ok"))
        kept.keep(KeptRow(f"bad-{number}", outcome="lost"))
    assert [request.request_id for request in kept.newest(Fate.SERVED, 3)] == ["good-4", "good-3", "good-2"]
    assert [request.request_id for request in kept.newest(Fate.FAILED, 9)][-1] == "bad-0"
    assert kept.newest(Fate.REFUSED, 3) == []
