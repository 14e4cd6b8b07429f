"""Tokens and seals: only holders of the same secret can make them, for exactly one thing."""

from __future__ import annotations

import pytest

from pdcluster_protocol.errors import ConfigError, ProtocolError
from pdcluster_protocol.ids import Attempt, TransferId
from pdcluster_protocol.secret import MAX_PASS_S, SEAL_BYTES, load_secret, make_secret

OURS = make_secret("0123456789abcdef")
THEIRS = make_secret("fedcba9876543210")
T = TransferId("t")
FIRST, SECOND = Attempt(1), Attempt(2)


def test_a_token_says_how_long_its_attempt_may_last() -> None:
    OURS.check(OURS.mint(T, FIRST, 1234), T, FIRST, 1234)
    with pytest.raises(ProtocolError, match="asks for 1235 ms, its token allows 1234"):
        OURS.check(OURS.mint(T, FIRST, 1234), T, FIRST, 1235)


@pytest.mark.parametrize(
    ("transfer_id", "attempt"), [(TransferId("u"), FIRST), (T, SECOND)], ids=["transfer", "attempt"]
)
def test_a_token_is_good_for_one_attempt_of_one_transfer(transfer_id: TransferId, attempt: Attempt) -> None:
    with pytest.raises(ProtocolError, match="not valid here"):
        OURS.check(OURS.mint(T, FIRST, 1234), transfer_id, attempt, 1)


def test_a_token_of_another_cluster_is_refused_with_the_cure() -> None:
    with pytest.raises(ProtocolError, match="same PDCLUSTER_SECRET"):
        OURS.check(THEIRS.mint(T, FIRST, 1234), T, FIRST, 1)


def test_a_longer_deadline_does_not_fit_the_token() -> None:
    token = OURS.mint(T, FIRST, 1234)
    with pytest.raises(ProtocolError, match="not valid here"):
        OURS.check("9" + token, T, FIRST, 1)


@pytest.mark.parametrize("token", ["", ".", "x", "12", "-1.00", "1e3.00", "٣.00", "9" * 40 + ".00", "1.é"])
def test_what_is_no_token_is_refused(token: str) -> None:
    with pytest.raises(ProtocolError):
        OURS.check(token, T, FIRST, 1)


def test_a_seal_fits_its_own_connection_and_message_only() -> None:
    seal = OURS.seal(b"connection", b"payload")
    assert len(seal) == SEAL_BYTES
    others = (
        OURS.seal(b"connectionp", b"ayload"),
        OURS.seal(b"connection", b"other"),
        THEIRS.seal(b"connection", b"payload"),
    )
    assert seal == OURS.seal(b"connection", b"payload")
    assert seal not in others


def test_a_secret_is_never_shown() -> None:
    assert "key" not in repr(OURS)


def test_a_short_secret_is_refused_with_the_cure() -> None:
    with pytest.raises(ConfigError, match=r"has 5 bytes, the least is 16: make one with: openssl"):
        load_secret({"PDCLUSTER_SECRET": "short"}, host="127.0.0.1")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.9.9.9"])
def test_loopback_needs_no_secret(host: str) -> None:
    assert load_secret({}, host=host) == load_secret({}, host="127.0.0.1")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::", "engine-0.pool"])  # refused, not bound
def test_an_address_that_others_reach_needs_one(host: str) -> None:
    with pytest.raises(ConfigError, match=f"{host} can be reached from other machines"):
        load_secret({}, host=host)


def test_parts_with_the_same_variable_share_a_secret() -> None:
    environ = {"PDCLUSTER_SECRET": "0123456789abcdef"}
    assert load_secret(environ, host="10.0.0.7") == OURS


ORDER, NOW = b'{"revision":"r1"}', 1_800_000_000.5


def test_a_pass_lets_its_body_be_carried_out_until_it_ends() -> None:
    until = int(NOW) + 60
    OURS.check_pass(OURS.mint_pass(ORDER, until), ORDER, now_s=NOW)
    with pytest.raises(ProtocolError, match="ends at"):
        OURS.check_pass(OURS.mint_pass(ORDER, until), ORDER, now_s=until)


