"""One decode rank: who may write what, and what it says to whom."""

from __future__ import annotations

import msgspec
import pytest

from pdcluster_connector.core.receiving import PeerId, Reply, Report
from pdcluster_connector.core.reception import MAX_PARKED, Command, Ended, Expected, Reception
from pdcluster_connector.core.sending import PushKey
from pdcluster_protocol.fingerprint import KvFingerprint
from pdcluster_protocol.ids import Attempt, BootId, EngineId, RequestId, TransferId
from pdcluster_protocol.side_channel import (
    Denial,
    Done,
    Failed,
    Grant,
    Hello,
    Open,
    Refusal,
    RegionLayout,
    Revoke,
    ToDecode,
    ToPrefill,
    Welcome,
)

PRINT = KvFingerprint("m", "f32", 16, "LBHNC", 4, 8, 2, "CPU", "0.32", "0.1.0")
REGIONS = (RegionLayout("a", 0, 0, 9, 64), RegionLayout("b", 0, 999, 9, 64))
WELCOME = Welcome(EngineId("d"), BootId("dboot"), 0, 1, "host:1", REGIONS)
PEER = PeerId(b"p")
KEY = PushKey(TransferId("t"), Attempt(1))
EXPECTED = Expected(RequestId("r"), KEY, 60.0, (3,))
OPEN = Open(*KEY, BootId("dboot"), 50_000)


def hello(tp_rank: int = 0, tp_size: int = 1, fingerprint: KvFingerprint = PRINT) -> Hello:
    return Hello(EngineId("p"), BootId("pboot"), tp_rank, tp_size, fingerprint)


def reception(*, is_greeted: bool = True) -> Reception:
    made = Reception(WELCOME, PRINT, 35.0)
    if is_greeted:
        assert hear(made, hello()) == WELCOME
    return made


def hear(made: Reception, message: ToDecode, peer: PeerId = PEER, now: float = 1.0) -> ToPrefill:
    (reply,) = made.hear(peer, message, now=now)
    assert isinstance(reply, Reply)
    assert reply.peer == peer
    return reply.message


def ended(commands: list[Command]) -> Report:
    (end,) = commands
    assert isinstance(end, Ended)
    assert end.request_id == "r"
    return end.report


def test_an_announced_request_is_granted_and_received_with_the_bytes_of_its_blocks() -> None:
    made = reception()
    assert list(made.expect(EXPECTED, now=0.0)) == []
    assert hear(made, OPEN) == Grant(*KEY)
    # 3 blocks x 2 layers x 64 bytes
    assert ended(list(made.hear(PEER, Done(*KEY, 384, 2), now=2.0))).is_received
    assert made.num_waiting == 0


@pytest.mark.parametrize("num_bytes", [0, 256, 383, 385, 768])
def test_any_other_byte_count_is_a_failure(num_bytes: int) -> None:
    made = reception()
    list(made.expect(EXPECTED, now=0.0))
    hear(made, OPEN)
    assert not ended(list(made.hear(PEER, Done(*KEY, num_bytes, 2), now=2.0))).is_received


def test_an_open_before_its_announcement_waits_for_it() -> None:
    made = reception()
    assert list(made.hear(PEER, OPEN, now=0.0)) == []
    assert list(made.expect(EXPECTED, now=1.0)) == [Reply(PEER, Grant(*KEY))]


def test_an_open_that_is_never_announced_is_denied_at_its_deadline() -> None:
    made = reception()
    list(made.hear(PEER, OPEN, now=0.0))
    assert list(made.expire(now=49.0)) == []
    (reply,) = made.expire(now=50.0)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Denial)


def test_an_open_after_the_end_is_denied_at_once() -> None:
    made = reception()
    list(made.expect(EXPECTED, now=0.0))
    assert not ended(list(made.cancel(RequestId("r"), "aborted", now=1.0))).is_received
    assert isinstance(hear(made, OPEN), Denial)


