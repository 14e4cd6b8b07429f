"""The decode engine: one real ``Reception`` for each rank, and the real ``DecodeScheduler`` with a vLLM around it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import msgspec

from model.link import Output, scrubbed
from model.plan import BLOCK_BYTES, BLOCK_TOKENS, DEADLINE_MS, SECRET, Broken, Plan
from pdcluster_connector.core.content import Found, plan_content
from pdcluster_connector.core.receiving import CutSession, ReceiveTimes, Reply
from pdcluster_connector.core.reception import Compare, Ended, Expected, Invite, Lost, Reception, ReceptionCommand
from pdcluster_connector.core.tp_mapping import Sharding
from pdcluster_connector.core.watermark import KvGroup
from pdcluster_connector.core.writers import PeerId, SessionId, WriterState
from pdcluster_connector.scheduler.decode import DecodeEngine, DecodeScheduler
from pdcluster_connector.steps import Cancel, Expect, PrefillEnded
from pdcluster_protocol.fingerprint import KvFingerprint
from pdcluster_protocol.ids import Attempt, BootId, EngineId, RequestId, TransferId
from pdcluster_protocol.metaserver import PrefillOutcome
from pdcluster_protocol.params import ContentCheck, DecodeCall, DecodeParams, Reservation, SideChannelAddress, to_wire
from pdcluster_protocol.side_channel import (
    ContentSums,
    Done,
    Grant,
    RankLayout,
    RegionKind,
    RegionLayout,
    ToDecode,
    ToPrefill,
    Welcome,
)

FUTURE: Final = 1e9
TIMES: Final = ReceiveTimes(lease_s=1.0, quarantine_s=1.0, ask_s=1.0)
TOKENS: Final = (1, 2, 3, 4)

News: TypeAlias = Expect | PrefillEnded | Cancel


def fingerprint(plan: Plan) -> KvFingerprint:
    return KvFingerprint("m", "f32", "LBHNC", (plan.num_heads,), "CPU", "0.32", "0.1.0")


def decode_boot(life: int) -> BootId:
    return BootId(f"d-{life}")


@dataclass(slots=True)
class Rank:
    """One decode rank: its reception, its sessions, and what the forward thread has told it."""

    number: int
    life: int
    reception: Reception
    open: dict[BootId, str] = field(default_factory=dict)
    cutting: set[str] = field(default_factory=set)
    num_sessions: int = 0
    shares_session: bool = False
    inbox: deque[News] = field(default_factory=deque)
    granted: dict[TransferId, Attempt] = field(default_factory=dict)
    """The newest attempt of each transfer that was ever granted here."""
    ended: set[TransferId] = field(default_factory=set)
    """Whose blocks vLLM may give away."""
    received: set[TransferId] = field(default_factory=set)
    """Whose KV is here."""
    sums: ContentSums | None = None
    """Of right content; None where none is compared."""
    comparing: set[tuple[TransferId, Attempt]] = field(default_factory=set)
    """Whose content is being summed up."""
    wrong: set[tuple[TransferId, Attempt]] = field(default_factory=set)
    """Whose content is not what was pushed."""

    def is_live(self, session: str) -> bool:
        """Whether bytes can land by ``session``."""
        return session in self.cutting or session in self.open.values()

    def announce(self, news: tuple[News, ...]) -> tuple[Output, ...]:
        self.inbox.extend(news)
        return ()

    def take(self) -> tuple[Output, ...]:
        """The receiver thread looks at the next announcement."""
        news = self.inbox.popleft()
        if isinstance(news, Cancel):
            return self._do(self.reception.cancel(news.request_id, "", now=0.0))
        if isinstance(news, PrefillEnded):
            return self._do(self.reception.prefill_ended(news.request_id, news.attempt, now=0.0))
        expected = Expected(news.request_id, news.transfer_id, FUTURE, news.spans, self.sums is not None)
        return self._do(self.reception.expect(expected, now=0.0))

    def hear(self, peer: bytes, message: ToDecode) -> tuple[Output, ...]:
        if isinstance(message, Done) and message.num_pushes == 2:
            self.wrong.discard((message.transfer_id, message.attempt))  # Right bytes have landed there.
        return self._do(self.reception.hear(PeerId(peer), message, now=0.0))

    def compare(self, transfer: TransferId, attempt: Attempt) -> tuple[Output, ...]:
        """The sums of what is here are made."""
        self.comparing.discard((transfer, attempt))
        assert self.sums is not None
        here = self.sums
        if (transfer, attempt) in self.wrong:
            here = ContentSums(b"\1" + here.rows[1:], b"\1" + here.ranges[1:])
        layout = self.reception.welcome.layout
        found = Found(plan_content(ContentCheck.FULL, layout, (((0, len(TOKENS)),),), transfer), here)
        return self._do(self.reception.summed_up(transfer, attempt, found, now=0.0))

    def spoil(self, transfer: TransferId, attempt: Attempt) -> tuple[Output, ...]:
        self.wrong.add((transfer, attempt))
        return ()

    def spoilable(self) -> list[tuple[TransferId, Attempt]]:
        """Attempts of which something was written."""
        found = [(transfer, waiting.receive) for transfer, waiting in self.reception._waiting.items()]
        return [
            (transfer, receive.attempt)
            for transfer, receive in found
            if any(w.state is WriterState.DONE and w.attempt == receive.attempt for w in receive._writers.values())
            and (transfer, receive.attempt) not in self.wrong
        ]

    def closed(self, session: str) -> tuple[Output, ...]:
        """The closing of a session has ended."""
        self.cutting.discard(session)
        return self._do(self.reception.cut(SessionId(session), now=0.0))

    def timers(self) -> list[tuple[Any, ...]]:
        """What may pass: ("lease", transfer), ("quarantine", transfer, peer), ("deadline", transfer), ("parked", i)."""
        found: list[tuple[Any, ...]] = []
        for transfer, waiting in self.reception._waiting.items():
            writers = waiting.receive._writers
            if any(w.state is WriterState.WRITING for w in writers.values()):
                found.append(("lease", transfer))
            found += [("quarantine", transfer, p) for p, w in writers.items() if w.state is WriterState.REVOKED]
            if waiting.receive._is_open:
                found.append(("deadline", transfer))
            if not math.isinf(waiting.receive._ask_by) and waiting.receive._is_rank_missing:
                found.append(("ask", transfer))
        return found + [("parked", transfer) for transfer in self.reception._parked]

    def fire(self, timer: tuple[Any, ...]) -> tuple[Output, ...]:
        """``timer`` has passed, and no other."""
        reception = self.reception
        reception._prune_at = 0.0 if timer[0] == "idle" else FUTURE
        for session in reception._heard_at:
            reception._heard_at[session] = -FUTURE if timer == ("idle", session) else 1.0
        for transfer, waiting in reception._waiting.items():
            is_it = timer[:2] == ("deadline", transfer)
            waiting.receive.deadline = 0.0 if is_it else FUTURE
            if not math.isinf(waiting.receive._ask_by):
                waiting.receive._ask_by = 0.0 if timer[:2] == ("ask", transfer) else FUTURE
            for peer, writer in waiting.receive._writers.items():
                lapses = timer[:2] == ("lease", transfer) and writer.state is WriterState.WRITING
                writer.until = 0.0 if lapses or timer == ("quarantine", transfer, peer) else FUTURE
        for transfer, parked in reception._parked.items():
            at = 0.0 if timer == ("parked", transfer) else FUTURE
            for one in parked:
                object.__setattr__(one, "expires_at", at)
        return self._do(reception.expire(now=1.0))

    def _do(self, commands: Iterable[ReceptionCommand]) -> tuple[Output, ...]:
        out: list[Output] = []
        attempts = {w.expected.transfer_id: w.receive for w in self.reception._waiting.values()}
        transfers = dict(self.reception._by_request)
        for command in commands:
            match command:
                case Reply(peer, message):
                    self._note_grant(message)
                    out.append(("reply", bytes(peer), scrubbed(message)))
                case Ended(request_id, report):
                    transfer = self._note_end(transfers.get(request_id), request_id, is_received=report.is_received)
                    attempt = attempts[transfer].attempt if transfer in attempts else Attempt(0)
                    out.append(("ended", request_id, transfer, report.is_received, attempt))
                case Invite(peer, boot_id):
                    out += self._do(self.reception.invited((peer,), SessionId(self._session_for(boot_id)), now=0.0))
                case Compare(transfer_id, attempt):
                    self.comparing.add((transfer_id, attempt))
                case Lost(request_id, attempt):
                    out.append(("lost", request_id, attempt))
                case CutSession(session):
                    self._begin_cut(session)
        return tuple(out)

    def _note_grant(self, message: ToPrefill) -> None:
        if isinstance(message, Grant):
            newest = max(self.granted.get(message.transfer_id, Attempt(0)), message.attempt)
            self.granted[message.transfer_id] = newest

    def _note_end(self, transfer: TransferId | None, request_id: RequestId, *, is_received: bool) -> TransferId:
        if transfer is None:
            raise Broken("I4", f"rank {self.number} reports {request_id}, which it does not expect")
        self.ended.add(transfer)
        self.comparing = {key for key in self.comparing if key[0] != transfer}
        if is_received and (transfer, self.granted.get(transfer)) in self.wrong:
            raise Broken("I3", f"rank {self.number} received {request_id} with wrong content")
        if is_received:
            self.received.add(transfer)
        return transfer

    def _session_for(self, boot_id: BootId) -> str:
        if boot_id not in self.open and self.shares_session and self.open:
            self.open[boot_id] = next(iter(self.open.values()))
        if boot_id not in self.open:
            self.open[boot_id] = f"s{self.number}-{self.life}-{boot_id}-{self.num_sessions}"
            self.num_sessions += 1
        return self.open[boot_id]

    def _begin_cut(self, session: str) -> None:
        for boot_id in [boot_id for boot_id, known in self.open.items() if known == session]:
            del self.open[boot_id]
            self.cutting.add(session)


def layout_of(plan: Plan, rank: int, tp_size: int) -> RankLayout:
    """One layer of ``plan.num_heads`` heads; a block of a decode rank has ``BLOCK_BYTES``."""
    ours, theirs = (len(Sharding(size, plan.num_heads).heads_of(0)) for size in (tp_size, plan.decode_ranks))
    size = BLOCK_BYTES * ours // theirs
    region = RegionLayout("a", 0, 0, 9, size, size, RegionKind.HEADS, plan.num_heads, BLOCK_TOKENS)
    return RankLayout(rank, tp_size, (region,))


def make_rank(plan: Plan, number: int, life: int) -> Rank:
    welcome = Welcome(EngineId("d"), decode_boot(life), "", layout_of(plan, number, plan.decode_ranks))
    reception = plan.reception(welcome, fingerprint(plan), TIMES, SECRET)
    sums = plan.sums if plan.compares else None
    return Rank(number, life, reception, shares_session=plan.shares_session, sums=sums)


class Posts:
    """What the scheduler asks of its metaserver client in one step."""

    def __init__(self) -> None:
        self.out: list[Output] = []

    def post(self, request_id: RequestId, url: str, said: DecodeCall, *, deadline: float) -> None:
        assert isinstance(said, Reservation), "no prompt here is computed by decode alone"
        self.out.append(("post", request_id, msgspec.structs.replace(said, lost_reason="")))

    def cancel(self, request_id: RequestId) -> None:
        self.out.append(("hangup", request_id))


class Vllm:
    """Where one request is in decode's vLLM."""

    WAITING, ABORTED, READY, GONE = "waiting", "aborted", "ready", "gone"


