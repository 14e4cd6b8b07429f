"""The picker's stream where only one order of events shows a mistake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from fakes.reservations import SECRET
from patience import EDGE_S
from pdcluster_router.core.requests.consultation import (
    BodyReply,
    Consultation,
    ErrorReply,
    GatewayBody,
    GatewayHead,
    GatewayReply,
    GatewaySide,
    HeadReply,
)
from pdcluster_router.core.requests.gateway_headers import NO_CHANGES
from pdcluster_router.front.picker.replies import FULL_BYTES
from pdcluster_router.front.picker.stream import PickerStream
from pdcluster_router.front.router import Router
from pdcluster_router.settings.router_settings import build_settings

pytestmark = pytest.mark.anyio
REQUEST, ANSWER = GatewaySide.REQUEST, GatewaySide.ANSWER


@asynccontextmanager
async def router_of(**settings: Any) -> AsyncIterator[Router]:
    router = Router(
        build_settings(prefill_urls=("http://127.0.0.1:1",), decode_urls=("http://127.0.0.1:2",), **settings), SECRET
    )
    yield router
    await router.close()
    assert router.clients.num_open == 0


def head(path: str, method: str = "POST", *, is_last: bool = False) -> GatewayHead:
    return GatewayHead(REQUEST, [(b":path", path.encode()), (b":method", method.encode())], is_last)


async def next_of(stream: PickerStream) -> GatewayReply | None:
    async with asyncio.timeout(EDGE_S):
        return await stream.next_reply()


class Owner:
    """What works on an answer, and what it was told."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")


def flowing() -> Consultation:
    """One whose answer has begun."""
    talk = Consultation()
    talk.hear(head("/v1/completions", is_last=True))
    talk.deliver("127.0.0.1:2", NO_CHANGES, (b"{}",))
    talk.hear(GatewayHead(ANSWER, [(b":status", b"200")], is_last=False))
    talk.hear(GatewayBody(ANSWER, b"x", is_last=False))
    talk.begin_answer(NO_CHANGES)
    return talk


@pytest.mark.parametrize("num_bytes", [FULL_BYTES + 1, 70_000, 3 * FULL_BYTES])
async def test_an_answer_that_was_held_up_goes_on_though_its_gateway_waited_for_bytes(num_bytes: int) -> None:
    async with router_of() as router:
        stream, owner = PickerStream(router, None), Owner()
        stream._talk, stream._is_answering = flowing(), True
        stream._cycle = SimpleNamespace(owner=owner, gone=lambda: None)  # type: ignore[assignment]  # as far as it is used
        waiting = asyncio.create_task(next_of(stream))
        await asyncio.sleep(0)
        stream.write(b"y" * num_bytes)
        assert owner.calls == ["pause"]
        taken, first = 0, await waiting
        while taken < num_bytes:
            reply = first or await next_of(stream)
            first = None
            assert isinstance(reply, BodyReply)
            assert reply.body is not None
            taken += len(reply.body)
        assert owner.calls == ["pause", "resume"]
        stream.ended()


async def test_what_goes_by_unread_is_read_no_faster_than_its_gateway_takes_it() -> None:
    async with router_of() as router:
        stream = PickerStream(router, None)
        stream.hear(head("/tokenize"))
        assert isinstance(await next_of(stream), HeadReply)
        stream.hear(GatewayBody(REQUEST, b"z" * (FULL_BYTES + 1), is_last=False))
        assert not stream.may_read.is_set()
        while not stream.may_read.is_set():
            assert isinstance(await next_of(stream), BodyReply)
        stream.ended()


async def test_what_goes_by_unread_is_bounded() -> None:
    async with router_of(max_body_bytes=1024) as router:
        stream = PickerStream(router, None)
        stream.hear(head("/tokenize"))
        stream.hear(GatewayBody(REQUEST, b"z" * 1025, is_last=True))
        replies = [reply async for reply in all_of(stream)]
        assert isinstance(replies[-1], ErrorReply)
        assert replies[-1].status == 413


async def all_of(stream: PickerStream) -> AsyncIterator[GatewayReply]:
    while (reply := await next_of(stream)) is not None:
        yield reply


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/v1/responses/resp_1", "GET", 404),
        ("/v1/load_lora_adapter", "POST", 404),
        ("/v1/chat/completions/batch", "POST", 404),
        ("/metrics", "GET", 404),
        ("/v1/models", "POST", 405),
        ("/tokenize", "GET", 405),
        ("/v1/completions", "GET", 405),
    ],
)
async def test_only_what_our_own_door_passes_on_goes_by(path: str, method: str, status: int) -> None:
    async with router_of() as router:
        stream = PickerStream(router, None)
        stream.hear(head(path, method))
        (refused,) = [reply async for reply in all_of(stream)]
        assert isinstance(refused, ErrorReply)
        assert refused.status == status
        stream.ended()


async def test_a_stream_beyond_all_places_makes_room_by_itself_and_leaves_nothing() -> None:
    async with router_of(max_connections=1) as router:
        others = [PickerStream(router, None) for _ in range(2)]
        assert not router.clients.may_stay(others[1])
        late = PickerStream(router, None)
        assert late.is_broken_off
        assert await next_of(late) is None
        assert router.clients.num_open == 2
        for stream in others:
            stream.ended()


async def test_a_bug_at_the_end_of_a_request_keeps_no_place() -> None:
    def fails() -> None:
        raise RuntimeError("a bug")

    async with router_of() as router:
        stream = PickerStream(router, None)
        stream._cycle = SimpleNamespace(owner=None, gone=fails)  # type: ignore[assignment]  # as far as it is used
        with pytest.raises(RuntimeError, match="a bug"):
            stream.ended()
        assert await next_of(stream) is None


async def test_a_question_of_a_gateway_is_waited_for_as_our_own() -> None:
    async with router_of() as router:
        stream = PickerStream(router, None)
        stream.hear(head("/tokenize"))
        assert router.num_asking == 1
        stream.ended()
        stream.ended()
        assert router.num_asking == 0
