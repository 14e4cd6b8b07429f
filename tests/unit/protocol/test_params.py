"""The parameters on each leg of a request: what travels, what is refused, and what other routers may count on."""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.ids import Attempt, BootId, EngineId, TransferId
from pdcluster_protocol.params import (
    PARAMS_VERSION,
    ContentCheck,
    DecodeParams,
    Receipt,
    Reservation,
    SideChannelAddress,
    check_seal,
    parse_call,
    parse_decode_params,
    parse_reservation,
    receipt_in,
    reservation_in,
    sealed,
    to_wire,
)
from pdcluster_protocol.prompt_digest import digest_prompt
from pdcluster_protocol.secret import make_secret
from unit.protocol.messages import any_message

VLLM_ASCEND_NAMES: Final = {
    "token_ids", "request_id", "do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_block_size",
    "remote_engine_id", "remote_host", "remote_port", "remote_tp_size", "remote_pcp_size", "remote_dcp_size",
    "remote_cached_tokens",
}  # fmt: skip
"""What a decode engine of vllm-ascend 0.23 posts, and what its prefill engines expect."""

OURS: Final = st.just(PARAMS_VERSION)
TOKEN_ID: Final = st.integers(0, (1 << 31) - 1)

PARAMS: Final = DecodeParams(
    metaserver="http://r:8000/v1/metaserver", transfer_id=TransferId("t-1"), deadline_ms=30_000, token="seal"
)
RESERVATION: Final = Reservation(
    request_id="chatcmpl-1",
    remote_block_ids=((3, 4, 9),),
    remote_block_size=16,
    remote_engine_id=EngineId("d-0"),
    remote_host="10.0.0.2",
    remote_port=5600,
    remote_tp_size=2,
    remote_cached_tokens=16,
    transfer_id=TransferId("t-1"),
    attempt=Attempt(1),
    deadline_ms=29_000,
    token="seal",
    remote_boot_id=BootId("b-0"),
    remote_side_channels=(
        SideChannelAddress("10.0.0.2", 5600, BootId("b-0")),
        SideChannelAddress("10.0.0.2", 5601, BootId("b-1")),
    ),
    num_prompt_tokens=40,
    prompt_digest=digest_prompt([1, 2, 3]),
)


CHANNELS: Final = [["h", port, "b"] for port in range(1, 4098)]
"""One for each of 4,097 ranks."""


def over_json(params: DecodeParams | Reservation | Receipt) -> Any:
    """What the other side sees: engines and proxies between us use Python's own json."""
    return json.loads(json.dumps(to_wire(params)))


def address_each_rank(reservation: Reservation) -> Reservation:
    named = reservation.remote_side_channels or (SideChannelAddress("h", 1, BootId("b")),)
    addresses = tuple({(address.host, address.port): address for address in named}.values())
    return msgspec.structs.replace(
        reservation,
        remote_tp_size=len(addresses),
        remote_pp_size=1,
        remote_side_channels=addresses,
        remote_block_sizes=(),
        remote_page_sizes=(),
    )


@given(any_message(DecodeParams, version=OURS))
def test_the_routers_instructions_survive_json(params: DecodeParams) -> None:
    assert parse_decode_params(over_json(params)) == params


@given(any_message(Reservation, version=OURS).map(address_each_rank))
def test_a_reservation_survives_json(reservation: Reservation) -> None:
    assert parse_reservation(over_json(reservation)) == reservation


@given(any_message(Reservation, version=OURS).map(address_each_rank), st.booleans())
def test_a_reservation_is_the_same_straight_from_its_bytes(reservation: Reservation, is_ascii: bool) -> None:
    call = json.dumps(to_wire(reservation), ensure_ascii=is_ascii).encode()
    assert reservation_in(call) == parse_call(json.loads(call)) == reservation


WIRE: Final = to_wire(RESERVATION)


