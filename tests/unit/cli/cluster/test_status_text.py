"""What ``pdcluster top`` prints of one router."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from pdcluster_cli.cluster.status_text import MAX_REQUESTS, describe_status
from pdcluster_protocol.status_page import StatusPage


def engine(name: str, **more: object) -> dict[str, object]:
    plain = {"name": name, "role": name.partition("-")[0], "url": f"http://{name}", "pod": "", "revision": ""}
    well = {"state": "serving", "healthy": True, "circuit": "closed", "ejected_s": 0.0}
    return {**plain, **well, "running": 0, "outstanding_tokens": 0, **more}


def text_of(*engines: dict[str, object], recent: Sequence[dict[str, object]] = (), **kinds: int) -> str:
    requests = {"running": 3, "queued": {"prefill": 2, "decode": 0}, "backlog_tokens": {"prefill": 70, "decode": 1}}
    failures = {"seconds": 300.0, "kinds": kinds}
    other = {
        "discovery": {"kind": "static"},
        "policy": "affinity",
        "revisions": [],
        "ended": {"ok": 7, "lost": 9},
        "new": 1,
    }
    pool = {"requests": requests, "failures": failures, "engines": list(engines), **other}
    return describe_status(msgspec.convert({"pool": pool, "recent": list(recent), "new": 1}, StatusPage), "router-1")


def request(name: str, **more: object) -> dict[str, object]:
    return {"request_id": name, "ended_s": 2.4, "fate": "served", "status": 200, "outcome": "ok", **more}


def test_the_page_is_told_whole() -> None:
    sick = engine("prefill-0", pod="p-1", revision="r1", healthy=False, circuit="ejected", ejected_s=3.6, running=12)
    assert text_of(engine("decode-0", outstanding_tokens=4096), sick, deadline=1, decode_lost=7) == (
        "router-1: 3 requests run, 2 wait for prefill (backlog 70 tokens), 0 wait for decode (backlog 1 tokens)\n"
        "ended since the start: lost 9, ok 7\n"
        "failures of the last 300 s: decode_lost 7, deadline 1\n"
        "\n"
        "ENGINE     STATE    HEALTH  CIRCUIT      RUNNING  TOKENS  REVISION  WHERE\n"
        "decode-0   serving  well    closed       0        4096    -         http://decode-0\n"
        "prefill-0  serving  silent  ejected 4 s  12       0       r1        p-1"
    )


def test_engines_stand_by_role_and_number() -> None:
    names = ["prefill-0", "decode-10", "decode-9", "decode-1"]
    rows = text_of(*map(engine, names)).splitlines()[5:]
    assert [row.split()[0] for row in rows] == ["decode-1", "decode-9", "decode-10", "prefill-0"]


def test_a_pool_without_engines_and_failures_is_told() -> None:
    assert "failures of the last 300 s: none\n\nENGINE " in text_of()


def test_no_word_of_a_router_is_a_command_to_the_terminal() -> None:
    evil = "\x1b[2Jpod\n"
    row = request(evil, error=evil, steps=[{"kind": evil, "took_s": 1.0, "text": evil}])
    sick = engine("decode-0", pod=evil, revision="\u2028", last_failure=evil)
    lines = text_of(sick, recent=[row]).split("\n")
    assert len(lines) == 10
    assert all(line.isprintable() for line in lines)


def test_what_ails_an_engine_stands_below_the_table() -> None:
    new = engine("decode-0", slow_start_s=7.6)
    sick = engine("prefill-0", ejections=3, last_failure="prefill_failed: it answered 500", last_failure_s=4.2)
    old = engine("prefill-1", last_failure="prefill_timeout")
    assert text_of(new, sick, old, engine("prefill-2")).splitlines()[-3:] == [
        "decode-0: starts slowly for 8 s more",
        "prefill-0: ejected 3 times, last failure 4 s ago: prefill_failed: it answered 500",
        "prefill-1: last failure: prefill_timeout",
    ]


def test_the_last_requests_say_where_their_time_went() -> None:
    steps = [
        {"kind": "read", "took_s": 0.25, "text": "its head and body come"},
        {"kind": "prefill_sent", "took_s": 1.5, "text": "attempt 1: sent to prefill-0"},
        {"kind": "first_byte", "took_s": 9.0, "text": "first byte from decode-0"},
    ]
    good = request("R-7", read_s=0.25, first_byte_s=1.5, total_s=9.5, steps=steps)
    bad = request("x" * 60, status=401, error="invalid_api_key", outcome="rejected", fate="refused")
    assert text_of(recent=[good, bad]).splitlines()[-4:] == [
        "",
        f"{'ENDED':7}  {'REQUEST':40}  {'HOW':19}  BODY     FIRST BYTE  WHOLE    LONGEST STEP BEFORE IT",
        f"{'2 s ago':7}  {'R-7':40}  {'200 ok':19}  0.250 s  1.500 s     9.500 s  1.500 s attempt 1: sent to prefill-0",
        f"{'2 s ago':7}  {'x' * 37}...  {'401 invalid_api_key':19}  -        -           -",
    ]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({}, "200 ok "),
        ({"fate": "failed"}, "200 ok after a failure "),
        ({"fate": "failed", "status": 502, "outcome": "lost", "error": "decode_lost"}, "502 decode_lost "),
        ({"fate": "refused", "status": None, "outcome": "client_gone"}, "- client_gone "),
        ({"fate": "failed", "status": 500, "outcome": ""}, "500 a bug of the router "),
    ],
)
def test_a_row_says_how_the_request_ended(row: dict[str, object], told: str) -> None:
    assert f" {told}" in text_of(recent=[request("R", **row)]).splitlines()[-1]


def test_of_many_requests_the_newest_are_shown() -> None:
    lines = text_of(recent=[request(f"R-{number}") for number in range(30)]).splitlines()
    assert [line.split()[3] for line in lines[-MAX_REQUESTS:]] == [f"R-{number}" for number in range(MAX_REQUESTS)]
