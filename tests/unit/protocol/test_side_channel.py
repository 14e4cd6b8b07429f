"""Frames between a prefill rank and a decode rank: each message survives, and nothing else gets through."""

from __future__ import annotations

from typing import Any, Final, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.ids import Attempt, BootId, EngineId, TransferId
from pdcluster_protocol.secret import SEAL_BYTES, make_secret
from pdcluster_protocol.side_channel import (
    MAX_FRAME_BYTES,
    SIDE_CHANNEL_VERSION,
    Grant,
    Hello,
    RankLayout,
    RegionLayout,
    Revoke,
    Seal,
    ToDecode,
    ToPrefill,
    Welcome,
    encode_frame,
    parse_to_decode,
    parse_to_prefill,
    seal_connection,
)
from unit.protocol.messages import FINGERPRINT, any_message

TO_DECODE: Final[tuple[type[msgspec.Struct], ...]] = get_args(ToDecode)
TO_PREFILL: Final[tuple[type[msgspec.Struct], ...]] = get_args(ToPrefill)
GRANT: Final = Grant(TransferId("t-1"), Attempt(1), 9000)
HELLO: Final = Hello(EngineId("p-0"), BootId("b-0"), RankLayout(0, 1, ()), FINGERPRINT)
DECODE: Final = BootId("d-1")
OURS: Final = make_secret("of this cluster!")
SEAL: Final = seal_connection(OURS, DECODE, b"prefill 0")
OTHERS: Final = {
    "another secret": seal_connection(make_secret("of another one !"), DECODE, b"prefill 0"),
    "another connection": seal_connection(OURS, DECODE, b"prefill 1"),
    "another life of decode": seal_connection(OURS, BootId("d-2"), b"prefill 0"),
    "the same letters, split elsewhere": seal_connection(OURS, BootId("d-1\0prefill"), b" 0"),
}

any_to_decode: Final = st.one_of([any_message(kind) for kind in TO_DECODE])
any_to_prefill: Final = st.one_of([any_message(kind) for kind in TO_PREFILL])


def frame_of(fields: object, version: int = SIDE_CHANNEL_VERSION) -> bytes:
    return bytes([version]) + SEAL.close(msgspec.msgpack.encode(fields))[1:]


@given(any_to_decode)
def test_what_prefill_says_survives_the_wire(message: Any) -> None:
    assert parse_to_decode(encode_frame(message, SEAL), SEAL) == message


@given(any_to_prefill)
def test_what_decode_says_survives_the_wire(message: Any) -> None:
    assert parse_to_prefill(encode_frame(message, SEAL), SEAL) == message


def test_every_message_has_its_own_tag_and_one_direction() -> None:
    kinds = TO_DECODE + TO_PREFILL
    tags = [kind.__struct_config__.tag for kind in kinds]
    assert tags == [kind.__name__.lower() for kind in kinds]
    assert len(set(tags)) == len(kinds) == 14


@given(any_to_decode)
def test_prefill_does_not_take_what_only_decode_should_get(message: Any) -> None:
    with pytest.raises(ProtocolError, match="side-channel frame is not a known message: Invalid value"):
        parse_to_prefill(encode_frame(message, SEAL), SEAL)


@given(any_to_prefill)
def test_decode_does_not_take_what_only_prefill_should_get(message: Any) -> None:
    with pytest.raises(ProtocolError, match="side-channel frame is not a known message: Invalid value"):
        parse_to_decode(encode_frame(message, SEAL), SEAL)


@pytest.mark.parametrize("version", [0, SIDE_CHANNEL_VERSION + 1, 255])
def test_another_version_is_refused_with_both_values_and_the_cure(version: int) -> None:
    with pytest.raises(ProtocolError) as refused:
        parse_to_prefill(bytes([version]) + encode_frame(GRANT, SEAL)[1:], SEAL)
    assert str(refused.value) == (
        f"side-channel peer speaks version {version}, ours is {SIDE_CHANNEL_VERSION}: "
        "run the same pdcluster on both engines"
    )


def test_an_empty_frame_is_refused() -> None:
    with pytest.raises(ProtocolError, match=f"speaks version None, ours is {SIDE_CHANNEL_VERSION}"):
        parse_to_decode(b"", SEAL)


def test_a_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolError) as refused:
        parse_to_decode(b"\xff" * (MAX_FRAME_BYTES + 1), SEAL)
    assert str(refused.value) == (f"side-channel frame has {MAX_FRAME_BYTES + 1} bytes, the limit is {MAX_FRAME_BYTES}")