@pytest.mark.parametrize(
    "said",
    [
        {**WIRE, "version": PARAMS_VERSION + 1},
        {**WIRE, "version": "1"},
        {**WIRE, "version": True},
        {name: value for name, value in WIRE.items() if name != "version"},
        {**WIRE, "lost_reason": "version"} | {"version": None},
        {**{name: value for name, value in WIRE.items() if name != "version"}, "lost_reason": '"version":1'},
        {**{name: value for name, value in WIRE.items() if name != "version"}, 'x"version': 1},
        {
            **{name: value for name, value in WIRE.items() if name != "version"},
            "remote_side_channels": [["h", 1, "b", {"version": 1}], ["h", 2, "b"]],
        },
        {**WIRE, "colour": "red"},
        {**WIRE, "num_local_tokens": 7},
        {**WIRE, "request_id": "half \ud800"},
        {**WIRE, "half \ud800": 1},
        {**WIRE, "remote_port": 5600.0},
        {**WIRE, "remote_block_size": 1 << 70},
        [WIRE],
        None,
    ],
)
def test_what_is_no_whole_reservation_is_left_to_the_slow_way(said: object) -> None:
    assert reservation_in(json.dumps(said).encode()) is None


@pytest.mark.parametrize(
    "call", [b"", b"\xef\xbb\xbf{}", b'{"version":1', b'"version":\xff', b"[" * 100_000 + b'"version":']
)
def test_what_is_no_json_is_left_to_the_slow_way(call: bytes) -> None:
    assert reservation_in(call) is None


def test_bytes_that_are_no_utf_8_are_left_to_the_slow_way() -> None:
    call = json.dumps(WIRE).encode()
    assert reservation_in(call) == RESERVATION
    assert reservation_in(call.replace(b"chatcmpl-1", b"chatcmpl-\xff")) is None


def test_fields_that_do_not_fit_together_are_refused_straight_away() -> None:
    with pytest.raises(ProtocolError, match="named one side channel for several of its 2 ranks"):
        reservation_in(json.dumps({**WIRE, "remote_side_channels": [["h", 1, "b"]] * 2}).encode())


def test_decode_is_told_to_wait_and_prefill_to_push() -> None:
    told_decode, told_prefill = to_wire(PARAMS), to_wire(RESERVATION)
    assert (told_decode["do_remote_prefill"], told_decode["do_remote_decode"]) == (True, False)
    assert (told_prefill["do_remote_prefill"], told_prefill["do_remote_decode"]) == (False, True)


@pytest.mark.parametrize(
    ("pages", "expected"), [((), (16,)), ((16,), (16,)), ((4,), (4,)), ((32,), None), ((0,), None), ((16, 16), None)]
)
def test_blocks_are_whole_pages(pages: tuple[int, ...], expected: tuple[int, ...] | None) -> None:
    reservation = msgspec.structs.replace(
        RESERVATION, remote_block_ids=((1,),), remote_block_sizes=(16,), remote_page_sizes=pages
    )
    if expected is None:
        with pytest.raises(ProtocolError, match="must be one page or several"):
            parse_reservation(over_json(reservation))
    else:
        assert parse_reservation(over_json(reservation)).page_sizes == expected


def test_a_group_of_state_has_no_pages() -> None:
    sizes = {"remote_block_ids": ((1,), (2,)), "remote_block_sizes": (16, 0), "remote_page_sizes": (8, 1)}
    reservation = msgspec.structs.replace(RESERVATION, **sizes)
    assert parse_reservation(over_json(reservation)).page_sizes == (8, 1)


def test_a_reservation_has_every_name_of_vllm_ascends_contract() -> None:
    assert to_wire(RESERVATION).keys() >= VLLM_ASCEND_NAMES


def test_the_routers_instructions_have_every_name_of_vllm_ascends_contract() -> None:
    assert to_wire(PARAMS).keys() >= {"do_remote_decode", "do_remote_prefill", "metaserver"}


def test_an_engine_that_knows_no_receipts_is_not_asked_for_one_without_need() -> None:
    assert "wants_receipt" not in to_wire(PARAMS)
    assert to_wire(msgspec.structs.replace(PARAMS, wants_receipt=True))["wants_receipt"] is True


@pytest.mark.parametrize(
    ("said", "receipt"),
    [
        (over_json(Receipt(42)), Receipt(42)),
        (over_json(Receipt(0)), Receipt(0)),
        (over_json(Receipt(42, pdcluster_is_content_compared=True)), Receipt(42, pdcluster_is_content_compared=True)),
        (None, None),
        ({}, None),
        ({"pdcluster_reason": "no"}, None),
        ({"pdcluster_received_tokens": "42"}, None),
    ],
)
def test_a_receipt_is_read_from_decodes_answer(said: object, receipt: Receipt | None) -> None:
    reply = json.dumps({"choices": [], "kv_transfer_params": said}).encode()
    assert receipt_in(reply) == receipt


