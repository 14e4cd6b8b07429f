"""Since when a relay has had no byte: what makes a request at an engine that is gone a lost one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fakes.responses import ResponsesWords
from pdcluster_router.core.apis.client_apis import MESSAGES, OPENAI, RESPONSES, ClientApi
from pdcluster_router.core.apis.messages import MAX_ANSWER_BYTES
from pdcluster_router.core.apis.openai_errors import stopped
from pdcluster_router.core.apis.sse import GAVE_UP, MAX_FIRST_EVENT_BYTES
from pdcluster_router.core.clients.room import Room
from pdcluster_router.core.telemetry.histogram import PER_TOKEN, Histogram
from pdcluster_router.http.connection import Call, ResponseHead, ResponseLost
from pdcluster_router.http.cycle import NO_HEAD, HotCycle
from pdcluster_router.requests.relay import MAX_ERROR_BYTES, MOST_AWAITED_BYTES, DecodeRefusal, Relay
from pdcluster_router.telemetry.stream_gaps import StreamGaps


class Nobody:
    """A connection and an exchange that are told nothing of interest."""

    def write(self, data: bytes) -> None: ...

    def answered(self, status: int = 0, end: bytes | bytearray = b"") -> None: ...

    is_full = False

    def close(self, *, with_reset: bool = False) -> None: ...

    def first_byte(self) -> None: ...

    def begins(self) -> StreamGaps | None: ...

    def refused(self, refusal: DecodeRefusal) -> None: ...

    def decode_lost(self, lost: ResponseLost) -> None: ...


class Heard(Nobody):
    """What the exchange is told, in order, and what the client gets."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.said = b""

    def write(self, data: bytes) -> None:
        self.said += data

    def close(self, *, with_reset: bool = False) -> None:
        self.told.append("closed with a reset" if with_reset else "closed")

    def begins(self) -> None:
        self.told.append("begins")

    def refused(self, refusal: DecodeRefusal) -> None:
        self.told.append(f"refused {refusal.status}")

    def decode_lost(self, lost: ResponseLost) -> None:
        self.told.append(lost.reason)


def relay(owner: Nobody | None = None, api: ClientApi = OPENAI) -> Relay:
    nobody = owner or Nobody()
    return Relay(nobody, HotCycle(nobody, b"/", NO_HEAD, lambda _: None, Room(1)), api, GAVE_UP, now=7.0)


A_STREAM = ResponseHead(200, [], None, b"text/event-stream")
PLAIN = ResponseHead(200, [], None, b"application/json")


class Gapped(Nobody):
    """An exchange that wants the gaps of a stream, with the times at which pieces come."""

    def __init__(self, *times: float) -> None:
        self.gaps = Histogram(PER_TOKEN)
        self._times = iter(times)

    def begins(self) -> StreamGaps:
        return StreamGaps(self.gaps, lambda: next(self._times), 7.0)


@pytest.mark.parametrize(("head", "counts"), [(A_STREAM, {"0.05": 1, "2.0": 1}), (PLAIN, {})])
def test_each_piece_of_a_stream_behind_the_first_one_counts_the_time_before_it(
    head: ResponseHead, counts: dict[str, int]
) -> None:
    owner = Gapped(7.05, 8.05)
    one = relay(owner)
    one.begin(Call(one))
    one.on_head(head)
    for _ in range(3):
        one.on_body(b"data: {}\n\n")
    bounds = (*map(str, PER_TOKEN), "+Inf")
    assert {bound: num for bound, num in zip(bounds, owner.gaps.counts, strict=True) if num} == counts


def answered(api: ClientApi, head: ResponseHead, *parts: bytes) -> tuple[Heard, Call]:
    """What became of an answer with these parts, and the call that brought it."""
    heard = Heard()
    one = relay(heard, api)
    call = Call(one)
    one.begin(call)
    one.on_head(head)
    for part in parts:
        if not call.is_closed:
            one.on_body(part)
    return heard, call


