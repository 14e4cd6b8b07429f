"""When a silent stream gets a comment, look by look."""

from __future__ import annotations

from pdcluster_router.core.apis.sse import ErrorWatch, first_event_end, refusal_event
from pdcluster_router.core.requests.keep_alive import COMMENT, Silence


def looks(*num_bytes: int, may_comment: bool = True) -> list[bool]:
    silence = Silence()
    return [silence.is_comment_due(num, may_comment=may_comment) for num in num_bytes]


def test_a_stream_that_has_not_begun_gets_a_comment_at_every_second_look() -> None:
    assert looks(0, 0, 0, 0, 0) == [False, True, False, True, False]


def test_bytes_that_came_between_two_looks_may_have_come_right_after_the_first() -> None:
    assert looks(9, 9, 9, 9) == [False, True, False, True]


def test_a_stream_that_flows_gets_none() -> None:
    assert looks(1, 2, 3, 4, 5, 6) == [False] * 6


def test_what_may_not_be_interrupted_gets_its_comment_at_the_first_look_at_which_it_may() -> None:
    silence = Silence()
    assert not any(silence.is_comment_due(5, may_comment=False) for _ in range(9))
    assert silence.is_comment_due(5, may_comment=True)
    assert not silence.is_comment_due(5, may_comment=True)


def test_a_comment_is_no_event() -> None:
    assert first_event_end(COMMENT) == -1
    assert first_event_end(COMMENT + b"data: 1\n\n") == len(COMMENT + b"data: 1\n\n")


def test_a_comment_is_written_between_two_events_only() -> None:
    places = {
        b"data: 1\n\n": True,
        b"data: 1\r\n\r\n": True,
        b"data: 1\n": False,
        b"data: 1": False,
        b"event: a\ndata: 1\n\ndat": False,
        b'data: 1\n\ndata: {"error": {': False,
    }
    for stream, is_between in places.items():
        watch = ErrorWatch()
        watch.feed(stream)
        assert watch.is_between_events is is_between, stream
        whole = ErrorWatch()
        for at in range(len(stream)):
            whole.feed(stream[at : at + 1])
        assert whole.is_between_events is is_between, stream


def test_an_engines_error_of_several_lines_is_one_event() -> None:
    assert refusal_event(b'{"error":\r\n {}\n}') == b'data: {"error":\ndata:  {}\ndata: }\n\n'
