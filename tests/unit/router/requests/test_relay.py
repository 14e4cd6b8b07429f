"""Since when a relay has had no byte: what makes a request at an engine that is gone a lost one."""

from __future__ import annotations

import pytest

from pdcluster_router.core.client_apis import OPENAI
from pdcluster_router.core.room import Room
from pdcluster_router.core.sse import GAVE_UP
from pdcluster_router.http.connection import ResponseHead, ResponseLost
from pdcluster_router.http.cycle import NO_HEAD, HotCycle
from pdcluster_router.requests.relay import DecodeRefusal, Relay


class Nobody:
    """A connection and an exchange that are told nothing of interest."""

    def write(self, data: bytes) -> None: ...

    def answered(self, status: int = 0) -> None: ...

    is_full = False

    def close(self, *, with_reset: bool = False) -> None: ...

    def first_byte(self) -> None: ...

    def begins(self) -> None: ...

    def refused(self, refusal: DecodeRefusal) -> None: ...

    def decode_lost(self, lost: ResponseLost) -> None: ...


def relay() -> Relay:
    nobody = Nobody()
    return Relay(nobody, HotCycle(nobody, b"/", NO_HEAD, lambda _: None, Room(1)), OPENAI, GAVE_UP, now=7.0)


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