def test_it_is_quiet_since_it_began_and_since_bytes_were_last_seen() -> None:
    one = relay()
    assert (one.has_moved(now=8.0), one.quiet_since) == (False, 7.0)
    one.on_head(ResponseHead(500, [], None, b""))
    one.on_body(b"a")
    assert (one.has_moved(now=9.0), one.quiet_since) == (True, 9.0)
    assert (one.has_moved(now=10.0), one.quiet_since) == (False, 9.0)


def test_a_client_that_takes_nothing_is_no_silence_of_the_engine() -> None:
    one = relay()
    one.pause()
    assert (one.has_moved(now=8.0), one.quiet_since) == (False, 8.0)
    one.resume()
    assert (one.has_moved(now=9.0), one.quiet_since) == (False, 8.0)


def test_what_is_held_has_not_gone_to_the_client() -> None:
    one = relay()
    one.on_head(ResponseHead(200, [], None, b"text/event-stream"))
    for part in (b"data", b": 1", b"\n"):
        one.on_body(part)
        assert (one.num_streamed_bytes, one.may_comment) == (0, True)
    one.on_body(b"\n")
    assert (one.num_streamed_bytes, one.may_comment) == (9, True)
    one.on_body(b"data")
    assert (one.num_streamed_bytes, one.may_comment) == (13, False)


@pytest.mark.parametrize(
    ("status", "content_type", "may_comment"),
    [(200, b"text/event-stream", True), (200, b"application/json", False), (503, b"text/event-stream", False)],
)
def test_none_is_written_into_what_its_head_says_is_no_good_stream(
    status: int, content_type: bytes, *, may_comment: bool
) -> None:
    one = relay()
    assert one.may_comment
    one.on_head(ResponseHead(status, [], None, content_type))
    assert one.may_comment is may_comment
    one.on_body(b"data: 1\n\n")
    assert one.may_comment is may_comment


