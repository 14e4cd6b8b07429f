"""One decode rank: who may write what, on which session, and what it says to whom."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from pdcluster_connector.core.peers import MAX_PEERS
from pdcluster_connector.core.receiving import CutSession, ReceiveTimes, Reply, Report
from pdcluster_connector.core.reception import (
    SESSION_IDLE_S,
    Ended,
    Expected,
    Invite,
    Lost,
    Reception,
    ReceptionCommand,
)
from pdcluster_connector.core.writers import PeerId, SessionId
from pdcluster_protocol.fingerprint import KvFingerprint
from pdcluster_protocol.ids import Attempt, BootId, EngineId, RequestId, TransferId
from pdcluster_protocol.secret import make_secret
from pdcluster_protocol.side_channel import (
    Denial,
    Done,
    Failed,
    Fenced,
    Grant,
    Hello,
    Open,
    Progress,
    RankLayout,
    Refusal,
    RegionKind,
    RegionLayout,
    Revoke,
    ToDecode,
    ToPrefill,
    Unneeded,
    Welcome,
)

PRINT = KvFingerprint("m", "f32", "LBHNC", (4,), "CPU", "0.32", "0.1.0")


def layout(tp_rank: int = 0, tp_size: int = 1, names: str = "ab", stage: int = 0, num_stages: int = 1) -> RankLayout:
    """Layers of 4 KV heads: 64 bytes a block in all."""
    size = 64 // tp_size
    regions = tuple(RegionLayout(name, 0, 999, 9, size, size, RegionKind.HEADS, 4) for name in names)
    return RankLayout(tp_rank, tp_size, regions, stage, num_stages)


WELCOME = Welcome(EngineId("d"), BootId("dboot"), "", layout())
SECRET, STRANGER = make_secret("of this cluster!"), make_secret("of another one !")
PEER, OTHER = PeerId(b"p"), PeerId(b"q")
T, R = TransferId("t"), RequestId("r")
FIRST, SECOND = Attempt(1), Attempt(2)
EXPECTED = Expected(R, T, 60.0, (((0, 48),),))
ANOTHER = Expected(RequestId("s"), TransferId("u"), 60.0, (((0, 48),),))
NUM_BYTES = 384
"""3 blocks x 2 layers x 64 bytes."""
GRANT = Grant(T, FIRST, 9000)
SESSION = SessionId("s-pboot")
TIMES = ReceiveTimes(lease_s=9.0, quarantine_s=35.0, ask_s=20.0)


def open_(attempt: Attempt = FIRST, transfer: TransferId = T, deadline_ms: int = 50_000) -> Open:
    return Open(transfer, attempt, BootId("dboot"), deadline_ms, SECRET.mint(transfer, attempt, deadline_ms))


def hello(tp_rank: int = 0, tp_size: int = 1, fingerprint: KvFingerprint = PRINT, boot: str = "pboot") -> Hello:
    return Hello(EngineId("p"), BootId(boot), layout(tp_rank, tp_size), fingerprint)


def reception(*, is_greeted: bool = True, quarantine_s: float = TIMES.quarantine_s) -> Reception:
    made = Reception(WELCOME, PRINT, ReceiveTimes(TIMES.lease_s, quarantine_s, TIMES.ask_s), SECRET)
    if is_greeted:
        greet(made)
    return made


def greet(made: Reception, message: Hello | None = None, peer: PeerId = PEER, session: str = "") -> None:
    """As the receiver does: one session for each life of a prefill engine."""
    message = message or hello()
    (invite,) = made.hear(peer, message, now=0.0)
    assert invite == Invite(peer, message.boot_id)
    session = session or f"s-{message.boot_id}"
    (reply,) = made.invited((peer,), SessionId(session), now=0.0)
    assert reply == Reply(peer, msgspec.structs.replace(WELCOME, session=session))


def expecting(*, is_greeted: bool = True) -> Reception:
    made = reception(is_greeted=is_greeted)
    assert list(made.expect(EXPECTED, now=0.0)) == []
    return made


def writing() -> Reception:
    made = expecting()
    assert hear(made, open_()) == GRANT
    return made


def hear(made: Reception, message: ToDecode, peer: PeerId = PEER, now: float = 1.0) -> ToPrefill:
    (reply,) = made.hear(peer, message, now=now)
    assert isinstance(reply, Reply)
    assert reply.peer == peer
    return reply.message


def report_of(commands: Iterable[ReceptionCommand]) -> Report:
    (end,) = (command for command in commands if isinstance(command, Ended))
    assert end.request_id == "r"
    return end.report


def cuts_of(commands: Iterable[ReceptionCommand]) -> tuple[list[CutSession], list[PeerId]]:
    """Which sessions are cut, and who is told."""
    made = list(commands)
    told = [command for command in made if isinstance(command, Reply)]
    assert all(isinstance(reply.message, Refusal) and "closed your session" in reply.message.reason for reply in told)
    return [command for command in made if isinstance(command, CutSession)], [reply.peer for reply in told]


def reason_of(message: ToPrefill) -> str:
    assert isinstance(message, Denial | Refusal)
    return message.reason


# The road on which all goes well.


def test_an_announced_request_is_granted_and_received_with_the_bytes_of_its_blocks() -> None:
    made = writing()
    assert report_of(made.hear(PEER, Done(T, FIRST, NUM_BYTES, 2), now=2.0)).is_received
    assert made.num_waiting == 0


@pytest.mark.parametrize("num_bytes", [0, 256, 383, 385, 768])
def test_any_other_byte_count_loses_the_attempt(num_bytes: int) -> None:
    made = writing()
    (lost,) = made.hear(PEER, Done(T, FIRST, num_bytes, 2), now=2.0)
    assert isinstance(lost, Lost)
    assert (lost.request_id, lost.attempt) == (R, FIRST)
    assert made.num_waiting == 1


def test_two_prefill_ranks_each_owe_their_half() -> None:
    made = expecting(is_greeted=False)
    greet(made, hello(0, 2))
    greet(made, hello(1, 2), OTHER)
    assert hear(made, open_()) == GRANT
    assert hear(made, open_(), OTHER) == GRANT
    assert list(made.hear(PEER, Done(T, FIRST, NUM_BYTES // 2, 2), now=2.0)) == []
    assert report_of(made.hear(OTHER, Done(T, FIRST, NUM_BYTES // 2, 2), now=2.0)).is_received


def test_a_rank_that_asks_again_after_the_end_is_told_that_nothing_is_needed() -> None:
    made = writing()
    list(made.hear(PEER, Done(T, FIRST, NUM_BYTES, 2), now=2.0))
    assert hear(made, open_(SECOND)) == Unneeded(T, SECOND)


def test_progress_reaches_the_receive_and_keeps_its_lease() -> None:
    made = writing()
    assert list(made.hear(PEER, Progress(T, FIRST, 64), now=8.0)) == []
    assert list(made.expire(now=16.9)) == []
    assert any(isinstance(command, Lost) for command in made.expire(now=17.0))


# Opens that come early, late, or too often.


def test_an_open_before_its_announcement_waits_for_it() -> None:
    made = reception()
    assert list(made.hear(PEER, open_(), now=0.0)) == []
    assert list(made.expect(EXPECTED, now=1.0)) == [Reply(PEER, GRANT)]


def test_an_open_that_is_never_announced_is_denied_at_its_deadline() -> None:
    made = reception()
    list(made.hear(PEER, open_(), now=0.0))
    assert list(made.expire(now=49.0)) == []
    (reply,) = made.expire(now=50.0)
    assert isinstance(reply, Reply)
    assert "never reserved" in reason_of(reply.message)


def test_an_open_after_a_failed_end_is_denied_at_once() -> None:
    made = expecting()
    assert not report_of(made.cancel(R, "aborted", now=1.0)).is_received
    assert "has ended" in reason_of(hear(made, open_()))


def test_a_failure_that_comes_before_the_announcement_loses_the_attempt_when_it_is_announced() -> None:
    made = reception()
    greet(made, hello(), OTHER)
    list(made.hear(OTHER, open_(), now=0.0))
    assert list(made.hear(PEER, Failed(T, FIRST, "refused", is_fenced=True), now=0.0)) == []
    lost, denial = made.expect(EXPECTED, now=1.0)
    assert lost == Lost(R, FIRST, "prefill gave up: refused")
    assert isinstance(denial, Reply)
    assert "is over on decode" in reason_of(denial.message)


def test_an_early_failure_is_not_remembered_for_ever() -> None:
    made = reception()
    list(made.hear(PEER, Failed(T, FIRST, "refused", is_fenced=True), now=0.0))
    list(made.expire(now=60.0))
    assert list(made.expect(EXPECTED, now=61.0)) == []


def test_a_transfer_id_that_is_used_twice_ends_the_second_request_at_once() -> None:
    made = expecting()
    (end,) = made.expect(Expected(RequestId("again"), T, 60.0, (((0, 48),),)), now=0.0)
    assert isinstance(end, Ended)
    assert (end.request_id, end.report.is_received) == ("again", False)
    assert made.num_waiting == 1


# Strangers.


def test_a_stranger_must_say_hello_first() -> None:
    made = expecting(is_greeted=False)
    assert isinstance(hear(made, open_()), Refusal)
    assert isinstance(hear(made, Done(T, FIRST, NUM_BYTES, 2)), Refusal)
    assert made.num_waiting == 1


@pytest.mark.parametrize(
    ("token", "word"),
    [
        ("", "without a token"),
        (STRANGER.mint(T, FIRST, 50_000), "PDCLUSTER_SECRET"),
        (SECRET.mint(T, SECOND, 50_000), "not valid here"),
        (SECRET.mint(TransferId("u"), FIRST, 50_000), "not valid here"),
    ],
    ids=["none", "another cluster's", "another attempt's", "another transfer's"],
)
def test_an_open_without_the_routers_token_for_this_very_attempt_gets_no_grant(token: str, word: str) -> None:
    made = expecting()
    assert word in reason_of(hear(made, msgspec.structs.replace(open_(), token=token)))
    assert hear(made, open_()) == GRANT


def test_an_open_without_a_token_is_not_parked() -> None:
    assert isinstance(hear(reception(), msgspec.structs.replace(open_(), token="")), Denial)


def test_an_open_for_an_earlier_life_of_decode_is_denied() -> None:
    reply = hear(expecting(), msgspec.structs.replace(open_(), decode_boot_id=BootId("earlier")))
    assert "restarted" in reason_of(reply)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"layout": "LBNHC"}, ["layout: prefill 'LBNHC', decode 'LBHNC'", "same attention backend"]),
        ({"kv_dtype": "bf16"}, ["kv_dtype: prefill 'bf16', decode 'f32'", "--dtype"]),
        ({"model_digest": "x"}, ["same model"]),
        ({"positions": "long"}, ["positions: prefill 'long', decode ''", "the same --max-model-len"]),
        ({"vllm_version": "0.33"}, ["prefill '0.33', decode '0.32'", "same vLLM"]),
    ],
)
def test_an_engine_with_another_fingerprint_is_refused_with_both_values_and_the_cure(
    changed: dict[str, object], words: list[str]
) -> None:
    reply = hear(reception(is_greeted=False), hello(fingerprint=msgspec.structs.replace(PRINT, **changed)))
    assert isinstance(reply, Refusal)
    assert all(word in reply.reason for word in ["engine p", "engine d", *words])


def test_a_refused_engine_gets_no_grant_but_its_failure_is_heard() -> None:
    made = expecting(is_greeted=False)
    hear(made, hello(fingerprint=msgspec.structs.replace(PRINT, layout="LBNHC")))
    assert isinstance(hear(made, open_()), Refusal)
    (lost,) = made.hear(PEER, Failed(T, FIRST, "refused", is_fenced=True), now=1.0)
    assert isinstance(lost, Lost)


def test_the_peer_that_was_silent_longest_is_forgotten_first() -> None:
    made = reception()
    for number in range(MAX_PEERS - 1):
        greet(made, peer=PeerId(b"%d" % number))
    list(made.hear(PEER, Progress(T, FIRST, 0), now=1.0))
    greet(made, peer=OTHER)
    assert isinstance(hear(made, open_(), PeerId(b"0")), Refusal)
    assert list(made.hear(PEER, open_(), now=1.0)) == []


# Ends.


def test_a_cancelled_request_waits_for_its_writer() -> None:
    made = writing()
    assert list(made.cancel(R, "client left", now=1.0)) == [Reply(PEER, Revoke(T, FIRST))]
    assert report_of(made.hear(PEER, Failed(T, FIRST, "stopped", is_fenced=True), now=2.0)).reason == "client left"


def test_cancelling_an_unknown_or_ended_request_does_nothing() -> None:
    made = expecting()
    list(made.cancel(R, "aborted", now=1.0))
    assert list(made.cancel(R, "again", now=1.0)) == []
    assert list(made.cancel(RequestId("nobody"), "x", now=0.0)) == []


# Sessions.


def test_an_unclean_writer_costs_its_engine_the_session_and_nobody_else() -> None:
    made = writing()
    greet(made, hello(boot="another engine"), OTHER)
    list(made.cancel(R, "client left", now=1.0))
    assert cuts_of(made.hear(PEER, Fenced(T, FIRST, is_clean=False), now=2.0)) == ([CutSession(SESSION)], [PEER])
    assert made.num_waiting == 1
    assert report_of(made.cut(SESSION, now=3.0)).reason == "client left"
    assert isinstance(hear(made, open_(transfer=ANOTHER.transfer_id)), Refusal)
    assert list(made.hear(OTHER, open_(transfer=ANOTHER.transfer_id), now=3.0)) == []


def test_a_push_that_has_not_begun_when_its_engine_is_cut_can_still_say_that_it_has_failed() -> None:
    made = writing()
    assert list(made.hear(PEER, open_(transfer=ANOTHER.transfer_id), now=1.0)) == []
    list(made.hear(PEER, Fenced(T, FIRST, is_clean=False), now=2.0))
    list(made.hear(PEER, Failed(ANOTHER.transfer_id, FIRST, "the lane failed", is_fenced=True), now=2.0))
    (lost,) = made.expect(ANOTHER, now=3.0)
    assert lost == Lost(RequestId("s"), FIRST, "prefill gave up: the lane failed")


def test_a_silent_writer_is_cut_after_the_quarantine_and_once_for_all_of_its_requests() -> None:
    made = writing()
    list(made.expect(ANOTHER, now=0.0))
    hear(made, open_(transfer=ANOTHER.transfer_id))
    list(made.cancel(R, "x", now=1.0))
    list(made.cancel(RequestId("s"), "x", now=1.0))
    assert list(made.expire(now=35.9)) == []
    assert cuts_of(made.expire(now=36.0)) == ([CutSession(SESSION)], [PEER])
    ended = [command.request_id for command in made.cut(SESSION, now=37.0) if isinstance(command, Ended)]
    assert ended == ["r", "s"]


def test_an_engine_that_was_cut_says_hello_again_and_writes_on_another_session() -> None:
    made = writing()
    list(made.cancel(R, "x", now=1.0))
    list(made.hear(PEER, Fenced(T, FIRST, is_clean=False), now=2.0))
    greet(made, session="another")
    list(made.cut(SESSION, now=3.0))
    list(made.expect(ANOTHER, now=3.0))
    assert hear(made, open_(transfer=ANOTHER.transfer_id), now=4.0) == Grant(ANOTHER.transfer_id, FIRST, 9000)
    assert list(made.cut(SESSION, now=5.0)) == []


def test_the_session_of_an_engine_that_is_silent_for_long_is_closed() -> None:
    made = reception()
    greet(made, hello(boot="busy"), OTHER)
    list(made.hear(OTHER, Progress(T, FIRST, 0), now=SESSION_IDLE_S / 2))
    assert cuts_of(made.expire(now=SESSION_IDLE_S)) == ([CutSession(SESSION, is_idle=True)], [PEER])
    assert list(made.expire(now=SESSION_IDLE_S + 10)) == []


def test_a_session_that_opened_for_nobody_is_closed_too() -> None:
    made = Reception(WELCOME, PRINT, TIMES, SECRET)
    assert list(made.invited((), SESSION, now=0.0)) == []
    assert list(made.expire(now=SESSION_IDLE_S)) == [CutSession(SESSION, is_idle=True)]


def without(name: str) -> RankLayout:
    regions = [msgspec.structs.replace(region, **{name: 0}) for region in layout().regions]
    return msgspec.structs.replace(layout(), regions=tuple(regions))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (msgspec.structs.replace(layout(0, 1), tp_size=1 << 40), "says TP 1099511627776 in 1 stages"),
        (msgspec.structs.replace(layout(0, 1), tp_size=-1), "says TP -1"),
        (msgspec.structs.replace(layout(0, 1), num_stages=0), "in 0 stages"),
        *((without(one), "prefill engine p and decode engine") for one in ("page_tokens", "pages_per_block", "heads")),
    ],
)
def test_a_hello_whose_sizes_mean_nothing_is_refused_at_once(changed: RankLayout, words: str) -> None:
    refusal = hear(reception(is_greeted=False), msgspec.structs.replace(hello(), layout=changed))
    assert isinstance(refusal, Refusal)
    assert words in refusal.reason


def test_engines_that_move_bytes_by_different_protocols_are_refused_with_both_values_and_the_cure() -> None:
    refusal = hear(reception(is_greeted=False), msgspec.structs.replace(hello(), transfer_protocol="rdma"))
    words = ("prefill engine p moves KV by 'rdma'", "by ''", "give both the same transfer_protocol")
    assert all(word in reason_of(refusal) for word in words)
