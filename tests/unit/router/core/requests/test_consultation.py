"""What a gateway says, what it means, and what the gateway is told: known cases. Laws are in tests/property."""

from __future__ import annotations

import pytest

from pdcluster_protocol.errors import ProtocolError
from pdcluster_router.core.requests.consultation import (
    PIECE_BYTES,
    BodyMode,
    BodyModes,
    BodyReply,
    Consultation,
    ErrorReply,
    GatewayBody,
    GatewayHead,
    GatewaySide,
    GatewayTrailers,
    HeadReply,
    Heard,
    Replies,
    TrailersReply,
)
from pdcluster_router.core.requests.gateway_headers import NO_CHANGES, HeaderChanges

REQUEST, ANSWER = GatewaySide.REQUEST, GatewaySide.ANSWER
BUFFERED = BodyModes(BodyMode.BUFFERED, BodyMode.DUPLEX)
UNREAD = BodyModes(BodyMode.DUPLEX, BodyMode.NONE)
ERROR = ErrorReply(503, [], b"no")
ENGINE = "10.0.0.1:8000"


def head(side: GatewaySide = REQUEST, *, is_last: bool = False, modes: BodyModes | None = None) -> GatewayHead:
    return GatewayHead(side, [], is_last, modes=modes)


def whole(modes: BodyModes | None = None) -> Consultation:
    """A consultation whose request is here."""
    talk = Consultation()
    talk.hear(head(modes=modes))
    talk.ask_for_body()
    talk.hear(GatewayBody(REQUEST, b"{}", True))
    return talk


def delivered(modes: BodyModes | None = None) -> Consultation:
    talk = whole(modes)
    talk.deliver(ENGINE, NO_CHANGES, [b"{}"])
    return talk


def test_a_request_in_pieces_is_whole_with_its_last_one() -> None:
    talk = Consultation()
    assert talk.hear(head()) == ((Heard.HEAD,), ())
    assert talk.ask_for_body() == ()
    assert talk.hear(GatewayBody(REQUEST, b"{", False)) == ((Heard.PART,), ())
    assert talk.hear(GatewayBody(REQUEST, b"", True)) == ((Heard.WHOLE,), ())
    assert talk.deliver(ENGINE, NO_CHANGES, [b"{", b"}"]) == (
        HeadReply(REQUEST, NO_CHANGES, ENGINE),
        BodyReply(REQUEST, memoryview(b"{}"), is_last=True),
    )


def test_a_large_body_goes_on_in_pieces() -> None:
    replies = whole().deliver(ENGINE, NO_CHANGES, [b"x" * (2 * PIECE_BYTES + 1)])
    assert lengths_of(replies) == [PIECE_BYTES] * 2 + [1]
    assert [reply.is_last for reply in replies if isinstance(reply, BodyReply)] == [False, False, True]
    replies = whole().deliver(ENGINE, NO_CHANGES, [b"x" * PIECE_BYTES, b"y"])
    assert lengths_of(replies) == [PIECE_BYTES, 1]


def test_parts_of_a_body_that_fit_into_one_piece_are_one() -> None:
    for parts in ([b"x"] * PIECE_BYTES, [b"", b"x" * (PIECE_BYTES - 1), b"", b"y"]):
        assert lengths_of(whole().deliver(ENGINE, NO_CHANGES, parts)) == [PIECE_BYTES]


def lengths_of(replies: Replies) -> list[int]:
    return [len(reply.body or b"") for reply in replies if isinstance(reply, BodyReply)]


def test_trailers_end_a_request_and_are_let_on_after_its_body() -> None:
    talk = Consultation()
    talk.hear(head())
    talk.hear(GatewayBody(REQUEST, b"{}", False))
    assert talk.hear(GatewayTrailers(REQUEST)) == ((Heard.WHOLE,), ())
    replies = talk.deliver(ENGINE, NO_CHANGES, [b"{}"])
    assert replies[1:] == (BodyReply(REQUEST, memoryview(b"{}")), TrailersReply(REQUEST))