@pytest.mark.parametrize("reply", [b"", b"<html>", b"[]", b"{}", b"[" * 9999, b'{"x":' + b"[" * 9999])
def test_what_is_no_answer_has_no_receipt(reply: bytes) -> None:
    assert receipt_in(reply) is None


def test_a_side_channel_address_is_a_short_list() -> None:
    assert over_json(RESERVATION)["remote_side_channels"][1] == ["10.0.0.2", 5601, "b-1"]


@pytest.mark.parametrize("version", [0, PARAMS_VERSION + 1, "1", None])
@pytest.mark.parametrize("parse", [parse_decode_params, parse_reservation])
def test_another_version_is_refused_with_both_values_and_the_cure(parse: Any, version: object) -> None:
    wire = over_json(PARAMS if parse is parse_decode_params else RESERVATION) | {"version": version}
    with pytest.raises(ProtocolError) as refused:
        parse(wire)
    assert str(refused.value) == (
        f"kv_transfer_params have version {version!r}, ours is {PARAMS_VERSION}: run the same pdcluster everywhere"
    )


@pytest.mark.parametrize("params", [None, [], "text", 7, {}])
def test_what_is_no_object_with_a_version_is_refused(params: object) -> None:
    for parse in (parse_decode_params, parse_reservation):
        with pytest.raises(ProtocolError, match="have version None, ours is 1"):
            parse(params)


@pytest.mark.parametrize("params", [PARAMS, RESERVATION])
def test_an_unknown_field_is_refused_by_name(params: DecodeParams | Reservation) -> None:
    parse: Any = parse_decode_params if isinstance(params, DecodeParams) else parse_reservation
    with pytest.raises(ProtocolError, match=f"are not {type(params).__name__}: .*unknown field `colour`"):
        parse(over_json(params) | {"colour": "red"})


