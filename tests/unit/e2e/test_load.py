from __future__ import annotations

from e2e.load import Told, lost, summary

from campaign.outcomes import End, Verdict


def told(end: End, code: str = "", detail: str = "") -> Told:
    return Told("e2e-0-1", 1.0, 2.0, Verdict(end, code, detail))


def test_a_summary_counts_each_kind_of_end_with_its_code() -> None:
    ends = [told(End.OK), told(End.OK), told(End.ERROR, "503 no_decode")]
    assert summary(ends) == "2 ok, 1 error (503 no_decode)"


def test_only_what_is_right_is_not_lost_unless_more_is_allowed() -> None:
    ends = [told(End.OK), told(End.ERROR, "200 then engine_died", "..."), told(End.WRONG, detail="another token")]
    assert lost(ends) == ["e2e-0-1: error 200 then engine_died ...", "e2e-0-1: wrong  another token"]
    assert lost(ends, End.ERROR) == ["e2e-0-1: wrong  another token"]
