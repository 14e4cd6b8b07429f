"""Reasons without addresses and tokens, in one line."""

from __future__ import annotations

import pytest

from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.fingerprint import CURES, KvFingerprint, require_equal
from pdcluster_protocol.ids import Attempt, TransferId
from pdcluster_protocol.secret import make_secret
from pdcluster_router.core.telemetry.scrub import MAX_REASON_CHARS, scrub


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prefill-0 answered 500", "prefill-0 answered 500"),
        ("cannot connect: ('10.0.12.7', 8200)", "cannot connect: ('<address>', 8200)"),
        ("rank 3 of 10.0.12.7:6000 is silent", "rank 3 of <address> is silent"),
        ("see http://user:pass@prefill.example:81/x?y for more", "see <address> for more"),
        ("tcp://h:1 and RDMA://h:2", "<address> and <address>"),
        ("no route to [fe80::1]:6000", "no route to <address>"),
        ("no route to 2001:db8::ff00:42:8329.", "no route to <address>."),
        ("version 0.3.13 of vllm 0.32", "version 0.3.13 of vllm 0.32"),
        ("std::vector and rank::0", "std::vector and rank::0"),
        ("two\nlines\tand \x1b[31mred", "two lines and ?[31mred"),
        ("", ""),
    ],
)
def test_what_is_said_stays_and_where_it_is_goes(text: str, expected: str) -> None:
    assert scrub(text) == expected


def test_a_token_is_never_shown() -> None:
    token = make_secret("0123456789abcdef").mint(TransferId("t"), Attempt(1), 600_000)
    assert scrub(f"the token {token} is not valid") == "the token <token> is not valid"


def test_a_reason_is_short() -> None:
    assert len(scrub("x" * 100_000)) == MAX_REASON_CHARS


def test_the_cure_at_the_end_of_the_longest_refusal_is_kept() -> None:
    values = dict.fromkeys(CURES, "v" * 24) | {"kv_heads": (2, 4), "draft_heads": (2, 4)}
    ours, theirs = KvFingerprint(**values), KvFingerprint(**{name: f"{value}w" for name, value in values.items()})  # type: ignore[arg-type]  # a table of values
    with pytest.raises(ProtocolError) as refused:
        require_equal(prefill=ours, decode=theirs, prefill_id="p" * 40, decode_id="d" * 40)
    assert scrub(str(refused.value)).endswith(CURES["model_digest"])
