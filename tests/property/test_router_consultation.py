"""Laws of a consultation: the gateway's rules hold in every mode, however messages and decisions come."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster_protocol.errors import ProtocolError
from pdcluster_router.core.requests.consultation import (
    BodyMode,
    BodyModes,
    BodyReply,
    Consultation,
    ErrorReply,
    GatewayBody,
    GatewayHead,
    GatewayMessage,
    GatewayReply,
    GatewaySide,
    GatewayTrailers,
    HeadReply,
    Heard,
    TrailersReply,
)
from pdcluster_router.core.requests.gateway_headers import NO_CHANGES, changes_between

REQUEST, ANSWER = GatewaySide
ENGINE = "10.0.0.1:8000"
bodies = st.lists(st.binary(max_size=6), max_size=5)
request_modes = st.sampled_from([BodyMode.DUPLEX, BodyMode.BUFFERED])
answer_modes = st.sampled_from([BodyMode.DUPLEX, BodyMode.NONE, BodyMode.STREAMED])


def messages_of(
    side: GatewaySide, body: Sequence[bytes], mode: BodyMode, *, has_trailers: bool
) -> list[GatewayMessage]:
    """What Envoy says of a body in this mode. The last piece says so, unless trailers come behind it."""
    if mode is BodyMode.NONE:
        return []
    parts = [b"".join(body)] if mode is BodyMode.BUFFERED else [*body, b""]
    said: list[GatewayMessage] = [GatewayBody(side, part, False) for part in parts[:-1]]
    said.append(GatewayBody(side, parts[-1], not has_trailers))
    return [*said, GatewayTrailers(side)] if has_trailers else said


class Envoy:
    """The rules by which a gateway takes replies: each kind in its order, and one for each message where none streams.

    ``told``: the bytes that go on from here.
    """

    def __init__(self, modes: BodyModes) -> None:
        self.modes = {REQUEST: modes.request, ANSWER: modes.answer}
        self.owed: dict[GatewaySide, list[type[GatewayReply]]] = {REQUEST: [], ANSWER: []}
        self.told = {REQUEST: b"", ANSWER: b""}
        self.is_ended = {REQUEST: False, ANSWER: False}
        self.has_head = {REQUEST: False, ANSWER: False}
        self.error: ErrorReply | None = None

    def says(self, message: GatewayMessage) -> GatewayMessage:
        kinds: dict[type[GatewayMessage], type[GatewayReply]] = {
            GatewayHead: HeadReply,
            GatewayBody: BodyReply,
            GatewayTrailers: TrailersReply,
        }
        self.owed[message.side].append(kinds[type(message)])
        return message

    def takes(self, replies: Sequence[GatewayReply]) -> None:
        for reply in replies:
            assert self.error is None, "nothing is said after an error"
            if isinstance(reply, ErrorReply):
                self.error = reply
            else:
                self._take(reply)

    def _take(self, reply: HeadReply | BodyReply | TrailersReply) -> None:
        side, is_duplex = reply.side, self.modes[reply.side] is BodyMode.DUPLEX
        assert not self.is_ended[side]
        if isinstance(reply, BodyReply) and is_duplex:
            assert self.has_head[side], "a head goes before its body"
            assert reply.is_piece
            self.told[side] += bytes(reply.body or b"")
            self.is_ended[side] = reply.is_last
            return
        if is_duplex:  # Pieces are not owed one by one.
            self.owed[side] = [kind for kind in self.owed[side] if kind is not BodyReply]
        assert self.owed[side].pop(0) is type(reply)
        self.has_head[side] |= isinstance(reply, HeadReply)
        if isinstance(reply, BodyReply):
            assert not reply.is_piece
            self.told[side] += bytes(reply.body or b"")
        self.is_ended[side] = isinstance(reply, TrailersReply)


class Shell:
    """Decides as the picker does: reads, delivers, holds the answer back or not, and writes it."""

    def __init__(self, envoy: Envoy, *, holds: bool) -> None:
        self.talk = Consultation()
        self.envoy = envoy
        self.holds = holds
        self.got = self.held = b""
        self.has_begun = False

    def hears(self, message: GatewayMessage, *, fails: bool) -> None:
        heard, replies = self.talk.hear(self.envoy.says(message))
        self.envoy.takes(replies)
        if fails:
            self.envoy.takes(self.talk.refuse(ErrorReply(500, [], b"")))
        for fact in heard if not self.talk.is_over else ():
            self.acts(fact, message.body if isinstance(message, GatewayBody) else b"")

    def acts(self, fact: Heard, body: bytes) -> None:
        match fact:
            case Heard.HEAD:
                self.envoy.takes(self.talk.ask_for_body())
            case Heard.PART:
                self.got += body
            case Heard.WHOLE:
                self.envoy.takes(self.talk.deliver(ENGINE, NO_CHANGES, [b"<", self.got, b">"]))
            case _:
                self.answers(fact, body)

    def answers(self, fact: Heard, body: bytes) -> None:
        self.held += body
        if not self.has_begun and (fact is Heard.ANSWER_END or not (self.holds and self.talk.carries_answer)):
            self.has_begun = True
            self.envoy.takes(self.talk.begin_answer(NO_CHANGES))
        if self.has_begun:
            self.envoy.takes(self.talk.write(self.held))
            self.held = b""
        if fact is Heard.ANSWER_END:
            self.envoy.takes(self.talk.end())


@given(bodies, bodies, request_modes, answer_modes, st.booleans(), st.booleans(), st.integers(-1, 12), st.booleans())
def test_a_request_and_its_answer_go_through_whole_in_every_mode(
    body: list[bytes],
    answer: list[bytes],
    request_mode: BodyMode,
    answer_mode: BodyMode,
    request_trailers: bool,
    answer_trailers: bool,
    fails_at: int,
    holds: bool,
) -> None:
    modes = BodyModes(request_mode, answer_mode)
    envoy = Envoy(modes)
    said: list[GatewayMessage] = [GatewayHead(REQUEST, [], False, modes=modes)]
    said += messages_of(REQUEST, body, request_mode, has_trailers=request_trailers)
    said += [GatewayHead(ANSWER, [], False)]
    said += messages_of(ANSWER, answer, answer_mode, has_trailers=answer_trailers)
    shell = Shell(envoy, holds=holds)
    for number, message in enumerate(said):
        shell.hears(message, fails=number == fails_at)
    if envoy.error is not None:
        assert shell.talk.is_over
        return
    assert envoy.told[REQUEST] == b"<" + b"".join(body) + b">"
    assert not envoy.owed[REQUEST] or request_mode is BodyMode.DUPLEX
    if answer_mode is BodyMode.DUPLEX:
        assert envoy.told[ANSWER] == b"".join(answer)
        assert envoy.is_ended == {REQUEST: request_trailers or request_mode is BodyMode.DUPLEX, ANSWER: True}
    else:
        assert envoy.owed[ANSWER] == []


@given(st.data())
def test_whatever_a_gateway_says_it_gets_replies_it_may_get_or_breaks_the_rules(data: st.DataObject) -> None:
    """Also a gateway that no one has met: nothing is raised but ``ProtocolError``."""
    sides = st.sampled_from([REQUEST, ANSWER])
    modes = st.builds(BodyModes, st.sampled_from(list(BodyMode)), st.sampled_from(list(BodyMode)))
    heads = st.builds(GatewayHead, sides, st.just([]), st.booleans(), st.none(), st.one_of(st.none(), modes))
    messages = st.one_of(
        heads, st.builds(GatewayBody, sides, st.binary(max_size=3), st.booleans()), st.builds(GatewayTrailers, sides)
    )
    talk = Consultation()
    for message in data.draw(st.lists(messages, max_size=8)):
        try:
            heard, _ = talk.hear(message)
        except ProtocolError:
            assert talk.refuse(ErrorReply(500, [], b"")) != ()
            return
        for fact in heard:
            if fact is Heard.HEAD and data.draw(st.booleans()):
                talk.pass_by(ENGINE, NO_CHANGES)
                break
            if fact is Heard.WHOLE and data.draw(st.booleans()):
                talk.deliver(ENGINE, NO_CHANGES, [b"x"])
            if fact is Heard.ANSWER_HEAD and data.draw(st.booleans()):
                talk.begin_answer(NO_CHANGES)


names = st.sampled_from([b"a", b"b", b"host", b":path", b"content-length", b"x-envoy-a"])
headers = st.lists(st.tuples(names, st.sampled_from([b"1", b"2"])), max_size=6)
OWN = (b"host", b":path", b"content-length", b"x-envoy-a")


@given(headers, headers)
def test_the_changes_make_the_head_that_was_wanted(
    had: list[tuple[bytes, bytes]], wanted: list[tuple[bytes, bytes]]
) -> None:
    changes = changes_between(had, wanted)
    named = {name for name, _ in changes.set}
    made = [header for header in had if header[0] not in named and header[0] not in changes.remove] + list(changes.set)
    assert sorted(made) == sorted(
        [header for header in wanted if header[0] not in OWN] + [header for header in had if header[0] in OWN]
    )


def test_the_oracle_is_not_blind() -> None:
    envoy = Envoy(BodyModes())
    with pytest.raises(AssertionError, match="a head goes before its body"):
        envoy.takes([BodyReply(REQUEST, b"x")])
    with pytest.raises(AssertionError, match="after an error"):
        envoy.takes([ErrorReply(500, [], b""), ErrorReply(500, [], b"")])
