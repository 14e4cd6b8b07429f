"""What ``pdcluster top`` prints of one router."""

from __future__ import annotations

import msgspec

from pdcluster_cli.cluster.pool_text import describe_page
from pdcluster_protocol.pool_page import PoolPage


def engine(name: str, **more: object) -> dict[str, object]:
    plain = {"name": name, "role": name.partition("-")[0], "url": f"http://{name}", "pod": "", "revision": ""}
    well = {"state": "serving", "healthy": True, "circuit": "closed", "ejected_s": 0.0}
    return {**plain, **well, "running": 0, "outstanding_tokens": 0, **more}


def text_of(*engines: dict[str, object], **kinds: int) -> str:
    requests = {"running": 3, "queued": {"prefill": 2, "decode": 0}, "backlog_tokens": {"prefill": 70, "decode": 1}}
    failures = {"seconds": 300.0, "kinds": kinds}
    other = {"discovery": {"kind": "static"}, "policy": "affinity", "revisions": [], "new": 1}
    page = {"requests": requests, "failures": failures, "engines": list(engines), **other}
    return describe_page(msgspec.convert(page, PoolPage), "router-1")


def test_the_page_is_told_whole() -> None:
    sick = engine("prefill-0", pod="p-1", revision="r1", healthy=False, circuit="ejected", ejected_s=3.6, running=12)
    assert text_of(engine("decode-0", outstanding_tokens=4096), sick, deadline=1, decode_lost=7) == (
        "router-1: 3 requests run, 2 wait for prefill (backlog 70 tokens), 0 wait for decode (backlog 1 tokens)\n"
        "failures of the last 300 s: decode_lost 7, deadline 1\n"
        "\n"
        "ENGINE     STATE    HEALTH  CIRCUIT      RUNNING  TOKENS  REVISION  WHERE\n"
        "decode-0   serving  well    closed       0        4096    -         http://decode-0\n"
        "prefill-0  serving  silent  ejected 4 s  12       0       r1        p-1"
    )


def test_engines_stand_by_role_and_number() -> None:
    names = ["prefill-0", "decode-10", "decode-9", "decode-1"]
    rows = text_of(*map(engine, names)).splitlines()[4:]
    assert [row.split()[0] for row in rows] == ["decode-1", "decode-9", "decode-10", "prefill-0"]


def test_a_pool_without_engines_and_failures_is_told() -> None:
    assert "failures of the last 300 s: none\n\nENGINE " in text_of()


def test_no_word_of_a_router_is_a_command_to_the_terminal() -> None:
    lines = text_of(engine("decode-0", pod="\x1b[2Jpod\n", revision="\u2028")).split("\n")
    assert len(lines) == 5
    assert all(line.isprintable() for line in lines)