@pytest.mark.parametrize("params", [PARAMS, RESERVATION])
def test_a_field_without_default_must_be_there_and_is_named(params: DecodeParams | Reservation) -> None:
    parse: Any = parse_decode_params if isinstance(params, DecodeParams) else parse_reservation
    required = [field.name for field in msgspec.structs.fields(params) if field.required]
    assert {"transfer_id", "deadline_ms"} <= set(required)
    for name in required:
        wire = over_json(params)
        del wire[name]
        with pytest.raises(ProtocolError, match=f"missing required field `{name}`"):
            parse(wire)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("remote_block_size", "16", r"Expected `int`, got `str` - at `\$.remote_block_size`"),
        ("remote_block_ids", [3, 4], r"Expected `array`, got `int` - at `\$.remote_block_ids\[0\]`"),
        ("remote_port", None, r"Expected `int`, got `null` - at `\$.remote_port`"),
        ("transfer_id", 5, r"Expected `str`, got `int` - at `\$.transfer_id`"),
    ],
)
def test_a_wrong_type_is_refused_with_its_place(name: str, value: object, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        parse_reservation(over_json(RESERVATION) | {name: value})


@pytest.mark.parametrize("odd", [{"\ud800": 1}, {"remote_cached_tokens": "\ud800"}], ids=["a name", "no text"])
def test_half_a_character_where_no_text_belongs_is_refused(odd: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="a name, or what is no text, has half a character"):
        parse_reservation(over_json(RESERVATION) | odd)


def test_a_reservation_without_a_seal_says_nothing_of_seals() -> None:
    """Engines of before the seal refuse what they do not know, and the router writes their orders."""
    assert "seal" not in over_json(RESERVATION)
    with pytest.raises(ProtocolError, match="has no seal: run the same pdcluster on"):
        check_seal(RESERVATION, SECRET)


@pytest.mark.parametrize("parse", [parse_decode_params, parse_reservation])
@pytest.mark.parametrize("name", ["transfer_id", "token", "request_id", "remote_engine_id", "remote_side_channels"])
def test_half_a_character_is_refused_by_the_name_of_its_field(parse: Any, name: str) -> None:
    """JSON may spell one (a lone surrogate), and what then seals, hashes or sends the text cannot write it."""
    wire = over_json(PARAMS if parse is parse_decode_params else RESERVATION)
    if name in wire:
        odd = [["h\ud800", 5600, "b"]] if name == "remote_side_channels" else "t\ud800"
        with pytest.raises(ProtocolError, match=rf"{name} has half a character \(U\+D800\)"):
            parse(wire | {name: odd})


@pytest.mark.parametrize("tp_size", [1, 3])
def test_a_side_channel_for_each_rank_or_the_reservation_is_refused(tp_size: int) -> None:
    with pytest.raises(ProtocolError) as refused:
        parse_reservation(over_json(RESERVATION) | {"remote_tp_size": tp_size})
    assert str(refused.value) == (
        f"decode engine d-0 has TP {tp_size} in 1 stages but named 2 side channels: it must name one for each rank"
    )


def test_one_side_channel_for_several_ranks_is_refused() -> None:
    """One lane would be told of the same push twice."""
    first, second = RESERVATION.remote_side_channels
    same = (first, SideChannelAddress(first.host, first.port, second.boot_id))
    params = over_json(msgspec.structs.replace(RESERVATION, remote_side_channels=same))
    with pytest.raises(ProtocolError, match="one side channel for several of its 2 ranks: each must have its own"):
        parse_reservation(params)


@given(st.lists(TOKEN_ID, max_size=50), st.lists(TOKEN_ID, max_size=50))
def test_digests_are_equal_only_for_equal_prompts(first: list[int], second: list[int]) -> None:
    assert (digest_prompt(first) == digest_prompt(second)) == (first == second)


def test_a_digest_is_short_and_the_same_on_every_machine() -> None:
    assert digest_prompt([1, 2, 3]) == digest_prompt((1, 2, 3)) == "ab44942e43d9d2af667cb73e"
    assert digest_prompt([]) != digest_prompt([0]) != digest_prompt([0, 0])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"remote_tp_size": -2, "remote_pp_size": -1}, "remote_tp_size is -2"),
        ({"remote_tp_size": 0}, "remote_tp_size is 0"),
        ({"remote_tp_size": 4097, "remote_side_channels": CHANNELS}, "remote_tp_size is 4097"),
        ({"remote_pp_size": 4097, "remote_tp_size": 1, "remote_side_channels": CHANNELS}, "remote_pp_size is 4097"),
        ({"remote_block_ids": [[3, -4, 9]]}, "remote_block_ids[0][1] is -4"),
        ({"remote_side_channels": [["h", 5600, "b"], ["h", 70_000, "b"]]}, "remote_side_channels[1].port is 70000"),
        ({"deadline_ms": 0}, "deadline_ms is 0"),
    ],
)
def test_a_number_out_of_its_bounds_is_refused_by_name(changes: dict[str, object], reason: str) -> None:
    """It would reach prefill's forward thread."""
    with pytest.raises(ProtocolError) as refused:
        parse_reservation(over_json(RESERVATION) | changes)
    assert f"kv_transfer_params are not Reservation: {reason}, and must be in [" in str(refused.value)


SECRET = make_secret("0123456789abcdef")
CHANGED_ON_THE_WAY = {
    "attempt": Attempt(7), "token": "x", "deadline_ms": 1, "lost_attempt": Attempt(6), "lost_reason": "late",
    "wants_whole": True,
}  # fmt: skip


@given(any_message(Reservation, version=OURS).map(address_each_rank))
def test_a_seal_fits_what_came_over_the_wire_whatever_the_router_changes(reservation: Reservation) -> None:
    order = msgspec.structs.replace(sealed(reservation, SECRET), **CHANGED_ON_THE_WAY)
    check_seal(parse_reservation(over_json(order)), SECRET)


@pytest.mark.parametrize("name", sorted({*Reservation.__struct_fields__} - {*CHANGED_ON_THE_WAY, "seal"}))
def test_a_seal_is_over_every_field_that_the_router_does_not_change(name: str) -> None:
    forged = msgspec.structs.replace(sealed(RESERVATION, SECRET), **{name: another(getattr(RESERVATION, name))})
    with pytest.raises(ProtocolError, match="not what was sealed"):
        check_seal(forged, SECRET)


def another(value: object) -> object:
    """Of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, ContentCheck):
        return ContentCheck.FULL
    return value + "x" if isinstance(value, str) else (*value, *value) or ((1,),)  # type: ignore[misc]  # a tuple