def test_an_error_without_end_is_told_as_far_as_it_came_and_not_read_on() -> None:
    half = b"x" * (MAX_ERROR_BYTES // 2)
    heard, call = answered(OPENAI, ResponseHead(400, [], None, b"text/plain"), half, half)
    assert (heard.told, call.is_closed) == ([], False)
    heard, call = answered(OPENAI, ResponseHead(400, [], None, b"text/plain"), half, half, b"x")
    assert (heard.told, call.is_closed) == (["refused 400"], True)


def test_an_answer_that_is_kept_to_its_end_is_lost_when_it_has_none() -> None:
    json = ResponseHead(200, [], None, b"application/json")
    heard, call = answered(MESSAGES, json, b"x" * (MAX_ANSWER_BYTES + 1))
    assert (heard.told, call.is_closed) == (
        [f"it broke off its answer: it is longer than {MAX_ANSWER_BYTES} bytes"],
        True,
    )


def test_a_first_event_that_is_no_error_message_any_more_is_relayed() -> None:
    stream = ResponseHead(200, [], None, b"text/event-stream")
    heard, _ = answered(OPENAI, stream, b"data: ", b"x" * (MAX_FIRST_EVENT_BYTES - 6))
    assert (heard.told, heard.said) == ([], b"")
    heard, _ = answered(OPENAI, stream, b"data: ", b"x" * (MAX_FIRST_EVENT_BYTES - 6), b"x")
    assert heard.told == ["begins"]
    assert b"data: xxx" in heard.said


@pytest.mark.parametrize(("length", "told"), [(None, ["begins"]), (MOST_AWAITED_BYTES + 1, ["begins"]), (29, [])])
def test_a_plain_answer_that_its_engine_gives_up_behind_its_first_part_is_lost(
    length: int | None, told: list[str]
) -> None:
    """A short one before the client has a byte of it."""
    json = ResponseHead(200, [], length, b"application/json")
    heard, call = answered(OPENAI, json, b'{"a":', b'"finish_reason":"abort"}')
    assert (heard.told, call.is_closed) == ([*told, "it broke off its answer: it gave the request up"], True)
    assert b"abort" not in heard.said


def test_an_error_that_comes_with_the_first_event_is_told_at_once() -> None:
    stream = ResponseHead(200, [], None, b"text/event-stream")
    heard, call = answered(OPENAI, stream, b'data: 1\n\ndata: {"error": {"message": "core died"}}\n\n')
    assert (heard.told, call.is_closed) == (["begins", "it broke off its answer: core died"], True)


@pytest.mark.parametrize("takes_chunks", [True, False])
def test_a_stream_of_comments_begins_with_its_engines_headers_and_ends_in_an_error_without_a_clean_end(
    *, takes_chunks: bool
) -> None:
    heard = Heard()
    cycle = HotCycle(heard, b"/v1/completions", NO_HEAD, lambda _: None, Room(1))
    cycle.takes_chunks = takes_chunks
    one = Relay(heard, cycle, OPENAI, GAVE_UP, now=7.0)
    one.on_head(ResponseHead(200, [(b"x-engine", b"a"), (b"content-length", b"9")], 9, b"text/event-stream"))
    cycle.comment()
    assert b"x-engine: a\r\n" in heard.said
    assert b"content-length" not in heard.said
    assert (b"chunked" in heard.said) is takes_chunks
    one.fail(stopped())
    assert heard.said.count(b'data: {"error":') == 1
    assert not heard.said.endswith(b"0\r\n\r\n")
    assert heard.told == ["closed" if takes_chunks else "closed with a reset"]


def test_events_that_repeat_a_long_request_in_many_pieces_are_not_searched_once_for_each_piece() -> None:
    looks: list[int] = []

    def counted(stream: bytes | bytearray) -> tuple[int, int]:
        looks.append(len(stream))
        return RESPONSES.first_event(stream)

    heard = Heard()
    one = relay(heard, replace(RESPONSES, first_event=counted))
    one._cycle.num_body_bytes = 1 << 20
    one.on_head(ResponseHead(200, [], None, b"text/event-stream"))
    words = ResponsesWords({"instructions": "x" * (1 << 20)}, ["a"], "", None)
    early = b"".join(words.events()[:2])
    for begin in range(0, len(early), 1 << 12):
        one.on_body(early[begin : begin + (1 << 12)])
    assert (len(looks), heard.said) == (2, b"")
    one.on_body(words.events()[2])
    assert early + words.events()[2] in heard.said


def test_events_that_repeat_more_than_the_request_can_be_are_relayed() -> None:
    heard = Heard()
    one = relay(heard, RESPONSES)
    one.on_head(ResponseHead(200, [], None, b"text/event-stream"))
    one.on_body(b"event: response.created\ndata: " + b"x" * MAX_FIRST_EVENT_BYTES)
    assert len(heard.said) > MAX_FIRST_EVENT_BYTES


@pytest.mark.parametrize("num_bytes", [2, MOST_AWAITED_BYTES])
def test_a_short_plain_answer_goes_when_it_is_whole(num_bytes: int) -> None:
    json = ResponseHead(200, [], num_bytes, b"application/json")
    heard, _ = answered(OPENAI, json, b"x" * (num_bytes - 1))
    assert (heard.told, heard.said) == ([], b"")
    heard, _ = answered(OPENAI, json, b"x" * (num_bytes - 1), b"x")
    assert heard.told == ["begins"]
    assert heard.said.endswith(b"x" * num_bytes)


@pytest.mark.parametrize("length", [MOST_AWAITED_BYTES + 1, None])
def test_a_long_one_and_one_of_unknown_length_go_as_they_come(length: int | None) -> None:
    heard, _ = answered(OPENAI, ResponseHead(200, [], length, b"application/json"), b"x")
    assert heard.told == ["begins"]