def test_a_pass_may_not_end_far_ahead() -> None:
    OURS.check_pass(OURS.mint_pass(ORDER, int(NOW) + MAX_PASS_S), ORDER, now_s=NOW)
    with pytest.raises(ProtocolError, match="within 300 s"):
        OURS.check_pass(OURS.mint_pass(ORDER, int(NOW) + MAX_PASS_S + 1), ORDER, now_s=NOW)


@pytest.mark.parametrize(
    "shown",
    [
        THEIRS.mint_pass(ORDER, int(NOW) + 60),
        OURS.mint_pass(b"{}", int(NOW) + 60),
        OURS.mint_pass(ORDER, int(NOW) + 60).replace("1800000060", "1800000061"),
        OURS.mint(T, FIRST, int(NOW) + 60),
    ],
    ids=["another cluster's", "another body's", "prolonged", "a token"],
)
def test_a_pass_is_good_for_one_body_of_one_cluster(shown: str) -> None:
    with pytest.raises(ProtocolError, match="not valid here"):
        OURS.check_pass(shown, ORDER, now_s=NOW)


@pytest.mark.parametrize(
    "shown", ["", ".", "soon.abc", "1800000060", "\u0661.abc", "1.\u0661", "9" * 20 + ".abc", "-1.abc"]
)
def test_what_is_no_pass_is_refused(shown: str) -> None:
    with pytest.raises(ProtocolError):
        OURS.check_pass(shown, ORDER, now_s=NOW)


CALL = b'{"remote_host":"10.0.0.7"}'


@pytest.mark.parametrize("body", [b"", CALL, bytearray(CALL), b"x" * 1_000_000])
def test_the_seal_of_a_call_is_known_by_who_has_the_secret(body: bytes) -> None:
    seal = OURS.seal_call(body)
    assert len(seal) == 2 * SEAL_BYTES
    OURS.check_call(seal.encode(), body)


@pytest.mark.parametrize(
    "seal",
    [
        THEIRS.seal_call(CALL),
        OURS.seal_call(CALL + b" "),
        OURS.seal(b"", CALL).hex(),
        OURS.mint_pass(CALL, 1).partition(".")[2],
        OURS.seal_call(CALL).upper(),
    ],
    ids=["another cluster's", "another body's", "a frame's", "a pass's", "in capitals"],
)
def test_the_seal_of_a_call_is_good_for_one_body_of_one_cluster(seal: str) -> None:
    with pytest.raises(ProtocolError, match=r"not valid here.* same PDCLUSTER_SECRET"):
        OURS.check_call(seal.encode(), CALL)


@pytest.mark.parametrize("index", range(len(CALL)))
def test_no_byte_of_a_sealed_call_can_be_changed(index: int) -> None:
    changed = bytearray(CALL)
    changed[index] ^= 1
    with pytest.raises(ProtocolError, match="not valid here"):
        OURS.check_call(OURS.seal_call(CALL).encode(), changed)


@pytest.mark.parametrize("shown", [b"", b"0", b"0" * 31, b"0" * 33, b"\xe9" * 30_000])
def test_a_call_with_no_seal_is_refused_by_name(shown: bytes) -> None:
    with pytest.raises(ProtocolError, match="has no seal: run the same pdcluster"):
        OURS.check_call(shown, CALL)


def test_a_seal_of_bytes_that_are_no_text_is_not_valid() -> None:
    with pytest.raises(ProtocolError, match="not valid here"):
        OURS.check_call(b"\xe9" * 32, CALL)


def test_a_secret_of_any_bytes_is_taken_as_it_is() -> None:
    """``$(head -c 32 /dev/urandom)``: Python gives a variable's bytes that are no text as surrogates."""
    raw = bytes([0xFF, 0xFE, 0x80]) * 6
    ours = load_secret({"PDCLUSTER_SECRET": raw.decode("utf-8", "surrogateescape")}, host="10.0.0.1")
    other = load_secret({"PDCLUSTER_SECRET": (raw[:-1] + b"\x81").decode("utf-8", "surrogateescape")}, host="10.0.0.1")
    ours.check(ours.mint(T, FIRST, 1), T, FIRST, 1)
    with pytest.raises(ProtocolError):
        ours.check(other.mint(T, FIRST, 1), T, FIRST, 1)