def test_a_frame_at_the_limit_is_read() -> None:
    room = MAX_FRAME_BYTES - len(encode_frame(msgspec.structs.replace(HELLO, engine_id=EngineId("x" * 70_000)), SEAL))
    longest = msgspec.structs.replace(HELLO, engine_id=EngineId("x" * (70_000 + room)))
    frame = encode_frame(longest, SEAL)
    assert len(frame) == MAX_FRAME_BYTES
    assert parse_to_decode(frame, SEAL) == longest


def test_a_welcome_has_room_for_forty_thousand_regions() -> None:
    name = f"model.layers.{'9' * 40}.attn"
    regions = tuple(RegionLayout(name, 0, (1 << 47) + index, 1 << 20, 1 << 20, 1 << 20) for index in range(40_000))
    welcome = Welcome(EngineId("d-0"), BootId("b-0"), "10.0.0.2:15000", RankLayout(0, 1, regions))
    assert parse_to_prefill(encode_frame(welcome, SEAL), SEAL) == welcome


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"type": "dance"}, "Invalid value 'dance'"),
        ({"transfer_id": "t-1", "attempt": 1}, "missing required field `type`"),
        ({"type": "grant", "transfer_id": "t-1"}, "missing required field `attempt`"),
        (
            {"type": "grant", "transfer_id": "t-1", "attempt": 1, "lease_ms": 1, "colour": "red"},
            "unknown field `colour`",
        ),
        ({"type": "grant", "transfer_id": "t-1", "attempt": "1"}, "Expected `int`, got `str`"),
        (["grant", "t-1", 1], "Expected `object`, got `array`"),
        (7, "Expected `object`, got `int`"),
    ],
)
def test_what_is_no_message_is_refused_with_the_reason(fields: object, message: str) -> None:
    with pytest.raises(ProtocolError, match=f"side-channel frame is not a known message: .*{message}"):
        parse_to_prefill(frame_of(fields), SEAL)


def test_an_unknown_field_within_the_fingerprint_is_refused() -> None:
    hello: Any = {"type": "hello", **msgspec.to_builtins(HELLO)}
    assert parse_to_decode(frame_of(hello), SEAL) == HELLO
    hello["fingerprint"]["colour"] = "red"
    with pytest.raises(ProtocolError, match=r"unknown field `colour` - at `\$.fingerprint`"):
        parse_to_decode(frame_of(hello), SEAL)


@given(any_to_prefill, st.data())
def test_a_frame_that_is_cut_is_refused(message: Any, data: st.DataObject) -> None:
    frame = encode_frame(message, SEAL)
    cut = data.draw(st.integers(1, len(frame) - 1))
    with pytest.raises(ProtocolError):
        parse_to_prefill(frame[:cut], SEAL)


@given(st.binary(max_size=200))
def test_noise_is_refused_and_never_crashes(noise: bytes) -> None:
    for parse in (parse_to_decode, parse_to_prefill):
        with pytest.raises(ProtocolError):
            parse(SEAL.close(noise), SEAL)


def test_a_key_that_cannot_be_one_is_refused() -> None:
    with pytest.raises(ProtocolError, match="not a known message"):
        parse_to_prefill(SEAL.close(b"\x81\x80\x01"), SEAL)
    with pytest.raises(ProtocolError, match="not a known message"):
        parse_to_prefill(frame_of({"type": ["grant"]}), SEAL)


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
@pytest.mark.parametrize("parse", [parse_to_decode, parse_to_prefill])
def test_a_frame_that_is_sealed_for_others_is_refused_with_the_cure(parse: Any, other: Seal) -> None:
    message = HELLO if parse is parse_to_decode else GRANT
    assert parse(encode_frame(message, SEAL), SEAL) == message
    with pytest.raises(ProtocolError, match="the same PDCLUSTER_SECRET"):
        parse(encode_frame(message, other), SEAL)


@given(any_to_decode, st.data())
def test_a_frame_with_one_bit_changed_is_refused(message: Any, data: st.DataObject) -> None:
    frame = bytearray(encode_frame(message, SEAL))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ProtocolError):
        parse_to_decode(bytes(frame), SEAL)


@given(any_to_decode)
def test_a_frame_that_is_sent_back_to_where_it_came_from_says_nothing_there(message: Any) -> None:
    with pytest.raises(ProtocolError, match="not a known message"):
        parse_to_prefill(encode_frame(message, SEAL), SEAL)


def test_a_seal_costs_sixteen_bytes() -> None:
    assert len(SEAL.close(b"payload")) == 1 + SEAL_BYTES + len(b"payload")


def test_grant_and_revoke_differ_on_the_wire() -> None:
    assert encode_frame(GRANT, SEAL) != encode_frame(Revoke(GRANT.transfer_id, GRANT.attempt), SEAL)