@dataclass(slots=True)
class DecodeSide:
    """The scheduler process of the decode engine."""

    life: int
    scheduler: DecodeScheduler
    posts: Posts
    outcomes: deque[tuple[RequestId, PrefillOutcome]]
    status: dict[RequestId, str] = field(default_factory=dict)
    reported: dict[RequestId, frozenset[int]] = field(default_factory=dict)

    def admit(self, plan: Plan, request: RequestId, transfer: TransferId) -> tuple[Output, ...]:
        """The router's call is here, and vLLM has blocks for it."""
        token = SECRET.mint(transfer, Attempt(1), DEADLINE_MS)
        params = DecodeParams(metaserver="m", transfer_id=transfer, deadline_ms=DEADLINE_MS, token=token)
        self.scheduler.add(request, to_wire(params), TOKENS, now=0.0)
        self.scheduler.reserve(request, ((1,),), len(TOKENS), now=0.0)
        self.status[request], self.reported[request] = Vllm.WAITING, frozenset()
        return self._step()

    def ended(self, plan: Plan, rank: int, request: RequestId) -> tuple[Output, ...]:
        """One rank's worker names ``request`` as received or failed."""
        if self.status.get(request) not in (Vllm.WAITING, Vllm.ABORTED):
            raise Broken("I4", f"vLLM is told about {request}, which is {self.status.get(request, 'unknown')}")
        if rank in self.reported[request]:
            raise Broken("I4", f"rank {rank} reports {request} twice")
        self.reported[request] |= {rank}
        if len(self.reported[request]) == plan.decode_ranks:
            self.scheduler.received([request])
            is_aborted = self.status[request] == Vllm.ABORTED
            self.status[request] = Vllm.GONE if is_aborted else Vllm.READY
        return self._step()

    def lost(self, request: RequestId, attempt: Attempt) -> tuple[Output, ...]:
        self.scheduler.attempt_lost(request, attempt, "", now=0.0)
        return self._step()

    def outcome(self, request: RequestId, outcome: PrefillOutcome) -> tuple[Output, ...]:
        self.outcomes.append((request, outcome))
        return self._step()

    def abort(self, request: RequestId) -> tuple[Output, ...]:
        """The router has hung up on decode."""
        status = self.status.get(request)
        if status not in (Vllm.WAITING, Vllm.READY):
            return ()
        self.status[request] = Vllm.ABORTED if status == Vllm.WAITING else Vllm.GONE
        self.scheduler.finish(request)
        return self._step()

    def answer(self, request: RequestId) -> tuple[Output, ...]:
        """Decode has computed the answer: with the KV that came, or from the prompt."""
        self.status[request] = Vllm.GONE
        self.scheduler.finish(request)
        return (*self._step(), ("answered", request))

    def _step(self) -> tuple[Output, ...]:
        step = self.scheduler.step()
        out, self.posts.out = self.posts.out, []
        news = (*step.expects, *step.ended, *(Cancel(cancel.request_id, "") for cancel in step.cancels))
        return (*((("news", news),) if news else ()), *out)


def make_decode_side(plan: Plan, life: int) -> DecodeSide:
    addresses = tuple(SideChannelAddress("h", 1 + rank, decode_boot(life)) for rank in range(plan.decode_ranks))
    engine = DecodeEngine(EngineId("d"), plan.decode_ranks, (KvGroup(BLOCK_TOKENS),), addresses, SECRET)
    posts, outcomes = Posts(), deque[tuple[RequestId, PrefillOutcome]]()
    return DecodeSide(life, plan.cores.scheduler(engine, posts, outcomes), posts, outcomes)
