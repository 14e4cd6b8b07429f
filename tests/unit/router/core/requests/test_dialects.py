"""Each dialect's answers, as a table: what engines are told, whose call is taken, and what a failed attempt leaves."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from fakes.layerwise import posted
from fakes.reservations import SECRET, local_prefill_of, plain_reservation, reservation_of
from fakes.router import params_of
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.ids import Attempt, TransferId
from pdcluster_protocol.params import DecodeParams, LocalPrefill, Reservation
from pdcluster_router.core.apis.sse import ErrorWatch, given_up_in
from pdcluster_router.core.engines.breaker import Blame
from pdcluster_router.core.requests.dialect import BadCall, LayerwiseCall, PdclusterDialect
from pdcluster_router.core.requests.pairing import Event, Retries
from pdcluster_router.core.requests.vllm_ascend import VllmAscendDialect, transfer_id_of

R = TransferId("0123456789abcdef" * 2)
OURS, THEIRS = PdclusterDialect(SECRET), VllmAscendDialect()
PARAMS = DecodeParams(metaserver="http://10.0.0.1:8001/v1/metaserver", transfer_id=R, deadline_ms=5000)
CALL = json.dumps(posted(f"cmpl-{R}-0")).encode()


def taken(**changes: Any) -> LayerwiseCall | None:
    return THEIRS.call_in(b"", json.dumps({**posted(f"cmpl-{R}-0"), **changes}).encode(), {R})


def test_our_decode_gets_a_token_and_theirs_the_three_names_that_it_knows() -> None:
    ours = OURS.decode_params(PARAMS)
    SECRET.check(ours.token, R, Attempt(1), 5000)
    assert json.loads(THEIRS.decode_params(PARAMS)) == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "metaserver": PARAMS.metaserver,
    }


def test_only_their_engines_get_the_transfer_in_place_of_the_clients_id() -> None:
    assert (OURS.client_line(b"mine"), OURS.transfer_line(R)) == (b"x-request-id: mine\r\n", b"")
    assert (THEIRS.client_line(b"mine"), THEIRS.transfer_line(R)) == (b"", b"x-request-id: %b\r\n" % R.encode())


def test_our_prefill_gets_a_token_for_its_attempt_and_the_time_that_is_left() -> None:
    ours = OURS.prefill_params(plain_reservation(R), Attempt(2), 7)
    assert isinstance(ours, Reservation)
    SECRET.check(ours.token, R, Attempt(2), 7)
    with pytest.raises(ProtocolError, match="its token allows 7"):
        SECRET.check(ours.token, R, Attempt(2), 8)


def test_prefill_gets_byte_for_byte_what_was_posted() -> None:
    call = THEIRS.call_in(b"", bytearray(CALL), {R})
    assert call is not None
    assert THEIRS.prefill_params(call, Attempt(2), 7) == CALL
    assert (call.transfer_id, call.num_prompt_tokens, call.remote_cached_tokens) == (R, 48, 0)


def test_a_prompt_is_longer_than_what_decode_has_of_it() -> None:
    call = taken(remote_cached_tokens=48)
    assert call is not None
    assert call.num_prompt_tokens == 49


def test_a_call_without_blocks_waits_for_nothing() -> None:
    assert taken(remote_block_ids=[]) is None


@pytest.mark.parametrize("request_id", [f"cmpl-{R}-0", f"chatcmpl-{R}"])
def test_their_id_names_the_transfer(request_id: str) -> None:
    assert transfer_id_of(request_id) == R


@pytest.mark.parametrize(
    ("request_id", "status"),
    [
        (f"cmpl-{R}-1", 400),
        (f"cmpl-{R}", 400),
        (f"chatcmpl-{R}-0", 400),
        (f"0_cmpl-{R}-0", 400),
        (f"cmpl-{R.upper()}-0", 400),
        ("cmpl--0", 400),
        ("", 400),
        (f"cmpl-{'0' * 32}-0", 404),
    ],
)
def test_another_id_is_refused_before_the_rest_is_read(request_id: str, status: int) -> None:
    with pytest.raises(BadCall) as refused:
        THEIRS.call_in(b"", json.dumps({"request_id": request_id, "remote_port": "nonsense"}).encode(), {R})
    assert refused.value.status == status


def test_a_call_of_the_wrong_shape_names_its_transfer() -> None:
    with pytest.raises(BadCall, match="remote_port") as refused:
        taken(remote_port=0)
    assert (refused.value.status, refused.value.transfer_id) == (400, R)


@pytest.mark.parametrize(
    ("seal", "change", "status"),
    [(None, {}, 0), (b"", {}, 403), (None, {"token": "1.x"}, 403), (None, {"version": 9}, 400)],
)
def test_our_calls_show_a_seal_and_a_token(seal: bytes | None, change: dict[str, Any], status: int) -> None:
    body = json.dumps({**reservation_of(params_of("t")), **change}).encode()
    shown = SECRET.seal_call(body).encode() if seal is None else seal
    if status:
        with pytest.raises(BadCall) as refused:
            OURS.call_in(shown, body, set())
        assert refused.value.status == status
    else:
        reservation = OURS.call_in(shown, body, set())
        assert isinstance(reservation, Reservation)
        assert isinstance(OURS.prefill_params(reservation, Attempt(2), 7), Reservation)


@pytest.mark.parametrize(
    ("change", "status"),
    [({}, 0), ({"token": "1.x"}, 403), ({"num_local_tokens": 43}, 400), ({"num_local_tokens": 0}, 400)],
)
def test_our_decode_may_say_that_it_prefills_locally(change: dict[str, Any], status: int) -> None:
    said = {**local_prefill_of(params_of("t")), **change}
    body = json.dumps(said).encode()
    seal = SECRET.seal_call(body).encode()
    if status:
        with pytest.raises(BadCall) as refused:
            OURS.call_in(seal, body, set())
        assert refused.value.status == status
    else:
        assert OURS.call_in(seal, body, set()) == msgspec.convert(said, LocalPrefill)


@pytest.mark.parametrize(
    ("event", "blame", "spoils"),
    [
        (Event.PREFILL_FAILED, Blame.PERHAPS, True),  # It answered an error, or broke off.
        (Event.PREFILL_FAILED, Blame.ENGINE, False),  # It could not be reached.
        (Event.PREFILL_FAILED, Blame.NOBODY, False),  # All of our connections to it are in use.
        (Event.PREFILL_TIMED_OUT, Blame.ENGINE, True),
    ],
)
def test_a_reservation_that_an_engine_has_seen_is_not_given_to_another(
    event: Event, blame: Blame, spoils: bool
) -> None:
    assert THEIRS.spoils(event, blame) is spoils
    assert not OURS.spoils(event, blame)


def test_their_decode_never_computes_a_prompt_whose_push_has_failed() -> None:
    wanted = Retries(5, 4, recomputes=True)
    assert OURS.retries(wanted) == wanted
    assert THEIRS.retries(wanted) == Retries(5, 4, recomputes=False)


def test_only_their_engines_give_a_request_back() -> None:
    said = b'{"choices":[{"finish_reason":"stop","stop_reason":"recomputed"}]}'
    assert given_up_in(said, OURS.given_up) == ""
    assert "recompute_scheduler_enable" in given_up_in(said, THEIRS.given_up)
    assert given_up_in(b'"finish_reason":"abort"', THEIRS.given_up) == given_up_in(b'"finish_reason":"abort"')
    assert given_up_in(said + b'"finish_reason":"abort"', THEIRS.given_up) == given_up_in(said, THEIRS.given_up)


BEGINNING = b'data: {"choices":[{"text":" a","stop_reason":null}]}\n\n'
GIVEN_BACK = BEGINNING + b'data: {"choices":[{"text":"","stop_reason":"recomputed"}]}\n\n'


@pytest.mark.parametrize("size", range(1, len(GIVEN_BACK) + 1))
def test_an_event_that_gives_a_request_back_is_found_however_the_stream_is_cut(size: int) -> None:
    watch, passed = ErrorWatch(THEIRS.given_up), b""
    for start in range(0, len(GIVEN_BACK), size):
        passed += watch.feed(GIVEN_BACK[start : start + size])
    assert "recompute_scheduler_enable" in (watch.message() or "")
    assert passed.startswith(BEGINNING[:-1])
    assert b'"recomputed"' not in passed