def test_parked_opens_are_bounded() -> None:
    made = reception()
    for number in range(MAX_PARKED):
        list(made.hear(PEER, Open(TransferId(f"t{number}"), Attempt(1), BootId("dboot"), 1000), now=0.0))
    assert isinstance(hear(made, Open(TransferId("one more"), Attempt(1), BootId("dboot"), 1000)), Denial)


def test_a_stranger_must_say_hello_first() -> None:
    made = reception(is_greeted=False)
    list(made.expect(EXPECTED, now=0.0))
    assert isinstance(hear(made, OPEN), Refusal)
    assert isinstance(hear(made, Done(*KEY, 384, 2)), Refusal)
    assert made.num_waiting == 1


def test_an_open_for_an_earlier_life_of_decode_is_denied() -> None:
    made = reception()
    list(made.expect(EXPECTED, now=0.0))
    reply = hear(made, msgspec.structs.replace(OPEN, decode_boot_id=BootId("earlier")))
    assert isinstance(reply, Denial)
    assert "restarted" in reply.reason


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"block_size": 32}, ["block_size: prefill 32, decode 16", "--block-size"]),
        ({"kv_dtype": "bf16"}, ["kv_dtype: prefill 'bf16', decode 'f32'", "--dtype"]),
        ({"model_digest": "x"}, ["same model"]),
        ({"vllm_version": "0.33"}, ["prefill '0.33', decode '0.32'", "same vLLM"]),
    ],
)
def test_an_engine_with_another_fingerprint_is_refused_with_both_values_and_the_cure(
    changed: dict[str, object], words: list[str]
) -> None:
    reply = hear(reception(is_greeted=False), hello(fingerprint=msgspec.structs.replace(PRINT, **changed)))
    assert isinstance(reply, Refusal)
    assert all(word in reply.reason for word in ["engine p", "engine d", *words])


def test_a_tp_that_splits_heads_is_refused() -> None:
    assert isinstance(hear(reception(is_greeted=False), hello(tp_size=3)), Refusal)


def test_two_prefill_ranks_each_owe_their_half() -> None:
    made, other = reception(is_greeted=False), PeerId(b"q")
    hear(made, hello(0, 2))
    hear(made, hello(1, 2), other)
    list(made.expect(EXPECTED, now=0.0))
    assert hear(made, OPEN) == Grant(*KEY)
    assert hear(made, OPEN, other) == Grant(*KEY)
    assert list(made.hear(PEER, Done(*KEY, 192, 2), now=2.0)) == []
    assert ended(list(made.hear(other, Done(*KEY, 192, 2), now=2.0))).is_received


def test_a_cancelled_request_waits_for_its_writer() -> None:
    made = reception()
    list(made.expect(EXPECTED, now=0.0))
    hear(made, OPEN)
    assert list(made.cancel(RequestId("r"), "client left", now=1.0)) == [Reply(PEER, Revoke(*KEY))]
    report = ended(list(made.hear(PEER, Failed(*KEY, "stopped", is_fenced=True), now=2.0)))
    assert report.reason == "client left"


def test_cancelling_an_unknown_or_ended_request_does_nothing() -> None:
    assert list(reception().cancel(RequestId("nobody"), "x", now=0.0)) == []


def test_a_failure_that_comes_before_the_announcement_ends_the_request_when_it_is_announced() -> None:
    made, other = reception(), PeerId(b"q")
    hear(made, hello(), other)
    list(made.hear(other, OPEN, now=0.0))
    assert list(made.hear(PEER, Failed(*KEY, "refused", is_fenced=True), now=0.0)) == []
    end, denial = made.expect(EXPECTED, now=1.0)
    assert "refused" in ended([end]).reason
    assert isinstance(denial, Reply)
    assert isinstance(denial.message, Denial)


def test_a_transfer_id_that_is_used_twice_ends_the_second_request_at_once() -> None:
    made = reception()
    list(made.expect(EXPECTED, now=0.0))
    (end,) = made.expect(Expected(RequestId("again"), KEY, 60.0, (3,)), now=0.0)
    assert isinstance(end, Ended)
    assert (end.request_id, end.report.is_received) == ("again", False)
    assert made.num_waiting == 1
