"""A client's body is taken piece by piece, unless it has too many keys."""

from __future__ import annotations

import pytest

from pdcluster_router.core.apis.rewrite import parse_body
from pdcluster_router.core.clients.room import Room
from pdcluster_router.http.cycle import MAX_KEYS, NO_HEAD, UNCOUNTED_BYTES, HotCycle

PART = 256 << 10
"""What one read brings."""


LARGE = 8 << 20


class Connection:
    """Of a request that is not answered."""

    is_full = False

    def write(self, data: bytes) -> None:
        raise AssertionError(data)

    def answered(self) -> None: ...

    def close(self, *, with_reset: bool = False) -> None: ...


def new_cycle(room: Room | None = None, *, is_for_engines: bool = False) -> HotCycle:
    room = room or Room(64 << 20)
    return HotCycle(Connection(), b"/", NO_HEAD, lambda _: None, room, is_for_engines=is_for_engines)


def refusal_of(cycle: HotCycle, raw: bytes, part: int = PART) -> str:
    """The message; empty: the whole of it was taken."""
    for begin in range(0, len(raw), part):
        if error := cycle.add_body(raw[begin : begin + part], LARGE):
            return error.message
    return ""


@pytest.mark.parametrize("part", [1_000, PART, UNCOUNTED_BYTES, UNCOUNTED_BYTES + 1])
def test_a_body_has_as_many_keys_as_are_allowed_and_no_more(part: int) -> None:
    raw = b"{" + b'"n":1,' * (MAX_KEYS - 1) + b'"prompt":"hi"}'
    assert refusal_of(new_cycle(), raw, part) == ""
    room = Room(64 << 20)
    message = refusal_of(new_cycle(room), raw[:-1] + b',"a":1}', part)
    assert message == f"the request body has more than {MAX_KEYS} colons: send less at once"
    assert room.used_bytes == 0


def test_keys_are_refused_before_the_body_is_whole() -> None:
    cycle = new_cycle()
    assert refusal_of(cycle, b'"n":1,' * (MAX_KEYS + PART)) != ""
    assert cycle.num_body_bytes < UNCOUNTED_BYTES + 2 * PART


def test_a_short_body_and_an_engines_call_are_not_counted() -> None:
    assert refusal_of(new_cycle(), b":" * UNCOUNTED_BYTES) == ""
    assert refusal_of(new_cycle(is_for_engines=True), b":" * (UNCOUNTED_BYTES + PART)) == ""


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt":[%b7]}' % (b"123456, " * (LARGE // 8 - 2)),  # A million token ids as json.dumps writes them.
        b'{"prompt":[%b7]}' % (b"12345," * (LARGE // 6 - 3)),
        b'{"prompt":[[%b1]]}' % (b"1," * (LARGE // 2 - 8)),
        b'{"messages":[{"role":"user","content":"%b"}]}' % (b"The quick, brown fox: it jumps. " * (LARGE // 32 - 2)),
        b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,%b"}}]}]}'
        % (b"iVBORw0KGgoAAAANSUhEUg42" * (LARGE // 24 - 5)),
        b'{"messages":[%b{}]}' % (b'{"role":"user","content":"and then we went to %d, all of us"},' * 120_000),
        b'{"messages":[],"tools":[%b{}]}'
        % (b'{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{}}}},' * 45_000),
        b'{"prompt":"%b"}' % (b'{\\"time\\": \\"12:30:45\\", \\"level\\": 3}, ' * 74_000),
    ],
    ids=["ids", "short ids", "one list", "text", "image", "messages", "tools", "records as text"],
)
def test_what_clients_send_is_taken_up_to_the_largest_size(raw: bytes) -> None:
    assert 0.3 * LARGE < len(raw) <= LARGE
    cycle = new_cycle()
    assert [cycle.add_body(raw[begin : begin + PART], LARGE) for begin in range(0, len(raw), PART)] == [None] * (
        -(-len(raw) // PART)
    )
    body = parse_body(cycle.take_body())
    assert not body.needs_local_prefill
    assert b"".join(body.for_decode(None)) == raw