def test_a_buffered_body_is_asked_for_and_replaced_in_one_reply() -> None:
    talk = Consultation()
    talk.hear(head(modes=BUFFERED))
    assert talk.ask_for_body() == (HeadReply(REQUEST),)
    assert talk.hear(GatewayBody(REQUEST, b"{}", False)) == ((Heard.PART, Heard.WHOLE), ())
    sized = HeaderChanges(((b"content-length", b"3"),))
    wanted = BodyReply(REQUEST, b"abc", is_piece=False, changes=sized, endpoint=ENGINE)
    assert talk.deliver(ENGINE, NO_CHANGES, [b"a", b"bc"]) == (wanted,)
    assert talk.hear(GatewayTrailers(REQUEST)) == ((), (TrailersReply(REQUEST),))


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED, BodyMode.PARTIAL])
def test_a_body_that_cannot_be_replaced_is_a_problem_with_its_cure(mode: BodyMode) -> None:
    talk = Consultation()
    talk.hear(head(modes=BodyModes(mode, BodyMode.DUPLEX)))
    assert "set FULL_DUPLEX_STREAMED" in talk.problem
    assert whole().problem == whole(BUFFERED).problem == ""


def test_the_answer_goes_to_the_client_when_it_is_written() -> None:
    talk = delivered()
    assert talk.hear(head(ANSWER)) == ((Heard.ANSWER_HEAD,), ())
    assert not talk.may_add
    assert talk.hear(GatewayBody(ANSWER, b"ab", False)) == ((Heard.ANSWER_PART,), ())
    assert talk.begin_answer(NO_CHANGES) == (HeadReply(ANSWER),)
    assert talk.may_add
    assert talk.write(b"ab") == (BodyReply(ANSWER, memoryview(b"ab")),)
    assert talk.hear(GatewayBody(ANSWER, b"", True)) == ((Heard.ANSWER_END,), ())
    assert talk.end() == (BodyReply(ANSWER, b"", is_last=True),)
    assert talk.is_over


def test_an_answers_trailers_are_its_end() -> None:
    talk = delivered()
    talk.hear(head(ANSWER))
    assert talk.hear(GatewayTrailers(ANSWER)) == ((Heard.ANSWER_END,), ())
    talk.begin_answer(NO_CHANGES)
    assert talk.end() == (TrailersReply(ANSWER),)


def test_an_answer_that_goes_by_unread_needs_its_head_let_on_and_nothing_else() -> None:
    talk = delivered(UNREAD)
    assert not talk.carries_answer
    talk.hear(head(ANSWER))
    assert talk.begin_answer(NO_CHANGES) == (HeadReply(ANSWER),)
    assert (talk.write(b"x"), talk.end(), talk.is_over, talk.is_passing) == ((), (), False, True)
    assert talk.hear(GatewayTrailers(ANSWER)) == ((), (TrailersReply(ANSWER),))


def test_an_error_ends_all_at_any_time() -> None:
    for talk in (Consultation(), whole(), delivered()):
        assert talk.refuse(ERROR) == (ERROR,)
        assert talk.refuse(ERROR) == ()
        assert talk.hear(head(ANSWER)) == ((), ())
        assert talk.is_over


def test_a_request_that_passes_by_goes_on_as_it_comes() -> None:
    talk = Consultation()
    talk.hear(head())
    assert talk.pass_by(ENGINE, NO_CHANGES) == (HeadReply(REQUEST, NO_CHANGES, ENGINE),)
    assert talk.hear(GatewayBody(REQUEST, b"ab", True)) == ((), (BodyReply(REQUEST, memoryview(b"ab"), is_last=True),))
    assert talk.hear(head(ANSWER)) == ((), (HeadReply(ANSWER),))
    assert talk.hear(GatewayBody(ANSWER, b"", True)) == ((), (BodyReply(ANSWER, b"", is_last=True),))
    assert talk.hear(GatewayTrailers(ANSWER)) == ((), (TrailersReply(ANSWER),))


def test_a_gateway_that_answers_by_itself_withdraws_the_request() -> None:
    talk = whole()
    assert talk.hear(head(ANSWER)) == ((Heard.WITHDRAWN,), (HeadReply(ANSWER),))
    assert talk.hear(GatewayBody(ANSWER, b"no", True))[1] == (BodyReply(ANSWER, memoryview(b"no"), is_last=True),)


@pytest.mark.parametrize("message", [head(), GatewayBody(REQUEST, b"x", True)], ids=["head", "body"])
def test_a_gateway_that_says_more_than_a_request_breaks_the_rules(message: GatewayHead | GatewayBody) -> None:
    with pytest.raises(ProtocolError):
        delivered().hear(message)


def test_an_answer_without_a_head_or_with_two_breaks_the_rules() -> None:
    with pytest.raises(ProtocolError, match="response_header_mode"):
        delivered().hear(GatewayBody(ANSWER, b"x", True))
    talk = delivered()
    talk.hear(head(ANSWER))
    with pytest.raises(ProtocolError, match="second head"):
        talk.hear(head(ANSWER))
